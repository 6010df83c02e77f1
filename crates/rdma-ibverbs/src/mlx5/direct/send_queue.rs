//! Send queues: work requests become WQEs in the ring, and completions find their work requests.

use std::borrow::Borrow;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use rdma_provider::VerbError;
use rdma_provider::contract::{PlainOp, PlainWr, PostError};
use rdma_provider::locks::Mutex;
use rdma_provider::types::{
    Data, DctTarget, SendFlags, SendOp, SendTarget, SendWr, Sge, Transport, UdTarget, WcOpcode,
    WrId,
};

use super::address::route_of;
use super::doorbell::{Record, Register};
use super::entry::{Blank, Complete, Entry, Header, NoBuffer, NoData};
use super::layout::{MAX_SEGMENTS, Opcode, SEGMENT, SEGMENTS_OF_BLOCK, control};
use super::ring::Ring;
use crate::supported::transport_supports;

/// Maximum bytes of a memory window, 2 GiB, as in libmlx5.
const MAX_WINDOW: u64 = 1 << 31;

/// The parameters of a send queue.
#[derive(Debug)]
pub(super) struct Setup {
    pub(super) qpn: u32,
    pub(super) transport: Transport,
    /// Maximum requests in flight. A request of maximum length for each fits the ring.
    pub(super) max_wr: u32,
    pub(super) max_sge: u32,
    pub(super) max_inline: u32,
    pub(super) ring: Ring<'static>,
    pub(super) record: Record,
    pub(super) register: Arc<Register>,
    /// A single request may be copied to the register (BlueFlame). Not a property of the register,
    /// which may be shared with queue pairs that choose otherwise.
    pub(super) blue_flame: bool,
}

/// A send queue that this crate posts to.
pub(crate) struct SendQueue {
    setup: Setup,
    /// Longest request that is copied to the register, in blocks; 0 without BlueFlame.
    copied: u32,
    /// Plain requests are copied to a register of this queue alone.
    copies_alone: bool,
    /// The work request at each block, valid where a WQE begins.
    requests: Box<[Request]>,
    /// Requests completed, modulo 2^32.
    consumed: AtomicU32,
    /// The queue pair is ready to send. Not the producer's, which has no lock while it posts plain
    /// requests.
    is_open: AtomicBool,
    producer: Mutex<Producer>,
}

// SAFETY: S3: one producer at a time writes the ring and the producer's state: under the lock, or
// by the contract of `post_plain`. It writes free blocks only; completions read blocks in flight.
// The fields of `requests` are atomic.
unsafe impl Send for SendQueue {}
// SAFETY: S3: as above.
unsafe impl Sync for SendQueue {}

struct Producer {
    /// Index of the next WQE's first block.
    next: u32,
    /// Requests posted, modulo 2^32.
    posted: u32,
    /// The value of `posted` up to which [plain](SendQueue::post_plain) requests need no check.
    /// Never before `posted`; equal to it until the queue pair is ready, and if the next WQE has a
    /// `fence`.
    limit: u32,
    /// [`control::SMALL_FENCE`] after a UMR, for the next WQE.
    fence: u8,
}

impl Producer {
    const NEW: Self = Self { next: 0, posted: 0, limit: 0, fence: 0 };
}

/// A posted work request. A completion reads it without the producer's lock, so the fields are
/// atomic: a broken adapter may complete work that is just being posted.
struct Request {
    wr_id: AtomicU64,
    /// Number of the request | index of its first block << 32 | [`WcOpcode`] of a UMR << 48.
    position: AtomicU64,
}

impl Request {
    /// Stores request `number`, whose WQE begins at block `index`.
    #[inline]
    fn set(&self, wr_id: WrId, number: u32, index: u32, local: WcOpcode) {
        let position =
            u64::from(number) | u64::from(index & 0xffff) << 32 | u64::from(local.0) << 48;
        self.wr_id.store(wr_id.0, Ordering::Relaxed);
        self.position.store(position, Ordering::Relaxed);
    }
}

/// The position at a block where no WQE has begun: a number before those in flight.
const NEVER: u64 = u32::MAX as u64;

/// A completed work request.
#[derive(Debug, Clone, Copy)]
pub(super) struct Completed {
    pub(super) wr_id: WrId,
    position: u64,
}

impl Completed {
    /// Returns the operation of a UMR.
    pub(super) fn local_opcode(self) -> WcOpcode {
        WcOpcode((self.position >> 48) as u32)
    }
}

impl SendQueue {
    pub(super) fn new(setup: Setup) -> Self {
        let blocks = setup.ring.blocks();
        let copied = if setup.blue_flame { setup.register.blocks() } else { 0 };
        let never = || Request { wr_id: AtomicU64::new(0), position: AtomicU64::new(NEVER) };
        Self {
            requests: (0..blocks).map(|_| never()).collect(),
            consumed: AtomicU32::new(0),
            is_open: AtomicBool::new(false),
            producer: Mutex::new(Producer::NEW),
            copied,
            copies_alone: copied > 0 && !setup.register.is_shared(),
            setup,
        }
    }

    pub(super) fn ring(&self) -> &Ring<'static> {
        &self.setup.ring
    }

    /// Forgets all work, after a reset of the queue pair.
    pub(super) fn reset(&self) {
        let mut producer = self.producer.lock();
        self.is_open.store(false, Ordering::Release);
        for request in &self.requests {
            request.position.store(NEVER, Ordering::Relaxed);
        }
        self.consumed.store(0, Ordering::Relaxed);
        *producer = Producer::NEW;
        self.setup.record.store(0);
    }

    /// Permits plain requests: the queue pair is ready to send. Other threads may post.
    pub(crate) fn open(&self) {
        self.is_open.store(true, Ordering::Release);
    }

    /// Returns the number of requests in flight. It exceeds the capacity if a broken adapter has
    /// completed requests in two completion queues at once.
    #[inline]
    fn in_flight(&self, producer: &Producer) -> u32 {
        producer.posted.wrapping_sub(self.consumed.load(Ordering::Acquire))
    }

    /// Moves the limit to what completions have freed. Returns whether `count` plain requests may
    /// be posted.
    #[cold]
    #[inline(never)]
    fn refresh_limit(&self, producer: &mut Producer, count: usize) -> bool {
        if !self.is_open.load(Ordering::Acquire) || producer.fence != 0 {
            return false;
        }
        let free = self.setup.max_wr.saturating_sub(self.in_flight(producer));
        producer.limit = producer.posted.wrapping_add(free);
        free as usize >= count
    }

    /// Posts plain requests of a reliable connection with one doorbell. Returns false, and posts
    /// nothing, if the queue pair is not ready, there is too little capacity, or the first needs a
    /// fence.
    ///
    /// # Safety
    ///
    /// The caller excludes all other posts to the queue, and its reset. Each buffer has bytes.
    #[inline(always)]
    pub(crate) unsafe fn post_plain(&self, list: impl ExactSizeIterator<Item = PlainWr>) -> bool {
        // SAFETY: S3: the caller's promise.
        let producer = unsafe { &mut *self.producer.data_ptr() };
        let count = list.len();
        let known = producer.limit.wrapping_sub(producer.posted) as usize;
        if known < count && !self.refresh_limit(producer, count) {
            return false;
        }
        // The compiler would load it again after each store to the ring.
        let Setup { qpn, ring, record, register, .. } = &self.setup;
        let (qpn, ring, requests) = (*qpn, *ring, &self.requests[..]);
        let Producer { mut next, mut posted, .. } = *producer;
        let mut last = None;
        for wr in list {
            let place = ring.place(next);
            last = Some(write_plain(Entry::at(&ring, next, place), qpn, &wr));
            // SAFETY: S3: one for each block of the ring.
            unsafe { requests.get_unchecked(place) }.set(wr.wr_id, posted, next, WcOpcode(0));
            next = next.wrapping_add(1);
            posted = posted.wrapping_add(1);
        }
        (producer.next, producer.posted) = (next, posted);
        let Some(last) = last else { return true };
        if count == 1 && self.copies_alone {
            record.publish(next & 0xffff);
            // SAFETY: S3: a block of the ring; the caller's promise.
            unsafe { register.copy_alone(last) };
        } else {
            self.publish(producer, count, 1);
        }
        true
    }

    /// Posts a list with one doorbell, up to the first refused request.
    ///
    /// # Safety
    ///
    /// See [`Qp::post_send`](rdma_provider::contract::Qp::post_send): memory and
    /// address handles that the requests name stay valid.
    #[inline]
    pub(crate) unsafe fn post_list<'a>(
        &self,
        list: impl Iterator<Item = impl Borrow<SendWr<'a>>>,
    ) -> Result<(), PostError> {
        let producer = &mut *self.producer.lock();
        let (mut posted, mut blocks, mut result) = (0, 0, Ok(()));
        for wr in list {
            // SAFETY: S1, S3: the caller's promise.
            match unsafe { self.write_any(producer, wr.borrow()) } {
                Ok(written) => blocks = written,
                Err(error) => {
                    result = Err(PostError { posted, error });
                    break;
                }
            }
            posted += 1;
        }
        if posted > 0 {
            self.publish(producer, posted, blocks);
        }
        result
    }

    /// Makes `posted` requests visible to the adapter; the last has `blocks` blocks.
    #[inline(never)]
    fn publish(&self, producer: &Producer, posted: usize, blocks: u32) {
        let Setup { ring, record, register, .. } = &self.setup;
        record.publish(producer.next & 0xffff);
        let last = producer.next.wrapping_sub(blocks);
        if posted == 1 && blocks <= self.copied {
            // SAFETY: S3: blocks of the ring; the producer is the only one.
            unsafe { register.copy(blocks, |block| ring.block(last.wrapping_add(block))) };
        } else {
            // SAFETY: S3: a control segment, written before; the producer is the only one.
            unsafe { register.ring(ring.block(last).cast::<u64>().read()) };
        }
    }

    /// Returns the work request whose WQE begins at block `index`.
    #[inline]
    fn request(&self, index: u32) -> &Request {
        // SAFETY: S3: one for each block of the ring.
        unsafe { self.requests.get_unchecked(self.setup.ring.place(index)) }
    }

    /// Returns why a request is malformed, if it is.
    fn check(&self, wr: &SendWr<'_>) -> Result<(), VerbError> {
        let Setup { transport, max_wr, max_sge, max_inline, ring, .. } = &self.setup;
        if !transport_supports(*transport, wr) {
            return Err(MALFORMED);
        }
        let route = if wr.target.is_some() { 3 } else { 0 };
        let remote = match wr.op {
            SendOp::Send | SendOp::SendWithImm(_) | SendOp::SendWithInvalidate(_) => 0,
            SendOp::Write(_) | SendOp::WriteWithImm(..) | SendOp::Read(_) => 1,
            SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. } => 2,
            SendOp::LocalInvalidate(_) => 3 + 4,
            SendOp::BindWindow => 3 + 4 + 4,
        };
        let data = match wr.data {
            Data::Sges(list) if list.len() > *max_sge as usize => return Err(MALFORMED),
            Data::Sges(list) => list.len(),
            Data::Inline(bytes) if bytes.len() > *max_inline as usize => return Err(MALFORMED),
            Data::Inline(bytes) => (size_of::<u32>() + bytes.len()).div_ceil(SEGMENT),
            Data::Window(bind) if bind.len > MAX_WINDOW => return Err(WINDOW_TOO_LONG),
            Data::Window(_) => 0,
        };
        let segments = 1 + route + remote + data as u32;
        let fits = segments <= MAX_SEGMENTS
            && segments.div_ceil(SEGMENTS_OF_BLOCK) * max_wr <= ring.blocks();
        if fits { Ok(()) } else { Err(MALFORMED) }
    }

    /// Returns the request whose WQE has index `counter`, if it is in flight. Called under the lock
    /// of the completion queue.
    #[inline]
    pub(super) fn find(&self, counter: u16) -> Option<Completed> {
        let request = self.request(counter.into());
        let position = request.position.load(Ordering::Relaxed);
        // Not only in the future: the record of a block where no WQE begins any more may be older
        // than half of all numbers.
        let ahead = (position as u32).wrapping_sub(self.consumed.load(Ordering::Relaxed));
        if (position >> 32) as u16 != counter || ahead >= self.setup.max_wr {
            return None;
        }
        Some(Completed { wr_id: WrId(request.wr_id.load(Ordering::Relaxed)), position })
    }

    /// Frees the capacity of a request and of all before it.
    #[inline]
    pub(super) fn free(&self, completed: Completed) {
        self.consumed.store((completed.position as u32).wrapping_add(1), Ordering::Release);
    }
}

impl SendQueue {
    /// Writes any request; returns its length in blocks.
    ///
    /// # Safety
    ///
    /// See [`post_list`](Self::post_list).
    unsafe fn write_any(&self, producer: &mut Producer, wr: &SendWr<'_>) -> Result<u32, VerbError> {
        let Setup { qpn, ring, max_wr, .. } = &self.setup;
        self.check(wr)?;
        if self.in_flight(producer) >= *max_wr {
            return Err(FULL);
        }
        let index = producer.next;
        let flags = producer.flags(wr.flags);
        let entry = match wr.target {
            None => Entry::connected(ring, index),
            Some(SendTarget::Datagram(UdTarget { handle, qpn, qkey, .. })) => {
                let key = u64::from(qkey.0) << 32;
                // SAFETY: S3: the caller's promise: the handle is alive.
                Entry::unconnected(ring, index).route(unsafe { route_of(handle) }, qpn.0, key)
            }
            Some(SendTarget::Dc(DctTarget { handle, number, key, .. })) => {
                // SAFETY: S3: as above.
                Entry::unconnected(ring, index).route(unsafe { route_of(handle) }, number.0, key.0)
            }
        };
        let mut local = WcOpcode(0);
        let (entry, immediate) = match (wr.op, wr.data) {
            (SendOp::BindWindow, Data::Window(bind)) => {
                local = WcOpcode::BIND_MW;
                (entry.bind(*qpn, bind), bind.current.0)
            }
            (SendOp::LocalInvalidate(rkey), _) => {
                local = WcOpcode::LOCAL_INV;
                (entry.invalidate(), rkey.0)
            }
            (op, Data::Sges(list)) => operation(entry, op, Payload::List(list)).ok_or(MALFORMED)?,
            // `transport_supports`: not for a response.
            (op, Data::Inline(bytes)) => {
                operation(entry, op, Payload::Inline(bytes)).ok_or(MALFORMED)?
            }
            (_, Data::Window(_)) => return Err(MALFORMED),
        };
        let segments = entry.finish(&Header { qpn: *qpn, flags, immediate });
        let blocks = segments.div_ceil(SEGMENTS_OF_BLOCK);
        self.request(index).set(wr.wr_id, producer.posted, index, local);
        let is_local = local != WcOpcode(0);
        let had_free = producer.limit != producer.posted;
        producer.next = index.wrapping_add(blocks);
        producer.posted = producer.posted.wrapping_add(1);
        if is_local {
            producer.fence = control::SMALL_FENCE;
        }
        if is_local || !had_free {
            producer.limit = producer.posted;
        }
        Ok(blocks)
    }
}

impl Producer {
    /// Returns the bits of the next WQE's control segment.
    fn flags(&mut self, flags: SendFlags) -> u8 {
        let small = std::mem::take(&mut self.fence);
        // A fence of the request is stronger.
        let small = if flags.contains(SendFlags::FENCE) { 0 } else { small };
        control_flags(flags) | small
    }
}

/// Returns the bits of a control segment for `flags`.
#[inline]
const fn control_flags(flags: SendFlags) -> u8 {
    // One copy of the flags for each, shifted so that its bit is seven above its place.
    const COPIES: u32 = 1 << 14 | 1 << 9 | 1 << 6;
    const BITS: u32 =
        (control::FENCE as u32 | control::SIGNALED as u32 | control::SOLICITED as u32) << 7;
    (((flags.bits() as u32 * COPIES) & BITS) >> 7) as u8
}

const _: () = {
    assert!(control_flags(SendFlags::empty()) == 0);
    assert!(control_flags(SendFlags::FENCE) == control::FENCE);
    assert!(control_flags(SendFlags::SIGNALED) == control::SIGNALED);
    assert!(control_flags(SendFlags::SOLICITED) == control::SOLICITED);
    let all = control::FENCE | control::SIGNALED | control::SOLICITED;
    assert!(control_flags(SendFlags::all()) == all && SendFlags::all().bits() == 7);
};

/// Writes a plain request, which takes one block; returns its address.
#[inline(always)]
fn write_plain(entry: Entry<'_, '_, Blank>, qpn: u32, wr: &PlainWr) -> NonNull<u8> {
    let first = entry.first();
    let header = Header { qpn, flags: control_flags(wr.flags), immediate: 0 };
    match wr.op {
        PlainOp::Send => entry.send(Opcode::Send).plain(&wr.buffer).finish(&header),
        PlainOp::Write(at) => {
            let entry = entry.write(Opcode::Write).remote(at.addr, at.rkey.0);
            entry.plain(&wr.buffer).finish(&header)
        }
        PlainOp::Read(at) => {
            entry.read().remote(at.addr, at.rkey.0).plain(&wr.buffer).finish(&header)
        }
    };
    first
}

/// The error for a window that exceeds [`MAX_WINDOW`]; libmlx5 has the same.
const WINDOW_TOO_LONG: VerbError = VerbError::new("ibv_post_send", VerbError::EOPNOTSUPP);
/// The error for a full queue.
const FULL: VerbError = VerbError::new("ibv_post_send", VerbError::ENOMEM);
/// The error for a request that the queue pair cannot execute.
const MALFORMED: VerbError = VerbError::new("ibv_post_send", VerbError::EINVAL);

/// The data of a request.
#[derive(Clone, Copy)]
enum Payload<'a> {
    List(&'a [Sge]),
    Inline(&'a [u8]),
}

impl Payload<'_> {
    #[inline]
    fn data<'r, 'm>(self, entry: Entry<'r, 'm, NoData>) -> Entry<'r, 'm, Complete> {
        match self {
            Self::List(list) => entry.data(list),
            Self::Inline(bytes) => entry.inline(bytes),
        }
    }

    #[inline]
    fn buffer<'r, 'm>(self, entry: Entry<'r, 'm, NoBuffer>) -> Entry<'r, 'm, Complete> {
        match self {
            Self::List(list) => entry.buffer(list),
            Self::Inline(_) => entry.buffer(&[]),
        }
    }
}

/// Adds an operation to an entry. Returns it with the immediate data; `None` for local operations.
fn operation<'r, 'm>(
    entry: Entry<'r, 'm, Blank>,
    op: SendOp,
    payload: Payload<'_>,
) -> Option<(Entry<'r, 'm, Complete>, u32)> {
    Some(match op {
        SendOp::Write(at) => {
            (payload.data(entry.write(Opcode::Write).remote(at.addr, at.rkey.0)), 0)
        }
        SendOp::Read(at) => (payload.buffer(entry.read().remote(at.addr, at.rkey.0)), 0),
        SendOp::Send => (payload.data(entry.send(Opcode::Send)), 0),
        SendOp::SendWithImm(imm) => (payload.data(entry.send(Opcode::SendWithImm)), imm.0),
        SendOp::SendWithInvalidate(rkey) => {
            (payload.data(entry.send(Opcode::SendInvalidate)), rkey.0)
        }
        SendOp::WriteWithImm(at, imm) => {
            (payload.data(entry.write(Opcode::WriteWithImm).remote(at.addr, at.rkey.0)), imm.0)
        }
        SendOp::CompareSwap { remote, compare, swap } => {
            let entry = entry.atomic(Opcode::CompareSwap).remote(remote.addr, remote.rkey.0);
            (payload.buffer(entry.operands(swap, compare)), 0)
        }
        SendOp::FetchAdd { remote, add } => {
            let entry = entry.atomic(Opcode::FetchAdd).remote(remote.addr, remote.rkey.0);
            (payload.buffer(entry.operands(add, 0)), 0)
        }
        SendOp::LocalInvalidate(_) | SendOp::BindWindow => return None,
    })
}

impl fmt::Debug for SendQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SendQueue")
            .field("qpn", &self.setup.qpn)
            .field("blocks", &self.setup.ring.blocks())
            .field("consumed", &self.consumed)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;

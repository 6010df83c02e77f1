//! Completion queues: reads CQEs, finds their work requests, arms events.
//!
//! The adapter writes the entries of the ring in order. An entry belongs to software if its owner
//! bit equals the parity of the pass and it has been written at all. The consumer index in the
//! doorbell record returns entries to the adapter. [`common`] decodes the most common entries,
//! [`compressed`] expands compressed sessions.

mod common;
mod compressed;

use std::fmt;
use std::mem;
use std::ptr::NonNull;
use std::sync::Arc;

use rdma_provider::VerbError;
use rdma_provider::locks::{Mutex, MutexGuard};
use rdma_provider::types::{
    Qpn, Timestamp, TimestampedCompletion, WcFlags, WcOpcode, WcStatus, WorkCompletion, WrId,
};

use self::common::Next;
use super::doorbell::{ArmRegister, Record, from_device, to_device};
use super::errors::{BadEntry, PAGE_FAULT, status};
use super::layout::{Cqe, Opcode, cqe};
use super::queues::{Queues, Receives};
use super::receive_queue::Entries;
use super::scatter::{self, Inline};
use super::send_queue::SendQueue;
use super::table::Table;

/// Consumer indices have 24 bits.
const INDEX: u32 = 0xff_ffff;
/// Queue pair numbers have 24 bits.
const QPN: u32 = 0xff_ffff;
/// Marks requests for solicited events only, `MLX5_CQ_DB_REQ_NOT_SOL`.
const SOLICITED_ONLY: u32 = 1 << 24;

/// The parameters of a completion queue.
#[derive(Debug)]
pub(super) struct Setup {
    /// The first entry.
    pub(super) start: NonNull<u8>,
    /// Number of entries, a power of two.
    pub(super) entries: u32,
    /// Bytes of an entry: 64 or 128.
    pub(super) entry_size: u32,
    pub(super) consumer: Record,
    pub(super) arm: Record,
    pub(super) register: ArmRegister,
    pub(super) number: u32,
    /// The queue was created with compression.
    pub(super) compressed: bool,
}

/// A completion queue that is read in place.
pub struct CompletionQueue {
    setup: Setup,
    /// The CQE in the first entry.
    first: NonNull<u8>,
    /// Number of entries - 1.
    mask: u32,
    /// Base-2 logarithm of the number of entries.
    log_entries: u32,
    state: Mutex<State>,
}

// SAFETY: S3: the lock protects the ring, whose memory lives as long as the queue.
unsafe impl Send for CompletionQueue {}
// SAFETY: S3: as above.
unsafe impl Sync for CompletionQueue {}

struct State {
    /// Index of the next entry, counted on beyond the ring.
    consumer: u32,
    table: Table,
    failed: Option<BadEntry>,
}

impl CompletionQueue {
    /// Wraps a new queue.
    ///
    /// # Safety
    ///
    /// The ring is valid for reads and writes as long as the value is used, and nothing else
    /// consumes from it.
    pub(super) unsafe fn new(setup: Setup) -> Self {
        debug_assert!(setup.entries.is_power_of_two() && matches!(setup.entry_size, 64 | 128));
        let state = State { consumer: 0, table: Table::new(), failed: None };
        Self {
            // SAFETY: S3: within the first entry.
            first: unsafe { setup.start.add(setup.entry_size as usize - size_of::<Cqe>()) },
            mask: setup.entries - 1,
            log_entries: setup.entries.trailing_zeros(),
            state: Mutex::new(state),
            setup,
        }
    }

    /// Returns the address of the CQE at `index`: the last 64 bytes of its entry.
    #[inline]
    fn cqe(&self, index: u32) -> NonNull<Cqe> {
        let place = (index & self.mask) as usize;
        // SAFETY: S3: masked: within the ring.
        unsafe { self.first.add(place * self.setup.entry_size as usize) }.cast()
    }

    /// Returns the owner bit of entries that belong to software in the pass of `index`.
    #[inline]
    fn owner(&self, index: u32) -> u8 {
        (index >> self.log_entries) as u8 & cqe::OWNER
    }

    /// Returns a copy of the CQE at `index` if it belongs to software.
    fn read(&self, index: u32) -> Option<Cqe> {
        let entry = self.cqe(index);
        let op_own = op_own(entry);
        if op_own >> 4 == cqe::INVALID || (op_own ^ self.owner(index)) & cqe::OWNER != 0 {
            return None;
        }
        Some(copy_of(entry))
    }

    /// Removes up to `limit` of the oldest completions and passes each to `each`, without a copy in
    /// between. Returns their number; less than `limit` means that the queue is empty. `each` is
    /// called under the lock of the queue, so it takes no lock under which a queue pair of the
    /// queue is reset or destroyed.
    ///
    /// # Errors
    ///
    /// EIO, permanently, after a [`BadEntry`].
    #[inline]
    pub fn drain(
        &self,
        limit: usize,
        mut each: impl FnMut(&WorkCompletion),
    ) -> Result<usize, VerbError> {
        self.drain_indexed(limit, |completion, _| each(completion))
    }

    /// Does the same, and also passes the index of the entry, which is not yet the adapter's.
    #[inline]
    fn drain_indexed(
        &self,
        limit: usize,
        mut each: impl FnMut(&WorkCompletion, u32),
    ) -> Result<usize, VerbError> {
        let state = &mut *self.state.lock();
        if let Some(bad) = &state.failed {
            return Err(refusal(bad));
        }
        let before = state.consumer;
        let mut found = 0;
        while found < limit {
            let completion = match self.next_common(state) {
                Next::Completion(completion) => completion,
                Next::Empty => break,
                Next::Other => match self.next(state) {
                    Ok(Some(completion)) => completion,
                    Ok(None) => break,
                    // The completions before it are delivered first.
                    Err(_) if found > 0 => break,
                    Err(bad) => return Err(refusal(&bad)),
                },
            };
            each(&completion, state.consumer.wrapping_sub(1));
            found += 1;
        }
        // A page fault of a shared receive consumes an entry without a completion, so `found` may
        // be 0.
        if state.consumer != before {
            self.setup.consumer.release(state.consumer & INDEX);
        }
        Ok(found)
    }

    /// Moves the oldest completions to `out` and returns their number, see [`drain`](Self::drain).
    ///
    /// # Errors
    ///
    /// See [`drain`](Self::drain).
    pub fn poll(&self, out: &mut [WorkCompletion]) -> Result<usize, VerbError> {
        let mut places = out.iter_mut();
        self.drain(places.len(), |completion| {
            if let Some(place) = places.next() {
                *place = *completion;
            }
        })
    }

    /// Moves the oldest completions to `out`, with their timestamps, and returns their number, see
    /// [`drain`](Self::drain).
    ///
    /// # Errors
    ///
    /// See [`drain`](Self::drain).
    pub fn poll_timestamped(&self, out: &mut [TimestampedCompletion]) -> Result<usize, VerbError> {
        let mut places = out.iter_mut();
        self.drain_indexed(places.len(), |completion, index| {
            if let Some(place) = places.next() {
                let succeeded = completion.status.is_success();
                let timestamp = if succeeded { self.timestamp(index) } else { Timestamp(0) };
                *place = TimestampedCompletion { completion: *completion, timestamp };
            }
        })
    }

    /// Returns the timestamp of the entry at `index`, which belongs to software.
    fn timestamp(&self, index: u32) -> Timestamp {
        // SAFETY: S3: within the ring.
        let bytes = unsafe { (&raw const (*self.cqe(index).as_ptr()).timestamp).read_volatile() };
        Timestamp(u64::from_be_bytes(bytes))
    }

    /// Requests an event for the next completion, or the next solicited or failed one. `sequence`
    /// is the number of events taken so far.
    pub(crate) fn arm(&self, solicited_only: bool, sequence: u32) {
        let state = self.state.lock();
        let command = if solicited_only { SOLICITED_ONLY } else { 0 };
        let request = (sequence & 3) << 28 | command | state.consumer & INDEX;
        self.setup.arm.store(request);
        self.setup.register.ring(u64::from(request) << 32 | u64::from(self.setup.number));
    }

    /// Decodes and removes the oldest CQE, without telling the adapter.
    #[inline(never)]
    fn next(&self, state: &mut State) -> Result<Option<WorkCompletion>, BadEntry> {
        loop {
            let index = state.consumer;
            let Some(entry) = self.read(index) else { return Ok(None) };
            let decoded = self.decode(&state.table, index, &entry);
            match decoded {
                Ok(completion) => {
                    state.consumer = index.wrapping_add(1);
                    // A page fault of a shared receive has no completion.
                    if completion.is_some() {
                        return Ok(completion);
                    }
                }
                Err(bad) => {
                    let expanded = if self.is_title(&entry) {
                        self.expand(index, &entry, self.setup.entries)
                    } else {
                        Err(bad)
                    };
                    let Err(bad) = expanded else { continue };
                    rdma_provider::error!(
                        cqn = self.setup.number,
                        index,
                        error = %bad,
                        "failed to read a completion queue entry; failing the queue"
                    );
                    state.failed = Some(bad);
                    return Err(bad);
                }
            }
        }
    }

    fn decode(
        &self,
        table: &Table,
        index: u32,
        entry: &Cqe,
    ) -> Result<Option<WorkCompletion>, BadEntry> {
        let opcode_qpn = entry.opcode_qpn.get();
        let qpn = opcode_qpn & QPN;
        let kind = entry.op_own >> 4;
        let queues = || table.find(qpn).ok_or(BadEntry::QueuePair { qpn });
        match kind {
            cqe::REQUEST => self.decode_request(queues()?, index, entry).map(Some),
            cqe::WRITE_WITH_IMM..=cqe::SEND_WITH_INVALIDATE => {
                self.decode_receive(queues()?, index, entry).map(Some)
            }
            cqe::REQUEST_ERROR | cqe::RECEIVE_ERROR => decode_error(queues()?, entry),
            _ => Err(BadEntry::Kind { op_own: entry.op_own }),
        }
    }

    fn decode_request(
        &self,
        queues: &Queues,
        index: u32,
        entry: &Cqe,
    ) -> Result<WorkCompletion, BadEntry> {
        let (qpn, counter) = (entry.opcode_qpn.get() & QPN, entry.counter.get());
        let code = (entry.opcode_qpn.get() >> 24) as u8;
        let send = queues.send.as_ref().ok_or(BadEntry::Counter { qpn, counter })?;
        let operation = Opcode::from_code(code).ok_or(BadEntry::Opcode { opcode: code })?;
        let is_inline = self.is_inline(entry)?;
        let completed = send.find(counter).ok_or(BadEntry::Counter { qpn, counter })?;
        let mut completion =
            WorkCompletion { wr_id: completed.wr_id, qpn: Qpn(qpn), ..WorkCompletion::EMPTY };
        (completion.opcode, completion.byte_len) = match operation {
            Opcode::Send | Opcode::SendWithImm | Opcode::SendInvalidate => (WcOpcode::SEND, 0),
            Opcode::Write | Opcode::WriteWithImm => (WcOpcode::RDMA_WRITE, 0),
            Opcode::Read => (WcOpcode::RDMA_READ, entry.length.get()),
            Opcode::CompareSwap => (WcOpcode::COMP_SWAP, 8),
            Opcode::FetchAdd => (WcOpcode::FETCH_ADD, 8),
            Opcode::Umr | Opcode::Nop => (completed.local_opcode(), 0),
        };
        if matches!(operation, Opcode::SendWithImm | Opcode::WriteWithImm) {
            completion.flags = WcFlags::WITH_IMM;
        }
        if is_inline {
            completion.status = self.scatter_response(send, index, entry, completion.byte_len)?;
        }
        // Only now may its WQE be overwritten.
        send.free(completed);
        Ok(completion)
    }

    fn decode_receive(
        &self,
        queues: &Queues,
        index: u32,
        entry: &Cqe,
    ) -> Result<WorkCompletion, BadEntry> {
        let (wr_id, status) = if self.is_inline(entry)? {
            self.scatter_message(queues, index, entry)?
        } else {
            retire_receive(queues, entry, |_, _, _| WcStatus::SUCCESS)?
        };
        Ok(received(entry, wr_id, status))
    }

    /// Copies the response to a request from the entry to its buffers.
    #[cold]
    fn scatter_response(
        &self,
        send: &SendQueue,
        index: u32,
        entry: &Cqe,
        length: u32,
    ) -> Result<WcStatus, BadEntry> {
        let (qpn, code) = (entry.opcode_qpn.get() & QPN, (entry.opcode_qpn.get() >> 24) as u8);
        let unexpected = BadEntry::Opcode { opcode: code };
        let operation = Opcode::from_code(code).ok_or(unexpected)?;
        let inline = self.inline(index, entry);
        let bytes = inline.bytes(qpn, length)?;
        let counter = entry.counter.get().into();
        // SAFETY: S1, S2: the request is in flight until the caller frees it. The adapter puts no
        // data into CQEs if it registers memory under other addresses.
        let status = unsafe { scatter::to_request(send.ring(), counter, operation, bytes) };
        status.ok_or(unexpected)
    }

    /// Retires a receive, and copies its message from the entry to its buffers.
    #[cold]
    fn scatter_message(
        &self,
        queues: &Queues,
        index: u32,
        entry: &Cqe,
    ) -> Result<(WrId, WcStatus), BadEntry> {
        let inline = self.inline(index, entry);
        let bytes = inline.bytes(entry.opcode_qpn.get() & QPN, entry.length.get())?;
        retire_receive(queues, entry, |entries, place, skipped| {
            // SAFETY: S1, S2: the receive is in flight until this returns; as above.
            unsafe { scatter::to_receive(entries, place, skipped, bytes) }
        })
    }

    /// Returns true if the adapter has put the data into the entry instead of memory.
    fn is_inline(&self, entry: &Cqe) -> Result<bool, BadEntry> {
        match entry.op_own & cqe::FORMAT {
            0 => Ok(false),
            cqe::INLINE_32 => Ok(true),
            cqe::INLINE_64 if self.setup.entry_size == 128 => Ok(true),
            _ => Err(BadEntry::Kind { op_own: entry.op_own }),
        }
    }

    /// Returns a copy of the data in an [inline](Self::is_inline) entry.
    fn inline(&self, index: u32, entry: &Cqe) -> Inline {
        if entry.op_own & cqe::FORMAT == cqe::INLINE_32 {
            return Inline::in_entry(entry);
        }
        // SAFETY: S3: the first half of an entry of 128 bytes.
        Inline::before(unsafe { self.cqe(index).sub(1).cast().read_volatile() })
    }

    /// Locks the queue, so that a queue pair can be attached, reset or destroyed.
    pub(crate) fn lock(&self) -> Locked<'_> {
        Locked { queue: self, state: self.state.lock() }
    }
}

/// A locked completion queue: nothing polls it.
pub(crate) struct Locked<'a> {
    queue: &'a CompletionQueue,
    state: MutexGuard<'a, State>,
}

impl Locked<'_> {
    /// Lets completions of queue pair `qpn` find its queues.
    pub(crate) fn attach(&mut self, qpn: u32, queues: Arc<Queues>) {
        self.state.table.insert(qpn, queues);
    }

    /// Removes a destroyed queue pair and its completions.
    pub(crate) fn detach(&mut self, qpn: u32) {
        self.remove_completions(qpn);
        self.state.table.remove(qpn);
    }

    /// Removes the completions of a queue pair that was reset or destroyed, and frees the shared
    /// receives that they have taken. libmlx5 leaves this to the owner of the queue.
    pub(crate) fn remove_completions(&mut self, qpn: u32) {
        let Self { queue, state } = self;
        let entries = queue.setup.entries;
        let mut end = state.consumer;
        loop {
            let found = end.wrapping_sub(state.consumer);
            let Some(entry) = (found < entries).then(|| queue.read(end)).flatten() else { break };
            // An invalid session ends the removal; the next poll fails the queue.
            if queue.is_title(&entry) && queue.expand(end, &entry, entries - found).is_err() {
                break;
            }
            end = end.wrapping_add(1);
        }
        // From the newest to the oldest: each entry moves up by the number of removed ones.
        let mut removed = 0;
        let mut index = end;
        while index != state.consumer {
            index = index.wrapping_sub(1);
            let Some(entry) = queue.read(index) else { continue };
            if entry.opcode_qpn.get() & QPN == qpn {
                if let Some(Receives::Shared(shared)) =
                    state.table.find(qpn).map(|queues| &queues.receive)
                    && !matches!(entry.op_own >> 4, cqe::REQUEST | cqe::REQUEST_ERROR)
                {
                    let _no_receive = shared.retire(entry.counter.get(), || {});
                }
                removed += 1;
            } else if removed > 0 {
                queue.copy(index, index.wrapping_add(removed));
            }
        }
        if removed > 0 {
            state.consumer = state.consumer.wrapping_add(removed);
            to_device();
            queue.setup.consumer.release(state.consumer & INDEX);
        }
    }
}

impl CompletionQueue {
    /// Copies an entry over a later one, which keeps its owner bit.
    fn copy(&self, from: u32, to: u32) {
        let owner = op_own(self.cqe(to)) & cqe::OWNER;
        let half = size_of::<Cqe>();
        let size = self.setup.entry_size as usize;
        // SAFETY: S3: two different entries of the ring, both owned by software.
        unsafe {
            let (source, target) = (self.cqe(from).cast::<u8>(), self.cqe(to).cast::<u8>());
            let before = size - half;
            target.sub(before).copy_from_nonoverlapping(source.sub(before), size);
            let op_own = &raw mut (*self.cqe(to).as_ptr()).op_own;
            op_own.write(op_own.read() & !cqe::OWNER | owner);
        }
    }
}

#[cold]
#[inline(never)]
fn refusal(bad: &BadEntry) -> VerbError {
    bad.verb_error()
}

/// Returns kind, format and owner bit of an entry of the ring.
#[inline]
fn op_own(entry: NonNull<Cqe>) -> u8 {
    // SAFETY: S3: within the ring.
    unsafe { (&raw const (*entry.as_ptr()).op_own).read_volatile() }
}

/// Returns a copy of an entry of the ring, which belongs to software.
#[inline]
fn copy_of(entry: NonNull<Cqe>) -> Cqe {
    from_device();
    // A volatile load of a `Cqe` would load each field by itself; this loads eight words.
    let words = entry.cast::<u64>();
    let mut copy = [0_u64; size_of::<Cqe>() / size_of::<u64>()];
    for (at, word) in copy.iter_mut().enumerate() {
        // SAFETY: S3: within the ring.
        *word = unsafe { words.add(at).read_volatile() };
    }
    // SAFETY: S3: any bytes are a CQE.
    unsafe { mem::transmute::<[u64; 8], Cqe>(copy) }
}

/// Returns the completion of a receive.
#[inline]
fn received(entry: &Cqe, wr_id: WrId, status: WcStatus) -> WorkCompletion {
    let source = entry.flags_source.get();
    let immediate = entry.immediate;
    let (opcode, mut flags, imm_or_rkey) = match entry.op_own >> 4 {
        cqe::WRITE_WITH_IMM => {
            (WcOpcode::RECV_RDMA_WITH_IMM, WcFlags::WITH_IMM, immediate.get().to_be())
        }
        cqe::SEND_WITH_IMM => (WcOpcode::RECV, WcFlags::WITH_IMM, immediate.get().to_be()),
        cqe::SEND_WITH_INVALIDATE => (WcOpcode::RECV, WcFlags::WITH_INV, immediate.get()),
        _ => (WcOpcode::RECV, WcFlags::empty(), 0),
    };
    flags.set(WcFlags::GRH, source >> 28 & 3 != 0);
    WorkCompletion {
        wr_id,
        status,
        opcode,
        vendor_error: 0,
        byte_len: entry.length.get(),
        imm_or_rkey,
        qpn: Qpn(entry.opcode_qpn.get() & QPN),
        src_qpn: Qpn(source & QPN),
        flags,
        pkey_index: immediate.get() as u16,
        src_lid: entry.source_lid.get(),
        service_level: (source >> 24) as u8 & 15,
        dest_path_bits: entry.path_bits & 0x7f,
    }
}

/// Decodes an error CQE. Returns `None` for a shared receive that was posted again.
fn decode_error(queues: &Queues, entry: &Cqe) -> Result<Option<WorkCompletion>, BadEntry> {
    let (qpn, counter) = (entry.opcode_qpn.get() & QPN, entry.counter.get());
    let [.., vendor_error, syndrome] = entry.timestamp;
    let unknown = BadEntry::Counter { qpn, counter };
    let wr_id = if entry.op_own >> 4 == cqe::REQUEST_ERROR {
        let send = queues.send.as_ref().ok_or(unknown)?;
        let completed = send.find(counter).ok_or(unknown)?;
        send.free(completed);
        completed.wr_id
    } else {
        if let (PAGE_FAULT, Receives::Shared(shared)) = ((syndrome, vendor_error), &queues.receive)
        {
            shared.post_again(qpn, counter)?;
            return Ok(None);
        }
        retire_receive(queues, entry, |_, _, _| WcStatus::SUCCESS)?.0
    };
    Ok(Some(WorkCompletion {
        wr_id,
        status: status(syndrome),
        vendor_error: vendor_error.into(),
        qpn: Qpn(qpn),
        ..WorkCompletion::EMPTY
    }))
}

/// Retires the receive of a CQE. Before its entry can be used again, `fill` gets the entry, with
/// the number of segments before its list.
fn retire_receive(
    queues: &Queues,
    entry: &Cqe,
    fill: impl FnOnce(&Entries, u32, usize) -> WcStatus,
) -> Result<(WrId, WcStatus), BadEntry> {
    let (qpn, counter) = (entry.opcode_qpn.get() & QPN, entry.counter.get());
    let unknown = BadEntry::Counter { qpn, counter };
    match &queues.receive {
        Receives::None => Err(unknown),
        Receives::Own(queue) => {
            let oldest = queue.oldest().ok_or(unknown)?;
            let status = fill(queue.entries(), oldest.place, 0);
            queue.retire(&oldest);
            Ok((oldest.wr_id, status))
        }
        Receives::Shared(queue) => {
            queue.retire(counter, || fill(queue.entries(), counter.into(), 1)).ok_or(unknown)
        }
    }
}

impl fmt::Debug for CompletionQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CompletionQueue")
            .field("number", &self.setup.number)
            .field("entries", &self.setup.entries)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;

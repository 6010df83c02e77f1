//! Completion queues: create, poll, arm, acknowledge events.

#![allow(unsafe_code)]

use std::mem;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::ffi::*;

use super::ibv_channel::{Channel, DESTROYING, Events};
use super::mlx5::direct::{self, CompletionQueue, Device, NewCompletionQueue};
use super::{Ibverbs, convert, sys};
use rdma_provider::VerbError;
use rdma_provider::contract::{self, CqInit};
use rdma_provider::locks::Mutex;
use rdma_provider::types::{
    Qpn, Timestamp, TimestampedCompletion, WcFlags, WcOpcode, WcStatus, WorkCompletion, WrId,
};

/// A completion queue, `ibv_cq`.
#[derive(Debug)]
pub struct Cq {
    raw: NonNull<ibv_cq>,
    /// The field `cqe` of `raw`. Locked while libibverbs resizes the queue, which changes it.
    capacity: Mutex<u32>,
    events: Arc<Events>,
    direct: Option<Arc<CompletionQueue>>,
    /// The same queue, if it has timestamps.
    extended: Option<NonNull<ibv_cq_ex>>,
}

// SAFETY: S3: libibverbs is thread-safe.
unsafe impl Send for Cq {}
// SAFETY: S3: as above.
unsafe impl Sync for Cq {}

impl Cq {
    /// Returns the C library's handle, which is valid while this object lives.
    ///
    /// Unsafe calls with it must neither destroy nor poll it.
    #[must_use]
    pub const fn as_raw(&self) -> NonNull<ibv_cq> {
        self.raw
    }

    pub(super) fn new(
        context: NonNull<ibv_context>,
        init: &CqInit<'_, Ibverbs>,
        mut direct: Option<Device>,
    ) -> Result<Self, VerbError> {
        let verb = "ibv_create_cq";
        let (Ok(capacity), Ok(vector)) = (init.capacity.try_into(), init.vector.try_into()) else {
            return Err(VerbError::new(verb, VerbError::EINVAL));
        };
        let channel = init.channel.map_or(ptr::null_mut(), Channel::raw);
        let events = Arc::new(Events {
            cookie: init.cookie,
            unacknowledged: AtomicU64::new(0),
            taken: AtomicU32::new(0),
        });
        // Opaque to libibverbs, which returns it with each event.
        let cq_context = Arc::as_ptr(&events).cast_mut().cast();
        let new = NewCompletionQueue { context, capacity, cq_context, channel, vector };
        let mut extended = None;
        let raw = match direct {
            _ if init.timestamps => {
                // SAFETY: S3: the context is open and owns the channel, if any.
                let queue = unsafe { create_timestamped(new) }?;
                extended = Some(queue);
                // Entries of a compressed session have no timestamps.
                if let Some(device) = &mut direct {
                    device.compressed = false;
                }
                // An extended queue begins with a plain one, `ibv_cq_ex_to_cq`.
                queue.cast()
            }
            // SAFETY: S3: the context is open and owns the channel, if any.
            Some(device) if device.compressed => unsafe { direct::create_compressed(new) }?,
            _ => sys::handle(verb, {
                // SAFETY: S3: as above.
                unsafe { ibv_create_cq(context.as_ptr(), capacity, cq_context, channel, vector) }
            })?,
        };
        // SAFETY: S3: the queue is alive, and nothing else uses it yet.
        let capacity = Mutex::new(unsafe { granted(raw) });
        // From here on, an error destroys the queue.
        let mut made = Self { raw, capacity, events, direct: None, extended };
        if let Some(direct) = direct {
            // SAFETY: S3: new, and destroyed after the queue pairs that refer to it.
            made.direct = Some(Arc::new(unsafe { direct.completion_queue(raw) }?));
        }
        Ok(made)
    }

    /// Returns the queue if its device is polled directly.
    #[inline]
    pub fn direct(&self) -> Option<&Arc<CompletionQueue>> {
        if cfg!(feature = "mlx5") { self.direct.as_ref() } else { None }
    }

    pub(super) fn raw(&self) -> *mut ibv_cq {
        self.raw.as_ptr()
    }
}

impl contract::Cq for Cq {
    fn id(&self) -> u64 {
        // Asynchronous events carry the pointer.
        self.raw().expose_provenance() as u64
    }

    fn capacity(&self) -> u32 {
        *self.capacity.lock()
    }

    #[inline]
    fn poll(&self, out: &mut [WorkCompletion]) -> Result<usize, VerbError> {
        if let Some(direct) = self.direct() {
            return direct.poll(out);
        }
        let wanted = i32::try_from(out.len()).unwrap_or(i32::MAX);
        // SAFETY: S3: the queue is alive; S4: `out` has `wanted` entries, and any bytes are valid.
        let found = unsafe { ibv_poll_cq(self.raw(), wanted, convert::completions(out)) };
        // Some drivers return codes of their own; none sets `errno`.
        usize::try_from(found).map_err(|_| VerbError::new("ibv_poll_cq", VerbError::EIO))
    }

    fn poll_timestamped(&self, out: &mut [TimestampedCompletion]) -> Result<usize, VerbError> {
        let Some(extended) = self.extended else {
            return Err(VerbError::new("ibv_start_poll", VerbError::EINVAL));
        };
        if let Some(direct) = self.direct() {
            return direct.poll_timestamped(out);
        }
        // SAFETY: S3: the queue is alive, and has all fields of `FIELDS`.
        unsafe { poll_extended(extended, out) }
    }

    fn arm(&self, solicited_only: bool) -> Result<(), VerbError> {
        if let Some(direct) = self.direct() {
            direct.arm(solicited_only, self.events.taken.load(Ordering::Acquire));
            return Ok(());
        }
        // SAFETY: S3: the queue is alive.
        sys::status("ibv_req_notify_cq", unsafe {
            ibv_req_notify_cq(self.raw(), solicited_only.into())
        })
    }

    fn resize(&self, capacity: u32) -> Result<(), VerbError> {
        let verb = "ibv_resize_cq";
        // The direct data path reads the entries in place, and libmlx5 would move them.
        if self.direct().is_some() {
            return Err(VerbError::new(verb, VerbError::EOPNOTSUPP));
        }
        let wanted =
            i32::try_from(capacity).map_err(|_| VerbError::new(verb, VerbError::EINVAL))?;
        let mut present = self.capacity.lock();
        // SAFETY: S3: the queue is alive; drivers exclude polls meanwhile.
        sys::status(verb, unsafe { ibv_resize_cq(self.raw(), wanted) })?;
        // SAFETY: S3: the queue is alive, and only this call changes its field, under the lock.
        *present = unsafe { granted(self.raw) };
        Ok(())
    }

    fn moderate(&self, completions: u16, period: u16) -> Result<(), VerbError> {
        let moderate = ibv_moderate_cq { cq_count: completions, cq_period: period };
        let mut attr =
            ibv_modify_cq_attr { attr_mask: ibv_cq_attr_mask::IBV_CQ_ATTR_MODERATE.0, moderate };
        // SAFETY: S3: the queue is alive, the attributes local.
        sys::status("ibv_modify_cq", unsafe { ibv_modify_cq(self.raw(), &raw mut attr) })
    }

    fn ack(&self, events: u32) {
        let count = |given: u64| Some(given - u64::from(events).min(given));
        let given = match self.events.unacknowledged.fetch_update(
            Ordering::AcqRel,
            Ordering::Acquire,
            count,
        ) {
            Ok(given) | Err(given) => given,
        };
        let counted = u32::try_from(given).unwrap_or(u32::MAX).min(events);
        if counted < events {
            rdma_provider::error!(
                cq = self.id(),
                events,
                given,
                "acknowledged more completion events than were taken; ignoring the excess"
            );
        }
        // SAFETY: S3: the queue is alive; at least as many events were taken.
        unsafe { ibv_ack_cq_events(self.raw(), counted) };
    }
}

/// The fields of a completion that libibverbs reads. The number of the partition key is not among
/// them.
const FIELDS: u32 = {
    use ibv_create_cq_wc_flags as field;
    field::IBV_WC_EX_WITH_BYTE_LEN.0
        | field::IBV_WC_EX_WITH_IMM.0
        | field::IBV_WC_EX_WITH_QP_NUM.0
        | field::IBV_WC_EX_WITH_SRC_QP.0
        | field::IBV_WC_EX_WITH_SLID.0
        | field::IBV_WC_EX_WITH_SL.0
        | field::IBV_WC_EX_WITH_DLID_PATH_BITS.0
        | field::IBV_WC_EX_WITH_COMPLETION_TIMESTAMP.0
};

/// Creates a completion queue with timestamps.
///
/// # Safety
///
/// The context is open and owns the channel, if any.
unsafe fn create_timestamped(new: NewCompletionQueue) -> Result<NonNull<ibv_cq_ex>, VerbError> {
    const VERB: &str = "ibv_create_cq_ex";
    let mut attr = new.extended(VERB)?;
    attr.wc_flags = FIELDS.into();
    // SAFETY: S3: the caller's promise; the attributes are local.
    sys::handle(VERB, unsafe { ibv_create_cq_ex(new.context.as_ptr(), &raw mut attr) })
}

/// Moves the oldest completions to `out` and returns their number.
///
/// # Safety
///
/// The queue is alive and was created with [`FIELDS`]. Drivers exclude other polls from the start
/// of a poll to its end, because it was created without IBV_CREATE_CQ_ATTR_SINGLE_THREADED.
unsafe fn poll_extended(
    cq: NonNull<ibv_cq_ex>,
    out: &mut [TimestampedCompletion],
) -> Result<usize, VerbError> {
    /// ENOENT of `errno(3)`: the queue is empty.
    const EMPTY: i32 = 2;
    let mut attr = ibv_poll_cq_attr { comp_mask: 0 };
    let mut found = 0;
    for target in out {
        // SAFETY: S3: the caller's promise; `ibv_start_poll(3)` comes first.
        let result = unsafe {
            match found {
                0 => ibv_start_poll(cq.as_ptr(), &raw mut attr),
                _ => ibv_next_poll(cq.as_ptr()),
            }
        };
        match (result, found) {
            // SAFETY: S3: the caller's promise; the poll has found a completion.
            (0, _) => *target = unsafe { current(cq) },
            // A poll that does not start does not end either.
            (EMPTY, 0) => return Ok(0),
            (_, 0) => return Err(VerbError::new("ibv_start_poll", VerbError::EIO)),
            // The next poll reports an error.
            _ => break,
        }
        found += 1;
    }
    if found > 0 {
        // SAFETY: S3: the caller's promise; the poll was started.
        unsafe { ibv_end_poll(cq.as_ptr()) };
    }
    Ok(found)
}

/// Reads the completion that a poll has found.
///
/// # Safety
///
/// The queue was created with [`FIELDS`] and is between a successful poll and its end.
unsafe fn current(cq: NonNull<ibv_cq_ex>) -> TimestampedCompletion {
    let raw = cq.as_ptr();
    let mut completion = WorkCompletion::EMPTY;
    // SAFETY: S3: for all of them: the caller's promise.
    unsafe {
        completion.wr_id = WrId((*raw).wr_id);
        completion.status = WcStatus((*raw).status);
        completion.qpn = Qpn(ibv_wc_read_qp_num(raw));
        // The other fields of a failure are not defined.
        if !completion.status.is_success() {
            completion.vendor_error = ibv_wc_read_vendor_err(raw);
            return TimestampedCompletion { completion, timestamp: Timestamp(0) };
        }
        completion.opcode = WcOpcode(ibv_wc_read_opcode(raw));
        completion.byte_len = ibv_wc_read_byte_len(raw);
        completion.flags = WcFlags::from_bits_retain(ibv_wc_read_wc_flags(raw));
        if completion.flags.intersects(WcFlags::WITH_IMM | WcFlags::WITH_INV) {
            completion.imm_or_rkey = ibv_wc_read_imm_data(raw);
        }
        completion.src_qpn = Qpn(ibv_wc_read_src_qp(raw));
        completion.src_lid = ibv_wc_read_slid(raw) as u16;
        completion.service_level = ibv_wc_read_sl(raw);
        completion.dest_path_bits = ibv_wc_read_dlid_path_bits(raw);
        TimestampedCompletion { completion, timestamp: Timestamp(ibv_wc_read_completion_ts(raw)) }
    }
}

/// Returns the number of entries.
///
/// # Safety
///
/// The queue is alive and is not being resized.
unsafe fn granted(raw: NonNull<ibv_cq>) -> u32 {
    // SAFETY: S3: promised by the caller.
    u32::try_from(unsafe { raw.as_ref().cqe }).unwrap_or(0)
}

impl Drop for Cq {
    fn drop(&mut self) {
        let left = self.events.unacknowledged.fetch_or(DESTROYING, Ordering::AcqRel);
        // SAFETY: S3: the queue is alive, its queue pairs are gone; as many events were taken.
        // libibverbs counts them modulo 2^32.
        let result = unsafe {
            ibv_ack_cq_events(self.raw(), left as u32);
            ibv_destroy_cq(self.raw())
        };
        if let Err(error) = sys::status("ibv_destroy_cq", result) {
            let cq = contract::Cq::id(self);
            rdma_provider::error!(cq, %error, "failed to destroy completion queue; leaking it");
            // Later events of the queue may still refer to it.
            mem::forget(self.events.clone());
        }
    }
}

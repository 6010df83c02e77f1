//! Completion queue: poll, arm, acknowledge.

#![allow(unsafe_code)]

use std::ffi::c_void;
use std::mem;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use rdma_sys::*;

use super::ibv_channel::Channel;
use super::{convert, sys};
use rdma_provider::VerbError;
use rdma_provider::contract;
use rdma_provider::types::WorkCompletion;

/// `ibv_cq`.
#[derive(Debug)]
pub struct Cq {
    raw: NonNull<ibv_cq>,
    events: Arc<Events>,
}

/// What libibverbs gives back with each event of a queue: its cookie, and how many were given and not acknowledged.
///
/// `ibv_destroy_cq` waits until all are, for ever; and for ever, too, if more are acknowledged than were given.
#[derive(Debug)]
pub(super) struct Events {
    cookie: u64,
    /// Or [`ENDING`].
    given: AtomicU32,
}

/// Nobody acknowledges any more.
const ENDING: u32 = 1 << 31;

impl Events {
    /// Counts an event that was just taken; its queue's cookie. If the queue is being destroyed, acknowledges it.
    ///
    /// # Safety
    ///
    /// Both are what `ibv_get_cq_event` gave: an event of a queue that was made by [`Cq::new`].
    pub(super) unsafe fn take(cq: *mut ibv_cq, events: *mut c_void) -> u64 {
        let events: *const Self = events.cast_const().cast();
        // SAFETY: S3: the queue is not destroyed before this event is acknowledged, and keeps its `Events` until then.
        let (cookie, before) =
            unsafe { ((*events).cookie, (*events).given.fetch_add(1, Ordering::AcqRel)) };
        // From here on the queue may be gone, unless it is this event that it waits for.
        if before & ENDING != 0 {
            // SAFETY: S3: it is.
            unsafe { ibv_ack_cq_events(cq, 1) };
        }
        cookie
    }
}

// SAFETY: S3: libibverbs is safe to call from any thread at once; the handle is used until `Drop` only.
unsafe impl Send for Cq {}
// SAFETY: S3: as above.
unsafe impl Sync for Cq {}

impl Cq {
    /// The handle of the C library.
    ///
    /// # Safety
    ///
    /// It is valid while this object lives. What the object is for is left to the object: the caller neither ends the handle
    /// nor polls it.
    #[must_use]
    pub const unsafe fn as_raw(&self) -> NonNull<ibv_cq> {
        self.raw
    }

    pub(super) fn new(
        context: NonNull<ibv_context>,
        capacity: u32,
        channel: Option<&Channel>,
        vector: u32,
        cookie: u64,
    ) -> Result<Self, VerbError> {
        let verb = "ibv_create_cq";
        let (Ok(capacity), Ok(vector)) = (capacity.try_into(), vector.try_into()) else {
            return Err(VerbError::new(verb, VerbError::EINVAL));
        };
        let channel = channel.map_or(ptr::null_mut(), Channel::raw);
        let events = Arc::new(Events { cookie, given: AtomicU32::new(0) });
        // libibverbs gives it back and never looks behind it.
        let behind = Arc::as_ptr(&events).cast_mut().cast();
        // SAFETY: S3: the context is open and the channel, if any, is of it.
        let raw = unsafe { ibv_create_cq(context.as_ptr(), capacity, behind, channel, vector) };
        Ok(Self { raw: sys::handle(verb, raw)?, events })
    }

    pub(super) fn raw(&self) -> *mut ibv_cq {
        self.raw.as_ptr()
    }
}

impl contract::Cq for Cq {
    fn id(&self) -> u64 {
        // What an asynchronous event carries.
        self.raw().expose_provenance() as u64
    }

    fn capacity(&self) -> u32 {
        // SAFETY: S3: the queue is alive.
        u32::try_from(unsafe { self.raw.as_ref().cqe }).unwrap_or(0)
    }

    #[inline(always)]
    fn poll(&self, out: &mut [WorkCompletion]) -> Result<usize, VerbError> {
        let wanted = i32::try_from(out.len()).unwrap_or(i32::MAX);
        // SAFETY: S3: the queue is alive; S4: there is room for as many as are asked for, of numbers of any value.
        let found = unsafe { ibv_poll_cq(self.raw(), wanted, convert::completions(out)) };
        // Of some drivers a failure is a code of their own; none sets `errno`.
        usize::try_from(found).map_err(|_| VerbError::new("ibv_poll_cq", VerbError::EIO))
    }

    fn arm(&self, solicited_only: bool) -> Result<(), VerbError> {
        // SAFETY: S3: the queue is alive.
        sys::status("ibv_req_notify_cq", unsafe {
            ibv_req_notify_cq(self.raw(), solicited_only.into())
        })
    }

    fn moderate(&self, completions: u16, period: u16) -> Result<(), VerbError> {
        let moderate = ibv_moderate_cq { cq_count: completions, cq_period: period };
        let mut attr =
            ibv_modify_cq_attr { attr_mask: ibv_cq_attr_mask::IBV_CQ_ATTR_MODERATE.0, moderate };
        // SAFETY: S3: the queue is alive, the attributes ours.
        sys::status("ibv_modify_cq", unsafe { ibv_modify_cq(self.raw(), &raw mut attr) })
    }

    fn ack(&self, events: u32) {
        let count = |given: u32| Some(given - events.min(given));
        let given = match self.events.given.fetch_update(Ordering::AcqRel, Ordering::Acquire, count)
        {
            Ok(given) | Err(given) => given,
        };
        if given < events {
            tracing::error!(
                cq = self.id(),
                events,
                given,
                "acknowledged more events than were given"
            );
        }
        // SAFETY: S3: the queue is alive; so many events were given.
        unsafe { ibv_ack_cq_events(self.raw(), events.min(given)) };
    }
}

impl Drop for Cq {
    fn drop(&mut self) {
        let left = self.events.given.fetch_or(ENDING, Ordering::AcqRel);
        // SAFETY: S3: the queue is alive; so many events were given. Its queue pairs are gone.
        let result = unsafe {
            ibv_ack_cq_events(self.raw(), left);
            ibv_destroy_cq(self.raw())
        };
        if let Err(error) = sys::status("ibv_destroy_cq", result) {
            tracing::error!(%error, "not freed");
            // It may go on to raise events.
            mem::forget(self.events.clone());
        }
    }
}

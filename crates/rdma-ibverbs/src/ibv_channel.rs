//! Completion channels: the descriptor that reports events of completion queues.

#![allow(unsafe_code)]

use std::ffi::c_void;
use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::ffi::*;

use super::sys;
use rdma_provider::VerbError;
use rdma_provider::contract;

/// A completion channel, `ibv_comp_channel`.
#[derive(Debug)]
pub struct Channel {
    raw: NonNull<ibv_comp_channel>,
}

// SAFETY: S3: libibverbs is thread-safe.
unsafe impl Send for Channel {}
// SAFETY: S3: as above.
unsafe impl Sync for Channel {}

impl Channel {
    pub(super) fn new(context: NonNull<ibv_context>) -> Result<Self, VerbError> {
        // SAFETY: S3: the context is open.
        let raw = sys::handle("ibv_create_comp_channel", unsafe {
            ibv_create_comp_channel(context.as_ptr())
        })?;
        let channel = Self { raw };
        sys::set_nonblocking(contract::Channel::fd(&channel))?;
        Ok(channel)
    }

    pub(super) fn raw(&self) -> *mut ibv_comp_channel {
        self.raw.as_ptr()
    }
}

impl contract::Channel for Channel {
    fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: S3: the descriptor is open as long as the channel.
        unsafe { BorrowedFd::borrow_raw(self.raw.as_ref().fd) }
    }

    fn next_event(&self) -> Result<Option<u64>, VerbError> {
        let (mut cq, mut events) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: S3: the channel is open, the results local.
        let result = unsafe { ibv_get_cq_event(self.raw(), &raw mut cq, &raw mut events) };
        match sys::status("ibv_get_cq_event", result) {
            // SAFETY: S3: just taken; `Cq::new` makes all queues of this channel.
            Ok(()) => Ok(Some(unsafe { Events::take(cq, events) })),
            Err(error) if error.errno == sys::EAGAIN => Ok(None),
            Err(error) => Err(error),
        }
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        // SAFETY: S3: created by this object; its completion queues are gone.
        sys::log_failure("ibv_destroy_comp_channel", unsafe {
            ibv_destroy_comp_channel(self.raw())
        });
    }
}

/// The `cq_context` that libibverbs returns with each event of a queue.
///
/// `ibv_destroy_cq(3)` blocks forever if the number of acknowledged events differs from the number
/// taken.
#[derive(Debug)]
pub(super) struct Events {
    pub(super) cookie: u64,
    /// Events taken and not acknowledged, with the flag [`DESTROYING`].
    pub(super) unacknowledged: AtomicU64,
    /// Events taken, modulo 2^32: the sequence number of the next request for one.
    pub(super) taken: AtomicU32,
}

/// The queue is being destroyed: only [`Events::take`] acknowledges its events. Safe code may take
/// any number of events without acknowledging them, but not as many as this.
pub(super) const DESTROYING: u64 = 1 << 63;

impl Events {
    /// Counts an event just taken and returns its queue's cookie. If the queue is being destroyed,
    /// acknowledges the event.
    ///
    /// # Safety
    ///
    /// Both arguments must come from `ibv_get_cq_event(3)`, for a queue of `Cq::new`.
    unsafe fn take(cq: *mut ibv_cq, events: *mut c_void) -> u64 {
        let events: *const Self = events.cast_const().cast();
        // SAFETY: S3: the queue and its `Events` exist until this event is acknowledged.
        let (cookie, before) = unsafe {
            (*events).taken.fetch_add(1, Ordering::AcqRel);
            ((*events).cookie, (*events).unacknowledged.fetch_add(1, Ordering::AcqRel))
        };
        // From here on the queue may be gone, unless its destruction waits for this event.
        if before & DESTROYING != 0 {
            // SAFETY: S3: it does.
            unsafe { ibv_ack_cq_events(cq, 1) };
        }
        cookie
    }
}

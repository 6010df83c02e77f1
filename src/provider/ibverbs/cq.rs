//! Completion queue: poll, arm, acknowledge.

#![allow(unsafe_code)]

use std::mem::MaybeUninit;
use std::ptr::{self, NonNull};

use rdma_sys::*;

use super::channel::Channel;
use super::{convert, sys};
use crate::error::VerbError;
use crate::provider::contract;
use crate::types::WorkCompletion;

/// Completions that one call of `ibv_poll_cq` takes at most; they stand on the stack in between.
const BATCH: usize = 16;

/// `ibv_cq`.
#[derive(Debug)]
pub(crate) struct Cq {
    raw: NonNull<ibv_cq>,
}

// SAFETY: S3: libibverbs is safe to call from any thread at once; the handle is used until `Drop` only.
unsafe impl Send for Cq {}
// SAFETY: S3: as above.
unsafe impl Sync for Cq {}

impl Cq {
    pub(super) fn new(
        context: NonNull<ibv_context>,
        capacity: u32,
        channel: Option<&Channel>,
        vector: u32,
        cookie: u64,
    ) -> Result<Self, VerbError> {
        let verb = "ibv_create_cq";
        let (Ok(capacity), Ok(vector), Ok(cookie)) = (capacity.try_into(), vector.try_into(), usize::try_from(cookie))
        else {
            return Err(VerbError::new(verb, VerbError::EINVAL));
        };
        let channel = channel.map_or(ptr::null_mut(), Channel::raw);
        // The cookie is a number to libibverbs as well: it gives it back and never looks behind it.
        let cookie = ptr::without_provenance_mut(cookie);
        // SAFETY: S3: the context is open and the channel, if any, is of it.
        let raw = unsafe { ibv_create_cq(context.as_ptr(), capacity, cookie, channel, vector) };
        Ok(Self { raw: sys::handle(verb, raw)? })
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

    #[inline]
    fn poll(&self, out: &mut [WorkCompletion]) -> Result<usize, VerbError> {
        let mut buffer = [const { MaybeUninit::<ibv_wc>::uninit() }; BATCH];
        let mut filled = 0;
        loop {
            let room = &mut out[filled..];
            let wanted = room.len().min(BATCH);
            // SAFETY: S3: the queue is alive, and the buffer has room for as many as are asked for.
            let found = unsafe { ibv_poll_cq(self.raw(), wanted as i32, buffer.as_mut_ptr().cast()) };
            let found = match usize::try_from(found) {
                Ok(found) => found.min(wanted),
                // Of some drivers it is a code of their own; none sets `errno`.
                Err(_) if filled == 0 => return Err(VerbError::new("ibv_poll_cq", VerbError::EIO)),
                // What was taken is given; the error comes again.
                Err(_) => 0,
            };
            for (out, wc) in room.iter_mut().zip(&buffer[..found]) {
                // SAFETY: S4: the call has written the first `found`, of numbers of any value.
                *out = convert::completion_from(unsafe { wc.assume_init_ref() });
            }
            filled += found;
            // Whoever gets fewer than fit takes the queue for empty.
            if found < wanted || filled == out.len() {
                return Ok(filled);
            }
        }
    }

    fn arm(&self, solicited_only: bool) -> Result<(), VerbError> {
        // SAFETY: S3: the queue is alive.
        sys::status("ibv_req_notify_cq", unsafe { ibv_req_notify_cq(self.raw(), solicited_only.into()) })
    }

    fn moderate(&self, completions: u16, period: u16) -> Result<(), VerbError> {
        let moderate = ibv_moderate_cq { cq_count: completions, cq_period: period };
        let mut attr = ibv_modify_cq_attr { attr_mask: ibv_cq_attr_mask::IBV_CQ_ATTR_MODERATE.0, moderate };
        // SAFETY: S3: the queue is alive, the attributes ours.
        sys::status("ibv_modify_cq", unsafe { ibv_modify_cq(self.raw(), &raw mut attr) })
    }

    fn ack(&self, events: u32) {
        // SAFETY: S3: the queue is alive; the caller was given so many events.
        unsafe { ibv_ack_cq_events(self.raw(), events) };
    }
}

impl Drop for Cq {
    fn drop(&mut self) {
        // SAFETY: S3: made by us; its queue pairs are gone and its events acknowledged.
        sys::freed("ibv_destroy_cq", unsafe { ibv_destroy_cq(self.raw()) });
    }
}

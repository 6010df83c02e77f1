//! Completion queue: poll, arm, acknowledge.

#![allow(unsafe_code)]

use std::ptr::{self, NonNull};

use rdma_sys::*;

use super::channel::Channel;
use super::{convert, sys};
use crate::error::VerbError;
use crate::provider::contract;
use crate::types::WorkCompletion;

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

//! Shared receive queue.

#![allow(unsafe_code)]

use std::ptr::{self, NonNull};

use rdma_sys::*;

use super::owned::Owned;
use super::{ibv_post, sys};
use rdma_provider::VerbError;
use rdma_provider::contract::{self, PostError};
use rdma_provider::types::{RecvWr, SrqCaps};

/// `ibv_srq`.
#[derive(Debug)]
pub struct Srq {
    raw: Owned<ibv_srq>,
    caps: SrqCaps,
}

impl Srq {
    /// The handle of the C library.
    ///
    /// # Safety
    ///
    /// It is valid while this object lives. What the object is for is left to the object: the caller neither ends the handle
    /// nor changes its size.
    #[must_use]
    pub const unsafe fn as_raw(&self) -> NonNull<ibv_srq> {
        self.raw.get()
    }

    pub(super) fn new(pd: NonNull<ibv_pd>, caps: SrqCaps) -> Result<Self, VerbError> {
        let mut init = ibv_srq_init_attr {
            srq_context: ptr::null_mut(),
            attr: ibv_srq_attr { max_wr: caps.max_wr, max_sge: caps.max_sge, srq_limit: 0 },
        };
        // SAFETY: S3: the protection domain is alive, the attributes ours; granted sizes come back in them.
        let raw =
            sys::handle("ibv_create_srq", unsafe { ibv_create_srq(pd.as_ptr(), &raw mut init) })?;
        let caps = SrqCaps {
            max_wr: init.attr.max_wr.max(caps.max_wr),
            max_sge: init.attr.max_sge.max(caps.max_sge),
        };
        // SAFETY: S3: just made, and ours; its queue pairs go before it.
        Ok(Self { raw: unsafe { Owned::new(raw) }, caps })
    }

    pub(super) fn raw(&self) -> *mut ibv_srq {
        self.raw.get().as_ptr()
    }
}

impl contract::Srq for Srq {
    fn id(&self) -> u64 {
        // What an asynchronous event carries.
        self.raw().expose_provenance() as u64
    }

    fn caps(&self) -> SrqCaps {
        self.caps
    }

    fn set_limit(&self, limit: u32) -> Result<(), VerbError> {
        let mut attr = ibv_srq_attr { max_wr: 0, max_sge: 0, srq_limit: limit };
        let mask = ibv_srq_attr_mask::IBV_SRQ_LIMIT.0 as i32;
        // SAFETY: S3: the queue is alive, the attributes ours.
        sys::status("ibv_modify_srq", unsafe { ibv_modify_srq(self.raw(), &raw mut attr, mask) })
    }

    fn limit(&self) -> Result<u32, VerbError> {
        let mut attr = ibv_srq_attr { max_wr: 0, max_sge: 0, srq_limit: 0 };
        // SAFETY: S3: the queue is alive, the attributes ours.
        sys::status("ibv_query_srq", unsafe { ibv_query_srq(self.raw(), &raw mut attr) })?;
        Ok(attr.srq_limit)
    }

    unsafe fn post_recv(&self, list: &[RecvWr<'_>]) -> Result<(), PostError> {
        ibv_post::receives(list, |first, refused| {
            // SAFETY: S1: the memory of the list is kept by the caller; S3: the queue is alive, the chain ours.
            sys::status("ibv_post_srq_recv", unsafe {
                ibv_post_srq_recv(self.raw(), first, refused)
            })
        })
    }

    fn destroy(&mut self) -> Result<(), VerbError> {
        self.raw.end()
    }
}

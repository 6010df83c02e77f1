//! Shared receive queues: `ibv_create_srq(3)`.

#![allow(unsafe_code)]

use std::ptr::{self, NonNull};
use std::sync::Arc;

use crate::ffi::*;

use super::mlx5::direct::{Device, SharedReceiveQueue};
use super::owned::Owned;
use super::{ibv_post, sys};
use rdma_provider::VerbError;
use rdma_provider::contract::{self, PostError};
use rdma_provider::types::{RecvWr, Sge, SrqCaps};

/// A shared receive queue, `ibv_srq`.
#[derive(Debug)]
pub struct Srq {
    raw: Owned<ibv_srq>,
    caps: SrqCaps,
    direct: Option<Arc<SharedReceiveQueue>>,
    /// The elements of a receive without any.
    empty: &'static [Sge],
}

impl Srq {
    /// Returns the C library's handle, which is valid while this object lives.
    ///
    /// Unsafe calls with it must neither destroy nor resize it.
    #[must_use]
    pub const fn as_raw(&self) -> NonNull<ibv_srq> {
        self.raw.get()
    }

    pub(super) fn new(
        pd: NonNull<ibv_pd>,
        caps: SrqCaps,
        direct: Option<Device>,
        empty: &'static [Sge],
    ) -> Result<Self, VerbError> {
        let mut init = ibv_srq_init_attr {
            srq_context: ptr::null_mut(),
            attr: ibv_srq_attr { max_wr: caps.max_wr, max_sge: caps.max_sge, srq_limit: 0 },
        };
        // SAFETY: S3: the domain is alive; `init` is local.
        let raw =
            sys::handle("ibv_create_srq", unsafe { ibv_create_srq(pd.as_ptr(), &raw mut init) })?;
        let caps = SrqCaps {
            max_wr: init.attr.max_wr.max(caps.max_wr),
            max_sge: init.attr.max_sge.max(caps.max_sge),
        };
        // SAFETY: S3: just created; its queue pairs are destroyed before it.
        let owned = unsafe { Owned::new(raw) };
        // SAFETY: S3: new, and outlives the queue pairs that read it.
        let direct =
            direct.map(|direct| unsafe { direct.shared_receive_queue(raw) }).transpose()?;
        Ok(Self { raw: owned, caps, direct: direct.map(Arc::new), empty })
    }

    /// Returns the queue if its device posts directly.
    pub(super) fn direct(&self) -> Option<&Arc<SharedReceiveQueue>> {
        if cfg!(feature = "mlx5") { self.direct.as_ref() } else { None }
    }

    pub(super) fn raw(&self) -> *mut ibv_srq {
        self.raw.get().as_ptr()
    }
}

impl contract::Srq for Srq {
    fn id(&self) -> u64 {
        // Asynchronous events carry the pointer.
        self.raw().expose_provenance() as u64
    }

    fn caps(&self) -> SrqCaps {
        self.caps
    }

    fn set_limit(&self, limit: u32) -> Result<(), VerbError> {
        let mut attr = ibv_srq_attr { max_wr: 0, max_sge: 0, srq_limit: limit };
        let mask = ibv_srq_attr_mask::IBV_SRQ_LIMIT.0 as i32;
        // SAFETY: S3: the queue is alive, the attributes local.
        sys::status("ibv_modify_srq", unsafe { ibv_modify_srq(self.raw(), &raw mut attr, mask) })
    }

    fn limit(&self) -> Result<u32, VerbError> {
        let mut attr = ibv_srq_attr { max_wr: 0, max_sge: 0, srq_limit: 0 };
        // SAFETY: S3: the queue is alive, the attributes local.
        sys::status("ibv_query_srq", unsafe { ibv_query_srq(self.raw(), &raw mut attr) })?;
        Ok(attr.srq_limit)
    }

    unsafe fn post_recv(&self, list: &[RecvWr<'_>]) -> Result<(), PostError> {
        if let Some(direct) = self.direct() {
            // SAFETY: S1: the caller's promise.
            return unsafe { direct.post(list) };
        }
        ibv_post::receives(list, self.empty, |first, refused| {
            // SAFETY: S1: the caller's promise; S3: the queue is alive, the chain local.
            sys::status("ibv_post_srq_recv", unsafe {
                ibv_post_srq_recv(self.raw(), first, refused)
            })
        })
    }

    fn destroy(&mut self) -> Result<(), VerbError> {
        self.raw.destroy()
    }
}

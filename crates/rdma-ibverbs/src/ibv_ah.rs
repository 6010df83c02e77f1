//! Address handles: `ibv_create_ah(3)`.

#![allow(unsafe_code)]

use std::ptr::NonNull;

use rdma_sys::*;

use super::{convert, sys};
use rdma_provider::VerbError;
use rdma_provider::contract;
use rdma_provider::types::AddressVector;

/// An address handle, `ibv_ah`.
#[derive(Debug)]
pub struct Ah {
    raw: NonNull<ibv_ah>,
}

// SAFETY: S3: libibverbs is thread-safe.
unsafe impl Send for Ah {}
// SAFETY: S3: as above.
unsafe impl Sync for Ah {}

impl Ah {
    pub(super) fn new(pd: NonNull<ibv_pd>, address: &AddressVector) -> Result<Self, VerbError> {
        let mut attr = convert::address_to(address);
        // SAFETY: S3: the domain is alive, the attributes local.
        let raw = unsafe { ibv_create_ah(pd.as_ptr(), &raw mut attr) };
        Ok(Self { raw: sys::handle("ibv_create_ah", raw)? })
    }
}

impl contract::Ah for Ah {
    fn handle(&self) -> usize {
        self.raw.as_ptr().expose_provenance()
    }
}

impl Drop for Ah {
    fn drop(&mut self) {
        // SAFETY: S3: created by this object; work that named it has copied it or was flushed.
        sys::log_failure("ibv_destroy_ah", unsafe { ibv_destroy_ah(self.raw.as_ptr()) });
    }
}

//! Address handles: `ibv_create_ah(3)`.

#![allow(unsafe_code)]

use std::mem;
use std::ptr::NonNull;

use crate::ffi::*;

use super::mlx5::direct::address::AddressHandle;
use super::mlx5::direct::{self, Device};
use super::{convert, sys};
use rdma_provider::VerbError;
use rdma_provider::contract;
use rdma_provider::types::AddressVector;

/// An address handle, `ibv_ah`.
#[derive(Debug)]
pub struct Ah {
    /// Work requests name it by its address.
    handle: Box<AddressHandle>,
}

// SAFETY: S3: libibverbs is thread-safe.
unsafe impl Send for Ah {}
// SAFETY: S3: as above.
unsafe impl Sync for Ah {}

impl Ah {
    pub(super) fn new(
        pd: NonNull<ibv_pd>,
        address: &AddressVector,
        device: Option<Device>,
    ) -> Result<Self, VerbError> {
        let mut attr = convert::address_to(address);
        // SAFETY: S3: the domain is alive, the attributes local.
        let raw = unsafe { ibv_create_ah(pd.as_ptr(), &raw mut attr) };
        let raw = sys::handle("ibv_create_ah", raw)?;
        // SAFETY: S3: zeros are valid.
        let route = unsafe { mem::zeroed() };
        // From here on, an error destroys the handle.
        let mut made = Self { handle: Box::new(AddressHandle { raw, route }) };
        if device.is_some() {
            // SAFETY: S3: just created, by libmlx5.
            made.handle.route = unsafe { direct::route(raw) }?;
        }
        Ok(made)
    }
}

impl contract::Ah for Ah {
    fn handle(&self) -> usize {
        self.handle.number()
    }
}

impl Drop for Ah {
    fn drop(&mut self) {
        // SAFETY: S3: created by this object; work that named it has copied it or was flushed.
        sys::log_failure("ibv_destroy_ah", unsafe { ibv_destroy_ah(self.handle.raw.as_ptr()) });
    }
}

//! Address handles: what [`UdTarget::handle`](rdma_provider::types::UdTarget) points to.

use std::ptr::{self, NonNull};

use crate::ffi::ibv_ah;

use super::layout::Route;

/// An address handle of libibverbs, with the adapter's form of its route.
#[derive(Debug)]
pub(crate) struct AddressHandle {
    pub(crate) raw: NonNull<ibv_ah>,
    /// All zero if the device does not post directly.
    pub(crate) route: Route,
}

impl AddressHandle {
    /// Returns the number by which work requests name it: its address.
    pub(crate) fn number(&self) -> usize {
        ptr::from_ref(self).expose_provenance()
    }

    /// Returns the address handle that a work request names.
    ///
    /// # Safety
    ///
    /// `number` comes from [`number`](Self::number), and the address handle is alive and not moved.
    #[inline]
    pub(crate) unsafe fn from_number<'a>(number: usize) -> &'a Self {
        // SAFETY: S3: the caller's promise.
        unsafe { &*ptr::with_exposed_provenance::<Self>(number) }
    }
}

/// Returns the route of an address handle.
///
/// # Safety
///
/// See [`AddressHandle::from_number`].
#[inline]
pub(super) unsafe fn route_of<'a>(number: usize) -> &'a Route {
    // SAFETY: S3: the caller's promise.
    unsafe { &AddressHandle::from_number(number).route }
}

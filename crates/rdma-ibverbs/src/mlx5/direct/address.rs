//! Address handles: what [`UdTarget::handle`](rdma_provider::types::UdTarget) points to.

use std::ptr::{self, NonNull};

use rdma_sys::ibv_ah;

use super::layout::Route;

/// An address handle of libibverbs, with the adapter's form of its route.
#[derive(Debug)]
pub(crate) struct AddressHandle {
    pub(crate) raw: NonNull<ibv_ah>,
    /// All zero if the device does not post directly.
    pub(crate) route: Route,
}

impl AddressHandle {
    pub(crate) fn handle(&self) -> usize {
        ptr::from_ref(self).expose_provenance()
    }
}

/// Returns the address handle behind a handle's number.
///
/// # Safety
///
/// `handle` comes from [`AddressHandle::handle`], and the address handle is alive and not moved.
#[inline(always)]
pub(crate) unsafe fn handle_of<'a>(handle: usize) -> &'a AddressHandle {
    // SAFETY: S3: the caller's promise.
    unsafe { &*ptr::with_exposed_provenance::<AddressHandle>(handle) }
}

/// Returns the route of an address handle.
///
/// # Safety
///
/// See [`handle_of`].
#[inline(always)]
pub(super) unsafe fn route_of<'a>(handle: usize) -> &'a Route {
    // SAFETY: S3: the caller's promise.
    unsafe { &handle_of(handle).route }
}

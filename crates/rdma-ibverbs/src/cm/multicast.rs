//! Membership in multicast groups: `rdma_join_multicast(3)`.

#![allow(unsafe_code)]

use std::net::{IpAddr, SocketAddr};
use std::ptr;

use crate::ffi::*;

use super::address::Address;
use crate::sys;
use rdma_provider::VerbError;

/// The kernel's own code, which programs should not see, for IPv6 groups on RoCE v2.
const ENOTSUPP: i32 = 524;

/// Asks to join a group; an event follows.
///
/// # Safety
///
/// The id must be alive, without a concurrent call on it.
pub(super) unsafe fn join(id: *mut rdma_cm_id, group: IpAddr) -> Result<(), VerbError> {
    const VERB: &str = "rdma_join_multicast";
    let mut address = Address::from(SocketAddr::new(group, 0));
    // SAFETY: S3: the id is alive, the address local and of its family's length.
    let result = unsafe { rdma_join_multicast(id, (&raw mut address).cast(), ptr::null_mut()) };
    sys::status(VERB, result).map_err(|error| match error.errno {
        ENOTSUPP => VerbError::new(VERB, VerbError::EOPNOTSUPP),
        _ => error,
    })
}

/// Leaves a group; returns when its events are acknowledged.
///
/// # Safety
///
/// The id must be alive, without a concurrent call on it.
pub(super) unsafe fn leave(id: *mut rdma_cm_id, group: IpAddr) -> Result<(), VerbError> {
    const VERB: &str = "rdma_leave_multicast";
    let mut address = Address::from(SocketAddr::new(group, 0));
    // SAFETY: S3: as above.
    sys::status(VERB, unsafe { rdma_leave_multicast(id, (&raw mut address).cast()) })
}

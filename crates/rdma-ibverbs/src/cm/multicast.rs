//! Membership in multicast groups: `rdma_join_multicast(3)`, which the binding lacks.

#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};
use std::net::{IpAddr, SocketAddr};
use std::ptr;
use std::sync::OnceLock;

use rdma_sys::*;

use super::address::Address;
use crate::library::Library;
use crate::sys;
use rdma_provider::VerbError;

type Join = unsafe extern "C" fn(*mut rdma_cm_id, *mut Address, *mut c_void) -> c_int;
type Leave = unsafe extern "C" fn(*mut rdma_cm_id, *mut Address) -> c_int;

/// The kernel's own code, which programs should not see, for IPv6 groups on RoCE v2.
const ENOTSUPP: i32 = 524;

/// Asks to join a group; an event follows.
///
/// # Safety
///
/// The id must be alive, without a concurrent call on it.
pub(super) unsafe fn join(id: *mut rdma_cm_id, group: IpAddr) -> Result<(), VerbError> {
    const VERB: &str = "rdma_join_multicast";
    static FUNCTION: OnceLock<Option<Join>> = OnceLock::new();
    // SAFETY: S3: the function has this signature, rdma_cma.h.
    let function = unsafe { Library::Rdmacm.cached(&FUNCTION, c"rdma_join_multicast") };
    let function = function.ok_or(VerbError::new(VERB, VerbError::EOPNOTSUPP))?;
    let mut address = Address::from(SocketAddr::new(group, 0));
    // SAFETY: S3: the id is alive, the address local and of its family's length.
    let result = unsafe { function(id, &raw mut address, ptr::null_mut()) };
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
    static FUNCTION: OnceLock<Option<Leave>> = OnceLock::new();
    // SAFETY: S3: the function has this signature, rdma_cma.h.
    let function = unsafe { Library::Rdmacm.cached(&FUNCTION, c"rdma_leave_multicast") };
    let function = function.ok_or(VerbError::new(VERB, VerbError::EOPNOTSUPP))?;
    let mut address = Address::from(SocketAddr::new(group, 0));
    // SAFETY: S3: as above.
    sys::status(VERB, unsafe { function(id, &raw mut address) })
}

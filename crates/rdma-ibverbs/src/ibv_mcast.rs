//! Attachment to multicast groups: `ibv_attach_mcast(3)`, which the binding lacks.

#![allow(unsafe_code)]

use std::ffi::{CStr, c_int};
use std::sync::OnceLock;

use rdma_sys::*;

use super::library::Library;
use super::sys;
use rdma_provider::VerbError;
use rdma_provider::types::Gid;

type Function = unsafe extern "C" fn(*mut ibv_qp, *const ibv_gid, u16) -> c_int;
type Cache = OnceLock<Option<Function>>;

/// Attaches a queue pair to a group.
///
/// # Safety
///
/// The queue pair must be alive.
pub(super) unsafe fn attach(qp: *mut ibv_qp, group: Gid, lid: u16) -> Result<(), VerbError> {
    static FUNCTION: Cache = Cache::new();
    // SAFETY: S3: the caller's promise.
    unsafe { call("ibv_attach_mcast", &FUNCTION, c"ibv_attach_mcast", (qp, group, lid)) }
}

/// Detaches a queue pair from a group.
///
/// # Safety
///
/// The queue pair must be alive.
pub(super) unsafe fn detach(qp: *mut ibv_qp, group: Gid, lid: u16) -> Result<(), VerbError> {
    static FUNCTION: Cache = Cache::new();
    // SAFETY: S3: the caller's promise.
    unsafe { call("ibv_detach_mcast", &FUNCTION, c"ibv_detach_mcast", (qp, group, lid)) }
}

/// Calls one of these functions.
///
/// # Safety
///
/// The queue pair must be alive.
unsafe fn call(
    verb: &'static str,
    cache: &Cache,
    name: &CStr,
    (qp, group, lid): (*mut ibv_qp, Gid, u16),
) -> Result<(), VerbError> {
    // SAFETY: S3: both functions have this signature, verbs.h.
    let function = unsafe { Library::Ibverbs.cached(cache, name) };
    let function = function.ok_or(VerbError::new(verb, VerbError::EOPNOTSUPP))?;
    let group = ibv_gid { raw: group.0 };
    // SAFETY: S3: the queue pair is alive, the group local.
    sys::status(verb, unsafe { function(qp, &raw const group, lid) })
}

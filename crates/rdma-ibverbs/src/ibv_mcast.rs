//! Attachment to multicast groups: `ibv_attach_mcast(3)`.

#![allow(unsafe_code)]

use super::sys;
use crate::ffi::*;
use rdma_provider::VerbError;
use rdma_provider::types::Gid;

/// Attaches a queue pair to a group.
///
/// # Safety
///
/// The queue pair must be alive.
pub(super) unsafe fn attach(qp: *mut ibv_qp, group: Gid, lid: u16) -> Result<(), VerbError> {
    let group = ibv_gid { raw: group.0 };
    // SAFETY: S3: the queue pair is alive, the group local.
    sys::status("ibv_attach_mcast", unsafe { ibv_attach_mcast(qp, &raw const group, lid) })
}

/// Detaches a queue pair from a group.
///
/// # Safety
///
/// The queue pair must be alive.
pub(super) unsafe fn detach(qp: *mut ibv_qp, group: Gid, lid: u16) -> Result<(), VerbError> {
    let group = ibv_gid { raw: group.0 };
    // SAFETY: S3: as above.
    sys::status("ibv_detach_mcast", unsafe { ibv_detach_mcast(qp, &raw const group, lid) })
}

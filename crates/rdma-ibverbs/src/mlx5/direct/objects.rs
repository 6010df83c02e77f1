//! The memory and registers behind objects of libmlx5: `mlx5dv_init_obj(3)`.

use std::ffi::{c_int, c_void};
use std::ptr::NonNull;
use std::{mem, ptr};

use crate::ffi::*;
use rdma_provider::VerbError;

use super::layout::Route;
use crate::sys;

// `enum mlx5dv_obj_type`.
const QP: u64 = 1;
const CQ: u64 = 1 << 1;
const SRQ: u64 = 1 << 2;
const AH: u64 = 1 << 5;

/// The format of mini-CQEs of receives. Mini-CQEs of requests have a fixed
/// format.
pub(super) const HASH: u32 = mlx5dv_cqe_comp_res_format::MLX5DV_CQE_RES_FORMAT_HASH;

/// The arguments of `ibv_create_cq(3)`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct NewCompletionQueue {
    pub(crate) context: NonNull<ibv_context>,
    pub(crate) capacity: c_int,
    pub(crate) cq_context: *mut c_void,
    pub(crate) channel: *mut ibv_comp_channel,
    pub(crate) vector: c_int,
}

impl NewCompletionQueue {
    /// Returns the arguments of `verb`, which creates an extended queue.
    pub(crate) fn extended(self, verb: &'static str) -> Result<ibv_cq_init_attr_ex, VerbError> {
        let invalid = |_| VerbError::new(verb, VerbError::EINVAL);
        let mut attr = blank::<ibv_cq_init_attr_ex>();
        attr.cqe = self.capacity.try_into().map_err(invalid)?;
        attr.comp_vector = self.vector.try_into().map_err(invalid)?;
        (attr.cq_context, attr.channel) = (self.cq_context, self.channel);
        Ok(attr)
    }
}

/// Creates a completion queue with compressed entries. Receives have the format `HASH`.
///
/// # Safety
///
/// The context is open, a device of libmlx5, and owns the channel, if any.
pub(crate) unsafe fn create_compressed(
    new: NewCompletionQueue,
) -> Result<NonNull<ibv_cq>, VerbError> {
    const NAME: &str = "mlx5dv_create_cq";
    let mut attr = new.extended(NAME)?;
    let mut compressed = blank::<mlx5dv_cq_init_attr>();
    let mask = mlx5dv_cq_init_attr_mask::MLX5DV_CQ_INIT_ATTR_MASK_COMPRESSED_CQE;
    compressed.comp_mask = mask.0.into();
    compressed.cqe_comp_res_format = HASH as u8;
    // SAFETY: S3: the caller's promise; the attributes are local.
    let raw = unsafe { mlx5dv_create_cq(new.context.as_ptr(), &raw mut attr, &raw mut compressed) };
    // An extended queue begins with a plain one, `ibv_cq_ex_to_cq`.
    sys::handle(NAME, raw.cast())
}

/// Calls `mlx5dv_init_obj` for one object.
///
/// # Safety
///
/// The input of `object` is alive and belongs to libmlx5.
unsafe fn call(mut object: mlx5dv_obj, kind: u64) -> Result<(), VerbError> {
    const NAME: &str = "mlx5dv_init_obj";
    // SAFETY: S3: the caller's promise.
    sys::status(NAME, unsafe { mlx5dv_init_obj(&raw mut object, kind) })
}

fn blank<T>() -> T {
    const { assert!(!mem::needs_drop::<T>()) };
    // SAFETY: S3: only used for the C structures below, for which zeros are valid.
    unsafe { mem::zeroed() }
}

/// Returns the memory and registers of a queue pair.
///
/// # Safety
///
/// `qp` is a live queue pair of libmlx5, but no DC target.
pub(super) unsafe fn queue_pair(qp: NonNull<ibv_qp>) -> Result<mlx5dv_qp, VerbError> {
    let (mut object, mut out) = (blank::<mlx5dv_obj>(), blank::<mlx5dv_qp>());
    (object.qp.in_, object.qp.out) = (qp.as_ptr(), &raw mut out);
    // SAFETY: S3: the caller's promise.
    unsafe { call(object, QP) }.map(|()| out)
}

/// Returns the memory and registers of a completion queue. From then on, libmlx5 does not consume
/// from it, not even when a queue pair is reset or destroyed.
///
/// # Safety
///
/// `cq` is a live completion queue of libmlx5.
pub(super) unsafe fn completion_queue(cq: NonNull<ibv_cq>) -> Result<mlx5dv_cq, VerbError> {
    let (mut object, mut out) = (blank::<mlx5dv_obj>(), blank::<mlx5dv_cq>());
    (object.cq.in_, object.cq.out) = (cq.as_ptr(), &raw mut out);
    // SAFETY: S3: the caller's promise.
    unsafe { call(object, CQ) }.map(|()| out)
}

/// Returns the memory of a shared receive queue.
///
/// # Safety
///
/// `srq` is a live shared receive queue of libmlx5.
pub(super) unsafe fn shared_receive_queue(srq: NonNull<ibv_srq>) -> Result<mlx5dv_srq, VerbError> {
    let (mut object, mut out) = (blank::<mlx5dv_obj>(), blank::<mlx5dv_srq>());
    (object.srq.in_, object.srq.out) = (srq.as_ptr(), &raw mut out);
    // SAFETY: S3: the caller's promise.
    unsafe { call(object, SRQ) }.map(|()| out)
}

/// Returns the route of an address handle in the adapter's form.
///
/// # Safety
///
/// `ah` is a live address handle of libmlx5.
pub(crate) unsafe fn route(ah: NonNull<ibv_ah>) -> Result<Route, VerbError> {
    const { assert!(size_of::<Route>() == size_of::<mlx5_wqe_av>()) };
    let mut object = blank::<mlx5dv_obj>();
    let mut out = mlx5dv_ah { av: ptr::null_mut(), comp_mask: 0 };
    (object.ah.in_, object.ah.out) = (ah.as_ptr(), &raw mut out);
    // SAFETY: S3: the caller's promise.
    unsafe { call(object, AH) }?;
    // SAFETY: S3: libmlx5 returns the address of a route within the handle.
    Ok(unsafe { out.av.cast::<Route>().read_unaligned() })
}

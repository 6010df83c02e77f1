//! Dynamically connected transport (DC) of libmlx5, `mlx5dv_create_qp(3)`: initiators, targets.

#![allow(unsafe_code)]

use std::mem;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU32, Ordering};

use crate::ffi::*;
use rdma_provider::locks::Mutex;

use super::direct;
use crate::owned::Owned;
use crate::{Ibverbs, convert, sys};
use rdma_provider::VerbError;
use rdma_provider::contract::{self, DctInit, QpInit};
use rdma_provider::types::{QpAttr, QpState, Qpn, Transport};

/// The error of a device without DC.
const NONE: VerbError = VerbError::new("mlx5dv_create_qp", VerbError::EOPNOTSUPP);

/// Creates a DC queue pair in protection domain `pd`.
fn create(
    pd: NonNull<ibv_pd>,
    attr: &mut ibv_qp_init_attr_ex,
    dc: mlx5dv_dc_init_attr,
    flags: Option<mlx5dv_qp_create_flags>,
) -> Result<NonNull<ibv_qp>, VerbError> {
    attr.qp_type = convert::qp_type(Transport::Dci);
    attr.pd = pd.as_ptr();
    attr.comp_mask |= ibv_qp_init_attr_mask::IBV_QP_INIT_ATTR_PD.0;
    // SAFETY: S3: zeros are valid.
    let mut special: mlx5dv_qp_init_attr = unsafe { mem::zeroed() };
    special.comp_mask = mlx5dv_qp_init_attr_mask::MLX5DV_QP_INIT_ATTR_MASK_DC.0.into();
    if let Some(flags) = flags {
        let field = mlx5dv_qp_init_attr_mask::MLX5DV_QP_INIT_ATTR_MASK_QP_CREATE_FLAGS;
        special.comp_mask |= u64::from(field.0);
        special.create_flags = flags.0;
    }
    special.dc_init_attr = dc;
    // SAFETY: S3: domain and queues are alive, the attributes local.
    let raw = unsafe { mlx5dv_create_qp(pd.as_ref().context, &raw mut *attr, &raw mut special) };
    sys::handle("mlx5dv_create_qp", raw)
}

/// Returns the type of DC queue pair, with the key of a target.
fn kind(dc_type: mlx5dv_dc_type::Type, key: u64) -> mlx5dv_dc_init_attr {
    // SAFETY: S3: zeros are valid.
    let mut kind: mlx5dv_dc_init_attr = unsafe { mem::zeroed() };
    kind.dc_type = dc_type;
    kind.dct_access_key = key;
    kind
}

/// A DC initiator, for `ibv_wr_*` and `mlx5dv_wr_set_dc_addr`.
pub(crate) struct Initiator {
    pub(crate) raw: NonNull<ibv_qp>,
    pub(crate) extended: NonNull<ibv_qp_ex>,
    pub(crate) dc: NonNull<mlx5dv_qp_ex>,
    pub(crate) granted: ibv_qp_cap,
}

impl Initiator {
    pub(crate) fn new(
        pd: NonNull<ibv_pd>,
        init: &QpInit<'_, Ibverbs>,
        operations: ibv_qp_create_send_ops_flags,
    ) -> Result<Self, VerbError> {
        // SAFETY: S3: zeros are valid.
        let mut attr: ibv_qp_init_attr_ex = unsafe { mem::zeroed() };
        attr.send_cq = init.send_cq.raw();
        attr.recv_cq = init.recv_cq.raw();
        attr.cap = convert::caps_to(init.caps);
        attr.comp_mask = ibv_qp_init_attr_mask::IBV_QP_INIT_ATTR_SEND_OPS_FLAGS.0;
        attr.send_ops_flags = operations.0.into();
        // libmlx5 turns scatter to CQE off for initiators.
        let raw = create(pd, &mut attr, kind(mlx5dv_dc_type::MLX5DV_DCTYPE_DCI, 0), None)?;
        // SAFETY: S3: just created, with extended operations.
        let extended = unsafe { ibv_qp_to_qp_ex(raw.as_ptr()) };
        // SAFETY: S3: as above; not null.
        let dc = NonNull::new(extended)
            .and_then(|qp| NonNull::new(unsafe { mlx5dv_qp_ex_from_ibv_qp_ex(qp.as_ptr()) }));
        match (NonNull::new(extended), dc) {
            (Some(extended), Some(dc)) => Ok(Self { raw, extended, dc, granted: attr.cap }),
            _ => {
                // SAFETY: S3: just created, not used again.
                sys::log_failure("ibv_destroy_qp", unsafe { ibv_destroy_qp(raw.as_ptr()) });
                Err(NONE)
            }
        }
    }
}

/// A DC target, represented by an `ibv_qp`.
#[derive(Debug)]
pub struct Dct {
    raw: Owned<ibv_qp>,
    direct: Option<direct::Target>,
    /// Number of the target; 0 before RTR.
    number: AtomicU32,
    /// Kept here, because the kernel reports nothing before RTR and no changes afterwards.
    known: Mutex<(QpState, QpAttr)>,
}

impl Dct {
    /// Creates a target; `flags` are libmlx5's creation flags.
    pub(crate) fn new(
        pd: NonNull<ibv_pd>,
        init: &DctInit<'_, Ibverbs>,
        flags: Option<mlx5dv_qp_create_flags>,
    ) -> Result<Self, VerbError> {
        // SAFETY: S3: zeros are valid.
        let mut attr: ibv_qp_init_attr_ex = unsafe { mem::zeroed() };
        // A target does not send, but the kernel requires a send queue.
        attr.send_cq = init.recv_cq.raw();
        attr.recv_cq = init.recv_cq.raw();
        attr.srq = init.srq.raw();
        let raw =
            create(pd, &mut attr, kind(mlx5dv_dc_type::MLX5DV_DCTYPE_DCT, init.key.0), flags)?;
        // SAFETY: S3: just created.
        let raw = unsafe { Owned::new(raw) };
        let known = QpAttr { state: Some(QpState::Reset), ..QpAttr::default() };
        let direct = match (init.srq.direct(), init.recv_cq.direct()) {
            (Some(srq), Some(queue)) => Some(direct::Target::new(srq, queue)),
            _ => None,
        };
        let known = Mutex::new((QpState::Reset, known));
        Ok(Self { raw, direct, number: AtomicU32::new(0), known })
    }
}

impl contract::Dct for Dct {
    fn number(&self) -> Option<Qpn> {
        match self.number.load(Ordering::Acquire) {
            0 => None,
            number => Some(Qpn(number)),
        }
    }

    fn modify(&self, attr: &QpAttr) -> Result<(), VerbError> {
        let mut known = self.known.lock();
        let mut raw = convert::qp_attr_to(attr);
        let qp = self.raw.get();
        let mut modify = || {
            let mask = attr.mask().bits() as i32;
            // SAFETY: S3: the target is alive, the attributes local.
            let result = unsafe { ibv_modify_qp(qp.as_ptr(), &raw mut raw, mask) };
            sys::status("ibv_modify_qp", result)?;
            // SAFETY: S3: the target is alive; the call has written the number, under our lock.
            let number = unsafe { ptr::read(&raw const (*qp.as_ptr()).qp_num) };
            Ok((attr.state == Some(QpState::Rtr)).then_some(number))
        };
        let number = match &self.direct {
            Some(direct) => direct.modify(&mut modify)?,
            None => modify()?,
        };
        let before = known.1;
        known.0 = attr.state.unwrap_or(known.0);
        known.1 = QpAttr {
            state: Some(known.0),
            access: attr.access.or(before.access),
            pkey_index: attr.pkey_index.or(before.pkey_index),
            port: attr.port.or(before.port),
            address: attr.address.or(before.address),
            path_mtu: attr.path_mtu.or(before.path_mtu),
            min_rnr_timer: attr.min_rnr_timer.or(before.min_rnr_timer),
            ..before
        };
        if let Some(number) = number {
            self.number.store(number, Ordering::Release);
        }
        Ok(())
    }

    fn query(&self) -> Result<(QpState, QpAttr), VerbError> {
        Ok(*self.known.lock())
    }

    fn destroy(&mut self) -> Result<(), VerbError> {
        let number = self.number().map(|number| number.0);
        match &self.direct {
            Some(direct) if !self.raw.is_destroyed() => {
                direct.destroy(number, || self.raw.destroy())
            }
            _ => self.raw.destroy(),
        }
    }
}

impl Drop for Dct {
    fn drop(&mut self) {
        if let Err(error) = contract::Dct::destroy(self) {
            rdma_provider::error!(%error, "failed to destroy DC target; leaking it");
            self.raw.leak();
        }
    }
}

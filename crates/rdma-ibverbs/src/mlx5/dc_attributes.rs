//! Whether a device has dynamically connected transport, and its limits.

#![allow(unsafe_code)]

use std::mem;
use std::ptr::NonNull;

use crate::ffi::*;

use crate::ibv_cq::Cq;
use crate::ibv_pd::Pd;
use crate::posting::Posting;
use crate::sys;
use rdma_provider::VerbError;
use rdma_provider::contract::{CqInit, DctInit, Pd as _, QpInit};
use rdma_provider::types::{DcAttr, DcKey, DeviceAttr, DirectConfig, QpCaps, SrqCaps, Transport};

/// Returns the device's DC capabilities; `None` without feature `mlx5` or libmlx5, or for another
/// driver's device.
pub(crate) fn query(context: NonNull<ibv_context>, device: &DeviceAttr) -> Option<DcAttr> {
    if !cfg!(feature = "mlx5") {
        return None;
    }
    use mlx5dv_context_comp_mask as field;
    // SAFETY: S3: zeros are valid.
    let mut found: mlx5dv_context = unsafe { mem::zeroed() };
    found.comp_mask = field::MLX5DV_CONTEXT_MASK_MAX_DC_RD_ATOM.0.into();
    // SAFETY: S3: the context is open, the result local; fails for another driver's device.
    let asked = sys::status("mlx5dv_query_device", unsafe {
        mlx5dv_query_device(context.as_ptr(), &raw mut found)
    });
    if let Err(error) = asked {
        rdma_provider::debug!(%error, "failed to query mlx5 attributes; reporting no DC support");
        return None;
    }
    // Older libraries ignore unknown fields and clear their bits in the mask.
    let has = |bit: field| found.comp_mask & u64::from(bit.0) != 0;
    // Zero may mean that the library could not query the firmware: use the RC limit then.
    let limit = |value: u64, otherwise: u8| match u8::try_from(value) {
        _ if !has(field::MLX5DV_CONTEXT_MASK_MAX_DC_RD_ATOM) => otherwise,
        Ok(0) => otherwise,
        Ok(value) => value,
        Err(_) => u8::MAX,
    };
    let attr = DcAttr::new(
        limit(found.max_dc_rd_atom, device.max_qp_rd_atom),
        limit(found.max_dc_init_rd_atom, device.max_qp_init_rd_atom),
    );
    // No attribute reports DC support, so create an initiator and a target.
    let mut device = device.clone();
    device.dc = Some(attr);
    match try_both(context, device) {
        Ok(()) => Some(attr),
        Err(error) => {
            rdma_provider::debug!(
                %error,
                "failed to create a DC initiator or target; reporting no DC support"
            );
            None
        }
    }
}

fn try_both(context: NonNull<ibv_context>, device: DeviceAttr) -> Result<(), VerbError> {
    let pd = Pd::new(context, device, Posting::Extended)?;
    let cq = Cq::new(context, &CqInit::new(2), None)?;
    let srq = pd.create_srq(SrqCaps { max_wr: 1, max_sge: 1 })?;
    let caps =
        QpCaps { max_send_wr: 1, max_recv_wr: 0, max_send_sge: 1, max_recv_sge: 0, max_inline: 0 };
    pd.create_qp(&QpInit {
        transport: Transport::Dci,
        send_cq: &cq,
        recv_cq: &cq,
        srq: None,
        caps,
        direct: DirectConfig::DEFAULT,
    })?;
    pd.create_dct(&DctInit { srq: &srq, recv_cq: &cq, key: DcKey(0) })?;
    Ok(())
}

//! DC targets and initiators, created by `mlx5dv_create_qp(3)`.

use std::ffi::c_void;
use std::sync::Arc;

use rdma_ibverbs::ffi::*;

use super::{ALL, Ah, Cq, Mr, Pd, Qp, Queues, SIGNALED, Srq, zeroed};

/// The access key of all targets.
pub const KEY: u64 = 0x1122_3344_5566_7788;

/// Creates a DC target over `srq` and makes it ready.
pub fn dc_target(pd: &Arc<Pd>, cq: &Arc<Cq>, srq: &Arc<Srq>) -> Qp {
    let target = dc_target_at_reset(pd, cq, srq);
    assert_eq!(target.number(), 0, "a target has no number before it is ready");
    dc_target_up(&target, pd.1.route());
    assert_ne!(target.number(), 0);
    target
}

pub fn dc_target_at_reset(pd: &Arc<Pd>, cq: &Arc<Cq>, srq: &Arc<Srq>) -> Qp {
    let queues = Queues { srq: Some(srq.clone()), ..Queues::one(cq) };
    let mut dv: mlx5dv_qp_init_attr = zeroed();
    dv.comp_mask = mlx5dv_qp_init_attr_mask::MLX5DV_QP_INIT_ATTR_MASK_DC.0.into();
    dv.dc_init_attr.dc_type = mlx5dv_dc_type::MLX5DV_DCTYPE_DCT;
    dv.dc_init_attr.dct_access_key = KEY;
    let mut init: ibv_qp_init_attr_ex = zeroed();
    init.comp_mask = ibv_qp_init_attr_mask::IBV_QP_INIT_ATTR_PD.0;
    init.srq = srq.0;
    create_dc(pd, queues, init, dv)
}

pub fn dc_target_up(target: &Qp, route: ibv_ah_attr) {
    use ibv_qp_attr_mask as m;
    let mut attr: ibv_qp_attr = zeroed();
    attr.qp_state = ibv_qp_state::IBV_QPS_INIT;
    attr.port_num = 1;
    attr.qp_access_flags = ALL;
    let mask = m::IBV_QP_STATE | m::IBV_QP_PKEY_INDEX | m::IBV_QP_PORT | m::IBV_QP_ACCESS_FLAGS;
    assert_eq!(target.modify(&attr, mask), 0, "to INIT");
    attr.qp_state = ibv_qp_state::IBV_QPS_RTR;
    attr.path_mtu = ibv_mtu::IBV_MTU_4096;
    attr.min_rnr_timer = 1;
    attr.ah_attr = route;
    let mask = m::IBV_QP_STATE | m::IBV_QP_MIN_RNR_TIMER | m::IBV_QP_AV | m::IBV_QP_PATH_MTU;
    assert_eq!(target.modify(&attr, mask), 0, "to RTR");
}

/// Creates an initiator in RTS.
pub fn dc_initiator(pd: &Arc<Pd>, cq: &Arc<Cq>) -> Qp {
    use ibv_qp_create_send_ops_flags as o;
    let mut dv: mlx5dv_qp_init_attr = zeroed();
    dv.comp_mask = mlx5dv_qp_init_attr_mask::MLX5DV_QP_INIT_ATTR_MASK_DC.0.into();
    dv.dc_init_attr.dc_type = mlx5dv_dc_type::MLX5DV_DCTYPE_DCI;
    let mut init: ibv_qp_init_attr_ex = zeroed();
    let mask = ibv_qp_init_attr_mask::IBV_QP_INIT_ATTR_PD
        | ibv_qp_init_attr_mask::IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
    init.comp_mask = mask.0;
    let operations = o::IBV_QP_EX_WITH_RDMA_WRITE
        | o::IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM
        | o::IBV_QP_EX_WITH_RDMA_READ
        | o::IBV_QP_EX_WITH_SEND
        | o::IBV_QP_EX_WITH_SEND_WITH_IMM
        | o::IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP
        | o::IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD;
    init.send_ops_flags = operations.0.into();
    init.cap = ibv_qp_cap {
        max_send_wr: 32,
        max_recv_wr: 0,
        max_send_sge: 2,
        max_recv_sge: 0,
        max_inline_data: 64,
    };
    let qp = create_dc(pd, Queues::one(cq), init, dv);
    dc_initiator_up(&qp, |_| {});
    qp
}

/// Moves an initiator from RESET to RTS.
pub fn dc_initiator_up(qp: &Qp, change: impl Fn(&mut ibv_qp_attr)) {
    use ibv_qp_attr_mask as m;
    let mut attr: ibv_qp_attr = zeroed();
    attr.qp_state = ibv_qp_state::IBV_QPS_INIT;
    attr.port_num = 1;
    attr.path_mtu = ibv_mtu::IBV_MTU_4096;
    attr.timeout = 14;
    attr.retry_cnt = 2;
    attr.rnr_retry = 3;
    attr.max_rd_atomic = 4;
    change(&mut attr);
    assert_eq!(
        qp.modify(&attr, m::IBV_QP_STATE | m::IBV_QP_PKEY_INDEX | m::IBV_QP_PORT),
        0,
        "to INIT"
    );
    attr.qp_state = ibv_qp_state::IBV_QPS_RTR;
    assert_eq!(qp.modify(&attr, m::IBV_QP_STATE | m::IBV_QP_PATH_MTU), 0, "to RTR");
    attr.qp_state = ibv_qp_state::IBV_QPS_RTS;
    let mask = m::IBV_QP_STATE | m::IBV_QP_SQ_PSN | m::IBV_QP_TIMEOUT | m::IBV_QP_RETRY_CNT;
    let mask = mask | m::IBV_QP_RNR_RETRY | m::IBV_QP_MAX_QP_RD_ATOMIC;
    assert_eq!(qp.modify(&attr, mask), 0, "to RTS");
}

fn create_dc(
    pd: &Arc<Pd>,
    queues: Queues,
    mut init: ibv_qp_init_attr_ex,
    mut dv: mlx5dv_qp_init_attr,
) -> Qp {
    init.qp_type = ibv_qp_type::IBV_QPT_DRIVER;
    init.send_cq = queues.send.0;
    init.recv_cq = queues.recv.0;
    init.pd = pd.0;
    let raw = unsafe { mlx5dv_create_qp(pd.1.0, &mut init, &mut dv) };
    assert!(!raw.is_null(), "{}", std::io::Error::last_os_error());
    Qp { raw, pd: pd.clone(), queues }
}

#[derive(Clone, Copy)]
pub enum Dc<'a> {
    Write(ibv_sge, &'a Mr, u64),
    WriteInline(&'a [u8], &'a Mr, u64),
    WriteImm(ibv_sge, &'a Mr, u64, u32),
    Read(ibv_sge, &'a Mr, u64),
    Send(ibv_sge),
    FetchAdd(ibv_sge, &'a Mr, u64, u64),
    CompareSwap(ibv_sge, &'a Mr, u64, u64, u64),
}

/// The destination: address handle, number and access key.
pub type To<'a> = (&'a Ah, u32, u64);

pub fn post_dc(qp: &Qp, requests: &[(u64, Dc<'_>, To<'_>)]) {
    unsafe {
        let x = ibv_qp_to_qp_ex(qp.raw);
        let mx = mlx5dv_qp_ex_from_ibv_qp_ex(x);
        assert!(!x.is_null() && !mx.is_null());
        ibv_wr_start(x);
        for &(id, request, (ah, number, key)) in requests {
            (*x).wr_id = id;
            (*x).wr_flags = SIGNALED;
            let set = |sge: ibv_sge| ibv_wr_set_sge(x, sge.lkey, sge.addr, sge.length);
            match request {
                Dc::Write(sge, mr, from) => {
                    ibv_wr_rdma_write(x, mr.key(), mr.address() + from);
                    set(sge);
                }
                Dc::WriteInline(bytes, mr, from) => {
                    ibv_wr_rdma_write(x, mr.key(), mr.address() + from);
                    ibv_wr_set_inline_data(
                        x,
                        bytes.as_ptr().cast_mut().cast::<c_void>(),
                        bytes.len(),
                    );
                }
                Dc::WriteImm(sge, mr, from, immediate) => {
                    ibv_wr_rdma_write_imm(x, mr.key(), mr.address() + from, immediate.to_be());
                    set(sge);
                }
                Dc::Read(sge, mr, from) => {
                    ibv_wr_rdma_read(x, mr.key(), mr.address() + from);
                    set(sge);
                }
                Dc::Send(sge) => {
                    ibv_wr_send(x);
                    set(sge);
                }
                Dc::FetchAdd(sge, mr, from, add) => {
                    ibv_wr_atomic_fetch_add(x, mr.key(), mr.address() + from, add);
                    set(sge);
                }
                Dc::CompareSwap(sge, mr, from, compare, swap) => {
                    ibv_wr_atomic_cmp_swp(x, mr.key(), mr.address() + from, compare, swap);
                    set(sge);
                }
            }
            mlx5dv_wr_set_dc_addr(mx, ah.0, number, key);
        }
        assert_eq!(ibv_wr_complete(x), 0);
    }
}

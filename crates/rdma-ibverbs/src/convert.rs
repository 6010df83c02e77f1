//! Conversions between our types and libibverbs structures.

#![allow(unsafe_code)]

use std::mem;
use std::ptr;

use crate::ffi::*;

use rdma_provider::types::{
    Access, AckTimeout, AddressVector, Gid, LinkLayer, Lkey, Mtu, PhysicalState, PortNum,
    PortState, Psn, Qkey, QpAttr, QpAttrMask, QpCaps, QpState, Qpn, RnrTimer, SendFlags, Sge,
    StaticRate, Transport, WcFlags, WcOpcode, WindowBind, WorkCompletion,
};

// Scatter/gather lists are passed without conversion.
const _: () = {
    assert!(size_of::<Sge>() == size_of::<ibv_sge>() && align_of::<Sge>() == align_of::<ibv_sge>());
    assert!(mem::offset_of!(Sge, addr) == mem::offset_of!(ibv_sge, addr));
    assert!(mem::offset_of!(Sge, length) == mem::offset_of!(ibv_sge, length));
    assert!(mem::offset_of!(Sge, lkey) == mem::offset_of!(ibv_sge, lkey));
    assert!(size_of::<Lkey>() == size_of::<u32>());
};

/// Returns the list for libibverbs, which does not write to it.
#[inline]
pub(super) fn sge_list(sges: &[Sge]) -> *mut ibv_sge {
    sges.as_ptr().cast_mut().cast()
}

/// Converts to the `access` flags of `ibv_reg_mr(3)`.
pub(super) fn access_flags(access: Access) -> u32 {
    const PAIRS: [(Access, ibv_access_flags); 8] = [
        (Access::LOCAL_WRITE, ibv_access_flags::IBV_ACCESS_LOCAL_WRITE),
        (Access::REMOTE_WRITE, ibv_access_flags::IBV_ACCESS_REMOTE_WRITE),
        (Access::REMOTE_READ, ibv_access_flags::IBV_ACCESS_REMOTE_READ),
        (Access::REMOTE_ATOMIC, ibv_access_flags::IBV_ACCESS_REMOTE_ATOMIC),
        (Access::MW_BIND, ibv_access_flags::IBV_ACCESS_MW_BIND),
        (Access::ON_DEMAND, ibv_access_flags::IBV_ACCESS_ON_DEMAND),
        (Access::RELAXED_ORDERING, ibv_access_flags::IBV_ACCESS_RELAXED_ORDERING),
        (Access::HUGE_PAGES, ibv_access_flags::IBV_ACCESS_HUGETLB),
    ];
    PAIRS
        .iter()
        .filter(|(ours, _)| access.contains(*ours))
        .fold(0, |flags, (_, theirs)| flags | theirs.0)
}

/// Returns the region and range of a binding.
pub(super) fn bind_info(bind: &WindowBind) -> ibv_mw_bind_info {
    ibv_mw_bind_info {
        mr: ptr::with_exposed_provenance_mut(bind.region),
        addr: bind.addr,
        length: bind.len,
        mw_access_flags: access_flags(bind.access),
    }
}

fn access_of(flags: u32) -> Access {
    Access::all().iter().filter(|&access| flags & access_flags(access) != 0).collect()
}

/// Converts to the `send_flags` of `ibv_post_send(3)`, without IBV_SEND_INLINE.
#[inline]
pub(super) fn send_flags(flags: SendFlags) -> u32 {
    const {
        assert!(SendFlags::FENCE.bits() as u32 == ibv_send_flags::IBV_SEND_FENCE.0);
        assert!(SendFlags::SIGNALED.bits() as u32 == ibv_send_flags::IBV_SEND_SIGNALED.0);
        assert!(SendFlags::SOLICITED.bits() as u32 == ibv_send_flags::IBV_SEND_SOLICITED.0);
    }
    u32::from(flags.bits())
}

pub(super) fn qp_type(transport: Transport) -> ibv_qp_type::Type {
    match transport {
        Transport::Rc => ibv_qp_type::IBV_QPT_RC,
        Transport::Uc => ibv_qp_type::IBV_QPT_UC,
        Transport::Ud => ibv_qp_type::IBV_QPT_UD,
        Transport::Dci => ibv_qp_type::IBV_QPT_DRIVER,
    }
}

pub(super) fn caps_to(caps: QpCaps) -> ibv_qp_cap {
    ibv_qp_cap {
        max_send_wr: caps.max_send_wr,
        max_recv_wr: caps.max_recv_wr,
        max_send_sge: caps.max_send_sge,
        max_recv_sge: caps.max_recv_sge,
        max_inline_data: caps.max_inline,
    }
}

pub(super) fn caps_from(cap: &ibv_qp_cap) -> QpCaps {
    QpCaps {
        max_send_wr: cap.max_send_wr,
        max_recv_wr: cap.max_recv_wr,
        max_send_sge: cap.max_send_sge,
        max_recv_sge: cap.max_recv_sge,
        max_inline: cap.max_inline_data,
    }
}

pub(super) fn gid_from(gid: &ibv_gid) -> Gid {
    // SAFETY: S4: any 16 bytes are a valid GID.
    Gid(unsafe { gid.raw })
}

pub(super) fn mtu_from(code: ibv_mtu::Type) -> Mtu {
    // Unknown codes are larger than all in the specification.
    u8::try_from(code).ok().and_then(Mtu::from_code).unwrap_or(if code == 0 {
        Mtu::Mtu256
    } else {
        Mtu::Mtu4096
    })
}

pub(super) fn port_state(state: ibv_port_state::Type) -> PortState {
    match state {
        ibv_port_state::IBV_PORT_DOWN => PortState::Down,
        ibv_port_state::IBV_PORT_INIT => PortState::Initializing,
        ibv_port_state::IBV_PORT_ARMED => PortState::Armed,
        ibv_port_state::IBV_PORT_ACTIVE => PortState::Active,
        other => PortState::Other(u8::try_from(other).unwrap_or(u8::MAX)),
    }
}

pub(super) fn physical_state(code: u8) -> PhysicalState {
    match code {
        1 => PhysicalState::Sleep,
        2 => PhysicalState::Polling,
        3 => PhysicalState::Disabled,
        4 => PhysicalState::Training,
        5 => PhysicalState::LinkUp,
        6 => PhysicalState::ErrorRecovery,
        7 => PhysicalState::Test,
        other => PhysicalState::Other(other),
    }
}

/// Returns the lanes for `active_width`; 0 if it is unknown.
pub(super) fn lanes(width: u8) -> u8 {
    match width {
        1 => 1,
        2 => 4,
        4 => 8,
        8 => 12,
        16 => 2,
        _ => 0,
    }
}

/// Returns the rate of a lane for `active_speed`; 0 if it is unknown. The kernel reports XDR as NDR
/// here.
pub(super) fn lane_mbps(speed: u8) -> u32 {
    match speed {
        1 => 2_500,
        2 => 5_000,
        4 | 8 => 10_000,
        16 => 14_000,
        32 => 25_000,
        64 => 50_000,
        128 => 100_000,
        _ => 0,
    }
}

pub(super) fn link_layer(code: u8) -> LinkLayer {
    match code {
        // Unspecified means InfiniBand, `ibv_query_port(3)`.
        0 | 1 => LinkLayer::InfiniBand,
        2 => LinkLayer::Ethernet,
        other => LinkLayer::Other(other),
    }
}

pub(super) fn address_to(address: &AddressVector) -> ibv_ah_attr {
    // Within an InfiniBand subnet, packets are routed by LID without a global header.
    let within_subnet = address.dlid != 0 && address.dgid.0[..8] == [0xfe, 0x80, 0, 0, 0, 0, 0, 0];
    ibv_ah_attr {
        grh: ibv_global_route {
            dgid: ibv_gid { raw: address.dgid.0 },
            flow_label: address.flow_label,
            sgid_index: address.sgid_index,
            hop_limit: address.hop_limit,
            traffic_class: address.traffic_class,
        },
        dlid: address.dlid,
        sl: address.service_level,
        src_path_bits: 0,
        static_rate: address.static_rate.code(),
        is_global: u8::from(!address.dgid.is_zero() && !within_subnet),
        port_num: address.port.0,
    }
}

pub(super) fn address_from(attr: &ibv_ah_attr) -> AddressVector {
    AddressVector {
        port: PortNum(attr.port_num),
        dgid: gid_from(&attr.grh.dgid),
        sgid_index: attr.grh.sgid_index,
        dlid: attr.dlid,
        service_level: attr.sl,
        hop_limit: attr.grh.hop_limit,
        traffic_class: attr.grh.traffic_class,
        flow_label: attr.grh.flow_label,
        static_rate: StaticRate::from_code(attr.static_rate),
    }
}

fn state_from(code: ibv_qp_state::Type) -> QpState {
    // An unknown state accepts no work.
    QpState::ALL.into_iter().find(|&state| state as u32 == code).unwrap_or(QpState::Err)
}

/// Returns false if a value exceeds its field on the wire or in the device; drivers truncate it
/// silently.
pub(super) fn fits(attr: &QpAttr) -> bool {
    let three_bits = |value: Option<u8>| value.is_none_or(|value| value < 1 << 3);
    three_bits(attr.retry_count)
        && three_bits(attr.rnr_retry)
        && attr.dest_qpn.is_none_or(|qpn| qpn.0 < 1 << 24)
}

/// Converts to the attributes of `ibv_modify_qp(3)`. [`QpAttr::mask`] selects the valid ones, with
/// the same bits.
pub(super) fn qp_attr_to(attr: &QpAttr) -> ibv_qp_attr {
    // SAFETY: S3: zeros are valid.
    let mut raw: ibv_qp_attr = unsafe { mem::zeroed() };
    raw.qp_state = attr.state.map_or(0, |state| state as u32);
    raw.cur_qp_state = attr.current_state.map_or(0, |state| state as u32);
    raw.en_sqd_async_notify = u8::from(attr.notify_drained.unwrap_or(false));
    raw.qp_access_flags = attr.access.map_or(0, access_flags);
    raw.pkey_index = attr.pkey_index.unwrap_or(0);
    raw.port_num = attr.port.map_or(0, |port| port.0);
    raw.qkey = attr.qkey.map_or(0, |key| key.0);
    raw.path_mtu = attr.path_mtu.map_or(0, |mtu| mtu as u32);
    raw.timeout = attr.timeout.map_or(0, AckTimeout::code);
    raw.retry_cnt = attr.retry_count.unwrap_or(0);
    raw.rnr_retry = attr.rnr_retry.unwrap_or(0);
    raw.rq_psn = attr.rq_psn.map_or(0, Psn::value);
    raw.sq_psn = attr.sq_psn.map_or(0, Psn::value);
    raw.max_rd_atomic = attr.max_rd_atomic.unwrap_or(0);
    raw.max_dest_rd_atomic = attr.max_dest_rd_atomic.unwrap_or(0);
    raw.min_rnr_timer = attr.min_rnr_timer.map_or(0, RnrTimer::code);
    raw.dest_qp_num = attr.dest_qpn.map_or(0, |qpn| qpn.0);
    if let Some(address) = &attr.address {
        raw.ah_attr = address_to(address);
    }
    raw
}

/// Converts the attributes of `rdma_init_qp_attr(3)` that `mask` selects, except an alternate path.
pub(super) fn qp_attr_given(raw: &ibv_qp_attr, mask: u32) -> QpAttr {
    use QpAttrMask as Mask;
    let given = |attribute: Mask| mask & attribute.bits() != 0;
    QpAttr {
        state: given(Mask::STATE).then(|| state_from(raw.qp_state)),
        current_state: given(Mask::CUR_STATE).then(|| state_from(raw.cur_qp_state)),
        notify_drained: given(Mask::EN_SQD_ASYNC_NOTIFY).then_some(raw.en_sqd_async_notify != 0),
        access: given(Mask::ACCESS_FLAGS).then(|| access_of(raw.qp_access_flags)),
        pkey_index: given(Mask::PKEY_INDEX).then_some(raw.pkey_index),
        port: given(Mask::PORT).then_some(PortNum(raw.port_num)),
        qkey: given(Mask::QKEY).then_some(Qkey(raw.qkey)),
        address: given(Mask::AV).then(|| address_from(&raw.ah_attr)),
        path_mtu: given(Mask::PATH_MTU).then(|| mtu_from(raw.path_mtu)),
        timeout: given(Mask::TIMEOUT).then(|| AckTimeout::from_code(raw.timeout)),
        retry_count: given(Mask::RETRY_CNT).then_some(raw.retry_cnt),
        rnr_retry: given(Mask::RNR_RETRY).then_some(raw.rnr_retry),
        rq_psn: given(Mask::RQ_PSN).then(|| Psn::new(raw.rq_psn)),
        max_rd_atomic: given(Mask::MAX_QP_RD_ATOMIC).then_some(raw.max_rd_atomic),
        min_rnr_timer: given(Mask::MIN_RNR_TIMER).then(|| RnrTimer::from_code(raw.min_rnr_timer)),
        sq_psn: given(Mask::SQ_PSN).then(|| Psn::new(raw.sq_psn)),
        max_dest_rd_atomic: given(Mask::MAX_DEST_RD_ATOMIC).then_some(raw.max_dest_rd_atomic),
        dest_qpn: given(Mask::DEST_QPN).then_some(Qpn(raw.dest_qp_num)),
    }
}

/// Converts the state and the attributes that are set in that state.
///
/// A queue pair in the error state may never have been connected: unset attributes then read as 0.
pub(super) fn qp_attr_from(raw: &ibv_qp_attr, transport: Transport) -> (QpState, QpAttr) {
    let state = state_from(raw.qp_state);
    let mut attr = QpAttr { state: Some(state), ..QpAttr::default() };
    let reliable = matches!(transport, Transport::Rc | Transport::Dci);
    let (connected, datagrams) =
        (matches!(transport, Transport::Rc | Transport::Uc), transport == Transport::Ud);
    if state != QpState::Reset {
        attr.pkey_index = Some(raw.pkey_index);
        attr.port = Some(PortNum(raw.port_num));
        attr.access = connected.then(|| access_of(raw.qp_access_flags));
        attr.qkey = datagrams.then_some(Qkey(raw.qkey));
    }
    let (to_receive, to_send) = match state {
        QpState::Reset | QpState::Init => (false, false),
        QpState::Rtr => (true, false),
        QpState::Rts | QpState::Sqd | QpState::Sqe | QpState::Err => (true, true),
    };
    if to_receive && transport == Transport::Dci {
        attr.path_mtu = Some(mtu_from(raw.path_mtu));
    }
    if to_receive && connected {
        attr.address = Some(address_from(&raw.ah_attr));
        attr.path_mtu = Some(mtu_from(raw.path_mtu));
        attr.dest_qpn = Some(Qpn(raw.dest_qp_num));
        attr.rq_psn = Some(Psn::new(raw.rq_psn));
        attr.max_dest_rd_atomic = reliable.then_some(raw.max_dest_rd_atomic);
        attr.min_rnr_timer = reliable.then(|| RnrTimer::from_code(raw.min_rnr_timer));
    }
    if to_send {
        attr.sq_psn = Some(Psn::new(raw.sq_psn));
        attr.timeout = reliable.then(|| AckTimeout::from_code(raw.timeout));
        attr.retry_count = reliable.then_some(raw.retry_cnt);
        attr.rnr_retry = reliable.then_some(raw.rnr_retry);
        attr.max_rd_atomic = reliable.then_some(raw.max_rd_atomic);
    }
    (state, attr)
}

// libibverbs writes completions directly into ours.
const _: () = {
    assert!(
        size_of::<WorkCompletion>() == size_of::<ibv_wc>()
            && align_of::<WorkCompletion>() == align_of::<ibv_wc>()
    );
    assert!(mem::offset_of!(WorkCompletion, wr_id) == mem::offset_of!(ibv_wc, wr_id));
    assert!(mem::offset_of!(WorkCompletion, status) == mem::offset_of!(ibv_wc, status));
    assert!(mem::offset_of!(WorkCompletion, opcode) == mem::offset_of!(ibv_wc, opcode));
    assert!(mem::offset_of!(WorkCompletion, vendor_error) == mem::offset_of!(ibv_wc, vendor_err));
    assert!(mem::offset_of!(WorkCompletion, byte_len) == mem::offset_of!(ibv_wc, byte_len));
    assert!(
        mem::offset_of!(WorkCompletion, imm_or_rkey)
            == mem::offset_of!(ibv_wc, imm_data_invalidated_rkey_union)
    );
    assert!(mem::offset_of!(WorkCompletion, qpn) == mem::offset_of!(ibv_wc, qp_num));
    assert!(mem::offset_of!(WorkCompletion, src_qpn) == mem::offset_of!(ibv_wc, src_qp));
    assert!(mem::offset_of!(WorkCompletion, flags) == mem::offset_of!(ibv_wc, wc_flags));
    assert!(mem::offset_of!(WorkCompletion, pkey_index) == mem::offset_of!(ibv_wc, pkey_index));
    assert!(mem::offset_of!(WorkCompletion, src_lid) == mem::offset_of!(ibv_wc, slid));
    assert!(mem::offset_of!(WorkCompletion, service_level) == mem::offset_of!(ibv_wc, sl));
    assert!(
        mem::offset_of!(WorkCompletion, dest_path_bits) == mem::offset_of!(ibv_wc, dlid_path_bits)
    );
    assert!(WcFlags::GRH.bits() == ibv_wc_flags::IBV_WC_GRH.0);
    assert!(WcFlags::WITH_IMM.bits() == ibv_wc_flags::IBV_WC_WITH_IMM.0);
    assert!(WcFlags::WITH_INV.bits() == ibv_wc_flags::IBV_WC_WITH_INV.0);
    assert!(WcOpcode::SEND.0 == ibv_wc_opcode::IBV_WC_SEND);
    assert!(WcOpcode::RDMA_WRITE.0 == ibv_wc_opcode::IBV_WC_RDMA_WRITE);
    assert!(WcOpcode::RDMA_READ.0 == ibv_wc_opcode::IBV_WC_RDMA_READ);
    assert!(WcOpcode::COMP_SWAP.0 == ibv_wc_opcode::IBV_WC_COMP_SWAP);
    assert!(WcOpcode::FETCH_ADD.0 == ibv_wc_opcode::IBV_WC_FETCH_ADD);
    assert!(WcOpcode::BIND_MW.0 == ibv_wc_opcode::IBV_WC_BIND_MW);
    assert!(WcOpcode::LOCAL_INV.0 == ibv_wc_opcode::IBV_WC_LOCAL_INV);
    assert!(WcOpcode::RECV.0 == ibv_wc_opcode::IBV_WC_RECV);
    assert!(WcOpcode::RECV_RDMA_WITH_IMM.0 == ibv_wc_opcode::IBV_WC_RECV_RDMA_WITH_IMM);
};

/// Returns the completions for libibverbs to write: all fields are numbers of any value.
#[inline]
pub(super) fn completions(out: &mut [WorkCompletion]) -> *mut ibv_wc {
    out.as_mut_ptr().cast()
}

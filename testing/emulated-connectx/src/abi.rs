//! Constants and structures of the kernel's verbs ABI, as libibverbs and libmlx5 use it.
//!
//! Sources: `rdma/ib_user_ioctl_cmds.h`, `rdma/ib_user_verbs.h`, `rdma/mlx5-abi.h`,
//! `rdma/mlx5_user_ioctl_cmds.h`, and the WQE formats of `infiniband/mlx5dv.h`. Names follow the
//! headers, without prefixes. A structure ends after the last field that the emulation reads.

/// A structure of integers, valid for any bytes and without significant padding.
///
/// # Safety
///
/// The type is `repr(C)` and consists of integers, arrays of integers and other `Plain` types.
pub(crate) unsafe trait Plain: Copy {
    fn zeroed() -> Self {
        // SAFETY: the type consists of integers, so all-zero bytes are valid.
        unsafe { std::mem::zeroed() }
    }
}

macro_rules! plain {
    ($($(#[$meta:meta])* struct $name:ident { $($field:ident: $type:ty),* $(,)? })*) => {$(
        $(#[$meta])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug)]
        pub(crate) struct $name { $(pub(crate) $field: $type),* }
        // SAFETY: `repr(C)`; the list above has only integers, arrays of them and `Plain` types.
        unsafe impl Plain for $name {}
    )*};
}

/// Implements `Plain` for integers, which attributes carry without a structure around them.
macro_rules! numbers {
    ($($type:ty),*) => {$(
        // SAFETY: an integer.
        unsafe impl Plain for $type {}
    )*};
}
numbers!(u8, u16, u32, u64);

/// `RDMA_VERBS_IOCTL`: read and write, a 24-byte header, type 0x1b, number 1.
pub(crate) const VERBS_IOCTL: u64 = (3 << 30) | (24 << 16) | (0x1b << 8) | 1;

/// The first driver-specific attribute and object id.
pub(crate) const DRIVER: u16 = 1 << 12;
pub(crate) const UHW_IN: u16 = DRIVER;
pub(crate) const UHW_OUT: u16 = DRIVER + 1;

pub(crate) mod object {
    pub(crate) const DEVICE: u16 = 0;
    pub(crate) const PD: u16 = 1;
    pub(crate) const CQ: u16 = 3;
    pub(crate) const QP: u16 = 4;
    pub(crate) const SRQ: u16 = 5;
    pub(crate) const AH: u16 = 6;
    pub(crate) const MR: u16 = 7;
    pub(crate) const MW: u16 = 8;
    pub(crate) const ASYNC_EVENT: u16 = 16;
    pub(crate) const UAR: u16 = super::DRIVER + 8;
}

/// Methods of the device. For other objects, 0 creates and 1 destroys if both exist.
pub(crate) mod device {
    pub(crate) const INVOKE_WRITE: u16 = 0;
    pub(crate) const QUERY_PORT: u16 = 2;
    pub(crate) const GET_CONTEXT: u16 = 3;
    pub(crate) const QUERY_CONTEXT: u16 = 4;
    pub(crate) const QUERY_GID_TABLE: u16 = 5;
    pub(crate) const QUERY_GID_ENTRY: u16 = 6;
}

/// Commands of the write interface, which arrive in `INVOKE_WRITE`.
pub(crate) mod command {
    pub(crate) const QUERY_DEVICE: u32 = 1;
    pub(crate) const ALLOC_PD: u32 = 3;
    pub(crate) const DEALLOC_PD: u32 = 4;
    pub(crate) const CREATE_AH: u32 = 5;
    pub(crate) const DESTROY_AH: u32 = 8;
    pub(crate) const REG_MR: u32 = 9;
    pub(crate) const DEREG_MR: u32 = 13;
    pub(crate) const ALLOC_MW: u32 = 14;
    pub(crate) const DEALLOC_MW: u32 = 16;
    pub(crate) const CREATE_COMP_CHANNEL: u32 = 17;
    pub(crate) const QUERY_QP: u32 = 25;
    pub(crate) const MODIFY_QP: u32 = 26;
    pub(crate) const MODIFY_SRQ: u32 = 33;
    pub(crate) const QUERY_SRQ: u32 = 34;
    pub(crate) const EXTENDED: u32 = 0x8000_0000;
}

pub(crate) use libc::{
    EBUSY, EFAULT, EINVAL, EMFILE, ENODATA, ENOMEM, ENOSPC, EOPNOTSUPP, EPROTONOSUPPORT,
};

pub(crate) mod access {
    pub(crate) const LOCAL_WRITE: u32 = 1;
    pub(crate) const REMOTE_WRITE: u32 = 2;
    pub(crate) const REMOTE_READ: u32 = 4;
    pub(crate) const REMOTE_ATOMIC: u32 = 8;
    pub(crate) const MW_BIND: u32 = 16;
    pub(crate) const ZERO_BASED: u32 = 32;
    pub(crate) const ON_DEMAND: u32 = 64;
}

/// `ibv_qp_state`.
pub(crate) mod state {
    pub(crate) const RESET: u8 = 0;
    pub(crate) const INIT: u8 = 1;
    pub(crate) const RTR: u8 = 2;
    pub(crate) const RTS: u8 = 3;
    pub(crate) const SQD: u8 = 4;
    pub(crate) const SQE: u8 = 5;
    pub(crate) const ERR: u8 = 6;
}

/// `ibv_qp_attr_mask`.
pub(crate) mod mask {
    pub(crate) const STATE: u32 = 1;
    pub(crate) const CUR_STATE: u32 = 1 << 1;
    pub(crate) const EN_SQD_ASYNC_NOTIFY: u32 = 1 << 2;
    pub(crate) const ACCESS_FLAGS: u32 = 1 << 3;
    pub(crate) const PKEY_INDEX: u32 = 1 << 4;
    pub(crate) const PORT: u32 = 1 << 5;
    pub(crate) const QKEY: u32 = 1 << 6;
    pub(crate) const AV: u32 = 1 << 7;
    pub(crate) const PATH_MTU: u32 = 1 << 8;
    pub(crate) const TIMEOUT: u32 = 1 << 9;
    pub(crate) const RETRY_CNT: u32 = 1 << 10;
    pub(crate) const RNR_RETRY: u32 = 1 << 11;
    pub(crate) const RQ_PSN: u32 = 1 << 12;
    pub(crate) const MAX_QP_RD_ATOMIC: u32 = 1 << 13;
    pub(crate) const ALT_PATH: u32 = 1 << 14;
    pub(crate) const MIN_RNR_TIMER: u32 = 1 << 15;
    pub(crate) const SQ_PSN: u32 = 1 << 16;
    pub(crate) const MAX_DEST_RD_ATOMIC: u32 = 1 << 17;
    pub(crate) const PATH_MIG_STATE: u32 = 1 << 18;
    pub(crate) const DEST_QPN: u32 = 1 << 20;
}

/// `ibv_event_type`.
pub(crate) mod event {
    pub(crate) const CQ_ERR: u32 = 0;
    pub(crate) const QP_FATAL: u32 = 1;
    pub(crate) const QP_REQ_ERR: u32 = 2;
    pub(crate) const QP_ACCESS_ERR: u32 = 3;
    pub(crate) const COMM_EST: u32 = 4;
    pub(crate) const SQ_DRAINED: u32 = 5;
    pub(crate) const DEVICE_FATAL: u32 = 8;
    pub(crate) const PORT_ACTIVE: u32 = 9;
    pub(crate) const PORT_ERR: u32 = 10;
    pub(crate) const SRQ_LIMIT_REACHED: u32 = 15;
    pub(crate) const LAST_WQE_REACHED: u32 = 16;
}

/// Flags in `CreateQp`.
pub(crate) mod qp_flag {
    pub(crate) const SCATTER_CQE: u32 = 1 << 1;
    pub(crate) const TYPE_DCT: u32 = 1 << 4;
    pub(crate) const TYPE_DCI: u32 = 1 << 5;
    pub(crate) const ALLOW_SCATTER_CQE: u32 = 1 << 8;
    pub(crate) const UAR_PAGE_INDEX: u32 = 1 << 10;
}

plain! {
    struct Attribute { id: u16, len: u16, flags: u16, reserved: u16, data: u64 }
    struct Header {
        length: u16, object: u16, method: u16, attributes: u16, reserved1: u64, driver: u32,
        reserved2: u32,
    }

    struct UcontextRequest {
        total_bfregs: u32, low_latency_bfregs: u32, flags: u32, comp_mask: u32,
        max_cqe_version: u8, reserved0: u8, reserved1: u16, reserved2: u32, lib_caps: u64,
    }
    struct UcontextResponse {
        qp_tab_size: u32, bf_reg_size: u32, tot_bfregs: u32, cache_line_size: u32,
        max_sq_desc_sz: u16, max_rq_desc_sz: u16, max_send_wqebb: u32, max_recv_wr: u32,
        max_srq_recv_wr: u32, num_ports: u16, flow_action_flags: u16, comp_mask: u32,
        response_length: u32, cqe_version: u8, cmds_supp_uhw: u8, eth_min_inline: u8,
        clock_info_versions: u8, hca_core_clock_offset: u64, log_uar_size: u32,
        num_uars_per_page: u32, num_dyn_bfregs: u32, dump_fill_mkey: u32,
    }

    struct QueryDevice {
        fw_ver: u64, node_guid: u64, sys_image_guid: u64, max_mr_size: u64, page_size_cap: u64,
        vendor_id: u32, vendor_part_id: u32, hw_ver: u32, max_qp: u32, max_qp_wr: u32,
        device_cap_flags: u32, max_sge: u32, max_sge_rd: u32, max_cq: u32, max_cqe: u32,
        max_mr: u32, max_pd: u32, max_qp_rd_atom: u32, max_ee_rd_atom: u32, max_res_rd_atom: u32,
        max_qp_init_rd_atom: u32, max_ee_init_rd_atom: u32, atomic_cap: u32, max_ee: u32,
        max_rdd: u32, max_mw: u32, max_raw_ipv6_qp: u32, max_raw_ethy_qp: u32, max_mcast_grp: u32,
        max_mcast_qp_attach: u32, max_total_mcast_qp_attach: u32, max_ah: u32, max_fmr: u32,
        max_map_per_fmr: u32, max_srq: u32, max_srq_wr: u32, max_srq_sge: u32, max_pkeys: u16,
        local_ca_ack_delay: u8, phys_port_cnt: u8, reserved: [u8; 4],
    }
    struct QueryDeviceEx {
        base: QueryDevice, comp_mask: u32, response_length: u32, odp_general: u64,
        odp_transports: [u32; 4], timestamp_mask: u64, hca_core_clock: u64,
        device_cap_flags_ex: u64, rss: [u32; 4], max_wq_type_rq: u32, raw_packet_caps: u32,
        tag_matching: [u32; 6], cq_moderation: [u16; 4], max_dm_size: u64, xrc_odp_caps: u32,
        reserved: u32,
    }
    struct Mlx5QueryDevice {
        comp_mask: u32, response_length: u32, tso: [u32; 2], rss: [u64; 2], cqe_comp: [u32; 2],
        packet_pacing: [u32; 4], multi_packet_send: u32, flags: u32, sw_parsing: [u32; 2],
        striding_rq: [u32; 6], tunnel_offloads: u32, dci_streams_log_concurrent: u8,
        dci_streams_log_errored: u8, reserved: u16,
    }
    struct QueryPort {
        port_cap_flags: u32, max_msg_sz: u32, bad_pkey_cntr: u32, qkey_viol_cntr: u32,
        gid_tbl_len: u32, pkey_tbl_len: u16, lid: u16, sm_lid: u16, state: u8, max_mtu: u8,
        active_mtu: u8, lmc: u8, max_vl_num: u8, sm_sl: u8, subnet_timeout: u8,
        init_type_reply: u8, active_width: u8, active_speed: u8, phys_state: u8, link_layer: u8,
        flags: u8, reserved: u8, port_cap_flags2: u16, reserved2: [u8; 6],
    }
    struct GidEntry { gid: [u8; 16], index: u32, port: u32, kind: u32, interface: u32 }

    struct RegMr { response: u64, start: u64, length: u64, hca_va: u64, pd: u32, access: u32 }
    struct RegMrResponse { handle: u32, lkey: u32, rkey: u32 }
    struct AllocMw { response: u64, pd: u32, kind: u8, reserved: [u8; 3] }
    struct AllocMwResponse { handle: u32, rkey: u32 }

    struct CreateCq {
        buf_addr: u64, db_addr: u64, cqe_size: u32, comp_en: u8, comp_format: u8, flags: u16,
        uar_page: u16, reserved0: u16, reserved1: u32,
    }
    struct CreateCqResponse { cqn: u32, reserved: u32 }
    struct DestroyCqResponse { completion_events: u32, async_events: u32 }

    struct CreateSrq {
        buf_addr: u64, db_addr: u64, flags: u32, reserved0: u32, uidx: u32, reserved1: u32,
    }
    struct CreateSrqResponse { srqn: u32, reserved: u32 }
    struct ModifySrq { handle: u32, mask: u32, max_wr: u32, limit: u32 }
    struct QuerySrq { response: u64, handle: u32, reserved: u32 }
    struct QuerySrqResponse { max_wr: u32, max_sge: u32, limit: u32, reserved: u32 }

    struct QpCap {
        max_send_wr: u32, max_recv_wr: u32, max_send_sge: u32, max_recv_sge: u32,
        max_inline_data: u32,
    }
    struct CreateQp {
        buf_addr: u64, db_addr: u64, sq_wqe_count: u32, rq_wqe_count: u32, rq_wqe_shift: u32,
        flags: u32, uidx: u32, bfreg_index: u32, access_key: u64, ece_options: u32,
        dci_log_concurrent: u8, dci_log_errored: u8, reserved: u16,
    }
    struct CreateQpResponse {
        bfreg_index: u32, ece_options: u32, comp_mask: u32, tirn: u32, tisn: u32, rqn: u32,
        sqn: u32, reserved: u32, tir_icm_addr: u64,
    }
    struct QpDest {
        dgid: [u8; 16], flow_label: u32, dlid: u16, reserved: u16, sgid_index: u8, hop_limit: u8,
        traffic_class: u8, sl: u8, src_path_bits: u8, static_rate: u8, is_global: u8, port: u8,
    }
    struct ModifyQp {
        dest: QpDest, alt_dest: QpDest, handle: u32, mask: u32, qkey: u32, rq_psn: u32,
        sq_psn: u32, dest_qpn: u32, access: u32, pkey_index: u16, alt_pkey_index: u16, state: u8,
        cur_state: u8, path_mtu: u8, path_mig_state: u8, en_sqd_async_notify: u8,
        max_rd_atomic: u8, max_dest_rd_atomic: u8, min_rnr_timer: u8, port: u8, timeout: u8,
        retry_cnt: u8, rnr_retry: u8, alt_port: u8, alt_timeout: u8, reserved: [u8; 2],
    }
    struct ModifyQpExResponse { comp_mask: u32, response_length: u32 }
    struct Mlx5ModifyQpResponse { response_length: u32, dctn: u32, ece_options: u32, reserved: u32 }
    struct QueryQp { response: u64, handle: u32, mask: u32 }
    struct QueryQpResponse {
        dest: QpDest, alt_dest: QpDest, cap: QpCap, qkey: u32, rq_psn: u32, sq_psn: u32,
        dest_qpn: u32, access: u32, pkey_index: u16, alt_pkey_index: u16, state: u8, cur_state: u8,
        path_mtu: u8, path_mig_state: u8, sq_draining: u8, max_rd_atomic: u8,
        max_dest_rd_atomic: u8, min_rnr_timer: u8, port: u8, timeout: u8, retry_cnt: u8,
        rnr_retry: u8, alt_port: u8, alt_timeout: u8, sq_sig_all: u8, reserved: [u8; 5],
    }

    struct AhAttr {
        dgid: [u8; 16], flow_label: u32, sgid_index: u8, hop_limit: u8, traffic_class: u8,
        reserved0: u8, dlid: u16, sl: u8, src_path_bits: u8, static_rate: u8, is_global: u8,
        port: u8, reserved1: u8,
    }
    struct CreateAh { response: u64, user_handle: u64, pd: u32, reserved: u32, attr: AhAttr }
    struct CreateAhResponse { handle: u32 }
    struct Mlx5CreateAhResponse { response_length: u32, dmac: [u8; 6], reserved: [u8; 6] }
}

// Sizes in the headers of rdma-core 44.
const _: () = {
    assert!(size_of::<Attribute>() == 16);
    assert!(size_of::<Header>() == 24);
    assert!(size_of::<UcontextRequest>() == 32);
    assert!(size_of::<UcontextResponse>() == 72);
    assert!(size_of::<QueryDevice>() == 176);
    assert!(size_of::<QueryDeviceEx>() == 304);
    assert!(size_of::<Mlx5QueryDevice>() == 104);
    assert!(size_of::<QueryPort>() == 48);
    assert!(size_of::<AllocMw>() == 16);
    assert!(size_of::<CreateCq>() == 32);
    assert!(size_of::<CreateQp>() == 56);
    assert!(size_of::<QpDest>() == 32);
    assert!(size_of::<ModifyQp>() == 112);
    assert!(size_of::<QueryQpResponse>() == 128);
    assert!(size_of::<CreateAh>() == 56);
};

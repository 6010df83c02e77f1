//! `infiniband/mlx5dv.h`.

use std::ffi::{c_int, c_void};

use super::{
    ibv_ah, ibv_context, ibv_cq, ibv_cq_ex, ibv_cq_init_attr_ex, ibv_qp, ibv_qp_ex,
    ibv_qp_init_attr_ex, ibv_srq,
};

enumeration! {
    in MLX5_ENUMERATIONS;
    mlx5dv_dc_type: c_uint {
        MLX5DV_DCTYPE_DCT = 1,
        MLX5DV_DCTYPE_DCI = 2,
    }
    mlx5dv_cqe_comp_res_format: c_uint {
        MLX5DV_CQE_RES_FORMAT_HASH = 1,
    }
}

flags! {
    in MLX5_FLAGS;
    mlx5dv_context_comp_mask {
        MLX5DV_CONTEXT_MASK_CQE_COMPRESION = 1,
        MLX5DV_CONTEXT_MASK_MAX_DC_RD_ATOM = 1 << 14,
    }
    mlx5dv_context_flags {
        MLX5DV_CONTEXT_FLAGS_CQE_V1 = 1,
        MLX5DV_CONTEXT_FLAGS_CQE_128B_COMP = 1 << 4,
    }
    mlx5dv_cq_init_attr_mask {
        MLX5DV_CQ_INIT_ATTR_MASK_COMPRESSED_CQE = 1,
    }
    mlx5dv_qp_create_flags {
        MLX5DV_QP_CREATE_DISABLE_SCATTER_TO_CQE = 1 << 3,
        MLX5DV_QP_CREATE_ALLOW_SCATTER_TO_CQE = 1 << 4,
    }
    mlx5dv_qp_init_attr_mask {
        MLX5DV_QP_INIT_ATTR_MASK_QP_CREATE_FLAGS = 1,
        MLX5DV_QP_INIT_ATTR_MASK_DC = 1 << 1,
    }
}

structures! {
    in MLX5;
    struct mlx5dv_cqe_comp_caps {
        max_num: u32,
        supported_format: u32,
    }
    struct mlx5dv_sw_parsing_caps {
        sw_parsing_offloads: u32,
        supported_qpts: u32,
    }
    struct mlx5dv_striding_rq_caps {
        min_single_stride_log_num_of_bytes: u32,
        max_single_stride_log_num_of_bytes: u32,
        min_single_wqe_log_num_of_strides: u32,
        max_single_wqe_log_num_of_strides: u32,
        supported_qpts: u32,
    }
    struct mlx5dv_sig_caps {
        block_size: u64,
        block_prot: u32,
        t10dif_bg: u16,
        crc_type: u16,
    }
    struct mlx5dv_dci_streams_caps {
        max_log_num_concurent: u8,
        max_log_num_errored: u8,
    }
    struct mlx5dv_crypto_caps {
        failed_selftests: u16,
        crypto_engines: u8,
        wrapped_import_method: u8,
        log_max_num_deks: u8,
        flags: u32,
    }
    /// The start of the structure: do not ask for later fields in `comp_mask`.
    struct mlx5dv_context {
        version: u8,
        flags: u64,
        comp_mask: u64,
        cqe_comp_caps: mlx5dv_cqe_comp_caps,
        sw_parsing_caps: mlx5dv_sw_parsing_caps,
        striding_rq_caps: mlx5dv_striding_rq_caps,
        tunnel_offloads_caps: u32,
        max_dynamic_bfregs: u32,
        max_clock_info_update_nsec: u64,
        flow_action_flags: u32,
        dc_odp_caps: u32,
        hca_core_clock: *mut c_void,
        num_lag_ports: u8,
        sig_caps: mlx5dv_sig_caps,
        dci_streams_caps: mlx5dv_dci_streams_caps,
        max_wr_memcpy_length: usize,
        crypto_caps: mlx5dv_crypto_caps,
        max_dc_rd_atom: u64,
        max_dc_init_rd_atom: u64,
    }
    struct mlx5dv_cq_init_attr {
        comp_mask: u64,
        cqe_comp_res_format: u8,
        flags: u32,
        cqe_size: u16,
    }
    struct mlx5dv_dc_init_attr {
        dc_type: mlx5dv_dc_type::Type,
        // A union with the streams of initiators.
        dct_access_key: u64,
    }
    struct mlx5dv_qp_init_attr {
        comp_mask: u64,
        create_flags: u32,
        dc_init_attr: mlx5dv_dc_init_attr,
        send_ops_flags: u64,
    }
    /// The start of the structure: further functions follow.
    struct mlx5dv_qp_ex {
        comp_mask: u64,
        wr_set_dc_addr: Option<unsafe extern "C" fn(*mut Self, *mut ibv_ah, u32, u64)>,
    }
    struct mlx5dv_queue {
        buf: *mut c_void,
        wqe_cnt: u32,
        stride: u32,
    }
    struct mlx5dv_register {
        reg: *mut c_void,
        size: u32,
    }
    struct mlx5dv_qp {
        dbrec: *mut u32,
        sq: mlx5dv_queue,
        rq: mlx5dv_queue,
        bf: mlx5dv_register,
        comp_mask: u64,
        uar_mmap_offset: libc::off_t,
        tirn: u32,
        tisn: u32,
        rqn: u32,
        sqn: u32,
        tir_icm_addr: u64,
    }
    struct mlx5dv_cq {
        buf: *mut c_void,
        dbrec: *mut u32,
        cqe_cnt: u32,
        cqe_size: u32,
        cq_uar: *mut c_void,
        cqn: u32,
        comp_mask: u64,
    }
    struct mlx5dv_srq {
        buf: *mut c_void,
        dbrec: *mut u32,
        stride: u32,
        head: u32,
        tail: u32,
        comp_mask: u64,
        srqn: u32,
    }
    struct mlx5_wqe_av {
        dc_key: u64,
        dqp_dct: u32,
        stat_rate_sl: u8,
        fl_mlid: u8,
        rlid: u16,
        reserved0: [u8; 4],
        rmac: [u8; 6],
        tclass: u8,
        hop_limit: u8,
        grh_gid_fl: u32,
        rgid: [u8; 16],
    }
    struct mlx5dv_ah {
        av: *mut mlx5_wqe_av,
        comp_mask: u64,
    }
    struct mlx5dv_obj_qp {
        in_: *mut ibv_qp,
        out: *mut mlx5dv_qp,
    }
    struct mlx5dv_obj_cq {
        in_: *mut ibv_cq,
        out: *mut mlx5dv_cq,
    }
    struct mlx5dv_obj_srq {
        in_: *mut ibv_srq,
        out: *mut mlx5dv_srq,
    }
    struct mlx5dv_obj_other {
        in_: *mut c_void,
        out: *mut c_void,
    }
    struct mlx5dv_obj_ah {
        in_: *mut ibv_ah,
        out: *mut mlx5dv_ah,
    }
    struct mlx5dv_obj {
        qp: mlx5dv_obj_qp,
        cq: mlx5dv_obj_cq,
        srq: mlx5dv_obj_srq,
        rwq: mlx5dv_obj_other,
        dm: mlx5dv_obj_other,
        ah: mlx5dv_obj_ah,
        pd: mlx5dv_obj_other,
        devx: mlx5dv_obj_other,
    }
}

functions! {
    Mlx5:
    fn mlx5dv_query_device(context: *mut ibv_context, attr: *mut mlx5dv_context) -> c_int;
    fn mlx5dv_create_cq(
        context: *mut ibv_context,
        attr: *mut ibv_cq_init_attr_ex,
        special: *mut mlx5dv_cq_init_attr,
    ) -> *mut ibv_cq_ex;
    fn mlx5dv_create_qp(
        context: *mut ibv_context,
        attr: *mut ibv_qp_init_attr_ex,
        special: *mut mlx5dv_qp_init_attr,
    ) -> *mut ibv_qp;
    fn mlx5dv_qp_ex_from_ibv_qp_ex(qp: *mut ibv_qp_ex) -> *mut mlx5dv_qp_ex;
    fn mlx5dv_init_obj(object: *mut mlx5dv_obj, kind: u64) -> c_int;
}

//! What `verbs.h` and `mlx5dv.h` define inline: calls through the fields of an object.
//!
//! The function of a driver is a field of an object. Functions that a driver may lack are in the
//! `verbs_context` around an `ibv_context`.

use std::ffi::{c_int, c_uint, c_void};
use std::mem::{offset_of, size_of};
use std::ptr;

use rdma_provider::VerbError;

use super::library::Missing;
use super::*;

/// `__VERBS_ABI_IS_EXTENDED`: the context is part of a `verbs_context`.
const EXTENDED: usize = usize::MAX;

/// Returns the structure around a context.
///
/// # Safety
///
/// The context is open.
unsafe fn verbs_context_of(context: *mut ibv_context) -> Option<*const verbs_context> {
    // SAFETY: S3: the caller's promise.
    let is_extended = unsafe { (*context).abi_compat }.addr() == EXTENDED;
    let start = context.wrapping_byte_sub(offset_of!(verbs_context, context));
    is_extended.then_some(start.cast_const().cast())
}

/// Returns a function of a context that its driver may lack, `verbs_get_ctx_op`.
macro_rules! driver_function {
    ($context:expr, $field:ident) => {
        verbs_context_of($context).and_then(|all| {
            let needed = size_of::<verbs_context>() - offset_of!(verbs_context, $field);
            if (*all).sz < needed { None } else { (*all).$field }
        })
    };
}

/// Declares functions that a driver may lack, each with the expression that finds it.
macro_rules! optional {
    ($(fn $name:ident($($argument:ident: $type:ty),*) -> $result:ty: $found:expr;)*) => {
        $(
            /// See the manual page.
            ///
            /// # Safety
            ///
            /// Handles are alive, and pointers valid, as the manual page requires.
            pub unsafe fn $name($($argument: $type),*) -> $result {
                // SAFETY: S3: the caller's promise.
                unsafe {
                    match $found {
                        Some(function) => function($($argument),*),
                        None => Missing::missing(),
                    }
                }
            }
        )*
    };
}

optional! {
    fn ibv_alloc_td(context: *mut ibv_context, attr: *mut ibv_td_init_attr) -> *mut ibv_td:
        driver_function!(context, alloc_td);
    fn ibv_dealloc_td(td: *mut ibv_td) -> c_int: driver_function!((*td).context, dealloc_td);
    fn ibv_alloc_parent_domain(
        context: *mut ibv_context, attr: *mut ibv_parent_domain_init_attr) -> *mut ibv_pd:
        driver_function!(context, alloc_parent_domain);
    fn ibv_modify_cq(cq: *mut ibv_cq, attr: *mut ibv_modify_cq_attr) -> c_int:
        driver_function!((*cq).context, modify_cq);
    fn ibv_create_cq_ex(
        context: *mut ibv_context, attr: *mut ibv_cq_init_attr_ex) -> *mut ibv_cq_ex:
        driver_function!(context, create_cq_ex);
    fn ibv_query_rt_values_ex(context: *mut ibv_context, values: *mut ibv_values_ex) -> c_int:
        driver_function!(context, query_rt_values);
    fn ibv_alloc_mw(pd: *mut ibv_pd, kind: ibv_mw_type::Type) -> *mut ibv_mw:
        (*(*pd).context).ops.alloc_mw;
    fn ibv_dealloc_mw(mw: *mut ibv_mw) -> c_int: (*(*mw).context).ops.dealloc_mw;
}

/// See the manual page. Without extended attributes, it is `ibv_create_qp`.
///
/// # Safety
///
/// Handles are alive, and pointers valid, as the manual page requires.
pub unsafe fn ibv_create_qp_ex(
    context: *mut ibv_context,
    attr: *mut ibv_qp_init_attr_ex,
) -> *mut ibv_qp {
    // SAFETY: S3: the caller's promise; the structure begins like that of `ibv_create_qp`.
    unsafe {
        if (*attr).comp_mask == ibv_qp_init_attr_mask::IBV_QP_INIT_ATTR_PD.0 {
            return ibv_create_qp((*attr).pd, attr.cast());
        }
        match driver_function!(context, create_qp_ex) {
            Some(function) => function(context, attr),
            None => Missing::missing(),
        }
    }
}

/// See the manual page. Old drivers answer in the structure's first part.
///
/// # Safety
///
/// Handles are alive, and pointers valid, as the manual page requires.
pub unsafe fn ibv_query_device_ex(
    context: *mut ibv_context,
    input: *const c_void,
    attr: *mut ibv_device_attr_ex,
) -> c_int {
    // SAFETY: S3: the caller's promise.
    unsafe {
        if let Some(function) = driver_function!(context, query_device_ex) {
            let result = function(context, input, attr, size_of::<ibv_device_attr_ex>());
            if !matches!(result, VerbError::EOPNOTSUPP | VerbError::ENOSYS) {
                return result;
            }
        }
        ptr::write_bytes(attr, 0, 1);
        ibv_query_device(context, &raw mut (*attr).orig_attr)
    }
}

/// See the manual page. Old libraries answer in the structure's first part.
///
/// # Safety
///
/// Handles are alive, and pointers valid, as the manual page requires.
pub unsafe fn ibv_query_port(
    context: *mut ibv_context,
    port: u8,
    attr: *mut ibv_port_attr,
) -> c_int {
    // SAFETY: S3: the caller's promise.
    unsafe {
        if let Some(function) = driver_function!(context, query_port) {
            return function(context, port, attr, size_of::<ibv_port_attr>());
        }
        ptr::write_bytes(attr, 0, 1);
        verbs::old::ibv_query_port(context, port, attr)
    }
}

/// See the manual page.
///
/// # Safety
///
/// Handles are alive, and pointers valid, as the manual page requires.
pub unsafe fn ibv_query_gid_table(
    context: *mut ibv_context,
    entries: *mut ibv_gid_entry,
    max_entries: usize,
    flags: u32,
) -> isize {
    let size = size_of::<ibv_gid_entry>();
    // SAFETY: S3: the caller's promise.
    unsafe { _ibv_query_gid_table(context, entries, max_entries, flags, size) }
}

/// Declares functions that each driver has.
macro_rules! always {
    (
        $(
            $field:ident: fn $name:ident($($argument:ident: $type:ty),*) -> $result:ty,
                of $context:expr;
        )*
    ) => {
        $(
            /// See the manual page.
            ///
            /// # Safety
            ///
            /// Handles are alive, and pointers valid, as the manual page requires.
            #[inline]
            pub unsafe fn $name($($argument: $type),*) -> $result {
                // SAFETY: S3: the caller's promise; libibverbs sets these fields when a driver
                // opens a device, to functions that fail if the driver has none.
                unsafe { (*$context).ops.$field.unwrap_unchecked()($($argument),*) }
            }
        )*
    };
}

always! {
    poll_cq: fn ibv_poll_cq(cq: *mut ibv_cq, entries: c_int, wc: *mut ibv_wc)
        -> c_int, of (*cq).context;
    req_notify_cq: fn ibv_req_notify_cq(cq: *mut ibv_cq, solicited_only: c_int)
        -> c_int, of (*cq).context;
    post_srq_recv: fn ibv_post_srq_recv(
        srq: *mut ibv_srq, wr: *mut ibv_recv_wr, bad: *mut *mut ibv_recv_wr)
        -> c_int, of (*srq).context;
    post_send: fn ibv_post_send(
        qp: *mut ibv_qp, wr: *mut ibv_send_wr, bad: *mut *mut ibv_send_wr)
        -> c_int, of (*qp).context;
    post_recv: fn ibv_post_recv(
        qp: *mut ibv_qp, wr: *mut ibv_recv_wr, bad: *mut *mut ibv_recv_wr)
        -> c_int, of (*qp).context;
}

/// Declares functions of an object that was created for them.
macro_rules! methods {
    (
        $object:ident:
        $($field:ident: fn $name:ident($($argument:ident: $type:ty),*) $(-> $result:ty)?;)*
    ) => {
        $(
            /// See the manual page.
            ///
            /// # Safety
            ///
            /// The object is alive and was created for this call, and pointers are valid, as the
            /// manual page requires.
            #[inline]
            pub unsafe fn $name(object: *mut $object, $($argument: $type),*) $(-> $result)? {
                // SAFETY: S3: the caller's promise.
                unsafe { (*object).$field.unwrap_unchecked()(object, $($argument),*) }
            }
        )*
    };
}

methods! {
    ibv_qp_ex:
    wr_atomic_cmp_swp: fn ibv_wr_atomic_cmp_swp(rkey: u32, remote: u64, compare: u64, swap: u64);
    wr_atomic_fetch_add: fn ibv_wr_atomic_fetch_add(rkey: u32, remote: u64, add: u64);
    wr_bind_mw: fn ibv_wr_bind_mw(mw: *mut ibv_mw, rkey: u32, info: *const ibv_mw_bind_info);
    wr_local_inv: fn ibv_wr_local_inv(rkey: u32);
    wr_rdma_read: fn ibv_wr_rdma_read(rkey: u32, remote: u64);
    wr_rdma_write: fn ibv_wr_rdma_write(rkey: u32, remote: u64);
    wr_rdma_write_imm: fn ibv_wr_rdma_write_imm(rkey: u32, remote: u64, imm: u32);
    wr_send: fn ibv_wr_send();
    wr_send_imm: fn ibv_wr_send_imm(imm: u32);
    wr_send_inv: fn ibv_wr_send_inv(rkey: u32);
    wr_set_ud_addr: fn ibv_wr_set_ud_addr(ah: *mut ibv_ah, qpn: u32, qkey: u32);
    wr_set_inline_data: fn ibv_wr_set_inline_data(start: *mut c_void, length: usize);
    wr_set_sge: fn ibv_wr_set_sge(lkey: u32, addr: u64, length: u32);
    wr_set_sge_list: fn ibv_wr_set_sge_list(count: usize, list: *const ibv_sge);
    wr_start: fn ibv_wr_start();
    wr_complete: fn ibv_wr_complete() -> c_int;
    wr_abort: fn ibv_wr_abort();
}

methods! {
    ibv_cq_ex:
    start_poll: fn ibv_start_poll(attr: *mut ibv_poll_cq_attr) -> c_int;
    next_poll: fn ibv_next_poll() -> c_int;
    end_poll: fn ibv_end_poll();
    read_opcode: fn ibv_wc_read_opcode() -> ibv_wc_opcode::Type;
    read_vendor_err: fn ibv_wc_read_vendor_err() -> u32;
    read_byte_len: fn ibv_wc_read_byte_len() -> u32;
    read_imm_data: fn ibv_wc_read_imm_data() -> u32;
    read_qp_num: fn ibv_wc_read_qp_num() -> u32;
    read_src_qp: fn ibv_wc_read_src_qp() -> u32;
    read_wc_flags: fn ibv_wc_read_wc_flags() -> c_uint;
    read_slid: fn ibv_wc_read_slid() -> u32;
    read_sl: fn ibv_wc_read_sl() -> u8;
    read_dlid_path_bits: fn ibv_wc_read_dlid_path_bits() -> u8;
    read_completion_ts: fn ibv_wc_read_completion_ts() -> u64;
}

methods! {
    mlx5dv_qp_ex:
    wr_set_dc_addr: fn mlx5dv_wr_set_dc_addr(ah: *mut ibv_ah, dctn: u32, key: u64);
}

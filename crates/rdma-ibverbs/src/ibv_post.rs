//! Conversion of work requests: chains for `ibv_post_send(3)` and `ibv_post_recv(3)`, calls for
//! `ibv_wr_post(3)`.

#![allow(unsafe_code)]

use std::borrow::Borrow;
use std::mem::MaybeUninit;
use std::ptr::{self, NonNull};

use crate::ffi::*;

use super::mlx5::direct::address::AddressHandle;
use super::supported::is_supported;
use super::{convert, sys};
use rdma_provider::VerbError;
use rdma_provider::contract::PostError;
use rdma_provider::types::{
    Data, DctTarget, RecvWr, RemoteAddr, SendOp, SendTarget, SendWr, Sge, Transport, UdTarget,
    WindowBind,
};

/// Maximum length of a chain on the stack. A longer list takes several chains, each with a
/// doorbell.
const CHAIN: usize = 32;

/// An element of a send chain, with the entry of its inline data.
#[repr(C)]
struct Element {
    wr: ibv_send_wr,
    inline: ibv_sge,
}

/// Returns the error for a request that the queue pair does not support, after `posted` others.
///
/// Drivers do not check: they assume that a datagram has an address handle, and differ in their
/// handling of operations that the transport lacks.
#[cold]
fn unsupported(posted: usize) -> PostError {
    PostError { posted, error: VerbError::new("ibv_post_send", VerbError::EINVAL) }
}

/// Posts one [plain](super::supported::is_plain) request. It is built in registers: the compiler
/// decides all branches.
///
/// # Safety
///
/// `qp` must be alive, and the request's memory kept as for `ibv_post_send(3)`.
#[inline]
pub(super) unsafe fn send_in_place(qp: *mut ibv_qp, wr: &SendWr<'_>) -> Result<(), VerbError> {
    let mut element = MaybeUninit::<Element>::uninit();
    let mut refused = ptr::null_mut();
    // SAFETY: S1, S3: the caller's promise; the element is local.
    let result = unsafe {
        write_send(element.as_mut_ptr(), ptr::null_mut(), wr);
        ibv_post_send(qp, element.as_mut_ptr().cast(), &raw mut refused)
    };
    sys::status("ibv_post_send", result)
}

/// Does the same as [`send_in_place`], with the calls of `ibv_wr_post(3)`.
///
/// # Safety
///
/// See [`send_in_place`]; the queue pair must have been created for these calls.
#[inline]
pub(super) unsafe fn extended_in_place(
    qp: *mut ibv_qp_ex,
    wr: &SendWr<'_>,
) -> Result<(), VerbError> {
    // SAFETY: S1, S3: the caller's promise; as in `extended`.
    let result = unsafe {
        ibv_wr_start(qp);
        if !request(qp, None, wr) {
            return Err(abort(qp));
        }
        ibv_wr_complete(qp)
    };
    sys::status("ibv_wr_complete", result)
}

/// Posts `list` up to the first request that `transport` does not support.
///
/// `post` takes a chain, and stores the refused element in its second argument.
#[inline]
pub(super) fn sends<'a>(
    transport: Transport,
    mut list: impl Iterator<Item = impl Borrow<SendWr<'a>>>,
    mut post: impl FnMut(*mut ibv_send_wr, *mut *mut ibv_send_wr) -> Result<(), VerbError>,
) -> Result<(), PostError> {
    let mut chain = [const { MaybeUninit::<Element>::uninit() }; CHAIN];
    let first = chain.as_mut_ptr().cast::<Element>();
    let mut posted = 0;
    loop {
        let (mut length, mut all_supported) = (0, true);
        for wr in list.by_ref().take(CHAIN) {
            all_supported = is_supported(transport, wr.borrow());
            if !all_supported {
                break;
            }
            // SAFETY: S3: `length` is within the local chain.
            unsafe {
                write_send(
                    first.wrapping_add(length),
                    first.wrapping_add(length + 1).cast(),
                    wr.borrow(),
                )
            };
            length += 1;
        }
        if length > 0 {
            // SAFETY: S3: written above.
            unsafe { (*first.wrapping_add(length - 1)).wr.next = ptr::null_mut() };
            let mut refused = ptr::null_mut();
            if let Err(error) = post(first.cast(), &raw mut refused) {
                return Err(PostError { posted: posted + position(first, refused.cast()), error });
            }
            posted += length;
        }
        if !all_supported {
            return Err(unsupported(posted));
        }
        if length < CHAIN {
            return Ok(());
        }
    }
}

/// Posts `list` with `post`, see [`sends`]. Receives without elements get those of `empty`.
#[inline]
pub(super) fn receives(
    list: &[RecvWr<'_>],
    empty: &[Sge],
    mut post: impl FnMut(*mut ibv_recv_wr, *mut *mut ibv_recv_wr) -> Result<(), VerbError>,
) -> Result<(), PostError> {
    let mut chain = [const { MaybeUninit::<ibv_recv_wr>::uninit() }; CHAIN];
    let first = chain.as_mut_ptr().cast::<ibv_recv_wr>();
    for (round, part) in list.chunks(CHAIN).enumerate() {
        for (index, wr) in part.iter().enumerate() {
            let next = if index + 1 < part.len() {
                first.wrapping_add(index + 1)
            } else {
                ptr::null_mut()
            };
            let sges = if wr.sges.is_empty() { empty } else { wr.sges };
            let (sg_list, num_sge) = (convert::sge_list(sges), sges.len() as i32);
            // SAFETY: S3: `index` is within the local chain.
            unsafe {
                first.wrapping_add(index).write(ibv_recv_wr {
                    wr_id: wr.wr_id.0,
                    next,
                    sg_list,
                    num_sge,
                })
            };
        }
        let mut refused = ptr::null_mut();
        if let Err(error) = post(first, &raw mut refused) {
            return Err(PostError { posted: round * CHAIN + position(first, refused), error });
        }
    }
    Ok(())
}

/// Returns the number of elements before `refused`; null means that the driver refused all.
fn position<T>(first: *mut T, refused: *mut T) -> usize {
    if refused.is_null() { 0 } else { (refused.addr() - first.addr()) / size_of::<T>() }
}

/// Writes the fields that `wr` uses; libibverbs reads no others.
///
/// # Safety
///
/// `element` must be valid for writes.
#[inline]
unsafe fn write_send(element: *mut Element, next: *mut ibv_send_wr, wr: &SendWr<'_>) {
    use ibv_wr_opcode as code;
    // SAFETY: S3: valid for writes; the fields have no destructors.
    unsafe {
        let raw = &raw mut (*element).wr;
        let immediate = |value| (*raw).imm_data_invalidated_rkey_union.imm_data = value;
        let remote = |at: RemoteAddr| {
            (*raw).wr.rdma.remote_addr = at.addr;
            (*raw).wr.rdma.rkey = at.rkey.0;
        };
        let atomic = |at: RemoteAddr, compare_add, swap| {
            (*raw).wr.atomic =
                atomic_t { remote_addr: at.addr, compare_add, swap, rkey: at.rkey.0 };
        };

        let opcode = match wr.op {
            SendOp::Send => code::IBV_WR_SEND,
            SendOp::SendWithImm(imm) => {
                immediate(imm.0.to_be());
                code::IBV_WR_SEND_WITH_IMM
            }
            SendOp::SendWithInvalidate(rkey) => {
                immediate(rkey.0);
                code::IBV_WR_SEND_WITH_INV
            }
            SendOp::Write(at) => {
                remote(at);
                code::IBV_WR_RDMA_WRITE
            }
            SendOp::WriteWithImm(at, imm) => {
                remote(at);
                immediate(imm.0.to_be());
                code::IBV_WR_RDMA_WRITE_WITH_IMM
            }
            SendOp::Read(at) => {
                remote(at);
                code::IBV_WR_RDMA_READ
            }
            SendOp::CompareSwap { remote, compare, swap } => {
                atomic(remote, compare, swap);
                code::IBV_WR_ATOMIC_CMP_AND_SWP
            }
            SendOp::FetchAdd { remote, add } => {
                atomic(remote, add, 0);
                code::IBV_WR_ATOMIC_FETCH_AND_ADD
            }
            SendOp::LocalInvalidate(rkey) => {
                immediate(rkey.0);
                code::IBV_WR_LOCAL_INV
            }
            SendOp::BindWindow => {
                // Drivers refuse a value other than 0.
                immediate(0);
                code::IBV_WR_BIND_MW
            }
        };
        (*raw).wr_id = wr.wr_id.0;
        (*raw).next = next;
        (*raw).opcode = opcode;
        // Requests to DC targets are never posted in chains.
        if let Some(SendTarget::Datagram(UdTarget { handle, qpn, qkey, .. })) = wr.target {
            (*raw).wr.ud = ud_t {
                ah: AddressHandle::from_number(handle).raw.as_ptr(),
                remote_qpn: qpn.0,
                remote_qkey: qkey.0,
            };
        }
        let flags = convert::send_flags(wr.flags);
        match wr.data {
            Data::Sges(sges) => {
                (*raw).sg_list = convert::sge_list(sges);
                (*raw).num_sge = sges.len() as i32;
                (*raw).send_flags = flags;
            }
            Data::Inline(bytes) => {
                (*element).inline = ibv_sge {
                    addr: bytes.as_ptr().addr() as u64,
                    length: bytes.len() as u32,
                    lkey: 0,
                };
                (*raw).sg_list = &raw mut (*element).inline;
                (*raw).num_sge = 1;
                (*raw).send_flags = flags | ibv_send_flags::IBV_SEND_INLINE.0;
            }
            Data::Window(bind) => {
                (*raw).sg_list = ptr::null_mut();
                (*raw).num_sge = 0;
                (*raw).send_flags = flags;
                (*raw).bind_mw_tso_union.bind_mw = bind_mw_t {
                    mw: window(bind),
                    rkey: bind.rkey.0,
                    bind_info: convert::bind_info(bind),
                };
            }
        }
    }
}

/// Returns the window of `bind` after restoring the key of its previous binding, which drivers
/// compare and rely on the program to update.
///
/// # Safety
///
/// The window must be alive, and no other binding of it may be posted concurrently.
unsafe fn window(bind: &WindowBind) -> *mut ibv_mw {
    let window: *mut ibv_mw = ptr::with_exposed_provenance_mut(bind.window);
    // SAFETY: S3: the caller's promise.
    unsafe { (*window).rkey = bind.current.0 };
    window
}

/// Posts `list` up to the first request that `transport` does not support, with the calls of
/// `ibv_wr_post(3)`. Posts either all of these requests or none.
///
/// # Safety
///
/// `qp` must be alive, `dc` the same queue pair if it is a DC initiator, and the list's memory kept
/// as for `ibv_post_send(3)`.
#[inline]
pub(super) unsafe fn extended<'a>(
    qp: *mut ibv_qp_ex,
    dc: Option<NonNull<mlx5dv_qp_ex>>,
    transport: Transport,
    list: impl Iterator<Item = impl Borrow<SendWr<'a>>>,
) -> Result<(), PostError> {
    let (mut posted, mut all_supported) = (0, true);
    // SAFETY: S1, S3: the caller's promise. Between start and complete, each request is one
    // operation and one or two setters, as `ibv_wr_post(3)` requires.
    let result = unsafe {
        ibv_wr_start(qp);
        for wr in list {
            all_supported = is_supported(transport, wr.borrow());
            if !all_supported {
                break;
            }
            if !request(qp, dc, wr.borrow()) {
                return Err(PostError { posted: 0, error: abort(qp) });
            }
            posted += 1;
        }
        if posted == 0 {
            abort(qp);
            0
        } else {
            ibv_wr_complete(qp)
        }
    };
    sys::status("ibv_wr_complete", result).map_err(|error| PostError { posted: 0, error })?;
    if all_supported { Ok(()) } else { Err(unsupported(posted)) }
}

/// Aborts the batch, because the queue pair was not created for an operation.
///
/// # Safety
///
/// See [`extended`]; `ibv_wr_start` must have been called.
#[cold]
unsafe fn abort(qp: *mut ibv_qp_ex) -> VerbError {
    // SAFETY: S3: the queue pair is alive.
    unsafe { ibv_wr_abort(qp) };
    VerbError::new("ibv_wr_start", VerbError::EINVAL)
}

/// Adds one work request. Returns false if the queue pair was not created for the operation: its
/// function pointer may be null.
///
/// # Safety
///
/// See [`extended`]; `ibv_wr_start` must have been called.
#[inline]
unsafe fn request(qp: *mut ibv_qp_ex, dc: Option<NonNull<mlx5dv_qp_ex>>, wr: &SendWr<'_>) -> bool {
    macro_rules! call {
        ($function:ident $(, $argument:expr)*) => {
            match (*qp).$function {
                Some(function) => function(qp $(, $argument)*),
                None => return false,
            }
        };
    }
    // SAFETY: S1, S3: as for `extended`.
    unsafe {
        (*qp).wr_id = wr.wr_id.0;
        (*qp).wr_flags = convert::send_flags(wr.flags);
        match wr.op {
            // These two have no data and take no setter.
            SendOp::LocalInvalidate(rkey) => {
                call!(wr_local_inv, rkey.0);
                return true;
            }
            SendOp::BindWindow => {
                let Data::Window(bind) = wr.data else { return false };
                call!(wr_bind_mw, window(bind), bind.rkey.0, &convert::bind_info(bind));
                return true;
            }
            SendOp::Send => call!(wr_send),
            SendOp::SendWithImm(imm) => call!(wr_send_imm, imm.0.to_be()),
            SendOp::SendWithInvalidate(rkey) => call!(wr_send_inv, rkey.0),
            SendOp::Write(at) => call!(wr_rdma_write, at.rkey.0, at.addr),
            SendOp::WriteWithImm(at, imm) => {
                call!(wr_rdma_write_imm, at.rkey.0, at.addr, imm.0.to_be())
            }
            SendOp::Read(at) => call!(wr_rdma_read, at.rkey.0, at.addr),
            SendOp::CompareSwap { remote, compare, swap } => {
                call!(wr_atomic_cmp_swp, remote.rkey.0, remote.addr, compare, swap);
            }
            SendOp::FetchAdd { remote, add } => {
                call!(wr_atomic_fetch_add, remote.rkey.0, remote.addr, add)
            }
        }
        match wr.target {
            None => {}
            Some(SendTarget::Datagram(UdTarget { handle, qpn, qkey, .. })) => {
                call!(
                    wr_set_ud_addr,
                    AddressHandle::from_number(handle).raw.as_ptr(),
                    qpn.0,
                    qkey.0
                );
            }
            Some(SendTarget::Dc(DctTarget { handle, number, key, .. })) => {
                let Some(dc) = dc.map(NonNull::as_ptr) else { return false };
                let handle = AddressHandle::from_number(handle).raw.as_ptr();
                let Some(set) = (*dc).wr_set_dc_addr else { return false };
                set(dc, handle, number.0, key.0);
            }
        }
        match wr.data {
            Data::Sges(&[sge]) => call!(wr_set_sge, sge.lkey.0, sge.addr, sge.length),
            Data::Sges(sges) => call!(wr_set_sge_list, sges.len(), convert::sge_list(sges)),
            Data::Inline(bytes) => {
                call!(wr_set_inline_data, bytes.as_ptr().cast_mut().cast(), bytes.len())
            }
            Data::Window(_) => return false,
        }
    }
    true
}

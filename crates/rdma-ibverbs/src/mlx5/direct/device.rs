//! Whether a device posts directly, and the queues of one that does.

use std::mem;
use std::ptr::NonNull;
use std::sync::Arc;

use crate::ffi::*;
use rdma_provider::VerbError;
use rdma_provider::types::{QpCaps, ScatterToCqe, Transport};

use super::completion_queue::{self, CompletionQueue};
use super::doorbell::{ArmRegister, Record, Register};
use super::layout::BLOCK;
use super::objects;
use super::queue_pair::QueuePair;
use super::queues::{Queues, Receives};
use super::receive_queue::{Entries, ReceiveQueue};
use super::registers::ThreadDomain;
use super::ring::Ring;
use super::send_queue::{self, SendQueue};
use super::shared_receive_queue::SharedReceiveQueue;
use crate::sys;

/// A device that posts directly.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Device {
    /// BlueFlame is allowed.
    blue_flame: bool,
    /// The adapter may put short data into CQEs: all buffers are addresses of this process.
    scatter: bool,
    /// The adapter and libmlx5 can compress completion queue entries.
    pub(crate) offers_compression: bool,
    /// Completion queues are created with compressed entries. False at first.
    pub(crate) compressed: bool,
}

/// `MLX5DV_CONTEXT_MASK_CQE_COMPRESION`, spelt thus.
const COMPRESSION: u64 = mlx5dv_context_comp_mask::MLX5DV_CONTEXT_MASK_CQE_COMPRESION.0 as u64;

/// Returns whether a device compresses entries of the size that libmlx5 chooses: 128 bytes if
/// `MLX5_CQE_SIZE` is 128.
fn compresses(found: &mlx5dv_context) -> bool {
    let caps = &found.cqe_comp_caps;
    let large = std::env::var("MLX5_CQE_SIZE").is_ok_and(|size| size.trim() == "128");
    let large_flag = mlx5dv_context_flags::MLX5DV_CONTEXT_FLAGS_CQE_128B_COMP.0;
    found.comp_mask & COMPRESSION != 0
        && caps.max_num > 1
        && caps.supported_format & objects::HASH != 0
        && (!large || found.flags & u64::from(large_flag) != 0)
        && Library::Mlx5.has(c"mlx5dv_create_cq")
}

/// The error of a program without feature `mlx5`.
const NO_FEATURE: VerbError = unknown("direct data path (needs feature mlx5)");
/// The error of another driver's device.
const NO_MLX5: VerbError = unknown("direct data path (needs an mlx5 device and libmlx5)");

impl Device {
    /// Errors of [`new`](Self::new) that are no fault of an adapter.
    pub(crate) const EXPECTED: [VerbError; 2] = [NO_FEATURE, NO_MLX5];

    /// Returns the direct path of an open device, or an error that names what it lacks.
    /// `same_addresses`: work requests name all memory by its address in this process.
    pub(crate) fn new(
        context: NonNull<ibv_context>,
        same_addresses: bool,
    ) -> Result<Self, VerbError> {
        if !cfg!(feature = "mlx5") {
            return Err(NO_FEATURE);
        }
        if !cfg!(any(target_arch = "x86_64", target_arch = "aarch64")) {
            return Err(unknown("direct data path (needs a processor of type x86-64 or aarch64)"));
        }
        // SAFETY: S3: zeros are valid; the context is open, the result local.
        let mut found: mlx5dv_context = unsafe { mem::zeroed() };
        found.comp_mask = COMPRESSION;
        // SAFETY: S3: as above; fails for another driver's device.
        let asked = unsafe { mlx5dv_query_device(context.as_ptr(), &raw mut found) };
        sys::status("mlx5dv_query_device", asked).map_err(|_| NO_MLX5)?;
        if !Library::Mlx5.has(c"mlx5dv_init_obj") {
            return Err(unknown("direct data path (needs mlx5dv_init_obj of libmlx5)"));
        }
        let first = mlx5dv_context_flags::MLX5DV_CONTEXT_FLAGS_CQE_V1.0;
        if found.flags & u64::from(first) == 0 {
            return Err(unknown("direct data path (needs version 1 of completion queue entries)"));
        }
        // These add checksums to WQEs, which this code does not write. libmlx5 ignores the value.
        if std::env::var_os("MLX5_QP_SIGNATURE").is_some() {
            return Err(unknown("direct data path (needs MLX5_QP_SIGNATURE to be unset)"));
        }
        if std::env::var_os("MLX5_SRQ_SIGNATURE").is_some() {
            return Err(unknown("direct data path (needs MLX5_SRQ_SIGNATURE to be unset)"));
        }
        Ok(Self {
            blue_flame: std::env::var_os("MLX5_SHUT_UP_BF").is_none_or(|value| value == "0"),
            // libmlx5 ignores it with MLX5DV_QP_CREATE_ALLOW_SCATTER_TO_CQE.
            scatter: same_addresses
                && std::env::var_os("MLX5_SCATTER_TO_CQE").is_none_or(|value| value != "0"),
            offers_compression: compresses(&found),
            compressed: false,
        })
    }

    /// Returns the creation flags of a queue pair or DC target, if it needs any.
    pub(crate) fn create_flags(self, scatter: ScatterToCqe) -> Option<mlx5dv_qp_create_flags> {
        if !self.scatter || scatter == ScatterToCqe::Off {
            return Some(mlx5dv_qp_create_flags::MLX5DV_QP_CREATE_DISABLE_SCATTER_TO_CQE);
        }
        (scatter == ScatterToCqe::All)
            .then_some(mlx5dv_qp_create_flags::MLX5DV_QP_CREATE_ALLOW_SCATTER_TO_CQE)
    }

    /// Reads `cq` directly from now on.
    ///
    /// # Safety
    ///
    /// `cq` is a new completion queue of this device, with compressed entries if and only if
    /// [`compressed`](Self::compressed) is set, and outlives the result.
    pub(crate) unsafe fn completion_queue(
        self,
        cq: NonNull<ibv_cq>,
    ) -> Result<CompletionQueue, VerbError> {
        // SAFETY: S3: the caller's promise.
        let raw = unsafe { objects::completion_queue(cq) }?;
        let records = present(raw.dbrec, "mlx5dv_init_obj (records of the completion queue)")?;
        let page =
            present(raw.cq_uar.cast(), "mlx5dv_init_obj (register of the completion queue)")?;
        let start = present(raw.buf.cast(), "mlx5dv_init_obj (completion queue)")?;
        if !raw.cqe_cnt.is_power_of_two() || !matches!(raw.cqe_size, 64 | 128) {
            return Err(unknown("mlx5dv_init_obj (format of the completion queue)"));
        }
        // SAFETY: S3: libmlx5's memory and register, which live as long as the queue.
        unsafe {
            Ok(CompletionQueue::new(completion_queue::Setup {
                start,
                entries: raw.cqe_cnt,
                entry_size: raw.cqe_size,
                consumer: Record::new(records),
                arm: Record::new(records.add(1)),
                register: ArmRegister::new(page),
                number: raw.cqn,
                compressed: self.compressed,
            }))
        }
    }

    /// Posts to `srq` directly from now on.
    ///
    /// # Safety
    ///
    /// `srq` is a new shared receive queue of this device, and outlives the result.
    pub(crate) unsafe fn shared_receive_queue(
        self,
        srq: NonNull<ibv_srq>,
    ) -> Result<SharedReceiveQueue, VerbError> {
        // SAFETY: S3: the caller's promise.
        let raw = unsafe { objects::shared_receive_queue(srq) }?;
        let record = present(raw.dbrec, "mlx5dv_init_obj (record of the shared receive queue)")?;
        let start = present(raw.buf.cast(), "mlx5dv_init_obj (shared receive queue)")?;
        let (Ok(head), Ok(tail)) = (u16::try_from(raw.head), u16::try_from(raw.tail)) else {
            return Err(unknown("mlx5dv_init_obj (format of the shared receive queue)"));
        };
        if head > tail || !raw.stride.is_power_of_two() || raw.stride < 32 {
            return Err(unknown("mlx5dv_init_obj (format of the shared receive queue)"));
        }
        // The free entries of a new queue follow each other. libmlx5 may keep further ones, which
        // it only uses after page faults that it handles itself.
        let count = u32::from(tail) + 1;
        // SAFETY: S3: libmlx5's memory, which lives as long as the queue.
        unsafe {
            let entries = Entries::new(start, raw.stride, count);
            Ok(SharedReceiveQueue::new(entries, Record::new(record), head, tail))
        }
    }

    /// Posts to `qp` directly from now on.
    ///
    /// # Safety
    ///
    /// `qp` is a new queue pair of this device, created in the protection domain of `domain`. It
    /// outlives the result, as do the queues that it uses, which are those given here.
    pub(crate) unsafe fn queue_pair(
        self,
        qp: NonNull<ibv_qp>,
        transport: Transport,
        caps: &QpCaps,
        blue_flame: bool,
        uses: Uses<'_>,
        domain: Arc<ThreadDomain>,
    ) -> Result<QueuePair, VerbError> {
        // SAFETY: S3: the caller's promise.
        let (raw, qpn) = unsafe { (objects::queue_pair(qp)?, qp.as_ref().qp_num) };
        let records = present(raw.dbrec, "mlx5dv_init_obj (records of the queue pair)")?;
        let register = present(raw.bf.reg.cast(), "mlx5dv_init_obj (register of the queue pair)")?;
        let half = if self.blue_flame { raw.bf.size } else { 0 };
        let send = if raw.sq.wqe_cnt == 0 {
            None
        } else {
            let start = present(raw.sq.buf.cast(), "mlx5dv_init_obj (send queue)")?;
            let blocks = raw.sq.wqe_cnt;
            let fits = caps.max_send_wr <= blocks && blocks <= 1 << 15;
            if !blocks.is_power_of_two() || !fits || raw.sq.stride != BLOCK as u32 {
                return Err(unknown("mlx5dv_init_obj (format of the send queue)"));
            }
            // SAFETY: S3: libmlx5's memory and register, which live as long as the queue pair and
            // its thread domain.
            Some(unsafe {
                SendQueue::new(send_queue::Setup {
                    qpn,
                    transport,
                    max_wr: caps.max_send_wr,
                    max_sge: caps.max_send_sge,
                    max_inline: caps.max_inline,
                    ring: Ring::from_raw(start, blocks),
                    record: Record::new(records.add(1)),
                    register: domain.register(|shared| Register::new(register, half, shared)),
                    blue_flame,
                })
            })
        };
        let receive = match uses.srq {
            Some(srq) => Receives::Shared(srq.clone()),
            None if raw.rq.wqe_cnt == 0 => Receives::None,
            None => {
                let start = present(raw.rq.buf.cast(), "mlx5dv_init_obj (receive queue)")?;
                let known = raw.rq.wqe_cnt.is_power_of_two() && raw.rq.wqe_cnt <= 1 << 15;
                if !known || !raw.rq.stride.is_multiple_of(16) || raw.rq.stride == 0 {
                    return Err(unknown("mlx5dv_init_obj (format of the receive queue)"));
                }
                // SAFETY: S3: as above.
                unsafe {
                    let entries = Entries::new(start, raw.rq.stride, raw.rq.wqe_cnt);
                    Receives::Own(Arc::new(ReceiveQueue::new(entries, Record::new(records))))
                }
            }
        };
        let queues = Arc::new(Queues { send: send.map(Arc::new), receive });
        let (send_cq, recv_cq) = (uses.send_cq.clone(), uses.recv_cq.clone());
        Ok(QueuePair::attached(qpn, queues, send_cq, recv_cq, domain))
    }
}

/// The queues that a queue pair uses.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Uses<'a> {
    pub(crate) send_cq: &'a Arc<CompletionQueue>,
    pub(crate) recv_cq: &'a Arc<CompletionQueue>,
    pub(crate) srq: Option<&'a Arc<SharedReceiveQueue>>,
}

fn present<T>(pointer: *mut T, what: &'static str) -> Result<NonNull<T>, VerbError> {
    NonNull::new(pointer).ok_or(unknown(what))
}

/// Returns the error for what this code does not support.
const fn unknown(what: &'static str) -> VerbError {
    VerbError::new(what, VerbError::EOPNOTSUPP)
}

//! Work completions.

use std::fmt;

use bitflags::bitflags;

use super::{Imm, Qpn, Rkey, WrId};

/// The outcome of a work request, codes of `enum ibv_wc_status`.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct WcStatus(pub u32);

macro_rules! statuses {
    ($($(#[$doc:meta])* $name:ident = $code:literal, $text:literal;)*) => {
        impl WcStatus {
            $($(#[$doc])* pub const $name: Self = Self($code);)*

            const fn name(self) -> Option<(&'static str, &'static str)> {
                match self.0 {
                    $($code => Some((stringify!($name), $text)),)*
                    _ => None,
                }
            }
        }
    };
}

statuses! {
    /// Success.
    SUCCESS = 0, "success";
    /// A message is too long: for the queue pair, or for the receive.
    LOC_LEN_ERR = 1, "local length error: the message exceeds the receive or a limit";
    /// The queue pair refused an inconsistent work request.
    LOC_QP_OP_ERR = 2, "local queue pair operation error: the work request is inconsistent";
    /// End-to-end context operation (unused).
    LOC_EEC_OP_ERR = 3, "local end-to-end context operation error";
    /// A local scatter/gather element is not covered by its registration.
    LOC_PROT_ERR = 4, "local protection error: a local buffer is not covered by its registration";
    /// The queue pair entered ERR before the work completed.
    WR_FLUSH_ERR = 5, "flushed: the queue pair entered the error state";
    /// A memory window could not be bound.
    MW_BIND_ERR = 6, "memory window bind error: wrong key, range or rights";
    /// The peer's response is malformed.
    BAD_RESP_ERR = 7, "bad response: the peer's response is malformed";
    /// A request accessed a local receive buffer without permission.
    LOC_ACCESS_ERR = 8, "local access error: the peer lacked rights to a local buffer";
    /// The peer refused the request: too long, misaligned or not enabled.
    REM_INV_REQ_ERR = 9, "remote invalid request: too long, misaligned or not enabled at the peer";
    /// The peer denied access: wrong key, range or rights.
    REM_ACCESS_ERR = 10, "remote access error: wrong key, range or rights";
    /// The peer failed to complete the request.
    REM_OP_ERR = 11, "remote operation error: the peer failed to complete the request";
    /// The peer did not respond.
    RETRY_EXC_ERR = 12, "transport retries exceeded: the peer does not answer";
    /// The peer had no receive posted.
    RNR_RETRY_EXC_ERR = 13, "receiver-not-ready retries exceeded: the peer has no receive posted";
    /// Reliable datagram domain violation (unused).
    LOC_RDD_VIOL_ERR = 14, "local reliable datagram domain violation";
    /// Remote invalid reliable datagram request (unused).
    REM_INV_RD_REQ_ERR = 15, "remote invalid reliable datagram request";
    /// The peer aborted.
    REM_ABORT_ERR = 16, "remote abort: the peer aborted the request";
    /// Invalid end-to-end context number (unused).
    INV_EECN_ERR = 17, "invalid end-to-end context number";
    /// Invalid end-to-end context state (unused).
    INV_EEC_STATE_ERR = 18, "invalid end-to-end context state";
    /// The device failed.
    FATAL_ERR = 19, "fatal device error";
    /// The response timed out.
    RESP_TIMEOUT_ERR = 20, "response timeout: the peer did not respond in time";
    /// Unspecified error.
    GENERAL_ERR = 21, "general error: the device gave no reason";
}

impl WcStatus {
    /// Returns true for [`WcStatus::SUCCESS`].
    #[must_use]
    pub const fn is_success(self) -> bool {
        self.0 == 0
    }
}

impl fmt::Debug for WcStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some((name, _)) => f.write_str(name),
            None => write!(f, "WcStatus({})", self.0),
        }
    }
}

impl fmt::Display for WcStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some((_, text)) => f.write_str(text),
            None => write!(f, "unknown completion status {}", self.0),
        }
    }
}

/// The completed operation, codes of `enum ibv_wc_opcode`. Undefined on failure.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct WcOpcode(pub u32);

macro_rules! opcodes {
    ($($(#[$doc:meta])* $name:ident = $code:literal;)*) => {
        impl WcOpcode {
            $($(#[$doc])* pub const $name: Self = Self($code);)*
        }

        impl fmt::Debug for WcOpcode {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                match self.0 {
                    $($code => f.write_str(stringify!($name)),)*
                    code => write!(f, "WcOpcode({code})"),
                }
            }
        }
    };
}

opcodes! {
    /// SEND of any kind.
    SEND = 0;
    /// WRITE of any kind.
    RDMA_WRITE = 1;
    /// READ.
    RDMA_READ = 2;
    /// Compare-and-swap.
    COMP_SWAP = 3;
    /// Fetch-and-add.
    FETCH_ADD = 4;
    /// A memory window was bound.
    BIND_MW = 5;
    /// A local key was invalidated.
    LOCAL_INV = 6;
    /// A message arrived.
    RECV = 128;
    /// A peer's WRITE consumed a receive.
    RECV_RDMA_WITH_IMM = 129;
}

bitflags! {
    /// The optional fields that are set, bits of `enum ibv_wc_flags`.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
    #[repr(transparent)]
    pub struct WcFlags: u32 {
        /// The first 40 bytes received are the global routing header (UD).
        const GRH = 1;
        /// Immediate data arrived.
        const WITH_IMM = 1 << 1;
        /// The peer invalidated a local key.
        const WITH_INV = 1 << 3;
    }
}

/// A work completion, `ibv_poll_cq(3)`.
///
/// On failure only `wr_id`, `status`, `qpn` and `vendor_error` are defined. For a message that
/// exceeds its receive (`LOC_LEN_ERR`, `RECV`), the software device also sets `byte_len` to the
/// bytes that arrived and `imm_or_rkey` to the length of the receive.
// Layout of `struct ibv_wc`, written in place by libibverbs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct WorkCompletion {
    /// Identifier of the work request.
    pub wr_id: WrId,
    /// Outcome.
    pub status: WcStatus,
    /// Operation.
    pub opcode: WcOpcode,
    /// Vendor-specific error code.
    pub vendor_error: u32,
    /// Bytes received or read (plus 40 for UD).
    pub byte_len: u32,
    /// Big-endian immediate data, or the key; see [`imm`](Self::imm) and
    /// [`invalidated`](Self::invalidated).
    pub imm_or_rkey: u32,
    /// Local queue pair.
    pub qpn: Qpn,
    /// Sender's queue pair number (UD).
    pub src_qpn: Qpn,
    /// Optional fields that are set.
    pub flags: WcFlags,
    /// Partition key index (UD).
    pub pkey_index: u16,
    /// Sender's LID (UD on InfiniBand).
    pub src_lid: u16,
    /// Service level (UD).
    pub service_level: u8,
    /// Low bits of the destination LID (UD on InfiniBand).
    pub dest_path_bits: u8,
}

impl WorkCompletion {
    /// Returns the immediate data, if any.
    #[must_use]
    pub fn imm(&self) -> Option<Imm> {
        self.flags.contains(WcFlags::WITH_IMM).then_some(Imm(u32::from_be(self.imm_or_rkey)))
    }

    /// Returns the local key that the peer invalidated, if any.
    #[must_use]
    pub fn invalidated(&self) -> Option<Rkey> {
        self.flags.contains(WcFlags::WITH_INV).then_some(Rkey(self.imm_or_rkey))
    }
}

impl WorkCompletion {
    /// A completion with all fields zero.
    pub const EMPTY: Self = Self {
        wr_id: WrId(0),
        status: WcStatus::SUCCESS,
        opcode: WcOpcode(0),
        vendor_error: 0,
        byte_len: 0,
        imm_or_rkey: 0,
        qpn: Qpn(0),
        src_qpn: Qpn(0),
        flags: WcFlags::empty(),
        pkey_index: 0,
        src_lid: 0,
        service_level: 0,
        dest_path_bits: 0,
    };
}

/// The time of a device's clock, in ticks of [`ClockAttr::khz`](super::ClockAttr::khz), as
/// `ibv_wc_read_completion_ts(3)` returns it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Timestamp(pub u64);

/// A completion and the time at which the device wrote it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TimestampedCompletion {
    /// The completion.
    pub completion: WorkCompletion,
    /// The time; 0 if the work request has failed.
    pub timestamp: Timestamp,
}

impl Default for WorkCompletion {
    fn default() -> Self {
        Self::EMPTY
    }
}

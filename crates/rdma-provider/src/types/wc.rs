//! Work completions: what a device answers.

use std::fmt;

use bitflags::bitflags;

use super::{Imm, Qpn, Rkey, WrId};

/// Outcome of a work request, codes of `enum ibv_wc_status`.
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
    /// Done.
    SUCCESS = 0, "success";
    /// A message did not fit: posted send longer than allowed, or message longer than the receive.
    LOC_LEN_ERR = 1, "local length error: the message does not fit";
    /// The queue pair refused the work request.
    LOC_QP_OP_ERR = 2, "local queue pair operation error: the work request is inconsistent";
    /// End-to-end context operation (unused).
    LOC_EEC_OP_ERR = 3, "local end-to-end context operation error";
    /// A local scatter/gather element is not covered by its registration.
    LOC_PROT_ERR = 4, "local protection error: a local buffer is not covered by its registration";
    /// The queue pair went to the error state before the work request was done.
    WR_FLUSH_ERR = 5, "flushed: the queue pair is in the error state";
    /// A memory window could not be bound.
    MW_BIND_ERR = 6, "memory window bind error";
    /// The peer answered with nonsense.
    BAD_RESP_ERR = 7, "bad response from the peer";
    /// A local receive buffer was hit by a request it does not allow.
    LOC_ACCESS_ERR = 8, "local access error";
    /// The peer holds the request for invalid: too long, misaligned or not enabled.
    REM_INV_REQ_ERR = 9, "remote invalid request: too long, misaligned or not enabled at the peer";
    /// The peer's memory does not allow it: wrong key, range or rights.
    REM_ACCESS_ERR = 10, "remote access error: wrong key, range or rights";
    /// The peer could not complete it for reasons of its own.
    REM_OP_ERR = 11, "remote operation error: the peer could not complete it";
    /// The peer did not answer.
    RETRY_EXC_ERR = 12, "transport retries exceeded: the peer does not answer";
    /// The peer had no receive posted, for too long.
    RNR_RETRY_EXC_ERR = 13, "receiver-not-ready retries exceeded: the peer has no receive posted";
    /// Reliable datagram domain violation (unused).
    LOC_RDD_VIOL_ERR = 14, "local reliable datagram domain violation";
    /// Remote invalid reliable datagram request (unused).
    REM_INV_RD_REQ_ERR = 15, "remote invalid reliable datagram request";
    /// The peer aborted.
    REM_ABORT_ERR = 16, "remote aborted";
    /// Invalid end-to-end context number (unused).
    INV_EECN_ERR = 17, "invalid end-to-end context number";
    /// Invalid end-to-end context state (unused).
    INV_EEC_STATE_ERR = 18, "invalid end-to-end context state";
    /// The device failed.
    FATAL_ERR = 19, "fatal device error";
    /// No response in time.
    RESP_TIMEOUT_ERR = 20, "response timeout";
    /// Unspecified.
    GENERAL_ERR = 21, "general error";
}

impl WcStatus {
    /// True for [`WcStatus::SUCCESS`].
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

/// Which kind of work completed, codes of `enum ibv_wc_opcode`. Defined only if the status is success.
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
    /// A key of ours was invalidated.
    LOCAL_INV = 6;
    /// A message arrived.
    RECV = 128;
    /// A peer's WRITE_WITH_IMM consumed a receive.
    RECV_RDMA_WITH_IMM = 129;
}

bitflags! {
    /// Which optional fields of a completion hold; the bits of `enum ibv_wc_flags`.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
    #[repr(transparent)]
    pub struct WcFlags: u32 {
        /// The first 40 bytes of the receive are the global routing header (UD).
        const GRH = 1;
        /// Immediate data arrived.
        const WITH_IMM = 1 << 1;
        /// The peer invalidated a key of ours.
        const WITH_INV = 1 << 3;
    }
}

/// Work completion, `ibv_poll_cq(3)`.
///
/// If [`status`](Self::status) is not success, only `wr_id`, `status`, `qpn` and `vendor_error` are defined. The software device
/// sets two more for a receive that is too small (`LOC_LEN_ERR`, `RECV`): `byte_len` is how much of the message had arrived,
/// `imm_or_rkey` the length of the receive.
// Laid out as `struct ibv_wc`: libibverbs writes it in place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct WorkCompletion {
    /// Of the work request.
    pub wr_id: WrId,
    /// Outcome.
    pub status: WcStatus,
    /// What completed.
    pub opcode: WcOpcode,
    /// The device's own code of an error.
    pub vendor_error: u32,
    /// Bytes received or read (40 more for UD).
    pub byte_len: u32,
    /// Immediate data as they stood on the wire, big-endian, or the key invalidated: [`imm`](Self::imm) or
    /// [`invalidated`](Self::invalidated) tells.
    pub imm_or_rkey: u32,
    /// Queue pair that the work belonged to.
    pub qpn: Qpn,
    /// Sender (UD).
    pub src_qpn: Qpn,
    /// Which optional fields hold.
    pub flags: WcFlags,
    /// Index of the partition key (UD, management datagrams).
    pub pkey_index: u16,
    /// Local identifier of the sender (UD on InfiniBand).
    pub src_lid: u16,
    /// Service level (UD).
    pub service_level: u8,
    /// Low bits of the local identifier that it was sent to (UD on InfiniBand).
    pub dest_path_bits: u8,
}

impl WorkCompletion {
    /// Immediate data, if any arrived.
    #[must_use]
    pub fn imm(&self) -> Option<Imm> {
        self.flags.contains(WcFlags::WITH_IMM).then_some(Imm(u32::from_be(self.imm_or_rkey)))
    }

    /// The key of ours that the peer invalidated, if it did.
    #[must_use]
    pub fn invalidated(&self) -> Option<Rkey> {
        self.flags.contains(WcFlags::WITH_INV).then_some(Rkey(self.imm_or_rkey))
    }
}

impl WorkCompletion {
    /// A completion with every field zero, to be written over.
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

impl Default for WorkCompletion {
    fn default() -> Self {
        Self::EMPTY
    }
}

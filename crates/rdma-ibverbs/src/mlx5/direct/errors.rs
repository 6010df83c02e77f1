//! Failures: the status of an error CQE, and the reason why a completion queue is unusable.

use std::fmt;

use rdma_provider::VerbError;
use rdma_provider::types::WcStatus;

/// Returns the status of an error CQE by its syndrome (`MLX5_CQE_SYNDROME_*`), as libmlx5 does.
#[must_use]
pub const fn status(syndrome: u8) -> WcStatus {
    match syndrome {
        0x01 => WcStatus::LOC_LEN_ERR,
        0x02 => WcStatus::LOC_QP_OP_ERR,
        0x04 => WcStatus::LOC_PROT_ERR,
        0x05 => WcStatus::WR_FLUSH_ERR,
        0x06 => WcStatus::MW_BIND_ERR,
        0x10 => WcStatus::BAD_RESP_ERR,
        0x11 => WcStatus::LOC_ACCESS_ERR,
        0x12 => WcStatus::REM_INV_REQ_ERR,
        0x13 => WcStatus::REM_ACCESS_ERR,
        0x14 => WcStatus::REM_OP_ERR,
        0x15 => WcStatus::RETRY_EXC_ERR,
        0x16 => WcStatus::RNR_RETRY_EXC_ERR,
        0x22 => WcStatus::REM_ABORT_ERR,
        _ => WcStatus::GENERAL_ERR,
    }
}

/// Syndrome and vendor code of a shared receive that met a page fault; it is posted again.
pub(super) const PAGE_FAULT: (u8, u8) = (0x22, 0x93);

/// The reason why a completion queue cannot be read further: the adapter and this code disagree
/// about the format, or memory was overwritten.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum BadEntry {
    /// The CQE has a kind or format that no queue here produces.
    Kind {
        /// The last byte of the CQE.
        op_own: u8,
    },
    /// A request completed with an operation that is unknown or differs from its WQE.
    Opcode {
        /// The operation's code.
        opcode: u8,
    },
    /// The CQE names a queue pair that does not use this completion queue.
    QueuePair {
        /// The queue pair number.
        qpn: u32,
    },
    /// The CQE names a WQE that is not in flight.
    Counter {
        /// The queue pair number.
        qpn: u32,
        /// The index of the WQE.
        counter: u16,
    },
    /// The free entries of a shared receive queue lead to one that it does not have.
    Link {
        /// The queue pair number.
        qpn: u32,
        /// The index of that entry.
        entry: u16,
    },
    /// The CQE claims more inline data than it has space for.
    Length {
        /// The queue pair number.
        qpn: u32,
        /// The length in bytes.
        length: u32,
    },
    /// A compressed session has fewer than two CQEs, or more than the queue.
    Session {
        /// The number of CQEs in the session.
        entries: u32,
    },
}

impl BadEntry {
    /// Returns the error of all later polls.
    #[must_use]
    pub const fn verb_error(self) -> VerbError {
        let verb = match self {
            Self::Kind { .. } => "poll of an mlx5 completion queue (unknown kind of entry)",
            Self::Opcode { .. } => "poll of an mlx5 completion queue (unexpected operation)",
            Self::QueuePair { .. } => "poll of an mlx5 completion queue (unknown queue pair)",
            Self::Counter { .. } => {
                "poll of an mlx5 completion queue (work request is not in flight)"
            }
            Self::Link { .. } => "poll of an mlx5 completion queue (bad shared receive queue)",
            Self::Length { .. } => "poll of an mlx5 completion queue (inline data too long)",
            Self::Session { .. } => "poll of an mlx5 completion queue (bad compressed session)",
        };
        VerbError::new(verb, VerbError::EIO)
    }
}

impl fmt::Display for BadEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Kind { op_own } => write!(f, "unknown kind of entry (op_own {op_own:#x})"),
            Self::Opcode { opcode } => write!(f, "unexpected operation {opcode:#x}"),
            Self::QueuePair { qpn } => {
                write!(f, "queue pair {qpn:#x} does not use this completion queue")
            }
            Self::Counter { qpn, counter } => {
                write!(f, "queue pair {qpn:#x} has no work request {counter:#x} in flight")
            }
            Self::Link { qpn, entry } => {
                write!(f, "the shared receive queue of queue pair {qpn:#x} has no entry {entry:#x}")
            }
            Self::Length { qpn, length } => {
                write!(f, "{length} bytes of inline data for queue pair {qpn:#x} exceed the entry")
            }
            Self::Session { entries } => {
                write!(f, "invalid compressed session of {entries} entries")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `enum mlx5_err_syndrome` of rdma-core and the status that `ibv_poll_cq(3)` documents for
    /// each. All others are general errors.
    const STATUSES: [(u8, WcStatus); 13] = [
        (0x01, WcStatus::LOC_LEN_ERR),
        (0x02, WcStatus::LOC_QP_OP_ERR),
        (0x04, WcStatus::LOC_PROT_ERR),
        (0x05, WcStatus::WR_FLUSH_ERR),
        (0x06, WcStatus::MW_BIND_ERR),
        (0x10, WcStatus::BAD_RESP_ERR),
        (0x11, WcStatus::LOC_ACCESS_ERR),
        (0x12, WcStatus::REM_INV_REQ_ERR),
        (0x13, WcStatus::REM_ACCESS_ERR),
        (0x14, WcStatus::REM_OP_ERR),
        (0x15, WcStatus::RETRY_EXC_ERR),
        (0x16, WcStatus::RNR_RETRY_EXC_ERR),
        (0x22, WcStatus::REM_ABORT_ERR),
    ];

    #[test]
    fn every_syndrome_has_its_status_and_none_is_a_success() {
        for syndrome in 0..=u8::MAX {
            let known = STATUSES.iter().find(|(code, _)| *code == syndrome);
            let expected = known.map_or(WcStatus::GENERAL_ERR, |(_, status)| *status);
            assert_eq!(status(syndrome), expected, "{syndrome:#x}");
            assert_ne!(status(syndrome), WcStatus::SUCCESS);
        }
    }

    #[test]
    fn every_bad_entry_has_its_exact_text() {
        let texts = |error: BadEntry| match error {
            BadEntry::Kind { .. } => (
                "unknown kind of entry (op_own 0x50)",
                "poll of an mlx5 completion queue (unknown kind of entry)",
            ),
            BadEntry::Opcode { .. } => (
                "unexpected operation 0x33",
                "poll of an mlx5 completion queue (unexpected operation)",
            ),
            BadEntry::QueuePair { .. } => (
                "queue pair 0x1a04 does not use this completion queue",
                "poll of an mlx5 completion queue (unknown queue pair)",
            ),
            BadEntry::Counter { .. } => (
                "queue pair 0x1a04 has no work request 0x7 in flight",
                "poll of an mlx5 completion queue (work request is not in flight)",
            ),
            BadEntry::Link { .. } => (
                "the shared receive queue of queue pair 0x1a04 has no entry 0x8000",
                "poll of an mlx5 completion queue (bad shared receive queue)",
            ),
            BadEntry::Length { .. } => (
                "65 bytes of inline data for queue pair 0x1a04 exceed the entry",
                "poll of an mlx5 completion queue (inline data too long)",
            ),
            BadEntry::Session { .. } => (
                "invalid compressed session of 9 entries",
                "poll of an mlx5 completion queue (bad compressed session)",
            ),
        };
        let qpn = 0x1a04;
        for error in [
            BadEntry::Kind { op_own: 0x50 },
            BadEntry::Opcode { opcode: 0x33 },
            BadEntry::QueuePair { qpn },
            BadEntry::Counter { qpn, counter: 7 },
            BadEntry::Link { qpn, entry: 0x8000 },
            BadEntry::Length { qpn, length: 65 },
            BadEntry::Session { entries: 9 },
        ] {
            let (text, verb) = texts(error);
            assert_eq!(error.to_string(), text);
            assert!(!text.ends_with('.') && !text.starts_with(char::is_uppercase), "{text:?}");
            assert_eq!(error.verb_error(), VerbError::new(verb, VerbError::EIO));
        }
    }
}

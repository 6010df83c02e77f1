//! Known deviations of the kernel's SoftRoCE from the specification.
//!
//! Each entry was observed on Linux 6.1 (Debian 12, rdma-core 44). On other devices every entry is
//! reported as absent, so the tests check them against the specification.

use tokio_rdma::Device;
use tokio_rdma::types::WcStatus;

const VENDOR: u32 = 0xff_ffff;

pub(crate) struct Deviation(&'static str);

/// Returns whether `device` is SoftRoCE and so has this deviation; prints it then.
pub(crate) fn known(device: &Device, deviation: &Deviation) -> bool {
    let known = device.attr().vendor_id == VENDOR;
    if known {
        eprintln!("SoftRoCE: {}", deviation.0);
    }
    known
}

/// Returns the capacity of a queue that reports `reported` work requests. SoftRoCE reports the
/// requested capacity, but its rings have a power of two of slots, one of which stays empty.
pub(crate) fn depth(device: &Device, reported: u32) -> u32 {
    if device.attr().vendor_id == VENDOR {
        (reported + 1).next_power_of_two() - 1
    } else {
        reported
    }
}

#[derive(Clone, Copy)]
pub(crate) struct Status {
    specified: WcStatus,
    reported: WcStatus,
}

impl Status {
    pub(crate) fn on(self, device: &Device) -> WcStatus {
        if device.attr().vendor_id == VENDOR { self.reported } else { self.specified }
    }
}

impl From<WcStatus> for Status {
    fn from(status: WcStatus) -> Self {
        Self { specified: status, reported: status }
    }
}

const fn status(specified: WcStatus, reported: WcStatus) -> Status {
    Status { specified, reported }
}

// The responder answers every failure of a receive with NAK 0x63 and one status.

/// A message longer than the receive, at the requester.
pub(crate) const TOO_LONG_HERE: Status = status(WcStatus::REM_INV_REQ_ERR, WcStatus::REM_OP_ERR);
/// A message longer than the receive, at the responder.
pub(crate) const TOO_LONG_THERE: Status = status(WcStatus::LOC_LEN_ERR, WcStatus::LOC_QP_OP_ERR);
/// A receive into memory that its keys do not cover.
pub(crate) const RECEIVE_NOT_COVERED: Status =
    status(WcStatus::LOC_PROT_ERR, WcStatus::LOC_QP_OP_ERR);
/// The receive that a forbidden WRITE_WITH_IMM consumed: the requester's status at both ends.
pub(crate) const RECEIVE_OF_FORBIDDEN_WRITE: Status =
    status(WcStatus::LOC_ACCESS_ERR, WcStatus::REM_ACCESS_ERR);
/// A SEND or WRITE with an invalid or foreign key: `copy_data` returns EINVAL, and only EFAULT (a
/// range outside the key's memory) becomes a protection error.
pub(crate) const SEND_WITHOUT_KEY: Status = status(WcStatus::LOC_PROT_ERR, WcStatus::LOC_QP_OP_ERR);
/// An atomic with fewer than 8 bytes for its result, which are checked when it arrives.
pub(crate) const SHORT_ATOMIC_RESULT: Status =
    status(WcStatus::LOC_LEN_ERR, WcStatus::LOC_PROT_ERR);
/// A message over the size limit: its length wraps at 2^32, so its memory is invalid.
pub(crate) const BEYOND_LARGEST: Status = status(WcStatus::LOC_LEN_ERR, WcStatus::LOC_QP_OP_ERR);
/// A SEND_WITH_INV whose key cannot be invalidated: it is acknowledged first.
pub(crate) const INVALIDATION_HERE: Status = status(WcStatus::RETRY_EXC_ERR, WcStatus::SUCCESS);

pub(crate) const FEW_EVENTS: Deviation = Deviation(
    "the only asynchronous events are SQ_DRAINED, CQ_ERR, SRQ_LIMIT_REACHED and port events",
);
pub(crate) const LATE_RECEIVES: Deviation = Deviation(
    "receives posted in the error state are flushed only at the next state change: posting writes \
     to shared memory and does not notify the kernel",
);
pub(crate) const SLOTS_FREED_EARLY: Deviation = Deviation(
    "the slot of a work request is freed by its execution, before its completion is polled",
);
pub(crate) const OVERRUN_IS_AN_EVENT: Deviation = Deviation(
    "an overrun completion queue stays usable: each excess completion is lost with an event, and \
     the loss of a send completion does not fail the queue pair",
);
pub(crate) const ATOMICS_REFUSED: Deviation =
    Deviation("misaligned atomics and atomics with a short result are refused by ibv_post_send");
pub(crate) const ATOMIC_FIRST: Deviation =
    Deviation("an atomic is executed before its result memory is checked");
pub(crate) const FENCED_WORK_STALLS: Deviation = Deviation(
    "fenced work may stall until the next post: the requester sets `wait_fence` after it checked \
     the preceding work, which the completer may have finished in between",
);
pub(crate) const HOP_LIMIT_OF_ROUTE: Deviation =
    Deviation("the kernel replaces the hop limit of an address vector by that of the IP route");
pub(crate) const NO_SERVICE_LEVEL: Deviation =
    Deviation("the service level of an address vector is not kept");
pub(crate) const READS_WAIT: Deviation =
    Deviation("a READ on a queue pair with max_rd_atomic 0 never completes");
pub(crate) const GRH_ON_CONNECTIONS: Deviation =
    Deviation("every receive has flag GRH, which is defined for datagrams only");
pub(crate) const SHORT_DATAGRAM: Deviation =
    Deviation("a datagram longer than its receive fails the queue pair with LOC_QP_OP_ERR");
pub(crate) const WAITS_FOR_DRAINED: Deviation =
    Deviation("the transition from SQD to RTS fails (EINVAL) until the send queue has drained");
pub(crate) const NO_SQE: Deviation =
    Deviation("state SQE is not implemented: a failed send of any transport leads to ERR");
pub(crate) const RESET_KEEPS_COMPLETIONS: Deviation =
    Deviation("a reset of the queue pair does not remove its completions");
pub(crate) const DRAINED_UNASKED: Deviation =
    Deviation("SQ_DRAINED is raised without a request for it");
pub(crate) const DRAINED_TOO_EARLY: Deviation = Deviation(
    "SQ_DRAINED is raised before a message without a receive is delivered, which is then delayed",
);
pub(crate) const RESUMES_AT_NEXT_POST: Deviation =
    Deviation("after the transition from SQD to RTS, sends resume at the next post");
pub(crate) const TAKES_ANY_VALUE: Deviation =
    Deviation("pkey_index and max_dest_rd_atomic are not checked");
pub(crate) const LOCAL_WORK_REPEATED: Deviation = Deviation(
    "a retransmission repeats the bindings and invalidations posted after the message, although \
     they are done: they fail or crash the kernel",
);
pub(crate) const INVALID_TWICE: Deviation = Deviation(
    "invalidating an unbound window crashes the kernel (null pointer in rxe_do_invalidate_mw)",
);
pub(crate) const WINDOW_AS_WIDE_AS_ITS_REGION: Deviation =
    Deviation("access through a window is checked against the bounds of its region");
pub(crate) const INVALID_BINDINGS_ACCEPTED: Deviation = Deviation(
    "bindings under the same key, of another domain's region and past the address space succeed",
);
pub(crate) const OTHER_QUEUE_PAIR_INVALIDATES: Deviation =
    Deviation("SEND_WITH_INV invalidates a window that another queue pair has bound");
pub(crate) const MESSAGE_OUTLIVES_WINDOW: Deviation =
    Deviation("the key of a window is checked at the start of a message only, not for each packet");
pub(crate) const INVALIDATION_NOT_REPORTED: Deviation = Deviation(
    "the completion of a SEND_WITH_INV has the kernel's flag, which libibverbs reads as a checksum \
     result",
);
pub(crate) const NO_INVALIDATION_ON_UC: Deviation = Deviation(
    "LOCAL_INV is supported on reliable connections only, window bindings also on unreliable ones",
);

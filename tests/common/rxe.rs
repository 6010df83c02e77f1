//! What the kernel's SoftRoCE is known to do otherwise than the specification, and what the tests make of it there.
//!
//! Each entry was seen on Linux 6.1 (Debian 12, rdma-core 44). Whoever asks for one on another device is told that there
//! is none, so every other device is held to the specification.

use tokio_rdma::Device;
use tokio_rdma::types::WcStatus;

/// Vendor number of SoftRoCE.
const VENDOR: u32 = 0xff_ffff;

/// Something that it does in its own way, and the reason.
pub(crate) struct Deviation(&'static str);

/// True if `device` is SoftRoCE and so has this deviation; says so.
pub(crate) fn known(device: &Device, deviation: &Deviation) -> bool {
    let known = device.attr().vendor_id == VENDOR;
    if known {
        eprintln!("SoftRoCE: {}", deviation.0);
    }
    known
}

/// Work requests that a queue of `device` holds which says that it holds `reported`: rings of SoftRoCE have a power of two
/// of places, one of which stays empty, and the library is told what was asked for.
pub(crate) fn depth(device: &Device, reported: u32) -> u32 {
    if device.attr().vendor_id == VENDOR {
        (reported + 1).next_power_of_two() - 1
    } else {
        reported
    }
}

/// A status that it reports in place of another.
#[derive(Clone, Copy)]
pub(crate) struct Status {
    specified: WcStatus,
    reported: WcStatus,
}

impl Status {
    /// What `device` reports.
    pub(crate) fn on(self, device: &Device) -> WcStatus {
        if device.attr().vendor_id == VENDOR { self.reported } else { self.specified }
    }
}

impl From<WcStatus> for Status {
    /// A status that it reports as it should.
    fn from(status: WcStatus) -> Self {
        Self { specified: status, reported: status }
    }
}

const fn status(specified: WcStatus, reported: WcStatus) -> Status {
    Status { specified, reported }
}

// The responder has one answer to all that goes wrong with a receive: NAK 0x63, and one status of its own.

/// At the requester of a message that is longer than the receive.
pub(crate) const TOO_LONG_HERE: Status = status(WcStatus::REM_INV_REQ_ERR, WcStatus::REM_OP_ERR);
/// Of the receive that is shorter than the message.
pub(crate) const TOO_LONG_THERE: Status = status(WcStatus::LOC_LEN_ERR, WcStatus::LOC_QP_OP_ERR);
/// Of a receive into memory that its keys do not cover.
pub(crate) const RECEIVE_NOT_COVERED: Status =
    status(WcStatus::LOC_PROT_ERR, WcStatus::LOC_QP_OP_ERR);
/// Of the receive that a forbidden WRITE_WITH_IMM took: the requester's status is reported at both ends.
pub(crate) const RECEIVE_OF_FORBIDDEN_WRITE: Status =
    status(WcStatus::LOC_ACCESS_ERR, WcStatus::REM_ACCESS_ERR);
/// Of a SEND or WRITE with a key that is none, or of another domain: `copy_data` gives EINVAL, and only EFAULT, of a
/// range that the key does not cover, becomes a protection error.
pub(crate) const SEND_WITHOUT_KEY: Status = status(WcStatus::LOC_PROT_ERR, WcStatus::LOC_QP_OP_ERR);
/// Of an atomic whose result has no room: found when the result comes.
pub(crate) const NO_ROOM_FOR_RESULT: Status = status(WcStatus::LOC_LEN_ERR, WcStatus::LOC_PROT_ERR);
/// Of a message beyond the largest: its length wraps at 2^32, and its memory is what is wrong then.
pub(crate) const BEYOND_LARGEST: Status = status(WcStatus::LOC_LEN_ERR, WcStatus::LOC_QP_OP_ERR);
/// Of a SEND_WITH_INV whose key could not be invalidated: acknowledged before that is tried.
pub(crate) const INVALIDATION_HERE: Status = status(WcStatus::RETRY_EXC_ERR, WcStatus::SUCCESS);

pub(crate) const FEW_EVENTS: Deviation = Deviation(
    "of asynchronous events there are SQ_DRAINED, CQ_ERR, SRQ_LIMIT_REACHED and those of ports, and no others",
);
pub(crate) const LATE_RECEIVES: Deviation = Deviation(
    "receives posted in the error state are flushed at the next change of state: posting writes to shared memory and \
     tells nobody",
);
pub(crate) const SLOTS_FREED_EARLY: Deviation = Deviation(
    "the slot of a work request is free when it has been executed, whether its completion was polled or not",
);
pub(crate) const OVERRUN_IS_AN_EVENT: Deviation = Deviation(
    "a completion queue that was overrun goes on: completions that find no room are lost, each with an event, and a queue \
     pair that loses one of a send does not notice",
);
pub(crate) const ATOMICS_REFUSED: Deviation = Deviation(
    "atomics off their boundary, or without room for the result, are refused while posting (ibv_post_send)",
);
pub(crate) const ATOMIC_FIRST: Deviation =
    Deviation("an atomic is done before it is known whether its result can be stored");
pub(crate) const FENCE_FORGOTTEN: Deviation = Deviation(
    "fenced work may not begin before the next post: the requester says that it waits (`wait_fence`) after it has looked, \
     and the completer may have ended the work before it in between",
);
pub(crate) const READS_WAIT: Deviation =
    Deviation("READ on a queue pair that allows itself none waits for ever");
pub(crate) const GRH_ON_CONNECTIONS: Deviation =
    Deviation("every receive is flagged GRH, which means something for datagrams only");
pub(crate) const SHORT_DATAGRAM: Deviation = Deviation(
    "a datagram that its receive is too short for ends the queue pair, with the status LOC_QP_OP_ERR",
);
pub(crate) const WAITS_FOR_DRAINED: Deviation =
    Deviation("the way back from SQD to RTS is refused (EINVAL) until the send queue has drained");
pub(crate) const NO_SQE: Deviation =
    Deviation("there is no state SQE: a failed send of any transport leads to the error state");
pub(crate) const RESET_KEEPS_COMPLETIONS: Deviation =
    Deviation("completions stay in their queue when the queue pair is reset");
pub(crate) const DRAINED_UNASKED: Deviation =
    Deviation("SQ_DRAINED is raised whether it was asked for or not");
pub(crate) const DRAINED_TOO_EARLY: Deviation = Deviation(
    "a message that found no receive counts as not begun: SQ_DRAINED comes before it is done, and it is held back",
);
pub(crate) const WAKES_AT_NEXT_POST: Deviation =
    Deviation("from SQD back in RTS, sends go on when the next is posted");
pub(crate) const TAKES_ANY_VALUE: Deviation =
    Deviation("an index of a partition key and the number of READs to serve may be anything");
pub(crate) const LOCAL_WORK_AGAIN: Deviation = Deviation(
    "whatever is sent again takes along the bindings and invalidations posted behind it, though they are done: they fail \
     then, or crash the kernel",
);
pub(crate) const INVALID_TWICE: Deviation = Deviation(
    "invalidating a window that is not bound crashes the kernel (rxe_do_invalidate_mw follows a null pointer)",
);
pub(crate) const WINDOW_AS_WIDE_AS_ITS_REGION: Deviation =
    Deviation("what a peer names by the key of a window is held against the bounds of the region");
pub(crate) const BINDS_TOO_MUCH: Deviation = Deviation(
    "a binding under the same key, of a region of another domain, or past the end of all memory is taken",
);
pub(crate) const ANYBODY_INVALIDATES: Deviation =
    Deviation("SEND_WITH_INV invalidates a window that another queue pair has bound");
pub(crate) const MESSAGE_OUTLIVES_WINDOW: Deviation = Deviation(
    "the key of a window is looked at when a message begins, which then goes on to its end",
);
pub(crate) const INVALIDATION_UNSAID: Deviation = Deviation(
    "the completion of a SEND_WITH_INV has the flag that the kernel has for it, which to libibverbs means a good checksum",
);
pub(crate) const NO_INVALIDATION_ON_UC: Deviation = Deviation(
    "LOCAL_INV is known to reliable connections only, though a window can be bound on an unreliable one",
);

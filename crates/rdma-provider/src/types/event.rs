//! Asynchronous events: faults and state changes that belong to no work request.

use super::{PortNum, Qpn};

/// `ibv_get_async_event(3)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum AsyncEvent {
    /// A completion queue was overrun; it and its queue pairs are unusable.
    CqError {
        /// Number of the completion queue, `CompletionQueue::id`.
        cq: u64,
    },
    /// A queue pair failed without a work request to blame; it is in the error state.
    QpFatal(Qpn),
    /// A peer's request was malformed; the queue pair is in the error state.
    QpRequestError(Qpn),
    /// A peer's request violated access rights; the queue pair is in the error state.
    QpAccessError(Qpn),
    /// The first packet arrived while the queue pair was still in RTR.
    CommunicationEstablished(Qpn),
    /// The send queue has drained after the transition to SQD.
    SendQueueDrained(Qpn),
    /// A queue pair in the error state takes no more work from its shared receive queue.
    LastWqeReached(Qpn),
    /// A shared receive queue holds fewer work requests than its limit.
    SrqLimitReached {
        /// Number of the shared receive queue.
        srq: u64,
    },
    /// A shared receive queue failed.
    SrqError {
        /// Number of the shared receive queue.
        srq: u64,
    },
    /// A port came up.
    PortActive(PortNum),
    /// A port went down.
    PortError(PortNum),
    /// A GID table changed.
    GidChange(PortNum),
    /// The device is lost: everything created from it fails.
    DeviceFatal,
    /// A code this crate does not know.
    Other(u32),
}

//! Asynchronous events.

use super::{PortNum, Qpn};

/// An asynchronous event, `ibv_get_async_event(3)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum AsyncEvent {
    /// A completion queue overflowed; it and its queue pairs are unusable.
    CqError {
        /// Number of the completion queue, `CompletionQueue::id`.
        cq: u64,
    },
    /// A queue pair failed without a failed work request; it is in ERR.
    QpFatal(Qpn),
    /// A peer's request was malformed; the queue pair is in ERR.
    QpRequestError(Qpn),
    /// A peer's request violated access rights; the queue pair is in ERR.
    QpAccessError(Qpn),
    /// The first packet arrived in RTR.
    CommunicationEstablished(Qpn),
    /// The send queue drained in SQD.
    SendQueueDrained(Qpn),
    /// A queue pair in ERR takes no more receives from its shared receive queue.
    LastWqeReached(Qpn),
    /// A shared receive queue fell below its limit.
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
    /// The subnet manager gave the port another LID (InfiniBand).
    LidChange(PortNum),
    /// A partition key table changed. Queue pairs that used a changed entry must be modified.
    PkeyChange(PortNum),
    /// Another subnet manager has taken over the subnet (InfiniBand).
    SubnetManagerChange(PortNum),
    /// The subnet manager has forgotten multicast memberships and subscriptions, which must be
    /// made again (InfiniBand).
    ClientReregister(PortNum),
    /// A queue pair moved to its alternate path.
    PathMigrated(Qpn),
    /// A queue pair could not move to its alternate path.
    PathMigrationFailed(Qpn),
    /// The device is lost with all its objects.
    DeviceFatal,
    /// An unknown code.
    Other(u32),
}

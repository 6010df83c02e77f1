use rdma_message_proto::sending::{Blocked, FlushPoint};

use super::error::MessageError;
use crate::waiters::Waiters;

#[derive(Debug, Default)]
pub(super) struct Waiting {
    pub(super) senders: Waiters,
    pub(super) blocked: Blocked,
    pub(super) receivers: Waiters,
    /// Streams of messages that wait. They are in no FIFO, because one that is no longer polled
    /// would block the receivers behind it.
    pub(super) streams: Waiters,
    pub(super) notified: Waiters,
    /// Tasks that wait for a flush, for the termination, or for the queue pair to close.
    pub(super) flushers: Waiters,
    /// The earliest point that a flush waits for.
    pub(super) flush: Option<FlushPoint>,
}

/// The result of an attempt to send, or the missing resource.
pub(crate) type Attempt<T> = Result<Result<T, Blocked>, MessageError>;

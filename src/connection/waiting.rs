//! Tasks that wait for a connection.

use super::error::MessageError;
use super::outbox::Mark;
use crate::waiters::Waiters;

#[derive(Debug, Default)]
pub(super) struct Waiting {
    pub(super) senders: Waiters,
    /// Resource that the first sender lacks.
    pub(super) blocked: Block,
    pub(super) receivers: Waiters,
    /// Streams of messages that wait. They have no turn: one that is not polled any more would
    /// block the receivers behind it.
    pub(super) streams: Waiters,
    /// Tasks that wait for a notification.
    pub(super) notified: Waiters,
    /// Tasks that wait for a flush, for the termination, or for the queue pair to close.
    pub(super) flushers: Waiters,
    /// Position that the earliest flush waits for.
    pub(super) mark: Option<Mark>,
}

/// The resource that the first waiting sender lacks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Block {
    Credits {
        frames: u32,
    },
    Buffers {
        frames: usize,
    },
    Memory(u64),
    /// Held bytes must be sent first.
    Held,
}

impl Default for Block {
    fn default() -> Self {
        Self::Credits { frames: 1 }
    }
}

/// The result of an attempt to send, or the missing resource.
pub(crate) type Attempt<T> = Result<Result<T, Block>, MessageError>;

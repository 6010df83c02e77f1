use std::fmt;

use crate::Violation;

/// A reason for the end of a connection that the protocol finds itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// Both ends have finished, and have all messages.
    Clean,
    /// The application closed or dropped this end, and no longer waits for the peer.
    Local,
    /// The peer has sent an `Abort`.
    Dropped,
    Violation(Violation),
    /// The peer did not answer a `Ping` in time.
    Silent,
    /// The peer sent no first message in time.
    NoFirstMessage,
    /// The peer accepted no message in time.
    Stalled,
}

impl From<Violation> for End {
    fn from(violation: Violation) -> Self {
        Self::Violation(violation)
    }
}

/// Each [`End`], and the caller's own reasons, such as failed operations.
pub trait Reason: Copy + PartialEq + fmt::Debug + From<End> {
    /// A flush has another failure as its cause, which may be found later.
    fn is_flush(&self) -> bool;
}

impl Reason for End {
    fn is_flush(&self) -> bool {
        false
    }
}

#[cfg(test)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TestReason {
    Protocol(End),
    Aborted,
    Flush,
    Failed(u8),
}

#[cfg(test)]
impl From<End> for TestReason {
    fn from(end: End) -> Self {
        Self::Protocol(end)
    }
}

#[cfg(test)]
impl Reason for TestReason {
    fn is_flush(&self) -> bool {
        *self == Self::Flush
    }
}

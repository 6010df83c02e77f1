use super::error::{CloseReason, MessageError, TrySendError};
use crate::error::Outcome;

impl CloseReason {
    /// Returns the outcome of messages for which [`send`](super::Connection::send) had returned
    /// `Ok` when the connection closed, unless a later `flush` or answer has confirmed them.
    ///
    /// - `Done` after [`Clean`](Self::Clean): the peer has confirmed that it has all messages.
    /// - `NotSent` after [`Refused`](Self::Refused) and [`Rejected`](Self::Rejected): the
    ///   listener's application did not accept the connection.
    /// - `MaybeExecuted` after all others, including [`Unconfirmed`](Self::Unconfirmed): an earlier
    ///   process at the listener's address may have executed messages before it ended.
    #[must_use]
    pub const fn outcome(&self) -> Outcome {
        match self {
            Self::Clean => Outcome::Done,
            Self::Refused(_) | Self::Rejected => Outcome::NotSent,
            Self::Unconfirmed
            | Self::Local
            | Self::Aborted
            | Self::Dropped
            | Self::Disconnected
            | Self::Operation(_)
            | Self::Violation(_)
            | Self::Silent
            | Self::NoFirstMessage
            | Self::Stalled
            | Self::CloseTimeout
            | Self::Memory
            | Self::Runtime
            | Self::Shutdown => Outcome::MaybeExecuted,
        }
    }
}

impl MessageError {
    /// Returns the outcome of a request whose `send`, `flush` or awaited answer has failed with
    /// this error. A `send` that fails has always sent nothing.
    ///
    /// - `NotSent` after [`TooLong`](Self::TooLong) and [`Finished`](Self::Finished).
    /// - `MaybeExecuted` after [`Register`](Self::Register), because an answer that `recv_buffer`
    ///   did not return has arrived, and after [`Closed`](Self::Closed) with
    ///   [`CloseReason::Clean`], because an answer was discarded.
    /// - [`CloseReason::outcome`] after [`Closed`](Self::Closed) with another reason.
    #[must_use]
    pub const fn outcome(&self) -> Outcome {
        match self {
            Self::TooLong(_) | Self::Finished => Outcome::NotSent,
            Self::Register(_) | Self::Closed(CloseReason::Clean) => Outcome::MaybeExecuted,
            Self::Closed(reason) => reason.outcome(),
        }
    }
}

impl TrySendError {
    /// Returns the outcome of the message: always `NotSent`.
    #[must_use]
    pub const fn outcome(&self) -> Outcome {
        match self {
            Self::Full(_) | Self::Failed(_) => Outcome::NotSent,
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use bytes::Bytes;

    use super::*;
    use crate::connection::{RefusalReason, Violation};
    use crate::error::{LimitError, OpErrorKind, SetupError};

    const LIMIT: LimitError = LimitError { field: "message bytes", asked: 2, allowed: 1 };

    #[test]
    fn outcome_is_certain_only_if_the_peer_said_so() {
        use Outcome::{Done, MaybeExecuted, NotSent};
        let outcomes = [
            (CloseReason::Clean, Done),
            (CloseReason::Unconfirmed, MaybeExecuted),
            (CloseReason::Refused(RefusalReason::ListenerFull), NotSent),
            (CloseReason::Rejected, NotSent),
            (CloseReason::Local, MaybeExecuted),
            (CloseReason::Aborted, MaybeExecuted),
            (CloseReason::Dropped, MaybeExecuted),
            (CloseReason::Disconnected, MaybeExecuted),
            (CloseReason::Operation(OpErrorKind::Closed), MaybeExecuted),
            (CloseReason::Violation(Violation::AfterFinish), MaybeExecuted),
            (CloseReason::Silent, MaybeExecuted),
            (CloseReason::NoFirstMessage, MaybeExecuted),
            (CloseReason::Stalled, MaybeExecuted),
            (CloseReason::CloseTimeout, MaybeExecuted),
            (CloseReason::Memory, MaybeExecuted),
            (CloseReason::Runtime, MaybeExecuted),
            (CloseReason::Shutdown, MaybeExecuted),
        ];
        for (reason, outcome) in outcomes {
            assert_eq!(reason.outcome(), outcome, "{reason:?}");
            // The same error would end a later `send`, whose message the peer does not have.
            let of_error = if outcome == Done { MaybeExecuted } else { outcome };
            assert_eq!(MessageError::Closed(reason).outcome(), of_error, "{reason:?}");
            assert_eq!(TrySendError::Failed(reason.into()).outcome(), NotSent);
        }
        assert_eq!(MessageError::TooLong(LIMIT).outcome(), NotSent);
        assert_eq!(MessageError::Finished.outcome(), NotSent);
        assert_eq!(MessageError::Register(SetupError::Closed).outcome(), MaybeExecuted);
        assert_eq!(TrySendError::Full(Bytes::new()).outcome(), NotSent);
    }
}

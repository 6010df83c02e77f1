use super::{OpError, OpErrorKind, TryError};

/// The outcome at the peer of work that ended with an error at this side. `NotSent` and `Done` are
/// certain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// It was not sent, or the peer's service never saw the connection. You may repeat the request.
    NotSent,
    /// The peer may have executed it. Repeat the request only if a second execution does no harm,
    /// or the peer recognises it.
    MaybeExecuted,
    /// The peer has it.
    Done,
}

impl OpErrorKind {
    /// Returns the outcome of the operation at the peer.
    ///
    /// - `NotSent` if the work request was refused before the post.
    /// - `MaybeExecuted` after a [`Completion`](Self::Completion): a part of a long WRITE may have
    ///   arrived before the failure, and work may be executed before it is flushed.
    /// - `MaybeExecuted` after [`Closed`](Self::Closed) and
    ///   [`CompletionQueue`](Self::CompletionQueue), which end both queued and posted work.
    /// - [`TimedOut`](Self::TimedOut) names it. After `MaybeExecuted`, packets of a WRITE may still
    ///   change the peer's memory until the peer revokes the access.
    #[must_use]
    pub const fn outcome(&self) -> Outcome {
        match self {
            Self::TimedOut { outcome } => *outcome,
            Self::Completion(_) | Self::Closed | Self::CompletionQueue(_) => Outcome::MaybeExecuted,
            Self::Post(_)
            | Self::State { .. }
            | Self::Limit(_)
            | Self::Foreign { .. }
            | Self::Rights { .. }
            | Self::Unsupported { .. }
            | Self::NotOneSided { .. }
            | Self::Misaligned { .. } => Outcome::NotSent,
        }
    }
}

impl<B> OpError<B> {
    /// See [`OpErrorKind::outcome`].
    #[must_use]
    pub fn outcome(&self) -> Outcome {
        self.kind().outcome()
    }
}

impl<B> TryError<B> {
    /// See [`OpErrorKind::outcome`].
    #[must_use]
    pub fn outcome(&self) -> Outcome {
        match self {
            Self::Full(_) => Outcome::NotSent,
            Self::Refused(error) => error.outcome(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::{CompletionError, LimitError, VerbError};
    use crate::types::{Access, QpState, Qpn, WcStatus};

    #[test]
    fn only_operations_refused_before_the_post_are_not_sent() {
        let qpn = Qpn(7);
        let verb = VerbError::new("ibv_post_send", VerbError::EIO);
        let failed = |status| {
            OpErrorKind::Completion(CompletionError { status, vendor_error: 0, qpn, lengths: None })
        };
        let unknown = [
            failed(WcStatus::WR_FLUSH_ERR),
            failed(WcStatus::RETRY_EXC_ERR),
            failed(WcStatus::RNR_RETRY_EXC_ERR),
            failed(WcStatus::REM_ACCESS_ERR),
            failed(WcStatus::LOC_PROT_ERR),
            OpErrorKind::Closed,
            OpErrorKind::CompletionQueue(verb),
            OpErrorKind::TimedOut { outcome: Outcome::MaybeExecuted },
        ];
        let refused = [
            OpErrorKind::Post(verb),
            OpErrorKind::State { qpn, state: QpState::Err, error: verb },
            OpErrorKind::Limit(LimitError { field: "bytes", asked: 2, allowed: 1 }),
            OpErrorKind::Foreign { what: "buffer" },
            OpErrorKind::Rights { missing: Access::REMOTE_READ },
            OpErrorKind::Unsupported { what: "READ" },
            OpErrorKind::NotOneSided { index: 0, what: "SEND" },
            OpErrorKind::Misaligned { addr: 1, len: 8 },
            OpErrorKind::TimedOut { outcome: Outcome::NotSent },
        ];
        for (kinds, outcome) in
            [(&unknown[..], Outcome::MaybeExecuted), (&refused[..], Outcome::NotSent)]
        {
            for &kind in kinds {
                assert_eq!(kind.outcome(), outcome, "{kind:?}");
                assert_eq!(OpError::new(kind, ()).outcome(), outcome);
                assert_eq!(TryError::Refused(OpError::new(kind, ())).outcome(), outcome);
            }
        }
        assert_eq!(TryError::Full(()).outcome(), Outcome::NotSent);
    }
}

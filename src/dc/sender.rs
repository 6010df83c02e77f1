use super::DcPeer;
use crate::error::{LimitError, OpErrorKind, TryError};
use crate::op::{Destination, QueuePair};
use crate::types::{Mtu, SendFlags};

/// A [`DcInitiator`](super::DcInitiator) with one peer, for any number of operations.
///
/// Operations work like the methods of [`QueuePair`], on a reliable connection that the device
/// makes on demand. Their futures do not borrow the sender. Errors differ:
///
/// - For a wrong access key, or a target that no longer exists, the device reports a silent peer,
///   [`RETRY_EXC_ERR`](crate::types::WcStatus::RETRY_EXC_ERR), or another status.
/// - After a completion with an error, all operations of the initiator fail as flushed, and it must
///   be [repaired](super::DcInitiator::repair).
/// - A peer of another protection domain fails with [`OpErrorKind::Foreign`], a peer on another
///   port with [`OpErrorKind::Unsupported`], and a peer with a smaller MTU than the initiator with
///   [`OpErrorKind::Limit`]. Nothing is sent.
#[derive(Debug, Clone, Copy)]
pub struct DcSender<'a> {
    pub(super) qp: &'a QueuePair,
    pub(super) peer: &'a DcPeer,
    pub(super) mtu: Mtu,
    pub(super) flags: SendFlags,
}

impl<'a> DcSender<'a> {
    /// Returns a sender whose operations start after all earlier READs and atomics of the
    /// initiator, to any peer.
    #[must_use]
    pub fn fenced(self) -> Self {
        Self { flags: self.flags | SendFlags::FENCE, ..self }
    }

    /// Returns a sender whose messages are [solicited](QueuePair::solicited).
    #[must_use]
    pub fn solicited(self) -> Self {
        Self { flags: self.flags | SendFlags::SOLICITED, ..self }
    }

    /// Returns the peer.
    #[must_use]
    pub fn peer(&self) -> &'a DcPeer {
        self.peer
    }

    pub(super) fn destination(&self) -> Destination<'a> {
        match self.refusal() {
            Some(kind) => Destination::refused(kind),
            None => Destination::new(&self.qp.inner, self.flags, Some(self.peer.receiver())),
        }
    }

    pub(super) fn submit<F>(&self, work: impl FnOnce(Destination<'_>) -> F) -> F {
        work(self.destination())
    }

    pub(super) fn submit_inline<F>(
        &self,
        bytes: &[u8],
        work: impl FnOnce(Destination<'_>, &[u8]) -> F,
    ) -> F {
        work(self.destination(), bytes)
    }

    pub(super) fn try_submit<F, B>(
        &self,
        held: B,
        work: impl FnOnce(Destination<'_>, B) -> Result<F, TryError<B>>,
    ) -> Result<F, TryError<B>> {
        work(self.destination(), held)
    }

    fn refusal(&self) -> Option<OpErrorKind> {
        if !self.peer.handle.protection_domain().same(self.qp.protection_domain()) {
            return Some(OpErrorKind::Foreign { what: "DC peer" });
        }
        if self.peer.route().port != self.qp.local().port {
            return Some(OpErrorKind::Unsupported { what: "a DC peer on another port" });
        }
        LimitError::check(
            "path MTU to the DC peer",
            self.mtu.bytes() as u64,
            self.peer.mtu.bytes() as u64,
        )
        .err()
        .map(OpErrorKind::Limit)
    }
}

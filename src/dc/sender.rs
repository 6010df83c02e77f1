//! A DC initiator and one peer of it: the destination of operations.

use super::DcPeer;
use crate::error::{LimitError, OpErrorKind, TryError};
use crate::op::{Destination, QueuePair};
use crate::types::{Mtu, SendFlags};

/// What a [`DcInitiator`](super::DcInitiator) sends to one peer: [`DcInitiator::to`](super::DcInitiator::to) makes it, for one
/// operation or for many.
///
/// Each operation is that of [`QueuePair`] with the same name, on a reliable connection that the device makes when it is
/// needed; its future does not borrow from this. Errors differ in two ways. A wrong access key, or a target that is gone, is
/// that of a peer which does not answer, [`RETRY_EXC_ERR`](crate::types::WcStatus::RETRY_EXC_ERR), or what else the device
/// makes of it; and after each error that a completion brings, the initiator is to be
/// [repaired](super::DcInitiator::repair). A peer of another protection domain is
/// [`OpErrorKind::Foreign`], one that takes smaller packets than the initiator sends [`OpErrorKind::Limit`], nothing sent.
#[derive(Debug, Clone, Copy)]
pub struct DcSender<'a> {
    pub(super) qp: &'a QueuePair,
    pub(super) peer: &'a DcPeer,
    /// Packet payload of the initiator.
    pub(super) mtu: Mtu,
    pub(super) flags: SendFlags,
}

impl<'a> DcSender<'a> {
    /// The same; what is posted through it waits for all READs and atomics that the initiator has posted before, to any peer.
    #[must_use]
    pub fn fenced(self) -> Self {
        Self { flags: self.flags | SendFlags::FENCE, ..self }
    }

    /// The same; messages sent through it raise a solicited event at the receiver.
    #[must_use]
    pub fn solicited(self) -> Self {
        Self { flags: self.flags | SendFlags::SOLICITED, ..self }
    }

    /// The peer.
    #[must_use]
    pub fn peer(&self) -> &'a DcPeer {
        self.peer
    }

    /// Where the operations are posted.
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

    /// Why nothing goes from this initiator to that peer, if so.
    fn refusal(&self) -> Option<OpErrorKind> {
        if !self.peer.handle.protection_domain().same(self.qp.protection_domain()) {
            return Some(OpErrorKind::Foreign { what: "DC peer" });
        }
        if self.peer.route().port != self.qp.local().port {
            return Some(OpErrorKind::Unsupported {
                what: "a DC peer that is reached by another port",
            });
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

//! Operations of a DC initiator to one peer: those of a reliable connection.

use super::DcPeer;
use crate::engine::{Patience, Request, What};
use crate::error::{LimitError, OpErrorKind, TryError};
use crate::memory::{Gather, RemoteRegion, Scatter};
use crate::op::{Atomic, Batch, BatchOp, Operation, QueuePair, Read, Return, Send, Write, room, submit_batch};
use crate::types::{Imm, Mtu, SendFlags, SendOp};

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

    /// As [`QueuePair::write`].
    pub fn write<B: Gather>(&self, buffer: B, remote: RemoteRegion) -> Write<B> {
        self.post(SendOp::Write(remote.remote_addr()), room(&remote), buffer)
    }

    /// As [`QueuePair::write_with_imm`]: consumes a receive of the peer's shared queue.
    pub fn write_with_imm<B: Gather>(&self, buffer: B, remote: RemoteRegion, imm: Imm) -> Write<B> {
        self.post(SendOp::WriteWithImm(remote.remote_addr(), imm), room(&remote), buffer)
    }

    /// As [`QueuePair::write_inline`].
    pub fn write_inline(&self, bytes: &[u8], remote: RemoteRegion) -> Write<()> {
        self.post_inline(SendOp::Write(remote.remote_addr()), room(&remote), bytes)
    }

    /// As [`QueuePair::write_inline_with_imm`].
    pub fn write_inline_with_imm(&self, bytes: &[u8], remote: RemoteRegion, imm: Imm) -> Write<()> {
        self.post_inline(SendOp::WriteWithImm(remote.remote_addr(), imm), room(&remote), bytes)
    }

    /// As [`QueuePair::try_write`].
    ///
    /// # Errors
    ///
    /// [`TryError::Full`] with the buffer if there is no room.
    pub fn try_write<B: Gather>(&self, buffer: B, remote: RemoteRegion) -> Result<Write<B>, TryError<B>> {
        self.try_post(SendOp::Write(remote.remote_addr()), room(&remote), buffer)
    }

    /// As [`QueuePair::read`].
    pub fn read<B: Scatter>(&self, buffer: B, remote: RemoteRegion) -> Read<B> {
        self.post(SendOp::Read(remote.remote_addr()), room(&remote), buffer)
    }

    /// As [`QueuePair::try_read`].
    ///
    /// # Errors
    ///
    /// [`TryError::Full`] with the buffer if there is no room.
    pub fn try_read<B: Scatter>(&self, buffer: B, remote: RemoteRegion) -> Result<Read<B>, TryError<B>> {
        self.try_post(SendOp::Read(remote.remote_addr()), room(&remote), buffer)
    }

    /// As [`QueuePair::send`]: fills the next receive of the peer's shared queue.
    pub fn send<B: Gather>(&self, buffer: B) -> Send<B> {
        self.post(SendOp::Send, u64::MAX, buffer)
    }

    /// As [`QueuePair::send_with_imm`].
    pub fn send_with_imm<B: Gather>(&self, buffer: B, imm: Imm) -> Send<B> {
        self.post(SendOp::SendWithImm(imm), u64::MAX, buffer)
    }

    /// As [`QueuePair::send_inline`].
    pub fn send_inline(&self, bytes: &[u8]) -> Send<()> {
        self.post_inline(SendOp::Send, u64::MAX, bytes)
    }

    /// As [`QueuePair::send_inline_with_imm`].
    pub fn send_inline_with_imm(&self, bytes: &[u8], imm: Imm) -> Send<()> {
        self.post_inline(SendOp::SendWithImm(imm), u64::MAX, bytes)
    }

    /// As [`QueuePair::try_send`].
    ///
    /// # Errors
    ///
    /// [`TryError::Full`] with the buffer if there is no room.
    pub fn try_send<B: Gather>(&self, buffer: B) -> Result<Send<B>, TryError<B>> {
        self.try_post(SendOp::Send, u64::MAX, buffer)
    }

    /// As [`QueuePair::compare_swap`].
    pub fn compare_swap(&self, remote: RemoteRegion, compare: u64, swap: u64) -> Atomic {
        self.atomic(SendOp::CompareSwap { remote: remote.remote_addr(), compare, swap }, remote)
    }

    /// As [`QueuePair::fetch_add`].
    pub fn fetch_add(&self, remote: RemoteRegion, add: u64) -> Atomic {
        self.atomic(SendOp::FetchAdd { remote: remote.remote_addr(), add }, remote)
    }

    /// As [`QueuePair::post_batch`]: all of it to this peer.
    pub fn post_batch<B: Gather>(&self, batch: Batch<B>) -> BatchOp<B> {
        match self.submit_batch(batch, Patience::Queue) {
            Ok(operation) => operation,
            Err(_) => unreachable!("patience waits for room"),
        }
    }

    /// As [`QueuePair::try_post_batch`].
    ///
    /// # Errors
    ///
    /// [`TryError::Full`] with the batch if there is no room for all of it.
    pub fn try_post_batch<B: Gather>(&self, batch: Batch<B>) -> Result<BatchOp<B>, TryError<Batch<B>>> {
        self.submit_batch(batch, Patience::Try).map_err(TryError::Full)
    }

    fn submit_batch<B: Gather>(&self, batch: Batch<B>, patience: Patience) -> Result<BatchOp<B>, Batch<B>> {
        submit_batch(self.qp.send_queue(), self.flags, Some(self.peer.receiver()), batch, patience, self.refusal())
    }

    fn atomic(&self, op: SendOp, remote: RemoteRegion) -> Atomic {
        let word = match self.refusal() {
            Some(kind) => Err(kind),
            None => self.qp.word_for(&remote),
        };
        Atomic::new(word.map(|word| Operation::post_any(self.qp.send_queue(), self.request(op, room(&remote)), word)))
    }

    fn post<B: Gather>(&self, op: SendOp, room: u64, buffer: B) -> Operation<Return<B>> {
        if let Some(kind) = self.refusal() {
            return Operation::refused(kind, buffer);
        }
        Operation::post_any(self.qp.send_queue(), self.request(op, room), buffer)
    }

    fn post_inline(&self, op: SendOp, room: u64, bytes: &[u8]) -> Operation<Return<()>> {
        if let Some(kind) = self.refusal() {
            return Operation::refused(kind, ());
        }
        let request = Request { inline: Some(bytes), ..self.request(op, room) };
        Operation::post_any(self.qp.send_queue(), request, ())
    }

    fn try_post<B: Gather>(&self, op: SendOp, room: u64, buffer: B) -> Result<Operation<Return<B>>, TryError<B>> {
        if let Some(kind) = self.refusal() {
            return Ok(Operation::refused(kind, buffer));
        }
        Operation::try_post(self.qp.send_queue(), self.request(op, room), buffer)
    }

    fn request(&self, op: SendOp, room: u64) -> Request<'a> {
        let flags = self.flags | SendFlags::SIGNALED;
        Request { what: What::Send(op), flags, inline: None, window: None, to: Some(self.peer.receiver()), room }
    }

    /// Why nothing goes from this initiator to that peer, if so.
    fn refusal(&self) -> Option<OpErrorKind> {
        if !self.peer.handle.protection_domain().same(self.qp.protection_domain()) {
            return Some(OpErrorKind::Foreign { what: "DC peer" });
        }
        if self.peer.route().port != self.qp.local().port {
            return Some(OpErrorKind::Unsupported { what: "a DC peer that is reached by another port" });
        }
        LimitError::check("path MTU to the DC peer", self.mtu.bytes() as u64, self.peer.mtu.bytes() as u64)
            .err()
            .map(OpErrorKind::Limit)
    }
}

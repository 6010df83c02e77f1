//! SEND: a message into the peer's next receive.

use super::operation::{Finish, Operation, Return};
use super::post::{Destination, SendRequest};
use super::queue_pair::QueuePair;
use crate::engine::{Key, To};
use crate::error::TryError;
use crate::memory::{Gather, PdKey, RemoteRegion, Sealed};
use crate::types::{Imm, Qkey, Qpn, WorkCompletion};
use crate::verbs::AddressHandle;

/// A SEND in flight; gives the buffer back.
///
/// # Cancel safety
///
/// As [`Operation`]: dropped, it goes on, and the buffer stays with the queue pair until it is done.
pub type Send<B> = Operation<Return<B>>;

/// A datagram in flight; gives the buffer back.
///
/// # Cancel safety
///
/// As [`Operation`]: dropped, it goes on, and buffer and address stay with the queue pair until it is done.
pub type SendTo<B> = Operation<Addressed<B>>;

impl QueuePair {
    /// Sends a message: it fills the peer's next receive (RC, UC).
    ///
    /// # Errors
    ///
    /// Of the future, with the buffer: the completion's status, among them
    /// [`REM_INV_REQ_ERR`](crate::types::WcStatus::REM_INV_REQ_ERR) if the message is longer than the receive and
    /// [`RNR_RETRY_EXC_ERR`](crate::types::WcStatus::RNR_RETRY_EXC_ERR) if none was posted for too long.
    ///
    /// # Cancel safety
    ///
    /// As [`Operation`]: the message is sent even if the future is dropped.
    #[inline(always)]
    pub fn send<B: Gather>(&self, buffer: B) -> Send<B> {
        self.destination().post(SendRequest::send(), buffer)
    }

    /// As [`send`](Self::send), with four bytes beside the message.
    #[inline(always)]
    pub fn send_with_imm<B: Gather>(&self, buffer: B, imm: Imm) -> Send<B> {
        self.destination().post(SendRequest::send_with_imm(imm), buffer)
    }

    /// As [`send`](Self::send); the peer's device invalidates the key of `remote`, a lease of the peer's that this queue pair
    /// was granted, before the message is received there (RC). The receiver finds the key in
    /// [`Received::invalidated`](crate::op::Received::invalidated).
    ///
    /// READs that use the key must be done: await them before, or send [`fenced`](Self::fenced).
    ///
    /// # Errors
    ///
    /// Of the future, with the buffer, as [`send`](Self::send). If the key is not that of a lease in force, the connection
    /// ends at the peer's side ([`REM_INV_REQ_ERR`](crate::types::WcStatus::REM_INV_REQ_ERR) of its receive), and here with
    /// [`RETRY_EXC_ERR`](crate::types::WcStatus::RETRY_EXC_ERR), for there is no negative answer to that; by some devices
    /// this message, and only the next, succeeds.
    pub fn send_with_invalidate<B: Gather>(&self, buffer: B, remote: RemoteRegion) -> Send<B> {
        self.destination().post(SendRequest::send_with_invalidate(remote), buffer)
    }

    /// As [`send`](Self::send), of at most `max_inline` bytes that are copied now: `bytes` can be reused at once.
    #[inline(always)]
    pub fn send_inline(&self, bytes: &[u8]) -> Send<()> {
        self.destination().post_inline(SendRequest::send(), bytes)
    }

    /// As [`send_inline`](Self::send_inline), with four bytes beside the message.
    pub fn send_inline_with_imm(&self, bytes: &[u8], imm: Imm) -> Send<()> {
        self.destination().post_inline(SendRequest::send_with_imm(imm), bytes)
    }

    /// As [`send`](Self::send), if there is room in the send queue.
    ///
    /// # Errors
    ///
    /// [`TryError::Full`] with the buffer if there is none.
    #[inline(always)]
    pub fn try_send<B: Gather>(&self, buffer: B) -> Result<Send<B>, TryError<B>> {
        self.destination().try_post(SendRequest::send(), buffer)
    }

    /// Sends a datagram of at most the port's MTU to any datagram queue pair (UD).
    ///
    /// Success means that it was sent. It arrives 40 bytes into the receive, or is lost: without a trace if
    /// there is no such queue pair, it has another queue key, or no receive is posted.
    ///
    /// # Errors
    ///
    /// Of the future, with the buffer.
    ///
    /// # Cancel safety
    ///
    /// As [`Operation`]: the datagram is sent even if the future is dropped.
    pub fn send_to<B: Gather>(
        &self,
        buffer: B,
        handle: &AddressHandle,
        qpn: Qpn,
        qkey: Qkey,
    ) -> SendTo<B> {
        self.datagram_to(handle, qpn, qkey)
            .post(SendRequest::send(), WithRoute::new(buffer, handle))
    }

    /// As [`send_to`](Self::send_to), with four bytes beside the datagram.
    pub fn send_to_with_imm<B: Gather>(
        &self,
        buffer: B,
        imm: Imm,
        handle: &AddressHandle,
        qpn: Qpn,
        qkey: Qkey,
    ) -> SendTo<B> {
        self.datagram_to(handle, qpn, qkey)
            .post(SendRequest::send_with_imm(imm), WithRoute::new(buffer, handle))
    }

    /// A datagram queue pair that `handle` leads to.
    fn datagram_to<'a>(
        &'a self,
        handle: &'a AddressHandle,
        qpn: Qpn,
        qkey: Qkey,
    ) -> Destination<'a> {
        Destination::new(
            &self.inner,
            self.flags,
            Some(To { handle, number: qpn, key: Key::Datagram(qkey) }),
        )
    }
}

/// Gives the buffer of a datagram back.
#[derive(Debug)]
pub struct Addressed<B>(std::marker::PhantomData<fn() -> B>);

/// A buffer with the route that its datagram takes, which the device may need until it has gone.
#[derive(Debug)]
pub struct WithRoute<B> {
    buffer: B,
    _handle: AddressHandle,
}

impl<B> WithRoute<B> {
    fn new(buffer: B, handle: &AddressHandle) -> Self {
        Self { buffer, _handle: handle.clone() }
    }
}

impl<B: Gather> Gather for WithRoute<B> {}

impl<B: Gather> Sealed for WithRoute<B> {
    fn pieces(&self, visit: &mut dyn FnMut(crate::types::Sge, PdKey)) {
        self.buffer.pieces(visit);
    }

    fn single(&self) -> Option<(crate::types::Sge, PdKey)> {
        self.buffer.single()
    }
}

impl<B: Gather> Finish for Addressed<B> {
    type Held = WithRoute<B>;
    type Buffer = B;
    type Output = B;
    type Seen = ();

    fn see(_completion: &WorkCompletion) {}

    fn finish(held: WithRoute<B>, (): ()) -> B {
        held.buffer
    }

    fn give_back(held: WithRoute<B>) -> B {
        held.buffer
    }
}

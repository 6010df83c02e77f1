use super::destination::Destination;
use super::operation::{Operation, OperationKind, ReturnBuffer};
use super::queue_pair::QueuePair;
use crate::engine::WorkRequest;
use crate::engine::{Receiver, ReceiverKey};
use crate::error::TryError;
use crate::memory::{Gather, PdKey, Sealed};
use crate::types::{Qkey, Qpn, WorkCompletion};
use crate::verbs::AddressHandle;

/// A SEND [`Operation`], which returns the buffer.
pub type Send<B> = Operation<ReturnBuffer<B>>;

/// A datagram [`Operation`], which returns the buffer.
pub type SendTo<B> = Operation<SendDatagram<B>>;

impl QueuePair {
    /// Sends a message, which uses the peer's next receive (RC, UC).
    ///
    /// # Errors
    ///
    /// The status of the completion, for example (RC):
    ///
    /// - [`REM_INV_REQ_ERR`](crate::types::WcStatus::REM_INV_REQ_ERR) if the message is longer than
    ///   the receive;
    /// - [`RNR_RETRY_EXC_ERR`](crate::types::WcStatus::RNR_RETRY_EXC_ERR) if the peer posted no
    ///   receive before the last retry.
    #[inline]
    pub fn send<B: Gather>(&self, buffer: B) -> Send<B> {
        self.destination().post(WorkRequest::send(), buffer)
    }

    /// Posts a [`send`](Self::send) of at most `max_inline` bytes, which this call copies.
    #[inline]
    pub fn send_inline(&self, bytes: &[u8]) -> Send<()> {
        self.destination().post(WorkRequest::send().inline(bytes), ())
    }

    /// Posts a [`send`](Self::send) if the send queue has a free slot.
    ///
    /// # Errors
    ///
    /// See [`TryError`].
    #[inline]
    pub fn try_send<B: Gather>(&self, buffer: B) -> Result<Send<B>, TryError<B>> {
        self.destination().try_post(WorkRequest::send(), buffer)
    }

    /// Sends a datagram of at most the port's MTU to any datagram queue pair (UD). Success means
    /// that it was sent. It arrives at offset 40 of the receive, or is lost: silently if the queue
    /// pair does not exist, has another queue key or no receive.
    ///
    /// # Errors
    ///
    /// [`OpErrorKind::Limit`](crate::OpErrorKind::Limit) if the datagram is too long.
    pub fn send_to<B: Gather>(
        &self,
        buffer: B,
        handle: &AddressHandle,
        qpn: Qpn,
        qkey: Qkey,
    ) -> SendTo<B> {
        self.destination().send_datagram(WorkRequest::send(), buffer, (handle, qpn, qkey))
    }
}

impl<'a> Destination<'a> {
    pub(super) fn send_datagram<B: Gather>(
        self,
        request: WorkRequest<'a>,
        buffer: B,
        (handle, number, qkey): (&'a AddressHandle, Qpn, Qkey),
    ) -> SendTo<B> {
        let receiver = Receiver { handle, number, key: ReceiverKey::Datagram(qkey) };
        self.with_receiver(receiver).post(request, AddressedBuffer::new(buffer, handle))
    }
}

/// Returns the buffer.
#[derive(Debug)]
pub struct SendDatagram<B>(std::marker::PhantomData<fn() -> B>);

/// A buffer and the address handle of its datagram.
#[derive(Debug)]
pub struct AddressedBuffer<B> {
    buffer: B,
    _handle: AddressHandle,
}

impl<B> AddressedBuffer<B> {
    fn new(buffer: B, handle: &AddressHandle) -> Self {
        Self { buffer, _handle: handle.clone() }
    }
}

impl<B: Gather> Gather for AddressedBuffer<B> {}

impl<B: Gather> Sealed for AddressedBuffer<B> {
    fn pieces(&self, visit: &mut dyn FnMut(crate::types::Sge, PdKey)) {
        self.buffer.pieces(visit);
    }

    fn single(&self) -> Option<(crate::types::Sge, PdKey)> {
        self.buffer.single()
    }
}

impl<B: Gather> OperationKind for SendDatagram<B> {
    type Held = AddressedBuffer<B>;
    type Buffer = B;
    type Output = B;
    type Details = ();

    fn details(_completion: &WorkCompletion) {}

    fn finish(held: AddressedBuffer<B>, (): ()) -> B {
        held.buffer
    }

    fn into_buffer(held: AddressedBuffer<B>) -> B {
        held.buffer
    }
}

//! The two directions of a connection, owned by different tasks.

use std::fmt;
use std::future::poll_fn;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use futures::{Sink, Stream};

use super::connection::Handle;
use super::core::{ConnectionCounters, Core};
use super::error::{CloseReason, MessageError, TrySendError};
use super::inbound::copy_target;
use super::inbox::{Next, Notification};
use super::outbound::{Flush, Outgoing};
use super::shared::{Shared, WaitGuard};
use crate::coop::within_budget;
use crate::memory::Buf;
use crate::waiters::{Caller, Ticket};

/// A flush. Dropping it withdraws the waiter.
struct FlushGuard<'a> {
    shared: &'a Shared,
    flush: Flush,
}

impl Drop for FlushGuard<'_> {
    fn drop(&mut self) {
        if self.flush.ticket.is_some() {
            self.shared.with(|core, _| core.withdraw_flusher(&mut self.flush.ticket));
        }
    }
}

/// The sending half of a [`Connection`](super::Connection), and a [`Sink`] of messages.
///
/// As a sink it holds one message that could not be sent yet, which [`send`](Self::send) overtakes.
/// Closing the sink sends it and finishes; dropping the half does neither.
///
/// # Cancel safety
///
/// A dropped `send` of the sink's adapter has sent its message or not, or left it in the sink for
/// the next poll. `flush` and `close` may be called again.
pub struct SendHalf {
    pub(super) handle: Arc<Handle>,
    /// Unsent message of the sink.
    pending: Option<Bytes>,
    sending: Option<Ticket>,
    flushing: Flush,
}

impl SendHalf {
    pub(super) fn new(handle: Arc<Handle>) -> Self {
        Self { handle, pending: None, sending: None, flushing: Flush::default() }
    }

    /// Sends a message; see [`Connection::send`](super::Connection::send).
    ///
    /// # Errors
    ///
    /// See [`Connection::send`](super::Connection::send).
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped before it is ready, the message is not sent.
    pub async fn send(&self, message: impl Into<Bytes>) -> Result<(), MessageError> {
        let message = message.into();
        let buffer = self.handle.as_buffer(&message);
        self.send_outgoing(Outgoing::of(&message, buffer.as_ref())).await
    }

    /// Sends a registered buffer; see [`Connection::send_buffer`](super::Connection::send_buffer).
    ///
    /// # Errors
    ///
    /// See [`Connection::send`](super::Connection::send).
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped before it is ready, the message is not sent.
    pub async fn send_buffer(&self, buffer: impl Into<Buf>) -> Result<(), MessageError> {
        let buffer = buffer.into();
        self.send_outgoing(Outgoing::Buffer(&buffer)).await
    }

    /// Sends the parts as one message; see
    /// [`Connection::send_vectored`](super::Connection::send_vectored).
    ///
    /// # Errors
    ///
    /// See [`Connection::send`](super::Connection::send).
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped before it is ready, the message is not sent.
    pub async fn send_vectored(&self, parts: &[Bytes]) -> Result<(), MessageError> {
        if let [message] = parts {
            let buffer = self.handle.as_buffer(message);
            return self.send_outgoing(Outgoing::of(message, buffer.as_ref())).await;
        }
        // A long copy is made without the lock.
        if self.handle.shared.with(|core, _| core.is_offered(parts)) {
            let message = Outgoing::Parts(parts).to_bytes();
            return self.send_outgoing(Outgoing::Bytes(&message)).await;
        }
        self.send_outgoing(Outgoing::Parts(parts)).await
    }

    async fn send_outgoing(&self, message: Outgoing<'_>) -> Result<(), MessageError> {
        let shared = &self.handle.shared;
        // A sink that is not polled must not block this send.
        if let mut left @ Some(_) = self.sending {
            shared.with(|core, _| core.withdraw_sender(&mut left));
        }
        let mut guard = WaitGuard::new(shared, Core::withdraw_sender);
        poll_fn(|context| {
            within_budget(context, |context| {
                shared.poll(context, |core, driver, caller| {
                    core.poll_send(message, &mut guard.ticket, driver, caller)
                })
            })
        })
        .await
    }

    /// Sends a message at once or not at all; see
    /// [`Connection::try_send`](super::Connection::try_send).
    ///
    /// # Errors
    ///
    /// See [`Connection::try_send`](super::Connection::try_send).
    pub fn try_send(&self, message: impl Into<Bytes>) -> Result<(), TrySendError> {
        let message = message.into();
        let buffer = self.handle.as_buffer(&message);
        let outgoing = Outgoing::of(&message, buffer.as_ref());
        match self.handle.shared.with(|core, driver| core.send_now(outgoing, driver)) {
            Ok(true) => Ok(()),
            Ok(false) => Err(TrySendError::Full(message)),
            Err(error) => Err(TrySendError::Failed(error)),
        }
    }

    /// Waits until all messages have arrived; see [`Connection::flush`](super::Connection::flush).
    ///
    /// # Errors
    ///
    /// See [`Connection::flush`](super::Connection::flush).
    ///
    /// # Cancel safety
    ///
    /// Dropping the future loses nothing.
    pub async fn flush(&self) -> Result<(), MessageError> {
        let shared = &self.handle.shared;
        let mut flush = FlushGuard { shared, flush: Flush::default() };
        poll_fn(|context| {
            within_budget(context, |context| {
                shared.poll(context, |core, driver, caller| {
                    core.poll_flush(&mut flush.flush, driver, caller)
                })
            })
        })
        .await
    }

    /// Finishes sending; see [`Connection::finish`](super::Connection::finish).
    ///
    /// # Errors
    ///
    /// See [`Connection::finish`](super::Connection::finish).
    pub fn finish(&self) -> Result<(), MessageError> {
        self.handle.shared.with(|core, driver| core.finish(driver))
    }

    /// Aborts both directions; see [`Connection::abort`](super::Connection::abort).
    pub fn abort(&self) {
        self.handle.shared.abort(CloseReason::Aborted);
    }

    /// Returns the reason why the connection closed, if it has.
    #[must_use]
    pub fn close_reason(&self) -> Option<CloseReason> {
        self.handle.close_reason()
    }

    /// Waits until the connection has closed; see
    /// [`Connection::closed`](super::Connection::closed).
    ///
    /// # Cancel safety
    ///
    /// Dropping the future changes nothing.
    pub async fn closed(&self) -> CloseReason {
        self.handle.closed().await
    }

    /// Returns the peer's address if connected by address.
    #[must_use]
    pub fn peer_addr(&self) -> Option<SocketAddr> {
        self.handle.peer_addr()
    }

    /// Returns the counters of the connection, which both halves share.
    #[must_use]
    pub fn counters(&self) -> ConnectionCounters {
        self.handle.counters()
    }

    fn poll_pending(&mut self, context: &mut Context<'_>) -> Poll<Result<(), MessageError>> {
        let Self { handle, pending, sending, .. } = self;
        let Some(message) = pending else { return Poll::Ready(Ok(())) };
        let buffer = handle.as_buffer(message);
        let outgoing = Outgoing::of(message, buffer.as_ref());
        let result = ready!(handle.shared.poll(context, |core, driver, caller| {
            core.poll_send(outgoing, sending, driver, caller)
        }));
        // A message that failed is not retried.
        *pending = None;
        Poll::Ready(result)
    }
}

impl Sink<Bytes> for SendHalf {
    type Error = MessageError;

    fn poll_ready(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Result<(), MessageError>> {
        within_budget(context, |context| self.poll_pending(context))
    }

    fn start_send(mut self: Pin<&mut Self>, message: Bytes) -> Result<(), MessageError> {
        assert!(self.pending.is_none(), "start_send without poll_ready");
        self.pending = Some(message);
        // If this fails, the next poll registers a waker.
        match self.poll_pending(&mut Context::from_waker(std::task::Waker::noop())) {
            Poll::Ready(result) => result,
            Poll::Pending => Ok(()),
        }
    }

    fn poll_flush(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Result<(), MessageError>> {
        within_budget(context, |context| {
            ready!(self.poll_pending(context))?;
            let Self { handle, flushing, .. } = &mut *self;
            handle.shared.poll(context, |core, driver, caller| {
                flushing.renew(core);
                core.poll_flush(flushing, driver, caller)
            })
        })
    }

    fn poll_close(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Result<(), MessageError>> {
        within_budget(context, |context| {
            ready!(self.poll_pending(context))?;
            self.finish()?;
            let Self { handle, flushing, .. } = &mut *self;
            handle.shared.poll(context, |core, driver, caller| {
                flushing.renew(core);
                core.poll_flush(flushing, driver, caller)
            })
        })
    }
}

impl Drop for SendHalf {
    fn drop(&mut self) {
        if self.sending.is_some() || self.flushing.ticket.is_some() {
            let Self { handle, sending, flushing, .. } = self;
            handle.shared.with(|core, _| {
                core.withdraw_sender(sending);
                core.withdraw_flusher(&mut flushing.ticket);
            });
        }
    }
}

impl fmt::Debug for SendHalf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SendHalf")
            .field("qpn", &self.handle.shared.qp.qpn())
            .finish_non_exhaustive()
    }
}

/// The receiving half of a [`Connection`](super::Connection), and a [`Stream`] of messages that
/// ends after the peer has finished or after an error.
///
/// # Cancel safety
///
/// Dropping a future of the stream's adapters, such as `next`, loses no message.
pub struct RecvHalf {
    pub(super) handle: Arc<Handle>,
    /// Position of the stream.
    receiving: Option<Ticket>,
    ended: bool,
}

impl RecvHalf {
    pub(super) fn new(handle: Arc<Handle>) -> Self {
        Self { handle, receiving: None, ended: false }
    }

    /// Receives a message; see [`Connection::recv`](super::Connection::recv).
    ///
    /// # Errors
    ///
    /// See [`Connection::recv`](super::Connection::recv).
    ///
    /// # Cancel safety
    ///
    /// Dropping the future loses no message.
    pub async fn recv(&self) -> Result<Option<Bytes>, MessageError> {
        let shared = &self.handle.shared;
        let mut guard = self.receiver();
        poll_fn(|context| {
            within_budget(context, |context| {
                shared.poll_receiver(context, &mut guard.ticket, Core::poll_recv)
            })
        })
        .await
    }

    /// Receives a message in registered memory; see
    /// [`Connection::recv_buffer`](super::Connection::recv_buffer).
    ///
    /// # Errors
    ///
    /// See [`Connection::recv_buffer`](super::Connection::recv_buffer).
    ///
    /// # Cancel safety
    ///
    /// Dropping the future loses no message.
    pub async fn recv_buffer(&self) -> Result<Option<Buf>, MessageError> {
        let shared = &self.handle.shared;
        let mut guard = self.receiver();
        let mut memory = None;
        let mut poll_next = |context: &mut Context<'_>| {
            loop {
                let take =
                    |core: &mut Core, ticket: &mut _, driver: &_, caller: &mut Caller<'_>| {
                        core.poll_recv_buffer(&mut memory, ticket, driver, caller)
                    };
                let next = ready!(shared.poll_receiver(context, &mut guard.ticket, take))?;
                return Poll::Ready(Ok(match next {
                    Some(Next::Message(buffer)) => Some(buffer),
                    Some(Next::Copy(bytes)) => {
                        let mut target = copy_target(&mut memory, bytes.len());
                        target.copy_from_slice(&bytes);
                        Some(target.freeze())
                    }
                    Some(Next::Memory(len)) => {
                        memory = Some(self.handle.try_alloc(len).map_err(MessageError::Register)?);
                        continue;
                    }
                    None => None,
                }));
            }
        };
        poll_fn(|context| within_budget(context, &mut poll_next)).await
    }

    /// Returns a new position among the receivers.
    fn receiver(&self) -> WaitGuard<'_> {
        let shared = &self.handle.shared;
        // A stream that is not polled must not block this receive.
        if let mut left @ Some(_) = self.receiving {
            shared.with(|core, _| core.withdraw_receiver(&mut left));
        }
        WaitGuard::new(shared, Core::withdraw_receiver)
    }

    /// Returns the stream of the peer's WRITEs with immediate data; see
    /// [`Connection::notifications`](super::Connection::notifications).
    pub fn notifications(&self) -> Notifications<'_> {
        let guard = WaitGuard::new(&self.handle.shared, Core::withdraw_notified);
        Notifications { guard, ended: false }
    }

    /// Aborts both directions; see [`Connection::abort`](super::Connection::abort).
    pub fn abort(&self) {
        self.handle.shared.abort(CloseReason::Aborted);
    }

    /// Returns the reason why the connection closed, if it has.
    #[must_use]
    pub fn close_reason(&self) -> Option<CloseReason> {
        self.handle.close_reason()
    }

    /// Waits until the connection has closed; see
    /// [`Connection::closed`](super::Connection::closed).
    ///
    /// # Cancel safety
    ///
    /// Dropping the future changes nothing.
    pub async fn closed(&self) -> CloseReason {
        self.handle.closed().await
    }

    /// Returns the peer's address if connected by address.
    #[must_use]
    pub fn peer_addr(&self) -> Option<SocketAddr> {
        self.handle.peer_addr()
    }

    /// Returns the counters of the connection, which both halves share.
    #[must_use]
    pub fn counters(&self) -> ConnectionCounters {
        self.handle.counters()
    }
}

/// The stream of a peer's WRITEs with immediate data; see
/// [`Connection::notifications`](super::Connection::notifications).
///
/// # Cancel safety
///
/// Dropping the stream or a future of its adapters, such as `next`, loses no notification. Several
/// streams of a connection share them.
#[must_use = "streams do nothing unless polled"]
pub struct Notifications<'a> {
    guard: WaitGuard<'a>,
    ended: bool,
}

impl Stream for Notifications<'_> {
    type Item = Result<Notification, MessageError>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let Self { guard, ended } = &mut *self;
        if *ended {
            return Poll::Ready(None);
        }
        let WaitGuard { shared, ticket, .. } = guard;
        let next = ready!(within_budget(context, |context| {
            shared.poll(context, |core, driver, caller| {
                core.poll_notification(ticket, driver, caller)
            })
        }));
        *ended = !matches!(next, Some(Ok(_)));
        Poll::Ready(next)
    }
}

impl fmt::Debug for Notifications<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Notifications")
            .field("qpn", &self.guard.shared.qp.qpn())
            .field("ended", &self.ended)
            .finish_non_exhaustive()
    }
}

impl Stream for RecvHalf {
    type Item = Result<Bytes, MessageError>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.ended {
            return Poll::Ready(None);
        }
        let Self { handle, receiving, ended } = &mut *self;
        let next = ready!(within_budget(context, |context| {
            handle.shared.poll_receiver(context, receiving, Core::poll_recv)
        }))
        .transpose();
        *ended = !matches!(next, Some(Ok(_)));
        Poll::Ready(next)
    }
}

impl Drop for RecvHalf {
    fn drop(&mut self) {
        if self.receiving.is_some() {
            let Self { handle, receiving, .. } = self;
            handle.shared.with(|core, _| core.withdraw_receiver(receiving));
        }
    }
}

impl fmt::Debug for RecvHalf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RecvHalf")
            .field("qpn", &self.handle.shared.qp.qpn())
            .finish_non_exhaustive()
    }
}

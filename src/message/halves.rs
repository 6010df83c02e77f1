//! The two directions of a connection, to be owned by two tasks.

use std::fmt;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use futures::{Sink, Stream};

use super::connection::Handle;
use super::core::Core;
use super::error::{CloseReason, MessageError};
use super::outbound::Flush;
use super::shared::Shared;
use super::waiters::Ticket;

/// A place in a line of the connection that is given up when this is dropped.
pub(super) struct Turn<'a> {
    shared: &'a Shared,
    pub(super) ticket: Option<Ticket>,
    leave: fn(&mut Core, &mut Option<Ticket>),
}

impl<'a> Turn<'a> {
    pub(super) fn new(shared: &'a Shared, leave: fn(&mut Core, &mut Option<Ticket>)) -> Self {
        Self { shared, ticket: None, leave }
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        if self.ticket.is_some() {
            self.shared.with(|core, _| (self.leave)(core, &mut self.ticket));
        }
    }
}

/// A flush that is given up when this is dropped.
struct Leaving<'a> {
    shared: &'a Shared,
    flush: Flush,
}

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        if self.flush.ticket.is_some() {
            self.shared.with(|core, _| core.leave_flushers(&mut self.flush.ticket));
        }
    }
}

/// The half of a [`Connection`](super::Connection) that sends; a [`Sink`] of messages.
///
/// As a sink it holds one message that there was no room for, until it is polled as a sink again; [`send`](Self::send) does not
/// wait for that one, and overtakes it. Closing the sink sends it, and finishes; dropping the half does not.
///
/// # Cancel safety
///
/// A `send` of the sink's adapter that is dropped has not sent its message, has sent it, or has left it with the sink, which sends
/// it when it is polled next. A `flush` or `close` that is dropped may be called again.
pub struct SendHalf {
    pub(super) handle: Arc<Handle>,
    /// Of the sink: a message that waits for room, and places in line.
    pending: Option<Bytes>,
    sending: Option<Ticket>,
    flushing: Flush,
}

impl SendHalf {
    pub(super) fn new(handle: Arc<Handle>) -> Self {
        Self { handle, pending: None, sending: None, flushing: Flush::default() }
    }

    /// As [`Connection::send`](super::Connection::send).
    ///
    /// # Errors
    ///
    /// As there.
    ///
    /// # Cancel safety
    ///
    /// As there: the message was sent, or will not be.
    pub async fn send(&self, message: impl Into<Bytes>) -> Result<(), MessageError> {
        let message = message.into();
        let shared = &self.handle.shared;
        // Nobody polls the sink while this borrows it: its place in line would hold up this one for ever.
        if let mut left @ Some(_) = self.sending {
            shared.with(|core, _| core.next_sender(&mut left));
        }
        let mut turn = Turn::new(shared, Core::next_sender);
        poll_fn(|context| {
            shared.poll(context, |core, bell, guest| {
                core.poll_send(&message, &mut turn.ticket, bell, guest)
            })
        })
        .await
    }

    /// As [`Connection::flush`](super::Connection::flush).
    ///
    /// # Errors
    ///
    /// As there.
    ///
    /// # Cancel safety
    ///
    /// As there: nothing is lost.
    pub async fn flush(&self) -> Result<(), MessageError> {
        let shared = &self.handle.shared;
        let mut flush = Leaving { shared, flush: Flush::default() };
        poll_fn(|context| {
            shared.poll(context, |core, bell, guest| core.poll_flush(&mut flush.flush, bell, guest))
        })
        .await
    }

    /// As [`Connection::finish`](super::Connection::finish).
    ///
    /// # Errors
    ///
    /// As there.
    pub fn finish(&self) -> Result<(), MessageError> {
        self.handle.shared.with(|core, bell| core.finish(bell))
    }

    /// As [`Connection::abort`](super::Connection::abort): ends both directions.
    pub fn abort(&self) {
        self.handle.shared.abort(CloseReason::Aborted);
    }

    /// Sends the message that the sink holds.
    fn poll_pending(&mut self, context: &mut Context<'_>) -> Poll<Result<(), MessageError>> {
        let Self { handle, pending, sending, .. } = self;
        let Some(message) = pending else { return Poll::Ready(Ok(())) };
        let result = ready!(
            handle
                .shared
                .poll(context, |core, bell, guest| core.poll_send(message, sending, bell, guest))
        );
        // One that cannot be sent is not sent later, either.
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
        self.poll_pending(context)
    }

    fn start_send(mut self: Pin<&mut Self>, message: Bytes) -> Result<(), MessageError> {
        assert!(self.pending.is_none(), "start_send without poll_ready");
        self.pending = Some(message);
        // If there is room it leaves now; if not, whoever asks for more room is woken.
        match self.poll_pending(&mut Context::from_waker(std::task::Waker::noop())) {
            Poll::Ready(result) => result,
            Poll::Pending => Ok(()),
        }
    }

    fn poll_flush(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Result<(), MessageError>> {
        ready!(self.poll_pending(context))?;
        let Self { handle, flushing, .. } = &mut *self;
        handle.shared.poll(context, |core, bell, guest| {
            flushing.renew(core);
            core.poll_flush(flushing, bell, guest)
        })
    }

    fn poll_close(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Result<(), MessageError>> {
        ready!(self.poll_pending(context))?;
        self.finish()?;
        self.poll_flush(context)
    }
}

impl Drop for SendHalf {
    fn drop(&mut self) {
        if self.sending.is_some() || self.flushing.ticket.is_some() {
            let Self { handle, sending, flushing, .. } = self;
            handle.shared.with(|core, _| {
                core.next_sender(sending);
                core.leave_flushers(&mut flushing.ticket);
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

/// The half of a [`Connection`](super::Connection) that receives; a [`Stream`] of messages, which ends when the peer has
/// finished, or after an error.
///
/// # Cancel safety
///
/// No message is lost with a future of the stream's adapters, such as `next`, that is dropped before it was ready.
pub struct RecvHalf {
    pub(super) handle: Arc<Handle>,
    /// Of the stream: place in line, and whether it has ended.
    receiving: Option<Ticket>,
    ended: bool,
}

impl RecvHalf {
    pub(super) fn new(handle: Arc<Handle>) -> Self {
        Self { handle, receiving: None, ended: false }
    }

    /// As [`Connection::recv`](super::Connection::recv).
    ///
    /// # Errors
    ///
    /// As there.
    ///
    /// # Cancel safety
    ///
    /// As there: no message is lost.
    pub async fn recv(&self) -> Result<Option<Bytes>, MessageError> {
        let shared = &self.handle.shared;
        // Nobody polls the stream while this borrows it: its place in line would hold up this one for ever.
        if let mut left @ Some(_) = self.receiving {
            shared.with(|core, _| core.next_receiver(&mut left));
        }
        let mut turn = Turn::new(shared, Core::next_receiver);
        poll_fn(|context| {
            shared.poll(context, |core, bell, guest| core.poll_recv(&mut turn.ticket, bell, guest))
        })
        .await
    }

    /// As [`Connection::abort`](super::Connection::abort): ends both directions.
    pub fn abort(&self) {
        self.handle.shared.abort(CloseReason::Aborted);
    }
}

impl Stream for RecvHalf {
    type Item = Result<Bytes, MessageError>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.ended {
            return Poll::Ready(None);
        }
        let Self { handle, receiving, ended } = &mut *self;
        let next = ready!(
            handle.shared.poll(context, |core, bell, guest| core.poll_recv(receiving, bell, guest))
        )
        .transpose();
        *ended = !matches!(next, Some(Ok(_)));
        Poll::Ready(next)
    }
}

impl Drop for RecvHalf {
    fn drop(&mut self) {
        if self.receiving.is_some() {
            let Self { handle, receiving, .. } = self;
            handle.shared.with(|core, _| core.next_receiver(receiving));
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

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use futures::{Sink, Stream};

use super::Connection;
use crate::connection::error::MessageError;
use crate::connection::outbound::{Flush, Outgoing};
use crate::connection::state::ConnectionState;
use crate::coop::within_budget;
use crate::waiters::Ticket;

#[derive(Debug, Default)]
pub(super) struct Polled {
    /// A message that waits for a credit.
    pending: Option<Bytes>,
    pub(super) sending: Option<Ticket>,
    flush: Flush,
    flushing: Option<Ticket>,
    receiving: Option<Ticket>,
    ended: bool,
}

impl Connection {
    fn poll_pending(&mut self, context: &mut Context<'_>) -> Poll<Result<(), MessageError>> {
        let Self { handle, polled: Polled { pending, sending, .. } } = self;
        let Some(message) = pending else { return Poll::Ready(Ok(())) };
        let buffer = handle.as_buffer(message);
        let outgoing = Outgoing::of(message, buffer.as_ref());
        let result = ready!(handle.shared.poll(context, |state, waker, caller| {
            state.poll_send(outgoing, sending, waker, caller)
        }));
        // A message that failed is not retried.
        *pending = None;
        Poll::Ready(result)
    }

    fn poll_flushed(&mut self, context: &mut Context<'_>) -> Poll<Result<(), MessageError>> {
        let Self { handle, polled: Polled { flush, flushing, .. } } = self;
        handle.shared.poll(context, |state, waker, caller| {
            flush.renew(state);
            state.poll_flush(flush, flushing, waker, caller)
        })
    }
}

impl Sink<Bytes> for Connection {
    type Error = MessageError;

    fn poll_ready(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Result<(), MessageError>> {
        within_budget(context, |context| self.poll_pending(context))
    }

    fn start_send(mut self: Pin<&mut Self>, message: Bytes) -> Result<(), MessageError> {
        assert!(self.polled.pending.is_none(), "start_send without poll_ready");
        self.polled.pending = Some(message);
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
            self.poll_flushed(context)
        })
    }

    fn poll_close(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Result<(), MessageError>> {
        within_budget(context, |context| {
            ready!(self.poll_pending(context))?;
            self.finish()?;
            self.poll_flushed(context)
        })
    }
}

impl Stream for Connection {
    type Item = Result<Bytes, MessageError>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.polled.ended {
            return Poll::Ready(None);
        }
        let Self { handle, polled: Polled { receiving, ended, .. } } = &mut *self;
        let next = ready!(within_budget(context, |context| {
            handle.shared.poll_receiver(context, receiving, ConnectionState::poll_next)
        }))
        .transpose();
        *ended = !matches!(next, Some(Ok(_)));
        Poll::Ready(next)
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        let Self { handle, polled: Polled { sending, flushing, receiving, .. } } = self;
        if sending.is_some() || flushing.is_some() {
            handle.shared.with(|state, _| {
                state.withdraw_sender(sending);
                state.withdraw_flusher(flushing);
            });
        }
        if receiving.is_some() {
            handle.shared.with(|state, _| state.withdraw_stream(receiving));
        }
    }
}

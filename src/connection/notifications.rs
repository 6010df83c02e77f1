use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use futures::Stream;

use super::error::MessageError;
use super::inbox::Notification;
use super::shared::{ConnectionInner, WaitGuard};
use super::state::ConnectionState;
use crate::coop::within_budget;

/// The stream of [`Connection::notifications`](super::Connection::notifications). Streams of the
/// same connection share the notifications.
///
/// # Cancel safety
///
/// Dropping the stream or a future of its adapters, such as `next`, loses no notification.
#[must_use = "streams do nothing unless polled"]
pub struct Notifications<'a> {
    guard: WaitGuard<'a>,
    ended: bool,
}

impl<'a> Notifications<'a> {
    pub(super) fn new(shared: &'a ConnectionInner) -> Self {
        Self { guard: WaitGuard::new(shared, ConnectionState::withdraw_notified), ended: false }
    }
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
            shared.poll(context, |state, waker, caller| {
                state.poll_notification(ticket, waker, caller)
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

//! Tokio's cooperative budget, in public futures that can be ready again and again, so that a peer
//! that sends without pause cannot keep other tasks waiting.
//!
//! The budget is checked before anything is taken, so a future that yields loses nothing when it is
//! dropped. Code that several tasks share, such as the driver of a connection, does not check it,
//! because it must not depend on the budget of the task that happens to run it.

use std::future::poll_fn;
use std::task::{Context, Poll, ready};

use tokio::task::coop::poll_proceed;

/// Yields without calling `poll` if the budget of the task is used up.
#[inline]
pub(crate) fn within_budget<T>(
    context: &mut Context<'_>,
    poll: impl FnOnce(&mut Context<'_>) -> Poll<T>,
) -> Poll<T> {
    let budget = ready!(poll_proceed(context));
    let result = poll(context);
    if result.is_ready() {
        budget.made_progress();
    }
    result
}

#[inline(never)]
pub(crate) fn poll_budget(context: &mut Context<'_>) -> Poll<()> {
    within_budget(context, |_| Poll::Ready(()))
}

/// Only `Some` consumes budget, because with `None` the caller waits.
#[inline]
pub(crate) async fn try_within_budget<T>(mut attempt: impl FnMut() -> Option<T>) -> Option<T> {
    poll_fn(|context| {
        let budget = ready!(poll_proceed(context));
        let result = attempt();
        if result.is_some() {
            budget.made_progress();
        }
        Poll::Ready(result)
    })
    .await
}

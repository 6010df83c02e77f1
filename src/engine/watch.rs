//! Notifications about a work queue. The initiator pool, which shares work queues between peers,
//! must not reassign one in use.

use std::task::Waker;

/// Wakers to notify. Each is woken once, except `rouse`.
#[derive(Default)]
pub(super) struct Watch {
    /// Woken when the queue is idle. Counted as a waiter, so the completion queue is armed for it.
    pub(super) idle: Option<Waker>,
    /// Woken when the queue fails or is closed.
    pub(super) failure: Option<Waker>,
    /// Woken each time a reactor goes away.
    pub(super) rouse: Option<Waker>,
}

//! Notifications about a work queue. The initiator pool, which shares work queues between peers,
//! must not reassign one in use.

use std::task::Waker;

#[derive(Default)]
pub(super) struct Watch {
    pub(super) idle: Option<Waker>,
    pub(super) failure: Option<Waker>,
    pub(super) rouse: Option<Waker>,
}

//! Being told of a work queue: that nothing is in flight on it any more, and that work has failed. For who shares queues
//! out, and must not hand one on before the device is done with it.

use std::task::Waker;

/// Who is to be told, once.
#[derive(Default)]
pub(super) struct Watch {
    /// That the queue is idle. It counts as somebody who waits: the completion queue is armed for it.
    pub(super) idle: Option<Waker>,
    /// That work has failed, or that the queue has ended.
    pub(super) failure: Option<Waker>,
    /// That a reactor is gone, each time.
    pub(super) rouse: Option<Waker>,
}

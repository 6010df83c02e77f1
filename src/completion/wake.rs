//! What is left to do when the locks are released.

use std::sync::Arc;
use std::task::Waker;

use smallvec::SmallVec;

use super::slot::Held;
use super::teardown::QueuePairCore;
use super::work_queue::WorkQueue;
use crate::error::OpErrorKind;

/// Tasks to wake, and what abandoned operations owned to drop: both can run code of users, which no lock may be held for.
#[derive(Default)]
pub(super) struct WakeList {
    any: bool,
    wakers: SmallVec<[Waker; 16]>,
    held: SmallVec<[Held; 2]>,
    /// To be dropped, not woken.
    spent: SmallVec<[Waker; 1]>,
    ends: SmallVec<[(Arc<QueuePairCore>, OpErrorKind); 1]>,
    abandons: SmallVec<[(Arc<WorkQueue>, OpErrorKind); 1]>,
}

impl WakeList {
    #[inline]
    pub(super) fn new() -> Self {
        Self::default()
    }

    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        !self.any
    }

    pub(super) fn wake(&mut self, waker: Waker) {
        self.any = true;
        self.wakers.push(waker);
    }

    /// The one task to wake, if that is all that is left to do, as it is most of the time: spares moving the list.
    pub(super) fn only(&mut self) -> Option<Waker> {
        let else_nothing =
            self.held.is_empty() && self.spent.is_empty() && self.ends.is_empty() && self.abandons.is_empty();
        if self.wakers.len() != 1 || !else_nothing {
            return None;
        }
        self.any = false;
        self.wakers.pop()
    }

    pub(super) fn dispose(&mut self, held: Option<Held>, waker: Option<Waker>) {
        self.any |= held.is_some() || waker.is_some();
        self.held.extend(held);
        self.spent.extend(waker);
    }

    /// A queue pair that must be destroyed before its operations can end.
    pub(super) fn end(&mut self, core: Arc<QueuePairCore>, kind: OpErrorKind) {
        self.any = true;
        self.ends.push((core, kind));
    }

    /// A shared receive queue whose operations end once its queue pairs have.
    pub(super) fn abandon(&mut self, queue: Arc<WorkQueue>, kind: OpErrorKind) {
        self.any = true;
        self.abandons.push((queue, kind));
    }

    #[inline]
    pub(super) fn finish(self) {
        if !self.is_empty() {
            self.finish_slow();
        }
    }

    fn finish_slow(self) {
        for waker in self.wakers {
            waker.wake();
        }
        for (core, kind) in self.ends {
            core.shut_down(kind);
        }
        for (queue, kind) in self.abandons {
            drop(queue.close());
            queue.cq().abandon(&queue, kind, false);
        }
    }
}

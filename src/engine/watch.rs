//! Being told of a work queue: that nothing is in flight on it any more, and that work has failed. For who shares queues
//! out, and must not hand one on before the device is done with it.

use std::sync::Arc;
use std::task::{Context, Waker};

use super::completion_mode::CompletionMode;
use super::drain::CqShared;
use super::wake_list::WakeList;
use super::work_queue::{Posting, WorkQueue};
use crate::contained::contained;
use crate::sync::{Ordering, lock};

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

impl WorkQueue {
    /// True if the device holds none of its work, and none waits for room.
    pub(crate) fn is_idle(&self) -> bool {
        self.is_idle_now(&lock(&self.posting))
    }

    /// Work requests that the device holds or that wait for room.
    pub(crate) fn load(&self) -> usize {
        let posting = lock(&self.posting);
        self.room.in_flight(posting.posted as u32) as usize + posting.queued.len()
    }

    /// Up to where work was given to it so far, to ask [`has_passed`](Self::has_passed) with.
    pub(crate) fn mark(&self) -> u32 {
        let posting = lock(&self.posting);
        (posting.posted as u32).wrapping_add(posting.queued.len() as u32)
    }

    /// True if all is done that was given to it before that mark. It may take longer to be said if work in line was refused.
    pub(crate) fn has_passed(&self, mark: u32) -> bool {
        let posting = lock(&self.posting);
        let done = (posting.posted as u32).wrapping_sub(self.room.in_flight(posting.posted as u32));
        self.is_idle_now(&posting) || done.wrapping_sub(mark) < 1 << 31
    }

    /// True if work can be given to it: it was not destroyed.
    pub(crate) fn is_open(&self) -> bool {
        lock(&self.posting).poster.is_some()
    }

    /// Completions that were errors, modulo 2^32.
    #[inline]
    pub(crate) fn failures(&self) -> u32 {
        self.failed.load(Ordering::Relaxed)
    }

    /// As [`is_idle`](Self::is_idle). If it is not, `waker` is woken once when it is, however that comes about, and whoever
    /// else waits for completions or not; another waker that waits for the same is kept instead.
    pub(crate) fn when_idle(&self, waker: &Waker) -> bool {
        // No lock may be held for what the clone or the drop of a waker runs.
        let mut waker = Some(waker.clone());
        let mut posting = lock(&self.posting);
        if self.is_idle_now(&posting) {
            return true;
        }
        if posting.watch.idle.is_none() {
            self.cq().now_waiting();
            posting.watch.idle = waker.take();
        }
        // As who waits for room: either we see that it is idle, or the drainer sees us.
        self.room.crowd();
        let idle = self.is_idle_now(&posting);
        let spent = if idle { posting.watch.idle.take() } else { None };
        if spent.is_some() {
            self.cq().no_longer_waiting();
            self.room.clear();
        }
        drop(posting);
        drop(spent);
        if !idle {
            self.cq().attend();
        }
        idle
    }

    /// Has `waker` woken once, when work fails next, or has failed since `failures`, or when the queue ends.
    pub(crate) fn when_failed(&self, waker: &Waker, failures: u32) {
        let waker = waker.clone();
        let mut posting = lock(&self.posting);
        let before = posting.watch.failure.replace(waker);
        // Counted first, and told under this lock: either the drainer sees us, or we see that it has counted.
        let is_over = self.failures() != failures || posting.poster.is_none();
        let spent = if is_over { posting.watch.failure.take() } else { None };
        drop(posting);
        drop(before);
        if let Some(waker) = spent {
            super::wake_list::wake(waker);
        }
    }

    fn is_idle_now(&self, posting: &Posting) -> bool {
        posting.queued.is_empty() && self.room.in_flight(posting.posted as u32) == 0
    }

    /// Called when room has come up and some of it was used: tells who waits for all of it.
    pub(super) fn tell_idle(&self, posting: &mut Posting, woken: &mut WakeList) {
        if self.is_idle_now(posting)
            && let Some(waker) = posting.watch.idle.take()
        {
            self.cq().no_longer_waiting();
            woken.wake(waker);
        }
    }

    /// Has `waker` woken whenever those who wait are to look again, for who has others wait.
    pub(crate) fn when_roused(&self, waker: &Waker) {
        let waker = waker.clone();
        let before = lock(&self.posting).watch.rouse.replace(waker);
        drop(before);
    }

    /// No work can be given to it any more.
    pub(super) fn tell_of_end(&self) {
        let waker = lock(&self.posting).watch.failure.take();
        if let Some(waker) = waker {
            super::wake_list::wake(waker);
        }
    }

    /// Work has failed.
    #[cold]
    pub(super) fn tell_failure(&self, woken: &mut WakeList) {
        if let Some(waker) = lock(&self.posting).watch.failure.take() {
            woken.wake(waker);
        }
    }
}

impl CqShared {
    /// For a task that waits for what completions of others lead to, and that is woken by whoever brings it about: sees to it
    /// that they are found, in the runtime of this task too.
    pub(crate) fn attend_for(self: &Arc<Self>, context: &mut Context<'_>) {
        self.drain();
        if !self.mode().arms() {
            return;
        }
        self.attend();
        let polls = matches!(self.mode(), CompletionMode::Cooperative) && !self.is_driven();
        // As an operation that waits: without a reactor it has to ask.
        if polls || !self.reactors().watch(self) {
            contained(|| context.waker().wake_by_ref());
        }
    }
}

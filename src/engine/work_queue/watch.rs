//! For a pool of DC initiators, which shares work queues between peers, and must not reassign one
//! in use.

use std::task::Waker;

use rdma_provider::later;

use super::WorkQueue;
use super::state::WorkQueueState;
use crate::engine::wake_list::WakeList;
use crate::sync::lock;

#[derive(Default)]
pub(in crate::engine) struct Watch {
    pub(super) idle: Option<Waker>,
    pub(super) failure: Option<Waker>,
    pub(super) repoll_waker: Option<Waker>,
}

impl WorkQueue {
    pub(crate) fn is_idle(&self) -> bool {
        self.is_idle_now(&lock(&self.state))
    }

    pub(crate) fn load(&self) -> usize {
        let state = lock(&self.state);
        self.capacity.in_flight(state.posted as u32) as usize + state.wait_queue.len()
    }

    /// The position behind all work submitted so far, for [`has_passed`](Self::has_passed).
    pub(crate) fn mark(&self) -> u32 {
        let state = lock(&self.state);
        (state.posted as u32).wrapping_add(state.wait_queue.len() as u32)
    }

    /// Returns true if all work submitted before `mark` is done, perhaps late if queued work was
    /// refused.
    pub(crate) fn has_passed(&self, mark: u32) -> bool {
        let state = lock(&self.state);
        let done = (state.posted as u32).wrapping_sub(self.capacity.in_flight(state.posted as u32));
        self.is_idle_now(&state) || done.wrapping_sub(mark) < 1 << 31
    }

    /// If this returns false, wakes `waker` once when the queue becomes idle, whether or not tasks
    /// wait for its completions. An earlier waker is kept instead.
    pub(crate) fn when_idle(&self, waker: &Waker) -> bool {
        // Cloned, and dropped below, without the lock.
        let mut waker = Some(waker.clone());
        let mut state = lock(&self.state);
        if self.is_idle_now(&state) {
            return true;
        }
        if state.watch.idle.is_none() {
            self.cq().add_waiter();
            state.watch.idle = waker.take();
        }
        // Either this thread sees the idle queue, or the drainer sees the waiter.
        self.capacity.announce_waiter();
        let idle = self.is_idle_now(&state);
        let discarded = if idle { state.watch.idle.take() } else { None };
        if discarded.is_some() {
            self.cq().remove_waiter();
            self.capacity.clear_waiters();
        }
        drop(state);
        drop(discarded);
        if !idle {
            self.cq().ensure_watched();
        }
        idle
    }

    /// Wakes `waker` once at the next failure of the queue, or immediately if it has failed since
    /// `failures` or is closed.
    pub(crate) fn when_failed(&self, waker: &Waker, failures: u32) {
        let waker = waker.clone();
        let mut state = lock(&self.state);
        let before = state.watch.failure.replace(waker);
        // The drainer counts a failure before it notifies under this lock: either it sees the
        // waker, or this thread sees the count.
        let is_over = self.failures() != failures || state.device.is_none();
        let discarded = if is_over { state.watch.failure.take() } else { None };
        drop(state);
        drop(before);
        later::wake(discarded);
    }

    fn is_idle_now(&self, state: &WorkQueueState) -> bool {
        state.wait_queue.is_empty() && self.capacity.in_flight(state.posted as u32) == 0
    }

    /// Called after queued work was posted to freed capacity.
    pub(in crate::engine) fn notify_idle(&self, state: &mut WorkQueueState, woken: &mut WakeList) {
        if self.is_idle_now(state)
            && let Some(waker) = state.watch.idle.take()
        {
            self.cq().remove_waiter();
            woken.wake(waker);
        }
    }

    /// Wakes `waker` each time waiting tasks are to poll again, for components with waiters of
    /// their own.
    pub(crate) fn on_wake_to_repoll(&self, waker: &Waker) {
        let waker = waker.clone();
        let before = lock(&self.state).watch.repoll_waker.replace(waker);
        drop(before);
    }

    pub(in crate::engine) fn notify_closed(&self) {
        let waker = lock(&self.state).watch.failure.take();
        later::wake(waker);
    }
}

//! Work requests that wait for a free entry of the queue.

use super::WorkQueue;
use super::state::WorkQueueState;
use crate::engine::slot::Outcome;
use crate::engine::wake_list::WakeList;
use crate::engine::work_request::Queued;
use crate::engine::work_request_id::index_of;
use crate::error::OpErrorKind;
use crate::sync::{MutexGuard, lock};
use crate::types::WrId;

impl WorkQueue {
    #[cold]
    pub(super) fn enqueue(&self, state: &mut WorkQueueState, queued: Queued) {
        state.wait_queue.push_back(queued);
        state.until = state.posted;
        state.waited += 1;
        self.cq().add_waiter();
    }

    /// Announces queued work to the drainer and posts as much as possible.
    pub(in crate::engine) fn announce_queued(&self, mut state: MutexGuard<'_, WorkQueueState>) {
        self.capacity.announce_waiter();
        let mut woken = WakeList::new();
        self.post_queued(&mut state, &mut woken);
        let waits = !state.wait_queue.is_empty();
        drop(state);
        woken.finish();
        if waits {
            // The operations may not be polled.
            self.cq().ensure_watched();
        }
    }

    pub(super) fn post_queued(&self, state: &mut WorkQueueState, woken: &mut WakeList) {
        while state.device.is_some()
            && self.capacity.free(state.posted as u32) > 0
            && let Some(next) = state.wait_queue.pop_front()
        {
            self.cq().remove_waiter();
            let slot = self.slots.slot(index_of(next.id));
            let request = next.request();
            if let Err(error) = state.post_one(slot, next.id, &request, &next.sges) {
                if next.is_part {
                    self.refuse_queued(state, &next, error, woken);
                } else {
                    let kind = state.refusal(error);
                    self.settle(next.id, Outcome::Err(kind), woken);
                }
            }
        }
        self.notify_idle(state, woken);
        if state.wait_queue.is_empty() && state.watch.idle.is_none() {
            self.capacity.clear_waiters();
        }
    }

    #[cold]
    pub(in crate::engine) fn admit_queued(&self, woken: &mut WakeList) {
        self.post_queued(&mut lock(&self.state), woken);
    }

    pub(in crate::engine) fn is_queued(&self, id: WrId) -> bool {
        lock(&self.state).wait_queue.iter().any(|queued| queued.id == id)
    }

    /// Fails the queued work of a [closed](Self::close) queue that was not destroyed. The rest of a
    /// partly posted batch stays queued.
    pub(in crate::engine) fn fail_queued(&self, kind: OpErrorKind) {
        let mut woken = WakeList::new();
        let mut state = lock(&self.state);
        // The batch of which all parts are queued.
        let mut whole = None;
        for queued in std::mem::take(&mut state.wait_queue) {
            let slot = self.slots.slot(index_of(queued.id));
            let part = slot.part(queued.id).unwrap_or(0);
            if part > 0 && whole != Some(slot.id()) {
                state.wait_queue.push_back(queued);
                continue;
            }
            whole = Some(slot.id());
            self.cq().remove_waiter();
            if queued.id == slot.id() {
                self.settle(queued.id, Outcome::Err(kind), &mut woken);
            } else {
                self.failures.fail_part(slot, part, kind);
            }
        }
        drop(state);
        woken.finish();
    }
}

use super::WorkQueue;
use crate::engine::slot::Outcome;
use crate::engine::wake_list::WakeList;
use crate::error::OpErrorKind;
use crate::sync::lock;
use crate::types::WrId;

impl WorkQueue {
    /// Ends a queued work request with `kind`. Returns false if it is not queued, or part of a
    /// batch.
    pub(crate) fn withdraw(&self, id: WrId, kind: OpErrorKind) -> bool {
        let mut woken = WakeList::new();
        let mut state = lock(&self.state);
        let at = state.wait_queue.iter().position(|queued| queued.id == id && !queued.is_part);
        let Some(at) = at else { return false };
        state.wait_queue.remove(at);
        self.cq().remove_waiter();
        self.settle(id, Outcome::Err(kind), &mut woken);
        self.post_queued(&mut state, &mut woken);
        drop(state);
        woken.finish();
        true
    }

    /// Lets the device flush all work of the queue pair. Returns false if there is no queue pair,
    /// or the device refuses.
    pub(crate) fn move_to_error(&self, cause: OpErrorKind) -> bool {
        self.queue_pair().is_some_and(|queue_pair| queue_pair.move_to_error(cause))
    }

    pub(crate) fn destroy_queue_pair(&self) {
        if let Some(queue_pair) = self.queue_pair() {
            queue_pair.shut_down(OpErrorKind::Closed);
        }
    }
}

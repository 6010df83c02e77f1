//! A send, receive or shared receive queue: posting, capacity and the work in flight.

#![allow(unsafe_code)]

mod post;
mod post_batch;
mod revoke;
mod state;
#[cfg(all(test, not(loom)))]
mod tests;
mod wait_queue;
mod watch;

use std::fmt;
use std::ptr;
use std::sync::{Arc, OnceLock, Weak};
use std::task::Waker;

use rdma_provider::prefetch;

pub(crate) use state::DeviceQueue;
pub(super) use state::WorkQueueState;
use state::is_traced;

use super::capacity::Capacity;
use super::claim::Claim;
use super::drainer::Drainer;
use super::failures::{Failures, failure};
use super::slot::{FailedParts, Finished, Outcome, Slot};
use super::slot_table::{Cursor, Slots};
use super::wake_list::{Teardown, WakeList};
use super::work_request::{Limits, WorkQueueCounters};
use super::work_request_id::{Owner, index_of};
use crate::error::{CompletionError, OpErrorKind, ReceiveLengths};
use crate::memory::PdKey;
use crate::sync::{Mutex, lock};
use crate::types::{Timestamp, WcOpcode, WcStatus, WorkCompletion, WrId};

/// Bytes of the two reference counts before the value in an `Arc`.
const COUNTS: usize = 16;

/// Cache lines at [`WorkQueue::address`], which each operation uses.
pub(crate) const QUEUE_LINES: usize = 3;

/// The fields that each operation uses are together, in few cache lines.
#[repr(C)]
pub(crate) struct WorkQueue {
    pub(super) slots: Slots<Self>,
    /// References this queue until [`Drainer::abandon`] detaches it: keeps alive what the device
    /// uses.
    cq: Arc<Drainer>,
    /// Maximum bytes of a single-element request that needs no further check; 0 if all need one.
    max_plain: u64,
    pd: PdKey,
    pub(super) capacity: Capacity,
    posts_plain: bool,
    shared: bool,
    owner: Owner,
    pub(super) state: Mutex<WorkQueueState>,
    pub(super) limits: Limits,
    failures: Failures,
    /// Never set for a shared receive queue.
    queue_pair: OnceLock<Weak<dyn Teardown>>,
    /// Set only if `limits.notifies`.
    completion_waker: OnceLock<Waker>,
    /// The timestamps of the completed operations by the index of their slots; `None` if the
    /// completion queue has none.
    timestamps: Option<Mutex<Vec<Timestamp>>>,
}

impl WorkQueue {
    pub(super) fn new(owner: Owner, device: DeviceQueue, limits: Limits, cq: Arc<Drainer>) -> Self {
        Self {
            slots: Slots::new(),
            pd: limits.pd,
            limits,
            owner,
            max_plain: if limits.max_sge > 0 { limits.max_message } else { 0 },
            posts_plain: matches!(&device, DeviceQueue::Send(qp) if qp.has_plain()),
            shared: matches!(device, DeviceQueue::Shared(_)),
            capacity: Capacity::new(limits.depth, matches!(device, DeviceQueue::Shared(_))),
            failures: Failures::new(),
            state: Mutex::new(WorkQueueState::new(device)),
            queue_pair: OnceLock::new(),
            completion_waker: OnceLock::new(),
            timestamps: cq.verbs().is_timestamped().then(|| Mutex::new(Vec::new())),
            cq,
        }
    }

    pub(super) fn owner(&self) -> Owner {
        self.owner
    }

    pub(super) fn is_shared(&self) -> bool {
        self.shared
    }

    pub(super) fn set_queue_pair(&self, queue_pair: Weak<dyn Teardown>) {
        let set = self.queue_pair.set(queue_pair);
        debug_assert!(set.is_ok(), "a work queue has one queue pair");
    }

    /// The caller drops it without any lock held.
    pub(super) fn queue_pair(&self) -> Option<Arc<dyn Teardown>> {
        self.queue_pair.get()?.upgrade()
    }

    pub(crate) fn cq(&self) -> &Arc<Drainer> {
        &self.cq
    }

    pub(super) fn remove_watcher(&self) {
        self.cq.remove_watcher(self.limits.solicited);
    }

    pub(super) fn is_polled(&self) -> bool {
        !self.cq.mode().arms()
    }

    pub(super) fn slots(&self) -> &Slots<Self> {
        &self.slots
    }

    #[inline]
    pub(super) fn claim(self: &Arc<Self>, cursor: &mut Cursor, parts: u32) -> Option<Claim<Self>> {
        let make = |index| {
            let slot = Slot::new(self.owner.first_id(index), self.is_polled());
            let slot = if self.limits.solicited { slot.solicited() } else { slot };
            let slot = if self.timestamps.is_some() { slot.stamped() } else { slot };
            if self.limits.notifies { slot.notifying() } else { slot }
        };
        // SAFETY: C1: just claimed.
        self.slots.claim(cursor, parts, make).map(|slot| unsafe { Claim::new(self, slot) })
    }

    #[inline]
    pub(super) fn release(&self, slot: &Slot<Self>) {
        self.slots.remember_free(slot);
        slot.free();
    }

    /// Finishes a successful work request for a caller that is both drainer and future. Returns
    /// true if queued posts are to be [admitted](Self::admit_queued).
    #[inline]
    pub(super) fn finish_own(&self, slot: &Slot<Self>) -> bool {
        slot.finish_own();
        // A completion also completes all unsignalled work before it.
        self.capacity.retire(slot.position())
    }

    #[inline]
    pub(super) fn prefetch(self: &Arc<Self>) {
        prefetch::<QUEUE_LINES>(self.address());
    }

    #[inline]
    pub(crate) fn address(self: &Arc<Self>) -> *const () {
        Arc::as_ptr(self).cast::<()>().wrapping_byte_sub(COUNTS)
    }

    /// Returns the address of the next slot, for prefetching. Allocates the first slots.
    pub(crate) fn next_slot(self: &Arc<Self>) -> Option<*const ()> {
        let mut state = lock(&self.state);
        let claim = self.claim(&mut state.cursor, 1)?;
        let slot = ptr::from_ref::<Slot<Self>>(&claim).cast();
        claim.release();
        Some(slot)
    }

    #[inline]
    pub(super) fn prefetch_slot(&self, wc: &WorkCompletion) {
        if let Some(slot) = self.slots.first(index_of(wc.wr_id)) {
            prefetch::<1>(ptr::from_ref(slot).cast());
        }
    }

    /// Records the timestamp of a completion, before the operation is complete.
    pub(super) fn stamp(&self, id: WrId, timestamp: Timestamp) {
        let index = index_of(id) as usize;
        let Some(timestamps) = &self.timestamps else { return };
        // Otherwise the device repeats itself, and another operation may have the slot.
        if self.slots.find(index_of(id)).is_some_and(|slot| slot.is_current(id)) {
            let mut timestamps = lock(timestamps);
            if timestamps.len() <= index {
                timestamps.resize(index + 1, Timestamp::default());
            }
            timestamps[index] = timestamp;
        }
    }

    /// Returns the timestamp of the operation that has succeeded in the slot of `id`, which must
    /// not have been released; `None` if the completion queue has no timestamps.
    pub(crate) fn timestamp(&self, id: WrId) -> Option<Timestamp> {
        lock(self.timestamps.as_ref()?).get(index_of(id) as usize).copied()
    }

    #[inline]
    pub(super) fn complete(&self, wc: &WorkCompletion, woken: &mut WakeList) {
        let Some(slot) = self.slots.find(index_of(wc.wr_id)) else { return stale(wc) };
        let without_waker =
            slot.without_waker(wc.wr_id).filter(|_| wc.status.is_success() && !is_traced());
        let Some(without_waker) = without_waker else {
            return self.complete_slow(slot, wc, woken);
        };
        // Capacity first: a task that has seen the result then finds the capacity.
        if self.capacity.retire(slot.position()) {
            self.admit_queued(woken);
        }
        if !slot.finish_without_waker(without_waker, wc) {
            self.settle_overtaken(wc, woken);
        } else if without_waker.notifies() {
            self.notify_completion(woken);
        }
    }

    #[inline]
    fn notify_completion(&self, woken: &mut WakeList) {
        if let Some(completion_waker) = self.completion_waker.get() {
            woken.wake_once(completion_waker);
        }
    }

    #[cold]
    fn settle_overtaken(&self, wc: &WorkCompletion, woken: &mut WakeList) {
        self.settle(wc.wr_id, Ok(*wc), woken);
    }

    #[inline(never)]
    fn complete_slow(&self, slot: &Slot<Self>, wc: &WorkCompletion, woken: &mut WakeList) {
        let Some(part) = slot.current_part(wc.wr_id) else { return stale(wc) };
        if is_traced() {
            trace_completed(wc);
        }
        let is_last = wc.wr_id == slot.id();
        let position = if is_last { slot.position() } else { slot.start().wrapping_add(part) };
        let has_failed = !wc.status.is_success();
        // Before any task learns of the failure, also from the freed capacity.
        if has_failed {
            self.note_failure(wc, woken);
        }
        if self.capacity.retire(position) {
            self.admit_queued(woken);
        }
        if has_failed {
            let kind = OpErrorKind::Completion(self.failure(wc));
            if is_last {
                self.settle(wc.wr_id, Err(kind), woken)
            } else {
                self.failures.fail_part(slot, part, kind)
            }
        } else if is_last {
            self.settle(wc.wr_id, Ok(*wc), woken);
        }
    }

    /// Counts a failed completion, which ends the work of the queue, and notifies the watcher.
    #[cold]
    fn note_failure(&self, wc: &WorkCompletion, woken: &mut WakeList) {
        self.failures.count(wc, self.failure(wc));
        if let Some(waker) = lock(&self.state).watch.failure.take() {
            woken.wake(waker);
        }
    }

    #[cold]
    fn failure(&self, wc: &WorkCompletion) -> CompletionError {
        let has_lengths = wc.status == WcStatus::LOC_LEN_ERR
            && wc.opcode == WcOpcode::RECV
            && self.cq.verbs().is_software();
        let lengths = ReceiveLengths { capacity: wc.imm_or_rkey, arrived: wc.byte_len };
        CompletionError { lengths: has_lengths.then_some(lengths), ..failure(wc) }
    }

    #[inline]
    pub(super) fn settle(&self, id: WrId, outcome: Outcome, woken: &mut WakeList) {
        let slot = self.slots.slot(index_of(id));
        let finished = slot.finish(id, outcome);
        self.follow_up(slot, finished, woken);
    }

    #[cold]
    fn follow_up(&self, slot: &Slot<Self>, finished: Finished, woken: &mut WakeList) {
        match finished {
            Finished::Stale => {}
            Finished::WithoutWaker => self.notify_completion(woken),
            Finished::Wake(waker) => {
                self.remove_watcher();
                woken.wake(waker);
            }
            Finished::Detached { held, waker } => {
                self.failures.end_parts(slot);
                self.release(slot);
                self.cq.remove_waiter();
                woken.dispose(held, waker);
            }
        }
    }

    /// Stops posting. Queued work stays queued: it may be the rest of a partly posted batch, and a
    /// batch returns its buffers when its last work request ends.
    pub(crate) fn close(&self) -> Option<DeviceQueue> {
        let mut state = lock(&self.state);
        state.until = state.posted;
        state.device.take()
    }

    pub(super) fn shut_down_destroyed(&self, kind: OpErrorKind) {
        drop(self.close());
        self.cq.abandon(self, kind, true);
    }

    /// Requires that the device has destroyed or reset the queue.
    pub(super) fn abandon(&self, kind: OpErrorKind, woken: &mut WakeList) {
        let mut state = lock(&self.state);
        while let Some(next) = state.wait_queue.pop_front() {
            self.cq.remove_waiter();
            let slot = self.slots.slot(index_of(next.id));
            if let Some(part) = slot.part(next.id).filter(|_| next.id != slot.id()) {
                self.failures.fail_part(slot, part, kind);
            }
        }
        self.capacity.clear_waiters();
        for (_, slot) in self.slots.iter() {
            if let Some(id) = slot.in_flight() {
                self.abandon_parts(slot, kind);
                self.settle(id, Outcome::Err(kind), woken);
            }
        }
        self.capacity.retire_all(state.posted as u32);
        self.notify_idle(&mut state, woken);
    }

    /// Fails the parts of a batch before its last one, unless they have failed or a later
    /// completion of the batch has completed them.
    fn abandon_parts(&self, slot: &Slot<Self>, kind: OpErrorKind) {
        if slot.parts() > 1 {
            self.failures.fail_parts_from(slot, self.capacity.done_from(slot.start()), kind);
        }
    }

    pub(super) fn wake_to_repoll(&self, woken: &mut WakeList) {
        // Excludes the poster, which finishes queued work that was never posted.
        let state = lock(&self.state);
        state.watch.repoll_waker.iter().for_each(|waker| woken.wake(waker.clone()));
        self.notify_completion(woken);
        for (_, slot) in self.slots.iter() {
            if let Some((waker, stopped_waiting)) = slot.wake_to_repoll() {
                if stopped_waiting {
                    self.remove_watcher();
                }
                woken.wake(waker);
            }
        }
    }

    /// Returns the first failure, of any operation, that is not a flush: the reason why work is
    /// flushed.
    pub(crate) fn cause(&self) -> Option<OpErrorKind> {
        self.failures.cause()
    }

    pub(super) fn note_cause(&self, kind: OpErrorKind) {
        self.failures.note_cause(kind);
    }

    #[inline]
    pub(super) fn end_parts(&self, slot: &Slot<Self>) -> FailedParts {
        self.failures.end_parts(slot)
    }

    pub(crate) fn counters(&self) -> WorkQueueCounters {
        let state = lock(&self.state);
        WorkQueueCounters {
            posted: state.posted,
            in_flight: self.capacity.in_flight(state.posted as u32),
            waiting: state.wait_queue.len(),
            waited: state.waited,
            failed: self.failures.failed(),
            flushed: self.failures.flushed(),
        }
    }

    pub(crate) fn is_open(&self) -> bool {
        lock(&self.state).device.is_some()
    }

    /// Wakes `completion_waker` whenever operations without a waker of their own complete. Requires
    /// `limits.notifies`. Called once; earlier completions wake nothing.
    ///
    /// The queue counts as a waiter until it is detached. The waker is cloned and dropped under
    /// locks, so it must not run code of a user then.
    pub(crate) fn wake_on_completion(&self, completion_waker: Waker) {
        self.cq.set_completion_waker(self, completion_waker);
    }

    /// Requires the lock of the completion queue.
    pub(super) fn set_completion_waker(&self, completion_waker: Waker) {
        debug_assert!(self.limits.notifies, "operations are marked when they are posted");
        let set = self.completion_waker.set(completion_waker);
        debug_assert!(set.is_ok(), "a work queue has one completion waker");
    }

    pub(super) fn has_completion_waker(&self) -> bool {
        self.completion_waker.get().is_some()
    }

    pub(crate) fn notifies(&self) -> bool {
        self.limits.notifies
    }

    #[inline]
    pub(crate) fn failures(&self) -> u32 {
        self.failures.failed()
    }
}

/// Ends a shared receive queue whose completion queue has failed, without consumers.
/// It is not destroyed yet, so not detached.
impl Teardown for WorkQueue {
    fn shut_down(&self, kind: OpErrorKind) {
        drop(self.close());
        self.cq.abandon(self, kind, false);
    }
}

#[cold]
pub(super) fn trace_completed(wc: &WorkCompletion) {
    rdma_provider::trace!(wr_id = %wc.wr_id, status = ?wc.status, "completed");
}

#[cold]
fn stale(wc: &WorkCompletion) {
    rdma_provider::warn!(
        wr_id = %wc.wr_id,
        "ignored a completion of a work request that is not in flight"
    );
}

impl fmt::Debug for WorkQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WorkQueue")
            .field("limits", &self.limits)
            .field("counters", &self.counters())
            .finish()
    }
}

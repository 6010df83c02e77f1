//! A send, receive or shared receive queue: posting, room, and who is in flight.

#![allow(unsafe_code)]

mod post;
#[cfg(all(test, not(loom)))]
mod tests;

use std::fmt;
use std::sync::{Arc, OnceLock, Weak};
use std::task::Waker;

use super::capacity::Capacity;
use super::claim::Claim;
use super::completion_queue_core::CompletionQueueCore;
use super::failures::{Failures, failure};
use super::posting::{Poster, Posting, is_traced};
use super::slot::{FailedParts, Finished, Outcome, Slot};
use super::slot_table::{Cursor, Slots};
use super::wake_list::{Teardown, WakeList};
use super::work_request::{Limits, WorkQueueCounters};
use super::work_request_id::{Owner, index_of};
use crate::error::{CompletionError, OpErrorKind, ReceiveLengths};
use crate::sync::{Mutex, lock};
use crate::types::{WcOpcode, WcStatus, WorkCompletion, WrId};

/// A work queue of a device and all that is in flight on it.
pub(crate) struct WorkQueue {
    pub(super) slots: Slots<Self>,
    pub(super) limits: Limits,
    /// Where the completion queue finds it.
    owner: Owner,
    /// Most bytes of a request of one element that nothing else need be asked about; 0 if there is always something.
    plain: u64,
    /// Shared receives complete in any order, others as posted.
    shared: bool,
    pub(super) room: Capacity,
    failures: Failures,
    pub(super) posting: Mutex<Posting>,
    /// Its queue pair; of a shared receive queue, never set.
    queue_pair: OnceLock<Weak<dyn Teardown>>,
    /// Which has a share of this until [`CompletionQueueCore::forget`]: what the device still uses stays though nobody else keeps it.
    cq: Arc<CompletionQueueCore>,
}

impl WorkQueue {
    pub(super) fn new(
        owner: Owner,
        poster: Poster,
        limits: Limits,
        cq: Arc<CompletionQueueCore>,
    ) -> Self {
        Self {
            slots: Slots::new(),
            limits,
            owner,
            plain: if limits.max_sge > 0 { limits.max_message } else { 0 },
            shared: matches!(poster, Poster::Shared(_)),
            room: Capacity::new(limits.depth, matches!(poster, Poster::Shared(_))),
            failures: Failures::new(),
            posting: Mutex::new(Posting::new(poster)),
            queue_pair: OnceLock::new(),
            cq,
        }
    }

    pub(super) fn owner(&self) -> Owner {
        self.owner
    }

    pub(super) fn is_shared(&self) -> bool {
        self.shared
    }

    /// Notes which queue pair it is of.
    pub(super) fn set_queue_pair(&self, queue_pair: Weak<dyn Teardown>) {
        let set = self.queue_pair.set(queue_pair);
        debug_assert!(set.is_ok(), "a work queue has one queue pair");
    }

    /// Its queue pair, if it has one that lives. To be dropped without any lock.
    pub(super) fn queue_pair(&self) -> Option<Arc<dyn Teardown>> {
        self.queue_pair.get()?.upgrade()
    }

    pub(crate) fn cq(&self) -> &Arc<CompletionQueueCore> {
        &self.cq
    }

    /// True if a thread polls for all.
    pub(super) fn is_polled(&self) -> bool {
        !self.cq.mode().arms()
    }

    pub(super) fn slots(&self) -> &Slots<Self> {
        &self.slots
    }

    /// Starts a life of `parts` work requests in a free slot; `None` if there are 2^20 and all are taken.
    #[inline]
    pub(super) fn claim(self: &Arc<Self>, cursor: &mut Cursor, parts: u32) -> Option<Claim<Self>> {
        let make = |index| Slot::new(self.owner.first_id(index), self.is_polled());
        // SAFETY: C1: claimed for this.
        self.slots.claim(cursor, parts, make).map(|slot| unsafe { Claim::new(self, slot) })
    }

    /// Frees a slot that was claimed.
    #[inline(always)]
    pub(super) fn release(&self, slot: &Slot<Self>) {
        self.slots.hint(slot);
        slot.free();
    }

    /// Ends a work request by its completion, a success, in the hands of the operation that waits for it: the
    /// caller is both the drainer and the future, so nothing is handed over. True if somebody waits for room, who is to be
    /// [let in](Self::let_in).
    #[inline(always)]
    pub(super) fn end_own(&self, slot: &Slot<Self>) -> bool {
        slot.finish_own();
        // A completion stands for all unsignalled work before it.
        self.room.retire(slot.position())
    }

    /// A completion has come: its slot is finished, room is free, and who waits for room gets it.
    #[inline(always)]
    pub(super) fn complete(&self, wc: &WorkCompletion, woken: &mut WakeList) {
        let Some(slot) = self.slots.find(index_of(wc.wr_id)) else { return stale(wc) };
        if !wc.status.is_success() || !slot.is_unwatched_in(wc.wr_id) {
            return self.complete_watched(slot, wc, woken);
        }
        if is_traced() {
            trace_completed(wc);
        }
        // First the room, then the result: whoever has seen the result finds the room.
        if self.room.retire(slot.position()) {
            self.let_in(woken);
        }
        if !slot.finish_unwatched(wc.wr_id, wc) {
            self.settle(wc.wr_id, Ok(*wc), woken);
        }
    }

    /// As [`complete`](Self::complete), if it failed or somebody waits for it.
    #[inline(never)]
    fn complete_watched(&self, slot: &Slot<Self>, wc: &WorkCompletion, woken: &mut WakeList) {
        let Some(part) = slot.current_part(wc.wr_id) else { return stale(wc) };
        if is_traced() {
            trace_completed(wc);
        }
        if !wc.status.is_success() {
            self.failures.count(wc, self.failure(wc));
            self.tell_failure(woken);
        }
        let is_last = wc.wr_id == slot.id();
        let position = if is_last { slot.position() } else { slot.start().wrapping_add(part) };
        if self.room.retire(position) {
            self.let_in(woken);
        }
        if !wc.status.is_success() {
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

    /// What the completion says, and the lengths of a message that does not fit its receive, which the software device tells.
    #[cold]
    fn failure(&self, wc: &WorkCompletion) -> CompletionError {
        let told = wc.status == WcStatus::LOC_LEN_ERR
            && wc.opcode == WcOpcode::RECV
            && self.cq.verbs().is_software();
        let lengths = ReceiveLengths { capacity: wc.imm_or_rkey, arrived: wc.byte_len };
        CompletionError { lengths: told.then_some(lengths), ..failure(wc) }
    }

    /// Hands the outcome to the operation; what that leaves to do is added to `woken`.
    #[inline]
    pub(super) fn settle(&self, id: WrId, outcome: Outcome, woken: &mut WakeList) {
        let slot = self.slots.slot(index_of(id));
        let finished = slot.finish(id, outcome);
        self.follow_up(slot, finished, woken);
    }

    #[cold]
    fn follow_up(&self, slot: &Slot<Self>, finished: Finished, woken: &mut WakeList) {
        match finished {
            Finished::Unwatched | Finished::Stale => {}
            Finished::Wake(waker) => {
                self.cq.no_longer_waiting();
                woken.wake(waker);
            }
            Finished::Detached { held, waker } => {
                self.failures.end_parts(slot);
                self.release(slot);
                self.cq.no_longer_waiting();
                woken.dispose(held, waker);
            }
        }
    }

    /// Stops posting. What is posted stays with the device, and what is in line stays there: it may be the end of a
    /// batch of which a part is posted, and a batch gives its buffers back when its last work request ends.
    pub(crate) fn close(&self) -> Option<Poster> {
        let mut posting = lock(&self.posting);
        posting.until = posting.posted;
        posting.poster.take()
    }

    /// Ends a shared receive queue that was destroyed, and forgets it.
    pub(super) fn shut(&self, kind: OpErrorKind) {
        drop(self.close());
        self.cq.abandon(self, kind, true);
    }

    /// Ends all that is in flight. The device must have forgotten it: the queue was destroyed or reset.
    pub(super) fn abandon(&self, kind: OpErrorKind, woken: &mut WakeList) {
        let mut posting = lock(&self.posting);
        while let Some(next) = posting.queued.pop_front() {
            self.cq.no_longer_waiting();
            let slot = self.slots.slot(index_of(next.id));
            if let Some(part) = slot.part(next.id).filter(|_| next.id != slot.id()) {
                self.failures.fail_part(slot, part, kind);
            }
        }
        self.room.clear();
        for (_, slot) in self.slots.iter() {
            if let Some(id) = slot.in_flight() {
                self.abandon_parts(slot, kind);
                self.settle(id, Outcome::Err(kind), woken);
            }
        }
        self.room.retire_all(posting.posted as u32);
        self.tell_idle(&mut posting, woken);
    }

    /// Ends those before the last of a batch, if it is one, that were posted, have not failed, and are not done: a completion
    /// behind them in the batch stands for those.
    fn abandon_parts(&self, slot: &Slot<Self>, kind: OpErrorKind) {
        if slot.parts() > 1 {
            self.failures.fail_parts_from(slot, self.room.done_from(slot.start()), kind);
        }
    }

    /// Wakes all that wait, to look again.
    pub(super) fn rouse(&self, woken: &mut WakeList) {
        // Keeps out those who finish what was never posted.
        let posting = lock(&self.posting);
        posting.watch.rouse.iter().for_each(|waker| woken.wake(waker.clone()));
        for (_, slot) in self.slots.iter() {
            if let Some((waker, waits_no_more)) = slot.rouse() {
                if waits_no_more {
                    self.cq.no_longer_waiting();
                }
                woken.wake(waker);
            }
        }
    }

    /// Why work is flushed: the first failure since the queue was made that is no flush, whoever has posted what failed.
    pub(crate) fn cause(&self) -> Option<OpErrorKind> {
        self.failures.cause()
    }

    /// Leaves one work request in the slot of a batch that is over; which of the others failed.
    #[inline]
    pub(super) fn end_parts(&self, slot: &Slot<Self>) -> FailedParts {
        self.failures.end_parts(slot)
    }

    pub(crate) fn counters(&self) -> WorkQueueCounters {
        let posting = lock(&self.posting);
        WorkQueueCounters {
            posted: posting.posted,
            in_flight: self.room.in_flight(posting.posted as u32),
            waiting: posting.queued.len(),
            waited: posting.waited,
            failed: self.failures.failed(),
            flushed: self.failures.flushed(),
        }
    }

    // Being told of it.

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
        self.failures.failed()
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

/// Of a shared receive queue whose completion queue has failed, when nothing draws from it any more. It is not destroyed yet, so
/// not forgotten.
impl Teardown for WorkQueue {
    fn shut_down(&self, kind: OpErrorKind) {
        drop(self.close());
        self.cq.abandon(self, kind, false);
    }
}

#[cold]
pub(super) fn trace_completed(wc: &WorkCompletion) {
    tracing::trace!(wr_id = %wc.wr_id, status = ?wc.status, "completed");
}

#[cold]
fn stale(wc: &WorkCompletion) {
    tracing::warn!(wr_id = %wc.wr_id, "completion of a work request that is not in flight");
}

impl fmt::Debug for WorkQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WorkQueue")
            .field("limits", &self.limits)
            .field("counters", &self.counters())
            .finish()
    }
}

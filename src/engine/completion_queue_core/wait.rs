//! Waiting for one operation: looking for its completion, then spinning or parking as the mode says.

use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use super::{BATCH, CompletionQueueCore, Draining, RUN, State};
use crate::contained::contained;
use crate::engine::arm;
use crate::engine::completion_mode::CompletionMode;
use crate::engine::slot::{Registered, Slot, Spent};
use crate::engine::work_queue::{WorkQueue, trace_completed};
use crate::error::VerbError;
use crate::sync::{MutexGuard, Ordering, lock, try_lock};
use crate::types::WorkCompletion;

impl CompletionQueueCore {
    /// True if nobody waits for completions that are taken and not handed out. Whoever begins to wait later hands out what is
    /// left before: `look_further`, `wait_slow`, `attend`. A poller never sleeps.
    fn may_leave(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) == 0 && self.mode.arms()
    }

    /// Ends the first of a batch of `taken`, which is in `slot` and was asked for. If nobody waits for the rest it is left for
    /// who asks, and spared the way through the slot.
    #[inline(never)]
    fn leave(
        mut guard: MutexGuard<'_, State>,
        taken: usize,
        queue: &WorkQueue,
        slot: &Slot<WorkQueue>,
    ) {
        let (this, state) = (queue.cq(), &mut *guard);
        state.run -= taken;
        state.counters.completions += taken as u64;
        let crowded = queue.end_own(slot);
        if this.may_leave() {
            (state.next, state.end) = (1, taken);
        } else {
            this.finish_batch(state, 1, taken);
        }
        if crowded {
            queue.let_in(&mut state.woken);
        }
        this.release(guard);
    }

    /// Waits for the work request of `queue` that is in `slot`, which is [new](Slot::is_new): looks once, then as the mode
    /// says.
    ///
    /// When it is over, gives what `see` makes of the completion if that is the next one and a success, which spares the
    /// operation the way through its slot; the caller is to [end](crate::engine::claim::Claim::end) the claim then, in a
    /// frame whose arguments do not refer to the queue. Otherwise the slot has the outcome.
    #[inline(always)]
    pub(in crate::engine) fn look_first<S>(
        self: &Arc<Self>,
        queue: &WorkQueue,
        slot: &Slot<WorkQueue>,
        context: &mut Context<'_>,
        see: impl FnOnce(&WorkCompletion) -> S,
    ) -> Poll<Option<S>> {
        self.look(lock(&self.state), queue, slot, context, see)
    }

    /// As [`look_first`](Self::look_first), for an operation that is not complete and may have waited.
    #[inline(always)]
    pub(in crate::engine) fn look_again<S>(
        self: &Arc<Self>,
        queue: &WorkQueue,
        slot: &Slot<WorkQueue>,
        context: &mut Context<'_>,
        see: impl FnOnce(&WorkCompletion) -> S,
    ) -> Poll<Option<S>> {
        let rounds = slot.rounds();
        // Else its waker is in the slot.
        if slot.is_unwatched()
            && let Some(state) = try_lock(&self.state)
        {
            let see = |completion: &WorkCompletion| {
                if slot.is_traced() {
                    trace_completed(completion);
                }
                self.found(rounds);
                see(completion)
            };
            return self.look(state, queue, slot, context, see);
        }
        self.wait_slot(slot, context).map(|()| None)
    }

    /// Looks once; for an operation whose waker is not in the slot.
    #[inline(always)]
    fn look<'a, S>(
        self: &'a Arc<Self>,
        mut guard: MutexGuard<'a, State>,
        queue: &WorkQueue,
        slot: &Slot<WorkQueue>,
        context: &mut Context<'_>,
        see: impl FnOnce(&WorkCompletion) -> S,
    ) -> Poll<Option<S>> {
        let state = &mut *guard;
        let waited = if state.next < state.end {
            let at = state.next % BATCH;
            let next = &state.completions[at];
            if is_success_of(next, slot) {
                let seen = see(next);
                state.next += 1;
                if queue.end_own(slot) {
                    Self::let_in(guard, queue);
                } else {
                    drop(guard);
                }
                queue.slots().hint(slot);
                return Poll::Ready(Some(seen));
            }
            self.look_further(guard, slot, context)
        } else {
            let found = self.cq.take(&mut state.completions[..]);
            if let Ok(taken) = found
                && taken > 0
            {
                let next = &state.completions[0];
                if is_success_of(next, slot) && state.run >= taken {
                    let seen = see(next);
                    if taken > 1 {
                        Self::leave(guard, taken, queue, slot);
                    } else {
                        state.run -= 1;
                        state.counters.completions += 1;
                        if queue.end_own(slot) {
                            Self::let_in(guard, queue);
                        } else {
                            drop(guard);
                        }
                    }
                    queue.slots().hint(slot);
                    return Poll::Ready(Some(seen));
                }
            }
            self.look_at(guard, found, slot, context)
        };
        waited.map(|()| None)
    }

    /// What was taken is not what was looked for, or others shall run first.
    #[cold]
    fn look_at<'a>(
        self: &'a Arc<Self>,
        mut guard: MutexGuard<'a, State>,
        found: Result<usize, VerbError>,
        slot: &Slot<WorkQueue>,
        context: &mut Context<'_>,
    ) -> Poll<()> {
        let state = &mut *guard;
        let taken = self.count(state, found);
        if taken > state.run && self.may_leave() && is_success_of(&state.completions[0], slot) {
            (state.run, state.next, state.end) = (RUN, 0, taken);
            drop(guard);
            contained(|| context.waker().wake_by_ref());
            return Poll::Pending;
        }
        let more = taken > 0 && self.finish_batch(state, 0, taken);
        self.wait_slow(guard, more, slot, context)
    }

    /// What was left is not what was looked for.
    #[cold]
    fn look_further<'a>(
        self: &'a Arc<Self>,
        mut state: MutexGuard<'a, State>,
        slot: &Slot<WorkQueue>,
        context: &mut Context<'_>,
    ) -> Poll<()> {
        self.finish_left(&mut state);
        let more = !slot.is_complete() && self.drain_batch(&mut state);
        self.wait_slow(state, more, slot, context)
    }

    /// Unlocks. Before that, admits the operations that wait for free slots of `queue`.
    #[cold]
    fn let_in(mut state: MutexGuard<'_, State>, queue: &WorkQueue) {
        queue.let_in(&mut state.woken);
        queue.cq().release(state);
    }

    /// As [`look_again`](Self::look_again), always through the slot.
    pub(in crate::engine) fn wait_slot(
        self: &Arc<Self>,
        slot: &Slot<WorkQueue>,
        context: &mut Context<'_>,
    ) -> Poll<()> {
        let Some(mut state) = try_lock(&self.state) else { return self.wait_locked(slot, context) };
        let more = self.drain_batch(&mut state);
        self.wait_slow(state, more, slot, context)
    }

    /// Somebody else is draining.
    #[cold]
    fn wait_locked(
        self: &Arc<Self>,
        slot: &Slot<WorkQueue>,
        context: &mut Context<'_>,
    ) -> Poll<()> {
        // A poller has the lock most of the time, and will find what there is.
        if matches!(self.mode, CompletionMode::BusyPoll(_)) {
            if self.register(slot, context.waker().clone(), &mut Spent::default())
                == Registered::Imminent
            {
                contained(|| context.waker().wake_by_ref());
            }
            return if slot.is_complete() { Poll::Ready(()) } else { Poll::Pending };
        }
        let mut state = lock(&self.state);
        let more = self.drain_batch(&mut state);
        self.wait_slow(state, more, slot, context)
    }

    #[inline(never)]
    fn wait_slow<'a>(
        self: &'a Arc<Self>,
        mut state: MutexGuard<'a, State>,
        mut more: bool,
        slot: &Slot<WorkQueue>,
        context: &mut Context<'_>,
    ) -> Poll<()> {
        let rounds = slot.rounds();
        loop {
            if slot.is_complete() {
                let yields = state.run == 0;
                state.run = if yields { RUN } else { state.run - 1 };
                self.release(state);
                if yields {
                    // Let others run; the result is there when the task comes back.
                    contained(|| context.waker().wake_by_ref());
                }
                if more {
                    self.drain();
                }
                self.found(rounds);
                return if yields { Poll::Pending } else { Poll::Ready(()) };
            }
            if !more {
                break;
            }
            self.release(state);
            state = lock(&self.state);
            more = self.drain_batch(&mut state);
        }
        state.run = RUN;

        let spins = match &self.mode {
            CompletionMode::Cooperative => self.drivers.load(Ordering::Relaxed) == 0,
            CompletionMode::Hybrid if self.spin.allows(rounds) => true,
            CompletionMode::Hybrid => {
                if rounds > 0 {
                    self.spin.missed();
                    slot.spin(0);
                }
                false
            }
            CompletionMode::Event | CompletionMode::BusyPoll(_) => false,
        };
        if spins {
            slot.spin(rounds.saturating_add(1));
            self.release(state);
            self.serve();
            contained(|| context.waker().wake_by_ref());
            return Poll::Pending;
        }

        // To clone a waker, to wake it and to drop it is to run code of users, which no lock may be held for.
        self.release(state);
        let (waker, mut spent) = (context.waker().clone(), Spent::default());
        let mut state = lock(&self.state);
        self.finish_left(&mut state);
        if state.failed.is_some() {
            // A dead queue is being taken down by whoever noticed; look again until it is.
            slot.spin(rounds.saturating_add(1));
            self.release(state);
            contained(|| context.waker().wake_by_ref());
            return Poll::Pending;
        }
        let registered = self.register(slot, waker, &mut spent);
        // Under a driver too, for it may be dropped, or not be polled for a while.
        if matches!(registered, Registered::Fresh | Registered::Again) && self.mode.arms() {
            arm::before_park(&mut Draining { queue: self, state: &mut state });
        }
        self.release(state);
        drop(spent);
        if slot.is_complete() {
            return Poll::Ready(());
        }
        if registered == Registered::Imminent {
            contained(|| context.waker().wake_by_ref());
        } else if self.mode.arms() && !self.reactors.watch(self) {
            // No runtime, no reactor: the only way to be woken is to ask for it.
            contained(|| context.waker().wake_by_ref());
        } else if rounds > 0 && !self.reactors.has_inlet() {
            self.cq.device().leave();
        }
        Poll::Pending
    }

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
        if polls || !self.reactors.watch(self) {
            contained(|| context.waker().wake_by_ref());
        }
    }

    /// What [`Slot::register`] says.
    fn register(&self, slot: &Slot<WorkQueue>, waker: Waker, spent: &mut Spent) -> Registered {
        // Counted before it is visible, so that whoever finishes it never counts below zero.
        self.now_waiting();
        let registered = slot.register(waker, spent);
        let counted = match registered {
            Registered::Fresh => 0,
            Registered::Again | Registered::Complete | Registered::Imminent => 1,
            // It was counted when it began to wait, too.
            Registered::Overtaken => 2,
        };
        self.waiting.fetch_sub(counted, Ordering::Relaxed);
        registered
    }

    /// A wait ended after `rounds` of spinning.
    #[inline]
    fn found(&self, rounds: u32) {
        if rounds > 0 && matches!(self.mode, CompletionMode::Hybrid) {
            self.spin.found(rounds);
        }
    }
}

/// True if `completion` is that of the work request in `slot`, and a success.
#[inline(always)]
fn is_success_of(completion: &WorkCompletion, slot: &Slot<WorkQueue>) -> bool {
    completion.wr_id == slot.id() && completion.status.is_success()
}

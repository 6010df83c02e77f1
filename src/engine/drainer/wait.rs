//! Waiting for one operation: polls for its completion, then spins or parks as the mode requires.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::task::{Context, Poll, Waker};

use super::events::Draining;
use super::{Drainer, READY_BUDGET, State};
use crate::contained::wake_to_repoll;
use crate::engine::arm;
use crate::engine::completion_mode::CompletionMode;
use crate::engine::deferral::{share_core, wake_after_others, wake_in_turn};
use crate::engine::slot::{Discarded, Registered, Slot};
use crate::engine::work_queue::{WorkQueue, trace_completed};
use crate::error::VerbError;
use crate::sync::{MutexGuard, Ordering, lock, try_lock};
use crate::types::WorkCompletion;

/// Without a reactor, only the task itself can cause its next poll.
#[cold]
fn poll_without_reactor(context: &Context<'_>) {
    static IS_KNOWN: AtomicBool = AtomicBool::new(false);
    if !IS_KNOWN.swap(true, Ordering::Relaxed) {
        rdma_provider::warn!(
            "an operation is awaited outside of a Tokio runtime with an I/O driver: its task never \
             sleeps"
        );
    }
    wake_to_repoll(context);
}

impl Drainer {
    /// Taken completions may stay undispatched if no task waits and no thread polls. A task that
    /// begins to wait dispatches them first: `dispatch_rest`, `park`, `ensure_watched`.
    #[inline]
    fn may_defer(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) == 0 && self.mode.arms()
    }

    /// The first of `taken` completions belongs to `slot`.
    #[inline(never)]
    fn finish_first(
        mut guard: MutexGuard<'_, State>,
        taken: usize,
        queue: &WorkQueue,
        slot: &Slot<WorkQueue>,
    ) {
        let (this, state) = (queue.cq(), &mut *guard);
        state.was_full(taken);
        state.ready_budget -= taken;
        state.counters.completions += taken as u64;
        let has_waiters = queue.finish_own(slot);
        if this.may_defer() {
            // The others stay undispatched, which avoids the path through their slots.
            (state.next, state.end) = (1, taken);
        } else {
            this.finish_batch(state, 1, taken);
        }
        if has_waiters {
            queue.admit_queued(&mut state.woken);
        }
        this.release(guard);
    }

    /// Polls once for the work request of `queue` in a [new](Slot::is_new) slot, then waits as the
    /// mode requires.
    ///
    /// If the next completion is a success of this operation, returns the result of `extract`, and
    /// the caller must [end](crate::engine::claim::Claim::end) the claim. That may free the queue,
    /// so the caller has no reference arguments to it. Otherwise the slot has the outcome.
    #[inline(always)]
    pub(in crate::engine) fn poll_new<S>(
        queue: &WorkQueue,
        slot: &Slot<WorkQueue>,
        context: &mut Context<'_>,
        extract: impl FnOnce(&WorkCompletion) -> S,
    ) -> Poll<Option<S>> {
        let this = queue.cq();
        this.take_own(lock(&this.state), queue, slot, context, extract)
    }

    #[inline]
    pub(in crate::engine) fn poll_waiting<S>(
        self: &Arc<Self>,
        queue: &WorkQueue,
        slot: &Slot<WorkQueue>,
        context: &mut Context<'_>,
        extract: impl FnOnce(&WorkCompletion) -> S,
    ) -> Poll<Option<S>> {
        let rounds = slot.rounds();
        // A watched slot holds a waker and is finished through the slot.
        if slot.may_take_own()
            && let Some(state) = try_lock(&self.state)
        {
            let extract = |completion: &WorkCompletion| {
                if slot.is_traced() {
                    trace_completed(completion);
                }
                self.found(rounds);
                extract(completion)
            };
            return self.take_own(state, queue, slot, context, extract);
        }
        self.drain_and_wait(slot, context).map(|()| None)
    }

    /// Takes the next completion if it is a success of this operation; otherwise dispatches and
    /// waits.
    #[inline(always)]
    fn take_own<'a, S>(
        self: &'a Arc<Self>,
        mut guard: MutexGuard<'a, State>,
        queue: &WorkQueue,
        slot: &Slot<WorkQueue>,
        context: &mut Context<'_>,
        extract: impl FnOnce(&WorkCompletion) -> S,
    ) -> Poll<Option<S>> {
        let state = &mut *guard;
        // The device's queue is read in place, an earlier poll has left completions, or the device
        // is polled now.
        let waited = if let Some(direct) = &self.direct {
            if state.ready_budget > 0
                && let Some(completion) = direct.take_request(slot.id())
            {
                let extracted = extract(&completion);
                state.ready_budget -= 1;
                state.counters.completions += 1;
                let has_waiters = queue.finish_own(slot);
                queue.slots().remember_free(slot);
                if has_waiters || !self.may_defer() {
                    Self::drain_direct(guard, queue);
                }
                return Poll::Ready(Some(extracted));
            }
            self.dispatch_direct(guard, slot, context)
        } else if state.next < state.end
            && let Some(next) = state.completions.get(state.next)
        {
            if is_success_of(next, slot) {
                let extracted = extract(next);
                state.next += 1;
                if queue.finish_own(slot) {
                    Self::admit_queued(guard, queue);
                } else {
                    drop(guard);
                }
                queue.slots().remember_free(slot);
                return Poll::Ready(Some(extracted));
            }
            self.dispatch_rest(guard, slot, context)
        } else {
            let found = self.cq.poll_device(&mut state.completions[..]);
            if let Ok(taken) = found
                && taken > 0
            {
                let next = &state.completions[0];
                if is_success_of(next, slot) && state.ready_budget >= taken {
                    let extracted = extract(next);
                    if taken > 1 || state.completions.len() == 1 {
                        Self::finish_first(guard, taken, queue, slot);
                    } else {
                        state.ready_budget -= 1;
                        state.counters.completions += 1;
                        if queue.finish_own(slot) {
                            Self::admit_queued(guard, queue);
                        } else {
                            drop(guard);
                        }
                    }
                    queue.slots().remember_free(slot);
                    return Poll::Ready(Some(extracted));
                }
            }
            self.dispatch_taken(guard, found, slot, context)
        };
        waited.map(|()| None)
    }

    /// Handles a batch that starts with another completion, or an exhausted ready budget.
    #[cold]
    fn dispatch_taken<'a>(
        self: &'a Arc<Self>,
        mut guard: MutexGuard<'a, State>,
        found: Result<usize, VerbError>,
        slot: &Slot<WorkQueue>,
        context: &mut Context<'_>,
    ) -> Poll<()> {
        let state = &mut *guard;
        let taken = self.count(state, found);
        if taken > state.ready_budget
            && self.may_defer()
            && is_success_of(&state.completions[0], slot)
        {
            (state.ready_budget, state.next, state.end) = (READY_BUDGET, 0, taken);
            drop(guard);
            wake_after_others(context);
            return Poll::Pending;
        }
        let more = taken > 0 && self.finish_batch(state, 0, taken);
        self.wait(guard, more, slot, context)
    }

    #[cold]
    fn dispatch_rest<'a>(
        self: &'a Arc<Self>,
        mut state: MutexGuard<'a, State>,
        slot: &Slot<WorkQueue>,
        context: &mut Context<'_>,
    ) -> Poll<()> {
        self.finish_remaining(&mut state);
        let more = !slot.is_complete() && self.drain_batch(&mut state);
        self.wait(state, more, slot, context)
    }

    #[cold]
    fn dispatch_direct<'a>(
        self: &'a Arc<Self>,
        mut guard: MutexGuard<'a, State>,
        slot: &Slot<WorkQueue>,
        context: &mut Context<'_>,
    ) -> Poll<()> {
        if guard.ready_budget == 0 && self.may_defer() {
            guard.ready_budget = READY_BUDGET;
            drop(guard);
            wake_after_others(context);
            return Poll::Pending;
        }
        let more = self.drain_batch(&mut guard);
        self.wait(guard, more, slot, context)
    }

    #[cold]
    fn drain_direct(mut state: MutexGuard<'_, State>, queue: &WorkQueue) {
        let this = queue.cq();
        while this.drain_batch(&mut state) {}
        queue.admit_queued(&mut state.woken);
        this.release(state);
    }

    #[cold]
    fn admit_queued(mut state: MutexGuard<'_, State>, queue: &WorkQueue) {
        queue.admit_queued(&mut state.woken);
        queue.cq().release(state);
    }

    pub(in crate::engine) fn drain_and_wait(
        self: &Arc<Self>,
        slot: &Slot<WorkQueue>,
        context: &mut Context<'_>,
    ) -> Poll<()> {
        let mut state = match try_lock(&self.state) {
            Some(state) => state,
            None if matches!(self.mode, CompletionMode::BusyPoll(_)) => {
                return self.wait_for_busy_poller(slot, context);
            }
            None => lock(&self.state),
        };
        let more = self.drain_batch(&mut state);
        self.wait(state, more, slot, context)
    }

    /// The busy poller holds the lock most of the time and finds the completion.
    #[cold]
    fn wait_for_busy_poller(
        self: &Arc<Self>,
        slot: &Slot<WorkQueue>,
        context: &mut Context<'_>,
    ) -> Poll<()> {
        if self.register(slot, context.waker().clone(), &mut Discarded::default())
            == Registered::Imminent
        {
            wake_to_repoll(context);
        }
        if slot.is_complete() { Poll::Ready(()) } else { Poll::Pending }
    }

    /// Returns ready if the operation is complete; otherwise waits as the mode requires. `more` if
    /// the device may have further completions.
    #[inline(never)]
    fn wait<'a>(
        self: &'a Arc<Self>,
        mut state: MutexGuard<'a, State>,
        mut more: bool,
        slot: &Slot<WorkQueue>,
        context: &mut Context<'_>,
    ) -> Poll<()> {
        let rounds = slot.rounds();
        while !slot.is_complete() {
            if !more {
                state.ready_budget = READY_BUDGET;
                return if self.may_spin(slot, rounds) {
                    self.spin(state, slot, rounds.saturating_add(1), context)
                } else {
                    self.park(state, slot, rounds, context)
                };
            }
            self.release(state);
            state = lock(&self.state);
            more = self.drain_batch(&mut state);
        }
        let yields = state.ready_budget == 0;
        state.ready_budget = if yields { READY_BUDGET } else { state.ready_budget - 1 };
        self.release(state);
        if yields {
            // Yields to other tasks; the next poll finds the result.
            wake_after_others(context);
        }
        if more {
            self.drain();
        }
        self.found(rounds);
        if yields { Poll::Pending } else { Poll::Ready(()) }
    }

    /// Returns true if the task, after `rounds` polls without a result, polls again instead of
    /// sleeping.
    fn may_spin(&self, slot: &Slot<WorkQueue>, rounds: u32) -> bool {
        match &self.mode {
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
        }
    }

    fn spin(
        &self,
        state: MutexGuard<'_, State>,
        slot: &Slot<WorkQueue>,
        rounds: u32,
        context: &mut Context<'_>,
    ) -> Poll<()> {
        slot.spin(rounds);
        self.release(state);
        self.process_packets();
        if matches!(self.mode, CompletionMode::Cooperative) {
            share_core(rounds);
        }
        wake_in_turn(context, rounds);
        Poll::Pending
    }

    fn park<'a>(
        self: &'a Arc<Self>,
        state: MutexGuard<'a, State>,
        slot: &Slot<WorkQueue>,
        rounds: u32,
        context: &mut Context<'_>,
    ) -> Poll<()> {
        // The waker is cloned without the lock.
        self.release(state);
        let (waker, mut discarded) = (context.waker().clone(), Discarded::default());
        let mut state = lock(&self.state);
        self.finish_remaining(&mut state);
        if state.failed.is_some() {
            // The thread that noticed the failure is tearing the queue down; poll until it has.
            slot.spin(rounds.saturating_add(1));
            self.release(state);
            wake_to_repoll(context);
            return Poll::Pending;
        }
        let registered = self.register(slot, waker, &mut discarded);
        // Also with a driver, which may be dropped or not polled for a while.
        if matches!(registered, Registered::Fresh | Registered::Again) && self.mode.arms() {
            arm::before_park(&mut Draining { queue: self, state: &mut state });
        }
        self.release(state);
        drop(discarded);
        if slot.is_complete() {
            return Poll::Ready(());
        }
        if registered == Registered::Imminent {
            wake_to_repoll(context);
        } else if self.mode.arms() && !self.reactors.watch(self) {
            poll_without_reactor(context);
        } else if rounds > 0 && !self.reactors.watches_packets() {
            self.cq.device().stop_processing();
        }
        Poll::Pending
    }

    pub(crate) fn ensure_watched_for(self: &Arc<Self>, context: &mut Context<'_>) {
        self.drain();
        if !self.mode().arms() {
            return;
        }
        self.ensure_watched();
        let polls = matches!(self.mode(), CompletionMode::Cooperative) && !self.is_driven();
        if polls {
            wake_to_repoll(context);
        } else if !self.reactors.watch(self) {
            poll_without_reactor(context);
        }
    }

    fn register(
        &self,
        slot: &Slot<WorkQueue>,
        waker: Waker,
        discarded: &mut Discarded,
    ) -> Registered {
        // Counted before it is visible, so that the count never falls below zero.
        self.add_waiter();
        let solicited = u32::from(slot.is_solicited());
        self.solicited.fetch_add(solicited, Ordering::Relaxed);
        let registered = slot.register(waker, discarded);
        let counted = match registered {
            Registered::Fresh => 0,
            Registered::Again | Registered::Complete | Registered::Imminent => 1,
            // Its earlier wait was counted too.
            Registered::Overtaken => 2,
        };
        self.solicited.fetch_sub(counted * solicited, Ordering::Relaxed);
        self.waiting.fetch_sub(counted, Ordering::Relaxed);
        registered
    }

    #[inline]
    fn found(&self, rounds: u32) {
        if rounds > 0 && matches!(self.mode, CompletionMode::Hybrid) {
            self.spin.found(rounds);
        }
    }
}

#[inline]
fn is_success_of(completion: &WorkCompletion, slot: &Slot<WorkQueue>) -> bool {
    completion.wr_id == slot.id() && completion.status.is_success()
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::future::Future as _;
    use std::pin::Pin;
    use std::sync::atomic::AtomicBool;
    use std::task::Wake;
    use std::thread;

    use super::*;
    use crate::engine::CompletionQueue;
    use crate::memory::Pool;
    use crate::op::QueuePair;
    use crate::software::Network;
    use crate::verbs::Device;

    struct NoopWake;

    impl Wake for NoopWake {
        fn wake(self: Arc<Self>) {}
    }

    /// Messages that complete while a task replaces its waker all the time.
    const MESSAGES: usize = 100;

    // `wait_for_busy_poller` registers while another thread dispatches completions. One that comes
    // between the two steps in which a waker replaces another overtakes it. On one core this hardly
    // ever happens, and the test shows nothing.
    #[test]
    #[cfg_attr(miri, ignore = "takes minutes")]
    fn waiter_whose_completion_overtakes_its_waker_counts_once() {
        let device = Device::software_in(&Network::new(), "overtaken").unwrap();
        let pd = device.protection_domain().unwrap();
        let queue = CompletionQueue::new(&device, CompletionMode::Event).unwrap();
        let qp = QueuePair::new(&pd, &queue).unwrap();
        qp.connect(&qp.endpoint()).unwrap();
        let pool = Pool::new(&pd, 8, 2).unwrap();
        let (core, receives) = (queue.shared(), qp.inner.core.receive().unwrap());
        let waker = Waker::from(Arc::new(NoopWake));
        let before = core.waiting.load(Ordering::Relaxed);
        for _ in 0..MESSAGES {
            let mut receive = qp.recv(pool.copy_from(&[0; 8]).unwrap());
            let slots = (0..).map_while(|index| receives.slots().first(index));
            let slot = slots.into_iter().find(|slot| slot.in_flight().is_some()).unwrap();
            let registers = AtomicBool::new(false);
            thread::scope(|scope| {
                scope.spawn(|| {
                    let kept =
                        |registered| matches!(registered, Registered::Fresh | Registered::Again);
                    while kept(core.register(slot, waker.clone(), &mut Discarded::default())) {
                        registers.store(true, Ordering::Relaxed);
                    }
                });
                while !registers.load(Ordering::Relaxed) {
                    thread::yield_now();
                }
                drop(qp.send(pool.copy_from(&[1; 8]).unwrap()));
                core.drain();
            });
            let polled = Pin::new(&mut receive).poll(&mut Context::from_waker(&waker));
            assert!(matches!(polled, Poll::Ready(Ok(_))));
        }
        assert_eq!(core.waiting.load(Ordering::Relaxed), before);
    }
}

//! The one drain path, and waiting for what it finds.

use std::fmt;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Waker};

use super::arm::{self, Watched};
use super::mode::CompletionMode;
use super::queue::CompletionQueueCounters;
use super::reactor::Reactors;
use super::request::Limits;
use super::slot::{Registered, Slot};
use super::spin::SpinBudget;
use super::teardown::{Drawing, QueuePairCore};
use super::wake::{self, WakeList};
use super::work_queue::{Owner, Poster, WorkQueue};
use crate::error::{LimitError, OpErrorKind, SetupError, VerbError};
use crate::sync::{AtomicU32, Mutex, MutexGuard, Ordering, lock, try_lock};
use crate::types::WorkCompletion;
use crate::verbs::{Channel, Cq};

/// Completions taken from the device at once: enough to spread the cost of a poll, few enough that a drain
/// does not keep the lock for long.
const BATCH: usize = 32;

/// Operations that end without waiting before one of them yields to the runtime, as Tokio's own resources do
/// after 128: a task that never waits would starve the others.
const RUN: usize = 128;

/// What all holders of a completion queue share.
pub(crate) struct CqShared {
    mode: CompletionMode,
    /// Operations that registered a waker, were abandoned or stand in line for room, and are not finished.
    waiting: AtomicU32,
    /// Futures that poll it for all.
    drivers: AtomicU32,
    spin: SpinBudget,
    reactors: Reactors,
    state: Mutex<State>,
    cq: Cq,
    channel: Option<Channel>,
}

/// Of whoever drains.
struct State {
    completions: Box<[WorkCompletion; BATCH]>,
    /// Work queues by owner number.
    queues: Vec<Option<Attached>>,
    vacant: Vec<u32>,
    /// Completions that the attached queues can produce.
    reserved: u32,
    /// An event was asked for and has not been taken from the channel.
    armed: bool,
    unacknowledged: u32,
    /// Where in `completions` those begin that were taken from the device and left for who asks, and where they end: there are
    /// none while anybody waits.
    next: usize,
    end: usize,
    /// How many more operations may end without waiting, one after the other.
    run: usize,
    /// The queue is dead.
    failed: Option<VerbError>,
    /// What is left to do when the lock is released.
    woken: WakeList,
    counters: CompletionQueueCounters,
}

struct Attached {
    queue: Arc<WorkQueue>,
    /// The queue pair, if it is not a shared receive queue.
    core: Weak<QueuePairCore>,
    /// What is not destroyed and draws from it, if it is one.
    drawing: Vec<Weak<dyn Drawing>>,
    reserved: u32,
}

impl CqShared {
    pub(super) fn new(cq: Cq, channel: Option<Channel>, mode: CompletionMode) -> Self {
        Self {
            channel,
            mode,
            waiting: AtomicU32::new(0),
            drivers: AtomicU32::new(0),
            spin: SpinBudget::new(),
            reactors: Reactors::new(),
            state: Mutex::new(State {
                completions: Box::new([WorkCompletion::EMPTY; BATCH]),
                queues: Vec::new(),
                vacant: Vec::new(),
                reserved: 0,
                armed: false,
                unacknowledged: 0,
                next: 0,
                end: 0,
                run: RUN,
                failed: None,
                woken: WakeList::new(),
                counters: CompletionQueueCounters { capacity: cq.capacity(), ..Default::default() },
            }),
            cq,
        }
    }

    pub(super) fn verbs(&self) -> &Cq {
        &self.cq
    }

    pub(super) fn mode(&self) -> &CompletionMode {
        &self.mode
    }

    pub(super) fn counters(&self) -> CompletionQueueCounters {
        let state = lock(&self.state);
        CompletionQueueCounters {
            reserved: state.reserved,
            waiting: self.waiting.load(Ordering::Relaxed),
            spin_rounds: self.spin.rounds(),
            ..state.counters
        }
    }

    /// Makes a work queue whose completions arrive here, and sets room aside for them.
    pub(crate) fn attach(self: &Arc<Self>, poster: Poster, limits: Limits) -> Result<Arc<WorkQueue>, SetupError> {
        let mut state = lock(&self.state);
        if let Some(error) = state.failed {
            return Err(error.into());
        }
        let free = self.cq.capacity() - state.reserved;
        if limits.depth > free {
            return Err(SetupError::CompletionQueueFull { asked: limits.depth, free });
        }
        let number = match state.vacant.pop() {
            Some(number) => number,
            None => {
                let number = state.queues.len() as u32;
                LimitError::check("queues of a completion queue", u64::from(number) + 1, Owner::MAX.into())?;
                state.queues.push(None);
                number
            }
        };
        state.reserved += limits.depth;
        let queue = Arc::new(WorkQueue::new(Owner(number), poster, limits, self.clone()));
        state.queues[number as usize] =
            Some(Attached { queue: queue.clone(), core: Weak::new(), drawing: Vec::new(), reserved: limits.depth });
        Ok(queue)
    }

    /// Notes which queue pair `queue` is of, to be destroyed if this completion queue fails; not if it has.
    pub(super) fn own(&self, queue: &WorkQueue, core: &Arc<QueuePairCore>) -> Result<(), VerbError> {
        let mut state = lock(&self.state);
        if let Some(error) = state.failed {
            return Err(error);
        }
        if let Some(Some(attached)) = state.queues.get_mut(queue.owner().0 as usize) {
            attached.core = Arc::downgrade(core);
        }
        Ok(())
    }

    /// The queue pair of a work queue, if it has one that lives.
    pub(super) fn queue_pair_of(&self, owner: Owner) -> Option<Arc<QueuePairCore>> {
        let state = lock(&self.state);
        state.queues.get(owner.0 as usize)?.as_ref()?.core.upgrade()
    }

    /// Notes that `core` draws from the shared receive queue `queue`, whose buffers are free only after it is gone; not
    /// if this completion queue has failed.
    pub(super) fn draw(&self, queue: &WorkQueue, core: &Arc<dyn Drawing>) -> Result<(), VerbError> {
        let mut state = lock(&self.state);
        if let Some(error) = state.failed {
            return Err(error);
        }
        if let Some(Some(attached)) = state.queues.get_mut(queue.owner().0 as usize) {
            attached.drawing.push(Arc::downgrade(core));
        }
        Ok(())
    }

    /// `core` is destroyed. If this completion queue has failed and it was the last, the receives end.
    pub(super) fn no_longer_draws(&self, queue: &Arc<WorkQueue>, core: &impl Drawing) {
        let mut state = lock(&self.state);
        let failed = state.failed;
        if let Some(Some(attached)) = state.queues.get_mut(queue.owner().0 as usize) {
            attached.drawing.retain(|drawing| !std::ptr::addr_eq(drawing.as_ptr(), core));
            if let Some(error) = failed.filter(|_| attached.drawing.is_empty()) {
                state.woken.abandon(queue.clone(), OpErrorKind::CompletionQueue(error));
            }
        }
        self.release(state);
    }

    /// Ends everything in flight on a queue that the device has destroyed or reset, and forgets a destroyed one.
    pub(super) fn abandon(&self, queue: &WorkQueue, kind: OpErrorKind, forget: bool) {
        self.forget(queue, kind, forget).finish();
    }

    /// As [`abandon`](Self::abandon); who is to be woken is left to the caller.
    pub(super) fn forget(&self, queue: &WorkQueue, kind: OpErrorKind, forget: bool) -> WakeList {
        let mut state = lock(&self.state);
        // Completions that are already here tell more than `kind`.
        while self.drain_batch(&mut state) {}
        queue.abandon(kind, &mut state.woken);
        let entry = &mut state.queues[queue.owner().0 as usize];
        let forgotten = if forget { entry.take() } else { None };
        if let Some(attached) = &forgotten {
            state.reserved -= attached.reserved;
            state.vacant.push(queue.owner().0);
        }
        let poster = forgotten.as_ref().and_then(|_| queue.orphan());
        let woken = std::mem::take(&mut state.woken);
        drop(state);
        drop((forgotten, poster));
        woken
    }

    /// Takes all completions there are; who is to be woken is left to the caller.
    pub(super) fn drain_all(&self) -> WakeList {
        let mut state = lock(&self.state);
        while self.drain_batch(&mut state) {}
        std::mem::take(&mut state.woken)
    }

    /// Takes all completions there are.
    pub(crate) fn drain(&self) {
        loop {
            let mut state = lock(&self.state);
            let more = self.drain_batch(&mut state);
            self.release(state);
            if !more {
                return;
            }
        }
    }

    /// Sees to what has arrived at a device that is a program; true if there was anything.
    pub(super) fn serve(&self) -> bool {
        self.cq.device().serve()
    }

    /// Takes one batch of completions, unless somebody else is at it; false if there were none.
    pub(super) fn try_drain(&self) -> bool {
        let Some(mut state) = try_lock(&self.state) else { return true };
        let before = state.counters.completions;
        self.drain_batch(&mut state);
        let any = state.counters.completions != before;
        self.release(state);
        any
    }

    /// Takes one batch of completions and finishes their operations; true if there may be more.
    fn drain_batch(&self, state: &mut State) -> bool {
        self.finish_left(state);
        let taken = self.take_batch(state);
        taken > 0 && self.finish_batch(state, 0, taken)
    }

    /// Finishes the operations of completions that were left for whoever asks for them.
    #[inline]
    fn finish_left(&self, state: &mut State) {
        let (next, end) = (std::mem::take(&mut state.next), std::mem::take(&mut state.end));
        if next < end {
            self.finish_batch(state, next, end);
        }
    }

    /// As [`finish_left`](Self::finish_left), for who looks at a result, or for room, without waiting for it; true if there
    /// were any.
    pub(super) fn hand_out(&self) -> bool {
        if !self.mode.arms() {
            return false;
        }
        let mut state = lock(&self.state);
        let any = state.next < state.end;
        self.finish_left(&mut state);
        self.release(state);
        any
    }

    /// True if nobody waits for completions that are taken and not handed out. Whoever begins to wait later hands out what is
    /// left before: `look_further`, `attend`. A poller never sleeps.
    fn may_leave(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) == 0 && self.mode.arms()
    }

    /// Ends the first of a batch of `taken`, which is in `slot` and was asked for. If nobody waits for the rest it is left for
    /// who asks, and spared the way through the slot.
    #[inline(never)]
    fn leave(mut guard: MutexGuard<'_, State>, taken: usize, queue: &WorkQueue, slot: &Slot) {
        let (this, state) = (queue.cq(), &mut *guard);
        state.run -= taken;
        state.counters.completions += taken as u64;
        let crowded = queue.end_own(slot, &state.completions[0]);
        if this.may_leave() {
            (state.next, state.end) = (1, taken);
        } else {
            this.finish_batch(state, 1, taken);
        }
        if crowded {
            queue.let_in(&mut state.woken);
        }
        if !state.woken.is_empty() {
            // Whoever is woken may panic, and the operation then looks again.
            slot.keep(&state.completions[0]);
        }
        this.release(guard);
    }

    /// Takes one batch of completions; how many.
    fn take_batch(&self, state: &mut State) -> usize {
        let found = self.cq.take(&mut state.completions[..]);
        self.count(state, found)
    }

    /// How many were taken.
    fn count(&self, state: &mut State, found: Result<usize, VerbError>) -> usize {
        let found = found.and_then(|taken| if taken > 0 { Ok(taken) } else { self.cq.found_nothing() });
        match found {
            Ok(taken) => {
                state.counters.completions += taken as u64;
                taken
            }
            Err(error) => {
                self.fail(state, error);
                0
            }
        }
    }

    /// Finishes the operations of completions `from..taken` of a batch; true if there may be more to take.
    #[inline(never)]
    fn finish_batch(&self, state: &mut State, from: usize, taken: usize) -> bool {
        let State { completions, queues, woken, .. } = state;
        for wc in completions.iter().take(taken).skip(from) {
            match queues.get(Owner::of(wc.wr_id).0 as usize) {
                Some(Some(attached)) => attached.queue.complete(wc, woken),
                _ => tracing::warn!(wr_id = %wc.wr_id, "completion of a queue that is gone"),
            }
        }
        taken == BATCH
    }

    /// The queue is dead (overrun, or the device is gone): nothing on it will ever complete.
    #[cold]
    fn fail(&self, state: &mut State, error: VerbError) {
        if state.failed.replace(error).is_some() {
            return;
        }
        let woken = &mut state.woken;
        tracing::error!(cq = self.cq.id(), %error, "completion queue failed");
        for attached in state.queues.iter().flatten() {
            match attached.core.upgrade() {
                Some(core) => woken.end(core, OpErrorKind::CompletionQueue(error)),
                None if attached.queue.is_shared() && attached.drawing.is_empty() => {
                    woken.abandon(attached.queue.clone(), OpErrorKind::CompletionQueue(error));
                }
                // The last of them ends it, when nothing draws from it any more; see `no_longer_draws`.
                None if attached.queue.is_shared() => {
                    for core in attached.drawing.iter().filter_map(Weak::upgrade) {
                        woken.end(core, OpErrorKind::CompletionQueue(error));
                    }
                }
                // Its queue pair is being destroyed by somebody else, who ends what is in flight afterwards.
                None => {}
            }
        }
    }

    /// Unlocks, then wakes who is to be woken.
    #[inline(always)]
    fn release(&self, state: MutexGuard<'_, State>) {
        if !state.woken.is_empty() {
            Self::release_and_wake(state);
        }
    }

    #[cold]
    fn release_and_wake(mut state: MutexGuard<'_, State>) {
        if let Some(waker) = state.woken.only() {
            drop(state);
            return wake::wake(waker);
        }
        let woken = std::mem::take(&mut state.woken);
        drop(state);
        woken.finish();
    }

    /// Waits for the work request of `queue` that is in `slot`, which is [new](Slot::is_new): looks once, then as the mode
    /// says.
    ///
    /// Calls `take` when it is over: with what `see` makes of the completion if that is the next one and a success, which
    /// spares the operation the way through its slot; the slot is released then. Otherwise the slot has the outcome.
    #[inline(always)]
    pub(super) fn look_first<S, R>(
        self: &Arc<Self>,
        queue: &WorkQueue,
        slot: &Slot,
        context: &mut Context<'_>,
        see: impl FnOnce(&WorkCompletion) -> S,
        take: impl FnOnce(Option<S>) -> Poll<R>,
    ) -> Poll<R> {
        self.look(lock(&self.state), queue, slot, context, see, take)
    }

    /// As [`look_first`](Self::look_first), for an operation that is not complete and may have waited.
    #[inline(always)]
    pub(super) fn look_again<S, R>(
        self: &Arc<Self>,
        queue: &WorkQueue,
        slot: &Slot,
        context: &mut Context<'_>,
        see: impl FnOnce(&WorkCompletion) -> S,
        take: impl FnOnce(Option<S>) -> Poll<R>,
    ) -> Poll<R> {
        let rounds = slot.rounds();
        // Else its waker is in the slot.
        if slot.is_unwatched()
            && let Some(state) = try_lock(&self.state)
        {
            // Counted while the slot is taken: all of this may be gone with its share when it is released.
            let see = |completion: &WorkCompletion| {
                self.found(rounds);
                see(completion)
            };
            return self.look(state, queue, slot, context, see, take);
        }
        match self.wait_slot(slot, context) {
            Poll::Ready(()) => take(None),
            Poll::Pending => Poll::Pending,
        }
    }

    /// Looks once; for an operation whose waker is not in the slot.
    #[inline(always)]
    fn look<'a, S, R>(
        self: &'a Arc<Self>,
        mut guard: MutexGuard<'a, State>,
        queue: &WorkQueue,
        slot: &Slot,
        context: &mut Context<'_>,
        see: impl FnOnce(&WorkCompletion) -> S,
        take: impl FnOnce(Option<S>) -> Poll<R>,
    ) -> Poll<R> {
        let state = &mut *guard;
        let waited = if state.next < state.end {
            let at = state.next % BATCH;
            let next = &state.completions[at];
            if is_success_of(next, slot) {
                let seen = see(next);
                state.next += 1;
                if queue.end_own(slot, next) {
                    Self::let_in(guard, at, queue, slot);
                } else {
                    drop(guard);
                }
                slot.release_in(Some(queue));
                return take(Some(seen));
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
                        if queue.end_own(slot, next) {
                            Self::let_in(guard, 0, queue, slot);
                        } else {
                            drop(guard);
                        }
                    }
                    slot.release_in(Some(queue));
                    return take(Some(seen));
                }
            }
            self.look_at(guard, found, slot, context)
        };
        match waited {
            Poll::Ready(()) => take(None),
            Poll::Pending => Poll::Pending,
        }
    }

    /// What was taken is not what was looked for, or others shall run first.
    #[cold]
    fn look_at<'a>(
        self: &'a Arc<Self>,
        mut guard: MutexGuard<'a, State>,
        found: Result<usize, VerbError>,
        slot: &Slot,
        context: &mut Context<'_>,
    ) -> Poll<()> {
        let state = &mut *guard;
        let taken = self.count(state, found);
        if taken > state.run && self.may_leave() && is_success_of(&state.completions[0], slot) {
            (state.run, state.next, state.end) = (RUN, 0, taken);
            drop(guard);
            context.waker().wake_by_ref();
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
        slot: &Slot,
        context: &mut Context<'_>,
    ) -> Poll<()> {
        self.finish_left(&mut state);
        let more = !slot.is_complete() && self.drain_batch(&mut state);
        self.wait_slow(state, more, slot, context)
    }

    /// Unlocks; before, lets in who waits for room in `queue`. Completion `at` has ended the operation in `slot`.
    #[cold]
    fn let_in(mut state: MutexGuard<'_, State>, at: usize, queue: &WorkQueue, slot: &Slot) {
        queue.let_in(&mut state.woken);
        // As in `leave`.
        slot.keep(&state.completions[at]);
        queue.cq().release(state);
    }

    /// As [`look_again`](Self::look_again), always through the slot.
    pub(super) fn wait_slot(self: &Arc<Self>, slot: &Slot, context: &mut Context<'_>) -> Poll<()> {
        let Some(mut state) = try_lock(&self.state) else { return self.wait_locked(slot, context) };
        let more = self.drain_batch(&mut state);
        self.wait_slow(state, more, slot, context)
    }

    /// Somebody else is draining.
    #[cold]
    fn wait_locked(self: &Arc<Self>, slot: &Slot, context: &mut Context<'_>) -> Poll<()> {
        // A poller has the lock most of the time, and will find what there is.
        if matches!(self.mode, CompletionMode::BusyPoll(_)) {
            self.register(slot, context.waker(), &mut None);
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
        slot: &Slot,
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
                    context.waker().wake_by_ref();
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
        if spins || state.failed.is_some() {
            // A dead queue is being taken down by whoever noticed; look again until it is.
            slot.spin(rounds.saturating_add(1));
            self.release(state);
            if spins {
                self.serve();
            }
            context.waker().wake_by_ref();
            return Poll::Pending;
        }

        let mut replaced = None;
        let pending = self.register(slot, context.waker(), &mut replaced);
        // Under a driver too, for it may be dropped, or not be polled for a while.
        if pending && self.mode.arms() {
            arm::before_park(&mut Draining { queue: self, state: &mut state });
        }
        self.release(state);
        if slot.is_complete() {
            return Poll::Ready(());
        }
        if self.mode.arms() && !self.reactors.watch(self) {
            // No runtime, no reactor: the only way to be woken is to ask for it.
            context.waker().wake_by_ref();
        } else if rounds > 0 && !self.reactors.has_inlet() {
            self.cq.device().leave();
        }
        Poll::Pending
    }

    /// True if the slot is now waiting.
    fn register(&self, slot: &Slot, waker: &Waker, replaced: &mut Option<Waker>) -> bool {
        // Counted before it is visible, so that whoever finishes it never counts below zero.
        self.now_waiting();
        let registered = slot.register(waker, replaced);
        let counted = match registered {
            Registered::Fresh => 0,
            Registered::Again | Registered::Complete | Registered::Imminent => 1,
            // It was counted when it began to wait, too.
            Registered::Overtaken => 2,
        };
        self.waiting.fetch_sub(counted, Ordering::Relaxed);
        matches!(registered, Registered::Fresh | Registered::Again)
    }

    /// A wait ended after `rounds` of spinning.
    #[inline]
    fn found(&self, rounds: u32) {
        if rounds > 0 && matches!(self.mode, CompletionMode::Hybrid) {
            self.spin.found(rounds);
        }
    }

    /// Makes sure that a completion is noticed though nobody may be waiting for one: an abandoned operation holds
    /// buffers until then, and room that others wait for. A poller needs no telling.
    pub(super) fn attend(self: &Arc<Self>) {
        if !self.mode.arms() {
            return;
        }
        let mut state = lock(&self.state);
        self.finish_left(&mut state);
        arm::before_park(&mut Draining { queue: self, state: &mut state });
        self.release(state);
        self.reactors.watch(self);
    }

    /// An operation begins to wait.
    pub(super) fn now_waiting(&self) {
        self.waiting.fetch_add(1, Ordering::Relaxed);
    }

    #[inline]
    pub(super) fn no_longer_waiting(&self) {
        self.waiting.fetch_sub(1, Ordering::Relaxed);
    }

    /// The channel may have an event.
    pub(super) fn on_event(&self) {
        let mut state = lock(&self.state);
        arm::on_event(&mut Draining { queue: self, state: &mut state });
        self.release(state);
    }

    /// Somebody polls for all from now on.
    pub(super) fn begin_driving(&self) {
        self.drivers.fetch_add(1, Ordering::Relaxed);
    }

    /// True if somebody polls for all.
    pub(super) fn is_driven(&self) -> bool {
        self.drivers.load(Ordering::Relaxed) > 0
    }

    /// Why it is dead, if it is.
    pub(crate) fn failure(&self) -> Option<VerbError> {
        lock(&self.state).failed
    }

    /// Nobody does any more, perhaps: those who wait are woken by events until they look again.
    pub(super) fn end_driving(&self) {
        self.drivers.fetch_sub(1, Ordering::Relaxed);
    }

    /// A reactor is gone: those who relied on it look again, and find another or do without.
    #[cold]
    pub(super) fn rouse(&self) {
        let mut state = lock(&self.state);
        let State { queues, woken, .. } = &mut *state;
        for attached in queues.iter().flatten() {
            attached.queue.rouse(woken);
        }
        self.release(state);
    }

    pub(super) fn channel(&self) -> Option<&Channel> {
        self.channel.as_ref()
    }

    pub(super) fn reactors(&self) -> &Reactors {
        &self.reactors
    }
}

/// True if `completion` is that of the work request in `slot`, and a success.
#[inline(always)]
fn is_success_of(completion: &WorkCompletion, slot: &Slot) -> bool {
    completion.wr_id == slot.id() && completion.status.is_success()
}

/// The queue in the hands of whoever holds its lock.
struct Draining<'a> {
    queue: &'a CqShared,
    state: &'a mut State,
}

impl Watched for Draining<'_> {
    fn drain(&mut self) {
        while self.queue.drain_batch(self.state) {}
    }

    fn arm(&mut self) -> bool {
        match self.queue.cq.arm(false) {
            Ok(()) => {
                self.state.counters.arms += 1;
                true
            }
            Err(error) => {
                self.queue.fail(self.state, error);
                false
            }
        }
    }

    fn take_event(&mut self) -> bool {
        let Some(channel) = &self.queue.channel else { return false };
        match channel.next_event() {
            Ok(Some(_)) => {
                self.state.counters.events += 1;
                self.state.unacknowledged += 1;
                // Acknowledging takes a lock and wakes whoever destroys the queue: seldom is enough.
                if self.state.unacknowledged == u32::from(u16::MAX) {
                    self.queue.cq.acknowledge(std::mem::take(&mut self.state.unacknowledged));
                }
                true
            }
            Ok(None) => false,
            Err(error) => {
                self.queue.fail(self.state, error);
                false
            }
        }
    }

    fn is_awaited(&self) -> bool {
        self.queue.waiting.load(Ordering::Relaxed) > 0
    }

    fn armed(&mut self) -> &mut bool {
        &mut self.state.armed
    }
}

impl Drop for CqShared {
    fn drop(&mut self) {
        // The device waits for acknowledgements when the queue is destroyed, `ibv_destroy_cq(3)`.
        let state = lock(&self.state);
        if state.unacknowledged > 0 {
            self.cq.acknowledge(state.unacknowledged);
        }
    }
}

impl fmt::Debug for CqShared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CqShared").field("cq", &self.cq).field("mode", &self.mode).finish_non_exhaustive()
    }
}

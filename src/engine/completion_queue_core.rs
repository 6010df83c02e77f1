//! A completion queue and the work queues on it: completions are taken here, and their operations finished.

mod wait;

use std::fmt;
use std::sync::{Arc, Weak};

use super::arm::{self, Armed};
use super::busy_poll::Polled;
use super::completion_counters::CompletionQueueCounters;
use super::completion_mode::CompletionMode;
use super::posting::Poster;
use super::reactor::{self, Reactors};
use super::spin_budget::SpinBudget;
use super::wake_list::{Teardown, WakeList, wake};
use super::work_queue::WorkQueue;
use super::work_request::Limits;
use super::work_request_id::Owner;
use crate::error::{LimitError, OpErrorKind, SetupError, VerbError};
use crate::sync::{AtomicU32, Mutex, MutexGuard, Ordering, lock, try_lock};
use crate::types::WorkCompletion;
use crate::verbs::{Channel, Cq, Device};

/// Completions taken from the device at once: enough to spread the cost of a poll, few enough that a drain
/// does not keep the lock for long.
const BATCH: usize = 32;

/// Operations that end without waiting before one of them yields to the runtime, as Tokio's own resources do
/// after 128: a task that never waits would starve the others.
const RUN: usize = 128;

/// What all holders of a completion queue share.
pub(crate) struct CompletionQueueCore {
    mode: CompletionMode,
    /// Operations that registered a waker, were abandoned or are queued for capacity, and are not finished; and those who wait
    /// for a work queue to be idle.
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
    /// What is not destroyed and draws from it, if it is a shared receive queue.
    drawing: Vec<Weak<dyn Teardown>>,
    reserved: u32,
}

impl CompletionQueueCore {
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
    pub(crate) fn attach(
        self: &Arc<Self>,
        poster: Poster,
        limits: Limits,
    ) -> Result<Arc<WorkQueue>, SetupError> {
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
                LimitError::check(
                    "queues of a completion queue",
                    u64::from(number) + 1,
                    Owner::MAX.into(),
                )?;
                state.queues.push(None);
                number
            }
        };
        state.reserved += limits.depth;
        let queue = Arc::new(WorkQueue::new(Owner(number), poster, limits, self.clone()));
        state.queues[number as usize] =
            Some(Attached { queue: queue.clone(), drawing: Vec::new(), reserved: limits.depth });
        Ok(queue)
    }

    /// Notes which queue pair `queue` is of, to be destroyed if this completion queue fails; not if it has.
    pub(super) fn own(
        &self,
        queue: &WorkQueue,
        queue_pair: Weak<dyn Teardown>,
    ) -> Result<(), VerbError> {
        // Under the lock, so that a failure either comes first or finds the queue pair.
        let state = lock(&self.state);
        if let Some(error) = state.failed {
            return Err(error);
        }
        queue.set_queue_pair(queue_pair);
        Ok(())
    }

    /// Notes that `core` draws from the shared receive queue `queue`, whose buffers are free only after it is gone; not
    /// if this completion queue has failed.
    pub(super) fn draw(
        &self,
        queue: &WorkQueue,
        core: &Arc<dyn Teardown>,
    ) -> Result<(), VerbError> {
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
    pub(super) fn no_longer_draws(&self, queue: &Arc<WorkQueue>, core: &impl Teardown) {
        let mut state = lock(&self.state);
        let failed = state.failed;
        if let Some(Some(attached)) = state.queues.get_mut(queue.owner().0 as usize) {
            attached.drawing.retain(|drawing| !std::ptr::addr_eq(drawing.as_ptr(), core));
            if let Some(error) = failed.filter(|_| attached.drawing.is_empty()) {
                state.woken.end(queue.clone(), OpErrorKind::CompletionQueue(error));
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
        // The poster is dropped without the lock.
        let poster = forgotten.as_ref().and_then(|_| queue.close());
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

    /// Takes one batch of completions; how many.
    fn take_batch(&self, state: &mut State) -> usize {
        let found = self.cq.take(&mut state.completions[..]);
        self.count(state, found)
    }

    /// How many were taken.
    fn count(&self, state: &mut State, found: Result<usize, VerbError>) -> usize {
        let found =
            found.and_then(|taken| if taken > 0 { Ok(taken) } else { self.cq.found_nothing() });
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
            match attached.queue.queue_pair() {
                Some(core) => woken.end(core, OpErrorKind::CompletionQueue(error)),
                None if attached.queue.is_shared() && attached.drawing.is_empty() => {
                    woken.end(attached.queue.clone(), OpErrorKind::CompletionQueue(error));
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
            return wake(waker);
        }
        let woken = std::mem::take(&mut state.woken);
        drop(state);
        woken.finish();
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

    /// A driver ends. If it was the last, those who wait are woken by events until they look again.
    pub(super) fn end_driving(&self) {
        self.drivers.fetch_sub(1, Ordering::Relaxed);
    }
}

impl reactor::Watched for CompletionQueueCore {
    fn channel(&self) -> Option<&Channel> {
        self.channel.as_ref()
    }

    fn device(&self) -> &Device {
        self.cq.device()
    }

    fn on_event(&self) {
        let mut state = lock(&self.state);
        arm::on_event(&mut Draining { queue: self, state: &mut state });
        self.release(state);
    }

    #[cold]
    fn rouse(&self) {
        let mut state = lock(&self.state);
        let State { queues, woken, .. } = &mut *state;
        for attached in queues.iter().flatten() {
            attached.queue.rouse(woken);
        }
        self.release(state);
    }

    fn reactors(&self) -> &Reactors {
        &self.reactors
    }
}

impl Polled for CompletionQueueCore {
    fn poll(&self) -> bool {
        let Some(mut state) = try_lock(&self.state) else { return true };
        let before = state.counters.completions;
        self.drain_batch(&mut state);
        let any = state.counters.completions != before;
        self.release(state);
        any || self.serve()
    }
}

/// The queue in the hands of whoever holds its lock.
struct Draining<'a> {
    queue: &'a CompletionQueueCore,
    state: &'a mut State,
}

impl Armed for Draining<'_> {
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

impl Drop for CompletionQueueCore {
    fn drop(&mut self) {
        // The device waits for acknowledgements when the queue is destroyed, `ibv_destroy_cq(3)`.
        let state = lock(&self.state);
        if state.unacknowledged > 0 {
            self.cq.acknowledge(state.unacknowledged);
        }
    }
}

impl fmt::Debug for CompletionQueueCore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CompletionQueueCore")
            .field("cq", &self.cq)
            .field("mode", &self.mode)
            .finish_non_exhaustive()
    }
}

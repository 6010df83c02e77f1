//! Completion queue: the one drain path, and waiting.

use std::fmt;
use std::sync::Arc;
use std::sync::Weak;
use std::task::{Context, Poll, Waker};

use smallvec::SmallVec;

use super::arm::{self, Watched};
use super::mode::CompletionMode;
use super::reactor::Reactors;
use super::slot::{Held, Registered, Slot};
use super::spin::SpinBudget;
use super::teardown::QueuePairCore;
use super::work_queue::{Limits, Owner, Poster, WorkQueue};
use crate::error::{LimitError, OpErrorKind, SetupError, VerbError};
use crate::sync::{AtomicU32, Mutex, MutexGuard, Ordering, lock};
use crate::types::WorkCompletion;
use crate::verbs::{Channel, Cq, Device};

/// Completions taken from the device at once: enough to spread the cost of a poll, few enough that a drain
/// does not keep the lock for long.
const BATCH: usize = 32;

/// Operations that end without waiting before one of them yields to the runtime, as Tokio's own resources do
/// after 128: a task that never waits would starve the others.
const RUN: u32 = 128;

/// Where completions arrive and how they are watched; clones share it.
///
/// Many queue pairs may share one: the room for their completions is set aside when they are made, so that
/// it cannot be overrun.
#[derive(Clone)]
pub struct CompletionQueue {
    shared: Arc<CqShared>,
}

impl CompletionQueue {
    /// A queue of 1024 completions watched in `mode`.
    ///
    /// # Errors
    ///
    /// As [`CompletionQueueBuilder::build`].
    pub fn new(device: &Device, mode: CompletionMode) -> Result<Self, SetupError> {
        Self::builder(device).mode(mode).build()
    }

    /// A queue to be described further.
    #[must_use]
    pub fn builder(device: &Device) -> CompletionQueueBuilder {
        CompletionQueueBuilder { device: device.clone(), capacity: 1024, mode: CompletionMode::default(), vector: 0 }
    }

    /// The device it belongs to.
    #[must_use]
    pub fn device(&self) -> &Device {
        self.shared.cq.device()
    }

    /// The bare queue.
    #[must_use]
    pub fn verbs(&self) -> &Cq {
        &self.shared.cq
    }

    /// What it has done so far.
    #[must_use]
    pub fn counters(&self) -> CompletionQueueCounters {
        let state = lock(&self.shared.state);
        CompletionQueueCounters {
            reserved: state.reserved,
            waiting: self.shared.waiting.load(Ordering::Relaxed),
            spin_rounds: self.shared.spin.rounds(),
            ..state.counters
        }
    }

    pub(crate) fn shared(&self) -> &Arc<CqShared> {
        &self.shared
    }
}

impl fmt::Debug for CompletionQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CompletionQueue")
            .field("cq", &self.shared.cq)
            .field("mode", &self.shared.mode)
            .field("counters", &self.counters())
            .finish()
    }
}

/// Describes a [`CompletionQueue`].
#[derive(Debug, Clone)]
pub struct CompletionQueueBuilder {
    device: Device,
    capacity: u32,
    mode: CompletionMode,
    vector: u32,
}

impl CompletionQueueBuilder {
    /// Completions it holds; 1024 unless set. Each queue pair takes as many as its queues hold work requests.
    #[must_use]
    pub fn capacity(mut self, completions: u32) -> Self {
        self.capacity = completions;
        self
    }

    /// How it is watched; by events unless set.
    #[must_use]
    pub fn mode(mut self, mode: CompletionMode) -> Self {
        self.mode = mode;
        self
    }

    /// Which of the device's completion vectors interrupts; 0 unless set.
    #[must_use]
    pub fn vector(mut self, vector: u32) -> Self {
        self.vector = vector;
        self
    }

    /// Makes it.
    ///
    /// # Errors
    ///
    /// [`SetupError::Limit`] for a capacity of 0 or beyond the device's, [`SetupError::Verb`] if the provider refuses.
    pub fn build(self) -> Result<CompletionQueue, SetupError> {
        let channel = if self.mode.parks() { Some(Channel::new(&self.device)?) } else { None };
        let cq = Cq::on_vector(&self.device, self.capacity, channel.as_ref(), self.vector, 0)?;
        let shared = Arc::new(CqShared {
            channel,
            mode: self.mode,
            waiting: AtomicU32::new(0),
            spin: SpinBudget::new(),
            reactors: Reactors::new(),
            state: Mutex::new(State {
                completions: vec![WorkCompletion::default(); BATCH].into(),
                queues: Vec::new(),
                vacant: Vec::new(),
                reserved: 0,
                armed: false,
                unacknowledged: 0,
                run: 0,
                failed: None,
                counters: CompletionQueueCounters { capacity: cq.capacity(), ..Default::default() },
            }),
            cq,
        });
        if let CompletionMode::BusyPoll(poller) = &shared.mode {
            poller.serve(&shared);
        }
        Ok(CompletionQueue { shared })
    }
}

/// What all holders of a completion queue share.
pub(crate) struct CqShared {
    mode: CompletionMode,
    /// Operations that registered a waker and are not finished.
    waiting: AtomicU32,
    spin: SpinBudget,
    reactors: Reactors,
    state: Mutex<State>,
    cq: Cq,
    channel: Option<Channel>,
}

/// Of whoever drains.
struct State {
    completions: Box<[WorkCompletion]>,
    /// Work queues by owner number.
    queues: Vec<Option<Attached>>,
    vacant: Vec<u32>,
    /// Completions that the attached queues can produce.
    reserved: u32,
    /// An event was asked for and has not been taken from the channel.
    armed: bool,
    unacknowledged: u32,
    /// Operations that ended without waiting, one after the other.
    run: u32,
    /// The queue is dead.
    failed: Option<VerbError>,
    counters: CompletionQueueCounters,
}

struct Attached {
    queue: Arc<WorkQueue>,
    /// The queue pair, if it is not a shared receive queue.
    core: Weak<QueuePairCore>,
    reserved: u32,
}

impl CqShared {
    /// Makes a work queue whose completions arrive here, and sets room aside for them.
    pub(crate) fn attach(self: &Arc<Self>, poster: Poster, limits: Limits) -> Result<Arc<WorkQueue>, SetupError> {
        let mut state = lock(&self.state);
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
            Some(Attached { queue: queue.clone(), core: Weak::new(), reserved: limits.depth });
        Ok(queue)
    }

    /// Notes which queue pair `queue` is of, to be destroyed if this completion queue fails.
    pub(super) fn own(&self, queue: &WorkQueue, core: &Arc<QueuePairCore>) {
        let mut state = lock(&self.state);
        if let Some(Some(attached)) = state.queues.get_mut(queue.owner().0 as usize) {
            attached.core = Arc::downgrade(core);
        }
    }

    /// Ends everything in flight on a queue that the device has destroyed or reset, and forgets a destroyed one.
    pub(super) fn abandon(&self, queue: &WorkQueue, kind: OpErrorKind, forget: bool) {
        let mut woken = WakeList::new();
        let mut state = lock(&self.state);
        // Completions that are already here tell more than `kind`.
        while self.drain_batch(&mut state, &mut woken) {}
        queue.abandon(kind, &mut woken);
        let entry = &mut state.queues[queue.owner().0 as usize];
        let forgotten = if forget { entry.take() } else { None };
        if let Some(attached) = &forgotten {
            state.reserved -= attached.reserved;
            state.vacant.push(queue.owner().0);
        }
        drop(state);
        drop(forgotten);
        woken.finish();
    }

    /// Takes all completions there are; true if there were any.
    pub(crate) fn drain(&self) -> bool {
        let mut any = false;
        loop {
            let mut woken = WakeList::new();
            let more = {
                let mut state = lock(&self.state);
                let before = state.counters.completions;
                let more = self.drain_batch(&mut state, &mut woken);
                any |= state.counters.completions != before;
                more
            };
            woken.finish();
            if !more {
                return any;
            }
        }
    }

    /// As [`drain`](Self::drain), unless somebody else is at it.
    pub(super) fn try_drain(&self) -> bool {
        let Ok(mut state) = self.state.try_lock() else { return true };
        let mut woken = WakeList::new();
        let before = state.counters.completions;
        self.drain_batch(&mut state, &mut woken);
        let any = state.counters.completions != before;
        drop(state);
        woken.finish();
        any
    }

    /// Takes one batch of completions; true if there may be more.
    #[inline]
    fn drain_batch(&self, state: &mut State, woken: &mut WakeList) -> bool {
        let State { completions, queues, counters, .. } = state;
        let taken = match self.cq.poll(completions) {
            Ok(taken) => taken,
            Err(error) => {
                self.fail(state, error, woken);
                return false;
            }
        };
        counters.completions += taken as u64;
        for wc in &completions[..taken] {
            match queues.get(Owner::of(wc.wr_id).0 as usize) {
                Some(Some(attached)) => attached.queue.complete(wc, woken),
                _ => tracing::warn!(wr_id = %wc.wr_id, "completion of a queue that is gone"),
            }
        }
        taken == completions.len()
    }

    /// The queue is dead (overrun, or the device is gone): nothing on it will ever complete.
    #[cold]
    fn fail(&self, state: &mut State, error: VerbError, woken: &mut WakeList) {
        if state.failed.replace(error).is_some() {
            return;
        }
        tracing::error!(cq = self.cq.id(), %error, "completion queue failed");
        for attached in state.queues.iter().flatten() {
            match attached.core.upgrade() {
                Some(core) => woken.end(core, OpErrorKind::CompletionQueue(error)),
                // A shared receive queue: nothing draws from it once its queue pairs are destroyed.
                None => woken.abandons.push((attached.queue.clone(), OpErrorKind::CompletionQueue(error))),
            }
        }
    }

    /// Waits for a slot to be complete: looks once, then as the mode says.
    #[inline]
    pub(super) fn wait(self: &Arc<Self>, slot: &Slot, rounds: &mut u32, context: &mut Context<'_>) -> Poll<()> {
        let mut woken = WakeList::new();
        let mut state = match &self.mode {
            // The poller has the lock most of the time; it will find what there is.
            CompletionMode::BusyPoll(_) => match self.state.try_lock() {
                Ok(state) => state,
                Err(_) => return self.watch(slot, context),
            },
            _ => lock(&self.state),
        };
        let more = self.drain_batch(&mut state, &mut woken);
        if slot.is_complete() && !more && woken.is_empty() {
            state.run += 1;
            if state.run < RUN {
                drop(state);
                return self.found(*rounds);
            }
            // Let others run; the result is there when the task comes back.
            state.run = 0;
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        self.wait_slow(state, woken, more, slot, rounds, context)
    }

    fn wait_slow<'a>(
        self: &'a Arc<Self>,
        mut state: MutexGuard<'a, State>,
        mut woken: WakeList,
        mut more: bool,
        slot: &Slot,
        rounds: &mut u32,
        context: &mut Context<'_>,
    ) -> Poll<()> {
        loop {
            if slot.is_complete() {
                drop(state);
                woken.finish();
                if more {
                    self.drain();
                }
                return self.found(*rounds);
            }
            if !more {
                break;
            }
            drop(state);
            std::mem::take(&mut woken).finish();
            state = lock(&self.state);
            more = self.drain_batch(&mut state, &mut woken);
        }
        state.run = 0;

        let spins = match &self.mode {
            CompletionMode::Cooperative => true,
            CompletionMode::Hybrid if self.spin.allows(*rounds) => true,
            CompletionMode::Hybrid => {
                if *rounds > 0 {
                    self.spin.missed();
                    *rounds = 0;
                }
                false
            }
            CompletionMode::Event | CompletionMode::BusyPoll(_) => false,
        };
        if spins || state.failed.is_some() {
            // A dead queue is being taken down by whoever noticed; look again until it is.
            *rounds = rounds.saturating_add(1);
            drop(state);
            woken.finish();
            context.waker().wake_by_ref();
            return Poll::Pending;
        }

        let pending = self.register(slot, context.waker());
        if pending && self.mode.parks() {
            arm::before_park(&mut Draining { queue: self, state: &mut state, woken: &mut woken });
        }
        drop(state);
        woken.finish();
        if slot.is_complete() {
            return Poll::Ready(());
        }
        if self.mode.parks() && !self.reactors.watch(self) {
            // No runtime, no reactor: the only way to be woken is to ask for it.
            context.waker().wake_by_ref();
        }
        Poll::Pending
    }

    /// Registers with a slot whose completion somebody else is about to find.
    #[cold]
    fn watch(&self, slot: &Slot, context: &mut Context<'_>) -> Poll<()> {
        self.register(slot, context.waker());
        if slot.is_complete() { Poll::Ready(()) } else { Poll::Pending }
    }

    /// True if the slot is now waiting.
    fn register(&self, slot: &Slot, waker: &Waker) -> bool {
        // Counted before it is visible, so that whoever finishes it never counts below zero.
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let registered = slot.register(waker);
        if registered != Registered::Fresh {
            self.waiting.fetch_sub(1, Ordering::Relaxed);
        }
        matches!(registered, Registered::Fresh | Registered::Again)
    }

    #[inline]
    fn found(&self, rounds: u32) -> Poll<()> {
        if rounds > 0 && matches!(self.mode, CompletionMode::Hybrid) {
            self.spin.found(rounds);
        }
        Poll::Ready(())
    }

    #[inline]
    pub(super) fn no_longer_waiting(&self) {
        self.waiting.fetch_sub(1, Ordering::Relaxed);
    }

    /// The channel may have an event.
    pub(super) fn on_event(&self) {
        let mut woken = WakeList::new();
        let mut state = lock(&self.state);
        arm::on_event(&mut Draining { queue: self, state: &mut state, woken: &mut woken });
        drop(state);
        woken.finish();
    }

    pub(super) fn channel(&self) -> Option<&Channel> {
        self.channel.as_ref()
    }

    pub(super) fn reactors(&self) -> &Reactors {
        &self.reactors
    }
}

/// The queue in the hands of whoever holds its lock.
struct Draining<'a> {
    queue: &'a CqShared,
    state: &'a mut State,
    woken: &'a mut WakeList,
}

impl Watched for Draining<'_> {
    fn drain(&mut self) {
        while self.queue.drain_batch(self.state, self.woken) {}
    }

    fn arm(&mut self) -> bool {
        match self.queue.cq.arm(false) {
            Ok(()) => {
                self.state.counters.arms += 1;
                true
            }
            Err(error) => {
                self.queue.fail(self.state, error, self.woken);
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
                self.queue.fail(self.state, error, self.woken);
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

/// What is left to do when the locks are released: wake tasks, drop what abandoned operations owned.
#[derive(Default)]
pub(super) struct WakeList {
    wakers: SmallVec<[Waker; BATCH]>,
    held: SmallVec<[Held; 2]>,
    ends: SmallVec<[(Arc<QueuePairCore>, OpErrorKind); 1]>,
    abandons: SmallVec<[(Arc<WorkQueue>, OpErrorKind); 1]>,
}

impl WakeList {
    #[inline]
    pub(super) fn new() -> Self {
        Self::default()
    }

    #[inline]
    fn is_empty(&self) -> bool {
        self.wakers.is_empty() && self.held.is_empty() && self.ends.is_empty()
    }

    pub(super) fn wake(&mut self, waker: Waker) {
        self.wakers.push(waker);
    }

    pub(super) fn dispose(&mut self, held: Option<Held>) {
        self.held.extend(held);
    }

    /// A queue pair that must be destroyed before its operations can end.
    fn end(&mut self, core: Arc<QueuePairCore>, kind: OpErrorKind) {
        self.ends.push((core, kind));
    }

    #[inline]
    pub(super) fn finish(self) {
        if !self.is_empty() {
            self.finish_slow();
        }
    }

    fn finish_slow(self) {
        for waker in self.wakers {
            waker.wake();
        }
        for (core, kind) in self.ends {
            core.shut_down(kind);
        }
        for (queue, kind) in self.abandons {
            queue.cq().abandon(&queue, kind, false);
        }
    }
}

/// What a completion queue has done so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct CompletionQueueCounters {
    /// Completions it holds at most.
    pub capacity: u32,
    /// Completions that the queues on it can produce at most.
    pub reserved: u32,
    /// Completions taken.
    pub completions: u64,
    /// Events asked for.
    pub arms: u64,
    /// Events taken from the channel.
    pub events: u64,
    /// Operations that wait now.
    pub waiting: u32,
    /// Rounds a hybrid wait may spin now.
    pub spin_rounds: u32,
}

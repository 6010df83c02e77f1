//! A completion queue and its work queues: takes completions and finishes their operations.

mod events;
mod wait;

use std::fmt;
use std::sync::{Arc, Weak};
use std::task::Waker;

use tokio::runtime;

use super::arm;
use super::busy_poll::Polled;
use super::completion_counters::CompletionQueueCounters;
use super::completion_mode::CompletionMode;
use super::reactor::Reactors;
use super::spin_budget::SpinBudget;
use super::wake_list::{Teardown, WakeList};
use super::work_queue::{DeviceQueue, WorkQueue};
use super::work_request::Limits;
use super::work_request_id::Owner;
use crate::dispatch::DirectQueue;
use crate::error::{LimitError, OpErrorKind, SetupError, VerbError};
use crate::sync::{AtomicU32, Mutex, MutexGuard, Ordering, lock, try_lock};
use crate::types::{TimestampedCompletion, WorkCompletion, WrId};
use crate::verbs::{Channel, Cq};

/// Maximum completions taken at once: spreads the cost of a poll, but keeps the lock short.
const BATCH: usize = 32;

const FIRST_BATCH: usize = 1;

/// Up to this number of work queues stay in the cache, and prefetching costs more than it saves.
const FEW: usize = 64;

/// Operations that may complete in a row before one yields to the runtime, as with Tokio's
/// resources.
const READY_BUDGET: usize = 128;

/// Errors of a resize that leave a queue of the old size, which works.
const CANNOT_GROW: [i32; 4] =
    [VerbError::EOPNOTSUPP, VerbError::ENOSYS, VerbError::ENOMEM, VerbError::EINVAL];

/// Aligned so that a busy-poll thread, which upgrades its weak reference in each round, writes to
/// no cache line of these fields.
#[repr(align(64))]
pub(crate) struct Drainer {
    mode: CompletionMode,
    /// Operations in flight that registered a waker or were abandoned, queued work requests,
    /// watchers for an idle work queue, and completion wakers.
    waiting: AtomicU32,
    /// The part of `waiting` that only waits for solicited messages, see [`Limits::solicited`].
    /// Increased under the lock of `state`.
    solicited: AtomicU32,
    drivers: AtomicU32,
    spin: SpinBudget,
    reactors: Reactors,
    state: Mutex<State>,
    /// `None` also for a queue with timestamps, whose completions are copied before dispatch.
    direct: Option<Arc<DirectQueue>>,
    cq: Cq,
    grows: bool,
    channel: Option<Channel>,
}

/// The state under the lock of the thread that takes completions.
struct State {
    completions: Vec<WorkCompletion>,
    /// Takes the place of `completions` if the queue has timestamps; otherwise empty.
    timestamped: Vec<TimestampedCompletion>,
    queues: Vec<Option<Attached>>,
    vacant: Vec<u32>,
    reserved: u32,
    request: arm::Request,
    completion_wakers: u32,
    spinning: Option<runtime::Id>,
    spun: u64,
    unacknowledged: u32,
    /// `completions[next..end]` is taken from the device and not yet dispatched. Empty while a task
    /// waits, and if the device's queue is read in place.
    next: usize,
    end: usize,
    ready_budget: usize,
    failed: Option<VerbError>,
    woken: WakeList,
    counters: CompletionQueueCounters,
}

impl State {
    #[inline]
    fn was_full(&mut self, taken: usize) -> bool {
        let full = taken == self.completions.len();
        if full && taken < BATCH {
            self.enlarge_batch();
        }
        full
    }

    /// Without prefetching, each completion of many work queues costs two cache misses in turn.
    #[inline]
    fn prefetch(&self, from: usize, to: usize) {
        if from + 1 < to && self.queues.len() > FEW {
            self.prefetch_queues(from, to);
        }
    }

    #[inline(never)]
    fn prefetch_queues(&self, from: usize, to: usize) {
        let completions = || self.completions.iter().take(to).skip(from);
        let queue = |wc: &WorkCompletion| {
            self.queues.get(Owner::of(wc.wr_id).0 as usize)?.as_ref().map(|it| &it.queue)
        };
        for queue in completions().filter_map(queue) {
            queue.prefetch();
        }
        for wc in completions() {
            if let Some(queue) = queue(wc) {
                queue.prefetch_slot(wc);
            }
        }
    }

    #[cold]
    fn enlarge_batch(&mut self) {
        self.completions.resize(BATCH.min(2 * self.completions.len()), WorkCompletion::EMPTY);
    }
}

struct Attached {
    queue: Arc<WorkQueue>,
    consumers: Vec<Weak<dyn Teardown>>,
    reserved: u32,
}

impl Drainer {
    /// If `grows`, the queue is resized when queue pairs need more entries.
    pub(super) fn new(cq: Cq, channel: Option<Channel>, mode: CompletionMode, grows: bool) -> Self {
        let is_timestamped = cq.is_timestamped();
        let timestamped = if is_timestamped { BATCH } else { 0 };
        Self {
            channel,
            grows,
            mode,
            waiting: AtomicU32::new(0),
            solicited: AtomicU32::new(0),
            drivers: AtomicU32::new(0),
            spin: SpinBudget::new(),
            reactors: Reactors::new(),
            state: Mutex::new(State {
                completions: vec![WorkCompletion::EMPTY; FIRST_BATCH],
                timestamped: vec![TimestampedCompletion::default(); timestamped],
                queues: Vec::new(),
                vacant: Vec::new(),
                reserved: 0,
                request: arm::Request::NONE,
                completion_wakers: 0,
                spinning: None,
                spun: 0,
                unacknowledged: 0,
                next: 0,
                end: 0,
                ready_budget: READY_BUDGET,
                failed: None,
                woken: WakeList::new(),
                counters: CompletionQueueCounters::default(),
            }),
            direct: if is_timestamped { None } else { cq.direct() },
            cq,
        }
    }

    pub(super) fn verbs(&self) -> &Cq {
        &self.cq
    }

    pub(crate) fn mode(&self) -> &CompletionMode {
        &self.mode
    }

    pub(super) fn counters(&self) -> CompletionQueueCounters {
        let state = lock(&self.state);
        CompletionQueueCounters {
            capacity: self.cq.capacity(),
            reserved: state.reserved,
            waiting: self.waiting.load(Ordering::Relaxed),
            spin_rounds: self.spin.rounds(),
            ..state.counters
        }
    }

    pub(crate) fn attach(
        self: &Arc<Self>,
        device: DeviceQueue,
        limits: Limits,
    ) -> Result<Arc<WorkQueue>, SetupError> {
        let mut state = lock(&self.state);
        if let Some(error) = state.failed {
            return Err(error.into());
        }
        self.ensure_free(state.reserved, limits.depth)?;
        let number = match state.vacant.pop() {
            Some(number) => number,
            None => {
                let number = state.queues.len() as u32;
                LimitError::check(
                    "work queues of the completion queue",
                    u64::from(number) + 1,
                    Owner::MAX.into(),
                )?;
                if state.queues.is_empty() {
                    state.queues.reserve_exact(1);
                }
                state.queues.push(None);
                number
            }
        };
        state.reserved += limits.depth;
        let queue = Arc::new(WorkQueue::new(Owner(number), device, limits, self.clone()));
        state.queues[number as usize] =
            Some(Attached { queue: queue.clone(), consumers: Vec::new(), reserved: limits.depth });
        Ok(queue)
    }

    /// Ensures that `asked` entries are not reserved. A queue that grows is resized to twice its
    /// size or the device's limit, so that this is rare, or if that fails, to what is needed.
    fn ensure_free(&self, reserved: u32, asked: u32) -> Result<(), SetupError> {
        let capacity = self.cq.capacity();
        let free = capacity.saturating_sub(reserved);
        let limit = self.cq.device().attr().max_cqe;
        let needed = reserved.saturating_add(asked);
        if asked <= free {
            return Ok(());
        }
        if self.grows && needed <= limit {
            let doubled = capacity.saturating_mul(2).clamp(needed, limit);
            let exact = (needed < doubled).then_some(needed);
            for wanted in [Some(doubled), exact].into_iter().flatten() {
                match self.cq.resize(wanted) {
                    Ok(()) => return Ok(()),
                    // The device does not resize queues, or memory is short.
                    Err(SetupError::Verb(error)) if CANNOT_GROW.contains(&error.errno) => {
                        rdma_provider::debug!(
                            %error,
                            cq = self.cq.id(),
                            capacity,
                            wanted,
                            "failed to resize completion queue"
                        );
                    }
                    Err(error) => return Err(error),
                }
            }
        }
        Err(SetupError::CompletionQueueFull { asked, free })
    }

    pub(super) fn set_queue_pair(
        &self,
        queue: &WorkQueue,
        queue_pair: Weak<dyn Teardown>,
    ) -> Result<(), VerbError> {
        // Under the lock, a failure either comes first or finds the queue pair.
        let state = lock(&self.state);
        if let Some(error) = state.failed {
            return Err(error);
        }
        queue.set_queue_pair(queue_pair);
        Ok(())
    }

    /// The buffers of a shared receive queue are free only after all consumers are gone.
    pub(super) fn add_consumer(
        &self,
        queue: &WorkQueue,
        core: &Arc<dyn Teardown>,
    ) -> Result<(), VerbError> {
        let mut state = lock(&self.state);
        if let Some(error) = state.failed {
            return Err(error);
        }
        if let Some(Some(attached)) = state.queues.get_mut(queue.owner().0 as usize) {
            attached.consumers.push(Arc::downgrade(core));
        }
        Ok(())
    }

    /// The last consumer to go ends the receives if this completion queue has failed.
    pub(super) fn remove_consumer(&self, queue: &Arc<WorkQueue>, core: &impl Teardown) {
        let mut state = lock(&self.state);
        let failed = state.failed;
        if let Some(Some(attached)) = state.queues.get_mut(queue.owner().0 as usize) {
            attached.consumers.retain(|consumer| !std::ptr::addr_eq(consumer.as_ptr(), core));
            if let Some(error) = failed.filter(|_| attached.consumers.is_empty()) {
                state.woken.shut_down(queue.clone(), OpErrorKind::CompletionQueue(error));
            }
        }
        self.release(state);
    }

    pub(super) fn abandon(&self, queue: &WorkQueue, kind: OpErrorKind, detach: bool) {
        let mut state = lock(&self.state);
        // Available completions are more precise than `kind`.
        while !queue.is_idle() && self.drain_batch(&mut state) {}
        queue.abandon(kind, &mut state.woken);
        let entry = &mut state.queues[queue.owner().0 as usize];
        let detached = if detach { entry.take() } else { None };
        if let Some(attached) = &detached {
            if queue.has_completion_waker() {
                state.completion_wakers -= 1;
                queue.remove_watcher();
            }
            state.reserved -= attached.reserved;
            state.vacant.push(queue.owner().0);
        }
        // Dropped without the lock.
        let device = detached.as_ref().and_then(|_| queue.close());
        let woken = std::mem::take(&mut state.woken);
        drop(state);
        drop((detached, device));
        woken.finish();
    }

    /// Excludes dispatch until the result is dropped, if entries are read in place.
    pub(super) fn exclude_dispatch(&self) -> Option<impl Sized + '_> {
        self.direct.is_some().then(|| lock(&self.state))
    }

    /// Does not release the lock in between.
    pub(super) fn drain_all(&self) {
        let mut state = lock(&self.state);
        while self.drain_batch(&mut state) {}
        self.release(state);
    }

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

    pub(super) fn process_packets(&self) -> bool {
        self.cq.device().process_packets()
    }

    fn drain_batch(&self, state: &mut State) -> bool {
        if let Some(direct) = &self.direct {
            let State { queues, woken, .. } = state;
            let found = direct.drain(BATCH, |wc| dispatch(queues, wc, woken));
            return self.count(state, found) == BATCH;
        }
        if self.cq.is_timestamped() {
            return self.drain_timestamped(state);
        }
        self.finish_remaining(state);
        let found = self.cq.poll_device(&mut state.completions[..]);
        let taken = self.count(state, found);
        taken > 0 && self.finish_batch(state, 0, taken)
    }

    #[cold]
    fn drain_timestamped(&self, state: &mut State) -> bool {
        let found = self.cq.poll_device_timestamped(&mut state.timestamped);
        let taken = self.count(state, found);
        let State { timestamped, queues, woken, .. } = state;
        for TimestampedCompletion { completion, timestamp } in timestamped.iter().take(taken) {
            if let Some(Some(attached)) = queues.get(Owner::of(completion.wr_id).0 as usize) {
                attached.queue.stamp(completion.wr_id, *timestamp);
            }
            dispatch(queues, completion, woken);
        }
        taken == BATCH
    }

    #[inline]
    fn finish_remaining(&self, state: &mut State) {
        let (next, end) = (std::mem::take(&mut state.next), std::mem::take(&mut state.end));
        if next < end {
            self.finish_batch(state, next, end);
        }
    }

    pub(super) fn dispatch_available(&self) -> bool {
        if !self.mode.arms() {
            return false;
        }
        let mut state = lock(&self.state);
        // A task that took the first completion of a batch may await nothing more, and never find
        // the others.
        let (taken, before) = (state.next < state.end, state.counters.completions);
        while self.drain_batch(&mut state) {}
        let any = taken || state.counters.completions != before;
        self.release(state);
        any
    }

    fn count(&self, state: &mut State, found: Result<usize, VerbError>) -> usize {
        let found =
            found.and_then(|taken| if taken > 0 { Ok(taken) } else { self.cq.after_empty_poll() });
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

    #[inline(never)]
    fn finish_batch(&self, state: &mut State, from: usize, taken: usize) -> bool {
        state.prefetch(from, taken);
        let State { completions, queues, woken, .. } = &mut *state;
        for wc in completions.iter().take(taken).skip(from) {
            dispatch(queues, wc, woken);
        }
        state.was_full(taken)
    }

    /// Marks the queue as dead (overrun or lost device) and ends its work, because nothing will
    /// complete.
    #[cold]
    fn fail(&self, state: &mut State, error: VerbError) {
        if state.failed.replace(error).is_some() {
            return;
        }
        let woken = &mut state.woken;
        rdma_provider::error!(
            cq = self.cq.id(),
            %error,
            "completion queue failed; failing all its work requests"
        );
        for attached in state.queues.iter().flatten() {
            match attached.queue.queue_pair() {
                Some(core) => woken.shut_down(core, OpErrorKind::CompletionQueue(error)),
                None if attached.queue.is_shared() && attached.consumers.is_empty() => {
                    woken.shut_down(attached.queue.clone(), OpErrorKind::CompletionQueue(error));
                }
                // The last consumer ends it; see `remove_consumer`.
                None if attached.queue.is_shared() => {
                    for core in attached.consumers.iter().filter_map(Weak::upgrade) {
                        woken.shut_down(core, OpErrorKind::CompletionQueue(error));
                    }
                }
                // Another thread is destroying the queue pair, and ends its work.
                None => {}
            }
        }
    }

    #[inline]
    fn release(&self, state: MutexGuard<'_, State>) {
        if !state.woken.is_empty() {
            Self::release_and_wake(state);
        }
    }

    #[cold]
    fn release_and_wake(mut state: MutexGuard<'_, State>) {
        let woken = std::mem::take(&mut state.woken);
        drop(state);
        woken.finish();
    }

    pub(super) fn add_waiter(&self) {
        self.waiting.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn set_completion_waker(self: &Arc<Self>, queue: &WorkQueue, waker: Waker) {
        let mut state = lock(&self.state);
        let attached = state.queues.get(queue.owner().0 as usize).and_then(Option::as_ref);
        if attached.is_none_or(|attached| !std::ptr::eq(&*attached.queue, queue)) {
            return;
        }
        queue.set_completion_waker(waker);
        state.completion_wakers += 1;
        self.add_waiter();
        self.solicited.fetch_add(u32::from(queue.limits.solicited), Ordering::Relaxed);
        drop(state);
        self.ensure_watched();
    }

    #[inline]
    pub(super) fn remove_waiter(&self) {
        self.waiting.fetch_sub(1, Ordering::Relaxed);
    }

    #[inline]
    pub(super) fn remove_watcher(&self, solicited: bool) {
        if solicited {
            self.solicited.fetch_sub(1, Ordering::Relaxed);
        }
        self.remove_waiter();
    }

    pub(super) fn begin_driving(&self) {
        self.drivers.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn is_driven(&self) -> bool {
        self.drivers.load(Ordering::Relaxed) > 0
    }

    pub(crate) fn failure(&self) -> Option<VerbError> {
        lock(&self.state).failed
    }

    pub(super) fn end_driving(&self) {
        self.drivers.fetch_sub(1, Ordering::Relaxed);
    }
}

#[inline]
fn dispatch(queues: &[Option<Attached>], wc: &WorkCompletion, woken: &mut WakeList) {
    match queues.get(Owner::of(wc.wr_id).0 as usize) {
        Some(Some(attached)) => attached.queue.complete(wc, woken),
        _ => ignored(wc.wr_id),
    }
}

#[cold]
fn ignored(wr_id: WrId) {
    rdma_provider::warn!(%wr_id, "ignored a completion of a destroyed queue");
}

impl Polled for Drainer {
    #[inline]
    fn glance(&self) -> Option<bool> {
        let empty = self.cq.is_empty()?;
        Some(!empty || self.process_packets())
    }

    fn poll(&self, left_out: u32) -> bool {
        if left_out > 0 {
            self.cq.count_empty_polls(left_out);
        }
        let Some(mut state) = try_lock(&self.state) else { return true };
        let before = state.counters.completions;
        self.drain_batch(&mut state);
        let any = state.counters.completions != before;
        self.release(state);
        any || self.process_packets()
    }
}

impl Drop for Drainer {
    fn drop(&mut self) {
        // `ibv_destroy_cq(3)` waits for the acknowledgements.
        let state = lock(&self.state);
        if state.unacknowledged > 0 {
            self.cq.acknowledge(state.unacknowledged);
        }
    }
}

impl fmt::Debug for Drainer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Drainer")
            .field("cq", &self.cq)
            .field("mode", &self.mode)
            .finish_non_exhaustive()
    }
}

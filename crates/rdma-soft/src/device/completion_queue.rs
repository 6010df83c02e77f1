//! Completion queues.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use rdma_provider::locks::Mutex;

use rdma_provider::types::{AsyncEvent, Qpn, Timestamp, TimestampedCompletion, WorkCompletion};

use super::completion_channel::{Channel, Subscriber};
use super::events::Events;
use super::shared_receive_queue::SrqInner;
use crate::net::scheduler::Scheduler;
use crate::ring::Ring;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Arm {
    Off,
    Solicited,
    Next,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Health {
    Good,
    /// The device is lost: polling fails once the queue is empty.
    Lost,
    Overrun,
}

/// Positions up to which completions of a queue pair are polled and slots are free.
#[derive(Debug, Default)]
pub(crate) struct Polled {
    pub(crate) send: AtomicU32,
    pub(crate) recv: AtomicU32,
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum Frees {
    /// All send slots before this position.
    Send(u32),
    Recv(u32),
    /// One slot of the shared receive queue.
    Shared,
}

#[derive(Clone, Copy)]
pub(crate) struct Entry {
    completion: WorkCompletion,
    owner: u32,
    frees: Frees,
}

impl Default for Entry {
    fn default() -> Self {
        Self { completion: WorkCompletion::default(), owner: 0, frees: Frees::Shared }
    }
}

struct Attached {
    qpn: Qpn,
    polled: Arc<Polled>,
    srq: Option<Arc<SrqInner>>,
}

/// The times of the entries of a queue with timestamps, by the clock of the network.
struct Stamps {
    clock: Arc<Scheduler>,
    /// Of the entries in order, after those of entries that were polled without their times.
    times: VecDeque<u64>,
}

impl Stamps {
    /// Forgets the times of entries that were polled without them.
    fn trim(&mut self, entries: usize) {
        let polled = self.times.len().saturating_sub(entries);
        self.times.drain(..polled);
    }
}

pub(crate) struct State {
    pub(crate) entries: Ring<Entry>,
    arm: Arm,
    stamps: Option<Stamps>,
    /// The queue is armed or has timestamps.
    watched: bool,
    pub(crate) health: Health,
    attached: Vec<Option<Attached>>,
    vacant: Vec<u32>,
    pub(crate) counters: CqCounters,
}

/// Counters of a completion queue.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CqCounters {
    /// Completions added to the queue.
    pub completions: u64,
    /// Events raised on its channel.
    pub events: u64,
    /// Completions lost because the queue was full.
    pub lost: u64,
}

impl State {
    pub(crate) fn arm(&mut self, wanted: Arm) {
        // Arming for solicited completions does not downgrade an arm for all.
        self.arm = self.arm.max(wanted);
        self.watched = true;
    }

    /// Returns true if a poll fails: after an overrun, and on a lost device without entries.
    pub(crate) fn is_exhausted(&self) -> bool {
        match self.health {
            Health::Good => false,
            Health::Lost => self.entries.is_empty(),
            Health::Overrun => true,
        }
    }

    pub(crate) const fn has_stamps(&self) -> bool {
        self.stamps.is_some()
    }

    /// Takes entries like [`take`](Self::take), with their times.
    pub(crate) fn take_stamped(&mut self, out: &mut [TimestampedCompletion]) -> usize {
        let before = self.entries.len();
        if let Some(stamps) = &mut self.stamps {
            stamps.trim(before);
        }
        for (count, target) in out.iter_mut().enumerate() {
            if self.take(std::slice::from_mut(&mut target.completion)) == 0 {
                return count;
            }
            let time = self.stamps.as_mut().and_then(|stamps| stamps.times.pop_front());
            let succeeded = target.completion.status.is_success();
            target.timestamp = Timestamp(time.filter(|_| succeeded).unwrap_or(0));
        }
        out.len()
    }

    /// Returns the entry count, at least 1 for a failed queue so that polling returns the error.
    pub(crate) fn left(&self) -> usize {
        self.entries.len().max(usize::from(self.health != Health::Good))
    }

    #[inline]
    pub(crate) fn take(&mut self, out: &mut [WorkCompletion]) -> usize {
        let mut count = 0;
        for target in out {
            let Some(entry) = self.entries.front() else { break };
            if let Some(Some(owner)) = self.attached.get(entry.owner as usize) {
                match entry.frees {
                    // Release: a poster that sees the slot free also sees its work as done.
                    Frees::Send(position) => owner.polled.send.store(position, Ordering::Release),
                    Frees::Recv(position) => owner.polled.recv.store(position, Ordering::Release),
                    Frees::Shared => {
                        if let Some(srq) = &owner.srq {
                            srq.release();
                        }
                    }
                }
            }
            *target = entry.completion;
            self.entries.pop();
            count += 1;
        }
        count
    }
}

pub(crate) struct CqInner {
    pub(crate) id: u64,
    /// Changed under the lock of the state.
    pub(crate) capacity: AtomicU32,
    events: Arc<Events>,
    pub(crate) channel: Option<(Channel, Arc<Subscriber>)>,
    /// Number of entries: polling an empty queue takes no lock.
    pub(crate) waiting: AtomicUsize,
    pub(crate) state: Mutex<State>,
}

impl fmt::Debug for CqInner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CompletionQueue")
            .field("id", &self.id)
            .field("capacity", &self.capacity)
            .field("waiting", &self.waiting)
            .finish_non_exhaustive()
    }
}

/// The completion did not fit: the queue and its queue pairs become unusable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Overrun;

impl CqInner {
    pub(crate) fn new(
        id: u64,
        capacity: u32,
        events: &Arc<Events>,
        channel: Option<&Channel>,
        cookie: u64,
        clock: Option<&Arc<Scheduler>>,
    ) -> Arc<Self> {
        let channel = channel.map(|channel| {
            (channel.clone(), Arc::new(Subscriber { cookie, unacknowledged: AtomicU32::new(0) }))
        });
        Arc::new(Self {
            id,
            capacity: AtomicU32::new(capacity),
            events: Arc::clone(events),
            channel,
            waiting: AtomicUsize::new(0),
            state: Mutex::new(State {
                entries: Ring::new(),
                arm: Arm::Off,
                watched: clock.is_some(),
                stamps: clock.map(|clock| Stamps { clock: clock.clone(), times: VecDeque::new() }),
                health: Health::Good,
                attached: Vec::new(),
                vacant: Vec::new(),
                counters: CqCounters::default(),
            }),
        })
    }

    #[inline]
    fn capacity(&self) -> usize {
        self.capacity.load(Ordering::Relaxed) as usize
    }

    /// Changes the capacity unless more completions wait.
    pub(crate) fn resize(&self, capacity: u32) -> bool {
        let state = self.state.lock();
        let fits = state.entries.len() <= capacity as usize;
        if fits {
            self.capacity.store(capacity, Ordering::Relaxed);
        }
        fits
    }

    /// Appends a completion. `solicited` ones also fire an arm for solicited events.
    #[inline(always)]
    pub(crate) fn push(
        &self,
        owner: u32,
        frees: Frees,
        completion: &WorkCompletion,
        solicited: bool,
    ) -> Result<(), Overrun> {
        let mut state = self.state.lock();
        let state = &mut *state;
        if state.health == Health::Overrun || state.entries.len() >= self.capacity() {
            state.counters.lost += 1;
            let first = std::mem::replace(&mut state.health, Health::Overrun) != Health::Overrun;
            return if first { Err(Overrun) } else { Ok(()) };
        }
        let entry = state.entries.push_slot();
        entry.completion = *completion;
        entry.owner = owner;
        entry.frees = frees;
        state.counters.completions += 1;
        // Release pairs with the acquire in `poll`; the lock orders the rest.
        self.waiting.store(state.entries.len(), Ordering::Release);
        if state.watched {
            self.stamp_and_fire(state, solicited || !completion.status.is_success());
        }
        Ok(())
    }

    #[cold]
    fn stamp_and_fire(&self, state: &mut State, solicited: bool) {
        if let Some(stamps) = &mut state.stamps {
            stamps.trim(state.entries.len() - 1);
            stamps.times.push_back(stamps.clock.now());
        }
        self.fire(state, solicited);
    }

    #[cold]
    fn fire(&self, state: &mut State, solicited: bool) {
        if state.arm == Arm::Next || solicited && state.arm != Arm::Off {
            state.arm = Arm::Off;
            state.watched = state.has_stamps();
            if let Some((channel, subscriber)) = &self.channel {
                state.counters.events += 1;
                channel.0.push(Arc::clone(subscriber));
            }
        }
    }

    /// Attaches a queue pair and returns its index.
    pub(crate) fn attach(
        &self,
        qpn: Qpn,
        polled: &Arc<Polled>,
        srq: Option<&Arc<SrqInner>>,
    ) -> u32 {
        let attached = Attached { qpn, polled: Arc::clone(polled), srq: srq.cloned() };
        let mut state = self.state.lock();
        if let Some(index) = state.vacant.pop() {
            state.attached[index as usize] = Some(attached);
            index
        } else {
            if state.attached.is_empty() {
                state.attached.reserve_exact(1);
            }
            state.attached.push(Some(attached));
            state.attached.len() as u32 - 1
        }
    }

    /// Removes completions of a destroyed or reset queue pair, as mlx5 does.
    pub(crate) fn purge(&self, owner: u32) {
        let mut state = self.state.lock();
        let state = &mut *state;
        let shared = state
            .attached
            .get(owner as usize)
            .and_then(Option::as_ref)
            .and_then(|it| it.srq.as_ref());
        let mut times = None;
        if let Some(stamps) = &mut state.stamps {
            stamps.trim(state.entries.len());
            times = Some((std::mem::take(&mut stamps.times), &mut stamps.times));
        }
        state.entries.retain(|entry| {
            let keep = entry.owner != owner;
            if let Some((all, kept)) = &mut times {
                kept.extend(all.pop_front().filter(|_| keep));
            }
            if let (false, Frees::Shared, Some(srq)) = (keep, entry.frees, shared) {
                srq.release();
            }
            keep
        });
        self.waiting.store(state.left(), Ordering::Release);
    }

    /// Makes polling fail once empty and notifies waiters, after device loss and all flushes.
    pub(crate) fn mark_lost(&self) {
        let mut state = self.state.lock();
        let state = &mut *state;
        if state.health == Health::Good {
            state.health = Health::Lost;
        }
        self.waiting.store(state.left(), Ordering::Release);
        self.fire(state, true);
    }

    pub(crate) fn detach(&self, owner: u32) {
        self.purge(owner);
        let mut state = self.state.lock();
        if state.attached.get_mut(owner as usize).and_then(Option::take).is_some() {
            state.vacant.push(owner);
        }
    }

    /// Returns the attached queue pairs in numerical order.
    pub(crate) fn queue_pairs(&self) -> Vec<Qpn> {
        let mut all: Vec<_> =
            self.state.lock().attached.iter().flatten().map(|it| it.qpn).collect();
        all.sort_unstable();
        all.dedup();
        all
    }

    pub(crate) fn raise_error(&self) {
        self.events.raise(AsyncEvent::CqError { cq: self.id });
    }
}

//! What happens later: timers, deliveries and the rest of long transfers.
//!
//! One queue ordered by time, then by the order of entry. A thread works it off in real time; it is
//! started with the first job, so a network on which everything succeeds at once never has one. In
//! virtual time [`Scheduler::step`] does, and the clock is the time of the last job.

use std::cmp::Ordering as Compare;
use std::collections::BinaryHeap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};

use super::DeviceInner;
use super::pump::Half;
use super::queue_pair::QpInner;
use crate::cm::Manager;
use crate::dc::DctInner;
use crate::net::network::Delivery;
use crate::net::udp::PeerLink;

/// Something to do. Holds nothing alive.
#[derive(Debug)]
pub(crate) enum Job {
    /// A deadline of the requester has come.
    Timer(Weak<QpInner>),
    /// More packets of the requester than one slice took.
    Continue(Weak<QpInner>),
    /// Its turn has come on the way to the peer.
    Enter(Weak<QpInner>),
    /// Somebody waits long for the way to a peer.
    TurnPage(Weak<PeerLink>),
    /// More replies of the responder than one slice took.
    Reply(Weak<QpInner>),
    /// More replies of the sessions of a DC target than one slice took.
    TargetReply(Weak<DctInner>),
    /// A packet arrives.
    Deliver(Box<Delivery>),
    /// A deadline of the connection manager has come.
    ConnectionTimer(Weak<DeviceInner>),
}

impl Job {
    fn run(self) {
        match self {
            Self::Timer(qp) => {
                if let Some(qp) = qp.upgrade() {
                    qp.on_timer();
                }
            }
            Self::Continue(qp) => {
                if let Some(qp) = qp.upgrade() {
                    qp.on_continue();
                }
            }
            Self::Enter(qp) => {
                if let Some(qp) = qp.upgrade() {
                    qp.answer(Half::Sender);
                }
            }
            Self::TurnPage(link) => {
                if let Some(link) = link.upgrade() {
                    link.on_tick();
                }
            }
            Self::Reply(qp) => {
                if let Some(qp) = qp.upgrade() {
                    qp.on_reply_turn();
                }
            }
            Self::TargetReply(target) => {
                if let Some(target) = target.upgrade() {
                    target.on_reply_turn();
                }
            }
            Self::Deliver(delivery) => delivery.run(),
            Self::ConnectionTimer(device) => {
                if let Some(device) = device.upgrade() {
                    Manager::on_timer(&device);
                }
            }
        }
    }
}

#[derive(Debug)]
struct Entry {
    at: u64,
    sequence: u64,
    job: Job,
}

impl PartialEq for Entry {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Compare::Equal
    }
}

impl Eq for Entry {}

impl PartialOrd for Entry {
    fn partial_cmp(&self, other: &Self) -> Option<Compare> {
        Some(self.cmp(other))
    }
}

impl Ord for Entry {
    /// Earliest is greatest: `BinaryHeap` gives the greatest first.
    fn cmp(&self, other: &Self) -> Compare {
        (other.at, other.sequence).cmp(&(self.at, self.sequence))
    }
}

#[derive(Debug, Default)]
struct State {
    heap: BinaryHeap<Entry>,
    sequence: u64,
    thread: bool,
    stopped: bool,
}

#[derive(Debug)]
enum Clock {
    Real(Instant),
    Virtual(AtomicU64),
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Scheduler {
    clock: Clock,
    state: Mutex<State>,
    changed: Condvar,
}

impl Scheduler {
    pub(crate) fn real() -> Arc<Self> {
        Self::with(Clock::Real(Instant::now()))
    }

    pub(crate) fn virtual_time() -> Arc<Self> {
        Self::with(Clock::Virtual(AtomicU64::new(0)))
    }

    fn with(clock: Clock) -> Arc<Self> {
        Arc::new(Self { clock, state: Mutex::default(), changed: Condvar::new() })
    }

    /// Nanoseconds since the network began.
    pub(crate) fn now(&self) -> u64 {
        match &self.clock {
            // 2^64 ns are 584 years.
            Clock::Real(start) => start.elapsed().as_nanos() as u64,
            Clock::Virtual(now) => now.load(Ordering::Relaxed),
        }
    }

    pub(crate) const fn is_virtual(&self) -> bool {
        matches!(self.clock, Clock::Virtual(_))
    }

    /// Does `job` at time `at`, or as soon after as possible.
    pub(crate) fn schedule(self: &Arc<Self>, at: u64, job: Job) {
        let mut state = self.state.lock();
        if state.stopped {
            return;
        }
        let sequence = state.sequence;
        state.sequence += 1;
        let earliest = state.heap.peek().is_none_or(|first| at < first.at);
        state.heap.push(Entry { at, sequence, job });
        if self.is_virtual() {
            return;
        }
        if !state.thread {
            let scheduler = Arc::clone(self);
            let spawned = std::thread::Builder::new()
                .name("rdma-soft".into())
                .spawn(move || scheduler.work());
            match spawned {
                Ok(_) => state.thread = true,
                // Tried again with the next job; until then peers see a very slow device.
                Err(error) => {
                    tracing::error!(%error, "the software network cannot start its thread")
                }
            }
        } else if earliest {
            self.changed.notify_one();
        }
    }

    /// Ends the thread and forgets what was to come.
    pub(crate) fn stop(&self) {
        let forgotten = {
            let mut state = self.state.lock();
            state.stopped = true;
            std::mem::take(&mut state.heap)
        };
        drop(forgotten);
        self.changed.notify_all();
    }

    /// True if nothing is to come.
    pub(crate) fn is_idle(&self) -> bool {
        self.state.lock().heap.is_empty()
    }

    /// What is to come.
    #[cfg(test)]
    pub(crate) fn pending(&self) -> usize {
        self.state.lock().heap.len()
    }

    fn work(&self) {
        let mut state = self.state.lock();
        while !state.stopped {
            let now = self.now();
            let wait = match state.heap.peek() {
                Some(first) if first.at <= now => None,
                Some(first) => Some(first.at - now),
                None => Some(u64::MAX),
            };
            match wait {
                None => {
                    if let Some(entry) = state.heap.pop() {
                        MutexGuard::unlocked(&mut state, || entry.job.run());
                    }
                }
                Some(u64::MAX) => self.changed.wait(&mut state),
                Some(nanoseconds) => {
                    self.changed.wait_for(&mut state, Duration::from_nanos(nanoseconds));
                }
            }
        }
    }

    /// Virtual time only: does the next job and moves the clock to it. False if there is none, or none
    /// until `limit`.
    pub(crate) fn step(&self, limit: u64) -> bool {
        let Clock::Virtual(clock) = &self.clock else { return false };
        let entry = {
            let mut state = self.state.lock();
            if state.heap.peek().is_none_or(|first| first.at > limit) {
                return false;
            }
            state.heap.pop()
        };
        let Some(entry) = entry else { return false };
        clock.fetch_max(entry.at, Ordering::Relaxed);
        entry.job.run();
        true
    }
}

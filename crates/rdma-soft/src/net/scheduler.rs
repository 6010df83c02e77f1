//! The scheduled jobs of a network: timers, packet deliveries, and the rest of work that was
//! interrupted so that queue pairs alternate.
//!
//! Jobs run in order of time, then of insertion, without the scheduler's lock. In real time a
//! thread runs them, started with the first job. In virtual time [`Scheduler::step`] runs them, and
//! the clock shows the time of the last job, or of another clock that is ahead of it.

use std::cmp::Ordering as Compare;
use std::collections::BinaryHeap;
use std::fmt;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::task::Waker;
use std::time::{Duration, Instant};

use rdma_provider::later;
use rdma_provider::locks::{Condvar, Mutex, MutexGuard};

/// An object that has scheduled tasks.
pub(crate) trait Scheduled: fmt::Debug + Send + Sync {
    fn run(self: Arc<Self>, task: Task);
}

/// What an object does at its time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Task {
    /// Processes timeouts.
    Timer,
    /// Sends further packets of a requester that has used up its slice.
    Continue,
    /// Sends the packets of a requester that was queued for its path's window and is now admitted.
    Admitted,
    /// Sends further replies of a responder that has used up its slice.
    Reply,
}

/// A scheduled action. Its references are weak, so it does not keep the network alive.
pub(crate) enum Job {
    Run(Weak<dyn Scheduled>, Task),
    /// Delivers a packet.
    Deliver(Box<dyn FnOnce() + Send>),
    /// Wakes the task of an [`Alarm`](crate::Alarm), unless that was dropped.
    Alarm(Weak<Mutex<Option<Waker>>>),
}

impl Job {
    fn run(self) {
        match self {
            Self::Run(object, task) => {
                if let Some(object) = object.upgrade() {
                    object.run(task);
                }
            }
            Self::Deliver(deliver) => deliver(),
            Self::Alarm(alarm) => {
                let waker = alarm.upgrade().and_then(|alarm| alarm.lock().take());
                waker.into_iter().for_each(Waker::wake);
            }
        }
    }

    /// Returns true for an alarm that was dropped.
    fn is_cancelled(&self) -> bool {
        matches!(self, Self::Alarm(alarm) if alarm.strong_count() == 0)
    }
}

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
    /// Makes the earliest entry the greatest, which `BinaryHeap` pops first.
    fn cmp(&self, other: &Self) -> Compare {
        (other.at, other.sequence).cmp(&(self.at, self.sequence))
    }
}

#[derive(Default)]
struct State {
    heap: BinaryHeap<Entry>,
    sequence: u64,
    thread: bool,
    stopped: bool,
    /// Woken by the next job, in virtual time.
    driver: Option<Waker>,
}

/// The number of jobs for which memory is always kept.
const KEPT: usize = 64;

impl State {
    /// Returns the time of the next job.
    fn next(&mut self) -> Option<u64> {
        while let Some(first) = self.heap.peek() {
            if !first.job.is_cancelled() {
                return Some(first.at);
            }
            self.pop();
        }
        None
    }

    fn pop(&mut self) -> Option<Entry> {
        let entry = self.heap.pop();
        let needed = 2 * self.heap.len().max(KEPT);
        if self.heap.capacity() >= 2 * needed {
            // Rare: half as many jobs are then left as at the last change of the capacity.
            self.heap.shrink_to(needed);
        }
        entry
    }
}

enum Clock {
    Real,
    Virtual { now: AtomicU64, followed: Mutex<Option<Source>> },
}

/// A clock that virtual time follows.
type Source = Box<dyn Fn() -> Duration + Send>;

pub(crate) struct Scheduler {
    start: Instant,
    clock: Clock,
    state: Mutex<State>,
    changed: Condvar,
}

impl fmt::Debug for Scheduler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scheduler").field("now", &self.now()).finish_non_exhaustive()
    }
}

impl Scheduler {
    pub(crate) fn real() -> Arc<Self> {
        Self::with(Clock::Real)
    }

    pub(crate) fn virtual_time() -> Arc<Self> {
        Self::with(Clock::Virtual { now: AtomicU64::new(0), followed: Mutex::new(None) })
    }

    fn with(clock: Clock) -> Arc<Self> {
        let start = Instant::now();
        Arc::new(Self { start, clock, state: Mutex::default(), changed: Condvar::new() })
    }

    /// Returns the instant of age 0.
    pub(crate) const fn began(&self) -> Instant {
        self.start
    }

    /// Returns the nanoseconds since the network was created.
    pub(crate) fn now(&self) -> u64 {
        match &self.clock {
            // 2^64 ns are 584 years.
            Clock::Real => self.start.elapsed().as_nanos() as u64,
            Clock::Virtual { now, followed } => {
                if let Some(followed) = &*followed.lock() {
                    now.fetch_max(followed().as_nanos() as u64, Ordering::Relaxed);
                }
                now.load(Ordering::Relaxed)
            }
        }
    }

    /// Lets virtual time follow another clock, which returns the network's age.
    pub(crate) fn follow(&self, source: Option<Source>) {
        if let Clock::Virtual { followed, .. } = &self.clock {
            *followed.lock() = source;
        }
    }

    pub(crate) const fn is_virtual(&self) -> bool {
        matches!(self.clock, Clock::Virtual { .. })
    }

    /// Starts the thread, unless it runs or time is virtual.
    pub(crate) fn start(self: &Arc<Self>) -> io::Result<()> {
        let mut state = self.state.lock();
        if !state.thread && !self.is_virtual() {
            let scheduler = Arc::clone(self);
            let thread = std::thread::Builder::new().name("rdma-soft".into());
            thread.spawn(move || scheduler.work())?;
            state.thread = true;
        }
        Ok(())
    }

    /// Schedules a task of an object, unless that is dropped before.
    pub(crate) fn run_at(&self, at: u64, object: &Arc<impl Scheduled + 'static>, task: Task) {
        let object: Weak<_> = Arc::downgrade(object);
        self.schedule(at, Job::Run(object, task));
    }

    pub(crate) fn schedule(&self, at: u64, job: Job) {
        let mut state = self.state.lock();
        if state.stopped {
            return;
        }
        let sequence = state.sequence;
        state.sequence += 1;
        let earliest = state.heap.peek().is_none_or(|first| at < first.at);
        state.heap.push(Entry { at, sequence, job });
        if self.is_virtual() {
            if let Some(driver) = state.driver.take() {
                later::wake([driver]);
            }
            return;
        }
        if earliest {
            self.changed.notify_one();
        }
    }

    /// Drops all scheduled jobs and ends the thread after its current job.
    pub(crate) fn stop(&self) {
        let dropped = {
            let mut state = self.state.lock();
            state.stopped = true;
            std::mem::take(&mut state.heap)
        };
        drop(dropped);
        self.changed.notify_all();
    }

    /// Returns true if no job is scheduled; one may be running.
    pub(crate) fn is_idle(&self) -> bool {
        self.state.lock().heap.is_empty()
    }

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
                    if let Some(entry) = state.pop() {
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

    /// Advances virtual time to the next job and runs it. Returns false if no job is due by
    /// `limit`, and always in real time.
    pub(crate) fn step(&self, limit: u64) -> bool {
        let Clock::Virtual { now, .. } = &self.clock else { return false };
        let entry = {
            let mut state = self.state.lock();
            if state.next().is_none_or(|at| at > limit) {
                return false;
            }
            state.pop()
        };
        let Some(entry) = entry else { return false };
        now.fetch_max(entry.at, Ordering::Relaxed);
        entry.job.run();
        true
    }

    /// Returns the time of the next job. Wakes `driver` when another job is scheduled, in virtual
    /// time.
    pub(crate) fn next(&self, driver: &Waker) -> Option<u64> {
        let driver = driver.clone();
        let mut state = self.state.lock();
        let (before, next) = (state.driver.replace(driver), state.next());
        drop(state);
        drop(before);
        next
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_follows_the_number_of_jobs() {
        let scheduler = Scheduler::virtual_time();
        let schedule =
            |count| (0..count).for_each(|at| scheduler.schedule(at, Job::Deliver(Box::new(|| ()))));
        for count in [100, 10_000, 100] {
            schedule(count);
            while scheduler.step(u64::MAX) {
                let State { heap, .. } = &*scheduler.state.lock();
                let (left, capacity) = (heap.len().max(KEPT), heap.capacity());
                assert!(capacity < 4 * left, "{capacity} for {left}");
            }
        }
    }
}

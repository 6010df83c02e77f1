//! Determines which thread receives: the endpoint's thread, or a caller that would wait for it.
//!
//! The holder of the [`Inbox`] lock receives, so packets stay in order. The endpoint's thread holds
//! it while it sleeps in the socket. A caller that finds it locked sets `wanted`; the thread then
//! unlocks it and stands by. Every [`POLL_INTERVAL`] it checks for packets left in the socket, so
//! progress never depends on callers.
//!
//! Every packet is noticed: a caller sets `wanted` after its packet has arrived, then tries again.
//! A holder checks `wanted` after receiving, and only a new holder clears it.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;
use std::time::Duration;

use rdma_provider::locks::{Mutex, MutexGuard};

use super::socket::Inbox;

/// Maximum time that a packet waits while the thread stands by.
const POLL_INTERVAL: Duration = Duration::from_millis(1);
/// Idle checks until the thread sleeps in the socket again.
const IDLE_POLLS: u32 = 50;

pub(super) struct InboxLock {
    inbox: Mutex<Inbox>,
    /// A caller found the inbox locked.
    wanted: AtomicBool,
    /// Receives by callers.
    caller_receives: AtomicU32,
    /// A caller has stopped receiving, so the thread must take over.
    callers_stopped: AtomicBool,
    standing_by: AtomicBool,
}

impl InboxLock {
    pub(super) fn new() -> Self {
        Self {
            inbox: Mutex::new(Inbox::new()),
            wanted: AtomicBool::new(false),
            caller_receives: AtomicU32::new(0),
            callers_stopped: AtomicBool::new(false),
            standing_by: AtomicBool::new(false),
        }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Inbox> {
        let inbox = self.inbox.lock();
        self.wanted.store(false, Ordering::SeqCst);
        inbox
    }

    /// Locks the inbox for a caller, or sets `wanted`.
    pub(super) fn try_lock(&self) -> Option<MutexGuard<'_, Inbox>> {
        let inbox = self.inbox.try_lock().or_else(|| {
            self.wanted.store(true, Ordering::SeqCst);
            self.inbox.try_lock()
        })?;
        self.wanted.store(false, Ordering::SeqCst);
        Some(inbox)
    }

    /// Returns true if a caller needs the inbox, or did. Holders check after receiving.
    pub(super) fn is_wanted(&self) -> bool {
        self.wanted.load(Ordering::SeqCst)
    }

    pub(super) fn note_received(&self) {
        self.caller_receives.fetch_add(1, Ordering::Relaxed);
    }

    /// Leaves reception to the thread; returns true if it must be unparked.
    pub(super) fn stop_processing(&self) -> bool {
        self.callers_stopped.store(true, Ordering::SeqCst);
        self.standing_by.load(Ordering::SeqCst)
    }

    /// Lets callers receive until `closed`, one stops, packets are left, or [`IDLE_POLLS`] have
    /// passed.
    pub(super) fn stand_by(&self, closed: impl Fn() -> bool, readable: impl Fn() -> bool) {
        let mut idle = 0;
        let mut receives = self.caller_receives.load(Ordering::Relaxed);
        self.standing_by.store(true, Ordering::SeqCst);
        while !closed() && !self.callers_stopped.swap(false, Ordering::SeqCst) && idle < IDLE_POLLS
        {
            thread::park_timeout(POLL_INTERVAL);
            let now = self.caller_receives.load(Ordering::Relaxed);
            if now != receives {
                (receives, idle) = (now, 0);
            } else if readable() {
                break;
            } else {
                idle += 1;
            }
        }
        self.standing_by.store(false, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn caller_that_finds_the_inbox_locked_is_wanted_until_the_next_holder() {
        let lock = InboxLock::new();
        let thread = lock.lock();
        assert!(!lock.is_wanted());
        assert!(lock.try_lock().is_none() && lock.is_wanted());
        drop(thread);
        assert!(lock.try_lock().is_some() && !lock.is_wanted());
        lock.wanted.store(true, Ordering::SeqCst);
        drop(lock.lock());
        assert!(!lock.is_wanted(), "the thread receives");
    }

    /// Returns how often a thread that stands by finds no packet before it receives again.
    fn idle_checks(lock: &InboxLock, closed: impl Fn() -> bool, left_after: u32) -> u32 {
        let checks = Cell::new(0);
        lock.stand_by(closed, || {
            checks.set(checks.get() + 1);
            checks.get() > left_after
        });
        checks.get().min(left_after)
    }

    #[test]
    fn thread_receives_again_for_left_packets_idle_callers_and_a_caller_that_stops() {
        let lock = InboxLock::new();
        assert_eq!(idle_checks(&lock, || false, 3), 3, "then packets are left");
        assert_eq!(idle_checks(&lock, || false, u32::MAX), IDLE_POLLS);
        assert_eq!(idle_checks(&lock, || true, u32::MAX), 0, "closed");

        // While a caller receives, the thread is not needed, although packets are pending.
        let rounds = Cell::new(0);
        let receives = || {
            rounds.set(rounds.get() + 1);
            if rounds.get() <= 2 * IDLE_POLLS {
                lock.note_received();
            }
            false
        };
        assert_eq!(idle_checks(&lock, receives, 0), 0);
        assert_eq!(rounds.get(), 2 * IDLE_POLLS + 1);

        // A caller that stops early is not forgotten; one that stops later unparks the thread.
        assert!(!lock.stop_processing());
        assert_eq!(idle_checks(&lock, || false, u32::MAX), 0);
        let stops = || {
            assert!(lock.stop_processing());
            false
        };
        assert_eq!(idle_checks(&lock, stops, u32::MAX), 0);
        assert!(!lock.stop_processing(), "it stands by no more");
    }
}

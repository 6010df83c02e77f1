//! Who receives: the thread of the endpoint, or whoever waits for what arrives and would have to be woken by it.
//!
//! The [`Inbox`] is with the one who receives, and packets are taken out of it in order while it is held. The thread has it
//! while it sleeps in the socket. Somebody who waits and finds it taken leaves word; the thread then stands by as long as
//! others receive, looks now and then whether something lies in the socket that nobody takes, and takes over if so. Progress
//! never depends on those who wait: what a caller leaves behind lies for [`LOOK`] at most.
//!
//! No packet is overlooked: who finds the inbox taken leaves word after its packet has come, and tries again; who gives it
//! back looks for word afterwards, and word is forgotten only by one who then receives.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};

use super::socket::Inbox;

/// How long a packet may lie in the socket while the thread stands by.
const LOOK: Duration = Duration::from_millis(1);
/// Looks that find that nothing has come, until the thread waits in the socket again.
const IDLE: u32 = 50;

/// See the module.
pub(super) struct Duty {
    inbox: Mutex<Inbox>,
    /// Somebody found the inbox taken.
    wanted: AtomicBool,
    /// Times that somebody else than the thread received something.
    turns: AtomicU32,
    /// Somebody else leaves the rest to the thread.
    left: AtomicBool,
    /// The thread does.
    standing_by: AtomicBool,
}

impl Duty {
    pub(super) fn new() -> Self {
        Self {
            inbox: Mutex::new(Inbox::new()),
            wanted: AtomicBool::new(false),
            turns: AtomicU32::new(0),
            left: AtomicBool::new(false),
            standing_by: AtomicBool::new(false),
        }
    }

    /// The inbox, for the thread.
    pub(super) fn take(&self) -> MutexGuard<'_, Inbox> {
        let inbox = self.inbox.lock();
        self.wanted.store(false, Ordering::SeqCst);
        inbox
    }

    /// The inbox, if nobody has it. Who has it is told, and receives what is there.
    pub(super) fn try_take(&self) -> Option<MutexGuard<'_, Inbox>> {
        let inbox = self.inbox.try_lock().or_else(|| {
            self.wanted.store(true, Ordering::SeqCst);
            self.inbox.try_lock()
        })?;
        self.wanted.store(false, Ordering::SeqCst);
        Some(inbox)
    }

    /// True if somebody else would receive, or would have. Whoever gives the inbox back asks then.
    pub(super) fn is_wanted(&self) -> bool {
        self.wanted.load(Ordering::SeqCst)
    }

    /// Somebody else than the thread has received something.
    pub(super) fn taken(&self) {
        self.turns.fetch_add(1, Ordering::Relaxed);
    }

    /// Somebody else than the thread leaves what is there, or will be, to it; true if the thread stands by, and is to be
    /// unparked.
    pub(super) fn leave(&self) -> bool {
        self.left.store(true, Ordering::SeqCst);
        self.standing_by.load(Ordering::SeqCst)
    }

    /// The thread: lets others receive as long as they do, until `over` or something is to be received.
    pub(super) fn stand_by(&self, over: impl Fn() -> bool, readable: impl Fn() -> bool) {
        let mut idle = 0;
        let mut turns = self.turns.load(Ordering::Relaxed);
        self.standing_by.store(true, Ordering::SeqCst);
        while !over() && !self.left.swap(false, Ordering::SeqCst) && idle < IDLE {
            thread::park_timeout(LOOK);
            let now = self.turns.load(Ordering::Relaxed);
            if now != turns {
                (turns, idle) = (now, 0);
            } else if readable() {
                break;
            } else {
                idle += 1;
            }
        }
        self.standing_by.store(false, Ordering::SeqCst);
    }
}

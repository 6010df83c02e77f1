//! State shared by the tasks of a connection: one end under a lock, and the bell that wakes the driver.

use std::cell::Cell;
use std::ptr;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Waker};

use parking_lot::Mutex;
use tokio::runtime::Handle;

use super::admission::Admitted;
use super::core::Core;
use super::error::CloseReason;
use super::helper::Helper;
use super::waiters::Guest;
use crate::engine::Deferral;
use crate::op::QueuePair;

thread_local! {
    /// The bell of the driver that is being polled on this thread, and whether it has rung since.
    static POLLED: Cell<(*const Bell, bool)> = const { Cell::new((ptr::null(), false)) };
}

/// Waker of operations: wakes the driver of their connection.
#[derive(Debug, Default)]
pub(super) struct Bell {
    driver: futures::task::AtomicWaker,
}

impl Bell {
    pub(super) fn register(&self, waker: &Waker) {
        self.driver.register(waker);
    }

    pub(super) fn ring(&self) {
        if ptr::eq(POLLED.get().0, self) {
            POLLED.set((self, true));
        } else {
            self.driver.wake();
        }
    }

    /// Removes the waker of the driver.
    pub(super) fn take(&self) -> Option<Waker> {
        self.driver.take()
    }
}

impl std::task::Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.ring();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.ring();
    }
}

/// A poll of the driver of a bell. The driver is not woken by its own bell meanwhile.
pub(super) struct DriverPoll {
    bell: *const Bell,
    before: (*const Bell, bool),
}

impl DriverPoll {
    pub(super) fn begin(bell: &Bell) -> Self {
        Self { bell, before: POLLED.replace((bell, false)) }
    }

    /// Ends the poll. True if the bell has rung.
    pub(super) fn end(self) -> bool {
        POLLED.get() == (self.bell, true)
    }
}

impl Drop for DriverPoll {
    fn drop(&mut self) {
        POLLED.set(self.before);
    }
}

/// State shared by the tasks of a connection.
#[derive(Debug)]
pub(super) struct Shared {
    core: Mutex<Core>,
    pub(super) bell: Arc<Bell>,
    /// The bell as a waker.
    waker: Waker,
    pub(super) qp: QueuePair,
    /// The runtime of the driver.
    pub(super) runtime: Handle,
    /// Place among the connections of a listener.
    _admitted: Option<Admitted>,
    this: Weak<Self>,
}

impl Shared {
    pub(super) fn new(
        core: Core,
        qp: QueuePair,
        runtime: Handle,
        admitted: Option<Admitted>,
    ) -> Arc<Self> {
        let bell = Arc::new(Bell::default());
        let waker = bell.clone().into();
        Arc::new_cyclic(|this| Self {
            core: Mutex::new(core),
            waker,
            bell,
            qp,
            runtime,
            _admitted: admitted,
            this: this.clone(),
        })
    }

    /// Runs `work` under the lock, and without the lock what `work` has left to do: wakers and destructors of the service, which
    /// may call this function again. Polling operations may leave such work for other connections, too.
    pub(super) fn with<R>(&self, work: impl FnOnce(&mut Core, &Waker) -> R) -> R {
        let deferral = Deferral::begin();
        let mut core = self.core.lock();
        let result = work(&mut core, &self.waker);
        let after = core.take_after();
        drop(core);
        drop(deferral);
        if after.help {
            let helper = Helper::new(self.this.clone());
            drop(self.runtime.spawn_blocking(move || helper.run()));
        }
        if after.ring {
            self.bell.ring();
        }
        after.run();
        result
    }

    /// Runs `work` as [`with`](Self::with) does, for a task that may have to wait.
    pub(super) fn poll<R>(
        &self,
        context: &mut Context<'_>,
        mut work: impl FnMut(&mut Core, &Waker, &mut Guest<'_>) -> Poll<R>,
    ) -> Poll<R> {
        let mut guest = Guest::new(context.waker());
        let first = self.with(|core, bell| work(core, bell, &mut guest));
        if first.is_ready() || !guest.clone_if_needed() {
            return first;
        }
        // With the clone the task is registered, so that a third call is never needed.
        self.with(|core, bell| work(core, bell, &mut guest))
    }

    /// Continues without the service, which has dropped its last handle.
    pub(super) fn abandon(&self) {
        self.with(|core, bell| core.abandon(bell));
        self.bell.ring();
    }

    /// Ends the connection at once, without having finished.
    pub(super) fn abort(&self, reason: CloseReason) {
        self.with(|core, bell| core.abort(reason, bell));
        self.bell.ring();
    }
}

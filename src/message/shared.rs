//! State shared by the tasks of a connection.

use std::cell::Cell;
use std::future::poll_fn;
use std::ptr;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Waker};

use parking_lot::Mutex;
use tokio::runtime::Handle;

use super::admission::Admitted;
use super::core::Core;
use super::error::CloseReason;
use super::halves::WaitGuard;
use super::helper::Helper;
use super::waiters::Caller;
use crate::engine::Deferral;
use crate::op::QueuePair;

thread_local! {
    /// The connection whose driver this thread polls, and whether it was woken since.
    static POLLED: Cell<(*const DriverWaker, bool)> = const { Cell::new((ptr::null(), false)) };
}

/// The waker of all operations of a connection.
#[derive(Debug, Default)]
pub(super) struct DriverWaker {
    driver: futures::task::AtomicWaker,
}

impl DriverWaker {
    pub(super) fn register(&self, waker: &Waker) {
        self.driver.register(waker);
    }

    pub(super) fn wake_driver(&self) {
        if ptr::eq(POLLED.get().0, self) {
            POLLED.set((self, true));
        } else {
            self.driver.wake();
        }
    }

    pub(super) fn take(&self) -> Option<Waker> {
        self.driver.take()
    }
}

impl std::task::Wake for DriverWaker {
    fn wake(self: Arc<Self>) {
        self.wake_driver();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.wake_driver();
    }
}

/// A poll of the driver, during which its waker only sets a flag.
pub(super) struct DriverPoll {
    driver_waker: *const DriverWaker,
    before: (*const DriverWaker, bool),
}

impl DriverPoll {
    pub(super) fn begin(driver_waker: &DriverWaker) -> Self {
        Self { driver_waker, before: POLLED.replace((driver_waker, false)) }
    }

    /// Ends the poll. Returns true if the driver was woken meanwhile.
    pub(super) fn end(self) -> bool {
        POLLED.get() == (self.driver_waker, true)
    }
}

impl Drop for DriverPoll {
    fn drop(&mut self) {
        POLLED.set(self.before);
    }
}

#[derive(Debug)]
pub(super) struct Shared {
    core: Mutex<Core>,
    pub(super) driver_waker: Arc<DriverWaker>,
    /// `driver_waker` as a waker.
    waker: Waker,
    pub(super) qp: QueuePair,
    pub(super) runtime: Handle,
    admitted: Option<Admitted>,
    this: Weak<Self>,
}

impl Shared {
    pub(super) fn new(
        core: Core,
        qp: QueuePair,
        runtime: Handle,
        admitted: Option<Admitted>,
    ) -> Arc<Self> {
        let driver_waker = Arc::new(DriverWaker::default());
        let waker = driver_waker.clone().into();
        Arc::new_cyclic(|this| Self {
            core: Mutex::new(core),
            waker,
            driver_waker,
            qp,
            runtime,
            admitted: admitted.map(|admitted| admitted.accepted(this.clone())),
            this: this.clone(),
        })
    }

    /// Runs `work` under the lock, then, without it, deferred wakers and destructors, which may
    /// call this function again. Operations may defer them for other connections, too.
    pub(super) fn with<R>(&self, work: impl FnOnce(&mut Core, &Waker) -> R) -> R {
        let deferral = Deferral::begin();
        let mut core = self.core.lock();
        let result = work(&mut core, &self.waker);
        let after = core.take_after();
        drop(core);
        drop(deferral);
        if after.start_helper {
            let helper = Helper::new(self.this.clone());
            drop(self.runtime.spawn_blocking(move || helper.run()));
        }
        if after.wake_driver {
            self.driver_waker.wake_driver();
        }
        after.run();
        result
    }

    /// Runs `work` like [`with`](Self::with), for a task that may wait.
    pub(super) fn poll<R>(
        &self,
        context: &mut Context<'_>,
        mut work: impl FnMut(&mut Core, &Waker, &mut Caller<'_>) -> Poll<R>,
    ) -> Poll<R> {
        let mut caller = Caller::new(context.waker());
        let first = self.with(|core, driver_waker| work(core, driver_waker, &mut caller));
        if first.is_ready() || !caller.clone_if_needed() {
            return first;
        }
        // The clone registers the task: no third call is needed.
        self.with(|core, driver_waker| work(core, driver_waker, &mut caller))
    }

    /// Returns true if the listener of this connection shuts down.
    pub(super) fn is_draining(&self) -> bool {
        self.admitted.as_ref().is_some_and(Admitted::is_shutting_down)
    }

    pub(super) fn is_terminated(&self) -> bool {
        self.with(|core, _| core.close_reason().is_some())
    }

    pub(super) fn drain(&self) {
        self.with(|core, driver_waker| core.drain(driver_waker));
        self.driver_waker.wake_driver();
    }

    /// Waits until the queue pair is closed, and returns the close reason.
    pub(super) async fn closed(&self) -> CloseReason {
        let mut guard = WaitGuard::new(self, Core::withdraw_flusher);
        poll_fn(|context| {
            self.poll(context, |core, driver, caller| {
                core.poll_closed(&mut guard.ticket, driver, caller)
            })
        })
        .await
    }

    pub(super) fn abandon(&self) {
        self.with(|core, driver_waker| core.abandon(driver_waker));
        self.driver_waker.wake_driver();
    }

    pub(super) fn abort(&self, reason: CloseReason) {
        self.with(|core, driver_waker| core.abort(reason, driver_waker));
        self.driver_waker.wake_driver();
    }
}

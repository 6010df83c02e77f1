//! State shared by the tasks of a connection.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::poll_fn;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Waker};

use futures::FutureExt as _;
use futures::future::BoxFuture;
use rdma_provider::later::{self, contained};
use rdma_provider::locks::{self, Mutex, MutexGuard};
use tokio::runtime::Handle;

use super::admission::{Accepted, Admitted};
use super::error::CloseReason;
use super::helper::Helper;
use super::state::ConnectionState;
use crate::blocking;
use crate::clock;
use crate::coop::within_budget;
use crate::op::QueuePair;
use crate::waiters::{Caller, Ticket};

thread_local! {
    /// The connection that this thread drives or serves; true if its driver was woken since.
    static POLLED: Cell<(*const ConnectionWaker, bool)> = const { Cell::new((ptr::null(), false)) };
    /// Other connections woken since: one drain of a shared completion queue finds completions of
    /// several.
    static OTHERS: RefCell<VecDeque<Arc<ConnectionWaker>>> =
        const { RefCell::new(VecDeque::new()) };
    static SERVES_OTHERS: Cell<bool> = const { Cell::new(false) };
}

/// The connections that a thread serves in a row. The drivers of further ones are woken.
const MAX_IN_TURN: usize = 32;

fn serve_others() {
    // The end of each turn calls this function too.
    if SERVES_OTHERS.replace(true) {
        return;
    }
    let mut turns = 0;
    while let Some(other) = OTHERS.try_with(|others| others.borrow_mut().pop_front()).ok().flatten()
    {
        turns += 1;
        if turns <= MAX_IN_TURN {
            contained(|| other.serve());
        } else {
            other.driver.wake();
        }
    }
    SERVES_OTHERS.set(false);
}

/// The waker of all operations of a connection. It serves the connection on the waking thread, or
/// wakes the driver if that is not possible.
#[derive(Debug)]
pub(super) struct ConnectionWaker {
    driver: futures::task::AtomicWaker,
    shared: Weak<ConnectionInner>,
    /// False if a thread polls for several connections, because it must not wait for one.
    in_place: bool,
}

impl ConnectionWaker {
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

    /// Wakes the driver if this thread has the lock or only the driver can do the rest.
    fn serve(&self) {
        let Some(shared) = self.shared.upgrade() else { return };
        let poll = DriverPoll::begin(self);
        let must_continue = shared.with_unless_locked(|state, waker| state.serve(waker));
        if must_continue != Some(false) || poll.end() {
            self.driver.wake();
        }
    }

    /// Returns false if [`MAX_IN_TURN`] connections are queued.
    fn serve_later(self: &Arc<Self>) -> bool {
        let push = |others: &RefCell<VecDeque<_>>| {
            let mut others = others.borrow_mut();
            let fits = others.len() < MAX_IN_TURN;
            if fits {
                others.push_back(self.clone());
            }
            fits
        };
        OTHERS.try_with(push).unwrap_or(false)
    }

    pub(super) fn take(&self) -> Option<Waker> {
        self.driver.take()
    }
}

impl std::task::Wake for ConnectionWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        let polled = POLLED.get().0;
        if !self.in_place || ptr::eq(polled, &**self) {
            self.wake_driver();
        } else if polled.is_null() {
            self.serve();
        } else if !self.serve_later() {
            self.driver.wake();
        }
    }
}

/// A poll of the driver, or progress on its behalf, during which its waker only sets a flag.
pub(super) struct DriverPoll {
    connection_waker: *const ConnectionWaker,
    before: (*const ConnectionWaker, bool),
}

impl DriverPoll {
    pub(super) fn begin(connection_waker: &ConnectionWaker) -> Self {
        Self { connection_waker, before: POLLED.replace((connection_waker, false)) }
    }

    pub(super) fn end(self) -> bool {
        POLLED.get() == (self.connection_waker, true)
    }
}

impl Drop for DriverPoll {
    fn drop(&mut self) {
        POLLED.set(self.before);
        if self.before.0.is_null() {
            serve_others();
        }
    }
}

#[derive(Debug)]
pub(crate) struct ConnectionInner {
    state: Mutex<ConnectionState>,
    pub(super) connection_waker: Arc<ConnectionWaker>,
    waker: Waker,
    pub(crate) qp: QueuePair,
    /// The last task that began to receive had to wait. A hint, so its order is not ensured.
    receivers_wait: AtomicBool,
    pub(super) runtime: Handle,
    admitted: Option<Admitted>,
}

impl ConnectionInner {
    pub(super) fn new(
        mut state: Box<ConnectionState>,
        qp: QueuePair,
        runtime: Handle,
        admitted: Option<Admitted>,
    ) -> Arc<Self> {
        state.io.runtime = Some(runtime.id());
        Arc::new_cyclic(|this: &Weak<Self>| {
            let connection_waker = Arc::new(ConnectionWaker {
                driver: futures::task::AtomicWaker::new(),
                shared: this.clone(),
                in_place: !qp.is_polled_by_thread(),
            });
            let waker = Waker::from(connection_waker.clone());
            // Until this returns, the waker finds no connection. The driver's first poll takes what
            // has arrived.
            if qp.notifies() {
                qp.wake_on_completion(waker.clone());
            }
            Self {
                state: Mutex::new(*state),
                waker,
                connection_waker,
                qp,
                receivers_wait: AtomicBool::new(false),
                runtime,
                admitted: admitted.map(|admitted| admitted.accepted(Weak::<Self>::clone(this))),
            }
        })
    }

    /// The release of the lock runs the work of [`later`], which may call this function again.
    pub(crate) fn with<R>(&self, work: impl FnOnce(&mut ConnectionState, &Waker) -> R) -> R {
        self.run(self.state.lock(), work)
    }

    /// Returns `None` if the lock is taken and this thread holds a lock, which may be the same one.
    fn with_unless_locked<R>(
        &self,
        work: impl FnOnce(&mut ConnectionState, &Waker) -> R,
    ) -> Option<R> {
        let state = match self.state.try_lock() {
            Some(state) => state,
            // Without a lock, waiting cannot deadlock. This thread has to wait, because the other
            // one may have checked the receives before the completion that this one has found, and
            // the driver's runtime may not run.
            None if locks::held() == 0 => self.state.lock(),
            None => return None,
        };
        Some(self.run(state, work))
    }

    #[inline]
    fn run<R>(
        &self,
        mut state: MutexGuard<'_, ConnectionState>,
        work: impl FnOnce(&mut ConnectionState, &Waker) -> R,
    ) -> R {
        let result = work(&mut state, &self.waker);
        if state.io.wakes_driver || state.memory.jobs.need_helper() {
            self.follow_up(state);
        }
        result
    }

    #[inline(never)]
    fn follow_up(&self, mut state: MutexGuard<'_, ConnectionState>) {
        let wakes_driver = std::mem::take(&mut state.io.wakes_driver);
        let starts_helper = state.memory.jobs.start();
        drop(state);
        if starts_helper {
            let helper = Helper::new(self.connection_waker.shared.clone());
            if self.qp.protection_domain().device().may_block() {
                let runtime = self.runtime.clone();
                blocking::spawn(move || {
                    // Fetches wait in it.
                    let _inside = runtime.enter();
                    helper.run();
                });
            } else {
                helper.run();
            }
        }
        if wakes_driver {
            self.connection_waker.wake_driver();
        }
    }

    pub(crate) fn poll<R>(
        &self,
        context: &mut Context<'_>,
        work: impl FnMut(&mut ConnectionState, &Waker, &mut Caller<'_>) -> Poll<R>,
    ) -> Poll<R> {
        self.poll_as(Caller::new(context.waker()), work)
    }

    pub(crate) fn poll_receiver<R>(
        &self,
        context: &mut Context<'_>,
        ticket: &mut Option<Ticket>,
        mut work: impl FnMut(
            &mut ConnectionState,
            &mut Option<Ticket>,
            &Waker,
            &mut Caller<'_>,
        ) -> Poll<R>,
    ) -> Poll<R> {
        let mut caller = Caller::new(context.waker());
        let is_new = ticket.is_none();
        let expected = self.receivers_wait.load(Ordering::Relaxed);
        if is_new && expected {
            // The last receiver has waited, so this one most likely has to wait, too.
            caller.expect_wait();
        }
        let result =
            self.poll_as(caller, |state, waker, caller| work(state, ticket, waker, caller));
        if is_new && result.is_pending() != expected {
            self.receivers_wait.store(!expected, Ordering::Relaxed);
        }
        result
    }

    #[inline]
    fn poll_as<R>(
        &self,
        mut caller: Caller<'_>,
        mut work: impl FnMut(&mut ConnectionState, &Waker, &mut Caller<'_>) -> Poll<R>,
    ) -> Poll<R> {
        let mut result = self.with(|state, waker| work(state, waker, &mut caller));
        if result.is_pending() && caller.clone_if_needed() {
            // The clone registers the task: no third call is needed.
            result = self.with(|state, waker| work(state, waker, &mut caller));
        }
        later::discard(caller.unused());
        result
    }

    pub(super) fn is_draining(&self) -> bool {
        self.admitted.as_ref().is_some_and(Admitted::is_shutting_down)
    }

    pub(super) async fn closed(&self) -> CloseReason {
        let mut guard = WaitGuard::new(self, ConnectionState::withdraw_flusher);
        poll_fn(|context| {
            within_budget(context, |context| {
                self.poll(context, |state, waker, caller| {
                    state.poll_closed(&mut guard.ticket, waker, caller)
                })
            })
        })
        .await
    }

    pub(super) fn probe(&self) {
        self.with(|state, _| state.protocol.probe(clock::now()));
        self.connection_waker.wake_driver();
    }

    pub(super) fn abandon(&self) {
        self.abort_if_runtime_shuts_down();
        self.with(|state, waker| state.abandon(waker));
        self.connection_waker.wake_driver();
    }

    pub(crate) fn abort_if_runtime_shuts_down(&self) {
        let ends = self.with(|state, _| state.protocol.phase().check_open().is_ok());
        if ends && is_runtime_shutting_down() {
            // The peer would take a `Fin` for the end that the application wanted.
            self.abort(CloseReason::Runtime);
        }
    }

    pub(crate) fn abort(&self, reason: CloseReason) {
        self.with(|state, waker| state.abort(reason, waker));
        self.connection_waker.wake_driver();
    }
}

impl Accepted for ConnectionInner {
    fn is_terminated(&self) -> bool {
        self.with(|state, _| state.close_reason().is_some())
    }

    fn drain(&self) {
        self.with(|state, waker| state.drain(waker));
        self.connection_waker.wake_driver();
    }

    fn abort(&self, reason: CloseReason) {
        Self::abort(self, reason);
    }

    fn closed(&self) -> BoxFuture<'_, CloseReason> {
        Self::closed(self).boxed()
    }
}

/// Dropping it withdraws the waiter.
pub(crate) struct WaitGuard<'a> {
    pub(crate) shared: &'a ConnectionInner,
    pub(crate) ticket: Option<Ticket>,
    withdraw: fn(&mut ConnectionState, &mut Option<Ticket>),
}

impl<'a> WaitGuard<'a> {
    pub(crate) fn new(
        shared: &'a ConnectionInner,
        withdraw: fn(&mut ConnectionState, &mut Option<Ticket>),
    ) -> Self {
        Self { shared, ticket: None, withdraw }
    }

    #[cold]
    fn give_up(&mut self) {
        self.shared.with(|state, _| (self.withdraw)(state, &mut self.ticket));
    }
}

impl Drop for WaitGuard<'_> {
    #[inline]
    fn drop(&mut self) {
        if self.ticket.is_some() {
            self.give_up();
        }
    }
}

fn is_runtime_shutting_down() -> bool {
    // Such a runtime drops a new task during the call.
    Handle::try_current().is_ok_and(|runtime| {
        let probe = runtime.spawn(std::future::pending::<()>());
        let dropped = probe.is_finished();
        probe.abort();
        dropped
    })
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::contained::tests::Counts;

    const BEYOND: usize = 5;

    /// Returns more connections than one thread serves in a row. They have ended, so serving them
    /// does nothing, and the counter tells how often their drivers were woken.
    fn connections() -> (Vec<Arc<ConnectionWaker>>, Arc<Counts>) {
        let counts = Arc::new(Counts::default());
        let connection = || {
            let driver = futures::task::AtomicWaker::new();
            driver.register(&Waker::from(counts.clone()));
            Arc::new(ConnectionWaker { driver, shared: Weak::new(), in_place: true })
        };
        let all = std::iter::repeat_with(connection).take(MAX_IN_TURN + BEYOND).collect();
        (all, counts)
    }

    #[test]
    fn drivers_are_woken_for_connections_beyond_those_queued() {
        let (connections, counts) = connections();
        let polled = ConnectionWaker {
            driver: futures::task::AtomicWaker::new(),
            shared: Weak::new(),
            in_place: true,
        };
        let poll = DriverPoll::begin(&polled);
        for connection in &connections {
            Waker::from(connection.clone()).wake();
        }
        assert_eq!(OTHERS.with_borrow(VecDeque::len), MAX_IN_TURN);
        assert_eq!(counts.0.load(Ordering::Relaxed), BEYOND);
        assert!(!poll.end(), "its own driver was not woken");
        assert!(OTHERS.with_borrow(VecDeque::is_empty));
        assert_eq!(counts.0.load(Ordering::Relaxed), BEYOND, "the others were served");
    }

    #[test]
    fn drivers_are_woken_for_connections_beyond_those_served() {
        let (connections, counts) = connections();
        // As if connections had been queued while others were served.
        OTHERS.with_borrow_mut(|others| others.extend(connections));
        serve_others();
        assert!(OTHERS.with_borrow(VecDeque::is_empty));
        assert_eq!(counts.0.load(Ordering::Relaxed), BEYOND);
    }
}

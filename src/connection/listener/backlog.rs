use std::collections::VecDeque;
use std::mem;
use std::net::SocketAddr;
use std::task::{Context, Poll, Waker};

use futures::task::AtomicWaker;
use rdma_provider::later;
use rdma_provider::locks::Mutex;
use tokio::sync::Notify;
use tokio::task::AbortHandle;

use crate::connection::error::{CloseReason, EstablishError};
use crate::connection::handle::Connection;
use crate::contained::wakes_contained;

pub(super) type Established = Result<Unaccepted, EstablishError>;

/// Dropping it resets the peer, which dropping a byte stream would not.
pub(super) struct Unaccepted(Option<Connection>);

pub(super) struct Backlog {
    limit: usize,
    state: Mutex<State>,
    changed: Notify,
    /// Woken when there is capacity again, or the application takes requests instead.
    driver: AtomicWaker,
}

#[derive(Default)]
struct State {
    established: VecDeque<Established>,
    waiting: usize,
    /// The task of the last `poll_accept`, until it is woken.
    poller: Option<Waker>,
    /// The application takes requests instead.
    paused: bool,
    has_driver: bool,
    task: Option<AbortHandle>,
    end: Option<EstablishError>,
    closed: bool,
}

impl Backlog {
    pub(super) fn new(limit: u32) -> Self {
        let (changed, driver) = (Notify::new(), AtomicWaker::new());
        Self { limit: limit as usize, state: Mutex::default(), changed, driver }
    }

    /// Registers the driver's waker if this returns false.
    pub(super) fn poll_has_capacity(&self, context: &mut Context<'_>) -> bool {
        self.driver.register(context.waker());
        self.has_capacity(&self.state.lock())
    }

    fn has_capacity(&self, state: &State) -> bool {
        let wanted = state.waiting + usize::from(state.poller.is_some());
        !state.paused && !state.closed && state.established.len() < self.limit.max(wanted)
    }

    /// Aborts the connection if the listener was dropped meanwhile.
    pub(super) fn push(&self, established: Established) {
        let mut state = self.state.lock();
        if state.closed {
            drop(state);
            return drop(established);
        }
        state.established.push_back(established);
        later::wake(state.poller.take());
        drop(state);
        self.changed.notify_one();
    }

    pub(super) fn pop(&self) -> Option<Established> {
        let mut state = self.state.lock();
        let had_capacity = self.has_capacity(&state);
        let popped = state.established.pop_front();
        let next = popped.or_else(|| state.end.clone().map(Err));
        let wakes = self.has_capacity(&state) && !had_capacity;
        let has_more = !state.established.is_empty();
        drop(state);
        if has_more {
            // Two connections that arrive before two calls of `accept` begin to wait notify only
            // one of them.
            self.changed.notify_one();
        }
        if wakes {
            self.driver.wake();
        }
        next
    }

    /// Replaces the task of the last poll if there is no connection.
    pub(super) fn poll_pop(&self, context: &mut Context<'_>) -> Poll<Established> {
        if let Some(next) = self.pop() {
            return Poll::Ready(next);
        }
        let waker = context.waker().clone();
        later::discard(self.state.lock().poller.replace(waker));
        self.driver.wake();
        // A connection may have been added before the task was registered.
        let Some(next) = self.pop() else { return Poll::Pending };
        // No task waits now.
        later::discard(self.state.lock().poller.take());
        Poll::Ready(next)
    }

    pub(super) async fn next(&self) -> Established {
        loop {
            // Created before the check: it completes if a driver ends in between.
            let changed = self.changed();
            if let Some(next) = self.pop() {
                return next;
            }
            changed.await;
        }
    }

    pub(super) fn changed(&self) -> impl Future<Output = ()> + Send {
        wakes_contained(self.changed.notified())
    }

    pub(super) fn wait(&self) -> Waiting<'_> {
        self.state.lock().waiting += 1;
        self.driver.wake();
        Waiting(self)
    }

    pub(super) fn set_paused(&self, paused: bool) {
        let before = mem::replace(&mut self.state.lock().paused, paused);
        if before != paused {
            self.driver.wake();
        }
    }

    pub(super) fn needs_driver(&self) -> bool {
        let mut state = self.state.lock();
        let ended = state.end.is_some() || state.closed;
        !ended && !mem::replace(&mut state.has_driver, true)
    }

    pub(super) fn has_driver_or_end(&self) -> bool {
        let state = self.state.lock();
        state.has_driver || state.end.is_some()
    }

    pub(super) fn set_task(&self, task: AbortHandle) {
        self.state.lock().task = Some(task);
    }

    /// `end` is `Some` if no more connections can arrive.
    pub(super) fn driver_ended(&self, end: Option<EstablishError>) {
        let mut state = self.state.lock();
        state.has_driver = false;
        state.end = state.end.take().or(end);
        later::wake(state.poller.take());
        drop(state);
        self.changed.notify_waiters();
    }

    /// Aborts the connections that were not accepted.
    pub(super) fn close(&self) {
        let mut state = self.state.lock();
        state.closed = true;
        let established = mem::take(&mut state.established);
        later::discard(state.poller.take());
        let task = state.task.take();
        drop(state);
        if let Some(task) = task {
            task.abort();
        }
        drop(established);
    }
}

impl Unaccepted {
    pub(super) fn new(connection: Connection) -> Self {
        Self(Some(connection))
    }

    pub(super) fn get(&self) -> &Connection {
        let Some(connection) = &self.0 else { unreachable!("`accept` and `drop` consume it") };
        connection
    }

    pub(super) fn peer_addr(&self) -> SocketAddr {
        let Ok(address) = self.get().peer_addr() else {
            unreachable!("a listener connects by address")
        };
        address
    }

    pub(super) fn accept(mut self) -> Connection {
        let Some(connection) = self.0.take() else {
            unreachable!("`accept` and `drop` consume it")
        };
        connection
    }
}

impl Drop for Unaccepted {
    fn drop(&mut self) {
        if let Some(connection) = self.0.take() {
            connection.handle().shared.abort(CloseReason::Shutdown);
        }
    }
}

/// A call of `accept`, counted until dropped.
pub(super) struct Waiting<'a>(&'a Backlog);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.state.lock().waiting -= 1;
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::Arc;

    use futures::FutureExt as _;

    use super::*;
    use crate::cm::ConnectError;
    use crate::contained::tests::calls_when_cloned;
    use crate::error::NoRuntime;

    fn established() -> Established {
        Err(EstablishError::Connect(ConnectError::NoRuntime(NoRuntime::Outside)))
    }

    #[test]
    fn poll_that_returns_a_connection_asks_for_no_other() {
        let backlog = Arc::new(Backlog::new(0));
        let noop = &mut Context::from_waker(Waker::noop());
        assert!(backlog.poll_pop(noop).is_pending() && backlog.poll_has_capacity(noop));
        backlog.push(established());
        assert!(backlog.poll_pop(noop).is_ready() && !backlog.poll_has_capacity(noop));
        // The connection arrives during the poll.
        let driver = Arc::clone(&backlog);
        let waker = calls_when_cloned(move || driver.push(established()));
        assert!(backlog.poll_pop(&mut Context::from_waker(&waker)).is_ready());
        assert!(!backlog.poll_has_capacity(noop));
    }

    #[test]
    fn each_waiting_accept_learns_of_a_connection() {
        let backlog = Backlog::new(8);
        // Two calls have found nothing and do not wait yet.
        let mut calls = [backlog.changed(), backlog.changed()].map(Box::pin);
        for _ in 0..2 {
            backlog.push(established());
        }
        for call in &mut calls {
            assert!(call.now_or_never().is_some(), "a connection is left");
            assert!(backlog.pop().is_some());
        }
    }
}

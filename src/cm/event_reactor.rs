//! The event channel in Tokio's reactor: a registration for each runtime in which somebody waits.
//!
//! As that of completion channels: no task is spawned, the waker that the reactor holds drains the channel itself.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Wake, Waker};

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::runtime::{self, Handle};
use tokio::task::unconstrained;

use super::router::{Router, Watched};
use crate::error::NoRuntime;

/// Registrations of one channel.
pub(super) struct Reactors(parking_lot::Mutex<Vec<Arc<Reactor>>>);

struct Reactor {
    runtime: runtime::Id,
    handle: Handle,
    /// Owns a share of the channel, so that the descriptor is deregistered before it is closed.
    fd: AsyncFd<Watched>,
    router: Weak<Router>,
    /// Holds the reactor weakly: the registration holds the waker.
    waker: Waker,
}

impl Reactors {
    pub(super) fn new() -> Self {
        Self(parking_lot::Mutex::new(Vec::new()))
    }

    /// Makes sure that the current runtime watches the channel, if it can.
    pub(super) fn watch(&self, router: &Arc<Router>) -> Result<(), NoRuntime> {
        let handle = NoRuntime::or_current()?;
        let runtime = handle.id();
        let mut list = self.0.lock();
        if list.iter().any(|reactor| reactor.runtime == runtime) {
            return Ok(());
        }
        let watched = router.watched();
        // Deprecated because an `AsRawFd` can lie about its descriptor; ours owns it.
        #[allow(deprecated, reason = "its successor is not in the oldest Tokio we work with")]
        let register = || AsyncFd::with_interest(watched, Interest::READABLE);
        let fd = match NoRuntime::or_registered(register)? {
            Ok(fd) => fd,
            Err(error) => {
                // Deadlines still hold; and the next wait tries again.
                tracing::error!(%error, "events of the connection manager cannot be watched");
                return Ok(());
            }
        };
        let reactor = Arc::new_cyclic(|weak: &Weak<Reactor>| Reactor {
            runtime,
            handle,
            fd,
            router: Arc::downgrade(router),
            waker: Waker::from(Arc::new(ReactorWaker(weak.clone()))),
        });
        list.push(Arc::clone(&reactor));
        drop(list);
        reactor.run();
        Ok(())
    }

    /// True if a runtime watches the channel.
    pub(super) fn is_watched(&self) -> bool {
        !self.0.lock().is_empty()
    }

    /// A runtime in which somebody waits, if there is one besides those.
    pub(super) fn handle(&self, except: &[runtime::Id]) -> Option<Handle> {
        let list = self.0.lock();
        list.iter()
            .find(|reactor| !except.contains(&reactor.runtime))
            .map(|reactor| reactor.handle.clone())
    }

    fn forget(&self, gone: &Reactor) {
        let mut list = self.0.lock();
        let forgotten = list
            .iter()
            .position(|reactor| reactor.runtime == gone.runtime)
            .map(|at| list.swap_remove(at));
        drop(list);
        drop(forgotten);
    }
}

impl Reactor {
    /// Serves the channel until it is not readable; then the reactor has the waker.
    fn run(&self) {
        let Some(router) = self.router.upgrade() else { return };
        let mut context = Context::from_waker(&self.waker);
        loop {
            // Not charged to the budget of the task that happens to be here.
            let ready = pin!(unconstrained(poll_fn(|context| self.fd.poll_read_ready(context))));
            match ready.poll(&mut context) {
                Poll::Ready(Ok(mut ready)) => {
                    router.drain();
                    // A new event meanwhile makes the descriptor ready anew, which this does not clear.
                    ready.clear_ready();
                }
                Poll::Ready(Err(_)) => {
                    // The runtime shuts down, and its tasks with it. Futures that were polled there may be elsewhere.
                    router.reactors().forget(self);
                    router.rouse();
                    return;
                }
                Poll::Pending => return,
            }
        }
    }
}

struct ReactorWaker(Weak<Reactor>);

impl Wake for ReactorWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if let Some(reactor) = self.0.upgrade() {
            reactor.run();
        }
    }
}

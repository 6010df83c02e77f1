//! Registrations of the event channel with the I/O drivers of Tokio runtimes.
//!
//! The channel is registered with each runtime in which a task has waited for an event, until the
//! runtime shuts down. The registered waker drains the channel itself, without a task.

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

pub(super) struct Reactors(rdma_provider::locks::Mutex<Vec<Arc<Reactor>>>);

struct Reactor {
    runtime: runtime::Id,
    handle: Handle,
    /// Owns a reference to the channel, so that the descriptor is deregistered before it is closed.
    fd: AsyncFd<Watched>,
    router: Weak<Router>,
    /// Holds this `Reactor` weakly, because `fd` stores the waker.
    waker: Waker,
}

impl Reactors {
    pub(super) fn new() -> Self {
        Self(rdma_provider::locks::Mutex::new(Vec::new()))
    }

    /// Ensures that the current runtime watches the channel. A failed registration is only logged:
    /// the next poll retries, and deadlines still end the wait.
    pub(super) fn watch(&self, router: &Arc<Router>) -> Result<(), NoRuntime> {
        let handle = NoRuntime::or_current()?;
        let runtime = handle.id();
        let mut list = self.0.lock();
        if list.iter().any(|reactor| reactor.runtime == runtime) {
            return Ok(());
        }
        let watched = router.watched();
        // Deprecated because an `AsRawFd` may not own its descriptor; `Watched` does.
        #[allow(deprecated, reason = "its replacement is missing in the oldest supported Tokio")]
        let register = || AsyncFd::with_interest(watched, Interest::READABLE);
        let fd = match NoRuntime::or_registered(register)? {
            Ok(fd) => fd,
            Err(error) => {
                rdma_provider::error!(
                    %error,
                    "failed to watch the connection manager's event channel; the next wait retries"
                );
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

    pub(super) fn is_watched(&self) -> bool {
        !self.0.lock().is_empty()
    }

    pub(super) fn handle(&self, except: &[runtime::Id]) -> Option<Handle> {
        let list = self.0.lock();
        list.iter()
            .find(|reactor| !except.contains(&reactor.runtime))
            .map(|reactor| reactor.handle.clone())
    }

    fn deregister(&self, gone: &Reactor) {
        let mut list = self.0.lock();
        let removed = list
            .iter()
            .position(|reactor| reactor.runtime == gone.runtime)
            .map(|at| list.swap_remove(at));
        drop(list);
        drop(removed);
    }
}

impl Reactor {
    /// Drains the channel until it has no new events and the I/O driver holds the waker. The
    /// readiness is cleared even if [`Router::drain`] leaves events to a task.
    fn run(&self) {
        let Some(router) = self.router.upgrade() else { return };
        let mut context = Context::from_waker(&self.waker);
        loop {
            // The waker may run within any task. Once that task's budget is used up, the poll would
            // be pending although the channel is readable.
            let ready = pin!(unconstrained(poll_fn(|context| self.fd.poll_read_ready(context))));
            match ready.poll(&mut context) {
                Poll::Ready(Ok(mut ready)) => {
                    router.drain();
                    // Keeps the readiness if an event has arrived since the poll.
                    ready.clear_ready();
                }
                Poll::Ready(Err(_)) => {
                    // The runtime shuts down. Futures that move to another runtime must register
                    // the channel there, so wake them.
                    router.reactors().deregister(self);
                    router.wake_waiters();
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

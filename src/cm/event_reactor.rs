//! Registrations of the event channel with the I/O driver of each Tokio runtime in which a task has
//! waited for an event. The registered waker drains the channel itself, without a task.

use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Arc, Weak};
use std::task::{Wake, Waker};

use tokio::runtime::{self, Handle};

use super::router::Router;
use crate::dispatch::CmChannel;
use crate::error::NoRuntime;
use crate::readable::Readable;
use rdma_provider::cm_contract::CmChannel as _;

#[derive(Default)]
pub(super) struct Reactors(rdma_provider::locks::Mutex<Vec<Arc<Reactor>>>);

struct Reactor {
    runtime: runtime::Id,
    handle: Handle,
    /// References the channel, so that the descriptor is deregistered before it is closed.
    fd: Readable<Watched>,
    router: Weak<Router>,
    /// Weak, because `fd` stores the waker.
    waker: Waker,
}

struct Watched(Arc<CmChannel>);

impl AsRawFd for Watched {
    fn as_raw_fd(&self) -> RawFd {
        self.0.fd().as_raw_fd()
    }
}

impl Reactors {
    /// Does nothing if the channel is registered with the current runtime.
    pub(super) fn watch(&self, router: &Arc<Router>) -> Result<(), NoRuntime> {
        let handle = NoRuntime::or_current()?;
        let runtime = handle.id();
        let mut list = self.0.lock();
        if list.iter().any(|reactor| reactor.runtime == runtime) {
            return Ok(());
        }
        let watched = Watched(Arc::clone(&router.channel));
        let fd = match NoRuntime::or_registered(|| Readable::new(watched))? {
            Ok(fd) => fd,
            // Only logged, because deadlines still end the wait.
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
    /// Clears the channel's readiness even if [`Router::drain`] leaves events to a task.
    fn run(&self) {
        let Some(router) = self.router.upgrade() else { return };
        if self.fd.serve(&self.waker, || router.drain()).is_break() {
            // Futures that move to another runtime must register the channel there, so wake them.
            router.reactors.deregister(self);
            router.wake_waiters();
        }
    }
}

struct ReactorWaker(Weak<Reactor>);

impl Wake for ReactorWaker {
    fn wake(self: Arc<Self>) {
        if let Some(reactor) = self.0.upgrade() {
            reactor.run();
        }
    }
}

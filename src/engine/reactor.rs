//! The completion channel in Tokio's reactor.
//!
//! The crate spawns no task. The reactor wakes the completion queue, not an operation: its waker
//! drains the queue in place, and each operation found complete is woken once.
//!
//! Every runtime in which an operation waits has its own registration, so no wake-up depends on
//! another runtime. The reactor also watches the asynchronous events of the device, because no
//! completion may arrive after a fatal event.

use std::future::{Future, poll_fn};
use std::io;
use std::os::fd::OwnedFd;
use std::pin::pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Wake, Waker};

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::runtime::{self, Handle};
use tokio::task::unconstrained;

use super::device_events::readable;
use crate::error::NoRuntime;
use crate::verbs::{Channel, Device, Inlet};

/// A completion queue to which a reactor reports events.
pub(super) trait Watched: Send + Sync {
    fn channel(&self) -> Option<&Channel>;

    fn device(&self) -> &Device;

    fn on_event(&self);

    /// Wakes all waiting operations after a reactor is gone, to find another one or to poll.
    fn rouse(&self);

    fn reactors(&self) -> &Reactors;
}

/// The registrations of one channel, at most one per runtime.
pub(super) struct Reactors {
    list: parking_lot::Mutex<Vec<Arc<Reactor>>>,
}

/// A registration with one runtime.
///
/// Each `serve_` function runs until its descriptor is not readable and the reactor holds the
/// waker. It polls `unconstrained`: the budget belongs to the task that happens to run, and once
/// that is exhausted, Tokio would wake the waker, which calls the function again.
struct Reactor {
    runtime: runtime::Id,
    /// Holds a reference to the channel, so that the descriptor is deregistered before it is
    /// closed. `None` if the runtime has no I/O driver.
    fd: Option<AsyncFd<Channel>>,
    events: Option<AsyncFd<OwnedFd>>,
    /// Readable when data has arrived for a software device. Its own thread processes the data
    /// otherwise, and then wakes this reactor.
    inlet: Option<AsyncFd<Inlet>>,
    cq: Weak<dyn Watched>,
    /// One waker per descriptor, so that a completion does not poll the others. They reference the
    /// reactor weakly, because the registration holds the waker.
    completion_waker: Waker,
    event_waker: Waker,
    arrival_waker: Waker,
}

impl Reactors {
    pub(super) fn new() -> Self {
        Self { list: parking_lot::Mutex::new(Vec::new()) }
    }

    /// Ensures that the current runtime watches the channel; returns false if there is no runtime
    /// that can.
    pub(super) fn watch<W: Watched + 'static>(&self, cq: &Arc<W>) -> bool {
        let (Some(channel), Ok(handle)) = (cq.channel(), Handle::try_current()) else {
            return false;
        };
        let runtime = handle.id();
        let mut list = self.list.lock();
        if let Some(reactor) = list.iter().find(|reactor| reactor.runtime == runtime) {
            return reactor.fd.is_some();
        }
        let weak: Weak<W> = Arc::downgrade(cq);
        let reactor = Reactor::new(runtime, channel, cq.device(), weak);
        list.push(reactor.clone());
        drop(list);
        reactor.serve_events();
        reactor.serve_arrivals();
        reactor.serve_completions();
        reactor.fd.is_some()
    }

    pub(super) fn has_inlet(&self) -> bool {
        self.list.lock().iter().any(|reactor| reactor.inlet.is_some())
    }

    fn remove(&self, gone: &Reactor) {
        let mut list = self.list.lock();
        let removed = list
            .iter()
            .position(|reactor| reactor.runtime == gone.runtime)
            .map(|at| list.swap_remove(at));
        drop(list);
        drop(removed);
    }
}

impl Reactor {
    fn new(
        runtime: runtime::Id,
        channel: &Channel,
        device: &Device,
        cq: Weak<dyn Watched>,
    ) -> Arc<Self> {
        let channel = channel.clone();
        // Deprecated because an `AsRawFd` can lie about its descriptor; ours owns it.
        #[allow(deprecated, reason = "its successor is newer than the oldest supported Tokio")]
        let register = || AsyncFd::with_interest(channel, Interest::READABLE);
        let fd = match NoRuntime::or_registered(register) {
            Ok(Ok(fd)) => Some(fd),
            Ok(Err(error)) => {
                tracing::warn!(
                    device = device.name(),
                    %error,
                    "failed to watch a completion channel; waiting tasks poll instead"
                );
                None
            }
            Err(missing) => {
                tracing::warn!(
                    device = device.name(),
                    error = %missing,
                    "failed to watch a completion channel; waiting tasks poll instead"
                );
                None
            }
        };
        let events = fd.as_ref().and_then(|_| match readable(device) {
            Ok(events) => Some(events),
            Err(error) => {
                tracing::warn!(
                    device = device.name(),
                    %error,
                    "failed to watch asynchronous events; a lost device is noticed by polls only"
                );
                None
            }
        });
        // Optional: without it, the device's own thread processes arrivals, with more latency.
        let inlet = fd.as_ref().and_then(|_| {
            let inlet = device.inlet();
            #[allow(deprecated, reason = "its successor is newer than the oldest supported Tokio")]
            let registered = inlet.and_then(|inlet| {
                inlet.map(|inlet| AsyncFd::with_interest(inlet, Interest::READABLE)).transpose()
            });
            registered
                .inspect_err(|error| {
                    tracing::debug!(
                        device = device.name(),
                        %error,
                        "failed to watch for packets; the thread of the device processes them"
                    );
                })
                .ok()
                .flatten()
        });
        Arc::new_cyclic(|weak: &Weak<Self>| {
            let waker = |serve: fn(&Self)| {
                Waker::from(Arc::new(ReadyWaker { reactor: weak.clone(), serve }))
            };
            Self {
                runtime,
                fd,
                events,
                inlet,
                cq,
                completion_waker: waker(Self::serve_completions),
                event_waker: waker(Self::serve_events),
                arrival_waker: waker(Self::serve_arrivals),
            }
        })
    }

    fn serve_events(&self) {
        let (Some(events), Some(cq)) = (&self.events, self.cq.upgrade()) else { return };
        let mut context = Context::from_waker(&self.event_waker);
        while let Poll::Ready(Ok(mut ready)) =
            pin!(unconstrained(poll_fn(|context| events.poll_read_ready(context))))
                .poll(&mut context)
        {
            cq.device().read_events();
            ready.clear_ready();
        }
    }

    fn serve_arrivals(&self) {
        let (Some(inlet), Some(fd), Some(cq)) = (&self.inlet, &self.fd, self.cq.upgrade()) else {
            return;
        };
        let mut context = Context::from_waker(&self.arrival_waker);
        while let Poll::Ready(Ok(mut ready)) =
            pin!(unconstrained(poll_fn(|context| inlet.poll_read_ready(context))))
                .poll(&mut context)
        {
            let held = fd.get_ref().hold();
            if inlet.get_ref().serve() {
                cq.on_event();
            }
            drop(held);
            ready.clear_ready();
        }
    }

    fn serve_completions(&self) {
        let (Some(fd), Some(cq)) = (&self.fd, self.cq.upgrade()) else { return };
        let mut context = Context::from_waker(&self.completion_waker);
        loop {
            // A concurrent event makes the descriptor ready again; `try_io` does not clear that.
            let served = fd.try_io(Interest::READABLE, |_| {
                // Another thread processed the arrivals that led to this completion. Later arrivals
                // are processed here.
                if let Some(inlet) = &self.inlet {
                    inlet.get_ref().serve();
                }
                cq.on_event();
                Err::<(), _>(io::ErrorKind::WouldBlock.into())
            });
            debug_assert!(served.is_err(), "nothing is read here");
            let ready = pin!(unconstrained(poll_fn(|context| fd.poll_read_ready(context))));
            match ready.poll(&mut context) {
                Poll::Ready(Ok(_)) => {}
                Poll::Ready(Err(_)) => {
                    // The tasks of the runtime end with it. Threads that wait in its context
                    // continue.
                    tracing::debug!(
                        "runtime shut down; removed its registration of the completion channel"
                    );
                    cq.reactors().remove(self);
                    cq.rouse();
                    return;
                }
                Poll::Pending => return,
            }
        }
    }
}

/// A waker that serves one descriptor of the reactor in place.
struct ReadyWaker {
    reactor: Weak<Reactor>,
    serve: fn(&Reactor),
}

impl Wake for ReadyWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if let Some(reactor) = self.reactor.upgrade() {
            (self.serve)(&reactor);
        }
    }
}

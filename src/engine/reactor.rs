//! The completion channel in Tokio's reactor.
//!
//! No task is spawned. What the reactor wakes is not an operation but the completion queue: its waker drains
//! the queue right there, and the operations found complete are what gets scheduled, with one wake each.
//!
//! Every runtime in which an operation waits watches the channel with a registration of its own. So it does
//! not matter which of them is running: a waiting task's own runtime is, whenever that task could go on. It watches the
//! asynchronous events of the device too: after the last of them no completion may ever come.

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

/// What a reactor tells of events: a completion queue.
pub(super) trait Watched: Send + Sync {
    /// Where its events arrive; none if it has none.
    fn channel(&self) -> Option<&Channel>;

    fn device(&self) -> &Device;

    /// The channel may have an event.
    fn on_event(&self);

    /// A reactor is gone: those who relied on it look again, and find another or do without.
    fn rouse(&self);

    /// Its registrations.
    fn reactors(&self) -> &Reactors;
}

/// Registrations of one channel, one for each runtime that has waited for it.
pub(super) struct Reactors {
    list: parking_lot::Mutex<Vec<Arc<Reactor>>>,
}

struct Reactor {
    runtime: runtime::Id,
    /// Owns a share of the channel, so that the descriptor is deregistered before it is closed. `None` if the
    /// runtime has no I/O driver.
    fd: Option<AsyncFd<Channel>>,
    /// Readable when the device has asynchronous events.
    events: Option<AsyncFd<OwnedFd>>,
    /// Readable when something has arrived that a device that is a program would see to in a thread of its own, which would
    /// then wake us.
    inlet: Option<AsyncFd<Inlet>>,
    cq: Weak<dyn Watched>,
    /// One for each descriptor, so that a completion costs no look at the other. They hold the reactor weakly: the registration
    /// holds the waker.
    completion_waker: Waker,
    event_waker: Waker,
    arrival_waker: Waker,
}

impl Reactors {
    pub(super) fn new() -> Self {
        Self { list: parking_lot::Mutex::new(Vec::new()) }
    }

    /// Makes sure that the current runtime watches the channel. False if there is none that could.
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

    /// True if some runtime sees to what arrives.
    pub(super) fn has_inlet(&self) -> bool {
        self.list.lock().iter().any(|reactor| reactor.inlet.is_some())
    }

    fn forget(&self, gone: &Reactor) {
        let mut list = self.list.lock();
        let forgotten = list
            .iter()
            .position(|reactor| reactor.runtime == gone.runtime)
            .map(|at| list.swap_remove(at));
        drop(list);
        drop(forgotten);
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
        #[allow(deprecated, reason = "its successor is not in the oldest Tokio we work with")]
        let register = || AsyncFd::with_interest(channel, Interest::READABLE);
        let fd = match NoRuntime::or_registered(register) {
            Ok(Ok(fd)) => Some(fd),
            Ok(Err(error)) => {
                tracing::warn!(%error, "completion channel cannot be watched, polling instead");
                None
            }
            Err(missing) => {
                tracing::warn!(%missing, "completion channel cannot be watched, polling instead of sleeping");
                None
            }
        };
        let events = fd.as_ref().and_then(|_| match readable(device) {
            Ok(events) => Some(events),
            Err(error) => {
                tracing::warn!(%error, "asynchronous events cannot be watched, polls alone notice a lost device");
                None
            }
        });
        // Without it all is as well, if later.
        let inlet = fd.as_ref().and_then(|_| {
            let inlet = device.inlet();
            #[allow(deprecated, reason = "its successor is not in the oldest Tokio we work with")]
            let registered = inlet.and_then(|inlet| {
                inlet.map(|inlet| AsyncFd::with_interest(inlet, Interest::READABLE)).transpose()
            });
            registered
                .inspect_err(|error| tracing::debug!(%error, "arrivals cannot be watched"))
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

    /// Serves the device's asynchronous events until there are none; then the reactor has the waker.
    fn serve_events(&self) {
        let (Some(events), Some(cq)) = (&self.events, self.cq.upgrade()) else { return };
        let mut context = Context::from_waker(&self.event_waker);
        // Not charged to a budget, as below.
        while let Poll::Ready(Ok(mut ready)) =
            pin!(unconstrained(poll_fn(|context| events.poll_read_ready(context))))
                .poll(&mut context)
        {
            cq.device().read_events();
            ready.clear_ready();
        }
    }

    /// Has what has arrived seen to until there is nothing; then the reactor has the waker.
    fn serve_arrivals(&self) {
        let (Some(inlet), Some(fd), Some(cq)) = (&self.inlet, &self.fd, self.cq.upgrade()) else {
            return;
        };
        let mut context = Context::from_waker(&self.arrival_waker);
        // Not charged to a budget, as below.
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

    /// Serves the completion channel until it is not readable; then the reactor has the waker.
    fn serve_completions(&self) {
        let (Some(fd), Some(cq)) = (&self.fd, self.cq.upgrade()) else { return };
        let mut context = Context::from_waker(&self.completion_waker);
        loop {
            // A new event meanwhile makes the descriptor ready anew, which this does not clear.
            let served = fd.try_io(Interest::READABLE, |_| {
                // Somebody else has seen to what has arrived, perhaps before we could have; the next is ours.
                if let Some(inlet) = &self.inlet {
                    inlet.get_ref().serve();
                }
                cq.on_event();
                Err::<(), _>(io::ErrorKind::WouldBlock.into())
            });
            debug_assert!(served.is_err(), "nothing is read here");
            // Not charged to the budget of the task that happens to be here: if that were spent, Tokio would ask to
            // try again by waking the waker, which is us.
            let ready = pin!(unconstrained(poll_fn(|context| fd.poll_read_ready(context))));
            match ready.poll(&mut context) {
                Poll::Ready(Ok(_)) => {}
                Poll::Ready(Err(_)) => {
                    // The runtime shuts down, and its tasks with it; a thread that waits in its context does not.
                    tracing::debug!("runtime is gone, no longer watching for it");
                    cq.reactors().forget(self);
                    cq.rouse();
                    return;
                }
                Poll::Pending => return,
            }
        }
    }
}

/// Has the reactor serve one of its descriptors, there and then.
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

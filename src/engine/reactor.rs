//! The completion channel in Tokio's runtimes.
//!
//! At an event the queue is drained, and each operation found complete is woken once. Hardware
//! makes a descriptor readable, and the waker that Tokio's reactor calls drains the queue without a
//! task. A software device calls a waker while it holds locks, so a task drains the queue instead;
//! this takes no system call.
//!
//! In hybrid mode each registration has a task even if there is a descriptor. If the queue has a
//! [completion waker](super::work_queue::WorkQueue::wake_on_completion), the task polls it for a
//! while after an event. Awaited operations spin themselves.
//!
//! Every runtime in which an operation waits has its own registration, so no wake-up depends on
//! another runtime. The reactor also watches the asynchronous events of the device, because no
//! completion may arrive after a fatal event.

use std::error::Error;
use std::future::Future;
use std::io;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::task::{Context, Poll, Wake, Waker};

use tokio::runtime::{self, Handle};

use super::deferral::wake_in_turn;
use super::device_events::readable;
use crate::error::NoRuntime;
use crate::readable::Readable;
use crate::verbs::{Channel, Device, PacketSource};

pub(super) trait Watched: Send + Sync {
    fn channel(&self) -> Option<&Channel>;

    fn device(&self) -> &Device;

    fn may_spin(&self) -> bool;

    fn on_event(&self, runtime: Option<runtime::Id>) -> bool;

    /// Polls for the task of `runtime`, after `rounds` polls without a completion. Returns the
    /// rounds for the next poll, or `None` if the task is to wait for an event, which was
    /// requested.
    fn spin(&self, runtime: runtime::Id, rounds: u32) -> Option<u32>;

    fn stop_spinning(&self, runtime: runtime::Id);

    /// Called after a registration is gone, so that operations find another one or poll.
    fn wake_to_repoll(&self);

    fn reactors(&self) -> &Reactors;
}

pub(super) struct Reactors {
    list: rdma_provider::locks::Mutex<Vec<Arc<Reactor>>>,
}

/// Each `serve_` function runs until its descriptor is not readable and the reactor holds the
/// waker.
struct Reactor {
    runtime: runtime::Id,
    watched: Registrations,
    cq: Weak<dyn Watched>,
    /// One waker per descriptor, so that a completion does not poll the others. They reference the
    /// reactor weakly, because the registration holds the waker.
    channel_waker: Waker,
    event_waker: Waker,
    arrival_waker: Waker,
    may_spin: bool,
    task: futures::task::AtomicWaker,
    task_ended: AtomicBool,
}

#[derive(Default)]
struct Registrations {
    /// `None` if the runtime has no I/O driver or the registration failed: waiting tasks poll.
    source: Option<Source>,
    events: Option<Readable<OwnedFd>>,
    /// Readable when data has arrived for a software device. Its own thread processes the data
    /// otherwise, and then wakes this reactor.
    packets: Option<Readable<PacketSource>>,
}

enum Source {
    /// References the channel, so that the descriptor is deregistered before it is closed.
    Descriptor(Readable<Channel>),
    Task(Served),
}

struct Served {
    channel: Channel,
    waker: OnceLock<(Waker, Option<u64>)>,
}

struct ReactorTask {
    reactor: Weak<Reactor>,
    rounds: u32,
}

impl Reactors {
    pub(super) fn new() -> Self {
        Self { list: rdma_provider::locks::Mutex::new(Vec::new()) }
    }

    pub(super) fn watch<W: Watched + 'static>(&self, cq: &Arc<W>) -> bool {
        let (Some(channel), Ok(handle)) = (cq.channel(), Handle::try_current()) else {
            return false;
        };
        let runtime = handle.id();
        let mut list = self.list.lock();
        if let Some(reactor) = list.iter().find(|reactor| reactor.runtime == runtime) {
            return reactor.is_served();
        }
        let weak: Weak<dyn Watched> = Arc::<W>::downgrade(cq);
        let registrations = Registrations::new(channel, cq.device());
        let reactor = Reactor::new(runtime, registrations, weak.clone(), cq.may_spin());
        add(&mut list, reactor.clone());
        drop(list);
        reactor.serve_events();
        reactor.process_arrivals();
        let task = ReactorTask { reactor: Arc::downgrade(&reactor), rounds: 0 };
        match &reactor.watched.source {
            Some(Source::Descriptor(_)) => {
                if reactor.may_spin {
                    drop(handle.spawn(task));
                }
                reactor.serve_completions();
            }
            Some(Source::Task(_)) => {
                drop(handle.spawn(task));
                // A runtime that is shutting down drops the task at once, and with it the entry. An
                // entry without registrations keeps the next operation from trying again.
                if reactor.task_ended.load(Ordering::Acquire) {
                    let ended = Reactor::new(runtime, Registrations::default(), weak, false);
                    add(&mut self.list.lock(), ended);
                }
            }
            None => {}
        }
        reactor.is_served()
    }

    pub(super) fn is_only(&self, runtime: runtime::Id) -> bool {
        self.list.lock().iter().all(|reactor| reactor.runtime == runtime || !reactor.is_served())
    }

    pub(super) fn watches_packets(&self) -> bool {
        self.list.lock().iter().any(|reactor| reactor.watched.packets.is_some())
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

const MAX_WITHOUT_SOURCE: usize = 64;

fn add(list: &mut Vec<Arc<Reactor>>, new: Arc<Reactor>) {
    // A queue may outlive any number of runtimes, so entries without a source are limited.
    let is_idle = |reactor: &&Arc<Reactor>| reactor.watched.source.is_none();
    if list.iter().filter(is_idle).count() >= MAX_WITHOUT_SOURCE
        && let Some(oldest) = list.iter().position(|reactor| is_idle(&reactor))
    {
        list.remove(oldest);
    }
    list.push(new);
}

impl Registrations {
    fn new(channel: &Channel, device: &Device) -> Self {
        let device_name = device.name();
        let failed = |error: &dyn Error| {
            rdma_provider::warn!(
                device = device_name,
                %error,
                "failed to watch a completion channel; waiting tasks poll instead"
            );
        };
        // Shows whether the runtime has an I/O driver.
        let (source, events) = match NoRuntime::or_registered(|| readable(device)) {
            Ok(events) => (
                Source::new(channel).inspect_err(|error| failed(error)).ok(),
                events.inspect_err(|error| rdma_provider::warn!(
                    device = device_name,
                    %error,
                    "failed to watch asynchronous events; a lost device is noticed by polls only"
                )).ok(),
            ),
            Err(missing) => {
                failed(&missing);
                (None, None)
            }
        };
        // Optional: without it, the device's own thread processes arrivals, with more latency.
        let packets = source.as_ref().and_then(|_| {
            let packets = device.packet_source();
            let registered = packets.and_then(|packets| packets.map(Readable::new).transpose());
            registered
                .inspect_err(|error| {
                    rdma_provider::debug!(
                        device = device_name,
                        %error,
                        "failed to watch for packets; the thread of the device processes them"
                    );
                })
                .ok()
                .flatten()
        });
        Self { source, events, packets }
    }
}

impl Reactor {
    fn new(
        runtime: runtime::Id,
        watched: Registrations,
        cq: Weak<dyn Watched>,
        may_spin: bool,
    ) -> Arc<Self> {
        Arc::new_cyclic(|weak: &Weak<Self>| {
            let waker = |serve: fn(&Self)| {
                Waker::from(Arc::new(ReadyWaker { reactor: weak.clone(), serve }))
            };
            Self {
                runtime,
                watched,
                cq,
                channel_waker: waker(Self::serve_completions),
                event_waker: waker(Self::serve_events),
                arrival_waker: waker(Self::process_arrivals),
                may_spin,
                task: futures::task::AtomicWaker::new(),
                task_ended: AtomicBool::new(false),
            }
        })
    }

    fn is_served(&self) -> bool {
        match &self.watched.source {
            Some(Source::Descriptor(_)) => true,
            Some(Source::Task(_)) => !self.task_ended.load(Ordering::Acquire),
            None => false,
        }
    }

    fn serve_events(&self) {
        let (Some(events), Some(cq)) = (&self.watched.events, self.cq.upgrade()) else { return };
        let _ = events.serve(&self.event_waker, || cq.device().read_events());
    }

    fn process_arrivals(&self) {
        let (Some(packets), Some(cq)) = (&self.watched.packets, self.cq.upgrade()) else { return };
        let Some(channel) = cq.channel() else { return };
        let _ = packets.serve(&self.arrival_waker, || {
            let held = channel.hold();
            if packets.get_ref().process_packets() {
                self.on_event(&*cq);
            }
            drop(held);
        });
    }

    fn serve_completions(&self) {
        let (Some(Source::Descriptor(fd)), Some(cq)) = (&self.watched.source, self.cq.upgrade())
        else {
            return;
        };
        if fd.serve(&self.channel_waker, || self.on_event(&*cq)).is_break() {
            self.end(&*cq);
        }
    }

    fn on_event(&self, cq: &dyn Watched) {
        let has_task = self.may_spin && !self.task_ended.load(Ordering::Acquire);
        if cq.on_event(has_task.then_some(self.runtime)) {
            // It may have ended meanwhile.
            if self.task_ended.load(Ordering::Acquire) {
                cq.stop_spinning(self.runtime);
            }
            self.task.wake();
        }
    }

    /// The runtime's tasks end with it, but threads that wait in its context continue.
    fn end(&self, cq: &dyn Watched) {
        rdma_provider::debug!(
            "runtime shut down; removed its registration of the completion channel"
        );
        cq.reactors().remove(self);
        cq.wake_to_repoll();
    }
}

impl Source {
    fn new(channel: &Channel) -> io::Result<Self> {
        let channel = channel.clone();
        if channel.calls_wakers() {
            return Ok(Self::Task(Served { channel, waker: OnceLock::new() }));
        }
        Readable::new(channel).map(Self::Descriptor)
    }
}

impl Future for ReactorTask {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let Some(reactor) = self.reactor.upgrade() else { return Poll::Ready(()) };
        let Some(cq) = reactor.cq.upgrade() else { return Poll::Ready(()) };
        // Before the queue is polled, so that a later event wakes this task.
        if reactor.may_spin {
            reactor.task.register(context.waker());
        }
        match &reactor.watched.source {
            Some(Source::Task(served)) => {
                served.waker.get_or_init(|| {
                    let waker = context.waker().clone();
                    let key = served.channel.add_waker(&waker);
                    (waker, key)
                });
                if self.rounds == 0 {
                    // Another thread processed the arrivals that led to this completion. Later ones
                    // are processed here.
                    if let Some(packets) = &reactor.watched.packets {
                        packets.get_ref().process_packets();
                    }
                    cq.on_event(reactor.may_spin.then_some(reactor.runtime));
                }
            }
            Some(Source::Descriptor(_)) => {}
            None => return Poll::Ready(()),
        }
        if reactor.may_spin {
            self.rounds = cq.spin(reactor.runtime, self.rounds).unwrap_or(0);
            if self.rounds > 0 {
                wake_in_turn(context, self.rounds);
            }
        }
        Poll::Pending
    }
}

impl Drop for ReactorTask {
    fn drop(&mut self) {
        let Some(reactor) = self.reactor.upgrade() else { return };
        reactor.task_ended.store(true, Ordering::Release);
        drop(reactor.task.take());
        let cq = reactor.cq.upgrade();
        if let Some(cq) = &cq {
            cq.stop_spinning(reactor.runtime);
        }
        if let Some(Source::Task(served)) = &reactor.watched.source {
            served.end();
            if let Some(cq) = cq {
                reactor.end(&*cq);
            }
        }
    }
}

impl Served {
    fn end(&self) {
        if let Some((waker, key)) = self.waker.get() {
            if let Some(key) = *key {
                self.channel.remove_waker(key);
            }
            waker.wake_by_ref();
        }
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.end();
    }
}

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

#[cfg(all(test, not(loom)))]
mod tests {
    use std::future::pending;

    use super::*;
    use crate::software::Network;

    struct Queue {
        device: Device,
        channel: Channel,
        reactors: Reactors,
    }

    impl Watched for Queue {
        fn channel(&self) -> Option<&Channel> {
            Some(&self.channel)
        }

        fn device(&self) -> &Device {
            &self.device
        }

        fn may_spin(&self) -> bool {
            false
        }

        fn on_event(&self, _runtime: Option<runtime::Id>) -> bool {
            false
        }

        fn spin(&self, _runtime: runtime::Id, _rounds: u32) -> Option<u32> {
            None
        }

        fn stop_spinning(&self, _runtime: runtime::Id) {}

        fn wake_to_repoll(&self) {}

        fn reactors(&self) -> &Reactors {
            &self.reactors
        }
    }

    struct WatchesWhenDropped(Arc<Queue>);

    impl Drop for WatchesWhenDropped {
        fn drop(&mut self) {
            assert!(!self.0.reactors.watch(&self.0));
        }
    }

    fn queue() -> Arc<Queue> {
        let device = Device::software_in(&Network::new(), "watched").unwrap();
        let channel = Channel::new(&device).unwrap();
        Arc::new(Queue { device, channel, reactors: Reactors::new() })
    }

    /// Watches `queue` in a runtime that shuts down.
    fn watch_late(queue: &Arc<Queue>) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build().unwrap();
        let late = WatchesWhenDropped(queue.clone());
        drop(runtime.spawn(async move {
            let _late = late;
            pending::<()>().await;
        }));
    }

    #[test]
    fn runtimes_that_have_ended_do_not_accumulate() {
        let queue = queue();
        (0..2 * MAX_WITHOUT_SOURCE).for_each(|_| watch_late(&queue));
        assert_eq!(queue.reactors.list.lock().len(), MAX_WITHOUT_SOURCE);
    }

    #[test]
    fn runtime_that_shuts_down_keeps_no_registration() {
        let queue = queue();
        watch_late(&queue);
        let list = queue.reactors.list.lock();
        let [entry] = &list[..] else { panic!("{} entries", list.len()) };
        let Registrations { source, events, packets } = &entry.watched;
        assert!(source.is_none() && events.is_none() && packets.is_none());
    }
}

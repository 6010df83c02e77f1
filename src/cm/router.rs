//! The event channel of each open device, and the dispatch of its events.
//!
//! The waker that Tokio's reactor calls in a runtime with waiting tasks ([`Reactors`]) drains the
//! channel directly. It records each event in its id's inbox and wakes the waiters.

use std::collections::BTreeMap;
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Weak};

use parking_lot::{Mutex, MutexGuard};
use tokio::runtime::{self, Handle};
use tokio::sync::Notify;

use crate::dispatch::{Any, CmChannel, CmId};
use crate::error::{NoRuntime, VerbError};
use crate::op::{QueuePair, WeakQueuePair};
use crate::types::{QpAttr, QpState, RejectReason};
use crate::verbs::Device;
use rdma_provider::cm_contract::{CmChannel as _, CmEvent, CmEventKind, CmPeer};
use rdma_provider::contract::Context as _;

use super::connection::Disconnection;
use super::disposer::Disposer;
use super::endpoint::on_blocking_thread;
use super::error::ConnectError;
use super::event_reactor::Reactors;
use super::listener::Incoming;

/// The events of an id so far. Each occurs at most once.
#[derive(Debug, Default)]
pub(super) struct IdState {
    pub(super) address: Option<Result<(), i32>>,
    pub(super) route: Option<Result<(), i32>>,
    pub(super) response: Option<CmPeer>,
    pub(super) established: bool,
    /// The first end event.
    pub(super) end: Option<EndReason>,
    /// True if the peer's connection manager knows of the end or cannot be notified; false after an
    /// address change or a failed probe.
    pub(super) peer_knows: bool,
    /// True if TIMEWAIT is over or did not begin.
    pub(super) exited: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum EndReason {
    Rejected { reason: RejectReason, private_data: Vec<u8> },
    Unreachable(i32),
    Error(i32),
    Disconnected,
    TimewaitExit,
    DeviceRemoval,
    AddressChange,
    Keepalive(Disconnection),
}

/// The receiver of one id's events.
///
/// Tasks are woken and queue pairs modified without any lock held: both may call back into this
/// module.
#[derive(Debug)]
pub(super) struct Inbox {
    state: Mutex<IdState>,
    /// Notified of each change of `state`. Its wakers are
    /// [contained](crate::contained::ContainedWaker).
    pub(super) changed: Notify,
    attached: Mutex<AttachedQueuePair>,
    /// Only for listeners.
    pub(super) incoming: Option<Incoming>,
}

/// The queue pair that fails with the connection.
#[derive(Debug, Default)]
struct AttachedQueuePair {
    queue_pair: Option<WeakQueuePair>,
    /// True once the connection has ended; a queue pair attached later fails at once.
    ended: bool,
}

/// The event channel and inboxes of one open device.
pub(super) struct Router {
    device: Device,
    channel: Arc<CmChannel>,
    inboxes: Mutex<BTreeMap<u64, Arc<Inbox>>>,
    drain_state: Mutex<DrainState>,
    reactors: Reactors,
    disposer: Arc<Disposer<Arc<CmId>>>,
}

/// The lock that allows one drain at a time, so that each id's events stay in order.
#[derive(Debug, Default)]
struct DrainState {
    busy: bool,
    /// True if a drain was requested meanwhile.
    again: bool,
}

struct DrainLock<'a>(&'a Mutex<DrainState>);

impl<'a> DrainLock<'a> {
    /// Returns `None` if another drain is running, and makes it check again.
    fn try_lock(drain_state: &'a Mutex<DrainState>) -> Option<Self> {
        let mut state = drain_state.lock();
        if std::mem::replace(&mut state.busy, true) {
            state.again = true;
            return None;
        }
        Some(Self(drain_state))
    }
}

impl Drop for DrainLock<'_> {
    fn drop(&mut self) {
        self.0.lock().busy = false;
    }
}

/// A scheduled drain. If dropped because its runtime shut down, it is scheduled elsewhere.
struct DrainTask {
    router: Option<Arc<Router>>,
    runtime: runtime::Id,
    gone: Vec<runtime::Id>,
}

impl Drop for DrainTask {
    fn drop(&mut self) {
        if let Some(router) = self.router.take() {
            let mut gone = std::mem::take(&mut self.gone);
            gone.push(self.runtime);
            router.schedule_drain(gone);
        }
    }
}

const QUOTA: usize = 64;

/// The channel's descriptor for a reactor.
pub(super) struct Watched(Arc<CmChannel>);

impl std::os::fd::AsRawFd for Watched {
    fn as_raw_fd(&self) -> std::os::fd::RawFd {
        let fd: BorrowedFd<'_> = self.0.fd();
        fd.as_fd().as_raw_fd()
    }
}

static ROUTERS: Mutex<Vec<Weak<Router>>> = Mutex::new(Vec::new());

impl Router {
    /// Returns the router of an open device, and lets the current runtime watch it.
    ///
    /// It is created on first use, which may block (librdmacm reads sysfs), and dropped with its
    /// last id.
    pub(super) async fn of(device: &Device) -> Result<Arc<Self>, ConnectError> {
        NoRuntime::or_current()?;
        let router = match Self::known(device, None) {
            Some(router) => router,
            None => {
                let device = device.clone();
                on_blocking_thread(move || Ok(Self::make(&device)?)).await?
            }
        };
        router.watch()?;
        Ok(router)
    }

    fn make(device: &Device) -> Result<Arc<Self>, VerbError> {
        let router = Arc::new(Self {
            device: device.clone(),
            // May block, so before taking the lock on all routers.
            channel: Arc::new(device.context().create_cm_channel()?),
            inboxes: Mutex::default(),
            drain_state: Mutex::default(),
            reactors: Reactors::new(),
            disposer: Arc::default(),
        });
        let known = Self::known(device, Some(&router));
        Ok(known.unwrap_or(router))
    }

    /// Returns the router of `device`, or registers `new`.
    fn known(device: &Device, new: Option<&Arc<Self>>) -> Option<Arc<Self>> {
        // May hold a last reference, so dropped after the lock.
        let mut seen = Vec::new();
        let mut routers = ROUTERS.lock();
        routers.retain(|router| router.strong_count() > 0);
        seen.extend(routers.iter().filter_map(Weak::upgrade));
        let known = seen.iter().find(|router| router.device.same(device)).cloned();
        if known.is_none() {
            routers.extend(new.map(Arc::downgrade));
        }
        drop(routers);
        drop(seen);
        known
    }

    pub(super) fn device(&self) -> &Device {
        &self.device
    }

    /// Creates an id without blocking: librdmacm writes one command, and the kernel takes a short
    /// lock.
    pub(super) fn create_id(&self) -> Result<CmId, VerbError> {
        self.channel.create_id()
    }

    pub(super) fn watched(&self) -> Watched {
        Watched(Arc::clone(&self.channel))
    }

    pub(super) fn reactors(&self) -> &Reactors {
        &self.reactors
    }

    pub(super) fn watch(self: &Arc<Self>) -> Result<(), NoRuntime> {
        self.reactors.watch(self)
    }

    /// Wakes all waiters, because a runtime that watched the channel has shut down.
    pub(super) fn wake_waiters(&self) {
        let inboxes: Vec<_> = self.inboxes.lock().values().cloned().collect();
        for inbox in inboxes {
            inbox.changed.notify_waiters();
            if let Some(incoming) = &inbox.incoming {
                incoming.wake_all();
            }
        }
    }

    pub(super) fn is_watched(&self) -> bool {
        self.reactors.is_watched()
    }

    pub(super) fn add(&self, key: u64, inbox: &Arc<Inbox>) {
        self.inboxes.lock().insert(key, Arc::clone(inbox));
    }

    pub(super) fn remove(&self, key: u64) {
        let removed = self.inboxes.lock().remove(&key);
        drop(removed);
    }

    pub(super) fn may_block(&self) -> bool {
        self.channel.may_block()
    }

    pub(super) fn port_space(&self) -> usize {
        self.channel.port_space()
    }

    /// Drops ids on a blocking thread if that may block.
    pub(super) fn dispose(self: &Arc<Self>, ids: impl IntoIterator<Item = Arc<CmId>>) {
        if !self.may_block() {
            return ids.into_iter().for_each(drop);
        }
        let Some(runtime) = self.runtime() else { return ids.into_iter().for_each(drop) };
        let router = Arc::downgrade(self);
        self.disposer.dispose(ids, &runtime, move || {
            if let Some(router) = router.upgrade() {
                router.schedule_drain(Vec::new());
            }
        });
    }

    /// Returns a runtime to spawn on. The reactor's wakers may run outside of any runtime context.
    fn runtime(&self) -> Option<Handle> {
        Handle::try_current().ok().or_else(|| self.reactors.handle(&[]))
    }

    /// Dispatches at most [`QUOTA`] events; a task continues later, because a peer can cause any
    /// number. If a drain is running, that one continues instead.
    pub(super) fn drain(self: &Arc<Self>) {
        let (mut left, mut refused) = (QUOTA, Vec::new());
        loop {
            let Some(lock) = DrainLock::try_lock(&self.drain_state) else { break };
            while left > 0 && !self.disposer.is_stalled() {
                match self.channel.take_event() {
                    Ok(Some(event)) => {
                        left -= 1;
                        refused.extend(self.dispatch(event).map(Arc::new));
                    }
                    Ok(None) => break,
                    Err(error) => {
                        tracing::error!(
                            device = self.device.name(),
                            %error,
                            "failed to read a connection manager event; retrying at the next wake"
                        );
                        break;
                    }
                }
            }
            drop(lock);
            if left == 0 || !std::mem::take(&mut self.drain_state.lock().again) {
                break;
            }
        }
        // Together, to occupy one blocking thread.
        self.dispose(refused);
        if left == 0 {
            self.schedule_drain(Vec::new());
        }
    }

    /// Schedules another drain behind the ready tasks, in a runtime not in `gone`.
    fn schedule_drain(self: &Arc<Self>, gone: Vec<runtime::Id>) {
        let runtime = if gone.is_empty() { self.runtime() } else { self.reactors.handle(&gone) };
        // Otherwise no task waits, and the channel stays readable for a later waiter.
        if let Some(runtime) = runtime {
            let mut next =
                DrainTask { router: Some(Arc::clone(self)), runtime: runtime.id(), gone };
            drop(runtime.spawn(async move {
                if let Some(router) = next.router.take() {
                    router.drain();
                }
            }));
        }
    }

    /// Dispatches one event; returns the id of an unwanted connection request.
    fn dispatch(self: &Arc<Self>, event: CmEvent<Any>) -> Option<CmId> {
        let CmEvent { key, kind } = event;
        tracing::trace!(key, ?kind, "connection event");
        let inbox = self.inboxes.lock().get(&key).cloned();
        let Some(inbox) = inbox else {
            // The event's id has been destroyed.
            return match kind {
                CmEventKind::ConnectRequest { id, .. } => Some(id),
                _ => None,
            };
        };
        let kind = match kind {
            CmEventKind::ConnectRequest { id, peer } => {
                let Some(incoming) = &inbox.incoming else { return Some(id) };
                return incoming.push(self, id, peer);
            }
            kind => kind,
        };
        inbox.on_event(kind);
        None
    }
}

impl Inbox {
    pub(super) fn new(incoming: Option<Incoming>) -> Arc<Self> {
        Arc::new(Self {
            state: Mutex::default(),
            changed: Notify::new(),
            attached: Mutex::default(),
            incoming,
        })
    }

    /// Returns the events so far. Dispatch waits for this lock.
    pub(super) fn state(&self) -> MutexGuard<'_, IdState> {
        self.state.lock()
    }

    pub(super) fn on_event(&self, kind: CmEventKind<Any>) {
        if self.incoming.is_some() && matches!(kind, CmEventKind::AddressChange) {
            // Connection managers bind listeners to address and device, not to the network
            // interface.
            tracing::warn!(
                "address of a listener moved to another network interface; it still listens"
            );
            return;
        }
        let ends = kind.is_end();
        if ends {
            // Before waking: a task that sees the end must find the queue pair in the error state.
            let queue_pair = {
                let mut attached = self.attached.lock();
                attached.ended = true;
                attached.queue_pair.take()
            };
            fail_weak(queue_pair);
        }
        if !self.state.lock().on_event(kind) {
            return;
        }
        self.changed.notify_waiters();
        if ends && let Some(incoming) = &self.incoming {
            incoming.wake_all();
        }
    }

    /// Records a failed probe. The queue pair is in the error state already.
    pub(super) fn probe_failed(&self, end: Disconnection) {
        self.state.lock().end.get_or_insert(EndReason::Keepalive(end));
        self.changed.notify_waiters();
    }

    /// Makes the queue pair fail with the connection, at once if that has ended.
    pub(super) fn attach_queue_pair(&self, queue_pair: &QueuePair) {
        let ended = {
            let mut attached = self.attached.lock();
            if !attached.ended {
                attached.queue_pair = Some(queue_pair.downgrade());
            }
            attached.ended
        };
        if ended {
            fail(queue_pair);
        }
    }

    /// Returns true if the end of the connection fails, or has failed, the queue pair.
    pub(super) fn is_ending(&self) -> bool {
        let attached = self.attached.lock();
        attached.ended || attached.queue_pair.is_none()
    }

    pub(super) fn fail_queue_pair(&self) {
        let queue_pair = self.attached.lock().queue_pair.take();
        fail_weak(queue_pair);
    }
}

fn fail_weak(queue_pair: Option<WeakQueuePair>) {
    if let Some(queue_pair) = queue_pair.and_then(|weak| weak.upgrade()) {
        fail(&queue_pair);
    }
}

pub(super) fn fail(queue_pair: &QueuePair) {
    if let Err(error) = queue_pair.modify(&QpAttr::to_state(QpState::Err)) {
        // Closed, or its device is gone, so nothing is in flight.
        tracing::debug!(
            %error,
            qpn = %queue_pair.qpn(),
            "failed to move queue pair to the error state; it is closed or its device is lost"
        );
    }
}

impl IdState {
    /// Records the event. Returns true if waiters must check it.
    fn on_event(&mut self, kind: CmEventKind<Any>) -> bool {
        let end = match kind {
            CmEventKind::AddressResolved => {
                self.address = Some(Ok(()));
                None
            }
            CmEventKind::AddressError(errno) => {
                self.address = Some(Err(errno));
                None
            }
            CmEventKind::RouteResolved => {
                self.route = Some(Ok(()));
                None
            }
            CmEventKind::RouteError(errno) => {
                self.route = Some(Err(errno));
                None
            }
            CmEventKind::ConnectResponse(peer) => {
                self.response = Some(peer);
                None
            }
            CmEventKind::Established => {
                self.established = true;
                None
            }
            CmEventKind::Rejected { reason, private_data } => {
                Some(EndReason::Rejected { reason, private_data })
            }
            CmEventKind::Unreachable(errno) => Some(EndReason::Unreachable(errno)),
            CmEventKind::ConnectError(errno) => Some(EndReason::Error(errno)),
            CmEventKind::Disconnected => Some(EndReason::Disconnected),
            CmEventKind::TimewaitExit => {
                self.exited = true;
                Some(EndReason::TimewaitExit)
            }
            CmEventKind::DeviceRemoval => {
                self.exited = true;
                Some(EndReason::DeviceRemoval)
            }
            CmEventKind::AddressChange => Some(EndReason::AddressChange),
            CmEventKind::ConnectRequest { .. } | CmEventKind::Other(_) => return false,
        };
        self.peer_knows |= end.as_ref().is_some_and(|end| *end != EndReason::AddressChange);
        if self.end.is_none() {
            self.end = end;
        }
        true
    }
}

impl fmt::Debug for Router {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Router")
            .field("device", &self.device)
            .field("ids", &self.inboxes.lock().len())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use super::*;
    use rdma_provider::cm_contract::CmId as _;

    fn rejection() -> CmEventKind<Any> {
        CmEventKind::Rejected { reason: RejectReason::CONSUMER, private_data: vec![1] }
    }

    #[test]
    fn every_event_is_recorded_and_first_end_wins() {
        let peer = CmPeer {
            private_data: vec![2],
            responder_resources: 1,
            initiator_depth: 1,
            srq: false,
        };
        let events: [fn() -> CmEventKind<Any>; 7] = [
            rejection,
            || CmEventKind::Unreachable(110),
            || CmEventKind::ConnectError(22),
            || CmEventKind::Disconnected,
            || CmEventKind::TimewaitExit,
            || CmEventKind::DeviceRemoval,
            || CmEventKind::AddressChange,
        ];
        let ends = [
            EndReason::Rejected { reason: RejectReason::CONSUMER, private_data: vec![1] },
            EndReason::Unreachable(110),
            EndReason::Error(22),
            EndReason::Disconnected,
            EndReason::TimewaitExit,
            EndReason::DeviceRemoval,
            EndReason::AddressChange,
        ];
        for (event, end) in events.into_iter().zip(ends) {
            assert!(event().is_end());
            let inbox = Inbox::new(None);
            inbox.on_event(event());
            inbox.on_event(CmEventKind::Disconnected);
            inbox.on_event(rejection());
            assert_eq!(inbox.state().end, Some(end));
        }
        let inbox = Inbox::new(None);
        let mut changed = pin!(inbox.changed.notified());
        changed.as_mut().enable();
        for event in [
            CmEventKind::AddressResolved,
            CmEventKind::RouteError(113),
            CmEventKind::ConnectResponse(peer.clone()),
            CmEventKind::Established,
        ] {
            assert!(!event.is_end());
            inbox.on_event(event);
        }
        assert!(changed.enable());
        let state = inbox.state();
        assert_eq!((state.address, state.route), (Some(Ok(())), Some(Err(113))));
        assert_eq!((&state.response, state.established), (&Some(peer), true));
        assert_eq!((&state.end, state.exited), (&None, false));
    }

    #[test]
    fn draining_many_events_yields_to_other_tasks() {
        const EVENTS: usize = 5 * QUOTA / 2;
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let device = Device::software_in(&crate::software::Network::new(), "flooded").unwrap();
            let router = Router::make(&device).unwrap();
            let ids: Vec<_> = (0..EVENTS)
                .map(|_| {
                    let (id, inbox) = (router.create_id().unwrap(), Inbox::new(None));
                    router.add(id.key(), &inbox);
                    let unreachable = ([127, 0, 0, 1], 1).into();
                    id.resolve_addr(None, unreachable, std::time::Duration::from_secs(1)).unwrap();
                    (id, inbox)
                })
                .collect();
            let inboxes: Vec<_> = ids.iter().map(|(_, inbox)| inbox.clone()).collect();
            let filed =
                move || inboxes.iter().filter(|inbox| inbox.state().address.is_some()).count();
            router.drain();
            assert_eq!(filed(), QUOTA);
            // Runs between the next two drains.
            let other = tokio::spawn({
                let filed = filed.clone();
                async move { filed() }
            });
            assert_eq!(other.await.unwrap(), 2 * QUOTA);
            tokio::spawn(async {}).await.unwrap();
            assert_eq!(filed(), EVENTS);
        });
    }

    #[test]
    fn unknown_event_wakes_no_waiter() {
        let inbox = Inbox::new(None);
        let mut changed = pin!(inbox.changed.notified());
        changed.as_mut().enable();
        inbox.on_event(CmEventKind::Other(99));
        assert!(!changed.enable());
    }

    #[test]
    fn open_device_shares_one_router_while_in_use() {
        let network = crate::software::Network::new();
        let open = || Device::software_in(&network, "routed").unwrap();
        let (first, second) = (open(), open());
        let router = Router::make(&first).unwrap();
        // Loses a race against the first.
        assert!(Arc::ptr_eq(&router, &Router::make(&first.clone()).unwrap()));
        assert!(Arc::ptr_eq(&router, &Router::known(&first, None).unwrap()));
        assert!(Router::known(&second, None).is_none());
        assert!(!Arc::ptr_eq(&router, &Router::make(&second).unwrap()));
        let gone = Arc::downgrade(&router);
        drop(router);
        assert!(gone.upgrade().is_none());
    }
}

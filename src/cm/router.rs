//! One event channel for each open device, and where its events go.
//!
//! Whoever waits makes sure that its runtime watches the channel ([`Reactors`]). The reactor's waker drains the channel
//! there and then; each event is filed with the id that it belongs to, whose waiters are woken.

use std::collections::HashMap;
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

use super::disposer::Disposer;
use super::endpoint::where_it_may_block;
use super::error::ConnectError;
use super::event_reactor::Reactors;
use super::link::Disconnection;
use super::listener::Incoming;

/// What has happened to an id so far. Nothing happens twice, so nothing is overwritten.
#[derive(Debug, Default)]
pub(super) struct Happened {
    pub(super) address: Option<Result<(), i32>>,
    pub(super) route: Option<Result<(), i32>>,
    pub(super) response: Option<CmPeer>,
    pub(super) established: bool,
    /// The first of the ends that there may be.
    pub(super) end: Option<End>,
    /// The peer's manager knows of the end, or never will. Neither an address that was moved nor a probe that failed is told to it.
    pub(super) peer_knows: bool,
    /// TIMEWAIT is over, or there is none.
    pub(super) exited: bool,
}

/// How a connection, or the attempt at one, ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum End {
    Rejected {
        reason: RejectReason,
        private_data: Vec<u8>,
    },
    Unreachable(i32),
    Error(i32),
    Disconnected,
    TimewaitExit,
    DeviceRemoval,
    AddressChange,
    /// A probe of ours failed.
    Keepalive(Disconnection),
}

/// Where the events of one id go. No lock is held while somebody is woken, or a queue pair is changed, which wakes those
/// who wait for its work: what they do may come back here.
#[derive(Debug)]
pub(super) struct Inbox {
    happened: Mutex<Happened>,
    /// Told of each change of `happened`. The wakers of the waiters are [contained](crate::contained::ContainedWaker).
    pub(super) changed: Notify,
    tied: Mutex<Tied>,
    /// Of a listener.
    pub(super) incoming: Option<Incoming>,
}

/// The queue pair that goes to the error state with the connection.
#[derive(Debug, Default)]
struct Tied {
    queue_pair: Option<WeakQueuePair>,
    /// The connection is over; whoever comes later fails the queue pair himself.
    over: bool,
}

/// See the module.
pub(super) struct Router {
    device: Device,
    channel: Arc<CmChannel>,
    inboxes: Mutex<HashMap<u64, Arc<Inbox>>>,
    filing: Mutex<Filing>,
    reactors: Reactors,
    /// Destroys ids that nobody wants.
    disposer: Arc<Disposer<Arc<CmId>>>,
}

/// Whether somebody takes events: one at a time, so that those of one id stay in order.
#[derive(Debug, Default)]
struct Filing {
    busy: bool,
    /// There may be more.
    again: bool,
}

/// Somebody's turn to take events.
struct Turn<'a>(&'a Mutex<Filing>);

impl<'a> Turn<'a> {
    /// `None` if it is somebody else's, who is told to look again.
    fn begin(filing: &'a Mutex<Filing>) -> Option<Self> {
        let mut state = filing.lock();
        if std::mem::replace(&mut state.busy, true) {
            state.again = true;
            return None;
        }
        Some(Self(filing))
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.lock().busy = false;
    }
}

/// The next turn, in a runtime that may shut down before.
struct GoOn {
    /// `None` once it came.
    router: Option<Arc<Router>>,
    runtime: runtime::Id,
    gone: Vec<runtime::Id>,
}

impl Drop for GoOn {
    fn drop(&mut self) {
        if let Some(router) = self.router.take() {
            let mut gone = std::mem::take(&mut self.gone);
            gone.push(self.runtime);
            router.go_on(gone);
        }
    }
}

/// Events that are filed before others get their turn.
const QUOTA: usize = 64;

/// The channel as something that a reactor can watch.
pub(super) struct Watched(Arc<CmChannel>);

impl std::os::fd::AsRawFd for Watched {
    fn as_raw_fd(&self) -> std::os::fd::RawFd {
        let fd: BorrowedFd<'_> = self.0.fd();
        fd.as_fd().as_raw_fd()
    }
}

/// Routers in use.
static ROUTERS: Mutex<Vec<Weak<Router>>> = Mutex::new(Vec::new());

impl Router {
    /// That of an open device, made when first needed and gone with the last id.
    ///
    /// To make one may take a while: the first time librdmacm reads from sysfs what devices there are.
    ///
    /// The current runtime watches its events from now on.
    pub(super) async fn of(device: &Device) -> Result<Arc<Self>, ConnectError> {
        NoRuntime::or_current()?;
        let router = match Self::known(device, None) {
            Some(router) => router,
            None => {
                let device = device.clone();
                where_it_may_block(move || Ok(Self::make(&device)?)).await?
            }
        };
        router.watch()?;
        Ok(router)
    }

    fn make(device: &Device) -> Result<Arc<Self>, VerbError> {
        let router = Arc::new(Self {
            device: device.clone(),
            // Without the lock for all routers.
            channel: Arc::new(device.context().create_cm_channel()?),
            inboxes: Mutex::default(),
            filing: Mutex::default(),
            reactors: Reactors::new(),
            disposer: Arc::default(),
        });
        // Somebody else may have been faster.
        let known = Self::known(device, Some(&router));
        Ok(known.unwrap_or(router))
    }

    /// The router of a device, if there is one; if not, it is `new` from now on.
    fn known(device: &Device, new: Option<&Arc<Self>>) -> Option<Arc<Self>> {
        // Dropped without the lock: one of them may be the last share of its router by then.
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

    /// Waits for nobody, so it may be called anywhere: librdmacm writes one command to the channel's descriptor, for which the
    /// kernel makes an entry in a list of that descriptor, under a lock that is held for as long as that takes only.
    pub(super) fn create_id(&self) -> Result<CmId, VerbError> {
        self.channel.create_id()
    }

    pub(super) fn watched(&self) -> Watched {
        Watched(Arc::clone(&self.channel))
    }

    pub(super) fn reactors(&self) -> &Reactors {
        &self.reactors
    }

    /// Makes sure that the current runtime watches the channel, if it can.
    pub(super) fn watch(self: &Arc<Self>) -> Result<(), NoRuntime> {
        self.reactors.watch(self)
    }

    /// Wakes all tasks that wait for events: a runtime that watched the channel for them is gone.
    pub(super) fn rouse(&self) {
        let inboxes: Vec<_> = self.inboxes.lock().values().cloned().collect();
        for inbox in inboxes {
            inbox.changed.notify_waiters();
            if let Some(incoming) = &inbox.incoming {
                incoming.wake_all();
            }
        }
    }

    /// True if a runtime watches the channel.
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

    /// True if calls of ids may have to wait.
    pub(super) fn may_block(&self) -> bool {
        self.channel.may_block()
    }

    /// Identifies the set of ports that listeners take theirs from.
    pub(super) fn port_space(&self) -> usize {
        self.channel.port_space()
    }

    /// Drops ids where that holds up nobody.
    pub(super) fn dispose(self: &Arc<Self>, ids: impl IntoIterator<Item = Arc<CmId>>) {
        if !self.may_block() {
            return ids.into_iter().for_each(drop);
        }
        let Some(runtime) = self.runtime() else { return ids.into_iter().for_each(drop) };
        let router = Arc::downgrade(self);
        self.disposer.dispose(ids, &runtime, move || {
            if let Some(router) = router.upgrade() {
                router.go_on(Vec::new());
            }
        });
    }

    /// Wakers of the reactor may run outside of the context of their runtime.
    fn runtime(&self) -> Option<Handle> {
        Handle::try_current().ok().or_else(|| self.reactors.handle(&[]))
    }

    /// Takes and files events, unless somebody is at it, who goes on until there are none, or until others shall have their
    /// turn: peers may raise as many as they like.
    pub(super) fn drain(self: &Arc<Self>) {
        let (mut left, mut refused) = (QUOTA, Vec::new());
        loop {
            let Some(turn) = Turn::begin(&self.filing) else { break };
            while left > 0 && !self.disposer.stalls() {
                match self.channel.take_event() {
                    Ok(Some(event)) => {
                        left -= 1;
                        refused.extend(self.file(event).map(Arc::new));
                    }
                    Ok(None) => break,
                    Err(error) => {
                        tracing::error!(%error, "events of the connection manager cannot be read");
                        break;
                    }
                }
            }
            drop(turn);
            if left == 0 || !std::mem::take(&mut self.filing.lock().again) {
                break;
            }
        }
        // All at once: it takes one thread, however many there are.
        self.dispose(refused);
        if left == 0 {
            self.go_on(Vec::new());
        }
    }

    /// Goes on to drain when others have had their turn, in a runtime other than those that have shut down.
    fn go_on(self: &Arc<Self>, gone: Vec<runtime::Id>) {
        let runtime = if gone.is_empty() { self.runtime() } else { self.reactors.handle(&gone) };
        // Without one nobody waits; whoever comes watches the channel, which is readable.
        if let Some(runtime) = runtime {
            let mut next = GoOn { router: Some(Arc::clone(self)), runtime: runtime.id(), gone };
            drop(runtime.spawn(async move {
                if let Some(router) = next.router.take() {
                    router.drain();
                }
            }));
        }
    }

    /// Files one event. What comes back is an id that nobody wants.
    fn file(self: &Arc<Self>, event: CmEvent<Any>) -> Option<CmId> {
        let CmEvent { key, kind } = event;
        tracing::trace!(key, ?kind, "connection event");
        let inbox = self.inboxes.lock().get(&key).cloned();
        let Some(inbox) = inbox else {
            // Of an id that is gone.
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
            happened: Mutex::default(),
            changed: Notify::new(),
            tied: Mutex::default(),
            incoming,
        })
    }

    /// What has happened so far. Not to be kept: events wait for it.
    pub(super) fn happened(&self) -> MutexGuard<'_, Happened> {
        self.happened.lock()
    }

    pub(super) fn on_event(&self, kind: CmEventKind<Any>) {
        if self.incoming.is_some() && matches!(kind, CmEventKind::AddressChange) {
            // The manager goes on to take requests for it: it listens by address and device, not by network interface.
            tracing::warn!("the address of a listener was moved to another network interface");
            return;
        }
        let ends = kind.is_end();
        if ends {
            // Before it is told: who sees the end finds the queue pair in the error state.
            let queue_pair = {
                let mut tied = self.tied.lock();
                tied.over = true;
                tied.queue_pair.take()
            };
            fail_weak(queue_pair);
        }
        if !self.happened.lock().on_event(kind) {
            return;
        }
        self.changed.notify_waiters();
        if ends && let Some(incoming) = &self.incoming {
            incoming.wake_all();
        }
    }

    /// A probe failed, and the queue pair is in the error state.
    pub(super) fn probe_failed(&self, end: Disconnection) {
        self.happened.lock().end.get_or_insert(End::Keepalive(end));
        self.changed.notify_waiters();
    }

    /// The queue pair ends with the connection from now on; at once, if that is over.
    pub(super) fn tie(&self, queue_pair: &QueuePair) {
        let over = {
            let mut tied = self.tied.lock();
            if !tied.over {
                tied.queue_pair = Some(queue_pair.downgrade());
            }
            tied.over
        };
        if over {
            fail(queue_pair);
        }
    }

    /// True if the queue pair went to the error state, or is about to, because the connection ends, at this end or at the peer.
    pub(super) fn is_ending(&self) -> bool {
        let tied = self.tied.lock();
        tied.over || tied.queue_pair.is_none()
    }

    /// Ends what is in flight, once.
    pub(super) fn fail_queue_pair(&self) {
        let queue_pair = self.tied.lock().queue_pair.take();
        fail_weak(queue_pair);
    }
}

fn fail_weak(queue_pair: Option<WeakQueuePair>) {
    if let Some(queue_pair) = queue_pair.and_then(|weak| weak.upgrade()) {
        fail(&queue_pair);
    }
}

/// To the error state.
pub(super) fn fail(queue_pair: &QueuePair) {
    if let Err(error) = queue_pair.modify(&QpAttr::to_state(QpState::Err)) {
        // Closed, or its device is gone: then it does nothing more either.
        tracing::debug!(%error, qpn = %queue_pair.qpn(), "queue pair of a connection that ended");
    }
}

impl Happened {
    /// True if somebody may be interested.
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
                Some(End::Rejected { reason, private_data })
            }
            CmEventKind::Unreachable(errno) => Some(End::Unreachable(errno)),
            CmEventKind::ConnectError(errno) => Some(End::Error(errno)),
            CmEventKind::Disconnected => Some(End::Disconnected),
            CmEventKind::TimewaitExit => {
                self.exited = true;
                Some(End::TimewaitExit)
            }
            CmEventKind::DeviceRemoval => {
                self.exited = true;
                Some(End::DeviceRemoval)
            }
            CmEventKind::AddressChange => Some(End::AddressChange),
            CmEventKind::ConnectRequest { .. } | CmEventKind::Other(_) => return false,
        };
        self.peer_knows |= end.as_ref().is_some_and(|end| *end != End::AddressChange);
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
    fn every_event_is_filed_and_the_first_end_is_the_end() {
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
            End::Rejected { reason: RejectReason::CONSUMER, private_data: vec![1] },
            End::Unreachable(110),
            End::Error(22),
            End::Disconnected,
            End::TimewaitExit,
            End::DeviceRemoval,
            End::AddressChange,
        ];
        for (event, end) in events.into_iter().zip(ends) {
            assert!(event().is_end());
            let inbox = Inbox::new(None);
            inbox.on_event(event());
            // What comes after is not why it ended.
            inbox.on_event(CmEventKind::Disconnected);
            inbox.on_event(rejection());
            assert_eq!(inbox.happened().end, Some(end));
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
        let happened = inbox.happened();
        assert_eq!((happened.address, happened.route), (Some(Ok(())), Some(Err(113))));
        assert_eq!((&happened.response, happened.established), (&Some(peer), true));
        assert_eq!((&happened.end, happened.exited), (&None, false));
    }

    #[test]
    fn a_flood_of_events_lets_others_have_their_turn() {
        const EVENTS: usize = 5 * QUOTA / 2;
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let device = Device::software_in(&crate::software::Network::new(), "flooded").unwrap();
            let router = Router::make(&device).unwrap();
            let ids: Vec<_> = (0..EVENTS)
                .map(|_| {
                    let (id, inbox) = (router.create_id().unwrap(), Inbox::new(None));
                    router.add(id.key(), &inbox);
                    let nobody = ([127, 0, 0, 1], 1).into();
                    id.resolve_addr(None, nobody, std::time::Duration::from_secs(1)).unwrap();
                    (id, inbox)
                })
                .collect();
            let inboxes: Vec<_> = ids.iter().map(|(_, inbox)| inbox.clone()).collect();
            let filed =
                move || inboxes.iter().filter(|inbox| inbox.happened().address.is_some()).count();
            router.drain();
            assert_eq!(filed(), QUOTA);
            // A task that stands in line behind the next turn comes before the one after that.
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
    fn event_that_nobody_knows_wakes_nobody() {
        let inbox = Inbox::new(None);
        let mut changed = pin!(inbox.changed.notified());
        changed.as_mut().enable();
        inbox.on_event(CmEventKind::Other(99));
        assert!(!changed.enable());
    }

    #[test]
    fn an_open_device_has_one_router_as_long_as_somebody_uses_it() {
        let network = crate::software::Network::new();
        let open = || Device::software_in(&network, "routed").unwrap();
        let (first, second) = (open(), open());
        let router = Router::make(&first).unwrap();
        // As those do who come at once.
        assert!(Arc::ptr_eq(&router, &Router::make(&first.clone()).unwrap()));
        assert!(Arc::ptr_eq(&router, &Router::known(&first, None).unwrap()));
        assert!(Router::known(&second, None).is_none());
        assert!(!Arc::ptr_eq(&router, &Router::make(&second).unwrap()));
        let gone = Arc::downgrade(&router);
        drop(router);
        assert!(gone.upgrade().is_none());
    }
}

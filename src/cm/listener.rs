use std::collections::VecDeque;
use std::fmt;
use std::future::poll_fn;
use std::net::SocketAddr;
use std::sync::{Arc, Weak};
use std::task::Context;
use std::time::{Duration, Instant};

use rdma_provider::locks::Mutex;
use tokio::net::ToSocketAddrs;

use crate::coop::within_budget;
use crate::dispatch::CmId;
use crate::error::{NoRuntime, SetupError, VerbError};
use crate::op::{QueuePair, QueuePairBuilder};
use crate::types::{Gid, PortNum, Qpn};
use crate::verbs::Device;
use rdma_provider::cm_contract::{
    Admit, CmAnswer, CmChannel as _, CmId as _, CmPeer, MAX_REJECT_DATA, MAX_RESPONSE_DATA,
};

use super::config::{ConnectConfig, ListenConfig, check_private_data};
use super::connection::CmConnection;
use super::connector::{lookup, no_address};
use super::endpoint::{Endpoint, FailUnlessConnected, on_blocking_thread, with_deadline};
use super::error::{ConnectError, ConnectStep};
use super::inbox::{Inbox, TakeRequests};
use super::keepalive::Keepalive;
use super::path::{LocalSource, Reads, make_ready};
use super::router::{CreateId, Router};
use crate::clock::{self, Sleep};

/// Listens for connection requests at an address. Dropping it releases the address and rejects
/// requests that were not accepted. The [module](super) has an example.
///
/// # Cancel safety
///
/// A dropped future of `bind` leaves no listener behind, and one of `accept` loses no request.
pub struct Listener {
    bound: Mutex<Option<(Endpoint, Arc<ListenAddress>)>>,
    router: Arc<Router>,
    inbox: Arc<Inbox>,
    incoming: Arc<Incoming>,
    address: SocketAddr,
}

impl Listener {
    /// Calls [`bind_with`](Self::bind_with) with default [`ListenConfig`].
    ///
    /// # Errors
    ///
    /// As for `bind_with`.
    pub async fn bind(
        device: &Device,
        address: impl ToSocketAddrs + fmt::Debug,
    ) -> Result<Self, ConnectError> {
        Self::bind_with(device, address, &ListenConfig::default()).await
    }

    /// Listens at the first available of the addresses. Port 0 selects a free port. `0.0.0.0`
    /// stands for every IPv4 address of the device, and `::` for every address.
    ///
    /// # Errors
    ///
    /// [`ConnectError::AddressInUse`], [`ConnectError::AddressNotAvailable`] for an address that
    /// the device does not have, [`ConnectError::Lookup`] for an unknown host name,
    /// [`ConnectError::Setup`] for a backlog of 0, [`ConnectError::Verb`] if a verb fails.
    pub async fn bind_with(
        device: &Device,
        address: impl ToSocketAddrs + fmt::Debug,
        config: &ListenConfig,
    ) -> Result<Self, ConnectError> {
        Self::bind_by(device, address, config, Router::create_id).await
    }

    pub(super) async fn bind_by(
        device: &Device,
        address: impl ToSocketAddrs + fmt::Debug,
        config: &ListenConfig,
        create_id: CreateId,
    ) -> Result<Self, ConnectError> {
        let backlog = config.checked()?;
        let mut last = None;
        for address in lookup(address, &ConnectConfig::default()).await? {
            let attempt = async {
                let router = Router::of(device).await?;
                match Self::bind_one(&router, address, backlog, create_id).await {
                    Err(ConnectError::AddressInUse { .. }) => {
                        // A listener dropped a moment ago may still have the address.
                        router.disposed().await?;
                        Self::bind_one(&router, address, backlog, create_id).await
                    }
                    bound => bound,
                }
            };
            match attempt.await {
                Ok(listener) => return Ok(listener),
                Err(error) => last = Some(error.during(ConnectStep::Listen, address)),
            }
        }
        Err(last.unwrap_or_else(no_address))
    }

    async fn bind_one(
        router: &Arc<Router>,
        address: SocketAddr,
        backlog: u32,
        create_id: CreateId,
    ) -> Result<Self, ConnectError> {
        let incoming = Incoming::new(router, backlog);
        let inbox = Inbox::new(Some(incoming.clone()));
        let endpoint = Endpoint::new(router, create_id(router)?, inbox);
        let port_space = router.channel.port_space();
        let refused = move |error: VerbError| match error.errno {
            VerbError::EADDRINUSE => ConnectError::AddressInUse {
                address,
                device: ListenAddress::device_at(port_space, address),
            },
            VerbError::EADDRNOTAVAIL => ConnectError::AddressNotAvailable {
                address,
                source: None,
                step: ConnectStep::Listen,
            },
            _ => error.into(),
        };
        // If the future is dropped while a thread binds, the thread drops the endpoint, and whoever
        // binds the address next waits for that. Fields of a tuple are dropped in order.
        let held = (endpoint, router.hold_disposed());
        let bind = move || {
            let (endpoint, _) = &held;
            endpoint.id().bind(address).map_err(refused)?;
            endpoint.id().listen(backlog).map_err(refused)?;
            Ok(held)
        };
        let bound =
            if router.channel.may_block() { on_blocking_thread(bind).await } else { bind() };
        let (endpoint, _) = bound?;
        let address = endpoint.id().local_addr().unwrap_or(address);
        let entry = ListenAddress::new(router, address);
        rdma_provider::debug!(%address, backlog, device = router.device.name(), "listening");
        let (router, inbox) = (router.clone(), endpoint.inbox().clone());
        Ok(Self { bound: Mutex::new(Some((endpoint, entry))), router, inbox, incoming, address })
    }

    /// Returns the device.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.router.device
    }

    /// Returns the listening address, with the actual port.
    #[must_use]
    pub const fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// Returns the next connection request that was not withdrawn, in the order of arrival.
    ///
    /// # Errors
    ///
    /// [`ConnectError::DeviceRemoved`] if no more requests can arrive. If the address moves to
    /// another network interface (`RDMA_CM_EVENT_ADDR_CHANGE` of `rdma_get_cm_event(3)`), the
    /// listener stays bound.
    pub async fn accept(&self) -> Result<ConnectionRequest, ConnectError> {
        self.router.watch()?;
        loop {
            let Pending { endpoint, peer, .. } = self.next().await?;
            let (device, address) = (&self.router.device, endpoint.id().peer_addr());
            let route = endpoint.id().route();
            let Some(route) = route.filter(|route| route.device == device.name()) else {
                rdma_provider::warn!(
                    ?address,
                    device = device.name(),
                    "rejected a connection request: it arrived on another device"
                );
                continue;
            };
            let source = route.destination;
            match LocalSource::find(device, endpoint.id(), &route) {
                Ok(local_source) => {
                    let local = endpoint.id().local_addr().unwrap_or(self.address);
                    let address = address.unwrap_or(SocketAddr::new(source.to_ip(), 0));
                    return Ok(ConnectionRequest {
                        endpoint,
                        peer,
                        local_source,
                        source,
                        local,
                        address,
                    });
                }
                Err(error) => {
                    rdma_provider::warn!(
                        ?address,
                        device = device.name(),
                        %error,
                        "failed to find the path of a connection request; rejected it"
                    )
                }
            }
        }
    }

    /// Lets the provider answer requests as `admit` decides; returns false if it cannot. Requests
    /// then arrive when their peers have confirmed, and accepting them sends no message.
    pub(crate) fn answer(&self, admit: Arc<dyn Admit>) -> bool {
        let bound = self.bound.lock();
        bound.as_ref().is_some_and(|(endpoint, _)| endpoint.id().answer(admit))
    }

    pub(crate) fn watch(&self) -> Result<(), NoRuntime> {
        self.router.watch()
    }

    /// Releases the address and rejects requests that were not accepted. Futures of
    /// [`accept`](Self::accept) never complete afterwards.
    pub(crate) fn stop(&self) {
        let bound = self.bound.lock().take();
        drop(bound);
        let rejected = std::mem::take(&mut *self.incoming.queue.lock());
        drop(rejected);
    }

    pub(crate) fn answer_with(
        device: &Device,
        config: &ConnectConfig,
    ) -> Result<CmAnswer, ConnectError> {
        let private_data = config.checked(MAX_RESPONSE_DATA)?;
        Ok(Reads::of(device, config)?.answer(private_data.to_vec()))
    }

    pub(crate) fn waiting(&self) -> PendingRequests {
        PendingRequests(Arc::downgrade(&self.incoming))
    }

    #[cfg(all(test, not(loom)))]
    pub(super) fn inbox(&self) -> &Inbox {
        &self.inbox
    }

    async fn next(&self) -> Result<Pending, ConnectError> {
        let (inbox, incoming) = (&self.inbox, &self.incoming);
        // Declared first, so that it is dropped after `wait`.
        let _next = WakeNext(self);
        let mut wait = inbox.wait();
        let mut poll = |context: &mut Context<'_>| {
            let mut withdrawn = Vec::new();
            let polled =
                wait.poll(context, |state| match (incoming.pop(&mut withdrawn), &state.end) {
                    (Some(pending), _) => Some(Ok(pending)),
                    (None, Some(end)) => {
                        Some(Err(ConnectError::from_end(end, ConnectStep::Listen, self.address)))
                    }
                    (None, None) => None,
                });
            if polled.is_pending() {
                // On each poll, because the task may have moved from a runtime that has shut down.
                self.router.watch()?;
            }
            polled
        };
        poll_fn(|context| within_budget(context, &mut poll)).await
    }
}

/// Wakes the next acceptor if requests are left, because this one may have consumed their wake-up.
struct WakeNext<'a>(&'a Listener);

impl Drop for WakeNext<'_> {
    fn drop(&mut self) {
        if !self.0.incoming.queue.lock().is_empty() {
            self.0.inbox.wake_one();
        }
    }
}

impl fmt::Debug for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Listener").field("address", &self.address).finish_non_exhaustive()
    }
}

#[derive(Debug, Clone)]
pub(crate) struct PendingRequests(Weak<Incoming>);

impl PendingRequests {
    /// Waits until a request has waited for `age`, and for at least `age`. Each request completes
    /// one call. Never completes after the listener was dropped.
    pub(crate) async fn displaced(&self, age: Duration) {
        let mut sleep = Sleep::new(clock::deadline(age));
        loop {
            poll_fn(|context| sleep.poll(context)).await;
            if self.0.upgrade().is_some_and(|incoming| incoming.displaces(age)) {
                return;
            }
            // No event reports the age of a request, so poll for it.
            sleep.reset(clock::deadline(age / 2));
        }
    }
}

#[cfg(all(test, not(loom)))]
impl PendingRequests {
    pub(crate) fn any(&self) -> bool {
        self.0.upgrade().is_some_and(|incoming| !incoming.queue.lock().is_empty())
    }
}

static LISTEN_ADDRESSES: Mutex<Vec<Weak<ListenAddress>>> = Mutex::new(Vec::new());

struct ListenAddress {
    port_space: usize,
    address: SocketAddr,
    device: String,
}

impl ListenAddress {
    fn new(router: &Router, address: SocketAddr) -> Arc<Self> {
        let device = router.device.name().to_owned();
        let new = Arc::new(Self { port_space: router.channel.port_space(), address, device });
        let mut addresses = LISTEN_ADDRESSES.lock();
        addresses.retain(|other| other.strong_count() > 0);
        addresses.push(Arc::downgrade(&new));
        new
    }

    /// An unspecified address conflicts with every address.
    fn device_at(port_space: usize, address: SocketAddr) -> Option<String> {
        let meet = |held: &Arc<Self>| {
            let any = held.address.ip().is_unspecified() || address.ip().is_unspecified();
            let same = held.port_space == port_space && held.address.port() == address.port();
            same && (any || held.address.ip() == address.ip())
        };
        let addresses = LISTEN_ADDRESSES.lock();
        addresses.iter().filter_map(Weak::upgrade).find(meet).map(|held| held.device.clone())
    }
}

#[derive(Debug)]
struct Incoming {
    router: Weak<Router>,
    queue: Mutex<VecDeque<Pending>>,
    limit: usize,
}

#[derive(Debug)]
struct Pending {
    endpoint: Endpoint,
    peer: CmPeer,
    since: Instant,
    displaces: bool,
}

impl Incoming {
    fn new(router: &Arc<Router>, backlog: u32) -> Arc<Self> {
        let router = Arc::downgrade(router);
        Arc::new(Self { router, queue: Mutex::default(), limit: backlog as usize })
    }

    /// Moves withdrawn requests to `withdrawn`, to be dropped without the lock.
    fn pop(&self, withdrawn: &mut Vec<Pending>) -> Option<Pending> {
        let mut queue = self.queue.lock();
        loop {
            match queue.pop_front() {
                Some(pending) if pending.endpoint.has_ended() => withdrawn.push(pending),
                found => return found,
            }
        }
    }

    fn displaces(&self, age: Duration) -> bool {
        let mut queue = self.queue.lock();
        let old = |pending: &&mut Pending| {
            pending.displaces && clock::since(pending.since) >= age && !pending.endpoint.has_ended()
        };
        let found = queue.iter_mut().find(old);
        found.is_some_and(|pending| std::mem::replace(&mut pending.displaces, false))
    }
}

impl TakeRequests for Incoming {
    fn push(&self, id: CmId, peer: CmPeer) -> Option<CmId> {
        let Some(router) = self.router.upgrade() else { return Some(id) };
        // An answered peer considers the connection established, so its request is kept. The
        // provider does not answer while the backlog is full, which bounds the excess.
        let answered = id.reserved().is_some();
        let mut queue = self.queue.lock();
        let mut stale = VecDeque::new();
        if queue.len() >= self.limit {
            // Remove withdrawn requests; drop them without the lock.
            let (kept, gone) = queue.drain(..).partition(|pending| !pending.endpoint.has_ended());
            *queue = kept;
            stale = gone;
        }
        let refused = if !answered && queue.len() >= self.limit {
            rdma_provider::debug!(
                backlog = self.limit,
                "rejected a connection request: the backlog is full"
            );
            Some(id)
        } else {
            let endpoint = Endpoint::new(&router, id, Inbox::new(None));
            queue.push_back(Pending { endpoint, peer, since: clock::now(), displaces: true });
            None
        };
        drop(queue);
        drop::<VecDeque<Pending>>(stale);
        refused
    }
}

/// A peer's request to connect. Dropping it rejects the request.
pub struct ConnectionRequest {
    endpoint: Endpoint,
    peer: CmPeer,
    local_source: LocalSource,
    source: Gid,
    local: SocketAddr,
    address: SocketAddr,
}

impl ConnectionRequest {
    pub(super) fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    pub(super) const fn local_source(&self) -> &LocalSource {
        &self.local_source
    }

    /// Returns the device on which the request arrived.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.endpoint.router.device
    }

    /// Returns the peer's address.
    #[must_use]
    pub const fn peer_addr(&self) -> SocketAddr {
        self.address
    }

    /// Returns the address to which the request was sent.
    #[must_use]
    pub const fn local_addr(&self) -> SocketAddr {
        self.local
    }

    /// Returns the peer's GID.
    #[must_use]
    pub const fn source(&self) -> Gid {
        self.source
    }

    /// Returns the port on which the request arrived.
    #[must_use]
    pub const fn port(&self) -> PortNum {
        self.local_source.port
    }

    /// Returns the index of the destination GID in that port's table.
    #[must_use]
    pub const fn gid_index(&self) -> u8 {
        self.local_source.entry.index
    }

    /// Returns the request's private data, padded with zeros to 56 bytes, because requests do not
    /// carry its length (IBTA 12.6.5).
    #[must_use]
    pub fn private_data(&self) -> &[u8] {
        &self.peer.private_data
    }

    /// Returns the maximum of READs and atomics that the peer wants to have outstanding.
    #[must_use]
    pub const fn reads_issued(&self) -> u8 {
        self.peer.responder_resources
    }

    /// Returns the maximum of outstanding READs and atomics that the peer serves.
    #[must_use]
    pub const fn reads_served(&self) -> u8 {
        self.peer.initiator_depth
    }

    /// Sets the builder's port and GID to the destination of the request, and its partition to that
    /// of the request, unless its [path](QueuePairBuilder::path) names one.
    #[must_use]
    pub fn prepare(&self, builder: QueuePairBuilder) -> QueuePairBuilder {
        self.local_source.prepare(builder).number(self.reserved())
    }

    /// Lets the provider answer this request, see [`Listener::answer`]. If it returns true, the
    /// request must no longer be used.
    pub(crate) fn answer_late(&self, answer: &CmAnswer) -> bool {
        self.endpoint.id().answer_late(answer)
    }

    pub(crate) fn reserved(&self) -> Option<Qpn> {
        self.endpoint.id().reserved()
    }

    /// Accepts the request with `queue_pair`, and waits until the peer confirms.
    ///
    /// The queue pair must be in INIT and send from the request's port and GID. The peer's first
    /// messages may arrive before this returns, so post receives first.
    ///
    /// # Errors
    ///
    /// Any error rejects the request. Once the handshake has begun, an error also leaves the queue
    /// pair in the error state.
    ///
    /// - [`ConnectError::Rejected`] if the peer has withdrawn the request;
    /// - [`ConnectError::Unreachable`] or [`ConnectError::TimedOut`] if the peer does not confirm;
    /// - [`ConnectError::Limit`] for private data of more than 196 bytes;
    /// - [`ConnectError::Setup`] for a queue pair that does not fit.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future rejects the request or ends the connection; the queue pair goes to the
    /// error state.
    pub async fn accept(
        self,
        queue_pair: &QueuePair,
        config: &ConnectConfig,
    ) -> Result<CmConnection, ConnectError> {
        let Self { endpoint, peer, local_source, local, address, .. } = self;
        endpoint.router.watch()?;
        let private_data = config.checked(MAX_RESPONSE_DATA)?;
        let device = endpoint.router.device.clone();
        let misfit = |error| ConnectError::from(error).during(ConnectStep::Prepare, address);
        local_source.check(&device, queue_pair).map_err(misfit)?;
        local_source.join_partition(queue_pair, config).map_err(misfit)?;
        Keepalive::check(config.keepalive, config.retries.timeout, queue_pair).map_err(misfit)?;
        let guard = FailUnlessConnected::new(queue_pair);
        let reads = Reads::of(&device, config)?.agreed(&peer);
        with_deadline(config.timeout, ConnectStep::Establish, address, async || {
            endpoint.inbox().attach_queue_pair(queue_pair);
            let params = reads.params(queue_pair, private_data, config.timeout);
            let ready = make_ready(endpoint.id(), queue_pair, reads, config);
            let accepted = ready.and_then(|()| Ok(endpoint.id().accept(&params)?));
            endpoint.explain(accepted, ConnectStep::Accept, address).await?;
            queue_pair.note_connected();
            endpoint
                .wait_for(|state| match (state.established, &state.end) {
                    // Established even if it has ended again: data of the peer may have arrived.
                    (true, _) => Some(Ok(())),
                    (false, Some(end)) => {
                        Some(Err(ConnectError::from_end(end, ConnectStep::Establish, address)))
                    }
                    (false, None) => None,
                })
                .await
        })
        .await?;
        let (addresses, data) = ((local, address), peer.private_data);
        let connection = CmConnection::new(endpoint, data, addresses, config, queue_pair)?;
        guard.connected();
        Ok(connection)
    }

    /// Rejects the request. The peer gets [`ConnectError::Rejected`] with this private data.
    ///
    /// # Errors
    ///
    /// [`ConnectError::Limit`] for private data of more than 148 bytes, [`ConnectError::Rejected`]
    /// if the peer has withdrawn the request. `Limit` and [`ConnectError::NoRuntime`] reject the
    /// request without private data.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future still rejects the request.
    pub async fn reject(self, private_data: &[u8]) -> Result<(), ConnectError> {
        check_private_data(private_data, MAX_REJECT_DATA)?;
        self.endpoint.router.watch()?;
        let result = self.endpoint.id().reject(private_data);
        self.endpoint.explain(result, ConnectStep::Reject, self.address).await
    }

    pub(crate) fn refuse(self, private_data: &[u8]) {
        if let Err(error) = self.endpoint.id().reject(private_data) {
            rdma_provider::debug!(
                peer = %self.address,
                %error,
                "failed to reject connection request"
            );
        }
    }

    /// Returns `error`, or the end of the connection if that has invalidated the reserved number.
    pub(crate) async fn explain_setup_error(
        &self,
        error: SetupError,
    ) -> Result<SetupError, ConnectError> {
        if self.reserved().is_none() {
            return Ok(error);
        }
        let failed = Err::<(), _>(error.clone());
        match self.endpoint.explain(failed, ConnectStep::Prepare, self.address).await {
            Err(ConnectError::Setup { .. } | ConnectError::Verb { .. }) | Ok(()) => Ok(error),
            Err(gone) => Err(gone),
        }
    }

    pub(crate) fn prepare_error(&self, error: SetupError) -> ConnectError {
        ConnectError::from(error).during(ConnectStep::Prepare, self.address)
    }
}

impl fmt::Debug for ConnectionRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConnectionRequest")
            .field("peer", &self.address)
            .field("local", &self.local)
            .field("local_source", &self.local_source)
            .finish_non_exhaustive()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::net::IpAddr;

    use futures::future::join_all;

    use super::*;
    use crate::cm::resolve;
    use crate::contained::tests::HANG;
    use crate::engine::{CompletionMode, CompletionQueue};
    use crate::software::Network;
    use rdma_provider::cm_contract::{CmEventKind, Verdict};

    #[derive(Debug)]
    struct All(CmAnswer);

    impl Admit for All {
        fn admit(&self, _: IpAddr, _: &[u8]) -> Verdict {
            Verdict::Answer(self.0.clone())
        }

        fn evicted(&self) {}
    }

    /// Sends all requests before the first confirmation: a request counts only once confirmed.
    #[test]
    fn answered_peers_are_kept_beyond_backlog() {
        const ALL: usize = 6;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let test = async {
            let network = Network::new();
            let (server, client) = (
                Device::software_in(&network, "server").unwrap(),
                Device::software_in(&network, "client").unwrap(),
            );
            let listener =
                Listener::bind_with(&server, "127.0.0.1:0", &ListenConfig::default().backlog(2))
                    .await
                    .unwrap();
            let config = ConnectConfig::default();
            let answer = Listener::answer_with(&server, &config).unwrap();
            assert!(listener.answer(Arc::new(All(answer))));
            let pd = client.protection_domain().unwrap();
            let queue = CompletionQueue::new(&client, CompletionMode::Event).unwrap();
            let mut routes = Vec::new();
            for _ in 0..ALL {
                let route = resolve(&client, listener.local_addr()).await.unwrap();
                let builder = QueuePair::builder(&pd, &queue).max_send_wr(1).max_recv_wr(1);
                let queue_pair = route.prepare(builder).build().unwrap();
                routes.push((route, queue_pair));
            }
            let links = join_all(routes.into_iter().map(|(route, queue_pair)| {
                let config = &config;
                async move {
                    let link = route.connect(&queue_pair, config).await.unwrap();
                    (link, queue_pair)
                }
            }))
            .await;
            let mut requests = Vec::new();
            for _ in 0..ALL {
                requests.push(listener.accept().await.unwrap());
            }
            assert!(requests.iter().all(|request| request.reserved().is_some()));
            assert!(links.iter().all(|(link, _)| link.is_connected()));
        };
        runtime.block_on(async { tokio::time::timeout(HANG, test).await.expect("test timed out") });
    }

    #[test]
    fn full_backlog_drops_withdrawn_requests_for_a_new_one() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let device = Device::software_in(&Network::new(), "withdrawn").unwrap();
            let router = Router::of(&device).await.unwrap();
            let incoming = Incoming::new(&router, 2);
            let is_queued = || {
                let peer = CmPeer {
                    private_data: Vec::new(),
                    responder_resources: 1,
                    initiator_depth: 1,
                    srq: false,
                };
                incoming.push(router.create_id().unwrap(), peer).is_none()
            };
            assert!(is_queued() && is_queued() && !is_queued(), "the backlog is two requests");
            incoming.queue.lock()[0].endpoint.inbox().on_event(CmEventKind::Disconnected);
            assert!(is_queued());
            assert!(incoming.queue.lock().iter().all(|pending| !pending.endpoint.has_ended()));
            assert!(!is_queued(), "none of the others was withdrawn");
        });
    }
}

//! The passive side: listen, accept, reject.

use std::collections::VecDeque;
use std::fmt;
use std::future::{Future, poll_fn};
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::task::Poll;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::net::ToSocketAddrs;
use tokio::sync::Notify;

use crate::contained::ContainedWaker;
use crate::dispatch::CmId;
use crate::error::{LimitError, SetupError, VerbError};
use crate::op::{QueuePair, QueuePairBuilder};
use crate::types::{Gid, PortNum, Qpn};
use crate::verbs::Device;
use rdma_provider::cm_contract::{
    Admit, CmAnswer, CmId as _, CmPeer, MAX_REJECT_DATA, MAX_RESPONSE_DATA,
};

use super::clock::{self, Sleep};
use super::connector::{lookup, no_address};
use super::endpoint::{Endpoint, Halfway, within};
use super::error::{ConnectError, Step};
use super::keepalive::Keepalive;
use super::link::Link;
use super::options::{ListenOptions, Options};
use super::path::{Path, Reads, make_ready};
use super::router::{Inbox, Router};

/// Takes requests to connect that arrive at an address.
///
/// Dropping it gives the address back and rejects the requests that nobody has accepted; connections go on.
///
/// ```
/// use tokio_rdma::cm::{ConnectError, ListenOptions, Listener};
/// # use tokio_rdma::Device;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let device = Device::software()?;
/// let listener = Listener::bind_with(&device, "127.0.0.1:0", &ListenOptions::default().backlog(16)).await?;
/// let taken = Listener::bind(&device, listener.local_addr()).await;
/// assert!(matches!(taken, Err(ConnectError::AddressInUse { .. })));
/// # Ok(())
/// # }
/// ```
pub struct Listener {
    endpoint: Endpoint,
    address: SocketAddr,
    _held: Holding,
}

impl Listener {
    /// Listens at the first of the addresses that can be had, with default [`ListenOptions`].
    ///
    /// # Errors
    ///
    /// As [`bind_with`](Self::bind_with).
    ///
    /// # Cancel safety
    ///
    /// As [`bind_with`](Self::bind_with): dropping the future leaves nothing behind.
    pub async fn bind(device: &Device, address: impl ToSocketAddrs) -> Result<Self, ConnectError> {
        Self::bind_with(device, address, &ListenOptions::default()).await
    }

    /// Listens at the first of the addresses that can be had. Port 0 takes one that is free; the unspecified address is
    /// every one of the device (0.0.0.0 of IPv4, :: of both families).
    ///
    /// # Errors
    ///
    /// [`ConnectError::NoRuntime`] outside of a Tokio runtime with an I/O driver,
    /// [`ConnectError::AddressInUse`], [`ConnectError::AddressNotAvailable`] for one that is not of the device,
    /// [`ConnectError::Lookup`] for a host name that means nothing, [`ConnectError::Setup`] for a backlog of 0,
    /// [`ConnectError::Verb`] if the provider refuses.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves nothing behind.
    pub async fn bind_with(
        device: &Device,
        address: impl ToSocketAddrs,
        options: &ListenOptions,
    ) -> Result<Self, ConnectError> {
        let backlog = options.checked()?;
        let mut last = no_address();
        for address in lookup(address, &Options::default()).await? {
            let attempt =
                async { Self::bind_one(&Router::of(device).await?, address, backlog).await };
            match attempt.await {
                Ok(listener) => return Ok(listener),
                Err(error) => last = error.during(Step::Listen, address),
            }
        }
        Err(last)
    }

    async fn bind_one(
        router: &Arc<Router>,
        address: SocketAddr,
        backlog: u32,
    ) -> Result<Self, ConnectError> {
        let endpoint =
            Endpoint::new(router, router.create_id()?, Inbox::new(Some(Incoming::new(backlog))));
        let port_space = router.port_space();
        let refused = move |error: VerbError| match error.errno {
            VerbError::EADDRINUSE => ConnectError::AddressInUse {
                address,
                device: Holding::device_at(port_space, address),
            },
            VerbError::EADDRNOTAVAIL => {
                ConnectError::AddressNotAvailable { address, source: None, step: Step::Listen }
            }
            _ => error.into(),
        };
        let bound = endpoint
            .call(move |id| {
                id.bind(address).map_err(refused)?;
                id.listen(backlog).map_err(refused)?;
                Ok(id.local_addr())
            })
            .await?;
        let address = bound.unwrap_or(address);
        let held = Holding::new(router, address);
        tracing::debug!(%address, backlog, device = router.device().name(), "listening");
        Ok(Self { endpoint, address, _held: held })
    }

    /// Address that it listens at, with the port that was taken.
    #[must_use]
    pub const fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// The next request. Several tasks may wait; each request is given to one of them, in the order of their arrival.
    ///
    /// Requests that their peers have taken back meanwhile are left out.
    ///
    /// # Errors
    ///
    /// [`ConnectError::NoRuntime`] outside of a Tokio runtime with an I/O driver.
    /// [`ConnectError::DeviceRemoved`]: there will be no more. That its address was moved to another network interface
    /// (`RDMA_CM_EVENT_ADDR_CHANGE` of `rdma_get_cm_event(3)`) is logged and no error: the listener is bound as before.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future loses no request.
    pub async fn accept(&self) -> Result<Request, ConnectError> {
        self.endpoint.ready()?;
        let router = self.endpoint.router();
        loop {
            let Pending { endpoint, peer, .. } = self.next().await?;
            let (device, address) = (router.device(), endpoint.peer_addr());
            let Some(route) = endpoint.route().filter(|route| route.device == device.name()) else {
                tracing::warn!(
                    ?address,
                    device = device.name(),
                    "rejected: the request came over another device"
                );
                continue;
            };
            match Path::find(device, &route) {
                Ok(path) => {
                    let local = endpoint.local_addr().unwrap_or(self.address);
                    let address = address.unwrap_or(SocketAddr::new(route.destination.to_ip(), 0));
                    return Ok(Request {
                        endpoint,
                        peer,
                        path,
                        source: route.destination,
                        local,
                        address,
                    });
                }
                Err(error) => tracing::warn!(?address, %error, "rejected: no way back"),
            }
        }
    }

    /// Has the provider answer requests as `admit` decides, if it can: then a request comes here when its peer has confirmed the
    /// answer, and accepting it sends nothing.
    pub(crate) async fn answer(&self, admit: Arc<dyn Admit>) -> Result<bool, ConnectError> {
        self.endpoint.call(move |id| Ok(id.answer(admit))).await
    }

    /// What [`answer`](Self::answer) sends to peers that are accepted with `options`.
    pub(crate) fn answer_with(
        device: &Device,
        options: &Options,
    ) -> Result<CmAnswer, ConnectError> {
        let (private_data, _) = options.checked(MAX_RESPONSE_DATA)?;
        Ok(Reads::of(device, options)?.answer(private_data.to_vec()))
    }

    /// Requests that wait at this listener.
    pub(crate) fn waiting(&self) -> Waiting {
        Waiting(Arc::downgrade(self.endpoint.inbox()))
    }

    #[cfg(all(test, not(loom)))]
    pub(super) fn device(&self) -> &Device {
        self.endpoint.router().device()
    }

    #[cfg(all(test, not(loom)))]
    pub(super) fn inbox(&self) -> &Inbox {
        self.endpoint.inbox()
    }

    async fn next(&self) -> Result<Pending, ConnectError> {
        let inbox = self.endpoint.inbox();
        let Some(incoming) = &inbox.incoming else {
            unreachable!("that of a listener is made with one")
        };
        let mut wakers = ContainedWaker::reporting(&incoming.panicked);
        loop {
            let mut notified = pin!(incoming.notify.notified());
            notified.as_mut().enable();
            if let Some(pending) = incoming.pop() {
                return Ok(pending);
            }
            let end = inbox.happened().end.clone();
            if let Some(end) = end {
                return Err(ConnectError::ended(&end, Step::Listen, self.address));
            }
            poll_fn(|context| {
                match wakers.poll(context, |context| notified.as_mut().poll(context)) {
                    Poll::Ready(()) => Poll::Ready(Ok(())),
                    // At each poll: the task may be in another runtime than at the last one, which may be gone.
                    Poll::Pending => self
                        .endpoint
                        .ready()
                        .map_or_else(|missing| Poll::Ready(Err(missing)), |()| Poll::Pending),
                }
            })
            .await?;
        }
    }
}

impl fmt::Debug for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Listener").field("address", &self.address).finish_non_exhaustive()
    }
}

/// Requests that wait at a [`Listener`].
#[derive(Debug, Clone)]
pub(crate) struct Waiting(Weak<Inbox>);

impl Waiting {
    /// Ready when a request has waited for `age`, and `age` has passed since the first poll. Of several waiters, one is ready for each
    /// such request. Never ready without the listener.
    pub(crate) async fn displaced(&self, age: Duration) {
        let mut sleep = Sleep::new(clock::deadline(age));
        loop {
            poll_fn(|context| sleep.poll(context)).await;
            let inbox = self.0.upgrade();
            if inbox
                .as_ref()
                .and_then(|inbox| inbox.incoming.as_ref())
                .is_some_and(|incoming| incoming.displaces(age))
            {
                return;
            }
            // The age of a request raises no event.
            sleep.reset(clock::deadline(age / 2));
        }
    }
}

#[cfg(all(test, not(loom)))]
impl Waiting {
    pub(crate) fn any(&self) -> bool {
        let inbox = self.0.upgrade();
        let incoming = inbox.as_ref().and_then(|inbox| inbox.incoming.as_ref());
        incoming.is_some_and(|incoming| !incoming.queue.lock().is_empty())
    }
}

/// Listeners of this process.
static HELD: Mutex<Vec<Held>> = Mutex::new(Vec::new());

/// An address that a listener has.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Held {
    /// Of the provider, or of one network of software devices.
    port_space: usize,
    address: SocketAddr,
    /// Name of the listener's device.
    device: String,
}

/// Removes its entry from [`HELD`] when it is dropped.
struct Holding(Held);

impl Holding {
    fn new(router: &Router, address: SocketAddr) -> Self {
        let held = Held {
            port_space: router.port_space(),
            address,
            device: router.device().name().to_owned(),
        };
        HELD.lock().push(held.clone());
        Self(held)
    }

    /// Name of the device of the listener that keeps another one from having `address`; the unspecified address is each one.
    fn device_at(port_space: usize, address: SocketAddr) -> Option<String> {
        let meet = |held: &&Held| {
            let any = held.address.ip().is_unspecified() || address.ip().is_unspecified();
            let same = held.port_space == port_space && held.address.port() == address.port();
            same && (any || held.address.ip() == address.ip())
        };
        HELD.lock().iter().find(meet).map(|held| held.device.clone())
    }
}

impl Drop for Holding {
    fn drop(&mut self) {
        let mut held = HELD.lock();
        if let Some(at) = held.iter().position(|held| *held == self.0) {
            held.swap_remove(at);
        }
    }
}

/// Requests that wait at a listener.
#[derive(Debug)]
pub(super) struct Incoming {
    queue: Mutex<VecDeque<Pending>>,
    /// The wakers of the waiters are [contained](ContainedWaker).
    notify: Notify,
    /// The waker of an acceptor has panicked, so the next acceptor is woken instead.
    panicked: Arc<AtomicBool>,
    most: usize,
}

#[derive(Debug)]
struct Pending {
    endpoint: Endpoint,
    peer: CmPeer,
    since: Instant,
    /// No handshake has given way to this request yet.
    displaces: bool,
}

impl Incoming {
    fn new(backlog: u32) -> Self {
        Self {
            queue: Mutex::default(),
            notify: Notify::new(),
            panicked: Arc::default(),
            most: backlog as usize,
        }
    }

    /// Adds a request, or gives its id back if there are too many.
    pub(super) fn push(&self, router: &Arc<Router>, id: CmId, peer: CmPeer) -> Option<CmId> {
        // A peer that was answered takes the connection for established, so it is kept beyond the backlog. The provider answers no
        // more requests while the backlog is full, which bounds how many these are.
        let answered = id.reserved().is_some();
        let mut queue = self.queue.lock();
        let mut stale = VecDeque::new();
        if queue.len() >= self.most {
            // Those that were taken back make room. Dropped without the lock.
            let (kept, gone) = queue.drain(..).partition(|pending| !pending.endpoint.ended());
            *queue = kept;
            stale = gone;
        }
        let refused = if !answered && queue.len() >= self.most {
            tracing::debug!(backlog = self.most, "rejected: too many requests wait");
            Some(id)
        } else {
            let endpoint = Endpoint::new(router, id, Inbox::new(None));
            queue.push_back(Pending { endpoint, peer, since: Instant::now(), displaces: true });
            None
        };
        drop(queue);
        drop::<VecDeque<Pending>>(stale);
        if refused.is_none() {
            self.wake_one();
        }
        refused
    }

    /// The oldest that was not taken back.
    fn pop(&self) -> Option<Pending> {
        let mut stale = Vec::new();
        let mut queue = self.queue.lock();
        let found = loop {
            match queue.pop_front() {
                Some(pending) if pending.endpoint.ended() => stale.push(pending),
                found => break found,
            }
        };
        let more = !queue.is_empty();
        // A waker may come back for the lock.
        drop(queue);
        if more {
            // A permit may have been for one that was taken back.
            self.wake_one();
        }
        drop(stale);
        found
    }

    /// True if a request has waited for this long. Each request counts once, so that one handshake gives way to it.
    fn displaces(&self, age: Duration) -> bool {
        let mut queue = self.queue.lock();
        let old = |pending: &&mut Pending| {
            pending.displaces && pending.since.elapsed() >= age && !pending.endpoint.ended()
        };
        let found = queue.iter_mut().find(old);
        found.is_some_and(|pending| std::mem::replace(&mut pending.displaces, false))
    }

    /// Wakes all acceptors: there will be no more, or they have to look for another runtime.
    pub(super) fn wake_all(&self) {
        self.notify.notify_waiters();
    }

    /// Wakes the first acceptor whose waker does not panic; if there is none, the next one does not wait.
    fn wake_one(&self) {
        loop {
            // Each call takes a waiter off the queue of `notify`.
            self.notify.notify_one();
            if !self.panicked.swap(false, Ordering::AcqRel) {
                return;
            }
        }
    }
}

/// A peer that wants to connect. Dropping it rejects it.
pub struct Request {
    endpoint: Endpoint,
    peer: CmPeer,
    path: Path,
    source: Gid,
    local: SocketAddr,
    address: SocketAddr,
}

impl Request {
    /// Where it comes from.
    #[must_use]
    pub const fn peer_addr(&self) -> SocketAddr {
        self.address
    }

    /// Address that it was sent to.
    #[must_use]
    pub const fn local_addr(&self) -> SocketAddr {
        self.local
    }

    /// GID that it comes from.
    #[must_use]
    pub const fn source(&self) -> Gid {
        self.source
    }

    /// Port that it arrived at.
    #[must_use]
    pub const fn port(&self) -> PortNum {
        self.path.port
    }

    /// Index of the GID that it was sent to, in the table of that port.
    #[must_use]
    pub const fn gid_index(&self) -> u8 {
        self.path.gid_index
    }

    /// Private data of the request, padded with zeros to 56 bytes: a request of IBTA 12.6.5 does not carry their length. Begin them
    /// with a length if trailing zeros matter.
    #[must_use]
    pub fn private_data(&self) -> &[u8] {
        &self.peer.private_data
    }

    /// READs and atomics that the peer wants to issue at once.
    #[must_use]
    pub const fn reads_issued(&self) -> u8 {
        self.peer.responder_resources
    }

    /// READs and atomics that the peer serves at once.
    #[must_use]
    pub const fn reads_served(&self) -> u8 {
        self.peer.initiator_depth
    }

    /// Makes a queue pair to be described by `builder` send from the port and GID that this request was sent to.
    #[must_use]
    pub fn prepare(&self, builder: QueuePairBuilder) -> QueuePairBuilder {
        builder.source(self.path.port, self.path.gid_index).number(self.reserved())
    }

    /// Leaves the answer to the provider, see [`Listener::answer`]; false if that cannot give it. If true, the request is not to be
    /// used any more.
    pub(crate) fn answer_late(&self, answer: &CmAnswer) -> bool {
        self.endpoint.answer_late(answer)
    }

    /// Number that the peer was told, if the provider has answered it.
    pub(crate) fn reserved(&self) -> Option<Qpn> {
        self.endpoint.reserved()
    }

    /// Says yes with `queue_pair`, which is in INIT and sends from the port and GID of this request, and waits until the
    /// peer confirms. It is ready to use when this returns, and what the peer sends may arrive before: post the receives
    /// for it first.
    ///
    /// # Errors
    ///
    /// [`ConnectError::Rejected`] if the peer has given up, [`ConnectError::Unreachable`] or [`ConnectError::TimedOut`]
    /// if it does not confirm, [`ConnectError::Limit`] for private data of more than 196 bytes, [`ConnectError::Setup`]
    /// for a queue pair that does not fit. The queue pair is in the error state then, unless it did not fit, and the
    /// request is rejected; so it is with [`ConnectError::NoRuntime`] outside of a Tokio runtime with an I/O driver.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future rejects the request, or ends the connection; the queue pair goes to the error state.
    pub async fn accept(
        self,
        queue_pair: &QueuePair,
        options: &Options,
    ) -> Result<Link, ConnectError> {
        let Self { endpoint, peer, path, local, address, .. } = self;
        endpoint.ready()?;
        let (_, transport) = options.checked(MAX_RESPONSE_DATA)?;
        let device = endpoint.router().device().clone();
        let misfit = |error| ConnectError::from(error).during(Step::Prepare, address);
        path.check(&device, queue_pair).map_err(misfit)?;
        Keepalive::check(options.probes(), transport.timeout, queue_pair).map_err(misfit)?;
        let halfway = Halfway::new(queue_pair);
        let reads = Reads::of(&device, options)?.agreed(&peer);
        within(options.deadline(), Step::Establish, async {
            endpoint.inbox().tie(queue_pair);
            let (ours, options) = (queue_pair.clone(), options.clone());
            let said = endpoint
                .call(move |id| {
                    let (private_data, _) = options.checked(MAX_RESPONSE_DATA)?;
                    make_ready(id, &ours, reads, transport)?;
                    Ok(id.accept(&reads.params(&ours, private_data, options.deadline()))?)
                })
                .await;
            endpoint.blame(said, Step::Accept, address).await?;
            endpoint
                .until(|happened| match (happened.established, &happened.end) {
                    // It may be over already: what the peer sent before is there all the same.
                    (true, _) => Some(Ok(())),
                    (false, Some(end)) => {
                        Some(Err(ConnectError::ended(end, Step::Establish, address)))
                    }
                    (false, None) => None,
                })
                .await
        })
        .await
        .map_err(|error| error.during(Step::Establish, address))?;
        halfway.arrived();
        let link = Link::new(endpoint, peer.private_data, (local, address), options.deadline());
        Ok(link.with_keepalive(options.probes(), queue_pair)?)
    }

    /// Says no. The peer gets [`ConnectError::Rejected`] with this private data.
    ///
    /// # Errors
    ///
    /// [`ConnectError::NoRuntime`] outside of a Tokio runtime with an I/O driver (it is rejected all the same),
    /// [`ConnectError::Limit`] for private data of more than 148 bytes (it is rejected without it then),
    /// [`ConnectError::Rejected`] if the peer has given up.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future rejects it all the same.
    pub async fn reject(self, private_data: &[u8]) -> Result<(), ConnectError> {
        LimitError::check("private_data", private_data.len() as u64, MAX_REJECT_DATA as u64)?;
        self.endpoint.ready()?;
        let data = private_data.to_vec();
        let said = self.endpoint.call(move |id| Ok(id.reject(&data)?)).await;
        self.endpoint.blame(said, Step::Reject, self.address).await
    }
}

impl Request {
    /// Rejects the request with this private data, as far as that is possible; waits for no event.
    pub(crate) async fn refuse(self, private_data: &'static [u8]) {
        if let Err(error) = self.endpoint.call(move |id| Ok(id.reject(private_data)?)).await {
            tracing::debug!(peer = %self.address, %error, "the request was withdrawn before it was rejected");
        }
    }

    /// Why no queue pair could be made for this request: if the peer has left, its reserved number is gone, and that is why.
    pub(crate) async fn not_made(&self, error: SetupError) -> Result<SetupError, ConnectError> {
        if self.reserved().is_none() {
            return Ok(error);
        }
        let failed = Err::<(), _>(ConnectError::from(error.clone()));
        match self.endpoint.blame(failed, Step::Prepare, self.address).await {
            Err(ConnectError::Setup { .. }) | Ok(()) => Ok(error),
            Err(gone) => Err(gone),
        }
    }

    /// No queue pair can be made for this request.
    pub(crate) fn unprepared(&self, error: SetupError) -> ConnectError {
        ConnectError::from(error).during(Step::Prepare, self.address)
    }
}

impl fmt::Debug for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Request")
            .field("peer", &self.address)
            .field("local", &self.local)
            .field("path", &self.path)
            .finish_non_exhaustive()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::net::IpAddr;

    use futures::future::join_all;

    use super::*;
    use crate::cm::resolve;
    use crate::engine::{CompletionMode, CompletionQueue};
    use crate::software::Network;
    use rdma_provider::cm_contract::Verdict;

    /// Answers every peer.
    #[derive(Debug)]
    struct All(CmAnswer);

    impl Admit for All {
        fn admit(&self, _: IpAddr, _: &[u8]) -> Verdict {
            Verdict::Answer(self.0.clone())
        }

        fn gave_way(&self) {}
    }

    /// All requests arrive before the first confirmation, which is when they begin to count.
    #[test]
    fn peers_that_were_answered_are_kept_beyond_the_backlog() {
        const ALL: usize = 6;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let test = async {
            let network = Network::new();
            let (server, client) = (
                Device::software_in(&network, "server").unwrap(),
                Device::software_in(&network, "client").unwrap(),
            );
            let listener =
                Listener::bind_with(&server, "127.0.0.1:0", &ListenOptions::default().backlog(2))
                    .await
                    .unwrap();
            let options = Options::default();
            let answer = Listener::answer_with(&server, &options).unwrap();
            assert!(listener.answer(Arc::new(All(answer))).await.unwrap());
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
                let options = &options;
                async move {
                    let link = route.connect(&queue_pair, options).await.unwrap();
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
        runtime.block_on(async {
            tokio::time::timeout(Duration::from_secs(60), test).await.expect("hangs")
        });
    }
}

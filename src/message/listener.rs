//! Connections that peers ask for.

use std::cmp::Reverse;
use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::future::{Future, poll_fn};
use std::net::{IpAddr, SocketAddr};
use std::panic::resume_unwind;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures::future::{Either, select};
use tokio::net::ToSocketAddrs;
use tokio::sync::Mutex;
use tokio::task::{AbortHandle, JoinError, JoinSet};

use super::admission::{Admission, ListenerStats};
use super::config::ConnectionConfig;
use super::connection::{Connection, PreparedConnection};
use super::error::EstablishError;
use super::handshake::{Handshake, Rejection};
use crate::cm;
use crate::cm::clock::Sleep;
use crate::contained::wakes_contained;
use crate::error::NoRuntime;
use crate::verbs::Device;
use rdma_provider::cm_contract::{Admit as _, MAX_RESPONSE_DATA};

/// Takes connections that peers ask for by address.
///
/// ```
/// use tokio_rdma::{Access, Connection, Device, Listener, RemoteRegion};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let device = Device::software()?;
/// let listener = Listener::bind(&device, "127.0.0.1:0").await?;
/// let address = listener.local_addr();
/// let server = async {
///     let peer = listener.accept().await?;
///     let region = peer.expose(vec![0; 1 << 20], Access::REMOTE_ALL)?;
///     peer.send(region.grant()).await?;
///     while peer.recv().await?.is_some() {}
///     peer.close().await?;
///     Ok::<_, Box<dyn std::error::Error>>(())
/// };
/// let client = async {
///     let conn = Connection::connect(&device, address).await?;
///     let grant = conn.recv().await?.ok_or("no message")?;
///     let remote = RemoteRegion::from_bytes(&grant).ok_or("not a region")?;
///     conn.write(conn.copy_from(b"hello")?, remote.slice(..5)?).await?;
///     let buffer = conn.read(conn.alloc(5)?, remote.slice(..5)?).await?;
///     assert_eq!(&buffer[..], b"hello");
///     assert_eq!(conn.fetch_add(remote.slice(8..16)?, 1).await?, 0);
///     conn.close().await?;
///     Ok::<_, Box<dyn std::error::Error>>(())
/// };
/// tokio::try_join!(server, client)?;
/// # Ok(())
/// # }
/// ```
pub struct Listener {
    inner: cm::Listener,
    device: Device,
    config: ConnectionConfig,
    admission: Arc<Admission>,
    /// Those that were begun by `accept`, whoever has called it: one caller at a time starts and collects them.
    handshakes: Mutex<Handshakes>,
}

/// Handshakes in progress.
#[derive(Debug, Default)]
struct Handshakes {
    tasks: JoinSet<Result<Connection, EstablishError>>,
    /// By age; those that were aborted are in `tasks` only.
    running: VecDeque<Running>,
}

#[derive(Debug)]
struct Running {
    task: AbortHandle,
    source: IpAddr,
    since: Instant,
    /// Its peer has not confirmed, so far as is known.
    yields: bool,
}

/// Age from which a handshake gives way to another one: above what a round trip takes, so that peers which connect at once
/// wait for each other.
pub(super) const GRACE: Duration = Duration::from_millis(100);

/// What an acceptor waits for.
#[allow(clippy::large_enum_variant, reason = "it is taken apart where it is made")]
enum Next {
    Asked(Result<ConnectionRequest, EstablishError>),
    Made(Result<(tokio::task::Id, Result<Connection, EstablishError>), JoinError>),
    /// A handshake has become old enough to give way.
    Aged,
}

impl Handshakes {
    /// The handshake to give way: the oldest of the source with the most of them, of those that may. Else when there will be
    /// one, if ever.
    fn victim(&self) -> Result<usize, Option<Instant>> {
        let now = Instant::now();
        let mut shares: HashMap<IpAddr, usize> = HashMap::new();
        for running in &self.running {
            *shares.entry(running.source).or_default() += 1;
        }
        let yielding = || self.running.iter().enumerate().filter(|(_, running)| running.yields);
        let old = yielding().filter(|(_, running)| now.duration_since(running.since) >= GRACE);
        // Of equal shares the first, which is the oldest.
        let victim = old.min_by_key(|(_, running)| Reverse(shares.get(&running.source).copied()));
        victim
            .map(|(at, _)| at)
            .ok_or_else(|| yielding().next().map(|(_, running)| running.since + GRACE))
    }

    fn finished(&mut self, task: tokio::task::Id) {
        self.running.retain(|running| running.task.id() != task);
    }
}

impl Listener {
    /// Listens at the first of the addresses that can be had, with default settings for its connections.
    ///
    /// # Errors
    ///
    /// As [`bind_with`](Self::bind_with).
    ///
    /// # Cancel safety
    ///
    /// As [`bind_with`](Self::bind_with): dropping the future leaves nothing behind.
    pub async fn bind(
        device: &Device,
        address: impl ToSocketAddrs,
    ) -> Result<Self, EstablishError> {
        Self::bind_with(device, address, &ConnectionConfig::default()).await
    }

    /// Listens at the first of the addresses that can be had. Port 0 takes one that is free.
    ///
    /// # Errors
    ///
    /// [`EstablishError::NoRuntime`] outside of a Tokio runtime with an I/O driver; [`EstablishError::Setup`] for
    /// settings that the device does not allow; [`EstablishError::Handshake`] for more
    /// [`user_data`](ConnectionConfig::user_data) than an answer has room for; [`EstablishError::Connect`] as
    /// [`cm::Listener::bind_with`].
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves nothing behind.
    pub async fn bind_with(
        device: &Device,
        address: impl ToSocketAddrs,
        config: &ConnectionConfig,
    ) -> Result<Self, EstablishError> {
        config.check(device)?;
        // What cannot be said to any peer would have all of them rejected, and nobody told why.
        let answer = cm::Listener::answer_with(device, &config.cm_options(MAX_RESPONSE_DATA)?)?;
        let admission = Admission::new(config, answer);
        let inner = cm::Listener::bind(device, address).await?;
        let answered = inner.answer(admission.clone()).await?;
        tracing::debug!(address = %inner.local_addr(), answered, "the provider answers requests");
        let (device, config) = (device.clone(), config.clone());
        Ok(Self { inner, device, config, admission, handshakes: Mutex::default() })
    }

    /// Leaves each request to the program, as devices do whose manager cannot answer.
    #[cfg(all(test, not(loom)))]
    pub(super) fn never_answer(&self) {
        self.admission.never_answer();
    }

    /// True if a request waits to be taken.
    #[cfg(all(test, not(loom)))]
    pub(super) fn has_requests(&self) -> bool {
        self.inner.waiting().any()
    }

    /// Counters of what was accepted and refused.
    #[must_use]
    pub fn stats(&self) -> ListenerStats {
        self.admission.stats()
    }

    /// Address that it listens at.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.inner.local_addr()
    }

    /// The next connection that is complete. A peer that asks for another protocol, or for a connection more than
    /// [`max_connections`](ConnectionConfig::max_connections) or
    /// [`max_connections_per_source`](ConnectionConfig::max_connections_per_source) allow, is rejected, and one that does not
    /// go through with it is passed over; neither is an error here. [`stats`](Self::stats) counts them.
    ///
    /// Connections come in the order in which they are complete, so that a peer that is slow, or does not answer at all, holds up
    /// no other. Up to [`handshakes`](ConnectionConfig::handshakes) are made at once, each in a task of its own. To decide about
    /// each peer, take the [`request`](Self::request) and accept that.
    ///
    /// From the first call on, the software device answers peers by itself, as a kernel does for TCP: a peer takes its connection
    /// for complete when it has the answer, and whatever it sends waits until `accept` has returned the connection. Nothing
    /// is made for a peer that has not confirmed that answer, but a record of about 1 KiB; of 4,096 such records, and 256 of each
    /// source, the oldest of the source with the most give way. A real device has a handshake made for each peer that asks.
    ///
    /// # Errors
    ///
    /// [`EstablishError::NoRuntime`] outside of a Tokio runtime with an I/O driver,
    /// [`EstablishError::Connect`] if there will be no more, [`EstablishError::Setup`] if no queue pair can be made.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future loses no connection: handshakes that were begun go on, and whoever accepts next has them. Dropping
    /// the listener rejects their peers.
    pub async fn accept(&self) -> Result<Connection, EstablishError> {
        let mut handshakes = wakes_contained(self.handshakes.lock()).await;
        // Where the settings name one peer, that is to be looked at before the answer.
        self.admission.set_answering(self.config.answers_all());
        loop {
            // Dropped with each round, which loses no request.
            let mut request = pin!(self.next_request());
            let full = handshakes.running.len() >= self.config.handshakes as usize;
            let victim = if full { handshakes.victim() } else { Err(None) };
            let mut aged = victim.err().flatten().map(Sleep::new);
            let next = poll_fn(|context| {
                if let Poll::Ready(Some(made)) = handshakes.tasks.poll_join_next_with_id(context) {
                    return Poll::Ready(Next::Made(made));
                }
                // For the task of the handshake. At each poll: the future may have been moved to where there is none.
                if let Err(missing) = NoRuntime::or_current() {
                    return Poll::Ready(Next::Asked(Err(missing.into())));
                }
                if !full || victim.is_ok() {
                    return request.as_mut().poll(context).map(Next::Asked);
                }
                aged.as_mut().map_or(Poll::Pending, |aged| aged.poll(context).map(|()| Next::Aged))
            });
            match next.await {
                Next::Aged => {}
                Next::Asked(request) => {
                    let request = request?;
                    // Of a peer that asked before it was known whether the provider answers.
                    if request.inner.reserved().is_none()
                        && self.admission.may_enter(request.peer_addr().ip())
                        && self
                            .admission
                            .answer()
                            .is_some_and(|answer| request.inner.answer_late(answer))
                    {
                        continue;
                    }
                    if let Ok(at) = victim
                        && let Some(running) = handshakes.running.remove(at)
                    {
                        tracing::debug!(peer = %running.source, "handshake gives way to another one");
                        running.task.abort();
                        self.admission.gave_way();
                    }
                    let (source, yields) =
                        (request.peer_addr().ip(), request.inner.reserved().is_none());
                    let task = handshakes.tasks.spawn(async move {
                        let peer = request.peer_addr();
                        let config = request.config.clone();
                        let result = request.establish(&config).await;
                        if let Err(error) = &result {
                            tracing::debug!(%peer, %error, "not accepted");
                        }
                        result
                    });
                    handshakes.running.push_back(Running {
                        task,
                        source,
                        since: Instant::now(),
                        yields,
                    });
                }
                Next::Made(Ok((task, made))) => {
                    handshakes.finished(task);
                    match made {
                        Ok(connection) => return Ok(connection),
                        Err(EstablishError::Setup(error)) => return Err(error.into()),
                        Err(_) => {}
                    }
                }
                Next::Made(Err(error)) => {
                    handshakes.finished(error.id());
                    match error.try_into_panic() {
                        Ok(panic) => resume_unwind(panic),
                        // It gave way; or the runtime of an acceptor has shut down, and rejected it.
                        Err(error) => tracing::debug!(%error, "not accepted"),
                    }
                }
            }
        }
    }

    /// The next peer that asks, to be accepted or rejected. One that asks for another protocol is rejected.
    ///
    /// From now on no peer is answered without the program, until [`accept`](Self::accept) is called. A peer that was answered
    /// before has the settings of the listener, and ends as [`CloseReason::Rejected`](super::CloseReason::Rejected) by
    /// [`reject`](ConnectionRequest::reject).
    ///
    /// The address of such a peer may be forged: it has proved nothing. To accept it, a queue pair and buffers are made, and held until
    /// it confirms or [gives way](ConnectionRequest::accept_with). A service whose peers are not trusted calls
    /// [`accept`](Self::accept), which makes nothing for a peer that has not confirmed, or accepts each request in a task of its own
    /// and limits the number of these tasks.
    ///
    /// # Errors
    ///
    /// [`EstablishError::NoRuntime`] outside of a Tokio runtime with an I/O driver,
    /// [`EstablishError::Connect`] if there will be no more.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future loses no request.
    pub async fn request(&self) -> Result<ConnectionRequest, EstablishError> {
        self.admission.set_answering(false);
        self.next_request().await
    }

    async fn next_request(&self) -> Result<ConnectionRequest, EstablishError> {
        loop {
            let inner = self.inner.accept().await?;
            match self.admission.handshake(inner.private_data()) {
                Ok((handshake, user_data)) => {
                    let user_data = Bytes::copy_from_slice(user_data);
                    let (device, config) = (self.device.clone(), self.config.clone());
                    let admission = self.admission.clone();
                    let waiting = self.inner.waiting();
                    return Ok(ConnectionRequest {
                        inner,
                        handshake,
                        user_data,
                        device,
                        config,
                        admission,
                        waiting,
                    });
                }
                Err(error) => {
                    tracing::warn!(peer = %inner.peer_addr(), %error, "rejected");
                    if error.is_foreign() {
                        // Tells the peer's program what it has met.
                        inner.refuse(cm::FOR_MESSAGES).await;
                    }
                }
            }
        }
    }
}

impl fmt::Debug for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Listener")
            .field("local", &self.local_addr())
            .field("stats", &self.stats())
            .finish_non_exhaustive()
    }
}

/// A peer that wants a connection. Dropping it rejects it.
#[must_use = "dropping it rejects it"]
pub struct ConnectionRequest {
    inner: cm::Request,
    handshake: Handshake,
    user_data: Bytes,
    device: Device,
    config: ConnectionConfig,
    admission: Arc<Admission>,
    /// Requests that wait behind this one.
    waiting: cm::Waiting,
}

impl ConnectionRequest {
    /// Where it comes from.
    #[must_use]
    pub fn peer_addr(&self) -> SocketAddr {
        self.inner.peer_addr()
    }

    /// What the peer's service gave along.
    #[must_use]
    pub fn user_data(&self) -> &Bytes {
        &self.user_data
    }

    /// What the peer says of itself.
    #[must_use]
    pub fn peer(&self) -> Handshake {
        self.handshake
    }

    /// Says yes, with the settings of the listener.
    ///
    /// # Errors
    ///
    /// As [`accept_with`](Self::accept_with).
    ///
    /// # Cancel safety
    ///
    /// Dropping the future rejects the peer.
    pub async fn accept(self) -> Result<Connection, EstablishError> {
        let config = self.config.clone();
        self.accept_with(&config).await
    }

    /// Says yes, with settings of its own, but for the limits of the listener.
    ///
    /// Waits until the peer confirms, for up to [`connect_timeout`](ConnectionConfig::connect_timeout). If that takes longer than
    /// 0.1 s, and another request has waited for 0.1 s at the listener, this one gives way: the peer is rejected, so that a peer
    /// that asks and falls silent does not hold up those behind it. A service that takes requests faster than ten in a second
    /// accepts each in a task of its own.
    ///
    /// # Errors
    ///
    /// [`EstablishError::Refused`] if the listener has as many connections as it may have: the peer finds the same, in
    /// [`CloseReason::Refused`](super::CloseReason::Refused) if it was answered already. [`EstablishError::Connect`] with
    /// [`cm::ConnectError::Disconnected`] if the peer has left, with [`cm::ConnectError::TimedOut`] if it does not confirm, or gives
    /// way. As [`Connection::connect_with`] otherwise.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future rejects the peer.
    pub async fn accept_with(
        self,
        config: &ConnectionConfig,
    ) -> Result<Connection, EstablishError> {
        let (address, admission, waiting) =
            (self.peer_addr(), self.admission.clone(), self.waiting.clone());
        let (start, confirmed) = (std::time::Instant::now(), self.inner.reserved().is_some());
        let established = pin!(self.establish(config));
        if confirmed {
            return established.await;
        }
        match select(established, pin!(waiting.displaced(GRACE))).await {
            Either::Left((result, _)) => result,
            Either::Right(((), _)) => {
                admission.gave_way();
                let (address, step) = (Some(address), cm::Step::Establish);
                Err(cm::ConnectError::TimedOut { address, step, after: start.elapsed() }.into())
            }
        }
    }

    /// As [`accept_with`](Self::accept_with), but gives way to no other request.
    async fn establish(self, config: &ConnectionConfig) -> Result<Connection, EstablishError> {
        let admission = self.admission.clone();
        let result = self.establish_uncounted(config).await;
        if let Err(EstablishError::Connect(_)) = &result {
            admission.failed();
        }
        result
    }

    async fn establish_uncounted(
        self,
        config: &ConnectionConfig,
    ) -> Result<Connection, EstablishError> {
        let address = self.peer_addr();
        let answered = self.inner.reserved().is_some();
        // A peer that was answered has been told them.
        let config = if answered { &self.config } else { config };
        // Before anything is made. A peer that has not confirmed yet takes no place from those that have.
        let place = if answered {
            self.admission.enter(address.ip()).map(Some)
        } else {
            self.admission.check(address.ip()).map(|()| None)
        };
        let place = match place {
            Ok(place) => place,
            Err(refusal) => {
                self.inner.reject(&refusal.encode()).await?;
                return Err(EstablishError::Refused { address, refusal });
            }
        };
        let options = config.cm_options(MAX_RESPONSE_DATA)?;
        let pd = config.domain(&self.device)?;
        let path = (self.inner.port(), self.inner.gid_index());
        // No fault of this end, so that a listener goes on.
        config
            .check_path(path, self.inner.source())
            .map_err(|error| self.inner.unprepared(error))?;
        let prepared =
            match PreparedConnection::new(&pd, config, |builder| self.inner.prepare(builder)) {
                Ok(prepared) => prepared,
                Err(error) => return Err(self.inner.not_made(error).await?.into()),
            };
        let link = self.inner.accept(&prepared.qp, &options).await?;
        // Others may have been faster; then the link is dropped, and the peer disconnected.
        let refused = |refusal| EstablishError::Refused { address, refusal };
        let admitted = match place {
            Some(admitted) => admitted,
            None => self.admission.enter(address.ip()).map_err(refused)?,
        };
        prepared.start(self.handshake, self.user_data, Some(link), Some(admitted.accepted()))
    }

    /// Rejects the connection. The peer finds the bytes, at most 140 and with their length, in [`EstablishError::Rejected`].
    ///
    /// # Errors
    ///
    /// [`EstablishError::Connect`] with [`cm::ConnectError::Limit`] for more bytes (the peer is rejected without them then), else
    /// as [`cm::Request::reject`].
    ///
    /// # Cancel safety
    ///
    /// Dropping the future rejects the peer all the same.
    pub async fn reject(self, user_data: &[u8]) -> Result<(), EstablishError> {
        let rejection = Rejection::encode(user_data).map_err(cm::ConnectError::from)?;
        Ok(self.inner.reject(&rejection).await?)
    }
}

impl fmt::Debug for ConnectionRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConnectionRequest")
            .field("peer", &self.peer_addr())
            .field("handshake", &self.handshake)
            .finish_non_exhaustive()
    }
}

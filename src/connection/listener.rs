mod backlog;
mod request;

use std::cmp::Reverse;
use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::future::{Future, poll_fn};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures::Stream;
use futures::future::{Either, select};
use tokio::net::ToSocketAddrs;
use tokio::task::coop::consume_budget;
use tokio::task::{AbortHandle, JoinError, JoinSet};

pub use request::ConnectionRequest;

use self::backlog::{Backlog, Established, Unaccepted};
use self::request::Requested;

use super::admission::{Admission, ListenerStats, rejection};
#[cfg(doc)]
use super::config::ConnectionConfig;
use super::error::{CloseReason, EstablishError};
use super::handle::Connection;
use super::listener_config::ListenerConfig;
use super::resources::ResourceCache;
use crate::clock::{self, Sleep, timeout};
use crate::cm;
use crate::coop::within_budget;
use crate::error::NoRuntime;
use crate::verbs::Device;
use rdma_provider::cm_contract::{Admit as _, MAX_RESPONSE_DATA};

/// A listener that accepts connections at an address, and a [`Stream`] of them, which ends after
/// [`EstablishError::Connect`].
///
/// ```
/// use std::time::Duration;
/// use tokio_rdma::{Connection, Listener};
/// # use tokio_rdma::Device;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let device = Device::software()?;
/// let listener = Listener::bind(&device, "127.0.0.1:0").await?;
/// let connecting = Connection::connect(&device, listener.local_addr()?);
/// let (theirs, ours) = tokio::try_join!(listener.accept(), connecting)?;
/// ours.send("request").await?;
/// let service = tokio::spawn(async move {
///     while let Some(request) = theirs.recv().await? {
///         theirs.send(request).await?;
///     }
///     theirs.close().await
/// });
/// assert_eq!(ours.recv().await?.as_deref(), Some(&b"request"[..]));
///
/// let client = async {
///     assert_eq!(ours.recv().await?, None);
///     ours.close().await
/// };
/// let (report, closed) = tokio::join!(listener.shutdown(Duration::from_secs(30)), client);
/// assert_eq!((report.clean, closed), (1, Ok(())));
/// service.await??;
/// # Ok(())
/// # }
/// ```
///
/// # Cancel safety
///
/// Dropping a future of `accept`, `request` or the stream's adapters loses no connection. Dropping
/// one of `bind` stops listening.
pub struct Listener {
    acceptor: Arc<Acceptor>,
    ended: bool,
}

struct Acceptor {
    inner: cm::Listener,
    config: ListenerConfig,
    admission: Arc<Admission>,
    cache: Arc<ResourceCache>,
    backlog: Backlog,
}

#[derive(Debug, Default)]
struct Handshakes {
    tasks: JoinSet<Established>,
    /// Handshakes from the oldest to the newest, except evicted ones.
    running: VecDeque<Running>,
}

#[derive(Debug)]
struct Running {
    task: AbortHandle,
    source: IpAddr,
    since: Instant,
    /// False if the provider has answered the request, because the peer has then confirmed.
    evictable: bool,
}

/// The age from which a handshake can be evicted: longer than a round trip, so that simultaneous
/// peers do not evict each other.
pub(super) const GRACE: Duration = Duration::from_millis(100);

#[allow(clippy::large_enum_variant, reason = "it is matched where it is created")]
enum Next {
    Changed,
    Requested(Result<Requested, EstablishError>),
    Established(Result<(tokio::task::Id, Established), JoinError>),
    Aged,
}

impl Handshakes {
    /// Returns the index in `running` of the handshake to evict: of the source with the most, the
    /// oldest of age [`GRACE`]. Otherwise returns the time at which the next one reaches that age.
    fn victim(&self) -> Result<usize, Option<Instant>> {
        let now = clock::now();
        let mut counts: HashMap<IpAddr, usize> = HashMap::new();
        for running in &self.running {
            *counts.entry(running.source).or_default() += 1;
        }
        let candidates =
            || self.running.iter().enumerate().filter(|(_, running)| running.evictable);
        let old = candidates().filter(|(_, running)| now.duration_since(running.since) >= GRACE);
        // The first of equal elements, which is the oldest.
        let victim = old.min_by_key(|(_, running)| Reverse(counts.get(&running.source).copied()));
        victim
            .map(|(at, _)| at)
            .ok_or_else(|| candidates().next().map(|(_, running)| running.since + GRACE))
    }

    fn finished(&mut self, task: tokio::task::Id) {
        self.running.retain(|running| running.task.id() != task);
    }
}

impl Listener {
    /// Calls [`bind_with`](Self::bind_with) with default settings.
    ///
    /// # Errors
    ///
    /// As for `bind_with`.
    pub async fn bind(
        device: &Device,
        address: impl ToSocketAddrs + fmt::Debug,
    ) -> Result<Self, EstablishError> {
        Self::listen(device, address, Box::default()).await
    }

    /// Listens at the first usable address. Port 0 selects a free port. `config` is a
    /// [`ListenerConfig`], or only the [`ConnectionConfig`] of the connections.
    ///
    /// # Errors
    ///
    /// [`EstablishError::NoRuntime`] outside a Tokio runtime with an I/O driver,
    /// [`EstablishError::Setup`] for unsupported settings, [`EstablishError::Handshake`] if
    /// [`user_data`](ConnectionConfig::user_data) is too long, [`EstablishError::Connect`] as for
    /// [`cm::Listener::bind_with`].
    pub async fn bind_with(
        device: &Device,
        address: impl ToSocketAddrs + fmt::Debug,
        config: impl Into<ListenerConfig>,
    ) -> Result<Self, EstablishError> {
        Self::listen(device, address, Box::new(config.into())).await
    }

    /// `config` is boxed, because a future would store it twice.
    pub(crate) async fn listen(
        device: &Device,
        address: impl ToSocketAddrs + fmt::Debug,
        config: Box<ListenerConfig>,
    ) -> Result<Self, EstablishError> {
        config.check(device)?;
        // Invalid settings must fail here: later they would reject every peer without a reason.
        let answer =
            cm::Listener::answer_with(device, &config.connection.cm_config(MAX_RESPONSE_DATA)?)?;
        let admission = Admission::new(&config, answer);
        let inner = Box::pin(cm::Listener::bind(device, address)).await?;
        let answered = inner.answer(admission.clone());
        rdma_provider::debug!(address = %inner.local_addr(), answered, "listening for connections");
        let cache = ResourceCache::of(device);
        let backlog = Backlog::new(config.backlog);
        let listener = Self {
            acceptor: Arc::new(Acceptor { inner, config: *config, admission, cache, backlog }),
            ended: false,
        };
        if listener.acceptor.config.backlog > 0 {
            listener.acceptor.resume();
            listener.acceptor.ensure_driver()?;
        }
        Ok(listener)
    }

    /// Leaves all requests to the program, as providers do that cannot answer.
    #[cfg(all(test, not(loom)))]
    pub(super) fn never_answer(&self) {
        self.acceptor.admission.never_answer();
    }

    #[cfg(all(test, not(loom)))]
    pub(super) fn has_requests(&self) -> bool {
        self.acceptor.inner.waiting().any()
    }

    /// Returns the counters of this listener.
    #[must_use]
    pub fn stats(&self) -> ListenerStats {
        self.acceptor.admission.stats()
    }

    /// Returns the local address.
    ///
    /// # Errors
    ///
    /// None; the type is that of Tokio's listeners.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        Ok(self.acceptor.inner.local_addr())
    }

    /// Returns the device.
    #[must_use]
    pub fn device(&self) -> &Device {
        self.acceptor.cache.device()
    }

    /// Returns the next established connection. Rejects peers with another protocol or beyond
    /// [`max_connections`](ListenerConfig::max_connections) or
    /// [`max_connections_per_source`](ListenerConfig::max_connections_per_source), and skips peers
    /// that do not confirm; [`stats`](Self::stats) counts both. To decide about each peer, use
    /// [`request`](Self::request).
    ///
    /// Tasks in the runtime of [`bind`](Self::bind), or if that has shut down, of the next call,
    /// establish connections even before `accept` is called: up to
    /// [`handshakes`](ListenerConfig::handshakes) at once, until
    /// [`backlog`](ListenerConfig::backlog) connections wait. Slow peers delay no other.
    ///
    /// The software device answers requests itself, as a kernel does for TCP. An unconfirmed peer
    /// costs a record of about 1 KiB. Beyond 256 records of a source its oldest is evicted; beyond
    /// 4,096 in total, the oldest of the source with the most. On a real device, or if the settings
    /// restrict the [peer](ConnectionConfig::peer) or [source](ConnectionConfig::source), each
    /// request starts a handshake instead.
    ///
    /// # Errors
    ///
    /// [`EstablishError::NoRuntime`] outside a Tokio runtime with an I/O driver,
    /// [`EstablishError::Connect`] if no more requests can arrive, [`EstablishError::Setup`] if no
    /// queue pair can be created.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future loses no connection. Dropping the listener aborts connections that were
    /// not accepted: their peers get [`CloseReason::Dropped`].
    pub async fn accept(&self) -> Result<Connection, EstablishError> {
        self.acceptor.accept().await
    }

    /// Polls for what [`accept`](Self::accept) returns. Only the task of the last call is woken.
    pub fn poll_accept(
        &self,
        context: &mut Context<'_>,
    ) -> Poll<Result<Connection, EstablishError>> {
        within_budget(context, |context| {
            self.acceptor.resume();
            self.acceptor.ensure_driver()?;
            self.acceptor.backlog.poll_pop(context).map_ok(Unaccepted::accept)
        })
    }

    /// Returns the next request, before anything is established. Rejects peers with another
    /// protocol.
    ///
    /// From the first call until the next [`accept`](Self::accept), the listener establishes no
    /// connection itself. Connections that `accept` has established before come first, as requests
    /// that keep the listener's settings.
    ///
    /// A request's address may be forged, yet accepting it holds a queue pair and buffers until
    /// confirmation or [eviction](ConnectionRequest::accept_with). For untrusted peers use
    /// `accept`, or a limited number of tasks that accept.
    ///
    /// # Errors
    ///
    /// [`EstablishError::NoRuntime`] or [`EstablishError::Connect`], as for `accept`.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future loses no request.
    pub async fn request(&self) -> Result<ConnectionRequest, EstablishError> {
        let acceptor = &self.acceptor;
        acceptor.admission.set_answering(false);
        acceptor.backlog.set_paused(true);
        match select(pin!(acceptor.backlog.next()), pin!(acceptor.next_request())).await {
            Either::Left((established, _)) => Ok(established?.into()),
            Either::Right((request, _)) => Ok(request?.into()),
        }
    }

    /// Stops listening, lets the applications of the accepted connections finish, and waits for at
    /// most `limit` until these are closed. Then it aborts the rest, which takes at most two more
    /// seconds. [`Listener`] has an example.
    ///
    /// 1. The address is released, and connections that were not accepted are aborted.
    /// 2. Each connection receives the messages that have arrived, and then `None`, as if the peer
    ///    had finished. If the application answers each message, and then calls
    ///    [`close`](Connection::close) or drops the connection, all these requests are answered.
    ///    Later ones are discarded, and their clients receive `None` instead of an answer.
    /// 3. A peer that has received everything has one second to finish, instead of
    ///    [`close_timeout`](ConnectionConfig::close_timeout).
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped after its first poll, only the aborts are missing.
    pub async fn shutdown(self, limit: Duration) -> ShutdownReport {
        let mut connections = self.acceptor.admission.shut_down();
        let address = self.acceptor.inner.local_addr();
        drop(self);
        connections.retain(|connection| !connection.is_terminated());
        let open = connections.len();
        rdma_provider::debug!(%address, connections = open, "shutting down a listener");
        connections.iter().for_each(|connection| connection.drain());
        let mut closed = 0;
        let all_closed = async {
            for connection in &connections {
                connection.closed().await;
                closed += 1;
            }
        };
        let mut report = ShutdownReport::default();
        let in_time = timeout(limit, all_closed).await.is_some();
        for connection in &connections[closed..] {
            connection.abort(CloseReason::Shutdown);
        }
        for connection in &connections {
            match connection.closed().await {
                CloseReason::Clean => report.clean += 1,
                CloseReason::Shutdown => report.aborted += 1,
                _ => report.unclean += 1,
            }
        }
        if !in_time {
            rdma_provider::warn!(
                %address,
                aborted = report.aborted,
                ?limit,
                "shutdown of a listener reached its limit; aborted its connections"
            );
        }
        report
    }
}

/// How the connections of a listener were closed by its [shutdown](Listener::shutdown).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ShutdownReport {
    /// Both peers finished, and all messages arrived.
    pub clean: usize,
    /// The peer had all messages and did not finish within a second, or the connection failed.
    pub unclean: usize,
    /// Aborted at the limit, with [`CloseReason::Shutdown`].
    pub aborted: usize,
}

impl Stream for Listener {
    type Item = Result<Connection, EstablishError>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.ended {
            return Poll::Ready(None);
        }
        let result = ready!(self.poll_accept(context));
        self.ended = matches!(result, Err(EstablishError::Connect(_)));
        Poll::Ready(Some(result))
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.acceptor.inner.stop();
        self.acceptor.backlog.close();
    }
}

impl Acceptor {
    async fn accept(self: &Arc<Self>) -> Result<Connection, EstablishError> {
        consume_budget().await;
        self.resume();
        let _waiting = self.backlog.wait();
        loop {
            let mut changed = pin!(self.backlog.changed());
            self.ensure_driver()?;
            if let Some(next) = self.backlog.pop() {
                return next.map(Unaccepted::accept);
            }
            // On each poll, because this future may have moved out of its runtime.
            poll_fn(|context| match self.inner.watch() {
                Ok(()) => changed.as_mut().poll(context).map(Ok),
                Err(missing) => Poll::Ready(Err(missing)),
            })
            .await?;
        }
    }

    fn resume(&self) {
        // The provider does not check paths, so it must not answer if they are restricted.
        self.admission.set_answering(self.config.connection.accepts_any_peer());
        self.backlog.set_paused(false);
    }

    fn ensure_driver(self: &Arc<Self>) -> Result<(), NoRuntime> {
        let runtime = NoRuntime::or_current()?;
        if self.backlog.needs_driver() {
            let driver = Driver(self.clone());
            let task = runtime.spawn(Box::pin(async move { driver.run().await }));
            self.backlog.set_task(task.abort_handle());
            if !self.backlog.has_driver_or_end() {
                // The runtime has dropped the task, because it shuts down.
                return Err(NoRuntime::Outside);
            }
        }
        Ok(())
    }

    async fn establish_all(&self) -> EstablishError {
        let mut handshakes = Handshakes::default();
        loop {
            let mut took = None;
            let full = handshakes.running.len() >= self.config.handshakes as usize;
            let victim = if full { handshakes.victim() } else { Err(None) };
            let mut aged = victim.err().flatten().map(Sleep::new);
            // Dropping it loses no request.
            let mut request = pin!(self.next_request());
            let next = poll_fn(|context| {
                if let Poll::Ready(Some(established)) =
                    handshakes.tasks.poll_join_next_with_id(context)
                {
                    return Poll::Ready(Next::Established(established));
                }
                let takes_now = self.backlog.poll_has_capacity(context);
                if *took.get_or_insert(takes_now) != takes_now {
                    return Poll::Ready(Next::Changed);
                }
                if !takes_now {
                    return Poll::Pending;
                }
                if !full || victim.is_ok() {
                    return request.as_mut().poll(context).map(Next::Requested);
                }
                aged.as_mut().map_or(Poll::Pending, |aged| aged.poll(context).map(|()| Next::Aged))
            });
            match next.await {
                Next::Aged | Next::Changed => {}
                Next::Requested(Err(end)) => return end,
                Next::Requested(Ok(request)) => {
                    // The request arrived while answering was disabled. If the provider answers it
                    // now, it arrives again once the peer has confirmed.
                    if request.inner.reserved().is_none()
                        && self.admission.has_capacity(request.peer_addr().ip())
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
                        rdma_provider::debug!(
                            peer = %running.source,
                            "evicted the oldest handshake; its peer is rejected"
                        );
                        running.task.abort();
                        self.admission.evicted();
                    }
                    let (source, evictable) =
                        (request.peer_addr().ip(), request.inner.reserved().is_none());
                    // In a box, because Tokio moves a task's future some ten times.
                    let task = handshakes.tasks.spawn(Box::pin(establish(request)));
                    handshakes.running.push_back(Running {
                        task,
                        source,
                        since: clock::now(),
                        evictable,
                    });
                }
                Next::Established(Ok((task, established))) => {
                    handshakes.finished(task);
                    match established {
                        Ok(_) | Err(EstablishError::Setup(_)) => self.backlog.push(established),
                        Err(_) => {}
                    }
                }
                Next::Established(Err(error)) => {
                    handshakes.finished(error.id());
                    // Evicted, or it has panicked, which the panic hook has reported.
                    rdma_provider::debug!(%error, "handshake task ended without a connection");
                }
            }
        }
    }

    async fn next_request(&self) -> Result<Requested, EstablishError> {
        loop {
            let inner = self.inner.accept().await?;
            match self.admission.handshake(inner.private_data()) {
                Ok((handshake, user_data)) => {
                    let user_data = Bytes::copy_from_slice(user_data);
                    let (cache, config) = (self.cache.clone(), self.config.connection.clone());
                    let admission = self.admission.clone();
                    let waiting = self.inner.waiting();
                    return Ok(Requested {
                        inner,
                        handshake,
                        user_data,
                        cache,
                        config,
                        first_message_timeout: self.config.first_message_timeout,
                        admission,
                        waiting,
                    });
                }
                Err(error) => {
                    rdma_provider::warn!(
                        peer = %inner.peer_addr(),
                        %error,
                        "rejected connection request"
                    );
                    inner.refuse(&rejection(&error, self.admission.service));
                }
            }
        }
    }
}

async fn establish(request: Requested) -> Established {
    let peer = request.peer_addr();
    let config = request.config.clone();
    let result = request.establish(&config).await;
    if let Err(error) = &result {
        rdma_provider::debug!(%peer, %error, "handshake failed; dropped the connection");
    }
    result.map(Unaccepted::new)
}

/// The only driver of a listener, until it is dropped.
struct Driver(Arc<Acceptor>);

impl Driver {
    async fn run(self) {
        match self.0.establish_all().await {
            // The next `accept` starts another one, in a runtime that can watch.
            EstablishError::NoRuntime(_) => {}
            end => self.0.backlog.driver_ended(Some(end)),
        }
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        self.0.backlog.driver_ended(None);
    }
}

impl fmt::Debug for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Listener")
            .field("local", &self.acceptor.inner.local_addr())
            .field("stats", &self.stats())
            .finish_non_exhaustive()
    }
}

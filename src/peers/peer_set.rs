//! Callers that wait for the same link share one future, which is dropped with the last of them.
//!
//! ```text
//!  PeerSet::get ─ table.rs: enters the peer's slot ─▶ permits ─▶ attempt ─▶ Peer (guard)
//!                           ▲                                                 │ drop
//!   closer: one task ───────┴── idle timeout, clean closes ◀── idle slots ◀───┘
//!                               probes after events of the device
//! ```

mod link;
mod settings;
mod table;

use std::fmt;
use std::future::{Future, pending};
use std::hash::Hash;
use std::io;
use std::ops::Deref;
use std::pin::pin;
use std::sync::Arc;

use futures::future::{BoxFuture, FutureExt, Shared, select};
use futures::stream::{FuturesUnordered, StreamExt};
use rdma_provider::locks::Mutex;
use tokio::net::ToSocketAddrs;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio::task::AbortHandle;
use tokio::task::coop::consume_budget;
use tokio::time::{Instant, sleep_until, timeout_at};

pub use link::PeerLink;
pub use settings::{PeerError, PeerSetConfig, PeerSetCounters};

use super::change_to_active_port;
use crate::clock;
use crate::cm::ConnectError;
use crate::connection::{Connection, ConnectionConfig, EstablishError};
use crate::contained::wakes_contained;
use crate::dc::{DcAddress, DcPool, DcPoolPeer};
use crate::engine::PortChanges;
use crate::error::NoRuntime;
use crate::verbs::Device;
use table::{State, Table};

/// Links to peers by key, each made when it is first used: [`Connection`]s, or with
/// [`over_dc`](Self::over_dc), peers of a [`DcPool`].
///
/// [`get`](Self::get) returns a guard of the peer's link. While a guard exists, the peer is *busy*,
/// and the set does not close its link. It closes the link of an *idle* peer after
/// [`idle_timeout`](PeerSetConfig::idle_timeout), or to make place for a new peer beyond
/// [`max_peers`](PeerSetConfig::max_peers), least recently used first. A link that has ended is
/// replaced at the next `get`.
///
/// ```
/// use std::collections::HashMap;
/// use tokio_rdma::peers::{PeerSet, PeerSetConfig};
/// use tokio_rdma::{ConnectionConfig, Listener};
/// # use tokio_rdma::Device;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let device = Device::software()?;
/// let listener = Listener::bind(&device, "127.0.0.1:0").await?;
/// let directory = HashMap::from([("storage-1", listener.local_addr()?)]);
/// let settings = PeerSetConfig::default().max_peers(100);
/// let peers = PeerSet::new(&device, &ConnectionConfig::default(), settings, move |name: &&str| {
///     let found = directory.get(name).copied();
///     async move { found.ok_or_else(|| std::io::Error::other("unknown peer")) }
/// })?;
///
/// let (peer, accepted) = tokio::join!(peers.get(&"storage-1"), listener.accept());
/// peer?.send("request").await?;
/// assert_eq!(accepted?.recv().await?.as_deref(), Some(&b"request"[..]));
/// # Ok(())
/// # }
/// ```
///
/// Take one guard for each request, the unit of [`max_in_flight`](PeerSetConfig::max_in_flight). A
/// task that holds guards while it waits for another one may wait for itself.
///
/// Dropping the set [aborts](PeerLink::abort) all links.
///
/// # Errors
///
/// Without a current Tokio runtime with a timer, creating a set fails with [`NoRuntime`].
pub struct PeerSet<K: Hash + Eq + Clone, L: PeerLink = Connection> {
    inner: Arc<Inner<K, L>>,
    closer: AbortHandle,
}

/// A guard of a peer's link; see [`PeerSet::get`].
///
/// A message of a [`Connection`] goes to any guard that receives, so answers need a dispatcher per
/// connection, or [`max_in_flight_per_peer`](PeerSetConfig::max_in_flight_per_peer) of 1.
pub struct Peer<K: Hash + Eq + Clone, L: PeerLink = Connection> {
    link: Arc<L>,
    generation: u64,
    _permits: [OwnedSemaphorePermit; 2],
    _entered: Entered<K, L>,
}

impl<K: Hash + Eq + Clone, L: PeerLink> Peer<K, L> {
    /// Returns the number of this link; later links of the set have higher numbers.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.generation
    }
}

impl<K: Hash + Eq + Clone, L: PeerLink> Deref for Peer<K, L> {
    type Target = L;

    fn deref(&self) -> &L {
        &self.link
    }
}

impl<K: Hash + Eq + Clone, L: PeerLink + fmt::Debug> fmt::Debug for Peer<K, L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Peer")
            .field("generation", &self.generation)
            .field("link", &self.link)
            .finish()
    }
}

impl<K: Hash + Eq + Clone + Send + Sync + 'static> PeerSet<K> {
    /// Creates an empty set whose peers are [`Listener`](crate::Listener)s at the addresses that
    /// `resolve` returns for each attempt.
    ///
    /// After an event that leaves a port of the device active, each connection asks its peer for a
    /// frame, unless [`keepalive`](ConnectionConfig::keepalive) is off. So it ends soon if it has
    /// lost its peer or address during an outage.
    pub fn new<R, F, A>(
        device: &Device,
        config: &ConnectionConfig,
        settings: PeerSetConfig,
        resolve: R,
    ) -> Result<Self, NoRuntime>
    where
        R: Fn(&K) -> F + Send + Sync + 'static,
        F: Future<Output = io::Result<A>> + Send + 'static,
        A: ToSocketAddrs + fmt::Debug + Send + Sync + 'static,
    {
        let probes = PortChanges::new(device).map(|changes| Probes {
            changes,
            device: device.clone(),
            probe: Connection::probe,
        });
        let (device, config) = (device.clone(), config.clone());
        let connector = move |key: &K| {
            let (device, config, resolving) = (device.clone(), config.clone(), resolve(key));
            async move {
                let address = resolving.await.map_err(failed)?;
                Connection::connect_with(&device, address, &config).await
            }
        };
        Self::start(settings, connector, probes)
    }

    /// Creates an empty set whose connections `connector` makes.
    pub fn with_connector<C, F>(settings: PeerSetConfig, connector: C) -> Result<Self, NoRuntime>
    where
        C: Fn(&K) -> F + Send + Sync + 'static,
        F: Future<Output = Result<Connection, EstablishError>> + Send + 'static,
    {
        Self::with_links(settings, connector)
    }
}

impl<K: Hash + Eq + Clone + Send + Sync + 'static> PeerSet<K, DcPoolPeer> {
    /// Creates an empty set of peers of `pool`, whose targets have the addresses that `resolve`
    /// returns for each attempt. A peer that [has failed](DcPoolPeer::has_failed) is resolved
    /// again, because its target may have moved. Errors of `resolve` and of [`DcPool::peer`] are
    /// errors of [`get`](Self::get). `docs/reconnect.md` has an example.
    ///
    /// A peer costs an address handle and some hundred bytes. Operations to a peer keep their order
    /// within a [generation](Peer::generation).
    pub fn over_dc<R, F>(
        pool: &DcPool,
        settings: PeerSetConfig,
        resolve: R,
    ) -> Result<Self, NoRuntime>
    where
        R: Fn(&K) -> F + Send + Sync + 'static,
        F: Future<Output = io::Result<DcAddress>> + Send + 'static,
    {
        let pool = pool.clone();
        Self::with_links(settings, move |key| {
            let (pool, resolving) = (pool.clone(), resolve(key));
            async move {
                let address = resolving.await.map_err(failed)?;
                Ok(pool.peer(&address)?)
            }
        })
    }
}

impl<K: Hash + Eq + Clone + Send + Sync + 'static, L: PeerLink> PeerSet<K, L> {
    /// Creates an empty set of [links](PeerLink) that `connector` makes.
    pub fn with_links<C, F>(settings: PeerSetConfig, connector: C) -> Result<Self, NoRuntime>
    where
        C: Fn(&K) -> F + Send + Sync + 'static,
        F: Future<Output = Result<L, EstablishError>> + Send + 'static,
    {
        Self::start(settings, connector, None)
    }

    fn start<C, F>(
        settings: PeerSetConfig,
        connector: C,
        probes: Option<Probes<L>>,
    ) -> Result<Self, NoRuntime>
    where
        C: Fn(&K) -> F + Send + Sync + 'static,
        F: Future<Output = Result<L, EstablishError>> + Send + 'static,
    {
        let runtime = NoRuntime::or_timers()?;
        let inner = Arc::new(Inner {
            table: Mutex::new(Table::new(&settings)),
            permits: Arc::new(Semaphore::new(settings.max_in_flight)),
            gate: tokio::sync::Mutex::new(()),
            place: Notify::new(),
            closer: Notify::new(),
            connector: Box::new(move |key| connector(key).boxed()),
            settings,
        });
        let closer = runtime.spawn(close_idle(inner.clone(), probes)).abort_handle();
        Ok(Self { inner, closer })
    }

    /// Returns a guard of the peer's link, which is made if there is no live one. Callers that wait
    /// for the same peer share one attempt and its error.
    ///
    /// # Errors
    ///
    /// - [`PeerError::Busy`] if a limit is reached for longer than [`PeerSetConfig::wait`].
    /// - [`PeerError::Connect`] and [`PeerError::ConnectTimedOut`] if the attempt fails. The next
    ///   call makes another one.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future withdraws the attempt, unless other callers wait for it.
    pub async fn get(&self, key: &K) -> Result<Peer<K, L>, PeerError> {
        let (inner, settings) = (&self.inner, &self.inner.settings);
        let until = settings.wait.map(|wait| Instant::now() + wait.min(LONGEST_WAIT));
        consume_budget().await;
        let entered = inner.enter(key, until).await?;
        let of_peer = entered.permits.clone();
        let permits = [
            inner.permit(of_peer, PER_PEER, until).await?,
            inner.permit(inner.permits.clone(), TOTAL, until).await?,
        ];
        let (generation, link) = inner.connect(key).await?;
        Ok(Peer { link, generation, _permits: permits, _entered: entered })
    }

    /// Detaches the link of a peer, so that the next [`get`](Self::get) makes another. An idle link
    /// is closed; guards keep a busy one. Returns true if there was a link.
    pub fn disconnect(&self, key: &K) -> bool {
        let detached = self.inner.change(|table| table.disconnect(key));
        self.inner.place.notify_one();
        detached.is_some()
    }

    /// Returns the counters.
    #[must_use]
    pub fn counters(&self) -> PeerSetCounters {
        self.inner.counters()
    }
}

impl<K: Hash + Eq + Clone, L: PeerLink> Drop for PeerSet<K, L> {
    fn drop(&mut self) {
        self.closer.abort();
        let dropped = self.inner.table.lock().clear();
        for link in &dropped {
            link.abort();
        }
    }
}

impl<K: Hash + Eq + Clone, L: PeerLink> fmt::Debug for PeerSet<K, L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PeerSet")
            .field("counters", &self.inner.counters())
            .field("settings", &self.inner.settings)
            .finish_non_exhaustive()
    }
}

const PER_PEER: &str = "max_in_flight_per_peer";
const TOTAL: &str = "max_in_flight";
const PEERS: &str = "max_peers";

const LONGEST_WAIT: std::time::Duration = std::time::Duration::from_secs(10 * 365 * 24 * 3600);

type Attempted<L> = Result<(u64, Arc<L>), PeerError>;

type Attempt<L> = Shared<BoxFuture<'static, Attempted<L>>>;

fn failed(error: io::Error) -> ConnectError {
    ConnectError::lookup(None, &error)
}

type Connector<K, L> = dyn Fn(&K) -> BoxFuture<'static, Result<L, EstablishError>> + Send + Sync;

struct Inner<K, L> {
    table: Mutex<Table<K, L>>,
    permits: Arc<Semaphore>,
    /// The FIFO of callers with a new peer; the first one waits for `place`.
    gate: tokio::sync::Mutex<()>,
    /// Notified when a peer becomes idle or is removed.
    place: Notify,
    /// Notified when a peer becomes idle, or when a link is to be closed.
    closer: Notify,
    connector: Box<Connector<K, L>>,
    settings: PeerSetConfig,
}

impl<K: Hash + Eq + Clone, L: PeerLink> Inner<K, L> {
    fn counters(&self) -> PeerSetCounters {
        let in_flight = self.settings.max_in_flight - self.permits.available_permits();
        PeerSetCounters { in_flight, ..self.table.lock().counters() }
    }

    async fn enter(
        self: &Arc<Self>,
        key: &K,
        until: Option<Instant>,
    ) -> Result<Entered<K, L>, PeerError> {
        let entered = |permits| Entered { inner: self.clone(), key: key.clone(), permits };
        let known = self.table.lock().enter(key);
        if let Some(permits) = known {
            return Ok(entered(permits));
        }
        let _gate = match until {
            Some(until) => Some(self.within(until, self.gate.lock(), PEERS).await?),
            None => None,
        };
        loop {
            match (self.change(|table| table.enter_new(key)), until) {
                (Some(permits), _) => return Ok(entered(permits)),
                (None, Some(until)) => {
                    self.within(until, self.place.notified(), PEERS).await?;
                }
                (None, None) => return Err(self.busy(PEERS)),
            }
        }
    }

    async fn permit(
        &self,
        permits: Arc<Semaphore>,
        field: &'static str,
        until: Option<Instant>,
    ) -> Result<OwnedSemaphorePermit, PeerError> {
        let permit = match until {
            Some(until) => self.within(until, permits.acquire_owned(), field).await?.ok(),
            None => permits.try_acquire_owned().ok(),
        };
        permit.ok_or_else(|| self.busy(field))
    }

    async fn within<F: Future>(
        &self,
        until: Instant,
        future: F,
        field: &'static str,
    ) -> Result<F::Output, PeerError> {
        wakes_contained(timeout_at(until, future)).await.map_err(|_| self.busy(field))
    }

    fn busy(&self, field: &'static str) -> PeerError {
        let limit = match field {
            PEERS => self.settings.max_peers,
            PER_PEER => self.settings.max_in_flight_per_peer,
            _ => self.settings.max_in_flight,
        };
        PeerError::Busy { field, limit, waited: self.settings.wait }
    }

    async fn connect(&self, key: &K) -> Attempted<L> {
        let attempt = match self.table.lock().state(key) {
            Some(&State::Linked(generation, ref link)) => return Ok((generation, link.clone())),
            Some(State::Connecting(attempt)) => attempt.upgrade(),
            _ => None,
        };
        let attempt = match attempt {
            Some(attempt) => attempt,
            None => self.start(key),
        };
        let result = attempt.clone().await;
        self.table.lock().settle(key, &attempt, &result);
        result
    }

    fn start(&self, key: &K) -> Attempt<L> {
        let after = self.settings.attempt_timeout;
        // The connector may use the set, so it is called without the lock.
        let connecting = (self.connector)(key);
        let mut table = self.table.lock();
        let generation = table.next_generation();
        let attempt = async move {
            match clock::timeout(after, connecting).await {
                Some(Ok(link)) => Ok((generation, Arc::new(link))),
                Some(Err(error)) => Err(PeerError::Connect(error)),
                None => Err(PeerError::ConnectTimedOut { after }),
            }
        };
        table.start(key, attempt.boxed().shared())
    }

    /// Changes the table, and wakes the closer if it has work then.
    fn change<T>(&self, change: impl FnOnce(&mut Table<K, L>) -> T) -> T {
        let mut table = self.table.lock();
        let changed = change(&mut table);
        let wakes_closer = table.needs_closer();
        drop(table);
        if wakes_closer {
            self.closer.notify_one();
        }
        changed
    }
}

struct Entered<K: Hash + Eq + Clone, L: PeerLink> {
    inner: Arc<Inner<K, L>>,
    key: K,
    permits: Arc<Semaphore>,
}

impl<K: Hash + Eq + Clone, L: PeerLink> Drop for Entered<K, L> {
    fn drop(&mut self) {
        // Drops the link without the lock.
        drop(self.inner.change(|table| table.leave(&self.key)));
        self.inner.place.notify_one();
    }
}

struct Probes<L> {
    changes: PortChanges,
    device: Device,
    probe: fn(&L),
}

async fn close_idle<K: Hash + Eq + Clone, L: PeerLink>(
    inner: Arc<Inner<K, L>>,
    mut probes: Option<Probes<L>>,
) {
    let mut closing = FuturesUnordered::new();
    loop {
        let (ended, next) = inner.table.lock().expire(Instant::now());
        for link in ended {
            // Limited, because a peer that does not finish holds its connection for
            // `close_timeout`.
            if closing.len() < inner.settings.max_peers {
                closing.push(async move { link.close().await });
            }
        }
        let expired = async {
            match next {
                Some(next) => sleep_until(next).await,
                None => pending().await,
            }
        };
        let closed = async {
            if closing.next().await.is_none() {
                pending::<()>().await;
            }
        };
        let probed = async {
            let Some(probes) = &mut probes else { return pending().await };
            change_to_active_port(&mut probes.changes, &probes.device).await;
            let links = inner.table.lock().links();
            links.iter().for_each(|link| (probes.probe)(link));
        };
        let notified = wakes_contained(inner.closer.notified());
        select(select(pin!(notified), pin!(probed)), select(pin!(expired), pin!(closed))).await;
    }
}

//! Delays and the deadline follow Tokio's clock, which tests can pause. The timeout of an attempt
//! follows `clock`, because devices and peers do not pause.

mod connector;
mod error;
mod policy;

use std::any::Any;
use std::fmt;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use connector::{Connector, Failure};
use futures::Stream;
use futures::future::{Either, FutureExt, select};
use futures::stream::{self, BoxStream, StreamExt};
use rdma_provider::later::contained;
use tokio::net::ToSocketAddrs;
use tokio::sync::{Notify, watch};
use tokio::task::AbortHandle;
use tokio::task::coop::consume_budget;
use tokio::time::{Instant, sleep};

pub use error::{ReconnectCause, ReconnectError};
pub use policy::ReconnectPolicy;

use crate::clock;
use crate::connection::{
    CloseReason, Connection, ConnectionConfig, EstablishError, MessageError, RefusalReason,
};
use crate::contained::wakes_contained;
use crate::error::{NoRuntime, OpenError};
use crate::verbs::Device;

/// A connection to an address that is replaced whenever it ends, until this handle is closed or
/// dropped.
///
/// Each connection has a *generation*, a number from 1. Nothing is carried over to the next one:
/// requests in flight end with an error, whose [`outcome`](MessageError::outcome) tells whether the
/// peer may have executed them, and grants of the peer are no longer valid, unless the
/// configuration sets a [`protection_domain`](ConnectionConfig::protection_domain).
///
/// ```
/// use tokio_rdma::peers::{Reconnect, ReconnectPolicy};
/// use tokio_rdma::{ConnectionConfig, Listener};
/// # use tokio_rdma::Device;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let device = Device::software()?;
/// let listener = Listener::bind(&device, "127.0.0.1:0").await?;
/// let address = listener.local_addr()?;
/// let config = ConnectionConfig::default();
/// let client = Reconnect::new(&device, address, &config, ReconnectPolicy::default())?;
///
/// for expected in 1..=3 {
///     let (accepted, connected) = tokio::join!(listener.accept(), client.connected());
///     let (generation, connection) = connected?;
///     assert_eq!(generation, expected);
///     // The server drops its end, and the client connects again.
///     drop(accepted?);
///     connection.closed().await;
/// }
/// # Ok(())
/// # }
/// ```
///
/// # Attempts
///
/// The first attempt starts at once. Another one follows a failed attempt or the end of a
/// connection, after a delay of the [policy](ReconnectPolicy).
///
/// | Failure of an attempt | Another attempt |
/// |---|---|
/// | refused, unreachable, timed out, disconnected, route or address changed | yes |
/// | host name not found | yes |
/// | listener full or shutting down | yes |
/// | memory or entries of a queue missing | yes |
/// | invalid or unsupported settings, no runtime | no |
/// | another protocol, version or content | no |
/// | rejected by the peer's application, or by another program with data | no |
/// | device removed | by [`with_device`](Self::with_device) only |
///
/// [`EstablishError::is_temporary`] decides this, unless [`ReconnectPolicy::retry_when`] replaces
/// it. Every end of a connection leads to another attempt, even if this side closed it, except
/// [`CloseReason::Violation`], [`CloseReason::Rejected`], [`CloseReason::Refused`] for another
/// content, and [`CloseReason::Runtime`].
///
/// A listener of another version, or one that is dropped, rejects requests without a reason, so
/// attempts continue until the [deadline](ReconnectPolicy::deadline).
///
/// # Events of the device
///
/// With [`new`](Self::new) and [`with_device`](Self::with_device), no attempt is made while no port
/// is active, and the next one follows within [`first_delay`](ReconnectPolicy::first_delay) of an
/// event that may have changed a port. After the removal of the device, attempts end
/// ([`ReconnectCause::DeviceRemoved`]), or `open` of [`with_device`](Self::with_device) is called
/// until it returns a device. `docs/reconnect.md` has the details.
///
/// # Errors
///
/// Without a current Tokio runtime with a timer, creating the handle fails with [`NoRuntime`].
pub struct Reconnect {
    shared: Arc<Publisher>,
    task: AbortHandle,
}

/// The state of a [`Reconnect`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum ReconnectState {
    /// An attempt is in progress.
    Connecting {
        /// Attempts since the last connection, this one included.
        attempt: u32,
    },
    /// The connection is established.
    Connected {
        /// Number of the connection, from 1.
        generation: u64,
    },
    /// The next attempt or check of the device follows after a delay. An event that shortens the
    /// delay publishes this state again.
    Waiting {
        /// Length of the wait.
        delay: Duration,
        /// Reason for the next attempt.
        cause: ReconnectCause,
    },
    /// No further attempt is made.
    Failed(ReconnectError),
    /// The handle was closed or dropped.
    Closed,
}

impl ReconnectState {
    /// Returns true if no other state follows.
    #[must_use]
    pub const fn is_final(&self) -> bool {
        matches!(self, Self::Failed(_) | Self::Closed)
    }
}

impl fmt::Display for ReconnectState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Connecting { attempt } => write!(f, "connecting, attempt {attempt}"),
            Self::Connected { generation } => write!(f, "connected, generation {generation}"),
            Self::Waiting { delay, cause } => {
                write!(f, "connecting again in {delay:?}: {cause}")
            }
            Self::Failed(error) => error.fmt(f),
            Self::Closed => f.write_str("closed"),
        }
    }
}

impl Reconnect {
    /// Connects to a [`Listener`](crate::Listener) at `address`, which is resolved for each
    /// attempt.
    pub fn new<A>(
        device: &Device,
        address: A,
        config: &ConnectionConfig,
        policy: ReconnectPolicy,
    ) -> Result<Self, NoRuntime>
    where
        A: ToSocketAddrs + fmt::Debug + Clone + Send + Sync + 'static,
    {
        let (device, config, peer) = (device.clone(), config.clone(), format!("{address:?}"));
        let open = move || Ok(device.clone());
        Self::start(policy, peer, Connector::on_device(open, false, connect(address, config)))
    }

    /// Connects like [`new`](Self::new), on the device that `open` returns, for example `move ||
    /// Device::open(&name)`. `open` is called for the first attempt and after a removal, again
    /// after each failure until the [deadline](ReconnectPolicy::deadline), and may return another
    /// device. It should block the runtime no longer than `Device::open` does, some milliseconds.
    ///
    /// Some devices cannot be opened again until everything created from the removed one is
    /// dropped, in particular earlier connections. The configuration must name no object of a
    /// device, such as a [`protection_domain`](ConnectionConfig::protection_domain).
    pub fn with_device<O, A>(
        open: O,
        address: A,
        config: &ConnectionConfig,
        policy: ReconnectPolicy,
    ) -> Result<Self, NoRuntime>
    where
        O: FnMut() -> Result<Device, OpenError> + Send + 'static,
        A: ToSocketAddrs + fmt::Debug + Clone + Send + Sync + 'static,
    {
        let (config, peer) = (config.clone(), format!("{address:?}"));
        Self::start(policy, peer, Connector::on_device(open, true, connect(address, config)))
    }

    /// Connects by `connector`, which is called for each attempt and may choose a device and an
    /// address. Events of devices have no influence.
    ///
    /// ```
    /// # use tokio_rdma::peers::{Reconnect, ReconnectPolicy};
    /// # use tokio_rdma::{Connection, Device};
    /// # use std::net::SocketAddr;
    /// # use std::sync::{Arc, Mutex};
    /// # fn example(device: Device, leader: Arc<Mutex<SocketAddr>>) {
    /// let client = Reconnect::with_connector(ReconnectPolicy::default(), move || {
    ///     let device = device.clone();
    ///     let address = *leader.lock().unwrap();
    ///     async move { Connection::connect(&device, address).await }
    /// });
    /// # }
    /// ```
    pub fn with_connector<C, F>(
        policy: ReconnectPolicy,
        mut connector: C,
    ) -> Result<Self, NoRuntime>
    where
        C: FnMut() -> F + Send + 'static,
        F: Future<Output = Result<Connection, EstablishError>> + Send + 'static,
    {
        let peer = "of a connector".to_owned();
        Self::start(policy, peer, Connector::by_function(move || connector().boxed()))
    }

    fn start(
        policy: ReconnectPolicy,
        peer: String,
        connector: Connector,
    ) -> Result<Self, NoRuntime> {
        let runtime = NoRuntime::or_timers()?;
        let first =
            Published { state: ReconnectState::Connecting { attempt: 1 }, connection: None };
        let shared =
            Arc::new(Publisher { published: watch::Sender::new(first), retry: Notify::new() });
        let supervisor =
            Supervisor { shared: shared.clone(), policy, peer, connector, generation: 0 };
        let task = runtime.spawn(supervisor.run()).abort_handle();
        Ok(Self { shared, task })
    }

    /// Waits until there is a connection, and returns its generation and a handle of it. Do not
    /// hold the handle longer than needed: it keeps the buffers of an ended connection.
    ///
    /// # Errors
    ///
    /// [`ReconnectError`] if no further attempt is made.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn connected(&self) -> Result<(u64, Connection), ReconnectError> {
        let mut published = self.shared.published.subscribe();
        consume_budget().await;
        loop {
            {
                let current = published.borrow_and_update();
                match (&current.state, &current.connection) {
                    (ReconnectState::Failed(error), _) => return Err(error.clone()),
                    (ReconnectState::Closed, _) => return Err(ReconnectError::Closed),
                    // A connection with a reason has ended, but the task has not noticed it yet.
                    (&ReconnectState::Connected { generation }, Some(connection))
                        if connection.close_reason().is_none() =>
                    {
                        return Ok((generation, connection.clone()));
                    }
                    _ => {}
                }
            }
            if wakes_contained(published.changed()).await.is_err() {
                return Err(ReconnectError::Closed);
            }
        }
    }

    /// Returns the state.
    #[must_use]
    pub fn state(&self) -> ReconnectState {
        self.shared.published.borrow().state.clone()
    }

    /// Returns the stream of states, from the current one to a [final](ReconnectState::is_final)
    /// one. A slow observer misses states, but sees the newest.
    pub fn states(&self) -> ReconnectStates {
        ReconnectStates { inner: states(self.shared.published.subscribe()).boxed() }
    }

    /// Ends the wait before the next attempt, for example because the peer is known to be
    /// reachable.
    pub fn retry_now(&self) {
        self.shared.retry.notify_waiters();
    }

    /// Makes no further attempts, and closes the connection like [`Connection::close`].
    ///
    /// # Errors
    ///
    /// [`MessageError::Closed`] if there is a connection and it does not close cleanly.
    ///
    /// # Cancel safety
    ///
    /// From the first poll, no attempt is made. Dropping the future drops this handle of the
    /// connection.
    pub async fn close(&self) -> Result<(), MessageError> {
        let current = self.shared.publish(ReconnectState::Closed, None);
        self.task.abort();
        match current {
            Some(connection) if connection.close_reason().is_none() => connection.close().await,
            _ => {
                consume_budget().await;
                Ok(())
            }
        }
    }
}

impl Drop for Reconnect {
    fn drop(&mut self) {
        self.shared.publish(ReconnectState::Closed, None);
        self.task.abort();
    }
}

impl fmt::Debug for Reconnect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reconnect").field("state", &self.state()).finish_non_exhaustive()
    }
}

/// The stream that [`Reconnect::states`] returns.
///
/// # Cancel safety
///
/// Dropping a future of the next item loses no state.
#[must_use = "streams do nothing unless polled"]
pub struct ReconnectStates {
    inner: BoxStream<'static, ReconnectState>,
}

impl Stream for ReconnectStates {
    type Item = ReconnectState;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.inner.as_mut().poll_next(context)
    }
}

impl fmt::Debug for ReconnectStates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReconnectStates").finish_non_exhaustive()
    }
}

fn states(published: watch::Receiver<Published>) -> impl Stream<Item = ReconnectState> {
    stream::unfold((published, true), |(mut published, first)| async move {
        if first {
            consume_budget().await;
        } else {
            let ended = published.borrow().state.is_final();
            if ended || wakes_contained(published.changed()).await.is_err() {
                return None;
            }
        }
        let state = published.borrow_and_update().state.clone();
        Some((state, (published, false)))
    })
}

struct Publisher {
    published: watch::Sender<Published>,
    retry: Notify,
}

struct Published {
    state: ReconnectState,
    connection: Option<Connection>,
}

impl Publisher {
    /// Publishes a state, unless a final one was published. Returns the replaced connection, or the
    /// refused one, because its destructor must run without Tokio's lock.
    fn publish(
        &self,
        state: ReconnectState,
        mut connection: Option<Connection>,
    ) -> Option<Connection> {
        self.published.send_if_modified(|published| {
            let open = !published.state.is_final();
            if open {
                published.state = state;
                std::mem::swap(&mut published.connection, &mut connection);
            }
            open
        });
        connection
    }
}

fn connect<A>(address: A, config: ConnectionConfig) -> impl FnMut(Device) -> connector::Attempt
where
    A: ToSocketAddrs + fmt::Debug + Clone + Send + Sync + 'static,
{
    move |device| {
        let (address, config) = (address.clone(), config.clone());
        async move { Connection::connect_with(&device, address, &config).await }.boxed()
    }
}

struct Supervisor {
    shared: Arc<Publisher>,
    policy: ReconnectPolicy,
    /// Names the peer in logs.
    peer: String,
    connector: Connector,
    generation: u64,
}

impl Drop for Supervisor {
    /// Publishes the end of the task, even if its runtime drops it.
    fn drop(&mut self) {
        self.shared.publish(ReconnectState::Failed(ReconnectError::Runtime), None);
    }
}

impl Supervisor {
    async fn run(mut self) {
        // The connector and the policy call functions of the program, whose panic must reach the
        // callers that wait for a connection.
        let error = match AssertUnwindSafe(self.connect_until_failure()).catch_unwind().await {
            Ok(error) => error,
            Err(panic) => panicked(panic),
        };
        let (peer, generations) = (&self.peer, self.generation);
        rdma_provider::warn!(peer, generations, %error, "stopped connecting");
        self.shared.publish(ReconnectState::Failed(error), None);
    }

    async fn connect_until_failure(&mut self) -> ReconnectError {
        // `step`: how often the delay has doubled, since a connection that lasted or a change of
        // the device.
        let (mut since, mut attempts, mut step) = (Instant::now(), 0, 0);
        let mut last = None;
        loop {
            let cause = match self.attempt(since, &mut attempts, last.as_ref()).await {
                Ok(connection) => {
                    let connected = Instant::now();
                    let reason = self.until_ended(connection).await;
                    let cause = ReconnectCause::Lost { generation: self.generation, reason };
                    if !allows_another(reason) {
                        return ReconnectError::Permanent { cause, attempts };
                    }
                    if connected.elapsed() >= self.policy.greatest_delay {
                        step = 0;
                    }
                    (since, attempts) = (Instant::now(), 0);
                    cause
                }
                Err(Failure::Again(cause)) => cause,
                Err(Failure::Permanent(cause)) => {
                    return ReconnectError::Permanent { cause, attempts };
                }
            };
            let delay = self.policy.delay(step, random());
            let delay = self.left(since).map_or(delay, |left| delay.min(left));
            let is_news = last.as_ref() != Some(&cause);
            let device_changed = self.wait(delay, cause.clone(), is_news).await;
            if let Some(after) = self.policy.deadline
                && since.elapsed() >= after
            {
                return ReconnectError::TimedOut { after, attempts, cause };
            }
            last = Some(cause);
            // Failures before the change say nothing about what follows.
            step = if device_changed { 0 } else { step.saturating_add(1) };
        }
    }

    async fn attempt(
        &mut self,
        since: Instant,
        attempts: &mut u32,
        last: Option<&ReconnectCause>,
    ) -> Result<Connection, Failure> {
        let connecting = self.connector.start()?;
        *attempts = attempts.saturating_add(1);
        self.shared.publish(ReconnectState::Connecting { attempt: *attempts }, None);
        let limit = self.policy.attempt_timeout;
        let after = self.left(since).map_or(limit, |left| limit.min(left));
        match (clock::timeout(after, connecting).await, last) {
            (Some(Ok(connection)), _) => Ok(connection),
            (Some(Err(error)), _) => Err(self.connector.failed(error, &self.policy)),
            // An earlier failure says more than the deadline.
            (None, Some(last)) if after < limit => Err(Failure::Again(last.clone())),
            (None, _) => Err(Failure::Again(ReconnectCause::AttemptTimedOut { after })),
        }
    }

    async fn until_ended(&mut self, connection: Connection) -> CloseReason {
        self.generation += 1;
        let (peer, generation) = (&self.peer, self.generation);
        rdma_provider::debug!(peer, generation, ?connection, "connected");
        let state = ReconnectState::Connected { generation };
        self.connector.watch(&connection);
        self.shared.publish(state, Some(connection.clone()));
        self.connector.ended(&connection).await
    }

    async fn wait(&mut self, delay: Duration, cause: ReconnectCause, is_news: bool) -> bool {
        let peer = &self.peer;
        if is_news {
            rdma_provider::info!(peer, %cause, ?delay, "connecting again after a delay");
        } else {
            rdma_provider::debug!(peer, %cause, ?delay, "connecting again after a delay");
        }
        let mut retried = pin!(self.shared.retry.notified());
        // Enabled before the state is published, so that `retry_now` ends this wait.
        retried.as_mut().enable();
        self.shared.publish(ReconnectState::Waiting { delay, cause: cause.clone() }, None);
        let start = Instant::now();
        let (delayed, changed) = (pin!(sleep(delay)), pin!(self.connector.device_changed()));
        let mut ended = select(retried, delayed);
        if let Either::Right(_) = select(changed, &mut ended).await {
            return false;
        }
        // All handles of a device get its events at once, so a random delay spreads their attempts.
        let jitter = self.policy.delay(0, random());
        if jitter < delay.saturating_sub(start.elapsed()) {
            self.shared.publish(ReconnectState::Waiting { delay: jitter, cause }, None);
        }
        select(ended, pin!(sleep(jitter))).await;
        true
    }

    fn left(&self, since: Instant) -> Option<Duration> {
        self.policy.deadline.map(|deadline| deadline.saturating_sub(since.elapsed()))
    }
}

fn panicked(panic: Box<dyn Any + Send>) -> ReconnectError {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    let message = text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
    // The destructor of the payload is user code, too.
    contained(|| drop(panic));
    ReconnectError::Panicked { message }
}

fn allows_another(reason: CloseReason) -> bool {
    !matches!(
        reason,
        CloseReason::Violation(_)
            | CloseReason::Rejected
            | CloseReason::Runtime
            | CloseReason::Refused(RefusalReason::OtherService(_))
    )
}

fn random() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(0)
}

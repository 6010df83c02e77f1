use std::fmt;
use std::future::poll_fn;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use crate::blocking;
use crate::coop::within_budget;
use crate::dispatch::CmId;
use crate::error::{NoRuntime, VerbError};
use crate::op::QueuePair;
use rdma_provider::cm_contract::CmId as _;
use rdma_provider::later::contained;

use super::error::{ConnectError, ConnectStep};
use super::inbox::{IdState, Inbox, fail};
use super::router::{CreateId, Router};
use crate::clock;

pub(super) struct Endpoint {
    id: Option<Arc<CmId>>,
    inbox: Arc<Inbox>,
    pub(super) router: Arc<Router>,
    /// Listeners and unanswered requests, whose destruction may block.
    passive: bool,
}

impl Endpoint {
    pub(super) fn new(router: &Arc<Router>, id: CmId, inbox: Arc<Inbox>) -> Self {
        router.add(id.key(), &inbox);
        Self { id: Some(Arc::new(id)), inbox, router: Arc::clone(router), passive: true }
    }

    pub(super) fn create(router: &Arc<Router>, create_id: CreateId) -> Result<Self, VerbError> {
        let mut endpoint = Self::new(router, create_id(router)?, Inbox::new(None));
        endpoint.passive = false;
        Ok(endpoint)
    }

    pub(super) fn answered(&mut self) {
        self.passive = false;
    }

    /// Its calls that do not go through [`call_blocking`](Self::call_blocking) do not block, except
    /// for those of a [`Listener`](super::Listener) that binds: librdmacm writes one command for
    /// each, and the kernel executes it under locks that it holds briefly. For RTR and RTS, it
    /// looks up a RoCE neighbour that it already knows.
    pub(super) fn id(&self) -> &CmId {
        self.id.as_deref().unwrap_or_else(|| unreachable!("only `drop` takes it"))
    }

    pub(super) fn inbox(&self) -> &Arc<Inbox> {
        &self.inbox
    }

    /// Runs `f` to the end even if the future is dropped; on another thread if `blocks`.
    pub(super) async fn call_blocking<T: Send + 'static>(
        &self,
        blocks: bool,
        f: impl FnOnce(&CmId) -> Result<T, ConnectError> + Send + 'static,
    ) -> Result<T, ConnectError> {
        match &self.id {
            Some(id) if blocks => {
                let id = Arc::clone(id);
                on_blocking_thread(move || f(&id)).await
            }
            _ => f(self.id()),
        }
    }

    /// If no runtime watches the events, it polls for them.
    pub(super) async fn wait_for<T>(&self, mut find: impl FnMut(&mut IdState) -> Option<T>) -> T {
        let mut wait = self.inbox.wait();
        let mut poll = |context: &mut Context<'_>| {
            let polled = wait.poll(context, &mut find);
            // On each poll, because the task may have moved from a runtime that has shut down.
            if polled.is_ready() || self.router.watch().is_ok() || self.router.reactors.is_watched()
            {
                return polled;
            }
            self.router.drain();
            contained(|| context.waker().wake_by_ref());
            Poll::Pending
        };
        poll_fn(|context| within_budget(context, &mut poll)).await
    }

    pub(super) async fn explain<T>(
        &self,
        result: Result<T, impl Into<ConnectError>>,
        step: ConnectStep,
        address: SocketAddr,
    ) -> Result<T, ConnectError> {
        /// The time for the event of the end to arrive. Without one, it delays the error.
        const GRACE: Duration = Duration::from_millis(100);
        let error = match result {
            Ok(value) => return Ok(value),
            Err(error) => error.into(),
        };
        if !matches!(error, ConnectError::Verb { .. } | ConnectError::Setup { .. }) {
            return Err(error);
        }
        // An event raised by the failed call does not make the channel readable.
        self.router.drain();
        let end = self.wait_for(|state| state.end.clone());
        match clock::timeout(GRACE, end).await {
            Some(end) => Err(ConnectError::from_end(&end, step, address)),
            None => Err(error.during(step, address)),
        }
    }

    pub(super) fn has_ended(&self) -> bool {
        self.inbox.state(|state| state.end.is_some())
    }
}

/// Runs `f` to the end even if the future is dropped.
pub(super) async fn on_blocking_thread<T: Send + 'static>(
    f: impl FnOnce() -> Result<T, ConnectError> + Send + 'static,
) -> Result<T, ConnectError> {
    NoRuntime::or_current()?;
    blocking::run(f).await
}

/// Fails with [`ConnectError::TimedOut`] after `after`. Adds step and address to errors without
/// them.
pub(super) async fn with_deadline<T>(
    after: Duration,
    step: ConnectStep,
    address: SocketAddr,
    make: impl AsyncFnOnce() -> Result<T, ConnectError>,
) -> Result<T, ConnectError> {
    let late = Err(ConnectError::TimedOut { address, step, after });
    // The future is made where it is pinned, because a move would copy it.
    let result = clock::timeout(after, pin!(make())).await.unwrap_or(late);
    result.map_err(|error| error.during(step, address))
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        if let Some(id) = self.id.take() {
            self.router.remove(id.key());
            if self.passive {
                self.router.dispose([id]);
            }
        }
    }
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Endpoint")
            .field("local", &self.id().local_addr())
            .field("peer", &self.id().peer_addr())
            .finish_non_exhaustive()
    }
}

pub(super) struct FailUnlessConnected(Option<QueuePair>);

impl FailUnlessConnected {
    pub(super) fn new(queue_pair: &QueuePair) -> Self {
        Self(Some(queue_pair.clone()))
    }

    pub(super) fn connected(mut self) {
        self.0 = None;
    }
}

impl Drop for FailUnlessConnected {
    fn drop(&mut self) {
        if let Some(queue_pair) = self.0.take() {
            fail(&queue_pair);
        }
    }
}

//! An id with its events: called where that holds up nobody, awaited with a deadline.

use std::fmt;
use std::future::{Future, poll_fn};
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use crate::contained::{ContainedWaker, contained};
use crate::dispatch::CmId;
use crate::error::{NoRuntime, VerbError};
use crate::op::QueuePair;
use crate::types::Qpn;
use rdma_provider::cm_contract::{CmAnswer, CmId as _, CmRoute};

use super::clock;
use super::error::{ConnectError, Step};
use super::router::{Happened, Inbox, Router, fail};

/// See the module. Its drop destroys the id.
pub(super) struct Endpoint {
    raw: Option<Arc<CmId>>,
    inbox: Arc<Inbox>,
    router: Arc<Router>,
}

impl Endpoint {
    /// Takes an id, whose events go to `inbox` from now on.
    pub(super) fn new(router: &Arc<Router>, id: CmId, inbox: Arc<Inbox>) -> Self {
        router.add(id.key(), &inbox);
        Self { raw: Some(Arc::new(id)), inbox, router: Arc::clone(router) }
    }

    /// A new id that is not a listener.
    pub(super) fn create(router: &Arc<Router>) -> Result<Self, VerbError> {
        Ok(Self::new(router, router.create_id()?, Inbox::new(None)))
    }

    /// The provider's object.
    #[cfg(feature = "ibverbs")]
    pub(super) fn id(&self) -> Option<&CmId> {
        self.raw.as_deref()
    }

    pub(super) fn router(&self) -> &Arc<Router> {
        &self.router
    }

    pub(super) fn inbox(&self) -> &Arc<Inbox> {
        &self.inbox
    }

    pub(super) fn local_addr(&self) -> Option<SocketAddr> {
        self.raw.as_ref()?.local_addr()
    }

    pub(super) fn peer_addr(&self) -> Option<SocketAddr> {
        self.raw.as_ref()?.peer_addr()
    }

    pub(super) fn answer_late(&self, answer: &CmAnswer) -> bool {
        self.raw.as_ref().is_some_and(|raw| raw.answer_late(answer))
    }

    pub(super) fn reserved(&self) -> Option<Qpn> {
        self.raw.as_ref()?.reserved()
    }

    pub(super) fn route(&self) -> Option<CmRoute> {
        self.raw.as_ref()?.route()
    }

    /// Calls the id; on a thread for such things if it may block.
    ///
    /// If the future is dropped, the call is made all the same.
    pub(super) async fn call<T: Send + 'static>(
        &self,
        f: impl FnOnce(&CmId) -> Result<T, ConnectError> + Send + 'static,
    ) -> Result<T, ConnectError> {
        let Some(raw) = &self.raw else { return Err(CANCELLED.into()) };
        if !self.router.may_block() {
            return f(raw);
        }
        let raw = Arc::clone(raw);
        where_it_may_block(move || f(&raw)).await
    }

    /// Makes sure that the current runtime watches events.
    pub(super) fn ready(&self) -> Result<(), NoRuntime> {
        self.router.watch()
    }

    /// Waits until `f` finds what it looks for in what has happened. Where no runtime watches events, it polls for them.
    pub(super) async fn until<T>(&self, mut f: impl FnMut(&Happened) -> Option<T>) -> T {
        let mut wakers = ContainedWaker::default();
        loop {
            let mut changed = pin!(self.inbox.changed.notified());
            changed.as_mut().enable();
            // In a statement of its own: the lock is not held any longer.
            let found = f(&self.inbox.happened());
            if let Some(found) = found {
                return found;
            }
            let mut again = false;
            poll_fn(|context| {
                let polled = wakers.poll(context, |context| changed.as_mut().poll(context));
                // At each poll: the task may be in another runtime than at the last one, which may be gone.
                if polled.is_ready() || self.router.watch().is_ok() || self.router.is_watched() {
                    return polled;
                }
                self.router.drain();
                if std::mem::replace(&mut again, true) {
                    return Poll::Ready(());
                }
                contained(|| context.waker().wake_by_ref());
                Poll::Pending
            })
            .await;
        }
    }

    /// The result of a call; if it was refused because the peer has ended the connection meanwhile, that is why.
    pub(super) async fn blame<T>(
        &self,
        result: Result<T, ConnectError>,
        step: Step,
        address: SocketAddr,
    ) -> Result<T, ConnectError> {
        /// For the event, which may be there and not taken yet. If there is none, the refusal is this much later.
        const GRACE: Duration = Duration::from_millis(100);
        let Err(error) = result else { return result };
        if !matches!(error, ConnectError::Verb { .. } | ConnectError::Setup { .. }) {
            return Err(error);
        }
        // One that the refused call itself has raised does not make the channel readable.
        self.router.drain();
        let end = self.until(|happened| happened.end.clone());
        match clock::timeout(GRACE, end).await {
            Some(end) => Err(ConnectError::ended(&end, step, address)),
            None => Err(error.during(step, address)),
        }
    }

    pub(super) fn ended(&self) -> bool {
        self.inbox.happened().end.is_some()
    }
}

/// `ECANCELED` of `errno(3)`.
const CANCELLED: VerbError = VerbError::new("spawn_blocking", 125);

/// Calls `f` on a thread that may block; also if the future is dropped.
pub(super) async fn where_it_may_block<T: Send + 'static>(
    f: impl FnOnce() -> Result<T, ConnectError> + Send + 'static,
) -> Result<T, ConnectError> {
    match NoRuntime::or_current()?.spawn_blocking(f).await {
        Ok(result) => result,
        Err(error) => match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            Err(_) => Err(CANCELLED.into()),
        },
    }
}

/// `future`, or an error that names the step when it takes too long in real time, whatever the clock of the runtime says; the caller
/// adds the address by [`ConnectError::during`].
pub(super) async fn within<T>(
    after: Duration,
    step: Step,
    future: impl Future<Output = Result<T, ConnectError>>,
) -> Result<T, ConnectError> {
    NoRuntime::or_current()?;
    let late = Err(ConnectError::TimedOut { address: None, step, after });
    clock::timeout(after, future).await.unwrap_or(late)
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        if let Some(raw) = self.raw.take() {
            self.router.remove(raw.key());
            self.router.dispose([raw]);
        }
    }
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Endpoint")
            .field("local", &self.local_addr())
            .field("peer", &self.peer_addr())
            .finish_non_exhaustive()
    }
}

/// A queue pair on its way: in the error state unless it arrives.
pub(super) struct Halfway(Option<QueuePair>);

impl Halfway {
    pub(super) fn new(queue_pair: &QueuePair) -> Self {
        Self(Some(queue_pair.clone()))
    }

    pub(super) fn arrived(mut self) {
        self.0 = None;
    }
}

impl Drop for Halfway {
    fn drop(&mut self) {
        if let Some(queue_pair) = self.0.take() {
            fail(&queue_pair);
        }
    }
}

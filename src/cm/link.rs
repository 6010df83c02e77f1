//! A connection, once it is there: who is at the other end, and how it ends.

use std::fmt;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rdma_provider::cm_contract::CmId as _;

use super::endpoint::{Endpoint, within};
use super::error::{ConnectError, Step};
use super::keepalive::Keepalive;
use super::router::End;
use crate::error::NoRuntime;
use crate::op::QueuePair;
use crate::types::RejectReason;

/// The manager's side of a connected queue pair, which somebody else holds.
///
/// When it ends, whoever ends it, the queue pair goes to the error state and all its work is flushed. What has arrived by
/// then stays: await what matters before saying goodbye, and the peer has it.
///
/// Dropping it says goodbye without waiting for an answer: best effort, as the goodbye, and what repeats it, may be lost.
/// A peer that never hears it finds out when it sends, or by its [keepalive](super::Options::keepalive).
pub struct Link {
    /// Ends first: it may not probe a queue pair that is given up.
    keepalive: Option<Keepalive>,
    endpoint: Endpoint,
    private_data: Vec<u8>,
    local: SocketAddr,
    peer: SocketAddr,
    deadline: Duration,
    ours: AtomicBool,
}

/// Longest time from the end of a connection to that of its TIMEWAIT: that in which a goodbye of the kernel's manager is
/// repeated 15 times, each 4.3 s after the one before, and as much again for what packets may take on large networks.
const TIMEWAIT: Duration = Duration::from_secs(150);

/// How a connection ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Disconnection {
    /// We said goodbye.
    Local,
    /// The peer did, or its manager takes the connection for dead; or its program gave the connection up after it had answered the
    /// request, and before it heard that this end had confirmed.
    Peer,
    /// The device was taken away.
    DeviceRemoved,
    /// Our address was moved to another device.
    AddressChanged,
    /// The peer did not answer the [keepalive](super::Options::keepalive).
    Silent,
    /// The listener had given the request up, or let it give way to others, before it heard that this end had confirmed. Its
    /// program has seen nothing of the connection: connect again.
    Unconfirmed,
    /// A probe of the [keepalive](super::Options::keepalive) failed for another reason: the peer's queue pair does not allow
    /// REMOTE_WRITE, the completion queue is dead, or the queue pair was in the error state already, because other work had
    /// failed or the peer had asked for what is not allowed. The log has the status.
    ProbeFailed,
}

impl Link {
    /// The provider's object.
    #[cfg(feature = "ibverbs")]
    pub(crate) fn id(&self) -> Option<&crate::dispatch::CmId> {
        self.endpoint.id()
    }

    pub(super) fn new(
        endpoint: Endpoint,
        private_data: Vec<u8>,
        (local, peer): (SocketAddr, SocketAddr),
        deadline: Duration,
    ) -> Self {
        tracing::debug!(%local, %peer, "link established");
        Self {
            keepalive: None,
            endpoint,
            private_data,
            local,
            peer,
            deadline,
            ours: AtomicBool::new(false),
        }
    }

    /// Probes the peer of `queue_pair`, which has been checked for that.
    pub(super) fn with_keepalive(
        mut self,
        interval: Option<Duration>,
        queue_pair: &QueuePair,
    ) -> Result<Self, NoRuntime> {
        let start =
            |interval| Keepalive::start(interval, queue_pair, self.endpoint.inbox(), self.peer);
        self.keepalive = interval.map(start).transpose()?;
        Ok(self)
    }

    /// Our address.
    #[must_use]
    pub const fn local_addr(&self) -> SocketAddr {
        self.local
    }

    /// The peer's address.
    #[must_use]
    pub const fn peer_addr(&self) -> SocketAddr {
        self.peer
    }

    /// Private data of the peer, padded with zeros: to 56 bytes if it connected, to 196 if it accepted. The messages of IBTA 12.6
    /// do not carry their length.
    #[must_use]
    pub fn private_data(&self) -> &[u8] {
        &self.private_data
    }

    /// True until it ends.
    ///
    /// Operations can be flushed while this still returns true: the link ends only when the connection manager or the keepalive
    /// notices. After a flush, await [`disconnected`](Self::disconnected) under a timeout: if it returns, the connection has
    /// ended; otherwise the queue pair failed by itself.
    #[must_use]
    pub fn is_connected(&self) -> bool {
        !self.endpoint.ended()
    }

    /// Private data of the rejection that ended the connection, if one did: the listener's program sent it after the answer, or its
    /// manager has forgotten the request, see [`Disconnection::Unconfirmed`].
    pub(crate) fn rejection(&self) -> Option<Vec<u8>> {
        match &self.endpoint.inbox().happened().end {
            Some(End::Rejected { private_data, .. }) => Some(private_data.clone()),
            _ => None,
        }
    }

    /// Says goodbye, and waits until the peer's manager has heard it. The queue pair is in the error state at once. Nothing
    /// happens if the connection is over and the peer knows, which it does not if the keepalive ended it or the address was moved.
    ///
    /// # Errors
    ///
    /// [`ConnectError::NoRuntime`] outside of a Tokio runtime with an I/O driver; nothing was said then.
    /// [`ConnectError::TimedOut`] if there is no answer within [`Options::timeout`](super::Options::timeout); the goodbye
    /// goes on being repeated for a while.
    ///
    /// # Cancel safety
    ///
    /// Once polled, it goes on without the future.
    pub async fn disconnect(&self) -> Result<(), ConnectError> {
        if self.peer_knows() {
            return Ok(());
        }
        self.endpoint.ready()?;
        self.ours.store(true, Ordering::Release);
        self.endpoint.inbox().fail_queue_pair();
        within(self.deadline, Step::Disconnect, async {
            let said = self.endpoint.call(|id| Ok(id.disconnect()?)).await;
            match self.endpoint.blame(said, Step::Disconnect, self.peer).await {
                // Over already.
                Err(_) if self.peer_knows() => return Ok(()),
                said => said?,
            }
            self.endpoint.until(|happened| happened.peer_knows.then_some(())).await;
            Ok(())
        })
        .await
        .map_err(|error| error.during(Step::Disconnect, self.peer))
    }

    /// Waits until the connection is over, and says how it ended. Any number of tasks may wait.
    ///
    /// That a peer is gone without a goodbye is not noticed here, but by operations that fail, or by
    /// [`Options::keepalive`](super::Options::keepalive). Where no runtime with an I/O
    /// driver watches the device's connections, this polls for the end.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future changes nothing.
    pub async fn disconnected(&self) -> Disconnection {
        self.endpoint
            .until(|happened| match happened.end.as_ref()? {
                End::DeviceRemoval => Some(Disconnection::DeviceRemoved),
                End::AddressChange => Some(Disconnection::AddressChanged),
                End::Keepalive(end) => Some(*end),
                _ if self.ours.load(Ordering::Acquire) => Some(Disconnection::Local),
                End::Rejected { reason: RejectReason::CONSUMER, .. } => Some(Disconnection::Peer),
                End::Rejected { .. } => Some(Disconnection::Unconfirmed),
                _ => Some(Disconnection::Peer),
            })
            .await
    }

    /// True if it is over and there is nothing to tell the peer.
    fn peer_knows(&self) -> bool {
        self.endpoint.inbox().happened().peer_knows
    }

    /// Waits until the connection is over, and then until nothing of it can be underway any more (the end of TIMEWAIT): then
    /// its queue pair may be reset and connected anew. Before, the peer's manager may reject it as stale.
    ///
    /// If it is over because our address was moved, or because the peer was [silent](Disconnection::Silent), this says goodbye to
    /// the peer. TIMEWAIT begins with the answer of the peer, or when the goodbye has been repeated in vain.
    ///
    /// # Errors
    ///
    /// [`ConnectError::NoRuntime`] outside of a Tokio runtime with an I/O driver,
    /// [`ConnectError::TimedOut`] if TIMEWAIT has not ended 150 s after the connection.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future changes nothing.
    pub async fn drained(&self) -> Result<(), ConnectError> {
        self.endpoint.ready()?;
        self.drained_within(TIMEWAIT).await
    }

    async fn drained_within(&self, timeout: Duration) -> Result<(), ConnectError> {
        self.endpoint.until(|happened| happened.end.is_some().then_some(())).await;
        within(timeout, Step::Timewait, async {
            if !self.peer_knows()
                && let Err(error) = self.endpoint.call(|id| Ok(id.disconnect()?)).await
            {
                // Then nobody ever connected, or the device is gone, and that is what comes.
                tracing::debug!(%error, peer = %self.peer, "no goodbye after our address was moved");
            }
            self.endpoint.until(|happened| happened.exited.then_some(())).await;
            Ok(())
        })
        .await
        .map_err(|error| error.during(Step::Timewait, self.peer))
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.keepalive = None;
        self.endpoint.inbox().fail_queue_pair();
    }
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Link")
            .field("local", &self.local)
            .field("peer", &self.peer)
            .field("connected", &self.is_connected())
            .finish_non_exhaustive()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::future::Future;
    use std::sync::Arc;
    use std::task::{Context, Waker};

    use futures::FutureExt as _;

    use super::*;
    use crate::cm::{self, Listener, Options};
    use crate::contained::tests::{Counts, Panics};
    use crate::engine::{CompletionMode, CompletionQueue};
    use crate::op::QueuePair;
    use crate::software::Network;
    use crate::types::QpState;
    use crate::verbs::Device;
    use rdma_provider::cm_contract::CmEventKind;

    /// Both ends of a link, with their queue pairs, and the listener.
    async fn linked() -> ([(Link, QueuePair); 2], Listener) {
        let device = Device::software_in(&Network::new(), "linked").unwrap();
        let pd = device.protection_domain().unwrap();
        let queue = CompletionQueue::new(&device, CompletionMode::Event).unwrap();
        let listener = Listener::bind(&device, "127.0.0.1:0").await.unwrap();
        let options = Options::default();
        let passive = async {
            let request = listener.accept().await.unwrap();
            let qp = request.prepare(QueuePair::builder(&pd, &queue)).build().unwrap();
            (request.accept(&qp, &options).await.unwrap(), qp)
        };
        let active = async {
            let route = cm::resolve(&device, listener.local_addr()).await.unwrap();
            let qp = route.prepare(QueuePair::builder(&pd, &queue)).build().unwrap();
            (route.connect(&qp, &options).await.unwrap(), qp)
        };
        let (passive, active) = futures::future::join(passive, active).await;
        ([active, passive], listener)
    }

    fn run<F: Future<Output = ()>>(test: impl FnOnce() -> F) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            tokio::time::timeout(Duration::from_secs(60), test()).await.expect("hangs")
        });
    }

    #[test]
    fn link_whose_address_is_moved_ends_and_its_timewait_too() {
        run(|| async {
            let ([(ours, qp), (theirs, _other)], _listener) = linked().await;
            ours.endpoint.inbox().on_event(CmEventKind::AddressChange);
            assert_eq!(ours.disconnected().await, Disconnection::AddressChanged);
            assert_eq!(qp.query().unwrap().0, QpState::Err);
            assert!(!ours.is_connected() && theirs.is_connected());
            ours.drained().await.unwrap();
            assert_eq!(theirs.disconnected().await, Disconnection::Peer);
        });
    }

    #[test]
    fn goodbye_after_the_address_was_moved_reaches_the_peer() {
        run(|| async {
            let ([(ours, _qp), (theirs, _other)], _listener) = linked().await;
            ours.endpoint.inbox().on_event(CmEventKind::AddressChange);
            ours.disconnect().await.unwrap();
            assert_eq!(theirs.disconnected().await, Disconnection::Peer);
        });
    }

    #[test]
    fn timewait_that_never_ends_is_waited_for_until_the_deadline() {
        run(|| async {
            let ([(ours, _qp), _theirs], _listener) = linked().await;
            // One that the manager knows nothing of.
            ours.endpoint.inbox().on_event(CmEventKind::Disconnected);
            let after = Duration::from_millis(1);
            let (address, step) = (Some(ours.peer_addr()), Step::Timewait);
            assert_eq!(
                ours.drained_within(after).await,
                Err(ConnectError::TimedOut { address, step, after })
            );
        });
    }

    #[test]
    fn listener_whose_address_is_moved_goes_on_and_one_whose_device_is_removed_ends() {
        run(|| async {
            let (_links, listener) = linked().await;
            let inbox = listener.inbox();
            inbox.on_event(CmEventKind::AddressChange);
            let nobody = tokio::time::timeout(Duration::from_millis(1), listener.accept()).await;
            assert!(nobody.is_err(), "it waits on: {nobody:?}");
            inbox.on_event(CmEventKind::DeviceRemoval);
            assert!(matches!(listener.accept().await, Err(ConnectError::DeviceRemoved { .. })));
        });
    }

    /// Polls `futures`, by turns with a waker that panics and with `counts`, of which each has to wait.
    fn wait_with_panicking<F: Future + Unpin>(futures: &mut [F], counts: &Arc<Counts>) {
        let (rude, honest) =
            (Waker::from(Arc::new(Panics::default())), Waker::from(counts.clone()));
        for (future, waker) in futures.iter_mut().zip([&rude, &honest].into_iter().cycle()) {
            assert!(future.poll_unpin(&mut Context::from_waker(waker)).is_pending());
        }
    }

    #[test]
    fn waker_that_panics_keeps_no_other_waiter_of_a_link_from_being_woken() {
        run(|| async {
            let ([(ours, _qp), _theirs], _listener) = linked().await;
            let counts = Arc::new(Counts::default());
            let mut waiting: Vec<_> = (0..6).map(|_| Box::pin(ours.disconnected())).collect();
            wait_with_panicking(&mut waiting, &counts);
            ours.endpoint.inbox().on_event(CmEventKind::Disconnected);
            assert_eq!(counts.0.load(Ordering::Relaxed), 3);
        });
    }

    #[test]
    fn request_wakes_the_next_acceptor_if_the_waker_of_the_first_panics() {
        run(|| async {
            let (_links, listener) = linked().await;
            let counts = Arc::new(Counts::default());
            let mut waiting: Vec<_> = (0..4).map(|_| Box::pin(listener.accept())).collect();
            wait_with_panicking(&mut waiting, &counts);
            let device = listener.device().clone();
            let (pd, queue) = (
                device.protection_domain().unwrap(),
                CompletionQueue::new(&device, CompletionMode::Event).unwrap(),
            );
            let route = cm::resolve(&device, listener.local_addr()).await.unwrap();
            let qp = route.prepare(QueuePair::builder(&pd, &queue)).build().unwrap();
            let options = Options::default();
            let mut asking = Box::pin(route.connect(&qp, &options));
            while counts.0.load(Ordering::Relaxed) == 0 {
                assert!((&mut asking).now_or_never().is_none(), "it is not answered");
                tokio::task::yield_now().await;
            }
            assert_eq!(counts.0.load(Ordering::Relaxed), 1, "one acceptor for one request");
            assert!((&mut waiting[1]).now_or_never().is_some_and(|request| request.is_ok()));
        });
    }

    #[test]
    fn waker_that_panics_keeps_no_other_acceptor_from_hearing_of_the_end() {
        run(|| async {
            let (_links, listener) = linked().await;
            let counts = Arc::new(Counts::default());
            let mut waiting: Vec<_> = (0..6).map(|_| Box::pin(listener.accept())).collect();
            wait_with_panicking(&mut waiting, &counts);
            listener.inbox().on_event(CmEventKind::DeviceRemoval);
            assert_eq!(counts.0.load(Ordering::Relaxed), 3);
        });
    }
}

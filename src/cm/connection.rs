use std::fmt;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rdma_provider::cm_contract::CmId as _;
use tokio::task::coop::consume_budget;

use super::config::ConnectConfig;
use super::disconnection::Disconnection;
use super::endpoint::{Endpoint, with_deadline};
use super::error::{ConnectError, ConnectStep};
use super::inbox::EndReason;
use super::keepalive::Keepalive;
use crate::error::NoRuntime;
use crate::op::QueuePair;
use crate::types::RejectReason;

/// An established connection between two queue pairs.
///
/// When either side ends the connection, the queue pair goes to the error state and its outstanding
/// work is flushed. Await what matters before you disconnect.
///
/// Dropping a `CmConnection` sends a disconnect request. If that is lost, the peer detects the end
/// when it sends, or by its [keepalive](super::ConnectConfig::keepalive).
///
/// # Cancel safety
///
/// Dropping a future has no effect, but a disconnection, once polled, proceeds.
pub struct CmConnection {
    keepalive: Option<Keepalive>,
    endpoint: Endpoint,
    private_data: Vec<u8>,
    local: SocketAddr,
    peer: SocketAddr,
    deadline: Duration,
    ours: AtomicBool,
}

/// The kernel retransmits a disconnect request 15 times, 4.3 s apart; the rest allows for packet
/// lifetimes on large networks.
const TIMEWAIT: Duration = Duration::from_secs(150);

impl CmConnection {
    #[cfg(feature = "ibverbs")]
    pub(crate) fn id(&self) -> &crate::dispatch::CmId {
        self.endpoint.id()
    }

    pub(super) fn new(
        mut endpoint: Endpoint,
        private_data: Vec<u8>,
        (local, peer): (SocketAddr, SocketAddr),
        config: &ConnectConfig,
        queue_pair: &QueuePair,
    ) -> Result<Self, NoRuntime> {
        endpoint.answered();
        rdma_provider::debug!(%local, %peer, "connection established");
        let start = |interval| Keepalive::start(interval, queue_pair, endpoint.inbox(), peer);
        Ok(Self {
            keepalive: config.keepalive.map(start).transpose()?,
            endpoint,
            private_data,
            local,
            peer,
            deadline: config.timeout,
            ours: AtomicBool::new(false),
        })
    }

    /// Returns the local address.
    #[must_use]
    pub const fn local_addr(&self) -> SocketAddr {
        self.local
    }

    /// Returns the peer's address.
    #[must_use]
    pub const fn peer_addr(&self) -> SocketAddr {
        self.peer
    }

    /// Returns the peer's private data, padded with zeros, because messages do not carry its length
    /// (IBTA 12.6): to 56 bytes if the peer connected, to 196 if it accepted.
    #[must_use]
    pub fn private_data(&self) -> &[u8] {
        &self.private_data
    }

    /// Returns true until the connection ends. Operations may be flushed before that is detected:
    /// after a flush, await [`disconnected`](Self::disconnected) with a timeout. If it does not
    /// return, only the queue pair has failed.
    #[must_use]
    pub fn is_connected(&self) -> bool {
        !self.endpoint.has_ended()
    }

    pub(crate) fn rejection(&self) -> Option<Vec<u8>> {
        self.endpoint.inbox().state(|state| match &state.end {
            Some(EndReason::Rejected { private_data, .. }) => Some(private_data.clone()),
            _ => None,
        })
    }

    /// Disconnects, and waits until the peer's connection manager has answered. The queue pair goes
    /// to the error state at once. Does nothing if the peer already knows of the end.
    ///
    /// # Errors
    ///
    /// [`ConnectError::NoRuntime`], without effect. [`ConnectError::TimedOut`] if the peer does not
    /// answer within [`ConnectConfig::timeout`](super::ConnectConfig::timeout);
    /// retransmission continues for a while.
    pub async fn disconnect(&self) -> Result<(), ConnectError> {
        if self.peer_knows() {
            // Only here, because otherwise the disconnection must proceed from the first poll.
            consume_budget().await;
            return Ok(());
        }
        self.endpoint.router.watch()?;
        self.ours.store(true, Ordering::Release);
        self.endpoint.inbox().fail_queue_pair();
        with_deadline(self.deadline, ConnectStep::Disconnect, self.peer, async || {
            let result = self.endpoint.id().disconnect();
            match self.endpoint.explain(result, ConnectStep::Disconnect, self.peer).await {
                Err(_) if self.peer_knows() => return Ok(()),
                result => result?,
            }
            self.endpoint.wait_for(|state| state.peer_knows.then_some(())).await;
            Ok(())
        })
        .await
    }

    /// Waits until the connection has ended, and returns how. A peer that vanishes silently is
    /// detected only by a failed operation or by
    /// [`ConnectConfig::keepalive`](super::ConnectConfig::keepalive).
    pub async fn disconnected(&self) -> Disconnection {
        self.endpoint
            .wait_for(|state| match state.end.as_ref()? {
                EndReason::DeviceRemoval => Some(Disconnection::DeviceRemoved),
                EndReason::AddressChange => Some(Disconnection::AddressChanged),
                EndReason::Keepalive(end) => Some(*end),
                _ if self.ours.load(Ordering::Acquire) => Some(Disconnection::Local),
                EndReason::Rejected { reason: RejectReason::CONSUMER, .. } => {
                    Some(Disconnection::Peer)
                }
                EndReason::Rejected { .. } => Some(Disconnection::Unconfirmed),
                _ => Some(Disconnection::Peer),
            })
            .await
    }

    fn peer_knows(&self) -> bool {
        self.endpoint.inbox().state(|state| state.peer_knows)
    }

    /// Waits until the connection and its TIMEWAIT have ended, so that none of its packets is in
    /// flight and the queue pair may be reset and connected again. Earlier, the peer may reject the
    /// request as stale.
    ///
    /// If the peer does not know of the end, this sends a disconnect request. TIMEWAIT then starts
    /// with the peer's answer or after the last retransmission.
    ///
    /// # Errors
    ///
    /// [`ConnectError::TimedOut`] if TIMEWAIT lasts more than 150 s.
    pub async fn drained(&self) -> Result<(), ConnectError> {
        self.endpoint.router.watch()?;
        self.drained_within(TIMEWAIT).await
    }

    async fn drained_within(&self, timeout: Duration) -> Result<(), ConnectError> {
        self.endpoint.wait_for(|state| state.end.is_some().then_some(())).await;
        with_deadline(timeout, ConnectStep::Timewait, self.peer, async || {
            if !self.peer_knows()
                && let Err(error) = self.endpoint.id().disconnect()
            {
                // The connection was never established, or the device is gone. An event follows.
                rdma_provider::debug!(
                    %error,
                    peer = %self.peer,
                    "failed to send a disconnect request; awaiting TIMEWAIT"
                );
            }
            self.endpoint.wait_for(|state| state.exited.then_some(())).await;
            Ok(())
        })
        .await
    }
}

impl Drop for CmConnection {
    fn drop(&mut self) {
        self.keepalive = None;
        self.endpoint.inbox().fail_queue_pair();
    }
}

impl fmt::Debug for CmConnection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CmConnection")
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
    use crate::cm::{self, ConnectConfig, Listener};
    use crate::contained::tests::{Counts, HANG, Panics};
    use crate::engine::{CompletionMode, CompletionQueue};
    use crate::op::QueuePair;
    use crate::software::Network;
    use crate::types::QpState;
    use crate::verbs::Device;
    use rdma_provider::cm_contract::CmEventKind;

    async fn linked() -> ([(CmConnection, QueuePair); 2], Listener) {
        let device = Device::software_in(&Network::new(), "linked").unwrap();
        let pd = device.protection_domain().unwrap();
        let queue = CompletionQueue::new(&device, CompletionMode::Event).unwrap();
        let listener = Listener::bind(&device, "127.0.0.1:0").await.unwrap();
        let config = ConnectConfig::default();
        let passive = async {
            let request = listener.accept().await.unwrap();
            let qp = request.prepare(QueuePair::builder(&pd, &queue)).build().unwrap();
            (request.accept(&qp, &config).await.unwrap(), qp)
        };
        let active = async {
            let route = cm::resolve(&device, listener.local_addr()).await.unwrap();
            let qp = route.prepare(QueuePair::builder(&pd, &queue)).build().unwrap();
            (route.connect(&qp, &config).await.unwrap(), qp)
        };
        let (passive, active) = futures::future::join(passive, active).await;
        ([active, passive], listener)
    }

    fn run<F: Future<Output = ()>>(test: impl FnOnce() -> F) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime
            .block_on(async { tokio::time::timeout(HANG, test()).await.expect("test timed out") });
    }

    #[test]
    fn address_change_ends_connection_and_its_timewait() {
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
    fn disconnect_after_address_change_reaches_peer() {
        run(|| async {
            let ([(ours, _qp), (theirs, _other)], _listener) = linked().await;
            ours.endpoint.inbox().on_event(CmEventKind::AddressChange);
            ours.disconnect().await.unwrap();
            assert_eq!(theirs.disconnected().await, Disconnection::Peer);
        });
    }

    #[test]
    fn drained_times_out_if_timewait_never_ends() {
        run(|| async {
            let ([(ours, _qp), _theirs], _listener) = linked().await;
            // Unknown to the connection manager, so TIMEWAIT never ends.
            ours.endpoint.inbox().on_event(CmEventKind::Disconnected);
            let after = Duration::from_millis(1);
            let (address, step) = (ours.peer_addr(), ConnectStep::Timewait);
            assert_eq!(
                ours.drained_within(after).await,
                Err(ConnectError::TimedOut { address, step, after })
            );
        });
    }

    #[test]
    fn listener_survives_address_change_and_fails_on_device_removal() {
        run(|| async {
            let (_links, listener) = linked().await;
            let inbox = listener.inbox();
            inbox.on_event(CmEventKind::AddressChange);
            let accepted = tokio::time::timeout(Duration::from_millis(1), listener.accept()).await;
            assert!(accepted.is_err(), "accepted after an address change: {accepted:?}");
            inbox.on_event(CmEventKind::DeviceRemoval);
            assert!(matches!(listener.accept().await, Err(ConnectError::DeviceRemoved { .. })));
        });
    }

    /// Polls pending `futures`, alternately with a waker that panics and with `counts`.
    fn wait_with_panicking<F: Future + Unpin>(futures: &mut [F], counts: &Arc<Counts>) {
        let (panicking, counting) =
            (Waker::from(Arc::new(Panics::default())), Waker::from(counts.clone()));
        for (future, waker) in futures.iter_mut().zip([&panicking, &counting].into_iter().cycle()) {
            assert!(future.poll_unpin(&mut Context::from_waker(waker)).is_pending());
        }
    }

    #[test]
    fn panicking_waker_does_not_prevent_waking_other_waiters_of_a_connection() {
        run(|| async {
            let ([(ours, _qp), _theirs], _listener) = linked().await;
            let counts = Arc::new(Counts::default());
            let mut waiting: Vec<_> = (0..6).map(|_| Box::pin(ours.disconnected())).collect();
            wait_with_panicking(&mut waiting, &counts);
            ours.endpoint.inbox().on_event(CmEventKind::Disconnected);
            assert_eq!(counts.0.load(Ordering::Relaxed), 3);
        });
    }

    /// Sends a request to `listener`, and runs `test` once it has woken a task of `counts`.
    async fn request(listener: &Listener, counts: &Counts, test: impl FnOnce()) {
        let device = listener.device().clone();
        let (pd, queue) = (
            device.protection_domain().unwrap(),
            CompletionQueue::new(&device, CompletionMode::Event).unwrap(),
        );
        let route = cm::resolve(&device, listener.local_addr()).await.unwrap();
        let qp = route.prepare(QueuePair::builder(&pd, &queue)).build().unwrap();
        let config = ConnectConfig::default();
        let mut connecting = Box::pin(route.connect(&qp, &config));
        while counts.0.load(Ordering::Relaxed) == 0 {
            assert!((&mut connecting).now_or_never().is_none(), "no acceptor was woken");
            tokio::task::yield_now().await;
        }
        test();
    }

    #[test]
    fn request_wakes_next_acceptor_if_first_waker_panics() {
        run(|| async {
            let (_links, listener) = linked().await;
            let counts = Arc::new(Counts::default());
            let mut waiting: Vec<_> = (0..4).map(|_| Box::pin(listener.accept())).collect();
            wait_with_panicking(&mut waiting, &counts);
            request(&listener, &counts, || {
                assert_eq!(counts.0.load(Ordering::Relaxed), 1, "woken acceptors for one request");
                assert!((&mut waiting[1]).now_or_never().is_some_and(|request| request.is_ok()));
            })
            .await;
        });
    }

    #[test]
    fn request_wakes_next_acceptor_if_woken_one_is_dropped() {
        run(|| async {
            let (_links, listener) = linked().await;
            let counts: [Arc<Counts>; 3] = Default::default();
            let mut waiting: Vec<_> = (0..3).map(|_| Box::pin(listener.accept())).collect();
            for (future, counts) in waiting.iter_mut().zip(&counts) {
                let waker = Waker::from(counts.clone());
                assert!(future.poll_unpin(&mut Context::from_waker(&waker)).is_pending());
            }
            let woken = || counts.each_ref().map(|counts| counts.0.load(Ordering::Relaxed));
            request(&listener, &counts[0], || {
                assert_eq!(woken(), [1, 0, 0]);
                drop(waiting.remove(0));
                assert_eq!(woken(), [1, 1, 0]);
                assert!((&mut waiting[0]).now_or_never().is_some_and(|request| request.is_ok()));
            })
            .await;
            drop(waiting);
            assert_eq!(woken(), [1, 1, 0], "woken without a request");
        });
    }

    #[test]
    fn panicking_waker_does_not_prevent_waking_other_acceptors() {
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

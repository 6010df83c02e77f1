//! Queue pairs: connect, query, close.

mod builder;

use std::any::Any;
use std::fmt;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::task::Waker;

pub use self::builder::QueuePairBuilder;
pub(crate) use self::builder::Source;
use crate::dispatch::{ReceiveCounters, SendCounters};
use crate::engine::{
    CompletionMode, CompletionQueue, QueuePairCore, WorkQueue, WorkQueueCounters, WorkRequest,
};
use crate::error::{OpErrorKind, SetupError};
use crate::memory::{BufMut, Pool, PoolError};
use crate::op::destination::Destination;
use crate::op::post_state::PostState;
use crate::op::{PathConfig, QueuePairEndpoint, RetryConfig};
use crate::types::{
    AddressVector, Gid, GidEntry, LinkLayer, Mtu, PortNum, Psn, QpAttr, QpCaps, QpState, Qpn,
    Transport,
};
use crate::verbs::ProtectionDomain;

/// A queue pair whose work requests are futures. Clones refer to the same queue pair.
///
/// ```
/// use tokio_rdma::QueuePair;
/// # use tokio_rdma::*;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let pd = Device::open_default_or_software()?.protection_domain()?;
/// # let queue = CompletionQueue::new(pd.device(), CompletionMode::Event)?;
/// # let pool = Pool::new(&pd, 64, 4)?;
/// let (ours, theirs) = (QueuePair::new(&pd, &queue)?, QueuePair::new(&pd, &queue)?);
/// // Endpoints travel over any channel, as `QueuePairEndpoint::to_bytes`.
/// ours.connect(&theirs.endpoint())?;
/// theirs.connect(&ours.endpoint())?;
///
/// let receive = theirs.recv(pool.alloc(64).await?);
/// ours.send(pool.copy_from(b"hello")?).await?;
/// assert_eq!(&receive.await?.buffer[..], b"hello");
/// ours.close().await;
/// # Ok(())
/// # }
/// ```
///
/// # Closing
///
/// [`close`](Self::close) flushes all work requests first. Dropping the last clone destroys the
/// queue pair immediately: operations in flight are flushed or fail with [`OpErrorKind::Closed`].
/// Afterwards the device accesses no buffer.
#[derive(Clone)]
pub struct QueuePair {
    pub(crate) inner: Arc<Inner>,
    /// In the handle, so that prefetching need not wait for `inner`.
    post_state: PostState,
}

/// The fields that each operation uses come first, in few cache lines.
#[repr(C)]
pub(crate) struct Inner {
    /// A copy in `core` would cost one load more.
    pub(super) send: Arc<WorkQueue>,
    pub(super) transport: Transport,
    pub(super) immediate: bool,
    pub(super) atomics: bool,
    pub(crate) core: Arc<QueuePairCore>,
    pub(super) pd: ProtectionDomain,
    qpn: Qpn,
    caps: QpCaps,
    psn: AtomicU32,
    local: Local,
    atomic_results: OnceLock<Pool>,
    span: tracing::Span,
    // Dropped last: the teardown of `core` needs them.
    queues: [CompletionQueue; 2],
    // Dropped after all that uses it.
    _held: Option<Arc<dyn Any + Send + Sync>>,
}

impl Inner {
    fn psn(&self) -> Psn {
        Psn::new(self.psn.load(Ordering::Relaxed))
    }

    pub(super) fn alloc_atomic_result(&self) -> Result<BufMut, PoolError> {
        let results = match self.atomic_results.get() {
            Some(results) => results,
            None => {
                let pool = Pool::builder(&self.pd).buffer_size(8).buffers(64).growing(true).build();
                let pool = pool.map_err(PoolError::Register)?;
                self.atomic_results.get_or_init(|| pool)
            }
        };
        results.try_alloc(8)
    }
}

impl fmt::Debug for Inner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QueuePair")
            .field("qpn", &self.qpn)
            .field("transport", &self.transport)
            .finish_non_exhaustive()
    }
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Local {
    pub(crate) port: PortNum,
    pub(crate) gid: GidEntry,
    fixed_gid: bool,
    lid: u16,
    pub(crate) link_layer: LinkLayer,
    pub(crate) path: PathConfig,
    pub(crate) mtu: Mtu,
    reads: u8,
}

impl Local {
    pub(crate) fn route_to(&self, gid: Gid, lid: u16) -> AddressVector {
        let route = AddressVector::new(self.port, self.gid.index, gid);
        self.path.applied(AddressVector { dlid: lid, ..route })
    }
}

impl QueuePair {
    /// Creates an RC queue pair with default sizes, in INIT: receives can be posted.
    ///
    /// # Errors
    ///
    /// As for [`QueuePairBuilder::build`].
    pub fn new(pd: &ProtectionDomain, queue: &CompletionQueue) -> Result<Self, SetupError> {
        Self::builder(pd, queue).build()
    }

    /// Returns a builder for a queue pair whose completions go to `queue`.
    #[must_use]
    pub fn builder(pd: &ProtectionDomain, queue: &CompletionQueue) -> QueuePairBuilder {
        QueuePairBuilder::new(pd, queue)
    }

    #[cfg(feature = "ibverbs")]
    pub(crate) fn verbs(&self) -> Option<Arc<crate::verbs::Qp>> {
        self.inner.core.qp().ok()
    }

    /// Returns the queue pair number.
    #[must_use]
    pub fn qpn(&self) -> Qpn {
        self.inner.qpn
    }

    /// Returns the service type.
    #[inline]
    #[must_use]
    pub fn transport(&self) -> Transport {
        self.inner.transport
    }

    /// Returns the granted sizes.
    #[must_use]
    pub fn caps(&self) -> QpCaps {
        self.inner.caps
    }

    /// Returns its protection domain.
    #[must_use]
    pub fn protection_domain(&self) -> &ProtectionDomain {
        &self.inner.pd
    }

    /// Returns the address that a peer needs to connect. A transition to RESET changes it.
    #[must_use]
    pub fn endpoint(&self) -> QueuePairEndpoint {
        let Local { gid, lid, link_layer, mtu, reads, .. } = self.inner.local;
        QueuePairEndpoint {
            transport: self.inner.transport,
            qpn: self.inner.qpn,
            psn: self.inner.psn(),
            gid: gid.gid,
            lid,
            link_layer,
            mtu,
            reads,
        }
    }

    /// Connects to a peer, which must connect to this [`endpoint`](Self::endpoint) in turn. UD
    /// queue pairs [`activate`](Self::activate) instead.
    ///
    /// You may send once the call has returned. Until the peer has connected too, packets are
    /// retransmitted (RC) or lost (UC).
    ///
    /// # Errors
    ///
    /// - [`SetupError::Unsupported`] on an iWARP device, which connects by [`cm`](crate::cm) only;
    /// - [`SetupError::Mismatch`] if transport, link layer or address family differ;
    /// - [`SetupError::Transition`] if this queue pair is already connected.
    pub fn connect(&self, peer: &QueuePairEndpoint) -> Result<(), SetupError> {
        self.connect_with(peer, &RetryConfig::default())
    }

    /// Connects like [`connect`](Self::connect), with the given timeouts and retries.
    ///
    /// # Errors
    ///
    /// As for `connect`; [`SetupError::Limit`] if an option is out of range.
    pub fn connect_with(
        &self,
        peer: &QueuePairEndpoint,
        retries: &RetryConfig,
    ) -> Result<(), SetupError> {
        let local = self.inner.local;
        if self.inner.pd.device().attr().is_iwarp() {
            return Err(SetupError::Unsupported {
                what: "an iWARP device connects queue pairs only by its connection manager; \
                       connect by address: cm::connect and cm::Listener, or Connection and \
                       RdmaStream",
            });
        }
        self.require_equal(
            "transports of the queue pair and its peer",
            self.inner.transport,
            peer.transport,
        )?;
        self.require_equal(
            "link layers of the queue pair and its peer",
            local.link_layer,
            peer.link_layer,
        )?;
        self.check_path(peer.gid)?;
        retries.check()?;
        let reliable = self.inner.transport == Transport::Rc;
        self.modify(&QpAttr {
            address: Some(local.route_to(peer.gid, peer.lid)),
            path_mtu: Some(local.mtu.min(peer.mtu)),
            dest_qpn: Some(peer.qpn),
            rq_psn: Some(peer.psn),
            max_dest_rd_atomic: reliable.then_some(local.reads),
            min_rnr_timer: reliable.then_some(retries.rnr_timer),
            ..QpAttr::to_state(QpState::Rtr)
        })?;
        self.modify(&QpAttr {
            sq_psn: Some(self.inner.psn()),
            timeout: reliable.then_some(retries.timeout),
            retry_count: reliable.then_some(retries.retry_count),
            rnr_retry: reliable.then_some(retries.rnr_retry),
            max_rd_atomic: reliable.then_some(local.reads.min(peer.reads)),
            ..QpAttr::to_state(QpState::Rts)
        })?;
        self.inner.span.in_scope(
            || rdma_provider::debug!(peer = %peer.qpn, gid = %peer.gid, "connected queue pair"),
        );
        Ok(())
    }

    /// Makes a datagram queue pair ready to send and receive.
    ///
    /// # Errors
    ///
    /// [`SetupError::Transition`] if it is ready already, or not a datagram queue pair.
    pub fn activate(&self) -> Result<(), SetupError> {
        self.modify(&QpAttr::to_state(QpState::Rtr))?;
        self.modify(&QpAttr { sq_psn: Some(self.inner.psn()), ..QpAttr::to_state(QpState::Rts) })
    }

    pub(crate) fn check_group(&self, group: Gid) -> Result<(), SetupError> {
        self.inner.core.qp()?.check_group(group)
    }

    /// A packet has one address family.
    pub(crate) fn check_family(&self, peer: Gid) -> Result<(), SetupError> {
        let gid = self.inner.local.gid;
        let (ours, theirs) = (gid.gid.to_ip(), peer.to_ip());
        if gid.is_roce_v2() && ours.is_ipv4() != theirs.is_ipv4() {
            let (ours, theirs) = (ours.to_string(), theirs.to_string());
            return Err(SetupError::Mismatch {
                what: "address families of queue pair and peer (set QueuePairBuilder::peer)",
                ours,
                theirs,
            });
        }
        Ok(())
    }

    /// Warns if another GID suits the peer better, because routing may still work.
    fn check_path(&self, peer: Gid) -> Result<(), SetupError> {
        self.check_family(peer)?;
        let Local { port, gid, fixed_gid, .. } = self.inner.local;
        let theirs = peer.to_ip();
        if fixed_gid {
            return Ok(());
        }
        let ranked = self.inner.pd.device().gids(port, Some(peer))?;
        let used = ranked.iter().find(|other| other.entry.index == gid.index);
        if let (Some(used), Some(better)) = (used, ranked.first())
            && better.penalty() < used.penalty()
        {
            let _entered = self.inner.span.enter();
            rdma_provider::warn!(
                %used, %better, peer = %theirs,
                "another GID suits this peer better; set QueuePairBuilder::peer"
            );
        }
        Ok(())
    }

    pub(crate) fn require_equal<T: fmt::Debug + PartialEq>(
        &self,
        what: &'static str,
        ours: T,
        theirs: T,
    ) -> Result<(), SetupError> {
        if ours == theirs {
            return Ok(());
        }
        Err(SetupError::Mismatch { what, ours: format!("{ours:?}"), theirs: format!("{theirs:?}") })
    }

    /// Changes attributes and state, `ibv_modify_qp(3)`. A refused change has no effect. RESET
    /// discards work in flight, which fails with [`OpErrorKind::Closed`].
    ///
    /// # Errors
    ///
    /// - [`SetupError::Transition`] names missing or forbidden attributes;
    /// - [`SetupError::Closed`].
    pub fn modify(&self, attr: &QpAttr) -> Result<(), SetupError> {
        let _entered = self.inner.span.enter();
        if attr.state != Some(QpState::Reset) {
            self.inner.core.modify(attr)?;
            if attr.state == Some(QpState::Rts)
                && let Ok(qp) = self.inner.core.qp()
            {
                self.post_state.connected(&qp, &self.inner.send);
            }
            return Ok(());
        }
        // Delayed packets of the old connection must not match the next one.
        let psn = self.inner.pd.device().random_psn()?;
        self.inner.core.modify(attr)?;
        self.inner.psn.store(psn.value(), Ordering::Relaxed);
        Ok(())
    }

    /// On an iWARP device, the connection manager has moved the queue pair to RTS; on others,
    /// [`modify`](Self::modify) has, and this does nothing.
    pub(crate) fn note_connected(&self) {
        if let Ok(qp) = self.inner.core.qp() {
            qp.note_connected();
        }
    }

    /// Returns the state and all attributes set so far, `ibv_query_qp(3)`.
    ///
    /// # Errors
    ///
    /// [`SetupError::Closed`].
    pub fn query(&self) -> Result<(QpState, QpAttr), SetupError> {
        Ok(self.inner.core.qp()?.query()?)
    }

    /// Attaches a datagram queue pair to a multicast group, `ibv_attach_mcast(3)`. On adapters, the
    /// network may send nothing to the group before [`join_multicast`](Self::join_multicast), which
    /// does both; the software device joins by this call, too.
    ///
    /// # Errors
    ///
    /// As for [`Qp::attach_multicast`](crate::verbs::Qp::attach_multicast); [`SetupError::Closed`].
    pub fn attach_multicast(&self, group: Gid, lid: u16) -> Result<(), SetupError> {
        self.inner.core.qp()?.attach_multicast(group, lid)
    }

    /// Detaches it from the group, `ibv_detach_mcast(3)`.
    ///
    /// # Errors
    ///
    /// As for [`Qp::detach_multicast`](crate::verbs::Qp::detach_multicast); [`SetupError::Closed`].
    pub fn detach_multicast(&self, group: Gid, lid: u16) -> Result<(), SetupError> {
        self.inner.core.qp()?.detach_multicast(group, lid)
    }

    /// Stops new sends, waits until work in flight is flushed, and destroys the queue pair.
    ///
    /// Operations not yet acknowledged fail with
    /// [`WR_FLUSH_ERR`](crate::types::WcStatus::WR_FLUSH_ERR), so await important ones first. Later
    /// operations of clones fail with [`OpErrorKind::Closed`].
    ///
    /// # Cancel safety
    ///
    /// Dropped after its first poll, the future leaves the queue pair in the error state.
    pub async fn close(self) {
        if self.modify(&QpAttr::to_state(QpState::Err)).is_ok() {
            // The error state flushes work in order, so this is flushed last.
            let marker = super::Send::post(self.send_queue(), WorkRequest::send(), ());
            if let Err(error) = marker.await {
                rdma_provider::debug!(%error, qpn = %self.qpn(), "flushed all work requests");
            }
        }
        self.inner.core.shut_down(OpErrorKind::Closed);
    }

    pub(crate) fn shut_down(&self) {
        self.inner.core.shut_down(OpErrorKind::Closed);
    }

    /// Stops sends from every handle. Queued sends fail with `Closed` when the queue pair is closed
    /// or [shut down](Self::shut_down). Work in flight continues.
    pub(crate) fn stop_sending(&self) {
        // The returned poster is dropped outside the lock.
        drop(self.send_queue().close());
    }

    /// Returns the failure that led to the error state, if it was of a send and has been polled.
    pub(crate) fn cause(&self) -> Option<OpErrorKind> {
        self.send_queue().cause()
    }

    /// Returns the counters of its send queue.
    #[must_use]
    pub fn send_counters(&self) -> WorkQueueCounters {
        self.send_queue().counters()
    }

    /// Returns the counters of its receive queue; all zero with a shared receive queue.
    #[must_use]
    pub fn receive_counters(&self) -> WorkQueueCounters {
        self.inner.core.receive().map(|queue| queue.counters()).unwrap_or_default()
    }

    /// Returns the counters of a software device; `None` on hardware or after closing.
    #[must_use]
    pub fn software_counters(&self) -> Option<(SendCounters, ReceiveCounters)> {
        self.inner.core.qp().ok()?.software_counters()
    }

    pub(crate) fn last_state(&self) -> Result<QpState, SetupError> {
        Ok(self.inner.core.qp()?.last_state())
    }

    pub(crate) fn local(&self) -> Local {
        self.inner.local
    }

    pub(crate) fn port_and_gid(&self) -> (PortNum, GidEntry) {
        (self.inner.local.port, self.inner.local.gid)
    }

    pub(crate) fn shares_receives(&self) -> bool {
        self.inner.core.receive().is_none()
    }

    pub(crate) fn downgrade(&self) -> WeakQueuePair {
        WeakQueuePair { inner: Arc::downgrade(&self.inner), post_state: self.post_state.clone() }
    }

    pub(crate) fn drain_completions(&self) {
        let [send, receive] = &self.inner.queues;
        send.shared().drain();
        if !Arc::ptr_eq(send.shared(), receive.shared()) {
            receive.shared().drain();
        }
    }

    pub(crate) fn watch_receives(&self) -> bool {
        self.inner.queues[1].shared().watch()
    }

    /// Wakes `waker`, instead of futures, whenever receives complete. Requires
    /// [`notifies`](Self::notifies); see [`WorkQueue::wake_on_completion`].
    pub(crate) fn wake_on_completion(&self, waker: Waker) {
        if let Some(receive) = self.inner.core.receive() {
            receive.wake_on_completion(waker);
        }
    }

    pub(crate) fn notifies(&self) -> bool {
        self.inner.core.receive().is_some_and(|receive| receive.notifies())
    }

    pub(crate) fn is_polled_by_thread(&self) -> bool {
        matches!(self.inner.queues[1].shared().mode(), CompletionMode::BusyPoll(_))
    }

    #[inline]
    pub(crate) fn send_queue(&self) -> &Arc<WorkQueue> {
        &self.inner.send
    }

    #[inline(always)]
    pub(crate) fn destination(&self) -> Destination<'_> {
        self.post_state.prefetch();
        Destination::new(&self.inner, None)
    }
}

#[derive(Clone)]
pub(crate) struct WeakQueuePair {
    inner: Weak<Inner>,
    post_state: PostState,
}

impl fmt::Debug for WeakQueuePair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("WeakQueuePair").field(&self.inner.upgrade().map(|inner| inner.qpn)).finish()
    }
}

impl WeakQueuePair {
    pub(crate) fn upgrade(&self) -> Option<QueuePair> {
        Some(QueuePair { inner: self.inner.upgrade()?, post_state: self.post_state.clone() })
    }
}

impl fmt::Debug for QueuePair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QueuePair")
            .field("qpn", &self.inner.qpn)
            .field("transport", &self.inner.transport)
            .field("send", &self.send_counters())
            .field("receive", &self.receive_counters())
            .finish_non_exhaustive()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::software::Network;
    use crate::verbs::Device;

    #[test]
    fn each_reset_renews_the_packet_sequence_number() {
        let device = Device::software_in(&Network::new(), "reset").unwrap();
        let pd = device.protection_domain().unwrap();
        let queue = CompletionQueue::new(&device, CompletionMode::Event).unwrap();
        let qp = QueuePair::new(&pd, &queue).unwrap();
        // Three equal numbers in a row are one case in 2^72.
        let before = qp.endpoint().psn;
        let renewed = (0..3).any(|_| {
            qp.modify(&QpAttr::to_state(QpState::Reset)).unwrap();
            qp.endpoint().psn != before
        });
        assert!(renewed);
    }
}

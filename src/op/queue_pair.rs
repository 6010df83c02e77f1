//! Queue pairs: build, connect, query, close.

use std::any::Any;
use std::fmt;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::task::Waker;

use crate::dispatch::{ReceiveCounters, SendCounters};
use crate::engine::{
    CompletionMode, CompletionQueue, Limits, QueuePairCore, Shared, WorkKind, WorkQueue,
    WorkQueueCounters,
};
use crate::error::{LimitError, OpErrorKind, SetupError};
use crate::memory::{BufMut, PdKey, Pool, PoolError};
use crate::op::post::Destination;
use crate::op::post_state::PostState;
use crate::op::{ConnectOptions, QueuePairEndpoint, SharedReceiveQueue};
use crate::types::{
    Access, AddressVector, DataPath, DciStreamsInit, Gid, GidEntry, LinkLayer, Mtu, PortAttr,
    PortNum, PortState, Psn, Qkey, QpAttr, QpCaps, QpState, Qpn, SendFlags, SendOp, Transport,
};
use crate::verbs::{Device, ProtectionDomain, Qp, QpOptions};

/// A queue pair whose work requests are futures. Clones refer to the same queue pair.
///
/// ```
/// use tokio_rdma::QueuePair;
/// # use tokio_rdma::{CompletionMode, CompletionQueue, Device, Pool};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let device = Device::open_default()?;
/// # let pd = device.protection_domain()?;
/// # let queue = CompletionQueue::new(&device, CompletionMode::Event)?;
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
    pub(crate) flags: SendFlags,
    /// In the handle, so that prefetching need not wait for `inner`.
    post_state: PostState,
}

/// The fields that each operation uses come first, in few cache lines.
#[repr(C)]
pub(crate) struct Inner {
    /// The send queue of `core`, reachable with one load less.
    pub(super) send: Arc<WorkQueue>,
    pub(super) transport: Transport,
    pub(crate) core: Arc<QueuePairCore>,
    pub(super) pd: ProtectionDomain,
    qpn: Qpn,
    caps: QpCaps,
    /// The first packet sequence number, random and new for each connection.
    psn: AtomicU32,
    local: Local,
    /// Created by the first atomic.
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

#[derive(Debug, Clone, Copy)]
pub(crate) struct Local {
    pub(crate) port: PortNum,
    pub(crate) gid: GidEntry,
    /// True if the caller chose the GID by its index.
    fixed_gid: bool,
    lid: u16,
    pub(crate) link_layer: LinkLayer,
    pub(crate) mtu: Mtu,
    reads: u8,
}

impl QueuePair {
    /// Creates an RC queue pair with default sizes, in INIT: receives can be posted.
    ///
    /// # Errors
    ///
    /// See [`QueuePairBuilder::build`].
    pub fn new(pd: &ProtectionDomain, queue: &CompletionQueue) -> Result<Self, SetupError> {
        Self::builder(pd, queue).build()
    }

    /// Returns a builder for a queue pair whose completions go to `queue`.
    #[must_use]
    pub fn builder(pd: &ProtectionDomain, queue: &CompletionQueue) -> QueuePairBuilder {
        QueuePairBuilder {
            pd: pd.clone(),
            send_queue: queue.clone(),
            recv_queue: None,
            srq: None,
            transport: Transport::Rc,
            caps: QpCaps {
                max_send_wr: 128,
                max_recv_wr: 128,
                max_send_sge: 4,
                max_recv_sge: 4,
                max_inline: 64,
            },
            receives: None,
            held: None,
            access: None,
            qkey: None,
            path: Path::Any,
            number: None,
            streams: None,
            solicited: false,
            listened: false,
        }
    }

    #[cfg(feature = "ibverbs")]
    pub(crate) fn verbs(&self) -> Option<Arc<Qp>> {
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
    /// - [`SetupError::Mismatch`] if transport, link layer or address family differ;
    /// - [`SetupError::Transition`] if this queue pair is already connected.
    pub fn connect(&self, peer: &QueuePairEndpoint) -> Result<(), SetupError> {
        self.connect_with(peer, &ConnectOptions::default())
    }

    /// Connects as [`connect`](Self::connect) does, with the given timeouts and retries.
    ///
    /// # Errors
    ///
    /// See [`connect`](Self::connect); [`SetupError::Limit`] if an option is out of range.
    pub fn connect_with(
        &self,
        peer: &QueuePairEndpoint,
        options: &ConnectOptions,
    ) -> Result<(), SetupError> {
        let local = self.inner.local;
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
        options.check()?;
        let reliable = self.inner.transport == Transport::Rc;
        let mut address = AddressVector::new(local.port, local.gid.index, peer.gid);
        address.dlid = peer.lid;
        self.modify(&QpAttr {
            address: Some(address),
            path_mtu: Some(local.mtu.min(peer.mtu)),
            dest_qpn: Some(peer.qpn),
            rq_psn: Some(peer.psn),
            max_dest_rd_atomic: reliable.then_some(local.reads),
            min_rnr_timer: reliable.then_some(options.rnr_timer),
            ..QpAttr::to_state(QpState::Rtr)
        })?;
        self.modify(&QpAttr {
            sq_psn: Some(self.inner.psn()),
            timeout: reliable.then_some(options.timeout),
            retry_count: reliable.then_some(options.retry_count),
            rnr_retry: reliable.then_some(options.rnr_retry),
            max_rd_atomic: reliable.then_some(local.reads.min(peer.reads)),
            ..QpAttr::to_state(QpState::Rts)
        })?;
        self.inner.span.in_scope(
            || tracing::debug!(peer = %peer.qpn, gid = %peer.gid, "connected queue pair"),
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

    /// Refuses a peer of the other address family: a packet has one family.
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

    /// Checks the address family, and warns if another GID suits the peer better: routing may work.
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
            tracing::warn!(
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

    /// Returns the state and all attributes set so far, `ibv_query_qp(3)`.
    ///
    /// # Errors
    ///
    /// [`SetupError::Closed`].
    pub fn query(&self) -> Result<(QpState, QpAttr), SetupError> {
        Ok(self.inner.core.qp()?.query()?)
    }

    /// Stops new sends, waits until work in flight is flushed, and destroys the queue pair.
    ///
    /// Operations not yet acknowledged fail with
    /// [`WR_FLUSH_ERR`](crate::types::WcStatus::WR_FLUSH_ERR); await important ones first. Later
    /// operations of clones fail with [`OpErrorKind::Closed`].
    ///
    /// # Cancel safety
    ///
    /// If dropped after its first poll, the future leaves the queue pair in the error state.
    /// Dropping the last clone then destroys it.
    pub async fn close(self) {
        if self.modify(&QpAttr::to_state(QpState::Err)).is_ok() {
            // The error state flushes work in order, so this is flushed last.
            let flags = self.flags | SendFlags::SIGNALED;
            let marker = super::Send::post(
                self.send_queue(),
                WorkKind::Send(SendOp::Send),
                flags,
                u64::MAX,
                (),
            );
            if let Err(error) = marker.await {
                tracing::debug!(%error, qpn = %self.qpn(), "flushed all work requests");
            }
        }
        self.inner.core.shut_down(OpErrorKind::Closed);
    }

    /// Destroys the queue pair immediately, as dropping the last clone does.
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

    /// Returns a handle whose work requests wait for all READs and atomics posted before (RC,
    /// `IBV_SEND_FENCE`).
    #[must_use]
    pub fn fenced(&self) -> Self {
        Self { flags: self.flags | SendFlags::FENCE, ..self.clone() }
    }

    /// Returns a handle whose messages raise a solicited event at the receiver
    /// (`IBV_SEND_SOLICITED`).
    #[must_use]
    pub fn solicited(&self) -> Self {
        Self { flags: self.flags | SendFlags::SOLICITED, ..self.clone() }
    }

    /// Returns the state last set, without a system call.
    pub(crate) fn last_state(&self) -> Result<QpState, SetupError> {
        Ok(self.inner.core.qp()?.last_state())
    }

    pub(crate) fn local(&self) -> Local {
        self.inner.local
    }

    pub(crate) fn path(&self) -> (PortNum, GidEntry) {
        (self.inner.local.port, self.inner.local.gid)
    }

    pub(crate) fn shares_receives(&self) -> bool {
        self.inner.core.receive().is_none()
    }

    pub(crate) fn downgrade(&self) -> WeakQueuePair {
        WeakQueuePair { inner: Arc::downgrade(&self.inner), post_state: self.post_state.clone() }
    }

    /// Polls and dispatches available completions, whether or not other threads poll.
    pub(crate) fn drain_completions(&self) {
        let [send, receive] = &self.inner.queues;
        send.shared().drain();
        if !Arc::ptr_eq(send.shared(), receive.shared()) {
            receive.shared().drain();
        }
    }

    /// Ensures that the current runtime watches for receives; returns false if it cannot.
    pub(crate) fn watch_receives(&self) -> bool {
        self.inner.queues[1].shared().watch()
    }

    /// Wakes `listener` whenever receives complete, instead of their futures. Requires
    /// [`is_listened`](Self::is_listened); see [`WorkQueue::listen`].
    pub(crate) fn listen(&self, listener: Waker) {
        if let Some(receive) = self.inner.core.receive() {
            receive.listen(listener);
        }
    }

    /// Returns true if receives report to a listener.
    pub(crate) fn is_listened(&self) -> bool {
        self.inner.core.receive().is_some_and(|receive| receive.is_listened())
    }

    /// Returns true if a thread polls for receives.
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
        Destination::new(&self.inner, self.flags, None)
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
        Some(QueuePair {
            inner: self.inner.upgrade()?,
            flags: SendFlags::empty(),
            post_state: self.post_state.clone(),
        })
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

/// A builder for a [`QueuePair`].
///
/// ```
/// use tokio_rdma::QueuePair;
/// use tokio_rdma::types::{Qkey, QpState, Transport};
/// # use tokio_rdma::{CompletionMode, CompletionQueue, Device};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let device = Device::open_default()?;
/// # let pd = device.protection_domain()?;
/// # let queue = CompletionQueue::new(&device, CompletionMode::Event)?;
/// let datagrams = QueuePair::builder(&pd, &queue)
///     .transport(Transport::Ud)
///     .qkey(Qkey(0x1234))
///     .max_recv_wr(256)
///     .build()?;
/// datagrams.activate()?;
/// assert_eq!(datagrams.query()?.0, QpState::Rts);
/// assert!(datagrams.caps().max_recv_wr >= 256);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct QueuePairBuilder {
    pd: ProtectionDomain,
    send_queue: CompletionQueue,
    recv_queue: Option<CompletionQueue>,
    srq: Option<SharedReceiveQueue>,
    transport: Transport,
    caps: QpCaps,
    /// The requested `max_recv_wr`.
    receives: Option<u32>,
    held: Option<Arc<dyn Any + Send + Sync>>,
    access: Option<Access>,
    qkey: Option<Qkey>,
    path: Path,
    /// The number reserved by the connection manager.
    number: Option<Qpn>,
    /// Streams of a DC initiator.
    streams: Option<DciStreamsInit>,
    /// The peer solicits all messages.
    solicited: bool,
    /// Receives report to a listener in event and hybrid mode.
    listened: bool,
}

/// The choice of the local port and GID.
#[derive(Debug, Clone)]
pub(crate) enum Path {
    Any,
    To(Gid),
    From(PortNum, u8),
    /// Chosen by the connection manager.
    At(Arc<PortAttr>, GidEntry),
}

impl Path {
    pub(crate) fn choose(self, device: &Device) -> Result<(Arc<PortAttr>, GidEntry), SetupError> {
        let (port, entry) = match self {
            Self::Any => device.default_path()?,
            Self::To(peer) => device.path_to(peer)?,
            Self::From(port, gid_index) => device.path_from(port, gid_index)?,
            Self::At(port, entry) if port.state == PortState::Active => return Ok((port, entry)),
            Self::At(port, _) => return Err(SetupError::NoGid { port: port.port.0 }),
        };
        Ok((Arc::new(port), entry))
    }
}

impl QueuePairBuilder {
    /// Sets the service type, RC by default. [`Transport::Dci`] requires a
    /// [`DcInitiator`](crate::dc::DcInitiator).
    #[must_use]
    pub fn transport(mut self, transport: Transport) -> Self {
        self.transport = transport;
        self
    }

    /// Sets a separate completion queue for receives. With a shared receive queue, only its own is
    /// allowed.
    #[must_use]
    pub fn receive_completions(mut self, queue: &CompletionQueue) -> Self {
        self.recv_queue = Some(queue.clone());
        self
    }

    /// Uses a shared receive queue and its completion queue. [`max_recv_wr`](Self::max_recv_wr)
    /// must then be 0 or unset.
    #[must_use]
    pub fn shared_receive_queue(mut self, srq: &SharedReceiveQueue) -> Self {
        self.srq = Some(srq.clone());
        self
    }

    /// Sets the capacity of the send queue in work requests, 128 by default.
    ///
    /// Operations on a full queue wait. A device may grant more of this and the other sizes
    /// (`ibv_create_qp(3)`), see [`QueuePair::caps`].
    #[must_use]
    pub fn max_send_wr(mut self, work_requests: u32) -> Self {
        self.caps.max_send_wr = work_requests;
        self
    }

    /// Sets the capacity of the receive queue in work requests, 128 by default.
    #[must_use]
    pub fn max_recv_wr(mut self, work_requests: u32) -> Self {
        self.receives = Some(work_requests);
        self
    }

    /// Sets the scatter/gather elements of a work request (buffers in a `Vec`), 4 by default.
    #[must_use]
    pub fn max_sge(mut self, elements: u32) -> Self {
        self.caps.max_send_sge = elements;
        self.caps.max_recv_sge = elements;
        self
    }

    /// Sets the maximum bytes of inline data, which take queue memory; 64 by default.
    #[must_use]
    pub fn max_inline(mut self, bytes: u32) -> Self {
        self.caps.max_inline = bytes;
        self
    }

    /// Sets the peer's access to exposed regions of the protection domain (RC, UC), all by default.
    #[must_use]
    pub fn access(mut self, access: Access) -> Self {
        self.access = Some(access);
        self
    }

    /// Sets the queue key that datagrams must have (UD), 0 by default.
    #[must_use]
    pub fn qkey(mut self, qkey: Qkey) -> Self {
        self.qkey = Some(qkey);
        self
    }

    /// Chooses port and GID by [`Device::path_to`](crate::Device::path_to) instead of
    /// [`Device::default_path`](crate::Device::default_path).
    ///
    /// The GID is part of the [`endpoint`](QueuePair::endpoint), so it is chosen before connecting,
    /// and a peer may drop packets from another GID.
    #[must_use]
    pub fn peer(mut self, peer: impl Into<Gid>) -> Self {
        self.path = Path::To(peer.into());
        self
    }

    /// Sets port and GID index, whatever [`Device::gids`](crate::Device::gids) prefers.
    #[must_use]
    pub fn source(mut self, port: PortNum, gid_index: u8) -> Self {
        self.path = Path::From(port, gid_index);
        self
    }

    pub(crate) fn device(&self) -> &Device {
        self.pd.device()
    }

    /// Makes the queue pair hold a value, which is dropped after all that the queue pair refers to.
    pub(crate) fn holding(mut self, held: impl Any + Send + Sync) -> Self {
        self.held = Some(Arc::new(held));
        self
    }

    pub(crate) fn streams(mut self, streams: Option<DciStreamsInit>) -> Self {
        self.streams = streams;
        self
    }

    pub(crate) fn number(mut self, number: Option<Qpn>) -> Self {
        self.number = number;
        self
    }

    /// Receives raise events only for solicited messages, because the peer sends no others, and for
    /// failures. Without effect on devices of which it is unknown whether failures raise such an
    /// event: Linux's SoftRoCE flushes receives without one.
    pub(crate) fn solicited(mut self) -> Self {
        self.solicited = true;
        self
    }

    /// Lets receives report to a [listener](QueuePair::listen) if their queue is in event or hybrid
    /// mode. Other modes wait with the operations, which spin.
    pub(crate) fn listened(mut self) -> Self {
        self.listened = true;
        self
    }

    pub(crate) fn path(mut self, path: Path) -> Self {
        self.path = path;
        self
    }

    /// Creates the queue pair, in INIT: receives can be posted, nothing arrives yet.
    ///
    /// # Errors
    ///
    /// - [`SetupError::Limit`] above a limit of the device, or for `max_recv_wr` with a shared
    ///   receive queue;
    /// - [`SetupError::CompletionQueueFull`] if a completion queue has too few unreserved entries;
    /// - [`SetupError::Foreign`] for queues of another device or protection domain;
    /// - [`SetupError::OtherCompletionQueue`] if [`receive_completions`](Self::receive_completions)
    ///   contradicts the shared receive queue;
    /// - [`SetupError::NoGid`] without an active port or the requested GID;
    /// - [`SetupError::Unsupported`] for [`Transport::Dci`], and for settings that the transport
    ///   lacks.
    pub fn build(self) -> Result<QueuePair, SetupError> {
        if self.transport == Transport::Dci {
            return Err(SetupError::Unsupported {
                what: "transport DC needs a DcInitiator instead of a QueuePair",
            });
        }
        self.build_any()
    }

    /// Creates a queue pair of any transport, otherwise as [`build`](Self::build).
    pub(crate) fn build_any(self) -> Result<QueuePair, SetupError> {
        let Self {
            pd,
            send_queue,
            recv_queue,
            srq,
            transport,
            mut caps,
            receives,
            held,
            access,
            qkey,
            path,
            number,
            streams,
            solicited,
            listened,
        } = self;
        let device = pd.device();
        let (connected, datagram) =
            (matches!(transport, Transport::Rc | Transport::Uc), transport == Transport::Ud);
        if access.is_some() && !connected {
            return Err(SetupError::Unsupported {
                what: "`access` applies to the transports RC and UC only",
            });
        }
        if qkey.is_some() && !datagram {
            return Err(SetupError::Unsupported {
                what: "`qkey` applies to the transport UD only",
            });
        }
        let recv_queue = match (&srq, recv_queue) {
            (None, asked) => {
                caps.max_recv_wr = receives.unwrap_or(caps.max_recv_wr);
                asked.unwrap_or_else(|| send_queue.clone())
            }
            // Its work request numbers are valid only on its own completion queue, which reserves
            // entries for them.
            (Some(srq), asked) => {
                let queue = srq.completion_queue();
                if let Some(asked) =
                    asked.filter(|asked| !Arc::ptr_eq(asked.shared(), queue.shared()))
                {
                    let (asked, queue) = (asked.id(), queue.id());
                    return Err(SetupError::OtherCompletionQueue { asked, queue });
                }
                let field = "max_recv_wr beside a shared receive queue";
                LimitError::check(field, receives.unwrap_or(0).into(), 0)?;
                caps.max_recv_wr = 0;
                queue.clone()
            }
        };
        let (access, qkey) = (access.unwrap_or(Access::REMOTE_ALL), qkey.unwrap_or(Qkey(0)));
        let fixed_gid = matches!(path, Path::From(..) | Path::At(..));
        let (port, gid) = path.choose(device)?;
        let options = QpOptions { transport, caps };
        let (send_cq, recv_cq) = (send_queue.cq(), recv_queue.cq());
        let srq_verbs = srq.as_ref().map(SharedReceiveQueue::verbs);
        let qp = Qp::numbered(&pd, send_cq, recv_cq, srq_verbs, &options, number, streams)?;
        let (granted, qpn) = (qp.caps(), qp.qpn());
        qp.modify(&QpAttr {
            pkey_index: Some(0),
            port: Some(port.port),
            access: connected.then_some(access),
            qkey: datagram.then_some(qkey),
            ..QpAttr::to_state(QpState::Init)
        })?;

        // Completion queue entries are reserved for the requested depth, not the granted one.
        let limits = |depth, max_sge| Limits {
            depth,
            max_sge,
            max_inline: granted.max_inline,
            max_message: if datagram {
                port.active_mtu.bytes() as u64
            } else {
                port.max_msg_size.into()
            },
            pd: PdKey(pd.id()),
            solicited: false,
            listened: false,
        };
        let send = limits(caps.max_send_wr, granted.max_send_sge);
        let signals_failures =
            matches!(device.attr().data_path, DataPath::Software | DataPath::Direct);
        // A receive may be larger than any message.
        let receive = Limits {
            max_message: u64::MAX,
            solicited: solicited && signals_failures,
            listened: listened
                && matches!(
                    recv_queue.shared().mode(),
                    CompletionMode::Event | CompletionMode::Hybrid
                ),
            ..limits(caps.max_recv_wr, granted.max_recv_sge)
        };
        let core = QueuePairCore::new(
            qp,
            (send_queue.shared(), send),
            (recv_queue.shared(), srq.is_none().then_some(receive)),
            srq.map(|srq| Shared::new(srq.work_queue().clone(), srq)),
        )?;
        let span = tracing::info_span!("queue_pair", %qpn, ?transport);
        span.in_scope(|| tracing::debug!(?caps, "created queue pair"));
        let local = Local {
            port: port.port,
            gid,
            fixed_gid,
            lid: port.lid,
            link_layer: port.link_layer,
            mtu: port.active_mtu,
            reads: device.attr().max_qp_rd_atom.min(device.attr().max_qp_init_rd_atom),
        };
        let post_state = PostState::new(&*core.qp()?, core.send());
        let inner = Inner {
            send: core.send().clone(),
            core,
            transport,
            qpn,
            caps: granted,
            psn: AtomicU32::new(device.random_psn()?.value()),
            local,
            atomic_results: OnceLock::new(),
            span,
            pd,
            queues: [send_queue, recv_queue],
            _held: held,
        };
        Ok(QueuePair { inner: Arc::new(inner), flags: SendFlags::empty(), post_state })
    }
}

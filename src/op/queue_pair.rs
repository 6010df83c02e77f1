//! Queue pair: made, connected, closed.

use std::fmt;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use crate::dispatch::{ReceiveCounters, SendCounters};
use crate::engine::{
    CompletionQueue, Limits, QueuePairCore, Shared, What, WorkQueue, WorkQueueCounters,
};
use crate::error::{LimitError, OpErrorKind, SetupError};
use crate::memory::{BufMut, PdKey, Pool, PoolError};
use crate::op::post::Destination;
use crate::op::{ConnectOptions, QueuePairEndpoint, SharedReceiveQueue};
use crate::types::{
    Access, AddressVector, Gid, GidEntry, LinkLayer, Mtu, PortAttr, PortNum, Psn, Qkey, QpAttr,
    QpCaps, QpState, Qpn, SendFlags, SendOp, Transport,
};
use crate::verbs::{Device, ProtectionDomain, Qp, QpOptions};

/// A queue pair whose work requests are futures; clones share it.
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
/// [`close`](Self::close) ends it in order. Dropping the last clone ends it at once: what is in flight is flushed
/// or fails as [`OpErrorKind::Closed`], and when the drop returns the device touches no buffer any more.
#[derive(Clone)]
pub struct QueuePair {
    pub(crate) inner: Arc<Inner>,
    pub(crate) flags: SendFlags,
}

pub(crate) struct Inner {
    pub(crate) core: Arc<QueuePairCore>,
    /// That of `core`, one step nearer.
    pub(super) send: Arc<WorkQueue>,
    pub(super) pd: ProtectionDomain,
    pub(super) transport: Transport,
    qpn: Qpn,
    caps: QpCaps,
    /// Our first packet sequence number, drawn at random, anew for each connection.
    psn: AtomicU32,
    local: Local,
    /// Where results of atomics arrive; registered when first needed.
    words: OnceLock<Pool>,
    span: tracing::Span,
    // Last, for they are needed while the core shuts down.
    queues: [CompletionQueue; 2],
}

impl Inner {
    fn psn(&self) -> Psn {
        Psn::new(self.psn.load(Ordering::Relaxed))
    }

    /// A registered word for the result of an atomic.
    pub(super) fn word(&self) -> Result<BufMut, PoolError> {
        let words = match self.words.get() {
            Some(words) => words,
            None => {
                let made = Pool::builder(&self.pd).buffer_size(8).buffers(64).growing(true).build();
                let made = made.map_err(PoolError::Register)?;
                self.words.get_or_init(|| made)
            }
        };
        words.try_alloc(8)
    }
}

/// Our side of a connection.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Local {
    pub(crate) port: PortNum,
    pub(crate) gid: GidEntry,
    /// The caller chose it by number.
    chosen: bool,
    lid: u16,
    pub(crate) link_layer: LinkLayer,
    pub(crate) mtu: Mtu,
    reads: u8,
}

impl QueuePair {
    /// A reliable connection with default sizes, in INIT: receives can be posted.
    ///
    /// # Errors
    ///
    /// As [`QueuePairBuilder::build`].
    pub fn new(pd: &ProtectionDomain, queue: &CompletionQueue) -> Result<Self, SetupError> {
        Self::builder(pd, queue).build()
    }

    /// A queue pair to be described further; `queue` takes its completions.
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
            access: None,
            qkey: None,
            path: Path::Any,
            number: None,
        }
    }

    /// The bare queue pair, unless it is closed.
    #[cfg(feature = "ibverbs")]
    pub(crate) fn bare(&self) -> Option<Arc<Qp>> {
        self.inner.core.qp().ok()
    }

    /// Its number.
    #[must_use]
    pub fn qpn(&self) -> Qpn {
        self.inner.qpn
    }

    /// Service type.
    #[inline]
    #[must_use]
    pub fn transport(&self) -> Transport {
        self.inner.transport
    }

    /// Sizes granted.
    #[must_use]
    pub fn caps(&self) -> QpCaps {
        self.inner.caps
    }

    /// The protection domain it belongs to.
    #[must_use]
    pub fn protection_domain(&self) -> &ProtectionDomain {
        &self.inner.pd
    }

    /// What a peer needs to connect to it. A change to RESET makes it another one: exchange it again.
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

    /// Connects to a peer, which does the same with our [`endpoint`](Self::endpoint). UD needs no peer and is
    /// ready after [`activate`](Self::activate).
    ///
    /// Both ends may send as soon as both have called it; what is sent before the other end has is repeated until
    /// it answers, or lost if the connection is unreliable.
    ///
    /// # Errors
    ///
    /// [`SetupError::Mismatch`] if the ends do not fit together, [`SetupError::Transition`] if it is connected
    /// already, [`SetupError::Verb`] if the device refuses.
    pub fn connect(&self, peer: &QueuePairEndpoint) -> Result<(), SetupError> {
        self.connect_with(peer, &ConnectOptions::default())
    }

    /// As [`connect`](Self::connect), with timeouts and retries of your own.
    ///
    /// # Errors
    ///
    /// As [`connect`](Self::connect).
    pub fn connect_with(
        &self,
        peer: &QueuePairEndpoint,
        options: &ConnectOptions,
    ) -> Result<(), SetupError> {
        let local = self.inner.local;
        self.agree("transport", self.inner.transport, peer.transport)?;
        self.agree("link layer", local.link_layer, peer.link_layer)?;
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
        self.inner
            .span
            .in_scope(|| tracing::debug!(peer = %peer.qpn, gid = %peer.gid, "connected"));
        Ok(())
    }

    /// Makes a datagram queue pair ready to send and receive.
    ///
    /// # Errors
    ///
    /// [`SetupError::Transition`] if it is ready already or not of datagrams.
    pub fn activate(&self) -> Result<(), SetupError> {
        self.modify(&QpAttr::to_state(QpState::Rtr))?;
        self.modify(&QpAttr { sq_psn: Some(self.inner.psn()), ..QpAttr::to_state(QpState::Rts) })
    }

    /// An IPv4 packet cannot leave from an IPv6 address, nor the reverse.
    pub(crate) fn check_family(&self, peer: Gid) -> Result<(), SetupError> {
        let gid = self.inner.local.gid;
        let (ours, theirs) = (gid.gid.to_ip(), peer.to_ip());
        if gid.is_roce_v2() && ours.is_ipv4() != theirs.is_ipv4() {
            let (ours, theirs) = (ours.to_string(), theirs.to_string());
            return Err(SetupError::Mismatch {
                what: "address family (see `peer` of the builder)",
                ours,
                theirs,
            });
        }
        Ok(())
    }

    /// Whatever is of the same family may work by routing, though there may be better.
    fn check_path(&self, peer: Gid) -> Result<(), SetupError> {
        self.check_family(peer)?;
        let Local { port, gid, chosen, .. } = self.inner.local;
        let theirs = peer.to_ip();
        if chosen {
            return Ok(());
        }
        let ranked = self.inner.pd.device().gids(port, Some(peer))?;
        let used = ranked.iter().find(|other| other.entry.index == gid.index);
        if let (Some(used), Some(better)) = (used, ranked.first())
            && better.merit() < used.merit()
        {
            let _entered = self.inner.span.enter();
            tracing::warn!(%used, %better, peer = %theirs, "another GID fits this peer better: QueuePairBuilder::peer");
        }
        Ok(())
    }

    pub(crate) fn agree<T: fmt::Debug + PartialEq>(
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

    /// Changes attributes and state, `ibv_modify_qp(3)`; a refused change changes nothing. Work that a change to
    /// RESET makes the device forget fails as [`OpErrorKind::Closed`].
    ///
    /// # Errors
    ///
    /// [`SetupError::Transition`] with what is missing or not allowed, [`SetupError::Verb`] if the device refuses,
    /// [`SetupError::Closed`] after [`close`](Self::close).
    pub fn modify(&self, attr: &QpAttr) -> Result<(), SetupError> {
        let _entered = self.inner.span.enter();
        if attr.state != Some(QpState::Reset) {
            return self.inner.core.modify(attr);
        }
        // Late packets of one connection must not pass for the first ones of the next.
        let psn = self.inner.pd.device().random_psn()?;
        self.inner.core.modify(attr)?;
        self.inner.psn.store(psn.value(), Ordering::Relaxed);
        Ok(())
    }

    /// Current state and all attributes that have been set, `ibv_query_qp(3)`.
    ///
    /// # Errors
    ///
    /// [`SetupError::Verb`] if the device refuses, [`SetupError::Closed`] after [`close`](Self::close).
    pub fn query(&self) -> Result<(QpState, QpAttr), SetupError> {
        Ok(self.inner.core.qp()?.query()?)
    }

    /// Ends it in order: no more sends start, what is in flight is flushed and awaited, then it is destroyed.
    ///
    /// Operations that peers have not acknowledged fail with
    /// [`WR_FLUSH_ERR`](crate::types::WcStatus::WR_FLUSH_ERR): await those that matter before. Clones stay valid and
    /// answer [`OpErrorKind::Closed`].
    ///
    /// # Cancel safety
    ///
    /// Once polled, dropping the future leaves the queue pair in the error state; the rest happens when its last
    /// clone is dropped.
    pub async fn close(self) {
        if self.modify(&QpAttr::to_state(QpState::Err)).is_ok() {
            // In the error state work is taken and flushed, in order: this flush comes after all others.
            let flags = self.flags | SendFlags::SIGNALED;
            let beacon =
                super::Send::post(self.send_queue(), What::Send(SendOp::Send), flags, u64::MAX, ());
            if let Err(error) = beacon.await {
                tracing::debug!(%error, qpn = %self.qpn(), "drained");
            }
        }
        self.inner.core.shut_down(OpErrorKind::Closed);
    }

    /// Ends it at once, as dropping the last clone does.
    pub(crate) fn end(&self) {
        self.inner.core.shut_down(OpErrorKind::Closed);
    }

    /// Posts no more sends, of whomever: those in line stay there until it is closed or [ended](Self::end), and fail then; nothing
    /// else moves the line any more. What the device has goes on.
    pub(crate) fn stop_sending(&self) {
        // Dropped without the lock.
        drop(self.send_queue().close());
    }

    /// The failure that has put it in the error state, if it was that of a send of whomever and its completion was taken.
    pub(crate) fn cause(&self) -> Option<OpErrorKind> {
        self.send_queue().cause()
    }

    /// What its send queue has done so far.
    #[must_use]
    pub fn send_counters(&self) -> WorkQueueCounters {
        self.send_queue().counters()
    }

    /// What its receive queue has done so far; nothing, if it draws from a shared one.
    #[must_use]
    pub fn receive_counters(&self) -> WorkQueueCounters {
        self.inner.core.receive().map(|queue| queue.counters()).unwrap_or_default()
    }

    /// Packets, retries and refusals so far, if it is of a software device and not closed.
    #[must_use]
    pub fn software_counters(&self) -> Option<(SendCounters, ReceiveCounters)> {
        self.inner.core.qp().ok()?.software_counters()
    }

    /// The same queue pair; what is posted through this handle waits for all READs and atomics posted before, as
    /// `IBV_SEND_FENCE` of `ibv_post_send(3)` (RC).
    #[must_use]
    pub fn fenced(&self) -> Self {
        Self { inner: self.inner.clone(), flags: self.flags | SendFlags::FENCE }
    }

    /// The same queue pair; messages sent through this handle raise a solicited event at the receiver, as
    /// `IBV_SEND_SOLICITED` of `ibv_post_send(3)`.
    #[must_use]
    pub fn solicited(&self) -> Self {
        Self { inner: self.inner.clone(), flags: self.flags | SendFlags::SOLICITED }
    }

    pub(crate) fn local(&self) -> Local {
        self.inner.local
    }

    /// Port and GID that it sends from.
    pub(crate) fn path(&self) -> (PortNum, GidEntry) {
        (self.inner.local.port, self.inner.local.gid)
    }

    /// True if it draws receives from a shared queue.
    pub(crate) fn shares_receives(&self) -> bool {
        self.inner.core.receive().is_none()
    }

    /// A handle that does not keep it alive.
    pub(crate) fn downgrade(&self) -> WeakQueuePair {
        WeakQueuePair(Arc::downgrade(&self.inner))
    }

    /// Takes the completions that are there, whoever else does that and when.
    pub(crate) fn take_completions(&self) {
        for queue in &self.inner.queues {
            queue.shared().drain();
        }
    }

    #[inline]
    pub(crate) fn send_queue(&self) -> &Arc<WorkQueue> {
        &self.inner.send
    }

    /// The connected peer.
    #[inline(always)]
    pub(crate) fn destination(&self) -> Destination<'_> {
        Destination::new(&self.inner, self.flags, None)
    }
}

/// A queue pair that somebody else holds.
#[derive(Clone)]
pub(crate) struct WeakQueuePair(Weak<Inner>);

impl fmt::Debug for WeakQueuePair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("WeakQueuePair").field(&self.0.upgrade().map(|inner| inner.qpn)).finish()
    }
}

impl WeakQueuePair {
    /// The queue pair, unless it is gone.
    pub(crate) fn upgrade(&self) -> Option<QueuePair> {
        Some(QueuePair { inner: self.0.upgrade()?, flags: SendFlags::empty() })
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

/// Describes a [`QueuePair`].
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
    /// Receives asked for.
    receives: Option<u32>,
    access: Option<Access>,
    qkey: Option<Qkey>,
    path: Path,
    /// Reserved by the connection manager.
    number: Option<Qpn>,
}

/// How the port and its GID are chosen.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Path {
    Any,
    To(Gid),
    From(PortNum, u8),
}

impl Path {
    pub(crate) fn choose(self, device: &Device) -> Result<(PortAttr, GidEntry), SetupError> {
        match self {
            Self::Any => device.default_path(),
            Self::To(peer) => device.path_to(peer),
            Self::From(port, gid_index) => device.path_from(port, gid_index),
        }
    }
}

impl QueuePairBuilder {
    /// Service type; RC unless set. [`Transport::Dci`] is for [`DcInitiator`](crate::dc::DcInitiator)s.
    #[must_use]
    pub fn transport(mut self, transport: Transport) -> Self {
        self.transport = transport;
        self
    }

    /// Another queue for completions of receives than for those of sends. With a shared receive queue it can only be the
    /// completion queue of that.
    #[must_use]
    pub fn receive_completions(mut self, queue: &CompletionQueue) -> Self {
        self.recv_queue = Some(queue.clone());
        self
    }

    /// Draws receives from a shared queue, whose completion queue becomes that of receives. The queue pair has no receive queue
    /// of its own then: [`max_recv_wr`](Self::max_recv_wr) can only be 0.
    #[must_use]
    pub fn shared_receive_queue(mut self, srq: &SharedReceiveQueue) -> Self {
        self.srq = Some(srq.clone());
        self
    }

    /// Work requests the send queue holds; 128 unless set. More operations wait for room. A device may grant more, here and for
    /// the other sizes, as `ibv_create_qp(3)` allows: [`QueuePair::caps`] has what it granted.
    #[must_use]
    pub fn max_send_wr(mut self, work_requests: u32) -> Self {
        self.caps.max_send_wr = work_requests;
        self
    }

    /// Work requests the receive queue holds; 128 unless set. More operations wait for room.
    #[must_use]
    pub fn max_recv_wr(mut self, work_requests: u32) -> Self {
        self.receives = Some(work_requests);
        self
    }

    /// Scatter/gather elements of a work request, that is buffers in a `Vec`; 4 unless set.
    #[must_use]
    pub fn max_sge(mut self, elements: u32) -> Self {
        self.caps.max_send_sge = elements;
        self.caps.max_recv_sge = elements;
        self
    }

    /// Most bytes that can be sent inline; 64 unless set. Devices take queue memory for it.
    #[must_use]
    pub fn max_inline(mut self, bytes: u32) -> Self {
        self.caps.max_inline = bytes;
        self
    }

    /// What a peer may do to regions exposed in the same protection domain (RC, UC); everything unless set.
    #[must_use]
    pub fn access(mut self, access: Access) -> Self {
        self.access = Some(access);
        self
    }

    /// Queue key that datagrams must carry (UD); 0 unless set.
    #[must_use]
    pub fn qkey(mut self, qkey: Qkey) -> Self {
        self.qkey = Some(qkey);
        self
    }

    /// Chooses port and GID to reach this peer, as [`Device::path_to`](crate::Device::path_to) does; without it they
    /// are those of [`Device::default_path`](crate::Device::default_path).
    ///
    /// The GID is part of the [`endpoint`](QueuePair::endpoint): the peer sends to it, and may refuse packets from
    /// another one. So it is chosen here and does not change when the queue pair connects.
    #[must_use]
    pub fn peer(mut self, peer: impl Into<Gid>) -> Self {
        self.path = Path::To(peer.into());
        self
    }

    /// Sends from this entry of this port's GID table, whatever [`Device::gids`](crate::Device::gids) prefers.
    #[must_use]
    pub fn source(mut self, port: PortNum, gid_index: u8) -> Self {
        self.path = Path::From(port, gid_index);
        self
    }

    /// Makes it under a number that the connection manager has reserved, if there is one.
    pub(crate) fn number(mut self, number: Option<Qpn>) -> Self {
        self.number = number;
        self
    }

    /// As [`peer`](Self::peer) or [`source`](Self::source), whichever it is.
    pub(crate) fn path(mut self, path: Path) -> Self {
        self.path = path;
        self
    }

    /// Makes it, in INIT: receives can be posted, nothing arrives yet.
    ///
    /// # Errors
    ///
    /// [`SetupError::Limit`] beyond a limit of the device, and for receives of its own beside a shared receive queue,
    /// [`SetupError::CompletionQueueFull`] if the completion queue has no room for its work, [`SetupError::Foreign`] for queues
    /// of another device or protection domain, [`SetupError::OtherCompletionQueue`] for another completion queue of receives
    /// than that of the shared receive queue, [`SetupError::NoGid`] without an active port or the entry asked for, [`SetupError::Verb`] if
    /// the provider refuses, [`SetupError::Unsupported`] for DC, and for a setting that the transport does not have.
    pub fn build(self) -> Result<QueuePair, SetupError> {
        if self.transport == Transport::Dci {
            return Err(SetupError::Unsupported { what: "queue pairs of DC but in a DcInitiator" });
        }
        self.build_any()
    }

    /// As [`build`](Self::build), of any transport.
    pub(crate) fn build_any(self) -> Result<QueuePair, SetupError> {
        let Self {
            pd,
            send_queue,
            recv_queue,
            srq,
            transport,
            mut caps,
            receives,
            access,
            qkey,
            path,
            number,
        } = self;
        let device = pd.device();
        let (connected, datagram) =
            (matches!(transport, Transport::Rc | Transport::Uc), transport == Transport::Ud);
        if access.is_some() && !connected {
            return Err(SetupError::Unsupported {
                what: "remote access (`access`) on transports but RC and UC",
            });
        }
        if qkey.is_some() && !datagram {
            return Err(SetupError::Unsupported {
                what: "queue key (`qkey`) on transports but UD",
            });
        }
        let recv_queue = match (&srq, recv_queue) {
            (None, asked) => {
                caps.max_recv_wr = receives.unwrap_or(caps.max_recv_wr);
                asked.unwrap_or_else(|| send_queue.clone())
            }
            // Its work request numbers mean something on its completion queue only, which has entries reserved for them.
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
        let (port, gid) = path.choose(device)?;
        let options = QpOptions { transport, caps };
        let (send_cq, recv_cq) = (send_queue.cq(), recv_queue.cq());
        let srq_verbs = srq.as_ref().map(SharedReceiveQueue::verbs);
        let qp = Qp::numbered(&pd, send_cq, recv_cq, srq_verbs, &options, number)?;
        let (granted, qpn) = (qp.caps(), qp.qpn());
        qp.modify(&QpAttr {
            pkey_index: Some(0),
            port: Some(port.port),
            access: connected.then_some(access),
            qkey: datagram.then_some(qkey),
            ..QpAttr::to_state(QpState::Init)
        })?;

        // The depth asked for, not the one granted: completion queue room is set aside by it.
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
        };
        let send = limits(caps.max_send_wr, granted.max_send_sge);
        // A receive may be larger than any message.
        let receive =
            Limits { max_message: u64::MAX, ..limits(caps.max_recv_wr, granted.max_recv_sge) };
        let core = QueuePairCore::new(
            qp,
            (send_queue.shared(), send),
            (recv_queue.shared(), srq.is_none().then_some(receive)),
            srq.map(|srq| Shared::new(srq.work_queue().clone(), srq)),
        )?;
        let span = tracing::info_span!("queue_pair", %qpn, ?transport);
        span.in_scope(|| tracing::debug!(?caps, "created"));
        let local = Local {
            port: port.port,
            gid,
            chosen: matches!(path, Path::From(..)),
            lid: port.lid,
            link_layer: port.link_layer,
            mtu: port.active_mtu,
            reads: device.attr().max_qp_rd_atom.min(device.attr().max_qp_init_rd_atom),
        };
        let inner = Inner {
            send: core.send().clone(),
            core,
            transport,
            qpn,
            caps: granted,
            psn: AtomicU32::new(device.random_psn()?.value()),
            local,
            words: OnceLock::new(),
            span,
            pd,
            queues: [send_queue, recv_queue],
        };
        Ok(QueuePair { inner: Arc::new(inner), flags: SendFlags::empty() })
    }
}

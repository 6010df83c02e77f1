//! DC initiator: made, repaired, and whom it sends to.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::target::path_mtu;
use super::{DcAddress, DcSender};
use crate::dispatch::SendCounters;
use crate::engine::{CompletionQueue, Key, To, WorkQueueCounters};
use crate::error::{LimitError, SetupError};
use crate::op::{ConnectOptions, QueuePair, QueuePairBuilder};
use crate::types::{
    AddressVector, DcKey, Gid, Mtu, PortNum, QpAttr, QpCaps, QpState, Qpn, SendFlags, Transport,
};
use crate::verbs::{AddressHandle, ProtectionDomain};

/// Where dynamic connections begin: a send queue whose work goes to any number of [`DcTarget`](super::DcTarget)s, one after
/// the other. Clones share it.
///
/// ```
/// # use tokio_rdma::dc::DcTarget;
/// # use tokio_rdma::{Access, CompletionMode, CompletionQueue, Device, ExposedRegion, Pool, SharedReceiveQueue};
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let device = Device::software()?;
/// # let pd = device.protection_domain()?;
/// # let queue = CompletionQueue::new(&device, CompletionMode::Event)?;
/// # let receives = SharedReceiveQueue::new(&pd, &queue, 16, 1)?;
/// # let targets = [DcTarget::new(&pd, &receives)?, DcTarget::new(&pd, &receives)?];
/// # let addresses = targets.each_ref().map(DcTarget::address);
/// # let pool = Pool::new(&pd, 64, 4)?;
/// # let region = ExposedRegion::new(&pd, vec![0; 64], Access::REMOTE_WRITE)?;
/// # let remote = region.grant();
/// let initiator = tokio_rdma::dc::DcInitiator::new(&pd, &queue)?;
/// for address in &addresses {
///     let peer = initiator.peer(address)?;
///     initiator.to(&peer).write(pool.copy_from(b"hello")?, remote.slice(..5)?).await?;
/// }
/// # let mut bytes = [0; 5];
/// # region.read(0, &mut bytes)?;
/// # assert_eq!(&bytes, b"hello");
/// # Ok(())
/// # }
/// ```
///
/// Work completes in the order in which it was posted, also that to different targets: one that is slow, or gone, holds up
/// what is behind it. A failure puts the initiator in the error state as a whole, in which all behind it is flushed:
/// [`repair`](Self::repair) brings it back.
///
/// Dropping the last clone ends it at once: what is in flight is flushed or fails as
/// [`OpErrorKind::Closed`](crate::OpErrorKind::Closed), and when the drop returns the device touches no buffer any more.
#[derive(Clone)]
pub struct DcInitiator {
    qp: QueuePair,
    setup: Arc<Setup>,
}

/// What brings it up, again and again.
struct Setup {
    options: ConnectOptions,
    mtu: Mtu,
    reads: u8,
    /// One repair at a time.
    repair: Mutex<()>,
}

/// How long a device may take to flush what is in flight before a reset makes it forget the rest.
const FLUSH: Duration = Duration::from_millis(1);

impl DcInitiator {
    /// An initiator with default settings, ready to send; `queue` takes its completions.
    ///
    /// # Errors
    ///
    /// As [`DcInitiatorBuilder::build`].
    pub fn new(pd: &ProtectionDomain, queue: &CompletionQueue) -> Result<Self, SetupError> {
        Self::builder(pd, queue).build()
    }

    /// An initiator to be described further; `queue` takes its completions.
    #[must_use]
    pub fn builder(pd: &ProtectionDomain, queue: &CompletionQueue) -> DcInitiatorBuilder {
        DcInitiatorBuilder {
            queue_pair: QueuePair::builder(pd, queue).transport(Transport::Dci).max_recv_wr(0),
            options: ConnectOptions::default(),
            mtu: None,
            reads: None,
        }
    }

    #[inline]
    pub(super) fn queue_pair(&self) -> &QueuePair {
        &self.qp
    }

    /// Ends it, as dropping the last clone does.
    pub(super) fn end(&self) {
        self.qp.end();
    }

    /// Its number.
    #[must_use]
    pub fn qpn(&self) -> Qpn {
        self.qp.qpn()
    }

    /// Sizes granted.
    #[must_use]
    pub fn caps(&self) -> QpCaps {
        self.qp.caps()
    }

    /// The protection domain it belongs to.
    #[must_use]
    pub fn protection_domain(&self) -> &ProtectionDomain {
        self.qp.protection_domain()
    }

    /// Largest packet payload it sends.
    #[must_use]
    pub fn mtu(&self) -> Mtu {
        self.setup.mtu
    }

    /// READ and atomic requests it issues at once; more wait, in order.
    #[must_use]
    pub fn reads(&self) -> u8 {
        self.setup.reads
    }

    /// What its send queue has done so far.
    #[must_use]
    pub fn counters(&self) -> WorkQueueCounters {
        self.qp.send_counters()
    }

    /// Packets, retries and sessions so far, if it is of a software device and not closed.
    #[must_use]
    pub fn software_counters(&self) -> Option<SendCounters> {
        self.qp.software_counters().map(|(sent, _)| sent)
    }

    /// A peer to send to: made once from its address, used by any initiator of the same protection domain and port that sends
    /// no larger packets than it takes.
    ///
    /// On RoCE it may be a system call.
    ///
    /// # Errors
    ///
    /// [`SetupError::Mismatch`] if it is on another kind of link, of the other IP version, or takes smaller packets than this
    /// initiator sends ([`DcInitiatorBuilder::mtu`]); [`SetupError::Verb`] if the provider refuses.
    pub fn peer(&self, address: &DcAddress) -> Result<DcPeer, SetupError> {
        let local = self.qp.local();
        self.qp.agree("link layer", local.link_layer, address.link_layer)?;
        self.qp.check_family(address.gid)?;
        if address.mtu < self.setup.mtu {
            let (ours, theirs) =
                (self.setup.mtu.bytes().to_string(), address.mtu.bytes().to_string());
            return Err(SetupError::Mismatch {
                what: "path MTU (see DcInitiatorBuilder::mtu)",
                ours,
                theirs,
            });
        }
        let mut route = AddressVector::new(local.port, local.gid.index, address.gid);
        route.dlid = address.lid;
        let handle = self.protection_domain().address_handle(&route)?;
        Ok(DcPeer { handle, number: address.number, key: address.key, mtu: address.mtu })
    }

    /// Operations to this peer.
    #[inline]
    #[must_use]
    pub fn to<'a>(&'a self, peer: &'a DcPeer) -> DcSender<'a> {
        DcSender { qp: &self.qp, peer, mtu: self.setup.mtu, flags: SendFlags::empty() }
    }

    /// Current state and all attributes that have been set, `ibv_query_qp(3)`.
    ///
    /// # Errors
    ///
    /// [`SetupError::Verb`] if the device refuses, [`SetupError::Closed`] if its completion queue has failed.
    pub fn query(&self) -> Result<(QpState, QpAttr), SetupError> {
        self.qp.query()
    }

    /// Brings it back if it is in the error state, as after any operation that failed with a completion; says whether it
    /// was. Whoever comes second finds it repaired.
    ///
    /// # Errors
    ///
    /// As [`reset`](Self::reset).
    pub fn repair(&self) -> Result<bool, SetupError> {
        let _one_at_a_time = self.setup.repair.lock();
        if self.query()?.0 == QpState::Rts {
            return Ok(false);
        }
        self.start_over()?;
        Ok(true)
    }

    /// Ends all that is in flight and brings it back, in whatever state it is. Operations that the device has not flushed
    /// within a millisecond fail as [`OpErrorKind::Closed`](crate::OpErrorKind::Closed), and so do those that wait for
    /// room. When it returns the device touches no buffer of them any more. An operation that is called meanwhile may be
    /// refused as [`OpErrorKind::State`](crate::OpErrorKind::State).
    ///
    /// # Errors
    ///
    /// [`SetupError::Verb`] if the device refuses, [`SetupError::Closed`] if its completion queue has failed.
    pub fn reset(&self) -> Result<(), SetupError> {
        let _one_at_a_time = self.setup.repair.lock();
        self.start_over()
    }

    fn start_over(&self) -> Result<(), SetupError> {
        // A reset takes completions along that nobody has seen, which say more than that they are gone.
        if let Err(error) = self.qp.modify(&QpAttr::to_state(QpState::Err)) {
            tracing::debug!(qpn = %self.qpn(), %error, "not moved to the error state before it is reset");
        }
        let end = Instant::now() + FLUSH;
        while {
            self.qp.take_completions();
            self.counters().in_flight > 0 && Instant::now() < end
        } {
            std::thread::yield_now();
        }
        self.qp.modify(&QpAttr::to_state(QpState::Reset))?;
        let port = self.qp.local().port;
        self.qp.modify(&QpAttr {
            pkey_index: Some(0),
            port: Some(port),
            ..QpAttr::to_state(QpState::Init)
        })?;
        self.bring_up()
    }

    /// From INIT to RTS.
    fn bring_up(&self) -> Result<(), SetupError> {
        let Setup { options, mtu, reads, .. } = *self.setup;
        let local = self.qp.local();
        self.qp.modify(&QpAttr {
            // Where packets leave from: the way to its target is named by each work request.
            address: Some(AddressVector::new(local.port, local.gid.index, local.gid.gid)),
            path_mtu: Some(mtu),
            ..QpAttr::to_state(QpState::Rtr)
        })?;
        self.qp.modify(&QpAttr {
            sq_psn: Some(self.qp.endpoint().psn),
            timeout: Some(options.timeout),
            retry_count: Some(options.retry_count),
            rnr_retry: Some(options.rnr_retry),
            max_rd_atomic: Some(reads),
            ..QpAttr::to_state(QpState::Rts)
        })
    }
}

impl fmt::Debug for DcInitiator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DcInitiator")
            .field("qpn", &self.qpn())
            .field("mtu", &self.setup.mtu)
            .field("counters", &self.counters())
            .finish_non_exhaustive()
    }
}

/// A [`DcTarget`](super::DcTarget) of a peer, as initiators name it: its route, number and key. Cheap to clone; work in
/// line keeps what it needs of it.
#[derive(Debug, Clone)]
pub struct DcPeer {
    pub(super) handle: AddressHandle,
    number: Qpn,
    key: DcKey,
    /// Largest packet payload that it takes.
    pub(super) mtu: Mtu,
}

impl DcPeer {
    /// Number of the target.
    #[must_use]
    pub fn number(&self) -> Qpn {
        self.number
    }

    /// The route to it.
    #[must_use]
    pub fn route(&self) -> &AddressVector {
        self.handle.address()
    }

    #[inline]
    pub(super) fn receiver(&self) -> To<'_> {
        To { handle: &self.handle, number: self.number, key: Key::Dc(self.key) }
    }
}

/// Describes a [`DcInitiator`].
#[derive(Debug, Clone)]
pub struct DcInitiatorBuilder {
    queue_pair: QueuePairBuilder,
    options: ConnectOptions,
    mtu: Option<Mtu>,
    reads: Option<u8>,
}

impl DcInitiatorBuilder {
    /// Work requests the send queue holds; 128 unless set. More operations wait for room.
    #[must_use]
    pub fn max_send_wr(mut self, work_requests: u32) -> Self {
        self.queue_pair = self.queue_pair.max_send_wr(work_requests);
        self
    }

    /// Scatter/gather elements of a work request, that is buffers in a `Vec`; 4 unless set.
    #[must_use]
    pub fn max_sge(mut self, elements: u32) -> Self {
        self.queue_pair = self.queue_pair.max_sge(elements);
        self
    }

    /// Most bytes that can be sent inline; 64 unless set. Devices take queue memory for it.
    #[must_use]
    pub fn max_inline(mut self, bytes: u32) -> Self {
        self.queue_pair = self.queue_pair.max_inline(bytes);
        self
    }

    /// Timeouts and retries; those of [`ConnectOptions`] unless set, but its `rnr_timer`, which is the target's.
    #[must_use]
    pub fn options(mut self, options: ConnectOptions) -> Self {
        self.options = options;
        self
    }

    /// Largest packet payload; the port's unless set. Targets must not have a smaller one.
    #[must_use]
    pub fn mtu(mut self, mtu: Mtu) -> Self {
        self.mtu = Some(mtu);
        self
    }

    /// READ and atomic requests issued at once; unless set, as many as a target on a device like ours serves. It must not be
    /// more than any target's device serves.
    #[must_use]
    pub fn reads(mut self, requests: u8) -> Self {
        self.reads = Some(requests);
        self
    }

    /// Chooses port and GID to reach this peer, as [`QueuePairBuilder::peer`].
    #[must_use]
    pub fn peer(mut self, peer: impl Into<Gid>) -> Self {
        self.queue_pair = self.queue_pair.peer(peer);
        self
    }

    /// Sends from this entry of this port's GID table, whatever [`Device::gids`](crate::Device::gids) prefers.
    #[must_use]
    pub fn source(mut self, port: PortNum, gid_index: u8) -> Self {
        self.queue_pair = self.queue_pair.source(port, gid_index);
        self
    }

    /// Makes it, in RTS: ready to send.
    ///
    /// # Errors
    ///
    /// [`SetupError::Unsupported`] if the device has no DC ([`DeviceAttr::dc`](crate::types::DeviceAttr::dc)),
    /// [`SetupError::Limit`] beyond a limit of the device, else as [`QueuePairBuilder::build`].
    pub fn build(self) -> Result<DcInitiator, SetupError> {
        let Self { queue_pair, options, mtu, reads } = self;
        options.check()?;
        let qp = queue_pair.build_any()?;
        let Some(dc) = qp.protection_domain().device().attr().dc else {
            return Err(SetupError::Unsupported { what: "dynamically connected transport (DC)" });
        };
        let reads = match reads {
            Some(reads) => {
                LimitError::check("reads", reads.into(), dc.max_init_rd_atomic.into())?;
                reads
            }
            None => dc.max_init_rd_atomic.min(dc.max_rd_atomic),
        };
        let mtu = path_mtu(mtu, qp.local().mtu)?;
        let initiator = DcInitiator {
            qp,
            setup: Arc::new(Setup { options, mtu, reads, repair: Mutex::new(()) }),
        };
        initiator.bring_up()?;
        Ok(initiator)
    }
}

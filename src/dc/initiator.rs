use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rdma_provider::locks::Mutex;

use super::DcAddress;
use super::target::path_mtu;
use crate::dispatch::SendCounters;
use crate::engine::{CompletionQueue, Receiver, ReceiverKey, WorkQueueCounters};
use crate::error::{LimitError, OpErrorKind, SetupError};
use crate::op::{Destination, PathConfig, Posting, QueuePair, QueuePairBuilder, RetryConfig};
use crate::types::{
    AddressVector, DcKey, Gid, Mtu, PortNum, QpAttr, QpCaps, QpState, Qpn, Transport,
};
use crate::verbs::{AddressHandle, ProtectionDomain};

/// A send queue for any number of targets; [`DcTarget`](super::DcTarget) has an example. Clones
/// refer to the same initiator. Dropping the last one closes it like a [`QueuePair`].
///
/// Work completes in the order of posting, so a slow or unreachable target delays later work to
/// all. A failure moves the initiator to the error state and flushes all later work;
/// [`repair`](Self::repair) restores it.
#[derive(Clone)]
pub struct DcInitiator {
    qp: QueuePair,
    setup: Arc<Setup>,
}

struct Setup {
    retries: RetryConfig,
    mtu: Mtu,
    reads: u8,
    repair: Mutex<()>,
}

/// Time to flush the work in flight; a reset discards the rest.
const FLUSH: Duration = Duration::from_millis(1);

impl DcInitiator {
    /// Creates an initiator with default settings.
    ///
    /// # Errors
    ///
    /// As for [`DcInitiatorBuilder::build`].
    pub fn new(pd: &ProtectionDomain, queue: &CompletionQueue) -> Result<Self, SetupError> {
        Self::builder(pd, queue).build()
    }

    /// Returns a builder for an initiator. `queue` receives its completions.
    pub fn builder(pd: &ProtectionDomain, queue: &CompletionQueue) -> DcInitiatorBuilder {
        DcInitiatorBuilder {
            queue_pair: QueuePair::builder(pd, queue).transport(Transport::Dci).max_recv_wr(0),
            retries: RetryConfig::default(),
            mtu: None,
            reads: None,
        }
    }

    #[inline]
    pub(super) fn queue_pair(&self) -> &QueuePair {
        &self.qp
    }

    /// Returns the queue pair number.
    #[must_use]
    pub fn qpn(&self) -> Qpn {
        self.qp.qpn()
    }

    /// Returns the granted sizes.
    #[must_use]
    pub fn caps(&self) -> QpCaps {
        self.qp.caps()
    }

    /// Returns the protection domain.
    #[must_use]
    pub fn protection_domain(&self) -> &ProtectionDomain {
        self.qp.protection_domain()
    }

    /// Returns the maximum packet payload.
    #[must_use]
    pub fn mtu(&self) -> Mtu {
        self.setup.mtu
    }

    /// Returns the maximum of READs and atomics in flight.
    #[must_use]
    pub fn reads(&self) -> u8 {
        self.setup.reads
    }

    /// Returns the counters of the send queue.
    #[must_use]
    pub fn counters(&self) -> WorkQueueCounters {
        self.qp.send_counters()
    }

    /// Returns the counters of a software device; `None` on hardware or after closing.
    #[must_use]
    pub fn software_counters(&self) -> Option<SendCounters> {
        self.qp.software_counters().map(|(sent, _)| sent)
    }

    /// Creates a peer, for all initiators of this protection domain and port whose MTU it accepts.
    /// On RoCE this may take a system call.
    ///
    /// # Errors
    ///
    /// [`SetupError::Mismatch`] if link layer or IP version differ, or if the peer's MTU is smaller
    /// than the [initiator's](DcInitiatorBuilder::mtu).
    pub fn peer(&self, address: &DcAddress) -> Result<DcPeer, SetupError> {
        let local = self.qp.local();
        self.qp.require_equal(
            "link layers of the initiator and the peer",
            local.link_layer,
            address.link_layer,
        )?;
        self.qp.check_family(address.gid)?;
        if address.mtu < self.setup.mtu {
            let what = "path MTUs of the initiator and the peer (lower DcInitiatorBuilder::mtu)";
            let (ours, theirs) = (self.setup.mtu.bytes(), address.mtu.bytes());
            return Err(SetupError::mismatch(what, ours, theirs));
        }
        let route = local.route_to(address.gid, address.lid);
        let handle = self.protection_domain().address_handle(&route)?;
        let DcAddress { number, key, mtu, .. } = *address;
        Ok(DcPeer { handle, number, key, mtu })
    }

    /// Returns the operations to this peer. They work like the methods of [`QueuePair`], on a
    /// reliable connection that the device makes on demand. A fence applies to all peers.
    ///
    /// # Errors
    ///
    /// The operations have the errors of a [`QueuePair`], and these:
    ///
    /// - For a wrong access key, or a target that no longer exists, the device reports
    ///   [`RETRY_EXC_ERR`](crate::types::WcStatus::RETRY_EXC_ERR) or another status.
    /// - A peer of another protection domain is refused with [`OpErrorKind::Foreign`], a peer on
    ///   another port with [`OpErrorKind::Unsupported`], and a peer with a smaller MTU than the
    ///   initiator with [`OpErrorKind::Limit`].
    #[inline]
    pub fn to<'a>(&'a self, peer: &'a DcPeer) -> Posting<Destination<'a>> {
        Posting::new(self.destination(peer))
    }

    pub(super) fn destination<'a>(&'a self, peer: &'a DcPeer) -> Destination<'a> {
        match self.refusal(peer) {
            Some(kind) => Destination::refused(kind),
            None => Destination::new(&self.qp.inner, Some(peer.receiver())),
        }
    }

    fn refusal(&self, peer: &DcPeer) -> Option<OpErrorKind> {
        if !peer.handle.protection_domain().same(self.qp.protection_domain()) {
            return Some(OpErrorKind::Foreign { what: "DC peer" });
        }
        if peer.route().port != self.qp.local().port {
            return Some(OpErrorKind::Unsupported { what: "a DC peer on another port" });
        }
        LimitError::check(
            "path MTU to the DC peer",
            self.setup.mtu.bytes() as u64,
            peer.mtu.bytes() as u64,
        )
        .err()
        .map(OpErrorKind::Limit)
    }

    /// Returns the state and all attributes set so far, `ibv_query_qp(3)`.
    ///
    /// # Errors
    ///
    /// [`SetupError::Closed`].
    pub fn query(&self) -> Result<(QpState, QpAttr), SetupError> {
        self.qp.query()
    }

    /// Calls [`reset`](Self::reset) unless the initiator is in state RTS, and returns true if it
    /// did. Concurrent calls reset it once.
    ///
    /// # Errors
    ///
    /// As for `reset`.
    pub fn repair(&self) -> Result<bool, SetupError> {
        let _one_at_a_time = self.setup.repair.lock();
        if self.query()?.0 == QpState::Rts {
            return Ok(false);
        }
        self.restart()?;
        Ok(true)
    }

    /// Makes the initiator ready to send, from any state, and ends all its operations.
    ///
    /// The device flushes operations in flight for up to 1 ms. The others fail with
    /// [`OpErrorKind::Closed`], and the device no longer accesses their buffers. Concurrent
    /// operations may fail with [`OpErrorKind::State`].
    ///
    /// # Errors
    ///
    /// [`SetupError::Closed`], or [`SetupError::NoPkey`] if the port has lost the partition.
    pub fn reset(&self) -> Result<(), SetupError> {
        let _one_at_a_time = self.setup.repair.lock();
        self.restart()
    }

    fn restart(&self) -> Result<(), SetupError> {
        // First to the error state, because a reset would discard completions, which carry the
        // reason of the failure.
        if let Err(error) = self.qp.modify(&QpAttr::to_state(QpState::Err)) {
            rdma_provider::debug!(
                qpn = %self.qpn(),
                %error,
                "failed to move DC initiator to the error state; resetting it without a flush"
            );
        }
        let end = Instant::now() + FLUSH;
        while {
            self.qp.drain_completions();
            self.counters().in_flight > 0 && Instant::now() < end
        } {
            std::thread::yield_now();
        }
        self.qp.modify(&QpAttr::to_state(QpState::Reset))?;
        let local = self.qp.local();
        // The table of the port may have changed.
        let device = self.qp.protection_domain().device();
        let port = device.known_port(local.port)?;
        let partition = local.path.partition(device, &port)?;
        self.qp.modify(&QpAttr {
            pkey_index: Some(partition.unwrap_or(0)),
            port: Some(local.port),
            ..QpAttr::to_state(QpState::Init)
        })?;
        self.move_to_rts()
    }

    fn move_to_rts(&self) -> Result<(), SetupError> {
        let Setup { retries, mtu, reads, .. } = *self.setup;
        let local = self.qp.local();
        self.qp.modify(&QpAttr {
            // The source of packets; each work request names its route.
            address: Some(local.route_to(local.gid.gid, 0)),
            path_mtu: Some(mtu),
            ..QpAttr::to_state(QpState::Rtr)
        })?;
        self.qp.modify(&QpAttr {
            sq_psn: Some(self.qp.endpoint().psn),
            timeout: Some(retries.timeout),
            retry_count: Some(retries.retry_count),
            rnr_retry: Some(retries.rnr_retry),
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

/// The route, number and key of a [`DcTarget`](super::DcTarget). Clones are cheap.
#[derive(Debug, Clone)]
pub struct DcPeer {
    pub(super) handle: AddressHandle,
    number: Qpn,
    key: DcKey,
    pub(super) mtu: Mtu,
}

impl DcPeer {
    /// Returns the DC target number.
    #[must_use]
    pub fn number(&self) -> Qpn {
        self.number
    }

    /// Returns the route.
    #[must_use]
    pub fn route(&self) -> &AddressVector {
        self.handle.address()
    }

    #[inline]
    pub(super) fn receiver(&self) -> Receiver<'_> {
        Receiver { handle: &self.handle, number: self.number, key: ReceiverKey::Dc(self.key) }
    }
}

/// A builder for a [`DcInitiator`].
#[derive(Debug, Clone)]
#[must_use]
pub struct DcInitiatorBuilder {
    queue_pair: QueuePairBuilder,
    retries: RetryConfig,
    mtu: Option<Mtu>,
    reads: Option<u8>,
}

impl DcInitiatorBuilder {
    /// Sets the capacity like [`QueuePairBuilder::max_send_wr`].
    pub fn max_send_wr(mut self, work_requests: u32) -> Self {
        self.queue_pair = self.queue_pair.max_send_wr(work_requests);
        self
    }

    /// Sets the scatter/gather elements like [`QueuePairBuilder::max_sge`].
    pub fn max_sge(mut self, elements: u32) -> Self {
        self.queue_pair = self.queue_pair.max_sge(elements);
        self
    }

    /// Sets the inline bytes like [`QueuePairBuilder::max_inline`].
    pub fn max_inline(mut self, bytes: u32) -> Self {
        self.queue_pair = self.queue_pair.max_inline(bytes);
        self
    }

    /// Sets timeouts and retries. The target's `rnr_timer` applies instead of this one.
    pub fn retries(mut self, retries: RetryConfig) -> Self {
        self.retries = retries;
        self
    }

    /// Sets the maximum packet payload, which all targets must accept; default the MTU of the port.
    pub fn mtu(mut self, mtu: Mtu) -> Self {
        self.mtu = Some(mtu);
        self
    }

    /// Sets the maximum of READs and atomics in flight, which the devices of all targets must
    /// support. The default suits targets on the same model of device.
    pub fn reads(mut self, requests: u8) -> Self {
        self.reads = Some(requests);
        self
    }

    /// Sets the path of packets to all peers, like [`QueuePairBuilder::path`]. Its MTU limit lowers
    /// the default of [`mtu`](Self::mtu), which must not exceed it.
    pub fn path(mut self, path: PathConfig) -> Self {
        self.queue_pair = self.queue_pair.path(path);
        self
    }

    /// Chooses port and GID like [`QueuePairBuilder::peer`].
    pub fn peer(mut self, peer: impl Into<Gid>) -> Self {
        self.queue_pair = self.queue_pair.peer(peer);
        self
    }

    /// Sets port and GID index like [`QueuePairBuilder::source`].
    pub fn source(mut self, port: PortNum, gid_index: u8) -> Self {
        self.queue_pair = self.queue_pair.source(port, gid_index);
        self
    }

    /// Creates the initiator in state RTS.
    ///
    /// # Errors
    ///
    /// As for [`QueuePairBuilder::build`]; [`SetupError::Unsupported`] also if the device does not
    /// support DC ([`DeviceAttr::dc`](crate::types::DeviceAttr::dc)).
    pub fn build(self) -> Result<DcInitiator, SetupError> {
        let Self { queue_pair, retries, mtu, reads } = self;
        retries.check()?;
        let dc = queue_pair.device().dc()?;
        let qp = queue_pair.build_any()?;
        let reads = reads.unwrap_or(dc.max_init_rd_atomic.min(dc.max_rd_atomic));
        LimitError::check("reads", reads.into(), dc.max_init_rd_atomic.into())?;
        let mtu = path_mtu(mtu, qp.local().mtu)?;
        let initiator = DcInitiator {
            qp,
            setup: Arc::new(Setup { retries, mtu, reads, repair: Mutex::new(()) }),
        };
        initiator.move_to_rts()?;
        Ok(initiator)
    }
}

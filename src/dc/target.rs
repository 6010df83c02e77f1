use std::fmt;
use std::sync::Arc;

use super::DcAddress;
use crate::dispatch::TargetCounters;
use crate::engine::{SharedReceives, TargetCore};
use crate::error::{LimitError, SetupError, VerbError};
use crate::op::{PathConfig, SharedReceiveQueue, Source};
use crate::types::{
    Access, AddressVector, DcKey, Gid, Mtu, PortNum, QpAttr, QpState, Qpn, RnrTimer,
};
use crate::verbs::{Dct, ProtectionDomain};

/// The receiving end of dynamic connections from any number of peers. Clones refer to the same
/// target.
///
/// Peers that have its [`address`](Self::address) access memory exposed in its protection domain
/// and send to its shared receive queue, where [`Received::qpn`](crate::op::Received::qpn) is the
/// number of the target.
///
/// ```
/// use tokio_rdma::Access;
/// use tokio_rdma::dc::{DcInitiator, DcTarget};
/// # use tokio_rdma::*;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let pd = Device::software()?.protection_domain()?;
/// # let queue = CompletionQueue::new(pd.device(), CompletionMode::Event)?;
/// # let pool = Pool::new(&pd, 64, 4)?;
/// let receives = SharedReceiveQueue::new(&pd, &queue, 16, 1)?;
/// let target = DcTarget::builder(&pd, &receives).access(Access::REMOTE_WRITE).build()?;
/// let receive = receives.recv(pool.alloc(64).await?);
///
/// // The peer reaches the target by its address, `DcAddress::to_bytes`.
/// let initiator = DcInitiator::new(&pd, &queue)?;
/// let peer = initiator.peer(&target.address())?;
/// initiator.to(&peer).send(pool.copy_from(b"hello")?).await?;
///
/// let received = receive.await?;
/// assert_eq!((received.qpn, &received.buffer[..]), (target.number(), &b"hello"[..]));
/// # Ok(())
/// # }
/// ```
///
/// # Closing
///
/// Dropping the last clone destroys the target: peers can reach nothing through it, and their work
/// fails when retries are exhausted. With the software device, every acknowledged message has then
/// been received. On an adapter, a message that arrives at that moment may consume a receive, which
/// completes only when the shared receive queue is destroyed.
#[derive(Clone)]
pub struct DcTarget {
    inner: Arc<Inner>,
}

struct Inner {
    core: Arc<TargetCore>,
    address: DcAddress,
    pd: ProtectionDomain,
    srq: SharedReceiveQueue,
}

impl DcTarget {
    /// Creates a target with default settings.
    ///
    /// # Errors
    ///
    /// As for [`DcTargetBuilder::build`].
    pub fn new(pd: &ProtectionDomain, srq: &SharedReceiveQueue) -> Result<Self, SetupError> {
        Self::builder(pd, srq).build()
    }

    /// Returns a builder for a target.
    pub fn builder(pd: &ProtectionDomain, srq: &SharedReceiveQueue) -> DcTargetBuilder {
        DcTargetBuilder {
            pd: pd.clone(),
            srq: srq.clone(),
            access: Access::REMOTE_ALL,
            mtu: None,
            rnr_timer: RnrTimer::from_code(12),
            key: None,
            source: Source::Any,
            path: PathConfig::default(),
        }
    }

    /// Returns the address for peers.
    #[must_use]
    pub fn address(&self) -> DcAddress {
        self.inner.address
    }

    /// Returns the DC target number.
    #[must_use]
    pub fn number(&self) -> Qpn {
        self.inner.address.number
    }

    /// Returns the protection domain.
    #[must_use]
    pub fn protection_domain(&self) -> &ProtectionDomain {
        &self.inner.pd
    }

    /// Returns the shared receive queue.
    #[must_use]
    pub fn shared_receive_queue(&self) -> &SharedReceiveQueue {
        &self.inner.srq
    }

    /// Returns the state and all attributes set so far, `ibv_query_qp(3)`.
    ///
    /// # Errors
    ///
    /// [`SetupError::Closed`].
    pub fn query(&self) -> Result<(QpState, QpAttr), SetupError> {
        Ok(self.inner.core.with_dct(Dct::query)??)
    }

    /// Returns the counters of a software device; `None` on hardware or after closing.
    #[must_use]
    pub fn software_counters(&self) -> Option<TargetCounters> {
        self.inner.core.with_dct(Dct::software_counters).ok()?
    }
}

impl fmt::Debug for DcTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DcTarget").field("address", &self.inner.address).finish_non_exhaustive()
    }
}

/// A builder for a [`DcTarget`], which has an example.
#[derive(Debug, Clone)]
#[must_use]
pub struct DcTargetBuilder {
    pd: ProtectionDomain,
    srq: SharedReceiveQueue,
    access: Access,
    mtu: Option<Mtu>,
    rnr_timer: RnrTimer,
    key: Option<DcKey>,
    source: Source,
    path: PathConfig,
}

impl DcTargetBuilder {
    /// Sets the access of peers to regions of the protection domain; all rights by default.
    pub fn access(mut self, access: Access) -> Self {
        self.access = access;
        self
    }

    /// Sets the maximum packet payload for initiators; default the MTU of the port.
    pub fn mtu(mut self, mtu: Mtu) -> Self {
        self.mtu = Some(mtu);
        self
    }

    /// Sets how long a peer waits before it retries a message without a receive; default 0.64 ms.
    pub fn rnr_timer(mut self, timer: RnrTimer) -> Self {
        self.rnr_timer = timer;
        self
    }

    /// Sets the access key; random by default.
    pub fn key(mut self, key: DcKey) -> Self {
        self.key = Some(key);
        self
    }

    /// Sets the path of responses. Its MTU limit lowers the default of [`mtu`](Self::mtu), which
    /// must not exceed it.
    pub fn path(mut self, path: PathConfig) -> Self {
        self.path = path;
        self
    }

    /// Chooses port and GID like [`QueuePairBuilder::peer`](crate::op::QueuePairBuilder::peer).
    pub fn peer(mut self, peer: impl Into<Gid>) -> Self {
        self.source = Source::To(peer.into());
        self
    }

    /// Sets port and GID index like
    /// [`QueuePairBuilder::source`](crate::op::QueuePairBuilder::source).
    pub fn source(mut self, port: PortNum, gid_index: u8) -> Self {
        self.source = Source::From(port, gid_index);
        self
    }

    /// Creates the target in state RTR.
    ///
    /// # Errors
    ///
    /// As for [`QueuePairBuilder::build`](crate::op::QueuePairBuilder::build), and:
    ///
    /// - [`SetupError::Unsupported`] if the device does not support DC
    ///   ([`DeviceAttr::dc`](crate::types::DeviceAttr::dc)).
    /// - [`SetupError::Limit`] if the MTU exceeds the MTU of the port or of the path.
    pub fn build(self) -> Result<DcTarget, SetupError> {
        let Self { pd, srq, access, mtu, rnr_timer, key, source, path } = self;
        let path = path.resolved()?;
        let device = pd.device();
        let (port, gid) = source.choose(device)?;
        let mtu = path_mtu(mtu, path.limited(port.active_mtu))?;
        let pkey_index = path.partition(device, &port)?.unwrap_or(0);
        let key = match key {
            Some(key) => key,
            None => DcKey(device.random()?),
        };
        let dct = Dct::new(&pd, srq.completion_queue().cq(), srq.verbs(), key)?;
        // Before the target can consume receives. This fails if the completion queue has failed,
        // because it may have returned their buffers.
        let core =
            TargetCore::new(dct, SharedReceives::new(srq.work_queue().clone(), srq.clone()))?;
        let init = QpAttr {
            pkey_index: Some(pkey_index),
            port: Some(port.port),
            access: Some(access),
            ..QpAttr::to_state(QpState::Init)
        };
        let address = AddressVector::new(port.port, gid.index, gid.gid);
        let rtr = QpAttr {
            // The source of responses: the device uses only the local side of the route.
            address: Some(path.applied(address)),
            path_mtu: Some(mtu),
            min_rnr_timer: Some(rnr_timer),
            ..QpAttr::to_state(QpState::Rtr)
        };
        core.with_dct(|dct| dct.modify(&init).and_then(|()| dct.modify(&rtr)))??;
        let Some(number) = core.with_dct(Dct::number)? else {
            return Err(VerbError::new("reading the number of a DC target", VerbError::EIO).into());
        };
        rdma_provider::debug!(%number, gid = %gid.gid, "created DC target");
        let address = DcAddress {
            number,
            key,
            gid: gid.gid,
            lid: port.lid,
            link_layer: port.link_layer,
            mtu,
        };
        Ok(DcTarget { inner: Arc::new(Inner { core, address, pd, srq }) })
    }
}

pub(super) fn path_mtu(asked: Option<Mtu>, active: Mtu) -> Result<Mtu, SetupError> {
    let mtu = asked.unwrap_or(active);
    LimitError::check("path MTU", mtu.bytes() as u64, active.bytes() as u64)?;
    Ok(mtu)
}

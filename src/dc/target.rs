//! DC target: made, and known by its address.

use std::fmt;
use std::sync::Arc;

use super::DcAddress;
use crate::dispatch::TargetCounters;
use crate::engine::{Shared, TargetCore};
use crate::error::SetupError;
use crate::op::{Path, SharedReceiveQueue};
use crate::types::{
    Access, AddressVector, DcKey, Gid, Mtu, PortNum, QpAttr, QpState, Qpn, RnrTimer,
};
use crate::verbs::{Dct, ProtectionDomain};

/// Where dynamic connections end: whoever has its [`address`](Self::address) reads and writes memory exposed in its
/// protection domain, and sends messages to its shared receive queue. One is enough for any number of peers. Clones share it.
///
/// Messages arrive in [`SharedReceiveQueue::recv`], with the number of the target as [`Received::qpn`](crate::op::Received::qpn).
///
/// ```
/// use tokio_rdma::dc::{DcInitiator, DcTarget};
/// # use tokio_rdma::{CompletionMode, CompletionQueue, Device, Pool, SharedReceiveQueue};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let device = Device::software()?;
/// # let pd = device.protection_domain()?;
/// # let queue = CompletionQueue::new(&device, CompletionMode::Event)?;
/// # let pool = Pool::new(&pd, 64, 4)?;
/// let receives = SharedReceiveQueue::new(&pd, &queue, 16, 1)?;
/// let target = DcTarget::new(&pd, &receives)?;
/// let receive = receives.recv(pool.alloc(64).await?);
///
/// // The peer knows the target by its address, `DcAddress::to_bytes`.
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
/// Dropping the last clone destroys it: when the drop returns no peer reaches anything through it any more. Their work fails
/// when retries run out. With the software device a message that was acknowledged has arrived; on an adapter one that is
/// arriving just then may take its receive along, which ends with the shared receive queue.
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
    /// A target with default settings, ready for peers, which draws receives from `srq`.
    ///
    /// # Errors
    ///
    /// As [`DcTargetBuilder::build`].
    pub fn new(pd: &ProtectionDomain, srq: &SharedReceiveQueue) -> Result<Self, SetupError> {
        Self::builder(pd, srq).build()
    }

    /// A target to be described further.
    #[must_use]
    pub fn builder(pd: &ProtectionDomain, srq: &SharedReceiveQueue) -> DcTargetBuilder {
        DcTargetBuilder {
            pd: pd.clone(),
            srq: srq.clone(),
            access: Access::REMOTE_ALL,
            mtu: None,
            rnr_timer: RnrTimer::from_code(12),
            key: None,
            path: Path::Any,
        }
    }

    /// What a peer needs to reach it. It holds the access key: who has it may do what the target allows.
    #[must_use]
    pub fn address(&self) -> DcAddress {
        self.inner.address
    }

    /// Its number.
    #[must_use]
    pub fn number(&self) -> Qpn {
        self.inner.address.number
    }

    /// The protection domain it belongs to.
    #[must_use]
    pub fn protection_domain(&self) -> &ProtectionDomain {
        &self.inner.pd
    }

    /// Where its messages arrive.
    #[must_use]
    pub fn shared_receive_queue(&self) -> &SharedReceiveQueue {
        &self.inner.srq
    }

    /// Current state and all attributes that have been set, `ibv_query_qp(3)`.
    ///
    /// # Errors
    ///
    /// [`SetupError::Verb`] if the device refuses, [`SetupError::Closed`] if the completion queue of its receives has failed.
    pub fn query(&self) -> Result<(QpState, QpAttr), SetupError> {
        Ok(self.inner.core.ask(Dct::query)??)
    }

    /// Packets, sessions and refusals so far, if it is of a software device and not closed.
    #[must_use]
    pub fn software_counters(&self) -> Option<TargetCounters> {
        self.inner.core.ask(Dct::software_counters).ok()?
    }
}

impl fmt::Debug for DcTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DcTarget").field("address", &self.inner.address).finish_non_exhaustive()
    }
}

/// Describes a [`DcTarget`].
///
/// ```
/// use tokio_rdma::dc::DcTarget;
/// use tokio_rdma::types::{DcKey, Mtu};
/// # use tokio_rdma::{Access, CompletionMode, CompletionQueue, Device, SharedReceiveQueue};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let device = Device::software()?;
/// # let pd = device.protection_domain()?;
/// # let queue = CompletionQueue::new(&device, CompletionMode::Event)?;
/// # let receives = SharedReceiveQueue::new(&pd, &queue, 16, 1)?;
/// let target = DcTarget::builder(&pd, &receives)
///     .access(Access::REMOTE_READ)
///     .mtu(Mtu::Mtu1024)
///     .key(DcKey(0x5eed))
///     .build()?;
/// assert_eq!(target.address().mtu, Mtu::Mtu1024);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct DcTargetBuilder {
    pd: ProtectionDomain,
    srq: SharedReceiveQueue,
    access: Access,
    mtu: Option<Mtu>,
    rnr_timer: RnrTimer,
    key: Option<DcKey>,
    path: Path,
}

impl DcTargetBuilder {
    /// What peers may do to regions exposed in the same protection domain; everything unless set.
    #[must_use]
    pub fn access(mut self, access: Access) -> Self {
        self.access = access;
        self
    }

    /// Largest packet payload; the port's unless set. Initiators must not have a larger one.
    #[must_use]
    pub fn mtu(mut self, mtu: Mtu) -> Self {
        self.mtu = Some(mtu);
        self
    }

    /// Time that a peer waits before it repeats what found no receive posted. 0.64 ms unless set.
    #[must_use]
    pub fn rnr_timer(mut self, timer: RnrTimer) -> Self {
        self.rnr_timer = timer;
        self
    }

    /// The access key; drawn at random unless set. It is a secret like a memory key: who knows it and the number of the
    /// target may use it.
    #[must_use]
    pub fn key(mut self, key: DcKey) -> Self {
        self.key = Some(key);
        self
    }

    /// Chooses port and GID to be reached by this peer, as [`QueuePairBuilder::peer`](crate::op::QueuePairBuilder::peer).
    #[must_use]
    pub fn peer(mut self, peer: impl Into<Gid>) -> Self {
        self.path = Path::To(peer.into());
        self
    }

    /// Is reached at this entry of this port's GID table, whatever [`Device::gids`](crate::Device::gids) prefers.
    #[must_use]
    pub fn source(mut self, port: PortNum, gid_index: u8) -> Self {
        self.path = Path::From(port, gid_index);
        self
    }

    /// Makes it, in RTR: peers can reach it.
    ///
    /// # Errors
    ///
    /// [`SetupError::Unsupported`] if the device has no DC ([`DeviceAttr::dc`](crate::types::DeviceAttr::dc)),
    /// [`SetupError::Foreign`] if the shared receive queue is of another protection domain, [`SetupError::NoGid`] without an
    /// active port or the entry asked for, [`SetupError::Limit`] for an MTU above the port's,
    /// [`SetupError::Verb`] if the provider refuses.
    pub fn build(self) -> Result<DcTarget, SetupError> {
        let Self { pd, srq, access, mtu, rnr_timer, key, path } = self;
        let device = pd.device();
        let (port, gid) = path.choose(device)?;
        let mtu = path_mtu(mtu, port.active_mtu)?;
        let key = match key {
            Some(key) => key,
            None => DcKey(device.random()?),
        };
        let dct = Dct::new(&pd, srq.completion_queue().cq(), srq.verbs(), key)?;
        // Before it takes any receive: a completion queue that has failed may have given them back.
        let core = TargetCore::new(dct, Shared::new(srq.work_queue().clone(), srq.clone()))?;
        let init = QpAttr {
            pkey_index: Some(0),
            port: Some(port.port),
            access: Some(access),
            ..QpAttr::to_state(QpState::Init)
        };
        let rtr = QpAttr {
            // Where answers leave from: of the route the device wants to know our end only.
            address: Some(AddressVector::new(port.port, gid.index, gid.gid)),
            path_mtu: Some(mtu),
            min_rnr_timer: Some(rnr_timer),
            ..QpAttr::to_state(QpState::Rtr)
        };
        core.ask(|dct| dct.modify(&init).and_then(|()| dct.modify(&rtr)))??;
        let Some(number) = core.ask(Dct::number)? else {
            return Err(crate::error::VerbError::new(
                "number of a DC target in RTR",
                crate::error::VerbError::EIO,
            )
            .into());
        };
        tracing::debug!(%number, gid = %gid.gid, "DC target");
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

/// The port's MTU, or a smaller one that was asked for.
pub(super) fn path_mtu(asked: Option<Mtu>, active: Mtu) -> Result<Mtu, SetupError> {
    let mtu = asked.unwrap_or(active);
    crate::error::LimitError::check("path MTU", mtu.bytes() as u64, active.bytes() as u64)?;
    Ok(mtu)
}

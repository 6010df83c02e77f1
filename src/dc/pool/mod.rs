//! Many peers, few initiators: whoever has work for a peer borrows one.

mod core;
mod peer;
mod pooled;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

pub use self::peer::{DcLease, DcPoolPeer, PendingDcLease};
pub use self::pooled::Pooled;

use self::core::Core;
use super::{DcAddress, DcInitiator, DcInitiatorBuilder};
use crate::engine::{CompletionQueue, WorkQueueCounters};
use crate::error::SetupError;
use crate::types::Qpn;
use crate::verbs::ProtectionDomain;

/// Who uses an initiator of a [`DcPool`] at the same time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum DcPolicy {
    /// One peer: an initiator has work in flight for one peer only, and so an error ends operations to that peer only. It
    /// stays with its peer until another one needs it, and goes to that when it is idle. If none is idle, peers wait in a line,
    /// first in, first out; and a peer that has begun `quota` operations since it has its initiator lets it go to the first in line before it
    /// goes on, behind the others.
    Exclusive {
        /// Operations; 0 counts as 1. A batch counts as one.
        quota: u32,
    },
    /// Any number of peers: nobody waits for an initiator, and a peer changes to the one with the least work when it has
    /// nothing in flight itself and its own has work of others. An error of one operation flushes all others on the same
    /// initiator, those of other peers too.
    Shared,
}

impl Default for DcPolicy {
    /// Exclusive, with 64 operations: half of the send queue that initiators have by default, so that a peer may keep it busy.
    fn default() -> Self {
        Self::Exclusive { quota: 64 }
    }
}

/// A few [`DcInitiator`]s for any number of peers. Clones share them.
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
/// # let memory = Pool::new(&pd, 64, 4)?;
/// # let region = ExposedRegion::new(&pd, vec![0; 64], Access::REMOTE_WRITE)?;
/// # let remote = region.grant();
/// let pool = tokio_rdma::dc::DcPool::builder(&pd, &queue).initiators(4).build()?;
/// let peers = addresses.iter().map(|address| pool.peer(address)).collect::<Result<Vec<_>, _>>()?;
/// for peer in &peers {
///     peer.write(memory.copy_from(b"hello")?, remote.slice(..5)?).await?;
/// }
/// // A burst has an initiator for itself.
/// let lease = peers[0].borrow().await?;
/// let (first, second) = (lease.write_inline(b"one", remote.slice(..3)?), lease.write_inline(b"two", remote.slice(3..6)?));
/// first.await?;
/// second.await?;
/// # let mut bytes = [0; 6];
/// # region.read(0, &mut bytes)?;
/// # assert_eq!(&bytes, b"onetwo");
/// # Ok(())
/// # }
/// ```
///
/// A peer costs its address, a handle of the route to it, and no object of the device beyond that.
///
/// # Errors
///
/// When work fails with a completion, its initiator is taken out of use, repaired when the rest on it was flushed, and used
/// again; other initiators go on meanwhile. Whoever finds the failure starts that, so that it happens with all futures
/// dropped, too. Operations that wait are not concerned. An initiator that cannot be repaired is left alone until an operation
/// finds no other, and tried again then; if none can be repaired, that operation and all that wait fail with the reason:
/// [`OpErrorKind::CompletionQueue`](crate::OpErrorKind::CompletionQueue) or [`Post`](crate::OpErrorKind::Post).
///
/// # Closing
///
/// [`close`](Self::close), or dropping the pool, all its peers and leases, ends its initiators at once, as
/// [`DcInitiator`] describes.
#[derive(Clone)]
pub struct DcPool {
    core: Arc<Core>,
}

impl DcPool {
    /// A pool to be described further; `queue` takes the completions of all its initiators.
    #[must_use]
    pub fn builder(pd: &ProtectionDomain, queue: &CompletionQueue) -> DcPoolBuilder {
        DcPoolBuilder {
            initiator: DcInitiator::builder(pd, queue),
            initiators: 4,
            policy: DcPolicy::default(),
        }
    }

    /// A peer, made once from its address, to be cloned: the order of operations is that of one peer, and one that is made
    /// again from the same address is another one.
    ///
    /// # Errors
    ///
    /// As [`DcInitiator::peer`].
    pub fn peer(&self, address: &DcAddress) -> Result<DcPoolPeer, SetupError> {
        let to = self.core.members[0].initiator.peer(address)?;
        Ok(DcPoolPeer::new(self.core.clone(), to))
    }

    /// How initiators are chosen.
    #[must_use]
    pub fn policy(&self) -> DcPolicy {
        self.core.policy
    }

    /// What it has done so far.
    #[must_use]
    pub fn counters(&self) -> DcPoolCounters {
        let core = &self.core;
        let count = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
        DcPoolCounters {
            switches: count(&core.switches),
            waited: count(&core.waited),
            repairs: count(&core.repairs),
            failed_repairs: count(&core.failed_repairs),
            peers_in_line: core.counted_crowd(),
            initiators: core
                .members
                .iter()
                .map(|member| (member.initiator.qpn(), member.initiator.counters()))
                .collect(),
        }
    }

    /// Ends it: operations that wait for an initiator, and those called later, fail as
    /// [`OpErrorKind::Closed`](crate::OpErrorKind::Closed); those in flight are flushed or fail so, too: await before those that matter.
    /// When it returns the device touches no buffer of them any more.
    pub fn close(&self) {
        self.core.close();
    }
}

impl fmt::Debug for DcPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DcPool")
            .field("policy", &self.core.policy)
            .field("counters", &self.counters())
            .finish()
    }
}

/// What a [`DcPool`] has done so far.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct DcPoolCounters {
    /// Times that a peer got an initiator.
    pub switches: u64,
    /// Operations that had to wait for one.
    pub waited: u64,
    /// Initiators repaired.
    pub repairs: u64,
    /// Repairs that failed.
    pub failed_repairs: u64,
    /// Peers that wait for an initiator now.
    pub peers_in_line: usize,
    /// Each initiator, and what its send queue has done.
    pub initiators: Vec<(Qpn, WorkQueueCounters)>,
}

/// Describes a [`DcPool`].
#[derive(Debug, Clone)]
pub struct DcPoolBuilder {
    initiator: DcInitiatorBuilder,
    initiators: usize,
    policy: DcPolicy,
}

impl DcPoolBuilder {
    /// Initiators; 4 unless set. The completion queue needs room for the send queues of all of them.
    #[must_use]
    pub fn initiators(mut self, count: usize) -> Self {
        self.initiators = count;
        self
    }

    /// How they are chosen; [`DcPolicy::default`] unless set.
    #[must_use]
    pub fn policy(mut self, policy: DcPolicy) -> Self {
        self.policy = policy;
        self
    }

    /// Describes the initiators further, which are all alike: sizes, timeouts, MTU, port.
    #[must_use]
    pub fn initiator(
        mut self,
        describe: impl FnOnce(DcInitiatorBuilder) -> DcInitiatorBuilder,
    ) -> Self {
        self.initiator = describe(self.initiator);
        self
    }

    /// Makes it, with all its initiators ready to send.
    ///
    /// # Errors
    ///
    /// [`SetupError::TooSmall`] for no initiators or a [quota](DcPolicy::Exclusive) of 0, [`SetupError::CompletionQueueFull`] if their completions do not fit the
    /// queue, else as [`DcInitiatorBuilder::build`].
    pub fn build(self) -> Result<DcPool, SetupError> {
        let Self { initiator, initiators, policy } = self;
        SetupError::at_least("initiators", initiators as u64, 1)?;
        if let DcPolicy::Exclusive { quota } = policy {
            SetupError::at_least("quota", quota.into(), 1)?;
        }
        let initiators =
            (0..initiators).map(|_| initiator.clone().build()).collect::<Result<Vec<_>, _>>()?;
        Ok(DcPool { core: Core::new(initiators, policy) })
    }
}

mod core;
mod peer;
mod pooled;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

pub use self::peer::{DcLease, DcPoolPeer, PendingDcLease};
pub use self::pooled::PooledOperation;

use self::core::Core;
use super::{DcAddress, DcInitiator, DcInitiatorBuilder};
use crate::engine::{CompletionQueue, WorkQueueCounters};
use crate::error::SetupError;
use crate::types::Qpn;
use crate::verbs::ProtectionDomain;

/// How peers of a [`DcPool`] use its initiators.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum DcPolicy {
    /// An initiator has work in flight for one peer only, so an error affects only that peer.
    ///
    /// An idle initiator moves to a peer that needs one. If none is idle, peers wait in FIFO order,
    /// and a peer that has begun `quota` operations yields to the first one.
    Exclusive {
        /// Operations, at least 1. A batch counts as one.
        quota: u32,
    },
    /// An initiator serves any number of peers, so no peer waits. An error of one operation flushes
    /// all operations on the initiator, including those of other peers.
    ///
    /// A peer with nothing in flight switches from a busy initiator to the one with the least work.
    Shared,
}

impl Default for DcPolicy {
    /// Returns an exclusive policy with a quota of 64, half of the default send queue.
    fn default() -> Self {
        Self::Exclusive { quota: 64 }
    }
}

/// A pool of a few [`DcInitiator`]s for any number of peers. Clones refer to the same pool.
///
/// ```
/// use tokio_rdma::dc::{DcAddress, DcPool};
/// # use tokio_rdma::*;
///
/// # async fn example(pd: &ProtectionDomain, queue: &CompletionQueue, address: &DcAddress,
/// #     buffer: Buf, remote: RemoteRegion) -> Result<(), Box<dyn std::error::Error>> {
/// let pool = DcPool::builder(pd, queue).initiators(4).build()?;
/// let peer = pool.peer(address)?;
/// peer.write(buffer, remote).await?;
///
/// // A lease reserves an initiator for a burst.
/// let lease = peer.borrow().await?;
/// let (first, second) = (lease.write_inline(b"1", remote), lease.write_inline(b"2", remote));
/// first.await?;
/// second.await?;
/// # Ok(())
/// # }
/// ```
///
/// # Errors
///
/// When an operation completes with an error, the pool repairs its initiator once the remaining
/// work is flushed. Other initiators and waiting operations are not affected.
///
/// A failed repair is tried again when an operation finds no other initiator. If all repairs fail,
/// all waiting operations fail with
/// [`OpErrorKind::CompletionQueue`](crate::OpErrorKind::CompletionQueue) or
/// [`Post`](crate::OpErrorKind::Post).
///
/// # Closing
///
/// [`close`](Self::close), or dropping the pool with all its peers and leases, closes the
/// initiators at once.
#[derive(Clone)]
pub struct DcPool {
    core: Arc<Core>,
}

impl DcPool {
    /// Returns a builder for a pool. `queue` receives the completions of all initiators.
    pub fn builder(pd: &ProtectionDomain, queue: &CompletionQueue) -> DcPoolBuilder {
        DcPoolBuilder {
            initiator: DcInitiator::builder(pd, queue),
            initiators: 4,
            policy: DcPolicy::default(),
        }
    }

    /// Creates a peer, which costs its address and an address handle. Operations of two peers with
    /// the same address have no order.
    ///
    /// # Errors
    ///
    /// As for [`DcInitiator::peer`], and [`SetupError::Closed`] after [`close`](Self::close).
    pub fn peer(&self, address: &DcAddress) -> Result<DcPoolPeer, SetupError> {
        if self.core.state.lock().is_closed() {
            return Err(SetupError::Closed);
        }
        let to = self.core.members[0].initiator.peer(address)?;
        Ok(DcPoolPeer::new(self.core.clone(), to))
    }

    /// Returns the policy.
    #[must_use]
    pub fn policy(&self) -> DcPolicy {
        self.core.policy
    }

    /// Returns the counters.
    #[must_use]
    pub fn counters(&self) -> DcPoolCounters {
        let core = &self.core;
        let count = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
        DcPoolCounters {
            switches: count(&core.switches),
            waited: count(&core.waited),
            repairs: count(&core.repairs),
            failed_repairs: count(&core.failed_repairs),
            waiting_peers: core.queued_peers(),
            initiators: core
                .members
                .iter()
                .map(|member| (member.initiator.qpn(), member.initiator.counters()))
                .collect(),
        }
    }

    /// Closes the pool. Waiting and later operations fail with
    /// [`OpErrorKind::Closed`](crate::OpErrorKind::Closed). Operations in flight are flushed or
    /// fail with the same error, so await important ones first. Afterwards the device accesses none
    /// of their buffers.
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

/// The counters of a [`DcPool`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct DcPoolCounters {
    /// Assignments of an initiator to a peer.
    pub switches: u64,
    /// Operations that waited for an initiator.
    pub waited: u64,
    /// Successful repairs.
    pub repairs: u64,
    /// Failed repairs.
    pub failed_repairs: u64,
    /// Peers that currently wait for an initiator.
    pub waiting_peers: usize,
    /// The counters of each initiator's send queue.
    pub initiators: Vec<(Qpn, WorkQueueCounters)>,
}

/// A builder for a [`DcPool`].
#[derive(Debug, Clone)]
#[must_use]
pub struct DcPoolBuilder {
    initiator: DcInitiatorBuilder,
    initiators: usize,
    policy: DcPolicy,
}

impl DcPoolBuilder {
    /// Sets the number of initiators; 4 by default. The completion queue must have free entries for
    /// all their send queues.
    pub fn initiators(mut self, count: usize) -> Self {
        self.initiators = count;
        self
    }

    /// Sets the policy; [`DcPolicy::default`] by default.
    pub fn policy(mut self, policy: DcPolicy) -> Self {
        self.policy = policy;
        self
    }

    /// Configures all initiators.
    pub fn initiator(
        mut self,
        describe: impl FnOnce(DcInitiatorBuilder) -> DcInitiatorBuilder,
    ) -> Self {
        self.initiator = describe(self.initiator);
        self
    }

    /// Creates the pool.
    ///
    /// # Errors
    ///
    /// As for [`DcInitiatorBuilder::build`], and [`SetupError::TooSmall`] for 0 initiators or a
    /// [quota](DcPolicy::Exclusive) of 0.
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

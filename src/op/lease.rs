use std::fmt;
use std::future::Future;
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use super::checked::Checked;
use super::expiry::Expiry;
use super::operation::{Operation, OperationKind};
use super::queue_pair::QueuePair;
use crate::engine::{WorkQueue, WorkRequest};
use crate::error::{OpError, OpErrorKind, Outcome, SetupError};
use crate::memory::RemoteRegion;
use crate::memory::{BoundWindow, ExposedRegion, Gather, PdKey, Sealed};
use crate::types::{Access, Rkey, SendOp, WorkCompletion};

/// A type 2 memory window: a part of an [`ExposedRegion`] that only the peer of one queue pair may
/// access. The access ends, and the region can be reclaimed, in one of four ways:
///
/// - [`revoke`](Self::revoke), or a drop, deallocates the window (`ibv_dealloc_mw(3)`), in every
///   state of the queue pair. It is the only choice if the peer may invalidate the key.
/// - [`invalidate`](Self::invalidate) posts an invalidation, ordered after all earlier work. A
///   later lease reuses the window, which is cheaper on hardware.
/// - The queue pair is closed or dropped.
/// - The [deadline](Self::expire_at) passes, even if the peer is silent and no task runs.
///
/// A peer that uses the key afterwards gets
/// [`REM_ACCESS_ERR`](crate::types::WcStatus::REM_ACCESS_ERR), and the connection fails.
///
/// ```
/// # use tokio_rdma::*;
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let pd = Device::software()?.protection_domain()?;
/// # let queue = CompletionQueue::new(pd.device(), CompletionMode::Event)?;
/// # let (ours, theirs) = (QueuePair::new(&pd, &queue)?, QueuePair::new(&pd, &queue)?);
/// # ours.connect(&theirs.endpoint())?;
/// # theirs.connect(&ours.endpoint())?;
/// # let pool = Pool::new(&pd, 64, 4)?;
/// let region = ExposedRegion::new(&pd, vec![0; 4096], Access::MW_BIND)?;
/// let lease = ours.lease(&region, 0..64, Access::REMOTE_WRITE).await?;
/// theirs.write(pool.copy_from(b"hello")?, lease.grant()).await?;
/// lease.revoke();
/// let bytes: Vec<u8> = region.into_storage().map_err(|_| "still leased")?;
/// assert_eq!(&bytes[..5], b"hello");
/// # Ok(())
/// # }
/// ```
#[must_use = "dropping it revokes it"]
pub struct Lease {
    leased: Leased,
}

#[derive(Debug)]
pub struct Leased {
    window: BoundWindow,
    grant: RemoteRegion,
    access: Access,
    /// Does not keep the queue pair open.
    queue: Arc<WorkQueue>,
    expiry: Option<Expiry>,
}

// A lease sends no data: its work requests only keep it alive.
impl Gather for Leased {}

impl Sealed for Leased {
    fn pieces(&self, _visit: &mut dyn FnMut(crate::types::Sge, PdKey)) {}
}

/// A binding in flight. The future returns the [`Lease`].
///
/// # Cancel safety
///
/// Dropping the future revokes the lease, whose key is unknown to the peer, once the work request
/// is complete or the queue pair is closed.
///
/// # Panics
///
/// Panics if polled after completion.
#[derive(Debug)]
#[must_use = "it is already posted; await it for the lease, or drop it to revoke the lease"]
pub struct PendingLease {
    operation: Checked<BindLease>,
}

/// The [`Operation`] of [`Lease::invalidate`].
pub type Invalidate = Operation<InvalidateLease>;

impl QueuePair {
    /// Grants only the peer of this queue pair the rights `access` to `range` of `region` (RC, UC),
    /// `ibv_bind_mw(3)`.
    ///
    /// The region needs only [`Access::MW_BIND`]; with it alone, it is accessible through leases
    /// only. The binding is ordered with the work before and after it, so you may send the
    /// [`grant`](Lease::grant) in a message immediately.
    ///
    /// # Errors
    ///
    /// Before anything is posted:
    ///
    /// - [`OpErrorKind::Limit`] if the device has no memory windows, or `range` is empty or outside
    ///   the region;
    /// - [`OpErrorKind::Rights`] if the region lacks [`Access::MW_BIND`];
    /// - [`OpErrorKind::Foreign`] if the region belongs to another protection domain;
    /// - [`OpErrorKind::Post`] if no window can be allocated.
    ///
    /// From the completion: [`MW_BIND_ERR`](crate::types::WcStatus::MW_BIND_ERR) if the device
    /// refuses, which fails the connection.
    pub fn lease(
        &self,
        region: &ExposedRegion,
        range: Range<usize>,
        access: Access,
    ) -> PendingLease {
        PendingLease { operation: self.bind(region, range, access & Access::REMOTE_ALL).into() }
    }

    fn bind(
        &self,
        region: &ExposedRegion,
        range: Range<usize>,
        access: Access,
    ) -> Result<Operation<BindLease>, OpErrorKind> {
        let request = WorkRequest::local(SendOp::BindWindow);
        let (queue, request) = self.destination().address(request)?;
        let qp = self.inner.core.qp().map_err(|_| OpErrorKind::Closed)?;
        let (window, bind) =
            self.inner.core.windows().lease(self.protection_domain(), region, range, access)?;
        // Closing the queue pair waits for this reference.
        drop(qp);
        let grant = RemoteRegion::new(bind.addr, bind.len, bind.rkey);
        let leased =
            Leased { window, grant, access, queue: self.send_queue().clone(), expiry: None };
        Ok(Operation::post(queue, WorkRequest { window: Some(&bind), ..request }, leased))
    }
}

impl Lease {
    /// Returns the address and key to send to the peer.
    #[must_use]
    pub fn grant(&self) -> RemoteRegion {
        self.leased.grant
    }

    /// Returns the key, as reported in [`Received::invalidated`](crate::op::Received::invalidated).
    #[must_use]
    pub fn rkey(&self) -> Rkey {
        self.grant().rkey()
    }

    /// Returns the rights of the peer, which the queue pair may limit further.
    #[must_use]
    pub fn access(&self) -> Access {
        self.leased.access
    }

    /// Sets or moves the deadline of the lease: at `deadline`, a thread of this crate
    /// [revokes](Self::revoke) the access. Afterwards a WRITE of the peer that has [timed
    /// out](OpErrorKind::TimedOut) can no longer change the memory.
    ///
    /// - The deadline is in real time, or, in a simulated network, by the clock of
    ///   [`software::now`](crate::software::now). It holds even if the lease is leaked.
    /// - An [invalidation](Self::invalidate) in flight at the deadline fails, and the connection
    ///   with it.
    /// - If the device refuses to deallocate the window, the peer may keep access, and the region
    ///   is leaked.
    ///
    /// # Errors
    ///
    /// - [`SetupError::Closed`] if the lease has expired;
    /// - [`SetupError::Verb`] if the thread cannot be started. An earlier deadline stays in force.
    pub fn expire_at(&mut self, deadline: Instant) -> Result<(), SetupError> {
        let Leased { window, expiry, .. } = &mut self.leased;
        match (expiry.take(), window.window()) {
            (Some(set), _) => expiry.insert(set),
            (None, Some(window)) => expiry.insert(Expiry::new(window.clone())),
            (None, None) => return Err(SetupError::Closed),
        }
        .set(deadline)
    }

    /// Returns true if the [deadline](Self::expire_at) has revoked the access, or the device has
    /// refused.
    #[must_use]
    pub fn has_expired(&self) -> bool {
        self.leased.expiry.as_ref().is_some_and(Expiry::has_expired)
    }

    /// Waits until the [deadline](Self::expire_at) has revoked the access, or forever without one.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn expired(&self) {
        match &self.leased.expiry {
            Some(expiry) => expiry.expired().await,
            None => std::future::pending().await,
        }
    }

    /// Revokes the access before it returns, on hardware by a system call of a few microseconds.
    pub fn revoke(self) {
        drop(self);
    }

    /// Posts an invalidation of the key, `IBV_WR_LOCAL_INV` of `ibv_post_send(3)`, ordered after
    /// all earlier work. Once it is complete, even with an error, the peer has no access.
    ///
    /// # Errors
    ///
    /// - [`LOC_QP_OP_ERR`](crate::types::WcStatus::LOC_QP_OP_ERR), or on some devices
    ///   [`MW_BIND_ERR`](crate::types::WcStatus::MW_BIND_ERR), if the peer has invalidated the key.
    ///   The connection has failed then.
    /// - [`OpErrorKind::Closed`] if the queue pair is closed.
    /// - [`OpErrorKind::TimedOut`], before anything is posted, if the lease has
    ///   [expired](Self::expire_at).
    pub fn invalidate(self) -> Invalidate {
        let queue = self.leased.queue.clone();
        let request = WorkRequest::local(SendOp::LocalInvalidate(self.rkey()));
        if self.has_expired() {
            let kind = OpErrorKind::TimedOut { outcome: Outcome::NotSent };
            return Operation::refused(kind, self.leased);
        }
        Operation::post(&queue, request, self.leased)
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease")
            .field("grant", &self.grant())
            .field("access", &self.access())
            .finish_non_exhaustive()
    }
}

impl Future for PendingLease {
    type Output = Result<Lease, OpError<()>>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.operation).poll(context)
    }
}

#[derive(Debug)]
pub(crate) struct BindLease(());

impl OperationKind for BindLease {
    type Held = Leased;
    type Buffer = ();
    type Output = Lease;
    type Details = ();

    fn details(_completion: &WorkCompletion) {}

    fn finish(leased: Leased, (): ()) -> Lease {
        Lease { leased }
    }

    fn into_buffer(_leased: Leased) {}
}

/// Returns the window to the queue pair.
#[derive(Debug)]
pub struct InvalidateLease(());

impl OperationKind for InvalidateLease {
    type Held = Leased;
    type Buffer = ();
    type Output = ();
    type Details = ();

    fn details(_completion: &WorkCompletion) {}

    fn finish(leased: Leased, (): ()) {
        // An expired lease has freed its window.
        if leased.expiry.is_none_or(Expiry::end) {
            leased.window.recycle();
        }
    }

    /// Drops the window, which ends the access: the invalidation failed.
    fn into_buffer(_leased: Leased) {}
}

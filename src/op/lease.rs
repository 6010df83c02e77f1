//! Leases: a peer's access to a part of a region, and its end.

use std::fmt;
use std::future::Future;
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use super::checked::Checked;
use super::operation::{Finish, Operation};
use super::queue_pair::QueuePair;
use crate::engine::{What, WorkQueue};
use crate::error::{OpError, OpErrorKind};
use crate::memory::RemoteRegion;
use crate::memory::{BoundWindow, ExposedRegion, Gather, PdKey, Sealed};
use crate::types::{Access, Rkey, SendFlags, SendOp, WorkCompletion};

/// A part of an [`ExposedRegion`] that the peer of one queue pair may reach, and nobody else: a memory window of type 2
/// that this queue pair has bound.
///
/// It ends in one of three ways, and each time nobody reaches the bytes any more and the region is free:
///
/// - [`revoke`](Self::revoke), or dropping it, deallocates the window (`ibv_dealloc_mw(3)`) and returns when that is
///   done. It works at any time: with the queue pair in the error state or gone, with the peer alive or not, and if the
///   peer has invalidated the key itself. For a peer that may do so ([`Received::invalidated`](crate::op::Received::invalidated)) it is the
///   only one to use.
/// - [`invalidate`](Self::invalidate) has the device do it as work of the queue pair, behind all that was posted before,
///   and the window is bound again by a later lease. On a device that is hardware it is the cheaper one.
/// - The queue pair is closed or dropped.
///
/// A peer that uses the key afterwards gets [`REM_ACCESS_ERR`](crate::types::WcStatus::REM_ACCESS_ERR), and the connection
/// has ended then.
///
/// ```
/// # use tokio_rdma::{Access, CompletionMode, CompletionQueue, Device, ExposedRegion, Pool, QueuePair};
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let device = Device::software()?;
/// # let pd = device.protection_domain()?;
/// # let queue = CompletionQueue::new(&device, CompletionMode::Event)?;
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

/// What a lease is made of, and what its work requests hold.
#[derive(Debug)]
pub struct Leased {
    window: BoundWindow,
    grant: RemoteRegion,
    access: Access,
    /// Where it is invalidated. Not the queue pair, which it does not keep alive.
    queue: Arc<WorkQueue>,
}

// No bytes of it are sent: it is there to be kept.
impl Gather for Leased {}

impl Sealed for Leased {
    fn pieces(&self, _visit: &mut dyn FnMut(crate::types::Sge, PdKey)) {}
}

/// A binding in flight; gives the [`Lease`].
///
/// # Cancel safety
///
/// Dropping it revokes the lease when the work request has completed, or the queue pair has ended.
///
/// # Panics
///
/// If polled again after it was ready.
#[derive(Debug)]
#[must_use = "it is posted already, but only awaiting it tells whether it succeeded; dropping it revokes the lease"]
pub struct PendingLease {
    operation: Checked<Granting>,
}

/// An invalidation in flight.
///
/// # Cancel safety
///
/// As [`Operation`]: dropped, it goes on, and the window goes back to the queue pair when it is done.
pub type Invalidate = Operation<Ending>;

impl QueuePair {
    /// Lets the peer of this queue pair, and nobody else, do `access` to `range` of `region` (RC, UC): binds a memory
    /// window of type 2, `ibv_bind_mw(3)`.
    ///
    /// Rights of the region do not matter but [`Access::MW_BIND`], which it must have; expose it with that alone, and
    /// peers reach of it what they hold leases of. Work posted afterwards finds the lease in force, so a message with its
    /// [`grant`](Lease::grant) may be sent at once. It waits for work posted before.
    ///
    /// # Errors
    ///
    /// Of the future. Before anything was posted: [`OpErrorKind::Limit`] if the device has no memory windows or the range
    /// is empty or not within the region, [`OpErrorKind::Rights`], [`OpErrorKind::Foreign`] for a region of another
    /// protection domain, [`OpErrorKind::Post`] if no window can be allocated. Of the completion:
    /// [`MW_BIND_ERR`](crate::types::WcStatus::MW_BIND_ERR) if the device refuses; the connection has ended then.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future revokes the lease when the work request has completed, or the queue pair has ended. Nobody
    /// knows its key.
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
    ) -> Result<Operation<Granting>, OpErrorKind> {
        let route = self.destination().route_for(SendOp::BindWindow)?;
        let qp = self.inner.core.qp().map_err(|_| OpErrorKind::Closed)?;
        let (window, bind) =
            self.inner.core.windows().lease(self.protection_domain(), region, range, access)?;
        // Whoever holds it holds up the end of the queue pair.
        drop(qp);
        let grant = RemoteRegion::new(bind.addr, bind.len, bind.rkey);
        let leased = Leased { window, grant, access, queue: self.send_queue().clone() };
        Ok(route.post_binding(&bind, leased))
    }
}

impl Lease {
    /// Address and key, to hand to the peer.
    #[must_use]
    pub fn grant(&self) -> RemoteRegion {
        self.leased.grant
    }

    /// Key alone: what [`Received::invalidated`](crate::op::Received::invalidated) has if the peer has invalidated it.
    #[must_use]
    pub fn rkey(&self) -> Rkey {
        self.grant().rkey()
    }

    /// What the peer may do, as far as the queue pair allows it too.
    #[must_use]
    pub fn access(&self) -> Access {
        self.leased.access
    }

    /// Ends the access: when it returns the peer does not reach the bytes any more, and the region may be taken back.
    ///
    /// A system call of some microseconds on a device that is hardware.
    pub fn revoke(self) {
        drop(self);
    }

    /// Has the device end the access, LOCAL_INV of `ibv_post_send(3)`: in order, behind all work posted to the queue pair
    /// before. When it is done, in success or not, the peer does not reach the bytes any more.
    ///
    /// Only for a lease that the peer does not invalidate: a device refuses to invalidate what is invalid.
    ///
    /// # Errors
    ///
    /// Of the future: [`LOC_QP_OP_ERR`](crate::types::WcStatus::LOC_QP_OP_ERR) or, by some devices,
    /// [`MW_BIND_ERR`](crate::types::WcStatus::MW_BIND_ERR) if the peer has invalidated it, and the connection has ended
    /// then; [`OpErrorKind::Closed`] if the queue pair has ended.
    ///
    /// # Cancel safety
    ///
    /// The access ends even if the future is dropped: when the work request has completed, or the queue pair has ended.
    pub fn invalidate(self) -> Invalidate {
        let queue = self.leased.queue.clone();
        let what = What::Send(SendOp::LocalInvalidate(self.rkey()));
        Operation::post(&queue, what, SendFlags::SIGNALED, u64::MAX, self.leased)
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

/// Makes a [`Lease`] of a window that is bound.
#[derive(Debug)]
pub(crate) struct Granting(());

impl Finish for Granting {
    type Held = Leased;
    type Buffer = ();
    type Output = Lease;
    type Seen = ();

    fn see(_completion: &WorkCompletion) {}

    fn finish(leased: Leased, (): ()) -> Lease {
        Lease { leased }
    }

    fn give_back(_leased: Leased) {}
}

/// Gives the window of a lease back to the queue pair.
#[derive(Debug)]
pub struct Ending(());

impl Finish for Ending {
    type Held = Leased;
    type Buffer = ();
    type Output = ();
    type Seen = ();

    fn see(_completion: &WorkCompletion) {}

    fn finish(leased: Leased, (): ()) {
        leased.window.recycle();
    }

    /// Not invalidated: the window goes, and the access with it.
    fn give_back(_leased: Leased) {}
}

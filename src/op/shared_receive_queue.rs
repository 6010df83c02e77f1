use std::fmt;
use std::sync::Arc;

use super::recv::{Recv, recv, try_recv};
use crate::engine::{
    CompletionQueue, DeviceQueue, Limits, WorkQueue, WorkQueueCounters, destroy_shared,
};
use crate::error::{SetupError, TryError};
use crate::memory::{PdKey, Scatter};
use crate::types::SrqCaps;
use crate::verbs::{ProtectionDomain, Srq};

/// A receive queue that several queue pairs share, in order of message arrival. Their receive
/// completions use one completion queue. Clones refer to the same queue.
///
/// ```
/// use tokio_rdma::{QueuePair, SharedReceiveQueue};
/// # use tokio_rdma::*;
///
/// # async fn example(pd: &ProtectionDomain, queue: &CompletionQueue, pool: &Pool)
/// # -> Result<(), Box<dyn std::error::Error>> {
/// let receives = SharedReceiveQueue::new(pd, queue, 16, 1)?;
/// let qp = QueuePair::builder(pd, queue).shared_receive_queue(&receives).build()?;
/// let received = receives.recv(pool.alloc(64).await?).await?;
/// assert_eq!(received.qpn, qp.qpn());
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct SharedReceiveQueue {
    inner: Arc<Inner>,
}

struct Inner {
    queue: Arc<WorkQueue>,
    srq: Option<Srq>,
    completions: CompletionQueue,
}

impl SharedReceiveQueue {
    /// Creates a queue for `max_wr` receives of up to `max_sge` buffers each. A device may grant
    /// more (`ibv_create_srq(3)`), see [`caps`](Self::caps).
    ///
    /// # Errors
    ///
    /// - [`SetupError::TooSmall`] if `max_wr` is 0;
    /// - [`SetupError::Limit`] above a limit of the device;
    /// - [`SetupError::CompletionQueueFull`] if `completions` has too few unreserved entries;
    /// - [`SetupError::Foreign`] if `completions` belongs to another device.
    pub fn new(
        pd: &ProtectionDomain,
        completions: &CompletionQueue,
        max_wr: u32,
        max_sge: u32,
    ) -> Result<Self, SetupError> {
        if !completions.device().same(pd.device()) {
            return Err(SetupError::Foreign { what: "completion queue" });
        }
        let srq = Srq::new(pd, SrqCaps { max_wr, max_sge })?;
        let limits = Limits {
            depth: max_wr,
            max_sge: srq.caps().max_sge,
            max_read_sge: 0,
            max_inline: 0,
            max_message: u64::MAX,
            pd: PdKey(pd.id()),
            solicited: false,
            notifies: false,
        };
        let queue = completions.shared().attach(DeviceQueue::Shared(srq.clone()), limits)?;
        Ok(Self {
            inner: Arc::new(Inner { queue, srq: Some(srq), completions: completions.clone() }),
        })
    }

    /// Posts a receive for the next message to any of its queue pairs;
    /// [`Received::qpn`](super::Received::qpn) names it.
    ///
    /// # Errors
    ///
    /// As for [`QueuePair::recv`](super::QueuePair::recv), but queue pairs flush no unused
    /// receives. These fail with:
    ///
    /// - [`OpErrorKind::CompletionQueue`](crate::OpErrorKind::CompletionQueue) when the device is
    ///   lost;
    /// - [`OpErrorKind::Closed`](crate::OpErrorKind::Closed) when the shared queue is dropped with
    ///   its last queue pair.
    ///
    /// A receive whose message is arriving when its queue pair is closed also fails with `Closed`
    /// if the device takes more than 1 ms to report it. If a device refuses to destroy the queue,
    /// its receives never complete, and their buffers leak.
    ///
    /// # Cancel safety
    ///
    /// As for `QueuePair::recv`.
    pub fn recv<B: Scatter>(&self, buffer: B) -> Recv<B> {
        recv(&self.inner.queue, buffer)
    }

    /// Posts a [`recv`](Self::recv) if the queue has a free slot.
    ///
    /// # Errors
    ///
    /// See [`TryError`].
    pub fn try_recv<B: Scatter>(&self, buffer: B) -> Result<Recv<B>, TryError<B>> {
        try_recv(&self.inner.queue, buffer)
    }

    /// Requests one [`AsyncEvent::SrqLimitReached`](crate::types::AsyncEvent::SrqLimitReached) when
    /// fewer than `limit` receives are left.
    ///
    /// # Errors
    ///
    /// [`SetupError::Limit`] if `limit` exceeds the granted size.
    pub fn set_limit(&self, limit: u32) -> Result<(), SetupError> {
        self.verbs().set_limit(limit)
    }

    /// Returns the granted sizes.
    #[must_use]
    pub fn caps(&self) -> SrqCaps {
        self.verbs().caps()
    }

    /// Returns the counters of the queue.
    #[must_use]
    pub fn counters(&self) -> WorkQueueCounters {
        self.inner.queue.counters()
    }

    /// Returns the completion queue of its receives.
    #[must_use]
    pub fn completion_queue(&self) -> &CompletionQueue {
        &self.inner.completions
    }

    /// Crate-private: a [`Qp`](crate::verbs::Qp) created with it could send completions to another
    /// queue, and could use receives whose buffers were returned.
    pub(crate) fn verbs(&self) -> &Srq {
        match &self.inner.srq {
            Some(srq) => srq,
            None => unreachable!("destroyed only while the last reference is dropped"),
        }
    }

    pub(crate) fn work_queue(&self) -> &Arc<WorkQueue> {
        &self.inner.queue
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // Its queue pairs hold references, so none is left.
        if let Some(srq) = self.srq.take() {
            destroy_shared(&self.queue, srq);
        }
    }
}

impl fmt::Debug for SharedReceiveQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedReceiveQueue")
            .field("srq", self.verbs())
            .field("counters", &self.counters())
            .finish()
    }
}

//! Shared receive queue: receives that many queue pairs draw from.

use std::fmt;
use std::sync::Arc;

use super::recv::{Recv, recv, try_recv};
use crate::engine::{CompletionQueue, Limits, Poster, WorkQueue, WorkQueueCounters, end_shared};
use crate::error::{SetupError, TryError};
use crate::memory::{PdKey, Scatter};
use crate::types::SrqCaps;
use crate::verbs::{ProtectionDomain, Srq};

/// Receives that many queue pairs draw from, in the order in which messages arrive; clones share it.
///
/// All its completions arrive on one completion queue, which its queue pairs use for receives.
///
/// ```
/// use tokio_rdma::{QueuePair, SharedReceiveQueue};
/// # use tokio_rdma::{CompletionMode, CompletionQueue, Device, Pool};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let device = Device::open_default()?;
/// # let pd = device.protection_domain()?;
/// # let queue = CompletionQueue::new(&device, CompletionMode::Event)?;
/// # let pool = Pool::new(&pd, 64, 4)?;
/// # let peer = QueuePair::new(&pd, &queue)?;
/// let receives = SharedReceiveQueue::new(&pd, &queue, 16, 1)?;
/// let qp = QueuePair::builder(&pd, &queue).shared_receive_queue(&receives).build()?;
/// # qp.connect(&peer.endpoint())?;
/// # peer.connect(&qp.endpoint())?;
/// let receive = receives.recv(pool.alloc(64).await?);
/// peer.send(pool.copy_from(b"hello")?).await?;
/// let received = receive.await?;
/// assert_eq!((received.qpn, &received.buffer[..]), (qp.qpn(), &b"hello"[..]));
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct SharedReceiveQueue {
    inner: Arc<Inner>,
}

struct Inner {
    queue: Arc<WorkQueue>,
    /// `None` once destroyed, with the last share of this.
    srq: Option<Srq>,
    completions: CompletionQueue,
}

impl SharedReceiveQueue {
    /// A queue for `max_wr` receives of up to `max_sge` buffers each. A device may grant more, as `ibv_create_srq(3)` allows:
    /// [`caps`](Self::caps) has what it granted.
    ///
    /// # Errors
    ///
    /// [`SetupError::TooSmall`] for no receives, [`SetupError::Limit`] beyond a limit of the device, [`SetupError::CompletionQueueFull`] if `completions` has no
    /// room for its work, [`SetupError::Foreign`] if it is of another device, [`SetupError::Verb`] if the provider refuses.
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
            max_inline: 0,
            max_message: u64::MAX,
            pd: PdKey(pd.id()),
        };
        let queue = completions.shared().attach(Poster::Shared(srq.clone()), limits)?;
        Ok(Self {
            inner: Arc::new(Inner { queue, srq: Some(srq), completions: completions.clone() }),
        })
    }

    /// Posts a receive: the next message to any of its queue pairs goes into `buffer`;
    /// [`Received::qpn`](super::Received::qpn) tells which.
    ///
    /// # Errors
    ///
    /// Of the future, with the buffer; see [`QueuePair::recv`](super::QueuePair::recv). Receives that no message has
    /// found are not flushed when a queue pair ends; they fail as
    /// [`OpErrorKind::CompletionQueue`](crate::OpErrorKind::CompletionQueue) when the device is lost, and as
    /// [`OpErrorKind::Closed`](crate::OpErrorKind::Closed) when the shared queue is dropped with its last queue pair. So
    /// does the one that a message was arriving in when its queue pair was closed or dropped, if a device takes longer than
    /// a millisecond to report it. Should a device refuse to destroy the queue, which no device is known to do, they never
    /// end, and their buffers are leaked.
    ///
    /// # Cancel safety
    ///
    /// The receive stays posted if the future is dropped, and the message that finds it is lost.
    pub fn recv<B: Scatter>(&self, buffer: B) -> Recv<B> {
        recv(&self.inner.queue, buffer)
    }

    /// As [`recv`](Self::recv), if there is room.
    ///
    /// # Errors
    ///
    /// [`TryError::Full`] with the buffer if there is none.
    pub fn try_recv<B: Scatter>(&self, buffer: B) -> Result<Recv<B>, TryError<B>> {
        try_recv(&self.inner.queue, buffer)
    }

    /// Asks for [`AsyncEvent::SrqLimitReached`](crate::types::AsyncEvent::SrqLimitReached), once, when fewer than
    /// `limit` receives are left.
    ///
    /// # Errors
    ///
    /// [`SetupError::Limit`] above its size.
    pub fn set_limit(&self, limit: u32) -> Result<(), SetupError> {
        self.verbs().set_limit(limit)
    }

    /// Sizes granted.
    #[must_use]
    pub fn caps(&self) -> SrqCaps {
        self.verbs().caps()
    }

    /// What it has done so far.
    #[must_use]
    pub fn counters(&self) -> WorkQueueCounters {
        self.inner.queue.counters()
    }

    /// The completion queue of its receives.
    #[must_use]
    pub fn completion_queue(&self) -> &CompletionQueue {
        &self.inner.completions
    }

    /// The bare queue. Not for users: receives that a bare queue pair drew from it would complete who knows where,
    /// and it would still draw from it when the receives are given back.
    pub(crate) fn verbs(&self) -> &Srq {
        match &self.inner.srq {
            Some(srq) => srq,
            None => unreachable!("destroyed with the last share of it"),
        }
    }

    pub(crate) fn work_queue(&self) -> &Arc<WorkQueue> {
        &self.inner.queue
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // Its queue pairs hold it until they are destroyed, so nothing draws from it any more.
        if let Some(srq) = self.srq.take() {
            end_shared(&self.queue, srq);
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

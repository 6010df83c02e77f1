//! Operations with a deadline, which revokes them before they report it.

use std::convert::Infallible;
use std::fmt;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use super::atomic::Atomic;
use super::batch::{BatchOp, BatchResult};
use super::operation::{Operation, OperationKind};
use crate::clock::{self, Sleep};
use crate::engine::WorkQueue;
use crate::error::{OpError, OpErrorKind, Outcome};
use crate::memory::Gather;
use crate::types::{WcStatus, WrId};

/// The time for a device to flush a queue pair, before the queue pair is destroyed.
const FLUSH_LIMIT: Duration = Duration::from_secs(1);

const REVOKED: OpErrorKind = OpErrorKind::TimedOut { outcome: Outcome::MaybeExecuted };
const WITHDRAWN: OpErrorKind = OpErrorKind::TimedOut { outcome: Outcome::NotSent };

/// A future that a deadline can revoke: an [`Operation`], an [`Atomic`], a [`BatchOp`], or one of
/// these in a [pool of DC initiators](crate::dc::PooledOperation). This trait is sealed.
pub trait Revocable: Future + Unpin + Sized {
    /// The result of a success.
    type Success;
    /// The error of an operation that has ended, with its buffers.
    type Failure: fmt::Display;

    #[doc(hidden)]
    fn work(&self) -> Option<Work<'_>>;

    /// Ends an operation that waits for an initiator of a pool. Returns false if it was posted.
    #[doc(hidden)]
    fn withdraw(&mut self, _kind: OpErrorKind) -> bool {
        false
    }

    /// Returns true if the next poll returns the result.
    #[doc(hidden)]
    fn has_result(&self) -> bool;

    /// Returns the result. If `revoked`, the deadline caused any flush.
    #[doc(hidden)]
    fn conclude(output: Self::Output, revoked: bool) -> Result<Self::Success, Self::Failure>;
}

/// The work request of an operation, or the last one of a batch.
#[derive(Debug)]
pub struct Work<'a> {
    queue: &'a Arc<WorkQueue>,
    id: WrId,
}

impl<'a> Work<'a> {
    pub(super) fn new((queue, id): (&'a Arc<WorkQueue>, WrId)) -> Self {
        Self { queue, id }
    }

    fn revoke(&self) -> Stage {
        if self.queue.withdraw(self.id, WITHDRAWN) {
            return Stage::Running;
        }
        if self.queue.move_to_error(REVOKED) {
            return Stage::Flushing;
        }
        self.queue.destroy_queue_pair();
        Stage::Over
    }
}

/// An operation with a deadline.
///
/// The future returns the result of the operation, even if it becomes known after the deadline.
/// Otherwise the deadline revokes the operation, and the future returns
/// [`TimedOut`](OpErrorKind::TimedOut) with the buffers, which the device no longer accesses:
///
/// - A work request that is still queued, outside of a batch, is removed from the queue, as is an
///   operation of a pool that waits for an initiator. The queue pair is unharmed.
/// - Otherwise the queue pair is moved to the error state, because hardware cannot revoke one work
///   request. **The queue pair is lost**, even if this operation has won the race: other operations
///   on it end with [`WR_FLUSH_ERR`](WcStatus::WR_FLUSH_ERR), and a connection closes. A DC
///   initiator continues after a [`repair`](crate::dc::DcInitiator::repair), which a
///   [pool](crate::dc::DcPool) does itself.
///
/// If the device refuses the change of state, or has not flushed the operation after one second,
/// the queue pair is destroyed. If the device refuses that too, [`DeadlineError::NotRevoked`]
/// returns the operation. The future must be polled for each of these steps.
///
/// The deadline is in real time, or, in a simulated network, by the clock of
/// [`software::now`](crate::software::now). To wait for a limited time without a revocation, use
/// `tokio::time::timeout` with a reference to the operation.
///
/// # Memory of the peer
///
/// A WRITE that reports `TimedOut` with [`Outcome::MaybeExecuted`] may have been executed, and its
/// packets may still arrive. Its region is safe when the peer has revoked the access, for example
/// by the deadline of a [`Lease`](super::Lease::expire_at).
///
/// # Cancel safety
///
/// Dropping the future discards the deadline and detaches the operation, see [`Operation`].
///
/// # Panics
///
/// Panics if polled after completion.
///
/// ```
/// # use std::time::Duration;
/// # use tokio_rdma::*;
/// # async fn example(qp: &QueuePair, buffer: BufMut) -> Result<(), &'static str> {
/// let receive = qp.recv(buffer).within(Duration::from_millis(1));
/// let error = receive.await.unwrap_err();
/// assert!(matches!(error.kind(), OpErrorKind::TimedOut { .. }));
/// let buffer = error.into_buffer().ok_or("the device keeps the buffer")?;
/// # Ok(())
/// # }
/// ```
#[must_use = "the operation is already posted or queued, but only awaiting enforces the deadline"]
pub struct Within<O: Revocable> {
    operation: Option<O>,
    sleep: Sleep,
    stage: Stage,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Running,
    Flushing,
    Over,
}

impl<O: Revocable> Within<O> {
    pub(crate) fn new(operation: O, deadline: Instant) -> Self {
        Self { operation: Some(operation), sleep: Sleep::new(deadline), stage: Stage::Running }
    }

    /// Returns the deadline, or the end of the wait for a flush after it.
    #[must_use]
    pub fn deadline(&self) -> Instant {
        self.sleep.deadline()
    }

    /// Discards the deadline and returns the operation; `None` once the result was returned.
    #[must_use]
    pub fn into_inner(self) -> Option<O> {
        self.operation
    }
}

impl<O: Revocable> Future for Within<O> {
    type Output = Result<O::Success, DeadlineError<O>>;

    #[inline]
    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let Self { operation, sleep, stage } = &mut *self;
        loop {
            let Some(pending) = operation else {
                panic!("an operation was polled after it had completed")
            };
            if let Poll::Ready(output) = Pin::new(&mut *pending).poll(context) {
                *operation = None;
                let revoked = *stage != Stage::Running;
                return Poll::Ready(O::conclude(output, revoked).map_err(DeadlineError::Ended));
            }
            ready!(sleep.poll(context));
            if *stage == Stage::Running && pending.withdraw(WITHDRAWN) {
                continue;
            }
            if pending.has_result() {
                // The poll has yielded to other tasks, or the result came after it. In both cases
                // the task is woken. Another poll now could yield again, without end.
                return Poll::Pending;
            }
            *stage = match (*stage, pending.work()) {
                (Stage::Running, Some(work)) => work.revoke(),
                (Stage::Flushing, Some(work)) => {
                    work.queue.destroy_queue_pair();
                    Stage::Over
                }
                (Stage::Over, _) | (_, None) => {
                    let pending = operation.take().map(DeadlineError::NotRevoked);
                    let Some(error) = pending else { unreachable!("it was polled above") };
                    return Poll::Ready(Err(error));
                }
            };
            // Another task may be destroying the queue pair.
            if *stage != Stage::Running {
                sleep.reset(clock::deadline(FLUSH_LIMIT));
            }
        }
    }
}

impl<O: Revocable> fmt::Debug for Within<O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Within")
            .field("deadline", &self.sleep.deadline())
            .field("stage", &self.stage)
            .finish_non_exhaustive()
    }
}

/// The reason why an operation with a deadline failed.
pub enum DeadlineError<O: Revocable> {
    /// The operation has ended, by its own failure or by the deadline, and returned its buffers.
    Ended(O::Failure),
    /// The deadline has passed, but the operation, which this holds, cannot be revoked: the device
    /// may still access its buffers.
    ///
    /// This happens to receives of a [`SharedReceiveQueue`](super::SharedReceiveQueue), which no
    /// queue pair can flush, and if a device neither flushes nor destroys the queue pair. Await the
    /// operation further, or drop it: its buffers are released by the completion, or leaked if
    /// there is none.
    NotRevoked(O),
}

impl<O: Revocable> DeadlineError<O> {
    /// Returns the error of an operation that has ended, with its buffers.
    ///
    /// # Errors
    ///
    /// The operation, if it cannot be [revoked](Self::NotRevoked).
    pub fn into_result(self) -> Result<O::Failure, O> {
        match self {
            Self::Ended(failure) => Ok(failure),
            Self::NotRevoked(operation) => Err(operation),
        }
    }
}

impl<O: Revocable<Failure = OpError<B>>, B> DeadlineError<O> {
    /// Returns the reason, which is [`TimedOut`](OpErrorKind::TimedOut) for
    /// [`NotRevoked`](Self::NotRevoked).
    #[must_use]
    pub fn kind(&self) -> OpErrorKind {
        match self {
            Self::Ended(error) => error.kind(),
            Self::NotRevoked(_) => REVOKED,
        }
    }

    /// Returns the buffers, or drops the operation if the device may still access them.
    #[must_use]
    pub fn into_buffer(self) -> Option<B> {
        self.into_result().ok().map(OpError::into_buffer)
    }
}

impl<O: Revocable> fmt::Debug for DeadlineError<O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ended(error) => write!(f, "Ended({error})"),
            Self::NotRevoked(_) => f.write_str("NotRevoked"),
        }
    }
}

impl<O: Revocable> fmt::Display for DeadlineError<O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ended(error) => error.fmt(f),
            Self::NotRevoked(_) => f.write_str(
                "the deadline of an operation passed, but the device may still access its buffers",
            ),
        }
    }
}

impl<O: Revocable> std::error::Error for DeadlineError<O> {}

impl<O: Revocable<Failure = OpError<B>>, B> From<DeadlineError<O>> for io::Error {
    fn from(error: DeadlineError<O>) -> Self {
        match &error {
            DeadlineError::Ended(ended) => Self::new(ended.kind().io_kind(), ended.kind()),
            DeadlineError::NotRevoked(_) => Self::new(io::ErrorKind::TimedOut, error.to_string()),
        }
    }
}

fn is_flush(kind: OpErrorKind) -> bool {
    kind == OpErrorKind::Closed || kind.status() == Some(WcStatus::WR_FLUSH_ERR)
}

fn conclude<T, B>(result: Result<T, OpError<B>>, revoked: bool) -> Result<T, OpError<B>> {
    result.map_err(|error| match is_flush(error.kind()) && revoked {
        true => OpError::new(REVOKED, error.into_buffer()),
        false => error,
    })
}

impl<F: OperationKind> Revocable for Operation<F> {
    type Success = F::Output;
    type Failure = OpError<F::Buffer>;

    fn work(&self) -> Option<Work<'_>> {
        self.posted().map(Work::new)
    }

    fn has_result(&self) -> bool {
        self.is_finished()
    }

    fn conclude(output: Self::Output, revoked: bool) -> Result<F::Output, OpError<F::Buffer>> {
        conclude(output, revoked)
    }
}

impl Revocable for Atomic {
    type Success = u64;
    type Failure = OpError<()>;

    fn work(&self) -> Option<Work<'_>> {
        self.posted().map(Work::new)
    }

    fn has_result(&self) -> bool {
        self.is_finished()
    }

    fn conclude(output: Self::Output, revoked: bool) -> Result<u64, OpError<()>> {
        conclude(output, revoked)
    }
}

impl<B: Gather> Revocable for BatchOp<B> {
    type Success = BatchResult<B>;
    /// The result of a batch has an error for each work request.
    type Failure = Infallible;

    fn work(&self) -> Option<Work<'_>> {
        self.posted().map(Work::new)
    }

    fn has_result(&self) -> bool {
        self.is_finished()
    }

    fn conclude(mut output: BatchResult<B>, revoked: bool) -> Result<BatchResult<B>, Infallible> {
        if revoked {
            output.replace_failures(|kind| if is_flush(kind) { REVOKED } else { kind });
        }
        Ok(output)
    }
}

macro_rules! deadlines {
    ($(($($generics:tt)*) $of:ty),*) => {
        $(impl<$($generics)*> $of {
            /// Limits the operation to `limit` from now, at the price of its queue pair: see
            /// [`Within`].
            pub fn within(self, limit: Duration) -> Within<Self> {
                self.deadline(clock::deadline(limit))
            }

            /// Sets a deadline as [`within`](Self::within) does.
            pub fn deadline(self, deadline: Instant) -> Within<Self> {
                Within::new(self, deadline)
            }
        })*
    };
}

deadlines!((F: OperationKind) Operation<F>, () Atomic, (B: Gather) BatchOp<B>);

use std::fmt;
use std::future::Future;
use std::mem::ManuallyDrop;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use crate::coop::poll_budget;
use crate::engine::{Claim, InFlight, OnFull, Refusal, WorkQueue, WorkRequest};
use crate::error::{OpError, OpErrorKind, RemoteAccess, TryError};
use crate::memory::{Gather, Sealed as _};
use crate::types::{Timestamp, WorkCompletion, WrId};

/// The kind of an [`Operation`]: what it owns while it is in flight and what its future returns.
/// This trait is sealed.
pub trait OperationKind: Unpin + 'static {
    /// The buffers and handles that the operation owns while it is in flight.
    type Held: Gather;
    /// The part of [`Held`](Self::Held) that an error returns to the caller.
    type Buffer;
    /// The result of a success.
    type Output;

    /// The part of the completion that the result depends on.
    #[doc(hidden)]
    type Details;

    #[doc(hidden)]
    fn details(completion: &WorkCompletion) -> Self::Details;

    #[doc(hidden)]
    fn finish(held: Self::Held, details: Self::Details) -> Self::Output;

    #[doc(hidden)]
    fn into_buffer(held: Self::Held) -> Self::Buffer;
}

/// A posted work request, in flight whether or not it is polled.
///
/// # Cancel safety
///
/// Dropping the future discards the result but does not cancel the work request: the peer may still
/// see its effect, and the device may still access the buffers. They return to their pool, or are
/// freed, when the completion arrives.
///
/// # Panics
///
/// Panics if polled after completion.
#[must_use = "it is already posted, but only awaiting it returns its result"]
pub struct Operation<F: OperationKind> {
    in_flight: InFlight<F::Held>,
    /// The lengths of the buffers are not included.
    accessed: Option<RemoteAccess>,
}

impl<F: OperationKind> Operation<F> {
    #[inline(always)]
    pub(crate) fn post(queue: &Arc<WorkQueue>, request: WorkRequest<'_>, held: F::Held) -> Self {
        // A panic leaks `held`, as in `leak_on_panic`.
        let held = ManuallyDrop::new(held);
        let (claim, held) = match queue.submit_now(&request, held.single()) {
            Some(claim) => (claim, held),
            None => {
                // Through a variable: a call that returned straight into the result would keep
                // that in memory for every operation.
                let posted = submit_other(queue, request, held);
                (posted.0, posted.1)
            }
        };
        let in_flight = InFlight::new(claim, ManuallyDrop::into_inner(held));
        Self { in_flight, accessed: request.accessed() }
    }

    #[inline]
    pub(crate) fn try_post(
        queue: &Arc<WorkQueue>,
        request: WorkRequest<'_>,
        held: F::Held,
    ) -> Result<Self, TryError<F::Buffer>> {
        let accessed = request.accessed();
        let (submitted, held) =
            leak_on_panic(held, |held| queue.submit(request, held, OnFull::Try));
        match submitted {
            Ok(claim) => Ok(Self { in_flight: InFlight::new(claim, held), accessed }),
            Err(Refusal::Full) => Err(TryError::Full(F::into_buffer(held))),
            Err(Refusal::Error(kind)) => {
                Err(TryError::Refused(OpError::new(kind, F::into_buffer(held))))
            }
        }
    }

    /// Returns true if awaiting the operation would return immediately. May poll the device.
    pub fn is_finished(&self) -> bool {
        self.in_flight.is_finished()
    }

    pub(crate) fn is_complete(&self) -> bool {
        self.in_flight.is_complete()
    }

    /// Polls without the task's budget, for code that several tasks share.
    #[inline]
    pub(crate) fn poll_unconstrained(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Result<F::Output, OpError<F::Buffer>>> {
        self.poll_with(context, |_| Poll::Ready(()))
    }

    #[inline(always)]
    fn poll_with(
        &mut self,
        context: &mut Context<'_>,
        proceed: impl FnOnce(&mut Context<'_>) -> Poll<()>,
    ) -> Poll<Result<F::Output, OpError<F::Buffer>>> {
        let Self { in_flight, accessed } = self;
        in_flight.poll(context, proceed, F::details, |held, result| match result {
            Ok(details) => Ok(F::finish(held, details)),
            Err(kind) => Err(failed::<F>(kind, *accessed, held)),
        })
    }

    /// Returns a future that also returns the time at which the device completed the operation. A
    /// [`DeviceClock`](crate::verbs::DeviceClock) converts it to an `Instant`.
    ///
    /// The time is `None` if the completion queue was built without [timestamps]. Failed
    /// operations, atomics and batches return no time. Bare [`verbs`](crate::verbs) have that of
    /// each successful completion: `verbs::Cq::timestamped`.
    ///
    /// [timestamps]: crate::completion::CompletionQueueBuilder::timestamps
    pub fn timestamped(self) -> Timestamped<F> {
        Timestamped(self)
    }

    pub(crate) fn refusal(&self) -> Option<OpErrorKind> {
        self.in_flight.refusal()
    }

    pub(super) fn posted(&self) -> Option<(&Arc<WorkQueue>, WrId)> {
        self.in_flight.posted()
    }

    pub(crate) fn is_queued(&self) -> bool {
        self.in_flight.is_queued()
    }

    // A call would build every operation in memory: 20 instructions of an awaited WRITE.
    #[inline(always)]
    pub(crate) fn refused(kind: OpErrorKind, held: F::Held) -> Self {
        Self { in_flight: InFlight::new(Claim::refused(kind), held), accessed: None }
    }
}

/// Posts what [`submit_now`](WorkQueue::submit_now) does not: inline bytes, several buffers, work
/// for a receiver, and all work without capacity. `held` is in memory only here.
#[cold]
fn submit_other<B: Gather>(
    queue: &Arc<WorkQueue>,
    request: WorkRequest<'_>,
    held: ManuallyDrop<B>,
) -> (Claim<WorkQueue>, ManuallyDrop<B>) {
    let claim = match queue.submit(request, &*held, OnFull::Queue) {
        Ok(claim) => claim,
        Err(Refusal::Error(kind)) => Claim::refused(kind),
        Err(Refusal::Full) => unreachable!("a request that may be queued is never refused as full"),
    };
    (claim, held)
}

/// If `post` panics, `held` is leaked: the device or the wait queue may already use the buffers.
#[inline]
pub(crate) fn leak_on_panic<B, R>(held: B, post: impl FnOnce(&B) -> R) -> (R, B) {
    let held = ManuallyDrop::new(held);
    let posted = post(&held);
    (posted, ManuallyDrop::into_inner(held))
}

impl<F: OperationKind> Future for Operation<F> {
    type Output = Result<F::Output, OpError<F::Buffer>>;

    #[inline(always)]
    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        self.poll_with(context, poll_budget)
    }
}

/// An [`Operation`] that also returns its [`Timestamp`]: the future of
/// [`Operation::timestamped`].
///
/// # Cancel safety
///
/// See [`Operation`].
///
/// # Panics
///
/// Panics if polled after completion.
#[must_use = "it is already posted, but only awaiting it returns its result"]
pub struct Timestamped<F: OperationKind>(Operation<F>);

impl<F: OperationKind> Future for Timestamped<F> {
    type Output = Result<(F::Output, Option<Timestamp>), OpError<F::Buffer>>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let Operation { in_flight, accessed } = &mut self.0;
        let posted = in_flight.posted().map(|(queue, id)| (queue.clone(), id));
        // Called while the operation still has its slot, and so its timestamp.
        let extract = |completion: &WorkCompletion| {
            let timestamp = posted.as_ref().and_then(|(queue, id)| queue.timestamp(*id));
            (F::details(completion), timestamp)
        };
        in_flight.poll(context, poll_budget, extract, |held, result| match result {
            Ok((details, timestamp)) => Ok((F::finish(held, details), timestamp)),
            Err(kind) => Err(failed::<F>(kind, *accessed, held)),
        })
    }
}

impl<F: OperationKind> fmt::Debug for Timestamped<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Timestamped").field(&self.0).finish()
    }
}

#[cold]
fn failed<F: OperationKind>(
    kind: OpErrorKind,
    mut accessed: Option<RemoteAccess>,
    held: F::Held,
) -> OpError<F::Buffer> {
    if let Some(RemoteAccess { len, .. }) = &mut accessed {
        held.pieces(&mut |piece, _| *len += u64::from(piece.length));
    }
    OpError::accessing(accessed, kind, F::into_buffer(held))
}

impl<F: OperationKind> fmt::Debug for Operation<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.in_flight.fmt(f)
    }
}

/// The kind of SENDs, WRITEs and READs: returns the buffer.
#[derive(Debug)]
pub struct ReturnBuffer<B>(std::marker::PhantomData<fn() -> B>);

impl<B: Gather> OperationKind for ReturnBuffer<B> {
    type Held = B;
    type Buffer = B;
    type Output = B;
    type Details = ();

    #[inline]
    fn details(_completion: &WorkCompletion) {}

    #[inline]
    fn finish(held: B, (): ()) -> B {
        held
    }

    #[inline]
    fn into_buffer(held: B) -> B {
        held
    }
}

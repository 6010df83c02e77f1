//! The future of one work request.

use std::fmt;
use std::future::Future;
use std::mem::ManuallyDrop;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use crate::engine::{Claim, InFlight, Patience, Refusal, Request, What, WorkQueue};
use crate::error::{OpError, OpErrorKind, TryError};
use crate::memory::Gather;
use crate::types::{SendFlags, WorkCompletion};

/// What an operation makes of its completion. Sealed.
pub trait Finish: Unpin + 'static {
    /// What the operation owns while it is in flight.
    type Held: Gather;
    /// What comes back on failure.
    type Buffer;
    /// What comes back on success.
    type Output;

    /// What it needs to know of the completion.
    #[doc(hidden)]
    type Seen;

    /// Looks at the completion of a success.
    #[doc(hidden)]
    fn see(completion: &WorkCompletion) -> Self::Seen;

    /// The result of a success.
    #[doc(hidden)]
    fn finish(held: Self::Held, seen: Self::Seen) -> Self::Output;

    /// The caller's part of what was held.
    #[doc(hidden)]
    fn give_back(held: Self::Held) -> Self::Buffer;
}

/// A posted work request. It is in flight whether it is polled or not; awaiting it gives its result.
///
/// # Cancel safety
///
/// Dropping it, by hand, by a timeout or with its task, abandons the result and not the work: the peer may
/// still see it, and the device may still read and write the buffers, which therefore stay with the queue
/// pair until the completion has come, and then go back to their pool or are freed.
///
/// # Panics
///
/// If polled again after it was ready.
#[must_use = "it is posted already, but only awaiting it tells whether it succeeded"]
pub struct Operation<F: Finish> {
    in_flight: InFlight<F::Held>,
}

impl<F: Finish> Operation<F> {
    /// Posts a work request whose data are the buffers of `held`, to the connected peer if it is a send, or queues it behind
    /// requests that wait for free slots. `room`: bytes at the remote end, if it is memory.
    ///
    /// The parts of the request are arguments, so that they stay in registers while it is posted at once.
    #[inline(always)]
    pub(crate) fn post(
        queue: &Arc<WorkQueue>,
        what: What,
        flags: SendFlags,
        room: u64,
        held: F::Held,
    ) -> Self {
        // The operation is put together in one place, so that it is built where it will be awaited: no call is given
        // all of it. The buffer is kept as `kept` does.
        let held = ManuallyDrop::new(held);
        let claim = match queue.submit_now(what, flags, room, &*held) {
            Some(claim) => claim,
            None => submit(queue, Request::new(what, flags, room), &*held),
        };
        let held = ManuallyDrop::into_inner(held);
        Self { in_flight: InFlight::new(claim, held) }
    }

    /// Posts a work request of any kind, or queues it behind requests that wait for free slots.
    pub(crate) fn post_any(queue: &Arc<WorkQueue>, request: Request<'_>, held: F::Held) -> Self {
        let (claim, held) = kept(held, |held| submit(queue, request, held));
        Self { in_flight: InFlight::new(claim, held) }
    }

    /// Posts, if there is room.
    #[inline]
    pub(crate) fn try_post(
        queue: &Arc<WorkQueue>,
        request: Request<'_>,
        held: F::Held,
    ) -> Result<Self, TryError<F::Buffer>> {
        let (submitted, held) = kept(held, |held| queue.submit(request, held, Patience::Try));
        match submitted {
            Ok(claim) => Ok(Self { in_flight: InFlight::new(claim, held) }),
            Err(Refusal::Full) => Err(TryError::Full(F::give_back(held))),
            Err(Refusal::Error(kind)) => {
                Err(TryError::Refused(OpError::new(kind, F::give_back(held))))
            }
        }
    }

    /// True once it is over and awaiting it gives its result at once. It does not look for completions by itself: somebody who
    /// waits for work on the same completion queue does.
    pub fn is_finished(&self) -> bool {
        self.in_flight.is_finished()
    }

    /// Why it was not posted, if it was not.
    pub(crate) fn refusal(&self) -> Option<OpErrorKind> {
        self.in_flight.refusal()
    }

    /// True if it stands in line: the device has not seen it.
    pub(crate) fn is_in_line(&self) -> bool {
        self.in_flight.is_in_line()
    }

    /// Was never posted.
    #[inline(always)]
    pub(crate) fn refused(kind: OpErrorKind, held: F::Held) -> Self {
        Self { in_flight: InFlight::new(Claim::refused(kind), held) }
    }
}

/// Posts, or lines up, with patience.
#[inline(never)]
fn submit<B: Gather>(queue: &Arc<WorkQueue>, request: Request<'_>, held: &B) -> Claim<WorkQueue> {
    match queue.submit(request, held, Patience::Queue) {
        Ok(claim) => claim,
        Err(Refusal::Error(kind)) => Claim::refused(kind),
        Err(Refusal::Full) => unreachable!("patience waits for room"),
    }
}

/// What `post` makes of what is posted, and that again. Posting emits events of `tracing`, and a subscriber may panic: what the
/// device has, or what stands in line for it, is not dropped then but leaked.
#[inline(always)]
pub(crate) fn kept<B, R>(held: B, post: impl FnOnce(&B) -> R) -> (R, B) {
    let held = ManuallyDrop::new(held);
    let made = post(&held);
    (made, ManuallyDrop::into_inner(held))
}

impl<F: Finish> Future for Operation<F> {
    type Output = Result<F::Output, OpError<F::Buffer>>;

    #[inline(always)]
    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        self.in_flight.poll(context, F::see, |held, result| match result {
            Ok(seen) => Ok(F::finish(held, seen)),
            Err(kind) => Err(OpError::new(kind, F::give_back(held))),
        })
    }
}

impl<F: Finish> fmt::Debug for Operation<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.in_flight.fmt(f)
    }
}

/// Gives back what was held, filled or sent.
#[derive(Debug)]
pub struct Return<B>(std::marker::PhantomData<fn() -> B>);

impl<B: Gather> Finish for Return<B> {
    type Held = B;
    type Buffer = B;
    type Output = B;
    type Seen = ();

    #[inline]
    fn see(_completion: &WorkCompletion) {}

    #[inline]
    fn finish(held: B, (): ()) -> B {
        held
    }

    #[inline]
    fn give_back(held: B) -> B {
        held
    }
}

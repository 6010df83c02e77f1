//! The future of one work request.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use crate::completion::{InFlight, Patience, Refusal, Request, What, WorkQueue};
use crate::error::{OpError, OpErrorKind, TryError};
use crate::types::{SendFlags, WorkCompletion};
use crate::verbs::Source;

/// What an operation makes of its completion. Sealed.
pub trait Finish: Unpin + 'static {
    /// What the operation owns while it is in flight.
    type Held: Source;
    /// What comes back on failure.
    type Buffer;
    /// What comes back on success.
    type Output;

    /// The result of a success.
    #[doc(hidden)]
    fn finish(held: Self::Held, completion: &WorkCompletion) -> Self::Output;

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
    state: State<F::Held>,
}

enum State<H: std::marker::Send + 'static> {
    InFlight(InFlight<H>),
    /// `None` once that was told. Boxed to keep the usual operation small.
    Refused(Option<Box<(OpErrorKind, H)>>),
}

impl<F: Finish> Operation<F> {
    /// Posts a work request whose data are in `held`, or lines up behind those that wait for room. `room`: bytes at the
    /// remote end, if it is memory.
    #[inline(always)]
    pub(super) fn post(queue: &Arc<WorkQueue>, what: What, flags: SendFlags, room: u64, held: F::Held) -> Self {
        match queue.submit_now(what, flags, room, held) {
            Ok(in_flight) => Self { state: State::InFlight(in_flight) },
            Err(held) => {
                Self::post_any(queue, Request { what, flags, inline: None, window: None, to: None, room }, held)
            }
        }
    }

    /// As [`post`](Self::post), of any kind.
    #[inline(never)]
    pub(super) fn post_any(queue: &Arc<WorkQueue>, request: Request<'_>, held: F::Held) -> Self {
        match queue.submit(request, held, Patience::Queue) {
            Ok(in_flight) => Self { state: State::InFlight(in_flight) },
            Err(Refusal::Error(kind, held)) => Self::refused(kind, held),
            Err(Refusal::Full(_)) => unreachable!("patience waits for room"),
        }
    }

    /// Posts, if there is room.
    #[inline]
    pub(super) fn try_post(
        queue: &Arc<WorkQueue>,
        request: Request<'_>,
        held: F::Held,
    ) -> Result<Self, TryError<F::Buffer>> {
        match queue.submit(request, held, Patience::Try) {
            Ok(in_flight) => Ok(Self { state: State::InFlight(in_flight) }),
            Err(Refusal::Full(held)) => Err(TryError::Full(F::give_back(held))),
            Err(Refusal::Error(kind, held)) => Err(TryError::Refused(OpError::new(kind, F::give_back(held)))),
        }
    }

    /// True once it is over and awaiting it gives its result at once. It does not look for completions by itself: somebody who
    /// waits for work on the same completion queue does.
    pub fn is_finished(&self) -> bool {
        match &self.state {
            State::InFlight(in_flight) => in_flight.is_finished(),
            State::Refused(_) => true,
        }
    }

    /// Why it was not posted, if it was not.
    pub(crate) fn refusal(&self) -> Option<OpErrorKind> {
        match &self.state {
            State::InFlight(_) => None,
            State::Refused(refused) => refused.as_ref().map(|refused| refused.0),
        }
    }

    /// Was never posted.
    #[cold]
    pub(super) fn refused(kind: OpErrorKind, held: F::Held) -> Self {
        tracing::debug!(error = %kind, "operation refused");
        Self { state: State::Refused(Some(Box::new((kind, held)))) }
    }
}

impl<F: Finish> Future for Operation<F> {
    type Output = Result<F::Output, OpError<F::Buffer>>;

    #[inline]
    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        match &mut self.state {
            State::InFlight(in_flight) => in_flight.poll(context, |held, result| match result {
                Ok(completion) => Ok(F::finish(held, completion)),
                Err(kind) => Err(OpError::new(kind, F::give_back(held))),
            }),
            State::Refused(refused) => {
                let Some(refused) = refused.take() else { panic!("an operation was polled after it had completed") };
                let (kind, held) = *refused;
                Poll::Ready(Err(OpError::new(kind, F::give_back(held))))
            }
        }
    }
}

impl<F: Finish> fmt::Debug for Operation<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.state {
            State::InFlight(in_flight) => in_flight.fmt(f),
            State::Refused(refused) => {
                f.debug_tuple("Refused").field(&refused.as_ref().map(|refused| refused.0)).finish()
            }
        }
    }
}

/// Gives back what was held, filled or sent.
#[derive(Debug)]
pub struct Return<B>(std::marker::PhantomData<fn() -> B>);

impl<B: Source> Finish for Return<B> {
    type Held = B;
    type Buffer = B;
    type Output = B;

    #[inline]
    fn finish(held: B, _completion: &WorkCompletion) -> B {
        held
    }

    #[inline]
    fn give_back(held: B) -> B {
        held
    }
}

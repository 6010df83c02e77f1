//! What an operation's future holds: its slot and, until the device is done, its buffers.

#![allow(unsafe_code)]

use std::fmt;
use std::task::{Context, Poll, ready};

use super::claim::Claim;
use super::failures::success;
use super::slot::{Detach, FailedParts, Held, Outcome};
use super::work_queue::WorkQueue;
use super::work_request_id::index_of;
use crate::error::OpErrorKind;
use crate::types::WorkCompletion;

/// One work request in flight with the buffers `B` it names, or one that was refused.
///
/// Dropping it detaches: the buffers move into the slot and are dropped when the completion has come.
pub(crate) struct InFlight<B: Send + 'static> {
    /// `None` once the outcome was taken.
    held: Option<(Claim<WorkQueue>, B)>,
}

impl<B: Send + 'static> InFlight<B> {
    #[inline(always)]
    pub(crate) fn new(claim: Claim<WorkQueue>, buffer: B) -> Self {
        Self { held: Some((claim, buffer)) }
    }

    /// True if the completion has been found, and not been taken yet.
    pub(crate) fn is_finished(&self) -> bool {
        self.held.as_ref().is_some_and(|(claim, _)| {
            claim.is_complete() || {
                claim.queue().cq().hand_out();
                claim.is_complete()
            }
        })
    }

    /// Why it was never posted, if it was not and that has not been told.
    pub(crate) fn refusal(&self) -> Option<OpErrorKind> {
        self.held.as_ref().and_then(|(claim, _)| claim.refusal())
    }

    /// True if it waits for room, and the device has not seen it.
    pub(crate) fn is_in_line(&self) -> bool {
        self.held.as_ref().is_some_and(|(claim, _)| {
            claim.posted_to().is_some_and(|queue| queue.is_in_line(claim.id()))
        })
    }

    /// What `finish` makes of the buffers and of what `see` has seen in the completion, once.
    ///
    /// # Panics
    ///
    /// If polled again after it was ready.
    #[inline(always)]
    pub(crate) fn poll<S, R>(
        &mut self,
        context: &mut Context<'_>,
        see: impl Fn(&WorkCompletion) -> S,
        finish: impl FnOnce(B, Result<S, OpErrorKind>) -> R,
    ) -> Poll<R> {
        let Some((claim, _)) = &self.held else { polled_again() };
        // SAFETY: C1: where this one is ended, the other was taken out of `held` and forgotten.
        let (claim, held) = (unsafe { claim.same() }, &mut self.held);
        let end = |claim: Claim<WorkQueue>, seen: Option<S>| {
            // Before the claim is ended: should that unwind, nothing is left to abandon.
            // SAFETY: C1: it is what `claim` is of, and this is the first that takes it.
            let (_, buffer) = unsafe { held.take().unwrap_unchecked() };
            // SAFETY: C1: the slot is complete.
            Poll::Ready(finish(buffer, unsafe { claim.take(seen, &see) }))
        };
        if claim.is_new() {
            let queue = claim.queue();
            return match queue.cq().look_first(queue, &claim, context, &see) {
                Poll::Ready(Some(seen)) => end(claim, Some(seen)),
                Poll::Ready(None) => end(claim, None),
                Poll::Pending => Poll::Pending,
            };
        }
        match claim.wait(context, &see) {
            Poll::Ready(seen) => end(claim, seen),
            Poll::Pending => Poll::Pending,
        }
    }

    /// As [`poll`](Self::poll), of a batch: how its last work request ended, and those before it that failed.
    pub(crate) fn poll_batch(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<(B, Result<(), OpErrorKind>, FailedParts)> {
        let Some((claim, _)) = &self.held else { polled_again() };
        let see = |_: &WorkCompletion| claim.queue().end_parts(claim);
        let seen = if claim.is_new() {
            ready!(claim.queue().cq().look_first(claim.queue(), claim, context, see))
        } else {
            ready!(claim.wait(context, &see))
        };
        let Some((claim, buffers)) = self.held.take() else { polled_again() };
        let failed = match (seen, claim.posted_to()) {
            (Some(failed), _) => {
                // SAFETY: C1: its completion was found, so it was posted.
                unsafe { claim.end() };
                return Poll::Ready((buffers, Ok(()), failed));
            }
            (None, Some(queue)) => queue.end_parts(&claim),
            (None, None) => FailedParts::new(),
        };
        // SAFETY: C1: the slot is complete.
        let last = unsafe { claim.take(None, &|_| ()) };
        Poll::Ready((buffers, last, failed))
    }

    #[cold]
    #[inline(never)]
    fn abandon(&mut self) {
        if let Some((claim, buffer)) = self.held.take() {
            claim.abandon(buffer);
        }
    }
}

impl<B: Send + 'static> Drop for InFlight<B> {
    #[inline(always)]
    fn drop(&mut self) {
        if self.held.is_some() {
            self.abandon();
        }
    }
}

#[cold]
#[inline(never)]
fn polled_again() -> ! {
    panic!("an operation was polled after it had completed")
}

impl Claim<WorkQueue> {
    /// Frees the slot: nothing was posted, the result was taken, or no future will take it.
    pub(super) fn release(self) {
        if let Some(queue) = self.posted_to() {
            queue.slots().hint(&self);
            // SAFETY: C1: it was posted.
            unsafe { self.end() };
        } else {
            // SAFETY: C1: it was not posted.
            unsafe { self.end_refused() };
        }
    }

    /// Leaves the slot and `held` to the drainer, which drops `held` when the device is done; if that is so, drops it here.
    #[cold]
    pub(super) fn abandon<T: Send + 'static>(self, held: T) {
        // SAFETY: C1: this is the claim, and ends here. The share is taken out before the drainer may free the slot, and dropped
        // when this is done with the slot.
        let Some(queue) = (unsafe { self.let_go() }) else {
            // SAFETY: C1: it was not posted.
            return unsafe { self.end_refused() };
        };
        let index = index_of(self.id());
        let held: Option<Held> =
            if std::mem::needs_drop::<T>() { Some(Box::new(held)) } else { None };
        // Until it is reaped it counts as waiting, as what it owned and those who wait for capacity do: counted before it is
        // visible, so that the count never falls below zero.
        queue.cq().now_waiting();
        match self.detach(held) {
            Detach::InFlight { waiting } => {
                tracing::trace!(index, "detached");
                if waiting {
                    queue.cq().no_longer_waiting();
                }
                queue.cq().attend();
            }
            Detach::Complete(held) => {
                queue.cq().no_longer_waiting();
                queue.end_parts(&self);
                queue.release(&self);
                drop(held);
            }
        }
    }

    /// Goes on to wait, as [`look_again`](super::completion_queue_core::CompletionQueueCore::look_again).
    #[inline(never)]
    fn wait<S>(
        &self,
        context: &mut Context<'_>,
        see: &impl Fn(&WorkCompletion) -> S,
    ) -> Poll<Option<S>> {
        if self.is_complete() {
            return Poll::Ready(None);
        }
        self.queue().cq().look_again(self.queue(), self, context, see)
    }

    /// Ends the claim. Gives what was `seen` in the completion of a success, or else what the slot has.
    ///
    /// # Safety
    ///
    /// The operation is complete, and was posted if something was seen.
    #[inline(always)]
    unsafe fn take<S>(
        self,
        seen: Option<S>,
        see: &impl Fn(&WorkCompletion) -> S,
    ) -> Result<S, OpErrorKind> {
        let Some(seen) = seen else { return self.take_outcome(see) };
        // SAFETY: C1: promised.
        unsafe { self.end() };
        Ok(seen)
    }

    #[inline(never)]
    fn take_outcome<S>(self, see: &impl Fn(&WorkCompletion) -> S) -> Result<S, OpErrorKind> {
        let seen = self.outcome(|outcome| ending(outcome).map(see));
        self.release();
        seen
    }
}

/// The completion of a success, or why there is none.
#[inline]
fn ending(outcome: &Outcome) -> Result<&WorkCompletion, OpErrorKind> {
    match outcome {
        Ok(wc) => success(wc),
        Err(kind) => Err(*kind),
    }
}

impl<B: Send + 'static> fmt::Debug for InFlight<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let id = self.held.as_ref().map(|(claim, _)| claim.id());
        f.debug_struct("InFlight").field("id", &id).finish_non_exhaustive()
    }
}

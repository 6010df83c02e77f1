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
        self.held.as_ref().is_some_and(|(claim, _)| claim.posted_to().is_some_and(|queue| queue.is_in_line(claim.id())))
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
        // SAFETY: C1: where one is ended, the other is taken out of `held` and forgotten.
        let (claim, held) = (unsafe { claim.same() }, &mut self.held);
        let end = |seen: Result<S, OpErrorKind>| {
            // SAFETY: C1: it is what `claim` is of, and this is the first that takes it.
            let (_, buffer) = unsafe { held.take().unwrap_unchecked() };
            Poll::Ready(finish(buffer, seen))
        };
        if claim.is_new() {
            let queue = claim.queue();
            return match queue.cq().look_first(queue, &claim, context, &see) {
                Poll::Ready(Some(seen)) => {
                    // SAFETY: C1: its completion was found, so it was posted.
                    unsafe { claim.end() };
                    end(Ok(seen))
                }
                Poll::Ready(None) => end(claim.take(&see)),
                Poll::Pending => Poll::Pending,
            };
        }
        match claim.wait(context, &see) {
            Poll::Ready(seen) => end(seen),
            Poll::Pending => Poll::Pending,
        }
    }

    /// As [`poll`](Self::poll), of a batch: how its last work request ended, and those before it that failed.
    pub(crate) fn poll_batch(&mut self, context: &mut Context<'_>) -> Poll<(B, Result<(), OpErrorKind>, FailedParts)> {
        let Some((claim, _)) = &self.held else { polled_again() };
        // SAFETY: C1: where one is ended, the other is taken out of `held` and forgotten.
        let claim = unsafe { claim.same() };
        let (last, failed) = ready!(claim.wait_batch(context));
        let Some((_, buffers)) = self.held.take() else { polled_again() };
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
        let held: Option<Held> = if std::mem::needs_drop::<T>() { Some(Box::new(held)) } else { None };
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

    /// Goes on to wait for what `see` makes of a success, or for why it is none.
    #[inline(never)]
    fn wait<S>(self, context: &mut Context<'_>, see: &impl Fn(&WorkCompletion) -> S) -> Poll<Result<S, OpErrorKind>> {
        if self.is_complete() {
            return Poll::Ready(self.take(see));
        }
        let queue = self.queue();
        match queue.cq().look_again(queue, &self, context, see) {
            Poll::Ready(Some(seen)) => {
                // SAFETY: C1: its completion was found, so it was posted.
                unsafe { self.end() };
                Poll::Ready(Ok(seen))
            }
            Poll::Ready(None) => Poll::Ready(self.take(see)),
            Poll::Pending => Poll::Pending,
        }
    }

    /// Waits for how the last of a batch ends, and for those before it that fail.
    fn wait_batch(self, context: &mut Context<'_>) -> Poll<(Result<(), OpErrorKind>, FailedParts)> {
        let seen = if self.is_complete() {
            Poll::Ready(None)
        } else {
            let (queue, see) = (self.queue(), |_: &WorkCompletion| self.queue().end_parts(&self));
            if self.is_new() {
                queue.cq().look_first(queue, &self, context, see)
            } else {
                queue.cq().look_again(queue, &self, context, see)
            }
        };
        match seen {
            Poll::Ready(Some(failed)) => {
                // SAFETY: C1: its completion was found, so it was posted.
                unsafe { self.end() };
                Poll::Ready((Ok(()), failed))
            }
            Poll::Ready(None) => {
                let failed = self.posted_to().map_or_else(FailedParts::new, |queue| queue.end_parts(&self));
                Poll::Ready((self.take(&|_| ()), failed))
            }
            Poll::Pending => Poll::Pending,
        }
    }

    /// Takes the result, which is there, and ends the life of the slot.
    #[inline(never)]
    fn take<S>(self, see: &impl Fn(&WorkCompletion) -> S) -> Result<S, OpErrorKind> {
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

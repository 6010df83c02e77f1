//! The state of an operation's future: its claim to a slot and, until the device is done, its
//! buffers.

#![allow(unsafe_code)]

use std::fmt;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use super::claim::Claim;
use super::drainer::Drainer;
use super::failures::success;
use super::slot::{Detach, DetachedBuffers, FailedParts, Outcome};
use super::work_queue::WorkQueue;
use super::work_request_id::index_of;
use crate::coop::poll_budget;
use crate::error::OpErrorKind;
use crate::types::{WorkCompletion, WrId};

/// Dropping it detaches: the buffers move into the slot and are dropped at the completion.
pub(crate) struct InFlight<B: Send + 'static> {
    held: Option<(Claim<WorkQueue>, B)>,
}

impl<B: Send + 'static> InFlight<B> {
    #[inline]
    pub(crate) fn new(claim: Claim<WorkQueue>, buffer: B) -> Self {
        Self { held: Some((claim, buffer)) }
    }

    pub(crate) fn is_finished(&self) -> bool {
        self.is_complete() || {
            if let Some((claim, _)) = &self.held {
                claim.queue().cq().dispatch_available();
            }
            self.is_complete()
        }
    }

    pub(crate) fn is_complete(&self) -> bool {
        self.held.as_ref().is_some_and(|(claim, _)| claim.is_complete())
    }

    pub(crate) fn refusal(&self) -> Option<OpErrorKind> {
        self.held.as_ref().and_then(|(claim, _)| claim.refusal())
    }

    /// Returns the work queue and the id of the last work request, if it was posted or queued and
    /// its outcome was not taken.
    pub(crate) fn posted(&self) -> Option<(&Arc<WorkQueue>, WrId)> {
        let (claim, _) = self.held.as_ref()?;
        Some((claim.posted_to()?, claim.id()))
    }

    pub(crate) fn is_queued(&self) -> bool {
        self.held.as_ref().is_some_and(|(claim, _)| {
            claim.posted_to().is_some_and(|queue| queue.is_queued(claim.id()))
        })
    }

    /// Passes the buffers and the result of `extract` to `finish`, once.
    ///
    /// `proceed` is polled before an outcome is taken that another task or thread has found. What
    /// this call finds itself counts towards `ready_budget` of the completion queue.
    ///
    /// # Panics
    ///
    /// If polled again after it was ready.
    #[inline(always)]
    pub(crate) fn poll<S, R>(
        &mut self,
        context: &mut Context<'_>,
        proceed: impl FnOnce(&mut Context<'_>) -> Poll<()>,
        extract: impl Fn(&WorkCompletion) -> S,
        finish: impl FnOnce(B, Result<S, OpErrorKind>) -> R,
    ) -> Poll<R> {
        let Some((claim, _)) = &self.held else { polled_again() };
        // SAFETY: C1: only this copy is ended: `end` takes the other out of `held` and forgets it.
        let (claim, held) = (unsafe { claim.same() }, &mut self.held);
        let end = |claim: Claim<WorkQueue>, extracted: Option<S>| {
            // Before the claim is ended: if that unwinds, the drop has nothing to abandon.
            // SAFETY: C1: `held` has the claim copied above, and this is the first take.
            let (_, buffer) = unsafe { held.take().unwrap_unchecked() };
            // SAFETY: C1: the slot is complete.
            Poll::Ready(finish(buffer, unsafe { claim.take(extracted, &extract) }))
        };
        if claim.is_new() {
            // Separate arms, so that the usual one does not test for `None` again
            // (`scripts/instructions`: 837 instead of 886).
            return match Drainer::poll_new(claim.queue(), &claim, context, &extract) {
                Poll::Ready(Some(extracted)) => end(claim, Some(extracted)),
                Poll::Ready(None) => end(claim, None),
                Poll::Pending => Poll::Pending,
            };
        }
        if claim.is_complete() {
            ready!(proceed(context));
            return end(claim, None);
        }
        match claim.wait(context, &extract) {
            Poll::Ready(extracted) => end(claim, extracted),
            Poll::Pending => Poll::Pending,
        }
    }

    /// Like [`poll`](Self::poll), for a batch. Also passes the earlier parts that failed.
    #[inline]
    pub(crate) fn poll_batch<R>(
        &mut self,
        context: &mut Context<'_>,
        finish: impl FnOnce(B, Result<(), OpErrorKind>, FailedParts) -> R,
    ) -> Poll<R> {
        let Some((claim, _)) = &self.held else { polled_again() };
        let extract = |_: &WorkCompletion| claim.queue().end_parts(claim);
        let extracted = if claim.is_new() {
            ready!(Drainer::poll_new(claim.queue(), claim, context, extract))
        } else {
            if claim.is_complete() {
                ready!(poll_budget(context));
            }
            ready!(claim.wait(context, &extract))
        };
        let Some((claim, buffers)) = self.held.take() else { polled_again() };
        let failed = match (extracted, claim.posted_to()) {
            (Some(failed), _) => {
                // SAFETY: C1: its completion was found, so it was posted.
                unsafe { claim.end() };
                return Poll::Ready(finish(buffers, Ok(()), failed));
            }
            (None, Some(queue)) => queue.end_parts(&claim),
            (None, None) => FailedParts::new(),
        };
        // SAFETY: C1: the slot is complete.
        let last = unsafe { claim.take(None, &|_| ()) };
        Poll::Ready(finish(buffers, last, failed))
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
    #[inline]
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
    pub(super) fn release(self) {
        if let Some(queue) = self.posted_to() {
            queue.slots().remember_free(&self);
            // SAFETY: C1: it was posted.
            unsafe { self.end() };
        } else {
            // SAFETY: C1: it was not posted.
            unsafe { self.end_refused() };
        }
    }

    #[cold]
    pub(super) fn abandon<T: Send + 'static>(self, held: T) {
        // SAFETY: C1: this is the claim, and ends here. The reference is taken before the drainer
        // may free the slot, and dropped after the last use of the slot.
        let Some(queue) = (unsafe { self.take_queue() }) else {
            // SAFETY: C1: it was not posted.
            return unsafe { self.end_refused() };
        };
        let index = index_of(self.id());
        // In a box only while the device may use it.
        let (held, unneeded): (Option<DetachedBuffers>, _) =
            if std::mem::needs_drop::<T>() && !self.is_complete() {
                (Some(Box::new(held)), None)
            } else {
                (None, Some(held))
            };
        // Counts as a waiter until reaped, because other tasks may wait for its buffers or
        // capacity. Counted before it is visible, so that the count never falls below zero.
        queue.cq().add_waiter();
        match self.detach(held) {
            Detach::InFlight { waiting } => {
                rdma_provider::trace!(index, "detached");
                if waiting {
                    queue.remove_watcher();
                }
                queue.cq().ensure_watched();
            }
            Detach::Complete(held) => {
                queue.cq().remove_waiter();
                queue.end_parts(&self);
                queue.release(&self);
                drop((held, unneeded));
            }
        }
    }

    #[inline(never)]
    fn wait<S>(
        &self,
        context: &mut Context<'_>,
        extract: &impl Fn(&WorkCompletion) -> S,
    ) -> Poll<Option<S>> {
        if self.is_complete() {
            return Poll::Ready(None);
        }
        self.queue().cq().poll_waiting(self.queue(), self, context, extract)
    }

    /// Returns `extracted`, the result of a success, or else the outcome in the slot.
    ///
    /// # Safety
    ///
    /// The operation is complete, and was posted if `extracted` is some.
    #[inline]
    unsafe fn take<S>(
        self,
        extracted: Option<S>,
        extract: &impl Fn(&WorkCompletion) -> S,
    ) -> Result<S, OpErrorKind> {
        let extracted = match extracted {
            Some(extracted) => extracted,
            None => match self.success(extract) {
                Some((queue, extracted)) => {
                    queue.slots().remember_free(&self);
                    extracted
                }
                None => return self.take_outcome(extract),
            },
        };
        // SAFETY: C1: the caller's promise, or `success` found its queue.
        unsafe { self.end() };
        Ok(extracted)
    }

    #[inline]
    fn success<S>(&self, extract: &impl Fn(&WorkCompletion) -> S) -> Option<(&WorkQueue, S)> {
        let queue = self.posted_to()?;
        let extracted = self.outcome(|outcome| match outcome {
            Ok(wc) if wc.status.is_success() => Some(extract(wc)),
            _ => None,
        })?;
        Some((queue, extracted))
    }

    #[inline(never)]
    fn take_outcome<S>(self, extract: &impl Fn(&WorkCompletion) -> S) -> Result<S, OpErrorKind> {
        let extracted = self.outcome(|outcome| ending(outcome).map(extract));
        self.release();
        extracted
    }
}

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

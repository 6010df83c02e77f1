//! What an operation's future holds: its slot and, until the device is done, its buffers.

use std::fmt;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use super::slot::{Claim, Detach, Held, Outcome};
use super::work_queue::{WorkQueue, index_of};
use crate::error::{CompletionError, OpErrorKind};
use crate::types::{WorkCompletion, WrId};

/// One work request in flight with the buffers `B` it names, or one that was refused.
///
/// Dropping it detaches: the buffers move into the slot and are dropped when the completion has come.
pub(crate) struct InFlight<B: Send + 'static> {
    /// `None` once the outcome was taken.
    held: Option<(Claim, B)>,
}

impl<B: Send + 'static> InFlight<B> {
    #[inline(always)]
    pub(crate) fn new(claim: Claim, buffer: B) -> Self {
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
        self.held.as_ref().is_some_and(|(claim, _)| claim.share().is_some_and(|queue| queue.is_in_line(claim.id())))
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
        let (claim, held) = (claim.same(), &mut self.held);
        let end = |seen: Result<S, OpErrorKind>| {
            let Some((_, buffer)) = held.take() else { polled_again() };
            Poll::Ready(finish(buffer, seen))
        };
        if claim.is_new() {
            let queue = claim.queue();
            return queue.cq().look_first(queue, &claim, context, &see, |seen| {
                end(match seen {
                    Some(seen) => Ok(seen),
                    None => claim.take(&see),
                })
            });
        }
        match claim.wait(context, &see) {
            Poll::Ready(seen) => end(seen),
            Poll::Pending => Poll::Pending,
        }
    }

    #[cold]
    #[inline(never)]
    fn abandon(&mut self) {
        if let Some((claim, buffer)) = self.held.take() {
            match claim.share() {
                Some(queue) => detach(&queue, index_of(claim.id()), buffer),
                None => claim.release(),
            }
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

impl Claim {
    /// Goes on to wait for what `see` makes of a success, or for why it is none.
    #[inline(never)]
    fn wait<S>(&self, context: &mut Context<'_>, see: &impl Fn(&WorkCompletion) -> S) -> Poll<Result<S, OpErrorKind>> {
        if self.is_complete() {
            return Poll::Ready(self.take(see));
        }
        let queue = self.queue();
        queue.cq().look_again(queue, self, context, see, |seen| Poll::Ready(seen.map_or_else(|| self.take(see), Ok)))
    }

    /// Takes the result, which is there, and ends the life of the slot.
    #[inline(never)]
    fn take<S>(&self, see: &impl Fn(&WorkCompletion) -> S) -> Result<S, OpErrorKind> {
        let seen = self.outcome(|outcome| success(outcome).map(see));
        self.release();
        seen
    }
}

/// The completion of a success, or why there is none.
#[inline]
fn success(outcome: &Outcome) -> Result<&WorkCompletion, OpErrorKind> {
    match outcome {
        Ok(wc) if wc.status.is_success() => Ok(wc),
        Ok(wc) => Err(failure(wc)),
        Err(kind) => Err(*kind),
    }
}

#[cold]
fn failure(wc: &WorkCompletion) -> OpErrorKind {
    let WorkCompletion { status, vendor_error, qpn, .. } = *wc;
    OpErrorKind::Completion(CompletionError { status, vendor_error, qpn })
}

/// Leaves `held` to whoever finishes the slot; if it is finished, drops it here.
#[cold]
fn detach<T: Send + 'static>(queue: &WorkQueue, index: u32, held: T) {
    let slot = queue.slots().slot(index);
    let held: Option<Held> = if std::mem::needs_drop::<T>() { Some(Box::new(held)) } else { None };
    // Until it is reaped it counts as waiting, as what it owned and those who wait for room do: counted before it is
    // visible, so that whoever reaps it never counts below zero.
    queue.cq().now_waiting();
    match slot.detach(held) {
        Detach::InFlight { waiting } => {
            tracing::trace!(index, "detached");
            if waiting {
                queue.cq().no_longer_waiting();
            }
            queue.cq().attend();
        }
        Detach::Complete(held) => {
            queue.cq().no_longer_waiting();
            queue.release_batch(index);
            drop(held);
        }
    }
}

impl<B: Send + 'static> fmt::Debug for InFlight<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let id = self.held.as_ref().map(|(claim, _)| claim.id());
        f.debug_struct("InFlight").field("id", &id).finish_non_exhaustive()
    }
}

/// A batch in flight: its slots are chained from the last to the first, and only the last is waited for.
pub(crate) struct InFlightBatch<B: Send + 'static> {
    queue: Arc<WorkQueue>,
    last: WrId,
    len: usize,
    buffers: Option<Vec<B>>,
}

impl<B: Send + 'static> InFlightBatch<B> {
    pub(super) fn new(queue: Arc<WorkQueue>, last: WrId, len: usize, buffers: Vec<B>) -> Self {
        Self { queue, last, len, buffers: Some(buffers) }
    }

    /// The buffers, once, with the outcome of each work request written to `results` in order.
    ///
    /// # Panics
    ///
    /// If polled again after it was ready.
    pub(crate) fn poll(
        &mut self,
        results: &mut Vec<Result<(), OpErrorKind>>,
        context: &mut Context<'_>,
    ) -> Poll<Vec<B>> {
        assert!(self.buffers.is_some(), "a batch was polled after it had completed");
        let (slots, last) = (self.queue.slots(), index_of(self.last));
        let slot = slots.slot(last);
        // A batch has its chain of slots looked through at the end, so it does not end on the short way.
        while !slot.is_complete() {
            ready!(self.queue.cq().wait_slot(slot, context));
        }
        results.clear();
        results.resize(self.len, Ok(()));
        let mut next = Some(last);
        for result in results.iter_mut().rev() {
            let Some(index) = next else { break };
            let slot = slots.slot(index);
            // Work that got no completion of its own was done before one that did.
            if slot.is_complete() {
                *result = slot.outcome(|outcome| success(outcome).map(|_| ()));
            }
            next = slot.previous();
        }
        self.queue.release_batch(last);
        match self.buffers.take() {
            Some(buffers) => Poll::Ready(buffers),
            None => unreachable!("checked above"),
        }
    }
}

impl<B: Send + 'static> Drop for InFlightBatch<B> {
    fn drop(&mut self) {
        if let Some(buffers) = self.buffers.take() {
            detach(&self.queue, index_of(self.last), buffers);
        }
    }
}

impl<B: Send + 'static> fmt::Debug for InFlightBatch<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InFlightBatch")
            .field("last", &self.last)
            .field("len", &self.len)
            .field("done", &self.buffers.is_none())
            .finish_non_exhaustive()
    }
}

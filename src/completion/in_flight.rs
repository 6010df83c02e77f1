//! What an operation's future holds: its slot and, until the device is done, its buffers.

use std::fmt;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use super::slot::{Detach, Held, Outcome};
use super::work_queue::{WorkQueue, index_of};
use crate::error::{CompletionError, OpErrorKind};
use crate::types::{WorkCompletion, WrId};

/// One work request in flight with the buffers `B` it names.
///
/// Dropping it detaches: the buffers move into the slot and are dropped when the completion has come.
pub(crate) struct InFlight<B: Send + 'static> {
    queue: Arc<WorkQueue>,
    id: WrId,
    rounds: u32,
    /// `None` once the outcome was taken.
    buffer: Option<B>,
}

impl<B: Send + 'static> InFlight<B> {
    #[inline]
    pub(super) fn new(queue: Arc<WorkQueue>, id: WrId, buffer: B) -> Self {
        Self { queue, id, rounds: 0, buffer: Some(buffer) }
    }

    /// True if the completion has been found, and not been taken yet.
    pub(crate) fn is_finished(&self) -> bool {
        self.queue.slots().slot(index_of(self.id)).is_complete()
    }

    /// What `finish` makes of the completion and the buffers, once.
    ///
    /// # Panics
    ///
    /// If polled again after it was ready.
    #[inline]
    pub(crate) fn poll<R>(
        &mut self,
        context: &mut Context<'_>,
        finish: impl FnOnce(B, Result<&WorkCompletion, OpErrorKind>) -> R,
    ) -> Poll<R> {
        assert!(self.buffer.is_some(), "an operation was polled after it had completed");
        let slot = self.queue.slots().slot(index_of(self.id));
        if !slot.is_complete()
            && let Some(completion) =
                ready!(self.queue.cq().wait(&self.queue, slot, self.id, &mut self.rounds, context))
        {
            let Some(buffer) = self.buffer.take() else { unreachable!("checked above") };
            return Poll::Ready(finish(buffer, Ok(&completion)));
        }
        let Some(buffer) = self.buffer.take() else { unreachable!("checked above") };
        let result = slot.outcome(|outcome| match outcome {
            // Spelled out: what succeeds goes straight through.
            Ok(completion) if completion.status.is_success() => finish(buffer, Ok(completion)),
            outcome => finish(buffer, success(outcome)),
        });
        self.queue.slots().release(slot, index_of(self.id));
        Poll::Ready(result)
    }

    #[cold]
    #[inline(never)]
    fn abandon(&mut self) {
        if let Some(buffer) = self.buffer.take() {
            detach(&self.queue, index_of(self.id), buffer);
        }
    }
}

impl<B: Send + 'static> Drop for InFlight<B> {
    #[inline(always)]
    fn drop(&mut self) {
        if self.buffer.is_some() {
            self.abandon();
        }
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
            queue.slots().release_chain(index);
            drop(held);
        }
    }
}

impl<B: Send + 'static> fmt::Debug for InFlight<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InFlight").field("id", &self.id).field("done", &self.buffer.is_none()).finish_non_exhaustive()
    }
}

/// A batch in flight: its slots are chained from the last to the first, and only the last is waited for.
pub(crate) struct InFlightBatch<B: Send + 'static> {
    queue: Arc<WorkQueue>,
    last: WrId,
    len: usize,
    rounds: u32,
    buffers: Option<Vec<B>>,
}

impl<B: Send + 'static> InFlightBatch<B> {
    pub(super) fn new(queue: Arc<WorkQueue>, last: WrId, len: usize, buffers: Vec<B>) -> Self {
        Self { queue, last, len, rounds: 0, buffers: Some(buffers) }
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
            ready!(self.queue.cq().wait_slot(slot, &mut self.rounds, context));
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
        slots.release_chain(last);
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

//! What an operation's future holds: its slot and, until the device is done, its buffers.

use std::fmt;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use super::slot::{Detach, Held, Outcome};
use super::work_queue::WorkQueue;
use crate::error::OpErrorKind;

/// One work request in flight with the buffers `B` it names.
///
/// Dropping it detaches: the buffers move into the slot and are dropped when the completion has come.
pub(crate) struct InFlight<B: Send + 'static> {
    queue: Arc<WorkQueue>,
    index: u32,
    rounds: u32,
    /// `None` once the outcome was taken.
    buffer: Option<B>,
}

impl<B: Send + 'static> InFlight<B> {
    #[inline]
    pub(super) fn new(queue: Arc<WorkQueue>, index: u32, buffer: B) -> Self {
        Self { queue, index, rounds: 0, buffer: Some(buffer) }
    }

    /// The outcome and the buffers, once.
    ///
    /// # Panics
    ///
    /// If polled again after it was ready.
    #[inline]
    pub(crate) fn poll(&mut self, context: &mut Context<'_>) -> Poll<(Outcome, B)> {
        assert!(self.buffer.is_some(), "an operation was polled after it had completed");
        let slot = self.queue.slots().slot(self.index);
        if !slot.is_complete() {
            ready!(self.queue.cq().wait(slot, &mut self.rounds, context));
        }
        let outcome = slot.take();
        match self.buffer.take() {
            Some(buffer) => Poll::Ready((outcome, buffer)),
            None => unreachable!("checked above"),
        }
    }
}

impl<B: Send + 'static> Drop for InFlight<B> {
    #[inline]
    fn drop(&mut self) {
        if let Some(buffer) = self.buffer.take() {
            detach(&self.queue, self.index, buffer);
        }
    }
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
        f.debug_struct("InFlight")
            .field("slot", &self.index)
            .field("done", &self.buffer.is_none())
            .finish_non_exhaustive()
    }
}

/// A batch in flight: its slots are chained from the last to the first, and only the last is waited for.
pub(crate) struct InFlightBatch<B: Send + 'static> {
    queue: Arc<WorkQueue>,
    last: u32,
    len: usize,
    rounds: u32,
    buffers: Option<Vec<B>>,
}

impl<B: Send + 'static> InFlightBatch<B> {
    pub(super) fn new(queue: Arc<WorkQueue>, last: u32, len: usize, buffers: Vec<B>) -> Self {
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
        let slots = self.queue.slots();
        let slot = slots.slot(self.last);
        if !slot.is_complete() {
            ready!(self.queue.cq().wait(slot, &mut self.rounds, context));
        }
        results.clear();
        results.resize(self.len, Ok(()));
        let mut next = Some(self.last);
        for result in results.iter_mut().rev() {
            let Some(index) = next else { break };
            let slot = slots.slot(index);
            // Work that got no completion of its own was done before one that did.
            if slot.is_complete() {
                *result = slot.peek().into_result().map(|_| ());
            }
            next = slot.previous();
        }
        slots.release_chain(self.last);
        match self.buffers.take() {
            Some(buffers) => Poll::Ready(buffers),
            None => unreachable!("checked above"),
        }
    }
}

impl<B: Send + 'static> Drop for InFlightBatch<B> {
    fn drop(&mut self) {
        if let Some(buffers) = self.buffers.take() {
            detach(&self.queue, self.last, buffers);
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

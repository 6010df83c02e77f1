use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use pin_project::pin_project;

use super::completion_queue::CompletionQueue;
use super::deferral::wake_in_turn;
use super::drainer::Drainer;

impl CompletionQueue {
    /// Runs `future` and polls this queue each time the runtime schedules the returned future,
    /// which always reschedules itself. Meant for a current-thread runtime with a core of its own:
    /// `runtime.block_on(queue.drive(process_packets()))`.
    ///
    /// While this future runs, operations of a [`Cooperative`](super::CompletionMode::Cooperative)
    /// queue sleep until their completion arrives, instead of each polling for itself. If it is not
    /// polled for a while, events wake them. In the other modes it reduces latency.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe if `future` is. After it is dropped, operations poll for themselves again.
    pub fn drive<F: Future>(&self, future: F) -> Drive<F> {
        Drive { driver: Driver::new(self.shared()), rounds: 0, future }
    }
}

/// A future that polls a completion queue while it runs; see [`CompletionQueue::drive`].
///
/// # Cancel safety
///
/// Cancel safe if the inner future is.
#[pin_project]
#[must_use = "futures do nothing unless they are awaited"]
pub struct Drive<F> {
    driver: Driver,
    rounds: u32,
    #[pin]
    future: F,
}

impl<F: Future> Future for Drive<F> {
    type Output = F::Output;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
        let this = self.project();
        this.driver.queue.process_packets();
        this.driver.queue.drain();
        let output = this.future.poll(context);
        if output.is_pending() {
            *this.rounds = this.rounds.wrapping_add(1);
            wake_in_turn(context, *this.rounds);
        }
        output
    }
}

impl<F> fmt::Debug for Drive<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Drive").field("queue", &self.driver.queue).finish_non_exhaustive()
    }
}

struct Driver {
    queue: Arc<Drainer>,
}

impl Driver {
    fn new(queue: &Arc<Drainer>) -> Self {
        queue.begin_driving();
        Self { queue: queue.clone() }
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        self.queue.end_driving();
    }
}

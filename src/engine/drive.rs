//! One future that polls for all: the heart of a thread-per-core service.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use pin_project::pin_project;

use super::completion_queue::CompletionQueue;
use super::completion_queue_core::CompletionQueueCore;
use crate::contained::contained;

impl CompletionQueue {
    /// Runs `future` and polls this queue each time the runtime comes round to it, which is at once.
    ///
    /// Under a [`Cooperative`](super::CompletionMode::Cooperative) queue every waiting operation polls for itself; while
    /// this runs it polls for all of them, however many tasks of the runtime wait, and they sleep until their
    /// completion is there; should it not be polled for a while, events wake them. Meant for the main task of a current-thread runtime with a core of its own:
    /// `runtime.block_on(queue.drive(serve()))`. In the other modes it makes completions be noticed earlier.
    ///
    /// # Cancel safety
    ///
    /// That of `future`. When it is dropped, operations poll for themselves again.
    pub fn drive<F: Future>(&self, future: F) -> Drive<F> {
        Drive { driver: Driver::new(self.shared()), future }
    }
}

/// A future that polls a completion queue while it runs; see [`CompletionQueue::drive`].
///
/// # Cancel safety
///
/// That of the future within.
#[pin_project]
#[must_use = "futures do nothing unless they are awaited"]
pub struct Drive<F> {
    driver: Driver,
    #[pin]
    future: F,
}

impl<F: Future> Future for Drive<F> {
    type Output = F::Output;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
        let this = self.project();
        this.driver.queue.serve();
        this.driver.queue.drain();
        let output = this.future.poll(context);
        if output.is_pending() {
            contained(|| context.waker().wake_by_ref());
        }
        output
    }
}

impl<F> fmt::Debug for Drive<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Drive").field("queue", &self.driver.queue).finish_non_exhaustive()
    }
}

/// As long as it lives, somebody polls the queue.
struct Driver {
    queue: Arc<CompletionQueueCore>,
}

impl Driver {
    fn new(queue: &Arc<CompletionQueueCore>) -> Self {
        queue.begin_driving();
        Self { queue: queue.clone() }
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        self.queue.end_driving();
    }
}

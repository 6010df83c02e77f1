//! Operations of a pool, which may wait for an initiator.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use parking_lot::Mutex;

use super::peer::{Grant, Peer};
use crate::engine::wake;
use crate::error::OpErrorKind;

/// An operation `F` ([`Write`](crate::op::Write), [`Read`](crate::op::Read), …) that may wait for
/// an initiator, see [`DcPoolPeer`](super::DcPoolPeer).
///
/// # Cancel safety
///
/// Dropping it before it is posted sends nothing and drops its buffers. Dropping it later does not
/// cancel the operation, see [`Operation`](crate::op::Operation).
///
/// # Panics
///
/// Panics if polled after completion.
#[must_use = "the operation is posted or queued; await it for its result"]
pub struct PooledOperation<F> {
    progress: Progress<F>,
}

enum Progress<F> {
    Posted(F),
    Queued(Queued<F>),
}

impl<F> PooledOperation<F> {
    #[inline]
    pub(super) fn posted(future: F) -> Self {
        Self { progress: Progress::Posted(future) }
    }

    pub(super) fn queued(entry: Arc<Entry<F>>, peer: Arc<Peer>) -> Self {
        Self { progress: Progress::Queued(Queued { entry, peer }) }
    }
}

impl<F: Future + Unpin> Future for PooledOperation<F> {
    type Output = F::Output;

    #[inline]
    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
        loop {
            match &mut self.progress {
                Progress::Posted(future) => return Pin::new(future).poll(context),
                Progress::Queued(queued) => match queued.entry.poll_posted(context.waker()) {
                    Some(future) => self.progress = Progress::Posted(future),
                    None => {
                        queued.peer.watch_completions(context);
                        return Poll::Pending;
                    }
                },
            }
        }
    }
}

impl<F: fmt::Debug> fmt::Debug for PooledOperation<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.progress {
            Progress::Posted(future) => f.debug_tuple("PooledOperation").field(future).finish(),
            Progress::Queued(_) => f.write_str("PooledOperation(queued)"),
        }
    }
}

struct Queued<F> {
    entry: Arc<Entry<F>>,
    peer: Arc<Peer>,
}

impl<F> Drop for Queued<F> {
    fn drop(&mut self) {
        // Dropped outside the lock: it may contain values of the user.
        let stage = std::mem::replace(&mut *self.entry.stage.lock(), Stage::Taken);
        if matches!(stage, Stage::Queued { .. }) {
            self.peer.withdraw(Arc::as_ptr(&self.entry).cast());
        }
    }
}

/// Posts a waiting operation, or fails it.
pub(super) type Work<F> = Box<dyn FnOnce(Result<Grant<'_>, OpErrorKind>) -> F + Send>;

pub(super) struct Entry<F> {
    stage: Mutex<Stage<F>>,
}

enum Stage<F> {
    Queued {
        work: Work<F>,
        waker: Option<Waker>,
    },
    /// Posted, for the future to take.
    Posted(F),
    Taken,
}

impl<F> Entry<F> {
    pub(super) fn new(work: Work<F>) -> Arc<Self> {
        Arc::new(Self { stage: Mutex::new(Stage::Queued { work, waker: None }) })
    }

    /// Returns the posted operation; otherwise registers `waker`.
    fn poll_posted(&self, waker: &Waker) -> Option<F> {
        // Cloning and dropping a waker runs user code: both happen without the lock.
        let mut clone = None;
        let mut stage = self.stage.lock();
        if let Stage::Queued { waker: kept, .. } = &*stage {
            if kept.as_ref().is_some_and(|kept| kept.will_wake(waker)) {
                return None;
            }
            drop(stage);
            clone = Some(waker.clone());
            stage = self.stage.lock();
        }
        if let Stage::Queued { waker: kept, .. } = &mut *stage {
            std::mem::swap(kept, &mut clone);
            return None;
        }
        match std::mem::replace(&mut *stage, Stage::Taken) {
            Stage::Posted(future) => Some(future),
            _ => unreachable!("the future takes the operation once"),
        }
    }
}

pub(super) trait Waiting: Send + Sync {
    /// Posts the operation or fails it. Called under locks, within a
    /// [`Deferral`](crate::engine::Deferral).
    fn resolve(&self, grant: Result<Grant<'_>, OpErrorKind>);

    /// Wakes the task. Called under locks, within a deferral.
    fn wake_task(&self);
}

impl<F: Send> Waiting for Entry<F> {
    fn resolve(&self, grant: Result<Grant<'_>, OpErrorKind>) {
        let mut stage = self.stage.lock();
        match std::mem::replace(&mut *stage, Stage::Taken) {
            Stage::Queued { work, waker } => {
                *stage = Stage::Posted(work(grant));
                drop(stage);
                if let Some(waker) = waker {
                    wake(waker);
                }
            }
            // The future was dropped but has not left the queue yet.
            other => *stage = other,
        }
    }

    fn wake_task(&self) {
        if let Stage::Queued { waker, .. } = &mut *self.stage.lock()
            && let Some(waker) = waker.take()
        {
            wake(waker);
        }
    }
}

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use rdma_provider::later;
use rdma_provider::locks::Mutex;

use super::peer::{Grant, Peer};
use crate::clock;
use crate::error::OpErrorKind;
use crate::op::{Revocable, Within, Work as PostedWork};

/// An operation `F`, such as a [`Write`](crate::op::Write), of a [`DcPoolPeer`](super::DcPoolPeer),
/// which may wait for an initiator.
///
/// # Cancel safety
///
/// Dropping it before it is posted sends nothing. Later, it is like dropping an
/// [`Operation`](crate::op::Operation).
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

impl<F: Revocable + Send> PooledOperation<F> {
    /// Limits the operation to `limit` from now. The deadline revokes it, see [`Within`]:
    ///
    /// - A queued operation leaves the queue without effect on other work, unless it is part of a
    ///   batch that has an initiator.
    /// - An operation in flight makes its initiator fail, which flushes other work of this peer,
    ///   and in a [shared](super::DcPolicy::Shared) pool that of all peers of the initiator. The
    ///   pool then repairs the initiator, or destroys it if the device does not flush its work
    ///   within a second.
    ///
    /// If the operation completes just before the deadline and its initiator moves to another peer,
    /// the work of that peer is flushed.
    pub fn within(self, limit: Duration) -> Within<Self> {
        self.deadline(clock::deadline(limit))
    }

    /// Sets a deadline like [`within`](Self::within).
    pub fn deadline(self, deadline: Instant) -> Within<Self> {
        Within::new(self, deadline)
    }
}

impl<F: Revocable + Send> Revocable for PooledOperation<F> {
    type Success = F::Success;
    type Failure = F::Failure;

    fn work(&self) -> Option<PostedWork<'_>> {
        match &self.progress {
            Progress::Posted(future) => future.work(),
            Progress::Queued(_) => None,
        }
    }

    fn withdraw(&mut self, kind: OpErrorKind) -> bool {
        let Progress::Queued(queued) = &self.progress else { return false };
        let withdrawn = queued.entry.resolve(Err(kind));
        if withdrawn {
            queued.leave();
        }
        let posted = queued.entry.stage.lock().take_posted();
        if let Some(future) = posted {
            self.progress = Progress::Posted(future);
        }
        withdrawn
    }

    fn has_result(&self) -> bool {
        match &self.progress {
            Progress::Posted(future) => future.has_result(),
            Progress::Queued(_) => false,
        }
    }

    fn conclude(output: Self::Output, revoked: bool) -> Result<F::Success, F::Failure> {
        F::conclude(output, revoked)
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

impl<F> Queued<F> {
    fn leave(&self) {
        self.peer.withdraw(Arc::as_ptr(&self.entry).cast());
    }
}

impl<F> Drop for Queued<F> {
    fn drop(&mut self) {
        // Dropped without the lock, because it may contain values of the user.
        let stage = std::mem::replace(&mut *self.entry.stage.lock(), Stage::Taken);
        if matches!(stage, Stage::Queued { .. }) {
            self.leave();
        }
    }
}

pub(super) type Work<F> = Box<dyn FnOnce(Result<Grant<'_>, OpErrorKind>) -> F + Send>;

pub(super) struct Entry<F> {
    stage: Mutex<Stage<F>>,
}

enum Stage<F> {
    Queued { work: Work<F>, waker: Option<Waker> },
    Posted(F),
    Taken,
}

impl<F> Entry<F> {
    pub(super) fn new(work: Work<F>) -> Arc<Self> {
        Arc::new(Self { stage: Mutex::new(Stage::Queued { work, waker: None }) })
    }

    fn poll_posted(&self, waker: &Waker) -> Option<F> {
        // Cloning and dropping a waker runs user code, so both happen without the lock.
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
        stage.take_posted()
    }
}

impl<F> Stage<F> {
    fn take_posted(&mut self) -> Option<F> {
        match std::mem::replace(self, Self::Taken) {
            Self::Posted(future) => Some(future),
            other => {
                *self = other;
                None
            }
        }
    }
}

pub(super) trait Waiting: Send + Sync {
    /// Called under locks. Returns false without effect if the operation was posted or failed
    /// before, or if the future was dropped.
    fn resolve(&self, grant: Result<Grant<'_>, OpErrorKind>) -> bool;

    /// Called under locks, so it must wake the task after their release.
    fn wake_task(&self);
}

impl<F: Send> Waiting for Entry<F> {
    fn resolve(&self, grant: Result<Grant<'_>, OpErrorKind>) -> bool {
        let mut stage = self.stage.lock();
        match std::mem::replace(&mut *stage, Stage::Taken) {
            Stage::Queued { work, waker } => {
                *stage = Stage::Posted(work(grant));
                drop(stage);
                later::wake(waker);
                true
            }
            other => {
                *stage = other;
                false
            }
        }
    }

    fn wake_task(&self) {
        if let Stage::Queued { waker, .. } = &mut *self.stage.lock() {
            later::wake(waker.take());
        }
    }
}

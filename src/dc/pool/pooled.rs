//! An operation of a pool: one of its initiator, which may have to wait for that first.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use parking_lot::Mutex;

use super::peer::{Grant, Peer};
use crate::engine::wake;
use crate::error::OpErrorKind;

/// An operation `F` that may have to wait for an initiator first: [`Write`](crate::op::Write), [`Read`](crate::op::Read), …; its
/// result is that of `F`.
///
/// Once it has an initiator it is in flight, whether it is polled or not. Until then it stands in the line of its peer, and is
/// posted when the turn comes, also without being polled.
///
/// # Cancel safety
///
/// Dropped while it waits for an initiator, nothing is sent, its buffers are dropped at once, and those behind it move up.
/// Dropped later it goes on, as [`Operation`](crate::op::Operation) does.
///
/// # Panics
///
/// If polled again after it was ready.
#[must_use = "it is posted or in line already, but only awaiting it tells whether it succeeded"]
pub struct Pooled<F> {
    progress: Progress<F>,
}

enum Progress<F> {
    Posted(F),
    Lined(Lined<F>),
}

impl<F> Pooled<F> {
    #[inline]
    pub(super) fn posted(future: F) -> Self {
        Self { progress: Progress::Posted(future) }
    }

    pub(super) fn lined(entry: Arc<Entry<F>>, peer: Arc<Peer>) -> Self {
        Self { progress: Progress::Lined(Lined { entry, peer }) }
    }
}

impl<F: Future + Unpin> Future for Pooled<F> {
    type Output = F::Output;

    #[inline]
    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
        loop {
            match &mut self.progress {
                Progress::Posted(future) => return Pin::new(future).poll(context),
                Progress::Lined(lined) => match lined.entry.look(context.waker()) {
                    Some(future) => self.progress = Progress::Posted(future),
                    None => {
                        lined.peer.attend(context);
                        return Poll::Pending;
                    }
                },
            }
        }
    }
}

impl<F: fmt::Debug> fmt::Debug for Pooled<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.progress {
            Progress::Posted(future) => f.debug_tuple("Pooled").field(future).finish(),
            Progress::Lined(_) => f.write_str("Pooled(in line)"),
        }
    }
}

/// Place in a line, given up when it is dropped.
struct Lined<F> {
    entry: Arc<Entry<F>>,
    peer: Arc<Peer>,
}

impl<F> Drop for Lined<F> {
    fn drop(&mut self) {
        // What is taken out is dropped without a lock: it may be memory of the user's.
        let stage = std::mem::replace(&mut *self.entry.stage.lock(), Stage::Taken);
        if matches!(stage, Stage::Lined { .. }) {
            self.peer.step_out(Arc::as_ptr(&self.entry).cast());
        }
    }
}

/// Posts what waits, or ends it.
pub(super) type Work<F> = Box<dyn FnOnce(Result<Grant<'_>, OpErrorKind>) -> F + Send>;

/// What is to be posted when the turn comes.
pub(super) struct Entry<F> {
    stage: Mutex<Stage<F>>,
}

enum Stage<F> {
    Lined {
        work: Work<F>,
        waker: Option<Waker>,
    },
    /// For the future to take.
    Posted(F),
    Taken,
}

impl<F> Entry<F> {
    pub(super) fn new(work: Work<F>) -> Arc<Self> {
        Arc::new(Self { stage: Mutex::new(Stage::Lined { work, waker: None }) })
    }

    /// The operation if it was posted; otherwise `waker` is woken when it is.
    fn look(&self, waker: &Waker) -> Option<F> {
        // Cloning and dropping a waker runs code of the user, so both happen without the lock.
        let mut clone = None;
        let mut stage = self.stage.lock();
        if let Stage::Lined { waker: kept, .. } = &*stage {
            if kept.as_ref().is_some_and(|kept| kept.will_wake(waker)) {
                return None;
            }
            drop(stage);
            clone = Some(waker.clone());
            stage = self.stage.lock();
        }
        if let Stage::Lined { waker: kept, .. } = &mut *stage {
            std::mem::swap(kept, &mut clone);
            return None;
        }
        match std::mem::replace(&mut *stage, Stage::Taken) {
            Stage::Posted(future) => Some(future),
            _ => unreachable!("its future takes it once"),
        }
    }
}

/// An entry of a line, whatever it is made of.
pub(super) trait Waiting: Send + Sync {
    /// Posts it, or ends it with an error. Under a lock: the caller has deferred what wakes others.
    fn decide(&self, grant: Result<Grant<'_>, OpErrorKind>);

    /// Has its task look again. Under a lock, as above.
    fn rouse(&self);
}

impl<F: Send> Waiting for Entry<F> {
    fn decide(&self, grant: Result<Grant<'_>, OpErrorKind>) {
        let mut stage = self.stage.lock();
        match std::mem::replace(&mut *stage, Stage::Taken) {
            Stage::Lined { work, waker } => {
                *stage = Stage::Posted(work(grant));
                drop(stage);
                if let Some(waker) = waker {
                    wake(waker);
                }
            }
            // Its future was dropped just now, and has not stepped out of the line yet.
            other => *stage = other,
        }
    }

    fn rouse(&self) {
        if let Stage::Lined { waker, .. } = &mut *self.stage.lock()
            && let Some(waker) = waker.take()
        {
            wake(waker);
        }
    }
}

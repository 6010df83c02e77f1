//! A queue pair with its two work queues, from first post to last flush.
//!
//! The end, in this order: no more posts; to the error state, so that the device flushes; take the flushes
//! that are there; destroy, after which the device touches nothing any more; take what it left in the
//! completion queues; fail what never got a completion. Only then are buffers free. If the device refuses to destroy it,
//! they are free when their flushes come, those of work in line at once.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use super::completion_queue_core::CompletionQueueCore;
use super::posting::Poster;
use super::wake_list::{Deferral, Teardown, WakeList};
use super::work_queue::WorkQueue;
use super::work_request::Limits;
use crate::error::{OpErrorKind, SetupError, VerbError};
use crate::memory::WindowSet;
use crate::sync::lock;
use crate::types::{QpAttr, QpState};
use crate::verbs::{Qp, Srq};
use parking_lot::Mutex;
use smallvec::SmallVec;

/// A queue pair and what is in flight on it.
pub(crate) struct QueuePairCore {
    /// `None` once destroyed.
    qp: Mutex<Option<Arc<Qp>>>,
    /// One change of state at a time, together with what it makes the device forget: nobody posts again before that has
    /// ended. Nobody is woken under it.
    change: Mutex<()>,
    send: Arc<WorkQueue>,
    /// `None` with a shared receive queue.
    receive: Option<Arc<WorkQueue>>,
    shared: Option<Shared>,
    /// Of leases. They end before the queue pair does.
    windows: Arc<WindowSet>,
}

impl Teardown for QueuePairCore {
    fn shut_down(&self, kind: OpErrorKind) {
        Self::shut_down(self, kind);
    }
}

/// A shared receive queue that a queue pair or DC target draws from.
pub(crate) struct Shared {
    pub(super) queue: Arc<WorkQueue>,
    /// Dropped with the queue pair and not before: it ends the receives. Never, if that is not destroyed.
    owner: Mutex<Option<Box<dyn Any + Send + Sync>>>,
}

impl Shared {
    /// `owner` ends `queue` when it is dropped.
    pub(crate) fn new(queue: Arc<WorkQueue>, owner: impl Any + Send + Sync) -> Self {
        Self { queue, owner: Mutex::new(Some(Box::new(owner))) }
    }

    /// Keeps it for ever: what draws from it was not destroyed.
    pub(super) fn keep(&self) {
        std::mem::forget(self.owner.lock().take());
    }
}

impl QueuePairCore {
    /// Takes charge of `qp`, whose completions go to `send_cq` and `recv_cq`. No limits for receives: it draws
    /// from `shared`.
    pub(crate) fn new(
        qp: Qp,
        (send_cq, send): (&Arc<CompletionQueueCore>, Limits),
        (recv_cq, receive): (&Arc<CompletionQueueCore>, Option<Limits>),
        shared: Option<Shared>,
    ) -> Result<Arc<Self>, SetupError> {
        let qp = Arc::new(qp);
        let send = send_cq.attach(Poster::Send(qp.clone()), send)?;
        let receive = match receive
            .map(|limits| recv_cq.attach(Poster::Receive(qp.clone()), limits))
            .transpose()
        {
            Ok(receive) => receive,
            Err(error) => {
                send_cq.abandon(&send, OpErrorKind::Closed, true);
                return Err(error);
            }
        };
        let core = Arc::new(Self {
            qp: Mutex::new(Some(qp)),
            change: Mutex::new(()),
            send,
            receive,
            shared,
            windows: Arc::default(),
        });
        // Fails if a completion queue has failed meanwhile, which then did not know of this queue pair.
        let this: Arc<dyn Teardown> = core.clone();
        for queue in core.queues() {
            queue.cq().own(queue, Arc::downgrade(&this))?;
        }
        if let Some(Shared { queue, .. }) = &core.shared {
            queue.cq().draw(queue, &this)?;
        }
        Ok(core)
    }

    pub(crate) fn send(&self) -> &Arc<WorkQueue> {
        &self.send
    }

    pub(crate) fn receive(&self) -> Option<&Arc<WorkQueue>> {
        self.receive.as_ref()
    }

    fn queues(&self) -> impl Iterator<Item = &Arc<WorkQueue>> {
        std::iter::once(&self.send).chain(&self.receive)
    }

    /// The bare queue pair.
    pub(crate) fn qp(&self) -> Result<Arc<Qp>, SetupError> {
        self.qp.lock().clone().ok_or(SetupError::Closed)
    }

    /// The windows of its leases. None may be made without a share of the bare queue pair, which keeps it from its end.
    pub(crate) fn windows(&self) -> &Arc<WindowSet> {
        &self.windows
    }

    /// Changes attributes and state. Work that a reset makes the device forget fails as closed.
    pub(crate) fn modify(&self, attr: &QpAttr) -> Result<(), SetupError> {
        let _deferral = Deferral::begin();
        let change = self.change.lock();
        if attr.state != Some(QpState::Reset) {
            return self.qp()?.modify(attr);
        }
        let mut woken: [WakeList; 3] = Default::default();
        if let Some(Shared { queue, .. }) = &self.shared {
            // What has arrived goes with the completions of a queue pair that is reset, and it alone knows of it.
            self.flush(&*self.qp()?);
            woken[2] = queue.cq().drain_all();
        }
        let qp = self.qp()?;
        // Who is about to post has seen a state in which that can be done: behind the reset the driver would take it, and the
        // device would execute it when it is up again, long after it was given up here.
        let posting: SmallVec<[_; 2]> = self.queues().map(|queue| lock(&queue.posting)).collect();
        let result = qp.modify(attr);
        drop(posting);
        drop(qp);
        if result.is_ok() {
            for (queue, woken) in self.queues().zip(&mut woken) {
                *woken = queue.cq().forget(queue, OpErrorKind::Closed, false);
            }
        }
        drop(change);
        woken.into_iter().for_each(WakeList::finish);
        result
    }

    /// To the error state, and past the last receive that it takes from a shared queue. Refused in RESET, where nothing is in flight, and by a device that is gone, which flushes
    /// nothing.
    fn flush(&self, qp: &Qp) {
        match qp.modify(&QpAttr::to_state(QpState::Err)) {
            Ok(()) => qp.await_last_receive(),
            Err(error) => {
                tracing::debug!(%error, "not moved to the error state before it is reset or destroyed")
            }
        }
    }

    /// Destroys the queue pair and ends all that is in flight, with `kind` where the device said nothing.
    pub(crate) fn shut_down(&self, kind: OpErrorKind) {
        // Tasks are woken when all of it has ended.
        let _deferral = Deferral::begin();
        let change = self.change.lock();
        let taken = self.qp.lock().take();
        drop(change);
        let Some(qp) = taken else { return };
        let _span = tracing::debug_span!("shut_down", qpn = %qp.qpn()).entered();
        let posters: [_; 2] =
            [self.send.close(), self.receive.as_ref().and_then(|queue| queue.close())];
        self.flush(&qp);
        let shared = self.shared.as_ref().map(|shared| &shared.queue);
        for queue in self.queues().chain(shared) {
            queue.cq().drain();
        }
        drop(posters);
        match self.destroy(qp) {
            Err(error) if !error.is_device_gone() => {
                tracing::error!(%error, "what is in flight ends when the device says so");
                self.shared.iter().for_each(Shared::keep);
                self.queues().for_each(|queue| queue.end_line(kind));
                self.send.tell_of_end();
                return;
            }
            // The kernel takes the queue pair of a device that is gone down by itself.
            Ok(()) | Err(_) => {}
        }
        for queue in self.queues() {
            queue.cq().abandon(queue, kind, true);
        }
        if let Some(queue) = shared {
            queue.cq().no_longer_draws(queue, self);
        }
        self.send.tell_of_end();
    }

    /// Takes the last share and destroys it. Whoever holds another is in the middle of a verb and done with it at once.
    fn destroy(&self, mut qp: Arc<Qp>) -> Result<(), VerbError> {
        loop {
            match Arc::try_unwrap(qp) {
                Ok(qp) => {
                    self.windows.end();
                    return qp.destroy();
                }
                Err(shared) => qp = shared,
            }
            std::thread::yield_now();
        }
    }
}

/// Ends a shared receive queue that nothing draws from any more: receives fail as closed, and their buffers are free.
///
/// Not if the device refuses to destroy it. Then nothing of it is ever free, for nothing ever completes.
pub(crate) fn end_shared(queue: &Arc<WorkQueue>, srq: Srq) {
    drop(queue.close());
    match srq.destroy() {
        Err(error) if !error.is_device_gone() => {
            tracing::error!(%error, "receives of a shared queue stay with the device for ever");
            queue.end_line(OpErrorKind::Closed);
        }
        Ok(()) | Err(_) => queue.shut(OpErrorKind::Closed),
    }
}

impl Drop for QueuePairCore {
    fn drop(&mut self) {
        self.shut_down(OpErrorKind::Closed);
    }
}

impl fmt::Debug for QueuePairCore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QueuePairCore")
            .field("qp", &*self.qp.lock())
            .field("send", &self.send)
            .field("receive", &self.receive)
            .finish()
    }
}

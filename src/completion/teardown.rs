//! A queue pair with its two work queues, from first post to last flush.
//!
//! The end, in this order: no more posts; to the error state, so that the device flushes; take the flushes
//! that are there; destroy, after which the device touches nothing any more; take what it left in the
//! completion queues; fail what never got a completion. Only then are buffers free.

use std::fmt;
use std::sync::Arc;

use super::queue::{CqShared, WakeList};
use super::work_queue::{Limits, Poster, WorkQueue};
use crate::error::{OpErrorKind, SetupError};
use crate::types::{QpAttr, QpState};
use crate::verbs::Qp;
use parking_lot::Mutex;

/// A queue pair and what is in flight on it.
pub(crate) struct QueuePairCore {
    /// `None` once destroyed.
    qp: Mutex<Option<Arc<Qp>>>,
    changes: Mutex<()>,
    send: Arc<WorkQueue>,
    /// `None` with a shared receive queue.
    receive: Option<Arc<WorkQueue>>,
}

impl QueuePairCore {
    /// Takes charge of `qp`, whose completions go to `send_cq` and `recv_cq`. No limits for receives: it draws
    /// from a shared receive queue.
    pub(crate) fn new(
        qp: Qp,
        (send_cq, send): (&Arc<CqShared>, Limits),
        (recv_cq, receive): (&Arc<CqShared>, Option<Limits>),
    ) -> Result<Arc<Self>, SetupError> {
        let qp = Arc::new(qp);
        let send = send_cq.attach(Poster::Send(qp.clone()), send)?;
        let receive = match receive.map(|limits| recv_cq.attach(Poster::Receive(qp.clone()), limits)).transpose() {
            Ok(receive) => receive,
            Err(error) => {
                send_cq.abandon(&send, OpErrorKind::Closed, true);
                return Err(error);
            }
        };
        let core = Arc::new(Self { qp: Mutex::new(Some(qp)), changes: Mutex::new(()), send, receive });
        for queue in core.queues() {
            queue.cq().own(queue, &core);
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

    /// Changes attributes and state. Work that a reset makes the device forget fails as closed.
    pub(crate) fn modify(&self, attr: &QpAttr) -> Result<(), SetupError> {
        // One at a time: what is posted after a reset must not be taken for what the reset made the device forget.
        let change = self.changes.lock();
        self.qp()?.modify(attr)?;
        if attr.state == Some(QpState::Reset) {
            let abandon = |queue: &Arc<WorkQueue>| queue.cq().abandon_unwoken(queue, OpErrorKind::Closed, false);
            let woken: [_; 2] = [abandon(&self.send), self.receive.as_ref().map(abandon).unwrap_or_default()];
            // Whoever is woken may run at once, and change the state next.
            drop(change);
            woken.into_iter().for_each(WakeList::finish);
        }
        Ok(())
    }

    /// Destroys the queue pair and ends all that is in flight, with `kind` where the device said nothing.
    pub(crate) fn shut_down(&self, kind: OpErrorKind) {
        let Some(qp) = self.qp.lock().take() else { return };
        let _span = tracing::debug_span!("shut_down", qpn = %qp.qpn()).entered();
        let posters: [_; 2] = [self.send.close(), self.receive.as_ref().and_then(|queue| queue.close())];
        // Refused in RESET, where nothing is in flight, and by a device that is gone, which flushes nothing.
        if let Err(error) = qp.modify(&QpAttr::to_state(QpState::Err)) {
            tracing::debug!(%error, "not moved to the error state before it is destroyed");
        }
        for queue in self.queues() {
            queue.cq().drain();
        }
        drop(posters);
        destroy(qp);
        for queue in self.queues() {
            queue.cq().abandon(queue, kind, true);
        }
    }
}

/// Drops the last share. Whoever holds another is in the middle of a verb and done with it at once.
fn destroy(mut qp: Arc<Qp>) {
    loop {
        match Arc::try_unwrap(qp) {
            Ok(qp) => return drop(qp),
            Err(shared) => qp = shared,
        }
        std::thread::yield_now();
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

//! A queue pair with its two work queues, and its teardown.
//!
//! Teardown order:
//!
//! 1. stop posting;
//! 2. if work is in flight, move to the error state, so that the device flushes;
//! 3. take the available flushes;
//! 4. destroy the queue pair, after which the device accesses nothing;
//! 5. take the completions that it left in the completion queues;
//! 6. fail the work that has no completion. Only now are its buffers free.
//!
//! If the device refuses to destroy it, posted buffers are free when their flushes arrive, queued
//! buffers at once.

use std::any::Any;
use std::fmt;
use std::sync::{Arc, OnceLock};

use super::drainer::Drainer;
use super::wake_list::Teardown;
use super::work_queue::{DeviceQueue, WorkQueue};
use super::work_request::Limits;
use crate::error::{CompletionError, OpErrorKind, SetupError, VerbError};
use crate::memory::WindowSet;
use crate::sync::lock;
use crate::types::{QpAttr, QpState};
use crate::verbs::{Qp, Srq};
use rdma_provider::locks::{Mutex, Section};
use smallvec::SmallVec;

pub(crate) struct QueuePairCore {
    qp: Mutex<Option<Arc<Qp>>>,
    /// Serialises state changes. A reset holds it until the work in flight has failed, so nothing
    /// is posted earlier. Tasks are not woken under it.
    change: Mutex<()>,
    send: Arc<WorkQueue>,
    receive: Option<Arc<WorkQueue>>,
    shared: Option<SharedReceives>,
    /// Windows of leases, deallocated before the queue pair is destroyed.
    windows: OnceLock<Arc<WindowSet>>,
}

impl Teardown for QueuePairCore {
    fn shut_down(&self, kind: OpErrorKind) {
        Self::shut_down(self, kind);
    }

    fn move_to_error(&self, cause: OpErrorKind) -> bool {
        // First, so that a task that finds the flushes also finds their cause.
        self.send.note_cause(cause);
        let Ok(qpn) = self.qp().map(|qp| qp.qpn()) else { return false };
        match self.modify(&QpAttr::to_state(QpState::Err)) {
            Ok(()) => {
                rdma_provider::warn!(%qpn, %cause, "moved queue pair to the error state");
                true
            }
            Err(error) => {
                rdma_provider::warn!(%qpn, %error, "failed to move queue pair to the error state");
                false
            }
        }
    }
}

pub(crate) struct SharedReceives {
    pub(super) queue: Arc<WorkQueue>,
    /// Dropping the owner ends the receives, so it is dropped after the queue pair is destroyed,
    /// and leaked if that fails.
    owner: Mutex<Option<Box<dyn Any + Send + Sync>>>,
}

impl SharedReceives {
    pub(crate) fn new(queue: Arc<WorkQueue>, owner: impl Any + Send + Sync) -> Self {
        Self { queue, owner: Mutex::new(Some(Box::new(owner))) }
    }

    pub(super) fn leak(&self) {
        std::mem::forget(self.owner.lock().take());
    }
}

impl QueuePairCore {
    pub(crate) fn new(
        qp: Qp,
        (send_cq, send): (&Arc<Drainer>, Limits),
        (recv_cq, receive): (&Arc<Drainer>, Option<Limits>),
        shared: Option<SharedReceives>,
    ) -> Result<Arc<Self>, SetupError> {
        let qp = Arc::new(qp);
        let send = send_cq.attach(DeviceQueue::Send(qp.clone()), send)?;
        let receive = match receive
            .map(|limits| recv_cq.attach(DeviceQueue::Receive(qp.clone()), limits))
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
            windows: OnceLock::new(),
        });
        // Fails if a completion queue has failed meanwhile, because the failure missed this queue
        // pair.
        let this: Arc<dyn Teardown> = core.clone();
        for queue in core.queues() {
            queue.cq().set_queue_pair(queue, Arc::downgrade(&this))?;
        }
        if let Some(SharedReceives { queue, .. }) = &core.shared {
            queue.cq().add_consumer(queue, &this)?;
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

    pub(crate) fn qp(&self) -> Result<Arc<Qp>, SetupError> {
        self.qp.lock().clone().ok_or(SetupError::Closed)
    }

    /// They reference the bare queue pair, which defers its destruction.
    pub(crate) fn windows(&self) -> &Arc<WindowSet> {
        self.windows.get_or_init(Arc::default)
    }

    pub(crate) fn modify(&self, attr: &QpAttr) -> Result<(), SetupError> {
        let change = self.change.lock();
        if attr.state != Some(QpState::Reset) {
            let qp = self.qp()?;
            qp.modify(attr)?;
            drop(change);
            if attr.state == Some(QpState::Err) && !qp.flushes_late_work() {
                // The device has not flushed this work, because it was posted too late.
                let flushed = OpErrorKind::Completion(CompletionError::flushed(qp.qpn()));
                self.queues().for_each(|queue| queue.cq().abandon(queue, flushed, false));
            }
            return Ok(());
        }
        if let Some(SharedReceives { queue, .. }) = &self.shared {
            // A reset discards the completions of the queue pair, and only they record the receives
            // it has taken from the shared queue.
            self.flush(&*self.qp()?);
            queue.cq().drain_all();
        }
        let qp = self.qp()?;
        let dispatch = self.exclude_dispatch();
        // Excludes posters that checked the state before the reset. The driver would accept their
        // work in RESET, and the device would execute it after the next transition to RTS, long
        // after it failed here.
        let state: SmallVec<[_; 2]> = self.queues().map(|queue| lock(&queue.state)).collect();
        let result = qp.modify(attr);
        drop(state);
        drop(dispatch);
        drop(qp);
        if result.is_ok() {
            for queue in self.queues() {
                queue.cq().abandon(queue, OpErrorKind::Closed, false);
            }
        }
        drop(change);
        result
    }

    /// Excludes the dispatch of completions that are read in place: dispatch locks the device's
    /// queue before `WorkQueue::state`, and a reset in the other order.
    fn exclude_dispatch(&self) -> SmallVec<[impl Sized + '_; 2]> {
        let mut queues: SmallVec<[_; 2]> = self.queues().map(|queue| queue.cq()).collect();
        queues.sort_by_key(|queue| Arc::as_ptr(queue));
        queues.dedup_by_key(|queue| Arc::as_ptr(queue));
        queues.into_iter().filter_map(|queue| queue.exclude_dispatch()).collect()
    }

    /// Moves the queue pair to the error state and waits for its last receive from a shared queue.
    fn flush(&self, qp: &Qp) {
        match qp.modify(&QpAttr::to_state(QpState::Err)) {
            Ok(()) => qp.await_last_receive(),
            // In RESET nothing is in flight, and a lost device flushes nothing.
            Err(error) => {
                rdma_provider::debug!(
                    qpn = %qp.qpn(),
                    %error,
                    "failed to move queue pair to the error state; continuing without a flush"
                )
            }
        }
    }

    /// Ends all work in flight; `kind` is the result of work without a completion.
    pub(crate) fn shut_down(&self, kind: OpErrorKind) {
        // Wakes tasks after the destruction.
        let _section = Section::begin();
        let change = self.change.lock();
        let taken = self.qp.lock().take();
        drop(change);
        let Some(qp) = taken else { return };
        let qpn = qp.qpn();
        let posters: [_; 2] =
            [self.send.close(), self.receive.as_ref().and_then(|queue| queue.close())];
        let shared = self.shared.as_ref().map(|shared| &shared.queue);
        // Without work in flight there is nothing to flush: after `close` nothing is posted, so an
        // idle queue stays idle. Windows are deallocated in the error state, in which they are not
        // in use; one created later cannot be bound.
        let idle = self.queues().all(|queue| queue.is_idle());
        if !idle || shared.is_some() || self.windows.get().is_some() {
            self.flush(&qp);
            for queue in self.queues().chain(shared) {
                queue.cq().drain();
            }
        }
        drop(posters);
        match self.destroy(qp) {
            Err(error) if !error.is_device_gone() => {
                rdma_provider::error!(
                    %qpn,
                    %error,
                    "failed to destroy queue pair; holding posted buffers until they complete"
                );
                self.shared.iter().for_each(SharedReceives::leak);
                self.queues().for_each(|queue| queue.fail_queued(kind));
                self.send.notify_closed();
                return;
            }
            // The kernel destroys the queue pair of a lost device.
            Ok(()) | Err(_) => {}
        }
        for queue in self.queues() {
            queue.cq().abandon(queue, kind, true);
        }
        if let Some(queue) = shared {
            queue.cq().remove_consumer(queue, self);
        }
        self.send.notify_closed();
    }

    /// Waits for other references, which are held only during a verb.
    fn destroy(&self, mut qp: Arc<Qp>) -> Result<(), VerbError> {
        loop {
            match Arc::try_unwrap(qp) {
                Ok(qp) => {
                    if let Some(windows) = self.windows.get() {
                        windows.end();
                    }
                    return qp.destroy();
                }
                Err(shared) => qp = shared,
            }
            std::thread::yield_now();
        }
    }
}

/// Destroys a shared receive queue without consumers; its receives fail as closed and return their
/// buffers. If the device refuses, they never complete and their buffers are leaked.
pub(crate) fn destroy_shared(queue: &Arc<WorkQueue>, srq: Srq) {
    drop(queue.close());
    let id = srq.id();
    match srq.destroy() {
        Err(error) if !error.is_device_gone() => {
            rdma_provider::error!(
                srq = id,
                %error,
                "failed to destroy shared receive queue; leaking the buffers of its receives"
            );
            queue.fail_queued(OpErrorKind::Closed);
        }
        Ok(()) | Err(_) => queue.shut_down_destroyed(OpErrorKind::Closed),
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

//! Actions that run when no lock is held.

use std::cell::RefCell;
use std::sync::Arc;

use rdma_provider::types::AsyncEvent;

use super::completion_queue::CqInner;
use super::queue_pair::QpInner;
use crate::cm::Manager;

#[derive(Debug)]
enum Work {
    /// Fails a queue pair unless it was reset after `generation`.
    Fail { qp: Arc<QpInner>, generation: u64, event: Option<AsyncEvent> },
    /// Fails the queue pairs of an overrun completion queue.
    Overrun(Arc<CqInner>),
    /// Confirms a connection whose peer sent a request before RTU arrived.
    Confirm { qp: Arc<QpInner>, connection: u32 },
}

/// Empty, and free of cost, unless something fails.
#[derive(Debug, Default)]
pub(crate) struct Deferred(RefCell<Vec<Work>>);

impl Deferred {
    pub(crate) fn new() -> Self {
        Self::default()
    }

    #[cold]
    pub(crate) fn fail(&self, qp: &Arc<QpInner>, event: Option<AsyncEvent>) {
        let generation = qp.generation();
        self.0.borrow_mut().push(Work::Fail { qp: Arc::clone(qp), generation, event });
    }

    #[cold]
    pub(crate) fn overrun(&self, cq: &Arc<CqInner>) {
        self.0.borrow_mut().push(Work::Overrun(Arc::clone(cq)));
    }

    #[cold]
    pub(crate) fn confirm(&self, qp: &Arc<QpInner>, connection: u32) {
        self.0.borrow_mut().push(Work::Confirm { qp: Arc::clone(qp), connection });
    }

    /// Runs the actions and those that they add. The caller holds no lock.
    #[inline]
    pub(crate) fn run(mut self) {
        if self.0.get_mut().is_empty() {
            // An unused list has no allocation: forgetting it saves a call.
            std::mem::forget(self);
        } else {
            self.run_slow();
        }
    }

    #[cold]
    fn run_slow(self) {
        loop {
            let work = std::mem::take(&mut *self.0.borrow_mut());
            if work.is_empty() {
                return;
            }
            for item in work {
                match item {
                    Work::Fail { qp, generation, event } => qp.fail(Some(generation), event, &self),
                    Work::Confirm { qp, connection } => {
                        Manager::on_traffic(qp.device(), connection, qp.qpn())
                    }
                    Work::Overrun(cq) => {
                        let event = cq.error_event();
                        rdma_provider::error!(
                            ?event,
                            "completion queue overrun; completions lost, failing its queue pairs"
                        );
                        cq.context().event(event);
                        for qpn in cq.queue_pairs() {
                            let device = cq.context().device();
                            if let Some(qp) = device.queue_pair(qpn) {
                                qp.fail(None, Some(AsyncEvent::QpFatal(qpn)), &self);
                            }
                            if let Some(target) = device.target(qpn) {
                                target.fail(Some(AsyncEvent::QpFatal(qpn)), &self);
                            }
                        }
                    }
                }
            }
        }
    }
}

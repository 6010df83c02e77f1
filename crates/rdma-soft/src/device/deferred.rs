//! Work that must wait until no lock is held.

use std::cell::RefCell;
use std::sync::Arc;

use rdma_provider::types::AsyncEvent;

use super::completion_queue::CqInner;
use super::queue_pair::QpInner;
use crate::cm::Manager;

#[derive(Debug)]
enum Work {
    /// A queue pair goes to ERR, both halves; unless it has been reset since (`generation`).
    Fail { qp: Arc<QpInner>, generation: u64, event: Option<AsyncEvent> },
    /// A completion queue was overrun.
    Overrun(Arc<CqInner>),
    /// The peer of a connection that waits for its confirmation has sent something.
    Heard { qp: Arc<QpInner>, connection: u32 },
}

/// List of such work. Empty, and then free of cost, unless something fails.
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
    pub(crate) fn heard(&self, qp: &Arc<QpInner>, connection: u32) {
        self.0.borrow_mut().push(Work::Heard { qp: Arc::clone(qp), connection });
    }

    /// Does the work, and what follows from it. The caller holds no lock of the device.
    #[inline]
    pub(crate) fn run(mut self) {
        if self.0.get_mut().is_empty() {
            // What never held anything has nothing to free, and looking for that is a call.
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
                    Work::Heard { qp, connection } => {
                        Manager::on_traffic(qp.device(), connection, qp.qpn())
                    }
                    Work::Overrun(cq) => {
                        let event = cq.error_event();
                        tracing::error!(?event, "completion queue overrun: completions are lost");
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

//! A DC target and its teardown.
//!
//! Teardown order: stop accepting messages, take the available completions, destroy the target.
//! Receives taken after that end with the shared receive queue, because a target has no error state
//! in which it would report its last receive.

use std::fmt;
use std::sync::Arc;

use rdma_provider::locks::Mutex;

use super::queue_pair_core::SharedReceives;
use super::wake_list::Teardown;
use crate::error::{OpErrorKind, SetupError};
use crate::verbs::Dct;

pub(crate) struct TargetCore {
    dct: Mutex<Option<Dct>>,
    shared: SharedReceives,
}

impl TargetCore {
    pub(crate) fn new(dct: Dct, shared: SharedReceives) -> Result<Arc<Self>, SetupError> {
        let core = Arc::new(Self { dct: Mutex::new(Some(dct)), shared });
        let teardown: Arc<dyn Teardown> = core.clone();
        core.shared.queue.cq().add_consumer(&core.shared.queue, &teardown)?;
        Ok(core)
    }

    pub(crate) fn with_dct<T>(&self, question: impl FnOnce(&Dct) -> T) -> Result<T, SetupError> {
        self.dct.lock().as_ref().map(question).ok_or(SetupError::Closed)
    }
}

impl Teardown for TargetCore {
    fn shut_down(&self, _kind: OpErrorKind) {
        let Some(dct) = self.dct.lock().take() else { return };
        let number = dct.number();
        let queue = &self.shared.queue;
        dct.quiesce();
        queue.cq().drain();
        match dct.destroy() {
            Err(error) if !error.is_device_gone() => {
                rdma_provider::error!(
                    ?number,
                    %error,
                    "failed to destroy DC target; leaking its shared receive queue"
                );
                self.shared.leak();
                return;
            }
            // The kernel destroys the target of a lost device.
            Ok(()) | Err(_) => {}
        }
        queue.cq().remove_consumer(queue, self);
    }
}

impl Drop for TargetCore {
    fn drop(&mut self) {
        self.shut_down(OpErrorKind::Closed);
    }
}

impl fmt::Debug for TargetCore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TargetCore").field("dct", &*self.dct.lock()).finish_non_exhaustive()
    }
}

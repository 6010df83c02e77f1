//! A DC target, from the first message to the last.
//!
//! The end: no more messages; take those that are there; destroy it, after which it takes no receive any more. Of a device
//! that cannot be told to take no more, what arrives in between takes its receive along, which ends with the shared queue
//! then: a target has no error state in which it would say what its last receive was.

use std::fmt;
use std::sync::Arc;

use parking_lot::Mutex;

use super::queue_pair_core::Shared;
use super::wake_list::Teardown;
use crate::error::{OpErrorKind, SetupError};
use crate::verbs::Dct;

/// A DC target and the shared receive queue that it draws from.
pub(crate) struct TargetCore {
    /// `None` once destroyed.
    dct: Mutex<Option<Dct>>,
    shared: Shared,
}

impl TargetCore {
    /// Takes charge of `dct`, which is to draw from `shared`, and is in RESET.
    pub(crate) fn new(dct: Dct, shared: Shared) -> Result<Arc<Self>, SetupError> {
        let core = Arc::new(Self { dct: Mutex::new(Some(dct)), shared });
        let drawing: Arc<dyn Teardown> = core.clone();
        core.shared.queue.cq().draw(&core.shared.queue, &drawing)?;
        Ok(core)
    }

    /// Asks the bare target.
    pub(crate) fn ask<T>(&self, question: impl FnOnce(&Dct) -> T) -> Result<T, SetupError> {
        self.dct.lock().as_ref().map(question).ok_or(SetupError::Closed)
    }
}

impl Teardown for TargetCore {
    fn shut_down(&self, _kind: OpErrorKind) {
        let Some(dct) = self.dct.lock().take() else { return };
        let _span = tracing::debug_span!("shut_down", target_number = ?dct.number()).entered();
        let queue = &self.shared.queue;
        dct.quiesce();
        queue.cq().drain();
        match dct.destroy() {
            Err(error) if !error.is_device_gone() => {
                tracing::error!(%error, "what it draws from stays as long as the program runs");
                self.shared.keep();
                return;
            }
            // The kernel takes the target of a device that is gone down by itself.
            Ok(()) | Err(_) => {}
        }
        queue.cq().no_longer_draws(queue, self);
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

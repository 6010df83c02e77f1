//! Actions that run when no lock is held.

use std::cell::RefCell;

type Action = Box<dyn FnOnce(&Deferred)>;

/// Empty, and free of cost, unless something fails.
#[derive(Default)]
pub(crate) struct Deferred(RefCell<Vec<Action>>);

impl Deferred {
    pub(crate) fn new() -> Self {
        Self::default()
    }

    /// Adds an action, which may add others.
    #[cold]
    pub(crate) fn push(&self, action: impl FnOnce(&Self) + 'static) {
        self.0.borrow_mut().push(Box::new(action));
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
            let actions = std::mem::take(&mut *self.0.borrow_mut());
            if actions.is_empty() {
                return;
            }
            actions.into_iter().for_each(|action| action(&self));
        }
    }
}

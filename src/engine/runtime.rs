//! The runtime of the current task, and its I/O driver.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};

use rdma_provider::locks::Mutex;
use tokio::runtime::{Handle, Id};

use crate::error::NoRuntime;
use crate::forked;

/// The latest runtimes without an I/O driver, so that each is tried once.
static WITHOUT_IO: Mutex<VecDeque<Id>> = Mutex::new(VecDeque::new());

const MAX_KNOWN: usize = 64;

pub(crate) fn is_current(runtime: Id) -> bool {
    Handle::try_current().is_ok_and(|current| current.id() == runtime)
}

impl NoRuntime {
    pub(crate) fn or_current() -> Result<Handle, Self> {
        if forked::is_child() {
            return Err(Self::Forked);
        }
        Handle::try_current().map_err(|_| Self::Outside)
    }

    /// Returns the current runtime. Fails if it has no timer.
    #[cfg(not(loom))]
    pub(crate) fn or_timers() -> Result<Handle, Self> {
        let runtime = Self::or_current()?;
        let timer = || drop(tokio::time::sleep(std::time::Duration::ZERO));
        catch_unwind(AssertUnwindSafe(timer)).map_err(|_| Self::Time)?;
        Ok(runtime)
    }

    /// Calls `register`, which registers a descriptor. Fails if the current runtime has no I/O
    /// driver.
    pub(crate) fn or_registered<T>(register: impl FnOnce() -> T) -> Result<T, Self> {
        let runtime = Self::or_current()?.id();
        if WITHOUT_IO.lock().contains(&runtime) {
            return Err(Self::Io);
        }
        catch_unwind(AssertUnwindSafe(register)).map_err(|_| {
            let mut known = WITHOUT_IO.lock();
            if known.len() == MAX_KNOWN {
                known.pop_front();
            }
            known.push_back(runtime);
            Self::Io
        })
    }
}

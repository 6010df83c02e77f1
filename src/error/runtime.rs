//! What a future needs of the runtime that polls it.

use std::fmt;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// What a future needs of the Tokio runtime that polls it, and did not find.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum NoRuntime {
    /// The future was polled outside of a Tokio runtime.
    Outside,
    /// The runtime has no I/O driver.
    Io,
    /// The runtime has no time driver.
    Time,
}

impl NoRuntime {
    /// Calls `register`, which registers something with a driver of the current runtime; `self` if the runtime lacks the driver:
    /// Tokio panics then, and offers no other check.
    pub(crate) fn unless_registered<T>(self, register: impl FnOnce() -> T) -> Result<T, Self> {
        catch_unwind(AssertUnwindSafe(register)).map_err(|_| self)
    }
}

impl fmt::Display for NoRuntime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Outside => "polled outside of a Tokio runtime; await it within `Runtime::block_on` or a task",
            Self::Io => "the Tokio runtime has no I/O driver; build it with `enable_io` or `enable_all`",
            Self::Time => "the Tokio runtime has no time driver; build it with `enable_time` or `enable_all`",
        })
    }
}

impl std::error::Error for NoRuntime {}

impl From<NoRuntime> for io::Error {
    fn from(error: NoRuntime) -> Self {
        Self::new(io::ErrorKind::Unsupported, error)
    }
}

use std::fmt;
use std::io;

use super::VerbError;

/// A Tokio runtime, I/O driver or timer that a future needs, but that does not exist.
///
/// Tokio panics if a runtime has no I/O driver or timer, and offers no other check, so this crate
/// catches the panic. The panic hook therefore runs once for each runtime without an I/O driver and
/// for each check for a timer, and a program built with `panic = "abort"` aborts. Operations that
/// wait for completion events make the same check, but poll without a driver instead of failing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum NoRuntime {
    /// The future was polled outside a Tokio runtime.
    Outside,
    /// The runtime has no I/O driver.
    Io,
    /// The runtime has no timer.
    Time,
    /// The parent process opened a device before `fork(2)`. No device works in this process.
    Forked,
}

impl fmt::Display for NoRuntime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Forked => return VerbError::INHERITED.fmt(f),
            Self::Outside => {
                "the future was polled outside a Tokio runtime; await it within \
                 `Runtime::block_on` or a task"
            }
            Self::Io => {
                "the Tokio runtime has no I/O driver; build it with `enable_io` or `enable_all`"
            }
            Self::Time => {
                "the Tokio runtime has no timer; build it with `enable_time` or `enable_all`"
            }
        })
    }
}

impl std::error::Error for NoRuntime {}

impl From<NoRuntime> for io::Error {
    fn from(error: NoRuntime) -> Self {
        Self::new(io::ErrorKind::Unsupported, error)
    }
}

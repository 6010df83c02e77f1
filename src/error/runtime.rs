//! What a future needs of the runtime that polls it.

use std::fmt;
use std::io;

/// What a future needs of the Tokio runtime that polls it, and did not find.
///
/// Tokio has no other check for an I/O driver than a panic where it is missed. That panic is caught; but the panic hook runs for it,
/// which by default prints a message, once for each runtime without the driver; and a program that is built with
/// `panic = "abort"` ends there. Operations in a completion mode that sleeps meet the same check; without the driver they poll.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum NoRuntime {
    /// The future was polled outside of a Tokio runtime.
    Outside,
    /// The runtime has no I/O driver.
    Io,
}

impl fmt::Display for NoRuntime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Outside => {
                "polled outside of a Tokio runtime; await it within `Runtime::block_on` or a task"
            }
            Self::Io => {
                "the Tokio runtime has no I/O driver; build it with `enable_io` or `enable_all`"
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

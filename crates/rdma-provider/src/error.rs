//! The error of a failed verb.

use std::fmt;
use std::io;

/// The error of a verb, with a positive `errno` whatever the C function's return convention.
///
/// ```
/// use rdma_provider::VerbError;
///
/// let error = VerbError::new("ibv_reg_mr", VerbError::ENOMEM);
/// assert!(error.to_string().starts_with("ibv_reg_mr: "));
/// assert_eq!(std::io::Error::from(error).kind(), std::io::ErrorKind::OutOfMemory);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct VerbError {
    /// C function, for example `ibv_reg_mr`.
    pub verb: &'static str,
    /// Reason, `errno(3)`.
    pub errno: i32,
}

const START_THREAD: &str = "pthread_create";
const INHERITED: &str = "use of a device that the parent process opened before fork(2)";

impl VerbError {
    /// The device failed.
    pub const EIO: i32 = 5;
    /// Out of memory, or queue full.
    pub const ENOMEM: i32 = 12;
    /// The object is in use.
    pub const EBUSY: i32 = 16;
    /// The device does not exist or was removed.
    pub const ENODEV: i32 = 19;
    /// Invalid argument or state.
    pub const EINVAL: i32 = 22;
    /// The kernel lacks the call.
    pub const ENOSYS: i32 = 38;
    /// The address is taken.
    pub const EADDRINUSE: i32 = 98;
    /// The address is not local.
    pub const EADDRNOTAVAIL: i32 = 99;
    /// The driver or library lacks the operation.
    pub const EOPNOTSUPP: i32 = 95;

    /// A child process uses a device that its parent opened before `fork(2)`.
    #[doc(hidden)]
    pub const INHERITED: Self = Self::new(INHERITED, 1);

    /// Creates an error.
    #[must_use]
    pub const fn new(verb: &'static str, errno: i32) -> Self {
        Self { verb, errno }
    }

    /// Creates the error of a thread that cannot be started.
    #[doc(hidden)]
    #[must_use]
    pub fn no_thread(error: &io::Error) -> Self {
        const EAGAIN: i32 = 11;
        Self::new(START_THREAD, error.raw_os_error().unwrap_or(EAGAIN))
    }

    /// Returns true if the device was removed, and with it all its objects.
    #[must_use]
    pub const fn is_device_gone(&self) -> bool {
        matches!(self.errno, Self::EIO | Self::ENODEV)
    }
}

impl fmt::Display for VerbError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.verb, io::Error::from_raw_os_error(self.errno))?;
        match self.verb {
            START_THREAD => {
                f.write_str("; raise the limit of threads: RLIMIT_NPROC, or the cgroup's pids.max")
            }
            INHERITED => {
                f.write_str("; open devices only after fork, or start the child with exec(3)")
            }
            _ => Ok(()),
        }
    }
}

impl std::error::Error for VerbError {}

impl From<VerbError> for io::Error {
    fn from(error: VerbError) -> Self {
        let kind = Self::from_raw_os_error(error.errno).kind();
        Self::new(kind, error)
    }
}

//! The error of a verb.

use std::fmt;
use std::io;

/// A verb that the provider refused: its name and the `errno` it gave.
///
/// The four return conventions of libibverbs and librdmacm are already undone: `errno` is positive
/// and is the reason.
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
    /// Name of the C function, for example `ibv_reg_mr`.
    pub verb: &'static str,
    /// Reason, as in `errno(3)`.
    pub errno: i32,
}

impl VerbError {
    /// I/O error: the device failed.
    pub const EIO: i32 = 5;
    /// Out of memory, or queue full.
    pub const ENOMEM: i32 = 12;
    /// Something uses it.
    pub const EBUSY: i32 = 16;
    /// No such device, or it is gone.
    pub const ENODEV: i32 = 19;
    /// Wrong argument or wrong state.
    pub const EINVAL: i32 = 22;
    /// The kernel does not know it.
    pub const ENOSYS: i32 = 38;
    /// The address is taken.
    pub const EADDRINUSE: i32 = 98;
    /// No address of ours.
    pub const EADDRNOTAVAIL: i32 = 99;
    /// The driver or the library does not have it.
    pub const EOPNOTSUPP: i32 = 95;

    /// `verb` refused with `errno`.
    #[must_use]
    pub const fn new(verb: &'static str, errno: i32) -> Self {
        Self { verb, errno }
    }

    /// True if the kernel has taken the device away, and with it all that was made on it.
    #[must_use]
    pub const fn is_device_gone(&self) -> bool {
        matches!(self.errno, Self::EIO | Self::ENODEV)
    }
}

impl fmt::Display for VerbError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.verb, io::Error::from_raw_os_error(self.errno))
    }
}

impl std::error::Error for VerbError {}

impl From<VerbError> for io::Error {
    fn from(error: VerbError) -> Self {
        let kind = Self::from_raw_os_error(error.errno).kind();
        Self::new(kind, error)
    }
}

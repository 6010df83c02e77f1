//! Errors: who is at fault, and the numbers.

use std::fmt;
use std::io;

/// A verb that the provider refused: its name and the `errno` it gave.
///
/// The four return conventions of libibverbs and librdmacm are already undone: `errno` is positive
/// and is the reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct VerbError {
    /// Name of the C function, for example `ibv_reg_mr`.
    pub verb: &'static str,
    /// Reason, as in `errno(3)`.
    pub errno: i32,
}

impl VerbError {
    /// I/O error: the device failed.
    pub(crate) const EIO: i32 = 5;
    /// Out of memory, or queue full.
    pub(crate) const ENOMEM: i32 = 12;
    /// In use.
    pub(crate) const EBUSY: i32 = 16;
    /// No such device, or it is gone.
    pub(crate) const ENODEV: i32 = 19;
    /// Wrong argument or wrong state.
    pub(crate) const EINVAL: i32 = 22;

    pub(crate) const fn new(verb: &'static str, errno: i32) -> Self {
        Self { verb, errno }
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

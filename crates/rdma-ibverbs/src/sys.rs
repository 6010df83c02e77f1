//! Unifies the C library's error conventions.
//!
//! A function of libibverbs returns one of:
//!
//! - 0 or an `errno` (`ibv_modify_qp(3)`),
//! - -1 with `errno` set (`ibv_get_cq_event(3)`),
//! - a null pointer with `errno` set (`ibv_reg_mr(3)`),
//! - a count that is negative on failure (`ibv_poll_cq(3)`).
//!
//! Versions and drivers mix these up, so the value decides.

use std::ffi::c_int;
use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;

use rdma_provider::VerbError;
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};

/// Converts 0, an `errno` of either sign, or -1 with `errno` set.
#[inline]
pub(super) fn status(verb: &'static str, result: c_int) -> Result<(), VerbError> {
    if result == 0 { Ok(()) } else { Err(failure(verb, result)) }
}

/// Converts a handle, or null with `errno` set.
pub(super) fn handle<T>(verb: &'static str, pointer: *mut T) -> Result<NonNull<T>, VerbError> {
    NonNull::new(pointer).ok_or_else(|| failure(verb, -1))
}

/// Converts a count, or a negative error.
#[inline]
pub(super) fn count(verb: &'static str, result: isize) -> Result<usize, VerbError> {
    usize::try_from(result).map_err(|_| failure(verb, c_int::try_from(result).unwrap_or(-1)))
}

#[cold]
fn failure(verb: &'static str, result: c_int) -> VerbError {
    let errno = match result {
        -1 => io::Error::last_os_error().raw_os_error().unwrap_or(0),
        code => code.saturating_abs(),
    };
    // The function failed without an `errno`.
    VerbError::new(verb, if errno == 0 { VerbError::EIO } else { errno })
}

/// Logs the failure to free a handle in a `Drop`.
pub(super) fn log_failure(verb: &'static str, result: c_int) {
    if let Err(error) = status(verb, result) {
        rdma_provider::error!(%error, "failed to free a handle; leaking it");
    }
}

/// EAGAIN of `errno(3)`: a non-blocking descriptor is not readable.
pub(super) const EAGAIN: i32 = 11;

/// Makes a descriptor non-blocking, which libibverbs does not.
pub(super) fn set_nonblocking(fd: BorrowedFd<'_>) -> Result<(), VerbError> {
    let set = || fcntl_setfl(fd, fcntl_getfl(fd)? | OFlags::NONBLOCK);
    set().map_err(|error| VerbError::new("fcntl", error.raw_os_error()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_error_convention_yields_its_errno() {
        assert_eq!(status("v", 0), Ok(()));
        assert_eq!(status("v", 22), Err(VerbError::new("v", 22)));
        assert_eq!(status("v", -22), Err(VerbError::new("v", 22)));
        assert_eq!(count("v", 3), Ok(3));
        assert_eq!(count("v", -95), Err(VerbError::new("v", 95)));
        // Sets errno to ENOENT.
        assert!(std::fs::metadata("/does/not/exist").is_err());
        assert_eq!(status("v", -1), Err(VerbError::new("v", 2)));
        assert_eq!(handle("v", std::ptr::null_mut::<u8>()), Err(VerbError::new("v", 2)));
    }
}

//! The C library's ways to report an error, undone in one place.
//!
//! A function of libibverbs gives 0 or an `errno` (`ibv_modify_qp`), or -1 with `errno` set (`ibv_get_cq_event`), or a
//! null pointer with `errno` set (`ibv_reg_mr`), or a count that is negative on failure (`ibv_poll_cq`). Where a version
//! or a driver mixes them up, the value itself tells which was meant.

use std::ffi::c_int;
use std::io;
use std::ptr::NonNull;

use rdma_provider::VerbError;

/// Of a function that gives 0 or an `errno`, positive or negated, or -1 with `errno` set.
#[inline]
pub(super) fn status(verb: &'static str, result: c_int) -> Result<(), VerbError> {
    if result == 0 { Ok(()) } else { Err(failure(verb, result)) }
}

/// Of a function that gives a handle, or null with `errno` set.
pub(super) fn handle<T>(verb: &'static str, pointer: *mut T) -> Result<NonNull<T>, VerbError> {
    NonNull::new(pointer).ok_or_else(|| failure(verb, -1))
}

/// Of a function that gives a count, or something negative.
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
    // A function that fails without saying why.
    VerbError::new(verb, if errno == 0 { VerbError::EIO } else { errno })
}

/// Frees a handle in a `Drop`, which can only say that it failed.
pub(super) fn freed(verb: &'static str, result: c_int) {
    if let Err(error) = status(verb, result) {
        tracing::error!(%error, "not freed");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_convention_gives_its_errno() {
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

//! An owner that destroys its C handle once.

#![allow(unsafe_code)]

use std::ffi::c_int;
use std::fmt;
use std::ptr::NonNull;

use crate::ffi::*;

use super::sys;
use rdma_provider::VerbError;

/// A type of handle that libibverbs destroys by a function.
pub(super) trait Destroy {
    /// Name of the function.
    const VERB: &'static str;

    /// Calls the function named [`VERB`](Self::VERB).
    ///
    /// # Safety
    ///
    /// `raw` must be a live handle, and everything created from it must be gone.
    unsafe fn destroy(raw: *mut Self) -> c_int;
}

macro_rules! destroys {
    ($($handle:ty, $function:ident;)*) => {
        $(
            impl Destroy for $handle {
                const VERB: &'static str = stringify!($function);

                unsafe fn destroy(raw: *mut Self) -> c_int {
                    // SAFETY: S3: the caller's promise.
                    unsafe { $function(raw) }
                }
            }
        )*
    };
}

destroys! {
    ibv_mr, ibv_dereg_mr;
    ibv_mw, ibv_dealloc_mw;
    ibv_qp, ibv_destroy_qp;
    ibv_srq, ibv_destroy_srq;
}

/// A handle of libibverbs. It is destroyed explicitly, which returns errors, or on drop, which logs
/// them.
pub(super) struct Owned<T: Destroy> {
    raw: NonNull<T>,
    destroyed: bool,
}

// SAFETY: S3: libibverbs is thread-safe.
unsafe impl<T: Destroy> Send for Owned<T> {}
// SAFETY: S3: as above.
unsafe impl<T: Destroy> Sync for Owned<T> {}

impl<T: Destroy> Owned<T> {
    /// Takes ownership of a handle.
    ///
    /// # Safety
    ///
    /// `raw` must be a live handle without another owner. Everything created from it must be gone
    /// before it is destroyed.
    pub(super) const unsafe fn new(raw: NonNull<T>) -> Self {
        Self { raw, destroyed: false }
    }

    #[inline]
    pub(super) const fn get(&self) -> NonNull<T> {
        self.raw
    }

    pub(super) const fn is_destroyed(&self) -> bool {
        self.destroyed
    }

    /// Leaks the handle, after an attempt to destroy it has failed.
    pub(super) const fn leak(&mut self) {
        self.destroyed = true;
    }

    /// Destroys the handle, once. After an error it is alive, and the call may be repeated.
    pub(super) fn destroy(&mut self) -> Result<(), VerbError> {
        if !self.destroyed {
            // SAFETY: S3: promised to `new`; not called again after success.
            sys::status(T::VERB, unsafe { T::destroy(self.raw.as_ptr()) })?;
            self.destroyed = true;
        }
        Ok(())
    }
}

impl<T: Destroy> Drop for Owned<T> {
    fn drop(&mut self) {
        if let Err(error) = self.destroy() {
            rdma_provider::error!(
                raw = ?self.raw,
                %error,
                "failed to destroy verbs object; leaking it"
            );
        }
    }
}

impl<T: Destroy> fmt::Debug for Owned<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Owned").field(&self.raw).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Fails the given number of times, then succeeds and is -1.
    struct Reluctant(i32);

    impl Destroy for Reluctant {
        const VERB: &'static str = "v";

        unsafe fn destroy(raw: *mut Self) -> c_int {
            // SAFETY: the test below passes a live number.
            let left = unsafe { &mut (*raw).0 };
            assert!(*left >= 0, "destroyed twice");
            *left -= 1;
            if *left >= 0 { 16 } else { 0 }
        }
    }

    #[test]
    fn handle_is_destroyed_once_and_failed_destroy_can_be_retried() {
        for (refusals, tries) in [(0, 0), (0, 1), (0, 3), (2, 2), (2, 3), (2, 4)] {
            let mut number = Reluctant(refusals);
            // SAFETY: the number outlives its owner.
            let mut owned = unsafe { Owned::new(NonNull::from(&mut number)) };
            for attempt in 0..tries {
                let expected =
                    if attempt < refusals { Err(VerbError::new("v", 16)) } else { Ok(()) };
                assert_eq!(owned.destroy(), expected);
            }
            drop(owned);
            assert_eq!(
                number.0,
                (refusals - tries - 1).max(-1),
                "drop retries once if not destroyed"
            );
        }
    }
}

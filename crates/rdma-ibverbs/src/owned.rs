//! A handle that is ended once.

#![allow(unsafe_code)]

use std::ffi::c_int;
use std::fmt;
use std::ptr::NonNull;

use rdma_sys::*;

use super::sys;
use rdma_provider::VerbError;

/// What a function of libibverbs ends.
pub(super) trait Ends {
    /// The function.
    const VERB: &'static str;

    /// Calls it.
    ///
    /// # Safety
    ///
    /// `raw` is a live handle, and all that was made from it is gone.
    unsafe fn end(raw: *mut Self) -> c_int;
}

macro_rules! ends {
    ($($handle:ty, $function:ident;)*) => {
        $(
            impl Ends for $handle {
                const VERB: &'static str = stringify!($function);

                unsafe fn end(raw: *mut Self) -> c_int {
                    // SAFETY: S3: passed on from the caller.
                    unsafe { $function(raw) }
                }
            }
        )*
    };
}

ends! {
    ibv_mr, ibv_dereg_mr;
    ibv_mw, ibv_dealloc_mw;
    ibv_qp, ibv_destroy_qp;
    ibv_srq, ibv_destroy_srq;
}

/// A handle of libibverbs that is ended by its owner, who hears whether it did, or by its drop, which can only say so in the
/// log.
pub(super) struct Owned<T: Ends> {
    raw: NonNull<T>,
    ended: bool,
}

// SAFETY: S3: libibverbs is safe to call from any thread at once; the handle is used until it has ended only.
unsafe impl<T: Ends> Send for Owned<T> {}
// SAFETY: S3: as above.
unsafe impl<T: Ends> Sync for Owned<T> {}

impl<T: Ends> Owned<T> {
    /// # Safety
    ///
    /// `raw` is a live handle that nobody else ends, and all that is made from it is gone before.
    pub(super) const unsafe fn new(raw: NonNull<T>) -> Self {
        Self { raw, ended: false }
    }

    /// The handle, alive until [`end`](Self::end) has returned `Ok`.
    #[inline]
    pub(super) const fn get(&self) -> NonNull<T> {
        self.raw
    }

    /// Ends it; nothing more, if it has ended. After an error it lives on, and this may be tried again.
    pub(super) fn end(&mut self) -> Result<(), VerbError> {
        if !self.ended {
            // SAFETY: S3: promised by whoever made us, and not called again once it has ended.
            sys::status(T::VERB, unsafe { T::end(self.raw.as_ptr()) })?;
            self.ended = true;
        }
        Ok(())
    }
}

impl<T: Ends> Drop for Owned<T> {
    fn drop(&mut self) {
        if let Err(error) = self.end() {
            tracing::error!(%error, "not freed");
        }
    }
}

impl<T: Ends> fmt::Debug for Owned<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Owned").field(&self.raw).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Refuses as often as the number says, then ends and is -1.
    struct Reluctant(i32);

    impl Ends for Reluctant {
        const VERB: &'static str = "v";

        unsafe fn end(raw: *mut Self) -> c_int {
            // SAFETY: the test below passes a number that lives.
            let left = unsafe { &mut (*raw).0 };
            assert!(*left >= 0, "ended twice");
            *left -= 1;
            if *left >= 0 { 16 } else { 0 }
        }
    }

    #[test]
    fn handle_is_ended_once_and_what_refuses_may_be_tried_again() {
        for (refusals, tries) in [(0, 0), (0, 1), (0, 3), (2, 2), (2, 3), (2, 4)] {
            let mut number = Reluctant(refusals);
            // SAFETY: the number outlives its owner.
            let mut owned = unsafe { Owned::new(NonNull::from(&mut number)) };
            for attempt in 0..tries {
                let expected =
                    if attempt < refusals { Err(VerbError::new("v", 16)) } else { Ok(()) };
                assert_eq!(owned.end(), expected);
            }
            drop(owned);
            assert_eq!(
                number.0,
                (refusals - tries - 1).max(-1),
                "its drop tries once more, if it has not ended"
            );
        }
    }
}

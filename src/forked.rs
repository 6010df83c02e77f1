//! Child processes of `fork(2)`. Devices of the parent do not work in them: their threads are
//! missing, and an adapter does not access the child's copies of registered memory.
//!
//! If a device was open at the fork, all devices fail in the child, even new ones, which share
//! locks and threads with it. A direct `clone(2)` is not noticed.

use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use crate::error::VerbError;

static OPEN: AtomicUsize = AtomicUsize::new(0);

static INHERITED: AtomicBool = AtomicBool::new(false);

#[derive(Debug)]
pub(crate) struct Opened(());

impl Opened {
    #[allow(unsafe_code, reason = "a call of the C library")]
    pub(crate) fn new() -> Self {
        extern "C" fn in_child() {
            if OPEN.load(Ordering::Relaxed) > 0 {
                INHERITED.store(true, Ordering::Relaxed);
            }
        }
        static HANDLER: Once = Once::new();
        HANDLER.call_once(|| {
            // SAFETY: S3: the handler only accesses atomic variables, and stays loaded. If the call
            // fails, for lack of memory, children get no error.
            unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
        });
        OPEN.fetch_add(1, Ordering::Relaxed);
        Self(())
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        OPEN.fetch_sub(1, Ordering::Relaxed);
    }
}

#[inline]
pub(crate) fn check() -> Result<(), VerbError> {
    if is_child() { Err(VerbError::INHERITED) } else { Ok(()) }
}

#[inline]
pub(crate) fn is_child() -> bool {
    INHERITED.load(Ordering::Relaxed)
}

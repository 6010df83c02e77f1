//! Injected refusals of a faulty driver.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use crate::DeviceControl;

/// Value of [`Refusals::sends`] while sends are accepted.
const NO_SEND: u32 = u32::MAX;

/// The refusals in effect. Methods return true to refuse.
#[derive(Debug)]
pub(crate) struct Refusals {
    sends: AtomicU32,
    destroy: AtomicBool,
    flush: AtomicBool,
}

impl Refusals {
    pub(crate) const fn new() -> Self {
        Self {
            sends: AtomicU32::new(NO_SEND),
            destroy: AtomicBool::new(false),
            flush: AtomicBool::new(false),
        }
    }

    /// Counts a send. Unless a refusal is planned, this is a load and a comparison.
    #[inline]
    pub(crate) fn send(&self) -> bool {
        self.sends.load(Ordering::Relaxed) != NO_SEND && self.counted_send()
    }

    #[cold]
    fn counted_send(&self) -> bool {
        let count = |left: u32| (left != NO_SEND).then(|| left.checked_sub(1).unwrap_or(NO_SEND));
        self.sends.fetch_update(Ordering::Relaxed, Ordering::Relaxed, count) == Ok(0)
    }

    pub(crate) fn destroy(&self) -> bool {
        self.destroy.load(Ordering::Relaxed)
    }

    pub(crate) fn flush(&self) -> bool {
        self.flush.load(Ordering::Relaxed)
    }
}

impl DeviceControl {
    /// Starts or stops refusing to destroy objects: a fault of a driver.
    ///
    /// While it refuses, destroying a registration, a window, a queue pair or a shared receive
    /// queue fails with EBUSY. The layers above must leak the memory that the device may still
    /// access.
    pub fn refuse_destroy(&self, refuse: bool) {
        self.0.refusals.destroy.store(refuse, Ordering::Relaxed);
    }

    /// Starts or stops ignoring transitions of queue pairs to ERR: a fault of a device.
    ///
    /// Work continues without flush until its queue pair is destroyed.
    pub fn ignore_errors(&self, ignore: bool) {
        self.0.refusals.flush.store(ignore, Ordering::Relaxed);
    }

    /// Accepts `posted` more sends, then refuses one with ENOMEM: a fault of a driver.
    ///
    /// Later requests in the same list are not posted.
    pub fn refuse_send(&self, posted: u32) {
        self.0.refusals.sends.store(posted.min(NO_SEND - 1), Ordering::Relaxed);
    }
}

//! Injected refusals of a faulty driver.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// Value of [`Refusals::sends`] while sends are accepted.
const NO_SEND: u32 = u32::MAX;

/// The refusals in effect. Methods return true to refuse.
#[derive(Debug)]
pub(crate) struct Refusals {
    sends: AtomicU32,
    pub(super) destroy: AtomicBool,
    pub(super) flush: AtomicBool,
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

    /// Refuses a send after `posted` more.
    pub(super) fn set_send(&self, posted: u32) {
        self.sends.store(posted.min(NO_SEND - 1), Ordering::Relaxed);
    }

    pub(crate) fn destroy(&self) -> bool {
        self.destroy.load(Ordering::Relaxed)
    }

    pub(crate) fn flush(&self) -> bool {
        self.flush.load(Ordering::Relaxed)
    }
}

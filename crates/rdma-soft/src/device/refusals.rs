//! Refusals that a test asks of a device: the behaviour of a faulty driver.
//!
//! Without feature `testing` there is no state and each answer is a constant, so a post has no check.

#[cfg(not(feature = "testing"))]
pub(super) use never::Refusals;
#[cfg(feature = "testing")]
pub(super) use on_request::Refusals;

#[cfg(not(feature = "testing"))]
mod never {
    /// A device that refuses nothing.
    #[derive(Debug)]
    pub(crate) struct Refusals;

    impl Refusals {
        pub(crate) const fn new() -> Self {
            Self
        }

        #[inline(always)]
        pub(crate) const fn send(&self) -> bool {
            false
        }

        #[inline(always)]
        pub(crate) const fn destroy(&self) -> bool {
            false
        }

        #[inline(always)]
        pub(crate) const fn flush(&self) -> bool {
            false
        }
    }
}

#[cfg(feature = "testing")]
mod on_request {
    use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

    use crate::DeviceControl;

    /// Value of [`Refusals::sends`] while no send is to be refused.
    const NO_SEND: u32 = u32::MAX;

    /// The refusals in effect. The questions are true if the device must refuse.
    #[derive(Debug)]
    pub(crate) struct Refusals {
        /// Sends to accept before one is refused.
        sends: AtomicU32,
        /// No object can be destroyed.
        destroy: AtomicBool,
        /// Queue pairs do not enter the error state.
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

        /// Asked once for each send.
        pub(crate) fn send(&self) -> bool {
            let count =
                |left: u32| (left != NO_SEND).then(|| left.checked_sub(1).unwrap_or(NO_SEND));
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
        /// Starts or stops refusing to destroy registrations, windows, queue pairs and shared receive queues (EBUSY), as a
        /// driver does that has lost track of them. The layers above must leak the memory that the device may still access.
        pub fn refuse_destroy(&self, refuse: bool) {
            self.0.refusals.destroy.store(refuse, Ordering::Relaxed);
        }

        /// Starts or stops ignoring the transition of queue pairs to the error state: nothing is flushed and posted work
        /// continues. Work in flight then ends when its queue pair is destroyed.
        pub fn ignore_errors(&self, ignore: bool) {
            self.0.refusals.flush.store(ignore, Ordering::Relaxed);
        }

        /// Accepts `posted` more sends and refuses the next one with ENOMEM, once, as a driver does that runs out of
        /// memory. Requests behind it in the same list are not posted.
        pub fn refuse_send(&self, posted: u32) {
            self.0.refusals.sends.store(posted.min(NO_SEND - 1), Ordering::Relaxed);
        }
    }
}

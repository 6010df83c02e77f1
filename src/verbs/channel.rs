use std::fmt;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;
use std::task::Waker;

use super::Device;
use crate::dispatch;
use crate::error::VerbError;
use rdma_provider::contract::{Channel as _, Context as _};

/// A completion channel, `ibv_create_comp_channel(3)`. Its descriptor is readable when an event can
/// be taken; [`Cq`](super::Cq) has an example. Clones refer to the same channel.
#[derive(Clone)]
pub struct Channel {
    inner: Arc<Inner>,
}

struct Inner {
    raw: dispatch::Channel,
    device: Device,
}

impl Channel {
    /// Creates a channel with a non-blocking descriptor.
    ///
    /// # Errors
    ///
    /// [`VerbError`], for example if no file descriptor is left.
    pub fn new(device: &Device) -> Result<Self, VerbError> {
        let raw = device.context().create_channel()?;
        Ok(Self { inner: Arc::new(Inner { raw, device: device.clone() }) })
    }

    /// Takes the next event, if any, and returns the cookie of its completion queue,
    /// `ibv_get_cq_event(3)`.
    ///
    /// Acknowledge each event with [`Cq::acknowledge`](super::Cq::acknowledge); dropping the `Cq`
    /// acknowledges the rest.
    ///
    /// # Errors
    ///
    /// [`VerbError`].
    pub fn next_event(&self) -> Result<Option<u64>, VerbError> {
        self.inner.raw.next_event()
    }

    /// Keeps the descriptor unreadable until the result is dropped; remaining events then make it
    /// readable.
    pub(crate) fn hold(&self) -> Held<'_> {
        self.inner.raw.hold();
        Held(self)
    }

    /// Wakes `waker` at each event, instead of the descriptor. Returns the key to remove it, or
    /// `None` if the provider has only descriptors.
    pub(crate) fn add_waker(&self, waker: &Waker) -> Option<u64> {
        self.inner.raw.add_waker(waker)
    }

    pub(crate) fn remove_waker(&self, key: u64) {
        self.inner.raw.remove_waker(key);
    }

    pub(crate) fn calls_wakers(&self) -> bool {
        matches!(self.inner.raw, dispatch::Channel::Soft(_))
    }

    pub(super) fn raw(&self) -> &dispatch::Channel {
        &self.inner.raw
    }

    pub(super) fn device(&self) -> &Device {
        &self.inner.device
    }
}

pub(crate) struct Held<'a>(&'a Channel);

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.0.inner.raw.release();
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.inner.raw.fd()
    }
}

impl AsRawFd for Channel {
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

impl fmt::Debug for Channel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Channel").field("fd", &self.as_raw_fd()).finish_non_exhaustive()
    }
}

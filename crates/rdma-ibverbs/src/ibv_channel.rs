//! Completion channels: the descriptor that reports events of completion queues.

#![allow(unsafe_code)]

use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};

use rdma_sys::*;
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};

use super::ibv_context::EAGAIN;
use super::ibv_cq::Events;
use super::sys;
use rdma_provider::VerbError;
use rdma_provider::contract;

/// A completion channel, `ibv_comp_channel`.
#[derive(Debug)]
pub struct Channel {
    raw: NonNull<ibv_comp_channel>,
}

// SAFETY: S3: libibverbs is thread-safe.
unsafe impl Send for Channel {}
// SAFETY: S3: as above.
unsafe impl Sync for Channel {}

impl Channel {
    pub(super) fn new(context: NonNull<ibv_context>) -> Result<Self, VerbError> {
        // SAFETY: S3: the context is open.
        let raw = sys::handle("ibv_create_comp_channel", unsafe {
            ibv_create_comp_channel(context.as_ptr())
        })?;
        let channel = Self { raw };
        set_nonblocking(contract::Channel::fd(&channel))?;
        Ok(channel)
    }

    pub(super) fn raw(&self) -> *mut ibv_comp_channel {
        self.raw.as_ptr()
    }
}

/// Makes a descriptor non-blocking, which libibverbs does not.
pub(super) fn set_nonblocking(fd: BorrowedFd<'_>) -> Result<(), VerbError> {
    let set = || fcntl_setfl(fd, fcntl_getfl(fd)? | OFlags::NONBLOCK);
    set().map_err(|error| VerbError::new("fcntl", error.raw_os_error()))
}

impl contract::Channel for Channel {
    fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: S3: the descriptor is open as long as the channel.
        unsafe { BorrowedFd::borrow_raw(self.raw.as_ref().fd) }
    }

    fn next_event(&self) -> Result<Option<u64>, VerbError> {
        let (mut cq, mut events) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: S3: the channel is open, the results local.
        let result = unsafe { ibv_get_cq_event(self.raw(), &raw mut cq, &raw mut events) };
        match sys::status("ibv_get_cq_event", result) {
            // SAFETY: S3: just taken; `Cq::new` makes all queues of this channel.
            Ok(()) => Ok(Some(unsafe { Events::take(cq, events) })),
            Err(error) if error.errno == EAGAIN => Ok(None),
            Err(error) => Err(error),
        }
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        // SAFETY: S3: created by this object; its completion queues are gone.
        sys::log_failure("ibv_destroy_comp_channel", unsafe {
            ibv_destroy_comp_channel(self.raw())
        });
    }
}

//! The connection manager of real devices: librdmacm, opened when it is first used.
//!
//! librdmacm opens devices itself; an id only names its device. The kernel's connection manager
//! handles most of the protocol, except:
//!
//! - It does not answer disconnect requests: [`take_event`](cm_contract::CmChannel::take_event)
//!   does.
//! - It does not resolve the route after the address: `take_event` does, unless that may block.
//! - It raises no event for a withdrawn request, but fails calls on its id. After a failed call
//!   this module adds the event; the caller finds it when draining the channel.
//!
//! [`event`] copies and acknowledges events at once, so that destroying an id waits for short calls
//! only.
//! [`id`] has one call per function. It checks the phase first, because librdmacm dereferences a
//! null pointer if the address was not resolved.

#![allow(unsafe_code)]

mod address;
mod event;
mod id;
mod multicast;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::ffi::*;
use rdma_provider::locks::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::{Ibverbs, sys};
use rdma_provider::VerbError;
use rdma_provider::cm_contract::{self, CmEvent};

use event::UnackedEvent;
pub use id::CmId;
use id::{IdContext, IdState};

/// An event channel, `rdma_event_channel`, shared by its ids.
#[derive(Debug)]
pub struct CmChannel(Arc<Events>);

/// The part of a channel that its ids refer to.
#[derive(Debug)]
struct Events {
    raw: NonNull<rdma_event_channel>,
    next_key: AtomicU64,
    /// Events raised by this module.
    own: Mutex<VecDeque<CmEvent<Ibverbs>>>,
    /// Held from taking an event of librdmacm to acknowledging it, and to destroy an id that is
    /// being [resolved](IdState::is_resolving). To read the event of a resolution, librdmacm asks
    /// the kernel by the id's number. The kernel may have given the number of a destroyed id to
    /// another one, without a device, and librdmacm then reads through a null pointer.
    taking: Mutex<()>,
}

// SAFETY: S3: librdmacm is thread-safe, and the contract has one caller at a time take events.
unsafe impl Send for Events {}
// SAFETY: S3: as above.
unsafe impl Sync for Events {}

impl CmChannel {
    /// Creates a channel. EOPNOTSUPP if librdmacm could not be loaded, ENOENT or ENODEV without the
    /// kernel module rdma_ucm.
    pub(super) fn new() -> Result<Self, VerbError> {
        // SAFETY: S3: without arguments.
        let raw = sys::handle("rdma_create_event_channel", unsafe { rdma_create_event_channel() })?;
        let events = Events {
            raw,
            next_key: AtomicU64::new(1),
            own: Mutex::default(),
            taking: Mutex::default(),
        };
        sys::set_nonblocking(events.fd())?;
        Ok(Self(Arc::new(events)))
    }
}

impl Events {
    fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: S3: the descriptor is open as long as the borrowed channel.
        unsafe { BorrowedFd::borrow_raw(self.raw.as_ref().fd) }
    }

    /// Creates the context of a new id, with a key that was never used.
    fn new_context(&self, state: IdState) -> Arc<IdContext> {
        let key = self.next_key.fetch_add(1, Ordering::Relaxed);
        Arc::new(IdContext { key, calls: Mutex::default(), state: Mutex::new(state) })
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        // SAFETY: S3: created by this object; its ids, which reference it, are gone.
        unsafe { rdma_destroy_event_channel(self.raw.as_ptr()) };
    }
}

impl cm_contract::CmChannel<Ibverbs> for CmChannel {
    fn fd(&self) -> BorrowedFd<'_> {
        self.0.fd()
    }

    fn may_block(&self) -> bool {
        true
    }

    fn port_space(&self) -> usize {
        0
    }

    fn take_event(&self) -> Result<Option<CmEvent<Ibverbs>>, VerbError> {
        loop {
            let own = self.0.own.lock().pop_front();
            if own.is_some() {
                return Ok(own);
            }
            let taking = self.0.taking.lock();
            let Some(taken) = UnackedEvent::next(&self.0)? else { return Ok(None) };
            let event = taken.into_event();
            drop(taking);
            if event.is_some() || self.is_empty() {
                return Ok(event);
            }
        }
    }

    /// Polls the descriptor, because librdmacm allocates memory to find that there is no event.
    fn is_empty(&self) -> bool {
        let mut channel = [PollFd::from_borrowed_fd(self.fd(), PollFlags::IN)];
        let readable = poll(&mut channel, Some(&Timespec::default())) != Ok(0);
        !readable && self.0.own.lock().is_empty()
    }

    fn create_id(&self) -> Result<CmId, VerbError> {
        self.create(rdma_port_space::RDMA_PS_TCP)
    }

    fn create_datagram_id(&self) -> Result<CmId, VerbError> {
        self.create(rdma_port_space::RDMA_PS_UDP)
    }
}

impl CmChannel {
    fn create(&self, space: rdma_port_space::Type) -> Result<CmId, VerbError> {
        const VERB: &str = "rdma_create_id";
        let datagrams = space == rdma_port_space::RDMA_PS_UDP;
        let context = self.0.new_context(IdState { datagrams, ..IdState::default() });
        let mut raw = ptr::null_mut();
        // SAFETY: S3: the channel is open, the result local; the context outlives the id.
        let result =
            unsafe { rdma_create_id(self.0.raw.as_ptr(), &raw mut raw, context.as_ptr(), space) };
        sys::status(VERB, result)?;
        Ok(CmId::new(sys::handle(VERB, raw)?, context, Arc::clone(&self.0)))
    }
}

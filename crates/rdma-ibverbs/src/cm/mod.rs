//! The connection manager of real devices: librdmacm, opened when the program starts, as libibverbs is.
//!
//! librdmacm opens devices by itself, and those openings stay its own: an id only says what its device is called. The
//! manager of a peer is in its kernel, which answers nearly everything by itself. A goodbye it does not, so
//! [`take_event`](cm_contract::CmChannel::take_event) does. And it does not say that a request was taken back, but refuses
//! whatever is asked of its id; then the event is raised here, for who drains the channel after a call that failed.
//!
//! [`event`] reads events and gives them back at once, so that destroying an id never waits for one; [`id`] is one call
//! per function, after a look at whether librdmacm can bear it: it takes a resolved address for granted, and follows a
//! null pointer where there is none. [`address`] puts addresses into the form of C.

#![allow(unsafe_code)]

mod address;
mod event;
mod id;
#[cfg(test)]
mod tests;

use std::collections::{HashMap, VecDeque};
use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;
use rdma_sys::*;

use super::ibv_channel::do_not_block;
use super::{Ibverbs, sys};
use rdma_provider::VerbError;
use rdma_provider::cm_contract::{self, CmEvent};

use event::Taken;
pub use id::CmId;
use id::Known;

/// `rdma_event_channel`, shared by its ids.
#[derive(Debug)]
pub struct CmChannel(Arc<Events>);

/// What ids need of their channel.
#[derive(Debug)]
struct Events {
    raw: NonNull<rdma_event_channel>,
    next_key: AtomicUsize,
    /// What is known of each id; events carry its key.
    ids: Mutex<HashMap<usize, Arc<Mutex<Known>>>>,
    /// Events that the kernel does not raise.
    own: Mutex<VecDeque<CmEvent<Ibverbs>>>,
}

// SAFETY: S3: librdmacm is safe to call from any thread at once; the handle is used until `Drop` only, and its events are
// taken by one caller at a time, as the contract says.
unsafe impl Send for Events {}
// SAFETY: S3: as above.
unsafe impl Sync for Events {}

impl CmChannel {
    /// EOPNOTSUPP: librdmacm could not be loaded. ENOENT, ENODEV: the kernel's part, rdma_ucm, is not there.
    pub(super) fn new() -> Result<Self, VerbError> {
        // SAFETY: S3: takes nothing.
        let raw = sys::handle("rdma_create_event_channel", unsafe { rdma_create_event_channel() })?;
        let events = Events {
            raw,
            next_key: AtomicUsize::new(1),
            ids: Mutex::default(),
            own: Mutex::default(),
        };
        do_not_block(events.fd())?;
        Ok(Self(Arc::new(events)))
    }
}

impl Events {
    fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: S3: the descriptor is open as long as the channel, which is borrowed.
        unsafe { BorrowedFd::borrow_raw(self.raw.as_ref().fd) }
    }

    /// A key that was never used, which names `known` until it is forgotten.
    fn enter(&self, known: Known) -> (usize, Arc<Mutex<Known>>) {
        let (key, known) =
            (self.next_key.fetch_add(1, Ordering::Relaxed), Arc::new(Mutex::new(known)));
        self.ids.lock().insert(key, Arc::clone(&known));
        (key, known)
    }

    fn find(&self, key: usize) -> Option<Arc<Mutex<Known>>> {
        self.ids.lock().get(&key).cloned()
    }

    fn forget(&self, key: usize) {
        let forgotten = self.ids.lock().remove(&key);
        drop(forgotten);
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        // SAFETY: S3: made by us; ids hold the channel, so all of them are gone.
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
        let own = self.0.own.lock().pop_front();
        match own {
            Some(event) => Ok(Some(event)),
            None => Taken::next(&self.0).map(|taken| taken.map(Taken::file)),
        }
    }

    fn create_id(&self) -> Result<CmId, VerbError> {
        let (key, known) = self.0.enter(Known::default());
        let mut raw = ptr::null_mut();
        // SAFETY: S3: the channel is open, the result ours; the context is a number.
        let result = unsafe {
            let context = ptr::without_provenance_mut(key);
            rdma_create_id(self.0.raw.as_ptr(), &raw mut raw, context, rdma_port_space::RDMA_PS_TCP)
        };
        let made =
            sys::status("rdma_create_id", result).and_then(|()| sys::handle("rdma_create_id", raw));
        match made {
            Ok(raw) => Ok(CmId::new(raw, key, known, Arc::clone(&self.0))),
            Err(error) => {
                self.0.forget(key);
                Err(error)
            }
        }
    }
}

//! Doorbell registers of a protection domain: thread domains, `ibv_alloc_td(3)`.
//!
//! libmlx5 gives each thread domain a register that no other queue pair gets. Queue pairs of the
//! thread domain ring on it; their owner keeps them from ringing at the same time, here by the lock
//! of the [`Register`].

use std::fmt;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{self, Ordering};

use crate::ffi::*;
use rdma_provider::VerbError;
use rdma_provider::locks::Mutex;

use super::doorbell::Register;
use crate::sys;

/// Maximum registers of a protection domain that one queue pair each rings on, without a lock.
const OWN: usize = 16;
/// Maximum registers that further queue pairs share.
const SHARED: usize = 8;

/// The registers of a protection domain, allocated as queue pairs need them.
#[derive(Debug, Default)]
pub(crate) struct Registers {
    own: Mutex<Vec<Arc<ThreadDomain>>>,
    shared: Mutex<Vec<Arc<ThreadDomain>>>,
}

/// A thread domain, with the protection domain of its queue pairs.
pub(crate) struct ThreadDomain {
    td: NonNull<ibv_td>,
    parent: NonNull<ibv_pd>,
    shared: bool,
    /// Set when the first queue pair has reported its register.
    register: Mutex<Option<Arc<Register>>>,
}

// SAFETY: S3: libibverbs is thread-safe.
unsafe impl Send for ThreadDomain {}
// SAFETY: S3: as above.
unsafe impl Sync for ThreadDomain {}

impl Registers {
    /// Returns an unused thread domain, or one to share if there are many queue pairs.
    ///
    /// # Safety
    ///
    /// `pd` is alive, and outlives the registers.
    pub(crate) unsafe fn next(&self, pd: NonNull<ibv_pd>) -> Result<Arc<ThreadDomain>, VerbError> {
        let is_unused = |domain: &&Arc<ThreadDomain>| Arc::strong_count(domain) == 1;
        let (mut shared, mut own) = (self.shared.lock(), self.own.lock());
        if let Some(unused) = own.iter().find(is_unused) {
            // Pairs with the release of the last queue pair's reference: its doorbells come first.
            atomic::fence(Ordering::Acquire);
            return Ok(unused.clone());
        }
        // The second register is to be shared. From then on, queue pairs can be created although
        // the device has no register left.
        if shared.is_empty() && !own.is_empty() {
            // SAFETY: S3: the caller's promise.
            shared.push(Arc::new(unsafe { ThreadDomain::new(pd, true) }?));
        }
        if own.len() < OWN {
            // SAFETY: S3: the caller's promise.
            match unsafe { ThreadDomain::new(pd, false) } {
                Ok(domain) => {
                    let domain = Arc::new(domain);
                    own.push(domain.clone());
                    return Ok(domain);
                }
                Err(error) if shared.is_empty() => return Err(error),
                Err(_) => {}
            }
        }
        if shared.len() < SHARED
            // SAFETY: S3: the caller's promise.
            && let Ok(domain) = unsafe { ThreadDomain::new(pd, true) }
        {
            shared.push(Arc::new(domain));
        }
        let least = shared.iter().min_by_key(|domain| Arc::strong_count(domain));
        least.cloned().ok_or(VerbError::new("ibv_alloc_td", VerbError::ENOMEM))
    }
}

impl ThreadDomain {
    /// Allocates a thread domain.
    ///
    /// # Safety
    ///
    /// See [`Registers::next`].
    unsafe fn new(pd: NonNull<ibv_pd>, shared: bool) -> Result<Self, VerbError> {
        // SAFETY: S3: the domain is alive; the attributes are local.
        unsafe {
            let context = pd.as_ref().context;
            let mut attr = ibv_td_init_attr { comp_mask: 0 };
            let td = sys::handle("ibv_alloc_td", ibv_alloc_td(context, &raw mut attr))?;
            let mut attr: ibv_parent_domain_init_attr = std::mem::zeroed();
            (attr.pd, attr.td) = (pd.as_ptr(), td.as_ptr());
            attr.pd_context = ptr::null_mut();
            let parent = ibv_alloc_parent_domain(context, &raw mut attr);
            match sys::handle("ibv_alloc_parent_domain", parent) {
                Ok(parent) => Ok(Self { td, parent, shared, register: Mutex::new(None) }),
                Err(error) => {
                    sys::log_failure("ibv_dealloc_td", ibv_dealloc_td(td.as_ptr()));
                    Err(error)
                }
            }
        }
    }

    /// Returns the protection domain for queue pairs that ring here.
    pub(crate) fn domain(&self) -> NonNull<ibv_pd> {
        self.parent
    }

    /// Returns the register, which the first queue pair names.
    pub(super) fn register(&self, make: impl FnOnce(bool) -> Register) -> Arc<Register> {
        self.register.lock().get_or_insert_with(|| Arc::new(make(self.shared))).clone()
    }
}

impl Drop for ThreadDomain {
    fn drop(&mut self) {
        // SAFETY: S3: allocated by this object; its queue pairs are gone.
        unsafe {
            sys::log_failure("ibv_dealloc_pd", ibv_dealloc_pd(self.parent.as_ptr()));
            sys::log_failure("ibv_dealloc_td", ibv_dealloc_td(self.td.as_ptr()));
        }
    }
}

impl fmt::Debug for ThreadDomain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ThreadDomain").field("register", &self.register).finish_non_exhaustive()
    }
}

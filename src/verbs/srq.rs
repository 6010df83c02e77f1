#![allow(unsafe_code)]

use std::fmt;
use std::sync::Arc;

use super::{PostError, ProtectionDomain};
use crate::dispatch;
use crate::error::{LimitError, SetupError, VerbError};
use crate::types::{RecvWr, SrqCaps};
use rdma_provider::contract::{Pd as _, Srq as _};

/// A shared receive queue of the verbs interface, `ibv_create_srq(3)`; [`Dct`](super::Dct) has an
/// example. Clones refer to the same queue.
#[derive(Clone)]
pub struct Srq {
    inner: Arc<Inner>,
}

struct Inner {
    raw: dispatch::Srq,
    pd: ProtectionDomain,
}

impl Srq {
    /// Creates a queue for at least `caps.max_wr` receives.
    ///
    /// # Errors
    ///
    /// - [`SetupError::TooSmall`] if `max_wr` is 0;
    /// - [`SetupError::Limit`] above a limit of the device.
    pub fn new(pd: &ProtectionDomain, caps: SrqCaps) -> Result<Self, SetupError> {
        let attr = pd.device().attr();
        SetupError::at_least("max_wr of the shared receive queue", caps.max_wr.into(), 1)?;
        LimitError::check(
            "max_wr of the shared receive queue",
            caps.max_wr.into(),
            attr.max_srq_wr.into(),
        )?;
        LimitError::check(
            "max_sge of the shared receive queue",
            caps.max_sge.into(),
            attr.max_srq_sge.into(),
        )?;
        let raw = pd.raw().create_srq(caps)?;
        Ok(Self { inner: Arc::new(Inner { raw, pd: pd.clone() }) })
    }

    /// Returns the number by which asynchronous events name the queue.
    #[must_use]
    pub fn id(&self) -> u64 {
        self.inner.raw.id()
    }

    /// Returns the granted sizes.
    #[must_use]
    pub fn caps(&self) -> SrqCaps {
        self.inner.raw.caps()
    }

    /// Requests one event when fewer than `limit` receives are left, `ibv_modify_srq(3)`.
    ///
    /// # Errors
    ///
    /// [`SetupError::Limit`] if `limit` exceeds `max_wr`.
    pub fn set_limit(&self, limit: u32) -> Result<(), SetupError> {
        LimitError::check(
            "limit of the shared receive queue",
            limit.into(),
            self.caps().max_wr.into(),
        )?;
        Ok(self.inner.raw.set_limit(limit)?)
    }

    /// Returns the armed limit; 0 after its event.
    ///
    /// # Errors
    ///
    /// [`VerbError`].
    pub fn limit(&self) -> Result<u32, VerbError> {
        self.inner.raw.limit()
    }

    /// Returns its protection domain.
    #[must_use]
    pub fn protection_domain(&self) -> &ProtectionDomain {
        &self.inner.pd
    }

    /// Posts a list of receives, `ibv_post_srq_recv(3)`.
    ///
    /// # Errors
    ///
    /// [`PostError`] with EINVAL for a malformed request, and with ENOMEM if the queue is full.
    ///
    /// # Safety
    ///
    /// - The memory that the list names stays valid and untouched until its completion has been
    ///   polled or the last clone of this queue has been dropped.
    /// - If completions go to the [queue](crate::CompletionQueue::verbs) of a `CompletionQueue`, no
    ///   receive has the number of an operation there, whose buffers would be returned too early.
    pub unsafe fn post_recv(&self, list: &[RecvWr<'_>]) -> Result<(), PostError> {
        // SAFETY: S1: promised by the caller.
        unsafe { self.inner.raw.post_recv(list) }
    }

    /// Other references exist only in leaked queue pairs. After an error the queue is leaked,
    /// because the device may continue with posted receives.
    pub(crate) fn destroy(self) -> Result<(), VerbError> {
        let Ok(mut inner) = Arc::try_unwrap(self.inner) else { return Ok(()) };
        let result = inner.raw.destroy();
        if let Err(error) = &result {
            let srq = inner.raw.id();
            rdma_provider::error!(
                srq,
                %error,
                "failed to destroy shared receive queue; leaking it"
            );
            std::mem::forget(inner);
        }
        result
    }

    pub(crate) fn raw(&self) -> &dispatch::Srq {
        &self.inner.raw
    }
}

impl fmt::Debug for Srq {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Srq")
            .field("id", &self.id())
            .field("caps", &self.caps())
            .finish_non_exhaustive()
    }
}

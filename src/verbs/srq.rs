//! Shared receive queue: receives that many queue pairs draw from.

#![allow(unsafe_code)]

use std::fmt;
use std::sync::Arc;

use super::{PostError, ProtectionDomain};
use crate::dispatch;
use crate::error::{LimitError, SetupError, VerbError};
use crate::types::{RecvWr, SrqCaps};
use rdma_provider::contract::{Pd as _, Srq as _};

/// Bare shared receive queue, `ibv_create_srq(3)`; clones share it.
///
/// ```
/// use tokio_rdma::types::SrqCaps;
/// use tokio_rdma::verbs::Srq;
/// # use tokio_rdma::Device;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let device = Device::open_default()?;
/// # let pd = device.protection_domain()?;
/// let srq = Srq::new(&pd, SrqCaps { max_wr: 16, max_sge: 1 })?;
/// assert!(srq.caps().max_wr >= 16);
/// srq.set_limit(4)?;
/// assert_eq!(srq.limit()?, 4);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Srq {
    inner: Arc<Inner>,
}

struct Inner {
    raw: dispatch::Srq,
    pd: ProtectionDomain,
}

impl Srq {
    /// A queue for at least `caps.max_wr` receives.
    ///
    /// # Errors
    ///
    /// [`SetupError::TooSmall`] for no receives, [`SetupError::Limit`] above the device's limits, [`SetupError::Verb`] if the provider refuses.
    pub fn new(pd: &ProtectionDomain, caps: SrqCaps) -> Result<Self, SetupError> {
        let attr = pd.device().attr();
        SetupError::at_least("srq max_wr", caps.max_wr.into(), 1)?;
        LimitError::check("srq max_wr", caps.max_wr.into(), attr.max_srq_wr.into())?;
        LimitError::check("srq max_sge", caps.max_sge.into(), attr.max_srq_sge.into())?;
        let raw = pd.raw().create_srq(caps)?;
        Ok(Self { inner: Arc::new(Inner { raw, pd: pd.clone() }) })
    }

    /// Number by which asynchronous events name it.
    #[must_use]
    pub fn id(&self) -> u64 {
        self.inner.raw.id()
    }

    /// Sizes granted.
    #[must_use]
    pub fn caps(&self) -> SrqCaps {
        self.inner.raw.caps()
    }

    /// Arms the limit event: raised once when fewer than `limit` receives are left, `ibv_modify_srq(3)`.
    ///
    /// # Errors
    ///
    /// [`SetupError::Limit`] above `max_wr`.
    pub fn set_limit(&self, limit: u32) -> Result<(), SetupError> {
        LimitError::check("srq limit", limit.into(), self.caps().max_wr.into())?;
        Ok(self.inner.raw.set_limit(limit)?)
    }

    /// The armed limit; 0 after its event.
    ///
    /// # Errors
    ///
    /// [`VerbError`] as the provider gives it.
    pub fn limit(&self) -> Result<u32, VerbError> {
        self.inner.raw.limit()
    }

    /// The protection domain it belongs to.
    #[must_use]
    pub fn protection_domain(&self) -> &ProtectionDomain {
        &self.inner.pd
    }

    /// Posts a list, `ibv_post_srq_recv(3)`.
    ///
    /// # Errors
    ///
    /// [`PostError`]: EINVAL for a malformed request, ENOMEM for a full queue.
    ///
    /// # Safety
    ///
    /// The memory that the list names stays valid and untouched until its completion has been polled or the
    /// last clone of this queue was dropped.
    pub unsafe fn post_recv(&self, list: &[RecvWr<'_>]) -> Result<(), PostError> {
        // SAFETY: S1: promised by the caller.
        unsafe { self.inner.raw.post_recv(list) }
    }

    /// Destroys it, if this is the last share, and says whether it is gone. Others are held by queue pairs only that went with
    /// their device and were leaked: nothing draws for them either.
    ///
    /// After an error the device may go on with what was posted. Nothing that it is made of is freed then.
    pub(crate) fn destroy(self) -> Result<(), VerbError> {
        let Ok(mut inner) = Arc::try_unwrap(self.inner) else { return Ok(()) };
        let result = inner.raw.destroy();
        if let Err(error) = &result {
            tracing::error!(srq = inner.raw.id(), %error, "shared receive queue is not destroyed");
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

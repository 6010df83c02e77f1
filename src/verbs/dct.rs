//! Target of dynamic connections: create, bring to RTR.

#![forbid(unsafe_code)]

use std::fmt;

use parking_lot::Mutex;

use super::{Cq, ProtectionDomain, Srq};
use crate::dispatch::{self, TargetCounters};
use crate::error::{SetupError, VerbError};
use crate::types::{DcKey, QpAttr, QpState, Qpn, TransitionError, check_dct_transition};
use rdma_provider::contract::{Dct as _, DctInit, Pd as _};

/// Bare DC target, a DCT of `mlx5dv_create_qp(3)`: initiators that know its number and key reach the memory and the shared
/// receives of its protection domain.
///
/// Dropping it destroys it: nobody reaches anything through it any more, and completions of its receives that are not yet
/// polled may be gone.
///
/// ```
/// use tokio_rdma::types::{DcKey, SrqCaps};
/// use tokio_rdma::verbs::{Cq, Dct, Srq};
/// # use tokio_rdma::Device;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let device = Device::software()?;
/// # let pd = device.protection_domain()?;
/// let cq = Cq::new(&device, 16, None, 0)?;
/// let srq = Srq::new(&pd, SrqCaps { max_wr: 16, max_sge: 1 })?;
/// let target = Dct::new(&pd, &cq, &srq, DcKey(0x5eed))?;
/// // `Dct::modify` to RTR gives it its number.
/// assert_eq!(target.number(), None);
/// # Ok(())
/// # }
/// ```
pub struct Dct {
    raw: dispatch::Dct,
    /// One transition at a time, so that what is checked is what is changed.
    transition: Mutex<()>,
    recv_cq: Cq,
    srq: Srq,
    pd: ProtectionDomain,
}

impl Dct {
    /// A target in RESET that draws receives from `srq`, and whose completions of them go to `recv_cq`.
    ///
    /// # Errors
    ///
    /// [`SetupError::Unsupported`] if the device has no DC, [`SetupError::Foreign`] for queues of another device or
    /// protection domain, [`SetupError::Verb`] if the provider refuses.
    pub fn new(
        pd: &ProtectionDomain,
        recv_cq: &Cq,
        srq: &Srq,
        key: DcKey,
    ) -> Result<Self, SetupError> {
        if pd.device().attr().dc.is_none() {
            return Err(SetupError::Unsupported { what: "dynamically connected transport (DC)" });
        }
        if !recv_cq.device().same(pd.device()) {
            return Err(SetupError::Foreign { what: "completion queue" });
        }
        if !srq.protection_domain().same(pd) {
            return Err(SetupError::Foreign { what: "shared receive queue" });
        }
        let raw = pd.raw().create_dct(&DctInit { srq: srq.raw(), recv_cq: recv_cq.raw(), key })?;
        Ok(Self {
            raw,
            transition: Mutex::new(()),
            recv_cq: recv_cq.clone(),
            srq: srq.clone(),
            pd: pd.clone(),
        })
    }

    /// Its number, once it is in RTR.
    #[must_use]
    pub fn number(&self) -> Option<Qpn> {
        self.raw.number()
    }

    /// The protection domain it belongs to.
    #[must_use]
    pub fn protection_domain(&self) -> &ProtectionDomain {
        &self.pd
    }

    /// Queue of its receive completions.
    #[must_use]
    pub fn recv_cq(&self) -> &Cq {
        &self.recv_cq
    }

    /// Shared receive queue it draws from.
    #[must_use]
    pub fn srq(&self) -> &Srq {
        &self.srq
    }

    /// Changes attributes and state, `ibv_modify_qp(3)`, by [`dct_transition`](crate::types::dct_transition); a refused
    /// change changes nothing.
    ///
    /// # Errors
    ///
    /// [`SetupError::Transition`] with what is missing or not allowed, [`SetupError::Verb`] if a value is not
    /// valid or the device refuses.
    pub fn modify(&self, attr: &QpAttr) -> Result<(), SetupError> {
        let _one_at_a_time = self.transition.lock();
        let (now, _) = self.raw.query()?;
        if let Some(claimed) = attr.current_state.filter(|&claimed| claimed != now) {
            return Err(TransitionError::NotInState { claimed, actual: now }.into());
        }
        let to = attr.state.unwrap_or(now);
        check_dct_transition(now, to, attr.mask())?;
        self.raw.modify(attr)?;
        tracing::debug!(number = ?self.number(), from = ?now, ?to, "DC target state");
        Ok(())
    }

    /// Current state and all attributes that have been set, `ibv_query_qp(3)`.
    ///
    /// # Errors
    ///
    /// [`VerbError`] as the provider gives it.
    pub fn query(&self) -> Result<(QpState, QpAttr), VerbError> {
        self.raw.query()
    }

    /// Packets, sessions and refusals so far, if it is of a software device.
    #[must_use]
    pub fn software_counters(&self) -> Option<TargetCounters> {
        self.raw.software_counters()
    }

    /// Takes no message any more, if the device can do that without destroying it: then all that it has taken can be polled.
    pub(crate) fn quiesce(&self) {
        self.raw.quiesce();
    }

    /// Destroys it, `ibv_destroy_qp(3)`, and says whether it is gone; a drop can only log that.
    ///
    /// # Errors
    ///
    /// [`VerbError`] if the device refuses: messages may go on to arrive. Nothing that the target is made of is freed then,
    /// as long as the program runs.
    pub fn destroy(mut self) -> Result<(), VerbError> {
        let result = self.raw.destroy();
        if let Err(error) = &result {
            tracing::error!(number = ?self.number(), %error, "DC target is not destroyed");
            std::mem::forget(self);
        }
        result
    }
}

impl fmt::Debug for Dct {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Dct")
            .field("number", &self.number())
            .field("srq", &self.srq)
            .finish_non_exhaustive()
    }
}

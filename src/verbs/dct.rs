#![forbid(unsafe_code)]

use std::fmt;

use rdma_provider::locks::Mutex;

use super::{Cq, ProtectionDomain, Srq};
use crate::dispatch::{self, TargetCounters};
use crate::error::{SetupError, VerbError};
use crate::types::{DcKey, QpAttr, QpState, Qpn, TransitionError, check_dct_transition};
use rdma_provider::contract::{Dct as _, DctInit, Pd as _};

/// A DC target, a DCT of `mlx5dv_create_qp(3)`. Initiators that know its number and key access the
/// memory of its protection domain, and consume its shared receives.
///
/// Dropping the target destroys it, and may lose unpolled completions.
///
/// ```
/// use tokio_rdma::types::{DcKey, SrqCaps};
/// use tokio_rdma::verbs::{Cq, Dct, Srq};
/// # use tokio_rdma::{Device, SetupError};
///
/// # fn example(device: &Device) -> Result<(), SetupError> {
/// # let pd = device.protection_domain()?;
/// let cq = Cq::new(device, 16, None, 0)?;
/// let srq = Srq::new(&pd, SrqCaps { max_wr: 16, max_sge: 1 })?;
/// let target = Dct::new(&pd, &cq, &srq, DcKey(0x5eed))?;
/// # Ok(())
/// # }
/// ```
pub struct Dct {
    raw: dispatch::Dct,
    /// Held between the query of the state and its change.
    transition: Mutex<()>,
    recv_cq: Cq,
    srq: Srq,
    pd: ProtectionDomain,
}

impl Dct {
    /// Creates a target in RESET with receives from `srq`, which complete on `recv_cq`.
    ///
    /// # Errors
    ///
    /// - [`SetupError::Unsupported`] if the device has no DC;
    /// - [`SetupError::Foreign`] for queues of another device or protection domain.
    pub fn new(
        pd: &ProtectionDomain,
        recv_cq: &Cq,
        srq: &Srq,
        key: DcKey,
    ) -> Result<Self, SetupError> {
        pd.device().dc()?;
        SetupError::check_same(recv_cq.device().same(pd.device()), "completion queue")?;
        SetupError::check_same(srq.protection_domain().same(pd), "shared receive queue")?;
        let raw = pd.raw().create_dct(&DctInit { srq: srq.raw(), recv_cq: recv_cq.raw(), key })?;
        Ok(Self {
            raw,
            transition: Mutex::new(()),
            recv_cq: recv_cq.clone(),
            srq: srq.clone(),
            pd: pd.clone(),
        })
    }

    /// Returns its number, assigned by the transition to RTR.
    #[must_use]
    pub fn number(&self) -> Option<Qpn> {
        self.raw.number()
    }

    /// Returns its protection domain.
    #[must_use]
    pub fn protection_domain(&self) -> &ProtectionDomain {
        &self.pd
    }

    /// Returns the completion queue of its receives.
    #[must_use]
    pub fn recv_cq(&self) -> &Cq {
        &self.recv_cq
    }

    /// Returns its shared receive queue.
    #[must_use]
    pub fn srq(&self) -> &Srq {
        &self.srq
    }

    /// Changes attributes and state as [`dct_transition`](crate::types::dct_transition) permits,
    /// `ibv_modify_qp(3)`. A refused change has no effect.
    ///
    /// # Errors
    ///
    /// [`SetupError::Transition`] names missing or forbidden attributes.
    pub fn modify(&self, attr: &QpAttr) -> Result<(), SetupError> {
        let _one_at_a_time = self.transition.lock();
        let (now, _) = self.raw.query()?;
        if let Some(claimed) = attr.current_state.filter(|&claimed| claimed != now) {
            return Err(TransitionError::NotInState { claimed, actual: now }.into());
        }
        let to = attr.state.unwrap_or(now);
        check_dct_transition(now, to, attr.mask())?;
        self.raw.modify(attr)?;
        rdma_provider::debug!(number = ?self.number(), from = ?now, ?to, "DC target changed state");
        Ok(())
    }

    /// Returns the state and all attributes set so far, `ibv_query_qp(3)`.
    ///
    /// # Errors
    ///
    /// [`VerbError`].
    pub fn query(&self) -> Result<(QpState, QpAttr), VerbError> {
        self.raw.query()
    }

    /// Returns the counters of a software device; `None` on hardware.
    #[must_use]
    pub fn software_counters(&self) -> Option<TargetCounters> {
        self.raw.software_counters()
    }

    pub(crate) fn quiesce(&self) {
        self.raw.quiesce();
    }

    /// Destroys the target, `ibv_destroy_qp(3)`. A drop can only log an error.
    ///
    /// # Errors
    ///
    /// [`VerbError`] if the device refuses. The target and everything that it uses are then leaked,
    /// and messages may still arrive.
    pub fn destroy(mut self) -> Result<(), VerbError> {
        let result = self.raw.destroy();
        if let Err(error) = &result {
            let number = self.number();
            rdma_provider::error!(?number, %error, "failed to destroy DC target; leaking it");
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

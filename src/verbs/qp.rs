//! Queue pair: create, move through its states, post.

#![allow(unsafe_code)]

use std::borrow::Borrow;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::{Cq, ProtectionDomain, Srq};
use crate::dispatch;
use crate::dispatch::{ReceiveCounters, SendCounters};
use crate::error::{LimitError, SetupError, VerbError};
use crate::types::{
    QpAttr, QpCaps, QpState, Qpn, RecvWr, SendWr, TransitionError, Transport, check_transition,
};
use rdma_provider::contract::{Context as _, Pd as _, PostError, Qp as _, QpInit};

/// What a queue pair is made of.
#[derive(Debug, Clone)]
pub struct QpOptions {
    /// Service type.
    pub transport: Transport,
    /// Sizes asked for.
    pub caps: QpCaps,
}

/// Bare queue pair, `ibv_create_qp(3)`.
///
/// Dropping it destroys it: work in flight is abandoned, completions not yet polled are gone.
///
/// ```
/// use tokio_rdma::types::{QpAttr, QpCaps, QpState, Transport};
/// use tokio_rdma::verbs::{Cq, Qp, QpOptions};
/// # use tokio_rdma::Access;
/// # use tokio_rdma::Device;
/// # use tokio_rdma::types::PortNum;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let device = Device::software()?;
/// # let pd = device.protection_domain()?;
/// let cq = Cq::new(&device, 16, None, 0)?;
/// let caps = QpCaps { max_send_wr: 4, max_recv_wr: 4, max_send_sge: 1, max_recv_sge: 1, max_inline: 0 };
/// let qp = Qp::new(&pd, &cq, &cq, None, &QpOptions { transport: Transport::Rc, caps })?;
/// qp.modify(&QpAttr {
///     pkey_index: Some(0),
///     port: Some(PortNum(1)),
///     access: Some(Access::REMOTE_WRITE),
///     ..QpAttr::to_state(QpState::Init)
/// })?;
/// assert_eq!(qp.query()?.0, QpState::Init);
/// # Ok(())
/// # }
/// ```
pub struct Qp {
    raw: dispatch::Qp,
    transport: Transport,
    /// One transition at a time, so that what is checked is what is changed.
    transition: Mutex<()>,
    send_cq: Cq,
    recv_cq: Cq,
    srq: Option<Srq>,
    /// With a shared receive queue: that, in the error state, it takes nothing more from it.
    last_receive: Option<Arc<AtomicBool>>,
    pd: ProtectionDomain,
}

/// How long a device may take to say that a queue pair in the error state takes no more receives.
const LAST_RECEIVE: Duration = Duration::from_millis(1);

impl Qp {
    /// A queue pair in RESET.
    ///
    /// # Errors
    ///
    /// [`SetupError::Limit`] above a limit of the device, [`SetupError::Foreign`] for queues of another device or
    /// protection domain, [`SetupError::Unsupported`] for an initiator of a device without DC,
    /// [`SetupError::Verb`] if the provider refuses.
    pub fn new(
        pd: &ProtectionDomain,
        send_cq: &Cq,
        recv_cq: &Cq,
        srq: Option<&Srq>,
        options: &QpOptions,
    ) -> Result<Self, SetupError> {
        Self::numbered(pd, send_cq, recv_cq, srq, options, None)
    }

    /// As [`new`](Self::new), under a number that the connection manager has reserved, if there is one.
    pub(crate) fn numbered(
        pd: &ProtectionDomain,
        send_cq: &Cq,
        recv_cq: &Cq,
        srq: Option<&Srq>,
        options: &QpOptions,
        number: Option<Qpn>,
    ) -> Result<Self, SetupError> {
        let (attr, caps) = (pd.device().attr(), options.caps);
        LimitError::check("max_send_wr", caps.max_send_wr.into(), attr.max_qp_wr.into())?;
        LimitError::check("max_recv_wr", caps.max_recv_wr.into(), attr.max_qp_wr.into())?;
        LimitError::check("max_send_sge", caps.max_send_sge.into(), attr.max_sge.into())?;
        LimitError::check("max_recv_sge", caps.max_recv_sge.into(), attr.max_sge.into())?;
        LimitError::check("max_inline", caps.max_inline.into(), attr.max_inline.into())?;
        if options.transport == Transport::Dci {
            if attr.dc.is_none() {
                return Err(SetupError::Unsupported {
                    what: "dynamically connected transport (DC)",
                });
            }
            // It receives nothing.
            LimitError::check("max_recv_wr", caps.max_recv_wr.into(), 0)?;
            if srq.is_some() {
                return Err(SetupError::Unsupported {
                    what: "DC initiator with a shared receive queue",
                });
            }
        }
        for cq in [send_cq, recv_cq] {
            if !cq.device().same(pd.device()) {
                return Err(SetupError::Foreign { what: "completion queue" });
            }
        }
        if srq.is_some_and(|srq| !srq.protection_domain().same(pd)) {
            return Err(SetupError::Foreign { what: "shared receive queue" });
        }
        let init = QpInit {
            transport: options.transport,
            send_cq: send_cq.raw(),
            recv_cq: recv_cq.raw(),
            srq: srq.map(Srq::raw),
            caps,
        };
        let raw = match number {
            None => pd.raw().create_qp(&init)?,
            Some(number) => pd.raw().create_numbered_qp(number, &init)?,
        };
        let watched = srq.is_some() && pd.device().context().reports_last_receive();
        Ok(Self {
            last_receive: watched.then(|| pd.device().async_events().watch_last_receive(raw.qpn())),
            raw,
            transport: options.transport,
            transition: Mutex::new(()),
            send_cq: send_cq.clone(),
            recv_cq: recv_cq.clone(),
            srq: srq.cloned(),
            pd: pd.clone(),
        })
    }

    /// Its number.
    #[must_use]
    pub fn qpn(&self) -> Qpn {
        self.raw.qpn()
    }

    /// Sizes granted.
    #[must_use]
    pub fn caps(&self) -> QpCaps {
        self.raw.caps()
    }

    /// Service type.
    #[must_use]
    pub fn transport(&self) -> Transport {
        self.transport
    }

    /// The provider's object.
    #[cfg(feature = "ibverbs")]
    pub(crate) fn raw(&self) -> &dispatch::Qp {
        &self.raw
    }

    /// The protection domain it belongs to.
    #[must_use]
    pub fn protection_domain(&self) -> &ProtectionDomain {
        &self.pd
    }

    /// Queue of its send completions.
    #[must_use]
    pub fn send_cq(&self) -> &Cq {
        &self.send_cq
    }

    /// Queue of its receive completions.
    #[must_use]
    pub fn recv_cq(&self) -> &Cq {
        &self.recv_cq
    }

    /// Shared receive queue it draws from.
    #[must_use]
    pub fn srq(&self) -> Option<&Srq> {
        self.srq.as_ref()
    }

    /// Changes attributes and state, `ibv_modify_qp(3)`; a refused change changes nothing.
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
        check_transition(self.transport, now, to, attr.mask())?;
        self.raw.modify(attr)?;
        tracing::debug!(qpn = %self.qpn(), from = ?now, ?to, "queue pair state");
        Ok(())
    }

    /// Waits until the device takes nothing more from the shared receive queue, if there is one: the receive that a message
    /// was arriving in has its completion then, which destroying the queue pair would take along. In the error state only,
    /// and no longer than a millisecond: not every change of state makes a device say so (`LAST_WQE_REACHED`).
    pub(crate) fn await_last_receive(&self) {
        let Some(reached) = &self.last_receive else { return };
        let end = Instant::now() + LAST_RECEIVE;
        loop {
            self.pd.device().read_events();
            if reached.load(Ordering::Acquire) {
                return;
            }
            if Instant::now() >= end {
                tracing::debug!(qpn = %self.qpn(), "the device does not say that it takes no more shared receives");
                return;
            }
            std::thread::yield_now();
        }
    }

    /// Current state and all attributes that have been set, `ibv_query_qp(3)`.
    ///
    /// # Errors
    ///
    /// [`VerbError`] as the provider gives it.
    pub fn query(&self) -> Result<(QpState, QpAttr), VerbError> {
        self.raw.query()
    }

    /// Destroys it, `ibv_destroy_qp(3)`, and says whether it is gone; a drop can only log that.
    ///
    /// # Errors
    ///
    /// [`VerbError`] if the device refuses: it may go on with what was posted. Nothing that the queue pair is made of is
    /// freed then, as long as the program runs, and the memory that its work names must not be either.
    pub fn destroy(mut self) -> Result<(), VerbError> {
        let result = self.raw.destroy();
        if let Err(error) = &result {
            tracing::error!(qpn = %self.qpn(), %error, "queue pair is not destroyed");
            std::mem::forget(self);
        }
        result
    }

    /// Packets, retries and refusals so far, if it is of a software device.
    #[must_use]
    pub fn software_counters(&self) -> Option<(SendCounters, ReceiveCounters)> {
        self.raw.software_counters()
    }

    /// Posts a list with one doorbell, `ibv_post_send(3)`.
    ///
    /// # Errors
    ///
    /// [`PostError`]: EINVAL for a malformed request or a wrong state, ENOMEM for a full queue.
    ///
    /// # Safety
    ///
    /// The memory that the list names stays valid and untouched until its completion has been polled or this
    /// queue pair was [destroyed](Self::destroy). The window that a [`BindWindow`](crate::types::SendOp::BindWindow) names
    /// is alive, and no other binding of it is posted at the same time. If completions go to the queue of a [`CompletionQueue`](crate::CompletionQueue), no work
    /// request number is taken for that of an operation there: the queue would give back what that operation holds.
    /// What a window is bound to stays registered, and untouched but through its [`ExposedRegion`](crate::ExposedRegion),
    /// until the window was invalidated or dropped; windows that it bound are dropped before this queue pair.
    #[inline]
    pub unsafe fn post_send(&self, list: &[SendWr<'_>]) -> Result<(), PostError> {
        // SAFETY: S1: promised by the caller.
        unsafe { self.raw.post_send(list) }
    }

    /// Posts work requests that are put together where the device takes them, as [`post_send`](Self::post_send) does.
    ///
    /// # Safety
    ///
    /// As [`post_send`](Self::post_send).
    #[inline(always)]
    pub(crate) unsafe fn post_in_place<'a>(
        &self,
        list: impl IntoIterator<Item = impl Borrow<SendWr<'a>>>,
    ) -> Result<(), PostError> {
        // SAFETY: S1: promised by the caller.
        unsafe { self.raw.post_send(list) }
    }

    /// Posts a list, `ibv_post_recv(3)`.
    ///
    /// # Errors
    ///
    /// As [`post_send`](Self::post_send); EINVAL also if there is a shared receive queue.
    ///
    /// # Safety
    ///
    /// As [`post_send`](Self::post_send).
    #[inline]
    pub unsafe fn post_recv(&self, list: &[RecvWr<'_>]) -> Result<(), PostError> {
        // SAFETY: S1: promised by the caller.
        unsafe { self.raw.post_recv(list) }
    }
}

impl Drop for Qp {
    fn drop(&mut self) {
        if let Some(reached) = &self.last_receive {
            self.pd.device().async_events().forget_last_receive(self.qpn(), reached);
        }
    }
}

impl fmt::Debug for Qp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Qp")
            .field("qpn", &self.qpn())
            .field("transport", &self.transport)
            .finish_non_exhaustive()
    }
}

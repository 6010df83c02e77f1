#![allow(unsafe_code)]

use std::borrow::Borrow;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rdma_provider::locks::Mutex;

use super::{Cq, ProtectionDomain, Srq};
use crate::dispatch;
use crate::dispatch::{ReceiveCounters, SendCounters};
use crate::error::{LimitError, SetupError, VerbError};
use crate::types::{
    DataPath, DirectConfig, Gid, QpAttr, QpCaps, QpState, Qpn, RecvWr, ScatterToCqe, SendWr,
    TransitionError, Transport, check_transition,
};
use rdma_provider::contract::{Context as _, Pd as _, PlainWr, PostError, Qp as _, QpInit};

/// The config of a [`Qp`].
#[derive(Debug, Clone)]
pub struct QpConfig {
    /// The service type.
    pub transport: Transport,
    /// The requested sizes.
    pub caps: QpCaps,
    /// Use of the direct data path of an mlx5 adapter.
    pub direct: DirectConfig,
}

impl QpConfig {
    /// Returns a config with the default use of the direct data path.
    #[must_use]
    pub const fn new(transport: Transport, caps: QpCaps) -> Self {
        Self { transport, caps, direct: DirectConfig::DEFAULT }
    }
}

/// A queue pair of the verbs interface, `ibv_create_qp(3)`.
///
/// Dropping it destroys it, abandons work in flight, and loses unpolled completions.
///
/// ```
/// use tokio_rdma::types::{QpAttr, QpCaps, QpState, Transport};
/// use tokio_rdma::verbs::{Cq, Qp, QpConfig};
/// # use tokio_rdma::*;
/// # use tokio_rdma::types::PortNum;
///
/// # let device = Device::software()?;
/// # let pd = device.protection_domain()?;
/// let cq = Cq::new(&device, 16, None, 0)?;
/// let caps =
///     QpCaps { max_send_wr: 4, max_recv_wr: 4, max_send_sge: 1, max_recv_sge: 1, max_inline: 0 };
/// let qp = Qp::new(&pd, &cq, &cq, None, &QpConfig::new(Transport::Rc, caps))?;
/// qp.modify(&QpAttr {
///     pkey_index: Some(0),
///     port: Some(PortNum(1)),
///     access: Some(Access::REMOTE_WRITE),
///     ..QpAttr::to_state(QpState::Init)
/// })?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Qp {
    raw: dispatch::Qp,
    transport: Transport,
    /// The state last set, under the lock that serialises transitions. The device may since have
    /// moved the queue pair to the error state or SQE.
    last_state: Mutex<QpState>,
    send_cq: Cq,
    recv_cq: Cq,
    srq: Option<Srq>,
    /// With a shared receive queue: the device has reported `LAST_WQE_REACHED`.
    last_receive: Option<Arc<AtomicBool>>,
    pd: ProtectionDomain,
}

const LAST_RECEIVE: Duration = Duration::from_millis(1);

impl Qp {
    /// Creates a queue pair in RESET.
    ///
    /// # Errors
    ///
    /// - [`SetupError::Limit`] above a limit of the device;
    /// - [`SetupError::Foreign`] for queues of another device or protection domain;
    /// - [`SetupError::Unsupported`] for a DC initiator without DC or with a shared receive queue,
    ///   for a [`DirectConfig`] on a device without the direct data path, and for
    ///   [`ScatterToCqe::All`] on one that registers dma-bufs.
    pub fn new(
        pd: &ProtectionDomain,
        send_cq: &Cq,
        recv_cq: &Cq,
        srq: Option<&Srq>,
        config: &QpConfig,
    ) -> Result<Self, SetupError> {
        Self::numbered(pd, send_cq, recv_cq, srq, config, None)
    }

    /// Uses a number that the connection manager has reserved, if any.
    pub(crate) fn numbered(
        pd: &ProtectionDomain,
        send_cq: &Cq,
        recv_cq: &Cq,
        srq: Option<&Srq>,
        config: &QpConfig,
        number: Option<Qpn>,
    ) -> Result<Self, SetupError> {
        let (attr, caps) = (pd.device().attr(), config.caps);
        LimitError::check("max_send_wr", caps.max_send_wr.into(), attr.max_qp_wr.into())?;
        LimitError::check("max_recv_wr", caps.max_recv_wr.into(), attr.max_qp_wr.into())?;
        LimitError::check("max_send_sge", caps.max_send_sge.into(), attr.max_sge.into())?;
        LimitError::check("max_recv_sge", caps.max_recv_sge.into(), attr.max_sge.into())?;
        LimitError::check("max_inline", caps.max_inline.into(), attr.max_inline.into())?;
        if config.transport == Transport::Dci {
            pd.device().dc()?;
            // A DC initiator receives nothing.
            LimitError::check("max_recv_wr", caps.max_recv_wr.into(), 0)?;
            if srq.is_some() {
                return Err(SetupError::Unsupported {
                    what: "a DC initiator receives nothing; omit the shared receive queue",
                });
            }
        }
        if config.direct != DirectConfig::DEFAULT && attr.data_path != DataPath::Direct {
            return Err(SetupError::Unsupported {
                what: "scatter to CQE and BlueFlame are chosen on the direct data path of an mlx5 \
                       adapter only; omit the setting",
            });
        }
        if config.direct.scatter_to_cqe == ScatterToCqe::All && attr.dma_buf {
            return Err(SetupError::Unsupported {
                what: "a device that registers dma-bufs puts no data into completion queue \
                       entries: buffers may not be addresses of this process; omit \
                       ScatterToCqe::All",
            });
        }
        for cq in [send_cq, recv_cq] {
            SetupError::check_same(cq.device().same(pd.device()), "completion queue")?;
        }
        let same_pd = srq.is_none_or(|srq| srq.protection_domain().same(pd));
        SetupError::check_same(same_pd, "shared receive queue")?;
        let init = QpInit {
            transport: config.transport,
            send_cq: send_cq.raw(),
            recv_cq: recv_cq.raw(),
            srq: srq.map(Srq::raw),
            caps,
            direct: config.direct,
        };
        let raw = match number {
            None => pd.raw().create_qp(&init)?,
            Some(number) => pd.raw().create_numbered_qp(number, &init)?,
        };
        let watched = srq.is_some() && pd.device().context().reports_last_receive();
        Ok(Self {
            last_receive: watched.then(|| pd.device().async_events().watch_last_receive(raw.qpn())),
            raw,
            transport: config.transport,
            last_state: Mutex::new(QpState::Reset),
            send_cq: send_cq.clone(),
            recv_cq: recv_cq.clone(),
            srq: srq.cloned(),
            pd: pd.clone(),
        })
    }

    /// Returns the queue pair number.
    #[must_use]
    pub fn qpn(&self) -> Qpn {
        self.raw.qpn()
    }

    /// Returns the granted sizes.
    #[must_use]
    pub fn caps(&self) -> QpCaps {
        self.raw.caps()
    }

    /// Returns the service type.
    #[must_use]
    pub fn transport(&self) -> Transport {
        self.transport
    }

    #[cfg(feature = "ibverbs")]
    pub(crate) fn raw(&self) -> &dispatch::Qp {
        &self.raw
    }

    /// Returns its protection domain.
    #[must_use]
    pub fn protection_domain(&self) -> &ProtectionDomain {
        &self.pd
    }

    /// Returns the completion queue of its sends.
    #[must_use]
    pub fn send_cq(&self) -> &Cq {
        &self.send_cq
    }

    /// Returns the completion queue of its receives.
    #[must_use]
    pub fn recv_cq(&self) -> &Cq {
        &self.recv_cq
    }

    /// Returns its shared receive queue, if any.
    #[must_use]
    pub fn srq(&self) -> Option<&Srq> {
        self.srq.as_ref()
    }

    /// Changes attributes and state, `ibv_modify_qp(3)`. A refused change has no effect.
    ///
    /// # Errors
    ///
    /// [`SetupError::Transition`] names missing or forbidden attributes.
    pub fn modify(&self, attr: &QpAttr) -> Result<(), SetupError> {
        let mut last = self.last_state.lock();
        // A query is a system call, so the state is queried only if the caller claims one, if the
        // change is invalid in the state last set, or if the device refuses it.
        //
        // A change from the error state to itself reaches the device, because SoftRoCE flushes
        // receives that were posted in this state only then.
        let mut refused = None;
        if attr.current_state.is_none() && self.check(*last, attr).is_ok() {
            match self.raw.modify(attr) {
                Ok(()) => {
                    self.changed(&mut last, attr);
                    return Ok(());
                }
                Err(error) => refused = Some(error),
            }
        }
        let (now, _) = self.raw.query()?;
        if let Some(claimed) = attr.current_state.filter(|&claimed| claimed != now) {
            return Err(TransitionError::NotInState { claimed, actual: now }.into());
        }
        self.check(now, attr)?;
        if let Some(error) = refused {
            return Err(error.into());
        }
        self.raw.modify(attr)?;
        *last = now;
        self.changed(&mut last, attr);
        Ok(())
    }

    fn check(&self, now: QpState, attr: &QpAttr) -> Result<(), TransitionError> {
        check_transition(self.transport, now, attr.state.unwrap_or(now), attr.mask())
    }

    fn changed(&self, last: &mut QpState, attr: &QpAttr) {
        let (from, to) = (*last, attr.state.unwrap_or(*last));
        *last = to;
        rdma_provider::debug!(qpn = %self.qpn(), ?from, ?to, "queue pair changed state");
    }

    pub(crate) fn note_connected(&self) {
        let mut last = self.last_state.lock();
        // The connection may have ended already.
        if *last == QpState::Init {
            self.raw.connected();
            self.changed(&mut last, &QpAttr::to_state(QpState::Rts));
        }
    }

    pub(crate) fn flushes_late_work(&self) -> bool {
        self.pd.device().context().flushes_late_work()
    }

    pub(crate) fn last_state(&self) -> QpState {
        *self.last_state.lock()
    }

    /// Waits, in the error state, until the device uses no more shared receives: destroying the
    /// queue pair earlier would discard the completion of an arriving message. Waits at most 1 ms,
    /// because devices do not always report `IBV_EVENT_QP_LAST_WQE_REACHED`.
    pub(crate) fn await_last_receive(&self) {
        let Some(reached) = &self.last_receive else { return };
        let end = Instant::now() + LAST_RECEIVE;
        loop {
            self.pd.device().read_events();
            if reached.load(Ordering::Acquire) {
                return;
            }
            if Instant::now() >= end {
                rdma_provider::debug!(
                    qpn = %self.qpn(),
                    "device did not report LAST_WQE_REACHED within 1 ms; proceeding"
                );
                return;
            }
            std::thread::yield_now();
        }
    }

    /// Returns the state and all attributes set so far, `ibv_query_qp(3)`.
    ///
    /// # Errors
    ///
    /// [`VerbError`].
    pub fn query(&self) -> Result<(QpState, QpAttr), VerbError> {
        self.raw.query()
    }

    /// Attaches a datagram queue pair to a multicast group, `ibv_attach_mcast(3)`. It then receives
    /// a copy of each datagram, even of its own, that is sent to [`Qpn::MULTICAST`] of the group
    /// with its Q_Key. The destination in the datagram's header is the group. Repeating the call
    /// has no effect.
    ///
    /// `lid` is the group's on InfiniBand, and 0 on Ethernet. The network may forward the group's
    /// datagrams only to its members. The software device becomes one; for adapters and SoftRoCE,
    /// [`QueuePair::join_multicast`](crate::QueuePair::join_multicast) asks the network.
    ///
    /// # Errors
    ///
    /// - [`SetupError::NotMulticast`] if `group` is another address;
    /// - [`SetupError::Mismatch`] for another transport;
    /// - [`SetupError::GroupsFull`] beyond a limit of the device;
    /// - [`SetupError::Unsupported`] if the device has no multicast;
    /// - [`SetupError::Verb`], over UDP with EAFNOSUPPORT for a group of another address family
    ///   than the software device's.
    pub fn attach_multicast(&self, group: Gid, lid: u16) -> Result<(), SetupError> {
        let attr = self.pd.device().attr();
        self.check_group(group)?;
        if attr.max_mcast_grp == 0 {
            return Err(SetupError::Unsupported { what: "the device lacks multicast" });
        }
        self.raw.attach_multicast(group, lid).map_err(|error| match error.errno {
            VerbError::ENOMEM => SetupError::GroupsFull {
                qpn: self.qpn(),
                group,
                groups: attr.max_mcast_grp,
                queue_pairs: attr.max_mcast_qp_attach,
            },
            _ => error.into(),
        })
    }

    /// Detaches the queue pair from a multicast group, `ibv_detach_mcast(3)`, as its destruction
    /// does.
    ///
    /// # Errors
    ///
    /// As for [`attach_multicast`](Self::attach_multicast); [`SetupError::Verb`] with EINVAL if it
    /// is not attached.
    pub fn detach_multicast(&self, group: Gid, lid: u16) -> Result<(), SetupError> {
        self.check_group(group)?;
        Ok(self.raw.detach_multicast(group, lid)?)
    }

    pub(crate) fn check_group(&self, group: Gid) -> Result<(), SetupError> {
        if self.transport != Transport::Ud {
            let what = "transports of the queue pair and multicast";
            let ours = format!("{:?}", self.transport);
            return Err(SetupError::mismatch(what, ours, "Ud"));
        }
        if group.is_multicast() { Ok(()) } else { Err(SetupError::NotMulticast { group }) }
    }

    /// Destroys the queue pair, `ibv_destroy_qp(3)`. A drop can only log an error.
    ///
    /// # Errors
    ///
    /// [`VerbError`] if the device refuses. The queue pair is then moved to the error state, so
    /// that its peer reaches nothing through it, and leaked with everything that it uses. You must
    /// not free the memory of its work requests, because the device may continue with them.
    pub fn destroy(mut self) -> Result<(), VerbError> {
        let result = self.raw.destroy();
        if let Err(error) = &result {
            rdma_provider::error!(
                qpn = %self.qpn(),
                %error,
                "failed to destroy queue pair; leaking it"
            );
            if self.last_state() != QpState::Err
                && let Err(error) = self.modify(&QpAttr::to_state(QpState::Err))
            {
                rdma_provider::warn!(
                    qpn = %self.qpn(),
                    %error,
                    "failed to move leaked queue pair to the error state; its peer may still \
                     access memory through it"
                );
            }
            std::mem::forget(self);
        }
        result
    }

    /// Returns the counters of a software device; `None` on hardware.
    #[must_use]
    pub fn software_counters(&self) -> Option<(SendCounters, ReceiveCounters)> {
        self.raw.software_counters()
    }

    /// Posts a list of sends with one doorbell, `ibv_post_send(3)`.
    ///
    /// # Errors
    ///
    /// [`PostError`] with EINVAL for a malformed request or in a wrong state, and with ENOMEM if
    /// the queue is full.
    ///
    /// # Safety
    ///
    /// - The memory that the list names stays valid and untouched until its completion has been
    ///   polled or this queue pair has been [destroyed](Self::destroy).
    /// - The window of a [`BindWindow`](crate::types::SendOp::BindWindow) exists, and no other
    ///   binding of it is posted meanwhile.
    /// - The memory that a window is bound to stays registered, and is accessed only through its
    ///   [`ExposedRegion`](crate::ExposedRegion), until the window is invalidated or dropped.
    ///   Windows bound by this queue pair are dropped before it.
    /// - If completions go to the [queue](crate::CompletionQueue::verbs) of a `CompletionQueue`, no
    ///   work request has the number of an operation there, whose buffers would be returned too
    ///   early.
    #[inline]
    pub unsafe fn post_send(&self, list: &[SendWr<'_>]) -> Result<(), PostError> {
        // SAFETY: S1: promised by the caller.
        unsafe { self.raw.post_send(list) }
    }

    /// Posts like [`post_send`](Self::post_send), from an iterator that may build each request just
    /// before it is posted.
    ///
    /// # Safety
    ///
    /// As for `post_send`.
    #[inline]
    pub(crate) unsafe fn post_list<'a>(
        &self,
        list: impl IntoIterator<Item = impl Borrow<SendWr<'a>>>,
    ) -> Result<(), PostError> {
        // SAFETY: S1: promised by the caller.
        unsafe { self.raw.post_send(list) }
    }

    pub(crate) fn post_state(&self) -> Option<*const ()> {
        self.raw.post_state()
    }

    pub(crate) fn peer_post_state(&self) -> Option<*const ()> {
        self.raw.peer_post_state()
    }

    pub(crate) fn has_plain(&self) -> bool {
        self.raw.has_plain()
    }

    /// Returns false, and posts nothing, if the caller must use another method.
    ///
    /// # Safety
    ///
    /// As for [`post_send`](Self::post_send). The caller also excludes all other posts of sends,
    /// and changes to RESET. Each buffer has bytes.
    #[inline]
    pub(crate) unsafe fn post_plain(&self, list: impl ExactSizeIterator<Item = PlainWr>) -> bool {
        // SAFETY: S1: promised by the caller.
        unsafe { self.raw.post_plain(list) }
    }

    /// Posts a list of receives, `ibv_post_recv(3)`.
    ///
    /// # Errors
    ///
    /// As for [`post_send`](Self::post_send); EINVAL also with a shared receive queue.
    ///
    /// # Safety
    ///
    /// As for `post_send`.
    #[inline]
    pub unsafe fn post_recv(&self, list: &[RecvWr<'_>]) -> Result<(), PostError> {
        // SAFETY: S1: promised by the caller.
        unsafe { self.raw.post_recv(list) }
    }
}

impl Drop for Qp {
    fn drop(&mut self) {
        if let Some(reached) = &self.last_receive {
            self.pd.device().async_events().unwatch_last_receive(self.qpn(), reached);
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

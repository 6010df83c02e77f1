//! The target object: number, queues and state.

use std::fmt;
use std::sync::{Arc, OnceLock};

use rdma_provider::locks::Mutex;

use rdma_provider::VerbError;
use rdma_provider::contract::{self, DctInit};
use rdma_provider::types::{
    Access, AsyncEvent, Gid, Mtu, Qkey, QpAttr, QpState, Qpn, RnrTimer, Transport, WorkCompletion,
    check_dct_transition,
};

use crate::Soft;
use crate::dc::{Environment, MAX_SESSIONS, Target, TargetCounters};
use crate::roce::responder::{ReceiveConfig, ReceiveWqe, Receiver};

use super::completion_queue::{CqInner, Frees, Polled};
use super::deferred::Deferred;
use super::shared_receive_queue::SrqInner;
use super::{ContextInner, DeviceInner, PORT};

pub(crate) struct DctInner {
    context: Arc<ContextInner>,
    srq: Arc<SrqInner>,
    cq: Arc<CqInner>,
    /// Set in RTR.
    attachment: OnceLock<Attachment>,
    pub(super) state: Mutex<State>,
}

#[derive(Debug, Clone, Copy)]
struct Attachment {
    number: Qpn,
    owner: u32,
}

#[derive(Debug)]
pub(super) struct State {
    pub(super) machine: Target,
    attr: QpAttr,
    /// The scheduler has a job to send more replies.
    pub(super) replying: bool,
}

impl fmt::Debug for DctInner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Dct").field("number", &self.number()).finish_non_exhaustive()
    }
}

pub(super) struct TargetSide<'a> {
    pub(super) dct: &'a DctInner,
    pub(super) deferred: &'a Deferred,
}

impl Receiver for TargetSide<'_> {
    fn take_shared(&mut self, into: &mut ReceiveWqe) -> bool {
        self.dct.srq.take(into)
    }

    fn complete(&mut self, _position: u32, completion: &WorkCompletion, solicited: bool) {
        let Some(attachment) = self.dct.attachment.get() else { return };
        if self.dct.cq.push(attachment.owner, Frees::Shared, completion, solicited).is_err() {
            self.dct.device().fail_overrun(&self.dct.cq, self.deferred);
        }
    }

    /// Logs a session's error, which its initiator reports.
    fn event(&mut self, event: AsyncEvent) {
        rdma_provider::debug!(
            dct = ?self.dct,
            ?event,
            "DC session failed; its initiator reports why"
        );
    }

    fn failed(&mut self) {}
}

impl Environment for TargetSide<'_> {
    fn return_receive(&mut self, receive: &mut ReceiveWqe) {
        self.dct.srq.return_receive(receive);
    }

    fn now(&mut self) -> u64 {
        self.dct.device().network.scheduler.now()
    }

    fn random(&mut self) -> Option<u64> {
        self.dct.device().network.random().ok()
    }
}

pub(crate) fn create(
    context: &Arc<ContextInner>,
    pd: u32,
    init: &DctInit<'_, Soft>,
) -> Result<Dct, VerbError> {
    let device = context.device();
    let foreign = [init.recv_cq.0.context(), init.srq.0.context()];
    if foreign.into_iter().any(|other| !Arc::ptr_eq(other.device(), device)) {
        return Err(VerbError::new("mlx5dv_create_qp", VerbError::EINVAL));
    }
    let config = ReceiveConfig {
        transport: Transport::Rc,
        qpn: Qpn(0),
        gid: device.gid,
        pd,
        shared: true,
        receive_pd: init.srq.0.pd(),
        access: Access::empty(),
        mtu: Mtu::Mtu4096,
        peer: Qpn(0),
        peer_gid: Gid::default(),
        qkey: Qkey(0),
        min_rnr_timer: RnrTimer::from_code(0),
        max_dest_rd_atomic: device.attr().dc.map_or(0, |dc| dc.max_rd_atomic),
    };
    let machine = Target::new(config, init.key, MAX_SESSIONS);
    Ok(Dct(Arc::new(DctInner {
        context: Arc::clone(context),
        srq: Arc::clone(&init.srq.0),
        cq: Arc::clone(&init.recv_cq.0),
        attachment: OnceLock::new(),
        state: Mutex::new(State { machine, attr: QpAttr::default(), replying: false }),
    })))
}

impl DctInner {
    #[inline]
    pub(super) fn device(&self) -> &Arc<DeviceInner> {
        self.context.device()
    }

    pub(crate) fn number(&self) -> Option<Qpn> {
        self.attachment.get().map(|attachment| attachment.number)
    }

    pub(crate) fn fail(&self, event: Option<AsyncEvent>, deferred: &Deferred) {
        self.state.lock().machine.set_state(QpState::Err, &mut TargetSide { dct: self, deferred });
        if let Some(event) = event {
            self.context.event(event);
        }
    }

    fn modify(self: &Arc<Self>, attr: &QpAttr, deferred: &Deferred) -> Result<(), VerbError> {
        let invalid = VerbError::new("ibv_modify_qp", VerbError::EINVAL);
        let mut guard = self.state.lock();
        let state = &mut *guard;
        let from = state.machine.state();
        let to = attr.state.unwrap_or(from);
        if let Err(error) = check_dct_transition(from, to, attr.mask()) {
            rdma_provider::debug!(dct = ?self, %error, "refused modification of DC target");
            return Err(invalid);
        }
        let valid = attr.port.is_none_or(|port| port == PORT)
            && attr.pkey_index.is_none_or(|index| index == 0)
            && attr.address.is_none_or(|address| address.port == PORT && address.sgid_index == 0);
        if !valid {
            return Err(invalid);
        }
        if to == QpState::Rtr {
            let number = self.device().add_target(self)?;
            let owner = self.cq.attach(number, &Arc::new(Polled::default()), Some(&self.srq));
            // Empty until now: a target never leaves RTR for an earlier state.
            let _ = self.attachment.set(Attachment { number, owner });
            state.machine.config.qpn = number;
        }
        let config = &mut state.machine.config;
        config.access = attr.access.unwrap_or(config.access);
        config.mtu = attr.path_mtu.unwrap_or(config.mtu);
        config.min_rnr_timer = attr.min_rnr_timer.unwrap_or(config.min_rnr_timer);
        merge(&mut state.attr, attr);
        rdma_provider::debug!(dct = ?self, ?from, ?to, "DC target changed state");
        state.machine.set_state(to, &mut TargetSide { dct: self, deferred });
        Ok(())
    }
}

fn merge(into: &mut QpAttr, given: &QpAttr) {
    into.access = given.access.or(into.access);
    into.pkey_index = given.pkey_index.or(into.pkey_index);
    into.port = given.port.or(into.port);
    into.address = given.address.or(into.address);
    into.path_mtu = given.path_mtu.or(into.path_mtu);
    into.min_rnr_timer = given.min_rnr_timer.or(into.min_rnr_timer);
}

/// A target of dynamic connections, see [`contract::Dct`].
///
/// - Statuses at the initiator: `REM_ACCESS_ERR` for a wrong key, `REM_INV_REQ_ERR` for an MTU
///   larger than the target's, `RETRY_EXC_ERR` for an unknown number.
/// - An initiator whose session was evicted with work in flight gets `REM_OP_ERR`.
/// - When a target is destroyed or its completion queue fails, the receive of a partly received
///   message returns to the shared receive queue.
///
/// ```
/// use rdma_soft::Network;
/// use rdma_soft::contract::{Context as _, Dct as _, DctInit, Pd as _};
/// use rdma_soft::types::{DcKey, SrqCaps};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let context = Network::new().open("a")?;
/// let (pd, cq) = (context.create_pd()?, context.create_cq(16, None, 0, 0)?);
/// let srq = pd.create_srq(SrqCaps { max_wr: 16, max_sge: 1 })?;
/// let target = pd.create_dct(&DctInit { srq: &srq, recv_cq: &cq, key: DcKey(0x5eed) })?;
/// // The number exists from RTR on.
/// assert_eq!(target.number(), None);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Dct(Arc<DctInner>);

impl Dct {
    /// Returns its counters.
    pub fn counters(&self) -> TargetCounters {
        self.0.state.lock().machine.counters()
    }
}

impl contract::Dct for Dct {
    fn number(&self) -> Option<Qpn> {
        self.0.number()
    }

    fn modify(&self, attr: &QpAttr) -> Result<(), VerbError> {
        self.0.device().check_alive("ibv_modify_qp")?;
        let deferred = Deferred::new();
        let result = self.0.modify(attr, &deferred);
        deferred.run();
        result
    }

    fn query(&self) -> Result<(QpState, QpAttr), VerbError> {
        let state = self.0.state.lock();
        let now = state.machine.state();
        Ok((now, QpAttr { state: Some(now), ..state.attr }))
    }

    fn quiesce(&self) {
        let deferred = Deferred::new();
        self.0.fail(None, &deferred);
        deferred.run();
    }

    fn destroy(&mut self) -> Result<(), VerbError> {
        // `drop` destroys it.
        self.0.device().check_destroy("ibv_destroy_qp")
    }
}

impl Drop for Dct {
    fn drop(&mut self) {
        contract::Dct::quiesce(self);
        let dct = &self.0;
        if let Some(attachment) = dct.attachment.get() {
            dct.device().remove_target(attachment.number);
            dct.cq.detach(attachment.owner);
        }
    }
}

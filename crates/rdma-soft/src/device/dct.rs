//! DC targets: number, queues and state.

use std::fmt;
use std::sync::{Arc, OnceLock};

use rdma_provider::locks::Mutex;

use rdma_provider::VerbError;
use rdma_provider::types::{
    AsyncEvent, QpAttr, QpState, Qpn, WorkCompletion, check_dct_transition,
};

use crate::dc::{Environment, Target};
use crate::net::node::PORT;
use crate::roce::responder::{ReceiveWqe, Receiver};

use super::DeviceInner;
use super::completion_queue::{CqInner, Frees, Polled};
use super::deferred::Deferred;
use super::events::Events;
use super::shared_receive_queue::SrqInner;

pub(crate) struct DctInner {
    pub(crate) device: Arc<DeviceInner>,
    pub(crate) events: Arc<Events>,
    pub(crate) srq: Arc<SrqInner>,
    pub(crate) cq: Arc<CqInner>,
    /// Set in RTR.
    pub(crate) attachment: OnceLock<Attachment>,
    pub(crate) state: Mutex<State>,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Attachment {
    pub(crate) number: Qpn,
    pub(crate) owner: u32,
}

#[derive(Debug)]
pub(crate) struct State {
    pub(crate) machine: Target,
    pub(crate) attr: QpAttr,
    /// The scheduler has a job to send more replies.
    pub(crate) replying: bool,
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
            self.dct.device.fail_overrun(&self.dct.cq, self.deferred);
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

    fn count_bad_pkey(&mut self) {
        self.dct.device.pkeys.count_violation();
    }

    fn failed(&mut self) {}
}

impl Environment for TargetSide<'_> {
    fn return_receive(&mut self, receive: &mut ReceiveWqe) {
        self.dct.srq.return_receive(receive);
    }

    fn now(&mut self) -> u64 {
        self.dct.device.network.scheduler.now()
    }

    fn random(&mut self) -> Option<u64> {
        self.dct.device.network.random().ok()
    }
}

impl DctInner {
    pub(crate) fn number(&self) -> Option<Qpn> {
        self.attachment.get().map(|attachment| attachment.number)
    }

    pub(crate) fn fail(&self, event: Option<AsyncEvent>, deferred: &Deferred) {
        self.state.lock().machine.set_state(QpState::Err, &mut TargetSide { dct: self, deferred });
        if let Some(event) = event {
            self.events.raise(event);
        }
    }

    pub(crate) fn modify(
        self: &Arc<Self>,
        attr: &QpAttr,
        deferred: &Deferred,
    ) -> Result<(), VerbError> {
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
            && attr.pkey_index.is_none_or(|index| self.device.pkeys.at(index).is_some())
            && attr.address.is_none_or(|address| address.port == PORT && address.sgid_index == 0);
        if !valid {
            return Err(invalid);
        }
        if to == QpState::Rtr {
            let number = self.device.add_target(self)?;
            let owner = self.cq.attach(number, &Arc::new(Polled::default()), Some(&self.srq));
            // Empty until now: a target never leaves RTR for an earlier state.
            let _ = self.attachment.set(Attachment { number, owner });
            state.machine.config.qpn = number;
        }
        let config = &mut state.machine.config;
        if let Some(pkey) = attr.pkey_index.and_then(|index| self.device.pkeys.at(index)) {
            config.pkey = pkey;
        }
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

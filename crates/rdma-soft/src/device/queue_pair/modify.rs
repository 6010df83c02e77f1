//! State transitions of a queue pair.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use rdma_provider::VerbError;
use rdma_provider::types::{QpAttr, QpState, Qpn, Transport, check_transition};

use super::{QpInner, ReceiveSide, ReceiverHalf, SendSide, Sender, state_of};
use crate::device::deferred::Deferred;
use crate::device::pump::Budget;
use crate::net::node::PORT;
use crate::roce::ip_fields::IpFields;

/// Maximum of the three-bit retry counters.
const MAX_RETRY: u8 = 7;

impl QpInner {
    pub(crate) fn modify(
        self: &Arc<Self>,
        attr: &QpAttr,
        deferred: &Deferred,
    ) -> Result<(), VerbError> {
        let invalid = VerbError::new("ibv_modify_qp", VerbError::EINVAL);
        let mut sender_guard = self.sender.lock();
        let mut receiver_guard = self.receiver.lock();
        let (sender, receiver) = (&mut *sender_guard, &mut *receiver_guard);
        let from = state_of(sender, receiver);
        let to = attr.state.unwrap_or(from);
        if attr.current_state.is_some_and(|claimed| claimed != from) {
            return Err(invalid);
        }
        if let Err(error) = check_transition(self.transport, from, to, attr.mask()) {
            rdma_provider::debug!(qpn = %self.qpn, %error, "refused modification of queue pair");
            return Err(invalid);
        }
        if !self.values_are_valid(attr) {
            return Err(invalid);
        }
        match to {
            QpState::Reset => {
                self.reset(sender, receiver, deferred);
                return Ok(());
            }
            QpState::Err if self.device.refusals.flush() => return Ok(()),
            QpState::Err => {
                self.flush_both(sender, receiver, deferred);
                return Ok(());
            }
            _ => {}
        }
        merge(&mut sender.attr, attr);
        self.apply(sender, receiver);
        if let Some(pkey) = attr.pkey_index.and_then(|index| self.device.pkeys.at(index)) {
            (sender.machine.config.pkey, receiver.machine.config.pkey) = (pkey, pkey);
        }
        if let Some(psn) = attr.rq_psn {
            receiver.machine.start(psn);
        }
        if let Some(psn) = attr.sq_psn {
            sender.machine.start(psn);
        }
        if attr.retry_count.is_some() || attr.rnr_retry.is_some() {
            sender.machine.reset_retries();
        }
        if from != to {
            rdma_provider::debug!(qpn = %self.qpn, ?from, ?to, "queue pair changed state");
            sender.notify_drained = to == QpState::Sqd && attr.notify_drained == Some(true);
            receiver.machine.set_state(to, &mut ReceiveSide { qp: self, deferred });
            sender.machine.set_state(to, &mut SendSide { qp: self, deferred });
        }
        drop(receiver_guard);
        // Starts work queued in SQD, or reports that an empty queue has drained.
        self.pump(sender_guard, Budget::slice(), deferred);
        Ok(())
    }

    fn values_are_valid(&self, attr: &QpAttr) -> bool {
        let limits = self.device.attr();
        attr.port.is_none_or(|port| port == PORT)
            && attr.pkey_index.is_none_or(|index| self.device.pkeys.at(index).is_some())
            && attr.address.is_none_or(|address| address.port == PORT && address.sgid_index == 0)
            && attr.dest_qpn.is_none_or(|qpn| qpn <= Qpn::MAX)
            && attr.retry_count.is_none_or(|count| count <= MAX_RETRY)
            && attr.rnr_retry.is_none_or(|count| count <= MAX_RETRY)
            && attr.max_rd_atomic.is_none_or(|count| count <= limits.max_qp_init_rd_atom)
            && attr.max_dest_rd_atomic.is_none_or(|count| count <= limits.max_qp_rd_atom)
    }

    fn apply(self: &Arc<Self>, sender: &mut Sender, receiver: &mut ReceiverHalf) {
        let attr = &sender.attr;
        let send = &mut sender.machine.config;
        let receive = &mut receiver.machine.config;
        if let Some(qpn) = attr.dest_qpn {
            (send.dest, receive.peer) = (qpn, qpn);
            sender.peer_at.qpn = qpn;
        }
        let mut new_path = false;
        // Each work request of a DC initiator has its own address.
        if let Some(address) = attr.address.filter(|_| self.transport != Transport::Dci) {
            receive.peer_gid = address.dgid;
            new_path = sender.window_slot.is_none() || sender.peer_at.gid != address.dgid;
            sender.peer_at.gid = address.dgid;
            let ip_fields = IpFields::of(&address);
            (sender.peer_at.ip_fields, receiver.ip_fields) = (ip_fields, ip_fields);
        }
        sender.peer = None;
        if let Some(mtu) = attr.path_mtu {
            (send.mtu, receive.mtu) = (mtu, mtu);
        }
        if let Some(qkey) = attr.qkey {
            (send.qkey, receive.qkey) = (qkey, qkey);
        }
        send.timeout = attr.timeout.unwrap_or(send.timeout);
        send.retry_count = attr.retry_count.unwrap_or(send.retry_count);
        send.rnr_retry = attr.rnr_retry.unwrap_or(send.rnr_retry);
        send.max_rd_atomic = attr.max_rd_atomic.unwrap_or(send.max_rd_atomic);
        receive.access = attr.access.unwrap_or(receive.access);
        receive.min_rnr_timer = attr.min_rnr_timer.unwrap_or(receive.min_rnr_timer);
        receive.max_dest_rd_atomic = attr.max_dest_rd_atomic.unwrap_or(receive.max_dest_rd_atomic);
        if new_path && self.transport == Transport::Rc {
            sender.join_path(self, sender.peer_at.gid);
        }
    }

    pub(crate) fn reset(
        self: &Arc<Self>,
        sender: &mut Sender,
        receiver: &mut ReceiverHalf,
        deferred: &Deferred,
    ) {
        rdma_provider::debug!(qpn = %self.qpn, "reset queue pair");
        self.generation.fetch_add(1, Ordering::Relaxed);
        // The program may reset as soon as it has a completion, but the request was executed: its
        // acknowledgement still goes to the peer.
        if receiver.machine.has_replies() {
            self.reply(receiver, deferred);
        }
        if self.transport == Transport::Dci {
            self.close_session(sender, deferred);
        }
        self.return_shared(receiver);
        sender.machine.set_state(QpState::Reset, &mut SendSide { qp: self, deferred });
        receiver.machine.set_state(QpState::Reset, &mut ReceiveSide { qp: self, deferred });
        sender.attr = QpAttr::default();
        sender.window_slot = None;
        sender.peer = None;
        sender.target = Weak::new();
        sender.failed = false;
        sender.notify_drained = false;
        self.send_cq.purge(self.send_owner);
        self.recv_cq.purge(self.recv_owner);
        sender.polled = 0;
        self.polled.send.store(0, Ordering::Release);
        self.polled.recv.store(0, Ordering::Release);
    }

    /// Frees the slot of a shared receive whose message is incomplete.
    fn return_shared(&self, receiver: &ReceiverHalf) {
        if let Some(srq) = self.srq.as_ref().filter(|_| receiver.machine.holds_receive()) {
            srq.release();
        }
    }
}

fn merge(into: &mut QpAttr, given: &QpAttr) {
    macro_rules! take {
        ($($field:ident)*) => {
            $(if given.$field.is_some() { into.$field = given.$field; })*
        };
    }
    take!(access pkey_index port qkey address path_mtu timeout retry_count rnr_retry rq_psn sq_psn);
    take!(max_rd_atomic max_dest_rd_atomic min_rnr_timer dest_qpn);
}

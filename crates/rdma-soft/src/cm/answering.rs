//! Auto-accept: the [`Machine`] accepts requests without the program, as the listener's `Admit`
//! decides, and evicts them when records are scarce.

use std::time::Duration;

use rdma_provider::cm_contract::{CmAnswer, CmParams};
use rdma_provider::types::{Gid, Psn, Qpn};

use super::connection::State;
use super::limits::MAX_HALF_OPEN;
use super::machine::Machine;
use super::message::CommId;
use crate::roce::partition::is_same_partition;

impl Machine {
    /// Returns true if the request is not answered yet.
    pub(super) fn waits(&mut self, id: CommId) -> bool {
        self.in_state(id, State::ReqRcvd).is_some()
    }

    /// Accepts a request without the program. False if no queue pair number is free.
    pub(super) fn auto_accept(
        &mut self,
        now: u64,
        id: CommId,
        answer: &CmAnswer,
        number: impl FnOnce() -> Option<Qpn>,
    ) -> bool {
        let listener = self.connections.get(&id).and_then(|connection| connection.listener);
        // It counts again when the peer confirms.
        self.leave_backlog(id);
        let Some(qpn) = number() else { return false };
        let Some(connection) = self.connections.get_mut(&id) else { return false };
        connection.owned = false;
        connection.auto_accepted = true;
        connection.reserved = true;
        connection.local_qpn = qpn;
        let peer = connection.peer;
        let params = CmParams {
            qpn,
            private_data: &answer.private_data,
            responder_resources: answer.responder_resources.min(connection.responder_resources),
            initiator_depth: answer.initiator_depth.min(connection.initiator_depth),
            retry_count: answer.retry_count,
            rnr_retry: answer.rnr_retry,
            // Unused: this side sends no REQ.
            timeout: Duration::ZERO,
            srq: false,
        };
        self.reserved.insert(qpn, id);
        let position = self.evictable.add(peer, id);
        if let Some(connection) = self.connections.get_mut(&id) {
            connection.evictable = Some(position);
        }
        let accepted = self.accept(now, id, &params).is_ok();
        if let Some(connection) = self.connections.get_mut(&id) {
            connection.listener = listener;
        }
        accepted
    }

    /// Evicts a half-open connection for a request from `peer`: its own oldest if it is at its
    /// limit, else the oldest of the peer with the most. Requests that the program answers may
    /// evict only while over half of the records are evictable, so neither kind displaces the
    /// other.
    pub(super) fn evict_for(&mut self, peer: Gid, answers: bool) -> bool {
        let oldest = if self.half_open.is_full_for(peer) {
            self.evictable.oldest_of(peer)
        } else if answers || self.evictable.len() > MAX_HALF_OPEN / 2 {
            self.evictable.oldest_of_largest()
        } else {
            None
        };
        let Some(id) = oldest else { return false };
        let listener = self.connections.get(&id).and_then(|connection| connection.listener);
        if let Some(admit) =
            listener.and_then(|key| self.listeners.get(&key)).and_then(|it| it.admit.as_ref())
        {
            admit.evicted();
        }
        // The peer is not notified: it probably does not exist.
        self.forget(id);
        true
    }

    /// Handles an RC request at the queue pair `qpn`, which is not ready. If it is a connection's
    /// first packet and the queue pair is not created yet, returns the peer's queue pair, for an
    /// RNR NAK. Such a packet confirms the REP, which alone contains these numbers.
    pub(super) fn on_early(&mut self, from: Gid, qpn: Qpn, psn: Psn, pkey: u16) -> Option<Qpn> {
        let id = *self.reserved.get(&qpn)?;
        let connection = self.connections.get(&id)?;
        let known = matches!(connection.state, State::RepSent | State::Established);
        let expected = connection.peer == from
            && connection.rq_psn == psn
            && is_same_partition(connection.pkey, pkey);
        if !known || !expected {
            return None;
        }
        let remote = connection.remote_qpn;
        if connection.state == State::RepSent {
            self.established(id);
        }
        remote
    }
}

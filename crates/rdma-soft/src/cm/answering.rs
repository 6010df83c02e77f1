//! Requests that the [`Machine`] answers in a listener's name, without the program; and how these handshakes give way.

use std::time::Duration;

use rdma_provider::cm_contract::{CmAnswer, CmParams};
use rdma_provider::types::{Gid, Psn, Qpn};

use super::connection::State;
use super::limits::HALF_OPEN;
use super::machine::Machine;
use super::message::CommId;

impl Machine {
    /// True for a request that waits for its answer.
    pub(super) fn waits(&mut self, id: CommId) -> bool {
        self.in_state(id, State::ReqRcvd).is_some()
    }

    /// Answers a request without the program. False if no number can be had.
    pub(super) fn answer_unseen(
        &mut self,
        now: u64,
        id: CommId,
        answer: &CmAnswer,
        number: impl FnOnce() -> Option<Qpn>,
    ) -> bool {
        let listener = self.connections.get(&id).and_then(|connection| connection.waiting_at);
        // No longer, if it did: it waits for the program once its peer has confirmed.
        self.answered(id);
        let Some(qpn) = number() else { return false };
        let Some(connection) = self.connections.get_mut(&id) else { return false };
        connection.owned = false;
        connection.unseen = true;
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
            // Nothing is repeated by it.
            timeout: Duration::ZERO,
            srq: false,
        };
        self.reserved.insert(qpn, id);
        let place = self.yielding.add(peer, id);
        if let Some(connection) = self.connections.get_mut(&id) {
            connection.yielding = Some(place);
        }
        let accepted = self.accept(now, id, &params).is_ok();
        if let Some(connection) = self.connections.get_mut(&id) {
            connection.waiting_at = listener;
        }
        accepted
    }

    /// Lets a half-open connection give way to one of `peer`, if there is any that may: of the peer itself if that has as many as
    /// it may, else of the one that has the most. To a request that the program answers, they give way only while they have more
    /// than half of the records: neither kind displaces the other.
    pub(super) fn give_way_to(&mut self, peer: Gid, answers: bool) -> bool {
        let oldest = if self.half_open.is_full_for(peer) {
            self.yielding.oldest_of(peer)
        } else if answers || self.yielding.len() > HALF_OPEN / 2 {
            self.yielding.of_largest_share()
        } else {
            None
        };
        let Some(id) = oldest else { return false };
        let listener = self.connections.get(&id).and_then(|connection| connection.waiting_at);
        if let Some(admit) =
            listener.and_then(|key| self.listeners.get(&key)).and_then(|it| it.admit.as_ref())
        {
            admit.gave_way();
        }
        // Its peer is not told: most likely there is none.
        self.forget(id);
        true
    }

    /// A request of RC has arrived at the queue pair `qpn`, which is not ready, with this sequence number. The queue pair of the
    /// peer, which is to be asked to wait, if this is the first packet of a connection whose queue pair is still to be made.
    /// The peer can know its numbers from our answer only, so it has confirmed that.
    pub(super) fn on_early(&mut self, from: Gid, qpn: Qpn, psn: Psn) -> Option<Qpn> {
        let id = *self.reserved.get(&qpn)?;
        let connection = self.connections.get(&id)?;
        let known = matches!(connection.state, State::RepSent | State::Established);
        if !known || connection.peer != from || connection.rq_psn != psn {
            return None;
        }
        let remote = connection.remote_qpn;
        if connection.state == State::RepSent {
            self.established(id);
        }
        remote
    }
}

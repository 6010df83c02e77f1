//! Effects of arriving messages on connections and listeners of the [`Machine`].
//!
//! A message for an unknown connection changes no state and gets at most one answer, within
//! [limits](super::limits), so that the peer does not wait in vain.

use rdma_provider::cm_contract::Verdict;
use rdma_provider::types::{Gid, Mtu, Qpn, RejectReason};

use super::connection::{Connection, State};
use super::machine::{BUSY_TIMEOUT, Event, Machine, Numbers, Output, bounded};
use super::message::{About, CommId, Drep, Dreq, Mad, Message, Mra, Private, Rej, Rep, Req};
use crate::net::ports::covers;

impl Machine {
    pub(super) fn on_message(&mut self, now: u64, from: Gid, mad: Mad, numbers: impl Numbers) {
        self.rate_limited(now, from, |machine| machine.take_message(now, from, mad, numbers));
    }

    /// Rejects a request from the device `from` that no listener could accept.
    pub(super) fn reject_unacceptable(
        &mut self,
        now: u64,
        from: Gid,
        transaction: u64,
        remote_id: CommId,
        reason: RejectReason,
    ) {
        if remote_id != 0 {
            let rej = Rej {
                local_id: 0,
                remote_id,
                about: About::Req,
                reason,
                private_data: Private::empty(),
            };
            let answer = Output::Send {
                to: from,
                mad: Mad { transaction, message: Message::Rej(Box::new(rej)) },
            };
            self.rate_limited(now, from, |machine| machine.out.push_back(answer));
        }
    }

    /// Ends the request `id` to `from`, whose host has returned it. Established connections ignore
    /// such reports, which may be late or forged. A forger would have to know the numbers of a
    /// request.
    pub(super) fn on_refusal(&mut self, from: Gid, transaction: u64, id: CommId) {
        let Some(connection) = self.in_state(id, State::ReqSent) else { return };
        if (connection.peer, connection.transaction) == (from, transaction) {
            self.event(id, Event::PortClosed);
            self.forget(id);
        }
    }

    /// Runs `act`, and drops its answers if they exceed the rate limit.
    fn rate_limited(&mut self, now: u64, from: Gid, act: impl FnOnce(&mut Self)) {
        let before = self.out.len();
        act(self);
        let answers = |output: &Output| matches!(output, Output::Send { .. });
        if self.out.iter().skip(before).any(answers) && !self.answers.take(now, from) {
            let mut at = 0;
            self.out.retain(|output| {
                at += 1;
                at <= before || !answers(output)
            });
        }
    }

    fn take_message(&mut self, now: u64, from: Gid, mad: Mad, numbers: impl Numbers) {
        let Mad { transaction, message } = mad;
        match message {
            Message::Req(req) => self.on_req(now, from, transaction, *req, numbers),
            Message::Rep(rep) => self.on_rep(from, transaction, &rep),
            Message::Rej(rej) => self.on_rej(now, from, transaction, &rej),
            Message::Mra(mra) => self.on_mra(now, from, &mra),
            Message::Rtu(rtu) => {
                if self.find(from, rtu.remote_id, rtu.local_id) == Some(State::RepSent) {
                    self.established(rtu.remote_id);
                } else if self.connection(rtu.remote_id).is_none() && rtu.local_id != 0 {
                    // The connection was evicted or aborted, but the peer considers it established.
                    let rej = Rej {
                        local_id: rtu.remote_id,
                        remote_id: rtu.local_id,
                        about: About::Other,
                        reason: RejectReason::INVALID_COMM_ID,
                        private_data: Private::empty(),
                    };
                    let mad = Mad { transaction, message: Message::Rej(Box::new(rej)) };
                    self.out.push_back(Output::Send { to: from, mad });
                }
            }
            Message::Dreq(dreq) => self.on_dreq(now, from, transaction, &dreq),
            Message::Drep(drep) => {
                if self.find(from, drep.remote_id, drep.local_id) == Some(State::DreqSent) {
                    self.disconnected(now, drep.remote_id);
                }
            }
            Message::SidrReq(req) => {
                let mut numbers = numbers;
                self.on_sidr_req(from, transaction, &req, || numbers.id());
            }
            Message::SidrRep(rep) => self.on_sidr_rep(from, transaction, &rep),
        }
    }

    fn on_req(
        &mut self,
        now: u64,
        from: Gid,
        transaction: u64,
        req: Req,
        mut numbers: impl Numbers,
    ) {
        let refuse_with = |reason, private_data| {
            let rej = Rej {
                local_id: 0,
                remote_id: req.local_id,
                about: About::Req,
                reason,
                private_data,
            };
            Output::Send {
                to: from,
                mad: Mad { transaction, message: Message::Rej(Box::new(rej)) },
            }
        };
        let refuse = |reason| refuse_with(reason, Private::empty());
        // Protocol violations are ignored; their sender would not understand a REJ.
        if req.local_gid != from || req.local_id == 0 || req.qpn.0 <= 1 || req.qpn.0 > Qpn::MAX.0 {
            return;
        }
        if let Some(&id) = self.requests.get(&(from, req.local_id)) {
            return self.on_duplicate_req(id);
        }
        if req.remote_gid != self.gid {
            return self.out.push_back(refuse(RejectReason::INVALID_GID));
        }
        let listener = self.listeners.iter_mut().find(|(_, listener)| {
            listener.address.port() == req.service_port
                && covers(listener.address.ip(), req.destination)
        });
        let Some((&key, listener)) = listener else {
            return self.out.push_back(refuse(RejectReason::INVALID_SERVICE_ID));
        };
        if req.mtu > self.mtu {
            // Its packets would exceed the port's MTU, and ours would be too short.
            return self.out.push_back(refuse(RejectReason::INVALID_MTU));
        }
        if let Some(&id) = self.queue_pairs.get(&(from, req.qpn)) {
            // The peer reuses the queue pair, so it has forgotten the connection (12.9.8.3.1).
            self.out.push_back(refuse(RejectReason::STALE_CONNECTION));
            if self.connections.get(&id).is_some_and(|stale| stale.state == State::Established) {
                let _ = self.disconnect(now, id);
            }
            return;
        }
        let has_capacity = listener.waiting < listener.backlog;
        let verdict = match &listener.admit {
            Some(admit) if has_capacity => admit.admit(req.source.ip(), req.private_data.bytes()),
            _ => Verdict::Ask,
        };
        if let Verdict::Reject(data) = &verdict {
            // The retransmitted REQ is answered anew.
            let data = Private::new(data).unwrap_or_else(Private::empty);
            return self.out.push_back(refuse_with(RejectReason::CONSUMER, data));
        }
        let answers = matches!(verdict, Verdict::Answer(_));
        let may_open = |machine: &mut Self| {
            machine.half_open.open(from)
                || (machine.evict_for(from, answers) && machine.half_open.open(from))
        };
        if !has_capacity || !may_open(self) {
            // The retransmitted REQ may find a free record.
            let mra = Mra {
                local_id: 0,
                remote_id: req.local_id,
                about: About::Req,
                service_timeout: BUSY_TIMEOUT,
            };
            let mad = Mad { transaction, message: Message::Mra(mra) };
            return self.out.push_back(Output::Send { to: from, mad });
        }
        // Treated as lost.
        let Some(rq_psn) = numbers.psn() else { return self.half_open.close(from) };
        if let (Verdict::Ask, Some(listener)) = (&verdict, self.listeners.get_mut(&key)) {
            listener.waiting += 1;
        }
        let id = self.new_id_from(numbers.id());
        let timeout = bounded(req.local_timeout);
        let mut connection = Connection::from_request(&req, transaction, rq_psn, timeout);
        connection.listener = Some(key);
        connection.auto_accepted = matches!(verdict, Verdict::Answer(_));
        let peer = connection.params.clone();
        self.requests.insert((from, req.local_id), id);
        self.queue_pairs.insert((from, req.qpn), id);
        self.connections.insert(id, connection);
        if let Verdict::Answer(answer) = &verdict {
            if !self.auto_accept(now, id, answer, || numbers.reserve()) {
                self.forget(id);
            }
        } else if let Some(peer) = peer {
            self.out.push_back(Output::Request { listener: key, connection: id, peer });
        }
    }

    fn on_duplicate_req(&mut self, id: CommId) {
        match self.connections.get(&id).map(|connection| connection.state) {
            Some(State::ReqRcvd) => self.send_mra(id, About::Req),
            Some(State::RepSent | State::Refused) => self.send_last(id),
            _ => {}
        }
    }

    fn on_rep(&mut self, from: Gid, transaction: u64, rep: &Rep) {
        let connection = self.connections.get_mut(&rep.remote_id).filter(|connection| {
            connection.peer == from
                && (connection.remote_id == rep.local_id || connection.remote_id == 0)
        });
        match connection.map(|connection| connection.state) {
            Some(State::ReqSent)
                if rep.local_id != 0 && rep.qpn.0 > 1 && rep.qpn.0 <= Qpn::MAX.0 =>
            {
                let id = rep.remote_id;
                if self.queue_pairs.contains_key(&(from, rep.qpn)) {
                    if let Some(connection) = self.connections.get_mut(&id) {
                        // The rejection of a REP names both ids; rdma_cm ignores it otherwise.
                        connection.remote_id = rep.local_id;
                    }
                    self.event(id, Event::Rejected(RejectReason::STALE_CONNECTION, Vec::new()));
                    return self.abort(id, About::Rep, RejectReason::STALE_CONNECTION);
                }
                self.queue_pairs.insert((from, rep.qpn), id);
                self.set_deadline(id, None);
                let Some(connection) = self.connections.get_mut(&id) else { return };
                connection.on_rep(rep);
                connection.state = State::RepRcvd;
                if let Some(peer) = connection.params.clone() {
                    self.event(id, Event::Response(peer));
                }
            }
            Some(State::RepRcvd) => self.send_mra(rep.remote_id, About::Rep),
            // The RTU was lost.
            Some(State::Established) => {
                if self.is_active(rep.remote_id) {
                    self.send_last(rep.remote_id);
                }
            }
            Some(_) => {}
            None => {
                let rej = Rej {
                    local_id: rep.remote_id,
                    remote_id: rep.local_id,
                    about: About::Rep,
                    reason: RejectReason::INVALID_COMM_ID,
                    private_data: Private::empty(),
                };
                let mad = Mad { transaction, message: Message::Rej(Box::new(rej)) };
                self.out.push_back(Output::Send { to: from, mad });
            }
        }
    }

    fn on_rej(&mut self, now: u64, from: Gid, transaction: u64, rej: &Rej) {
        let id = match rej.remote_id {
            // The peer has not learnt the local id.
            0 => self.requests.get(&(from, rej.local_id)).copied().unwrap_or_default(),
            id => id,
        };
        let Some(connection) = self.connections.get(&id) else { return };
        // A REJ for a REQ may come from a peer that assigned no id.
        let theirs = connection.remote_id == rej.local_id || connection.remote_id == 0;
        if connection.peer != from || !theirs {
            return;
        }
        match connection.state {
            // A duplicate, about an MTU that was asked for before.
            State::ReqSent
                if rej.reason == RejectReason::INVALID_MTU
                    && connection.transaction != transaction => {}
            State::ReqSent
                if rej.reason == RejectReason::INVALID_MTU && connection.mtu > Mtu::Mtu256 =>
            {
                self.ask_for_smaller_mtu(now, id);
            }
            State::ReqSent | State::RepRcvd | State::RepSent => {
                self.event(id, Event::Rejected(rej.reason, rej.private_data.bytes().to_vec()));
                self.forget(id);
            }
            State::ReqRcvd => {
                self.event(id, Event::Rejected(rej.reason, rej.private_data.bytes().to_vec()));
                self.withdraw(id);
            }
            // The peer has answered the REQ, and a duplicate has reached another process at its
            // address. The rejection would tell the program that nothing was executed.
            State::Established | State::DreqSent if rej.about == About::Req => {}
            // The passive side aborted or evicted the connection before the RTU arrived.
            State::Established if self.is_active(id) => {
                self.enter_timewait(
                    now,
                    id,
                    Event::Rejected(rej.reason, rej.private_data.bytes().to_vec()),
                );
            }
            State::Established | State::DreqSent => self.disconnected(now, id),
            State::TimeWait | State::Refused | State::Withdrawn => {}
        }
    }

    fn on_mra(&mut self, now: u64, from: Gid, mra: &Mra) {
        let Some(connection) = self.connections.get_mut(&mra.remote_id) else { return };
        let theirs = connection.remote_id == mra.local_id || connection.remote_id == 0;
        if connection.peer != from || !theirs {
            return;
        }
        let expected = match connection.state {
            State::ReqSent => About::Req,
            State::RepSent => About::Rep,
            _ => return,
        };
        if mra.about == expected {
            // The peer is alive. Without this reset a busy listener would lose the requests it
            // delays most.
            connection.retransmissions = 0;
            let wait = match expected {
                // Only the program's own timeout limits the wait.
                About::Req => bounded(mra.service_timeout).max(mra.service_timeout.nanoseconds()),
                _ => bounded(mra.service_timeout),
            };
            let at = now.saturating_add(wait).min(connection.gives_up_at);
            self.set_deadline(mra.remote_id, Some(at));
        }
    }

    fn on_dreq(&mut self, now: u64, from: Gid, transaction: u64, dreq: &Dreq) {
        let id = dreq.remote_id;
        let answer = Message::Drep(Drep { local_id: id, remote_id: dreq.local_id });
        let state = self.find(from, id, dreq.local_id);
        let ours = self
            .connections
            .get(&id)
            .is_some_and(|connection| connection.local_qpn == dreq.remote_qpn);
        match state {
            Some(State::RepRcvd | State::RepSent | State::Established | State::DreqSent)
                if ours =>
            {
                if let Some(connection) = self.connections.get_mut(&id) {
                    connection.transaction = transaction;
                }
                if state == Some(State::RepSent) {
                    // The RTU was lost or overtaken; a DREQ confirms the REP, too.
                    self.event(id, Event::Established);
                }
                self.send(id, answer);
                self.disconnected(now, id);
            }
            Some(State::TimeWait) if ours => {
                self.out.push_back(Output::Send {
                    to: from,
                    mad: Mad { transaction, message: answer },
                });
            }
            Some(_) => {}
            // The peer must not wait for a DREP.
            None => self
                .out
                .push_back(Output::Send { to: from, mad: Mad { transaction, message: answer } }),
        }
    }
}

//! What a message does to a connection, or to a listener; the other half of the [`Machine`].
//!
//! A message for a connection that is not known changes nothing, and is answered with one at most: who waits for an answer
//! need not wait in vain. How many answers there are is [limited](super::limits).

use rdma_provider::cm_contract::Verdict;
use rdma_provider::types::{Gid, Qkey, Qpn, RejectReason};

use super::connection::{Connection, State};
use super::machine::{BUSY_TIMEOUT, Event, Machine, Numbers, Output, bounded};
use super::message::{
    About, CommId, Drep, Dreq, Mad, Message, Mra, Private, Rej, Rep, Req, SidrRep, SidrStatus,
};
use super::ports::covers;

impl Machine {
    /// A message from the device `from` arrives.
    pub(super) fn on_message(&mut self, now: u64, from: Gid, mad: Mad, numbers: impl Numbers) {
        self.limited(now, from, |machine| machine.take_message(now, from, mad, numbers));
    }

    /// A request from the device `from` arrives that nobody here could accept, whoever listens.
    pub(super) fn refuse_unseen(
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
            self.limited(now, from, |machine| machine.out.push_back(answer));
        }
    }

    /// Does what follows from a message. What would be answered beyond the limit is not sent: as if it was lost.
    fn limited(&mut self, now: u64, from: Gid, act: impl FnOnce(&mut Self)) {
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
            Message::Req(req) => self.on_request(now, from, transaction, *req, numbers),
            Message::Rep(rep) => self.on_response(from, transaction, &rep),
            Message::Rej(rej) => self.on_rejection(now, from, &rej),
            Message::Mra(mra) => self.on_receipt(now, from, &mra),
            Message::Rtu(rtu) => {
                if self.find(from, rtu.remote_id, rtu.local_id) == Some(State::RepSent) {
                    self.established(rtu.remote_id);
                } else if self.connection(rtu.remote_id).is_none() && rtu.local_id != 0 {
                    // It has given way, or was given up: its peer takes it for established.
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
            Message::Dreq(dreq) => self.on_goodbye(now, from, transaction, &dreq),
            Message::Drep(drep) => {
                if self.find(from, drep.remote_id, drep.local_id) == Some(State::DreqSent) {
                    self.disconnected(now, drep.remote_id);
                }
            }
            Message::SidrReq(req) => {
                // No program here serves datagrams by service.
                let rep = SidrRep {
                    request_id: req.request_id,
                    status: SidrStatus::UNSUPPORTED,
                    qpn: Qpn(0),
                    service: req.service,
                    qkey: Qkey(0),
                    private_data: Private::empty(),
                };
                let mad = Mad { transaction, message: Message::SidrRep(Box::new(rep)) };
                self.out.push_back(Output::Send { to: from, mad });
            }
            // Nobody here has asked.
            Message::SidrRep(_) => {}
        }
    }

    fn on_request(
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
        // Not of a manager that plays by the rules, so nobody would understand the answer.
        if req.local_gid != from || req.local_id == 0 || req.qpn.0 <= 1 || req.qpn.0 > Qpn::MAX.0 {
            return;
        }
        if let Some(&id) = self.requests.get(&(from, req.local_id)) {
            return self.on_repeated_request(id);
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
            // Its packets would not get through, nor ours be as long as they have to be.
            return self.out.push_back(refuse(RejectReason::INVALID_MTU));
        }
        if let Some(&id) = self.queue_pairs.get(&(from, req.qpn)) {
            // The peer has begun anew with this queue pair, so it has forgotten the connection that we know: 12.9.8.3.1.
            self.out.push_back(refuse(RejectReason::STALE_CONNECTION));
            if self.connections.get(&id).is_some_and(|stale| stale.state == State::Established) {
                // Cannot fail in this state.
                let _ = self.disconnect(now, id);
            }
            return;
        }
        let room = listener.waiting < listener.backlog;
        let verdict = match &listener.admit {
            Some(admit) if room => admit.admit(req.source.ip(), req.private_data.bytes()),
            _ => Verdict::Ask,
        };
        if let Verdict::Reject(data) = &verdict {
            // Nothing is remembered of it: if the answer is lost, the peer repeats its request and is answered anew.
            let data = Private::new(data).unwrap_or_else(Private::empty);
            return self.out.push_back(refuse_with(RejectReason::CONSUMER, data));
        }
        let answers = matches!(verdict, Verdict::Answer(_));
        let may_open = |machine: &mut Self| {
            machine.half_open.open(from)
                || (machine.give_way_to(from, answers) && machine.half_open.open(from))
        };
        if !room || !may_open(self) {
            // Nothing is remembered of it: the peer repeats it, and there may be room then.
            let mra = Mra {
                local_id: 0,
                remote_id: req.local_id,
                about: About::Req,
                service_timeout: BUSY_TIMEOUT,
            };
            let mad = Mad { transaction, message: Message::Mra(mra) };
            return self.out.push_back(Output::Send { to: from, mad });
        }
        // Without a number that nobody can guess: as if the request was lost.
        let Some(rq_psn) = numbers.psn() else { return self.half_open.close(from) };
        if let (Verdict::Ask, Some(listener)) = (&verdict, self.listeners.get_mut(&key)) {
            listener.waiting += 1;
        }
        let id = self.id_of_request(numbers.id());
        let timeout = bounded(req.local_timeout);
        let mut connection = Connection::of_request(&req, transaction, rq_psn, timeout);
        connection.waiting_at = Some(key);
        connection.unseen = matches!(verdict, Verdict::Answer(_));
        let peer = connection.params.clone();
        self.requests.insert((from, req.local_id), id);
        self.queue_pairs.insert((from, req.qpn), id);
        self.connections.insert(id, connection);
        if let Verdict::Answer(answer) = &verdict {
            if !self.answer_unseen(now, id, answer, || numbers.reserve()) {
                self.forget(id);
            }
        } else if let Some(peer) = peer {
            self.out.push_back(Output::Request { listener: key, connection: id, peer });
        }
    }

    fn on_repeated_request(&mut self, id: CommId) {
        match self.connections.get(&id).map(|connection| connection.state) {
            Some(State::ReqRcvd) => self.ask_for_time(id, About::Req),
            Some(State::RepSent | State::Refused) => self.send_last(id),
            // It has our answer by now, or will not want it any more.
            _ => {}
        }
    }

    fn on_response(&mut self, from: Gid, transaction: u64, rep: &Rep) {
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
                    self.event(id, Event::Rejected(RejectReason::STALE_CONNECTION, Vec::new()));
                    return self.give_up(id, About::Rep, RejectReason::STALE_CONNECTION);
                }
                self.queue_pairs.insert((from, rep.qpn), id);
                self.set_deadline(id, None);
                let Some(connection) = self.connections.get_mut(&id) else { return };
                connection.on_response(rep);
                connection.state = State::RepRcvd;
                if let Some(peer) = connection.params.clone() {
                    self.event(id, Event::Response(peer));
                }
            }
            Some(State::RepRcvd) => self.ask_for_time(rep.remote_id, About::Rep),
            // Our confirmation was lost.
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

    fn on_rejection(&mut self, now: u64, from: Gid, rej: &Rej) {
        let id = match rej.remote_id {
            // Of a peer that gives up a request without having heard our number.
            0 => self.requests.get(&(from, rej.local_id)).copied().unwrap_or_default(),
            id => id,
        };
        let Some(connection) = self.connections.get(&id) else { return };
        // Who rejects a request need not have given the connection a number.
        let theirs = connection.remote_id == rej.local_id || connection.remote_id == 0;
        if connection.peer != from || !theirs {
            return;
        }
        match connection.state {
            State::ReqSent | State::RepRcvd | State::RepSent => {
                self.event(id, Event::Rejected(rej.reason, rej.private_data.bytes().to_vec()));
                self.forget(id);
            }
            State::ReqRcvd => {
                self.event(id, Event::Rejected(rej.reason, rej.private_data.bytes().to_vec()));
                self.withdraw(id);
            }
            // The passive side has given the request up, or let it give way, before it heard our confirmation.
            State::Established if self.is_active(id) => {
                self.over(now, id, Event::Rejected(rej.reason, rej.private_data.bytes().to_vec()));
            }
            State::Established | State::DreqSent => self.disconnected(now, id),
            State::TimeWait | State::Refused | State::Withdrawn => {}
        }
    }

    fn on_receipt(&mut self, now: u64, from: Gid, mra: &Mra) {
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
            // It is alive: how long is long enough the program decides. Otherwise a listener in a storm would lose those
            // that it has put off too often.
            connection.repeated = 0;
            let wait = match expected {
                // Only the program's own deadline limits what it waits for.
                About::Req => bounded(mra.service_timeout).max(mra.service_timeout.nanoseconds()),
                _ => bounded(mra.service_timeout),
            };
            let at = now.saturating_add(wait).min(connection.give_up);
            self.set_deadline(mra.remote_id, Some(at));
        }
    }

    fn on_goodbye(&mut self, now: u64, from: Gid, transaction: u64, dreq: &Dreq) {
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
                    // The confirmation was lost or overtaken: who says goodbye has confirmed.
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
            // Forgotten here: the peer shall not wait for us.
            None => self
                .out
                .push_back(Output::Send { to: from, mad: Mad { transaction, message: answer } }),
        }
    }
}

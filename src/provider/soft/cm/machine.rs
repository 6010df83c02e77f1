//! The connection manager's protocol of one device (IBTA 12.9): messages, calls and time go in; messages, events and a
//! deadline come out. No clock, no lock, no randomness of its own.
//!
//! What a peer says is believed only of its own connections: a message counts if it names both numbers of a connection
//! and comes from the GID at its other end. Times that a peer asks for are cut to what is held here.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::net::SocketAddr;

use crate::error::VerbError;
use crate::provider::cm_contract::{CmParams, CmPeer, REJECT_DATA};
use crate::types::{AckTimeout, Gid, Mtu, Psn, Qpn, RejectReason};

use super::connection::{Connection, State};
use super::message::{About, CmTimeout, CommId, Drep, Dreq, Mad, Message, Mra, Private, Rej, Rep, Req, Rtu};
use super::ports::covers;

/// Time in which a peer's manager answers: 268 ms, far above what a process takes to be scheduled. With
/// [`MAX_RETRIES`], a peer that is gone is noticed after 4.3 s.
pub(super) const RESPONSE_TIMEOUT: CmTimeout = CmTimeout(16);
/// As the kernel's rdma_cm.
pub(super) const MAX_RETRIES: u8 = 15;
/// What an MRA asks for while a program makes up its mind: 4.3 s, after which the peer repeats its request and is asked
/// again.
const SERVICE_TIMEOUT: CmTimeout = CmTimeout(20);
/// What an MRA asks for when a listener's backlog is full: 67 ms. A listener with a backlog of 16 and a slow program
/// takes in 1,000 in 4 s so.
const BUSY_TIMEOUT: CmTimeout = CmTimeout(14);
/// Bounds of the times that peers ask for: 1 ms, so that they cannot make us busy, and 4.3 s, so that they cannot make
/// us remember them for hours.
const TIMEOUTS: (CmTimeout, CmTimeout) = (CmTimeout(8), CmTimeout(20));
/// Rejections remembered at most, for peers that repeat their request: however fast they come.
const MAX_REFUSED: usize = 1024;
/// Twice the lifetime of a packet (67 ms), IBTA 12.9.8.4: then nothing of a connection is underway any more.
const TIME_WAIT: u64 = 2 * CmTimeout(14).nanoseconds();
/// Acknowledgement timeout proposed to both queue pairs, as librdmacm's.
const ACK_TIMEOUT: AckTimeout = AckTimeout::from_code(14);

/// What comes out.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Output {
    Send {
        to: Gid,
        mad: Mad,
    },
    Event {
        connection: CommId,
        event: Event,
    },
    /// A connection exists whose requests go to this listener.
    Request {
        listener: u64,
        connection: CommId,
        peer: CmPeer,
    },
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Event {
    Response(CmPeer),
    Established,
    Rejected(RejectReason, Vec<u8>),
    Unreachable,
    Disconnected,
    TimewaitExit,
}

#[derive(Debug)]
struct Listener {
    address: SocketAddr,
    backlog: u32,
    /// Requests that wait for their answer.
    waiting: u32,
}

/// Where an active connection goes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Destination {
    pub(super) gid: Gid,
    pub(super) local: SocketAddr,
    pub(super) peer: SocketAddr,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Machine {
    gid: Gid,
    guid: u64,
    /// Makes the numbers of connections hard to guess.
    mask: u32,
    issued: u32,
    transactions: u64,
    connections: HashMap<CommId, Connection>,
    /// Requests of peers by the peer's number, to know repeated ones.
    requests: HashMap<(Gid, CommId), CommId>,
    /// Queue pairs at the other ends.
    queue_pairs: HashMap<(Gid, Qpn), CommId>,
    listeners: HashMap<u64, Listener>,
    timers: BTreeSet<(u64, CommId)>,
    /// Rejected last; some may be forgotten already.
    refused: VecDeque<CommId>,
    out: VecDeque<Output>,
}

const fn invalid(verb: &'static str) -> VerbError {
    VerbError::new(verb, VerbError::EINVAL)
}

impl Machine {
    pub(super) fn new(gid: Gid, guid: u64, seed: u64) -> Self {
        Self {
            gid,
            guid,
            mask: seed as u32,
            issued: 0,
            transactions: seed & 0xffff_ffff_0000_0000,
            connections: HashMap::new(),
            requests: HashMap::new(),
            queue_pairs: HashMap::new(),
            listeners: HashMap::new(),
            timers: BTreeSet::new(),
            refused: VecDeque::new(),
            out: VecDeque::new(),
        }
    }

    pub(super) fn next_output(&mut self) -> Option<Output> {
        self.out.pop_front()
    }

    /// When [`on_timer`](Self::on_timer) wants to be called next.
    pub(super) fn deadline(&self) -> Option<u64> {
        self.timers.first().map(|&(at, _)| at)
    }

    pub(super) fn connection(&self, id: CommId) -> Option<&Connection> {
        self.connections.get(&id)
    }

    // What programs ask for.

    pub(super) fn listen(&mut self, listener: u64, address: SocketAddr, backlog: u32) {
        self.listeners.insert(listener, Listener { address, backlog, waiting: 0 });
    }

    pub(super) fn stop_listening(&mut self, listener: u64) {
        self.listeners.remove(&listener);
    }

    /// Sends a request from a new connection.
    pub(super) fn connect(
        &mut self,
        now: u64,
        to: Destination,
        params: &CmParams<'_>,
        rq_psn: Psn,
    ) -> Result<CommId, VerbError> {
        let private_data = Private::new(params.private_data).ok_or(invalid("rdma_connect"))?;
        let (id, transaction) = (self.new_id(), self.new_transaction());
        let request = Message::Req(Box::new(Req {
            local_id: id,
            service_port: to.peer.port(),
            guid: self.guid,
            qpn: params.qpn,
            responder_resources: params.responder_resources,
            initiator_depth: params.initiator_depth,
            remote_timeout: RESPONSE_TIMEOUT,
            local_timeout: RESPONSE_TIMEOUT,
            starting_psn: rq_psn,
            retry_count: params.retry_count,
            mtu: Mtu::Mtu4096,
            rnr_retry: params.rnr_retry,
            max_retries: MAX_RETRIES,
            srq: params.srq,
            local_gid: self.gid,
            remote_gid: to.gid,
            ack_timeout: ACK_TIMEOUT,
            source: to.local,
            destination: to.peer.ip(),
            private_data,
        }));
        let connection = Connection {
            state: State::ReqSent,
            owned: true,
            waiting_at: None,
            transaction,
            peer: to.gid,
            remote_id: 0,
            local_qpn: params.qpn,
            remote_qpn: None,
            sq_psn: Psn::default(),
            rq_psn,
            responder_resources: params.responder_resources,
            initiator_depth: params.initiator_depth,
            retry_count: params.retry_count,
            rnr_retry: params.rnr_retry,
            mtu: Mtu::Mtu4096,
            ack_timeout: ACK_TIMEOUT,
            response_timeout: RESPONSE_TIMEOUT.nanoseconds(),
            retries: MAX_RETRIES,
            retries_left: 0,
            deadline: None,
            last: None,
            params: None,
            addresses: (to.local, to.peer),
        };
        self.connections.insert(id, connection);
        self.send_and_repeat(now, id, request);
        Ok(id)
    }

    /// Answers a request with yes.
    pub(super) fn accept(&mut self, now: u64, id: CommId, params: &CmParams<'_>) -> Result<(), VerbError> {
        const VERB: &str = "rdma_accept";
        let private_data = Private::new(params.private_data).ok_or(invalid(VERB))?;
        let guid = self.guid;
        let connection = self.in_state(id, State::ReqRcvd).ok_or(invalid(VERB))?;
        connection.state = State::RepSent;
        connection.local_qpn = params.qpn;
        connection.responder_resources = params.responder_resources;
        connection.initiator_depth = params.initiator_depth;
        let response = Message::Rep(Box::new(Rep {
            local_id: id,
            remote_id: connection.remote_id,
            qpn: params.qpn,
            starting_psn: connection.rq_psn,
            responder_resources: params.responder_resources,
            initiator_depth: params.initiator_depth,
            rnr_retry: params.rnr_retry,
            srq: params.srq,
            guid,
            private_data,
        }));
        self.answered(id);
        self.send_and_repeat(now, id, response);
        Ok(())
    }

    /// Answers a request with no.
    pub(super) fn reject(&mut self, now: u64, id: CommId, private_data: &[u8]) -> Result<(), VerbError> {
        const VERB: &str = "rdma_reject";
        let private_data = Private::new(private_data).ok_or(invalid(VERB))?;
        self.in_state(id, State::ReqRcvd).ok_or(invalid(VERB))?;
        self.refuse(now, id, RejectReason::CONSUMER, private_data);
        Ok(())
    }

    /// Confirms a response.
    pub(super) fn establish(&mut self, id: CommId) -> Result<(), VerbError> {
        let connection = self.in_state(id, State::RepRcvd).ok_or(invalid("rdma_establish"))?;
        connection.state = State::Established;
        let confirmation = Message::Rtu(Rtu { local_id: id, remote_id: connection.remote_id });
        self.send(id, confirmation);
        Ok(())
    }

    /// Says goodbye.
    pub(super) fn disconnect(&mut self, now: u64, id: CommId) -> Result<(), VerbError> {
        let connection = self.connections.get_mut(&id).ok_or(invalid("rdma_disconnect"))?;
        match connection.state {
            State::Established => {
                connection.state = State::DreqSent;
                let (remote_id, remote_qpn) = (connection.remote_id, connection.remote_qpn.unwrap_or_default());
                connection.transaction = self.transactions;
                self.transactions += 1;
                self.send_and_repeat(now, id, Message::Dreq(Dreq { local_id: id, remote_id, remote_qpn }));
                Ok(())
            }
            State::DreqSent | State::TimeWait => Ok(()),
            State::ReqSent | State::RepRcvd | State::ReqRcvd | State::RepSent | State::Refused | State::Withdrawn => {
                Err(invalid("rdma_disconnect"))
            }
        }
    }

    /// Its id is gone: no more events, and the peer learns.
    pub(super) fn release(&mut self, now: u64, id: CommId) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        connection.owned = false;
        match connection.state {
            State::ReqSent => self.give_up(id, About::Req, RejectReason::TIMEOUT),
            State::RepRcvd => self.give_up(id, About::Rep, RejectReason::CONSUMER),
            State::RepSent => self.give_up(id, About::Other, RejectReason::CONSUMER),
            State::ReqRcvd => self.refuse(now, id, RejectReason::CONSUMER, Private::empty()),
            State::Established => {
                // Cannot fail in this state.
                let _ = self.disconnect(now, id);
            }
            State::Withdrawn => self.forget(id),
            State::DreqSent | State::TimeWait | State::Refused => {}
        }
    }

    // What happens.

    /// A message from the device `from` arrives.
    pub(super) fn on_message(&mut self, now: u64, from: Gid, mad: Mad, psn: impl FnOnce() -> Option<Psn>) {
        let Mad { transaction, message } = mad;
        match message {
            Message::Req(req) => self.on_request(now, from, transaction, *req, psn),
            Message::Rep(rep) => self.on_response(from, transaction, &rep),
            Message::Rej(rej) => self.on_rejection(now, from, &rej),
            Message::Mra(mra) => self.on_receipt(now, from, &mra),
            Message::Rtu(rtu) => {
                if self.find(from, rtu.remote_id, rtu.local_id) == Some(State::RepSent) {
                    self.established(rtu.remote_id);
                }
            }
            Message::Dreq(dreq) => self.on_goodbye(now, from, transaction, &dreq),
            Message::Drep(drep) => {
                if self.find(from, drep.remote_id, drep.local_id) == Some(State::DreqSent) {
                    self.disconnected(now, drep.remote_id);
                }
            }
        }
    }

    /// A deadline has come.
    pub(super) fn on_timer(&mut self, now: u64) {
        while let Some(&(at, id)) = self.timers.first() {
            if at > now {
                return;
            }
            self.timers.pop_first();
            let Some(connection) = self.connections.get_mut(&id) else { continue };
            connection.deadline = None;
            let again = connection.retries_left > 0;
            match connection.state {
                State::ReqSent | State::RepSent | State::DreqSent if again => {
                    connection.retries_left -= 1;
                    let at = now.saturating_add(connection.response_timeout);
                    self.set_deadline(id, Some(at));
                    self.send_last(id);
                }
                State::ReqSent => {
                    self.event(id, Event::Unreachable);
                    self.give_up(id, About::Req, RejectReason::TIMEOUT);
                }
                State::RepSent => {
                    self.event(id, Event::Unreachable);
                    self.give_up(id, About::Other, RejectReason::TIMEOUT);
                }
                State::DreqSent => self.disconnected(now, id),
                State::TimeWait => {
                    self.event(id, Event::TimewaitExit);
                    self.forget(id);
                }
                State::Refused => self.forget(id),
                // Have no deadline.
                State::RepRcvd | State::ReqRcvd | State::Established | State::Withdrawn => {}
            }
        }
    }

    fn on_request(&mut self, now: u64, from: Gid, transaction: u64, req: Req, psn: impl FnOnce() -> Option<Psn>) {
        let refuse = |reason| {
            let rej =
                Rej { local_id: 0, remote_id: req.local_id, about: About::Req, reason, private_data: Private::empty() };
            Output::Send { to: from, mad: Mad { transaction, message: Message::Rej(Box::new(rej)) } }
        };
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
            listener.address.port() == req.service_port && covers(listener.address.ip(), req.destination)
        });
        let Some((&key, listener)) = listener else {
            return self.out.push_back(refuse(RejectReason::INVALID_SERVICE_ID));
        };
        if let Some(&id) = self.queue_pairs.get(&(from, req.qpn)) {
            // The peer has begun anew with this queue pair, so it has forgotten the connection that we know: 12.9.8.3.1.
            self.out.push_back(refuse(RejectReason::STALE_CONNECTION));
            if self.connections.get(&id).is_some_and(|stale| stale.state == State::Established) {
                let _ = self.disconnect(now, id);
            }
            return;
        }
        if listener.waiting >= listener.backlog {
            // Nothing is remembered of it: the peer repeats it, and there may be room then.
            let mra = Mra { local_id: 0, remote_id: req.local_id, about: About::Req, service_timeout: BUSY_TIMEOUT };
            let mad = Mad { transaction, message: Message::Mra(mra) };
            return self.out.push_back(Output::Send { to: from, mad });
        }
        // Without a number that nobody can guess: as if the request was lost.
        let Some(rq_psn) = psn() else { return };
        listener.waiting += 1;
        let id = self.new_id();
        let timeout = bounded(req.local_timeout);
        let mut connection = Connection::of_request(&req, transaction, rq_psn, timeout);
        connection.waiting_at = Some(key);
        let peer = connection.params.clone();
        self.requests.insert((from, req.local_id), id);
        self.queue_pairs.insert((from, req.qpn), id);
        self.connections.insert(id, connection);
        if let Some(peer) = peer {
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
            connection.peer == from && (connection.remote_id == rep.local_id || connection.remote_id == 0)
        });
        match connection.map(|connection| connection.state) {
            Some(State::ReqSent) if rep.local_id != 0 && rep.qpn.0 > 1 && rep.qpn.0 <= Qpn::MAX.0 => {
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
            // The peer has given up what we took for granted.
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
            connection.retries_left = connection.retries;
            let at = now.saturating_add(bounded(mra.service_timeout));
            self.set_deadline(mra.remote_id, Some(at));
        }
    }

    fn on_goodbye(&mut self, now: u64, from: Gid, transaction: u64, dreq: &Dreq) {
        let id = dreq.remote_id;
        let answer = Message::Drep(Drep { local_id: id, remote_id: dreq.local_id });
        let state = self.find(from, id, dreq.local_id);
        let ours = self.connections.get(&id).is_some_and(|connection| connection.local_qpn == dreq.remote_qpn);
        match state {
            Some(State::RepRcvd | State::RepSent | State::Established | State::DreqSent) if ours => {
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
                self.out.push_back(Output::Send { to: from, mad: Mad { transaction, message: answer } });
            }
            Some(_) => {}
            // Forgotten here: the peer shall not wait for us.
            None => self.out.push_back(Output::Send { to: from, mad: Mad { transaction, message: answer } }),
        }
    }

    // Steps that several of these take.

    /// State of the connection that both numbers and the peer's GID name.
    fn find(&self, from: Gid, id: CommId, remote_id: CommId) -> Option<State> {
        let connection = self.connections.get(&id)?;
        (connection.peer == from && connection.remote_id == remote_id && remote_id != 0).then_some(connection.state)
    }

    fn in_state(&mut self, id: CommId, state: State) -> Option<&mut Connection> {
        self.connections.get_mut(&id).filter(|connection| connection.state == state)
    }

    /// True if we asked for it.
    fn is_active(&self, id: CommId) -> bool {
        let Some(connection) = self.connections.get(&id) else { return false };
        self.requests.get(&(connection.peer, connection.remote_id)) != Some(&id)
    }

    fn established(&mut self, id: CommId) {
        self.set_deadline(id, None);
        if let Some(connection) = self.connections.get_mut(&id) {
            connection.state = State::Established;
        }
        self.event(id, Event::Established);
    }

    fn disconnected(&mut self, now: u64, id: CommId) {
        if let Some(connection) = self.connections.get_mut(&id) {
            connection.state = State::TimeWait;
        }
        self.set_deadline(id, Some(now.saturating_add(TIME_WAIT)));
        self.event(id, Event::Disconnected);
    }

    /// The peer has taken its request back. Its queue pair may ask anew.
    fn withdraw(&mut self, id: CommId) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        connection.state = State::Withdrawn;
        if let Some(qpn) = connection.remote_qpn {
            self.queue_pairs.remove(&(connection.peer, qpn));
        }
    }

    /// Rejects a request, and remembers that for as long as the peer may repeat it.
    fn refuse(&mut self, now: u64, id: CommId, reason: RejectReason, private_data: Private<REJECT_DATA>) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        connection.state = State::Refused;
        let remote_id = connection.remote_id;
        let linger = connection.response_timeout.saturating_mul(2);
        self.answered(id);
        let rej = Rej { local_id: id, remote_id, about: About::Req, reason, private_data };
        self.send(id, Message::Rej(Box::new(rej)));
        self.set_deadline(id, Some(now.saturating_add(linger)));
        self.refused.push_back(id);
        if self.refused.len() > MAX_REFUSED
            && let Some(oldest) = self.refused.pop_front()
            && self.in_state(oldest, State::Refused).is_some()
        {
            self.forget(oldest);
        }
    }

    /// Tells the peer, and forgets the connection.
    fn give_up(&mut self, id: CommId, about: About, reason: RejectReason) {
        let Some(connection) = self.connections.get(&id) else { return };
        let remote_id = connection.remote_id;
        let rej = Rej { local_id: id, remote_id, about, reason, private_data: Private::empty() };
        self.send(id, Message::Rej(Box::new(rej)));
        self.forget(id);
    }

    fn ask_for_time(&mut self, id: CommId, about: About) {
        let Some(connection) = self.connections.get(&id) else { return };
        let mra = Mra { local_id: id, remote_id: connection.remote_id, about, service_timeout: SERVICE_TIMEOUT };
        let mad = Mad { transaction: connection.transaction, message: Message::Mra(mra) };
        self.out.push_back(Output::Send { to: connection.peer, mad });
    }

    /// A request waits no more.
    fn answered(&mut self, id: CommId) {
        let listener = self.connections.get_mut(&id).and_then(|connection| connection.waiting_at.take());
        if let Some(listener) = listener.and_then(|key| self.listeners.get_mut(&key)) {
            listener.waiting -= 1;
        }
    }

    fn event(&mut self, id: CommId, event: Event) {
        if self.connections.get(&id).is_some_and(|connection| connection.owned) {
            self.out.push_back(Output::Event { connection: id, event });
        }
    }

    fn send_and_repeat(&mut self, now: u64, id: CommId, message: Message) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        connection.retries_left = connection.retries;
        let at = now.saturating_add(connection.response_timeout);
        self.set_deadline(id, Some(at));
        self.send(id, message);
    }

    fn send(&mut self, id: CommId, message: Message) {
        if let Some(connection) = self.connections.get_mut(&id) {
            connection.last = Some(message);
            self.send_last(id);
        }
    }

    fn send_last(&mut self, id: CommId) {
        let Some(connection) = self.connections.get(&id) else { return };
        if let Some(message) = connection.last.clone() {
            let mad = Mad { transaction: connection.transaction, message };
            self.out.push_back(Output::Send { to: connection.peer, mad });
        }
    }

    fn set_deadline(&mut self, id: CommId, deadline: Option<u64>) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        if let Some(old) = connection.deadline.take() {
            self.timers.remove(&(old, id));
        }
        connection.deadline = deadline;
        if let Some(at) = deadline {
            self.timers.insert((at, id));
        }
    }

    fn forget(&mut self, id: CommId) {
        self.answered(id);
        self.set_deadline(id, None);
        let Some(connection) = self.connections.remove(&id) else { return };
        let of = |known: Option<&CommId>| known == Some(&id);
        let request = (connection.peer, connection.remote_id);
        if of(self.requests.get(&request)) {
            self.requests.remove(&request);
        }
        if let Some(qpn) = connection.remote_qpn
            && of(self.queue_pairs.get(&(connection.peer, qpn)))
        {
            self.queue_pairs.remove(&(connection.peer, qpn));
        }
    }

    fn new_id(&mut self) -> CommId {
        loop {
            self.issued = self.issued.wrapping_add(1);
            let id = self.issued ^ self.mask;
            if id != 0 && !self.connections.contains_key(&id) {
                return id;
            }
        }
    }

    fn new_transaction(&mut self) -> u64 {
        self.transactions = self.transactions.wrapping_add(1);
        self.transactions
    }

    /// Connections, repeated requests, queue pairs and timers that it knows; for tests of what is left behind.
    #[cfg(test)]
    pub(super) fn sizes(&self) -> [usize; 4] {
        [self.connections.len(), self.requests.len(), self.queue_pairs.len(), self.timers.len()]
    }
}

/// A time that a peer asks for, within [`TIMEOUTS`].
fn bounded(timeout: CmTimeout) -> u64 {
    timeout.clamp(TIMEOUTS.0, TIMEOUTS.1).nanoseconds()
}

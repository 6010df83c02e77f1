//! The connection manager's protocol of one device (IBTA 12.9): messages, calls and time go in; messages, events and a
//! deadline come out. No clock, no lock, no randomness of its own.
//!
//! What a peer says is believed only of its own connections: a message counts if it names both numbers of a connection
//! and comes from the GID at its other end. Times that a peer asks for are cut to what is held here.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::SocketAddr;
use std::sync::Arc;

use rdma_provider::VerbError;
use rdma_provider::cm_contract::{Admit, CmParams, CmPeer, MAX_REJECT_DATA};
use rdma_provider::types::{AckTimeout, Gid, Mtu, Psn, Qpn, RejectReason};

use super::connection::{Connection, State};
use super::limits::{Answers, HURRIED_RETRIES, HURRIED_TIMEOUT, HalfOpen, Yielding};
use super::message::{
    About, CmTimeout, CommId, Dreq, Mad, Message, Mra, Private, Rej, Rep, Req, Rtu, Traffic,
};

/// First wait for an answer to a request or a disconnect: 268 ms, far above what a process takes to be scheduled.
/// Each further wait is twice as long, up to [`LONGEST_WAIT`], so that many connections at once do not keep a slow
/// peer from answering any of them.
pub(super) const FIRST_WAIT: CmTimeout = CmTimeout(16);
/// 4.3 s, the wait of the kernel's rdma_cm.
pub(super) const LONGEST_WAIT: CmTimeout = CmTimeout(20);
/// How often a disconnect is sent: a peer that is gone is noticed after 6.2 to 8.3 s.
pub(super) const DISCONNECTS: u8 = 5;
/// Sent to the peer: the time after which it repeats its response, 1.1 s, and how often, as the kernel's rdma_cm. A
/// program that prepares many queue pairs confirms the last of them late.
pub(super) const RESPONSE_TIMEOUT: CmTimeout = CmTimeout(18);
pub(super) const MAX_RETRIES: u8 = 15;
/// What an MRA asks for while a program makes up its mind: 4.3 s, after which the peer repeats its request and is asked
/// again.
const SERVICE_TIMEOUT: CmTimeout = CmTimeout(20);
/// What an MRA asks for when a listener's backlog is full: 67 ms. A listener with a backlog of 16 and a slow program
/// takes in 1,000 in 4 s so.
pub(super) const BUSY_TIMEOUT: CmTimeout = CmTimeout(14);
/// Bounds of the times that peers ask for: 1 ms, so that they cannot make us busy, and 4.3 s, so that they cannot make
/// us remember them for hours.
const TIMEOUTS: (CmTimeout, CmTimeout) = (CmTimeout(8), CmTimeout(20));
/// Rejections remembered at most, for peers that repeat their request: however fast they come.
const MAX_REFUSED: usize = 1024;
/// How long our device takes to acknowledge, as SoftRoCE says of itself: a process that is not scheduled for 134 ms is rare.
const ACK_DELAY: CmTimeout = CmTimeout(15);
/// Twice the lifetime of a packet (67 ms), IBTA 12.9.8.4: then nothing of a connection is underway any more.
const TIME_WAIT: u64 = 2 * CmTimeout(14).nanoseconds();
/// Sent to the peer, whose queue pair takes it over: how long it waits for our acknowledgements, 537 ms. Twice the lifetime
/// of a packet (67 ms) and [`ACK_DELAY`] (IBTA 12.7.34) make half of that. A shorter one makes a busy peer repeat what is
/// only late, until its retries are spent.
pub(super) const PEER_ACK_TIMEOUT: AckTimeout = AckTimeout::from_code(17);
/// Of our queue pair, unless the layer above replaces it; as librdmacm's.
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
    /// A number that was reserved is needed no more.
    Release(Qpn),
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
pub(super) struct Listener {
    pub(super) address: SocketAddr,
    pub(super) backlog: u32,
    /// Requests that wait for their answer; and those that were answered, and wait for the program.
    pub(super) waiting: u32,
    /// Answers requests without the program.
    pub(super) admit: Option<Arc<dyn Admit>>,
}

/// What a request needs that the machine cannot draw itself.
pub(super) trait Numbers {
    /// A first sequence number that peers cannot predict.
    fn psn(&mut self) -> Option<Psn>;
    /// A number for a connection that a peer has asked for. A peer that can predict it can confirm an answer that it has not
    /// received.
    fn id(&mut self) -> Option<CommId>;
    /// A number for a queue pair that is made later, which peers cannot predict either.
    fn reserve(&mut self) -> Option<Qpn>;
}

/// Where an active connection goes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Destination {
    pub(super) gid: Gid,
    pub(super) local: SocketAddr,
    pub(super) peer: SocketAddr,
    pub(super) mtu: Mtu,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Machine {
    pub(super) gid: Gid,
    guid: u64,
    /// The largest packets that our port takes.
    pub(super) mtu: Mtu,
    /// Makes the numbers of connections impossible to predict, see [`drawn`].
    secret: u64,
    issued: u32,
    transactions: u64,
    pub(super) connections: HashMap<CommId, Connection>,
    /// Requests of peers by the peer's number, to know repeated ones.
    pub(super) requests: HashMap<(Gid, CommId), CommId>,
    /// Queue pairs at the other ends.
    pub(super) queue_pairs: HashMap<(Gid, Qpn), CommId>,
    pub(super) listeners: HashMap<u64, Listener>,
    timers: BTreeSet<(u64, CommId)>,
    /// Rejected last; some may be forgotten already.
    refused: VecDeque<CommId>,
    pub(super) half_open: HalfOpen,
    pub(super) yielding: Yielding,
    /// Connections whose queue pair is still to be made, by the number that it will have.
    pub(super) reserved: HashMap<Qpn, CommId>,
    pub(super) answers: Answers,
    pub(super) out: VecDeque<Output>,
}

const fn invalid(verb: &'static str) -> VerbError {
    VerbError::new(verb, VerbError::EINVAL)
}

impl Machine {
    pub(super) fn new(gid: Gid, guid: u64, mtu: Mtu, seed: u64) -> Self {
        Self {
            gid,
            guid,
            mtu,
            secret: drawn(seed, Draw::Secret),
            issued: 0,
            transactions: drawn(seed, Draw::Transactions) & 0xffff_ffff_0000_0000,
            connections: HashMap::new(),
            requests: HashMap::new(),
            queue_pairs: HashMap::new(),
            listeners: HashMap::new(),
            timers: BTreeSet::new(),
            refused: VecDeque::new(),
            half_open: HalfOpen::default(),
            yielding: Yielding::default(),
            reserved: HashMap::new(),
            answers: Answers::new(drawn(seed, Draw::Answers)),
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
        self.listeners.insert(listener, Listener { address, backlog, waiting: 0, admit: None });
    }

    /// Has the requests of a listener answered as `admit` decides.
    pub(super) fn answer(&mut self, listener: u64, admit: Arc<dyn Admit>) -> bool {
        let Some(listener) = self.listeners.get_mut(&listener) else { return false };
        listener.admit = Some(admit);
        true
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
            remote_timeout: LONGEST_WAIT,
            local_timeout: RESPONSE_TIMEOUT,
            starting_psn: rq_psn,
            retry_count: params.retry_count,
            mtu: to.mtu,
            rnr_retry: params.rnr_retry,
            max_retries: MAX_RETRIES,
            srq: params.srq,
            local_gid: self.gid,
            remote_gid: to.gid,
            traffic: Traffic::PLAIN,
            ack_timeout: PEER_ACK_TIMEOUT,
            source: to.local,
            destination: to.peer.ip(),
            private_data,
        }));
        let connection = Connection {
            state: State::ReqSent,
            owned: true,
            waiting_at: None,
            unseen: false,
            yielding: None,
            reserved: false,
            half_open: false,
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
            mtu: to.mtu,
            traffic: Traffic::PLAIN,
            ack_timeout: ACK_TIMEOUT,
            response_timeout: RESPONSE_TIMEOUT.nanoseconds(),
            retries: MAX_RETRIES,
            repeated: 0,
            give_up: now
                .saturating_add(u64::try_from(params.timeout.as_nanos()).unwrap_or(u64::MAX)),
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
    pub(super) fn accept(
        &mut self,
        now: u64,
        id: CommId,
        params: &CmParams<'_>,
    ) -> Result<(), VerbError> {
        const VERB: &str = "rdma_accept";
        if self
            .in_state(id, State::Established)
            .is_some_and(|connection| connection.waiting_at.is_some())
        {
            // The peer was answered, and has confirmed.
            self.answered(id);
            self.event(id, Event::Established);
            return Ok(());
        }
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
            ack_delay: ACK_DELAY,
            private_data,
        }));
        self.answered(id);
        self.send_and_repeat(now, id, response);
        Ok(())
    }

    /// Answers a request with no.
    pub(super) fn reject(
        &mut self,
        now: u64,
        id: CommId,
        private_data: &[u8],
    ) -> Result<(), VerbError> {
        const VERB: &str = "rdma_reject";
        let private_data = Private::new(private_data).ok_or(invalid(VERB))?;
        if let Some(connection) = self.in_state(id, State::Established)
            && connection.waiting_at.is_some()
        {
            // The peer takes the connection for established. The rejection says why it ends; the disconnect request is repeated, and
            // ends it also if the rejection is lost.
            let remote_id = connection.remote_id;
            let (to, transaction) = (connection.peer, connection.transaction);
            let rej = Rej {
                local_id: id,
                remote_id,
                about: About::Other,
                reason: RejectReason::CONSUMER,
                private_data,
            };
            self.out.push_back(Output::Send {
                to,
                mad: Mad { transaction, message: Message::Rej(Box::new(rej)) },
            });
            self.answered(id);
            return self.disconnect(now, id);
        }
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
        const VERB: &str = "rdma_disconnect";
        let transaction = self.new_transaction();
        let connection = self.connections.get_mut(&id).ok_or(invalid(VERB))?;
        match connection.state {
            State::Established => {
                connection.state = State::DreqSent;
                connection.transaction = transaction;
                let (remote_id, remote_qpn) =
                    (connection.remote_id, connection.remote_qpn.unwrap_or_default());
                self.send_and_repeat(
                    now,
                    id,
                    Message::Dreq(Dreq { local_id: id, remote_id, remote_qpn }),
                );
                Ok(())
            }
            State::DreqSent | State::TimeWait => Ok(()),
            State::ReqSent
            | State::RepRcvd
            | State::ReqRcvd
            | State::RepSent
            | State::Refused
            | State::Withdrawn => Err(invalid(VERB)),
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
                self.answered(id);
                // Cannot fail in this state.
                let _ = self.disconnect(now, id);
            }
            State::Withdrawn => self.forget(id),
            State::DreqSent | State::TimeWait | State::Refused => {}
        }
    }

    // What happens.

    /// A deadline has come.
    pub(super) fn on_timer(&mut self, now: u64) {
        while let Some(&(at, id)) = self.timers.first() {
            if at > now {
                return;
            }
            self.timers.pop_first();
            let Some(connection) = self.connections.get_mut(&id) else { continue };
            connection.deadline = None;
            let hurried = self.half_open.hurries(connection);
            let again = match connection.state {
                State::ReqSent => now < connection.give_up,
                State::DreqSent => connection.repeated + 1 < DISCONNECTS,
                _ => {
                    let retries =
                        connection.retries.min(if hurried { HURRIED_RETRIES } else { u8::MAX });
                    connection.repeated < retries
                }
            };
            match connection.state {
                State::ReqSent | State::RepSent | State::DreqSent if again => {
                    connection.repeated = connection.repeated.saturating_add(1);
                    let (peer, answers) = (connection.peer, connection.state == State::RepSent);
                    let at = repeat_at(now, id, connection, hurried);
                    self.set_deadline(id, Some(at));
                    // Who asked in the name of another has chosen how often that one is answered, and how soon.
                    if !answers || self.answers.take(now, peer) {
                        self.send_last(id);
                    }
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

    /// A packet of the connection has arrived at our queue pair: as good as the confirmation of our answer, which was
    /// overtaken or lost (IBTA 12.9.6).
    pub(super) fn on_traffic(&mut self, id: CommId, qpn: Qpn) {
        if self.in_state(id, State::RepSent).is_some_and(|connection| connection.local_qpn == qpn) {
            self.established(id);
        }
    }

    // Steps that several of these take.

    /// State of the connection that both numbers and the peer's GID name.
    pub(super) fn find(&self, from: Gid, id: CommId, remote_id: CommId) -> Option<State> {
        let connection = self.connections.get(&id)?;
        (connection.peer == from && connection.remote_id == remote_id && remote_id != 0)
            .then_some(connection.state)
    }

    pub(super) fn in_state(&mut self, id: CommId, state: State) -> Option<&mut Connection> {
        self.connections.get_mut(&id).filter(|connection| connection.state == state)
    }

    /// True if we asked for it.
    pub(super) fn is_active(&self, id: CommId) -> bool {
        let Some(connection) = self.connections.get(&id) else { return false };
        self.requests.get(&(connection.peer, connection.remote_id)) != Some(&id)
    }

    pub(super) fn established(&mut self, id: CommId) {
        self.set_deadline(id, None);
        self.completed(id);
        let Some(connection) = self.connections.get_mut(&id) else { return };
        connection.state = State::Established;
        if !std::mem::take(&mut connection.unseen) {
            return self.event(id, Event::Established);
        }
        let (Some(key), Some(peer)) = (connection.waiting_at, connection.params.clone()) else {
            return;
        };
        connection.owned = true;
        match self.listeners.get_mut(&key) {
            Some(listener) => listener.waiting += 1,
            // Its owner is gone, so the request is released when it is given out.
            None => connection.waiting_at = None,
        }
        self.out.push_back(Output::Request { listener: key, connection: id, peer });
    }

    pub(super) fn disconnected(&mut self, now: u64, id: CommId) {
        self.over(now, id, Event::Disconnected);
    }

    /// The connection is over, as `event` says.
    pub(super) fn over(&mut self, now: u64, id: CommId, event: Event) {
        self.completed(id);
        if let Some(connection) = self.connections.get_mut(&id) {
            connection.state = State::TimeWait;
        }
        self.set_deadline(id, Some(now.saturating_add(TIME_WAIT)));
        self.event(id, event);
    }

    /// The peer has taken its request back. Its queue pair may ask anew.
    pub(super) fn withdraw(&mut self, id: CommId) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        connection.state = State::Withdrawn;
        self.let_go_of_queue_pair(id);
    }

    /// The queue pair at the other end is in no connection with us, or not in this one.
    fn let_go_of_queue_pair(&mut self, id: CommId) {
        let Some(connection) = self.connections.get(&id) else { return };
        let Some(qpn) = connection.remote_qpn else { return };
        let queue_pair = (connection.peer, qpn);
        // It may be in another one by now.
        if self.queue_pairs.get(&queue_pair) == Some(&id) {
            self.queue_pairs.remove(&queue_pair);
        }
    }

    /// Rejects a request, and remembers that for as long as the peer may repeat it. Its queue pair may ask anew.
    fn refuse(
        &mut self,
        now: u64,
        id: CommId,
        reason: RejectReason,
        private_data: Private<MAX_REJECT_DATA>,
    ) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        connection.state = State::Refused;
        let remote_id = connection.remote_id;
        // It may have been asked to wait, and be told no when it repeats its request after that.
        let repeats = connection.response_timeout.saturating_mul(u64::from(connection.retries) + 1);
        let linger = SERVICE_TIMEOUT.nanoseconds().saturating_add(repeats);
        self.let_go_of_queue_pair(id);
        self.answered(id);
        self.completed(id);
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
    pub(super) fn give_up(&mut self, id: CommId, about: About, reason: RejectReason) {
        let Some(connection) = self.connections.get(&id) else { return };
        let remote_id = connection.remote_id;
        let rej = Rej { local_id: id, remote_id, about, reason, private_data: Private::empty() };
        self.send(id, Message::Rej(Box::new(rej)));
        self.forget(id);
    }

    pub(super) fn ask_for_time(&mut self, id: CommId, about: About) {
        let Some(connection) = self.connections.get(&id) else { return };
        let mra = Mra {
            local_id: id,
            remote_id: connection.remote_id,
            about,
            service_timeout: SERVICE_TIMEOUT,
        };
        let mad = Mad { transaction: connection.transaction, message: Message::Mra(mra) };
        self.out.push_back(Output::Send { to: connection.peer, mad });
    }

    /// A request waits no more.
    pub(super) fn answered(&mut self, id: CommId) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        let listener = connection.waiting_at.take().filter(|_| !connection.unseen);
        if let Some(listener) = listener.and_then(|key| self.listeners.get_mut(&key)) {
            listener.waiting -= 1;
        }
    }

    /// It is half open no more.
    fn completed(&mut self, id: CommId) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        if std::mem::take(&mut connection.half_open) {
            self.half_open.close(connection.peer);
        }
        if let Some(place) = connection.yielding.take() {
            self.yielding.remove(connection.peer, place);
        }
    }

    pub(super) fn event(&mut self, id: CommId, event: Event) {
        if self.connections.get(&id).is_some_and(|connection| connection.owned) {
            self.out.push_back(Output::Event { connection: id, event });
        }
    }

    fn send_and_repeat(&mut self, now: u64, id: CommId, message: Message) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        connection.repeated = 0;
        let hurried = self.half_open.hurries(connection);
        let at = repeat_at(now, id, connection, hurried);
        self.set_deadline(id, Some(at));
        self.send(id, message);
    }

    pub(super) fn send(&mut self, id: CommId, message: Message) {
        if let Some(connection) = self.connections.get_mut(&id) {
            connection.last = Some(message);
            self.send_last(id);
        }
    }

    pub(super) fn send_last(&mut self, id: CommId) {
        let Some(connection) = self.connections.get(&id) else { return };
        if let Some(message) = connection.last.clone() {
            let mad = Mad { transaction: connection.transaction, message };
            self.out.push_back(Output::Send { to: connection.peer, mad });
        }
    }

    pub(super) fn set_deadline(&mut self, id: CommId, deadline: Option<u64>) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        if let Some(old) = connection.deadline.take() {
            self.timers.remove(&(old, id));
        }
        connection.deadline = deadline;
        if let Some(at) = deadline {
            self.timers.insert((at, id));
        }
    }

    pub(super) fn forget(&mut self, id: CommId) {
        self.answered(id);
        self.completed(id);
        self.set_deadline(id, None);
        self.let_go_of_queue_pair(id);
        let Some(connection) = self.connections.remove(&id) else { return };
        if connection.reserved {
            self.reserved.remove(&connection.local_qpn);
            self.out.push_back(Output::Release(connection.local_qpn));
        }
        let request = (connection.peer, connection.remote_id);
        if self.requests.get(&request) == Some(&id) {
            self.requests.remove(&request);
        }
    }

    /// Number of a new connection: `drawn`, if it is free.
    pub(super) fn id_of_request(&mut self, drawn: Option<CommId>) -> CommId {
        let free = drawn.filter(|id| *id != 0 && !self.connections.contains_key(id));
        free.unwrap_or_else(|| self.new_id())
    }

    pub(super) fn new_id(&mut self) -> CommId {
        loop {
            self.issued = self.issued.wrapping_add(1);
            let id = drawn(self.secret, Draw::Connection(self.issued)) as u32;
            if id != 0 && !self.connections.contains_key(&id) {
                return id;
            }
        }
    }

    fn new_transaction(&mut self) -> u64 {
        self.transactions = self.transactions.wrapping_add(1);
        self.transactions
    }

    /// Returns the number of connections, including connections in TIMEWAIT.
    pub(super) fn connections(&self) -> usize {
        self.connections.len()
    }

    /// Connections, repeated requests, queue pairs and timers that it knows; for tests of what is left behind.
    #[cfg(test)]
    pub(super) fn sizes(&self) -> [usize; 4] {
        [self.connections.len(), self.requests.len(), self.queue_pairs.len(), self.timers.len()]
    }
}

/// What a random number is drawn for.
#[derive(Hash)]
enum Draw {
    Secret,
    Transactions,
    Answers,
    Connection(CommId),
}

/// A number made of `secret`, by SipHash: those that peers see tell nothing about the secret, nor about each other.
fn drawn(secret: u64, what: Draw) -> u64 {
    let mut hasher = DefaultHasher::new();
    (secret, what).hash(&mut hasher);
    hasher.finish()
}

/// When what a connection has sent is repeated, or given up; `hurried`: records of handshakes are scarce.
fn repeat_at(now: u64, id: CommId, connection: &Connection, hurried: bool) -> u64 {
    match connection.state {
        State::RepSent => {
            let asked = connection.response_timeout;
            let wait = match connection.yielding {
                _ if hurried => asked.min(HURRIED_TIMEOUT),
                // Forged requests would ask for answers in quick succession, until the answers to honest peers are too many.
                Some(_) => asked.max(HURRIED_TIMEOUT),
                None => asked,
            };
            now.saturating_add(wait)
        }
        State::ReqSent => {
            now.saturating_add(backoff(id, connection.repeated)).min(connection.give_up)
        }
        _ => now.saturating_add(backoff(id, connection.repeated)),
    }
}

/// The wait for an answer to what was repeated so often, less up to a quarter that differs between connections: those
/// that begin together do not repeat together.
pub(super) fn backoff(id: CommId, repeated: u8) -> u64 {
    let doublings = repeated.min(LONGEST_WAIT.0 - FIRST_WAIT.0);
    let wait = FIRST_WAIT.nanoseconds() << doublings;
    let spread =
        ((u64::from(id) << 8) | u64::from(repeated)).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
    wait - ((wait / 4 * spread) >> 32)
}

/// A time that a peer asks for, within [`TIMEOUTS`].
pub(super) fn bounded(timeout: CmTimeout) -> u64 {
    timeout.clamp(TIMEOUTS.0, TIMEOUTS.1).nanoseconds()
}

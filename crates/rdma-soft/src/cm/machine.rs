//! The connection manager protocol of one device (IBTA 12.9) as a pure state machine.
//!
//! The machine has no clock, lock or source of randomness.
//!
//! A message affects a connection only if it names both ids and comes from the peer's GID. Timeouts
//! that a peer requests are clamped to local bounds.
//!
//! ```text
//!   active                                                        passive
//!   REQ  service id, queue pair, PSN, timers, MTU, addresses ──▶  request to the listener
//!        ◀──  REP  queue pair, PSN      or      REJ  reason
//!   RTU  or the first packet of the connection               ──▶  established
//!   DREQ ──▶ or ◀──  either side disconnects; DREP answers
//! ```
//!
//! - REQ is retransmitted after 268 ms, then after twice the previous wait, up to 4.3 s. Each wait
//!   is shortened by up to a quarter, so that simultaneous connections do not retransmit in step. A
//!   peer that asks for time (MRA) gets it within the deadline. A "port unreachable" message that
//!   quotes the pending REQ ends it.
//! - DREQ is sent five times with the same waits.
//! - REP is retransmitted as the peer's request asks, at an interval of 1 ms to 4.3 s.
//! - A request proposes timers to the peer: an acknowledgement timeout of 1.07 s, because this
//!   process may wait for a processor, 6 retries, unlimited RNR retries, and 15 retransmissions of
//!   the REP, one each 1.1 s.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::hash::{Hash, Hasher};
use std::net::SocketAddr;
use std::sync::Arc;

use rdma_provider::VerbError;
use rdma_provider::cm_contract::{Admit, CmParams, CmPeer, MAX_REJECT_DATA};
use rdma_provider::types::{AckTimeout, Gid, Mtu, Psn, Qkey, Qpn, RejectReason};
use siphasher::sip::SipHasher13;

use super::connection::{Connection, State};
use super::limits::{Answers, Evictable, HalfOpen, SCARCE_RETRIES, SCARCE_TIMEOUT};
use super::message::{
    About, CmTimeout, CommId, Dreq, Mad, Message, Mra, PathFields, Private, Rej, Rep, Req, Rtu,
};
use super::sidr::Sidr;

/// The first retransmission timeout of a REQ or DREQ: 268 ms, far above scheduling delays. It
/// doubles up to [`LONGEST_WAIT`], so that many connections do not overload a slow peer.
pub(super) const FIRST_WAIT: CmTimeout = CmTimeout(16);
/// 4.3 s, as in the kernel's rdma_cm.
pub(super) const LONGEST_WAIT: CmTimeout = CmTimeout(20);
/// DREQ transmissions. An unreachable peer is detected after 6.2 to 8.3 s.
pub(super) const MAX_DREQS: u8 = 5;
/// The peer's retransmission timeout (1.1 s) and retry limit for a REP, as in the kernel's rdma_cm.
/// A program that prepares many queue pairs confirms late.
pub(super) const RESPONSE_TIMEOUT: CmTimeout = CmTimeout(18);
pub(super) const MAX_RETRIES: u8 = 15;
/// The service timeout in an MRA while the program decides: 4.3 s, then the peer retransmits.
const SERVICE_TIMEOUT: CmTimeout = CmTimeout(20);
/// The service timeout in an MRA when the backlog is full: 67 ms. A slow program with a backlog of
/// 16 accepts 1,000 connections in 4 s.
pub(super) const BUSY_TIMEOUT: CmTimeout = CmTimeout(14);
/// Bounds of the timeouts that peers request: at least 1 ms, to limit the load; at most 4.3 s, so
/// that state is not kept for hours.
const TIMEOUTS: (CmTimeout, CmTimeout) = (CmTimeout(8), CmTimeout(20));
/// Maximum number of rejections kept to answer duplicate REQs.
const MAX_REFUSED: usize = 1024;
/// The declared acknowledgement delay, as SoftRoCE's: 134 ms, longer than most scheduling delays.
const ACK_DELAY: CmTimeout = CmTimeout(15);
/// Twice the packet lifetime of 67 ms (IBTA 12.9.8.4), after which no packet is in flight.
const TIME_WAIT: u64 = 2 * CmTimeout(14).nanoseconds();
/// The acknowledgement timeout for the peer's queue pair: 1.07 s, at least twice the sum of
/// [`ACK_DELAY`] and two packet lifetimes (IBTA 12.7.34). Six retries outlast an outage of seconds.
pub(super) const PEER_ACK_TIMEOUT: AckTimeout = AckTimeout::from_code(18);
/// The local queue pair's default acknowledgement timeout, as in librdmacm.
const ACK_TIMEOUT: AckTimeout = AckTimeout::from_code(14);

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
    Request {
        listener: u64,
        connection: CommId,
        peer: CmPeer,
    },
    /// The reserved number is no longer needed.
    Release(Qpn),
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Event {
    Response(CmPeer),
    Established,
    Rejected(RejectReason, Vec<u8>),
    Unreachable,
    PortClosed,
    Disconnected,
    TimewaitExit,
    ServiceFound { peer: Gid, qpn: Qpn, qkey: Qkey, private_data: Vec<u8> },
}

#[derive(Debug)]
pub(super) struct Listener {
    pub(super) address: SocketAddr,
    pub(super) backlog: u32,
    /// Requests in the backlog: not answered yet, or auto-accepted and waiting for the program.
    pub(super) waiting: u32,
    pub(super) admit: Option<Arc<dyn Admit>>,
}

/// Random numbers for requests.
pub(super) trait Numbers {
    /// Returns a first sequence number that peers cannot predict.
    fn psn(&mut self) -> Option<Psn>;
    /// Returns an id for a connection that a peer requests. A peer that predicts it can confirm a
    /// REP that it did not receive.
    fn id(&mut self) -> Option<CommId>;
    /// Reserves an unpredictable number for a queue pair that is created later.
    fn reserve(&mut self) -> Option<Qpn>;
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Destination {
    pub(super) gid: Gid,
    pub(super) local: SocketAddr,
    pub(super) peer: SocketAddr,
    pub(super) mtu: Mtu,
    pub(super) pkey: u16,
}

/// The state of all connections. Its tables are trees, because a hash table keeps the memory of its
/// maximum number of entries.
#[derive(Debug)]
pub(super) struct Machine {
    pub(super) gid: Gid,
    guid: u64,
    pub(super) mtu: Mtu,
    /// Keeps connection ids unpredictable, see [`drawn`].
    secret: u64,
    issued: u32,
    transactions: u64,
    pub(super) connections: BTreeMap<CommId, Connection>,
    /// Peers' requests by the peer's id, to recognise duplicate REQs.
    pub(super) requests: BTreeMap<(Gid, CommId), CommId>,
    pub(super) queue_pairs: BTreeMap<(Gid, Qpn), CommId>,
    pub(super) listeners: BTreeMap<u64, Listener>,
    timers: BTreeSet<(u64, CommId)>,
    /// The latest rejections; some may be forgotten already.
    refused: VecDeque<CommId>,
    pub(super) half_open: HalfOpen,
    pub(super) evictable: Evictable,
    /// Connections whose queue pair is not created yet.
    pub(super) reserved: BTreeMap<Qpn, CommId>,
    pub(super) answers: Answers,
    pub(super) sidr: Sidr,
    pub(super) out: VecDeque<Output>,
}

pub(super) const fn invalid(verb: &'static str) -> VerbError {
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
            connections: BTreeMap::new(),
            requests: BTreeMap::new(),
            queue_pairs: BTreeMap::new(),
            listeners: BTreeMap::new(),
            timers: BTreeSet::new(),
            refused: VecDeque::new(),
            half_open: HalfOpen::default(),
            evictable: Evictable::default(),
            reserved: BTreeMap::new(),
            answers: Answers::new(drawn(seed, Draw::Answers)),
            sidr: Sidr::default(),
            out: VecDeque::new(),
        }
    }

    pub(super) fn next_output(&mut self) -> Option<Output> {
        self.out.pop_front()
    }

    /// Returns the time at which [`on_timer`](Self::on_timer) must be called.
    pub(super) fn deadline(&self) -> Option<u64> {
        let first = self.timers.first().map(|&(at, _)| at);
        first.into_iter().chain(self.sidr.deadline()).min()
    }

    pub(super) fn connection(&self, id: CommId) -> Option<&Connection> {
        self.connections.get(&id)
    }

    pub(super) fn listen(&mut self, listener: u64, address: SocketAddr, backlog: u32) {
        self.listeners.insert(listener, Listener { address, backlog, waiting: 0, admit: None });
    }

    /// Lets `admit` decide about the requests of a listener. False if there is no such listener.
    pub(super) fn answer(&mut self, listener: u64, admit: Arc<dyn Admit>) -> bool {
        let Some(listener) = self.listeners.get_mut(&listener) else { return false };
        listener.admit = Some(admit);
        true
    }

    pub(super) fn stop_listening(&mut self, listener: u64) {
        self.listeners.remove(&listener);
        self.sidr.stop_serving(listener);
    }

    /// Creates a connection and sends its REQ.
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
            pkey: to.pkey,
            local_gid: self.gid,
            remote_gid: to.gid,
            path: PathFields::PLAIN,
            ack_timeout: PEER_ACK_TIMEOUT,
            source: to.local,
            destination: to.peer.ip(),
            private_data,
        }));
        let connection = Connection {
            state: State::ReqSent,
            owned: true,
            listener: None,
            auto_accepted: false,
            evictable: None,
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
            pkey: to.pkey,
            path: PathFields::PLAIN,
            ack_timeout: ACK_TIMEOUT,
            response_timeout: RESPONSE_TIMEOUT.nanoseconds(),
            retries: MAX_RETRIES,
            retransmissions: 0,
            gives_up_at: now
                .saturating_add(u64::try_from(params.timeout.as_nanos()).unwrap_or(u64::MAX)),
            deadline: None,
            last: None,
            params: None,
            addresses: (to.local, to.peer),
        };
        self.connections.insert(id, connection);
        self.send_with_retries(now, id, request);
        Ok(id)
    }

    /// Sends the REQ again with the next smaller path MTU, because the peer's port has a smaller
    /// one. Neither the REQ nor the REP tells the active side the MTU of that port.
    pub(super) fn ask_for_smaller_mtu(&mut self, now: u64, id: CommId) {
        let transaction = self.new_transaction();
        let Some(connection) = self.in_state(id, State::ReqSent) else { return };
        let smaller = Mtu::ALL.into_iter().filter(|mtu| *mtu < connection.mtu).max();
        let (Some(mtu), Some(Message::Req(mut request))) = (smaller, connection.last.take()) else {
            return;
        };
        connection.mtu = mtu;
        connection.transaction = transaction;
        request.mtu = mtu;
        self.send_with_retries(now, id, Message::Req(request));
    }

    /// Accepts a request: sends a REP, or lets the program take an auto-accepted connection.
    pub(super) fn accept(
        &mut self,
        now: u64,
        id: CommId,
        params: &CmParams<'_>,
    ) -> Result<(), VerbError> {
        const VERB: &str = "rdma_accept";
        if self
            .in_state(id, State::Established)
            .is_some_and(|connection| connection.listener.is_some())
        {
            // The peer has the REP and has confirmed it.
            self.leave_backlog(id);
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
        self.leave_backlog(id);
        self.send_with_retries(now, id, response);
        Ok(())
    }

    /// Rejects a request with a REJ, or disconnects an auto-accepted connection.
    pub(super) fn reject(
        &mut self,
        now: u64,
        id: CommId,
        private_data: &[u8],
    ) -> Result<(), VerbError> {
        const VERB: &str = "rdma_reject";
        let private_data = Private::new(private_data).ok_or(invalid(VERB))?;
        if let Some(connection) = self.in_state(id, State::Established)
            && connection.listener.is_some()
        {
            // The peer considers the connection established. The REJ carries the reason; the DREQ
            // ends the connection even if the REJ is lost.
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
            self.leave_backlog(id);
            return self.disconnect(now, id);
        }
        self.in_state(id, State::ReqRcvd).ok_or(invalid(VERB))?;
        self.refuse(now, id, RejectReason::CONSUMER, private_data);
        Ok(())
    }

    /// Confirms a REP with an RTU.
    pub(super) fn establish(&mut self, id: CommId) -> Result<(), VerbError> {
        let connection = self.in_state(id, State::RepRcvd).ok_or(invalid("rdma_establish"))?;
        connection.state = State::Established;
        let confirmation = Message::Rtu(Rtu { local_id: id, remote_id: connection.remote_id });
        self.send(id, confirmation);
        Ok(())
    }

    /// Sends a DREQ.
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
                self.send_with_retries(
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

    /// Handles the drop of the program's id. No more events follow.
    pub(super) fn release(&mut self, now: u64, id: CommId) {
        if self.release_query(id) {
            return;
        }
        let Some(connection) = self.connections.get_mut(&id) else { return };
        connection.owned = false;
        match connection.state {
            State::ReqSent => self.abort(id, About::Req, RejectReason::TIMEOUT),
            State::RepRcvd => self.abort(id, About::Rep, RejectReason::CONSUMER),
            State::RepSent => self.abort(id, About::Other, RejectReason::CONSUMER),
            State::ReqRcvd => self.refuse(now, id, RejectReason::CONSUMER, Private::empty()),
            State::Established => {
                self.leave_backlog(id);
                // Cannot fail in this state.
                let _ = self.disconnect(now, id);
            }
            State::Withdrawn => self.forget(id),
            State::DreqSent | State::TimeWait | State::Refused => {}
        }
    }

    pub(super) fn on_timer(&mut self, now: u64) {
        self.on_query_timer(now);
        while let Some(&(at, id)) = self.timers.first() {
            if at > now {
                return;
            }
            self.timers.pop_first();
            let Some(connection) = self.connections.get_mut(&id) else { continue };
            connection.deadline = None;
            let scarce = self.half_open.is_scarce_for(connection);
            let again = match connection.state {
                State::ReqSent => now < connection.gives_up_at,
                State::DreqSent => connection.retransmissions + 1 < MAX_DREQS,
                _ => {
                    let retries =
                        connection.retries.min(if scarce { SCARCE_RETRIES } else { u8::MAX });
                    connection.retransmissions < retries
                }
            };
            match connection.state {
                State::ReqSent | State::RepSent | State::DreqSent if again => {
                    connection.retransmissions = connection.retransmissions.saturating_add(1);
                    let (peer, answers) = (connection.peer, connection.state == State::RepSent);
                    let at = retransmit_at(now, id, connection, scarce);
                    self.set_deadline(id, Some(at));
                    // Retransmissions count: the peer's address may be forged.
                    if !answers || self.answers.take(now, peer) {
                        self.send_last(id);
                    }
                }
                State::ReqSent => {
                    self.event(id, Event::Unreachable);
                    self.abort(id, About::Req, RejectReason::TIMEOUT);
                }
                State::RepSent => {
                    self.event(id, Event::Unreachable);
                    self.abort(id, About::Other, RejectReason::TIMEOUT);
                }
                State::DreqSent => self.disconnected(now, id),
                State::TimeWait => {
                    self.event(id, Event::TimewaitExit);
                    self.forget(id);
                }
                State::Refused => self.forget(id),
                State::RepRcvd | State::ReqRcvd | State::Established | State::Withdrawn => {}
            }
        }
    }

    /// Handles a packet of the connection at the local queue pair `qpn`. It confirms the REP like
    /// an RTU, which was lost or overtaken (IBTA 12.9.6).
    pub(super) fn on_traffic(&mut self, id: CommId, qpn: Qpn) {
        if self.in_state(id, State::RepSent).is_some_and(|connection| connection.local_qpn == qpn) {
            self.established(id);
        }
    }

    /// Returns the connection's state if both ids and the peer's GID match.
    pub(super) fn find(&self, from: Gid, id: CommId, remote_id: CommId) -> Option<State> {
        let connection = self.connections.get(&id)?;
        (connection.peer == from && connection.remote_id == remote_id && remote_id != 0)
            .then_some(connection.state)
    }

    pub(super) fn in_state(&mut self, id: CommId, state: State) -> Option<&mut Connection> {
        self.connections.get_mut(&id).filter(|connection| connection.state == state)
    }

    /// Returns true if this side sent the REQ.
    pub(super) fn is_active(&self, id: CommId) -> bool {
        let Some(connection) = self.connections.get(&id) else { return false };
        self.requests.get(&(connection.peer, connection.remote_id)) != Some(&id)
    }

    pub(super) fn established(&mut self, id: CommId) {
        self.set_deadline(id, None);
        self.close_half_open(id);
        let Some(connection) = self.connections.get_mut(&id) else { return };
        connection.state = State::Established;
        if !std::mem::take(&mut connection.auto_accepted) {
            return self.event(id, Event::Established);
        }
        let (Some(key), Some(peer)) = (connection.listener, connection.params.clone()) else {
            return;
        };
        connection.owned = true;
        match self.listeners.get_mut(&key) {
            Some(listener) => listener.waiting += 1,
            // The listener is gone: the manager will find no owner and release the connection.
            None => connection.listener = None,
        }
        self.out.push_back(Output::Request { listener: key, connection: id, peer });
    }

    pub(super) fn disconnected(&mut self, now: u64, id: CommId) {
        self.enter_timewait(now, id, Event::Disconnected);
    }

    /// Ends the connection with `event` and enters TIMEWAIT.
    pub(super) fn enter_timewait(&mut self, now: u64, id: CommId, event: Event) {
        self.close_half_open(id);
        if let Some(connection) = self.connections.get_mut(&id) {
            connection.state = State::TimeWait;
        }
        self.set_deadline(id, Some(now.saturating_add(TIME_WAIT)));
        self.event(id, event);
    }

    /// Records that the peer has withdrawn its request. Its queue pair may send a new REQ.
    pub(super) fn withdraw(&mut self, id: CommId) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        connection.state = State::Withdrawn;
        self.unmap_queue_pair(id);
    }

    fn unmap_queue_pair(&mut self, id: CommId) {
        let Some(connection) = self.connections.get(&id) else { return };
        let Some(qpn) = connection.remote_qpn else { return };
        let queue_pair = (connection.peer, qpn);
        // The queue pair may belong to a newer connection.
        if self.queue_pairs.get(&queue_pair) == Some(&id) {
            self.queue_pairs.remove(&queue_pair);
        }
    }

    /// Rejects a request and keeps the REJ while the peer may retransmit the REQ. The peer's queue
    /// pair may send a new REQ at once.
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
        // After an MRA, the peer retransmits only when the service timeout has expired.
        let repeats = connection.response_timeout.saturating_mul(u64::from(connection.retries) + 1);
        let linger = SERVICE_TIMEOUT.nanoseconds().saturating_add(repeats);
        self.unmap_queue_pair(id);
        self.leave_backlog(id);
        self.close_half_open(id);
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

    /// Sends a REJ to the peer and forgets the connection.
    pub(super) fn abort(&mut self, id: CommId, about: About, reason: RejectReason) {
        let Some(connection) = self.connections.get(&id) else { return };
        let remote_id = connection.remote_id;
        let rej = Rej { local_id: id, remote_id, about, reason, private_data: Private::empty() };
        self.send(id, Message::Rej(Box::new(rej)));
        self.forget(id);
    }

    pub(super) fn send_mra(&mut self, id: CommId, about: About) {
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

    pub(super) fn leave_backlog(&mut self, id: CommId) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        let listener = connection.listener.take().filter(|_| !connection.auto_accepted);
        if let Some(listener) = listener.and_then(|key| self.listeners.get_mut(&key)) {
            listener.waiting -= 1;
        }
    }

    fn close_half_open(&mut self, id: CommId) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        if std::mem::take(&mut connection.half_open) {
            self.half_open.close(connection.peer);
        }
        if let Some(position) = connection.evictable.take() {
            self.evictable.remove(connection.peer, position);
        }
    }

    pub(super) fn event(&mut self, id: CommId, event: Event) {
        if self.connections.get(&id).is_some_and(|connection| connection.owned) {
            self.out.push_back(Output::Event { connection: id, event });
        }
    }

    fn send_with_retries(&mut self, now: u64, id: CommId, message: Message) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        connection.retransmissions = 0;
        let scarce = self.half_open.is_scarce_for(connection);
        let at = retransmit_at(now, id, connection, scarce);
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
        self.leave_backlog(id);
        self.close_half_open(id);
        self.set_deadline(id, None);
        self.unmap_queue_pair(id);
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

    /// Returns `drawn` as the id of a new connection if it is free, else another id.
    pub(super) fn new_id_from(&mut self, drawn: Option<CommId>) -> CommId {
        let free = drawn.filter(|id| *id != 0 && !self.is_used(*id));
        free.unwrap_or_else(|| self.new_id())
    }

    pub(super) fn new_id(&mut self) -> CommId {
        loop {
            self.issued = self.issued.wrapping_add(1);
            let id = drawn(self.secret, Draw::Connection(self.issued)) as u32;
            if id != 0 && !self.is_used(id) {
                return id;
            }
        }
    }

    fn is_used(&self, id: CommId) -> bool {
        self.connections.contains_key(&id) || self.sidr.contains(id)
    }

    pub(super) fn new_transaction(&mut self) -> u64 {
        self.transactions = self.transactions.wrapping_add(1);
        self.transactions
    }

    /// Returns the number of connections, including connections in TIMEWAIT.
    pub(super) fn connections(&self) -> usize {
        self.connections.len()
    }

    #[cfg(test)]
    pub(super) fn sizes(&self) -> [usize; 4] {
        [self.connections.len(), self.requests.len(), self.queue_pairs.len(), self.timers.len()]
    }
}

#[derive(Hash)]
enum Draw {
    Secret,
    Transactions,
    Answers,
    Connection(CommId),
}

/// Derives a number from `secret`. The results reveal neither the secret nor one another.
fn drawn(secret: u64, what: Draw) -> u64 {
    let mut hasher = SipHasher13::new_with_keys(secret, 0);
    what.hash(&mut hasher);
    hasher.finish()
}

/// Returns the time of the next retransmission or of failure. `scarce`: few records are free.
fn retransmit_at(now: u64, id: CommId, connection: &Connection, scarce: bool) -> u64 {
    match connection.state {
        State::RepSent => {
            let asked = connection.response_timeout;
            let wait = match connection.evictable {
                _ if scarce => asked.min(SCARCE_TIMEOUT),
                // Otherwise forged requests could use up the limit for honest peers' answers.
                Some(_) => asked.max(SCARCE_TIMEOUT),
                None => asked,
            };
            now.saturating_add(wait)
        }
        State::ReqSent => {
            now.saturating_add(backoff(id, connection.retransmissions)).min(connection.gives_up_at)
        }
        _ => now.saturating_add(backoff(id, connection.retransmissions)),
    }
}

/// Returns the retransmission timeout, less up to a quarter that depends on the connection, so that
/// simultaneous requests do not retransmit in step.
pub(super) fn backoff(id: CommId, retransmissions: u8) -> u64 {
    let doublings = retransmissions.min(LONGEST_WAIT.0 - FIRST_WAIT.0);
    let wait = FIRST_WAIT.nanoseconds() << doublings;
    let spread = ((u64::from(id) << 8) | u64::from(retransmissions))
        .wrapping_mul(0x9e37_79b9_7f4a_7c15)
        >> 32;
    wait - ((wait / 4 * spread) >> 32)
}

pub(super) fn bounded(timeout: CmTimeout) -> u64 {
    timeout.clamp(TIMEOUTS.0, TIMEOUTS.1).nanoseconds()
}

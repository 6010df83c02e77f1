//! The state machine of a DC target, which has a responder per session.
//!
//! Without clock, thread or lock. Packets arrive by [`on_request`](Target::on_request); replies are
//! taken by [`next_reply`](Target::next_reply). An error in a session affects only that session.

use std::collections::VecDeque;

use rdma_provider::types::{DcKey, Gid, QpState, Qpn, Transport};

use crate::memory::dma::{Gather, Payload};
use crate::memory::keys::Keys;
use crate::roce::ip_fields::Origin;
use crate::roce::packet::{Aeth, Body, Nak, Packet, Syndrome};
use crate::roce::partition::may_communicate;
use crate::roce::responder::{ReceiveConfig, ReceiveWqe, Receiver, Responder};

use super::header::Header;
use super::sessions::{Session, SessionKey, Sessions};

pub(crate) trait Environment: Receiver {
    /// Returns the receive of an incomplete message to the shared queue.
    fn return_receive(&mut self, receive: &mut ReceiveWqe);
    fn now(&mut self) -> u64;
    /// Draws a number that initiators cannot predict.
    fn random(&mut self) -> Option<u64>;
}

/// Counters of a DC target.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct TargetCounters {
    /// Packets received.
    pub packets: u64,
    /// Sessions created.
    pub sessions: u64,
    /// Sessions that exist now.
    pub open: u64,
    /// Silent sessions evicted in favour of new ones.
    pub evicted: u64,
    /// Sessions refused because the table was full. Their initiators retry.
    pub full: u64,
    /// Sessions refused for a wrong key or an MTU larger than the target's.
    pub refused: u64,
    /// Packets of sessions that do not exist.
    pub gone: u64,
    /// Packets dropped without a response.
    pub dropped: u64,
}

pub(crate) type Framed = (Packet, Header);

/// The effect of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    Nothing,
    /// A packet for the sender.
    Answer(Framed),
    /// This session may have replies.
    Session(SessionKey),
}

#[derive(Debug)]
pub(crate) struct Target {
    /// The responders' configuration, except for their peers.
    pub(crate) config: ReceiveConfig,
    key: DcKey,
    state: QpState,
    sessions: Sessions,
    /// Sessions with unsent replies.
    due: VecDeque<SessionKey>,
    counters: TargetCounters,
}

impl Target {
    pub(crate) fn new(config: ReceiveConfig, key: DcKey, limit: usize) -> Self {
        Self {
            config,
            key,
            state: QpState::Reset,
            sessions: Sessions::new(limit),
            due: VecDeque::new(),
            counters: TargetCounters::default(),
        }
    }

    pub(crate) const fn state(&self) -> QpState {
        self.state
    }

    pub(crate) fn counters(&self) -> TargetCounters {
        TargetCounters { open: self.sessions.len() as u64, ..self.counters }
    }

    /// Changes the state. Sessions exist only in RTR.
    pub(crate) fn set_state(&mut self, state: QpState, out: &mut impl Environment) {
        self.state = state;
        if state != QpState::Rtr {
            self.due.clear();
            for session in self.sessions.drain() {
                abandon(session, out);
            }
        }
    }

    pub(crate) fn on_request(
        &mut self,
        (packet, header): (&Packet, &Header),
        source: Gid,
        payload: &Payload<'_, '_>,
        keys: &Keys,
        out: &mut impl Environment,
    ) -> Outcome {
        self.counters.packets += 1;
        let key = SessionKey {
            gid: source,
            source: header.source,
            incarnation: header.session.incarnation,
        };
        if self.state != QpState::Rtr {
            self.counters.dropped += 1;
            return Outcome::Nothing;
        }
        if !may_communicate(self.config.pkey, packet.pkey) {
            self.counters.dropped += 1;
            out.count_bad_pkey();
            return Outcome::Nothing;
        }
        match packet.body {
            Body::Open { key: claimed, mtu } => {
                if claimed != self.key {
                    // At debug level: any sender can cause it at any rate.
                    rdma_provider::debug!(
                        dct = %self.config.qpn,
                        %source,
                        initiator = %header.source,
                        "refused DC session: wrong access key"
                    );
                    self.counters.refused += 1;
                    return self.refuse(packet, header, Syndrome::Nak(Nak::RemoteAccess));
                }
                if mtu > self.config.mtu {
                    self.counters.refused += 1;
                    return self.refuse(packet, header, Syndrome::Nak(Nak::InvalidRequest));
                }
                let config =
                    ReceiveConfig { mtu, peer: header.source, peer_gid: source, ..self.config };
                return self.on_open(packet, header, key, config, out);
            }
            Body::Close => {
                let is_this = |session: &mut Session| {
                    (session.number, session.cookie) == (header.session, header.cookie)
                };
                if self.sessions.get_mut(&key).is_some_and(is_this) {
                    self.remove(&key, out);
                } else {
                    self.counters.dropped += 1;
                }
                return Outcome::Nothing;
            }
            _ => {}
        }
        match self.sessions.get_mut(&key) {
            Some(session)
                if session.number == header.session && session.cookie == header.cookie =>
            {
                session.used = out.now();
                let packet = Packet { transport: Transport::Rc, ..*packet };
                let origin = Origin { gid: source, ..Origin::default() };
                session.responder.on_request(&packet, origin, payload, keys, out);
                if session.responder.has_replies() {
                    Outcome::Session(key)
                } else {
                    Outcome::Nothing
                }
            }
            // The initiator has a later session and does not wait for an answer.
            Some(session) if session.number.count > header.session.count => {
                self.counters.dropped += 1;
                Outcome::Nothing
            }
            _ => {
                self.counters.gone += 1;
                self.answer(packet, header, header.cookie, Body::Gone)
            }
        }
    }

    fn on_open(
        &mut self,
        packet: &Packet,
        header: &Header,
        key: SessionKey,
        config: ReceiveConfig,
        out: &mut impl Environment,
    ) -> Outcome {
        let now = out.now();
        match self.sessions.get_mut(&key) {
            Some(session) if session.number == header.session => {
                session.used = now;
                let cookie = session.cookie;
                return self.answer(packet, header, cookie, Body::Accept);
            }
            Some(session) if session.number.count > header.session.count => {
                self.counters.dropped += 1;
                return Outcome::Nothing;
            }
            Some(_) => self.remove(&key, out),
            None => {}
        }
        if self.sessions.is_full() {
            let Some(silent) = self.sessions.silent(now) else {
                self.counters.full += 1;
                return self.refuse(
                    packet,
                    header,
                    Syndrome::RnrNak(self.config.min_rnr_timer.code()),
                );
            };
            self.counters.evicted += 1;
            self.remove(&silent, out);
        }
        // Without an answer the initiator retransmits.
        let Some(random) = out.random() else { return Outcome::Nothing };
        let cookie = random as u32;
        let mut responder = Responder::new(config);
        responder.start(packet.psn.add(1));
        responder.set_state(QpState::Rts, out);
        self.sessions.insert(
            key,
            Session { number: header.session, cookie, responder, used: now, due: false },
        );
        self.counters.sessions += 1;
        self.answer(packet, header, cookie, Body::Accept)
    }

    fn remove(&mut self, key: &SessionKey, out: &mut impl Environment) {
        if let Some(session) = self.sessions.remove(key) {
            if session.due {
                self.due.retain(|due| due != key);
            }
            abandon(session, out);
        }
    }

    fn refuse(&self, packet: &Packet, header: &Header, syndrome: Syndrome) -> Outcome {
        self.answer(packet, header, 0, Body::Acknowledge(Aeth { syndrome, msn: 0 }))
    }

    fn answer(&self, packet: &Packet, header: &Header, cookie: u32, body: Body) -> Outcome {
        let answer = Packet::dc_control(self.config.pkey, header.source, packet.psn, body);
        Outcome::Answer((
            answer,
            Header { source: self.config.qpn, session: header.session, cookie },
        ))
    }

    /// Returns a session's next reply. Its payload is in `gather`, which must be empty.
    pub(crate) fn next_reply<'k>(
        &mut self,
        key: &SessionKey,
        keys: &'k Keys,
        gather: &mut Gather<'k>,
        out: &mut impl Environment,
    ) -> Option<Framed> {
        let session = self.sessions.get_mut(key)?;
        let reply = session.responder.next_reply(keys, gather, out)?;
        let header =
            Header { source: self.config.qpn, session: session.number, cookie: session.cookie };
        Some((reply, header))
    }

    /// Queues a session that has replies to send.
    pub(crate) fn put_due(&mut self, key: SessionKey) {
        if let Some(session) = self.sessions.get_mut(&key)
            && !std::mem::replace(&mut session.due, true)
        {
            self.due.push_back(key);
        }
    }

    pub(crate) fn take_due(&mut self) -> Option<SessionKey> {
        let key = self.due.pop_front()?;
        if let Some(session) = self.sessions.get_mut(&key) {
            session.due = false;
        }
        Some(key)
    }
}

/// Ends a session and returns the receive of its incomplete message.
fn abandon(mut session: Session, out: &mut impl Environment) {
    if let Some(receive) = session.responder.take_held_receive() {
        out.return_receive(receive);
    }
}

impl SessionKey {
    pub(crate) const fn new(gid: Gid, source: Qpn, incarnation: u32) -> Self {
        Self { gid, source, incarnation }
    }
}

//! Initiator of dynamic connections: the target that the requester faces now, and how it turns to another.
//!
//! One target at a time. A work request for another one waits until all before it are acknowledged; then the session with
//! the old target is closed, without waiting for anybody, and one with the new target is opened, which takes a round trip:
//!
//! ```text
//!  Closed ── OPEN ──▶ Opening ── ACCEPT ──▶ Open ── CLOSE ──▶ Closed
//! ```
//!
//! OPEN takes a sequence number, the one before the first request. So it is sent again, waits for a target that is not ready,
//! and fails, as a request does.

use rdma_provider::types::{DcKey, Gid, Psn, QpState, WcStatus};

use crate::dc::{Header, SessionNumber};
use crate::device::dma::Payload;
use crate::device::keys::Keys;
use crate::roce::packet::{Body, Packet};

use super::{Destination, Outgoing, Requester, SendCompletions, SendConfig, Source};

/// How long nothing is started before the next message opens a new session, in nanoseconds. A target may forget one that
/// is silent for ten times as long.
const PAUSE: u64 = 1_000_000_000;

/// What becomes of the work request at the cursor.
pub(super) enum Facing {
    /// It faces its target: go on.
    Target,
    /// It has to wait.
    Nobody,
    /// This is to be sent first.
    Turning(Outgoing),
}

/// Where the session with the target is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Closed,
    /// `sent`: and nothing has been heard that makes it necessary to send it again.
    Opening {
        sent: bool,
    },
    Open,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Initiator {
    target: Destination,
    session: SessionNumber,
    cookie: u32,
    phase: Phase,
    /// When a message was started last.
    used: u64,
    /// One was, in this session.
    begun: bool,
}

impl Initiator {
    /// One that faces nobody. What is random in `incarnation` tells it from others that had its number before.
    pub(super) fn new(incarnation: u32) -> Self {
        Self {
            target: Destination::default(),
            session: SessionNumber { incarnation, count: 0 },
            cookie: 0,
            phase: Phase::Closed,
            used: 0,
            begun: false,
        }
    }

    /// As it is when its queue pair has been reset: sessions count on, so that late packets of old ones belong to none.
    pub(super) fn renewed(mut self: Box<Self>) -> Box<Self> {
        self.phase = Phase::Closed;
        self.cookie = 0;
        self
    }

    /// What was sent goes out again.
    pub(super) fn go_back(&mut self) {
        if let Phase::Opening { sent } = &mut self.phase {
            *sent = false;
        }
    }

    /// True if OPEN is to be sent once more.
    pub(super) fn opens_again(&self) -> bool {
        self.phase == Phase::Opening { sent: false }
    }

    /// True if the target has just accepted the session: no message has been started in it.
    pub(super) fn begins(&self) -> bool {
        self.phase == Phase::Open && !self.begun
    }

    /// A packet of the session besides those of its requests.
    fn packet(&self, psn: Psn, body: Body) -> Outgoing {
        let packet = Packet::of_dc(self.target.qpn, psn, body);
        Outgoing { packet, source: Source::Gathered, to: self.target }
    }
}

impl Requester {
    /// An initiator of dynamic connections. It speaks the protocol of RC with its targets, which is what
    /// `config.transport` says.
    pub(crate) fn initiator(config: SendConfig, incarnation: u32) -> Self {
        Self { initiator: Some(Box::new(Initiator::new(incarnation))), ..Self::new(config) }
    }

    /// The target of what it sends next, if it is free to turn to another.
    pub(crate) fn turns_to(&self) -> Option<Destination> {
        let free = self.unacked == self.next_psn;
        self.queue.front().filter(|_| free).map(|head| head.to)
    }

    /// What packets sent now have besides those of RC; of an initiator.
    pub(crate) fn header(&self) -> Option<Header> {
        let initiator = self.initiator.as_ref()?;
        Some(Header {
            source: self.config.qpn,
            session: initiator.session,
            cookie: initiator.cookie,
        })
    }

    /// True if an answer belongs to the session that it has now.
    fn is_facing(&self, source: Gid, header: &Header) -> bool {
        self.initiator.as_ref().is_some_and(|initiator| {
            let cookie = initiator.phase != Phase::Open || header.cookie == initiator.cookie;
            cookie
                && initiator.phase != Phase::Closed
                && initiator.session == header.session
                && initiator.target.qpn == header.source
                && initiator.target.gid == source
        })
    }

    /// Sees to it that the work request at the cursor, which is not a local one, has a session with its target.
    pub(super) fn face(&mut self, out: &mut impl SendCompletions) -> Facing {
        let (Some(initiator), Some(head)) = (&mut self.initiator, self.queue.get(self.cursor))
        else {
            return Facing::Target;
        };
        if head.started {
            return Facing::Target;
        }
        let to = head.to;
        // Then it is the oldest in the queue.
        let idle = self.unacked == self.next_psn;
        match initiator.phase {
            Phase::Opening { sent: true } => return Facing::Nobody,
            Phase::Opening { sent: false } => return self.open_again(),
            Phase::Open => {
                let now = out.now();
                let fresh = now.saturating_sub(initiator.used) < PAUSE;
                if initiator.target == to && (fresh || !idle || initiator.begins()) {
                    (initiator.used, initiator.begun) = (now, true);
                    return Facing::Target;
                }
                if !idle {
                    return Facing::Nobody;
                }
                if let Some(close) = self.close_session() {
                    return Facing::Turning(close);
                }
            }
            Phase::Closed => {}
        }
        match (to.key, out.random()) {
            (Some(key), Some(random)) => self.open_session(to, key, random, out.now()),
            // The system has no random numbers, and a session that can be foreseen is none.
            _ => {
                self.refuse(WcStatus::LOC_QP_OP_ERR, out);
                Facing::Nobody
            }
        }
    }

    fn open_session(&mut self, to: Destination, key: DcKey, random: u64, now: u64) -> Facing {
        let first = Psn::new(random as u32);
        self.start(first);
        self.next_psn = first.add(1);
        self.config.dest = to.qpn;
        self.since_ack_request = 0;
        self.counters.sessions += 1;
        if let Some(initiator) = &mut self.initiator {
            tracing::trace!(qpn = %self.config.qpn, target = %to.qpn, gid = %to.gid, "turns to a target");
            initiator.target = Destination { key: Some(key), ..to };
            initiator.session = initiator.session.next((random >> 32) as u32);
            initiator.cookie = 0;
            (initiator.used, initiator.begun) = (now, false);
            initiator.phase = Phase::Opening { sent: false };
        }
        self.open_again()
    }

    /// OPEN, for the first time or once more.
    fn open_again(&mut self) -> Facing {
        let Some(initiator) = &mut self.initiator else { return Facing::Nobody };
        let Some(key) = initiator.target.key else { return Facing::Nobody };
        initiator.phase = Phase::Opening { sent: true };
        let open = initiator.packet(self.unacked, Body::Open { key, mtu: self.config.mtu });
        self.counters.packets += 1;
        if self.sent_end == self.next_psn {
            self.counters.retransmitted += 1;
        }
        self.sent_end = self.next_psn;
        Facing::Turning(open)
    }

    /// What tells the target that the session is over, if there is one. Nobody waits for it to arrive.
    pub(crate) fn close_session(&mut self) -> Option<Outgoing> {
        let psn = self.next_psn;
        let initiator =
            self.initiator.as_mut().filter(|initiator| initiator.phase == Phase::Open)?;
        initiator.phase = Phase::Closed;
        self.counters.packets += 1;
        Some(initiator.packet(psn, Body::Close))
    }

    /// What a target answers to an initiator.
    pub(crate) fn on_answer(
        &mut self,
        (packet, header): (&Packet, &Header),
        source: Gid,
        payload: &Payload<'_, '_>,
        keys: &Keys,
        out: &mut impl SendCompletions,
    ) {
        if !self.is_facing(source, header) {
            self.counters.stale += 1;
            return;
        }
        match packet.body {
            Body::Accept if packet.psn == self.unacked => self.on_accept(header.cookie),
            Body::Gone => self.on_gone(out),
            // Another acceptance is found stale there.
            _ => self.on_response(packet, payload, keys, out),
        }
    }

    /// The target has made the session.
    fn on_accept(&mut self, cookie: u32) {
        match &mut self.initiator {
            Some(initiator)
                if self.state == QpState::Rts
                    && matches!(initiator.phase, Phase::Opening { .. }) =>
            {
                initiator.phase = Phase::Open;
                initiator.cookie = cookie;
                self.counters.responses += 1;
                self.unacked = self.next_psn;
                self.on_progress();
            }
            _ => self.counters.stale += 1,
        }
    }

    /// The target has no such session any more. What was sent in it may have been executed or not.
    fn on_gone(&mut self, out: &mut impl SendCompletions) {
        match &mut self.initiator {
            Some(initiator) if self.state == QpState::Rts && initiator.phase == Phase::Open => {
                initiator.phase = Phase::Closed;
                self.counters.responses += 1;
                if self.unacked != self.next_psn {
                    self.fail(WcStatus::REM_OP_ERR, out);
                }
            }
            _ => self.counters.stale += 1,
        }
    }
}

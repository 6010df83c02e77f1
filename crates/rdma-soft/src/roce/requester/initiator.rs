//! The DC initiator: sessions with one target at a time.
//!
//! A work request for another target waits until all earlier ones are acknowledged. The initiator
//! then closes the session, without a response, and opens one with the new target, which takes a
//! round trip:
//!
//! ```text
//!  Closed ── OPEN ──▶ Opening ── ACCEPT ──▶ Open ── CLOSE ──▶ Closed
//! ```
//!
//! OPEN uses the PSN before the first request, so that retransmission, RNR and failure work as for
//! requests.

use rdma_provider::types::{DcKey, Gid, Psn, QpState, WcStatus};

use crate::dc::{Header, SessionNumber};
use crate::memory::dma::Payload;
use crate::memory::keys::Keys;
use crate::roce::packet::{Body, Packet};
use crate::roce::partition::may_communicate;

use super::{Destination, Outgoing, Requester, SendCompletions, SendConfig, Source};

/// Nanoseconds without a new message after which the next one opens a new session. A target may
/// drop a session that is idle ten times as long.
const SESSION_IDLE: u64 = 1_000_000_000;

/// The next step for the work request at the cursor.
pub(super) enum SessionStep {
    Ready,
    Blocked,
    /// This packet precedes it.
    Send(Outgoing),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Closed,
    /// `sent` is false if OPEN must be sent or retransmitted.
    Opening {
        sent: bool,
    },
    Open,
}

/// The session of a DC initiator, see the [module](self).
#[derive(Debug)]
pub(super) struct Initiator {
    target: Destination,
    session: SessionNumber,
    cookie: u32,
    phase: Phase,
    /// Time of the last message.
    last_start: u64,
    /// A message started in this session.
    has_started: bool,
}

impl Initiator {
    /// Creates an initiator without session. The random bits of `incarnation` distinguish it from
    /// earlier ones with its number.
    pub(super) fn new(incarnation: u32) -> Self {
        Self {
            target: Destination::default(),
            session: SessionNumber { incarnation, count: 0 },
            cookie: 0,
            phase: Phase::Closed,
            last_start: 0,
            has_started: false,
        }
    }

    /// Resets the initiator. The session count continues: late packets match no session.
    pub(super) fn into_reset(mut self: Box<Self>) -> Box<Self> {
        self.phase = Phase::Closed;
        self.cookie = 0;
        self
    }

    pub(super) fn resend_open(&mut self) {
        if let Phase::Opening { sent } = &mut self.phase {
            *sent = false;
        }
    }

    pub(super) fn must_resend_open(&self) -> bool {
        self.phase == Phase::Opening { sent: false }
    }

    /// Returns whether the session is open and no message has started in it.
    pub(super) fn is_unused(&self) -> bool {
        self.phase == Phase::Open && !self.has_started
    }

    fn packet(&self, pkey: u16, psn: Psn, body: Body) -> Outgoing {
        let packet = Packet::dc_control(pkey, self.target.qpn, psn, body);
        Outgoing { packet, source: Source::Gathered, to: self.target }
    }
}

impl Requester {
    /// Creates a DC initiator, whose `config.transport` is RC: it uses that protocol with targets.
    pub(crate) fn initiator(config: SendConfig, incarnation: u32) -> Self {
        Self { initiator: Some(Box::new(Initiator::new(incarnation))), ..Self::new(config) }
    }

    /// Returns the next target if nothing is outstanding.
    pub(crate) fn next_target(&self) -> Option<Destination> {
        let free = self.unacked == self.next_psn;
        self.queue.front().filter(|_| free).map(|head| head.to)
    }

    /// Returns the DC header of packets, if this is a DC initiator.
    pub(crate) fn header(&self) -> Option<Header> {
        let initiator = self.initiator.as_ref()?;
        Some(Header {
            source: self.config.qpn,
            session: initiator.session,
            cookie: initiator.cookie,
        })
    }

    fn is_current_session(&self, source: Gid, header: &Header) -> bool {
        self.initiator.as_ref().is_some_and(|initiator| {
            let cookie = initiator.phase != Phase::Open || header.cookie == initiator.cookie;
            cookie
                && initiator.phase != Phase::Closed
                && initiator.session == header.session
                && initiator.target.qpn == header.source
                && initiator.target.gid == source
        })
    }

    /// Establishes the session for the work request at the cursor, which is not local.
    pub(super) fn prepare_session(&mut self, out: &mut impl SendCompletions) -> SessionStep {
        let (Some(initiator), Some(head)) = (&mut self.initiator, self.queue.get(self.cursor))
        else {
            return SessionStep::Ready;
        };
        if head.started {
            return SessionStep::Ready;
        }
        let to = head.to;
        // If so, it is the oldest in the queue.
        let idle = self.unacked == self.next_psn;
        match initiator.phase {
            Phase::Opening { sent: true } => return SessionStep::Blocked,
            Phase::Opening { sent: false } => return self.send_open(),
            Phase::Open => {
                let now = out.now();
                let fresh = now.saturating_sub(initiator.last_start) < SESSION_IDLE;
                if initiator.target == to && (fresh || !idle || initiator.is_unused()) {
                    (initiator.last_start, initiator.has_started) = (now, true);
                    return SessionStep::Ready;
                }
                if !idle {
                    return SessionStep::Blocked;
                }
                if let Some(close) = self.close_session() {
                    return SessionStep::Send(close);
                }
            }
            Phase::Closed => {}
        }
        match (to.key, out.random()) {
            (Some(key), Some(random)) => self.open_session(to, key, random, out.now()),
            // Without random numbers, the session would be predictable.
            _ => {
                self.refuse(WcStatus::LOC_QP_OP_ERR, out);
                SessionStep::Blocked
            }
        }
    }

    fn open_session(&mut self, to: Destination, key: DcKey, random: u64, now: u64) -> SessionStep {
        let first = Psn::new(random as u32);
        self.start(first);
        self.next_psn = first.add(1);
        self.config.dest = to.qpn;
        self.since_ack_request = 0;
        self.counters.sessions += 1;
        if let Some(initiator) = &mut self.initiator {
            rdma_provider::trace!(
                qpn = %self.config.qpn,
                target = %to.qpn,
                gid = %to.gid,
                "opens DC session"
            );
            initiator.target = Destination { key: Some(key), ..to };
            initiator.session = initiator.session.next((random >> 32) as u32);
            initiator.cookie = 0;
            (initiator.last_start, initiator.has_started) = (now, false);
            initiator.phase = Phase::Opening { sent: false };
        }
        self.send_open()
    }

    fn send_open(&mut self) -> SessionStep {
        let Some(initiator) = &mut self.initiator else { return SessionStep::Blocked };
        let Some(key) = initiator.target.key else { return SessionStep::Blocked };
        initiator.phase = Phase::Opening { sent: true };
        let body = Body::Open { key, mtu: self.config.mtu };
        let open = initiator.packet(self.config.pkey, self.unacked, body);
        self.counters.packets += 1;
        if self.sent_end == self.next_psn {
            self.counters.retransmitted += 1;
        }
        self.sent_end = self.next_psn;
        SessionStep::Send(open)
    }

    /// Closes an open session and returns CLOSE, which has no response.
    pub(crate) fn close_session(&mut self) -> Option<Outgoing> {
        let psn = self.next_psn;
        let initiator =
            self.initiator.as_mut().filter(|initiator| initiator.phase == Phase::Open)?;
        initiator.phase = Phase::Closed;
        self.counters.packets += 1;
        Some(initiator.packet(self.config.pkey, psn, Body::Close))
    }

    pub(crate) fn on_answer(
        &mut self,
        (packet, header): (&Packet, &Header),
        source: Gid,
        payload: &Payload<'_, '_>,
        keys: &Keys,
        out: &mut impl SendCompletions,
    ) {
        if !self.is_current_session(source, header) {
            self.counters.stale += 1;
            return;
        }
        if !may_communicate(self.config.pkey, packet.pkey) {
            out.count_bad_pkey();
            return;
        }
        match packet.body {
            Body::Accept if packet.psn == self.unacked => self.on_accept(header.cookie),
            Body::Gone => self.on_gone(out),
            // Counts other ACCEPTs as stale.
            _ => self.on_response(packet, payload, keys, out),
        }
    }

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

    /// Handles the loss of the session at the target. Outstanding requests may have executed: the
    /// oldest fails.
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

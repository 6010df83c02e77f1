//! Requester: turns the send queue into packets, and responses into completions.
//!
//! A state machine without clock, thread or lock. Its owner asks for packets
//! ([`next_packet`](Requester::next_packet)) until there are none, hands in responses
//! ([`on_response`](Requester::on_response)), calls [`settle`](Requester::settle) when it lets go, and
//! [`on_timer`](Requester::on_timer) at the deadline that gave.
//!
//! ```text
//!        oldest                 cursor                      newest
//!  queue [ sent, unacknowledged | being sent | not started ... ]
//!  psn   unacked ──────────▶ sent_end            next_psn
//! ```
//!
//! Recovery is go-back-N: the cursor returns to the oldest unacknowledged packet (IBTA 9.7.5).

use crate::types::{
    Access, AckTimeout, Data, Gid, Mtu, Psn, Qkey, QpState, Qpn, RemoteAddr, RnrTimer, SendFlags, SendOp, SendWr, Sge,
    Transport, WcOpcode, WcStatus, WorkCompletion, WrId,
};

use super::dma::{Gather, Payload};
use super::keys::Keys;
use super::ring::Ring;
use super::wire::{AtomicOp, Body, Nak, Packet, Part, Reth, Syndrome, Tail};

/// Largest message. Half of what RETH can say: a READ of it then covers 2^22 packets of the smallest
/// MTU, well below the 2^23 at which sequence numbers become ambiguous.
pub(super) const MAX_MESSAGE: u32 = 1 << 30;

/// Request packets in flight. Bounds what a network with delays has to hold; as rxe.
const WINDOW: i32 = 64;
/// A long message asks for an acknowledgement this often, so that the window never starves.
const ACK_EVERY: u32 = 32;

/// Where a datagram goes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Destination {
    pub(super) gid: Gid,
    pub(super) qpn: Qpn,
    pub(super) qkey: Qkey,
}

/// Send work request in the queue.
#[derive(Debug)]
pub(super) struct SendWqe {
    wr_id: WrId,
    op: SendOp,
    flags: SendFlags,
    /// Counted from the creation of the queue; completions free the slots up to theirs.
    position: u32,
    length: u32,
    first_psn: Psn,
    /// Sequence numbers that it takes.
    packets: u32,
    started: bool,
    inline: bool,
    /// The only scatter/gather element, or one of length 0.
    one: Sge,
    /// All of them if there are several.
    several: Vec<Sge>,
    /// Inline bytes, as far as they fit.
    short: [u8; SHORT],
    /// All of them if they do not.
    long: Vec<u8>,
    to: Destination,
}

/// Inline bytes that need no allocation of their own.
const SHORT: usize = 64;

impl Default for SendWqe {
    fn default() -> Self {
        Self {
            wr_id: WrId(0),
            op: SendOp::Send,
            flags: SendFlags::empty(),
            position: 0,
            length: 0,
            first_psn: Psn::new(0),
            packets: 0,
            started: false,
            inline: false,
            one: Sge::default(),
            several: Vec::new(),
            short: [0; SHORT],
            long: Vec::new(),
            to: Destination::default(),
        }
    }
}

impl SendWqe {
    #[inline]
    fn sges(&self) -> &[Sge] {
        if self.several.is_empty() { std::slice::from_ref(&self.one) } else { &self.several }
    }

    #[inline]
    fn bytes(&self) -> &[u8] {
        let len = if self.inline { self.length as usize } else { 0 };
        self.short.get(..len).unwrap_or(&self.long)
    }

    fn last_psn(&self) -> Psn {
        self.first_psn.add(self.packets - 1)
    }

    fn end_psn(&self) -> Psn {
        self.first_psn.add(self.packets)
    }

    fn completion(&self, status: WcStatus, qpn: Qpn) -> WorkCompletion {
        let opcode = match self.op {
            SendOp::Send | SendOp::SendWithImm(_) | SendOp::SendWithInvalidate(_) => WcOpcode::Send,
            SendOp::Write(_) | SendOp::WriteWithImm(..) => WcOpcode::RdmaWrite,
            SendOp::Read(_) => WcOpcode::RdmaRead,
            SendOp::CompareSwap { .. } => WcOpcode::CompareSwap,
            SendOp::FetchAdd { .. } => WcOpcode::FetchAdd,
        };
        WorkCompletion {
            wr_id: self.wr_id,
            status,
            vendor_error: 0,
            opcode,
            byte_len: self.length,
            imm_or_rkey: 0,
            qpn,
            src_qpn: Qpn(0),
            flags: crate::types::WcFlags::empty(),
        }
    }
}

/// Who takes the requester's completions.
pub(super) trait SendCompletions {
    /// The work request at `position` is done; slots before `position + 1` are free once this is polled.
    fn complete(&mut self, position: u32, completion: &WorkCompletion);
}

/// Attributes that a requester obeys.
#[derive(Debug, Clone, Copy)]
pub(super) struct SendConfig {
    pub(super) transport: Transport,
    pub(super) qpn: Qpn,
    pub(super) pd: u32,
    pub(super) dest: Qpn,
    pub(super) mtu: Mtu,
    pub(super) timeout: AckTimeout,
    pub(super) retry_count: u8,
    pub(super) rnr_retry: u8,
    pub(super) max_rd_atomic: u8,
    pub(super) qkey: Qkey,
}

/// What a requester has been through.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SendCounters {
    /// Request packets sent, repetitions included.
    pub packets: u64,
    /// Responses received.
    pub responses: u64,
    /// Packets sent again.
    pub retransmitted: u64,
    /// Times that no acknowledgement came in time.
    pub timeouts: u64,
    /// Times that the peer had no receive posted.
    pub rnr_naks: u64,
    /// Sequence errors reported by the peer, or inferred from a gap in its responses.
    pub sequence_naks: u64,
    /// Responses that answer nothing outstanding.
    pub stale: u64,
}

/// Where the payload of a packet comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Source {
    /// The segments that were gathered.
    Gathered,
    /// Inline bytes of the work request; see [`Requester::inline`].
    Inline { index: usize, offset: usize, len: usize },
}

/// A packet to be sent.
#[derive(Debug, Clone, Copy)]
pub(super) struct Outgoing {
    pub(super) packet: Packet,
    pub(super) source: Source,
    /// Receiver of a datagram.
    pub(super) to: Destination,
}

/// A message of one packet, as it stands in the send queue.
#[derive(Debug, Clone, Copy)]
pub(super) struct Whole<'a> {
    pub(super) op: &'a SendOp,
    pub(super) solicited: bool,
    pub(super) length: usize,
    pub(super) data: Data<'a>,
}

/// Why nothing is sent before the deadline.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wait {
    /// Sending.
    None,
    /// The peer was not ready; code of its timer.
    Rnr(RnrTimer),
}

/// See the module.
#[derive(Debug)]
pub(super) struct Requester {
    pub(super) config: SendConfig,
    state: QpState,
    queue: Ring<SendWqe>,
    /// Index of the work request that is being sent, and the packet of it that is next.
    cursor: usize,
    cursor_packet: u32,
    /// Oldest sequence number that is not acknowledged.
    unacked: Psn,
    /// After the newest sequence number that was ever sent.
    sent_end: Psn,
    /// For the next work request that starts.
    next_psn: Psn,
    /// READ and atomic requests that have no answer yet.
    reads: u8,
    retries_left: u8,
    rnr_left: u8,
    since_ack_request: u32,
    wait: Wait,
    deadline: Option<u64>,
    /// The deadline counts from now, not from when it was set.
    progressed: bool,
    /// Went back because of a gap in the responses, and no progress since: late ones change nothing.
    gap_seen: bool,
    drained_reported: bool,
    position: u32,
    pub(super) counters: SendCounters,
}

impl Requester {
    pub(super) fn new(config: SendConfig) -> Self {
        Self {
            config,
            state: QpState::Reset,
            queue: Ring::new(),
            cursor: 0,
            cursor_packet: 0,
            unacked: Psn::new(0),
            sent_end: Psn::new(0),
            next_psn: Psn::new(0),
            reads: 0,
            retries_left: 0,
            rnr_left: 0,
            since_ack_request: 0,
            wait: Wait::None,
            deadline: None,
            progressed: false,
            gap_seen: false,
            drained_reported: true,
            position: 0,
            counters: SendCounters::default(),
        }
    }

    pub(super) const fn state(&self) -> QpState {
        self.state
    }

    /// Work requests ever posted; the position of the next one.
    pub(super) const fn position(&self) -> u32 {
        self.position
    }

    /// True if work is queued.
    pub(super) const fn has_work(&self) -> bool {
        !self.queue.is_empty()
    }

    /// First sequence number, given on the way to RTS.
    pub(super) fn start(&mut self, psn: Psn) {
        (self.unacked, self.sent_end, self.next_psn) = (psn, psn, psn);
        self.retries_left = self.config.retry_count;
        self.rnr_left = self.config.rnr_retry;
    }

    /// Changes the state on the user's request; flushes on the way to ERR.
    pub(super) fn set_state(&mut self, state: QpState, out: &mut impl SendCompletions) {
        match state {
            QpState::Err => self.flush(state, out),
            QpState::Reset => {
                *self = Self { counters: self.counters, ..Self::new(self.config) };
            }
            _ => {
                if state == QpState::Sqd && self.state == QpState::Rts {
                    self.drained_reported = false;
                }
                self.state = state;
            }
        }
    }

    /// Retry limits may have changed.
    pub(super) fn reset_retries(&mut self) {
        self.retries_left = self.config.retry_count;
        self.rnr_left = self.config.rnr_retry;
    }

    /// Queues a work request that was found well-formed. In ERR and SQE it is flushed at once.
    #[inline]
    pub(super) fn post(&mut self, wr: &SendWr<'_>, length: u32, out: &mut impl SendCompletions) {
        let position = self.position;
        self.position = position.wrapping_add(1);
        let wqe = self.queue.push_slot();
        wqe.wr_id = wr.wr_id;
        wqe.op = wr.op;
        wqe.flags = wr.flags;
        wqe.position = position;
        wqe.length = length;
        wqe.started = false;
        wqe.several.clear();
        match wr.data {
            Data::Sges([one]) => {
                wqe.inline = false;
                wqe.one = *one;
            }
            Data::Sges(sges) => {
                wqe.inline = false;
                wqe.one = Sge::default();
                wqe.several.extend_from_slice(sges);
            }
            Data::Inline(bytes) => {
                wqe.inline = true;
                match wqe.short.get_mut(..bytes.len()) {
                    Some(short) => short.copy_from_slice(bytes),
                    None => {
                        wqe.long.clear();
                        wqe.long.extend_from_slice(bytes);
                    }
                }
            }
        }
        if let Some(target) = wr.target {
            wqe.to = Destination { gid: target.address.dgid, qpn: target.qpn, qkey: target.qkey };
        }
        if matches!(self.state, QpState::Err | QpState::Sqe) {
            let completion = wqe.completion(WcStatus::WR_FLUSH_ERR, self.config.qpn);
            self.queue.pop();
            out.complete(position, &completion);
        }
    }

    /// The next work request, if it is a whole message of one packet into the peer and nothing is
    /// outstanding: then it can be executed without a packet. Its sequence number comes with it.
    #[inline]
    pub(super) fn quiet_head(&self) -> Option<(Psn, Whole<'_>)> {
        let head = self.queue.front()?;
        let quiet = self.state == QpState::Rts
            && !head.started
            && self.unacked == self.next_psn
            && self.wait == Wait::None
            && head.length as usize <= self.config.mtu.bytes();
        if !quiet {
            return None;
        }
        let data = match head.several.as_slice() {
            _ if head.length == 0 || head.inline => Data::Inline(head.bytes()),
            [] => Data::Sges(std::slice::from_ref(&head.one)),
            _ => return None,
        };
        let solicited = head.flags.contains(SendFlags::SOLICITED);
        Some((self.next_psn, Whole { op: &head.op, solicited, length: head.length as usize, data }))
    }

    /// What [`quiet_head`](Self::quiet_head) gave was sent; `acknowledged`: and executed by the peer.
    #[inline]
    pub(super) fn quiet_sent(&mut self, acknowledged: bool, out: &mut impl SendCompletions) {
        self.counters.packets += 1;
        let psn = self.next_psn;
        self.next_psn = psn.add(1);
        self.sent_end = self.next_psn;
        if acknowledged {
            self.counters.responses += 1;
            self.unacked = self.next_psn;
            self.retries_left = self.config.retry_count;
            self.rnr_left = self.config.rnr_retry;
            self.complete_head(out);
        } else if let Some(head) = self.queue.front_mut() {
            head.started = true;
            head.first_psn = psn;
            head.packets = 1;
            self.cursor = 1;
            self.cursor_packet = 0;
        }
    }

    /// The next packet, its payload in `gather` (which is empty) or inline.
    #[inline]
    pub(super) fn next_packet<'k>(
        &mut self,
        keys: &'k Keys,
        gather: &mut Gather<'k>,
        out: &mut impl SendCompletions,
    ) -> Option<Outgoing> {
        if !matches!(self.state, QpState::Rts | QpState::Sqd) || self.wait != Wait::None {
            return None;
        }
        let index = self.cursor;
        let wqe = self.queue.get_mut(index)?;
        let reliable = self.config.transport == Transport::Rc;
        let mtu = self.config.mtu.bytes() as u32;
        if !wqe.started {
            if self.state == QpState::Sqd {
                return None;
            }
            let refusal = if wqe.op.reads_back() {
                if self.config.max_rd_atomic == 0 {
                    // It could never start; saying so beats waiting for ever.
                    Some(WcStatus::LOC_QP_OP_ERR)
                } else {
                    local_fault(wqe, &self.config, keys)
                }
            } else if wqe.length > mtu {
                // Of a single packet, gathering the payload below is the check.
                local_fault(wqe, &self.config, keys)
            } else {
                None
            };
            if let Some(status) = refusal {
                return self.refuse(status, out);
            }
            let reads_back = wqe.op.reads_back();
            // IBTA 9.4.4 and 10.8.3.3: stalls, does not fail.
            let too_many = reads_back && self.reads >= self.config.max_rd_atomic;
            let fenced = wqe.flags.contains(SendFlags::FENCE) && self.reads > 0;
            if too_many || fenced {
                return None;
            }
            wqe.packets = match wqe.op {
                SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. } => 1,
                _ if wqe.length <= mtu => 1,
                _ => wqe.length.div_ceil(mtu),
            };
            wqe.first_psn = self.next_psn;
        }
        let number = self.cursor_packet;
        let psn = wqe.first_psn.add(number);
        if reliable && psn.distance_from(self.unacked) >= WINDOW {
            return None;
        }
        let offset = number * mtu;
        let len = if wqe.op.reads_back() { 0 } else { (wqe.length - offset).min(mtu) };
        let source = if wqe.inline {
            Source::Inline { index, offset: offset as usize, len: len as usize }
        } else {
            if len > 0
                && keys
                    .gather(wqe.sges(), self.config.pd, offset as usize, len as usize, Access::empty(), gather)
                    .is_err()
            {
                gather.clear();
                return self.refuse(WcStatus::LOC_PROT_ERR, out);
            }
            Source::Gathered
        };
        let part = Part::of(number, wqe.packets);
        let (body, end) = body_of(wqe, part, offset, psn, &self.config);
        if !wqe.started {
            wqe.started = true;
            self.next_psn = wqe.end_psn();
            self.reads += u8::from(wqe.op.reads_back());
        }
        let whole = end == wqe.end_psn();
        let ack_request = reliable && !wqe.op.reads_back() && (whole || self.since_ack_request >= ACK_EVERY);
        let packet = Packet {
            transport: self.config.transport,
            dest: if self.config.transport == Transport::Ud { wqe.to.qpn } else { self.config.dest },
            psn,
            solicited: whole && wqe.flags.contains(SendFlags::SOLICITED) && consumes_receive(&wqe.op),
            ack_request,
            body,
        };
        let to = wqe.to;
        self.since_ack_request = if ack_request { 0 } else { self.since_ack_request + 1 };
        if whole {
            self.cursor += 1;
            self.cursor_packet = 0;
        } else {
            self.cursor_packet += 1;
        }
        self.counters.packets += 1;
        if end.distance_from(self.sent_end) > 0 {
            self.sent_end = end;
        } else {
            self.counters.retransmitted += 1;
        }
        Some(Outgoing { packet, source, to })
    }

    /// Inline payload of a packet just made.
    pub(super) fn inline(&self, source: Source) -> &[u8] {
        match source {
            Source::Inline { index, offset, len } => {
                self.queue.get(index).and_then(|wqe| wqe.bytes().get(offset..offset + len)).unwrap_or(&[])
            }
            Source::Gathered => &[],
        }
    }

    /// A packet of an unreliable transport has left: its work request is done when it was the last one.
    pub(super) fn on_sent(&mut self, out: &mut impl SendCompletions) {
        if self.config.transport != Transport::Rc && self.cursor > 0 {
            self.unacked = self.sent_end;
            self.complete_head(out);
        }
    }

    /// A response of the peer.
    #[inline]
    pub(super) fn on_response(
        &mut self,
        packet: &Packet,
        payload: &Payload<'_, '_>,
        keys: &Keys,
        out: &mut impl SendCompletions,
    ) {
        if !matches!(self.state, QpState::Rts | QpState::Sqd) || self.config.transport != Transport::Rc {
            return;
        }
        self.counters.responses += 1;
        let psn = packet.psn;
        // Older than anything outstanding, or about something never sent.
        if psn.distance_from(self.unacked) < 0 || psn.distance_from(self.sent_end) >= 0 {
            self.counters.stale += 1;
            return;
        }
        match packet.body {
            Body::Acknowledge(aeth) => match aeth.syndrome {
                Syndrome::Ack(_) => {
                    self.advance(psn.add(1), out);
                }
                Syndrome::RnrNak(timer) => {
                    if self.advance(psn, out) {
                        self.on_receiver_not_ready(RnrTimer::from_code(timer), out);
                    }
                }
                Syndrome::Nak(Nak::Sequence) => {
                    if self.advance(psn, out) && !self.at_unacked() {
                        self.counters.sequence_naks += 1;
                        self.retry(out);
                    }
                }
                Syndrome::Nak(nak) => {
                    if self.advance(psn, out) {
                        self.fail(status_of(nak), out);
                    }
                }
                Syndrome::Reserved(_) => self.counters.stale += 1,
            },
            Body::AtomicAcknowledge { original, .. } => self.on_atomic(psn, original, keys, out),
            Body::ReadResponse { part, .. } => self.on_read_data(psn, part, payload, keys, out),
            _ => self.counters.stale += 1,
        }
    }

    /// Moves the time. Call it when the deadline that [`settle`](Self::settle) gave has come.
    pub(super) fn on_timer(&mut self, now: u64, out: &mut impl SendCompletions) {
        if self.deadline.is_none_or(|deadline| now < deadline) {
            return;
        }
        self.deadline = None;
        if !matches!(self.state, QpState::Rts | QpState::Sqd) {
            return;
        }
        match std::mem::replace(&mut self.wait, Wait::None) {
            Wait::Rnr(_) => self.go_back(),
            Wait::None => {
                self.counters.timeouts += 1;
                self.gap_seen = false;
                self.retry(out);
            }
        }
    }

    /// When [`on_timer`](Self::on_timer) is due, as things are now. `now` is asked only if it matters.
    #[inline]
    pub(super) fn settle(&mut self, now: impl FnOnce() -> u64) -> Option<u64> {
        if self.unacked == self.sent_end && self.wait == Wait::None {
            self.deadline = None;
            self.progressed = false;
            return None;
        }
        self.settle_slow(now())
    }

    #[cold]
    fn settle_slow(&mut self, now: u64) -> Option<u64> {
        if !matches!(self.state, QpState::Rts | QpState::Sqd) || self.config.transport != Transport::Rc {
            self.deadline = None;
        } else if std::mem::take(&mut self.progressed) || self.deadline.is_none() {
            let duration = match self.wait {
                Wait::Rnr(timer) => Some(timer.nanoseconds()),
                Wait::None => self.config.timeout.nanoseconds(),
            };
            self.deadline = duration.map(|duration| now.saturating_add(duration));
        }
        self.deadline
    }

    /// True once, when the queue has drained after the transition to SQD.
    pub(super) fn take_drained(&mut self) -> bool {
        if self.drained_reported || self.state != QpState::Sqd || self.queue.front().is_some_and(|wqe| wqe.started) {
            return false;
        }
        self.drained_reported = true;
        true
    }

    /// Completes everything that ends before `to`; false if a READ or atomic without answer is in the way.
    #[inline]
    fn advance(&mut self, to: Psn, out: &mut impl SendCompletions) -> bool {
        while self.unacked != to {
            let Some(head) = self.queue.front().filter(|head| head.started) else { return false };
            if head.op.reads_back() {
                // IBTA 9.7.5.1.1: acknowledging what follows says that its response was lost.
                self.on_gap(out);
                return false;
            }
            let end = head.end_psn();
            self.on_progress();
            if end.distance_from(to) > 0 {
                self.unacked = to;
            } else {
                self.unacked = end;
                self.complete_head(out);
            }
            self.catch_up();
        }
        true
    }

    fn on_progress(&mut self) {
        self.progressed = true;
        self.gap_seen = false;
        self.reset_retries();
    }

    fn on_atomic(&mut self, psn: Psn, original: u64, keys: &Keys, out: &mut impl SendCompletions) {
        if !self.reach(psn, out) {
            return;
        }
        let Some(head) = self.queue.front() else { return };
        if !matches!(head.op, SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. }) {
            self.fail(WcStatus::BAD_RESP_ERR, out);
            return;
        }
        let mut target = Gather::new();
        if keys.gather(head.sges(), self.config.pd, 0, 8, Access::LOCAL_WRITE, &mut target).is_err() {
            drop(target);
            self.fail(WcStatus::LOC_PROT_ERR, out);
            return;
        }
        Payload::Bytes(&original.to_ne_bytes()).copy_to(&target);
        drop(target);
        self.answered(psn.add(1), true, out);
    }

    fn on_read_data(
        &mut self,
        psn: Psn,
        part: Part,
        payload: &Payload<'_, '_>,
        keys: &Keys,
        out: &mut impl SendCompletions,
    ) {
        if !self.reach(psn, out) {
            return;
        }
        let Some(head) = self.queue.front() else { return };
        if !matches!(head.op, SendOp::Read(_)) {
            self.fail(WcStatus::BAD_RESP_ERR, out);
            return;
        }
        let mtu = self.config.mtu.bytes() as u32;
        let offset = psn.distance_from(head.first_psn) as u32 * mtu;
        let expected = (head.length - offset).min(mtu) as usize;
        let last = psn == head.last_psn();
        // A repeated request begins with First or Only anywhere, so only the end is telling.
        if payload.len() != expected || part.ends() != last {
            self.fail(WcStatus::BAD_RESP_ERR, out);
            return;
        }
        if expected > 0 {
            let mut target = Gather::new();
            let covered =
                keys.gather(head.sges(), self.config.pd, offset as usize, expected, Access::LOCAL_WRITE, &mut target);
            if covered.is_err() {
                drop(target);
                self.fail(WcStatus::LOC_PROT_ERR, out);
                return;
            }
            payload.copy_to(&target);
        }
        self.answered(psn.add(1), last, out);
    }

    /// Completes what precedes the response `psn`; true if that answers the oldest packet now.
    fn reach(&mut self, psn: Psn, out: &mut impl SendCompletions) -> bool {
        loop {
            let Some(head) = self.queue.front().filter(|head| head.started) else { return false };
            if head.op.reads_back() || psn.distance_from(head.end_psn()) < 0 {
                break;
            }
            let end = head.end_psn();
            if !self.advance(end, out) {
                return false;
            }
        }
        if psn != self.unacked {
            self.on_gap(out);
            return false;
        }
        true
    }

    /// Data up to `end` have arrived.
    fn answered(&mut self, end: Psn, last: bool, out: &mut impl SendCompletions) {
        self.on_progress();
        self.unacked = end;
        if last {
            self.reads -= 1;
            self.complete_head(out);
        }
        self.catch_up();
    }

    /// A response is missing: ask again, once until there is progress or a timeout.
    fn on_gap(&mut self, out: &mut impl SendCompletions) {
        if !self.gap_seen && self.wait == Wait::None {
            self.gap_seen = true;
            self.counters.sequence_naks += 1;
            self.retry(out);
        }
    }

    fn on_receiver_not_ready(&mut self, timer: RnrTimer, out: &mut impl SendCompletions) {
        if self.wait != Wait::None {
            return;
        }
        self.counters.rnr_naks += 1;
        // 7 is without end (IBTA 9.7.5.2.8).
        if self.config.rnr_retry != 7 {
            if self.rnr_left == 0 {
                self.fail(WcStatus::RNR_RETRY_EXC_ERR, out);
                return;
            }
            self.rnr_left -= 1;
        }
        self.wait = Wait::Rnr(timer);
        self.deadline = None;
    }

    fn retry(&mut self, out: &mut impl SendCompletions) {
        if self.retries_left == 0 {
            self.fail(WcStatus::RETRY_EXC_ERR, out);
            return;
        }
        self.retries_left -= 1;
        self.progressed = true;
        self.go_back();
    }

    /// True if nothing has been sent since the cursor went back.
    fn at_unacked(&self) -> bool {
        self.cursor == 0
            && self
                .queue
                .front()
                .is_some_and(|head| head.started && head.first_psn.add(self.cursor_packet) == self.unacked)
    }

    /// Sends again from the oldest packet that is not acknowledged.
    fn go_back(&mut self) {
        self.cursor = 0;
        self.cursor_packet = match self.queue.front() {
            Some(head) if head.started => self.unacked.distance_from(head.first_psn).max(0) as u32,
            _ => 0,
        };
    }

    /// What was acknowledged while it was being sent again is not sent again.
    #[inline]
    fn catch_up(&mut self) {
        if self.cursor == 0
            && let Some(head) = self.queue.front().filter(|head| head.started)
        {
            let done = self.unacked.distance_from(head.first_psn).max(0) as u32;
            self.cursor_packet = self.cursor_packet.max(done);
        }
    }

    /// The work request at the cursor cannot be sent. Those before it complete first.
    fn refuse(&mut self, status: WcStatus, out: &mut impl SendCompletions) -> Option<Outgoing> {
        if self.cursor == 0 {
            self.fail(status, out);
        }
        None
    }

    #[inline]
    fn complete_head(&mut self, out: &mut impl SendCompletions) {
        let Some(head) = self.queue.front() else { return };
        if head.flags.contains(SendFlags::SIGNALED) {
            let completion = head.completion(WcStatus::SUCCESS, self.config.qpn);
            let position = head.position;
            self.queue.pop();
            out.complete(position, &completion);
        } else {
            self.queue.pop();
        }
        if self.cursor == 0 {
            // It was being sent again.
            self.cursor_packet = 0;
        } else {
            self.cursor -= 1;
        }
    }

    /// The oldest work request fails, and with it the queue.
    #[cold]
    fn fail(&mut self, status: WcStatus, out: &mut impl SendCompletions) {
        tracing::warn!(qpn = %self.config.qpn, %status, "send queue failed");
        if let Some(head) = self.queue.front() {
            let completion = head.completion(status, self.config.qpn);
            let position = head.position;
            self.queue.pop();
            out.complete(position, &completion);
        }
        // A reliable connection fails as a whole; otherwise the receive side goes on (IBTA 10.3.1).
        let state = if self.config.transport == Transport::Rc { QpState::Err } else { QpState::Sqe };
        self.flush(state, out);
    }

    #[cold]
    fn flush(&mut self, state: QpState, out: &mut impl SendCompletions) {
        let flushed = self.queue.len();
        while let Some(head) = self.queue.front() {
            let completion = head.completion(WcStatus::WR_FLUSH_ERR, self.config.qpn);
            let position = head.position;
            self.queue.pop();
            out.complete(position, &completion);
        }
        if flushed > 0 {
            tracing::debug!(qpn = %self.config.qpn, flushed, "send queue flushed");
        }
        self.state = state;
        (self.cursor, self.cursor_packet) = (0, 0);
        self.unacked = self.next_psn;
        self.sent_end = self.next_psn;
        self.reads = 0;
        self.wait = Wait::None;
        self.deadline = None;
        self.drained_reported = true;
    }
}

/// What is wrong with the local side of a work request, all of it checked before anything is sent.
fn local_fault(wqe: &SendWqe, config: &SendConfig, keys: &Keys) -> Option<WcStatus> {
    if wqe.length > MAX_MESSAGE {
        return Some(WcStatus::LOC_LEN_ERR);
    }
    let (len, need) = match wqe.op {
        SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. } if wqe.length < 8 => return Some(WcStatus::LOC_LEN_ERR),
        SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. } => (8, Access::LOCAL_WRITE),
        SendOp::Read(_) => (wqe.length as usize, Access::LOCAL_WRITE),
        _ => (wqe.length as usize, Access::empty()),
    };
    if wqe.inline {
        return None;
    }
    keys.gather(wqe.sges(), config.pd, 0, len, need, &mut Gather::new()).is_err().then_some(WcStatus::LOC_PROT_ERR)
}

/// The packet of `wqe` that is `part` and begins at `offset`, and the sequence number after it.
#[inline]
fn body_of(wqe: &SendWqe, part: Part, offset: u32, psn: Psn, config: &SendConfig) -> (Body, Psn) {
    let next = psn.add(1);
    if config.transport == Transport::Ud {
        let imm = if let SendOp::SendWithImm(imm) = wqe.op { Some(imm) } else { None };
        // IBTA 10.2.5: a key with its top bit set stands for the queue pair's own.
        let qkey = if wqe.to.qkey.0 >> 31 != 0 { config.qkey } else { wqe.to.qkey };
        return (Body::Datagram { qkey, source: config.qpn, imm }, next);
    }
    let reth = |remote| Reth { remote, length: wqe.length };
    match wqe.op {
        SendOp::Send => (Body::Send { part, tail: Tail::None }, next),
        SendOp::SendWithImm(imm) => {
            (Body::Send { part, tail: if part.ends() { Tail::Imm(imm) } else { Tail::None } }, next)
        }
        SendOp::SendWithInvalidate(rkey) => {
            (Body::Send { part, tail: if part.ends() { Tail::Invalidate(rkey) } else { Tail::None } }, next)
        }
        SendOp::Write(remote) => (Body::Write { part, reth: reth(remote), imm: None }, next),
        SendOp::WriteWithImm(remote, imm) => {
            (Body::Write { part, reth: reth(remote), imm: part.ends().then_some(imm) }, next)
        }
        // A repeated READ asks for the rest only (IBTA 9.4.4).
        SendOp::Read(remote) => {
            let rest = RemoteAddr { addr: remote.addr.wrapping_add(u64::from(offset)), rkey: remote.rkey };
            (Body::ReadRequest(Reth { remote: rest, length: wqe.length - offset }), wqe.end_psn())
        }
        SendOp::CompareSwap { remote, compare, swap } => {
            (Body::Atomic { remote, op: AtomicOp::CompareSwap { compare, swap } }, next)
        }
        SendOp::FetchAdd { remote, add } => (Body::Atomic { remote, op: AtomicOp::FetchAdd { add } }, next),
    }
}

/// True if the operation takes a receive from the peer: only then is "solicited" sent (IBTA 9.2.3).
const fn consumes_receive(op: &SendOp) -> bool {
    !matches!(op, SendOp::Write(_)) && !op.reads_back()
}

const fn status_of(nak: Nak) -> WcStatus {
    match nak {
        Nak::InvalidRequest => WcStatus::REM_INV_REQ_ERR,
        Nak::RemoteAccess => WcStatus::REM_ACCESS_ERR,
        Nak::RemoteOperation => WcStatus::REM_OP_ERR,
        Nak::Sequence | Nak::Other(_) => WcStatus::BAD_RESP_ERR,
    }
}

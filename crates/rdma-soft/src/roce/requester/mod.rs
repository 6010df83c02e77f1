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

mod initiator;
mod local;
mod outstanding;
mod responses;
mod single_packet;
mod wqe;

use initiator::{Facing, Initiator};
pub(crate) use outstanding::Asks;
pub(crate) use single_packet::Whole;
pub(crate) use wqe::Destination;
use wqe::{SendWqe, body_of, consumes_receive, left_in_request, local_fault};

use rdma_provider::types::{
    Access, AckTimeout, Data, Mtu, Psn, Qkey, QpState, Qpn, RnrTimer, SendFlags, SendOp, SendWr,
    Sge, Transport, WcStatus, WorkCompletion,
};

use crate::device::dma::Gather;
use crate::device::keys::Keys;
use crate::device::ring::Ring;
use crate::roce::packet::{Packet, Part};

/// Largest message. Half of what RETH can say: a READ of it then covers 2^22 packets of the smallest
/// MTU, well below the 2^23 at which sequence numbers become ambiguous.
pub(crate) const MAX_MESSAGE: u32 = 1 << 30;

/// How much of a reliable connection is underway.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Flow {
    /// Packets in flight. Bounds what a network with delays has to hold.
    window: i32,
    /// A long message asks for an acknowledgement this often, so that the window never starves.
    ack_every: u32,
    /// Packets that one READ request asks for: a longer one is asked for piece by piece, as nothing else paces the answers.
    read_packets: u32,
    /// How often the timeout doubles while nothing is heard: between processes silence may mean that the other one does not
    /// run. 4 times the timeout is what IBTA 9.7.6.1.3 lets it take.
    doublings: u32,
}

impl Flow {
    /// Within the process, where nothing overflows; the window is that of rxe.
    pub(crate) const MEMORY: Self =
        Self { window: 64, ack_every: 32, read_packets: u32::MAX, doublings: 0 };

    /// Of `window` packets in flight, where answers must be paced too.
    pub(crate) const fn of(window: u32) -> Self {
        // An acknowledgement for each quarter; of a READ, two halves are on the way.
        Self {
            window: window as i32,
            ack_every: window / 4,
            read_packets: READ_PACKETS,
            doublings: 2,
        }
    }
}

/// Packets of one READ request where answers must be paced; the same for the life of a connection, since it is told from
/// the answers which request they end. 32 KiB of the largest MTU.
const READ_PACKETS: u32 = 8;

/// What surrounds a requester: who takes its completions, and what an initiator of dynamic connections asks for.
pub(crate) trait SendCompletions {
    /// The work request at `position` is done; slots before `position + 1` are free once this is polled.
    fn complete(&mut self, position: u32, completion: &WorkCompletion);
    /// The time, in nanoseconds.
    fn now(&mut self) -> u64;
    /// A number that peers cannot predict, or none.
    fn random(&mut self) -> Option<u64>;
}

/// Attributes that a requester obeys.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SendConfig {
    /// Of an initiator of dynamic connections: RC, which it speaks to each of its targets.
    pub(crate) transport: Transport,
    pub(crate) qpn: Qpn,
    pub(crate) pd: u32,
    pub(crate) dest: Qpn,
    pub(crate) mtu: Mtu,
    pub(crate) timeout: AckTimeout,
    pub(crate) retry_count: u8,
    pub(crate) rnr_retry: u8,
    pub(crate) max_rd_atomic: u8,
    pub(crate) qkey: Qkey,
    pub(crate) flow: Flow,
}

/// Counters of the requester of a queue pair.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SendCounters {
    /// Request packets sent, retransmissions included.
    pub packets: u64,
    /// Responses received.
    pub responses: u64,
    /// Packets retransmitted.
    pub retransmitted: u64,
    /// Acknowledgement timeouts.
    pub timeouts: u64,
    /// RNR NAKs: the peer had no receive posted.
    pub rnr_naks: u64,
    /// Sequence errors reported by the peer or inferred from a gap in its responses.
    pub sequence_naks: u64,
    /// Responses that match no outstanding request.
    pub stale: u64,
    /// Sessions opened by an initiator of dynamic connections: one for each change of its target, and for each return to the
    /// same target after a second or more.
    pub sessions: u64,
}

/// Where the payload of a packet comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Source {
    /// The segments that were gathered.
    Gathered,
    /// Inline bytes of the work request; see [`Requester::inline`].
    Inline { index: usize, offset: usize, len: usize },
}

/// A packet to be sent.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Outgoing {
    pub(crate) packet: Packet,
    pub(crate) source: Source,
    /// Receiver of a datagram, or target of a dynamic connection.
    pub(crate) to: Destination,
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
pub(crate) struct Requester {
    pub(crate) config: SendConfig,
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
    /// Timeouts since the last progress.
    silences: u32,
    /// It waits for its turn on the way to the peer.
    paused: bool,
    /// Went back because of a gap in the responses, and no progress since: late ones change nothing.
    gap_seen: bool,
    drained_reported: bool,
    position: u32,
    /// Of dynamic connections.
    initiator: Option<Box<Initiator>>,
    pub(crate) counters: SendCounters,
}

impl Requester {
    pub(crate) fn new(config: SendConfig) -> Self {
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
            silences: 0,
            paused: false,
            gap_seen: false,
            drained_reported: true,
            position: 0,
            initiator: None,
            counters: SendCounters::default(),
        }
    }

    pub(crate) const fn state(&self) -> QpState {
        self.state
    }

    /// Work requests ever posted; the position of the next one.
    pub(crate) const fn position(&self) -> u32 {
        self.position
    }

    /// True if work is queued.
    pub(crate) const fn has_work(&self) -> bool {
        !self.queue.is_empty()
    }

    /// First sequence number, given on the way to RTS.
    pub(crate) fn start(&mut self, psn: Psn) {
        (self.unacked, self.sent_end, self.next_psn) = (psn, psn, psn);
        self.retries_left = self.config.retry_count;
        self.rnr_left = self.config.rnr_retry;
    }

    /// Changes the state on the user's request; flushes on the way to ERR.
    pub(crate) fn set_state(&mut self, state: QpState, out: &mut impl SendCompletions) {
        match state {
            QpState::Err => self.flush(state, out),
            QpState::Reset => {
                let initiator = self.initiator.take().map(Initiator::renewed);
                *self = Self { counters: self.counters, initiator, ..Self::new(self.config) };
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
    pub(crate) fn reset_retries(&mut self) {
        self.retries_left = self.config.retry_count;
        self.rnr_left = self.config.rnr_retry;
    }

    /// Queues a work request that was found well-formed. In ERR and SQE it is flushed at once.
    #[inline(always)]
    pub(crate) fn post(&mut self, wr: &SendWr<'_>, length: u32, out: &mut impl SendCompletions) {
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
            Data::Window(bind) => wqe.keep(bind),
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
        if let Some(target) = &wr.target {
            wqe.to = Destination::of(target);
        }
        if matches!(self.state, QpState::Err | QpState::Sqe) {
            let completion = wqe.completion(WcStatus::WR_FLUSH_ERR, self.config.qpn);
            self.queue.pop();
            out.complete(position, &completion);
        }
    }

    /// The next packet, its payload in `gather` (which is empty) or inline.
    #[inline]
    pub(crate) fn next_packet<'k>(
        &mut self,
        keys: &'k Keys,
        gather: &mut Gather<'k>,
        out: &mut impl SendCompletions,
    ) -> Option<Outgoing> {
        if !matches!(self.state, QpState::Rts | QpState::Sqd) || self.wait != Wait::None {
            return None;
        }
        while self.queue.get(self.cursor)?.op.is_local() {
            self.run_local(keys, out)?;
        }
        if self.initiator.is_some() {
            match self.face(out) {
                Facing::Target => {}
                Facing::Nobody => return None,
                Facing::Turning(packet) => return Some(packet),
            }
        }
        if self.too_many_reads() {
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
        let underway = psn.distance_from(self.unacked);
        // All answers to a READ are underway as soon as it is asked for.
        let asked =
            if matches!(wqe.op, SendOp::Read(_)) && self.config.flow.read_packets != u32::MAX {
                (wqe.packets - number).min(left_in_request(number, &self.config)) as i32
            } else {
                1
            };
        let blocked = reliable && underway > 0 && underway + asked > self.config.flow.window;
        // If no acknowledgement is to come, for the window was larger before, one more packet asks for it.
        let unasked = blocked && self.since_ack_request as i32 >= underway;
        if blocked && !unasked {
            return None;
        }
        let offset = number * mtu;
        let len = if wqe.op.reads_back() { 0 } else { (wqe.length - offset).min(mtu) };
        let source = if wqe.inline {
            Source::Inline { index, offset: offset as usize, len: len as usize }
        } else {
            if len > 0
                && keys
                    .gather(
                        wqe.sges(),
                        self.config.pd,
                        offset as usize,
                        len as usize,
                        Access::empty(),
                        gather,
                    )
                    .is_err()
            {
                gather.clear();
                return self.refuse(WcStatus::LOC_PROT_ERR, out);
            }
            Source::Gathered
        };
        let part = Part::of(number, wqe.packets);
        let (body, end) = body_of(wqe, part, number, psn, &self.config);
        if !wqe.started {
            wqe.started = true;
            self.next_psn = wqe.end_psn();
            self.reads += u8::from(wqe.op.reads_back());
        }
        let whole = end == wqe.end_psn();
        let ack_request = reliable
            && !wqe.op.reads_back()
            && (whole || unasked || self.since_ack_request >= self.config.flow.ack_every);
        let packet = Packet {
            transport: self.config.transport,
            dest: if self.config.transport == Transport::Ud {
                wqe.to.qpn
            } else {
                self.config.dest
            },
            psn,
            solicited: whole
                && wqe.flags.contains(SendFlags::SOLICITED)
                && consumes_receive(&wqe.op),
            ack_request,
            body,
        };
        let to = wqe.to;
        // An answer acknowledges all before it.
        let asks = ack_request || wqe.op.reads_back();
        self.since_ack_request = if asks { 0 } else { self.since_ack_request + 1 };
        if whole {
            self.cursor += 1;
            self.cursor_packet = 0;
        } else {
            self.cursor_packet += end.distance_from(psn) as u32;
        }
        self.counters.packets += 1;
        if end.distance_from(self.sent_end) > 0 {
            self.sent_end = end;
        } else {
            self.counters.retransmitted += 1;
        }
        Some(Outgoing { packet, source, to })
    }

    /// True if the work request at the cursor is a READ or atomic and as many of their requests as the peer takes have no
    /// answer, where a READ may be several.
    #[inline]
    fn too_many_reads(&self) -> bool {
        self.config.flow.read_packets != u32::MAX
            && self.config.max_rd_atomic > 0
            && self.queue.get(self.cursor).is_some_and(|wqe| wqe.op.reads_back())
            && self.read_requests() >= u32::from(self.config.max_rd_atomic)
    }

    /// READ and atomic requests between the oldest packet without answer and the cursor.
    fn read_requests(&self) -> u32 {
        let each = self.config.flow.read_packets;
        let sent = (0..=self.cursor).filter_map(|index| Some((index, self.queue.get(index)?)));
        let reads = sent.filter(|(_, wqe)| wqe.started && wqe.op.reads_back());
        let requests = reads.map(|(index, wqe)| {
            let from = if index == 0 {
                self.unacked.distance_from(wqe.first_psn).max(0) as u32
            } else {
                0
            };
            let to = if index == self.cursor { self.cursor_packet } else { wqe.packets };
            if to > from { (to - 1) / each - from / each + 1 } else { 0 }
        });
        requests.sum()
    }

    /// Inline payload of a packet just made.
    pub(crate) fn inline(&self, source: Source) -> &[u8] {
        match source {
            Source::Inline { index, offset, len } => self
                .queue
                .get(index)
                .and_then(|wqe| wqe.bytes().get(offset..offset + len))
                .unwrap_or(&[]),
            Source::Gathered => &[],
        }
    }

    /// A packet of an unreliable transport has left: its work request is done when it was the last one.
    pub(crate) fn on_sent(&mut self, out: &mut impl SendCompletions) {
        if self.config.transport != Transport::Rc && self.cursor > 0 {
            self.unacked = self.sent_end;
            self.complete_head(out);
        }
    }

    /// Moves the time. Call it when the deadline that [`settle`](Self::settle) gave has come.
    pub(crate) fn on_timer(&mut self, now: u64, out: &mut impl SendCompletions) {
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
                self.silences += 1;
                self.gap_seen = false;
                self.retry(out);
            }
        }
    }

    /// When [`on_timer`](Self::on_timer) is due, as things are now. `now` is asked only if it matters.
    #[inline]
    pub(crate) fn settle(&mut self, now: impl FnOnce() -> u64) -> Option<u64> {
        if self.unacked == self.sent_end && self.wait == Wait::None {
            self.deadline = None;
            self.progressed = false;
            return None;
        }
        self.settle_slow(now())
    }

    #[cold]
    fn settle_slow(&mut self, now: u64) -> Option<u64> {
        let idle = self.paused && self.wait == Wait::None;
        if idle
            || !matches!(self.state, QpState::Rts | QpState::Sqd)
            || self.config.transport != Transport::Rc
        {
            self.deadline = None;
        } else if std::mem::take(&mut self.progressed) || self.deadline.is_none() {
            let duration = match self.wait {
                Wait::Rnr(timer) => Some(timer.nanoseconds()),
                Wait::None => {
                    let times = 1 << self.silences.min(self.config.flow.doublings);
                    self.config.timeout.nanoseconds().map(|duration| duration.saturating_mul(times))
                }
            };
            self.deadline = duration.map(|duration| now.saturating_add(duration));
        }
        self.deadline
    }

    /// True once, when the queue has drained after the transition to SQD.
    pub(crate) fn take_drained(&mut self) -> bool {
        if self.drained_reported
            || self.state != QpState::Sqd
            || self.queue.front().is_some_and(|wqe| wqe.started)
        {
            return false;
        }
        self.drained_reported = true;
        true
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
            && self.queue.front().is_some_and(|head| {
                head.started && head.first_psn.add(self.cursor_packet) == self.unacked
            })
    }

    /// Sends again from the oldest packet that is not acknowledged.
    fn go_back(&mut self) {
        if let Some(initiator) = &mut self.initiator {
            initiator.go_back();
        }
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

    #[inline(always)]
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
        let state =
            if self.config.transport == Transport::Rc { QpState::Err } else { QpState::Sqe };
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

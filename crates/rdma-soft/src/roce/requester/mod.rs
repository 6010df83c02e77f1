//! The requester: turns the send queue into packets, and responses into completions.
//!
//! It is a state machine without clock, thread or lock. The caller:
//!
//! - takes all packets from [`next_packet`](Requester::next_packet),
//! - passes responses to [`on_response`](Requester::on_response),
//! - finally calls [`settle`](Requester::settle),
//! - calls [`on_timer`](Requester::on_timer) at the deadline from `settle`.
//!
//! ```text
//!        oldest                 cursor                      newest
//!  queue [ sent, unacknowledged | being sent | not started ... ]
//!  psn   unacked ──────────▶ sent_end            next_psn
//! ```
//!
//! Retransmission is go-back-N: the cursor returns to the oldest unacknowledged packet (IBTA
//! 9.7.5).

mod direct;
mod flow;
mod initiator;
mod local;
mod outstanding;
mod responses;
mod wqe;

pub(crate) use direct::DirectMessage;
pub(crate) use flow::Flow;
use flow::{Congestion, PROBE};
use initiator::{Initiator, SessionStep};
pub(crate) use outstanding::WindowRequest;
pub(crate) use wqe::Destination;
use wqe::{SendWqe, body_of, check_local, consumes_receive, left_in_request};

use rdma_provider::types::{
    Access, AckTimeout, Data, Mtu, Psn, Qkey, QpState, Qpn, RnrTimer, SendFlags, SendOp, SendWr,
    Sge, Transport, WcStatus, WorkCompletion,
};

use crate::memory::dma::Gather;
use crate::memory::keys::Keys;
use crate::ring::Ring;
use crate::roce::packet::{Packet, Part};

/// Maximum message length: 2^22 packets of the smallest MTU, well below the 2^23 at which PSNs
/// become ambiguous.
pub(crate) const MAX_MESSAGE: u32 = 1 << 30;

/// The longest wait for an acknowledgement before the first retransmission, 67 ms; each further
/// wait is twice as long, up to the timeout of the queue pair. So a loss is repaired soon, although
/// the timeouts outlast an outage of seconds. Only a wait of a whole timeout takes a retry (IBTA
/// 9.7.6.1.3).
const FIRST_WAIT: u64 = 67_108_864;

pub(crate) trait SendCompletions {
    /// Completes the work request at `position`. Polling frees all slots up to it.
    fn complete(&mut self, position: u32, completion: &WorkCompletion);
    /// Returns nanoseconds.
    fn now(&mut self) -> u64;
    /// Returns an unpredictable number, if the system has one.
    fn random(&mut self) -> Option<u64>;
    /// Counts a packet that was dropped because of its partition.
    fn count_bad_pkey(&mut self);
}

/// The fields that each operation uses come first.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct SendConfig {
    pub(crate) pd: u32,
    pub(crate) qpn: Qpn,
    pub(crate) mtu: Mtu,
    pub(crate) retry_count: u8,
    pub(crate) rnr_retry: u8,
    pub(crate) max_rd_atomic: u8,
    pub(crate) timeout: AckTimeout,
    /// RC for a DC initiator.
    pub(crate) transport: Transport,
    pub(crate) dest: Qpn,
    pub(crate) qkey: Qkey,
    pub(crate) pkey: u16,
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
    /// RNR NAKs received: the peer had no receive posted.
    pub rnr_naks: u64,
    /// Sequence errors reported by the peer, or detected as gaps in its responses.
    pub sequence_naks: u64,
    /// Responses that match no outstanding request.
    pub stale: u64,
    /// Sessions opened by a DC initiator: one per change of target, and one after each second or
    /// more without messages.
    pub sessions: u64,
    /// Congestion notification packets received.
    pub congestion_notifications: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Source {
    Gathered,
    /// See [`Requester::inline`].
    Inline {
        index: usize,
        offset: usize,
        len: usize,
    },
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Outgoing {
    pub(crate) packet: Packet,
    pub(crate) source: Source,
    /// Destination of a datagram, or DC target.
    pub(crate) to: Destination,
}

/// Why nothing is sent before the deadline.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wait {
    None,
    Rnr(RnrTimer),
}

/// The requester of a queue pair, see the [module](self).
///
/// The fields that each operation uses come first, in few cache lines.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Requester {
    queue: Ring<SendWqe>,
    state: QpState,
    wait: Wait,
    /// Outstanding READ and atomic work requests.
    reads: u8,
    retries_left: u8,
    rnr_left: u8,
    /// Restarts the deadline at the next `settle`.
    progressed: bool,
    /// Queued for the window of the path to the peer.
    awaiting_window: bool,
    /// A response gap caused a retransmission; more gaps before progress are ignored.
    gap_seen: bool,
    drained_reported: bool,
    position: u32,
    unacked: Psn,
    /// PSN after the newest packet ever sent.
    sent_end: Psn,
    /// First PSN of the next work request.
    next_psn: Psn,
    pub(crate) config: SendConfig,
    pub(crate) counters: SendCounters,
    deadline: Option<u64>,
    /// Index of the work request to send, and its next packet.
    cursor: usize,
    cursor_packet: u32,
    since_ack_request: u32,
    /// Timeouts since the last progress.
    consecutive_timeouts: u32,
    initiator: Option<Box<Initiator>>,
    /// `None` while the path has no congestion.
    congestion: Option<Congestion>,
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
            consecutive_timeouts: 0,
            awaiting_window: false,
            gap_seen: false,
            drained_reported: true,
            position: 0,
            initiator: None,
            congestion: None,
            counters: SendCounters::default(),
        }
    }

    pub(crate) const fn state(&self) -> QpState {
        self.state
    }

    /// Returns the number of work requests ever posted: the next position.
    pub(crate) const fn position(&self) -> u32 {
        self.position
    }

    pub(crate) const fn has_work(&self) -> bool {
        !self.queue.is_empty()
    }

    /// Sets the first PSN on the transition to RTS.
    pub(crate) fn start(&mut self, psn: Psn) {
        (self.unacked, self.sent_end, self.next_psn) = (psn, psn, psn);
        self.retries_left = self.config.retry_count;
        self.rnr_left = self.config.rnr_retry;
    }

    /// Changes the state; ERR flushes the queue.
    pub(crate) fn set_state(&mut self, state: QpState, out: &mut impl SendCompletions) {
        match state {
            QpState::Err => self.flush(state, out),
            QpState::Reset => {
                let initiator = self.initiator.take().map(Initiator::into_reset);
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

    pub(crate) fn reset_retries(&mut self) {
        self.retries_left = self.config.retry_count;
        self.rnr_left = self.config.rnr_retry;
    }

    /// Queues a valid work request; ERR and SQE flush it at once.
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
            Data::Window(bind) => wqe.set_bind(bind),
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

    /// Returns the next packet. The payload is inline or in `gather`, which is empty.
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
            match self.prepare_session(out) {
                SessionStep::Ready => {}
                SessionStep::Blocked => return None,
                SessionStep::Send(packet) => return Some(packet),
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
                    // It could never start: fails instead of stalling.
                    Some(WcStatus::LOC_QP_OP_ERR)
                } else {
                    check_local(wqe, &self.config, keys)
                }
            } else if wqe.length > mtu {
                // For a single packet, gathering the payload is the check.
                check_local(wqe, &self.config, keys)
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
        let in_flight = psn.distance_from(self.unacked);
        // A READ request puts all its responses in flight.
        let added =
            if matches!(wqe.op, SendOp::Read(_)) && self.config.flow.read_packets != u32::MAX {
                (wqe.packets - number).min(left_in_request(number, &self.config)) as i32
            } else {
                1
            };
        let Flow { window, ack_every, .. } = self.config.flow.limited_by(self.congestion);
        let blocked = reliable && in_flight > 0 && in_flight + added > window;
        // If the window shrank, possibly no packet in flight requests an acknowledgement: one more
        // does.
        let ack_missing = blocked && self.since_ack_request as i32 >= in_flight;
        if blocked && !ack_missing {
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
            && (whole || ack_missing || self.since_ack_request >= ack_every);
        let packet = Packet {
            transport: self.config.transport,
            pkey: self.config.pkey,
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
        // A response acknowledges everything before it.
        let requests_response = ack_request || wqe.op.reads_back();
        self.since_ack_request = if requests_response { 0 } else { self.since_ack_request + 1 };
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

    /// Returns whether the next packet is a READ or atomic beyond `max_rd_atomic` requests, if
    /// READs are split.
    #[inline]
    fn too_many_reads(&self) -> bool {
        self.config.flow.read_packets != u32::MAX
            && self.config.max_rd_atomic > 0
            && self.queue.get(self.cursor).is_some_and(|wqe| wqe.op.reads_back())
            && self.read_requests() >= u32::from(self.config.max_rd_atomic)
    }

    /// Counts READ and atomic requests from the oldest unacknowledged packet to the cursor.
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

    /// Completes the work request after its last packet, on an unreliable transport.
    pub(crate) fn on_sent(&mut self, out: &mut impl SendCompletions) {
        if self.config.transport != Transport::Rc && self.cursor > 0 {
            self.unacked = self.sent_end;
            self.complete_head(out);
        }
    }

    /// Handles the deadline from [`settle`](Self::settle).
    pub(crate) fn on_timer(&mut self, now: u64, out: &mut impl SendCompletions) {
        if self.deadline.is_none_or(|deadline| now < deadline) {
            return;
        }
        self.deadline = None;
        if !matches!(self.state, QpState::Rts | QpState::Sqd) {
            return;
        }
        match std::mem::replace(&mut self.wait, Wait::None) {
            Wait::Rnr(_) => self.go_back_n(),
            Wait::None => {
                let is_whole = self.ack_wait() == self.config.timeout.nanoseconds();
                self.counters.timeouts += 1;
                self.consecutive_timeouts += 1;
                self.congestion = Some(Congestion::new(PROBE, self.sent_end));
                self.gap_seen = false;
                if is_whole { self.retry(out) } else { self.retransmit() }
            }
        }
    }

    /// Returns the deadline for [`on_timer`](Self::on_timer). Calls `now` only if needed.
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
        let idle = self.awaiting_window && self.wait == Wait::None;
        if idle
            || !matches!(self.state, QpState::Rts | QpState::Sqd)
            || self.config.transport != Transport::Rc
        {
            self.deadline = None;
        } else if std::mem::take(&mut self.progressed) || self.deadline.is_none() {
            let duration = match self.wait {
                Wait::Rnr(timer) => Some(timer.nanoseconds()),
                Wait::None => self.ack_wait(),
            };
            self.deadline = duration.map(|duration| now.saturating_add(duration));
        }
        self.deadline
    }

    /// Returns the time to wait for an acknowledgement, `None` if it is infinite.
    fn ack_wait(&self) -> Option<u64> {
        let early = FIRST_WAIT.saturating_mul(1 << self.consecutive_timeouts.min(31));
        self.config.timeout.nanoseconds().map(|timeout| timeout.min(early))
    }

    /// Returns true once, when the queue has drained in SQD.
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
        self.retransmit();
    }

    fn retransmit(&mut self) {
        self.progressed = true;
        self.go_back_n();
    }

    fn at_unacked(&self) -> bool {
        self.cursor == 0
            && self.queue.front().is_some_and(|head| {
                head.started && head.first_psn.add(self.cursor_packet) == self.unacked
            })
    }

    /// Moves the cursor to the oldest unacknowledged packet.
    fn go_back_n(&mut self) {
        if let Some(initiator) = &mut self.initiator {
            initiator.resend_open();
        }
        self.cursor = 0;
        self.cursor_packet = match self.queue.front() {
            Some(head) if head.started => self.unacked.distance_from(head.first_psn).max(0) as u32,
            _ => 0,
        };
    }

    /// Moves the cursor past packets acknowledged during their retransmission.
    #[inline]
    fn skip_acknowledged(&mut self) {
        if self.cursor == 0
            && let Some(head) = self.queue.front().filter(|head| head.started)
        {
            let done = self.unacked.distance_from(head.first_psn).max(0) as u32;
            self.cursor_packet = self.cursor_packet.max(done);
        }
    }

    /// Fails the work request at the cursor once earlier ones are complete.
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
            self.cursor_packet = 0;
        } else {
            self.cursor -= 1;
        }
    }

    /// Fails the oldest work request, then flushes the queue.
    #[cold]
    fn fail(&mut self, status: WcStatus, out: &mut impl SendCompletions) {
        rdma_provider::warn!(
            qpn = %self.config.qpn,
            %status,
            "work request failed; flushing send queue"
        );
        if let Some(head) = self.queue.front() {
            let completion = head.completion(status, self.config.qpn);
            let position = head.position;
            self.queue.pop();
            out.complete(position, &completion);
        }
        // A reliable connection fails as a whole; otherwise receives continue (IBTA 10.3.1).
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
            rdma_provider::debug!(qpn = %self.config.qpn, flushed, "flushed send queue");
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

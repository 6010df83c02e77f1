//! Handling of responses.

use rdma_provider::types::{Access, Psn, QpState, RnrTimer, SendOp, Transport, WcStatus};

use crate::memory::dma::{Gather, Payload};
use crate::memory::keys::Keys;
use crate::roce::packet::{Body, Nak, Packet, Part, Syndrome};
use crate::roce::partition::may_communicate;

use super::flow::Congestion;
use super::wqe::left_in_request;
use super::{Requester, SendCompletions, Wait};

impl Requester {
    #[inline]
    pub(crate) fn on_response(
        &mut self,
        packet: &Packet,
        payload: &Payload<'_, '_>,
        keys: &Keys,
        out: &mut impl SendCompletions,
    ) {
        if !matches!(self.state, QpState::Rts | QpState::Sqd)
            || self.config.transport != Transport::Rc
        {
            return;
        }
        if !may_communicate(self.config.pkey, packet.pkey) {
            out.count_bad_pkey();
            return;
        }
        if packet.body == Body::Congestion {
            self.counters.congestion_notifications += 1;
            self.slow_down();
            return;
        }
        self.counters.responses += 1;
        let (psn, unacked) = (packet.psn, self.unacked);
        // Older than any outstanding packet, or never sent.
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
        if let Some(congestion) = self.congestion {
            let acknowledged = self.unacked.distance_from(unacked).max(0) as u32;
            self.congestion = congestion.widened(acknowledged);
        }
    }

    /// Narrows the window for congestion that packets in flight have met. One notification does so
    /// for all of them.
    #[cold]
    pub(crate) fn slow_down(&mut self) {
        let in_flight = self.in_flight();
        let is_known = self.congestion.is_some_and(|known| known.is_recent(self.unacked));
        if in_flight > 0 && !is_known {
            let window = self.config.flow.limited_by(self.congestion).window as u32;
            self.congestion = Some(Congestion::new(window.min(in_flight) / 2, self.sent_end));
        }
    }

    /// Restores the whole window, for another path.
    pub(crate) const fn forget_congestion(&mut self) {
        self.congestion = None;
    }

    /// Acknowledges packets before `to`. Returns false at a READ or atomic without response.
    #[inline]
    pub(super) fn advance(&mut self, to: Psn, out: &mut impl SendCompletions) -> bool {
        while self.unacked != to {
            let Some(head) = self.queue.front().filter(|head| head.started) else { return false };
            if head.op.reads_back() {
                // IBTA 9.7.5.1.1: acknowledging a later packet implies a lost response.
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
            self.skip_acknowledged();
        }
        true
    }

    pub(super) fn on_progress(&mut self) {
        self.progressed = true;
        self.consecutive_timeouts = 0;
        self.gap_seen = false;
        self.reset_retries();
    }

    pub(super) fn on_atomic(
        &mut self,
        psn: Psn,
        original: u64,
        keys: &Keys,
        out: &mut impl SendCompletions,
    ) {
        if !self.acknowledge_before(psn, out) {
            return;
        }
        let Some(head) = self.queue.front() else { return };
        if !matches!(head.op, SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. }) {
            self.fail(WcStatus::BAD_RESP_ERR, out);
            return;
        }
        let mut target = Gather::new();
        if keys.gather(head.sges(), self.config.pd, 0, 8, Access::LOCAL_WRITE, &mut target).is_err()
        {
            drop(target);
            self.fail(WcStatus::LOC_PROT_ERR, out);
            return;
        }
        Payload::Bytes(&original.to_ne_bytes()).copy_to(&target);
        drop(target);
        self.accept_response(psn.add(1), true, out);
    }

    pub(super) fn on_read_data(
        &mut self,
        psn: Psn,
        part: Part,
        payload: &Payload<'_, '_>,
        keys: &Keys,
        out: &mut impl SendCompletions,
    ) {
        if !self.acknowledge_before(psn, out) {
            return;
        }
        let Some(head) = self.queue.front() else { return };
        if !matches!(head.op, SendOp::Read(_)) {
            self.fail(WcStatus::BAD_RESP_ERR, out);
            return;
        }
        let mtu = self.config.mtu.bytes() as u32;
        let number = psn.distance_from(head.first_psn) as u32;
        let offset = number * mtu;
        let expected = (head.length - offset).min(mtu) as usize;
        let last = psn == head.last_psn();
        // Responses to a retransmission start with First or Only anywhere: only the end is checked.
        let ends = last || left_in_request(number, &self.config) == 1;
        if payload.len() != expected || part.ends() != ends {
            self.fail(WcStatus::BAD_RESP_ERR, out);
            return;
        }
        if expected > 0 {
            let mut target = Gather::new();
            let covered = keys.gather(
                head.sges(),
                self.config.pd,
                offset as usize,
                expected,
                Access::LOCAL_WRITE,
                &mut target,
            );
            if covered.is_err() {
                drop(target);
                self.fail(WcStatus::LOC_PROT_ERR, out);
                return;
            }
            payload.copy_to(&target);
        }
        self.accept_response(psn.add(1), last, out);
    }

    /// Acknowledges everything before the response `psn`. Returns whether `psn` is the oldest
    /// unacknowledged packet now.
    pub(super) fn acknowledge_before(&mut self, psn: Psn, out: &mut impl SendCompletions) -> bool {
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

    /// Acknowledges a response up to `end`; the `last` one completes the work request.
    pub(super) fn accept_response(&mut self, end: Psn, last: bool, out: &mut impl SendCompletions) {
        self.on_progress();
        self.unacked = end;
        if last {
            self.reads -= 1;
            self.complete_head(out);
        }
        self.skip_acknowledged();
    }

    /// Retransmits after a missing response, once until progress or a timeout.
    pub(super) fn on_gap(&mut self, out: &mut impl SendCompletions) {
        if !self.gap_seen && self.wait == Wait::None {
            self.gap_seen = true;
            self.counters.sequence_naks += 1;
            self.retry(out);
        }
    }

    pub(super) fn on_receiver_not_ready(
        &mut self,
        timer: RnrTimer,
        out: &mut impl SendCompletions,
    ) {
        if self.wait != Wait::None {
            return;
        }
        self.counters.rnr_naks += 1;
        // 7 means no limit (IBTA 9.7.5.2.8).
        if self.config.rnr_retry != 7 {
            if self.rnr_left == 0 {
                self.fail(WcStatus::RNR_RETRY_EXC_ERR, out);
                return;
            }
            self.rnr_left -= 1;
        }
        // The peer is reachable: losses during repeated waits do not add up.
        self.retries_left = self.config.retry_count;
        self.wait = Wait::Rnr(timer);
        self.deadline = None;
    }
}

pub(super) const fn status_of(nak: Nak) -> WcStatus {
    match nak {
        Nak::InvalidRequest => WcStatus::REM_INV_REQ_ERR,
        Nak::RemoteAccess => WcStatus::REM_ACCESS_ERR,
        Nak::RemoteOperation => WcStatus::REM_OP_ERR,
        Nak::Sequence | Nak::Other(_) => WcStatus::BAD_RESP_ERR,
    }
}

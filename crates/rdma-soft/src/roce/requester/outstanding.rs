//! Packets in flight, and requests for the window of a UDP path.

use rdma_provider::types::{QpState, SendOp};

use super::wqe::left_in_request;
use super::{Requester, Wait};

/// A request for a path's window, in packets or READ responses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct WindowRequest {
    /// Minimum to start with.
    pub(crate) min: u32,
    /// Packets after waiting: one packet is not worth the switch.
    pub(crate) quantum: u32,
}

impl Requester {
    /// Returns the number of packets and READ responses in flight.
    ///
    /// - After an RNR NAK it is 0: the peer dropped them.
    /// - After go-back-N only retransmissions count.
    /// - After two timeouts in a row it is at most 1.
    pub(crate) fn in_flight(&self) -> u32 {
        let must_resend_open =
            self.initiator.as_ref().is_some_and(|initiator| initiator.must_resend_open());
        if self.wait != Wait::None || must_resend_open {
            return 0;
        }
        let end = match self.queue.get(self.cursor) {
            Some(wqe) if wqe.started => wqe.first_psn.add(self.cursor_packet),
            _ => self.sent_end,
        };
        let packets = end.distance_from(self.unacked).max(0) as u32;
        if self.has_timed_out_twice() { packets.min(1) } else { packets }
    }

    pub(crate) fn all_acknowledged(&self) -> bool {
        self.unacked == self.sent_end && self.state != QpState::Err
    }

    /// Returns the window needed to send, if everything is acknowledged or to be retransmitted.
    ///
    /// Returns `None` otherwise, if nothing can be sent, or for a new DC session, which was granted
    /// the window for OPEN.
    pub(crate) fn window_request(&self) -> Option<WindowRequest> {
        if !matches!(self.state, QpState::Rts | QpState::Sqd) || self.wait != Wait::None {
            return None;
        }
        let (is_unused, resends) = self.initiator.as_ref().map_or((false, false), |initiator| {
            (initiator.is_unused(), initiator.must_resend_open())
        });
        if is_unused || self.unacked != self.sent_end && !self.at_unacked() && !resends {
            return None;
        }
        let mut at = self.cursor;
        while self.queue.get(at)?.op.is_local() {
            at += 1;
        }
        let wqe = self.queue.get(at).filter(|wqe| wqe.started || self.state == QpState::Rts)?;
        let packets = if wqe.started {
            wqe.packets
        } else {
            wqe.length.div_ceil(self.config.mtu.bytes() as u32).max(1)
        };
        let number = if at == self.cursor { self.cursor_packet } else { 0 };
        let quantum = (packets - number).min(left_in_request(number, &self.config));
        Some(match wqe.op {
            SendOp::Read(_) if !self.has_timed_out_twice() => {
                WindowRequest { min: quantum, quantum }
            }
            // A silent peer gets no more of the window than a probe needs.
            _ if self.has_timed_out() => WindowRequest { min: 1, quantum: 1 },
            _ => WindowRequest { min: 1, quantum },
        })
    }

    /// Returns whether a timeout was not followed by progress.
    pub(crate) const fn has_timed_out(&self) -> bool {
        self.consecutive_timeouts > 0
    }

    /// Returns whether the retransmission timed out too.
    const fn has_timed_out_twice(&self) -> bool {
        self.consecutive_timeouts > 1
    }

    /// Suspends the timeout while queued for the window, with nothing in flight.
    pub(crate) const fn set_awaiting_window(&mut self, awaiting: bool) {
        self.awaiting_window = awaiting;
    }
}

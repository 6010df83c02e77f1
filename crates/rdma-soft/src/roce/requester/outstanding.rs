//! What is underway, and what a reliable queue pair asks for when it comes to the way that it shares with others.

use rdma_provider::types::{QpState, SendOp};

use super::wqe::left_in_request;
use super::{Requester, Wait};

/// Packets, or answers, that somebody asks the way for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Asks {
    /// With which it can begin.
    pub(crate) least: u32,
    /// Of a turn for which it has waited: one at a time would cost more than it brings.
    pub(crate) turn: u32,
}

impl Requester {
    /// Packets that are on their way, or answers to READs that have not come: none while the peer, which has dropped them, is not
    /// ready, and of what is to be sent again only what has been. Of one that has been silent for long, one.
    pub(crate) fn underway(&self) -> u32 {
        let opens_again = self.initiator.as_ref().is_some_and(|initiator| initiator.opens_again());
        if self.wait != Wait::None || opens_again {
            return 0;
        }
        let end = match self.queue.get(self.cursor) {
            Some(wqe) if wqe.started => wqe.first_psn.add(self.cursor_packet),
            _ => self.sent_end,
        };
        let packets = end.distance_from(self.unacked).max(0) as u32;
        if self.is_long_silent() { packets.min(1) } else { packets }
    }

    /// True if the peer has answered all that was sent.
    pub(crate) fn is_answered(&self) -> bool {
        self.unacked == self.sent_end && self.state != QpState::Err
    }

    /// What it would send now, if nothing of it is on the way: all has been acknowledged, or is to be sent again. None
    /// otherwise, or if it can send nothing, or begins a session with a DC target, for which its turn has come already.
    pub(crate) fn asks(&self) -> Option<Asks> {
        if !matches!(self.state, QpState::Rts | QpState::Sqd) || self.wait != Wait::None {
            return None;
        }
        let (begins, again) = self
            .initiator
            .as_ref()
            .map_or((false, false), |initiator| (initiator.begins(), initiator.opens_again()));
        if begins || self.unacked != self.sent_end && !self.at_unacked() && !again {
            return None;
        }
        // What is local takes no way.
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
        let turn = (packets - number).min(left_in_request(number, &self.config));
        Some(match wqe.op {
            SendOp::Read(_) if !self.is_long_silent() => Asks { least: turn, turn },
            // Nobody answers: it tries with little.
            _ if self.is_silent() => Asks { least: 1, turn: 1 },
            _ => Asks { least: 1, turn },
        })
    }

    /// True if nothing has been heard since a timeout.
    pub(crate) const fn is_silent(&self) -> bool {
        self.silences > 0
    }

    /// Nor after what was sent again.
    const fn is_long_silent(&self) -> bool {
        self.silences > 1
    }

    /// While it waits for its turn nothing is to be acknowledged, and no time runs.
    pub(crate) const fn pause(&mut self, paused: bool) {
        self.paused = paused;
    }
}

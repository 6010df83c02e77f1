//! The fast path within a process: whole messages without packets.
//!
//! It changes both machines as the packets of the message would, so that packets can follow.

use rdma_provider::types::{
    Data, Psn, QpState, SendFlags, SendOp, SendWr, WcStatus, WorkCompletion,
};

use super::wqe::opcode_of;
use super::{Requester, SendCompletions, Wait};

/// Maximum length of a message on the fast path: a slice of the caller's time.
const MAX_LENGTH: usize = 256 << 10;

/// A message that is delivered whole.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DirectMessage<'a> {
    pub(crate) op: &'a SendOp,
    pub(crate) solicited: bool,
    pub(crate) length: usize,
    pub(crate) data: Data<'a>,
}

impl Requester {
    /// Returns the next work request, its PSN and its number of packets, if it is not too long for
    /// the fast path and nothing is outstanding.
    pub(crate) fn direct_head(&self) -> Option<(Psn, DirectMessage<'_>, u32)> {
        let head = self.queue.front()?;
        if head.started || head.length as usize > MAX_LENGTH || !self.may_send_directly() {
            return None;
        }
        let data = match head.several.as_slice() {
            _ if head.length == 0 || head.inline => Data::Inline(head.bytes()),
            [] => Data::Sges(std::slice::from_ref(&head.one)),
            _ => return None,
        };
        let (psn, message) =
            self.direct_message(&head.op, head.flags, head.length as usize, data)?;
        let packets = message.length.div_ceil(self.config.mtu.bytes()).max(1);
        Some((psn, message, packets as u32))
    }

    /// Returns a work request as a message, and its PSN, if it is a single-packet message and
    /// nothing is queued or outstanding: it needs no slot of the queue.
    #[inline]
    pub(crate) fn unqueued<'a>(
        &self,
        wr: &'a SendWr<'_>,
        length: u32,
    ) -> Option<(Psn, DirectMessage<'a>)> {
        let length = length as usize;
        let eligible = self.queue.is_empty()
            && self.may_send_directly()
            && length > 0
            && length <= self.config.mtu.bytes();
        if eligible { self.direct_message(&wr.op, wr.flags, length, wr.data) } else { None }
    }

    /// Returns the address after the fields that an unqueued work request uses.
    #[cfg(test)]
    pub(crate) fn direct_end(&self) -> usize {
        (&raw const self.counters.responses).addr() + size_of::<u64>()
    }

    #[inline]
    fn may_send_directly(&self) -> bool {
        self.state == QpState::Rts && self.unacked == self.next_psn && self.wait == Wait::None
    }

    #[inline]
    fn direct_message<'a>(
        &self,
        op: &'a SendOp,
        flags: SendFlags,
        given: usize,
        data: Data<'a>,
    ) -> Option<(Psn, DirectMessage<'a>)> {
        let mut length = given;
        if op.reads_back() {
            if !matches!(op, SendOp::Read(_)) {
                length = 8;
            }
            // The packet path handles these.
            if self.config.max_rd_atomic == 0 || given == 0 || given < length {
                return None;
            }
        }
        let solicited = flags.contains(SendFlags::SOLICITED);
        Some((self.next_psn, DirectMessage { op, solicited, length, data }))
    }

    /// Completes an [unqueued](Self::unqueued) work request that the peer has acknowledged.
    #[inline(always)]
    pub(crate) fn unqueued_sent(
        &mut self,
        wr: &SendWr<'_>,
        length: u32,
        out: &mut impl SendCompletions,
    ) {
        let position = self.position;
        self.position = position.wrapping_add(1);
        self.count_acknowledged(1);
        if wr.flags.contains(SendFlags::SIGNALED) {
            let completion = WorkCompletion {
                wr_id: wr.wr_id,
                status: WcStatus::SUCCESS,
                opcode: opcode_of(&wr.op),
                byte_len: length,
                qpn: self.config.qpn,
                ..WorkCompletion::EMPTY
            };
            out.complete(position, &completion);
        }
    }

    #[inline]
    fn count_acknowledged(&mut self, packets: u32) {
        self.counters.packets += 1;
        self.counters.responses += 1;
        self.next_psn = self.next_psn.add(packets);
        self.sent_end = self.next_psn;
        self.unacked = self.next_psn;
        self.retries_left = self.config.retry_count;
        self.rnr_left = self.config.rnr_retry;
    }

    /// Records that the peer got the message at the head, in `packets` or as their responses, and
    /// whether it acknowledged it.
    #[inline]
    pub(crate) fn fast_path_sent(
        &mut self,
        packets: u32,
        acknowledged: bool,
        out: &mut impl SendCompletions,
    ) {
        if packets > 1 {
            self.count_further(packets - 1);
        }
        if acknowledged {
            self.count_acknowledged(packets);
            self.complete_head(out);
            return;
        }
        self.counters.packets += 1;
        let psn = self.next_psn;
        self.next_psn = psn.add(packets);
        self.sent_end = self.next_psn;
        if let Some(head) = self.queue.front_mut() {
            head.started = true;
            head.first_psn = psn;
            head.packets = packets;
            self.cursor = 1;
            self.cursor_packet = 0;
        }
    }

    /// Counts the packets of the message after the first, or the responses of a READ.
    fn count_further(&mut self, packets: u32) {
        let reads_back = self.queue.front().is_some_and(|head| head.op.reads_back());
        let counters = &mut self.counters;
        let counter = if reads_back { &mut counters.responses } else { &mut counters.packets };
        *counter += u64::from(packets);
    }
}

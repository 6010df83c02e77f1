//! The fast path within a process: whole messages without packets.
//!
//! It changes both machines as the packets of the message would, so that packets can follow.

use rdma_provider::types::{Data, Psn, QpState, SendFlags, SendOp};

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
    /// Returns the next work request and its PSN, if it is a single-packet message and nothing is
    /// outstanding.
    #[inline]
    pub(crate) fn fast_path_head(&self) -> Option<(Psn, DirectMessage<'_>)> {
        self.direct_head(self.config.mtu.bytes())
    }

    /// Returns the next work request, its PSN and its number of packets, if it is not too long for
    /// the fast path and nothing is outstanding.
    pub(crate) fn long_head(&self) -> Option<(Psn, DirectMessage<'_>, u32)> {
        let (psn, message) = self.direct_head(MAX_LENGTH)?;
        let packets = message.length.div_ceil(self.config.mtu.bytes()).max(1);
        Some((psn, message, packets as u32))
    }

    #[inline(always)]
    fn direct_head(&self, max_length: usize) -> Option<(Psn, DirectMessage<'_>)> {
        let head = self.queue.front()?;
        let eligible = self.state == QpState::Rts
            && !head.started
            && self.unacked == self.next_psn
            && self.wait == Wait::None
            && head.length as usize <= max_length;
        if !eligible {
            return None;
        }
        let mut length = head.length as usize;
        if head.op.reads_back() {
            if !matches!(head.op, SendOp::Read(_)) {
                length = 8;
            }
            // The packet path handles these.
            if self.config.max_rd_atomic == 0 || head.length == 0 || (head.length as usize) < length
            {
                return None;
            }
        }
        let data = match head.several.as_slice() {
            _ if head.length == 0 || head.inline => Data::Inline(head.bytes()),
            [] => Data::Sges(std::slice::from_ref(&head.one)),
            _ => return None,
        };
        let solicited = head.flags.contains(SendFlags::SOLICITED);
        Some((self.next_psn, DirectMessage { op: &head.op, solicited, length, data }))
    }

    /// Records that the peer got the message at the head, in `packets` or as their responses, and
    /// whether it acknowledged it.
    #[inline(always)]
    pub(crate) fn fast_path_sent(
        &mut self,
        packets: u32,
        acknowledged: bool,
        out: &mut impl SendCompletions,
    ) {
        if packets > 1 {
            self.count_further(packets - 1);
        }
        self.counters.packets += 1;
        let psn = self.next_psn;
        self.next_psn = psn.add(packets);
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

//! The fast path: single-packet messages without an encoded packet.

use rdma_provider::types::{Data, Psn, QpState, SendFlags, SendOp};

use super::{Requester, SendCompletions, Wait};

/// A single-packet message.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SinglePacket<'a> {
    pub(crate) op: &'a SendOp,
    pub(crate) solicited: bool,
    pub(crate) length: usize,
    pub(crate) data: Data<'a>,
}

impl Requester {
    /// Returns the next work request and its PSN, if it is a single-packet message and nothing is
    /// outstanding.
    #[inline]
    pub(crate) fn fast_path_head(&self) -> Option<(Psn, SinglePacket<'_>)> {
        let head = self.queue.front()?;
        let eligible = self.state == QpState::Rts
            && !head.started
            && self.unacked == self.next_psn
            && self.wait == Wait::None
            && head.length as usize <= self.config.mtu.bytes();
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
        Some((self.next_psn, SinglePacket { op: &head.op, solicited, length, data }))
    }

    /// Records that the peer got the message of [`fast_path_head`](Self::fast_path_head), and
    /// whether it acknowledged it.
    #[inline]
    pub(crate) fn fast_path_sent(&mut self, acknowledged: bool, out: &mut impl SendCompletions) {
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
}

//! The short way: a message of one packet with nothing outstanding needs no packet.

use rdma_provider::types::{Data, Psn, QpState, SendFlags, SendOp};

use super::{Requester, SendCompletions, Wait};

/// A message of one packet, as it stands in the send queue.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Whole<'a> {
    pub(crate) op: &'a SendOp,
    pub(crate) solicited: bool,
    pub(crate) length: usize,
    pub(crate) data: Data<'a>,
}

impl Requester {
    /// The next work request, if it is a whole message of one packet into the peer and nothing is
    /// outstanding: then it can be executed without a packet. Its sequence number comes with it.
    #[inline]
    pub(crate) fn quiet_head(&self) -> Option<(Psn, Whole<'_>)> {
        let head = self.queue.front()?;
        let quiet = self.state == QpState::Rts
            && !head.started
            && self.unacked == self.next_psn
            && self.wait == Wait::None
            && head.length as usize <= self.config.mtu.bytes();
        if !quiet {
            return None;
        }
        let mut length = head.length as usize;
        if head.op.reads_back() {
            if !matches!(head.op, SendOp::Read(_)) {
                length = 8;
            }
            // Whatever is odd about it is found out on the way of packets.
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
        Some((self.next_psn, Whole { op: &head.op, solicited, length, data }))
    }

    /// What [`quiet_head`](Self::quiet_head) gave was sent; `acknowledged`: and executed by the peer.
    #[inline]
    pub(crate) fn quiet_sent(&mut self, acknowledged: bool, out: &mut impl SendCompletions) {
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

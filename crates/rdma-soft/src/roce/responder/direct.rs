//! The fast path within a process: whole messages without packets.

use rdma_provider::types::{Access, Gid, Psn, QpState, SendOp, Transport};

use crate::memory::dma::{self, Payload, Segment};
use crate::memory::keys::Keys;
use crate::roce::packet::{AtomicOp, Part, Tail};
use crate::roce::requester::DirectMessage;

use super::{Piece, Receiver, Responder};

impl Responder {
    /// Executes a SEND or WRITE with the expected PSN.
    ///
    /// - `Some(true)`: acknowledged.
    /// - `Some(false)`: the reply is queued.
    /// - `None`: not executed. The packet path decides, so that only it refuses WRITEs.
    #[inline(always)]
    pub(crate) fn on_direct_message(
        &mut self,
        (psn, packets): (Psn, u32),
        source: &Gid,
        message: &DirectMessage<'_>,
        payload: &Payload<'_, '_>,
        keys: &Keys,
        out: &mut impl Receiver,
    ) -> Option<bool> {
        let length = message.length;
        if !self.accepts_fast_path(psn, source) || !self.agrees(length, packets) {
            return None;
        }
        let tail = match *message.op {
            SendOp::Write(remote) => {
                if !self.config.access.contains(Access::REMOTE_WRITE) {
                    return None;
                }
                if length > 0 {
                    let target = self.remote(keys, remote, length, Access::REMOTE_WRITE).ok()?;
                    payload.copy_to(std::slice::from_ref(&target));
                }
                self.expected = psn.add(packets);
                self.msn = self.msn.wrapping_add(1);
                self.count_fast_path();
                self.count_further(packets);
                return Some(true);
            }
            SendOp::Send => Tail::None,
            SendOp::SendWithImm(imm) => Tail::Imm(imm),
            _ => return None,
        };
        // The packets before an error would be executed.
        if packets > 1 && !(self.take_receive(out) && length as u64 <= self.receive.length) {
            return None;
        }
        self.count_fast_path();
        self.count_further(packets);
        let solicited = message.solicited;
        Some(
            match self.on_send(
                Piece { psn, packets, solicited, part: Part::Only },
                tail,
                payload,
                keys,
                out,
            ) {
                Ok(acknowledged) => acknowledged,
                Err(refusal) => {
                    self.refuse(psn, refusal, out);
                    false
                }
            },
        )
    }

    /// Executes a READ or atomic with the expected PSN into the requester's memory, with `packets`
    /// of response, or returns `None`.
    ///
    /// It saves nothing for duplicates, because the response has arrived.
    #[inline(always)]
    pub(crate) fn on_direct_read(
        &mut self,
        (psn, packets): (Psn, u32),
        source: &Gid,
        op: &SendOp,
        into: &Segment<'_>,
        keys: &Keys,
    ) -> Option<()> {
        if !self.accepts_fast_path(psn, source)
            || !self.agrees(into.len(), packets)
            || self.config.max_dest_rd_atomic == 0
        {
            return None;
        }
        let (remote, need, atomic) = match *op {
            SendOp::Read(remote) => (remote, Access::REMOTE_READ, None),
            SendOp::CompareSwap { remote, compare, swap } => {
                (remote, Access::REMOTE_ATOMIC, Some(AtomicOp::CompareSwap { compare, swap }))
            }
            SendOp::FetchAdd { remote, add } => {
                (remote, Access::REMOTE_ATOMIC, Some(AtomicOp::FetchAdd { add }))
            }
            _ => return None,
        };
        if !self.config.access.contains(need) {
            return None;
        }
        let from = self.remote(keys, remote, into.len(), need).ok()?;
        match atomic {
            None => Payload::Segment(&from).copy_to(std::slice::from_ref(into)),
            Some(op) => {
                let original = dma::atomic(&from, op)?;
                Payload::Bytes(&original.to_ne_bytes()).copy_to(std::slice::from_ref(into));
            }
        }
        self.expected = psn.add(packets);
        self.msn = self.msn.wrapping_add(1);
        self.count_fast_path();
        if packets > 1 {
            self.counters.replies += u64::from(packets - 1);
        }
        Some(())
    }

    /// Returns the address after the fields that the fast path uses.
    #[cfg(test)]
    pub(crate) fn direct_end(&self) -> usize {
        (&raw const self.counters.replies).addr() + size_of::<u64>()
    }

    /// Returns whether the fast path may execute a request.
    #[inline(always)]
    fn accepts_fast_path(&self, psn: Psn, source: &Gid) -> bool {
        self.state == QpState::Rts
            && self.message.is_none()
            && psn == self.expected
            && self.replies.is_empty()
            && *source == self.config.peer_gid
            && self.config.transport == Transport::Rc
    }

    /// Returns whether the message has as many packets with this side's MTU.
    #[inline]
    fn agrees(&self, length: usize, packets: u32) -> bool {
        packets == 1 || length.div_ceil(self.config.mtu.bytes()) == packets as usize
    }

    #[inline]
    fn count_fast_path(&mut self) {
        self.counters.packets += 1;
        self.counters.replies += 1;
        self.gap_reported = false;
    }

    /// Counts the packets after the first.
    #[inline]
    fn count_further(&mut self, packets: u32) {
        if packets > 1 {
            self.counters.packets += u64::from(packets - 1);
        }
    }
}

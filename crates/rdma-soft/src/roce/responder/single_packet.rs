//! The short way: a message of one packet, next in sequence, executed without the packet.

use rdma_provider::types::{Access, Gid, Psn, QpState, SendOp, Transport};

use crate::device::dma::{self, Payload, Segment};
use crate::device::keys::Keys;
use crate::roce::packet::{AtomicOp, Part, Tail};
use crate::roce::requester::Whole;

use super::{Piece, Receiver, Responder};

impl Responder {
    /// Executes a message of one packet that is the next in sequence, without the packet. `Some(true)`:
    /// acknowledged; `Some(false)`: the answer is among the replies; `None`: nothing was done, a packet
    /// is needed. That is so for whatever is to be refused, so the refusals are written only once.
    #[inline]
    pub(crate) fn on_whole(
        &mut self,
        psn: Psn,
        source: &Gid,
        whole: &Whole<'_>,
        payload: &Payload<'_, '_>,
        keys: &Keys,
        out: &mut impl Receiver,
    ) -> Option<bool> {
        if !self.is_quiet(psn, source) {
            return None;
        }
        let tail = match *whole.op {
            SendOp::Write(remote) => {
                if !self.config.access.contains(Access::REMOTE_WRITE) {
                    return None;
                }
                if whole.length > 0 {
                    let target =
                        self.remote(keys, remote, whole.length, Access::REMOTE_WRITE).ok()?;
                    payload.copy_to(std::slice::from_ref(&target));
                }
                self.expected = psn.add(1);
                self.msn = self.msn.wrapping_add(1);
                self.on_quiet();
                return Some(true);
            }
            SendOp::Send => Tail::None,
            SendOp::SendWithImm(imm) => Tail::Imm(imm),
            _ => return None,
        };
        self.on_quiet();
        Some(
            match self.on_send(
                Piece { psn, solicited: whole.solicited, part: Part::Only },
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

    /// As [`on_whole`](Self::on_whole) for what reads back, `into` the memory of the requester. Nothing is
    /// saved to be answered again: the answer is there already.
    #[inline]
    pub(crate) fn on_whole_read(
        &mut self,
        psn: Psn,
        source: &Gid,
        op: &SendOp,
        into: &Segment<'_>,
        keys: &Keys,
    ) -> Option<()> {
        if !self.is_quiet(psn, source) || self.config.max_dest_rd_atomic == 0 {
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
        self.expected = psn.add(1);
        self.msn = self.msn.wrapping_add(1);
        self.on_quiet();
        Some(())
    }

    /// True if a request with this sequence number could be executed and answered at once.
    #[inline]
    pub(super) fn is_quiet(&self, psn: Psn, source: &Gid) -> bool {
        self.state == QpState::Rts
            && self.message.is_none()
            && psn == self.expected
            && self.replies.is_empty()
            && *source == self.config.peer_gid
            && self.config.transport == Transport::Rc
    }

    #[inline]
    pub(super) fn on_quiet(&mut self) {
        self.counters.packets += 1;
        self.counters.replies += 1;
        self.gap_reported = false;
    }
}

//! The fast path: single-packet messages without an encoded packet.

use rdma_provider::types::{Access, Gid, Psn, QpState, SendOp, Transport};

use crate::device::dma::{self, Payload, Segment};
use crate::device::keys::Keys;
use crate::roce::packet::{AtomicOp, Part, Tail};
use crate::roce::requester::SinglePacket;

use super::{Piece, Receiver, Responder};

impl Responder {
    /// Executes a SEND or WRITE with the expected PSN.
    ///
    /// - `Some(true)`: acknowledged.
    /// - `Some(false)`: the reply is queued.
    /// - `None`: not executed. The packet path decides, so that only it refuses WRITEs.
    #[inline]
    pub(crate) fn on_single_packet(
        &mut self,
        psn: Psn,
        source: &Gid,
        message: &SinglePacket<'_>,
        payload: &Payload<'_, '_>,
        keys: &Keys,
        out: &mut impl Receiver,
    ) -> Option<bool> {
        if !self.accepts_fast_path(psn, source) {
            return None;
        }
        let tail = match *message.op {
            SendOp::Write(remote) => {
                if !self.config.access.contains(Access::REMOTE_WRITE) {
                    return None;
                }
                if message.length > 0 {
                    let target =
                        self.remote(keys, remote, message.length, Access::REMOTE_WRITE).ok()?;
                    payload.copy_to(std::slice::from_ref(&target));
                }
                self.expected = psn.add(1);
                self.msn = self.msn.wrapping_add(1);
                self.count_fast_path();
                return Some(true);
            }
            SendOp::Send => Tail::None,
            SendOp::SendWithImm(imm) => Tail::Imm(imm),
            _ => return None,
        };
        self.count_fast_path();
        Some(
            match self.on_send(
                Piece { psn, solicited: message.solicited, part: Part::Only },
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

    /// Executes a READ or atomic with the expected PSN into the requester's memory, or returns
    /// `None`.
    ///
    /// It saves nothing for duplicates, because the response has arrived.
    #[inline]
    pub(crate) fn on_single_packet_read(
        &mut self,
        psn: Psn,
        source: &Gid,
        op: &SendOp,
        into: &Segment<'_>,
        keys: &Keys,
    ) -> Option<()> {
        if !self.accepts_fast_path(psn, source) || self.config.max_dest_rd_atomic == 0 {
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
        self.count_fast_path();
        Some(())
    }

    /// Returns whether the fast path may execute a request.
    #[inline]
    pub(super) fn accepts_fast_path(&self, psn: Psn, source: &Gid) -> bool {
        self.state == QpState::Rts
            && self.message.is_none()
            && psn == self.expected
            && self.replies.is_empty()
            && *source == self.config.peer_gid
            && self.config.transport == Transport::Rc
    }

    #[inline]
    pub(super) fn count_fast_path(&mut self) {
        self.counters.packets += 1;
        self.counters.replies += 1;
        self.gap_reported = false;
    }
}

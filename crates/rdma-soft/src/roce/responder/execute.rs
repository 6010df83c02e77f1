//! Execution of requests, and replies to duplicates.

use rdma_provider::types::{
    Access, Imm, Mtu, Psn, RemoteAddr, WcFlags, WcOpcode, WcStatus, WorkCompletion,
};

use crate::memory::dma::{self, Payload, Segment};
use crate::memory::keys::Keys;
use crate::roce::packet::{AtomicOp, Body, Packet, Part, Reth, Syndrome, Tail};
use crate::roce::requester::MAX_MESSAGE;

use super::{Message, Piece, ReadReply, Receiver, Refusal, Reply, Resource, Responder};

impl Responder {
    /// Executes a packet of a SEND. Returns whether to acknowledge it.
    #[inline]
    pub(super) fn on_send(
        &mut self,
        piece: Piece,
        tail: Tail,
        payload: &Payload<'_, '_>,
        keys: &Keys,
        out: &mut impl Receiver,
    ) -> Result<bool, Refusal> {
        let Piece { psn, packets, solicited, part } = piece;
        let in_order = if part.begins() {
            self.message.is_none()
        } else {
            self.message == Some(Message::Send)
        };
        let len = payload.len();
        if !in_order || !piece.fits(len, self.config.mtu) {
            return Err(Refusal::INVALID);
        }
        if part.begins() {
            if !self.take_receive(out) {
                self.not_ready(psn);
                return Ok(false);
            }
            self.received = 0;
        }
        self.fill_receive(payload, keys)?;
        self.expected = psn.add(packets);
        if !part.ends() {
            self.message = Some(Message::Send);
            return Ok(true);
        }
        self.message = None;
        let (imm_or_rkey, flags) = match tail {
            Tail::None => (0, WcFlags::empty()),
            Tail::Imm(imm) => (imm.0.to_be(), WcFlags::WITH_IMM),
            // Only windows: a peer must not invalidate a registration.
            Tail::Invalidate(rkey) => {
                keys.invalidate(rkey, self.config.qpn).map_err(|_| Refusal::INVALIDATION)?;
                (rkey.0, WcFlags::WITH_INV)
            }
        };
        self.msn = self.msn.wrapping_add(1);
        let completion = WorkCompletion {
            byte_len: self.received,
            imm_or_rkey,
            flags,
            opcode: WcOpcode::RECV,
            ..self.completion(self.receive.wr_id, WcStatus::SUCCESS)
        };
        self.finish_receive(&completion, solicited, out);
        Ok(true)
    }

    /// Executes a packet of a WRITE. Returns whether to acknowledge it.
    #[inline]
    pub(super) fn on_write(
        &mut self,
        piece: Piece,
        reth: Reth,
        imm: Option<Imm>,
        payload: &Payload<'_, '_>,
        keys: &Keys,
        out: &mut impl Receiver,
    ) -> Result<bool, Refusal> {
        let Piece { psn, solicited, part, .. } = piece;
        let len = payload.len();
        if !piece.fits(len, self.config.mtu) {
            return Err(Refusal::INVALID);
        }
        let rest = match (part.begins(), self.message) {
            (true, None) => reth,
            (false, Some(Message::Write(rest))) => rest,
            _ => return Err(Refusal::INVALID),
        };
        let total = rest.length as usize;
        let announced = if part.ends() { len == total } else { len < total };
        let allowed = self.config.access.contains(Access::REMOTE_WRITE);
        if !announced || !allowed || rest.length > MAX_MESSAGE * 2 {
            return Err(Refusal::INVALID);
        }
        // Before any byte is written: an immediate needs a receive.
        if imm.is_some() && !self.take_receive(out) {
            self.not_ready(psn);
            return Ok(false);
        }
        let need = Access::REMOTE_WRITE;
        if part.begins() && !part.ends() {
            self.remote(keys, rest.remote, total, need)?;
        }
        if len > 0 {
            let target = self.remote(keys, rest.remote, len, need)?;
            payload.copy_to(std::slice::from_ref(&target));
        }
        self.expected = psn.add(1);
        if !part.ends() {
            if part.begins() {
                self.received = rest.length;
            }
            let RemoteAddr { addr, rkey } = rest.remote;
            let remote = RemoteAddr { addr: addr.wrapping_add(len as u64), rkey };
            self.message = Some(Message::Write(Reth { remote, length: rest.length - len as u32 }));
            return Ok(true);
        }
        if part.begins() {
            self.received = rest.length;
        }
        self.message = None;
        self.msn = self.msn.wrapping_add(1);
        if let Some(imm) = imm {
            let completion = WorkCompletion {
                byte_len: self.received,
                imm_or_rkey: imm.0.to_be(),
                flags: WcFlags::WITH_IMM,
                opcode: WcOpcode::RECV_RDMA_WITH_IMM,
                ..self.completion(self.receive.wr_id, WcStatus::SUCCESS)
            };
            self.finish_receive(&completion, solicited, out);
        }
        Ok(true)
    }

    pub(super) fn on_read(&mut self, psn: Psn, reth: Reth, keys: &Keys) -> Result<bool, Refusal> {
        let allowed = self.config.access.contains(Access::REMOTE_READ);
        if self.message.is_some()
            || !allowed
            || reth.length > MAX_MESSAGE * 2
            || !self.has_resource()
        {
            return Err(Refusal::INVALID);
        }
        if reth.length > 0 {
            self.remote(keys, reth.remote, reth.length as usize, Access::REMOTE_READ)?;
        }
        let packets = reth.length.div_ceil(self.config.mtu.bytes() as u32).max(1);
        self.expected = psn.add(packets);
        self.msn = self.msn.wrapping_add(1);
        let msn = self.msn;
        self.save(Resource::Read { psn, packets, reth, msn });
        self.replies.push_back(Reply::Read(ReadReply {
            psn,
            msn,
            rest: reth,
            begun: false,
            duplicate: false,
        }));
        Ok(false)
    }

    pub(super) fn on_atomic(
        &mut self,
        psn: Psn,
        remote: RemoteAddr,
        op: AtomicOp,
        keys: &Keys,
    ) -> Result<bool, Refusal> {
        let allowed = self.config.access.contains(Access::REMOTE_ATOMIC);
        if self.message.is_some()
            || !allowed
            || !remote.addr.is_multiple_of(8)
            || !self.has_resource()
        {
            return Err(Refusal::INVALID);
        }
        let target = self.remote(keys, remote, 8, Access::REMOTE_ATOMIC)?;
        let original = dma::atomic(&target, op).ok_or(Refusal::INVALID)?;
        drop(target);
        self.expected = psn.add(1);
        self.msn = self.msn.wrapping_add(1);
        let msn = self.msn;
        self.save(Resource::Atomic { psn, original, msn });
        self.replies.push_back(Reply::Atomic { psn, msn, original, duplicate: false });
        Ok(false)
    }

    #[inline]
    pub(super) fn remote<'k>(
        &self,
        keys: &'k Keys,
        RemoteAddr { addr, rkey }: RemoteAddr,
        len: usize,
        need: Access,
    ) -> Result<Segment<'k>, Refusal> {
        let accessor = (self.config.pd, self.config.qpn);
        keys.resolve_remote(rkey.0, accessor, addr, len, need).map_err(|_| Refusal::ACCESS)
    }

    /// Handles a duplicate request, whose reply was lost (IBTA 9.7.5.1.4).
    #[cold]
    pub(super) fn on_duplicate(&mut self, packet: &Packet, keys: &Keys) {
        self.counters.duplicates += 1;
        match packet.body {
            Body::Send { .. } | Body::Write { .. } => {
                self.acknowledge_duplicate(packet.psn);
            }
            Body::ReadRequest(requested) => {
                let saved = self.resources.iter().find_map(|resource| match *resource {
                    Resource::Read { psn, packets, reth, msn } => {
                        let into = packet.psn.distance_from(psn);
                        (0..packets as i32).contains(&into).then_some((
                            into as u32,
                            reth,
                            msn,
                            psn,
                            packets as i32,
                        ))
                    }
                    Resource::Atomic { .. } => None,
                });
                // It must request the rest of the original from that packet on.
                if let Some((into, reth, msn, first, packets)) = saved
                    && requested.remote.rkey == reth.remote.rkey
                    && let Some(offset) = into.checked_mul(self.config.mtu.bytes() as u32)
                    && requested.remote.addr == reth.remote.addr.wrapping_add(u64::from(offset))
                    && reth.length.checked_sub(offset).is_some_and(|left| requested.length <= left)
                {
                    let of_this = |pending: &Reply| match pending {
                        Reply::Read(read)
                            if (0..packets).contains(&read.psn.distance_from(first)) =>
                        {
                            Some(*read)
                        }
                        _ => None,
                    };
                    let answered =
                        !self.replies.iter().filter_map(of_this).any(|read| !read.duplicate);
                    if answered && self.is_stale_read(packet.psn, requested, keys) {
                        self.counters.dropped += 1;
                        return;
                    }
                    let reply = ReadReply {
                        psn: packet.psn,
                        msn,
                        rest: requested,
                        begun: false,
                        duplicate: answered,
                    };
                    // The requester ignores the rest of the first response. Sending it first would
                    // trigger further duplicates, each for a response further behind.
                    self.replies.retain(|pending| of_this(pending).is_none());
                    self.queue_duplicate_reply(Reply::Read(reply));
                } else {
                    self.counters.dropped += 1;
                }
            }
            Body::Atomic { .. } => {
                let saved = self.resources.iter().find_map(|resource| match *resource {
                    Resource::Atomic { psn, original, msn } if psn == packet.psn => {
                        Some((original, msn))
                    }
                    _ => None,
                });
                let Some((original, msn)) = saved else {
                    self.counters.dropped += 1;
                    return;
                };
                let pending = |reply: &Reply| {
                    // The original or an earlier duplicate.
                    matches!(reply, Reply::Atomic { psn, .. } if *psn == packet.psn)
                };
                if !self.replies.iter().any(pending) {
                    self.queue_duplicate_reply(Reply::Atomic {
                        psn: packet.psn,
                        msn,
                        original,
                        duplicate: true,
                    });
                }
            }
            _ => self.counters.dropped += 1,
        }
    }

    /// Acknowledges a duplicate SEND or WRITE and executed requests after it, up to the first READ
    /// or atomic, whose response the peer may not have.
    ///
    /// SoftRoCE completes a READ without data if its PSN is acknowledged.
    fn acknowledge_duplicate(&mut self, psn: Psn) {
        let executed = self.expected.distance_from(psn);
        // All READs and atomics that the peer may have outstanding are saved. Older saved ones
        // appear to be ahead after 2^24 packets: a READ that reaches back to this packet is old.
        // Any other acknowledges at least this packet.
        let reads = self.resources.iter().filter_map(|resource| {
            let (first, packets, msn) = match *resource {
                Resource::Read { psn, packets, msn, .. } => (psn, packets, msn),
                Resource::Atomic { psn, msn, .. } => (psn, 1, msn),
            };
            let last = first.add(packets - 1).distance_from(psn);
            (first.distance_from(psn) > 0 && last < executed).then_some((last, first, msn))
        });
        let (psn, msn) = match reads.min_by_key(|&(last, ..)| last) {
            Some((_, first, msn)) => (first.sub(1), msn.wrapping_sub(1)),
            None => (self.expected.sub(1), self.msn),
        };
        // A queued response acknowledges everything before it.
        let covers = |reply: &Reply| {
            !matches!(reply, Reply::Acknowledge { .. }) && reply.psn().distance_from(psn) > 0
        };
        if !self.replies.iter().any(covers) {
            self.acknowledge_with_msn(msn, psn, Syndrome::ACK);
        }
    }

    /// Returns whether to ignore a duplicate of an answered READ whose memory was deregistered.
    ///
    /// The network may have delayed it: normally the peer had the response by then. A requester
    /// that still waits retransmits; its second duplicate is answered.
    fn is_stale_read(&mut self, psn: Psn, read: Reth, keys: &Keys) -> bool {
        let gone =
            self.remote(keys, read.remote, read.length as usize, Access::REMOTE_READ).is_err();
        gone && self.last_stale_read.replace(psn) != Some(psn)
    }

    /// Queues an RNR NAK: no receive is posted (IBTA 9.7.5.2.8).
    ///
    /// Later packets are dropped silently until this one is retransmitted.
    #[cold]
    pub(super) fn not_ready(&mut self, psn: Psn) {
        self.counters.not_ready += 1;
        self.gap_reported = true;
        self.acknowledge(psn, Syndrome::RnrNak(self.config.min_rnr_timer.code()));
    }

    /// Queues a reply to a duplicate in request order: a requester retransmits all after a missing
    /// response, and accepts responses only in order.
    fn queue_duplicate_reply(&mut self, reply: Reply) {
        let behind = |later: &Reply| later.psn().distance_from(reply.psn()) > 0;
        let at = self.replies.iter().position(behind).unwrap_or(self.replies.len());
        self.replies.insert(at, reply);
    }

    /// Returns whether the peer may have another READ or atomic outstanding.
    ///
    /// If all permitted responses are queued, a new request shows that the peer has the oldest. If
    /// that one answers a duplicate, it is removed.
    pub(super) fn has_resource(&mut self) -> bool {
        let allowed = self.config.max_dest_rd_atomic as usize;
        if allowed > 0 && self.pending_reads() >= allowed {
            let mut pending = self.replies.iter();
            let oldest = pending.position(|reply| !matches!(reply, Reply::Acknowledge { .. }));
            if let Some(oldest) = oldest.filter(|&oldest| self.replies[oldest].is_duplicate()) {
                self.replies.remove(oldest);
            }
        }
        self.pending_reads() < allowed
    }

    pub(super) fn pending_reads(&self) -> usize {
        self.replies.iter().filter(|reply| !matches!(reply, Reply::Acknowledge { .. })).count()
    }

    pub(super) fn save(&mut self, resource: Resource) {
        if self.resources.len() >= self.config.max_dest_rd_atomic as usize {
            self.resources.pop_front();
        }
        self.resources.push_back(resource);
    }
}

/// Checks a length: all packets but the last are full, only single-packet messages may be empty
/// (IBTA 9.7.4.1.4).
#[inline]
pub(super) fn part_fits(part: Part, len: usize, mtu: Mtu) -> bool {
    match part {
        Part::First | Part::Middle => len == mtu.bytes(),
        Part::Last => len > 0 && len <= mtu.bytes(),
        Part::Only => len <= mtu.bytes(),
    }
}

//! Responder: executes a peer's requests in order, and answers.
//!
//! A state machine without clock, thread or lock. Its owner hands in requests
//! ([`on_request`](Responder::on_request)) and takes the replies
//! ([`next_reply`](Responder::next_reply)) until there are none.
//!
//! Nothing that a packet says is trusted: sequence, order of the parts, lengths, rights and keys are
//! checked before memory is touched, and every refusal has the effect that IBTA 9.9.3 gives it.

use std::collections::VecDeque;
use std::net::IpAddr;

use smallvec::SmallVec;

use crate::types::{
    Access, AsyncEvent, Gid, Imm, Mtu, Psn, Qkey, QpState, Qpn, RecvWr, RemoteAddr, RnrTimer, SendOp, Sge, Transport,
    WcFlags, WcOpcode, WcStatus, WorkCompletion, WrId,
};

use super::dma::{self, Gather, Payload};
use super::keys::Keys;
use super::requester::{MAX_MESSAGE, Whole};
use super::ring::Ring;
use super::wire::{Aeth, AtomicOp, Body, Nak, Packet, Part, Reth, Syndrome, Tail};

/// Bytes before the data of a datagram.
pub(super) const GRH: usize = 40;

/// Receive work request in the queue.
#[derive(Debug)]
pub(super) struct ReceiveWqe {
    wr_id: WrId,
    position: u32,
    length: u64,
    sges: SmallVec<[Sge; 2]>,
}

impl Default for ReceiveWqe {
    fn default() -> Self {
        Self { wr_id: WrId(0), position: 0, length: 0, sges: SmallVec::new() }
    }
}

impl ReceiveWqe {
    /// Becomes `wr`.
    pub(super) fn assign(&mut self, wr: &RecvWr<'_>, position: u32) {
        self.wr_id = wr.wr_id;
        self.position = position;
        self.length = wr.sges.iter().map(|sge| u64::from(sge.length)).sum();
        self.sges.clear();
        self.sges.extend_from_slice(wr.sges);
    }
}

/// What surrounds a responder: its completion queue, its shared receive queue, its events.
pub(super) trait Receiver {
    /// Takes a receive from the shared queue; false if that is empty.
    fn take_shared(&mut self, into: &mut ReceiveWqe) -> bool;
    /// A receive is done. `position` counts those of the own queue.
    fn complete(&mut self, position: u32, completion: &WorkCompletion, solicited: bool);
    /// Something for the owner of the device.
    fn event(&mut self, event: AsyncEvent);
    /// The queue pair is in ERR now: its send queue must be flushed once no lock is held.
    fn failed(&mut self);
}

/// Attributes that a responder obeys.
#[derive(Debug, Clone, Copy)]
pub(super) struct ReceiveConfig {
    pub(super) transport: Transport,
    pub(super) qpn: Qpn,
    /// Own address.
    pub(super) gid: Gid,
    pub(super) pd: u32,
    /// Receives come from a shared queue, and belong to its protection domain.
    pub(super) shared: bool,
    pub(super) receive_pd: u32,
    pub(super) access: Access,
    pub(super) mtu: Mtu,
    pub(super) peer: Qpn,
    pub(super) peer_gid: Gid,
    pub(super) qkey: Qkey,
    pub(super) min_rnr_timer: RnrTimer,
    pub(super) max_dest_rd_atomic: u8,
}

/// What a responder has been through.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ReceiveCounters {
    /// Requests received.
    pub packets: u64,
    /// Replies sent.
    pub replies: u64,
    /// Requests that had been executed already.
    pub duplicates: u64,
    /// Requests that came after a gap.
    pub out_of_sequence: u64,
    /// Requests refused because no receive was posted.
    pub not_ready: u64,
    /// Requests dropped without an answer.
    pub dropped: u64,
}

/// Message of which more parts are to come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Message {
    /// Into [`Responder::receive`].
    Send,
    /// The part that is left.
    Write(Reth),
}

/// Something to be sent back.
#[derive(Debug, Clone, Copy)]
enum Reply {
    Acknowledge { psn: Psn, syndrome: Syndrome, msn: u32 },
    Atomic { psn: Psn, msn: u32, original: u64 },
    Read { psn: Psn, msn: u32, rest: Reth, begun: bool },
}

/// Request that may have to be answered again: responder resource of IBTA 9.4.4 and 9.4.5.
#[derive(Debug, Clone, Copy)]
enum Resource {
    Atomic { psn: Psn, original: u64, msn: u32 },
    Read { psn: Psn, packets: u32, reth: Reth, msn: u32 },
}

/// Why a request is refused, and how.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Refusal {
    nak: Option<Nak>,
    /// Outcome of the receive that the request holds.
    status: WcStatus,
}

impl Refusal {
    const INVALID: Self = Self { nak: Some(Nak::InvalidRequest), status: WcStatus::REM_INV_REQ_ERR };
    /// IBTA 9.9.3: a WRITE with immediate that hits protected memory ends its receive so.
    const ACCESS: Self = Self { nak: Some(Nak::RemoteAccess), status: WcStatus::LOC_ACCESS_ERR };
    const TOO_LONG: Self = Self { nak: Some(Nak::InvalidRequest), status: WcStatus::LOC_LEN_ERR };
    const RECEIVE: Self = Self { nak: Some(Nak::RemoteOperation), status: WcStatus::LOC_PROT_ERR };
    /// Class J: no NAK.
    const INVALIDATION: Self = Self { nak: None, status: WcStatus::REM_INV_REQ_ERR };
}

/// See the module.
#[derive(Debug)]
pub(super) struct Responder {
    pub(super) config: ReceiveConfig,
    state: QpState,
    expected: Psn,
    /// Requests completed, 24 bits.
    msn: u32,
    /// The gap has been reported: silence until the expected packet arrives (IBTA 9.7.5.2.4).
    gap_reported: bool,
    message: Option<Message>,
    /// `receive` was taken and is not completed.
    receive_held: bool,
    receive: ReceiveWqe,
    received: u32,
    queue: Ring<ReceiveWqe>,
    position: u32,
    replies: VecDeque<Reply>,
    resources: VecDeque<Resource>,
    last_wqe_reported: bool,
    established: bool,
    pub(super) counters: ReceiveCounters,
}

impl Responder {
    pub(super) fn new(config: ReceiveConfig) -> Self {
        Self {
            config,
            state: QpState::Reset,
            expected: Psn::new(0),
            msn: 0,
            gap_reported: false,
            message: None,
            receive_held: false,
            receive: ReceiveWqe::default(),
            received: 0,
            queue: Ring::new(),
            position: 0,
            replies: VecDeque::new(),
            resources: VecDeque::new(),
            last_wqe_reported: false,
            established: false,
            counters: ReceiveCounters::default(),
        }
    }

    pub(super) const fn state(&self) -> QpState {
        self.state
    }

    /// Receives ever posted; the position of the next one.
    pub(super) const fn position(&self) -> u32 {
        self.position
    }

    /// Replies that have not been taken.
    pub(super) fn has_replies(&self) -> bool {
        !self.replies.is_empty()
    }

    /// First sequence number expected, given on the way to RTR.
    pub(super) fn start(&mut self, psn: Psn) {
        self.expected = psn;
    }

    /// Changes the state on the user's request; flushes on the way to ERR.
    pub(super) fn set_state(&mut self, state: QpState, out: &mut impl Receiver) {
        match state {
            QpState::Err => self.flush(out),
            QpState::Reset => *self = Self { counters: self.counters, ..Self::new(self.config) },
            _ => self.state = state,
        }
    }

    /// True if a receive is held whose message has not ended.
    pub(super) const fn holds_receive(&self) -> bool {
        self.receive_held
    }

    /// Queues a receive that was found well-formed. In ERR it is flushed at once.
    pub(super) fn post(&mut self, wr: &RecvWr<'_>, out: &mut impl Receiver) {
        let position = self.position;
        self.position = position.wrapping_add(1);
        self.queue.push_slot().assign(wr, position);
        if self.state == QpState::Err {
            self.queue.pop();
            out.complete(position, &self.completion(wr.wr_id, WcStatus::WR_FLUSH_ERR), false);
        }
    }

    /// A request of the peer.
    #[inline]
    pub(super) fn on_request(
        &mut self,
        packet: &Packet,
        source: Gid,
        payload: &Payload<'_, '_>,
        keys: &Keys,
        out: &mut impl Receiver,
    ) {
        let receiving = matches!(self.state, QpState::Rtr | QpState::Rts | QpState::Sqd | QpState::Sqe);
        if !receiving || packet.transport != self.config.transport {
            self.counters.dropped += 1;
            return;
        }
        match self.config.transport {
            Transport::Rc => {
                if source != self.config.peer_gid {
                    self.counters.dropped += 1;
                    return;
                }
                self.on_reliable(packet, payload, keys, out);
            }
            Transport::Uc => {
                if source != self.config.peer_gid {
                    self.counters.dropped += 1;
                    return;
                }
                self.on_unreliable(packet, payload, keys, out);
            }
            Transport::Ud => self.on_datagram(packet, source, payload, keys, out),
        }
    }

    /// Executes a message of one packet that is the next in sequence, without the packet. `None` if that
    /// cannot be done here; `Some(true)`: acknowledged; `Some(false)`: the answer is among the replies.
    #[inline]
    pub(super) fn on_whole(
        &mut self,
        psn: Psn,
        source: Gid,
        whole: &Whole<'_>,
        payload: &Payload<'_, '_>,
        keys: &Keys,
        out: &mut impl Receiver,
    ) -> Option<bool> {
        let quiet = self.state == QpState::Rts
            && self.message.is_none()
            && psn == self.expected
            && self.replies.is_empty()
            && source == self.config.peer_gid
            && self.config.transport == Transport::Rc;
        if !quiet {
            return None;
        }
        let solicited = whole.solicited;
        let done = match *whole.op {
            SendOp::Write(remote) => {
                let reth = Reth { remote, length: whole.length as u32 };
                self.on_write(psn, false, Part::Only, reth, None, payload, keys, out)
            }
            SendOp::Send => self.on_send(psn, solicited, Part::Only, Tail::None, payload, keys, out),
            SendOp::SendWithImm(imm) => self.on_send(psn, solicited, Part::Only, Tail::Imm(imm), payload, keys, out),
            SendOp::WriteWithImm(remote, imm) => {
                let reth = Reth { remote, length: whole.length as u32 };
                self.on_write(psn, solicited, Part::Only, reth, Some(imm), payload, keys, out)
            }
            _ => return None,
        };
        self.counters.packets += 1;
        self.gap_reported = false;
        Some(match done {
            Ok(acknowledged) => {
                // "Not ready" is among the replies, and silences what follows.
                self.gap_reported = !acknowledged;
                self.counters.replies += u64::from(acknowledged);
                acknowledged
            }
            Err(refusal) => {
                self.refuse(psn, refusal, out);
                false
            }
        })
    }

    /// The next reply, its payload in `gather` (which is empty).
    #[inline]
    pub(super) fn next_reply<'k>(
        &mut self,
        keys: &'k Keys,
        gather: &mut Gather<'k>,
        out: &mut impl Receiver,
    ) -> Option<Packet> {
        let reply = *self.replies.front()?;
        let (psn, body) = match reply {
            Reply::Acknowledge { psn, syndrome, msn } => {
                self.replies.pop_front();
                (psn, Body::Acknowledge(Aeth { syndrome, msn }))
            }
            Reply::Atomic { psn, msn, original } => {
                self.replies.pop_front();
                (psn, Body::AtomicAcknowledge { aeth: Aeth { syndrome: Syndrome::ACK, msn }, original })
            }
            Reply::Read { psn, msn, rest, begun } => (psn, self.read_reply(psn, msn, rest, begun, keys, gather, out)),
        };
        self.counters.replies += 1;
        Some(Packet {
            transport: Transport::Rc,
            dest: self.config.peer,
            psn,
            solicited: false,
            ack_request: false,
            body,
        })
    }

    /// One packet of the READ at the front of the replies.
    fn read_reply<'k>(
        &mut self,
        psn: Psn,
        msn: u32,
        rest: Reth,
        begun: bool,
        keys: &'k Keys,
        gather: &mut Gather<'k>,
        out: &mut impl Receiver,
    ) -> Body {
        let mtu = self.config.mtu.bytes() as u32;
        let len = rest.length.min(mtu);
        if len > 0 {
            let RemoteAddr { addr, rkey } = rest.remote;
            match keys.resolve(rkey.0, self.config.pd, addr, len as usize, Access::REMOTE_READ) {
                Ok(segment) => gather.push(segment),
                // Deregistered while it was being read.
                Err(_) => {
                    out.event(AsyncEvent::QpAccessError(self.config.qpn));
                    self.flush(out);
                    out.failed();
                    return Body::Acknowledge(Aeth { syndrome: Syndrome::Nak(Nak::RemoteAccess), msn });
                }
            }
        }
        let left = rest.length - len;
        if left == 0 {
            self.replies.pop_front();
        } else {
            let remote = RemoteAddr { addr: rest.remote.addr.wrapping_add(u64::from(len)), rkey: rest.remote.rkey };
            let rest = Reth { remote, length: left };
            self.replies[0] = Reply::Read { psn: psn.add(1), msn, rest, begun: true };
        }
        let part = match (begun, left == 0) {
            (false, false) => Part::First,
            (false, true) => Part::Only,
            (true, false) => Part::Middle,
            (true, true) => Part::Last,
        };
        Body::ReadResponse { part, aeth: Aeth { syndrome: Syndrome::ACK, msn } }
    }

    #[inline]
    fn on_reliable(&mut self, packet: &Packet, payload: &Payload<'_, '_>, keys: &Keys, out: &mut impl Receiver) {
        self.counters.packets += 1;
        if self.state == QpState::Rtr && !std::mem::replace(&mut self.established, true) {
            out.event(AsyncEvent::CommunicationEstablished(self.config.qpn));
        }
        let distance = packet.psn.distance_from(self.expected);
        if distance < 0 {
            self.on_duplicate(packet);
            return;
        }
        if distance > 0 {
            self.counters.out_of_sequence += 1;
            if !self.gap_reported {
                self.gap_reported = true;
                self.acknowledge(self.expected, Syndrome::Nak(Nak::Sequence));
            }
            return;
        }
        self.gap_reported = false;
        let done = match packet.body {
            Body::Send { part, tail } => self.on_send(packet.psn, packet.solicited, part, tail, payload, keys, out),
            Body::Write { part, reth, imm } => {
                self.on_write(packet.psn, packet.solicited, part, reth, imm, payload, keys, out)
            }
            Body::ReadRequest(reth) => self.on_read(packet.psn, reth, keys),
            Body::Atomic { remote, op } => self.on_atomic(packet.psn, remote, op, keys),
            _ => {
                self.counters.dropped += 1;
                return;
            }
        };
        match done {
            Ok(true) => {
                if packet.ack_request {
                    self.acknowledge(packet.psn, Syndrome::ACK);
                }
            }
            Ok(false) => {}
            Err(refusal) => self.refuse(packet.psn, refusal, out),
        }
    }

    /// Executes a part of a SEND. `Ok(true)`: to be acknowledged; `Ok(false)`: answered already.
    #[inline]
    fn on_send(
        &mut self,
        psn: Psn,
        solicited: bool,
        part: Part,
        tail: Tail,
        payload: &Payload<'_, '_>,
        keys: &Keys,
        out: &mut impl Receiver,
    ) -> Result<bool, Refusal> {
        let in_order = if part.begins() { self.message.is_none() } else { self.message == Some(Message::Send) };
        let len = payload.len();
        if !in_order || !part_fits(part, len, self.config.mtu) {
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
        self.expected = psn.add(1);
        if !part.ends() {
            self.message = Some(Message::Send);
            return Ok(true);
        }
        self.message = None;
        let (imm_or_rkey, flags) = match tail {
            Tail::None => (0, WcFlags::empty()),
            Tail::Imm(imm) => (imm.0, WcFlags::WITH_IMM),
            // There are no memory windows, and a plain registration is not the peer's to invalidate.
            Tail::Invalidate(_) => return Err(Refusal::INVALIDATION),
        };
        self.msn += 1;
        let completion = WorkCompletion {
            byte_len: self.received,
            imm_or_rkey,
            flags,
            opcode: WcOpcode::Recv,
            ..self.completion(self.receive.wr_id, WcStatus::SUCCESS)
        };
        self.finish_receive(&completion, solicited, out);
        Ok(true)
    }

    /// Executes a part of a WRITE.
    #[inline]
    fn on_write(
        &mut self,
        psn: Psn,
        solicited: bool,
        part: Part,
        reth: Reth,
        imm: Option<Imm>,
        payload: &Payload<'_, '_>,
        keys: &Keys,
        out: &mut impl Receiver,
    ) -> Result<bool, Refusal> {
        let len = payload.len();
        if !part_fits(part, len, self.config.mtu) {
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
        // Before anything of this packet is written: a receive must be there to report it.
        if imm.is_some() && !self.take_receive(out) {
            self.not_ready(psn);
            return Ok(false);
        }
        let need = Access::REMOTE_WRITE;
        let RemoteAddr { addr, rkey } = rest.remote;
        if part.begins() && !part.ends() {
            keys.resolve(rkey.0, self.config.pd, addr, total, need).map_err(|_| Refusal::ACCESS)?;
        }
        if len > 0 {
            let target = keys.resolve(rkey.0, self.config.pd, addr, len, need).map_err(|_| Refusal::ACCESS)?;
            payload.copy_to(std::slice::from_ref(&target));
        }
        self.expected = psn.add(1);
        if !part.ends() {
            if part.begins() {
                self.received = rest.length;
            }
            let remote = RemoteAddr { addr: addr.wrapping_add(len as u64), rkey };
            self.message = Some(Message::Write(Reth { remote, length: rest.length - len as u32 }));
            return Ok(true);
        }
        if part.begins() {
            self.received = rest.length;
        }
        self.message = None;
        self.msn += 1;
        if let Some(imm) = imm {
            let completion = WorkCompletion {
                byte_len: self.received,
                imm_or_rkey: imm.0,
                flags: WcFlags::WITH_IMM,
                opcode: WcOpcode::RecvRdmaWithImm,
                ..self.completion(self.receive.wr_id, WcStatus::SUCCESS)
            };
            self.finish_receive(&completion, solicited, out);
        }
        Ok(true)
    }

    fn on_read(&mut self, psn: Psn, reth: Reth, keys: &Keys) -> Result<bool, Refusal> {
        let allowed = self.config.access.contains(Access::REMOTE_READ);
        if self.message.is_some() || !allowed || reth.length > MAX_MESSAGE * 2 || !self.has_resource() {
            return Err(Refusal::INVALID);
        }
        if reth.length > 0 {
            let RemoteAddr { addr, rkey } = reth.remote;
            keys.resolve(rkey.0, self.config.pd, addr, reth.length as usize, Access::REMOTE_READ)
                .map_err(|_| Refusal::ACCESS)?;
        }
        let packets = reth.length.div_ceil(self.config.mtu.bytes() as u32).max(1);
        self.expected = psn.add(packets);
        self.msn += 1;
        let msn = self.msn;
        self.save(Resource::Read { psn, packets, reth, msn });
        self.replies.push_back(Reply::Read { psn, msn, rest: reth, begun: false });
        Ok(false)
    }

    fn on_atomic(&mut self, psn: Psn, remote: RemoteAddr, op: AtomicOp, keys: &Keys) -> Result<bool, Refusal> {
        let allowed = self.config.access.contains(Access::REMOTE_ATOMIC);
        if self.message.is_some() || !allowed || remote.addr % 8 != 0 || !self.has_resource() {
            return Err(Refusal::INVALID);
        }
        let target = keys
            .resolve(remote.rkey.0, self.config.pd, remote.addr, 8, Access::REMOTE_ATOMIC)
            .map_err(|_| Refusal::ACCESS)?;
        let original = dma::atomic(&target, op).ok_or(Refusal::INVALID)?;
        drop(target);
        self.expected = psn.add(1);
        self.msn += 1;
        let msn = self.msn;
        self.save(Resource::Atomic { psn, original, msn });
        self.replies.push_back(Reply::Atomic { psn, msn, original });
        Ok(false)
    }

    /// A request that was executed before: its answer was lost (IBTA 9.7.5.1.4).
    #[cold]
    fn on_duplicate(&mut self, packet: &Packet) {
        self.counters.duplicates += 1;
        match packet.body {
            Body::Send { .. } | Body::Write { .. } => {
                self.acknowledge(self.expected.sub(1), Syndrome::ACK);
            }
            Body::ReadRequest(again) => {
                let saved = self.resources.iter().find_map(|resource| match *resource {
                    Resource::Read { psn, packets, reth, msn } => {
                        let into = packet.psn.distance_from(psn);
                        (0..packets as i32).contains(&into).then_some((into as u32, reth, msn))
                    }
                    Resource::Atomic { .. } => None,
                });
                // It must be the rest of the original from that packet on, nothing else.
                if let Some((into, reth, msn)) = saved
                    && again.remote.rkey == reth.remote.rkey
                    && let Some(offset) = into.checked_mul(self.config.mtu.bytes() as u32)
                    && again.remote.addr == reth.remote.addr.wrapping_add(u64::from(offset))
                    && reth.length.checked_sub(offset).is_some_and(|left| again.length <= left)
                    && self.pending_reads() < self.config.max_dest_rd_atomic as usize
                {
                    self.replies.push_back(Reply::Read { psn: packet.psn, msn, rest: again, begun: false });
                } else {
                    self.counters.dropped += 1;
                }
            }
            Body::Atomic { .. } => {
                let saved = self.resources.iter().find_map(|resource| match *resource {
                    Resource::Atomic { psn, original, msn } if psn == packet.psn => Some((original, msn)),
                    _ => None,
                });
                match saved {
                    Some((original, msn)) if self.pending_reads() < self.config.max_dest_rd_atomic as usize => {
                        self.replies.push_back(Reply::Atomic { psn: packet.psn, msn, original });
                    }
                    _ => self.counters.dropped += 1,
                }
            }
            _ => self.counters.dropped += 1,
        }
    }

    fn on_unreliable(&mut self, packet: &Packet, payload: &Payload<'_, '_>, keys: &Keys, out: &mut impl Receiver) {
        self.counters.packets += 1;
        let part = match packet.body {
            Body::Send { part, .. } | Body::Write { part, .. } => part,
            _ => {
                self.counters.dropped += 1;
                return;
            }
        };
        if packet.psn != self.expected {
            // A gap loses the message; the next one that begins is the new start (IBTA 9.8.2.2).
            self.counters.out_of_sequence += 1;
            self.message = None;
        }
        if part.begins() {
            self.message = None;
        } else if self.message.is_none() {
            self.expected = packet.psn.add(1);
            self.counters.dropped += 1;
            return;
        }
        let done = match packet.body {
            Body::Send { tail, .. } => self.on_send(packet.psn, packet.solicited, part, tail, payload, keys, out),
            Body::Write { reth, imm, .. } => {
                self.on_write(packet.psn, packet.solicited, part, reth, imm, payload, keys, out)
            }
            _ => return,
        };
        self.expected = packet.psn.add(1);
        // Nothing is answered.
        self.replies.clear();
        self.gap_reported = false;
        if let Err(refusal) = done {
            self.message = None;
            self.counters.dropped += 1;
            if self.receive_held && refusal.status != WcStatus::REM_INV_REQ_ERR {
                self.fail_receive(refusal.status, out);
            }
        }
    }

    fn on_datagram(
        &mut self,
        packet: &Packet,
        source: Gid,
        payload: &Payload<'_, '_>,
        keys: &Keys,
        out: &mut impl Receiver,
    ) {
        self.counters.packets += 1;
        let Body::Datagram { qkey, source: src_qpn, imm } = packet.body else {
            self.counters.dropped += 1;
            return;
        };
        if qkey != self.config.qkey || !self.take_receive(out) {
            self.counters.dropped += 1;
            return;
        }
        let len = payload.len();
        if self.receive.length < (GRH + len) as u64 {
            self.counters.dropped += 1;
            self.fail_receive(WcStatus::LOC_LEN_ERR, out);
            return;
        }
        let header = routing_header(source, self.config.gid, len);
        self.received = 0;
        let filled = self.fill_receive(&Payload::Bytes(&header), keys).and_then(|()| self.fill_receive(payload, keys));
        if let Err(refusal) = filled {
            self.counters.dropped += 1;
            self.fail_receive(refusal.status, out);
            return;
        }
        let completion = WorkCompletion {
            byte_len: self.received,
            imm_or_rkey: imm.map_or(0, |imm| imm.0),
            flags: if imm.is_some() { WcFlags::GRH | WcFlags::WITH_IMM } else { WcFlags::GRH },
            opcode: WcOpcode::Recv,
            src_qpn,
            ..self.completion(self.receive.wr_id, WcStatus::SUCCESS)
        };
        self.finish_receive(&completion, packet.solicited, out);
    }

    /// Takes the next receive, unless one is held already.
    #[inline]
    fn take_receive(&mut self, out: &mut impl Receiver) -> bool {
        if self.receive_held {
            return true;
        }
        self.receive_held = if self.config.shared {
            out.take_shared(&mut self.receive)
        } else if let Some(front) = self.queue.front_mut() {
            std::mem::swap(front, &mut self.receive);
            self.queue.pop();
            true
        } else {
            false
        };
        self.receive_held
    }

    /// Appends to the receive that is held.
    #[inline]
    fn fill_receive(&mut self, payload: &Payload<'_, '_>, keys: &Keys) -> Result<(), Refusal> {
        let len = payload.len();
        if len == 0 {
            return Ok(());
        }
        let at = self.received as usize;
        if (at + len) as u64 > self.receive.length {
            return Err(Refusal::TOO_LONG);
        }
        let pd = self.config.receive_pd;
        if let [only] = self.receive.sges.as_slice() {
            let addr = only.addr.checked_add(at as u64).ok_or(Refusal::RECEIVE)?;
            let target = keys.resolve(only.lkey.0, pd, addr, len, Access::LOCAL_WRITE).map_err(|_| Refusal::RECEIVE)?;
            payload.copy_to(std::slice::from_ref(&target));
        } else {
            let mut target = Gather::new();
            keys.gather(&self.receive.sges, pd, at, len, Access::LOCAL_WRITE, &mut target)
                .map_err(|_| Refusal::RECEIVE)?;
            payload.copy_to(&target);
        }
        self.received += len as u32;
        Ok(())
    }

    #[inline]
    fn finish_receive(&mut self, completion: &WorkCompletion, solicited: bool, out: &mut impl Receiver) {
        self.receive_held = false;
        out.complete(self.receive.position, completion, solicited);
    }

    fn fail_receive(&mut self, status: WcStatus, out: &mut impl Receiver) {
        let completion = self.completion(self.receive.wr_id, status);
        self.finish_receive(&completion, false, out);
    }

    fn completion(&self, wr_id: WrId, status: WcStatus) -> WorkCompletion {
        WorkCompletion { wr_id, status, qpn: self.config.qpn, opcode: WcOpcode::Recv, ..WorkCompletion::default() }
    }

    /// No receive is posted: the peer shall come back (IBTA 9.7.5.2.8). The packet was not executed, and
    /// those behind it are silently dropped until it comes again.
    #[cold]
    fn not_ready(&mut self, psn: Psn) {
        self.counters.not_ready += 1;
        self.gap_reported = true;
        self.acknowledge(psn, Syndrome::RnrNak(self.config.min_rnr_timer.code()));
    }

    /// Queues an acknowledgement; it stands for all before it.
    #[inline]
    fn acknowledge(&mut self, psn: Psn, syndrome: Syndrome) {
        let reply = Reply::Acknowledge { psn, syndrome, msn: self.msn & 0x00ff_ffff };
        match self.replies.back_mut() {
            // A refusal says more than an acknowledgement of what is before it, and of two
            // acknowledgements the later says all.
            Some(last @ Reply::Acknowledge { syndrome: Syndrome::Ack(_), .. }) => *last = reply,
            Some(Reply::Acknowledge { .. }) if syndrome == Syndrome::ACK => {}
            _ => self.replies.push_back(reply),
        }
    }

    /// The peer broke the rules: NAK, error of the receive it holds, event, ERR.
    #[cold]
    fn refuse(&mut self, psn: Psn, refusal: Refusal, out: &mut impl Receiver) {
        tracing::warn!(qpn = %self.config.qpn, nak = ?refusal.nak, status = %refusal.status, "request refused");
        if let Some(nak) = refusal.nak {
            self.acknowledge(psn, Syndrome::Nak(nak));
        }
        if self.receive_held {
            self.fail_receive(refusal.status, out);
        } else {
            match refusal.nak {
                Some(Nak::RemoteAccess) => out.event(AsyncEvent::QpAccessError(self.config.qpn)),
                _ => out.event(AsyncEvent::QpRequestError(self.config.qpn)),
            }
        }
        self.flush(out);
        out.failed();
    }

    /// Enters ERR. Replies that are queued still go out; the packet that caused it is among them.
    pub(super) fn flush(&mut self, out: &mut impl Receiver) {
        if self.receive_held {
            self.fail_receive(WcStatus::WR_FLUSH_ERR, out);
        }
        let flushed = self.queue.len();
        while let Some(front) = self.queue.front() {
            let (position, wr_id) = (front.position, front.wr_id);
            self.queue.pop();
            out.complete(position, &self.completion(wr_id, WcStatus::WR_FLUSH_ERR), false);
        }
        if flushed > 0 {
            tracing::debug!(qpn = %self.config.qpn, flushed, "receive queue flushed");
        }
        if self.config.shared && !self.last_wqe_reported {
            self.last_wqe_reported = true;
            out.event(AsyncEvent::LastWqeReached(self.config.qpn));
        }
        self.state = QpState::Err;
        self.message = None;
        self.replies.retain(|reply| !matches!(reply, Reply::Read { .. }));
        self.resources.clear();
    }

    fn has_resource(&self) -> bool {
        self.pending_reads() < self.config.max_dest_rd_atomic as usize
    }

    /// READ and atomic requests whose answer has not been taken.
    fn pending_reads(&self) -> usize {
        self.replies.iter().filter(|reply| !matches!(reply, Reply::Acknowledge { .. })).count()
    }

    fn save(&mut self, resource: Resource) {
        if self.resources.len() >= self.config.max_dest_rd_atomic as usize {
            self.resources.pop_front();
        }
        self.resources.push_back(resource);
    }
}

/// IBTA 9.7.4.1.4: all but the end of a message are full, and only a whole message may be empty.
#[inline]
fn part_fits(part: Part, len: usize, mtu: Mtu) -> bool {
    match part {
        Part::First | Part::Middle => len == mtu.bytes(),
        Part::Last => len > 0 && len <= mtu.bytes(),
        Part::Only => len <= mtu.bytes(),
    }
}

/// The 40 bytes before a datagram: the IPv6 header, or 20 zero bytes and the IPv4 header (IBTA A17.4.5).
fn routing_header(source: Gid, destination: Gid, payload: usize) -> [u8; GRH] {
    // BTH 12, DETH 8, ICRC 4, UDP 8.
    const OVERHEAD: usize = 32;
    const UDP: u8 = 17;
    const HOPS: u8 = 64;
    let mut header = [0; GRH];
    match (source.to_ip(), destination.to_ip()) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            let ip = &mut header[20..];
            ip[0] = 0x45;
            ip[2..4].copy_from_slice(&((payload + OVERHEAD + 20) as u16).to_be_bytes());
            // Do not fragment.
            ip[6] = 0x40;
            ip[8] = HOPS;
            ip[9] = UDP;
            ip[12..16].copy_from_slice(&from.octets());
            ip[16..20].copy_from_slice(&to.octets());
            let sum: u32 = ip.chunks_exact(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]]))).sum();
            let folded = (sum & 0xffff) + (sum >> 16);
            let checksum = !((folded & 0xffff) + (folded >> 16)) as u16;
            ip[10..12].copy_from_slice(&checksum.to_be_bytes());
        }
        _ => {
            header[0] = 0x60;
            header[4..6].copy_from_slice(&((payload + OVERHEAD) as u16).to_be_bytes());
            header[6] = UDP;
            header[7] = HOPS;
            header[8..24].copy_from_slice(&source.0);
            header[24..40].copy_from_slice(&destination.0);
        }
    }
    header
}

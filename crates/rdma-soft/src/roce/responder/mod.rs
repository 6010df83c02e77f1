//! The responder: executes a peer's requests in order and replies.
//!
//! It is a state machine without clock, thread or lock. The caller passes requests to
//! [`on_request`](Responder::on_request) and takes all replies from
//! [`next_reply`](Responder::next_reply).
//!
//! Packets are not trusted: sequence, position, length, rights and keys are checked before memory
//! is accessed. Refusals follow IBTA 9.9.3.

mod direct;
mod execute;
mod receive;
mod unreliable;

pub(crate) use receive::ReceiveWqe;

use std::collections::VecDeque;

use rdma_provider::types::{
    Access, AsyncEvent, Gid, Mtu, Psn, Qkey, QpState, Qpn, RecvWr, RemoteAddr, RnrTimer, Transport,
    WcOpcode, WcStatus, WorkCompletion, WrId,
};

use crate::memory::dma::{Gather, Payload};
use crate::memory::keys::Keys;
use crate::ring::Ring;
use crate::roce::ip_fields::Origin;
use crate::roce::packet::{Aeth, Body, Nak, Packet, Part, Reth, Syndrome};
use crate::roce::partition::may_communicate;

use execute::part_fits;

pub(crate) trait Receiver {
    /// Takes a receive from the shared queue, if any.
    fn take_shared(&mut self, into: &mut ReceiveWqe) -> bool;
    /// Completes the receive at `position` of the queue pair's own queue.
    fn complete(&mut self, position: u32, completion: &WorkCompletion, solicited: bool);
    fn event(&mut self, event: AsyncEvent);
    /// Counts a packet that was dropped because of its partition.
    fn count_bad_pkey(&mut self);
    /// Reports ERR: the send queue must be flushed once no lock is held.
    fn failed(&mut self);
}

/// The fields that each operation uses come first.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct ReceiveConfig {
    pub(crate) peer: Qpn,
    pub(crate) qpn: Qpn,
    pub(crate) pd: u32,
    pub(crate) access: Access,
    pub(crate) peer_gid: Gid,
    pub(crate) transport: Transport,
    pub(crate) mtu: Mtu,
    pub(crate) pkey: u16,
    pub(crate) max_dest_rd_atomic: u8,
    pub(crate) min_rnr_timer: RnrTimer,
    /// Receives come from a shared queue in `receive_pd`.
    pub(crate) shared: bool,
    pub(crate) receive_pd: u32,
    pub(crate) qkey: Qkey,
    pub(crate) gid: Gid,
}

/// Counters of the responder of a queue pair.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ReceiveCounters {
    /// Requests received.
    pub packets: u64,
    /// Responses sent.
    pub replies: u64,
    /// Duplicate requests.
    pub duplicates: u64,
    /// Requests received after a gap.
    pub out_of_sequence: u64,
    /// Requests refused because no receive was posted.
    pub not_ready: u64,
    /// Requests dropped without a response.
    pub dropped: u64,
    /// Packets that a switch has marked as having met congestion, responses included.
    pub marked: u64,
    /// Congestion notification packets sent.
    pub congestion_notifications: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Message {
    Send,
    Write(Reth),
}

#[derive(Debug, Clone, Copy)]
struct Piece {
    psn: Psn,
    /// 1, or more for a whole message.
    packets: u32,
    solicited: bool,
    part: Part,
}

impl Piece {
    #[inline]
    fn of(packet: &Packet, part: Part) -> Self {
        let Packet { psn, solicited, .. } = *packet;
        Self { psn, packets: 1, solicited, part }
    }

    #[inline]
    fn fits(&self, len: usize, mtu: Mtu) -> bool {
        self.packets > 1 || part_fits(self.part, len, mtu)
    }
}

/// The rest of a reply to a READ, from `psn` on.
#[derive(Debug, Clone, Copy)]
struct ReadReply {
    psn: Psn,
    msn: u32,
    rest: Reth,
    begun: bool,
    /// Duplicate of a request that was answered completely.
    duplicate: bool,
}

#[derive(Debug, Clone, Copy)]
enum Reply {
    Acknowledge { psn: Psn, syndrome: Syndrome, msn: u32 },
    Atomic { psn: Psn, msn: u32, original: u64, duplicate: bool },
    Read(ReadReply),
}

impl Reply {
    const fn psn(&self) -> Psn {
        match *self {
            Self::Acknowledge { psn, .. }
            | Self::Atomic { psn, .. }
            | Self::Read(ReadReply { psn, .. }) => psn,
        }
    }

    /// Returns whether it replies to a duplicate of an answered request.
    const fn is_duplicate(&self) -> bool {
        matches!(
            self,
            Self::Atomic { duplicate: true, .. } | Self::Read(ReadReply { duplicate: true, .. })
        )
    }
}

/// A request saved for duplicates: a responder resource (IBTA 9.4.4, 9.4.5).
#[derive(Debug, Clone, Copy)]
enum Resource {
    Atomic { psn: Psn, original: u64, msn: u32 },
    Read { psn: Psn, packets: u32, reth: Reth, msn: u32 },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Refusal {
    nak: Option<Nak>,
    /// Status of the held receive.
    status: WcStatus,
}

impl Refusal {
    const INVALID: Self =
        Self { nak: Some(Nak::InvalidRequest), status: WcStatus::REM_INV_REQ_ERR };
    /// Status of the receive of a WRITE with immediate: IBTA 9.9.3.
    const ACCESS: Self = Self { nak: Some(Nak::RemoteAccess), status: WcStatus::LOC_ACCESS_ERR };
    const TOO_LONG: Self = Self { nak: Some(Nak::InvalidRequest), status: WcStatus::LOC_LEN_ERR };
    const RECEIVE: Self = Self { nak: Some(Nak::RemoteOperation), status: WcStatus::LOC_PROT_ERR };
    /// Class J error: no NAK.
    const INVALIDATION: Self = Self { nak: None, status: WcStatus::REM_INV_REQ_ERR };
}

/// The responder of a queue pair, see the [module](self).
///
/// The fields that each operation uses come first, in few cache lines.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Responder {
    state: QpState,
    /// The gap was NAKed: no further NAK until the expected packet arrives (IBTA 9.7.5.2.4).
    gap_reported: bool,
    receive_held: bool,
    last_wqe_reported: bool,
    established: bool,
    expected: Psn,
    /// Message sequence number: requests completed, 24 bits.
    msn: u32,
    replies: VecDeque<Reply>,
    message: Option<Message>,
    pub(crate) config: ReceiveConfig,
    pub(crate) counters: ReceiveCounters,
    received: u32,
    position: u32,
    receive: ReceiveWqe,
    queue: Ring<ReceiveWqe>,
    resources: VecDeque<Resource>,
    /// Last duplicate READ that was ignored because its memory was deregistered.
    last_stale_read: Option<Psn>,
}

impl Responder {
    pub(crate) fn new(config: ReceiveConfig) -> Self {
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
            last_stale_read: None,
            last_wqe_reported: false,
            established: false,
            counters: ReceiveCounters::default(),
        }
    }

    pub(crate) const fn state(&self) -> QpState {
        self.state
    }

    /// Returns the number of receives ever posted: the next position.
    pub(crate) const fn position(&self) -> u32 {
        self.position
    }

    #[inline]
    pub(crate) const fn is_receiving(&self) -> bool {
        matches!(self.state, QpState::Rtr | QpState::Rts | QpState::Sqd | QpState::Sqe)
    }

    pub(crate) fn has_replies(&self) -> bool {
        !self.replies.is_empty()
    }

    /// Sets the first expected PSN on the transition to RTR.
    pub(crate) fn start(&mut self, psn: Psn) {
        self.expected = psn;
    }

    /// Changes the state; ERR flushes the queue.
    pub(crate) fn set_state(&mut self, state: QpState, out: &mut impl Receiver) {
        match state {
            QpState::Err => self.flush(out),
            QpState::Reset => *self = Self { counters: self.counters, ..Self::new(self.config) },
            _ => self.state = state,
        }
    }

    /// Returns whether an incomplete message holds a receive.
    pub(crate) const fn holds_receive(&self) -> bool {
        self.receive_held
    }

    /// Queues a valid receive; ERR flushes it at once.
    pub(crate) fn post(&mut self, wr: &RecvWr<'_>, out: &mut impl Receiver) {
        let position = self.position;
        self.position = position.wrapping_add(1);
        self.queue.push_slot().assign(wr, position);
        if self.state == QpState::Err {
            self.queue.pop();
            out.complete(position, &self.completion(wr.wr_id, WcStatus::WR_FLUSH_ERR), false);
        }
    }

    #[inline]
    pub(crate) fn on_request(
        &mut self,
        packet: &Packet,
        origin: Origin,
        payload: &Payload<'_, '_>,
        keys: &Keys,
        out: &mut impl Receiver,
    ) {
        if !self.admits(packet, out) {
            return;
        }
        if self.config.transport != Transport::Ud {
            if origin.gid != self.config.peer_gid {
                self.counters.dropped += 1;
                return;
            }
            // The first request shows that the connection works (IBTA 11.6.3.2).
            if self.state == QpState::Rtr && !std::mem::replace(&mut self.established, true) {
                out.event(AsyncEvent::CommunicationEstablished(self.config.qpn));
            }
        }
        match self.config.transport {
            Transport::Rc => self.on_reliable(packet, payload, keys, out),
            // A DC initiator gets no requests.
            Transport::Dci => self.counters.dropped += 1,
            Transport::Uc => self.on_unreliable(packet, payload, keys, out),
            Transport::Ud => {
                self.on_datagram(packet, (origin, self.config.gid), payload, keys, out);
            }
        }
    }

    /// Returns whether state, transport and partition admit a packet; counts it if not.
    #[inline]
    fn admits(&mut self, packet: &Packet, out: &mut impl Receiver) -> bool {
        if !self.is_receiving() || packet.transport != self.config.transport {
            self.counters.dropped += 1;
            return false;
        }
        if !may_communicate(self.config.pkey, packet.pkey) {
            self.counters.dropped += 1;
            out.count_bad_pkey();
            return false;
        }
        true
    }

    /// Returns the next reply, with its payload in `gather`, which is empty.
    #[inline]
    pub(crate) fn next_reply<'k>(
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
            Reply::Atomic { psn, msn, original, .. } => {
                self.replies.pop_front();
                (
                    psn,
                    Body::AtomicAcknowledge {
                        aeth: Aeth { syndrome: Syndrome::ACK, msn },
                        original,
                    },
                )
            }
            Reply::Read(read) => (read.psn, self.read_reply(read, keys, gather, out)),
        };
        self.counters.replies += 1;
        Some(Packet {
            transport: Transport::Rc,
            pkey: self.config.pkey,
            dest: self.config.peer,
            psn,
            solicited: false,
            ack_request: false,
            body,
        })
    }

    fn read_reply<'k>(
        &mut self,
        read: ReadReply,
        keys: &'k Keys,
        gather: &mut Gather<'k>,
        out: &mut impl Receiver,
    ) -> Body {
        let ReadReply { psn, msn, rest, begun, duplicate } = read;
        let mtu = self.config.mtu.bytes() as u32;
        let len = rest.length.min(mtu);
        if len > 0 {
            match self.remote(keys, rest.remote, len as usize, Access::REMOTE_READ) {
                Ok(segment) => gather.push(segment),
                // The NAK fails a requester that still waits; any other ignores it.
                Err(_) if duplicate => {
                    self.replies.pop_front();
                    return Body::Acknowledge(Aeth {
                        syndrome: Syndrome::Nak(Nak::RemoteAccess),
                        msn,
                    });
                }
                // Deregistered while it was being read.
                Err(_) => {
                    // In ERR the failure was reported already.
                    if self.state != QpState::Err {
                        out.event(AsyncEvent::QpAccessError(self.config.qpn));
                        out.failed();
                    }
                    self.flush(out);
                    return Body::Acknowledge(Aeth {
                        syndrome: Syndrome::Nak(Nak::RemoteAccess),
                        msn,
                    });
                }
            }
        }
        let left = rest.length - len;
        if left == 0 {
            self.replies.pop_front();
        } else {
            let remote = RemoteAddr {
                addr: rest.remote.addr.wrapping_add(u64::from(len)),
                rkey: rest.remote.rkey,
            };
            let rest = Reth { remote, length: left };
            self.replies[0] =
                Reply::Read(ReadReply { psn: psn.add(1), msn, rest, begun: true, duplicate });
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
    fn on_reliable(
        &mut self,
        packet: &Packet,
        payload: &Payload<'_, '_>,
        keys: &Keys,
        out: &mut impl Receiver,
    ) {
        self.counters.packets += 1;
        let distance = packet.psn.distance_from(self.expected);
        if distance < 0 {
            self.on_duplicate(packet, keys);
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
        let piece = |part| Piece::of(packet, part);
        let done = match packet.body {
            Body::Send { part, tail } => self.on_send(piece(part), tail, payload, keys, out),
            Body::Write { part, reth, imm } => {
                self.on_write(piece(part), reth, imm, payload, keys, out)
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

    fn completion(&self, wr_id: WrId, status: WcStatus) -> WorkCompletion {
        WorkCompletion {
            wr_id,
            status,
            qpn: self.config.qpn,
            opcode: WcOpcode::RECV,
            ..WorkCompletion::default()
        }
    }

    /// Acknowledges all packets up to `psn`.
    #[inline]
    fn acknowledge(&mut self, psn: Psn, syndrome: Syndrome) {
        self.acknowledge_with_msn(self.msn, psn, syndrome);
    }

    #[inline]
    fn acknowledge_with_msn(&mut self, msn: u32, psn: Psn, syndrome: Syndrome) {
        let reply = Reply::Acknowledge { psn, syndrome, msn: msn & 0x00ff_ffff };
        match self.replies.back_mut() {
            // The later of two suffices: a NAK acknowledges all before it, and an acknowledgement
            // of the missing packet revokes a NAK.
            Some(last @ Reply::Acknowledge { .. }) if psn.distance_from(last.psn()) >= 0 => {
                *last = reply
            }
            Some(Reply::Acknowledge { .. }) if syndrome == Syndrome::ACK => {}
            None => self.replies.push_back(reply),
            Some(_) => self.acknowledge_behind(psn, reply),
        }
    }

    /// Queues an acknowledgement behind responses and removes those that it covers.
    ///
    /// Otherwise a peer that repeats a request behind a long response could accumulate them.
    #[cold]
    fn acknowledge_behind(&mut self, psn: Psn, reply: Reply) {
        self.replies.retain(|before| match before {
            Reply::Acknowledge { psn: before, syndrome: Syndrome::Ack(_), .. } => {
                psn.distance_from(*before) < 0
            }
            _ => true,
        });
        self.replies.push_back(reply);
    }

    /// Refuses a request: NAK, failed receive or event, and ERR.
    #[cold]
    fn refuse(&mut self, psn: Psn, refusal: Refusal, out: &mut impl Receiver) {
        rdma_provider::warn!(
            qpn = %self.config.qpn,
            nak = ?refusal.nak,
            status = %refusal.status,
            "refused a request of the peer; queue pair enters the error state"
        );
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
        // Earlier requests are answered before the NAK, which would otherwise fail earlier READs.
        let pending = std::mem::take(&mut self.replies);
        self.flush(out);
        self.replies = pending;
        out.failed();
    }

    /// Enters ERR and flushes the receive queue.
    ///
    /// Replies before the first READ are still sent. It and later replies, which would acknowledge
    /// it, are dropped.
    pub(crate) fn flush(&mut self, out: &mut impl Receiver) {
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
            rdma_provider::debug!(qpn = %self.config.qpn, flushed, "flushed receive queue");
        }
        if self.config.shared && !self.last_wqe_reported {
            self.last_wqe_reported = true;
            out.event(AsyncEvent::LastWqeReached(self.config.qpn));
        }
        self.state = QpState::Err;
        self.message = None;
        let read = self.replies.iter().position(|reply| matches!(reply, Reply::Read(_)));
        self.replies.truncate(read.unwrap_or(self.replies.len()));
        self.resources.clear();
    }
}

//! RoCE v2 transport headers and their encoding (IBTA chapter 9).
//!
//! [`Packet::parse`] returns a packet or a [`WireError`] for any bytes, and never panics.
//!
//! The network adds IP, UDP and the check at the end. Over UDP the check is the
//! [ICRC](super::icrc); within the process, [`seal`] and [`unseal`] use one of the image alone.

use rdma_provider::types::{DcKey, Imm, Mtu, Psn, Qkey, Qpn, RemoteAddr, Rkey, Transport};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part {
    First,
    Middle,
    Last,
    Only,
}

impl Part {
    pub(crate) const fn of(index: u32, count: u32) -> Self {
        match (index == 0, index + 1 >= count) {
            (true, true) => Self::Only,
            (true, false) => Self::First,
            (false, true) => Self::Last,
            (false, false) => Self::Middle,
        }
    }

    pub(crate) const fn begins(self) -> bool {
        matches!(self, Self::First | Self::Only)
    }

    pub(crate) const fn ends(self) -> bool {
        matches!(self, Self::Last | Self::Only)
    }
}

/// The RDMA extended transport header: remote memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Reth {
    pub(crate) remote: RemoteAddr,
    pub(crate) length: u32,
}

/// An operation on 8 remote bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AtomicOp {
    CompareSwap { compare: u64, swap: u64 },
    FetchAdd { add: u64 },
}

/// A NAK code: why a request was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Nak {
    Sequence,
    InvalidRequest,
    RemoteAccess,
    RemoteOperation,
    /// Code of reliable datagrams, or unassigned.
    Other(u8),
}

/// The syndrome of an AETH.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Syndrome {
    /// End-to-end credit code. This device sends only 31, no limit.
    Ack(u8),
    /// Receiver not ready, with a timer code.
    RnrNak(u8),
    Nak(Nak),
    Reserved(u8),
}

impl Syndrome {
    pub(crate) const ACK: Self = Self::Ack(31);

    const fn to_byte(self) -> u8 {
        match self {
            Self::Ack(credits) => credits & 31,
            Self::RnrNak(timer) => 0x20 | (timer & 31),
            Self::Nak(Nak::Sequence) => 0x60,
            Self::Nak(Nak::InvalidRequest) => 0x61,
            Self::Nak(Nak::RemoteAccess) => 0x62,
            Self::Nak(Nak::RemoteOperation) => 0x63,
            Self::Nak(Nak::Other(code)) => 0x60 | (code & 31),
            Self::Reserved(byte) => byte,
        }
    }

    const fn from_byte(byte: u8) -> Self {
        let code = byte & 31;
        match byte >> 5 {
            0 => Self::Ack(code),
            1 => Self::RnrNak(code),
            3 => Self::Nak(match code {
                0 => Nak::Sequence,
                1 => Nak::InvalidRequest,
                2 => Nak::RemoteAccess,
                3 => Nak::RemoteOperation,
                _ => Nak::Other(code),
            }),
            _ => Self::Reserved(byte),
        }
    }
}

/// The acknowledgement extended transport header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Aeth {
    pub(crate) syndrome: Syndrome,
    /// Message sequence number: messages completed, 24 bits.
    pub(crate) msn: u32,
}

/// The extension header of a SEND's last packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tail {
    None,
    Imm(Imm),
    Invalidate(Rkey),
}

/// The operation of a packet, with its extension headers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Body {
    /// `tail` only in the [last](Part::ends) packet.
    Send {
        part: Part,
        tail: Tail,
    },
    /// `reth` only in the [first](Part::begins) packet, `imm` only in the [last](Part::ends).
    Write {
        part: Part,
        reth: Reth,
        imm: Option<Imm>,
    },
    ReadRequest(Reth),
    Atomic {
        remote: RemoteAddr,
        op: AtomicOp,
    },
    /// `aeth` is absent from middle packets.
    ReadResponse {
        part: Part,
        aeth: Aeth,
    },
    Acknowledge(Aeth),
    /// Original value of an atomic operation.
    AtomicAcknowledge {
        aeth: Aeth,
        original: u64,
    },
    Datagram {
        qkey: Qkey,
        source: Qpn,
        imm: Option<Imm>,
    },
    /// Session request to a DC target, see [`dc`](crate::dc).
    Open {
        key: DcKey,
        mtu: Mtu,
    },
    /// DC session created.
    Accept,
    /// DC session unknown.
    Gone,
    /// DC session closed.
    Close,
    /// The congestion notification packet: a packet to its sender was marked (annex A17.9).
    Congestion,
}

impl Body {
    /// Returns whether the packet is for the requester of a queue pair.
    pub(crate) const fn is_for_requester(&self) -> bool {
        matches!(
            self,
            Self::ReadResponse { .. }
                | Self::Acknowledge(_)
                | Self::AtomicAcknowledge { .. }
                | Self::Congestion
        )
    }

    /// Returns whether a DC target sends the packet.
    pub(crate) const fn is_dc_response(&self) -> bool {
        self.is_for_requester() || matches!(self, Self::Accept | Self::Gone)
    }
}

/// The headers of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Packet {
    pub(crate) transport: Transport,
    pub(crate) dest: Qpn,
    pub(crate) psn: Psn,
    pub(crate) pkey: u16,
    pub(crate) solicited: bool,
    pub(crate) ack_request: bool,
    pub(crate) body: Body,
}

/// Why bytes are not a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WireError {
    Truncated,
    /// Corrupted.
    Checksum,
    Unsupported,
}

/// The upper three bits of the operation code of congestion notification packets.
const CONGESTION_CLASS: u8 = 4;
/// Backward explicit congestion notification, in the word of the destination (IBTA 9.2).
const BECN: u32 = 1 << 30;
/// Reserved bytes of a congestion notification packet.
const RESERVED: [u8; 16] = [0; 16];

/// Length of the check.
const CHECK: usize = 4;

/// Appends the check used within the process.
pub(crate) fn seal(image: &mut Vec<u8>) {
    let check = crc32fast::hash(image);
    image.extend_from_slice(&check.to_le_bytes());
}

/// Verifies and removes the check used within the process.
pub(crate) fn unseal(sealed: &[u8]) -> Result<&[u8], WireError> {
    let (image, check) = sealed.split_last_chunk::<CHECK>().ok_or(WireError::Truncated)?;
    if crc32fast::hash(image) == u32::from_le_bytes(*check) {
        Ok(image)
    } else {
        Err(WireError::Checksum)
    }
}

mod opcode {
    //! Low five bits of the BTH opcode (IBTA table 38).
    pub(super) const SEND_FIRST: u8 = 0x00;
    pub(super) const SEND_MIDDLE: u8 = 0x01;
    pub(super) const SEND_LAST: u8 = 0x02;
    pub(super) const SEND_LAST_IMM: u8 = 0x03;
    pub(super) const SEND_ONLY: u8 = 0x04;
    pub(super) const SEND_ONLY_IMM: u8 = 0x05;
    pub(super) const WRITE_FIRST: u8 = 0x06;
    pub(super) const WRITE_MIDDLE: u8 = 0x07;
    pub(super) const WRITE_LAST: u8 = 0x08;
    pub(super) const WRITE_LAST_IMM: u8 = 0x09;
    pub(super) const WRITE_ONLY: u8 = 0x0a;
    pub(super) const WRITE_ONLY_IMM: u8 = 0x0b;
    pub(super) const READ_REQUEST: u8 = 0x0c;
    pub(super) const READ_RESPONSE_FIRST: u8 = 0x0d;
    pub(super) const READ_RESPONSE_MIDDLE: u8 = 0x0e;
    pub(super) const READ_RESPONSE_LAST: u8 = 0x0f;
    pub(super) const READ_RESPONSE_ONLY: u8 = 0x10;
    pub(super) const ACKNOWLEDGE: u8 = 0x11;
    pub(super) const ATOMIC_ACKNOWLEDGE: u8 = 0x12;
    pub(super) const COMPARE_SWAP: u8 = 0x13;
    pub(super) const FETCH_ADD: u8 = 0x14;
    pub(super) const SEND_LAST_INV: u8 = 0x16;
    pub(super) const SEND_ONLY_INV: u8 = 0x17;
    // Private opcodes of DC.
    pub(super) const OPEN: u8 = 0x18;
    pub(super) const ACCEPT: u8 = 0x19;
    pub(super) const GONE: u8 = 0x1a;
    pub(super) const CLOSE: u8 = 0x1b;
    /// Of a class of its own.
    pub(super) const CONGESTION: u8 = 0x01;
}

impl Packet {
    /// Creates a session packet of DC.
    pub(crate) const fn dc_control(pkey: u16, dest: Qpn, psn: Psn, body: Body) -> Self {
        let transport = Transport::Dci;
        Self { transport, pkey, dest, psn, solicited: false, ack_request: false, body }
    }

    /// Creates a congestion notification packet.
    pub(crate) const fn congestion_notification(pkey: u16, dest: Qpn) -> Self {
        let (transport, psn, body) = (Transport::Rc, Psn::new(0), Body::Congestion);
        Self { transport, pkey, dest, psn, solicited: false, ack_request: false, body }
    }

    const fn opcode(&self) -> u8 {
        match self.body {
            Body::Send { part, tail } => match (part, tail) {
                (Part::First, _) => opcode::SEND_FIRST,
                (Part::Middle, _) => opcode::SEND_MIDDLE,
                (Part::Last, Tail::None) => opcode::SEND_LAST,
                (Part::Last, Tail::Imm(_)) => opcode::SEND_LAST_IMM,
                (Part::Last, Tail::Invalidate(_)) => opcode::SEND_LAST_INV,
                (Part::Only, Tail::None) => opcode::SEND_ONLY,
                (Part::Only, Tail::Imm(_)) => opcode::SEND_ONLY_IMM,
                (Part::Only, Tail::Invalidate(_)) => opcode::SEND_ONLY_INV,
            },
            Body::Write { part, imm, .. } => match (part, imm) {
                (Part::First, _) => opcode::WRITE_FIRST,
                (Part::Middle, _) => opcode::WRITE_MIDDLE,
                (Part::Last, None) => opcode::WRITE_LAST,
                (Part::Last, Some(_)) => opcode::WRITE_LAST_IMM,
                (Part::Only, None) => opcode::WRITE_ONLY,
                (Part::Only, Some(_)) => opcode::WRITE_ONLY_IMM,
            },
            Body::ReadRequest(_) => opcode::READ_REQUEST,
            Body::Atomic { op: AtomicOp::CompareSwap { .. }, .. } => opcode::COMPARE_SWAP,
            Body::Atomic { op: AtomicOp::FetchAdd { .. }, .. } => opcode::FETCH_ADD,
            Body::ReadResponse { part, .. } => match part {
                Part::First => opcode::READ_RESPONSE_FIRST,
                Part::Middle => opcode::READ_RESPONSE_MIDDLE,
                Part::Last => opcode::READ_RESPONSE_LAST,
                Part::Only => opcode::READ_RESPONSE_ONLY,
            },
            Body::Acknowledge(_) => opcode::ACKNOWLEDGE,
            Body::AtomicAcknowledge { .. } => opcode::ATOMIC_ACKNOWLEDGE,
            Body::Datagram { imm: None, .. } => opcode::SEND_ONLY,
            Body::Datagram { imm: Some(_), .. } => opcode::SEND_ONLY_IMM,
            Body::Open { .. } => opcode::OPEN,
            Body::Accept => opcode::ACCEPT,
            Body::Gone => opcode::GONE,
            Body::Close => opcode::CLOSE,
            Body::Congestion => opcode::CONGESTION,
        }
    }

    /// Appends the encoded image; `payload` appends the payload.
    pub(crate) fn emit(
        &self,
        payload_len: usize,
        out: &mut Vec<u8>,
        payload: impl FnOnce(&mut Vec<u8>),
    ) {
        let class = match self.transport {
            _ if self.body == Body::Congestion => CONGESTION_CLASS << 5,
            Transport::Rc => 0x00,
            Transport::Uc => 0x20,
            Transport::Ud => 0x60,
            // Manufacturer-defined (IBTA table 38).
            Transport::Dci => 0xc0,
        };
        let pad = payload_len.wrapping_neg() & 3;
        out.push(class | self.opcode());
        out.push(u8::from(self.solicited) << 7 | (pad as u8) << 4);
        out.extend_from_slice(&self.pkey.to_be_bytes());
        let becn = if self.body == Body::Congestion { BECN } else { 0 };
        out.extend_from_slice(&(self.dest.0 & Qpn::MAX.0 | becn).to_be_bytes());
        out.extend_from_slice(
            &(u32::from(self.ack_request) << 31 | self.psn.value()).to_be_bytes(),
        );
        match self.body {
            Body::Send { tail, .. } => match tail {
                Tail::None => {}
                Tail::Imm(imm) => out.extend_from_slice(&imm.0.to_be_bytes()),
                Tail::Invalidate(rkey) => out.extend_from_slice(&rkey.0.to_be_bytes()),
            },
            Body::Write { part, reth, imm } => {
                if part.begins() {
                    emit_reth(&reth, out);
                }
                if let Some(imm) = imm {
                    out.extend_from_slice(&imm.0.to_be_bytes());
                }
            }
            Body::ReadRequest(reth) => emit_reth(&reth, out),
            Body::Atomic { remote, op } => {
                let (swap_or_add, compare) = match op {
                    AtomicOp::CompareSwap { compare, swap } => (swap, compare),
                    AtomicOp::FetchAdd { add } => (add, 0),
                };
                out.extend_from_slice(&remote.addr.to_be_bytes());
                out.extend_from_slice(&remote.rkey.0.to_be_bytes());
                out.extend_from_slice(&swap_or_add.to_be_bytes());
                out.extend_from_slice(&compare.to_be_bytes());
            }
            Body::ReadResponse { part: Part::Middle, .. } => {}
            Body::ReadResponse { aeth, .. } | Body::Acknowledge(aeth) => emit_aeth(&aeth, out),
            Body::AtomicAcknowledge { aeth, original } => {
                emit_aeth(&aeth, out);
                out.extend_from_slice(&original.to_be_bytes());
            }
            Body::Datagram { qkey, source, imm } => {
                out.extend_from_slice(&qkey.0.to_be_bytes());
                out.extend_from_slice(&(source.0 & Qpn::MAX.0).to_be_bytes());
                if let Some(imm) = imm {
                    out.extend_from_slice(&imm.0.to_be_bytes());
                }
            }
            Body::Open { key, mtu } => {
                out.extend_from_slice(&key.0.to_be_bytes());
                out.extend_from_slice(&(mtu as u32).to_be_bytes());
            }
            Body::Accept | Body::Gone | Body::Close => {}
            Body::Congestion => out.extend_from_slice(&RESERVED),
        }
        let before = out.len();
        payload(out);
        debug_assert_eq!(out.len() - before, payload_len, "payload differs from payload_len");
        out.extend_from_slice(&[0; 3][..pad]);
    }

    /// Parses an image into a packet and its payload.
    ///
    /// Congestion, migration and reserved bits are ignored (IBTA 9.2).
    pub(crate) fn parse(image: &[u8]) -> Result<(Self, &[u8]), WireError> {
        let mut reader = Reader(image);
        let [code, flags] = reader.take()?;
        let pkey = u16::from_be_bytes(reader.take()?);
        let dest = Qpn(u32::from_be_bytes(reader.take()?) & Qpn::MAX.0);
        let sequence = u32::from_be_bytes(reader.take()?);
        if flags & 15 != 0 {
            return Err(WireError::Unsupported);
        }
        let transport = match code >> 5 {
            0 | CONGESTION_CLASS => Transport::Rc,
            1 => Transport::Uc,
            3 => Transport::Ud,
            6 => Transport::Dci,
            _ => return Err(WireError::Unsupported),
        };
        let body = if code >> 5 == CONGESTION_CLASS {
            if code & 31 != opcode::CONGESTION {
                return Err(WireError::Unsupported);
            }
            reader.take().map(|_: [u8; RESERVED.len()]| Body::Congestion)?
        } else {
            parse_body(transport, code & 31, &mut reader)?
        };
        let payload = reader.0;
        let pad = usize::from(flags >> 4 & 3);
        let length = payload.len().checked_sub(pad).ok_or(WireError::Truncated)?;
        let packet = Self {
            transport,
            pkey,
            dest,
            psn: Psn::new(sequence),
            solicited: flags & 0x80 != 0,
            ack_request: sequence >> 31 != 0,
            body,
        };
        Ok((packet, &payload[..length]))
    }
}

fn parse_body(transport: Transport, code: u8, reader: &mut Reader<'_>) -> Result<Body, WireError> {
    if transport == Transport::Ud {
        let imm_follows = match code {
            opcode::SEND_ONLY => false,
            opcode::SEND_ONLY_IMM => true,
            _ => return Err(WireError::Unsupported),
        };
        let qkey = Qkey(u32::from_be_bytes(reader.take()?));
        let source = Qpn(u32::from_be_bytes(reader.take()?) & Qpn::MAX.0);
        let imm = if imm_follows { Some(reader.imm()?) } else { None };
        return Ok(Body::Datagram { qkey, source, imm });
    }
    let send = |part, tail| Body::Send { part, tail };
    let none = Reth::default();
    let body = match code {
        opcode::SEND_FIRST => send(Part::First, Tail::None),
        opcode::SEND_MIDDLE => send(Part::Middle, Tail::None),
        opcode::SEND_LAST => send(Part::Last, Tail::None),
        opcode::SEND_LAST_IMM => send(Part::Last, Tail::Imm(reader.imm()?)),
        opcode::SEND_ONLY => send(Part::Only, Tail::None),
        opcode::SEND_ONLY_IMM => send(Part::Only, Tail::Imm(reader.imm()?)),
        opcode::WRITE_FIRST => Body::Write { part: Part::First, reth: reader.reth()?, imm: None },
        opcode::WRITE_MIDDLE => Body::Write { part: Part::Middle, reth: none, imm: None },
        opcode::WRITE_LAST => Body::Write { part: Part::Last, reth: none, imm: None },
        opcode::WRITE_LAST_IMM => {
            Body::Write { part: Part::Last, reth: none, imm: Some(reader.imm()?) }
        }
        opcode::WRITE_ONLY => Body::Write { part: Part::Only, reth: reader.reth()?, imm: None },
        opcode::WRITE_ONLY_IMM => {
            Body::Write { part: Part::Only, reth: reader.reth()?, imm: Some(reader.imm()?) }
        }
        // UC has no responses and no invalidation.
        _ if transport == Transport::Uc => return Err(WireError::Unsupported),
        opcode::SEND_LAST_INV => send(Part::Last, Tail::Invalidate(reader.rkey()?)),
        opcode::SEND_ONLY_INV => send(Part::Only, Tail::Invalidate(reader.rkey()?)),
        opcode::READ_REQUEST => Body::ReadRequest(reader.reth()?),
        opcode::READ_RESPONSE_FIRST => {
            Body::ReadResponse { part: Part::First, aeth: reader.aeth()? }
        }
        opcode::READ_RESPONSE_MIDDLE => Body::ReadResponse {
            part: Part::Middle,
            aeth: Aeth { syndrome: Syndrome::ACK, msn: 0 },
        },
        opcode::READ_RESPONSE_LAST => Body::ReadResponse { part: Part::Last, aeth: reader.aeth()? },
        opcode::READ_RESPONSE_ONLY => Body::ReadResponse { part: Part::Only, aeth: reader.aeth()? },
        opcode::ACKNOWLEDGE => Body::Acknowledge(reader.aeth()?),
        opcode::ATOMIC_ACKNOWLEDGE => Body::AtomicAcknowledge {
            aeth: reader.aeth()?,
            original: u64::from_be_bytes(reader.take()?),
        },
        opcode::COMPARE_SWAP | opcode::FETCH_ADD => {
            let remote =
                RemoteAddr { addr: u64::from_be_bytes(reader.take()?), rkey: reader.rkey()? };
            let swap_or_add = u64::from_be_bytes(reader.take()?);
            let compare = u64::from_be_bytes(reader.take()?);
            let op = if code == opcode::COMPARE_SWAP {
                AtomicOp::CompareSwap { compare, swap: swap_or_add }
            } else {
                AtomicOp::FetchAdd { add: swap_or_add }
            };
            Body::Atomic { remote, op }
        }
        opcode::OPEN if transport == Transport::Dci => {
            let key = DcKey(u64::from_be_bytes(reader.take()?));
            let [.., code] = reader.take::<4>()?;
            Body::Open { key, mtu: Mtu::from_code(code).ok_or(WireError::Unsupported)? }
        }
        opcode::ACCEPT if transport == Transport::Dci => Body::Accept,
        opcode::GONE if transport == Transport::Dci => Body::Gone,
        opcode::CLOSE if transport == Transport::Dci => Body::Close,
        _ => return Err(WireError::Unsupported),
    };
    Ok(body)
}

fn emit_reth(reth: &Reth, out: &mut Vec<u8>) {
    out.extend_from_slice(&reth.remote.addr.to_be_bytes());
    out.extend_from_slice(&reth.remote.rkey.0.to_be_bytes());
    out.extend_from_slice(&reth.length.to_be_bytes());
}

fn emit_aeth(aeth: &Aeth, out: &mut Vec<u8>) {
    let word = u32::from(aeth.syndrome.to_byte()) << 24 | (aeth.msn & 0x00ff_ffff);
    out.extend_from_slice(&word.to_be_bytes());
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], WireError> {
        let (head, rest) = self.0.split_first_chunk::<N>().ok_or(WireError::Truncated)?;
        self.0 = rest;
        Ok(*head)
    }

    fn imm(&mut self) -> Result<Imm, WireError> {
        Ok(Imm(u32::from_be_bytes(self.take()?)))
    }

    fn rkey(&mut self) -> Result<Rkey, WireError> {
        Ok(Rkey(u32::from_be_bytes(self.take()?)))
    }

    fn reth(&mut self) -> Result<Reth, WireError> {
        let addr = u64::from_be_bytes(self.take()?);
        let rkey = self.rkey()?;
        let length = u32::from_be_bytes(self.take()?);
        Ok(Reth { remote: RemoteAddr { addr, rkey }, length })
    }

    fn aeth(&mut self) -> Result<Aeth, WireError> {
        let word = u32::from_be_bytes(self.take()?);
        Ok(Aeth { syndrome: Syndrome::from_byte((word >> 24) as u8), msn: word & 0x00ff_ffff })
    }
}

#[cfg(test)]
mod tests;

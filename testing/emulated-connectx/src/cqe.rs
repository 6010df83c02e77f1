//! Completion queue entries (CQEs): `struct mlx5_cqe64`, `struct mlx5_err_cqe`.

use crate::control::Status;

/// Position of the opcode in the last byte. Bit 0 is the owner bit, bit 1 marks solicited events.
const OPCODE: u32 = 4;
const SOLICITED: u8 = 2;
/// `MLX5_INLINE_SCATTER_32` and `_64`.
const SCATTER_32: u8 = 4;
const SCATTER_64: u8 = 8;
/// The CQE begins a compressed session.
const COMPRESSED: u8 = 12;
/// Bytes of a mini-CQE.
pub(crate) const MINI: usize = 8;
pub(crate) const INVALID: u8 = 15;

#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(u8)]
pub(crate) enum Opcode {
    Request = 0,
    WriteImm = 1,
    Send = 2,
    SendImm = 3,
    SendInvalidate = 4,
    RequestError = 13,
    ResponseError = 14,
}

/// A CQE without its owner bit.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cqe {
    bytes: [u8; 64],
    /// Data before the CQE, in entries of 128 bytes.
    before: [u8; 64],
    /// `MLX5_INLINE_SCATTER_*`, [`COMPRESSED`], or 0.
    scatter: u8,
    pub(crate) solicited: bool,
    opcode: Opcode,
}

impl Cqe {
    fn new(uidx: u32, opcode: Opcode, qpn: u32, wqe: u16) -> Self {
        let mut cqe =
            Self { bytes: [0; 64], before: [0; 64], scatter: 0, solicited: false, opcode };
        cqe.put(32, &uidx.to_be_bytes());
        cqe.put(56, &qpn.to_be_bytes());
        cqe.put(60, &wqe.to_be_bytes());
        cqe
    }

    fn put(&mut self, at: usize, bytes: &[u8]) {
        self.bytes[at..at + bytes.len()].copy_from_slice(bytes);
    }

    /// Creates the CQE of a successful request: `wqe` is the WQE counter, `bytes` the length read.
    pub(crate) fn request(uidx: u32, qpn: u32, wqe: u16, operation: u8, bytes: u32) -> Self {
        let mut cqe = Self::new(uidx, Opcode::Request, u32::from(operation) << 24 | qpn, wqe);
        cqe.put(44, &bytes.to_be_bytes());
        cqe
    }

    pub(crate) fn receive(
        uidx: u32,
        opcode: Opcode,
        qpn: u32,
        wqe: u16,
        arrived: &Arrived,
    ) -> Self {
        let mut cqe = Self::new(uidx, opcode, qpn, wqe);
        cqe.put(22, &arrived.source_lid.to_be_bytes());
        let route = u32::from(arrived.has_grh) << 28 | u32::from(arrived.service_level & 15) << 24;
        cqe.put(24, &(route | arrived.source_qpn).to_be_bytes());
        cqe.put(36, &arrived.immediate);
        cqe.put(44, &arrived.bytes.to_be_bytes());
        cqe.solicited = arrived.solicited;
        cqe
    }

    pub(crate) fn error(
        uidx: u32,
        opcode: Opcode,
        qpn: u32,
        wqe: u16,
        operation: u8,
        status: Status,
    ) -> Self {
        /// Vendor error code, made up.
        const VENDOR: u8 = 0x68;
        let mut cqe = Self::new(uidx, opcode, u32::from(operation) << 24 | qpn, wqe);
        let vendor = if status == Status::WorkRequestFlushed { 0xf9 } else { VENDOR };
        cqe.put(54, &[vendor, status.syndrome()]);
        cqe
    }

    /// Puts `data` into the entry: into the 64 bytes before the CQE if `limit` is 64, else over its
    /// first 32 bytes. The CQE has no fields there that the program needs.
    pub(crate) fn scatter(&mut self, data: &[u8], limit: usize) {
        debug_assert!(data.len() <= limit);
        let (into, flag) = if limit == 64 {
            (&mut self.before[..], SCATTER_64)
        } else {
            (&mut self.bytes[..], SCATTER_32)
        };
        into[..data.len()].copy_from_slice(data);
        self.scatter = flag;
    }

    /// Returns the data before the CQE.
    pub(crate) fn before(&self) -> Option<&[u8]> {
        (self.scatter == SCATTER_64).then_some(&self.before)
    }

    pub(crate) fn has_data(&self) -> bool {
        self.scatter != 0
    }

    pub(crate) fn is_error(&self) -> bool {
        matches!(self.opcode, Opcode::RequestError | Opcode::ResponseError)
    }

    /// Returns whether the CQE may be part of a compressed session.
    pub(crate) fn is_compressible(&self) -> bool {
        !self.is_error() && !self.has_data()
    }

    /// Returns whether the CQE may follow `previous` in a compressed session: they differ only in
    /// what a [`mini`](Self::mini) holds, and in timestamps.
    pub(crate) fn continues(&self, previous: &Self) -> bool {
        let same =
            |range: std::ops::Range<usize>| self.bytes[range.clone()] == previous.bytes[range];
        let next = previous.counter().wrapping_add(1);
        let requests = self.opcode == Opcode::Request;
        self.is_compressible()
            && previous.is_compressible()
            && (self.opcode, self.solicited) == (previous.opcode, previous.solicited)
            && same(0..44)
            && same(57..60)
            && (requests || same(56..57) && self.counter() == next)
    }

    fn counter(&self) -> u16 {
        u16::from_be_bytes([self.bytes[60], self.bytes[61]])
    }

    /// Returns the mini-CQE: counter and operation of a request, or the hash of a receive, then the
    /// length.
    pub(crate) fn mini(&self) -> [u8; MINI] {
        /// The hash of a packet, which messages do not have.
        const HASH: [u8; 4] = [0xd1, 0xd2, 0xd3, 0xd4];
        let mut mini = [0; MINI];
        if self.opcode == Opcode::Request {
            mini[..2].copy_from_slice(&self.bytes[60..62]);
            mini[2] = self.bytes[56];
        } else {
            mini[..4].copy_from_slice(&HASH);
        }
        mini[4..].copy_from_slice(&self.bytes[44..48]);
        mini
    }

    /// Returns the first CQE of a session of `entries`, whose own length is in its mini-CQE.
    pub(crate) fn title(mut self, entries: u32) -> Self {
        self.put(44, &entries.to_be_bytes());
        self.scatter = COMPRESSED;
        self
    }

    /// Sets the timestamp, which error CQEs lack.
    pub(crate) fn stamp(&mut self, nanoseconds: u64) {
        if !self.is_error() {
            self.put(48, &nanoseconds.to_be_bytes());
        }
    }

    /// Returns all bytes but the last, and the last byte with owner bit `odd`.
    pub(crate) fn parts(&self, odd: bool) -> (&[u8], u8) {
        let solicited = if self.solicited { SOLICITED } else { 0 };
        (
            &self.bytes[..63],
            (self.opcode as u8) << OPCODE | self.scatter | solicited | u8::from(odd),
        )
    }
}

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Arrived {
    pub(crate) source_qpn: u32,
    pub(crate) source_lid: u16,
    pub(crate) service_level: u8,
    pub(crate) has_grh: bool,
    /// Immediate data in network order, or the key to invalidate.
    pub(crate) immediate: [u8; 4],
    pub(crate) bytes: u32,
    pub(crate) solicited: bool,
}

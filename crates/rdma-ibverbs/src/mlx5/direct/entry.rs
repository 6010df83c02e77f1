//! Building a send WQE: the type of an entry says which segments it still lacks.
//!
//! ```text
//! Unrouted ─route─▶ Blank ─send──────────────────────▶ NoData ────┐
//!                     ├────write─▶ NoRemote ─remote─▶ NoData ────┤
//!                     ├────read──▶ NoRemote ─remote─▶ NoBuffer ──┼▶ Complete ─finish
//!                     ├────atomic▶ NoRemote ─▶ NoOperands ─▶ NoBuffer
//!                     └────bind, invalidate ─────────────────────┘
//! ```
//!
//! Queue pairs of RC and UC begin at `Blank`, of UD and DC at `Unrouted`. An entry that lacks a
//! segment cannot be finished:
//!
//! ```compile_fail
//! use rdma_ibverbs::mlx5::direct::entry::{Entry, Header};
//! use rdma_ibverbs::mlx5::direct::layout::Opcode;
//! use rdma_ibverbs::mlx5::direct::ring::{Block, Ring};
//!
//! let mut memory = [Block([0; 64]); 4];
//! let ring = Ring::new(&mut memory);
//! // The local buffer is missing.
//! let entry = Entry::connected(&ring, 0).read().remote(0x1000, 7);
//! entry.finish(&Header { qpn: 1, ..Header::default() });
//! ```
//!
//! ```
//! # use rdma_ibverbs::mlx5::direct::entry::{Entry, Header};
//! # use rdma_ibverbs::mlx5::direct::layout::Opcode;
//! # use rdma_ibverbs::mlx5::direct::ring::{Block, Ring};
//! use rdma_ibverbs::types::{Lkey, Sge};
//!
//! # let mut memory = [Block([0; 64]); 4];
//! # let ring = Ring::new(&mut memory);
//! let buffer = Sge { addr: 0x2000, length: 8, lkey: Lkey(3) };
//! let entry = Entry::connected(&ring, 0).read().remote(0x1000, 7).buffer(&[buffer]);
//! assert_eq!(entry.finish(&Header { qpn: 1, ..Header::default() }), 3);
//! ```

use std::marker::PhantomData;
use std::ptr::NonNull;

use rdma_provider::types::{Access, Sge, WindowBind};

use super::layout::{
    Be16, Be32, Be64, Control, DataSegment, INLINE, Klm, MAX_SEGMENTS, MkeyContext, Opcode,
    Operands, Remote, Route, SEGMENT, SEGMENTS_OF_BLOCK, UmrControl, mkey_access, mkey_mask, umr,
};
use super::ring::Ring;

/// The entry lacks the route to its receiver, then an operation.
#[derive(Debug)]
pub enum Unrouted {}
/// The entry lacks an operation.
#[derive(Debug)]
pub enum Blank {}
/// The entry lacks the address of remote memory, then what `Next` lacks.
#[derive(Debug)]
pub struct NoRemote<Next>(PhantomData<Next>);
/// The entry lacks the operands of an atomic operation, then a buffer.
#[derive(Debug)]
pub enum NoOperands {}
/// The entry lacks data to send: buffers or inline bytes.
#[derive(Debug)]
pub enum NoData {}
/// The entry lacks a buffer for the peer's response.
#[derive(Debug)]
pub enum NoBuffer {}
/// The entry lacks nothing but its control segment.
#[derive(Debug)]
pub enum Complete {}

/// A WQE under construction in the blocks from an index on.
///
/// The caller ensures that these blocks are free; otherwise entries in flight are overwritten.
#[must_use = "the adapter sees an entry only when it is finished and published"]
#[derive(Debug)]
pub struct Entry<'r, 'm, Lacks> {
    ring: &'r Ring<'m>,
    index: u32,
    /// Address of the first block.
    first: NonNull<u8>,
    /// Segments written so far, control segment included.
    segments: u32,
    opcode: Opcode,
    lacks: PhantomData<Lacks>,
}

/// The parameters of a control segment.
#[derive(Debug, Clone, Copy, Default)]
pub struct Header {
    /// The queue pair number.
    pub qpn: u32,
    /// Bits of [`control`](super::layout::control).
    pub flags: u8,
    /// Immediate data, or the key to invalidate.
    pub immediate: u32,
}

impl<'r, 'm> Entry<'r, 'm, Blank> {
    /// Begins an entry of a connected queue pair at block `index`.
    #[inline]
    pub fn connected(ring: &'r Ring<'m>, index: u32) -> Self {
        Self::begin(ring, index)
    }

    /// Begins an entry of a connected queue pair at block `index`, which is at `place`.
    #[inline]
    pub(super) fn at(ring: &'r Ring<'m>, index: u32, place: usize) -> Self {
        let first = ring.block_at(place);
        Self { ring, index, first, segments: 1, opcode: Opcode::Nop, lacks: PhantomData }
    }

    /// Returns the address of its first block.
    #[inline]
    pub(super) fn first(&self) -> NonNull<u8> {
        self.first
    }

    /// Makes it a SEND of any kind.
    #[inline]
    pub fn send(self, opcode: Opcode) -> Entry<'r, 'm, NoData> {
        debug_assert!(matches!(
            opcode,
            Opcode::Send | Opcode::SendWithImm | Opcode::SendInvalidate
        ));
        self.with(opcode)
    }

    /// Makes it a WRITE, with or without immediate data.
    #[inline]
    pub fn write(self, opcode: Opcode) -> Entry<'r, 'm, NoRemote<NoData>> {
        debug_assert!(matches!(opcode, Opcode::Write | Opcode::WriteWithImm));
        self.with(opcode)
    }

    /// Makes it a READ.
    #[inline]
    pub fn read(self) -> Entry<'r, 'm, NoRemote<NoBuffer>> {
        self.with(Opcode::Read)
    }

    /// Makes it an atomic operation.
    #[inline]
    pub fn atomic(self, opcode: Opcode) -> Entry<'r, 'm, NoRemote<NoOperands>> {
        debug_assert!(matches!(opcode, Opcode::CompareSwap | Opcode::FetchAdd));
        self.with(opcode)
    }

    /// Makes it a binding of a memory window by queue pair `qpn`. The length of the window is at
    /// most 2^31. A window of length 0 becomes an invalidation, as in libmlx5, which the adapter
    /// refuses.
    ///
    /// # Panics
    ///
    /// Panics if the entry has a route: only connected queue pairs have windows.
    pub fn bind(mut self, qpn: u32, bind: &WindowBind) -> Entry<'r, 'm, Complete> {
        if bind.len == 0 {
            return self.unbind(bind.rkey.0 & 0xff);
        }
        const RIGHTS: [(Access, u8); 4] = [
            (Access::LOCAL_WRITE, mkey_access::LOCAL_WRITE),
            (Access::REMOTE_WRITE, mkey_access::REMOTE_WRITE),
            (Access::REMOTE_READ, mkey_access::REMOTE_READ),
            (Access::REMOTE_ATOMIC, mkey_access::ATOMIC),
        ];
        let access = RIGHTS
            .iter()
            .filter(|(right, _)| bind.access.contains(*right))
            .fold(0, |access, (_, bit)| access | bit);
        self.put(UmrControl {
            flags: umr::TRANSLATION_OFFSET | umr::INLINE | umr::CHECK_FREE,
            reserved0: [0; 3],
            // One element takes one octoword; the unit is four.
            klm_octowords: Be16::new(4),
            translation_offset: Be16::new(0),
            mkey_mask: Be64::new(
                mkey_mask::FREE
                    | mkey_mask::MKEY
                    | mkey_mask::QPN
                    | mkey_mask::LEN
                    | mkey_mask::START_ADDRESS
                    | mkey_mask::LOCAL_WRITE
                    | mkey_mask::REMOTE_READ
                    | mkey_mask::REMOTE_WRITE
                    | mkey_mask::ATOMIC,
            ),
            reserved1: [0; 32],
        });
        self.put(MkeyContext {
            access,
            qpn_mkey: Be32::new(bind.rkey.0 & 0xff | qpn << 8),
            start_address: Be64::new(bind.addr),
            len: Be64::new(bind.len),
            ..NO_MKEY
        });
        self.put(Klm {
            length: Be32::new(bind.len as u32),
            key: Be32::new(bind.lkey.0),
            address: Be64::new(bind.addr),
            padding: [0; 6],
        });
        self.with(Opcode::Umr)
    }

    /// Makes it the invalidation of a window that the queue pair has bound.
    ///
    /// # Panics
    ///
    /// See [`bind`](Self::bind).
    pub fn invalidate(self) -> Entry<'r, 'm, Complete> {
        self.unbind(0)
    }

    fn unbind(mut self, key: u32) -> Entry<'r, 'm, Complete> {
        self.put(UmrControl {
            flags: umr::TRANSLATION_OFFSET | umr::INLINE | umr::CHECK_QPN,
            reserved0: [0; 3],
            klm_octowords: Be16::new(0),
            translation_offset: Be16::new(0),
            mkey_mask: Be64::new(mkey_mask::FREE | mkey_mask::MKEY | mkey_mask::QPN),
            reserved1: [0; 32],
        });
        self.put(MkeyContext {
            free: MkeyContext::FREE,
            qpn_mkey: Be32::new(MkeyContext::NO_QUEUE_PAIR << 8 | key),
            ..NO_MKEY
        });
        self.with(Opcode::Umr)
    }
}

const NO_MKEY: MkeyContext = MkeyContext {
    free: 0,
    reserved1: 0,
    access: 0,
    sf: 0,
    qpn_mkey: Be32::new(0),
    reserved2: 0,
    flags_pd: Be32::new(0),
    start_address: Be64::new(0),
    len: Be64::new(0),
    rest: [0; 8],
};

impl<'r, 'm> Entry<'r, 'm, Unrouted> {
    /// Begins an entry of a UD queue pair or DC initiator at block `index`.
    #[inline]
    pub fn unconnected(ring: &'r Ring<'m>, index: u32) -> Self {
        Self::begin(ring, index)
    }

    /// Adds the route to receiver `number` with `key`: the access key of a DC target, or the Q_Key
    /// << 32. `address` is the route of the address handle.
    #[inline]
    pub fn route(mut self, address: &Route, number: u32, key: u64) -> Entry<'r, 'm, Blank> {
        let number = number | Route::EXTENDED;
        self.put(Route { key: Be64::new(key), number: Be32::new(number), ..*address });
        self.with(Opcode::Nop)
    }
}

impl<'r, 'm, Lacks> Entry<'r, 'm, NoRemote<Lacks>> {
    /// Adds the address and key of remote memory.
    #[inline]
    pub fn remote(mut self, address: u64, key: u32) -> Entry<'r, 'm, Lacks> {
        self.put_words::<Remote>(address, u64::from(key) << 32);
        let opcode = self.opcode;
        self.with(opcode)
    }
}

impl<'r, 'm> Entry<'r, 'm, NoOperands> {
    /// Adds the value to add or swap in, and the expected value, 0 for an addition.
    #[inline]
    pub fn operands(mut self, swap_add: u64, compare: u64) -> Entry<'r, 'm, NoBuffer> {
        self.put(Operands { swap_add: Be64::new(swap_add), compare: Be64::new(compare) });
        let opcode = self.opcode;
        self.with(opcode)
    }
}

impl<'r, 'm> Entry<'r, 'm, NoBuffer> {
    /// Adds the buffers for the response.
    pub fn buffer(self, buffers: &[Sge]) -> Entry<'r, 'm, Complete> {
        self.list(buffers)
    }

    /// Adds the buffer for the response, which is not empty.
    #[inline]
    pub(super) fn plain(self, buffer: &Sge) -> Entry<'r, 'm, Complete> {
        self.single(buffer)
    }
}

impl<'r, 'm> Entry<'r, 'm, NoData> {
    /// Adds the buffers to send.
    pub fn data(self, buffers: &[Sge]) -> Entry<'r, 'm, Complete> {
        self.list(buffers)
    }

    /// Adds the buffer to send, which is not empty.
    #[inline]
    pub(super) fn plain(self, buffer: &Sge) -> Entry<'r, 'm, Complete> {
        self.single(buffer)
    }

    /// Adds a copy of `bytes`.
    #[inline]
    pub fn inline(mut self, bytes: &[u8]) -> Entry<'r, 'm, Complete> {
        if !bytes.is_empty() {
            let length = size_of::<Be32>() + bytes.len();
            let at = self.ring.segment(self.index, self.first, self.segments);
            // SAFETY: S3: masked: within the ring, which no reference aliases.
            unsafe { at.cast().write(Be32::new(bytes.len() as u32 | INLINE)) };
            let from = self.segments as usize * SEGMENT + size_of::<Be32>();
            self.ring.copy_in(self.index, from, bytes);
            self.segments += length.div_ceil(SEGMENT) as u32;
        }
        let opcode = self.opcode;
        self.with(opcode)
    }
}

impl Entry<'_, '_, Complete> {
    /// Writes the control segment; returns the length of the entry in segments.
    #[inline]
    pub fn finish(self, header: &Header) -> u32 {
        debug_assert!(self.segments <= MAX_SEGMENTS, "{} segments", self.segments);
        let opcode = u64::from((self.index & 0xffff) << 8 | self.opcode as u32);
        let length = u64::from(header.qpn << 8 | self.segments);
        let flags = u64::from(header.flags) << 32;
        let immediate = u64::from(header.immediate);
        let control = [Be64::new(opcode << 32 | length), Be64::new(flags | immediate)];
        const { assert!(size_of::<[Be64; 2]>() == size_of::<Control>()) };
        // SAFETY: S3: masked: within the ring, which no reference aliases.
        unsafe { self.first.cast().write(control) };
        self.segments
    }
}

impl<'r, 'm, Lacks> Entry<'r, 'm, Lacks> {
    /// Adds a segment.
    #[inline]
    fn put<T>(&mut self, segment: T) {
        const { assert!(size_of::<T>().is_multiple_of(SEGMENT)) };
        let length = (size_of::<T>() / SEGMENT) as u32;
        let fits = self.segments % SEGMENTS_OF_BLOCK + length <= SEGMENTS_OF_BLOCK;
        // Decided at compile time except for UMRs, which do not fit after a route.
        assert!(fits, "the segment crosses a block");
        let at = self.ring.segment(self.index, self.first, self.segments);
        // SAFETY: S3: masked: within the ring, which no reference aliases; the segment is within a
        // block.
        unsafe { at.cast().write(segment) };
        self.segments += length;
    }

    /// Adds a list of buffers. Empty ones are left out: length 0 means 2^31.
    #[inline]
    fn list(mut self, buffers: &[Sge]) -> Entry<'r, 'm, Complete> {
        for buffer in buffers {
            if buffer.length > 0 {
                self.put(data_segment(buffer));
            }
        }
        let opcode = self.opcode;
        self.with(opcode)
    }

    #[inline]
    fn single(mut self, buffer: &Sge) -> Entry<'r, 'm, Complete> {
        debug_assert!(buffer.length > 0, "the adapter takes length 0 for 2^31");
        let length_and_key = u64::from(buffer.length) << 32 | u64::from(buffer.lkey.0);
        self.put_words::<DataSegment>(length_and_key, buffer.addr);
        let opcode = self.opcode;
        self.with(opcode)
    }

    /// Adds a segment by two 64-bit stores, where the compiler would store each field.
    #[inline]
    fn put_words<T>(&mut self, first: u64, second: u64) {
        const { assert!(size_of::<[Be64; 2]>() == size_of::<T>()) };
        self.put([Be64::new(first), Be64::new(second)]);
    }

    #[inline]
    fn with<Lack>(self, opcode: Opcode) -> Entry<'r, 'm, Lack> {
        let Self { ring, index, first, segments, .. } = self;
        Entry { ring, index, first, segments, opcode, lacks: PhantomData }
    }

    #[inline]
    fn begin(ring: &'r Ring<'m>, index: u32) -> Self {
        let first = ring.block(index);
        Self { ring, index, first, segments: 1, opcode: Opcode::Nop, lacks: PhantomData }
    }
}

/// Returns the segment of a buffer.
#[inline]
pub(super) fn data_segment(buffer: &Sge) -> DataSegment {
    DataSegment {
        length: Be32::new(buffer.length),
        key: Be32::new(buffer.lkey.0),
        address: Be64::new(buffer.addr),
    }
}

#[cfg(test)]
mod tests;

//! The memory of a send queue: a ring of 64-byte blocks, addressed by block and segment.

use std::marker::PhantomData;
use std::ptr::NonNull;

use super::layout::{BLOCK, Route, SEGMENT, SEGMENTS_OF_BLOCK};

/// A basic block of a send queue.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub struct Block(pub [u8; BLOCK]);

/// A ring of blocks. Indices count on beyond its end, and wrap around.
#[derive(Debug, Clone, Copy)]
pub struct Ring<'m> {
    start: NonNull<u8>,
    /// Number of blocks - 1; a power of two - 1.
    mask: u32,
    memory: PhantomData<&'m mut [Block]>,
}

// Segments of 16, 48 and 64 bytes are contiguous: a route follows the control segment of its block.
const _: () = assert!(SEGMENT + size_of::<Route>() == BLOCK);

impl<'m> Ring<'m> {
    /// Wraps blocks, whose number is rounded down to a power of two. At most 65,536 are used.
    ///
    /// # Panics
    ///
    /// Panics without blocks.
    #[must_use]
    pub fn new(blocks: &'m mut [Block]) -> Self {
        assert!(!blocks.is_empty(), "a ring needs a block");
        let length = 1 << blocks.len().ilog2().min(16);
        // SAFETY: S3: the slice has that many blocks, which the ring borrows.
        unsafe { Self::from_raw(NonNull::from(blocks).cast(), length) }
    }

    /// Wraps memory that libmlx5 has allocated.
    ///
    /// # Safety
    ///
    /// `start` is aligned to 64 bytes, and valid for reads and writes of `blocks` blocks during
    /// `'m`. `blocks` is a power of two. No thread reads or writes a block while another
    /// writes it.
    pub(super) unsafe fn from_raw(start: NonNull<u8>, blocks: u32) -> Self {
        debug_assert!(blocks.is_power_of_two());
        Self { start, mask: blocks - 1, memory: PhantomData }
    }

    #[inline]
    pub(super) fn blocks(&self) -> u32 {
        self.mask + 1
    }

    /// Returns the place of a block in arrays with one element for each block.
    #[inline]
    pub(super) fn place(&self, index: u32) -> usize {
        (index & self.mask) as usize
    }

    /// Returns the address of block `index`.
    #[inline]
    pub(super) fn block(&self, index: u32) -> NonNull<u8> {
        self.block_at(self.place(index))
    }

    /// Returns the address of the block at [`place`](Self::place).
    #[inline]
    pub(super) fn block_at(&self, place: usize) -> NonNull<u8> {
        debug_assert!(place <= self.mask as usize, "block {place} of {}", self.blocks());
        // SAFETY: S3: masked: within the ring.
        unsafe { self.start.add(place * BLOCK) }
    }

    /// Returns the address of a segment of the WQE that begins at block `index`, at address
    /// `first`.
    #[inline]
    pub(super) fn segment(&self, index: u32, first: NonNull<u8>, segment: u32) -> NonNull<u8> {
        // Usually known at compile time.
        let block = if segment < SEGMENTS_OF_BLOCK {
            first
        } else {
            self.block(index.wrapping_add(segment / SEGMENTS_OF_BLOCK))
        };
        // SAFETY: S3: within the block.
        unsafe { block.add((segment % SEGMENTS_OF_BLOCK) as usize * SEGMENT) }
    }

    /// Copies `bytes` to offset `from` of the WQE that begins at block `index`.
    #[inline]
    pub(super) fn copy_in(&self, index: u32, from: usize, bytes: &[u8]) {
        let (mut rest, mut at) = (bytes, from);
        while !rest.is_empty() {
            let block = index.wrapping_add((at / BLOCK) as u32);
            let contiguous = (self.blocks() as usize - self.place(block)) * BLOCK - at % BLOCK;
            let (now, later) = rest.split_at(rest.len().min(contiguous));
            // SAFETY: S3: so many bytes follow in the ring; a slice of the caller does not overlap
            // it.
            unsafe {
                let to = self.block(block).add(at % BLOCK);
                to.copy_from_nonoverlapping(NonNull::from(now).cast(), now.len());
            }
            at += now.len();
            rest = later;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ring_has_the_largest_power_of_two_of_blocks() {
        for (blocks, expected) in [(1, 1), (2, 2), (3, 2), (4, 4), (7, 4), (1000, 512)] {
            let mut memory = vec![Block([0; BLOCK]); blocks];
            assert_eq!(Ring::new(&mut memory).blocks(), expected);
        }
    }

    #[test]
    fn bytes_wrap_around_at_the_end_and_touch_nothing_else() {
        let lengths = if cfg!(miri) { [0, 63, 65].to_vec() } else { (0..=4 * BLOCK).collect() };
        for index in [0, 1, 3, 0xffff, u32::MAX] {
            for from in [0, 4, 20, 63, 64, 100] {
                for &length in &lengths {
                    // One more block than the ring has.
                    let mut memory = vec![Block([0xa5; BLOCK]); 5];
                    let ring = Ring::new(&mut memory);
                    let bytes: Vec<_> = (0..length).map(|at| at as u8).collect();
                    ring.copy_in(index, from, &bytes);
                    let start = (index % 4) as usize * BLOCK + from;
                    let mut expected = vec![0xa5; 5 * BLOCK];
                    for (at, byte) in bytes.into_iter().enumerate() {
                        expected[(start + at) % (4 * BLOCK)] = byte;
                    }
                    let found: Vec<_> = memory.iter().flat_map(|block| block.0).collect();
                    assert_eq!(found, expected, "{length} bytes at {from} of {index}");
                }
            }
        }
    }

    #[test]
    fn segments_of_a_wqe_follow_each_other_across_the_end() {
        let mut memory = vec![Block([0; BLOCK]); 4];
        let ring = Ring::new(&mut memory);
        let first = ring.block(u32::MAX);
        let offset = |at: NonNull<u8>| at.addr().get() - ring.block(0).addr().get();
        assert_eq!(offset(first), 3 * BLOCK);
        for segment in 0..16 {
            let expected = (3 * BLOCK + segment as usize * SEGMENT) % (4 * BLOCK);
            assert_eq!(offset(ring.segment(u32::MAX, first, segment)), expected);
        }
    }
}

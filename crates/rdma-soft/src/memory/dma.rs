//! Copies to and from registered memory: the only code of the device that dereferences pointers.
//!
//! A [`Segment`] is a checked part of a registration with a [`Use`], which blocks its removal. The
//! functions here are therefore safe.
//!
//! Memory that a peer may access is accessed by atomics or their equivalent only (S2), because the
//! program accesses it concurrently. Stores ascend and the last one is a release: a program that
//! polls the last byte with acquire sees all bytes. In memory that is registered to land
//! out of order, the last block of 64 bytes comes first.

#![allow(unsafe_code)]

use std::alloc::Layout;
#[cfg(not(miri))]
use std::alloc::handle_alloc_error;
use std::ops::Deref;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering};

#[cfg(not(miri))]
use memmap2::MmapMut;
use smallvec::SmallVec;

use super::keys::Use;
use crate::roce::packet::AtomicOp;
use rdma_provider::shared_memory as shared;

/// A part of registered memory, which stays registered while the segment lives.
///
/// Invariant: `pointer..pointer + len` lies within the registration that `_use` holds, directly or
/// through a window, and was valid for reads and writes when registered. The caller of
/// `Pd::register` keeps it allocated until the registration is dropped, which waits for every `Use`
/// of it and its windows.
#[derive(Debug)]
pub(crate) struct Segment<'k> {
    pointer: *mut u8,
    len: usize,
    /// Accessed by atomics only.
    shared: bool,
    /// Written by blocks, the last one first; also `shared`.
    reordered: bool,
    _use: Use<'k>,
}

impl Segment<'_> {
    pub(crate) const fn len(&self) -> usize {
        self.len
    }

    pub(crate) const fn is_reordered(&self) -> bool {
        self.reordered
    }

    #[cfg(test)]
    pub(crate) const fn is_shared(&self) -> bool {
        self.shared
    }
}

/// Memory that the device may access, as promised by the caller of `Pd::register`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Memory {
    base: *mut u8,
    len: usize,
    start: u64,
}

impl Memory {
    /// Creates memory that work requests and peers address as `start..start + len`.
    ///
    /// # Safety
    ///
    /// `base..base + len` stays valid until its registration is removed from
    /// [`Keys`](super::keys::Keys) (S1).
    pub(crate) const unsafe fn new(base: *mut u8, len: usize, start: u64) -> Self {
        Self { base, len, start }
    }
}

/// The memory of a registration or window.
#[derive(Debug, Default)]
pub(crate) struct Region {
    base: AtomicPtr<u8>,
    len: AtomicUsize,
    /// First address in work requests: that of the memory, or another that was chosen (IOVA).
    start: AtomicU64,
}

impl Region {
    /// Sets the memory while no [`Use`] exists; the caller publishes it with a release store.
    pub(crate) fn assign(&self, memory: Memory) {
        self.base.store(memory.base, Ordering::Relaxed);
        self.len.store(memory.len, Ordering::Relaxed);
        self.start.store(memory.start, Ordering::Relaxed);
    }

    /// Sets the memory to a segment, like [`assign`](Self::assign). Removing its registration
    /// unbinds its windows and waits for their uses.
    pub(crate) fn assign_window(&self, of: &Segment<'_>, start: u64) {
        self.assign(Memory { base: of.pointer, len: of.len, start });
    }

    /// Returns `addr..addr + len` if it is within the region.
    #[inline]
    pub(crate) fn piece<'k>(
        &self,
        addr: u64,
        len: usize,
        (shared, reordered): (bool, bool),
        hold: Use<'k>,
    ) -> Option<Segment<'k>> {
        let start = self.start.load(Ordering::Relaxed);
        let size = self.len.load(Ordering::Relaxed);
        let offset = usize::try_from(addr.checked_sub(start)?).ok()?;
        if offset > size || len > size - offset {
            return None;
        }
        // SAFETY: `offset` is within the memory of a live registration, just checked (S1).
        let pointer = unsafe { self.base.load(Ordering::Relaxed).add(offset) };
        Some(Segment { pointer, len, shared, reordered, _use: hold })
    }
}

/// The segments of a packet. The capacity is the maximum of a work request.
pub(crate) type Gather<'k> = SmallVec<[Segment<'k>; 16]>;

/// The payload of a packet: registered memory, or bytes from the network.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Payload<'a, 'k> {
    Segment(&'a Segment<'k>),
    Segments(&'a [Segment<'k>]),
    Bytes(&'a [u8]),
}

impl Payload<'_, '_> {
    pub(crate) fn len(&self) -> usize {
        match *self {
            Self::Segment(one) | Self::Segments([one]) => one.len,
            Self::Segments(segments) => segments.iter().map(Segment::len).sum(),
            Self::Bytes(bytes) => bytes.len(),
        }
    }

    /// Copies the payload to `to`, which is at least as long.
    #[inline(always)]
    pub(crate) fn copy_to(&self, to: &[Segment<'_>]) {
        match (*self, to) {
            (Self::Segment(from) | Self::Segments([from]), [to]) if !to.reordered => {
                let len = from.len.min(to.len);
                // SAFETY: S1: both ranges are live registrations (invariant of Segment) of at least
                // `len` bytes.
                unsafe { copy(from.pointer, from.shared, to.pointer, to.shared, len) }
            }
            _ => self.scatter_to(to),
        }
    }

    fn scatter_to(&self, to: &[Segment<'_>]) {
        let mut cursor = Cursor::new(to);
        match self {
            Self::Segment(from) => cursor.write(from.pointer, from.len, from.shared),
            Self::Segments(from) => {
                for piece in *from {
                    cursor.write(piece.pointer, piece.len, piece.shared);
                }
            }
            Self::Bytes(bytes) => cursor.write(bytes.as_ptr(), bytes.len(), false),
        }
    }

    pub(crate) fn append_to(&self, out: &mut Vec<u8>) {
        let segments = match *self {
            Self::Bytes(bytes) => return out.extend_from_slice(bytes),
            Self::Segment(one) => std::slice::from_ref(one),
            Self::Segments(segments) => segments,
        };
        for piece in segments {
            let at = out.len();
            out.reserve(piece.len);
            // SAFETY: S2: the source is a live registration (invariant of Segment). The target has
            // just been reserved, belongs to this thread, and is initialised by the copy.
            unsafe {
                copy(piece.pointer, piece.shared, out.as_mut_ptr().add(at), false, piece.len);
                out.set_len(at + piece.len);
            }
        }
    }
}

struct Cursor<'a, 'k> {
    to: &'a [Segment<'k>],
    offset: usize,
}

impl<'a, 'k> Cursor<'a, 'k> {
    const fn new(to: &'a [Segment<'k>]) -> Self {
        Self { to, offset: 0 }
    }

    /// Writes `from..from + len`, which is readable: a segment or a slice.
    fn write(&mut self, mut from: *const u8, mut len: usize, shared: bool) {
        while let [first, rest @ ..] = self.to {
            let step = len.min(first.len - self.offset);
            // SAFETY: S2: `from` has `len` bytes left and `first` has `step` from `offset`; both
            // stay registered or borrowed during the call.
            unsafe {
                let to = first.pointer.add(self.offset);
                if first.reordered {
                    copy_reordered(from, shared, to, first.shared, step);
                } else {
                    copy(from, shared, to, first.shared, step);
                }
                from = from.add(step);
            }
            len -= step;
            self.offset += step;
            if len == 0 {
                return;
            }
            self.to = rest;
            self.offset = 0;
        }
        debug_assert_eq!(len, 0, "target shorter than the payload");
    }
}

/// Runs `op` and returns the original value, or `None` unless `target` is 8 aligned bytes.
pub(crate) fn atomic(target: &Segment<'_>, op: AtomicOp) -> Option<u64> {
    let pointer = target.pointer.cast::<u64>();
    if target.len != 8 || !pointer.is_aligned() {
        return None;
    }
    // SAFETY: 8 aligned bytes of a live registration with rights for remote atomics: all accesses
    // are atomic (S2).
    let word = unsafe { AtomicU64::from_ptr(pointer) };
    Some(match op {
        AtomicOp::CompareSwap { compare, swap } => word
            .compare_exchange(compare, swap, Ordering::AcqRel, Ordering::Acquire)
            .unwrap_or_else(|now| now),
        AtomicOp::FetchAdd { add } => word.fetch_add(add, Ordering::AcqRel),
    })
}

/// Copies `len` bytes in ascending order. Unshared ranges may overlap.
///
/// # Safety
///
/// `from` is valid for reads and `to` for writes of `len` bytes. Concurrent accesses to shared
/// memory are atomic; unshared memory has none (S1).
#[inline(always)]
unsafe fn copy(from: *const u8, from_shared: bool, to: *mut u8, to_shared: bool, len: usize) {
    // SAFETY: S2: the caller upholds the contract of this function.
    unsafe {
        match (from_shared, to_shared) {
            (false, false) => std::ptr::copy(from, to, len),
            (false, true) => shared::store(from, to, len),
            (true, false) => shared::load(from, to, len),
            (true, true) => shared::exchange(from, to, len),
        }
    }
}

/// Copies `len` bytes in blocks of a cache line, the last block first. Other threads may run before
/// the others follow, so that a program which takes the last byte for all is likely to notice.
///
/// # Safety
///
/// As for [`copy`].
#[cold]
unsafe fn copy_reordered(
    from: *const u8,
    from_shared: bool,
    to: *mut u8,
    to_shared: bool,
    len: usize,
) {
    const BLOCK: usize = 64;
    let mut end = len;
    while end > 0 {
        let start = (end - 1) / BLOCK * BLOCK;
        // SAFETY: S2: `start..end` is within the `len` bytes of the caller.
        unsafe { copy(from.add(start), from_shared, to.add(start), to_shared, end - start) };
        if end == len {
            std::thread::yield_now();
        }
        end = start;
    }
}

/// Words that are zero at first. The kernel provides their pages on first write, and has them back
/// on drop: an allocator may keep large blocks, and clears those that it uses again.
pub(crate) struct Words<const N: usize>(
    #[cfg(not(miri))] MmapMut,
    #[cfg(miri)] Box<[AtomicU32; N]>,
);

impl<const N: usize> Words<N> {
    /// Aborts the process if the system is out of memory.
    #[cfg(not(miri))]
    pub(crate) fn zeroed() -> Self {
        let layout = Layout::new::<[AtomicU32; N]>();
        Self(MmapMut::map_anon(layout.size()).unwrap_or_else(|_| handle_alloc_error(layout)))
    }

    #[cfg(miri)]
    pub(crate) fn zeroed() -> Self {
        let layout = Layout::new::<[AtomicU32; N]>();
        // SAFETY: S1: the layout is not empty and belongs to the type, for which zeros are valid.
        Self(unsafe { Box::from_raw(std::alloc::alloc_zeroed(layout).cast()) })
    }
}

impl<const N: usize> Deref for Words<N> {
    type Target = [AtomicU32; N];

    #[inline]
    fn deref(&self) -> &[AtomicU32; N] {
        // SAFETY: S1: mapped in this length and aligned to a page; any bytes are valid, and only
        // these words access them.
        unsafe { &*self.0.as_ptr().cast() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Shows S1.
    #[test]
    fn every_alignment_and_length_is_copied_exactly() {
        for (from_shared, to_shared) in [(false, false), (false, true), (true, false), (true, true)]
        {
            // Miri needs a second for about ten copies.
            let (step, lengths) =
                if cfg!(miri) { (5, vec![0, 1, 8, 13]) } else { (1, (0..40).collect()) };
            for from_offset in (0..9).step_by(step) {
                for to_offset in (0..9).step_by(step) {
                    for &len in &lengths {
                        let source: Vec<u8> = (1..=64).collect();
                        let mut from = source.clone();
                        let mut to = vec![0_u8; 64];
                        // SAFETY: both offsets plus `len` are below 64; only this test accesses the
                        // vectors.
                        unsafe {
                            copy(
                                from.as_mut_ptr().add(from_offset),
                                from_shared,
                                to.as_mut_ptr().add(to_offset),
                                to_shared,
                                len,
                            );
                        }
                        assert_eq!(
                            to[to_offset..to_offset + len],
                            source[from_offset..from_offset + len]
                        );
                        assert!(
                            to[..to_offset]
                                .iter()
                                .chain(&to[to_offset + len..])
                                .all(|&byte| byte == 0)
                        );
                    }
                }
            }
        }
    }
}

//! Prefetching of cache lines.

#![allow(unsafe_code)]

/// The bytes of a cache line.
const LINE: usize = 64;

/// Starts to load `LINES` cache lines from `start` on into the cache, without waiting for them.
///
/// An operation of one among many queue pairs finds its state in distant caches. Each line that is
/// found through a pointer in another one costs a wait of its own, unless its load begins earlier.
///
/// `start` may be any address: the processor ignores one that is not mapped. Does nothing on other
/// processors than x86-64.
#[inline]
pub fn prefetch<const LINES: usize>(start: *const ()) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    for line in 0..LINES {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: M1: a prefetch accesses no memory in terms of the language, and does not fault.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(start.wrapping_byte_add(line * LINE).cast()) };
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = (start, LINE);
}

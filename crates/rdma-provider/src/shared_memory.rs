//! Copies to and from memory that others change at the same time.
//!
//! A region that peers may write is read and written by relaxed atomic accesses, never through a
//! reference: a torn value is possible, a compiler that takes the bytes for unshared is not. Words are 8 bytes on 8-byte
//! boundaries; the bytes before the first and after the last whole word go one by one. Copies ascend,
//! and the last store has release order, so that whoever sees the last byte sees all before it. The layers
//! above and the software device's copies share these functions.
//!
//! One limit is known: where one side's range begins or ends within a word of the other's, a byte access meets a word
//! access at the same time. Rust's memory model does not define that for atomics of different size. It is accepted here,
//! because copies by bytes alone move an eighth as much with each access, and because all that is relied on holds on the
//! targets:
//! the processor executes an aligned access of 1 or 8 bytes as one, so each byte that is read is one that was written; and
//! the compiler neither splits, repeats nor invents an atomic access, nor concludes anything from its size. The order that
//! a release store and an acquire load establish is relied on only where both have the same size.
//!
//! Miri rejects such a race, and stays on: under Miri copies go byte by byte, so that racing copies are defined. What is
//! a word by its nature stays one: a copy of exactly one aligned word, and the words of remote atomics.

#![allow(unsafe_code)]

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering, fence};

/// Plain to shared.
///
/// # Safety
///
/// `from` is valid for reads and `to` for writes of `len` bytes; nobody writes `from` meanwhile, and `to` is reached by
/// atomic accesses only.
#[inline]
pub unsafe fn store(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: S2: all offsets are below `len`; words are stored only where `to` is aligned, sources are read
    // unaligned.
    unsafe {
        if len == 8 && to.cast::<u64>().is_aligned() {
            AtomicU64::from_ptr(to.cast())
                .store(from.cast::<u64>().read_unaligned(), Ordering::Release);
            return;
        }
        split(to, len, |offset, word, last| {
            let order = if last { Ordering::Release } else { Ordering::Relaxed };
            if word {
                let value = from.add(offset).cast::<u64>().read_unaligned();
                AtomicU64::from_ptr(to.add(offset).cast()).store(value, order);
            } else {
                AtomicU8::from_ptr(to.add(offset)).store(*from.add(offset), order);
            }
        });
    }
}

/// Shared to plain.
///
/// # Safety
///
/// `from` is valid for reads and `to` for writes of `len` bytes; `to` is reached by nobody else, and `from` by atomic
/// accesses only.
#[inline]
pub unsafe fn load(from: *const u8, to: *mut u8, len: usize) {
    let from = from.cast_mut();
    // SAFETY: S2: as in `store`, with the sides exchanged.
    unsafe {
        split(from, len, |offset, word, _| {
            if word {
                let value = AtomicU64::from_ptr(from.add(offset).cast()).load(Ordering::Relaxed);
                to.add(offset).cast::<u64>().write_unaligned(value);
            } else {
                *to.add(offset) = AtomicU8::from_ptr(from.add(offset)).load(Ordering::Relaxed);
            }
        });
    }
    // Whoever published the bytes with release order is seen from here on.
    fence(Ordering::Acquire);
}

/// Shared to shared. Words only where both sides are aligned alike, else the source goes byte by byte:
/// an aligned word around an odd byte could reach out of the registration.
///
/// # Safety
///
/// `from` is valid for reads and `to` for writes of `len` bytes; both are reached by atomic accesses only.
pub unsafe fn exchange(from: *const u8, to: *mut u8, len: usize) {
    let from = from.cast_mut();
    if len == 8 && (from.addr() | to.addr()) & 7 == 0 {
        // SAFETY: S2: one aligned word on both sides, in range as the caller says, reached by atomic accesses only.
        unsafe {
            let value = AtomicU64::from_ptr(from.cast()).load(Ordering::Relaxed);
            AtomicU64::from_ptr(to.cast()).store(value, Ordering::Release);
        }
        return;
    }
    let alike = (from.addr() ^ to.addr()) & 7 == 0;
    // SAFETY: S2: as in `store`; the source of a word is aligned if `alike`, else it is read as bytes.
    unsafe {
        split(to, len, |offset, word, last| {
            let order = if last { Ordering::Release } else { Ordering::Relaxed };
            let byte = |at: usize| AtomicU8::from_ptr(from.add(at)).load(Ordering::Relaxed);
            if !word {
                AtomicU8::from_ptr(to.add(offset)).store(byte(offset), order);
                return;
            }
            let value = if alike {
                AtomicU64::from_ptr(from.add(offset).cast()).load(Ordering::Relaxed)
            } else {
                u64::from_ne_bytes(std::array::from_fn(|at| byte(offset + at)))
            };
            AtomicU64::from_ptr(to.add(offset).cast()).store(value, order);
        });
    }
}

/// Calls `step(offset, is_word, is_last)` over `len` bytes in ascending order, words where `at` is
/// aligned, bytes before and after.
#[inline]
fn split(at: *const u8, len: usize, mut step: impl FnMut(usize, bool, bool)) {
    let head = (at.addr().wrapping_neg() & 7).min(len);
    let words = if cfg!(miri) && len != 8 { 0 } else { (len - head) / 8 };
    let tail = head + words * 8;
    for offset in 0..head {
        step(offset, false, offset + 1 == len);
    }
    for word in 0..words {
        let offset = head + word * 8;
        step(offset, true, offset + 8 == len);
    }
    for offset in tail..len {
        step(offset, false, offset + 1 == len);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_alignment_and_length_is_copied_and_nothing_else() {
        let (step, lengths) =
            if cfg!(miri) { (4, vec![0, 1, 7, 8, 9, 31]) } else { (1, (0..40).collect()) };
        for offset in (0..9).step_by(step) {
            for &len in &lengths {
                let private: Vec<u8> = (1..=len as u8).collect();
                let mut shared = [0_u64; 8];
                let base: *mut u8 = shared.as_mut_ptr().cast();
                let mut back = vec![0; len];
                // SAFETY: S2: both lie within their arrays (9 + 40 < 64), which only this thread reaches.
                unsafe {
                    store(private.as_ptr(), base.add(offset), len);
                    load(base.add(offset), back.as_mut_ptr(), len);
                }
                assert_eq!(back, private, "offset {offset}, {len} bytes");
                let bytes: Vec<u8> = shared.iter().flat_map(|word| word.to_ne_bytes()).collect();
                assert!(
                    bytes[..offset].iter().chain(&bytes[offset + len..]).all(|&byte| byte == 0)
                );
            }
        }
    }

    #[test]
    fn exchange_copies_every_pair_of_alignments_and_nothing_else() {
        // Miri takes a second for some ten copies.
        let (step, lengths) =
            if cfg!(miri) { (4, vec![0, 1, 8, 9]) } else { (1, (0..26).collect()) };
        let pairs = (0..9)
            .step_by(step)
            .flat_map(|source| (0..9).step_by(step).map(move |target| (source, target)));
        for (len, (source, target)) in
            lengths.into_iter().flat_map(|len| pairs.clone().map(move |pair| (len, pair)))
        {
            let mut from: [u64; 8] = std::array::from_fn(|word| {
                u64::from_ne_bytes([word as u8 + 1; 8]) ^ 0x0706_0504_0302_0100
            });
            let before: Vec<u8> = from.iter().flat_map(|word| word.to_ne_bytes()).collect();
            let mut to = [0_u64; 8];
            // SAFETY: S2: both lie within their arrays (9 + 26 < 64), which only this thread reaches.
            unsafe {
                let from: *mut u8 = from.as_mut_ptr().cast();
                exchange(from.add(source), to.as_mut_ptr().cast::<u8>().add(target), len);
            }
            let bytes: Vec<u8> = to.iter().flat_map(|word| word.to_ne_bytes()).collect();
            assert_eq!(
                bytes[target..target + len],
                before[source..source + len],
                "{len} bytes from {source} to {target}"
            );
            assert!(bytes[..target].iter().chain(&bytes[target + len..]).all(|&byte| byte == 0));
        }
    }

    #[test]
    fn split_gives_each_byte_once_in_order_and_marks_the_last_step() {
        let memory = [0_u64; 8];
        for (offset, len) in (0..8).flat_map(|offset| (0..40).map(move |len| (offset, len))) {
            let at = memory.as_ptr().cast::<u8>().wrapping_add(offset);
            let (mut next, mut ended) = (0, false);
            split(at, len, |step, word, last| {
                assert!(step == next && !ended, "{len} bytes at {offset}: {step}");
                let aligned = (offset + step).is_multiple_of(8);
                assert!(!word || aligned, "a word is aligned");
                assert!(
                    word || cfg!(miri) || !aligned || len - step < 8,
                    "no word goes byte by byte"
                );
                next += if word { 8 } else { 1 };
                ended = last;
            });
            assert_eq!((next, ended), (len, len > 0), "{len} bytes at {offset}");
        }
    }
}

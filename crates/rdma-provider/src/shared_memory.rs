//! Copies to and from memory that other threads or devices change at the same time.
//!
//! Memory that peers may write is accessed by relaxed atomics, never by reference: values may be
//! torn, but the compiler may not assume unshared bytes. tokio-rdma and the software device share
//! these functions.
//!
//! Copies ascend: aligned 8-byte words, single bytes before and after. The last store has release
//! order, so a reader that acquires the last byte sees all others.
//!
//! # Mixed access sizes
//!
//! Where one side's range ends within a word of the other's, a byte access races with a word
//! access, which Rust's memory model leaves undefined. Avoiding that would need bytes alone, eight
//! times the accesses, so the race is accepted. The code relies on two properties of the targets:
//!
//! - An aligned access of 1 or 8 bytes is indivisible, so each byte read was written.
//! - The compiler does not split, repeat or invent atomic accesses, nor infer anything from their
//!   size.
//!
//! Release/acquire order is relied on only between accesses of equal size.
//!
//! Miri rejects such races. Under Miri, copies go by bytes, except single aligned words and the
//! words of remote atomics.

#![allow(unsafe_code)]

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering, fence};

/// Copies from plain to shared memory.
///
/// # Safety
///
/// `from` is valid for reads and `to` for writes of `len` bytes. `from` is not written during the
/// copy, and `to` is accessed by atomics only.
#[inline]
pub unsafe fn store(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: S2: offsets are below `len`; words are stored only where `to` is aligned; sources are
    // read unaligned.
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

/// Copies from shared to plain memory.
///
/// # Safety
///
/// `from` is valid for reads and `to` for writes of `len` bytes. `from` is accessed by atomics
/// only, and `to` by this thread only.
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
    // Pairs with the writer's release store.
    fence(Ordering::Acquire);
}

/// Copies from shared to shared memory. Unless both sides are aligned alike, source bytes are
/// loaded one by one: a word around an odd byte could exceed the registration.
///
/// # Safety
///
/// `from` is valid for reads and `to` for writes of `len` bytes, and both are accessed by atomics
/// only.
pub unsafe fn exchange(from: *const u8, to: *mut u8, len: usize) {
    let from = from.cast_mut();
    if len == 8 && (from.addr() | to.addr()) & 7 == 0 {
        // SAFETY: S2: one aligned word on both sides, in range and atomic by the caller's promise.
        unsafe {
            let value = AtomicU64::from_ptr(from.cast()).load(Ordering::Relaxed);
            AtomicU64::from_ptr(to.cast()).store(value, Ordering::Release);
        }
        return;
    }
    let alike = (from.addr() ^ to.addr()) & 7 == 0;
    // SAFETY: S2: as in `store`; the source word is aligned if `alike`, else it is read as bytes.
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

/// Calls `step(offset, is_word, is_last)` in ascending order over `len` bytes; words are aligned.
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
                // SAFETY: S2: both lie within their arrays (9 + 40 < 64), which only this thread
                // accesses.
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
        // Miri takes about a second for ten copies.
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
            // SAFETY: S2: both lie within their arrays (9 + 26 < 64), which only this thread
            // accesses.
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
                    "a whole word is not copied by bytes"
                );
                next += if word { 8 } else { 1 };
                ended = last;
            });
            assert_eq!((next, ended), (len, len > 0), "{len} bytes at {offset}");
        }
    }
}

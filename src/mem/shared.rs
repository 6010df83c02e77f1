//! Copies to and from memory that others change at the same time.
//!
//! A region that peers may write is read and written by relaxed atomic accesses, never through a
//! reference: a torn value is possible, undefined behaviour is not. Words are 8 bytes on 8-byte
//! boundaries; the bytes before the first and after the last whole word go one by one. Copies ascend,
//! and the last store has release order, so that whoever sees the last byte sees all before it.

#![allow(unsafe_code)]

use std::ptr;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering, fence};

const WORD: usize = size_of::<u64>();

/// Bytes of `len` before the first word boundary.
fn head(addr: *const u8, len: usize) -> usize {
    (addr.addr().wrapping_neg() & (WORD - 1)).min(len)
}

/// Copies from shared to private memory.
///
/// # Safety
///
/// `src` is readable and `dst` writable for `len` bytes; `dst` is reached by nobody else, and `src` by
/// atomic accesses only.
pub(crate) unsafe fn load(src: *const u8, dst: *mut u8, len: usize) {
    let mut at = 0;
    let byte = |at: usize| {
        // SAFETY: S2: `at < len`; the shared side is accessed atomically, the private one is ours.
        unsafe { *dst.add(at) = AtomicU8::from_ptr(src.add(at).cast_mut()).load(Ordering::Relaxed) }
    };
    while at < head(src, len) {
        byte(at);
        at += 1;
    }
    while len - at >= WORD {
        // SAFETY: S2: `at + 8 <= len` and `src + at` is on a word boundary; the private side may be unaligned.
        unsafe {
            let word = AtomicU64::from_ptr(src.add(at).cast_mut().cast()).load(Ordering::Relaxed);
            ptr::write_unaligned(dst.add(at).cast(), word);
        }
        at += WORD;
    }
    while at < len {
        byte(at);
        at += 1;
    }
    // Whoever published the bytes with release order is seen from here on.
    fence(Ordering::Acquire);
}

/// Copies from private to shared memory.
///
/// # Safety
///
/// `src` is readable and `dst` writable for `len` bytes; nobody writes `src` meanwhile, and `dst` is
/// reached by atomic accesses only.
pub(crate) unsafe fn store(src: *const u8, dst: *mut u8, len: usize) {
    let mut at = 0;
    // Release order on the last store only: earlier ones need no order among themselves.
    fence(Ordering::Release);
    let byte = |at: usize| {
        let order = if at + 1 == len { Ordering::Release } else { Ordering::Relaxed };
        // SAFETY: S2: `at < len`; the shared side is accessed atomically, nobody writes the private one.
        unsafe { AtomicU8::from_ptr(dst.add(at)).store(*src.add(at), order) }
    };
    while at < head(dst, len) {
        byte(at);
        at += 1;
    }
    while len - at >= WORD {
        let order = if at + WORD == len { Ordering::Release } else { Ordering::Relaxed };
        // SAFETY: S2: `at + 8 <= len` and `dst + at` is on a word boundary; the private side may be unaligned.
        unsafe {
            let word = ptr::read_unaligned(src.add(at).cast());
            AtomicU64::from_ptr(dst.add(at).cast()).store(word, order);
        }
        at += WORD;
    }
    while at < len {
        byte(at);
        at += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_alignment_and_length_is_copied_and_nothing_else() {
        for offset in 0..9 {
            for len in 0..40 {
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
                assert!(bytes[..offset].iter().chain(&bytes[offset + len..]).all(|&byte| byte == 0));
            }
        }
    }
}

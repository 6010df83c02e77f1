//! Copies to and from memory that other threads or devices change at the same time.
//!
//! Memory that peers may write is accessed by relaxed atomics, never by reference: values may be
//! torn, but the compiler may not assume unshared bytes. tokio-rdma and the software device share
//! these functions.
//!
//! Copies ascend: aligned 8-byte words, single bytes before and after. The last store has release
//! order, so a reader that acquires the last byte sees all others.
//!
//! # Long copies
//!
//! The compiler does not combine atomic accesses, so words reach about half of `memcpy`'s speed.
//! From 256 bytes on, all but the ends is therefore copied by vector instructions, in inline
//! assembly. On Rust's abstract machine it has the effect of a loop that copies each byte by a
//! relaxed atomic load and a relaxed atomic store, in ascending order:
//!
//! - The instructions load and store each byte once, and access no byte outside of both ranges. If
//!   the ranges overlap, they load several bytes before they store the first.
//! - x86-64 and AArch64 execute a vector access as one or more accesses of at least one whole byte,
//!   so each byte read was written.
//! - The compiler assumes that an assembly block without `nomem` accesses any memory that its code
//!   can reach. It does not remove or repeat the block, or move it across accesses to that memory.
//!
//! The fence after the last load, and the release order of the last store, cover vector accesses as
//! they do others. A data race in Rust's terms has a non-atomic access, so there is none. Miri
//! executes that loop in place of the assembly, and other targets copy by words.
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
    // SAFETY: S2: the caller upholds the contract; `store_words` has the same.
    unsafe {
        if len < LONG {
            store_words(from, to, len);
        } else {
            copy_long(from, to, len, to.addr(), store_words);
        }
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
    // SAFETY: S2: the caller upholds the contract; `load_words` has the same.
    unsafe {
        if len < LONG {
            load_words(from, to, len);
        } else {
            copy_long(from, to, len, from.addr(), load_words);
        }
    }
}

/// Copies from shared to shared memory.
///
/// # Safety
///
/// `from` is valid for reads and `to` for writes of `len` bytes, and both are accessed by atomics
/// only.
pub unsafe fn exchange(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: S2: the caller upholds the contract; `exchange_words` has the same.
    unsafe {
        if len < LONG {
            exchange_words(from, to, len);
        } else {
            copy_long(from, to, len, to.addr(), exchange_words);
        }
    }
}

#[inline]
unsafe fn store_words(from: *const u8, to: *mut u8, len: usize) {
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

#[inline]
unsafe fn load_words(from: *const u8, to: *mut u8, len: usize) {
    let from = from.cast_mut();
    // SAFETY: S2: as in `store_words`, with the sides exchanged.
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

/// Unless both sides are aligned alike, source bytes are loaded one by one: a word around an odd
/// byte could exceed the registration.
unsafe fn exchange_words(from: *const u8, to: *mut u8, len: usize) {
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
    // SAFETY: S2: as in `store_words`; the source word is aligned if `alike`, else it is read as
    // bytes.
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

/// Length from which all but the ends of a copy goes by [`blocks`].
const LONG: usize = if blocks::AVAILABLE { 2 * BLOCK } else { usize::MAX };

/// The unit of [`blocks`], in bytes. A power of two.
const BLOCK: usize = 128;

/// The size of the largest vector access. A power of two.
const VECTOR: usize = 32;

/// Copies at least [`LONG`] bytes: the ends by `words`, the rest by vectors that are aligned on the
/// side of address `aligned`. `words` copies at least the last byte.
///
/// # Safety
///
/// The contract of `words` is upheld for `len` bytes.
#[inline(never)]
unsafe fn copy_long(
    from: *const u8,
    to: *mut u8,
    len: usize,
    aligned: usize,
    words: unsafe fn(*const u8, *mut u8, usize),
) {
    let head = aligned.wrapping_neg() & (VECTOR - 1);
    let tail = head + ((len - head - 1) & !(BLOCK - 1));
    // SAFETY: S2: `head < VECTOR` and `tail < len`, so the three ranges are parts of the caller's;
    // the second is a multiple of `BLOCK`, and at least one.
    unsafe {
        words(from, to, head);
        blocks::copy(from.add(head), to.add(head), tail - head);
        words(from.add(tail), to.add(tail), len - tail);
    }
}

/// Copies by vector instructions; see [Long copies](self#long-copies).
#[cfg(all(target_arch = "x86_64", target_pointer_width = "64", not(miri)))]
mod blocks {
    use std::arch::{asm, is_x86_feature_detected};

    pub(super) const AVAILABLE: bool = true;

    /// # Safety
    ///
    /// As [`exchange`](super::exchange), except that either side may be plain memory instead. `len`
    /// is a positive multiple of [`BLOCK`](super::BLOCK).
    #[inline]
    pub(super) unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
        // SAFETY: S2: `len` bytes are valid on both sides; the offset ascends from `-len` to 0 from
        // the ends in steps of 128 bytes. `vzeroupper` changes registers that are clobbered.
        unsafe {
            let (from, to, offset) = (from.add(len), to.add(len), len.wrapping_neg());
            if is_x86_feature_detected!("avx") {
                asm!(
                    "2:",
                    "vmovdqu ymm0, [rsi + rcx]",
                    "vmovdqu ymm1, [rsi + rcx + 32]",
                    "vmovdqu ymm2, [rsi + rcx + 64]",
                    "vmovdqu ymm3, [rsi + rcx + 96]",
                    "vmovdqu [rdi + rcx], ymm0",
                    "vmovdqu [rdi + rcx + 32], ymm1",
                    "vmovdqu [rdi + rcx + 64], ymm2",
                    "vmovdqu [rdi + rcx + 96], ymm3",
                    "sub rcx, -128",
                    "jnz 2b",
                    "vzeroupper",
                    in("rsi") from,
                    in("rdi") to,
                    inout("rcx") offset => _,
                    clobber_abi("sysv64"),
                    options(nostack),
                );
            } else {
                asm!(
                    "2:",
                    "movups {a}, [{from} + {offset}]",
                    "movups {b}, [{from} + {offset} + 16]",
                    "movups {c}, [{from} + {offset} + 32]",
                    "movups {d}, [{from} + {offset} + 48]",
                    "movups [{to} + {offset}], {a}",
                    "movups [{to} + {offset} + 16], {b}",
                    "movups [{to} + {offset} + 32], {c}",
                    "movups [{to} + {offset} + 48], {d}",
                    "add {offset}, 64",
                    "jnz 2b",
                    from = in(reg) from,
                    to = in(reg) to,
                    offset = inout(reg) offset => _,
                    a = out(xmm_reg) _,
                    b = out(xmm_reg) _,
                    c = out(xmm_reg) _,
                    d = out(xmm_reg) _,
                    options(nostack),
                );
            }
        }
    }
}

/// Copies by vector instructions; see [Long copies](self#long-copies).
#[cfg(all(
    target_arch = "aarch64",
    target_endian = "little",
    target_pointer_width = "64",
    not(miri)
))]
mod blocks {
    use std::arch::asm;

    pub(super) const AVAILABLE: bool = true;

    /// # Safety
    ///
    /// As [`exchange`](super::exchange), except that either side may be plain memory instead. `len`
    /// is a positive multiple of [`BLOCK`](super::BLOCK).
    #[inline]
    pub(super) unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
        // SAFETY: S2: `len` bytes are valid on both sides, which ascend by 64 bytes until none is
        // left.
        unsafe {
            asm!(
                "2:",
                "ldp q0, q1, [{from}], #32",
                "ldp q2, q3, [{from}], #32",
                "stp q0, q1, [{to}], #32",
                "stp q2, q3, [{to}], #32",
                "subs {left}, {left}, #64",
                "b.ne 2b",
                from = inout(reg) from => _,
                to = inout(reg) to => _,
                left = inout(reg) len => _,
                out("v0") _,
                out("v1") _,
                out("v2") _,
                out("v3") _,
                options(nostack),
            );
        }
    }
}

/// Stands in where [`LONG`] keeps it from being called.
#[cfg(any(
    miri,
    not(target_pointer_width = "64"),
    not(any(target_arch = "x86_64", all(target_arch = "aarch64", target_endian = "little")))
))]
mod blocks {
    pub(super) const AVAILABLE: bool = false;

    pub(super) unsafe fn copy(_: *const u8, _: *mut u8, _: usize) {
        unreachable!("copies by words need no blocks");
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
    use std::sync::atomic::AtomicPtr;

    use super::*;

    // Shows S2.
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

    // Shows S2.
    #[test]
    fn long_copies_of_every_kind_copy_each_byte_and_nothing_else() {
        const SIZE: usize = 1024;
        let pattern: Vec<u8> = (0..SIZE).map(|at| (at * 7 + at / 251) as u8).collect();
        let kinds: [unsafe fn(*const u8, *mut u8, usize); 3] = [store, load, exchange];
        let (offsets, lengths) = if cfg!(miri) {
            (vec![0, 3], vec![256])
        } else {
            (vec![0, 1, 7, 8, 24, 31, 33], (250..300).chain([384, 511, 512, 777]).collect())
        };
        let pairs = offsets.iter().flat_map(|from| offsets.iter().map(move |to| (*from, *to)));
        for ((from, to), &len) in pairs.flat_map(|pair| lengths.iter().map(move |len| (pair, len)))
        {
            for (kind, copy) in kinds.iter().enumerate() {
                let mut source = pattern.clone();
                let mut target = vec![0xa5_u8; SIZE];
                // SAFETY: S2: both lie within their vectors (33 + 777 < 1024), which only this
                // thread accesses.
                unsafe {
                    copy(source.as_mut_ptr().add(from), target.as_mut_ptr().add(to), len);
                }
                let scenario = format!("kind {kind}: {len} bytes from {from} to {to}");
                assert_eq!(source, pattern, "{scenario}");
                assert_eq!(target[to..to + len], pattern[from..from + len], "{scenario}");
                let mut around = target[..to].iter().chain(&target[to + len..]);
                assert!(around.all(|&byte| byte == 0xa5), "{scenario}");
            }
        }
    }

    // Shows S2.
    #[test]
    fn reader_that_acquires_the_last_byte_of_a_long_copy_sees_all_others() {
        let (len, rounds) = if cfg!(miri) { (257_usize, 2) } else { (4096 + 9, 2_000_u32) };
        let mut memory = vec![0_u8; len];
        let base = AtomicPtr::new(memory.as_mut_ptr());
        // SAFETY: S2: within `memory`, which is accessed by atomics only until both threads end.
        let last = unsafe { AtomicU8::from_ptr(base.load(Ordering::Relaxed).add(len - 1)) };
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| {
                for round in 1..=rounds {
                    let bytes = vec![round as u8 | 1; len];
                    // SAFETY: S2: as above.
                    unsafe { store(bytes.as_ptr(), base.load(Ordering::Relaxed), len) };
                    // The reader clears the last byte when it has checked the others.
                    while last.load(Ordering::Acquire) != 0 {
                        std::thread::yield_now();
                    }
                }
            });
            for round in 1..=rounds {
                let mut seen = vec![0_u8; len];
                while last.load(Ordering::Acquire) == 0 {
                    assert!(!writer.is_finished(), "the writer failed");
                    std::thread::yield_now();
                }
                // SAFETY: S2: as above.
                unsafe { load(base.load(Ordering::Relaxed), seen.as_mut_ptr(), len) };
                assert!(seen.iter().all(|&byte| byte == round as u8 | 1), "round {round}");
                last.store(0, Ordering::Release);
            }
        });
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

//! Registrations by key: what a work request or a peer may name.
//!
//! A key is found without a lock, and finding it takes a [`Use`] of the registration: releasing the
//! registration first closes it, then waits until nobody uses it. So after a release no byte is
//! touched any more, and while a copy runs its memory stays registered.
//!
//! ```text
//!  key ──unmix──▶ variant(12) index(20) ──▶ slot { users | CLOSED, key, base, len, rights }
//! ```

use std::collections::VecDeque;
use std::fmt;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use parking_lot::Mutex;

use crate::types::{Access, Sge};

use super::dma::{Gather, Memory, Region, Segment};

/// Most registrations of a device.
pub(super) const MAX_REGISTRATIONS: u32 = 1 << INDEX_BITS;

const INDEX_BITS: u32 = 20;
const INDEX_MASK: u32 = MAX_REGISTRATIONS - 1;
/// Slots are made a chunk at a time.
const CHUNK: u32 = 256;
const CHUNKS: usize = (MAX_REGISTRATIONS / CHUNK) as usize;
/// Bit of [`Slot::rights`], above those of `Access`: reached by atomic accesses only.
const SHARED: u32 = 1 << 31;
/// Bit of [`Slot::users`]: not registered.
const CLOSED: u32 = 1 << 31;

/// A piece that a key does not allow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct NotCovered;

/// Table of the registrations of one device.
pub(super) struct Keys {
    /// Odd factor that spreads index and variant over the key, and its inverse modulo 2^32. This keeps
    /// keys from being counted through; it is no cryptography, and need not be: each wrong guess costs
    /// the guesser its connection.
    factor: u32,
    inverse: u32,
    chunks: Box<[OnceLock<Box<[Slot; CHUNK as usize]>>; CHUNKS]>,
    free: Mutex<FreeList>,
}

impl fmt::Debug for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The slots are many and say little; the factor is nobody's business.
        f.debug_struct("Keys").finish_non_exhaustive()
    }
}

#[derive(Debug, Default)]
struct FreeList {
    /// Indexes never used begin here.
    fresh: u32,
    /// Oldest first, so that a key comes back as late as possible.
    returned: VecDeque<u32>,
}

#[derive(Debug)]
struct Slot {
    /// Copies in progress, and [`CLOSED`]. All else is constant while not closed.
    users: AtomicU32,
    key: AtomicU32,
    region: Region,
    /// Access and [`SHARED`] in the low half, protection domain in the high half.
    rights: AtomicU64,
    /// Odd distance between the variants of successive registrations: 4096 of them before one returns.
    stride: AtomicU32,
}

impl Default for Slot {
    fn default() -> Self {
        Self {
            users: AtomicU32::new(CLOSED),
            key: AtomicU32::new(0),
            region: Region::default(),
            rights: AtomicU64::new(0),
            stride: AtomicU32::new(0),
        }
    }
}

/// Keeps a registration from being released.
#[derive(Debug)]
pub(super) struct Use<'k>(&'k Slot);

impl Drop for Use<'_> {
    #[inline]
    fn drop(&mut self) {
        // Release: the copy happens before the end of the registration.
        self.0.users.fetch_sub(1, Ordering::Release);
    }
}

impl Keys {
    /// An empty table whose keys depend on `seed`.
    pub(super) fn new(seed: u32) -> Self {
        let factor = seed | 1;
        // Newton's iteration doubles the correct bits; an odd number is its own inverse to 3 bits.
        let inverse = (0..4).fold(factor, |x, _| x.wrapping_mul(2_u32.wrapping_sub(factor.wrapping_mul(x))));
        debug_assert_eq!(factor.wrapping_mul(inverse), 1);
        Self {
            factor,
            inverse,
            chunks: Box::new([const { OnceLock::new() }; CHUNKS]),
            free: Mutex::new(FreeList::default()),
        }
    }

    /// Registers memory, that is reached by atomic accesses if it is `shared` or peers may reach it; its key, or `None`
    /// if the table is full.
    pub(super) fn insert(&self, memory: Memory, access: Access, shared: bool, pd: u32, random: u64) -> Option<u32> {
        let index = {
            let mut free = self.free.lock();
            // A fresh slot is cheaper than a short cycle of one slot's keys.
            if free.returned.len() < 256 && free.fresh < MAX_REGISTRATIONS {
                free.fresh += 1;
                free.fresh - 1
            } else {
                free.returned.pop_front()?
            }
        };
        let (chunk, offset) = position(index);
        let slots = self.chunks[chunk].get_or_init(|| Box::new(std::array::from_fn(|_| Slot::default())));
        let slot = &slots[offset];
        let mut stride = slot.stride.load(Ordering::Relaxed);
        let mut variant = if stride == 0 {
            stride = (random >> 32) as u32 | 1;
            slot.stride.store(stride, Ordering::Relaxed);
            random as u32
        } else {
            (self.unmix(slot.key.load(Ordering::Relaxed)) >> INDEX_BITS).wrapping_add(stride)
        };
        let mut key = self.mix(variant << INDEX_BITS | index);
        if key == 0 {
            // 0 is what an uninitialized key looks like; it shall name nothing.
            variant = variant.wrapping_add(stride);
            key = self.mix(variant << INDEX_BITS | index);
        }
        slot.key.store(key, Ordering::Relaxed);
        slot.region.assign(memory);
        let shared = if shared || access.is_remote() { SHARED } else { 0 };
        slot.rights.store(u64::from(pd) << 32 | u64::from(access.bits() | shared), Ordering::Relaxed);
        // Release pairs with the acquire in `resolve`: who sees the slot open sees its fields.
        slot.users.fetch_and(!CLOSED, Ordering::Release);
        Some(key)
    }

    /// Ends a registration: no new use begins, and it returns when no use is left.
    pub(super) fn remove(&self, key: u32) {
        let Some(slot) = self.slot(key) else { return };
        slot.users.fetch_or(CLOSED, Ordering::AcqRel);
        // A use is one packet's copy, microseconds; nobody sleeps while holding one.
        let mut spins = 0_u32;
        while slot.users.load(Ordering::Acquire) != CLOSED {
            spins += 1;
            if spins < 64 {
                std::hint::spin_loop();
            } else {
                std::thread::yield_now();
            }
        }
        self.free.lock().returned.push_back(self.unmix(key) & INDEX_MASK);
    }

    /// `addr..addr + len` by `key`, if it is registered in `pd` with all of `need`.
    #[inline]
    pub(super) fn resolve(
        &self,
        key: u32,
        pd: u32,
        addr: u64,
        len: usize,
        need: Access,
    ) -> Result<Segment<'_>, NotCovered> {
        let slot = self.slot(key).ok_or(NotCovered)?;
        // Acquire pairs with `insert`. From here on `hold` gives the count back.
        let before = slot.users.fetch_add(1, Ordering::Acquire);
        let hold = Use(slot);
        if before & CLOSED != 0 || slot.key.load(Ordering::Relaxed) != key {
            return Err(NotCovered);
        }
        let rights = slot.rights.load(Ordering::Relaxed);
        let access = Access::from_bits_retain(rights as u32);
        if (rights >> 32) as u32 != pd || !access.contains(need) {
            return Err(NotCovered);
        }
        slot.region.piece(addr, len, rights as u32 & SHARED != 0, hold).ok_or(NotCovered)
    }

    /// `skip..skip + len` of a scatter/gather list, appended to `out`.
    ///
    /// The list is at least `skip + len` long; elements of length 0 are not looked up.
    #[inline]
    pub(super) fn gather<'k>(
        &'k self,
        sges: &[Sge],
        pd: u32,
        skip: usize,
        len: usize,
        need: Access,
        out: &mut Gather<'k>,
    ) -> Result<(), NotCovered> {
        let (mut skip, mut left) = (skip, len);
        for sge in sges {
            if left == 0 {
                break;
            }
            let length = sge.length as usize;
            if skip >= length {
                skip -= length;
                continue;
            }
            let step = left.min(length - skip);
            let addr = sge.addr.checked_add(skip as u64).ok_or(NotCovered)?;
            out.push(self.resolve(sge.lkey.0, pd, addr, step, need)?);
            skip = 0;
            left -= step;
        }
        debug_assert_eq!(left, 0, "list as long as asked");
        Ok(())
    }

    #[inline]
    fn slot(&self, key: u32) -> Option<&Slot> {
        let (chunk, offset) = position(self.unmix(key) & INDEX_MASK);
        Some(&self.chunks[chunk].get()?[offset])
    }

    const fn mix(&self, plain: u32) -> u32 {
        plain.wrapping_mul(self.factor)
    }

    const fn unmix(&self, key: u32) -> u32 {
        key.wrapping_mul(self.inverse)
    }
}

/// Chunk of an index and the place in it.
const fn position(index: u32) -> (usize, usize) {
    (((index & INDEX_MASK) / CHUNK) as usize, (index % CHUNK) as usize)
}

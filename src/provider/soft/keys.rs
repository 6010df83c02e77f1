//! Registrations by key: what a work request or a peer may name.
//!
//! A key is found without a lock, and finding it takes a [`Use`] of the registration: releasing the
//! registration first closes it, then waits until nobody uses it. So after a release no byte is
//! touched any more, and while a copy runs its memory stays registered.
//!
//! ```text
//!  key ──unmix──▶ chunk(12) variant(4) place(8) ── slot { users | CLOSED, key, base, len, rights }
//!      ──────────────────────────────────▶ tag(8)
//! ```
//!
//! The tag stands in the key as it is: a memory window keeps its slot whatever low byte it is bound with, and its slot is
//! closed while it is not bound. See [`windows`](super::windows).

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use parking_lot::Mutex;

use crate::types::{Access, Qpn, Sge};

use super::dma::{Gather, Memory, Region, Segment};
use super::windows::Window;

/// Most registrations of a device.
pub(super) const MAX_REGISTRATIONS: u32 = 1 << INDEX_BITS;

const INDEX_BITS: u32 = 20;
/// Slots are made a chunk at a time.
const CHUNK: u32 = 256;
const CHUNKS: usize = (MAX_REGISTRATIONS / CHUNK) as usize;
/// What a key is made of, see the module: where its parts are before they are mixed.
const TAG_BITS: u32 = 8;
const TAG_MASK: u32 = (1 << TAG_BITS) - 1;
const PLACE_SHIFT: u32 = TAG_BITS;
const VARIANT_SHIFT: u32 = 16;
const VARIANT_MASK: u32 = 15;
const CHUNK_SHIFT: u32 = 20;
/// Bit of [`Slot::rights`], above those of `Access`: reached by atomic accesses only.
const SHARED: u32 = 1 << 31;
/// Bit of the owner in [`Slot::rights`]: not a protection domain but the queue pair that bound a window.
const WINDOW: u32 = 1 << 31;
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
    /// By their keys without the tag.
    pub(super) windows: Mutex<HashMap<u32, Window>>,
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
pub(super) struct Slot {
    /// Copies in progress, and [`CLOSED`]. All else is constant while not closed.
    users: AtomicU32,
    key: AtomicU32,
    region: Region,
    /// Access and [`SHARED`] in the low half, owner in the high half: a protection domain, or [`WINDOW`] and a queue pair.
    rights: AtomicU64,
    /// Odd distance between the variants (tag included) of successive registrations: 4096 before one returns.
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

impl Slot {
    /// Lets uses begin. `owner` is as in `rights`.
    pub(super) fn open(&self, key: u32, owner: u32, access: Access, shared: bool) {
        let shared = if shared { SHARED } else { 0 };
        self.key.store(key, Ordering::Relaxed);
        self.rights.store(u64::from(owner) << 32 | u64::from(access.bits() | shared), Ordering::Relaxed);
        // Release pairs with the acquire in `find`: who sees the slot open sees its fields.
        self.users.fetch_and(!CLOSED, Ordering::Release);
    }

    /// No new use begins, and it returns when no use is left.
    pub(super) fn close(&self) {
        self.users.fetch_or(CLOSED, Ordering::AcqRel);
        // A use is one packet's copy, microseconds; nobody sleeps while holding one.
        let mut spins = 0_u32;
        while self.users.load(Ordering::Acquire) != CLOSED {
            spins += 1;
            if spins < 64 {
                std::hint::spin_loop();
            } else {
                std::thread::yield_now();
            }
        }
    }

    pub(super) fn region(&self) -> &Region {
        &self.region
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
            windows: Mutex::default(),
        }
    }

    /// Registers memory, that is reached by atomic accesses if it is `shared` or peers may reach it; its key, or `None`
    /// if the table is full.
    pub(super) fn insert(&self, memory: Memory, access: Access, shared: bool, pd: u32, random: u64) -> Option<u32> {
        let (slot, key) = self.claim(random)?;
        slot.region.assign(memory);
        slot.open(key, pd, access, shared || access.is_remote());
        Some(key)
    }

    /// Ends a registration: no new use begins, of its windows neither, and it returns when no use is left.
    pub(super) fn remove(&self, key: u32) {
        let Some(slot) = self.slot(key) else { return };
        slot.close();
        self.end_windows(|window| window.region() == Some(key));
        self.release(key);
    }

    /// A closed slot, and the next of its keys.
    pub(super) fn claim(&self, random: u64) -> Option<(&Slot, u32)> {
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
        let (chunk, place) = ((index / CHUNK) as usize, (index % CHUNK) as usize);
        let slots = self.chunks[chunk].get_or_init(|| Box::new(std::array::from_fn(|_| Slot::default())));
        let slot = &slots[place];
        let mut stride = slot.stride.load(Ordering::Relaxed);
        let mut variant = if stride == 0 {
            stride = (random >> 32) as u32 | 1;
            slot.stride.store(stride, Ordering::Relaxed);
            random as u32
        } else {
            let last = slot.key.load(Ordering::Relaxed);
            ((self.unmix(last) >> VARIANT_SHIFT & VARIANT_MASK) << TAG_BITS | last & TAG_MASK).wrapping_add(stride)
        };
        loop {
            let key = self.mix(index, variant);
            // 0 is what an uninitialized key looks like; whatever its tag, it shall name nothing.
            if key & !TAG_MASK != 0 {
                slot.key.store(key, Ordering::Relaxed);
                return Some((slot, key));
            }
            variant = variant.wrapping_add(stride);
        }
    }

    /// The slot of a key is closed and free for another.
    pub(super) fn release(&self, key: u32) {
        let (chunk, place) = self.position(key);
        self.free.lock().returned.push_back(chunk as u32 * CHUNK + place as u32);
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
        self.find(key, |owner| owner == pd, addr, len, need)
    }

    /// As [`resolve`](Self::resolve) for the peer of `qpn`, which windows that this queue pair bound are open to as well.
    #[inline]
    pub(super) fn resolve_remote(
        &self,
        key: u32,
        (pd, qpn): (u32, Qpn),
        addr: u64,
        len: usize,
        need: Access,
    ) -> Result<Segment<'_>, NotCovered> {
        self.find(key, |owner| owner == pd || owner == window_owner(qpn), addr, len, need)
    }

    #[inline(always)]
    fn find(
        &self,
        key: u32,
        is_owner: impl FnOnce(u32) -> bool,
        addr: u64,
        len: usize,
        need: Access,
    ) -> Result<Segment<'_>, NotCovered> {
        let slot = self.slot(key).ok_or(NotCovered)?;
        // Acquire pairs with `open`. From here on `hold` gives the count back.
        let before = slot.users.fetch_add(1, Ordering::Acquire);
        let hold = Use(slot);
        if before & CLOSED != 0 || slot.key.load(Ordering::Relaxed) != key {
            return Err(NotCovered);
        }
        let rights = slot.rights.load(Ordering::Relaxed);
        let access = Access::from_bits_retain(rights as u32);
        if !is_owner((rights >> 32) as u32) || !access.contains(need) {
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
    pub(super) fn slot(&self, key: u32) -> Option<&Slot> {
        let (chunk, place) = self.position(key);
        Some(&self.chunks[chunk].get()?[place])
    }

    /// Chunk of a key's slot and the place in it.
    #[inline]
    fn position(&self, key: u32) -> (usize, usize) {
        let plain = self.unmix(key);
        ((plain >> CHUNK_SHIFT) as usize, (plain >> PLACE_SHIFT & (CHUNK - 1)) as usize)
    }

    const fn mix(&self, index: u32, variant: u32) -> u32 {
        let (chunk, place) = (index / CHUNK, index % CHUNK);
        let upper = variant >> TAG_BITS & VARIANT_MASK;
        let plain = chunk << CHUNK_SHIFT | upper << VARIANT_SHIFT | place << PLACE_SHIFT;
        plain.wrapping_mul(self.factor) | variant & TAG_MASK
    }

    /// Without the tag.
    const fn unmix(&self, key: u32) -> u32 {
        (key & !TAG_MASK).wrapping_mul(self.inverse)
    }
}

/// Owner of a slot that is a window bound by `qpn`.
#[inline]
pub(super) const fn window_owner(qpn: Qpn) -> u32 {
    WINDOW | qpn.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_of_a_slot_differ_and_lead_to_it() {
        let keys = Keys::new(0x9e37_79b1);
        for index in [0, 1, 255, 256, MAX_REGISTRATIONS - 1] {
            let mut seen = std::collections::HashSet::new();
            for variant in 0..4096 {
                let key = keys.mix(index, variant);
                assert!(seen.insert(key), "{index} {variant}");
                assert_eq!(keys.position(key), ((index / CHUNK) as usize, (index % CHUNK) as usize));
                assert_eq!(keys.unmix(key) >> VARIANT_SHIFT & VARIANT_MASK, variant >> TAG_BITS);
                assert_eq!(key & TAG_MASK, variant & TAG_MASK);
            }
        }
    }
}

//! Registrations by key: what a work request or a peer may name.
//!
//! A key is found without a lock, and finding it takes a [`Use`] of the registration: releasing the
//! registration first closes it, then waits until nobody uses it. So after a release no byte is
//! touched any more, and while a copy runs its memory stays registered.
//!
//! ```text
//!  key ── place(20) ──▶ index ──▶ slot { users | CLOSED, key, base, len, rights }
//! ```
//!
//! Every key is a number of its own from the system's random source. None of its bits comes from a counter or from another
//! key, so keys that a peer was granted tell it nothing about the others: a guess hits one of `n` live registrations with
//! a chance of `n` in 2^32. A keyed permutation of a counter would not give that for the price of a lookup here, which
//! is a shift and a load. No two keys share a place, so at most half of the places are used, and few keys are drawn twice.
//!
//! The low byte of a key is its tag, which the owner of a memory window chooses on each bind: a window keeps its slot whatever
//! its tag, its other 24 bits are random and are no other registration's, and its slot is closed while it is not bound. See
//! [`windows`](super::memory_windows).
//!
//! A key that was released keeps its place until [`QUARANTINE`] others were released after it, and is not drawn before.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use parking_lot::Mutex;

use rdma_provider::types::{Access, Qpn, Sge};

use super::dma::{self, Gather, Memory, Region, Segment};
use super::memory_windows::Window;

/// Most registrations of a device: half as many as there are places for their keys.
pub(crate) const MAX_REGISTRATIONS: u32 = 1 << (PLACE_BITS - 1);

/// Upper bits of a key that no other key has. The table of places takes 4 MiB of addresses, and of memory one page for each
/// key until that is all. Miri interprets each step: there the tables are small enough to be destroyed in a moment.
const PLACE_BITS: u32 = if cfg!(miri) { 12 } else { 20 };
const PLACES: usize = 1 << PLACE_BITS;
/// Slots are made a chunk at a time.
const CHUNK: u32 = 1 << CHUNK_BITS;
const CHUNK_BITS: u32 = if cfg!(miri) { 5 } else { 8 };
const CHUNKS: usize = 1 << (INDEX_BITS - CHUNK_BITS);
/// Index 0 is that of no slot.
const INDEX_BITS: u32 = PLACE_BITS;
/// An index stands in the upper bits of its word, so no lookup checks a bound.
const INDEX_SHIFT: u32 = u32::BITS - INDEX_BITS;
/// What the owner of a window chooses.
const TAG_BITS: u32 = 8;
/// Released keys that are not drawn again, so that a packet that comes late finds nothing.
const QUARANTINE: usize = 256;
/// Bit of [`Slot::rights`], above those of `Access`: reached by atomic accesses only.
const SHARED: u32 = 1 << 31;
/// Bit of the owner in [`Slot::rights`]: not a protection domain but the queue pair that bound a window.
const WINDOW: u32 = 1 << 31;
/// Bit of [`Slot::users`]: not registered.
const CLOSED: u32 = 1 << 31;

/// A piece that a key does not allow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NotCovered;

/// Table of the registrations of one device.
pub(crate) struct Keys {
    /// Index of the slot whose key has this place, or 0.
    places: Box<[AtomicU32; PLACES]>,
    chunks: Box<[OnceLock<Box<[Slot; CHUNK as usize]>>; CHUNKS]>,
    free: Mutex<FreeList>,
    /// By their keys without the tag, see [`family`].
    pub(crate) windows: Mutex<HashMap<u32, Window>>,
}

impl fmt::Debug for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The slots are many, and keys are secrets.
        f.debug_struct("Keys").finish_non_exhaustive()
    }
}

#[derive(Debug, Default)]
struct FreeList {
    /// Slots used so far, index 0 not counted.
    fresh: u32,
    /// Words of indexes, the oldest first. Their slots are closed, and their keys keep their places.
    returned: VecDeque<u32>,
}

/// A cache line of its own: its place in a chunk is a shift away, and copies by different keys do not share a counter's line.
#[derive(Debug)]
#[repr(align(64))]
pub(crate) struct Slot {
    /// Copies in progress, and [`CLOSED`]. All else is constant while not closed.
    users: AtomicU32,
    /// 0 in a slot that was never claimed.
    key: AtomicU32,
    region: Region,
    /// Access and [`SHARED`] in the low half, owner in the high half: a protection domain, or [`WINDOW`] and a queue pair.
    rights: AtomicU64,
}

impl Default for Slot {
    fn default() -> Self {
        Self {
            users: AtomicU32::new(CLOSED),
            key: AtomicU32::new(0),
            region: Region::default(),
            rights: AtomicU64::new(0),
        }
    }
}

/// Keeps a registration from being released.
#[derive(Debug)]
pub(crate) struct Use<'k>(&'k Slot);

impl Drop for Use<'_> {
    #[inline]
    fn drop(&mut self) {
        // Release: the copy happens before the end of the registration.
        self.0.users.fetch_sub(1, Ordering::Release);
    }
}

impl Slot {
    /// Lets uses begin. `owner` is as in `rights`.
    pub(crate) fn open(&self, key: u32, owner: u32, access: Access, shared: bool) {
        let shared = if shared { SHARED } else { 0 };
        self.key.store(key, Ordering::Relaxed);
        self.rights
            .store(u64::from(owner) << 32 | u64::from(access.bits() | shared), Ordering::Relaxed);
        // Release pairs with the acquire in `find`: who sees the slot open sees its fields.
        self.users.fetch_and(!CLOSED, Ordering::Release);
    }

    /// No new use begins, and it returns when no use is left.
    pub(crate) fn close(&self) {
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

    pub(crate) fn region(&self) -> &Region {
        &self.region
    }

    /// True if its key is `key` with any tag.
    fn is_of(&self, key: u32) -> bool {
        family(self.key.load(Ordering::Relaxed)) == family(key)
    }
}

impl Keys {
    /// An empty table.
    pub(crate) fn new() -> Self {
        Self {
            places: dma::zeroed(),
            chunks: Box::new([const { OnceLock::new() }; CHUNKS]),
            free: Mutex::new(FreeList::default()),
            windows: Mutex::default(),
        }
    }

    /// Registers memory; its key, or `None` if the table is full. The device reaches the memory by atomic accesses if it is
    /// `shared` or peers may write it. Memory that peers may only read is read as plain memory: atomic accesses, even loads,
    /// are for memory that may be written. `random` is drawn for this key alone, and peers cannot predict it.
    pub(crate) fn insert(
        &self,
        memory: Memory,
        access: Access,
        shared: bool,
        pd: u32,
        random: u64,
    ) -> Option<u32> {
        let (slot, key) = self.claim(random)?;
        slot.region.assign(memory);
        let writable = access.intersects(Access::REMOTE_WRITE | Access::REMOTE_ATOMIC);
        slot.open(key, pd, access, shared || writable);
        Some(key)
    }

    /// Ends a registration: no new use begins, of its windows neither, and it returns when no use is left.
    pub(crate) fn remove(&self, key: u32) {
        let Some(slot) = self.slot(key) else { return };
        slot.close();
        self.end_windows(|window| window.region() == Some(key));
        self.release(key);
    }

    /// A closed slot and its new key, which is made of `random`.
    pub(crate) fn claim(&self, random: u64) -> Option<(&Slot, u32)> {
        let mut free = self.free.lock();
        let fresh = free.returned.len() < QUARANTINE && free.fresh < MAX_REGISTRATIONS;
        let index = if fresh {
            free.fresh += 1;
            free.fresh << INDEX_SHIFT
        } else {
            free.returned.pop_front()?
        };
        let (chunk, at) = split(index);
        let slot = &self.chunks[chunk]
            .get_or_init(|| Box::new(std::array::from_fn(|_| Slot::default())))[at];
        if !fresh {
            self.place(slot.key.load(Ordering::Relaxed)).store(0, Ordering::Relaxed);
        }
        let mut key = random as u32;
        let mut further = fastrand::Rng::with_seed(random);
        // 0 is what an uninitialized key looks like; whatever its tag, it shall name nothing. Another draw tells nothing
        // about other keys, as `random` makes this one only.
        while family(key) == 0 || self.place(key).load(Ordering::Relaxed) != 0 {
            key = further.u32(..);
        }
        slot.key.store(key, Ordering::Relaxed);
        // A lookup by this key happens after the key was returned, and sees the place.
        self.place(key).store(index, Ordering::Relaxed);
        Some((slot, key))
    }

    /// The slot of a key is closed, and free for another when its quarantine is over.
    pub(crate) fn release(&self, key: u32) {
        self.free.lock().returned.push_back(self.place(key).load(Ordering::Relaxed));
    }

    /// `addr..addr + len` by `key`, if it is registered in `pd` with all of `need`.
    #[inline]
    pub(crate) fn resolve(
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
    pub(crate) fn resolve_remote(
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
        let slot = self.at(key).ok_or(NotCovered)?;
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
    pub(crate) fn gather<'k>(
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

    /// The slot that has `key` with any tag.
    pub(crate) fn slot(&self, key: u32) -> Option<&Slot> {
        self.at(key).filter(|slot| slot.is_of(key))
    }

    /// The slot at the place of `key`, which may be another key's, or that of none.
    #[inline]
    fn at(&self, key: u32) -> Option<&Slot> {
        let (chunk, at) = split(self.place(key).load(Ordering::Relaxed));
        Some(&self.chunks[chunk].get()?[at])
    }

    #[inline]
    fn place(&self, key: u32) -> &AtomicU32 {
        &self.places[(key >> (u32::BITS - PLACE_BITS)) as usize]
    }
}

/// Chunk of a slot, and where it is in that.
#[inline]
const fn split(index: u32) -> (usize, usize) {
    ((index >> (INDEX_SHIFT + CHUNK_BITS)) as usize, (index >> INDEX_SHIFT & (CHUNK - 1)) as usize)
}

/// What the keys of a window have in common.
pub(crate) const fn family(key: u32) -> u32 {
    key >> TAG_BITS
}

/// Owner of a slot that is a window bound by `qpn`.
#[inline]
pub(crate) const fn window_owner(qpn: Qpn) -> u32 {
    WINDOW | qpn.0
}

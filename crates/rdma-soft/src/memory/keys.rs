//! Registrations by key.
//!
//! A lookup takes no lock and returns a [`Use`] of the registration. Removal closes the slot and
//! waits until no use is left: memory stays registered during a copy and is not accessed after
//! removal.
//!
//! ```text
//!  key ── bucket(20) ──▶ index ──▶ slot { users | CLOSED, key, base, len, rights }
//! ```
//!
//! Keys are drawn independently from the system's random source, so a peer's keys reveal nothing
//! about others: a guess hits one of `n` live registrations with probability `n` / 2^32. A keyed
//! permutation of a counter would make lookups dearer than a shift and a load. At most half of the
//! buckets are used, each by one key, so few keys are drawn again.
//!
//! The low byte of a key is its tag, which the owner of a [memory window](super::windows)
//! chooses on each bind. A window keeps its slot for every tag; its other 24 bits are unique. Its
//! slot is closed while unbound.
//!
//! A released key keeps its bucket, and is not drawn again, until [`QUARANTINE`] later releases.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use rdma_provider::locks::Mutex;

use rdma_provider::types::{Access, Qpn, Sge};

use super::dma::{Gather, Memory, Region, Segment, Words};
use super::windows::Window;

/// Maximum number of registrations: half the number of buckets.
pub(crate) const MAX_REGISTRATIONS: u32 = 1 << (BUCKET_BITS - 1);

/// Number of upper key bits, unique per key, that select the bucket.
///
/// The table reserves 4 MiB of address space; each key touches at most one page. It is small under
/// Miri, which interprets its destruction.
const BUCKET_BITS: u32 = if cfg!(miri) { 12 } else { 20 };
const BUCKETS: usize = 1 << BUCKET_BITS;
const CHUNK: u32 = 1 << CHUNK_BITS;
const CHUNK_BITS: u32 = if cfg!(miri) { 5 } else { 8 };
const CHUNKS: usize = 1 << (INDEX_BITS - CHUNK_BITS);
/// Index 0 belongs to no slot.
const INDEX_BITS: u32 = BUCKET_BITS;
/// Indexes are the upper bits of a word: lookups need no bounds check.
const INDEX_SHIFT: u32 = u32::BITS - INDEX_BITS;
/// Low bits of a key, chosen by the owner of a window.
const TAG_BITS: u32 = 8;
/// Number of released keys that are not reused, so that late packets match none.
const QUARANTINE: usize = 256;
/// Bit of [`Slot::rights`], not used by `Access`: atomic accesses only.
pub(crate) const SHARED: u32 = 1 << 31;
/// Bit of [`Slot::rights`], not used by `Access`: payload lands out of order.
pub(crate) const REORDERED: u32 = 1 << 30;
/// Bit of the owner in [`Slot::rights`]: the owner is a queue pair, not a protection domain.
const WINDOW: u32 = 1 << 31;
/// Bit of [`Slot::users`]: not registered.
const CLOSED: u32 = 1 << 31;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NotCovered;

pub(crate) struct Keys {
    /// Index of the slot, or 0.
    buckets: Words<BUCKETS>,
    chunks: Box<[OnceLock<Box<[Slot; CHUNK as usize]>>; CHUNKS]>,
    free: Mutex<FreeList>,
    /// By [`family`].
    pub(crate) windows: Mutex<HashMap<u32, Window>>,
    /// Whether payload lands out of order in memory that is registered from now on with
    /// [`Access::RELAXED_ORDERING`].
    pub(crate) reorders: AtomicBool,
}

impl fmt::Debug for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Keys").finish_non_exhaustive()
    }
}

#[derive(Debug, Default)]
struct FreeList {
    /// Number of slots used so far.
    fresh: u32,
    /// Shifted indexes, oldest first. Their slots are closed and their keys keep their buckets.
    returned: VecDeque<u32>,
}

/// A registration or window, in its own cache line: counters do not contend.
#[derive(Debug)]
#[repr(align(64))]
pub(crate) struct Slot {
    /// Number of uses, and [`CLOSED`]. The other fields are constant unless closed.
    users: AtomicU32,
    /// 0 if the slot was never claimed.
    key: AtomicU32,
    region: Region,
    /// Low half: access, [`SHARED`] and [`REORDERED`]. High half: a protection domain, or
    /// [`WINDOW`] and a queue pair.
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

/// A guard that blocks the removal of a registration.
#[derive(Debug)]
pub(crate) struct Use<'k>(&'k Slot);

impl Drop for Use<'_> {
    #[inline]
    fn drop(&mut self) {
        // Release: the copy happens before the removal.
        self.0.users.fetch_sub(1, Ordering::Release);
    }
}

impl Slot {
    /// Permits uses. `owner` has the format of [`Slot::rights`], `marks` are [`SHARED`] and
    /// [`REORDERED`].
    pub(crate) fn open(&self, key: u32, owner: u32, access: Access, marks: u32) {
        self.key.store(key, Ordering::Relaxed);
        self.rights
            .store(u64::from(owner) << 32 | u64::from(access.bits() | marks), Ordering::Relaxed);
        // Release pairs with the acquire in `find`: a lookup that sees the slot open sees its
        // fields.
        self.users.fetch_and(!CLOSED, Ordering::Release);
    }

    /// Stops new uses and waits until none is left.
    pub(crate) fn close(&self) {
        self.users.fetch_or(CLOSED, Ordering::AcqRel);
        // A use is the copy of one packet: microseconds, without sleeping.
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

    /// Ignores the tags.
    fn has_family(&self, key: u32) -> bool {
        family(self.key.load(Ordering::Relaxed)) == family(key)
    }
}

impl Keys {
    pub(crate) fn new() -> Self {
        Self {
            buckets: Words::zeroed(),
            chunks: Box::new([const { OnceLock::new() }; CHUNKS]),
            free: Mutex::new(FreeList::default()),
            windows: Mutex::default(),
            reorders: AtomicBool::new(false),
        }
    }

    /// Registers memory and returns its key, or `None` if the table is full.
    ///
    /// Memory that is `shared` or writable by peers is accessed by atomics. Other memory is read
    /// with plain loads, because atomic loads require writable memory. `random` is unpredictable
    /// and used only here.
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
        let mut marks = if shared || writable { SHARED } else { 0 };
        if access.contains(Access::RELAXED_ORDERING) && self.reorders.load(Ordering::Relaxed) {
            marks |= SHARED | REORDERED;
        }
        slot.open(key, pd, access, marks);
        Some(key)
    }

    /// Removes a registration, unbinds its windows, and waits for all uses.
    pub(crate) fn remove(&self, key: u32) {
        let Some(slot) = self.slot(key) else { return };
        slot.close();
        self.unbind_windows(|window| window.region() == Some(key));
        self.release(key);
    }

    /// Returns a closed slot and its new key, derived from `random`.
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
            self.bucket(slot.key.load(Ordering::Relaxed)).store(0, Ordering::Relaxed);
        }
        let mut key = random as u32;
        let mut further = fastrand::Rng::with_seed(random);
        // 0 with any tag stays invalid, because an uninitialised key is often 0. Drawing again from
        // `random`, used for this key only, reveals nothing about other keys.
        while family(key) == 0 || self.bucket(key).load(Ordering::Relaxed) != 0 {
            key = further.u32(..);
        }
        slot.key.store(key, Ordering::Relaxed);
        // Lookups of this key happen after its return to the caller, and see the bucket.
        self.bucket(key).store(index, Ordering::Relaxed);
        Some((slot, key))
    }

    /// Makes a closed slot reusable after its quarantine.
    pub(crate) fn release(&self, key: u32) {
        self.free.lock().returned.push_back(self.bucket(key).load(Ordering::Relaxed));
    }

    /// Returns `addr..addr + len` if `key` covers it, belongs to `pd` and permits `need`.
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

    /// Resolves for the peer of `qpn`, which may also use windows that this queue pair bound.
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
        // Acquire pairs with `open`. Dropping `hold` decrements the count.
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
        let marks = (rights as u32 & SHARED != 0, rights as u32 & REORDERED != 0);
        slot.region.piece(addr, len, marks, hold).ok_or(NotCovered)
    }

    /// Appends bytes `skip..skip + len` of a long enough list to `out`. Empty elements are not
    /// looked up.
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
        debug_assert_eq!(left, 0, "list shorter than requested");
        Ok(())
    }

    pub(crate) fn slot(&self, key: u32) -> Option<&Slot> {
        self.at(key).filter(|slot| slot.has_family(key))
    }

    /// Ignores the slot's key.
    #[inline]
    fn at(&self, key: u32) -> Option<&Slot> {
        let (chunk, at) = split(self.bucket(key).load(Ordering::Relaxed));
        Some(&self.chunks[chunk].get()?[at])
    }

    #[inline]
    fn bucket(&self, key: u32) -> &AtomicU32 {
        &self.buckets[(key >> (u32::BITS - BUCKET_BITS)) as usize]
    }
}

#[inline]
const fn split(index: u32) -> (usize, usize) {
    ((index >> (INDEX_SHIFT + CHUNK_BITS)) as usize, (index >> INDEX_SHIFT & (CHUNK - 1)) as usize)
}

/// Returns the bits that all keys of a window share.
pub(crate) const fn family(key: u32) -> u32 {
    key >> TAG_BITS
}

/// Returns the owner of a window bound by `qpn`, see [`Slot::rights`].
#[inline]
pub(crate) const fn window_owner(qpn: Qpn) -> u32 {
    WINDOW | qpn.0
}

//! Room in a work queue of the device: counted, so that posting never overruns it.

use crate::sync::{AtomicBool, AtomicU32, Ordering, between_store_and_load};

/// Work requests that the device has room for.
///
/// The poster counts what it posts under its own lock and asks here how much room is left; the drainer tells
/// what is done. If there is none left, the poster announces that it waits; the drainer sees that and lets it
/// post. Each side stores before it loads, in one order for all (sequential consistency): so either the poster
/// sees the room, or the drainer sees the announcement.
#[derive(Debug)]
pub(super) struct Room {
    depth: u32,
    /// Work requests whose room is free again, counted from the first, modulo 2^32.
    retired: AtomicU32,
    /// Somebody waits.
    crowded: AtomicBool,
}

impl Room {
    pub(super) fn new(depth: u32) -> Self {
        Self { depth, retired: AtomicU32::new(0), crowded: AtomicBool::new(false) }
    }

    // The poster.

    /// Work requests the device holds, if `posted` were given to it so far.
    #[inline]
    pub(super) fn in_flight(&self, posted: u32) -> u32 {
        posted.wrapping_sub(self.retired.load(Ordering::SeqCst))
    }

    /// Work requests there is room for, if `posted` were given to the device so far.
    #[inline]
    pub(super) fn left(&self, posted: u32) -> u32 {
        self.depth.saturating_sub(self.in_flight(posted))
    }

    /// Announces that somebody waits. Ask for room again afterwards.
    pub(super) fn crowd(&self) {
        self.crowded.store(true, Ordering::SeqCst);
        between_store_and_load();
    }

    /// Nobody waits any more.
    pub(super) fn clear(&self) {
        self.crowded.store(false, Ordering::SeqCst);
    }

    // The drainer.

    /// All up to and including `position` are done; true if somebody waits for room.
    #[inline]
    pub(super) fn retire_through(&self, position: u32) -> bool {
        self.retired.store(position.wrapping_add(1), Ordering::SeqCst);
        between_store_and_load();
        self.crowded.load(Ordering::SeqCst)
    }

    /// One is done, in no particular order; true if somebody waits for room.
    #[inline]
    pub(super) fn retire_one(&self) -> bool {
        self.retired.fetch_add(1, Ordering::SeqCst);
        between_store_and_load();
        self.crowded.load(Ordering::SeqCst)
    }
}

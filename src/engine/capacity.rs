//! Capacity in a work queue of the device: counted, so that posting never overruns it.

use crate::sync::{AtomicU8, AtomicU32, Ordering, between_store_and_load};

/// Work requests that the device has room for.
///
/// The poster counts what it posts under its own lock and asks here how much room is left; the drainer tells
/// what is done. If there is none left, the poster announces that it waits; the drainer sees that and lets it
/// post. Each side stores before it loads, in one order for all (sequential consistency): so either the poster
/// sees the room, or the drainer sees the announcement.
#[derive(Debug)]
pub(super) struct Capacity {
    depth: u32,
    /// Work requests whose room is free again, counted from the first, modulo 2^32.
    retired: AtomicU32,
    /// The same where they are done [in any order](ANY_ORDER).
    done: AtomicU32,
    /// What else the drainer has to do: nothing most of the time, which is one question.
    flags: AtomicU8,
}

/// Somebody waits.
const CROWDED: u8 = 1;
/// Work requests are not done in the order in which they were posted.
const ANY_ORDER: u8 = 2;

impl Capacity {
    pub(super) fn new(depth: u32, any_order: bool) -> Self {
        let flags = AtomicU8::new(if any_order { ANY_ORDER } else { 0 });
        Self { depth, retired: AtomicU32::new(0), done: AtomicU32::new(0), flags }
    }

    fn any_order(&self) -> bool {
        self.flags.load(Ordering::Relaxed) & ANY_ORDER != 0
    }

    // The poster.

    /// Work requests the device holds, if `posted` were given to it so far.
    pub(super) fn in_flight(&self, posted: u32) -> u32 {
        let retired = if self.any_order() { &self.done } else { &self.retired };
        posted.wrapping_sub(retired.load(Ordering::SeqCst))
    }

    /// Work requests there is room for, if `posted` were given to the device so far.
    pub(super) fn left(&self, posted: u32) -> u32 {
        self.depth.saturating_sub(self.in_flight(posted))
    }

    /// Announces that somebody waits. Ask for room again afterwards.
    pub(super) fn crowd(&self) {
        self.flags.fetch_or(CROWDED, Ordering::SeqCst);
        between_store_and_load();
    }

    /// Nobody waits any more.
    pub(super) fn clear(&self) {
        self.flags.fetch_and(!CROWDED, Ordering::SeqCst);
    }

    /// How many of those from position `start` on are done, if they are done in order.
    pub(super) fn done_from(&self, start: u32) -> u32 {
        let done = self.retired.load(Ordering::SeqCst).wrapping_sub(start);
        // Retired up to before it.
        if done > u32::MAX / 2 { 0 } else { done }
    }

    // The drainer.

    /// The work request at `position` is done, and with it all before it, if they are done in order; true if somebody waits
    /// for room.
    #[inline(always)]
    pub(super) fn retire(&self, position: u32) -> bool {
        self.retired.store(position.wrapping_add(1), Ordering::SeqCst);
        between_store_and_load();
        self.flags.load(Ordering::SeqCst) != 0 && self.retire_slow()
    }

    #[inline(never)]
    fn retire_slow(&self) -> bool {
        if self.any_order() {
            self.done.fetch_add(1, Ordering::SeqCst);
            between_store_and_load();
        }
        self.flags.load(Ordering::SeqCst) & CROWDED != 0
    }

    /// The device has forgotten all of `posted`.
    pub(super) fn retire_all(&self, posted: u32) {
        self.retired.store(posted, Ordering::SeqCst);
        self.done.store(posted, Ordering::SeqCst);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn completion_in_order_stands_for_those_before_it() {
        let room = Capacity::new(4, false);
        assert_eq!((room.left(0), room.left(3), room.left(4), room.in_flight(4)), (4, 1, 0, 4));
        assert!(!room.retire(1), "nothing waits");
        assert_eq!((room.left(4), room.in_flight(4)), (2, 2));
        room.crowd();
        assert!(room.retire(2));
        room.clear();
        assert!(!room.retire(3));
        assert_eq!((room.left(4), room.in_flight(4)), (4, 0));
        room.retire_all(9);
        assert_eq!((room.in_flight(9), room.in_flight(u32::MAX)), (0, u32::MAX - 9));
    }

    #[test]
    fn completion_in_any_order_stands_for_itself() {
        let room = Capacity::new(4, true);
        assert!(!room.retire(3), "nothing waits");
        assert_eq!((room.left(4), room.in_flight(4)), (1, 3));
        room.crowd();
        assert!(room.retire(0));
        room.clear();
        assert!(!room.retire(2));
        assert_eq!((room.left(4), room.in_flight(4)), (3, 1));
        room.retire_all(4);
        assert_eq!(room.left(4), 4);
    }

    #[test]
    fn work_requests_that_are_done_are_counted_from_any_position() {
        let room = Capacity::new(8, false);
        assert_eq!(room.done_from(0), 0);
        room.retire(4);
        assert_eq!([0, 3, 4, 5, 7].map(|start| room.done_from(start)), [5, 2, 1, 0, 0]);
        room.retire(u32::MAX.wrapping_add(2));
        assert_eq!([u32::MAX, 0, 2, 5].map(|start| room.done_from(start)), [3, 2, 0, 0]);
    }
}

use crate::sync::{AtomicU8, AtomicU32, Ordering, between_store_and_load};

/// The number of free entries in one work queue of the device, counted so that posting never
/// overruns it.
///
/// - A poster holds the lock on the posting state. If no entry is free, it queues its work and
///   announces a waiter.
/// - The drainer holds the lock of the completion queue. It retires completed work requests. If it
///   sees a waiter, it posts the queued work.
///
/// After its announcement the poster queries again. Both store before they load, so with sequential
/// consistency the poster sees the free entries or the drainer sees the announcement.
#[derive(Debug)]
pub(super) struct Capacity {
    depth: u32,
    /// The position after the last retired work request, modulo 2^32. Unused if work requests
    /// complete [in any order](ANY_ORDER).
    retired_before: AtomicU32,
    /// Modulo 2^32. Counted only if work requests complete in any order.
    retired_count: AtomicU32,
    /// [`HAS_WAITERS`] and [`ANY_ORDER`]. Usually zero, so `retire` needs only one comparison.
    flags: AtomicU8,
}

const HAS_WAITERS: u8 = 1;
const ANY_ORDER: u8 = 2;

impl Capacity {
    pub(super) fn new(depth: u32, any_order: bool) -> Self {
        let flags = AtomicU8::new(if any_order { ANY_ORDER } else { 0 });
        Self { depth, retired_before: AtomicU32::new(0), retired_count: AtomicU32::new(0), flags }
    }

    fn any_order(&self) -> bool {
        self.flags.load(Ordering::Relaxed) & ANY_ORDER != 0
    }

    // For the poster.

    pub(super) fn in_flight(&self, posted: u32) -> u32 {
        let retired = if self.any_order() { &self.retired_count } else { &self.retired_before };
        posted.wrapping_sub(retired.load(Ordering::SeqCst))
    }

    pub(super) fn free(&self, posted: u32) -> u32 {
        self.depth.saturating_sub(self.in_flight(posted))
    }

    /// The caller then queries the free entries again.
    pub(super) fn announce_waiter(&self) {
        self.flags.fetch_or(HAS_WAITERS, Ordering::SeqCst);
        between_store_and_load();
    }

    pub(super) fn clear_waiters(&self) {
        self.flags.fetch_and(!HAS_WAITERS, Ordering::SeqCst);
    }

    pub(super) fn done_from(&self, start: u32) -> u32 {
        let done = self.retired_before.load(Ordering::SeqCst).wrapping_sub(start);
        // Negative modulo 2^32 if work before `start` is still in flight.
        if done > u32::MAX / 2 { 0 } else { done }
    }

    // For the drainer.

    /// If work requests complete in order, retires all before `position`, too. Returns true if a
    /// waiter is announced.
    #[inline]
    pub(super) fn retire(&self, position: u32) -> bool {
        self.retired_before.store(position.wrapping_add(1), Ordering::SeqCst);
        between_store_and_load();
        self.flags.load(Ordering::SeqCst) != 0 && self.retire_slow()
    }

    #[inline(never)]
    fn retire_slow(&self) -> bool {
        if self.any_order() {
            self.retired_count.fetch_add(1, Ordering::SeqCst);
            between_store_and_load();
        }
        self.flags.load(Ordering::SeqCst) & HAS_WAITERS != 0
    }

    pub(super) fn retire_all(&self, posted: u32) {
        self.retired_before.store(posted, Ordering::SeqCst);
        self.retired_count.store(posted, Ordering::SeqCst);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn completion_in_order_retires_all_earlier_work_requests() {
        let capacity = Capacity::new(4, false);
        assert_eq!(
            (capacity.free(0), capacity.free(3), capacity.free(4), capacity.in_flight(4)),
            (4, 1, 0, 4)
        );
        assert!(!capacity.retire(1), "nothing waits");
        assert_eq!((capacity.free(4), capacity.in_flight(4)), (2, 2));
        capacity.announce_waiter();
        assert!(capacity.retire(2));
        capacity.clear_waiters();
        assert!(!capacity.retire(3));
        assert_eq!((capacity.free(4), capacity.in_flight(4)), (4, 0));
        capacity.retire_all(9);
        assert_eq!((capacity.in_flight(9), capacity.in_flight(u32::MAX)), (0, u32::MAX - 9));
    }

    #[test]
    fn completion_in_any_order_retires_one_work_request() {
        let capacity = Capacity::new(4, true);
        assert!(!capacity.retire(3), "nothing waits");
        assert_eq!((capacity.free(4), capacity.in_flight(4)), (1, 3));
        capacity.announce_waiter();
        assert!(capacity.retire(0));
        capacity.clear_waiters();
        assert!(!capacity.retire(2));
        assert_eq!((capacity.free(4), capacity.in_flight(4)), (3, 1));
        capacity.retire_all(4);
        assert_eq!(capacity.free(4), 4);
    }

    #[test]
    fn work_requests_that_are_done_are_counted_from_any_position() {
        let capacity = Capacity::new(8, false);
        assert_eq!(capacity.done_from(0), 0);
        capacity.retire(4);
        assert_eq!([0, 3, 4, 5, 7].map(|start| capacity.done_from(start)), [5, 2, 1, 0, 0]);
        capacity.retire(u32::MAX.wrapping_add(2));
        assert_eq!([u32::MAX, 0, 2, 5].map(|start| capacity.done_from(start)), [3, 2, 0, 0]);
    }
}

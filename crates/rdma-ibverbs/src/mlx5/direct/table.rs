//! The queue pairs of a completion queue, found by number.

use std::ptr::NonNull;
use std::sync::Arc;

use super::queues::Queues;
use super::send_queue::SendQueue;

/// An open-addressed table of queue pairs. Adapters assign numbers in sequence, so that the low
/// bits rarely collide.
#[derive(Debug)]
pub(super) struct Table {
    /// A power of two, at least four times the number of queue pairs.
    places: Box<[Place]>,
    /// Number of places - 1.
    mask: usize,
    used: usize,
}

#[derive(Debug, Clone)]
struct Place {
    qpn: u32,
    /// The send queue in `queues`.
    send: Option<NonNull<SendQueue>>,
    queues: Option<Arc<Queues>>,
}

// SAFETY: S3: the send queue is shared, and lives as long as `queues`.
unsafe impl Send for Place {}
// SAFETY: S3: as above.
unsafe impl Sync for Place {}

impl Place {
    const FREE: Self = Self { qpn: NONE, send: None, queues: None };
}

/// Not a queue pair number, which has 24 bits.
const NONE: u32 = u32::MAX;
const SMALLEST: usize = 4;
const PLACES_PER_QUEUE_PAIR: usize = 4;

impl Table {
    pub(super) fn new() -> Self {
        Self { places: empty(SMALLEST), mask: SMALLEST - 1, used: 0 }
    }

    #[inline]
    pub(super) fn find(&self, qpn: u32) -> Option<&Queues> {
        self.place(qpn)?.queues.as_deref()
    }

    /// Returns the send queue of queue pair `qpn`.
    #[inline]
    pub(super) fn find_send(&self, qpn: u32) -> Option<&SendQueue> {
        let send = self.place(qpn)?.send?;
        // SAFETY: S3: `queues` of the same place keeps it, and does not move it.
        Some(unsafe { send.as_ref() })
    }

    #[inline]
    fn place(&self, qpn: u32) -> Option<&Place> {
        let first = qpn as usize & self.mask;
        // SAFETY: S3: masked: below the length.
        let place = unsafe { self.places.get_unchecked(first) };
        if place.qpn == qpn { Some(place) } else { self.place_beyond(first, qpn) }
    }

    #[cold]
    fn place_beyond(&self, first: usize, qpn: u32) -> Option<&Place> {
        let (before, from) = self.places.split_at(first);
        // A free place ends the search; there always is one.
        let mut candidates = from.iter().chain(before).take_while(|place| place.qpn != NONE);
        candidates.find(|place| place.qpn == qpn)
    }

    pub(super) fn insert(&mut self, qpn: u32, queues: Arc<Queues>) {
        self.remove(qpn);
        if (self.used + 1) * PLACES_PER_QUEUE_PAIR > self.places.len() {
            self.grow();
        }
        let send = queues.send.as_deref().map(NonNull::from);
        self.put(Place { qpn, send, queues: Some(queues) });
    }

    pub(super) fn remove(&mut self, qpn: u32) {
        let mut gap = qpn as usize & self.mask;
        while self.places[gap].qpn != qpn {
            if self.places[gap].qpn == NONE {
                return;
            }
            gap = (gap + 1) & self.mask;
        }
        self.used -= 1;
        // Moves back the queue pairs after it whose search passes the gap.
        let mut at = gap;
        loop {
            at = (at + 1) & self.mask;
            let first = self.places[at].qpn as usize & self.mask;
            if self.places[at].qpn == NONE {
                break;
            }
            if at.wrapping_sub(first) & self.mask >= at.wrapping_sub(gap) & self.mask {
                self.places.swap(at, gap);
                gap = at;
            }
        }
        self.places[gap] = Place::FREE;
    }

    fn grow(&mut self) {
        let len = self.places.len() * 2;
        let before = std::mem::replace(&mut self.places, empty(len));
        (self.mask, self.used) = (len - 1, 0);
        for place in before.into_iter().filter(|place| place.qpn != NONE) {
            self.put(place);
        }
    }

    fn put(&mut self, new: Place) {
        let mut at = new.qpn as usize & self.mask;
        while self.places[at].qpn != NONE {
            at = (at + 1) & self.mask;
        }
        self.places[at] = new;
        self.used += 1;
    }
}

fn empty(len: usize) -> Box<[Place]> {
    vec![Place::FREE; len].into_boxed_slice()
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::super::queues::Receives;
    use super::*;

    fn queues() -> Arc<Queues> {
        Arc::new(Queues { send: None, receive: Receives::None })
    }

    // Random insertions, replacements and removals. Most numbers share their low bits.
    #[test]
    fn table_finds_exactly_the_queue_pairs_that_a_map_has() {
        for shift in [0, 3, 12, 20] {
            let mut table = Table::new();
            let mut map = HashMap::<u32, Arc<Queues>>::new();
            let mut random = 7_u64;
            for step in 0..if cfg!(miri) { 60 } else { 4000 } {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let choice = (random >> 40) as u32;
                let qpn = (choice % 12) << shift | choice >> 4 & 1;
                // Grows first, then shrinks again and again.
                if choice >> 8 & 3 <= step / 40 % 4 {
                    let new = queues();
                    map.insert(qpn, new.clone());
                    table.insert(qpn, new);
                } else {
                    map.remove(&qpn);
                    table.remove(qpn);
                }
                for qpn in (0..12).flat_map(|at| [at << shift, at << shift | 1]) {
                    let found = table.find(qpn).map(std::ptr::from_ref);
                    assert_eq!(found, map.get(&qpn).map(Arc::as_ptr), "{qpn:#x}");
                }
                assert!(table.find(NONE).is_none() && table.find(0xff_ffff).is_none());
                assert_eq!(table.used, map.len());
                assert_eq!(table.mask + 1, table.places.len());
                assert!(
                    table.used * PLACES_PER_QUEUE_PAIR <= table.places.len(),
                    "no free place is left"
                );
            }
            // The table keeps no queue pair that was removed or replaced.
            assert!(map.values().all(|queues| Arc::strong_count(queues) == 2));
        }
    }
}

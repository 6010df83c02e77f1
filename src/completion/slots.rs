//! The slots of one work queue: found by number, growing in steps that never move them.

use std::sync::OnceLock;

use super::slot::{Generation, NONE, Slot};
use crate::sync::{AtomicU32, Ordering};

/// Slots of the first step, 3 KiB; each further step doubles what there is.
const FIRST: u32 = 32;
const FIRST_BITS: u32 = FIRST.trailing_zeros();

/// Slot numbers have 20 bits in a work request number.
pub(super) const INDEX_BITS: u32 = 20;
const STEPS: usize = (INDEX_BITS - FIRST_BITS) as usize;

/// Slots by number.
///
/// There are more slots than the device holds work requests, for a slot is taken until its operation has
/// looked at the result. In a steady state none is added.
pub(super) struct Slots {
    /// The first step apart: most queues never need another, and it is found with fewer instructions.
    first: OnceLock<Box<[Slot; FIRST as usize]>>,
    /// Made when the first step is full: most queues need no more than one pointer for it.
    steps: OnceLock<Box<[Step; STEPS]>>,
    /// Where to look for a free slot first: that which was released last, for its memory is near.
    hint: AtomicU32,
}

/// Slots that were added together.
type Step = OnceLock<Box<[Slot]>>;

/// How far the poster has to look; under the lock of the queue.
#[derive(Debug, Default)]
pub(super) struct Cursor {
    /// Slots there are.
    len: u32,
}

impl Slots {
    pub(super) fn new() -> Self {
        Self { first: OnceLock::new(), steps: OnceLock::new(), hint: AtomicU32::new(0) }
    }

    /// Step and offset of a slot beyond the first step: 32..64, 64..128, 128..256, …
    fn place(index: u32) -> (usize, usize) {
        let step = index.ilog2() - FIRST_BITS;
        (step as usize, (index - (FIRST << step)) as usize)
    }

    /// The slot with this number, if there is one.
    #[inline(always)]
    pub(super) fn find(&self, index: u32) -> Option<&Slot> {
        if index < FIRST {
            return Some(&self.first.get()?[index as usize]);
        }
        self.find_beyond(index)
    }

    fn find_beyond(&self, index: u32) -> Option<&Slot> {
        let (step, offset) = Self::place(index);
        self.steps.get()?.get(step)?.get()?.get(offset)
    }

    /// A slot that was claimed before.
    #[inline]
    pub(super) fn slot(&self, index: u32) -> &Slot {
        match self.find(index) {
            Some(slot) => slot,
            None => unreachable!("claimed slots exist and never move"),
        }
    }

    /// Starts a life in a free slot; `None` if there are 2^20 and all are taken.
    ///
    /// One operation after the other uses the same slot; of many that end in the order they began, each uses that
    /// which was released before.
    #[inline(always)]
    pub(super) fn claim(&self, cursor: &mut Cursor, previous: u32) -> Option<(&Slot, u32, Generation)> {
        let index = self.hint.load(Ordering::Relaxed);
        if let Some(slot) = self.find(index)
            && let Some(generation) = slot.claim(previous)
        {
            self.hint.store(index + 1, Ordering::Relaxed);
            return Some((slot, index, generation));
        }
        self.search(cursor, previous)
    }

    #[cold]
    fn search(&self, cursor: &mut Cursor, previous: u32) -> Option<(&Slot, u32, Generation)> {
        let start = self.hint.load(Ordering::Relaxed);
        for step in 0..cursor.len {
            let index = start.wrapping_add(step) % cursor.len;
            let slot = self.slot(index);
            if let Some(generation) = slot.claim(previous) {
                self.hint.store(index + 1, Ordering::Relaxed);
                // More than half of them are held: search less next time.
                if step > cursor.len / 2 {
                    self.grow(cursor);
                }
                return Some((slot, index, generation));
            }
        }
        let index = cursor.len;
        self.grow(cursor)?;
        self.hint.store(index + 1, Ordering::Relaxed);
        let slot = self.slot(index);
        slot.claim(previous).map(|generation| (slot, index, generation))
    }

    fn grow(&self, cursor: &mut Cursor) -> Option<()> {
        if cursor.len == 0 {
            self.first.get_or_init(|| Box::new(std::array::from_fn(|_| Slot::new())));
            cursor.len = FIRST;
        } else {
            let (step, _) = Self::place(cursor.len);
            let steps = self.steps.get_or_init(|| Box::new([const { OnceLock::new() }; STEPS]));
            steps.get(step)?.get_or_init(|| (0..cursor.len).map(|_| Slot::new()).collect());
            cursor.len *= 2;
        }
        Some(())
    }

    /// Ends the life of slot `index`, whose result was looked at.
    #[inline(always)]
    pub(super) fn release(&self, slot: &Slot, index: u32) {
        slot.release();
        self.hint.store(index, Ordering::Relaxed);
    }

    /// Frees the slots of a batch, from its last to its first.
    pub(super) fn release_chain(&self, last: u32) {
        let mut next = Some(last);
        while let Some(index) = next {
            let slot = self.slot(index);
            next = slot.previous();
            self.release(slot, index);
        }
    }

    /// All that there are, with their numbers.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u32, &Slot)> {
        (0..NONE).map_while(|index| self.find(index).map(|slot| (index, slot)))
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn numbers_map_to_steps_without_gap_or_overlap() {
        let mut expected = (0, 0);
        let mut len = FIRST;
        for index in FIRST..4096 {
            assert_eq!(Slots::place(index), expected, "slot {index}");
            expected.1 += 1;
            if expected.1 == len as usize {
                len *= 2;
                expected = (expected.0 + 1, 0);
            }
        }
        assert_eq!(Slots::place((1 << INDEX_BITS) - 1).0, STEPS - 1);
    }

    #[test]
    fn slots_held_by_idle_operations_do_not_make_the_table_grow_for_ever() {
        let (slots, mut cursor) = (Slots::new(), Cursor::default());
        for _ in 0..100 {
            slots.claim(&mut cursor, NONE).unwrap();
        }
        for _ in 0..100_000 {
            slots.claim(&mut cursor, NONE).unwrap().0.unclaim();
        }
        assert!(cursor.len <= 512, "{} slots for 100 held", cursor.len);
    }

    #[test]
    fn a_slot_comes_back_in_another_generation() {
        let (slots, mut cursor) = (Slots::new(), Cursor::default());
        let (slot, index, first) = slots.claim(&mut cursor, NONE).unwrap();
        slot.unclaim();
        assert!(!slot.is_current(first));
        slots.hint.store(index, Ordering::Relaxed);
        let (_, again, second) = slots.claim(&mut cursor, NONE).unwrap();
        assert_eq!(again, index);
        assert_ne!(first, second);
    }
}

//! The slots of one work queue, found by index. The table grows in steps that never move a slot.

#![allow(unsafe_code)]

use std::ptr;
use std::sync::OnceLock;

use super::slot::Slot;
use super::work_request_id::INDEX_BITS;
use crate::sync::{AtomicPtr, Ordering};

/// Slots of the first step, 4 KiB; each further step doubles the table.
const FIRST: u32 = 32;
const FIRST_BITS: u32 = FIRST.trailing_zeros();

const STEPS: usize = (INDEX_BITS - FIRST_BITS) as usize;

/// A table of slots, more than the device holds work requests, because a slot stays claimed until
/// its operation has taken the result.
pub(super) struct Slots<Q> {
    /// A separate field, because most queues need no further step and the lookup takes fewer
    /// instructions.
    first: OnceLock<Box<[Slot<Q>; FIRST as usize]>>,
    /// Allocated when the first step is full; until then it costs one pointer.
    steps: OnceLock<Box<[Step<Q>; STEPS]>>,
    /// First candidate in the search for a free slot: the last one released, which is likely in the
    /// cache.
    hint: Hint<Q>,
}

type Step<Q> = OnceLock<Box<[Slot<Q>]>>;

/// The state of the search for free slots, under the lock of the queue.
#[derive(Debug, Default)]
pub(super) struct Cursor {
    len: u32,
    next: u32,
}

impl<Q> Slots<Q> {
    pub(super) fn new() -> Self {
        Self { first: OnceLock::new(), steps: OnceLock::new(), hint: Hint::new() }
    }

    /// Returns step and offset of a slot beyond the first step: 32..64, 64..128, 128..256, …
    fn locate(index: u32) -> (usize, usize) {
        let step = index.ilog2() - FIRST_BITS;
        (step as usize, (index - (FIRST << step)) as usize)
    }

    #[inline(always)]
    pub(super) fn find(&self, index: u32) -> Option<&Slot<Q>> {
        if index < FIRST {
            return Some(&self.first.get()?[index as usize]);
        }
        self.find_beyond(index)
    }

    fn find_beyond(&self, index: u32) -> Option<&Slot<Q>> {
        let (step, offset) = Self::locate(index);
        self.steps.get()?.get(step)?.get()?.get(offset)
    }

    #[inline]
    pub(super) fn slot(&self, index: u32) -> &Slot<Q> {
        match self.find(index) {
            Some(slot) => slot,
            None => unreachable!("claimed slots exist and never move"),
        }
    }

    #[inline(always)]
    pub(super) fn claim_next(&self) -> Option<&Slot<Q>> {
        self.hint.claim(1)
    }

    /// Claims a free slot for `parts` work requests; `None` if there are 2^20 and all are taken.
    /// `make` creates the slot with the given index.
    ///
    /// Consecutive operations use the same slot. Concurrent operations that end in the order they
    /// began each use the slot released before.
    #[inline(always)]
    pub(super) fn claim(
        &self,
        cursor: &mut Cursor,
        parts: u32,
        make: impl Fn(u32) -> Slot<Q>,
    ) -> Option<&Slot<Q>> {
        match self.hint.claim(parts) {
            None => self.search(cursor, parts, make),
            slot => slot,
        }
    }

    #[cold]
    fn search(
        &self,
        cursor: &mut Cursor,
        parts: u32,
        make: impl Fn(u32) -> Slot<Q>,
    ) -> Option<&Slot<Q>> {
        for step in 0..cursor.len {
            let index = cursor.next.wrapping_add(step) % cursor.len;
            if let Some(slot) = self.hint.claim_at(self.slot(index), parts) {
                cursor.next = index + 1;
                // More than half of them are held: grow, to shorten later searches.
                if step > cursor.len / 2 {
                    self.grow(cursor, make);
                }
                return Some(slot);
            }
        }
        cursor.next = cursor.len;
        self.grow(cursor, make)?;
        self.hint.claim_at(self.slot(cursor.next), parts)
    }

    fn grow(&self, cursor: &mut Cursor, make: impl Fn(u32) -> Slot<Q>) -> Option<()> {
        if cursor.len == 0 {
            self.first.get_or_init(|| Box::new(std::array::from_fn(|index| make(index as u32))));
            cursor.len = FIRST;
        } else {
            let (step, _) = Self::locate(cursor.len);
            let steps = self.steps.get_or_init(|| Box::new([const { OnceLock::new() }; STEPS]));
            steps.get(step)?.get_or_init(|| (cursor.len..2 * cursor.len).map(make).collect());
            cursor.len *= 2;
        }
        // Links all slots into a ring.
        let mut before = self.slot(cursor.len - 1);
        for (_, slot) in self.iter() {
            before.link(slot);
            before = slot;
        }
        Some(())
    }

    /// Makes `slot`, which is about to be free, the first candidate.
    #[inline(always)]
    pub(super) fn hint(&self, slot: &Slot<Q>) {
        self.hint.set(slot);
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (u32, &Slot<Q>)> {
        (0..1 << INDEX_BITS).map_while(|index| self.find(index).map(|slot| (index, slot)))
    }
}

struct Hint<Q>(AtomicPtr<Slot<Q>>);

impl<Q> Hint<Q> {
    fn new() -> Self {
        Self(AtomicPtr::new(ptr::null_mut()))
    }

    #[inline(always)]
    fn claim(&self, parts: u32) -> Option<&Slot<Q>> {
        // SAFETY: C1: a slot of the table that the hint is part of; slots never move.
        let slot = unsafe { self.0.load(Ordering::Relaxed).as_ref() }?;
        self.claim_at(slot, parts)
    }

    #[inline(always)]
    fn claim_at<'a>(&self, slot: &'a Slot<Q>, parts: u32) -> Option<&'a Slot<Q>> {
        if !slot.claim(parts) {
            return None;
        }
        self.0.store(slot.next(), Ordering::Relaxed);
        Some(slot)
    }

    /// Sets the candidate to `slot`, which is of the same table.
    #[inline(always)]
    fn set(&self, slot: &Slot<Q>) {
        self.0.store(ptr::from_ref(slot).cast_mut(), Ordering::Relaxed);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::types::WrId;

    #[test]
    fn numbers_map_to_steps_without_gap_or_overlap() {
        let mut expected = (0, 0);
        let mut len = FIRST;
        for index in FIRST..if cfg!(miri) { 512 } else { 4096 } {
            assert_eq!(Slots::<()>::locate(index), expected, "slot {index}");
            expected.1 += 1;
            if expected.1 == len as usize {
                len *= 2;
                expected = (expected.0 + 1, 0);
            }
        }
        assert_eq!(Slots::<()>::locate((1 << INDEX_BITS) - 1).0, STEPS - 1);
    }

    fn claim<'a>(slots: &'a Slots<()>, cursor: &mut Cursor) -> &'a Slot<()> {
        slots
            .hint
            .claim(1)
            .or_else(|| slots.search(cursor, 1, |index| Slot::new(WrId(index.into()), false)))
            .unwrap()
    }

    #[test]
    fn free_slots_follow_each_other_in_a_ring() {
        let (slots, mut cursor) = (Slots::<()>::new(), Cursor::default());
        assert!(
            slots.find(0).is_none() && slots.hint.claim(1).is_none() && slots.iter().count() == 0
        );
        let first = claim(&slots, &mut cursor);
        let others: Vec<_> =
            (1..FIRST).map(|_| slots.hint.claim(1).unwrap().id().0 as u32).collect();
        assert_eq!((first.id(), others), (WrId(0), (1..FIRST).collect()));
        assert!(slots.hint.claim(1).is_none(), "all are taken");
        first.free();
        assert!(
            std::ptr::eq(slots.hint.claim(1).unwrap(), slots.slot(0)),
            "the first comes after the last"
        );
        assert_eq!(claim(&slots, &mut cursor).id(), WrId(FIRST.into()));
        let others: Vec<_> =
            (1..FIRST).map(|_| slots.hint.claim(1).unwrap().id().0 as u32).collect();
        assert_eq!((others, cursor.len), ((FIRST + 1..2 * FIRST).collect(), 2 * FIRST));
        assert!(
            slots
                .iter()
                .map(|(index, slot)| (index, slot.id().0 as u32))
                .eq((0..2 * FIRST).map(|at| (at, at)))
        );
        assert!(slots.find(2 * FIRST).is_none());
    }

    #[test]
    fn slots_held_by_idle_operations_do_not_make_the_table_grow_without_bound() {
        let (slots, mut cursor) = (Slots::<()>::new(), Cursor::default());
        for _ in 0..100 {
            claim(&slots, &mut cursor);
        }
        for _ in 0..if cfg!(miri) { 200 } else { 100_000 } {
            claim(&slots, &mut cursor).free();
        }
        assert!(cursor.len <= 512, "{} slots for 100 held", cursor.len);
    }

    #[test]
    fn reused_slot_has_another_generation() {
        let (slots, mut cursor) = (Slots::<()>::new(), Cursor::default());
        let slot = claim(&slots, &mut cursor);
        let first = slot.id();
        assert!(slot.is_current(first));
        slot.free();
        assert!(!slot.is_current(first));
        slots.hint(slot);
        let again = claim(&slots, &mut cursor);
        assert!(std::ptr::eq(slot, again));
        assert!(again.is_current(again.id()) && !again.is_current(first));
    }

    #[test]
    fn batch_has_an_id_for_each_work_request_and_generations_stay_distinct() {
        let (slots, mut cursor) = (Slots::<()>::new(), Cursor::default());
        let mut before = Vec::new();
        for parts in [5, 1, 32, 2, crate::engine::slot::MAX_PARTS, 3] {
            let slot = slots
                .hint
                .claim(parts)
                .or_else(|| {
                    slots.search(&mut cursor, parts, |index| Slot::new(WrId(index.into()), false))
                })
                .unwrap();
            let some = [0, parts / 2, parts - 1];
            let ids = some.map(|part| slot.id_of(part));
            assert_eq!(ids.map(|id| slot.current_part(id)), some.map(Some));
            assert_eq!(slot.id_of(parts - 1), slot.id());
            let mut number = slot.ids();
            assert_eq!(
                [number.next(), number.next()].map(|id| slot.part(id)),
                [Some(0), (parts > 1).then_some(1)]
            );
            assert!(before.iter().all(|&id| slot.current_part(id).is_none()), "{parts}");
            assert!(slot.part(WrId(slot.id().0 ^ 1)).is_none(), "another slot's");
            slot.end_parts();
            slot.free();
            slots.hint(slot);
            before.extend(ids);
        }
    }
}

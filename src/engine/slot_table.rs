//! The slots of one work queue, found by index. The table grows in steps that never move a slot.

#![allow(unsafe_code)]

use std::iter;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::AtomicPtr as StepPtr;

use super::slot::Slot;
use super::work_request_id::INDEX_BITS;
use crate::sync::{AtomicPtr, Ordering};

/// Slots of the first step. A queue with one operation in flight needs no other.
const FIRST: u32 = 4;

/// Added to an index to find its step. There are four steps of equal length between two powers of
/// two, so a step adds at most a third of the slots before it.
const BIAS: u32 = 4 * FIRST;

/// Steps allocated after the first; with it, they hold 112 slots.
const NEAR: usize = 11;
const STEPS: usize = 4 * (INDEX_BITS - BIAS.ilog2()) as usize;
const FAR: usize = STEPS - 1 - NEAR;

pub(super) const MAX_SLOTS: u32 = (1 << INDEX_BITS) - BIAS;

/// May have more slots than the device's queue, because a slot stays claimed until its operation
/// has taken the result.
pub(super) struct Slots<Q> {
    /// First candidate in the search: the slot released last, likely in the cache.
    likely_free: LikelyFree<Q>,
    /// The first step, allocated with the first slot: many receive queues are never used.
    first: Step<Q>,
    steps: OnceLock<Box<Steps<Q>>>,
}

struct Steps<Q> {
    near: [Step<Q>; NEAR],
    far: OnceLock<Box<[Step<Q>; FAR]>>,
}

impl<Q> Steps<Q> {
    fn new() -> Box<Self> {
        Box::new(Self { near: [const { Step::empty() }; NEAR], far: OnceLock::new() })
    }

    fn all_mut(&mut self) -> impl Iterator<Item = &mut Step<Q>> {
        let far = self.far.get_mut().into_iter().flat_map(|far| far.iter_mut());
        self.near.iter_mut().chain(far)
    }

    #[inline]
    fn get(&self, step: usize) -> Option<&Step<Q>> {
        match self.near.get(step) {
            None => self.far.get()?.get(step - NEAR),
            near => near,
        }
    }
}

/// The first slot of a step, or null. Set once, and freed with the table.
struct Step<Q>(StepPtr<Slot<Q>>);

impl<Q> Step<Q> {
    const fn empty() -> Self {
        Self(StepPtr::new(ptr::null_mut()))
    }

    const fn len(step: usize) -> usize {
        (FIRST as usize) << (step / 4)
    }

    #[inline]
    fn get(&self, offset: usize) -> Option<&Slot<Q>> {
        let first = self.0.load(Ordering::Acquire);
        // SAFETY: C1: the slots of this step: they never move, and are freed with the table.
        (!first.is_null()).then(|| unsafe { &*first.add(offset) })
    }

    /// The caller excludes other threads that set the slots.
    fn set(&self, slots: Box<[Slot<Q>]>) {
        debug_assert!(self.get(0).is_none(), "a step is set once");
        self.0.store(Box::into_raw(slots).cast(), Ordering::Release);
    }
}

impl<Q> Drop for Slots<Q> {
    fn drop(&mut self) {
        let others = self.steps.get_mut().into_iter().flat_map(|steps| steps.all_mut());
        for (number, step) in iter::once(&mut self.first).chain(others).enumerate() {
            let first = std::mem::replace(step.0.get_mut(), ptr::null_mut());
            if !first.is_null() {
                let slots = ptr::slice_from_raw_parts_mut(first, Step::<Q>::len(number));
                // SAFETY: C1: `set` stored this box. The table has no users, and its drop is the
                // only one.
                drop(unsafe { Box::from_raw(slots) });
            }
        }
    }
}

#[derive(Debug, Default)]
pub(super) struct Cursor {
    len: u32,
    next: u32,
}

impl<Q> Slots<Q> {
    pub(super) fn new() -> Self {
        Self { likely_free: LikelyFree::new(), first: Step::empty(), steps: OnceLock::new() }
    }

    /// Returns step and offset of a slot: 0..4, 4..8, 8..12, 12..16, 16..24, 24..32, …
    #[inline]
    fn locate(index: u32) -> (usize, usize) {
        let biased = index + BIAS;
        let shift = biased.ilog2() - 2;
        let step = (biased >> shift) + 4 * shift + 4 - 4 * BIAS.ilog2();
        (step as usize, (biased & ((1 << shift) - 1)) as usize)
    }

    #[inline]
    pub(super) fn find(&self, index: u32) -> Option<&Slot<Q>> {
        if index < FIRST {
            return self.first(index);
        }
        let (step, offset) = Self::locate(index);
        self.steps.get()?.get(step - 1)?.get(offset)
    }

    #[inline]
    pub(super) fn first(&self, index: u32) -> Option<&Slot<Q>> {
        if index < FIRST { self.first.get(index as usize) } else { None }
    }

    #[inline]
    pub(super) fn slot(&self, index: u32) -> &Slot<Q> {
        match self.find(index) {
            Some(slot) => slot,
            None => unreachable!("claimed slots exist and never move"),
        }
    }

    #[inline]
    pub(super) fn claim_next(&self) -> Option<&Slot<Q>> {
        self.likely_free.claim(1)
    }

    /// Claims a free slot for `parts` work requests; `None` if all [`MAX_SLOTS`] are taken.
    /// Consecutive operations use the same slot.
    #[inline]
    pub(super) fn claim(
        &self,
        cursor: &mut Cursor,
        parts: u32,
        make: impl Fn(u32) -> Slot<Q>,
    ) -> Option<&Slot<Q>> {
        match self.likely_free.claim(parts) {
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
            if let Some(slot) = self.likely_free.claim_at(self.slot(index), parts) {
                cursor.next = index + 1;
                // The search has passed more than half of them: grow, to shorten later ones.
                if step > cursor.len / 2 {
                    self.grow(cursor, make);
                }
                return Some(slot);
            }
        }
        cursor.next = cursor.len;
        self.grow(cursor, make)?;
        self.likely_free.claim_at(self.slot(cursor.next), parts)
    }

    fn step(&self, step: usize) -> Option<&Step<Q>> {
        let Some(step) = step.checked_sub(1) else { return Some(&self.first) };
        let steps = self.steps.get_or_init(Steps::new);
        if step >= NEAR {
            steps.far.get_or_init(|| Box::new([const { Step::empty() }; FAR]));
        }
        steps.get(step)
    }

    fn grow(&self, cursor: &mut Cursor, make: impl Fn(u32) -> Slot<Q>) -> Option<()> {
        let (step, _) = Self::locate(cursor.len);
        let len = cursor.len + Step::<Q>::len(step) as u32;
        self.step(step)?.set((cursor.len..len).map(make).collect());
        cursor.len = len;
        // Links all slots into a ring.
        let mut before = self.slot(cursor.len - 1);
        for (_, slot) in self.iter() {
            before.link(slot);
            before = slot;
        }
        Some(())
    }

    #[inline]
    pub(super) fn remember_free(&self, slot: &Slot<Q>) {
        self.likely_free.set(slot);
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (u32, &Slot<Q>)> {
        (0..MAX_SLOTS).map_while(|index| self.find(index).map(|slot| (index, slot)))
    }
}

struct LikelyFree<Q>(AtomicPtr<Slot<Q>>);

impl<Q> LikelyFree<Q> {
    fn new() -> Self {
        Self(AtomicPtr::new(ptr::null_mut()))
    }

    #[inline]
    fn claim(&self, parts: u32) -> Option<&Slot<Q>> {
        // SAFETY: C1: a slot of the table that this is part of; slots never move.
        let slot = unsafe { self.0.load(Ordering::Relaxed).as_ref() }?;
        self.claim_at(slot, parts)
    }

    #[inline]
    fn claim_at<'a>(&self, slot: &'a Slot<Q>, parts: u32) -> Option<&'a Slot<Q>> {
        if !slot.claim(parts) {
            return None;
        }
        self.0.store(slot.next(), Ordering::Relaxed);
        Some(slot)
    }

    #[inline]
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
        for index in 0..if cfg!(miri) { 512 } else { 4096 } {
            assert_eq!(Slots::<()>::locate(index), expected, "slot {index}");
            expected.1 += 1;
            if expected.1 == Step::<()>::len(expected.0) {
                expected = (expected.0 + 1, 0);
            }
        }
        let last = (STEPS - 1, Step::<()>::len(STEPS - 1) - 1);
        assert_eq!(Slots::<()>::locate(MAX_SLOTS - 1), last);
    }

    fn claim<'a>(slots: &'a Slots<()>, cursor: &mut Cursor) -> &'a Slot<()> {
        slots
            .likely_free
            .claim(1)
            .or_else(|| slots.search(cursor, 1, |index| Slot::new(WrId(index.into()), false)))
            .unwrap()
    }

    #[test]
    fn free_slots_follow_each_other_in_a_ring() {
        let (slots, mut cursor) = (Slots::<()>::new(), Cursor::default());
        assert!(
            slots.find(0).is_none()
                && slots.likely_free.claim(1).is_none()
                && slots.iter().count() == 0
        );
        let first = claim(&slots, &mut cursor);
        let others: Vec<_> =
            (1..FIRST).map(|_| slots.likely_free.claim(1).unwrap().id().0 as u32).collect();
        assert_eq!((first.id(), others), (WrId(0), (1..FIRST).collect()));
        assert!(slots.likely_free.claim(1).is_none(), "all are taken");
        first.free();
        assert!(
            std::ptr::eq(slots.likely_free.claim(1).unwrap(), slots.slot(0)),
            "the first comes after the last"
        );
        assert_eq!(claim(&slots, &mut cursor).id(), WrId(FIRST.into()));
        let others: Vec<_> =
            (1..FIRST).map(|_| slots.likely_free.claim(1).unwrap().id().0 as u32).collect();
        assert_eq!((others, cursor.len), ((FIRST + 1..2 * FIRST).collect(), 2 * FIRST));
        assert!(
            slots
                .iter()
                .map(|(index, slot)| (index, slot.id().0 as u32))
                .eq((0..2 * FIRST).map(|at| (at, at)))
        );
        assert!(slots.find(2 * FIRST).is_none());
    }

    // Shows C4.
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

    // Shows C1.
    #[test]
    fn reused_slot_has_another_generation() {
        let (slots, mut cursor) = (Slots::<()>::new(), Cursor::default());
        let slot = claim(&slots, &mut cursor);
        let first = slot.id();
        assert!(slot.is_current(first));
        slot.free();
        assert!(!slot.is_current(first));
        slots.remember_free(slot);
        let again = claim(&slots, &mut cursor);
        assert!(std::ptr::eq(slot, again));
        assert!(again.is_current(again.id()) && !again.is_current(first));
    }

    // Shows C1.
    #[test]
    fn batch_has_an_id_for_each_work_request_and_generations_stay_distinct() {
        let (slots, mut cursor) = (Slots::<()>::new(), Cursor::default());
        let mut before = Vec::new();
        for parts in [5, 1, 32, 2, crate::engine::slot::MAX_PARTS, 3] {
            let slot = slots
                .likely_free
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
            slots.remember_free(slot);
            before.extend(ids);
        }
    }
}

//! A FIFO of reusable slots.

use std::{fmt, mem};

/// A FIFO whose slots keep their contents and allocations for reuse.
///
/// It starts empty and grows by a quarter, at least by one slot: an idle queue pair is small. While
/// at most one slot is in use, it is the same one, which is likely in the cache.
pub(crate) struct Ring<T> {
    slots: Box<[T]>,
    head: u32,
    len: u32,
}

impl<T: Default> Ring<T> {
    pub(crate) fn new() -> Self {
        Self { slots: Box::default(), head: 0, len: 0 }
    }

    pub(crate) const fn len(&self) -> usize {
        self.len as usize
    }

    pub(crate) const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Appends a slot with the contents of an earlier use: write every field.
    #[inline]
    pub(crate) fn push_slot(&mut self) -> &mut T {
        if self.len() == self.slots.len() {
            self.grow();
        }
        let at = self.at(self.len());
        self.len += 1;
        &mut self.slots[at]
    }

    #[cold]
    fn grow(&mut self) {
        self.slots.rotate_left(self.head as usize);
        self.head = 0;
        let mut slots = mem::take(&mut self.slots).into_vec();
        let more = (slots.len() / 4).max(1);
        slots.reserve_exact(more);
        slots.resize_with(slots.len() + more, T::default);
        self.slots = slots.into_boxed_slice();
    }

    /// Returns the slot of element `index`, at most the number of slots.
    #[inline]
    const fn at(&self, index: usize) -> usize {
        let at = self.head as usize + index;
        if at < self.slots.len() { at } else { at - self.slots.len() }
    }

    /// Returns element `index` from the oldest.
    #[inline]
    pub(crate) fn get(&self, index: usize) -> Option<&T> {
        (index < self.len()).then(|| &self.slots[self.at(index)])
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, index: usize) -> Option<&mut T> {
        if index < self.len() {
            let at = self.at(index);
            Some(&mut self.slots[at])
        } else {
            None
        }
    }

    #[inline]
    pub(crate) fn front(&self) -> Option<&T> {
        if self.len == 0 { None } else { self.slots.get(self.head as usize) }
    }

    #[inline]
    pub(crate) fn front_mut(&mut self) -> Option<&mut T> {
        if self.len == 0 { None } else { self.slots.get_mut(self.head as usize) }
    }

    /// Removes the oldest element.
    #[inline]
    pub(crate) fn pop(&mut self) {
        if self.len > 1 {
            self.head = self.at(1) as u32;
            self.len -= 1;
        } else {
            (self.head, self.len) = (0, 0);
        }
    }

    pub(crate) fn retain(&mut self, mut keep: impl FnMut(&T) -> bool) {
        let mut kept = 0;
        for index in 0..self.len() {
            let at = self.at(index);
            if keep(&self.slots[at]) {
                let to = self.at(kept);
                self.slots.swap(at, to);
                kept += 1;
            }
        }
        self.len = kept as u32;
    }

    pub(crate) fn clear(&mut self) {
        self.len = 0;
    }
}

impl<T> fmt::Debug for Ring<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ring").field("len", &self.len).field("slots", &self.slots.len()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retain_keeps_order_across_the_wrap() {
        let mut ring = Ring::<u32>::new();
        for value in 0..6 {
            *ring.push_slot() = value;
        }
        (0..5).for_each(|_| ring.pop());
        for value in 6..12 {
            *ring.push_slot() = value;
        }
        ring.retain(|value| value % 3 != 0);
        let left: Vec<_> = (0..ring.len()).filter_map(|index| ring.get(index).copied()).collect();
        assert_eq!(left, [5, 7, 8, 10, 11]);
    }

    #[test]
    fn order_survives_growth_and_wrap() {
        let mut ring = Ring::<u32>::new();
        let (mut pushed, mut popped) = (0, 0);
        for round in 0..50 {
            for _ in 0..round % 7 + 1 {
                *ring.push_slot() = pushed;
                pushed += 1;
            }
            for _ in 0..round % 5 {
                if let Some(front) = ring.front() {
                    assert_eq!(*front, popped);
                    popped += 1;
                    ring.pop();
                }
            }
        }
        assert_eq!(ring.len() as u32, pushed - popped);
        assert_eq!(ring.get(3), Some(&(popped + 3)));
    }
}

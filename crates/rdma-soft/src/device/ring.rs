//! Work queue: first in, first out, whose slots keep what they allocated.

use std::fmt;

/// Queue of work requests.
///
/// It starts without memory and doubles when full, so an idle queue pair is small; a slot is reused as
/// it was left, so that scatter/gather lists and inline bytes are allocated once, not per request.
pub(crate) struct Ring<T> {
    slots: Vec<T>,
    head: usize,
    len: usize,
}

impl<T: Default> Ring<T> {
    pub(crate) const fn new() -> Self {
        Self { slots: Vec::new(), head: 0, len: 0 }
    }

    pub(crate) const fn len(&self) -> usize {
        self.len
    }

    pub(crate) const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// A slot at the end, with the contents of a former use: write every field.
    #[inline]
    pub(crate) fn push_slot(&mut self) -> &mut T {
        if self.len == self.slots.len() {
            self.grow();
        }
        let at = (self.head + self.len) & (self.slots.len() - 1);
        self.len += 1;
        &mut self.slots[at]
    }

    #[cold]
    fn grow(&mut self) {
        // The mask in `at` needs a power of two.
        self.slots.rotate_left(self.head);
        self.head = 0;
        let size = (self.slots.len() * 2).max(4);
        self.slots.resize_with(size, T::default);
    }

    /// Element `index`, counted from the oldest.
    #[inline]
    pub(crate) fn get(&self, index: usize) -> Option<&T> {
        (index < self.len).then(|| &self.slots[(self.head + index) & (self.slots.len() - 1)])
    }

    /// As [`get`](Self::get), to change it.
    #[inline]
    pub(crate) fn get_mut(&mut self, index: usize) -> Option<&mut T> {
        if index < self.len {
            let at = (self.head + index) & (self.slots.len() - 1);
            Some(&mut self.slots[at])
        } else {
            None
        }
    }

    #[inline]
    pub(crate) fn front(&self) -> Option<&T> {
        self.get(0)
    }

    #[inline]
    pub(crate) fn front_mut(&mut self) -> Option<&mut T> {
        self.get_mut(0)
    }

    /// Forgets the oldest element; its slot is kept for reuse.
    #[inline]
    pub(crate) fn pop(&mut self) {
        if self.len > 0 {
            self.head = (self.head + 1) & (self.slots.len() - 1);
            self.len -= 1;
        }
    }

    /// Forgets the elements that `keep` refuses; the others stay in order.
    pub(crate) fn retain(&mut self, mut keep: impl FnMut(&T) -> bool) {
        let mut kept = 0;
        for index in 0..self.len {
            let mask = self.slots.len() - 1;
            let at = (self.head + index) & mask;
            if keep(&self.slots[at]) {
                self.slots.swap(at, (self.head + kept) & mask);
                kept += 1;
            }
        }
        self.len = kept;
    }

    /// Forgets all.
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

//! Numbers of protection domains.

use std::collections::VecDeque;

pub(super) const MAX_PDS: u32 = 1 << 24;
// Owners of windows use numbers from 2^31, see `keys`.
const _: () = assert!(MAX_PDS < 1 << 31);

#[derive(Debug)]
pub(crate) struct PdNumbers {
    limit: u32,
    highest: u32,
    /// Oldest first.
    returned: VecDeque<u32>,
}

/// Minimum number of released numbers before one is reused, while unused ones are left.
const QUARANTINE: usize = 256;

impl PdNumbers {
    pub(super) const fn new(limit: u32) -> Self {
        Self { limit, highest: 0, returned: VecDeque::new() }
    }

    pub(crate) fn take(&mut self) -> Option<u32> {
        if self.returned.len() < QUARANTINE && self.highest < self.limit {
            self.highest += 1;
            return Some(self.highest);
        }
        self.returned.pop_front()
    }

    pub(crate) fn release(&mut self, number: u32) {
        self.returned.push_back(number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pd_numbers_are_reused_and_never_shared() {
        let limit = if cfg!(miri) { 20 } else { 1000 };
        let mut numbers = PdNumbers::new(limit);
        let mut live: VecDeque<u32> = (0..limit).map(|_| numbers.take().unwrap()).collect();
        assert_eq!(
            live.iter().copied().collect::<std::collections::BTreeSet<_>>().len(),
            limit as usize
        );
        assert_eq!(numbers.take(), None, "the limit is reached");
        for _ in 0..10 * limit {
            let gone = live.pop_front().unwrap();
            numbers.release(gone);
            let next = numbers.take().unwrap();
            assert!((1..=limit).contains(&next) && !live.contains(&next), "{next}");
            live.push_back(next);
        }
    }

    #[test]
    fn released_pd_number_is_quarantined_before_reuse() {
        let mut numbers = PdNumbers::new(MAX_PDS);
        let first = numbers.take().unwrap();
        numbers.release(first);
        let until = (1..).find(|_| {
            let next = numbers.take().unwrap();
            numbers.release(next);
            next == first
        });
        assert_eq!(until, Some(QUARANTINE));
    }
}

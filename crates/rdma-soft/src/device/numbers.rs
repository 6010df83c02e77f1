//! Numbers of queue pairs: peers cannot predict them, and none comes again before all others were used.
//!
//! A number that came again soon would be refused: for some time after the end of a connection its peer takes a request from
//! the same number for one that has forgotten the connection (IBTA 12.9.8.3.1). Late packets would find it, too.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::atomic::{AtomicU32, Ordering};

use rdma_provider::types::Qpn;

/// Half of the 24 bits of a number.
const HALF: u32 = 12;
const MASK: u32 = (1 << HALF) - 1;
const ROUNDS: u8 = 4;

/// Counts in an order of its own: a permutation of all 24-bit numbers, chosen by a key.
#[derive(Debug)]
pub(super) struct Numbers {
    key: u64,
    count: AtomicU32,
}

impl Numbers {
    /// Whoever does not know `key` cannot tell the order.
    pub(super) const fn new(key: u64) -> Self {
        Self { key, count: AtomicU32::new(0) }
    }

    /// The next number; any 24 bits, those with a meaning of their own among them.
    pub(super) fn next(&self) -> Qpn {
        let count = self.count.fetch_add(1, Ordering::Relaxed) & Qpn::MAX.0;
        // A Feistel network, which is a permutation whatever its function.
        let (left, right) =
            (0..ROUNDS).fold((count >> HALF, count & MASK), |(left, right), round| {
                let mut hasher = DefaultHasher::new();
                (self.key, round, right).hash(&mut hasher);
                (right, left ^ (hasher.finish() as u32 & MASK))
            });
        Qpn(left << HALF | right)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn no_number_comes_again_soon() {
        // Of as many drawn at random some hundred would come again.
        let numbers = Numbers::new(7);
        let seen: HashSet<_> = (0..1 << 16).map(|_| numbers.next()).collect();
        assert_eq!(seen.len(), 1 << 16);
        // Nor does the count leave the 24 bits.
        numbers.count.store(u32::MAX, Ordering::Relaxed);
        let (last, first) = (numbers.next(), numbers.next());
        assert_eq!(first, Numbers::new(7).next());
        assert!(last.0 <= Qpn::MAX.0 && !seen.contains(&last));
    }

    #[test]
    fn order_is_that_of_the_key() {
        let order = |key| {
            let numbers = Numbers::new(key);
            std::array::from_fn::<_, 8, _>(|_| numbers.next())
        };
        assert_eq!(order(1), order(1));
        assert_ne!(order(1), order(2));
        assert!(!order(1).is_sorted());
    }
}

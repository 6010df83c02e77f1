//! Queue pair numbers that peers cannot predict and that repeat only after all others were used.
//!
//! A peer refuses a connection from a recently used number, which it takes for a lost connection
//! (IBTA 12.9.8.3.1). Late packets would also reach the new queue pair.

use std::hash::{Hash, Hasher};
use std::sync::atomic::{AtomicU32, Ordering};

use rdma_provider::types::Qpn;
use siphasher::sip::SipHasher13;

const HALF: u32 = 12;
const MASK: u32 = (1 << HALF) - 1;
const ROUNDS: u8 = 4;

/// A counter mapped through a keyed permutation of the 24-bit numbers.
#[derive(Debug)]
pub(super) struct Numbers {
    key: u64,
    count: AtomicU32,
}

impl Numbers {
    pub(super) const fn new(key: u64) -> Self {
        Self { key, count: AtomicU32::new(0) }
    }

    /// Returns the next number; it may be a reserved one.
    pub(super) fn next(&self) -> Qpn {
        let count = self.count.fetch_add(1, Ordering::Relaxed) & Qpn::MAX.0;
        // A Feistel network is a permutation for any round function.
        let (left, right) =
            (0..ROUNDS).fold((count >> HALF, count & MASK), |(left, right), round| {
                let mut hasher = SipHasher13::new_with_keys(self.key, 0);
                (round, right).hash(&mut hasher);
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
    fn first_65536_numbers_are_distinct() {
        // Random numbers would contain more than a hundred duplicates.
        let numbers = Numbers::new(7);
        let seen: HashSet<_> = (0..1 << 16).map(|_| numbers.next()).collect();
        assert_eq!(seen.len(), 1 << 16);
        // The count wraps at 24 bits.
        numbers.count.store(u32::MAX, Ordering::Relaxed);
        let (last, first) = (numbers.next(), numbers.next());
        assert_eq!(first, Numbers::new(7).next());
        assert!(last.0 <= Qpn::MAX.0 && !seen.contains(&last));
    }

    #[test]
    fn key_determines_order_of_numbers() {
        let order = |key| {
            let numbers = Numbers::new(key);
            std::array::from_fn::<_, 8, _>(|_| numbers.next())
        };
        assert_eq!(order(1), order(1));
        assert_ne!(order(1), order(2));
        assert!(!order(1).is_sorted());
    }
}

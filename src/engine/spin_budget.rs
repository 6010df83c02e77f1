//! How long a hybrid wait spins: a budget of rounds that follows what spinning found. No clock, no lock.

use std::sync::atomic::{AtomicU32, Ordering};

/// Rounds of the longest spin. A round is one turn of the runtime's scheduler and one poll, some 0.2 µs when
/// there is nothing else to do, so that this is about the 50 µs that arming, sleeping and waking can cost.
const MOST: u32 = 256;

/// Rounds that are always tried: a completion may have come while the waiting task was on its way to park.
const LEAST: u32 = 2;

/// Every so many parks the longest spin is tried, to find out whether it pays by now.
const PROBE_EVERY: u32 = 32;

/// Adaptive budget, shared by all who wait on a completion queue.
#[derive(Debug)]
pub(super) struct SpinBudget {
    rounds: AtomicU32,
    parks: AtomicU32,
}

impl SpinBudget {
    pub(super) const fn new() -> Self {
        Self { rounds: AtomicU32::new(MOST), parks: AtomicU32::new(0) }
    }

    /// True if one who has spun `rounds` should go on.
    pub(super) fn allows(&self, rounds: u32) -> bool {
        let probing = self.parks.load(Ordering::Relaxed) % PROBE_EVERY == PROBE_EVERY - 1;
        rounds < if probing { MOST } else { self.rounds.load(Ordering::Relaxed) }
    }

    /// Spinning found the completion after `rounds`: allow twice that, approached by quarters.
    ///
    /// Racing updates may lose one another; it is an estimate.
    pub(super) fn found(&self, rounds: u32) {
        let (now, wanted) = (self.rounds.load(Ordering::Relaxed), (2 * rounds).clamp(LEAST, MOST));
        let next = if wanted > now { wanted } else { now - (now - wanted) / 4 };
        self.rounds.store(next, Ordering::Relaxed);
        self.parks.store(0, Ordering::Relaxed);
    }

    /// Spinning was in vain: allow half.
    pub(super) fn missed(&self) {
        let now = self.rounds.load(Ordering::Relaxed);
        self.rounds.store((now / 2).max(LEAST), Ordering::Relaxed);
        self.parks.fetch_add(1, Ordering::Relaxed);
    }

    /// Rounds allowed now.
    pub(super) fn rounds(&self) -> u32 {
        self.rounds.load(Ordering::Relaxed)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn spinning_in_vain_soon_costs_little() {
        let budget = SpinBudget::new();
        (0..10).for_each(|_| budget.missed());
        assert_eq!(budget.rounds(), LEAST);
        assert!(!budget.allows(LEAST));
    }

    #[test]
    fn what_a_probe_finds_is_allowed_from_then_on() {
        let budget = SpinBudget::new();
        (0..PROBE_EVERY - 1).for_each(|_| budget.missed());
        assert!(budget.allows(MOST - 1), "a probe may spin long");
        budget.found(40);
        assert!(budget.allows(79) && !budget.allows(80));
    }

    #[test]
    fn quick_completions_shorten_the_budget() {
        let budget = SpinBudget::new();
        (0..40).for_each(|_| budget.found(1));
        assert!(budget.rounds() <= 6, "{}", budget.rounds());
    }
}

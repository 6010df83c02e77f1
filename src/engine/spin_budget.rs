//! The number of rounds that a hybrid wait spins, adapted to earlier waits.

use std::sync::atomic::{AtomicU32, Ordering};

/// A round is one pass of the scheduler and one poll, about 0.2 µs on an idle runtime, so this is
/// about the 50 µs that arming, sleeping and waking can cost.
const MAX_ROUNDS: u32 = 256;

/// A completion may arrive while the task is about to park.
const MIN_ROUNDS: u32 = 2;

/// One in so many parks tries the maximum, to detect that spinning pays again.
const PROBE_EVERY: u32 = 32;

#[derive(Debug)]
pub(super) struct SpinBudget {
    rounds: AtomicU32,
    parks: AtomicU32,
}

impl SpinBudget {
    pub(super) const fn new() -> Self {
        Self { rounds: AtomicU32::new(MAX_ROUNDS), parks: AtomicU32::new(0) }
    }

    pub(super) fn allows(&self, rounds: u32) -> bool {
        let probing = self.parks.load(Ordering::Relaxed) % PROBE_EVERY == PROBE_EVERY - 1;
        rounds < if probing { MAX_ROUNDS } else { self.rounds.load(Ordering::Relaxed) }
    }

    /// Spinning found the completion after `rounds`. The budget approaches twice that: up at once,
    /// down by quarters. Racing updates may be lost; the budget is an estimate.
    pub(super) fn found(&self, rounds: u32) {
        let (now, wanted) =
            (self.rounds.load(Ordering::Relaxed), (2 * rounds).clamp(MIN_ROUNDS, MAX_ROUNDS));
        let next = if wanted > now { wanted } else { now - (now - wanted) / 4 };
        self.rounds.store(next, Ordering::Relaxed);
        self.parks.store(0, Ordering::Relaxed);
    }

    /// Spinning found nothing.
    pub(super) fn missed(&self) {
        let now = self.rounds.load(Ordering::Relaxed);
        self.rounds.store((now / 2).max(MIN_ROUNDS), Ordering::Relaxed);
        self.parks.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn rounds(&self) -> u32 {
        self.rounds.load(Ordering::Relaxed)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn missed_spins_lower_the_budget_to_its_minimum() {
        let budget = SpinBudget::new();
        (0..10).for_each(|_| budget.missed());
        assert_eq!(budget.rounds(), MIN_ROUNDS);
        assert!(!budget.allows(MIN_ROUNDS));
    }

    #[test]
    fn probe_that_finds_a_completion_raises_the_budget() {
        let budget = SpinBudget::new();
        (0..PROBE_EVERY - 1).for_each(|_| budget.missed());
        assert!(budget.allows(MAX_ROUNDS - 1), "a probe may spin long");
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

//! How fast packets leave that nobody acknowledges, those of UC and UD: nothing that comes back would say when the receiver's
//! socket is full.

use std::sync::atomic::{AtomicU64, Ordering};

/// Nanoseconds that `bytes` take: at 400 MB/s. A receiver that has a processor for itself takes in several times as much; one
/// that has to wait for it has its socket's buffer, and then this.
const fn takes(bytes: usize) -> u64 {
    bytes as u64 * 5 / 2
}

/// By how much packets may be ahead.
const AHEAD: u64 = takes(64 << 10);
/// What a small packet counts as: it takes its receiver as long, and room besides its payload.
const SMALL: usize = 1 << 10;

/// Of one device, whoever is sent to: as the rate of a port.
#[derive(Debug, Default)]
pub(crate) struct Pace {
    /// Until when what was sent takes, in the network's nanoseconds.
    taken: AtomicU64,
    /// How many times longer packets take, so that a test need not be as fast as they are.
    #[cfg(test)]
    slower: AtomicU64,
}

impl Pace {
    /// True if packets have to wait.
    pub(crate) fn is_spent(&self, now: u64) -> bool {
        self.taken.load(Ordering::Relaxed) > now + AHEAD
    }

    /// When packets go on that had to wait: half of what may be ahead has left then, so that they go on in bursts. A queue pair that
    /// was passed over, as others had sent all that may be ahead, comes before those: so all take turns, in the order in which
    /// they came to wait.
    pub(crate) fn resumes(&self, passed_over: bool) -> u64 {
        self.taken.load(Ordering::Relaxed).saturating_sub(AHEAD / 2 + u64::from(passed_over))
    }

    /// A packet of `bytes` was sent.
    pub(crate) fn spend(&self, now: u64, bytes: usize) {
        // Another thread's count may be lost, which makes the rate less even and nothing wrong.
        let taken = self.taken.load(Ordering::Relaxed).max(now);
        let takes = takes(bytes.max(SMALL));
        #[cfg(test)]
        let takes = takes * self.slower.load(Ordering::Relaxed).max(1);
        self.taken.store(taken + takes, Ordering::Relaxed);
    }

    /// Has packets take so many times longer.
    #[cfg(test)]
    pub(crate) fn slow_down(&self, times: u64) {
        self.slower.store(times, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bursts_are_bounded_and_the_rate_is_kept() {
        let (pace, mut now, mut sent) = (Pace::default(), 7_000_000, 0_usize);
        let begin = now;
        let mut bursts = Vec::new();
        while sent < 10 << 20 {
            let mut burst = 0;
            while !pace.is_spent(now) {
                pace.spend(now, 4096);
                burst += 4096;
                // Sending takes time, too.
                now += 1_000;
            }
            bursts.push(burst);
            sent += burst;
            now = now.max(pace.resumes(false));
        }
        assert!((65536..=73728).contains(&bursts[0]), "{bursts:?}");
        assert!(bursts[1..].iter().all(|burst| (32768..=40960).contains(burst)), "{bursts:?}");
        let rate = sent as f64 / (now - begin) as f64;
        assert!((0.39..0.41).contains(&rate), "{rate} bytes per ns");
        // An hour of silence is not caught up.
        now += 3_600_000_000_000;
        let mut burst = 0;
        while !pace.is_spent(now) {
            pace.spend(now, 0);
            burst += 1;
        }
        assert_eq!(burst, 65);
    }

    #[test]
    fn queue_pairs_take_turns_whatever_they_have_to_send() {
        // What is left of each: the first two have work without end.
        let mut left = [usize::MAX, usize::MAX, 3 * 4096, 100 * 4096];
        let (pace, mut now, mut sequence) = (Pace::default(), 7_000_000, 0_u64..);
        // As the scheduler does it: by time, then in the order of entry.
        let mut waiting: Vec<_> = (0..left.len()).map(|who| (now, sequence.next(), who)).collect();
        let mut bursts = [0; 4];
        for _ in 0..200 {
            waiting.sort_unstable();
            let (at, _, who) = waiting.remove(0);
            now = now.max(at);
            let before = left[who];
            while left[who] > 0 && !pace.is_spent(now) {
                pace.spend(now, 4096);
                left[who] -= 4096;
            }
            bursts[who] += usize::from(left[who] < before);
            if left[who] > 0 {
                waiting.push((pace.resumes(left[who] == before).max(now), sequence.next(), who));
            }
        }
        // The short one is done with its first, and the others have had the same number of them.
        assert_eq!((left[2], bursts[2]), (0, 1), "{bursts:?}");
        assert!(
            bursts[0] > 9 && bursts[0].abs_diff(bursts[1]) <= 1 && left[3] == 0,
            "{bursts:?}, {left:?}"
        );
    }
}

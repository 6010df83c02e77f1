//! Rate limit for UC and UD, whose packets are not acknowledged: no response reveals a full socket.

use std::sync::atomic::{AtomicU64, Ordering};

/// Returns nanoseconds at 400 MB/s. A running receiver is several times faster; a waiting one has
/// its socket's buffer.
const fn duration(bytes: usize) -> u64 {
    bytes as u64 * 5 / 2
}

/// Maximum lead of the sender, in nanoseconds.
const BURST: u64 = duration(64 << 10);
/// Minimum charge: small packets take as long to receive, and more buffer than their payload.
const MIN_CHARGE: usize = 1 << 10;

/// The rate limit of a device, for all destinations together.
#[derive(Debug, Default)]
pub(crate) struct Pace {
    /// End of the packets sent, in the network's nanoseconds.
    busy_until: AtomicU64,
    /// Slowdown for tests.
    #[cfg(test)]
    slowdown: AtomicU64,
}

impl Pace {
    pub(crate) fn is_spent(&self, now: u64) -> bool {
        self.busy_until.load(Ordering::Relaxed) > now + BURST
    }

    /// Returns when waiting packets continue: after half of [`BURST`], so that they leave in
    /// bursts. A queue pair that found the burst used up precedes those that used it, so queue
    /// pairs alternate.
    pub(crate) fn resumes(&self, passed_over: bool) -> u64 {
        self.busy_until.load(Ordering::Relaxed).saturating_sub(BURST / 2 + u64::from(passed_over))
    }

    pub(crate) fn spend(&self, now: u64, bytes: usize) {
        // A lost concurrent charge makes the rate less even and breaks nothing.
        let busy_until = self.busy_until.load(Ordering::Relaxed).max(now);
        let duration = duration(bytes.max(MIN_CHARGE));
        #[cfg(test)]
        let duration = duration * self.slowdown.load(Ordering::Relaxed).max(1);
        self.busy_until.store(busy_until + duration, Ordering::Relaxed);
    }

    #[cfg(test)]
    pub(crate) fn slow_down(&self, times: u64) {
        self.slowdown.store(times, Ordering::Relaxed);
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
                // Sending takes time.
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
        // Idle time earns no credit.
        now += 3_600_000_000_000;
        let mut burst = 0;
        while !pace.is_spent(now) {
            pace.spend(now, 0);
            burst += 1;
        }
        assert_eq!(burst, 65);
    }

    #[test]
    fn queue_pairs_send_bursts_in_round_robin_order() {
        // The first two never finish.
        let mut left = [usize::MAX, usize::MAX, 3 * 4096, 100 * 4096];
        let (pace, mut now, mut sequence) = (Pace::default(), 7_000_000, 0_u64..);
        // The scheduler's order.
        let mut waiting: Vec<_> =
            (0..left.len()).map(|pair| (now, sequence.next(), pair)).collect();
        let mut bursts = [0; 4];
        for _ in 0..200 {
            waiting.sort_unstable();
            let (at, _, pair) = waiting.remove(0);
            now = now.max(at);
            let before = left[pair];
            while left[pair] > 0 && !pace.is_spent(now) {
                pace.spend(now, 4096);
                left[pair] -= 4096;
            }
            bursts[pair] += usize::from(left[pair] < before);
            if left[pair] > 0 {
                waiting.push((pace.resumes(left[pair] == before).max(now), sequence.next(), pair));
            }
        }
        // The short transfer takes one burst; the long ones alternate.
        assert_eq!((left[2], bursts[2]), (0, 1), "{bursts:?}");
        assert!(
            bursts[0] > 9 && bursts[0].abs_diff(bursts[1]) <= 1 && left[3] == 0,
            "{bursts:?}, {left:?}"
        );
    }
}

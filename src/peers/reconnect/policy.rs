use std::time::Duration;

use crate::connection::EstablishError;

/// The delays, timeouts and the deadline of a [`Reconnect`](super::Reconnect).
///
/// The delay before an attempt doubles with each failure, from [`first_delay`](Self::first_delay)
/// to [`greatest_delay`](Self::greatest_delay). Its second half is random, so that the clients of a
/// restarted server do not connect at the same time. A connection that has lasted for the greatest
/// delay resets it.
#[derive(Debug, Clone)]
#[must_use]
pub struct ReconnectPolicy {
    pub(super) first_delay: Duration,
    pub(super) greatest_delay: Duration,
    pub(super) attempt_timeout: Duration,
    pub(super) deadline: Option<Duration>,
    pub(super) retry_when: fn(&EstablishError) -> bool,
}

/// A delay of zero would let a refused client use up a processor.
const LEAST_DELAY: Duration = Duration::from_millis(1);

impl Default for ReconnectPolicy {
    fn default() -> Self {
        Self {
            first_delay: Duration::from_millis(50),
            greatest_delay: Duration::from_secs(5),
            attempt_timeout: Duration::from_secs(10),
            deadline: None,
            retry_when: EstablishError::is_temporary,
        }
    }
}

impl ReconnectPolicy {
    /// Sets the delay after the first failure, and after an event of the device; default 50 ms, at
    /// least 1 ms.
    pub fn first_delay(mut self, delay: Duration) -> Self {
        self.first_delay = delay;
        self
    }

    /// Sets the greatest delay; default 5 s. It takes precedence over a longer first delay.
    pub fn greatest_delay(mut self, delay: Duration) -> Self {
        self.greatest_delay = delay;
        self
    }

    /// Sets how long one attempt may take, including name lookup and all addresses; default 10 s.
    pub fn attempt_timeout(mut self, timeout: Duration) -> Self {
        self.attempt_timeout = timeout;
        self
    }

    /// Sets how long attempts continue, from the start or from the end of the last connection;
    /// default `None`, without limit.
    pub fn deadline(mut self, deadline: Option<Duration>) -> Self {
        self.deadline = deadline;
        self
    }

    /// Sets which errors lead to another attempt; default [`EstablishError::is_temporary`].
    /// Timeouts of attempts, removals of a device that can be reopened, and errors of opening it
    /// always do.
    ///
    /// ```
    /// use tokio_rdma::EstablishError;
    /// use tokio_rdma::peers::ReconnectPolicy;
    ///
    /// // This service rejects clients while it is busy.
    /// let policy = ReconnectPolicy::default().retry_when(|error| {
    ///     error.is_temporary() || matches!(error, EstablishError::Rejected { .. })
    /// });
    /// ```
    pub fn retry_when(mut self, retry: fn(&EstablishError) -> bool) -> Self {
        self.retry_when = retry;
        self
    }

    pub(super) fn delay(&self, step: u32, random: u64) -> Duration {
        let greatest = self.greatest_delay.max(LEAST_DELAY);
        let factor = 1_u32.checked_shl(step).unwrap_or(u32::MAX);
        let whole = self.first_delay.max(LEAST_DELAY).saturating_mul(factor).min(greatest);
        // 53 bits: the fraction is exact, and less than 1.
        let fraction = (random >> 11) as f64 / (1_u64 << 53) as f64;
        (whole / 2 + (whole / 2).mul_f64(fraction)).max(LEAST_DELAY)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delay_doubles_to_its_limit_and_its_second_half_is_random() {
        let policy = ReconnectPolicy::default()
            .first_delay(Duration::from_millis(100))
            .greatest_delay(Duration::from_millis(1500));
        for (step, whole) in [(0, 100), (1, 200), (3, 800), (4, 1500), (40, 1500), (u32::MAX, 1500)]
        {
            let (half, whole) = (Duration::from_millis(whole / 2), Duration::from_millis(whole));
            assert_eq!(policy.delay(step, 0), half, "step {step}");
            let last = policy.delay(step, u64::MAX);
            assert!(last > half + half.mul_f64(0.999) && last <= whole, "step {step}: {last:?}");
            let middle = policy.delay(step, 1 << 63);
            assert_eq!(middle, half + half / 2, "step {step}");
        }
        let short = policy.clone().greatest_delay(Duration::from_millis(10));
        assert!(short.delay(0, u64::MAX) <= Duration::from_millis(10));
        let none = policy.first_delay(Duration::ZERO).greatest_delay(Duration::ZERO);
        assert_eq!(none.delay(0, 0), LEAST_DELAY);
        let endless = ReconnectPolicy::default().first_delay(Duration::MAX);
        assert!(endless.greatest_delay(Duration::MAX).delay(9, u64::MAX) <= Duration::MAX);
    }
}

//! Detection of hanging connections. An operation may wait long behind others at its node, and is
//! not hanging as long as any of them completes.

use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::{Instant, timeout_at};

/// Maximum time without any completion; a dead peer is detected sooner, by keep-alives. On a
/// slow device, one operation among many may take longer.
pub(crate) const DEADLINE: Duration = Duration::from_secs(20);

/// Time of the last completion.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    last: Mutex<Option<Instant>>,
}

impl Progress {
    /// Waits for one of several operations. Returns `None` if none of them completes for
    /// [`DEADLINE`], counted from now at the earliest.
    pub(crate) async fn watch<F: Future + Unpin>(&self, operation: &mut F) -> Option<F::Output> {
        let mut since = Instant::now();
        loop {
            if let Ok(done) = timeout_at(since + DEADLINE, &mut *operation).await {
                *self.last.lock() = Some(Instant::now());
                return Some(done);
            }
            match *self.last.lock() {
                Some(last) if last > since => since = last,
                _ => return None,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use futures::future::join_all;
    use tokio::time::{advance, sleep};

    use super::*;

    /// Simulates a device that executes operations one by one, each in `each`, and stops after
    /// `limit`.
    async fn done(progress: &Progress, operations: u32, each: Duration, limit: u32) -> Vec<bool> {
        let all = (1..=operations).map(async |number| {
            let mut operation = std::pin::pin!(async {
                sleep(each * number).await;
                if number > limit {
                    std::future::pending::<()>().await;
                }
            });
            progress.watch(&mut operation).await.is_some()
        });
        join_all(all).await
    }

    #[tokio::test(start_paused = true)]
    async fn slow_device_may_exceed_the_deadline_in_total() {
        let (progress, begin) = (Progress::default(), Instant::now());
        let done = done(&progress, 200, DEADLINE / 2, 200).await;
        assert!(done.iter().all(|&done| done));
        // In virtual time: far longer than the deadline of a single operation.
        assert!(begin.elapsed() > DEADLINE * 90);
    }

    #[tokio::test(start_paused = true)]
    async fn no_progress_for_the_deadline_ends_all_waiters() {
        let progress = Progress::default();
        for limit in [0, 10] {
            let begin = Instant::now();
            let done = done(&progress, 100, DEADLINE / 2, limit).await;
            assert_eq!(done.iter().filter(|&&done| done).count(), limit as usize);
            assert_eq!(begin.elapsed(), DEADLINE / 2 * limit + DEADLINE, "{limit}");
        }
        // Idle time without operations does not count.
        advance(DEADLINE * 100).await;
        assert_eq!(self::done(&progress, 3, DEADLINE / 2, 3).await, [true; 3]);
    }
}

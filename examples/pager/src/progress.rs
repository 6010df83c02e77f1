//! Whether anything is done at all: what a node is asked for takes as long as there is before it in line, and none of it is hanging as
//! long as something else is done.

use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::{Instant, timeout_at};

/// Longest that nothing is done of all READs and WRITEs: retries find out before that a peer is gone. One of many on a slow device
/// may take longer.
pub(crate) const DEADLINE: Duration = Duration::from_secs(20);

/// When something was done last.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    last: Mutex<Option<Instant>>,
}

impl Progress {
    /// Waits for one of many. `None` if none of them is done for [`DEADLINE`], counted from now at the earliest.
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

    /// Operations of a device that does one after the other, each in `each`, up to `most`.
    async fn done(progress: &Progress, operations: u32, each: Duration, most: u32) -> Vec<bool> {
        let all = (1..=operations).map(async |number| {
            let mut operation = std::pin::pin!(async {
                sleep(each * number).await;
                if number > most {
                    std::future::pending::<()>().await;
                }
            });
            progress.watch(&mut operation).await.is_some()
        });
        join_all(all).await
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_device_may_take_as_long_as_it_likes_for_many() {
        let (progress, begin) = (Progress::default(), Instant::now());
        let done = done(&progress, 200, DEADLINE / 2, 200).await;
        assert!(done.iter().all(|&done| done));
        // Virtual time: far more than one may take that is alone.
        assert!(begin.elapsed() > DEADLINE * 90);
    }

    #[tokio::test(start_paused = true)]
    async fn nothing_done_for_the_deadline_ends_all_that_wait() {
        let progress = Progress::default();
        for most in [0, 10] {
            let begin = Instant::now();
            let done = done(&progress, 100, DEADLINE / 2, most).await;
            assert_eq!(done.iter().filter(|&&done| done).count(), most as usize);
            assert_eq!(begin.elapsed(), DEADLINE / 2 * most + DEADLINE, "{most}");
        }
        // An hour in which nothing was asked is no hour in which nothing was done.
        advance(DEADLINE * 100).await;
        assert_eq!(self::done(&progress, 3, DEADLINE / 2, 3).await, [true; 3]);
    }
}

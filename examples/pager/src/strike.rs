//! Removal of a failed node from the map. One request serves all pages that wait for it, and a
//! failed request is not repeated at once.

use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use futures::future::{BoxFuture, Shared};
use parking_lot::Mutex;
use tokio::time::Instant;

use crate::DirectoryError;

type Answer = Result<(), DirectoryError>;

#[derive(Debug, Clone, Default)]
pub(crate) struct Strike {
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
enum State {
    #[default]
    OnTheMap,
    /// Polled by all waiters.
    Asked(Shared<BoxFuture<'static, Answer>>),
    Failed(DirectoryError, Instant),
    Off,
}

impl Strike {
    /// Removes the node by the request that `ask` makes, once. For `pause` after a failure, all
    /// calls return that failure.
    pub(crate) async fn once<F>(&self, pause: Duration, ask: impl FnOnce() -> F) -> Answer
    where
        F: Future<Output = Answer> + Send + 'static,
    {
        let answer = {
            let mut state = self.state.lock();
            match &*state {
                State::Off => return Ok(()),
                State::Failed(error, when) if when.elapsed() < pause => return Err(error.clone()),
                State::Asked(answer) => answer.clone(),
                State::OnTheMap | State::Failed(..) => {
                    let (question, this) = (ask(), self.state.clone());
                    let asking = async move {
                        let answer = question.await;
                        let now = answer.clone().map_or_else(
                            |error| State::Failed(error, Instant::now()),
                            |()| State::Off,
                        );
                        // Drops the request outside the lock.
                        drop(std::mem::replace(&mut *this.lock(), now));
                        answer
                    };
                    let answer = asking.boxed().shared();
                    *state = State::Asked(answer.clone());
                    answer
                }
            }
        };
        answer.await
    }

    /// Returns whether the removal is unconfirmed: requested without a response, or failed
    /// recently.
    pub(crate) fn is_open(&self, pause: Duration) -> bool {
        match &*self.state.lock() {
            State::Asked(_) => true,
            State::Failed(_, when) => when.elapsed() < pause,
            State::OnTheMap | State::Off => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use futures::future::join_all;
    use tokio::time::{advance, sleep};

    use super::*;
    use crate::Conflict;

    const PAUSE: Duration = Duration::from_secs(5);

    /// A coordinator that answers after [`PAUSE`] and counts requests.
    #[derive(Default)]
    struct Stub {
        asked: Arc<AtomicUsize>,
    }

    impl Stub {
        async fn ask(&self, strike: &Strike, answer: Answer) -> Answer {
            let asked = self.asked.clone();
            let question = move || async move {
                asked.fetch_add(1, Ordering::Relaxed);
                sleep(PAUSE).await;
                answer
            };
            strike.once(PAUSE, question).await
        }

        fn asked(&self) -> usize {
            self.asked.load(Ordering::Relaxed)
        }
    }

    fn no() -> Answer {
        Err(DirectoryError::Conflict(Conflict::Lapsed))
    }

    fn failed(answer: &Answer) -> bool {
        matches!(answer, Err(DirectoryError::Conflict(Conflict::Lapsed)))
    }

    #[tokio::test(start_paused = true)]
    async fn one_request_serves_all_waiters() {
        let (strike, stub) = (Strike::default(), Stub::default());
        assert!(!strike.is_open(PAUSE));
        let begin = Instant::now();
        let answers = join_all((0..1000).map(|_| stub.ask(&strike, Ok(())))).await;
        assert!(answers.iter().all(Result::is_ok));
        // Virtual time: one wait instead of a thousand.
        assert_eq!((stub.asked(), begin.elapsed() < PAUSE * 2), (1, true));
        assert!(!strike.is_open(PAUSE));
        advance(PAUSE * 100).await;
        stub.ask(&strike, no()).await.unwrap();
        assert_eq!(stub.asked(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn failed_removal_is_not_repeated_at_once() {
        let (strike, stub) = (Strike::default(), Stub::default());
        let answers = join_all((0..1000).map(|_| stub.ask(&strike, no()))).await;
        assert!(answers.iter().all(failed));
        assert!(strike.is_open(PAUSE));
        let begin = Instant::now();
        for _ in 0..1000 {
            assert!(failed(&stub.ask(&strike, Ok(())).await));
        }
        assert_eq!((stub.asked(), begin.elapsed()), (1, Duration::ZERO));
        advance(PAUSE).await;
        assert!(!strike.is_open(PAUSE));
        stub.ask(&strike, Ok(())).await.unwrap();
        assert_eq!(stub.asked(), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn removal_continues_when_its_caller_gives_up() {
        let (strike, stub) = (Strike::default(), Stub::default());
        let given_up = tokio::time::timeout(PAUSE / 2, stub.ask(&strike, Ok(()))).await;
        assert!(given_up.is_err() && strike.is_open(PAUSE));
        stub.ask(&strike, no()).await.unwrap();
        assert_eq!(stub.asked(), 1);
    }
}

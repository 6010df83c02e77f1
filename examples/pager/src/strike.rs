//! Nodes that lack something are taken off the map: one question serves all pages that wait for the answer, and a coordinator that
//! does not answer is not asked again at once.

use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use futures::future::{BoxFuture, Shared};
use parking_lot::Mutex;
use tokio::time::Instant;

use crate::DirectoryError;

type Answer = Result<(), DirectoryError>;

/// Whether a node is off the map.
#[derive(Debug, Clone, Default)]
pub(crate) struct Strike {
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
enum State {
    #[default]
    OnTheMap,
    /// Whoever wants to know polls it.
    Asked(Shared<BoxFuture<'static, Answer>>),
    Failed(DirectoryError, Instant),
    Off,
}

impl Strike {
    /// Has it taken off the map by what `ask` makes, once. For `pause` after it has failed, it has failed for all.
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
                        // The question itself is dropped without the lock.
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

    /// The coordinator was asked and has not answered, so far or at all: who can do without should.
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

    /// A coordinator that takes its time, and counts what it is asked.
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
    async fn one_question_serves_all_that_wait() {
        let (strike, stub) = (Strike::default(), Stub::default());
        assert!(!strike.is_open(PAUSE));
        let begin = Instant::now();
        let answers = join_all((0..1000).map(|_| stub.ask(&strike, Ok(())))).await;
        assert!(answers.iter().all(Result::is_ok));
        // Virtual time: one wait, not a thousand.
        assert_eq!((stub.asked(), begin.elapsed() < PAUSE * 2), (1, true));
        assert!(!strike.is_open(PAUSE));
        // It stays off.
        advance(PAUSE * 100).await;
        stub.ask(&strike, no()).await.unwrap();
        assert_eq!(stub.asked(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn who_does_not_answer_is_not_asked_again_at_once() {
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
    async fn a_question_outlives_who_asked_it() {
        let (strike, stub) = (Strike::default(), Stub::default());
        let given_up = tokio::time::timeout(PAUSE / 2, stub.ask(&strike, Ok(()))).await;
        assert!(given_up.is_err() && strike.is_open(PAUSE));
        stub.ask(&strike, no()).await.unwrap();
        assert_eq!(stub.asked(), 1);
    }
}

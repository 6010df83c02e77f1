//! Which answer belongs to which call.

use std::collections::HashMap;

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::oneshot;

use crate::error::{KvError, ProtocolError};
use crate::protocol::Answer;

/// Calls that wait for their answers.
#[derive(Debug)]
pub(crate) struct Calls {
    state: Mutex<State>,
}

#[derive(Debug)]
enum State {
    Open {
        /// Number of the next call.
        next: u64,
        waiting: HashMap<u64, oneshot::Sender<Answer>>,
    },
    /// No more answers come.
    Over(KvError),
}

/// A call that was begun. Dropping it gives it up.
#[derive(Debug)]
pub(crate) struct Call<'a> {
    calls: &'a Calls,
    pub(crate) number: u64,
    answer: oneshot::Receiver<Answer>,
}

impl Calls {
    pub(crate) fn new() -> Self {
        Self { state: Mutex::new(State::Open { next: 0, waiting: HashMap::new() }) }
    }

    /// A call, whose number the request has.
    pub(crate) fn begin(&self) -> Result<Call<'_>, KvError> {
        match &mut *self.state.lock() {
            State::Over(error) => Err(error.clone()),
            State::Open { next, waiting } => {
                let number = *next;
                *next += 1;
                let (sender, answer) = oneshot::channel();
                waiting.insert(number, sender);
                Ok(Call { calls: self, number, answer })
            }
        }
    }

    /// Takes an answer. That of a call which was given up is of no use to anybody.
    pub(crate) fn on_message(&self, message: &Bytes) -> Result<(), ProtocolError> {
        let (number, answer) = Answer::decode(message)?;
        match &mut *self.state.lock() {
            State::Open { next, waiting } if number < *next => {
                // Nobody is there any more if sending fails.
                waiting.remove(&number).map(|call| call.send(answer).ok());
                Ok(())
            }
            State::Open { .. } => Err(ProtocolError::Unasked(number)),
            State::Over(_) => Ok(()),
        }
    }

    /// No more answers come, and this is why: for the calls that wait, and those to come.
    pub(crate) fn end(&self, error: KvError) {
        let mut state = self.state.lock();
        if let State::Open { .. } = *state {
            *state = State::Over(error);
        }
    }

    /// Calls that wait.
    #[cfg(test)]
    fn waiting(&self) -> usize {
        match &*self.state.lock() {
            State::Open { waiting, .. } => waiting.len(),
            State::Over(_) => 0,
        }
    }
}

impl Call<'_> {
    /// Its answer.
    pub(crate) async fn answer(mut self) -> Result<Answer, KvError> {
        match (&mut self.answer).await {
            Ok(answer) => Ok(answer),
            Err(_) => match &*self.calls.state.lock() {
                State::Over(error) => Err(error.clone()),
                State::Open { .. } => {
                    unreachable!("while it waits, its other end is among those that wait")
                }
            },
        }
    }
}

impl Drop for Call<'_> {
    fn drop(&mut self) {
        if let State::Open { waiting, .. } = &mut *self.calls.state.lock() {
            waiting.remove(&self.number);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn answers_find_their_calls_in_any_order() {
        let calls = Calls::new();
        let (a, b) = (calls.begin().unwrap(), calls.begin().unwrap());
        calls.on_message(&Answer::Done(20).encode(b.number)).unwrap();
        calls.on_message(&Answer::Done(10).encode(a.number)).unwrap();
        assert_eq!(
            (a.answer().await, b.answer().await),
            (Ok(Answer::Done(10)), Ok(Answer::Done(20)))
        );
        assert_eq!(calls.waiting(), 0);
    }

    #[test]
    fn call_that_is_given_up_leaves_nothing_and_its_answer_is_not_unasked() {
        let calls = Calls::new();
        let number = calls.begin().unwrap().number;
        assert_eq!(calls.waiting(), 0);
        assert_eq!(calls.on_message(&Answer::Absent.encode(number)), Ok(()));
        assert_eq!(
            calls.on_message(&Answer::Absent.encode(number + 1)),
            Err(ProtocolError::Unasked(number + 1))
        );
    }

    #[tokio::test]
    async fn end_reaches_those_who_wait_and_those_to_come() {
        let calls = Calls::new();
        let call = calls.begin().unwrap();
        calls.end(KvError::ServerLeft);
        calls.end(ProtocolError::Answer.into());
        assert_eq!(call.answer().await, Err(KvError::ServerLeft));
        assert_eq!(calls.begin().unwrap_err(), KvError::ServerLeft);
    }
}

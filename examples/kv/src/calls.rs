//! Matches answers to calls.

use std::collections::HashMap;

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::oneshot;

use crate::error::{KvError, ProtocolError};
use crate::protocol::Answer;

#[derive(Debug)]
pub(crate) struct Calls {
    state: Mutex<State>,
}

#[derive(Debug)]
enum State {
    Open { next: u64, pending: HashMap<u64, oneshot::Sender<Answer>> },
    Failed(KvError),
}

/// A call in flight. Dropping it cancels it.
#[derive(Debug)]
pub(crate) struct Call<'a> {
    calls: &'a Calls,
    pub(crate) number: u64,
    answer: oneshot::Receiver<Answer>,
}

impl Calls {
    pub(crate) fn new() -> Self {
        Self { state: Mutex::new(State::Open { next: 0, pending: HashMap::new() }) }
    }

    /// Registers a call, whose number the request carries.
    pub(crate) fn begin(&self) -> Result<Call<'_>, KvError> {
        match &mut *self.state.lock() {
            State::Failed(error) => Err(error.clone()),
            State::Open { next, pending } => {
                let number = *next;
                *next += 1;
                let (sender, answer) = oneshot::channel();
                pending.insert(number, sender);
                Ok(Call { calls: self, number, answer })
            }
        }
    }

    /// Delivers an answer to its call. The answer to a cancelled call is dropped.
    pub(crate) fn on_message(&self, message: &Bytes) -> Result<(), ProtocolError> {
        let (number, answer) = Answer::decode(message)?;
        match &mut *self.state.lock() {
            State::Open { next, pending } if number < *next => {
                // Fails if the call was dropped at the same time.
                pending.remove(&number).map(|call| call.send(answer).ok());
                Ok(())
            }
            State::Open { .. } => Err(ProtocolError::UnknownRequest(number)),
            State::Failed(_) => Ok(()),
        }
    }

    /// Fails the pending calls and all later ones.
    pub(crate) fn fail_all(&self, error: KvError) {
        let mut state = self.state.lock();
        if let State::Open { .. } = *state {
            *state = State::Failed(error);
        }
    }

    /// Returns the number of calls that wait.
    #[cfg(test)]
    fn pending(&self) -> usize {
        match &*self.state.lock() {
            State::Open { pending, .. } => pending.len(),
            State::Failed(_) => 0,
        }
    }
}

impl Call<'_> {
    pub(crate) async fn answer(mut self) -> Result<Answer, KvError> {
        match (&mut self.answer).await {
            Ok(answer) => Ok(answer),
            Err(_) => match &*self.calls.state.lock() {
                State::Failed(error) => Err(error.clone()),
                State::Open { .. } => {
                    unreachable!("an open state holds the sender of each pending call")
                }
            },
        }
    }
}

impl Drop for Call<'_> {
    fn drop(&mut self) {
        if let State::Open { pending, .. } = &mut *self.calls.state.lock() {
            pending.remove(&self.number);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn answers_reach_their_calls_in_any_order() {
        let calls = Calls::new();
        let (a, b) = (calls.begin().unwrap(), calls.begin().unwrap());
        calls.on_message(&Answer::Done(20).encode(b.number)).unwrap();
        calls.on_message(&Answer::Done(10).encode(a.number)).unwrap();
        assert_eq!(
            (a.answer().await, b.answer().await),
            (Ok(Answer::Done(10)), Ok(Answer::Done(20)))
        );
        assert_eq!(calls.pending(), 0);
    }

    #[test]
    fn dropped_call_is_removed_and_its_late_answer_is_ignored() {
        let calls = Calls::new();
        let number = calls.begin().unwrap().number;
        assert_eq!(calls.pending(), 0);
        assert_eq!(calls.on_message(&Answer::Absent.encode(number)), Ok(()));
        assert_eq!(
            calls.on_message(&Answer::Absent.encode(number + 1)),
            Err(ProtocolError::UnknownRequest(number + 1))
        );
    }

    #[tokio::test]
    async fn error_reaches_pending_and_later_calls() {
        let calls = Calls::new();
        let call = calls.begin().unwrap();
        calls.fail_all(KvError::ServerClosed);
        calls.fail_all(ProtocolError::Answer.into());
        assert_eq!(call.answer().await, Err(KvError::ServerClosed));
        assert_eq!(calls.begin().unwrap_err(), KvError::ServerClosed);
    }
}

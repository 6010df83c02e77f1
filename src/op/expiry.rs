//! The deadline of a lease, which revokes the access without a task.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Wake, Waker};
use std::time::Instant;

use rdma_provider::locks::Mutex;

use crate::clock::{self, Alarm, Sleep};
use crate::coop::try_within_budget;
use crate::error::{SetupError, VerbError};
use crate::memory::MemoryWindow;

#[derive(Debug)]
pub(super) struct Expiry {
    shared: Arc<Expiring>,
    alarm: Option<Alarm>,
}

#[derive(Debug)]
struct Expiring {
    state: Mutex<State>,
    window: Arc<MemoryWindow>,
}

#[derive(Debug, Clone, Copy)]
enum State {
    Until(Option<Instant>),
    Expired,
}

impl Expiry {
    pub(super) fn new(window: Arc<MemoryWindow>) -> Self {
        let state = Mutex::new(State::Until(None));
        let shared = Arc::new(Expiring { state, window });
        Self { shared, alarm: None }
    }

    pub(super) fn set(&mut self, deadline: Instant) -> Result<(), SetupError> {
        // First, because a lease without the thread keeps its earlier deadline.
        let alarm = Alarm::revoking(deadline, Waker::from(self.shared.clone()));
        let alarm = alarm.map_err(|error| VerbError::no_thread(&error))?;
        match &mut *self.shared.state.lock() {
            State::Until(until) => *until = Some(deadline),
            State::Expired => return Err(SetupError::Closed),
        }
        self.alarm = Some(alarm);
        // The alarm may have fired before the deadline was set.
        self.shared.expire();
        Ok(())
    }

    pub(super) fn has_expired(&self) -> bool {
        matches!(*self.shared.state.lock(), State::Expired)
    }

    /// Returns false if the lease has expired.
    pub(super) fn end(self) -> bool {
        match &mut *self.shared.state.lock() {
            State::Until(until) => {
                *until = None;
                true
            }
            State::Expired => false,
        }
    }

    pub(super) async fn expired(&self) {
        let expired = || self.has_expired().then_some(());
        if try_within_budget(expired).await.is_some() {
            return;
        }
        // No call moves or discards the deadline during this borrow.
        let state = *self.shared.state.lock();
        let deadline = match state {
            State::Until(Some(deadline)) => deadline,
            // The thread could not be started when the deadline was set.
            State::Until(None) => std::future::pending().await,
            State::Expired => return,
        };
        // A clock that another thread keeps may end the sleep early.
        while !self.has_expired() {
            let mut sleep = Sleep::new(deadline);
            poll_fn(|context| sleep.poll(context)).await;
            self.shared.expire();
        }
    }
}

impl Expiring {
    fn expire(&self) {
        let mut state = self.state.lock();
        match *state {
            State::Until(Some(deadline)) if deadline <= clock::now() => {
                self.window.free();
                *state = State::Expired;
            }
            State::Until(_) | State::Expired => return,
        }
        drop(state);
        rdma_provider::debug!(rkey = %self.window.rkey(), "lease expired");
    }
}

impl Wake for Expiring {
    fn wake(self: Arc<Self>) {
        self.expire();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.expire();
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::future::Future as _;
    use std::pin::pin;
    use std::task::Context;
    use std::time::Duration;

    use super::*;
    use crate::verbs::Device;

    #[test]
    fn lease_without_a_deadline_does_not_expire() {
        let pd = Device::software().unwrap().protection_domain().unwrap();
        let mut expiry = Expiry::new(Arc::new(MemoryWindow::allocate(&pd).unwrap()));
        let noop = &mut Context::from_waker(Waker::noop());
        // So is a lease whose deadline could not be set, for lack of a thread.
        assert!(pin!(expiry.expired()).poll(noop).is_pending());
        assert!(!expiry.has_expired());
        expiry.set(clock::deadline(Duration::ZERO)).unwrap();
        assert!(pin!(expiry.expired()).poll(noop).is_ready());
    }
}

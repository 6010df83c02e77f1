//! A FIFO of tasks that wait for the same condition.

use std::collections::VecDeque;
use std::task::Waker;

/// A task's position in a wait queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Ticket(u64);

/// A task that checks a condition under the lock and may have to wait. Cloning and dropping its
/// waker runs user code, which must not happen under the lock.
/// [`Shared::poll`](super::shared::Shared::poll) therefore checks again with a clone, unless the
/// task has [expected](Self::expect_wait) to wait.
///
/// One poll registers it at most once. `will_wake` is best effort and only saves a clone if an
/// earlier poll registered the same task.
#[derive(Debug)]
pub(super) struct Caller<'a> {
    waker: &'a Waker,
    clone: Option<Waker>,
    needs_clone: bool,
    checks_again: bool,
    /// Position registered by this poll.
    registered: Option<Ticket>,
    /// The replaced waker, dropped without the lock.
    replaced: Option<Waker>,
}

impl<'a> Caller<'a> {
    pub(super) fn new(waker: &'a Waker) -> Self {
        Self {
            waker,
            clone: None,
            needs_clone: false,
            checks_again: false,
            registered: None,
            replaced: None,
        }
    }

    /// Clones the waker of a task that will probably wait, which then need not check again.
    pub(super) fn expect_wait(&mut self) {
        self.clone = Some(self.waker.clone());
    }

    /// Returns true in the second call of the same poll.
    pub(super) fn checks_again(&self) -> bool {
        self.checks_again
    }

    /// Clones the waker if needed. Returns true if the task must then check again.
    pub(super) fn clone_if_needed(&mut self) -> bool {
        if std::mem::take(&mut self.needs_clone) {
            self.clone = Some(self.waker.clone());
            self.checks_again = true;
            return true;
        }
        false
    }
}

#[derive(Debug, Default)]
pub(super) struct Waiters {
    queue: VecDeque<(Ticket, Option<Waker>)>,
    next: u64,
}

impl Waiters {
    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Returns true if no other task is ahead; `None` stands for a new waiter.
    pub(super) fn is_first(&self, ticket: Option<Ticket>) -> bool {
        self.queue.front().is_none_or(|(first, _)| Some(*first) == ticket)
    }

    /// Registers `caller`, at the end of the queue if it has no position.
    ///
    /// If the waker was taken since this poll registered it, the task will be polled again and
    /// needs no registration.
    pub(super) fn wait(&mut self, ticket: &mut Option<Ticket>, caller: &mut Caller<'_>) {
        if ticket.is_some() && caller.registered == *ticket {
            return;
        }
        let found =
            ticket.and_then(|ticket| self.queue.iter_mut().find(|(other, _)| *other == ticket));
        if let Some((_, Some(registered))) = &found
            && registered.will_wake(caller.waker)
        {
            caller.registered = *ticket;
            return;
        }
        let Some(waker) = caller.clone.take() else {
            caller.needs_clone = true;
            return;
        };
        match found {
            Some((_, registered)) => caller.replaced = registered.replace(waker),
            None => {
                let new = Ticket(self.next);
                self.next += 1;
                self.queue.push_back((new, Some(waker)));
                *ticket = Some(new);
            }
        }
        caller.registered = *ticket;
    }

    /// Removes a waiter. The waker must be dropped without the lock.
    #[must_use]
    pub(super) fn withdraw(&mut self, ticket: &mut Option<Ticket>) -> Option<Waker> {
        let ticket = ticket.take()?;
        if self.queue.front().is_some_and(|(first, _)| *first == ticket) {
            return self.queue.pop_front()?.1;
        }
        let place = self.queue.iter().position(|(other, _)| *other == ticket)?;
        self.queue.remove(place)?.1
    }

    /// Takes the first waiter's waker if not taken yet.
    pub(super) fn take_first(&mut self) -> Option<Waker> {
        self.queue.front_mut().and_then(|(_, waker)| waker.take())
    }

    /// Takes all remaining wakers.
    pub(super) fn take_all(&mut self) -> impl Iterator<Item = Waker> {
        self.queue.iter_mut().filter_map(|(_, waker)| waker.take())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wait(waiters: &mut Waiters, ticket: &mut Option<Ticket>, waker: &Waker) {
        let mut caller = Caller::new(waker);
        waiters.wait(ticket, &mut caller);
        assert!(ticket.is_none() && caller.clone_if_needed(), "registration needs a clone");
        waiters.wait(ticket, &mut caller);
        assert!(ticket.is_some() && !caller.clone_if_needed());
    }

    #[test]
    fn waiters_are_served_in_fifo_order_and_withdrawn_ones_are_skipped() {
        let mut waiters = Waiters::default();
        let (mut a, mut b) = (None, None);
        assert!(waiters.is_first(a));
        wait(&mut waiters, &mut a, Waker::noop());
        wait(&mut waiters, &mut b, Waker::noop());
        assert!(waiters.is_first(a) && !waiters.is_first(b) && !waiters.is_first(None));
        assert!(waiters.take_first().is_some() && waiters.take_first().is_none(), "woken once");
        assert!(waiters.withdraw(&mut a).is_none(), "its waker was taken");
        assert!(waiters.is_first(b));
        assert!(waiters.withdraw(&mut b).is_some(), "its waker is returned");
        assert!(waiters.is_empty() && a.is_none() && b.is_none());
    }

    #[test]
    fn waker_that_wakes_the_same_task_is_not_cloned_again() {
        let (mut waiters, mut ticket) = (Waiters::default(), None);
        let [waker, other] = [(); 2].map(|()| Waker::from(std::sync::Arc::new(Other)));
        wait(&mut waiters, &mut ticket, &waker);
        let mut again = Caller::new(&waker);
        waiters.wait(&mut ticket, &mut again);
        assert!(!again.clone_if_needed());
        let mut moved = Caller::new(&other);
        waiters.wait(&mut ticket, &mut moved);
        assert!(moved.clone_if_needed());
        waiters.wait(&mut ticket, &mut moved);
        assert!(moved.replaced.is_some(), "the replaced waker is dropped with the caller");
    }

    struct Other;

    impl std::task::Wake for Other {
        fn wake(self: std::sync::Arc<Self>) {}
    }
}

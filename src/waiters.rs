//! A FIFO of tasks that wait for the same condition.
//!
//! The lock of the condition guards it. [`take_first`](Waiters::take_first) lets a woken task keep
//! its position, so that no other task overtakes it until it [withdraws](Waiters::withdraw).
//! [`remove_first`](Waiters::remove_first) and [`remove_all`](Waiters::remove_all) remove the task,
//! which registers again if it must wait further.

use std::collections::VecDeque;
use std::task::Waker;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ticket(u64);

/// A task that checks a condition under the lock and may have to wait. Drop it without the lock.
///
/// Cloning and dropping its waker runs user code, which must not happen under the lock. So a poll
/// that has to wait checks again with a [clone](Self::clone_if_needed), unless it
/// [expected](Self::expect_wait) to wait. One poll registers it at most once. `will_wake` is best
/// effort and only saves a clone if an earlier poll registered the same task.
#[derive(Debug)]
pub(crate) struct Caller<'a> {
    waker: &'a Waker,
    clone: Option<Waker>,
    needs_clone: bool,
    checks_again: bool,
    registered: Option<Ticket>,
    replaced: Option<Waker>,
}

impl<'a> Caller<'a> {
    pub(crate) fn new(waker: &'a Waker) -> Self {
        Self {
            waker,
            clone: None,
            needs_clone: false,
            checks_again: false,
            registered: None,
            replaced: None,
        }
    }

    /// Clones the waker of a task that will probably wait, so that it need not check twice.
    #[inline]
    pub(crate) fn expect_wait(&mut self) {
        self.clone = Some(self.waker.clone());
    }

    pub(crate) fn checks_again(&self) -> bool {
        self.checks_again
    }

    /// Returns true if the task must check again.
    #[inline]
    pub(crate) fn clone_if_needed(&mut self) -> bool {
        if std::mem::take(&mut self.needs_clone) {
            self.clone = Some(self.waker.clone());
            self.checks_again = true;
            return true;
        }
        false
    }

    #[inline]
    pub(crate) fn unused(self) -> impl Iterator<Item = Waker> {
        self.clone.into_iter().chain(self.replaced)
    }
}

#[derive(Debug, Default)]
pub(crate) struct Waiters {
    /// Separate, because usually at most one task waits, which then needs no allocation.
    first: Option<Waiter>,
    others: VecDeque<Waiter>,
    next: u64,
}

/// The waker is `None` if it was taken.
type Waiter = (Ticket, Option<Waker>);

impl Waiters {
    pub(crate) fn is_empty(&self) -> bool {
        self.first.is_none()
    }

    /// `None` stands for a new waiter.
    pub(crate) fn is_first(&self, ticket: Option<Ticket>) -> bool {
        self.first.as_ref().is_none_or(|(first, _)| Some(*first) == ticket)
    }

    /// Registers `caller`, at the end of the queue if it has no position, unless its waker was
    /// taken since this poll registered it: the task will then be polled again.
    pub(crate) fn wait(&mut self, ticket: &mut Option<Ticket>, caller: &mut Caller<'_>) {
        if ticket.is_some() && caller.registered == *ticket {
            return;
        }
        let found = ticket.and_then(|ticket| self.all().find(|(other, _)| *other == ticket));
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
                match &mut self.first {
                    first @ None => *first = Some((new, Some(waker))),
                    Some(_) => self.others.push_back((new, Some(waker))),
                }
                *ticket = Some(new);
            }
        }
        caller.registered = *ticket;
    }

    fn all(&mut self) -> impl Iterator<Item = &mut Waiter> {
        self.first.iter_mut().chain(&mut self.others)
    }

    /// The caller must drop the waker without the lock.
    #[must_use]
    #[inline]
    pub(crate) fn withdraw(&mut self, ticket: &mut Option<Ticket>) -> Option<Waker> {
        let ticket = ticket.take()?;
        if self.is_first(Some(ticket)) {
            return self.remove_first();
        }
        let place = self.others.iter().position(|(other, _)| *other == ticket)?;
        self.others.remove(place)?.1
    }

    pub(crate) fn take_first(&mut self) -> Option<Waker> {
        self.first.as_mut()?.1.take()
    }

    pub(crate) fn take_all(&mut self) -> impl Iterator<Item = Waker> {
        self.all().filter_map(|(_, waker)| waker.take())
    }

    pub(crate) fn remove_first(&mut self) -> Option<Waker> {
        std::mem::replace(&mut self.first, self.others.pop_front())?.1
    }

    pub(crate) fn remove_all(&mut self) -> impl Iterator<Item = Waker> + use<> {
        let others = std::mem::take(&mut self.others);
        self.first.take().into_iter().chain(others).filter_map(|(_, waker)| waker)
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
    fn removed_waiters_register_again_behind_others() {
        let mut waiters = Waiters::default();
        let mut tickets = [None; 4];
        for ticket in &mut tickets {
            wait(&mut waiters, ticket, Waker::noop());
        }
        assert!(waiters.withdraw(&mut tickets[1]).is_some());
        assert!(waiters.remove_first().is_some());
        assert!(waiters.is_first(tickets[2]) && !waiters.is_first(tickets[0]));
        let mut again = Caller::new(Waker::noop());
        for _ in 0..2 {
            waiters.wait(&mut tickets[0], &mut again);
            again.clone_if_needed();
        }
        let others: Vec<_> = waiters.others.iter().map(|(ticket, _)| Some(*ticket)).collect();
        assert_eq!(others, [tickets[3], tickets[0]]);
        assert!(waiters.take_first().is_some(), "not woken before");
        assert_eq!(waiters.remove_all().count(), 2, "without the woken one");
        assert!(waiters.is_empty() && waiters.remove_first().is_none());
        assert!(tickets.iter_mut().all(|ticket| waiters.withdraw(ticket).is_none()));
    }

    #[test]
    #[cfg_attr(miri, ignore = "wakers of one task have different addresses of their vtable")]
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

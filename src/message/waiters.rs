//! Tasks that wait for the same thing, served in the order in which they came.

use std::collections::VecDeque;
use std::task::Waker;

use smallvec::SmallVec;

/// A place in line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Ticket(u64);

/// A task that checks a condition under the lock, and may have to wait. Cloning and dropping its waker runs code of the user, so
/// both happen without the lock: [`Shared::poll`](super::shared::Shared::poll) checks a second time with a clone if the task
/// has to wait.
///
/// A guest is registered at most once in a poll. Whether `will_wake` recognises the clone is irrelevant: it is best effort,
/// and only saves the clone when the waker registered by an earlier poll wakes the same task.
#[derive(Debug)]
pub(super) struct Guest<'a> {
    waker: &'a Waker,
    clone: Option<Waker>,
    needs_clone: bool,
    /// Place in line where this poll has registered the task.
    registered: Option<Ticket>,
    /// Wakers that others took the place of.
    spent: SmallVec<[Waker; 1]>,
}

impl<'a> Guest<'a> {
    pub(super) fn new(waker: &'a Waker) -> Self {
        Self { waker, clone: None, needs_clone: false, registered: None, spent: SmallVec::new() }
    }

    /// Clones the waker if registering failed for want of a clone. True if the task must check again: with the clone it is
    /// registered then.
    pub(super) fn clone_if_needed(&mut self) -> bool {
        if std::mem::take(&mut self.needs_clone) {
            self.clone = Some(self.waker.clone());
            return true;
        }
        false
    }
}

/// Tasks in line.
#[derive(Debug, Default)]
pub(super) struct Waiters {
    line: VecDeque<(Ticket, Option<Waker>)>,
    next: u64,
}

impl Waiters {
    pub(super) fn is_empty(&self) -> bool {
        self.line.is_empty()
    }

    /// True if whoever holds `ticket`, or has none and would be the first, is not behind another.
    pub(super) fn is_first(&self, ticket: Option<Ticket>) -> bool {
        self.line.front().is_none_or(|(first, _)| Some(*first) == ticket)
    }

    /// Has `guest` woken when it is its turn; joins the line if it is not in it.
    ///
    /// If the registered waker was taken since this poll registered it, the wake that follows polls the task again: there is
    /// nothing to register then.
    pub(super) fn wait(&mut self, ticket: &mut Option<Ticket>, guest: &mut Guest<'_>) {
        if ticket.is_some() && guest.registered == *ticket {
            return;
        }
        let found =
            ticket.and_then(|ticket| self.line.iter_mut().find(|(other, _)| *other == ticket));
        if let Some((_, Some(registered))) = &found
            && registered.will_wake(guest.waker)
        {
            guest.registered = *ticket;
            return;
        }
        let Some(waker) = guest.clone.take() else {
            guest.needs_clone = true;
            return;
        };
        match found {
            Some((_, registered)) => guest.spent.extend(registered.replace(waker)),
            None => {
                let new = Ticket(self.next);
                self.next += 1;
                self.line.push_back((new, Some(waker)));
                *ticket = Some(new);
            }
        }
        guest.registered = *ticket;
    }

    /// Leaves the line; who was to be woken is the caller's to drop, without the lock.
    #[must_use]
    pub(super) fn leave(&mut self, ticket: &mut Option<Ticket>) -> Option<Waker> {
        let ticket = ticket.take()?;
        let place = self.line.iter().position(|(other, _)| *other == ticket)?;
        self.line.remove(place)?.1
    }

    /// Who is first and was not woken yet.
    pub(super) fn first(&mut self) -> Option<Waker> {
        self.line.front_mut().and_then(|(_, waker)| waker.take())
    }

    /// Everybody who was not woken yet.
    pub(super) fn all(&mut self) -> impl Iterator<Item = Waker> {
        self.line.iter_mut().filter_map(|(_, waker)| waker.take())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wait(waiters: &mut Waiters, ticket: &mut Option<Ticket>, waker: &Waker) {
        let mut guest = Guest::new(waker);
        waiters.wait(ticket, &mut guest);
        assert!(ticket.is_none() && guest.clone_if_needed(), "not without a clone");
        waiters.wait(ticket, &mut guest);
        assert!(ticket.is_some() && !guest.clone_if_needed());
    }

    #[test]
    fn whoever_came_first_is_first_and_whoever_leaves_is_passed_over() {
        let mut waiters = Waiters::default();
        let (mut a, mut b) = (None, None);
        assert!(waiters.is_first(a));
        wait(&mut waiters, &mut a, Waker::noop());
        wait(&mut waiters, &mut b, Waker::noop());
        assert!(waiters.is_first(a) && !waiters.is_first(b) && !waiters.is_first(None));
        assert!(waiters.first().is_some() && waiters.first().is_none(), "woken once");
        assert!(waiters.leave(&mut a).is_none(), "its waker was taken");
        assert!(waiters.is_first(b));
        assert!(waiters.leave(&mut b).is_some(), "its waker comes back");
        assert!(waiters.is_empty() && a.is_none() && b.is_none());
    }

    #[test]
    fn waker_that_wakes_the_same_task_is_not_cloned_again() {
        let (mut waiters, mut ticket) = (Waiters::default(), None);
        let [waker, other] = [(); 2].map(|()| Waker::from(std::sync::Arc::new(Other)));
        wait(&mut waiters, &mut ticket, &waker);
        let mut again = Guest::new(&waker);
        waiters.wait(&mut ticket, &mut again);
        assert!(!again.clone_if_needed());
        let mut moved = Guest::new(&other);
        waiters.wait(&mut ticket, &mut moved);
        assert!(moved.clone_if_needed());
        waiters.wait(&mut ticket, &mut moved);
        assert_eq!(moved.spent.len(), 1, "the earlier one is dropped with the guest");
    }

    struct Other;

    impl std::task::Wake for Other {
        fn wake(self: std::sync::Arc<Self>) {}
    }
}

//! Tasks that wait for the same thing, served in the order in which they came.

use std::collections::VecDeque;
use std::task::Waker;

/// A place in line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Ticket(u64);

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

    /// Has `waker` woken when it is its turn; joins the line if it is not in it.
    pub(super) fn wait(&mut self, ticket: &mut Option<Ticket>, waker: &Waker) {
        let found = ticket.and_then(|ticket| self.line.iter_mut().find(|(other, _)| *other == ticket));
        match found {
            Some((_, Some(registered))) if registered.will_wake(waker) => {}
            Some((_, registered)) => *registered = Some(waker.clone()),
            None => {
                let new = Ticket(self.next);
                self.next += 1;
                self.line.push_back((new, Some(waker.clone())));
                *ticket = Some(new);
            }
        }
    }

    /// Leaves the line.
    pub(super) fn leave(&mut self, ticket: &mut Option<Ticket>) {
        if let Some(ticket) = ticket.take() {
            self.line.retain(|(other, _)| *other != ticket);
        }
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

    #[test]
    fn whoever_came_first_is_first_and_whoever_leaves_is_passed_over() {
        let mut waiters = Waiters::default();
        let (mut a, mut b) = (None, None);
        assert!(waiters.is_first(a));
        waiters.wait(&mut a, Waker::noop());
        waiters.wait(&mut b, Waker::noop());
        assert!(waiters.is_first(a) && !waiters.is_first(b) && !waiters.is_first(None));
        assert!(waiters.first().is_some() && waiters.first().is_none(), "woken once");
        waiters.leave(&mut a);
        assert!(waiters.is_first(b) && waiters.first().is_some());
        waiters.leave(&mut b);
        assert!(waiters.is_empty() && a.is_none() && b.is_none());
    }
}

//! Chores of a connection, which may block, and the thread that does them.

use std::collections::VecDeque;
use std::sync::Weak;

use super::error::CloseReason;
use super::lifecycle::Event;
use super::message_memory::Chore;
use super::shared::Shared;

/// Chores of a connection.
#[derive(Debug, Default)]
pub(super) enum Chores {
    /// There are no chores, and there is no thread.
    #[default]
    None,
    /// The chores that come next. There is a thread, or one is being started.
    Helped(VecDeque<Chore>),
}

impl Chores {
    /// Adds a chore. True if a thread is to be started for it.
    #[must_use]
    pub(super) fn add(&mut self, chore: Chore) -> bool {
        match self {
            Self::None => {
                *self = Self::Helped(VecDeque::from([chore]));
                true
            }
            Self::Helped(chores) => {
                chores.push_back(chore);
                false
            }
        }
    }

    /// Removes the next chore. If there is none, the thread ends.
    pub(super) fn pop(&mut self) -> Option<Chore> {
        let Self::Helped(chores) = self else { return None };
        let next = chores.pop_front();
        if next.is_none() {
            *self = Self::None;
        }
        next
    }

    /// Removes all chores, to be dropped. The thread continues, and finds none.
    pub(super) fn take(&mut self) -> VecDeque<Chore> {
        match self {
            Self::None => VecDeque::new(),
            Self::Helped(chores) => std::mem::take(chores),
        }
    }
}

/// A thread that does one chore after the other until none is left. A connection has at most one, however much its peer offers.
pub(super) struct Helper {
    shared: Weak<Shared>,
    at_it: bool,
}

impl Helper {
    pub(super) fn new(shared: Weak<Shared>) -> Self {
        Self { shared, at_it: true }
    }

    pub(super) fn run(mut self) {
        while let Some(shared) = self.shared.upgrade()
            && let Some(chore) = shared.with(|core, _| core.chores.pop())
        {
            let done = chore.run();
            shared.with(|core, bell| core.on_done(done, bell));
        }
        self.at_it = false;
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        if let (true, Some(shared)) = (self.at_it, self.shared.upgrade()) {
            // Otherwise a task that waits for a message waits for ever.
            let reason =
                if std::thread::panicking() { CloseReason::Memory } else { CloseReason::Runtime };
            shared.with(|core, _| core.on(Event::End(reason)));
            shared.bell.ring();
        }
    }
}

use super::BusyPoller;

/// A mode of waiting for completions, with the same semantics in all modes. An operation always
/// polls the queue once before it parks.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub enum CompletionMode {
    /// Arms the queue and sleeps until Tokio's reactor reports its event. Idle tasks cost no
    /// processor time, and each event some microseconds.
    #[default]
    Event,
    /// A dedicated thread polls and occupies a core. Lowest latency for tasks on many threads.
    BusyPoll(BusyPoller),
    /// The waiting task polls each time its runtime schedules it, and reschedules itself. Meant for
    /// a current-thread runtime with a core of its own, which never sleeps while an operation
    /// waits. Events report completions of abandoned operations.
    Cooperative,
    /// Polls like [`Cooperative`](Self::Cooperative) for a number of rounds that adapts to the
    /// observed latency, then waits like [`Event`](Self::Event). For the receives of
    /// [connections](crate::Connection), one task of the runtime polls after an event, instead of
    /// each waiting task.
    Hybrid,
}

impl CompletionMode {
    pub(super) fn arms(&self) -> bool {
        !matches!(self, Self::BusyPoll(_))
    }

    pub(crate) fn same(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::BusyPoll(a), Self::BusyPoll(b)) => a.same(b),
            _ => std::mem::discriminant(self) == std::mem::discriminant(other),
        }
    }

    /// Returns [`BusyPoll`](Self::BusyPoll) with a thread of its own, not pinned.
    ///
    /// # Errors
    ///
    /// The error of the operating system if the thread cannot be started.
    pub fn busy_poll() -> std::io::Result<Self> {
        BusyPoller::new().map(Self::BusyPoll)
    }
}

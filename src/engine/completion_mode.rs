//! How a completion queue is watched.

use super::BusyPoller;

/// How a completion queue is watched while operations wait. All modes have the same semantics; whoever
/// waits looks once itself before it parks.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub enum CompletionMode {
    /// Arm the queue and sleep: its completion channel is registered with Tokio's reactor. Costs no processor
    /// time while nothing happens, and some microseconds when it does.
    #[default]
    Event,
    /// A dedicated thread polls, and burns a core. Lowest latency for tasks on many threads.
    BusyPoll(BusyPoller),
    /// The task that waits polls, each time its runtime comes round to it, and asks to come round again.
    /// Meant for a current-thread runtime with a core of its own: no other thread is involved, and the
    /// runtime never sleeps while an operation waits. Operations that nobody awaits any more are watched by events.
    Cooperative,
    /// As [`Cooperative`](Self::Cooperative) for a number of rounds that adapts to what they found, then as
    /// [`Event`](Self::Event).
    Hybrid,
}

impl CompletionMode {
    /// True if the queue is armed when something sleeps that only a completion can wake: a task, or the buffers of
    /// an abandoned operation.
    pub(super) fn arms(&self) -> bool {
        !matches!(self, Self::BusyPoll(_))
    }

    /// [`BusyPoll`](Self::BusyPoll) with a thread of its own, not pinned.
    ///
    /// # Errors
    ///
    /// If no thread can be started.
    pub fn busy_poll() -> std::io::Result<Self> {
        BusyPoller::new().map(Self::BusyPoll)
    }
}

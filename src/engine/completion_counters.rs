//! What a completion queue counts.

/// What a completion queue has done so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct CompletionQueueCounters {
    /// Completions it holds at most.
    pub capacity: u32,
    /// Completions that the queues on it can produce at most.
    pub reserved: u32,
    /// Completions taken.
    pub completions: u64,
    /// Events asked for.
    pub arms: u64,
    /// Events taken from the channel.
    pub events: u64,
    /// Operations that wait now, for a completion or for room, and abandoned ones that are still in flight.
    pub waiting: u32,
    /// Rounds a hybrid wait may spin now.
    pub spin_rounds: u32,
}

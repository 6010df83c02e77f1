/// The counters of a completion queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct CompletionQueueCounters {
    /// Number of entries.
    pub capacity: u32,
    /// Entries reserved by queue pairs and shared receive queues.
    pub reserved: u32,
    /// Completions taken.
    pub completions: u64,
    /// Events requested.
    pub arms: u64,
    /// Events taken from the channel.
    pub events: u64,
    /// Operations that now wait for a completion or for capacity, and abandoned operations in
    /// flight.
    pub waiting: u32,
    /// Rounds that a hybrid wait may spin now.
    pub spin_rounds: u32,
}

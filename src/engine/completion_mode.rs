use super::BusyPoller;

/// A mode of waiting for completions. Semantics are the same in all modes; in each, an operation
/// polls the queue once before it parks.
///
/// ```
/// use tokio_rdma::{CompletionMode, CompletionQueue};
/// # use tokio_rdma::{Access, Device, ExposedRegion, QueuePair};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let device = Device::open_default_or_software()?;
/// # let pd = device.protection_domain()?;
/// # let counter = ExposedRegion::new(&pd, vec![0; 8], Access::REMOTE_ATOMIC)?;
/// for mode in [CompletionMode::Event, CompletionMode::Hybrid, CompletionMode::busy_poll()?] {
///     let queue = CompletionQueue::new(&device, mode)?;
///     let qp = QueuePair::new(&pd, &queue)?;
///     # qp.connect(&qp.endpoint())?;
///     qp.fetch_add(counter.grant(), 1).await?;
/// }
/// assert_eq!(counter.load(0)?, 3);
/// # Ok(())
/// # }
/// ```
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

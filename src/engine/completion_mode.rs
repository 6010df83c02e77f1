//! How a completion queue is watched.

use super::BusyPoller;

/// How a completion queue is watched while operations wait. All modes have the same semantics; whoever
/// waits looks once itself before it parks.
///
/// ```
/// use tokio_rdma::{CompletionMode, CompletionQueue};
/// # use tokio_rdma::{Access, Device, ExposedRegion, QueuePair};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let device = Device::open_default()?;
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

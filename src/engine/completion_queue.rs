//! Completion queue: what users hold.

// Lends the bare queue under a condition that the caller promises.
#![allow(unsafe_code)]

use std::fmt;
use std::sync::{Arc, Weak};
use std::time::Duration;

use super::completion_counters::CompletionQueueCounters;
use super::completion_mode::CompletionMode;
use super::completion_queue_core::CompletionQueueCore;
use crate::dispatch::CqCounters;
use crate::error::{SetupError, VerbError};
use crate::verbs::{Channel, Cq, Device};

/// Where completions arrive and how they are watched; clones share it.
///
/// Many queue pairs may share one: the room for their completions is set aside when they are made, so that
/// it cannot be overrun.
///
/// ```
/// use tokio_rdma::{CompletionMode, CompletionQueue, QueuePair};
/// # use tokio_rdma::Device;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let device = Device::open_default()?;
/// # let pd = device.protection_domain()?;
/// let queue = CompletionQueue::new(&device, CompletionMode::Event)?;
/// let (first, second) = (QueuePair::new(&pd, &queue)?, QueuePair::new(&pd, &queue)?);
/// # assert_ne!(first.qpn(), second.qpn());
/// // Each queue pair reserves an entry for every work request that its two queues hold.
/// assert_eq!(queue.counters().reserved, 2 * (128 + 128));
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct CompletionQueue {
    shared: Arc<CompletionQueueCore>,
}

impl CompletionQueue {
    /// A queue of 1024 completions watched in `mode`.
    ///
    /// # Errors
    ///
    /// As [`CompletionQueueBuilder::build`].
    pub fn new(device: &Device, mode: CompletionMode) -> Result<Self, SetupError> {
        Self::builder(device).mode(mode).build()
    }

    /// A queue to be described further.
    #[must_use]
    pub fn builder(device: &Device) -> CompletionQueueBuilder {
        CompletionQueueBuilder {
            device: device.clone(),
            capacity: 1024,
            mode: CompletionMode::default(),
            vector: None,
            moderation: None,
        }
    }

    /// The device it belongs to.
    #[must_use]
    pub fn device(&self) -> &Device {
        self.cq().device()
    }

    /// Number by which asynchronous events name it ([`AsyncEvent::CqError`](crate::types::AsyncEvent::CqError)).
    #[must_use]
    pub fn id(&self) -> u64 {
        self.cq().id()
    }

    /// Completions it holds; at least as many as asked for.
    #[must_use]
    pub fn capacity(&self) -> u32 {
        self.cq().capacity()
    }

    /// Why it is dead, if it is: it was overrun, or its device is gone. All operations on it have failed or are about to.
    #[must_use]
    pub fn failure(&self) -> Option<VerbError> {
        self.shared.failure()
    }

    /// Completions, events and losses so far, if it is of a software device.
    #[must_use]
    pub fn software_counters(&self) -> Option<CqCounters> {
        self.cq().software_counters()
    }

    /// The bare queue, for experiments that disturb it. Its attributes have safe methods here; for completions of a
    /// [bare queue pair](crate::verbs::Qp), create a [bare completion queue](crate::verbs::Cq).
    ///
    /// # Safety
    ///
    /// Every completion on it must stem from this crate's operations: a completion with the work request number of an
    /// operation in flight ends that operation and returns its buffer while the device may still use it. So a bare queue
    /// pair that uses it must post no such number.
    ///
    /// Besides, an operation whose completion [`Cq::poll`] takes never completes, and one that waits may never be woken
    /// after [`Cq::arm`], [`Cq::acknowledge`] or a take from [`Cq::channel`].
    #[must_use]
    pub unsafe fn verbs(&self) -> &Cq {
        self.cq()
    }

    pub(crate) fn cq(&self) -> &Cq {
        self.shared.verbs()
    }

    /// What it has done so far.
    #[must_use]
    pub fn counters(&self) -> CompletionQueueCounters {
        self.shared.counters()
    }

    pub(crate) fn shared(&self) -> &Arc<CompletionQueueCore> {
        &self.shared
    }
}

impl fmt::Debug for CompletionQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CompletionQueue")
            .field("cq", self.cq())
            .field("mode", self.shared.mode())
            .field("counters", &self.counters())
            .finish()
    }
}

/// Describes a [`CompletionQueue`].
///
/// ```
/// use tokio_rdma::{CompletionMode, CompletionQueue};
/// # use tokio_rdma::{Device, SetupError};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let device = Device::open_default()?;
/// let queue = CompletionQueue::builder(&device).capacity(4096).mode(CompletionMode::Hybrid).build()?;
/// assert!(queue.capacity() >= 4096);
/// let refused = CompletionQueue::builder(&device).capacity(0).build();
/// assert!(matches!(refused, Err(SetupError::TooSmall { .. })));
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct CompletionQueueBuilder {
    device: Device,
    capacity: u32,
    mode: CompletionMode,
    vector: Option<u32>,
    moderation: Option<(u16, Duration)>,
}

impl CompletionQueueBuilder {
    /// Completions it holds; 1024 unless set. Each queue pair takes as many as its queues hold work requests. A device may grant
    /// more, as `ibv_create_cq(3)` allows: [`CompletionQueueCounters::capacity`] is what it granted.
    #[must_use]
    pub fn capacity(mut self, completions: u32) -> Self {
        self.capacity = completions;
        self
    }

    /// How it is watched; by events unless set.
    #[must_use]
    pub fn mode(mut self, mode: CompletionMode) -> Self {
        self.mode = mode;
        self
    }

    /// Which of the device's completion vectors interrupts; unless set, each of them in turn.
    #[must_use]
    pub fn vector(mut self, vector: u32) -> Self {
        self.vector = Some(vector);
        self
    }

    /// Has the device raise an event only when so many `completions` are there, or so much time (in microseconds, at
    /// most 65,535; the next whole one counts) has passed since the first of them, `ibv_modify_cq(3)`: fewer interrupts, later
    /// ones. Not unless set.
    #[must_use]
    pub fn moderation(mut self, completions: u16, period: Duration) -> Self {
        self.moderation = Some((completions, period));
        self
    }

    /// Makes it.
    ///
    /// # Errors
    ///
    /// [`SetupError::TooSmall`] for a capacity of 0, [`SetupError::Limit`] beyond the device's, [`SetupError::Verb`] if the
    /// provider refuses; with EOPNOTSUPP, if it has no moderation; with EAGAIN, if the machine has no thread left to tell of a dead queue.
    pub fn build(self) -> Result<CompletionQueue, SetupError> {
        let channel = if self.mode.arms() { Some(Channel::new(&self.device)?) } else { None };
        let vector = self.vector.unwrap_or_else(|| self.device.next_vector());
        let cq = Cq::on_vector(&self.device, self.capacity, channel.as_ref(), vector, 0)?;
        if let Some((completions, period)) = self.moderation {
            cq.moderate(completions, period)?;
        }
        let shared = Arc::new(CompletionQueueCore::new(cq, channel, self.mode));
        let weak = Arc::downgrade(&shared);
        shared.verbs().on_fault(Box::new(move || {
            // Finds the queue dead, and ends what is on it.
            if let Some(shared) = weak.upgrade() {
                shared.drain();
            }
        }))?;
        if let CompletionMode::BusyPoll(poller) = shared.mode() {
            let weak: Weak<CompletionQueueCore> = Arc::downgrade(&shared);
            poller.serve(weak);
        }
        Ok(CompletionQueue { shared })
    }
}

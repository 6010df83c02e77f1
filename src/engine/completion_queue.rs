#![forbid(unsafe_code)]

use std::fmt;
use std::sync::{Arc, Weak};
use std::time::Duration;

use super::completion_counters::CompletionQueueCounters;
use super::completion_mode::CompletionMode;
use super::drainer::Drainer;
use crate::dispatch::CqCounters;
use crate::error::{SetupError, VerbError};
use crate::verbs::{Channel, Cq, Device};

/// A completion queue with its mode of waiting. Clones share it.
///
/// Many queue pairs may share one. Each reserves entries, so the queue cannot overrun.
///
/// ```
/// use tokio_rdma::{CompletionMode, CompletionQueue, Device};
///
/// let device = Device::open_default_or_software()?;
/// let mode = CompletionMode::Hybrid;
/// let queue = CompletionQueue::builder(&device).capacity(4096).mode(mode).build()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct CompletionQueue {
    shared: Arc<Drainer>,
}

impl CompletionQueue {
    /// Creates a queue with the given `mode` and the
    /// [default capacity](CompletionQueueBuilder::capacity).
    ///
    /// # Errors
    ///
    /// As for [`CompletionQueueBuilder::build`].
    pub fn new(device: &Device, mode: CompletionMode) -> Result<Self, SetupError> {
        Self::builder(device).mode(mode).build()
    }

    /// Returns a builder for a queue of this device.
    #[must_use]
    pub fn builder(device: &Device) -> CompletionQueueBuilder {
        CompletionQueueBuilder {
            device: device.clone(),
            capacity: None,
            mode: CompletionMode::default(),
            vector: None,
            moderation: None,
            timestamps: false,
        }
    }

    /// Returns the device of the queue.
    #[must_use]
    pub fn device(&self) -> &Device {
        self.cq().device()
    }

    /// Returns the number that identifies the queue in
    /// [`AsyncEvent::CqError`](crate::types::AsyncEvent::CqError).
    #[must_use]
    pub fn id(&self) -> u64 {
        self.cq().id()
    }

    /// Returns the number of entries; at least as many as requested.
    #[must_use]
    pub fn capacity(&self) -> u32 {
        self.cq().capacity()
    }

    /// Returns why the queue is dead (overrun, or its device is gone), or `None` while it works.
    /// Operations on a dead queue fail.
    #[must_use]
    pub fn failure(&self) -> Option<VerbError> {
        self.shared.failure()
    }

    /// Returns the counters of completions, events and losses, if the device is a software device.
    #[must_use]
    pub fn software_counters(&self) -> Option<CqCounters> {
        self.cq().software_counters()
    }

    /// Returns the bare queue, for experiments that disturb it. For completions of a [bare queue
    /// pair](crate::verbs::Qp), create a [bare completion queue](crate::verbs::Cq).
    ///
    /// - An operation whose completion [`Cq::poll`] takes does not complete before its queue pair
    ///   is closed.
    /// - A waiting operation may never be woken after [`Cq::arm`], [`Cq::acknowledge`] or a take
    ///   from [`Cq::channel`]. Its buffers stay in use meanwhile.
    /// - A [`Cq::resize`] to fewer entries than [are reserved](CompletionQueueCounters::reserved)
    ///   lets the queue overrun, which ends all its operations.
    /// - [Work request numbers](crate::verbs::Qp::post_send) of a bare queue pair that uses the
    ///   queue must not be those of operations.
    #[must_use]
    pub fn verbs(&self) -> &Cq {
        self.cq()
    }

    pub(crate) fn cq(&self) -> &Cq {
        self.shared.verbs()
    }

    /// Returns the counters of the queue.
    #[must_use]
    pub fn counters(&self) -> CompletionQueueCounters {
        self.shared.counters()
    }

    pub(crate) fn shared(&self) -> &Arc<Drainer> {
        &self.shared
    }

    pub(crate) fn same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.shared, &other.shared)
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

/// A builder for a [`CompletionQueue`].
#[derive(Debug, Clone)]
pub struct CompletionQueueBuilder {
    device: Device,
    capacity: Option<u32>,
    mode: CompletionMode,
    vector: Option<u32>,
    moderation: Option<(u16, Duration)>,
    timestamps: bool,
}

impl CompletionQueueBuilder {
    /// Sets the number of entries. Each queue pair reserves as many as its queues hold work
    /// requests. A device may grant more (`ibv_create_cq(3)`); see
    /// [`CompletionQueueCounters::capacity`].
    ///
    /// The default is 16,384, enough for 64 queue pairs with default settings, or the device's
    /// limit if that is lower. On ConnectX adapters, with 64-byte entries, that locks 1 MiB of
    /// memory; if it is not available, the queue has 1024 entries. The software device allocates
    /// entries with use.
    ///
    /// A queue of the default capacity doubles when queue pairs need more, up to the device's limit
    /// (`ibv_resize_cq(3)`), except on the direct data path of ConnectX adapters. It does not
    /// shrink. Where it cannot grow, creating a queue pair fails with
    /// [`SetupError::CompletionQueueFull`].
    #[must_use]
    pub fn capacity(mut self, completions: u32) -> Self {
        self.capacity = Some(completions);
        self
    }

    /// Sets how tasks wait; default: [`CompletionMode::Event`].
    #[must_use]
    pub fn mode(mut self, mode: CompletionMode) -> Self {
        self.mode = mode;
        self
    }

    /// Sets the completion vector that interrupts; default: each vector of the device in turn.
    #[must_use]
    pub fn vector(mut self, vector: u32) -> Self {
        self.vector = Some(vector);
        self
    }

    /// Limits the rate of events, as [`Cq::moderate`] does; default no moderation.
    #[must_use]
    pub fn moderation(mut self, completions: u16, period: Duration) -> Self {
        self.moderation = Some((completions, period));
        self
    }

    /// Requests the times at which the device completes operations, `ibv_create_cq_ex(3)`; default:
    /// false. [`Operation::timestamped`](crate::op::Operation::timestamped) returns them.
    ///
    /// Each operation of such a queue costs more: a task no longer takes its completion straight
    /// from the device. On ConnectX adapters, entries of the queue are not compressed.
    #[must_use]
    pub fn timestamps(mut self, timestamps: bool) -> Self {
        self.timestamps = timestamps;
        self
    }

    /// Creates the queue.
    ///
    /// # Errors
    ///
    /// - [`SetupError::Unsupported`] for timestamps if the device has no
    ///   [clock](crate::types::DeviceAttr::clock);
    /// - [`SetupError::TooSmall`] for a capacity of 0;
    /// - [`SetupError::Limit`] for a capacity above the device's limit;
    /// - [`SetupError::Verb`] if the provider refuses: with EOPNOTSUPP if it has no moderation,
    ///   with EAGAIN if the thread that reports a dead queue cannot be started.
    pub fn build(self) -> Result<CompletionQueue, SetupError> {
        let channel = if self.mode.arms() { Some(Channel::new(&self.device)?) } else { None };
        let vector = self.vector.unwrap_or_else(|| self.device.next_vector());
        let cq = self.create(channel.as_ref(), vector)?;
        if let Some((completions, period)) = self.moderation {
            cq.moderate(completions, period)?;
        }
        let shared = Arc::new(Drainer::new(cq, channel, self.mode, self.capacity.is_none()));
        let weak = Arc::downgrade(&shared);
        shared.verbs().on_fault(Box::new(move || {
            // The drain finds the queue dead.
            if let Some(shared) = weak.upgrade() {
                shared.drain();
            }
        }))?;
        if let CompletionMode::BusyPoll(poller) = shared.mode() {
            let weak: Weak<Drainer> = Arc::downgrade(&shared);
            poller.serve(weak);
        }
        Ok(CompletionQueue { shared })
    }

    fn create(&self, channel: Option<&Channel>, vector: u32) -> Result<Cq, SetupError> {
        let create = |capacity| match self.timestamps {
            true => Cq::timestamped(&self.device, capacity, channel, vector, 0),
            false => Cq::on_vector(&self.device, capacity, channel, vector, 0),
        };
        if let Some(capacity) = self.capacity {
            return create(capacity);
        }
        let limit = self.device.attr().max_cqe.max(1);
        match create(DEFAULT_CAPACITY.min(limit)) {
            Err(SetupError::Verb(error)) if error.errno == VerbError::ENOMEM => {
                create(SMALL_CAPACITY.min(limit))
            }
            created => created,
        }
    }
}

const DEFAULT_CAPACITY: u32 = 64 * 2 * 128;
/// Fits a limit of 64 KiB on locked memory.
const SMALL_CAPACITY: u32 = 1024;

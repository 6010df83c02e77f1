//! Completion queue: poll and arm.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use super::async_events::{Fault, Listener};
use super::{Channel, Device};
use crate::dispatch;
use crate::dispatch::CqCounters;
use crate::error::{LimitError, SetupError, VerbError};
use crate::types::WorkCompletion;
use rdma_provider::contract::{Context as _, Cq as _};

/// Bare completion queue, `ibv_create_cq(3)`; clones share it.
///
/// ```
/// use tokio_rdma::types::WorkCompletion;
/// use tokio_rdma::verbs::Cq;
/// # use tokio_rdma::Device;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let device = Device::open_default()?;
/// let cq = Cq::new(&device, 16, None, 0)?;
/// let mut completions = [WorkCompletion::default(); 4];
/// assert_eq!(cq.poll(&mut completions)?, 0);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Cq {
    inner: Arc<Inner>,
}

struct Inner {
    raw: dispatch::Cq,
    channel: Option<Channel>,
    device: Device,
    fault: Arc<Fault>,
    /// Polls that found nothing, modulo 2^32.
    empty: AtomicU32,
}

/// Polls that find nothing before one looks for asynchronous events: a device that has been removed is heard of by those
/// only. About a millisecond of a thread that does nothing else.
const POLLS_BEFORE_EVENTS: u32 = 1 << 14;

impl Cq {
    /// A queue for at least `capacity` completions, with its events (marked `cookie`) on `channel`.
    ///
    /// # Errors
    ///
    /// [`SetupError::TooSmall`] for a capacity of 0, [`SetupError::Limit`] above the device's, [`SetupError::Foreign`] for a
    /// channel of another device, [`SetupError::Verb`] if the provider refuses.
    pub fn new(
        device: &Device,
        capacity: u32,
        channel: Option<&Channel>,
        cookie: u64,
    ) -> Result<Self, SetupError> {
        Self::on_vector(device, capacity, channel, 0, cookie)
    }

    /// As [`new`](Self::new), with the interrupt of completion vector `vector`.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new), and for a vector the device does not have.
    pub fn on_vector(
        device: &Device,
        capacity: u32,
        channel: Option<&Channel>,
        vector: u32,
        cookie: u64,
    ) -> Result<Self, SetupError> {
        let attr = device.attr();
        SetupError::at_least("completion queue entries (capacity)", capacity.into(), 1)?;
        LimitError::check(
            "completion queue entries (capacity)",
            capacity.into(),
            attr.max_cqe.into(),
        )?;
        LimitError::check(
            "completion vector",
            vector.into(),
            attr.completion_vectors.saturating_sub(1).into(),
        )?;
        if channel.is_some_and(|channel| !channel.device().same(device)) {
            return Err(SetupError::Foreign { what: "completion channel" });
        }
        let raw =
            device.context().create_cq(capacity, channel.map(Channel::raw), vector, cookie)?;
        let fault = Fault::new(raw.id());
        device.async_events().watch(&fault);
        let (channel, device, empty) = (channel.cloned(), device.clone(), AtomicU32::new(0));
        Ok(Self { inner: Arc::new(Inner { raw, channel, device, fault, empty }) })
    }

    /// Number by which asynchronous events name it.
    #[must_use]
    pub fn id(&self) -> u64 {
        self.inner.raw.id()
    }

    /// Completions it holds.
    #[must_use]
    pub fn capacity(&self) -> u32 {
        self.inner.raw.capacity()
    }

    /// Takes the oldest completions, `ibv_poll_cq(3)`; how many were written to `out`.
    ///
    /// # Errors
    ///
    /// [`VerbError`] for ever once the queue was overrun, and once it is empty, if its device is lost: by itself, or because
    /// an asynchronous event says so.
    #[inline(always)]
    pub fn poll(&self, out: &mut [WorkCompletion]) -> Result<usize, VerbError> {
        match self.take(out) {
            Ok(0) => self.found_nothing(),
            found => found,
        }
    }

    /// As [`poll`](Self::poll), for who asks [`found_nothing`](Self::found_nothing) if it finds none.
    #[inline(always)]
    pub(crate) fn take(&self, out: &mut [WorkCompletion]) -> Result<usize, VerbError> {
        self.inner.raw.poll(out)
    }

    /// 0, if there is no reason for it.
    #[inline(never)]
    pub(crate) fn found_nothing(&self) -> Result<usize, VerbError> {
        let empty = self.inner.empty.load(Ordering::Relaxed).wrapping_add(1);
        self.inner.empty.store(empty, Ordering::Relaxed);
        if empty.is_multiple_of(POLLS_BEFORE_EVENTS) {
            self.inner.device.read_events();
        }
        self.inner.fault.check().map(|()| 0)
    }

    /// Calls `listener` when an asynchronous event says that the queue is dead. EAGAIN: there is no thread to do so.
    pub(crate) fn on_fault(&self, listener: Box<Listener>) -> Result<(), VerbError> {
        self.inner.fault.listen(listener)
    }

    /// Asks for one event at the next completion (the next solicited or failed one if `solicited_only`),
    /// `ibv_req_notify_cq(3)`. Completions already there raise none: poll again afterwards.
    ///
    /// # Errors
    ///
    /// [`VerbError`] as the provider gives it.
    pub fn arm(&self, solicited_only: bool) -> Result<(), VerbError> {
        self.inner.raw.arm(solicited_only)
    }

    /// Has the device raise an event only when so many `completions` are there or `period` (at most 65,535 µs, in whole ones: the
    /// next counts) has passed since the first of them, `ibv_modify_cq(3)`. 0 and 0: at every completion.
    ///
    /// # Errors
    ///
    /// [`SetupError::Limit`] for a longer period, [`SetupError::Verb`] with EOPNOTSUPP if the device has no moderation.
    pub fn moderate(&self, completions: u16, period: Duration) -> Result<(), SetupError> {
        // Rounded up: less than a microsecond is not 0, which means no moderation.
        let period = u64::try_from(period.as_nanos().div_ceil(1000)).unwrap_or(u64::MAX);
        LimitError::check("moderation period in microseconds", period, u16::MAX.into())?;
        Ok(self.inner.raw.moderate(completions, period as u16)?)
    }

    /// Acknowledges events taken from the channel, `ibv_ack_cq_events(3)`.
    pub fn acknowledge(&self, events: u32) {
        self.inner.raw.ack(events);
    }

    /// Completions, events and losses so far, if it is of a software device.
    #[must_use]
    pub fn software_counters(&self) -> Option<CqCounters> {
        self.inner.raw.software_counters()
    }

    /// True for a completion queue of the software device.
    pub(crate) fn is_software(&self) -> bool {
        self.inner.raw.is_software()
    }

    /// The channel its events go to.
    #[must_use]
    pub fn channel(&self) -> Option<&Channel> {
        self.inner.channel.as_ref()
    }

    /// The device it belongs to.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.inner.device
    }

    pub(crate) fn raw(&self) -> &dispatch::Cq {
        &self.inner.raw
    }
}

impl fmt::Debug for Cq {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cq")
            .field("id", &self.id())
            .field("capacity", &self.capacity())
            .finish_non_exhaustive()
    }
}

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

#[cfg(doc)]
use super::DeviceClock;
use super::async_events::{Fault, Listener};
use super::{Channel, Device};
use crate::dispatch;
use crate::dispatch::CqCounters;
use crate::error::{LimitError, SetupError, VerbError};
use crate::types::{DeviceAttr, TimestampedCompletion, WorkCompletion};
use rdma_provider::contract::{Context as _, Cq as _, CqInit};

/// A completion queue of the verbs interface, `ibv_create_cq(3)`. Clones refer to the same queue.
///
/// ```
/// use tokio_rdma::types::WorkCompletion;
/// use tokio_rdma::verbs::{Channel, Cq};
/// # use tokio_rdma::Device;
///
/// # let device = Device::open_default_or_software()?;
/// let channel = Channel::new(&device)?;
/// let cq = Cq::new(&device, 16, Some(&channel), 7)?;
/// cq.arm(false)?;
/// let mut completions = [WorkCompletion::default(); 4];
/// assert_eq!(cq.poll(&mut completions)?, 0);
/// // Wait until the descriptor of the channel is readable, then take the event.
/// assert_eq!(channel.next_event()?, None);
/// # Ok::<(), Box<dyn std::error::Error>>(())
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
    empty: AtomicU32,
    is_timestamped: bool,
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.device.async_events().unwatch(&self.fault);
    }
}

/// Empty polls, about 1 ms of continuous polling, between two checks for asynchronous events. A
/// poller learns of a removed device only by these.
const POLLS_BEFORE_EVENTS: u32 = 1 << 14;

impl Cq {
    /// Creates a queue for at least `capacity` completions, with events on `channel` marked
    /// `cookie`.
    ///
    /// # Errors
    ///
    /// - [`SetupError::TooSmall`] if `capacity` is 0;
    /// - [`SetupError::Limit`] for more completions or a higher vector than the device supports;
    /// - [`SetupError::Foreign`] for a channel of another device.
    pub fn new(
        device: &Device,
        capacity: u32,
        channel: Option<&Channel>,
        cookie: u64,
    ) -> Result<Self, SetupError> {
        Self::on_vector(device, capacity, channel, 0, cookie)
    }

    /// Creates a queue like [`new`](Self::new), with the interrupt of completion vector `vector`.
    ///
    /// # Errors
    ///
    /// As for `new`.
    pub fn on_vector(
        device: &Device,
        capacity: u32,
        channel: Option<&Channel>,
        vector: u32,
        cookie: u64,
    ) -> Result<Self, SetupError> {
        Self::create(device, capacity, channel, vector, cookie, false)
    }

    /// Creates a queue like [`on_vector`](Self::on_vector), with timestamps, `ibv_create_cq_ex(3)`.
    /// [`poll_timestamped`](Self::poll_timestamped) returns them; [`DeviceClock`] converts them.
    ///
    /// # Errors
    ///
    /// See [`new`](Self::new). [`SetupError::Unsupported`] if the device has no
    /// [clock](DeviceAttr::clock).
    pub fn timestamped(
        device: &Device,
        capacity: u32,
        channel: Option<&Channel>,
        vector: u32,
        cookie: u64,
    ) -> Result<Self, SetupError> {
        device.clock_attr()?;
        Self::create(device, capacity, channel, vector, cookie, true)
    }

    fn create(
        device: &Device,
        capacity: u32,
        channel: Option<&Channel>,
        vector: u32,
        cookie: u64,
        timestamps: bool,
    ) -> Result<Self, SetupError> {
        let attr = device.attr();
        Self::check_capacity(attr, capacity)?;
        LimitError::check(
            "completion vector",
            vector.into(),
            attr.completion_vectors.saturating_sub(1).into(),
        )?;
        let same_device = channel.is_none_or(|channel| channel.device().same(device));
        SetupError::check_same(same_device, "completion channel")?;
        let raw = device.context().create_cq(&CqInit {
            capacity,
            channel: channel.map(Channel::raw),
            vector,
            cookie,
            timestamps,
        })?;
        let fault = Fault::new(raw.id());
        device.async_events().watch(&fault);
        let (channel, device, empty) = (channel.cloned(), device.clone(), AtomicU32::new(0));
        let inner = Inner { raw, channel, device, fault, empty, is_timestamped: timestamps };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Returns the number by which asynchronous events name the queue.
    #[must_use]
    pub fn id(&self) -> u64 {
        self.inner.raw.id()
    }

    /// Returns the maximum number of completions in the queue.
    #[must_use]
    pub fn capacity(&self) -> u32 {
        self.inner.raw.capacity()
    }

    /// Moves the oldest completions to `out` and returns their number, `ibv_poll_cq(3)`.
    ///
    /// # Errors
    ///
    /// [`VerbError`] after an overrun. On a lost device, only polls of an empty queue fail.
    #[inline]
    pub fn poll(&self, out: &mut [WorkCompletion]) -> Result<usize, VerbError> {
        match self.poll_device(out) {
            Ok(0) => self.after_empty_poll(),
            found => found,
        }
    }

    /// Moves the oldest completions to `out`, with the times at which the device wrote them, and
    /// returns their number, `ibv_start_poll(3)`. [`poll`](Self::poll) works too, and forgets the
    /// times.
    ///
    /// # Errors
    ///
    /// See [`poll`](Self::poll); EINVAL for a queue without timestamps.
    pub fn poll_timestamped(&self, out: &mut [TimestampedCompletion]) -> Result<usize, VerbError> {
        match self.poll_device_timestamped(out) {
            Ok(0) => self.after_empty_poll(),
            found => found,
        }
    }

    /// Polls the device only, see [`poll_device`](Self::poll_device).
    pub(crate) fn poll_device_timestamped(
        &self,
        out: &mut [TimestampedCompletion],
    ) -> Result<usize, VerbError> {
        self.inner.raw.poll_timestamped(out)
    }

    pub(crate) fn is_timestamped(&self) -> bool {
        self.inner.is_timestamped
    }

    /// If this returns 0, the caller calls [`after_empty_poll`](Self::after_empty_poll).
    #[inline]
    pub(crate) fn poll_device(&self, out: &mut [WorkCompletion]) -> Result<usize, VerbError> {
        self.inner.raw.poll(out)
    }

    pub(crate) fn direct(&self) -> Option<Arc<dispatch::DirectQueue>> {
        self.inner.raw.direct()
    }

    #[inline(never)]
    pub(crate) fn after_empty_poll(&self) -> Result<usize, VerbError> {
        self.count_empty_polls(1);
        self.inner.fault.check().map(|()| 0)
    }

    pub(crate) fn count_empty_polls(&self, polls: u32) {
        let before = self.inner.empty.load(Ordering::Relaxed);
        let empty = before.wrapping_add(polls);
        self.inner.empty.store(empty, Ordering::Relaxed);
        if before / POLLS_BEFORE_EVENTS != empty / POLLS_BEFORE_EVENTS {
            self.inner.device.read_events();
        }
    }

    /// Returns whether the queue is empty, if the device can tell without disturbing other pollers.
    #[inline]
    pub(crate) fn is_empty(&self) -> Option<bool> {
        self.inner.raw.is_empty()
    }

    /// Calls `listener` once, on another thread, when the queue dies. Fails with EAGAIN without a
    /// thread.
    pub(crate) fn on_fault(&self, listener: Box<Listener>) -> Result<(), VerbError> {
        self.inner.fault.listen(listener)
    }

    /// Changes the capacity to at least `capacity`, `ibv_resize_cq(3)`. Completions stay.
    ///
    /// # Errors
    ///
    /// The capacity stays as it was.
    ///
    /// - [`SetupError::TooSmall`] for 0, [`SetupError::Limit`] above the device's limit;
    /// - [`SetupError::Verb`] with EINVAL if more completions wait, with EOPNOTSUPP if the device
    ///   does not resize queues, or reads them directly (ConnectX with feature `mlx5`).
    pub fn resize(&self, capacity: u32) -> Result<(), SetupError> {
        Self::check_capacity(self.inner.device.attr(), capacity)?;
        Ok(self.inner.raw.resize(capacity)?)
    }

    fn check_capacity(attr: &DeviceAttr, capacity: u32) -> Result<(), SetupError> {
        const NAME: &str = "completion queue entries (capacity)";
        SetupError::at_least(NAME, capacity.into(), 1)?;
        Ok(LimitError::check(NAME, capacity.into(), attr.max_cqe.into())?)
    }

    /// Requests one event at the next completion, or, if `solicited_only`, at the next solicited or
    /// failed one, `ibv_req_notify_cq(3)`. Completions already in the queue raise no event, so poll
    /// again after arming.
    ///
    /// # Errors
    ///
    /// [`VerbError`].
    pub fn arm(&self, solicited_only: bool) -> Result<(), VerbError> {
        self.inner.raw.arm(solicited_only)
    }

    /// Moderates events, `ibv_modify_cq(3)`: an event waits until `completions` have arrived, or
    /// until `period` has passed since the first. The period is rounded up to microseconds, at most
    /// 65,535. Zero for both disables moderation.
    ///
    /// # Errors
    ///
    /// [`SetupError::Limit`] for a longer period, [`SetupError::Verb`] with EOPNOTSUPP if the
    /// device has no moderation.
    pub fn moderate(&self, completions: u16, period: Duration) -> Result<(), SetupError> {
        // Rounded up, because 0 would disable moderation.
        let period = u64::try_from(period.as_nanos().div_ceil(1000)).unwrap_or(u64::MAX);
        LimitError::check("moderation period in microseconds", period, u16::MAX.into())?;
        Ok(self.inner.raw.moderate(completions, period as u16)?)
    }

    /// Acknowledges events taken from the channel, `ibv_ack_cq_events(3)`.
    pub fn acknowledge(&self, events: u32) {
        self.inner.raw.ack(events);
    }

    /// Returns the counters of a software device; `None` on hardware.
    #[must_use]
    pub fn software_counters(&self) -> Option<CqCounters> {
        self.inner.raw.software_counters()
    }

    pub(crate) fn is_software(&self) -> bool {
        self.inner.raw.is_software()
    }

    /// Returns its channel.
    #[must_use]
    pub fn channel(&self) -> Option<&Channel> {
        self.inner.channel.as_ref()
    }

    /// Returns its device.
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

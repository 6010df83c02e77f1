use std::fmt;
use std::time::{Duration, Instant};

use super::Device;
use crate::clock;
use crate::error::{SetupError, VerbError};
use crate::types::{ClockAttr, Timestamp};
use rdma_provider::contract::Context as _;

/// Readings of the clock for one sample. The one with the shortest window counts, because a thread
/// may lose the processor during a reading.
const READINGS: u32 = 8;

/// Converts timestamps of a device to [`Instant`]s, by pairs of samples of both clocks.
///
/// ```
/// use tokio_rdma::verbs::DeviceClock;
/// # use tokio_rdma::{CompletionMode, CompletionQueue, Device, Pool, QueuePair};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let device = Device::open_default_or_software()?;
/// # let pd = device.protection_domain()?;
/// if device.attr().clock.is_none() {
///     return Ok(()); // `timestamps` would be refused.
/// }
/// let queue = CompletionQueue::builder(&device).timestamps(true).build()?;
/// # let qp = QueuePair::new(&pd, &queue)?;
/// # qp.connect(&qp.endpoint())?;
/// # let pool = Pool::new(&pd, 8, 2)?;
/// # let receive = qp.recv(pool.try_alloc(8)?);
/// let mut clock = DeviceClock::new(&device)?;
/// let (_buffer, timestamp) = qp.send(pool.copy_from(b"hello")?).timestamped().await?;
/// clock.synchronize()?;
/// let completed = timestamp.map(|timestamp| clock.instant(timestamp));
/// println!("{completed:?}, within {:?}", clock.error());
/// # receive.await?;
/// # Ok(())
/// # }
/// ```
///
/// The devices of a network in software share its clock. Clocks of different adapters have nothing
/// in common but the `Instant`s of this host.
#[derive(Clone)]
pub struct DeviceClock {
    device: Device,
    attr: ClockAttr,
    earlier: Sample,
    later: Sample,
}

/// One reading of both clocks.
#[derive(Debug, Clone, Copy)]
struct Sample {
    ticks: Timestamp,
    /// The middle of the window.
    instant: Instant,
    /// The time that reading the device's clock took.
    window: Duration,
}

impl DeviceClock {
    /// Takes the first sample. Each sample reads the clock of the device eight times, about a
    /// microsecond each on an adapter, without a system call.
    ///
    /// # Errors
    ///
    /// - [`SetupError::Unsupported`] if the device has no [clock](crate::types::DeviceAttr::clock);
    /// - [`SetupError::Verb`] if its clock cannot be read: EOPNOTSUPP if the driver does not map
    ///   it, EIO if the device is lost.
    pub fn new(device: &Device) -> Result<Self, SetupError> {
        let attr = device.clock_attr()?;
        let sample = Sample::take(device)?;
        Ok(Self { device: device.clone(), attr, earlier: sample, later: sample })
    }

    /// Takes another sample, which forms a pair with the latest one. Timestamps between the two are
    /// converted best. Call it at least once in half of the time in which the clock wraps around
    /// ([`ClockAttr::mask`]; a clock of 48 bits and 1 GHz wraps after 78 hours).
    ///
    /// # Errors
    ///
    /// [`VerbError`] if the clock cannot be read; the samples stay as they are.
    pub fn synchronize(&mut self) -> Result<(), VerbError> {
        self.earlier = std::mem::replace(&mut self.later, Sample::take(&self.device)?);
        Ok(())
    }

    /// Converts a timestamp, at most half of a wrap away from the latest sample.
    ///
    /// Between the two latest samples, the result lies on the line through them, so it lies between
    /// their instants too, and is accurate within [`error`](Self::error) if both clocks ran evenly.
    /// Other timestamps are converted at the nominal frequency from the nearest of the two samples.
    /// Then the error grows by the difference to the real frequency: specifications of adapters
    /// allow around 100 µs per second.
    #[must_use]
    pub fn instant(&self, timestamp: Timestamp) -> Instant {
        let span = self.ticks(self.earlier.ticks, self.later.ticks);
        // From the later sample: the earlier one may be more than half of a wrap away.
        let since = self.ticks(self.later.ticks, timestamp);
        if span > 0 && (-span..=0).contains(&since) {
            let between = self.later.instant.duration_since(self.earlier.instant);
            let ticks = i128::from(span + since);
            let nanoseconds = between.as_nanos() as i128 * ticks / i128::from(span);
            return moved(self.earlier.instant, nanoseconds);
        }
        let is_before = span > 0 && since < -span;
        let (nearest, ticks) =
            if is_before { (&self.earlier, since + span) } else { (&self.later, since) };
        moved(nearest.instant, i128::from(ticks) * 1_000_000 / i128::from(self.attr.khz))
    }

    /// Returns the error of a conversion between the two latest samples: half of the time that
    /// reading the clock took, and a tick.
    ///
    /// This holds if a reading returns the time of the device within that window. It says nothing
    /// about how long after the operation the device stamped its completion.
    #[must_use]
    pub fn error(&self) -> Duration {
        let tick = Duration::from_nanos(1_000_000_u64.div_ceil(self.attr.khz));
        self.earlier.window.max(self.later.window) / 2 + tick
    }

    /// Returns the ticks from `from` to `to`, which are less than half of a wrap apart.
    fn ticks(&self, from: Timestamp, to: Timestamp) -> i64 {
        let unused = self.attr.mask.leading_zeros();
        (to.0.wrapping_sub(from.0) << unused) as i64 >> unused
    }
}

impl Sample {
    fn take(device: &Device) -> Result<Self, VerbError> {
        let mut best: Option<Self> = None;
        for _ in 0..READINGS {
            let before = clock::now();
            let ticks = device.context().read_clock()?;
            let window = clock::now().saturating_duration_since(before);
            if best.is_none_or(|best| window < best.window) {
                best = Some(Self { ticks, instant: before + window / 2, window });
            }
        }
        best.ok_or(VerbError::new("ibv_query_rt_values_ex", VerbError::EIO))
    }
}

/// Returns the instant `nanoseconds` later, or `instant` if it has none.
fn moved(instant: Instant, nanoseconds: i128) -> Instant {
    let distance = u64::try_from(nanoseconds.unsigned_abs()).map(Duration::from_nanos);
    let moved = distance.ok().and_then(|distance| match nanoseconds {
        0.. => instant.checked_add(distance),
        _ => instant.checked_sub(distance),
    });
    moved.unwrap_or(instant)
}

impl fmt::Debug for DeviceClock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceClock")
            .field("device", &self.device.name())
            .field("attr", &self.attr)
            .field("error", &self.error())
            .finish_non_exhaustive()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::software::Network;

    /// Returns a clock of 250 MHz and 16 bits, with samples at `ticks` and 100 µs apart.
    fn clock(ticks: [u64; 2]) -> (DeviceClock, Instant) {
        let device = Device::software_in(&Network::new(), "clock").unwrap();
        let start = Instant::now() + Duration::from_secs(1);
        let sample = |ticks, instant| Sample {
            ticks: Timestamp(ticks),
            instant,
            window: Duration::from_nanos(600),
        };
        let attr = ClockAttr::new(250_000, 0xffff).unwrap();
        let (earlier, later) =
            (sample(ticks[0], start), sample(ticks[1], start + Duration::from_micros(100)));
        (DeviceClock { device, attr, earlier, later }, start)
    }

    #[test]
    fn timestamps_between_samples_lie_on_the_line_through_them_across_a_wrap() {
        // 20,000 ticks instead of 25,000: slower than nominal.
        let (clock, start) = clock([60_000, 80_000 - 65_536]);
        let at = |ticks: u64| clock.instant(Timestamp(ticks)) - start;
        assert_eq!(at(60_000), Duration::ZERO);
        assert_eq!(at(65_000), Duration::from_micros(25));
        assert_eq!(at(70_000 - 65_536), Duration::from_micros(50));
        assert_eq!(at(80_000 - 65_536), Duration::from_micros(100));
        assert_eq!(clock.error(), Duration::from_nanos(304));
    }

    #[test]
    fn other_timestamps_are_converted_at_the_nominal_frequency_from_the_nearest_sample() {
        let (clock, start) = clock([60_000, 80_000 - 65_536]);
        let before = start - clock.instant(Timestamp(59_750));
        assert_eq!(before, Duration::from_micros(1));
        let after = clock.instant(Timestamp(80_250 - 65_536)) - start;
        assert_eq!(after, Duration::from_micros(101));
    }

    #[test]
    fn a_single_sample_converts_in_both_directions() {
        let (mut clock, start) = clock([100, 100]);
        clock.later = clock.earlier;
        assert_eq!(clock.instant(Timestamp(350)) - start, Duration::from_micros(1));
        assert_eq!(start - clock.instant(Timestamp(65_386)), Duration::from_micros(1));
    }

    #[test]
    fn times_up_to_half_of_a_wrap_from_the_later_sample_are_converted() {
        let (clock, start) = clock([0, 30_000]);
        let later = start + Duration::from_micros(100);
        let converted = clock.instant(Timestamp(40_000));
        assert_eq!(converted.checked_duration_since(later), Some(Duration::from_micros(40)));
    }
}

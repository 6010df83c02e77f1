//! Counters and latencies.

use std::fmt;
use std::time::Duration;

use hdrhistogram::Histogram;
use parking_lot::Mutex;

/// Longer latencies are recorded as this.
const LONGEST: Duration = Duration::from_secs(60);

/// Targets on real hardware: p50 of 100 µs, p99 of 500 µs.
const TARGETS: (Duration, Duration) = (Duration::from_micros(100), Duration::from_micros(500));

#[derive(Debug)]
pub(crate) struct Meter {
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    counters: Counters,
    /// In nanoseconds.
    reads: Histogram<u64>,
    waits: Histogram<u64>,
}

/// Event counts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counters {
    /// Accesses to cached pages.
    pub hits: u64,
    /// Accesses that waited for the page.
    pub misses: u64,
    /// Pages fetched from a node.
    pub fetched: u64,
    /// Pages fetched before they were requested.
    pub prefetched: u64,
    /// Pages whose fetch failed.
    pub failed: u64,
    /// Pages evicted.
    pub evicted: u64,
    /// Pages written back to all their nodes.
    pub written_back: u64,
}

/// Latency statistics.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Latency {
    /// Number of samples.
    pub count: u64,
    /// Median.
    pub p50: Duration,
    /// 99th percentile.
    pub p99: Duration,
    /// Maximum.
    pub max: Duration,
}

/// Statistics since the start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Report {
    /// Event counts.
    pub counters: Counters,
    /// Time from posting a READ to its completion.
    pub read: Latency,
    /// Time that an access waits for an uncached page, including the queue, the buffer, and the
    /// write-back of an evicted page.
    pub wait: Latency,
}

impl Meter {
    pub(crate) fn new() -> Result<Self, hdrhistogram::CreationError> {
        // Three significant digits.
        let histogram = || Histogram::new_with_max(nanoseconds(LONGEST), 3);
        let inner =
            Inner { counters: Counters::default(), reads: histogram()?, waits: histogram()? };
        Ok(Self { inner: Mutex::new(inner) })
    }

    pub(crate) fn count(&self, count: impl FnOnce(&mut Counters)) {
        count(&mut self.inner.lock().counters);
    }

    pub(crate) fn read(&self, time: Duration) {
        self.inner.lock().reads.saturating_record(nanoseconds(time));
    }

    pub(crate) fn waited(&self, time: Duration) {
        let mut inner = self.inner.lock();
        inner.counters.misses += 1;
        inner.waits.saturating_record(nanoseconds(time));
    }

    pub(crate) fn report(&self) -> Report {
        let inner = self.inner.lock();
        Report {
            counters: inner.counters,
            read: latency(&inner.reads),
            wait: latency(&inner.waits),
        }
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

fn latency(histogram: &Histogram<u64>) -> Latency {
    let at = |quantile| Duration::from_nanos(histogram.value_at_quantile(quantile));
    Latency {
        count: histogram.len(),
        p50: at(0.5),
        p99: at(0.99),
        max: Duration::from_nanos(histogram.max()),
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Counters { hits, misses, fetched, prefetched, failed, evicted, written_back } =
            self.counters;
        writeln!(
            f,
            "{hits} hits, {misses} misses; {fetched} pages fetched, {prefetched} of them ahead, \
             {failed} failed"
        )?;
        writeln!(f, "{evicted} pages evicted, {written_back} written back")?;
        writeln!(f, "latency in µs        p50       p99       max")?;
        let micros = |time: Duration| time.as_secs_f64() * 1e6;
        for (name, latency) in [("READ", self.read), ("page", self.wait)] {
            let Latency { p50, p99, max, .. } = latency;
            writeln!(
                f,
                "{name:<14} {:>9.1} {:>9.1} {:>9.1}",
                micros(p50),
                micros(p99),
                micros(max)
            )?;
        }
        let (p50, p99) = TARGETS;
        write!(f, "{:<14} {:>9.1} {:>9.1}   on real hardware", "target", micros(p50), micros(p99))
    }
}

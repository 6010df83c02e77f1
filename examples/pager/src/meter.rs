//! What pages took.

use std::fmt;
use std::time::Duration;

use hdrhistogram::Histogram;
use parking_lot::Mutex;

/// Longest time that is told from longer ones: no page takes it.
const LONGEST: Duration = Duration::from_secs(60);

/// What was asked of real hardware: half of all pages in 100 µs, 99 of 100 in 500 µs.
const TARGETS: (Duration, Duration) = (Duration::from_micros(100), Duration::from_micros(500));

/// Counts, by many tasks.
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

/// What was done.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counters {
    /// Uses of a page that was in the cache.
    pub hits: u64,
    /// Uses that had to wait for it.
    pub misses: u64,
    /// Pages fetched from a node.
    pub fetched: u64,
    /// Of these, before anybody asked.
    pub prefetched: u64,
    /// Pages that could not be fetched.
    pub failed: u64,
    /// Pages that made room for others.
    pub evicted: u64,
    /// Pages written to all their nodes.
    pub written_back: u64,
}

/// Latencies of one kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Latency {
    /// How many.
    pub count: u64,
    /// Half took at most this.
    pub p50: Duration,
    /// 99 of 100 took at most this.
    pub p99: Duration,
    /// The longest.
    pub max: Duration,
}

/// What was seen so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Report {
    /// What was done.
    pub counters: Counters,
    /// From posting a READ to the page.
    pub read: Latency,
    /// From asking for a page that is not in the cache to having it: with the wait for a place in line, for a buffer, and,
    /// if that buffer has to be written back first, for that.
    pub wait: Latency,
}

impl Meter {
    pub(crate) fn new() -> Result<Self, hdrhistogram::CreationError> {
        // Three digits: to a thousandth.
        let histogram = || Histogram::new_with_max(nanoseconds(LONGEST), 3);
        let inner =
            Inner { counters: Counters::default(), reads: histogram()?, waits: histogram()? };
        Ok(Self { inner: Mutex::new(inner) })
    }

    pub(crate) fn count(&self, count: impl FnOnce(&mut Counters)) {
        count(&mut self.inner.lock().counters);
    }

    /// A READ gave a page.
    pub(crate) fn read(&self, time: Duration) {
        self.inner.lock().reads.saturating_record(nanoseconds(time));
    }

    /// Somebody has waited for a page.
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
            "{hits} hits, {misses} misses; {fetched} pages fetched, {prefetched} of them ahead, {failed} not"
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

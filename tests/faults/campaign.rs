//! Runs seeds on two threads and prints how to repeat a failed one.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// The default number of seeds. A release build runs a seed in a tenth of the time.
const SEEDS: u64 = if cfg!(debug_assertions) { 120 } else { 2000 };
const THREADS: usize = 2;

fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name}={text} is not a number")))
}

/// Runs `run(seed, verbose)` for a fraction `part` of the configured number of seeds.
///
/// Returns the results in the order of the seeds, or `None` if `TOKIO_RDMA_SEED` selects one seed.
pub(crate) fn seeds<R: Send>(
    test: &str,
    part: f64,
    run: impl Fn(u64, bool) -> R + Sync,
) -> Option<Vec<R>> {
    if let Some(seed) = number("TOKIO_RDMA_SEED") {
        // Another campaign of this process may have set the subscriber.
        let _ = tracing::subscriber::set_global_default(Printer);
        run(seed, true);
        return None;
    }
    let start = Instant::now();
    let count = (number("TOKIO_RDMA_SEEDS").unwrap_or(SEEDS) as f64 * part).ceil() as u64;
    let (next, failed) = (AtomicU64::new(0), AtomicU64::new(0));
    let results = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                // A few failures are enough.
                while failed.load(Ordering::Relaxed) < 3 {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= count {
                        break;
                    }
                    match catch_unwind(AssertUnwindSafe(|| run(seed, false))) {
                        Ok(result) => results.lock().unwrap().push((seed, result)),
                        Err(_) => {
                            failed.fetch_add(1, Ordering::Relaxed);
                            eprintln!(
                                "seed {seed} failed; replay it with TOKIO_RDMA_SEED={seed} cargo \
                                 test --test faults {test} -- --exact --nocapture"
                            );
                        }
                    }
                }
            });
        }
    });
    let failed = failed.into_inner();
    assert!(failed == 0, "{failed} seeds of {test} failed, see above");
    println!("{test}: {count} seeds in {:.1} s", start.elapsed().as_secs_f64());
    let mut results = results.into_inner().unwrap();
    results.sort_by_key(|&(seed, _)| seed);
    Some(results.into_iter().map(|(_, result)| result).collect())
}

/// A hash of the events of a run, which are also printed in verbose mode.
#[derive(Debug)]
pub(crate) struct Trace {
    verbose: bool,
    hash: u64,
}

impl Trace {
    pub(crate) fn new(verbose: bool) -> Self {
        // FNV-1a.
        Self { verbose, hash: 0xcbf2_9ce4_8422_2325 }
    }

    pub(crate) fn add(&mut self, values: &[u64]) {
        for byte in values.iter().flat_map(|value| value.to_le_bytes()) {
            self.hash = (self.hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
        }
    }

    pub(crate) fn print(&self, what: impl FnOnce() -> String) {
        if self.verbose {
            println!("{}", what());
        }
    }

    pub(crate) fn hash(&self) -> u64 {
        self.hash
    }
}

/// A subscriber that prints the crate's events, for the run of a single seed.
struct Printer;

struct Line(String);

impl tracing::field::Visit for Line {
    fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn std::fmt::Debug) {
        self.0.push_str(&format!(" {}={value:?}", field.name()));
    }
}

impl tracing::Subscriber for Printer {
    fn enabled(&self, _metadata: &tracing::Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, _span: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn record(&self, _span: &tracing::span::Id, _values: &tracing::span::Record<'_>) {}

    fn record_follows_from(&self, _span: &tracing::span::Id, _follows: &tracing::span::Id) {}

    fn event(&self, event: &tracing::Event<'_>) {
        let mut line = Line(String::from("   "));
        event.record(&mut line);
        println!("{}", line.0);
    }

    fn enter(&self, _span: &tracing::span::Id) {}

    fn exit(&self, _span: &tracing::span::Id) {}
}

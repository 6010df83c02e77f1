//! The report, as tables and as JSON.

use std::collections::BTreeMap;
use std::fmt;

use hdrhistogram::Histogram;
use serde::Serialize;
use tokio_rdma::Device;

use crate::Result;
use crate::args::Options;
use crate::case::{Case, Over, Work};
use crate::measure::Round;

#[derive(Debug, Serialize)]
pub(crate) struct Report {
    pub(crate) device: String,
    pub(crate) server_device: String,
    pub(crate) processes: u32,
    /// All parameters; the size is in each result.
    #[serde(flatten)]
    pub(crate) case: Case,
    pub(crate) threads: usize,
    pub(crate) seconds: f64,
    pub(crate) rounds: u32,
    pub(crate) results: Vec<Entry>,
    /// How far the counters of the client's port have moved, by all programs that use it.
    pub(crate) port_counters: BTreeMap<String, u64>,
    pub(crate) not_counted: [&'static str; 1],
}

/// A process without privileges cannot count its own system calls.
const NOT_COUNTED: [&str; 1] = [
    "system calls: counting them needs a tracer (strace -f -c), which slows the program; voluntary \
    context switches (sleeps) are counted instead",
];

/// The results of one size.
#[derive(Debug, Serialize)]
pub(crate) struct Entry {
    pub(crate) over: Over,
    pub(crate) size: usize,
    pub(crate) operations: u64,
    /// The rate of the median round.
    pub(crate) operations_per_second: f64,
    pub(crate) bytes_per_second: f64,
    /// The rate of each round, in order.
    pub(crate) operations_per_second_of_rounds: Vec<f64>,
    pub(crate) microseconds: Times,
    /// Processor time of both ends.
    pub(crate) cpu_microseconds_per_operation: f64,
    pub(crate) cpu_in_kernel: f64,
    pub(crate) sleeps_per_operation: f64,
    pub(crate) preemptions_per_operation: f64,
    /// Quantiles and microseconds, for the plot.
    pub(crate) distribution: Vec<(f64, f64)>,
}

/// Microseconds from posting to completion or answer.
#[derive(Debug, Serialize)]
pub(crate) struct Times {
    pub(crate) min: f64,
    pub(crate) mean: f64,
    pub(crate) p50: f64,
    pub(crate) p90: f64,
    pub(crate) p99: f64,
    pub(crate) p99_9: f64,
    pub(crate) p99_99: f64,
    pub(crate) max: f64,
}

impl Entry {
    pub(crate) fn new(over: Over, size: usize, rounds: &[Round]) -> Result<Self> {
        let mut times = Histogram::<u64>::new(3)?;
        let mut operations = 0;
        for round in rounds {
            times.add(&round.times)?;
            operations += round.operations;
        }
        let each =
            |of: fn(&Round) -> f64| rounds.iter().map(of).sum::<f64>() / operations.max(1) as f64;
        let rates: Vec<f64> = rounds.iter().map(Round::rate).collect();
        let mut sorted = rates.clone();
        sorted.sort_by(f64::total_cmp);
        let rate = sorted.get(sorted.len() / 2).copied().ok_or("no round")?;
        let cpu = each(|round| round.usage.user + round.usage.system);
        Ok(Self {
            over,
            size,
            operations,
            operations_per_second: rate,
            bytes_per_second: rate * size as f64,
            operations_per_second_of_rounds: rates,
            microseconds: Times::new(&times),
            cpu_microseconds_per_operation: cpu * 1e6,
            cpu_in_kernel: if cpu > 0.0 { each(|round| round.usage.system) / cpu } else { 0.0 },
            sleeps_per_operation: each(|round| round.usage.sleeps as f64),
            preemptions_per_operation: each(|round| round.usage.preemptions as f64),
            distribution: distribution(&times),
        })
    }
}

impl Times {
    pub(crate) fn new(times: &Histogram<u64>) -> Self {
        let at = |quantile| times.value_at_quantile(quantile) as f64 / 1e3;
        Self {
            min: times.min() as f64 / 1e3,
            mean: times.mean() / 1e3,
            p50: at(0.5),
            p90: at(0.9),
            p99: at(0.99),
            p99_9: at(0.999),
            p99_99: at(0.9999),
            max: times.max() as f64 / 1e3,
        }
    }
}

/// Returns times at quantiles that approach 1, as far as the number of values resolves them.
fn distribution(times: &Histogram<u64>) -> Vec<(f64, f64)> {
    // Ten steps per nine.
    let quantiles = (0..=50).map(|step| 1.0 - 10_f64.powf(-f64::from(step) / 10.0));
    let resolved = quantiles.take_while(|quantile| (1.0 - quantile) * times.len() as f64 >= 1.0);
    resolved.map(|quantile| (quantile, times.value_at_quantile(quantile) as f64 / 1e3)).collect()
}

impl Report {
    pub(crate) fn new(
        options: &Options,
        device: &Device,
        server_device: String,
        here: bool,
        results: Vec<Entry>,
        port_counters: BTreeMap<String, u64>,
    ) -> Result<Self> {
        Ok(Self {
            device: crate::device::describe(device),
            server_device,
            processes: if here { 1 } else { 2 },
            case: options.cases.first().cloned().ok_or("nothing to measure")?,
            threads: options.threads,
            seconds: options.duration.as_secs_f64(),
            rounds: options.rounds,
            results,
            port_counters,
            not_counted: NOT_COUNTED,
        })
    }

    pub(crate) fn title(&self) -> String {
        let Case { work, verb, mode, .. } = &self.case;
        let size = match self.pairs().count() {
            1 => {
                self.results.first().map_or_else(String::new, |entry| format!(", {} B", entry.size))
            }
            _ => String::new(),
        };
        format!("{work} of {verb}{size}, {mode} mode")
    }

    pub(crate) fn place(&self) -> String {
        let place = if self.processes == 1 { "within one process" } else { "two processes" };
        let devices = match (&self.device, &self.server_device) {
            (ours, theirs) if ours == theirs => ours.clone(),
            (ours, theirs) => format!("{ours} and {theirs}"),
        };
        format!("{devices}, {place}")
    }

    pub(crate) fn settings(&self) -> String {
        let Case { depth, lanes, batch, inline, .. } = self.case;
        let inline = if inline { ", inline" } else { "" };
        let Self { threads, rounds, seconds, .. } = self;
        format!(
            "depth {depth}, queue pairs {lanes}, threads {threads}, batch {batch}{inline}, \
             {rounds} rounds of {seconds} s"
        )
    }

    /// Returns the RDMA results, each with the TCP result of the same size.
    pub(crate) fn pairs(&self) -> impl Iterator<Item = (&Entry, Option<&Entry>)> {
        let of = |over| self.results.iter().filter(move |entry| entry.over == over);
        of(Over::Rdma)
            .map(move |entry| (entry, of(Over::Tcp).find(|other| other.size == entry.size)))
    }

    pub(crate) fn is_compared(&self) -> bool {
        self.pairs().any(|(_, tcp)| tcp.is_some())
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}\n{}\n{}\n", self.title(), self.place(), self.settings())?;
        let what = match self.case.work {
            Work::Latency if self.case.verb.two_sided() => "µs per round trip",
            _ => "µs to completion",
        };
        writeln!(f, "{:>9} {:5} {what:>17}\n{HEAD}", "", "")?;
        for entry in &self.results {
            writeln!(f, "{entry}")?;
        }
        if self.is_compared() {
            writeln!(
                f,
                "\nRDMA relative to TCP (rate: higher is better; times and processor: lower)"
            )?;
            for (rdma, tcp) in self.pairs() {
                let Some(tcp) = tcp else { continue };
                writeln!(
                    f,
                    "{:>9}       p50 {:.2}   p99 {:.2}   rate {:.2}   processor {:.2}",
                    rdma.size,
                    rdma.microseconds.p50 / tcp.microseconds.p50,
                    rdma.microseconds.p99 / tcp.microseconds.p99,
                    rdma.operations_per_second / tcp.operations_per_second,
                    rdma.cpu_microseconds_per_operation / tcp.cpu_microseconds_per_operation,
                )?;
            }
        }
        writeln!(
            f,
            "\nper operation: processor in µs of both ends; sleeps are voluntary context switches"
        )?;
        if !self.port_counters.is_empty() {
            let moved = self.port_counters.iter().map(|(name, count)| format!("{name} {count}"));
            writeln!(f, "counters of the client's port: {}", moved.collect::<Vec<_>>().join(", "))?;
        }
        self.not_counted.iter().try_for_each(|line| writeln!(f, "not counted: {line}"))
    }
}

const HEAD: &str = "     size over         p50       p90       p99     p99.9    p99.99       \
                    max      op/s    MB/s  processor   sleeps";

impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Times { p50, p90, p99, p99_9, p99_99, max, .. } = self.microseconds;
        write!(f, "{:>9} {:5}", self.size, self.over.to_string())?;
        [p50, p90, p99, p99_9, p99_99, max]
            .iter()
            .try_for_each(|time| write!(f, " {time:>9.2}"))?;
        write!(
            f,
            " {:>9.0} {:>7.1} {:>10.3} {:>8.4}",
            self.operations_per_second,
            self.bytes_per_second / 1e6,
            self.cpu_microseconds_per_operation,
            self.sleeps_per_operation
        )
    }
}

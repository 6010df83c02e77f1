//! The report of the load generator, as a table and as JSON.

use std::fmt;
use std::time::Duration;

use hdrhistogram::Histogram;
use kv::ReadCounters;
use serde::Serialize;

use crate::Result;
use crate::args::LoadOptions;
use crate::load::{Call, Times};
use crate::place::Target;

#[derive(Debug, Serialize)]
pub(crate) struct Report {
    device: String,
    /// 1 if the server is in this process.
    processes: u32,
    clients: u32,
    depth: u32,
    keys: u32,
    value_bytes: u32,
    seconds: f64,
    calls_per_second: f64,
    /// In microseconds; `null` for a kind of call that was not made.
    get_by_read: Option<Percentiles>,
    get_by_message: Option<Percentiles>,
    put: Option<Percentiles>,
    /// The p50 of GET by message divided by the p50 of GET by READ.
    message_to_read: Option<f64>,
    reads: u64,
    torn: u64,
    fallbacks: u64,
    #[serde(skip)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct Percentiles {
    calls: u64,
    p50: f64,
    p90: f64,
    p99: f64,
    p99_9: f64,
    max: f64,
}

impl Report {
    pub(crate) fn new(
        load: LoadOptions,
        server: &Target,
        took: Duration,
        times: &Times,
        counters: ReadCounters,
    ) -> Self {
        let [get_by_read, get_by_message, put] =
            Call::ALL.map(|call| Percentiles::of(times.of(call)));
        let calls: u64 = Call::ALL.iter().map(|&call| times.of(call).len()).sum();
        let ratio = get_by_read
            .as_ref()
            .zip(get_by_message.as_ref())
            .map(|(read, message)| message.p50 / read.p50);
        Self {
            device: server.device.name().to_owned(),
            processes: if server.here { 1 } else { 2 },
            clients: load.clients,
            depth: load.depth,
            keys: load.keys,
            value_bytes: load.value,
            seconds: took.as_secs_f64(),
            calls_per_second: calls as f64 / took.as_secs_f64(),
            get_by_read,
            get_by_message,
            put,
            message_to_read: ratio,
            reads: counters.reads,
            torn: counters.torn,
            fallbacks: counters.fallbacks,
            json: load.json,
        }
    }

    pub(crate) fn print(&self) -> Result<()> {
        if self.json {
            println!("{}", serde_json::to_string_pretty(self)?);
        } else {
            println!("{self}");
        }
        Ok(())
    }
}

impl Percentiles {
    fn of(times: &Histogram<u64>) -> Option<Self> {
        let at = |quantile| times.value_at_quantile(quantile) as f64 / 1000.0;
        (!times.is_empty()).then(|| Self {
            calls: times.len(),
            p50: at(0.5),
            p90: at(0.9),
            p99: at(0.99),
            p99_9: at(0.999),
            max: times.max() as f64 / 1000.0,
        })
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { device, clients, depth, keys, value_bytes, seconds, .. } = self;
        let processes = if self.processes == 1 { "one process" } else { "two processes" };
        writeln!(
            f,
            "{device}, {processes}: {clients} clients with {depth} concurrent calls each; \
             {keys} keys, values of {value_bytes} bytes"
        )?;
        writeln!(f, "{:.0} calls/s for {seconds:.1} s", self.calls_per_second)?;
        writeln!(
            f,
            "{:<16}{:>10}{:>10}{:>10}{:>10}{:>10}{:>10}",
            "µs", "calls", "p50", "p90", "p99", "p99.9", "max"
        )?;
        let rows = [
            ("GET by READ", &self.get_by_read),
            ("GET by message", &self.get_by_message),
            ("PUT", &self.put),
        ];
        for (name, row) in rows {
            let Some(Percentiles { calls, p50, p90, p99, p99_9, max }) = row else { continue };
            writeln!(
                f,
                "{name:<16}{calls:>10}{p50:>10.1}{p90:>10.1}{p99:>10.1}{p99_9:>10.1}{max:>10.1}"
            )?;
        }
        if let Some(ratio) = self.message_to_read {
            writeln!(f, "GET by message takes {ratio:.2} times as long as by READ (p50)")?;
        }
        write!(
            f,
            "{} READs, {} torn; GETs that fell back to a message: {}",
            self.reads, self.torn, self.fallbacks
        )
    }
}

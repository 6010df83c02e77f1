//! Lab 10: eight senders and one receiver, with and without congestion notification. See
//! `examples/labs/docs/10-incast.md`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use labs::{Failure, Result, check};
use plotters::prelude::*;
use tokio::task::JoinSet;
use tokio_rdma::memory::HostMemory;
use tokio_rdma::software::{self, Bottleneck, Faults, LinkCounters, Network};
use tokio_rdma::{
    Access, CompletionMode, CompletionQueue, Device, ExposedRegion, PathConfig, Pool, QueuePair,
    RemoteRegion,
};

const SENDERS: usize = 8;
/// WRITEs in flight of each sender.
const DEPTH: usize = 4;
const LENGTH: usize = 64 << 10;
/// 10 Gbit/s.
const LINK: Bottleneck =
    Bottleneck { rate: 1_250_000_000, buffer: 256 << 10, mark_above: Some(64 << 10) };
/// One way.
const DELAY: Duration = Duration::from_micros(5);
/// All senders begin at once, with more packets than the buffer takes. No notification prevents
/// these losses. A sender that loses the end of its window waits for a timeout of at least 67 ms.
const WARM_UP: Duration = Duration::from_millis(300);
/// The part of the plot for which a rate is computed.
const BIN: Duration = Duration::from_millis(10);

fn main() -> ExitCode {
    match arguments().and_then(|(time, plot)| run(time, plot.as_deref())) {
        Ok(()) => {
            println!("incast: all checks held");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("incast: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Returns the virtual time to run, and the file for the plot.
fn arguments() -> Result<(Duration, Option<PathBuf>)> {
    use lexopt::prelude::Long;
    let (mut time, mut plot) = (Duration::from_secs(1), None);
    let mut arguments = lexopt::Parser::from_env();
    while let Some(argument) = arguments.next()? {
        match argument {
            Long("quick") => time = Duration::from_millis(600),
            Long("plot") => plot = Some(arguments.value()?.into()),
            other => {
                return Err(
                    format!("{}; usage: [--quick] [--plot FILE]", other.unexpected()).into()
                );
            }
        }
    }
    Ok((time, plot))
}

/// What happened on a network. Times are virtual.
struct Outcome {
    name: &'static str,
    /// End and duration of the WRITEs of each sender.
    senders: Vec<Vec<(Duration, Duration)>>,
    link: LinkCounters,
    retransmitted: u64,
    notifications: u64,
}

fn run(time: Duration, plot: Option<&Path>) -> Result<()> {
    let outcomes = [
        incast("not markable", PathConfig::default(), time)?,
        // ECT(0): switches may mark the packets.
        incast("ECT(0)", PathConfig::default().traffic_class(2), time)?,
    ];
    const COLUMNS: [&str; 10] = [
        "MB/s", "slowest", "fastest", "p50 µs", "p99 µs", "max µs", "lost", "resent", "marked",
        "notified",
    ];
    print_row("packets", COLUMNS.map(str::to_owned));
    for outcome in &outcomes {
        let at = |per_mille| outcome.quantile(per_mille).as_micros().to_string();
        let rates = outcome.rates(time);
        let cells = [
            format!("{:.0}", rates.iter().sum::<f64>()),
            format!("{:.1}", rates.iter().copied().fold(f64::MAX, f64::min)),
            format!("{:.1}", rates.iter().copied().fold(0.0, f64::max)),
            at(500),
            at(990),
            at(1000),
            outcome.link.lost.to_string(),
            outcome.retransmitted.to_string(),
            outcome.link.marked.to_string(),
            outcome.notifications.to_string(),
        ];
        print_row(outcome.name, cells);
    }
    if let Some(file) = plot {
        draw(&outcomes, time, file)?;
    }
    let [without, with] = &outcomes;
    check("marked packets that are not markable", without.link.marked, 0)?;
    let (unfair, fair) = (without.rates(time), with.rates(time));
    let share = |rates: &[f64]| {
        let slowest = rates.iter().copied().fold(f64::MAX, f64::min);
        slowest / (rates.iter().sum::<f64>() / SENDERS as f64)
    };
    check("without it, some have less", share(&unfair) < share(&fair), true)?;
    let slower = without.quantile(990) > 10 * with.quantile(990);
    check("without it, WRITEs wait for timeouts", slower, true)?;
    let losses = |outcome: &Outcome| outcome.link.lost;
    check("without it, more is lost", losses(without) > 10 * losses(with), true)?;
    check("with it, each sender has most of its share", share(&fair) > 0.8, true)?;
    check("with it, the link is busy", fair.iter().sum::<f64>() > 1200.0, true)
}

fn print_row(name: &str, cells: [String; 10]) {
    print!("{name:<13}");
    cells.iter().for_each(|cell| print!(" {cell:>8}"));
    println!();
}

impl Outcome {
    /// Returns the WRITEs of each sender that began after the first losses.
    fn warm(&self) -> impl Iterator<Item = impl Iterator<Item = &(Duration, Duration)>> {
        self.senders
            .iter()
            .map(|writes| writes.iter().filter(|(end, duration)| *end - *duration > WARM_UP))
    }

    /// Returns the time of a WRITE at this quantile, in thousandths.
    fn quantile(&self, per_mille: usize) -> Duration {
        let mut times: Vec<_> = self.warm().flatten().map(|&(_, duration)| duration).collect();
        times.sort_unstable();
        let last = times.len().saturating_sub(1);
        times.get(last * per_mille / 1000).copied().unwrap_or_default()
    }

    /// Returns the rate of each sender in MB/s.
    fn rates(&self, time: Duration) -> Vec<f64> {
        let seconds = (time - WARM_UP).as_secs_f64();
        self.warm().map(|writes| (writes.count() * LENGTH) as f64 / seconds / 1e6).collect()
    }
}

/// Eight devices write to one for `time`, over a link that is as fast as each of them.
fn incast(name: &'static str, path: PathConfig, time: Duration) -> Result<Outcome> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let network = Network::simulated(1, Faults::none().delay(DELAY..DELAY).bottleneck(LINK));
    let senders = async {
        let receiver = Device::software_in(&network, "receiver")?;
        let (mut ends, mut tasks) = (Vec::new(), JoinSet::new());
        for number in 0..SENDERS {
            let sender = Device::software_in(&network, &format!("sender {number}"))?;
            let (ours, pool) = end(&sender, path)?;
            let (theirs, _) = end(&receiver, path)?;
            ours.connect(&theirs.endpoint())?;
            theirs.connect(&ours.endpoint())?;
            let memory = HostMemory::zeroed(LENGTH)?;
            let region =
                ExposedRegion::new(theirs.protection_domain(), memory, Access::REMOTE_WRITE)?;
            for _ in 0..DEPTH {
                let (qp, pool, to) = (ours.clone(), pool.clone(), region.grant());
                tasks.spawn(
                    async move { Ok::<_, Failure>((number, write(qp, pool, to, time).await?)) },
                );
            }
            ends.push((ours, theirs, region));
        }
        let mut senders = vec![Vec::new(); SENDERS];
        while let Some(done) = tasks.join_next().await {
            let (number, writes) = done??;
            senders[number].extend(writes);
        }
        let counters = ends.iter().filter_map(|(ours, ..)| ours.software_counters());
        let (retransmitted, notifications) = counters.fold((0, 0), |sum, (sent, _)| {
            (sum.0 + sent.retransmitted, sum.1 + sent.congestion_notifications)
        });
        let link = network.counters();
        Ok::<_, Failure>(Outcome { name, senders, link, retransmitted, notifications })
    };
    runtime.block_on(software::drive(&network, senders))
}

fn end(device: &Device, path: PathConfig) -> Result<(QueuePair, Pool)> {
    let pd = device.protection_domain()?;
    let queue = CompletionQueue::new(device, CompletionMode::Event)?;
    let qp = QueuePair::builder(&pd, &queue).path(path).build()?;
    Ok((qp, Pool::new(&pd, LENGTH, DEPTH)?))
}

/// Writes one after the other until `time` has passed. Returns the writes that ended before.
async fn write(
    qp: QueuePair,
    pool: Pool,
    to: RemoteRegion,
    time: Duration,
) -> Result<Vec<(Duration, Duration)>> {
    let (begin, mut writes) = (software::now(), Vec::new());
    let data = pool.copy_from(&[7; LENGTH])?.freeze();
    loop {
        let start = software::now();
        qp.write(data.clone(), to).await?;
        let end = software::now();
        if end - begin > time {
            return Ok(writes);
        }
        writes.push((end - begin, end - start));
    }
}

/// Draws the rate of each sender over time.
fn draw(outcomes: &[Outcome], time: Duration, file: &Path) -> Result<()> {
    const FONT: &str = "sans-serif";
    let failed = |error: &dyn std::fmt::Display| -> Failure {
        format!("{}: {error}", file.display()).into()
    };
    let root = SVGBackend::new(file, (1000, 400)).into_drawing_area();
    root.fill(&WHITE).map_err(|error| failed(&error))?;
    let (left, right) = root.split_horizontally(500);
    for (area, outcome) in [left, right].iter().zip(outcomes) {
        let mut chart = ChartBuilder::on(area)
            .caption(outcome.name, (FONT, 17))
            .margin(14)
            .margin_right(28)
            .x_label_area_size(46)
            .y_label_area_size(60)
            .build_cartesian_2d(0.0..time.as_secs_f64() * 1e3, 0.0..LINK.rate as f64 / 1e6)
            .map_err(|error| failed(&error))?;
        chart
            .configure_mesh()
            .x_desc("time in ms (virtual)")
            .y_desc("MB/s of each of 8 senders")
            .axis_desc_style((FONT, 15))
            .label_style((FONT, 13))
            .light_line_style(WHITE)
            .x_label_formatter(&|time| format!("{time:.0}"))
            .y_label_formatter(&|rate| format!("{rate:.0}"))
            .draw()
            .map_err(|error| failed(&error))?;
        for (number, writes) in outcome.senders.iter().enumerate() {
            let bins = (time.as_nanos() / BIN.as_nanos()) as usize;
            let mut bytes = vec![0; bins];
            for (end, _) in writes {
                if let Some(bin) = bytes.get_mut((end.as_nanos() / BIN.as_nanos()) as usize) {
                    *bin += LENGTH;
                }
            }
            let points = bytes.iter().enumerate().map(|(bin, &bytes)| {
                let middle = (bin as f64 + 0.5) * BIN.as_secs_f64() * 1e3;
                (middle, bytes as f64 / BIN.as_secs_f64() / 1e6)
            });
            let line = LineSeries::new(points, Palette99::pick(number).stroke_width(2));
            chart.draw_series(line).map_err(|error| failed(&error))?;
        }
    }
    root.present().map_err(|error| failed(&error))
}

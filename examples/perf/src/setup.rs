//! `perf setup`: the cost of everything that precedes the first operation.

use std::fmt;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use serde::Serialize;
use tokio::task::JoinSet;
use tokio_rdma::memory::HostMemory;
use tokio_rdma::{
    Access, CompletionMode, CompletionQueue, Connection, Device, ExposedRegion, Listener, QueuePair,
};

use crate::Result;
use crate::args::SetupOptions;
use crate::device::{self, Reach};
use crate::measure::{Tally, Until};
use crate::report::Times;

#[derive(Debug, Serialize)]
pub(crate) struct SetupReport {
    device: String,
    seconds: f64,
    rounds: u32,
    results: Vec<Entry>,
}

/// The results of one step.
#[derive(Debug, Serialize)]
struct Entry {
    step: &'static str,
    /// Bytes of a registration.
    size: Option<usize>,
    /// Operations at once.
    parallel: u32,
    operations: u64,
    /// The rate of the median round.
    operations_per_second: f64,
    microseconds: Times,
}

pub(crate) async fn measure(options: &SetupOptions) -> Result<SetupReport> {
    let devices = devices(options.udp)?;
    let mut results = Vec::new();
    for &size in &options.size {
        results.extend(registrations(options, &devices[0], size)?);
    }
    results.extend(queue_pairs(options, &devices[0])?);
    let mut numbers = vec![1, options.parallel];
    numbers.dedup();
    for parallel in numbers {
        results.push(connections(options, &devices, parallel).await?);
    }
    Ok(SetupReport {
        device: device::describe(&devices[0]),
        seconds: options.duration.as_secs_f64(),
        rounds: options.rounds,
        results,
    })
}

/// Opens the devices of the client and the server.
fn devices(udp: bool) -> Result<[Device; 2]> {
    if udp {
        // Each takes a free loopback address, as two processes would.
        let free = || Device::open_default_towards(Ipv4Addr::LOCALHOST.into());
        return Ok([free()?, free()?]);
    }
    let device = device::open(&Reach::Process)?;
    Ok([device.clone(), device])
}

/// Registers memory for remote access. The first round, which is not counted, touches its pages.
fn registrations(options: &SetupOptions, device: &Device, size: usize) -> Result<[Entry; 2]> {
    let pd = device.protection_domain()?;
    let mut memory = Some(HostMemory::zeroed(size)?);
    steps(options, ["register", "deregister"], Some(size), || {
        let storage = memory.take().ok_or("the memory is registered")?;
        let start = Instant::now();
        let region = ExposedRegion::new(&pd, storage, Access::REMOTE_ALL)?;
        let registered = start.elapsed();
        let start = Instant::now();
        let storage = region.into_storage().map_err(|_| "failed to deregister memory")?;
        memory = Some(storage);
        Ok([registered, start.elapsed()])
    })
}

/// Creates, connects and destroys reliable queue pairs with default sizes.
fn queue_pairs(options: &SetupOptions, device: &Device) -> Result<[Entry; 3]> {
    let pd = device.protection_domain()?;
    let queue = CompletionQueue::new(device, CompletionMode::Event)?;
    let steps_of_pairs = ["create queue pair", "connect queue pair", "destroy queue pair"];
    steps(options, steps_of_pairs, None, || {
        let peer = QueuePair::new(&pd, &queue)?;
        let start = Instant::now();
        let qp = QueuePair::new(&pd, &queue)?;
        let created = start.elapsed();
        let start = Instant::now();
        qp.connect(&peer.endpoint())?;
        let connected = start.elapsed();
        let start = Instant::now();
        drop(qp);
        Ok([created, connected, start.elapsed()])
    })
}

/// Runs rounds of `iteration`, which returns the time of each step.
fn steps<const N: usize>(
    options: &SetupOptions,
    names: [&'static str; N],
    size: Option<usize>,
    mut iteration: impl FnMut() -> Result<[Duration; N]>,
) -> Result<[Entry; N]> {
    let mut rounds: [Vec<Tally>; N] = std::array::from_fn(|_| Vec::new());
    for round in 0..=options.rounds {
        let until = Until::after(if round == 0 { options.warm_up() } else { options.duration });
        let mut tallies = names.iter().map(|_| Tally::new()).collect::<Result<Vec<_>>>()?;
        loop {
            for (tally, time) in tallies.iter_mut().zip(iteration()?) {
                tally.add(1, time)?;
            }
            if until.is_over(Instant::now()) {
                break;
            }
        }
        for (rounds, tally) in rounds.iter_mut().zip(tallies) {
            // The first one warms up.
            if round > 0 {
                rounds.push(tally);
            }
        }
    }
    let mut entries = Vec::new();
    for (step, rounds) in names.into_iter().zip(rounds) {
        entries.push(Entry::new(step, size, 1, &rounds)?);
    }
    entries.try_into().map_err(|_| "each step has an entry".into())
}

/// Makes and closes connections by address, `parallel` at once, each by default settings.
async fn connections(
    options: &SetupOptions,
    [client, server]: &[Device; 2],
    parallel: u32,
) -> Result<Entry> {
    let ip = server.default_path()?.1.gid.to_ip();
    let listener = Listener::bind(server, SocketAddr::new(ip, 0)).await?;
    let address = listener.local_addr()?;
    let mut serving = JoinSet::new();
    serving.spawn(async move {
        let mut closing = JoinSet::new();
        loop {
            tokio::select! {
                accepted = listener.accept() => {
                    let accepted = accepted?;
                    closing.spawn(async move { accepted.close().await });
                }
                Some(closed) = closing.join_next() => closed??,
            }
        }
    });
    let mut rounds = Vec::new();
    for round in 0..=options.rounds {
        let time = if round == 0 { options.warm_up() } else { options.duration };
        let until = Until::after(time);
        let mut clients = JoinSet::new();
        for _ in 0..parallel {
            clients.spawn(connect_until(client.clone(), address, until));
        }
        let mut tally = Tally::new()?;
        while tally.operations == 0 || !clients.is_empty() {
            tokio::select! {
                Some(done) = clients.join_next() => {
                    let done = done??;
                    tally.operations += done.operations;
                    tally.times.add(&done.times)?;
                }
                // The server ends only with an error.
                Some(ended) = serving.join_next() => {
                    let failed: Result<()> = ended?;
                    failed?;
                }
            }
        }
        if round > 0 {
            rounds.push(tally);
        }
    }
    Entry::new("connection", None, parallel, &rounds)
}

/// Makes connections one after the other, at least one.
async fn connect_until(device: Device, address: SocketAddr, until: Until) -> Result<Tally> {
    let mut tally = Tally::new()?;
    loop {
        let start = Instant::now();
        Connection::connect(&device, address).await?.close().await?;
        tally.add(1, start.elapsed())?;
        if until.is_over(Instant::now()) {
            return Ok(tally);
        }
    }
}

impl Entry {
    fn new(
        step: &'static str,
        size: Option<usize>,
        parallel: u32,
        rounds: &[Tally],
    ) -> Result<Self> {
        let (mut times, mut operations) = (Histogram::<u64>::new(3)?, 0);
        let mut rates = Vec::new();
        for round in rounds {
            times.add(&round.times)?;
            operations += round.operations;
            rates.push(f64::from(parallel) * 1e9 / round.times.mean().max(1.0));
        }
        rates.sort_by(f64::total_cmp);
        let rate = rates.get(rates.len() / 2).copied().ok_or("no round")?;
        let microseconds = Times::new(&times);
        Ok(Self { step, size, parallel, operations, operations_per_second: rate, microseconds })
    }
}

impl fmt::Display for SetupReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { device, seconds, rounds, .. } = self;
        writeln!(f, "set-up on {device}, {rounds} rounds of {seconds} s for each step\n")?;
        writeln!(
            f,
            "{:20} {:>11} {:>8} {:>10} {:>10} {:>10} {:>10}",
            "step", "bytes", "at once", "p50, µs", "p99, µs", "max, µs", "per second"
        )?;
        for Entry { step, size, parallel, operations_per_second, microseconds, .. } in &self.results
        {
            let size = size.map_or_else(String::new, |size| size.to_string());
            let Times { p50, p99, max, .. } = microseconds;
            writeln!(
                f,
                "{step:20} {size:>11} {parallel:>8} {p50:>10.2} {p99:>10.2} {max:>10.2} \
                 {operations_per_second:>10.0}"
            )?;
        }
        writeln!(f, "\na connection is made by address and closed by both ends")
    }
}

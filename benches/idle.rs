//! The cost of many connections: `cargo bench --bench idle -- [connections=1000]
//! [sizes=64,4096,65536] [exchanges=10000] [rounds=3] [budget=1024] [until=idle]`.
//!
//! Both sides of all connections are in this process, on the software device, in one thread. A side
//! is counted while it is idle, after all have exchanged messages in turn, and when it is idle
//! again: Rust allocations, the process's memory, and descriptors.
//!
//! The median time of an exchange by each connection in turn, one per visit, is compared with ten
//! connections that take turns. Each size begins with visits that are not counted, in which
//! connections register buffers, of at most `budget` MiB.
//!
//! With `until=exchanged` it ends after the exchanges, and connections keep their buffers however
//! long a turn takes: for `scripts/costs connections`, which counts the instructions and cache
//! misses of [`among_all`].

mod common;
#[path = "../tests/common/live.rs"]
mod live;

use std::fs;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use bytes::Bytes;
use common::{Arguments, Result};
use tokio::runtime::Runtime;
use tokio_rdma::connection::BufferBudget;
use tokio_rdma::{Connection, ConnectionConfig, Device, Listener, ListenerConfig};

/// The number of connections of the comparison.
const FEW: usize = 10;

/// The visits of each connection before those that are measured.
const WARM_UP: usize = 4;

/// The connections made at once.
const AT_ONCE: usize = 32;

/// The limit for anything that waits for the other side.
const LIMIT: Duration = Duration::from_secs(1200);

type Pair = (Connection, Connection);

/// Memory and descriptors of the process.
#[derive(Clone, Copy)]
struct Held {
    allocated: usize,
    resident: usize,
    descriptors: usize,
}

impl Held {
    fn now() -> Result<Self> {
        let pages = fs::read_to_string("/proc/self/statm")?;
        let resident = pages.split(' ').nth(1).unwrap_or("0").parse::<usize>()? * 4096;
        let descriptors = fs::read_dir("/proc/self/fd")?.count();
        Ok(Self { allocated: live::bytes(), resident, descriptors })
    }

    /// Prints what was added since `before`, for each of `sides`.
    fn print(self, what: &str, before: Self, sides: usize) {
        let each = |now: usize, before: usize| now.saturating_sub(before) as f64 / sides as f64;
        println!(
            "{what:14} each side {:7.0} B allocated, {:7.0} B resident, {:.1} descriptors; {} MiB",
            each(self.allocated, before.allocated),
            each(self.resident, before.resident),
            each(self.descriptors, before.descriptors),
            self.resident >> 20,
        );
    }
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("idle: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<()> {
    let arguments = Arguments::new(&[
        ("connections", "1000"),
        ("sizes", "64,4096,65536"),
        ("exchanges", "10000"),
        ("rounds", "3"),
        ("budget", "1024"),
        ("until", "idle"),
    ])?;
    let (number, rounds) = (arguments.number("connections")?, arguments.number("rounds")?);
    let exchanges = arguments.number("exchanges")?;
    let shrink_after = match arguments.get("until") {
        "idle" => Duration::from_secs(2),
        "exchanged" => Duration::from_secs(3600),
        other => return Err(format!("invalid argument until={other}").into()),
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let device = Device::software()?;
    let config = ConnectionConfig::default()
        .budget(&BufferBudget::new((arguments.number("budget")? as u64) << 20))
        .shrink_after(shrink_after);
    // What the first connections of a device need only once.
    drop(runtime.block_on(connect(&device, &config, FEW))?);
    let before = Held::now()?;
    let start = Instant::now();
    let pairs = runtime.block_on(connect(&device, &config, number))?;
    println!("{number} connections made in {:.2} s", start.elapsed().as_secs_f64());
    Held::now()?.print("idle", before, 2 * number);
    for size in arguments.get("sizes").split(',') {
        compare(&runtime, &pairs, size.parse()?, exchanges, rounds)?;
    }
    Held::now()?.print("just used", before, 2 * number);
    if arguments.get("until") == "exchanged" {
        return Ok(());
    }
    runtime.block_on(async {
        tokio::time::timeout(LIMIT, async {
            let first = |side: &Connection| side.counters().buffer_memory == 10 * 384;
            while !pairs.iter().all(|(one, other)| first(one) && first(other)) {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        })
        .await
        .map_err(|_| "connections did not return their buffers")?;
        // The peers skip the receives.
        tokio::time::sleep(Duration::from_secs(1)).await;
        Held::now()?.print("idle again", before, 2 * number);
        Ok(())
    })
}

/// Prints the time of an exchange of `size` bytes among all connections and among few.
fn compare(
    runtime: &Runtime,
    pairs: &[Pair],
    size: usize,
    exchanges: usize,
    rounds: usize,
) -> Result<()> {
    in_turn(runtime, pairs, WARM_UP * pairs.len(), size)?;
    let (mut few, mut all) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        few.extend(in_turn(runtime, &pairs[..FEW.min(pairs.len())], exchanges, size)?);
        all.extend(among_all(runtime, pairs, exchanges, size)?);
    }
    let [few, all] = [few, all].map(|mut times| {
        let middle = times.len() / 2;
        times.select_nth_unstable(middle).1.as_secs_f64() * 1e6
    });
    println!(
        "exchange of {size:5} B, among all {all:8.2} µs, among {FEW} {few:8.2} µs: {:.2} x",
        all / few
    );
    Ok(())
}

/// Exchanges by all connections. `scripts/costs` counts its instructions.
#[inline(never)]
fn among_all(
    runtime: &Runtime,
    pairs: &[Pair],
    exchanges: usize,
    size: usize,
) -> Result<Vec<Duration>> {
    in_turn(runtime, pairs, exchanges, size)
}

/// Makes connections of a listener.
async fn connect(device: &Device, config: &ConnectionConfig, number: usize) -> Result<Vec<Pair>> {
    let listening = ListenerConfig::new(config.clone())
        .max_connections(u32::MAX)
        .max_connections_per_source(u32::MAX);
    let listener = Listener::bind_with(device, "127.0.0.1:0", listening).await?;
    let address = listener.local_addr()?;
    let mut pairs = Vec::with_capacity(number);
    while pairs.len() < number {
        let some = AT_ONCE.min(number - pairs.len());
        let made = (0..some).map(|at| {
            let config = config.clone().user_data(vec![at as u8]);
            let listener = &listener;
            async move {
                let connecting = Connection::connect_with(device, address, &config);
                tokio::try_join!(connecting, listener.accept())
            }
        });
        let made = tokio::time::timeout(LIMIT, futures::future::try_join_all(made)).await;
        let made = made.map_err(|_| "connections took too long")??;
        let (clients, mut servers): (Vec<_>, Vec<_>) = made.into_iter().unzip();
        // Accepted in any order.
        servers.sort_by_key(|server: &Connection| server.user_data()[0]);
        pairs.extend(clients.into_iter().zip(servers));
    }
    Ok(pairs)
}

/// Sends `size` bytes and an answer `exchanges` times, by each connection in turn. Returns the time
/// of each exchange.
fn in_turn(
    runtime: &Runtime,
    pairs: &[Pair],
    exchanges: usize,
    size: usize,
) -> Result<Vec<Duration>> {
    let message = Bytes::from(vec![7; size]);
    let mut times = Vec::with_capacity(exchanges);
    let exchange = async {
        for (client, server) in pairs.iter().cycle().take(exchanges) {
            let start = Instant::now();
            client.send(message.clone()).await?;
            let request = server.recv().await?.ok_or("the client has finished")?;
            server.send(request.slice(..8)).await?;
            client.recv().await?.ok_or("the server has finished")?;
            times.push(start.elapsed());
        }
        Result::Ok(())
    };
    let limited = async { tokio::time::timeout(LIMIT, exchange).await };
    runtime.block_on(limited).map_err(|_| "exchanges took too long")??;
    Ok(times)
}

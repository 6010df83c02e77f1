//! The time in which a client goes on with another server when its server is killed.

use std::net::{IpAddr, SocketAddr};
use std::process::Stdio;
use std::time::{Duration, Instant};

use kv::{ClientConfig, FailoverClient};
use tokio::io::{AsyncBufReadExt, BufReader, Lines};
use tokio::process::{Child, ChildStdout, Command};
use tokio::time::timeout;
use tokio_rdma::Device;

use crate::Result;
use crate::args::FailoverOptions;

const KEY: &[u8] = b"server";
/// The limit for a process to start to listen.
const START: Duration = Duration::from_secs(30);
/// The longest time for which a server serves before it is killed.
const SERVES: Duration = Duration::from_millis(500);

/// Kills servers, and prints the times until the next ones answer.
pub(crate) async fn run(options: &FailoverOptions) -> Result<()> {
    let [first, second] = options.addresses[..] else {
        return Err("--addresses takes two addresses".into());
    };
    let device = Device::open_default_towards(first)?;
    let mut random = fastrand::Rng::with_seed(options.seed);
    let mut times = Vec::new();
    for _ in 0..options.repeat {
        // The failure happens at any time between two of its client's questions.
        let serves = SERVES.mul_f64(random.f64());
        times.push(fail_over(&device, first, second, serves).await?);
    }
    times.sort_unstable();
    // The smallest time that so many per cent of the runs do not exceed.
    let at = |percent: usize| times[(times.len() * percent).div_ceil(100) - 1].as_secs_f64();
    println!(
        "{} servers killed; until the next one answered: p50 {:.2} s, p99 {:.2} s, at most {:.2} s",
        times.len(),
        at(50),
        at(99),
        at(100)
    );
    Ok(())
}

/// Kills the first of two servers after a time in which a client calls it without a pause. Returns
/// the time from then until the second has answered.
async fn fail_over(
    device: &Device,
    first: IpAddr,
    second: IpAddr,
    serves: Duration,
) -> Result<Duration> {
    let (mut first, mut second) = (Server::start(first).await?, Server::start(second).await?);
    let servers = [first.address, second.address];
    let client = FailoverClient::new(device, servers, ClientConfig::default())?;
    client.put(KEY, b"first").await?;
    let start = Instant::now();
    while start.elapsed() < serves {
        client.get(KEY).await?.ok_or("the first server has lost the key")?;
    }
    if client.generation().await? != 1 {
        return Err("a running server was mistaken for a killed one".into());
    }
    let start = Instant::now();
    first.process.kill().await?;
    let found = client.get(KEY).await?;
    let took = start.elapsed();
    if found.is_some() {
        return Err("the second server has the key of the first".into());
    }
    client.close().await?;
    // The next run uses its address.
    second.process.kill().await?;
    Ok(took)
}

/// A server in a process, killed on drop.
struct Server {
    process: Child,
    address: SocketAddr,
    /// The process must be able to print.
    _output: Lines<BufReader<ChildStdout>>,
}

impl Server {
    async fn start(address: IpAddr) -> Result<Self> {
        let listen = SocketAddr::new(address, 0).to_string();
        let mut process = Command::new(std::env::current_exe()?)
            .args(["serve", "--listen", &listen])
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()?;
        let output = process.stdout.take().ok_or("the process has no standard output")?;
        let mut output = BufReader::new(output).lines();
        let line = timeout(START, output.next_line()).await.map_err(|_| "a server hangs")??;
        let line = line.ok_or("a server has exited")?;
        let address = line.strip_prefix("listening on ").and_then(|line| line.split(' ').next());
        let address = address.ok_or_else(|| format!("unexpected output of a server: {line}"))?;
        Ok(Self { process, address: address.parse()?, _output: output })
    }
}

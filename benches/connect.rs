//! Connections made and closed by address, both ends in one process, in the arguments and the line
//! of output of `benches/verbs.rs`; `benches/c/connect.c` does the same with librdmacm.
//!
//! ```text
//! connect [side=cm|connection] [operations=1000] [warmup=100] [devices=soft0] [times=yes|no]
//!         [runtime=current|multi]
//! ```
//!
//! An operation is one connection: resolve, connect, accept, disconnect, and the release of
//! everything it used at both ends. The accepting end is a task of its own. `cm` connects queue
//! pairs of one protection domain and completion queue by `tokio_rdma::cm`; `connection` makes a
//! `Connection` with default settings and closes it. The difference of two runs with different
//! `operations` is the cost of connections without the program's start.

mod common;

use std::net::SocketAddr;
use std::process::ExitCode;
use std::time::Instant;

use tokio_rdma::cm::{self, ConnectConfig};
use tokio_rdma::{
    CompletionMode, CompletionQueue, Connection, Device, Listener, ProtectionDomain, QueuePair,
};

use common::{Arguments, Result};

fn main() -> ExitCode {
    common::exit("connect", Arguments::new(&DEFAULTS).and_then(|arguments| run(&arguments)))
}

const DEFAULTS: [(&str, &str); 6] = [
    ("side", "cm"),
    ("operations", "1000"),
    ("warmup", "100"),
    ("devices", Device::SOFTWARE),
    ("times", "yes"),
    ("runtime", "current"),
];

fn run(arguments: &Arguments) -> Result<String> {
    arguments.runtime()?.enable_all().build()?.block_on(async {
        let device = Device::open(arguments.get("devices"))?;
        let address = common::address(&device);
        match arguments.get("side") {
            "cm" => queue_pairs(arguments, &device, address).await,
            "connection" => connections(arguments, &device, address).await,
            other => Err(format!("unknown side {other}").into()),
        }
    })
}

async fn queue_pairs(
    arguments: &Arguments,
    device: &Device,
    address: SocketAddr,
) -> Result<String> {
    let pd = device.protection_domain()?;
    let queue = CompletionQueue::new(device, CompletionMode::Event)?;
    let listener = cm::Listener::bind(device, address).await?;
    let address = listener.local_addr();
    let server = {
        let (pd, queue) = (pd.clone(), queue.clone());
        tokio::spawn(async move {
            loop {
                accept(&listener, &pd, &queue).await?;
            }
        })
    };
    let rate = measure(arguments, async || {
        let route = cm::resolve(device, address).await?;
        let qp = route.prepare(QueuePair::builder(&pd, &queue)).build()?;
        let connection = route.connect(&qp, &ConnectConfig::default()).await?;
        connection.disconnect().await?;
        Ok(())
    });
    finish(rate, server).await
}

/// Accepts a connection and waits until the peer disconnects.
async fn accept(
    listener: &cm::Listener,
    pd: &ProtectionDomain,
    queue: &CompletionQueue,
) -> Result<()> {
    let request = listener.accept().await?;
    let qp = request.prepare(QueuePair::builder(pd, queue)).build()?;
    let connection = request.accept(&qp, &ConnectConfig::default()).await?;
    connection.disconnected().await;
    Ok(())
}

async fn connections(
    arguments: &Arguments,
    device: &Device,
    address: SocketAddr,
) -> Result<String> {
    let listener = Listener::bind(device, address).await?;
    let address = listener.local_addr().unwrap();
    let server = tokio::spawn(async move {
        loop {
            listener.accept().await?.close().await?;
        }
    });
    let rate = measure(arguments, async || {
        Connection::connect(device, address).await?.close().await?;
        Ok(())
    });
    finish(rate, server).await
}

/// Ends the server, and reports its failure rather than what that caused at the client.
async fn finish(
    line: impl Future<Output = Result<String>>,
    mut server: tokio::task::JoinHandle<Result<()>>,
) -> Result<String> {
    tokio::select! {
        line = line => {
            server.abort();
            line
        }
        ended = &mut server => match ended? {
            Ok(()) => Err("the server ended".into()),
            Err(error) => Err(error),
        },
    }
}

async fn measure(arguments: &Arguments, connect: impl AsyncFn() -> Result<()>) -> Result<String> {
    let (operations, warmup) = (arguments.number("operations")?, arguments.number("warmup")?);
    let timed = arguments.get("times") == "yes";
    for _ in 0..warmup {
        connect().await?;
    }
    let mut times = Vec::with_capacity(operations);
    let start = Instant::now();
    for _ in 0..operations {
        let before = timed.then(Instant::now);
        connect().await?;
        times.extend(before.map(|before| before.elapsed().as_nanos() as u64));
    }
    let mean = start.elapsed().as_nanos() / operations.max(1) as u128;
    times.sort_unstable();
    let quantile = |percent| times.get(times.len() * percent / 100).copied().unwrap_or(0);
    Ok(format!(
        "program=connect work=connect side={} operations={operations} p50_ns={} p99_ns={} \
         mean_ns={mean}",
        arguments.get("side"),
        quantile(50),
        quantile(99),
    ))
}

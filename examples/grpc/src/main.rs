//! A gRPC server and client over RDMA or TCP.
//!
//! ```text
//! grpc serve --listen 127.0.0.1:7476               the server; run the client in another terminal
//! grpc call --connect 127.0.0.1:7476               one call of each kind
//! grpc load --connect 127.0.0.1:7476 --depth 64    measures unary calls
//! ```
//!
//! Add `--tcp` to both for TCP. Without it, the device is the one named by `TOKIO_RDMA_DEVICE`, or
//! a real device, or a software device, which between two processes sends RoCE v2 over UDP.

use std::error::Error;
use std::net::SocketAddr;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::{Args, Parser};
use futures::{StreamExt, stream};
use grpc::Counter;
use grpc::words::words_client::WordsClient;
use grpc::words::words_server::WordsServer;
use grpc::words::{DESCRIPTORS, Text};
use hdrhistogram::Histogram;
use tokio::net::TcpListener;
use tokio_rdma::Device;
use tokio_rdma_http::{HttpListener, RdmaConnector};
use tokio_stream::wrappers::TcpListenerStream;
use tonic::transport::{Channel, Endpoint, Server};
use tonic::{Code, Request};

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

/// A gRPC service over RDMA.
#[derive(Debug, Parser)]
enum Command {
    /// Serves until interrupted.
    Serve {
        /// Address; port 0 selects a free one.
        #[arg(long)]
        listen: SocketAddr,
        /// Uses TCP.
        #[arg(long)]
        tcp: bool,
    },
    /// Makes one call of each kind.
    Call {
        #[command(flatten)]
        client: Client,
    },
    /// Measures unary calls.
    Load {
        #[command(flatten)]
        client: Client,
        /// Calls in all.
        #[arg(long, default_value_t = 10_000)]
        calls: usize,
        /// Calls in flight.
        #[arg(long, default_value_t = 1)]
        depth: usize,
    },
}

#[derive(Debug, Args)]
struct Client {
    /// Address of the server.
    #[arg(long)]
    connect: SocketAddr,
    /// Uses TCP.
    #[arg(long)]
    tcp: bool,
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let result = match Command::parse() {
        Command::Serve { listen, tcp } => serve(listen, tcp).await,
        Command::Call { client } => call(&client).await,
        Command::Load { client, calls, depth } => load(&client, calls, depth).await,
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("grpc: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn serve(listen: SocketAddr, tcp: bool) -> Result<()> {
    let (reporter, health) = tonic_health::server::health_reporter();
    reporter.set_serving::<WordsServer<Counter>>().await;
    let reflection = tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(DESCRIPTORS)
        .build_v1()?;
    let server = Server::builder()
        .add_service(WordsServer::new(Counter))
        .add_service(health)
        .add_service(reflection);
    let interrupted = async { drop(tokio::signal::ctrl_c().await) };
    if tcp {
        let listener = TcpListener::bind(listen).await?;
        println!("listening on {} with TCP", listener.local_addr()?);
        let incoming = TcpListenerStream::new(listener).map(|accepted| {
            accepted.and_then(|stream| {
                stream.set_nodelay(true)?;
                Ok(stream)
            })
        });
        server.serve_with_incoming_shutdown(incoming, interrupted).await?;
    } else {
        let device = Device::open_default_at(listen.ip())?;
        let listener = HttpListener::bind(&device, listen).await?;
        // Scripts wait for this line.
        println!("listening on {} with {}", listener.local_addr()?, device.name());
        server.serve_with_incoming_shutdown(listener, interrupted).await?;
    }
    Ok(())
}

async fn connect(client: &Client) -> Result<WordsClient<Channel>> {
    let endpoint = Endpoint::from_shared(format!("http://{}", client.connect))?
        .connect_timeout(Duration::from_secs(5));
    let channel = if client.tcp {
        endpoint.tcp_nodelay(true).connect().await?
    } else {
        let device = Device::open_default_to(client.connect.ip())?;
        endpoint.connect_with_connector(RdmaConnector::new(&device)).await?
    };
    Ok(WordsClient::new(channel))
}

fn text(text: &str) -> Text {
    Text { text: text.to_owned(), delay_ms: 0 }
}

async fn call(client: &Client) -> Result<()> {
    let mut client = connect(client).await?;
    let total = client.count(text("one two three")).await?.into_inner();
    println!("unary: {} words", total.words);

    let mut words = client.split(text("one two three")).await?.into_inner();
    while let Some(word) = words.message().await? {
        println!("server streaming: {}", word.word);
    }

    let texts = stream::iter(["one", "two three", "four"].map(text));
    let mut totals = client.tally(texts).await?.into_inner();
    while let Some(total) = totals.message().await? {
        println!("bidirectional: {} words so far", total.words);
    }

    let mut slow = Request::new(Text { delay_ms: 10_000, ..text("late") });
    slow.set_timeout(Duration::from_millis(20));
    match client.count(slow).await {
        Err(status) if [Code::DeadlineExceeded, Code::Cancelled].contains(&status.code()) => {
            println!("deadline: {:?}", status.code());
        }
        other => return Err(format!("a call without a deadline: {other:?}").into()),
    }

    // Dropping a call cancels it, and the connection serves the next one.
    let slow = client.count(Text { delay_ms: 10_000, ..text("cancelled") });
    if tokio::time::timeout(Duration::from_millis(20), slow).await.is_ok() {
        return Err("the server did not wait".into());
    }
    let total = client.count(text("after it")).await?.into_inner();
    println!("after a cancelled call: {} words", total.words);
    Ok(())
}

async fn load(client: &Client, calls: usize, depth: usize) -> Result<()> {
    let client = connect(client).await?;
    let mut times = Histogram::<u64>::new(3)?;
    // Without the start of the process and the connection.
    let (start, before) = (Instant::now(), cpu());
    let mut finished = stream::iter(0..calls)
        .map(|_| {
            let mut client = client.clone();
            async move {
                let start = Instant::now();
                let total = client.count(text("one two three four")).await?.into_inner();
                Ok::<_, tonic::Status>((total.words, start.elapsed()))
            }
        })
        .buffer_unordered(depth.max(1));
    while let Some(finished) = finished.next().await {
        let (words, time) = finished?;
        if words != 4 {
            return Err(format!("a wrong answer: {words} words").into());
        }
        times.record(time.as_nanos() as u64)?;
    }
    let elapsed = start.elapsed();
    let quantile = |quantile| Duration::from_nanos(times.value_at_quantile(quantile));
    println!(
        "{calls} calls, {depth} in flight: p50 {:.1?}, p99 {:.1?}, {:.0} calls/s, {:.1?} of \
         processor time per call",
        quantile(0.5),
        quantile(0.99),
        calls as f64 / elapsed.as_secs_f64(),
        cpu().saturating_sub(before) / calls.max(1) as u32,
    );
    Ok(())
}

/// Returns the processor time of this process, or zero where the system does not report it.
fn cpu() -> Duration {
    let Ok(tasks) = std::fs::read_dir("/proc/self/task") else { return Duration::ZERO };
    let of_task = |task: std::fs::DirEntry| {
        let stat = std::fs::read_to_string(task.path().join("schedstat")).ok()?;
        stat.split_whitespace().next()?.parse::<u64>().ok()
    };
    Duration::from_nanos(tasks.flatten().filter_map(of_task).sum())
}

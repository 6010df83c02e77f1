//! Messages there and back over a `Connection`, in the arguments and the line of output of
//! `benches/verbs.rs`; `benches/c/raw.c work=pingpong` is the same exchange with bare verbs.
//!
//! ```text
//! echo [size=64] [mode=event|cooperative|hybrid|busy-poll] [operations=10000] [warmup=1000]
//!      [devices=soft0] [times=yes|no] [runtime=current|multi] [registered=no|yes]
//! ```
//!
//! An operation is a message in each direction. The answering end is a task of its own; both ends
//! have the default settings, except the mode. With `registered=yes` both ends send and receive
//! registered buffers, and the answering end sends back the one that it has received.
//! `scripts/costs` builds and runs it.

use std::collections::HashMap;
use std::error::Error;
use std::net::SocketAddr;
use std::process::ExitCode;
use std::time::Instant;

use bytes::Bytes;
use tokio_rdma::{Buf, CompletionMode, Connection, ConnectionConfig, Device, Listener};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

fn main() -> ExitCode {
    let arguments = std::env::args().skip(1).filter(|argument| argument != "--bench");
    match Arguments::new(arguments).and_then(|arguments| run(&arguments)) {
        Ok(line) => {
            println!("{line}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("echo: {error}");
            ExitCode::FAILURE
        }
    }
}

struct Arguments(HashMap<String, String>);

const DEFAULTS: [(&str, &str); 8] = [
    ("size", "64"),
    ("mode", "event"),
    ("operations", "10000"),
    ("warmup", "1000"),
    ("devices", Device::SOFTWARE),
    ("times", "yes"),
    ("runtime", "current"),
    ("registered", "no"),
];

impl Arguments {
    fn new(arguments: impl Iterator<Item = String>) -> Result<Self> {
        let mut values: HashMap<_, _> =
            DEFAULTS.iter().map(|&(name, value)| (name.to_owned(), value.to_owned())).collect();
        for argument in arguments {
            let (name, value) = argument
                .split_once('=')
                .ok_or_else(|| format!("invalid argument {argument}, must be name=value"))?;
            let known = values.get_mut(name).ok_or_else(|| format!("unknown argument {name}"))?;
            value.clone_into(known);
        }
        Ok(Self(values))
    }

    fn get(&self, name: &str) -> &str {
        &self.0[name]
    }

    fn number(&self, name: &str) -> Result<usize> {
        Ok(self.get(name).parse()?)
    }

    fn mode(&self) -> Result<CompletionMode> {
        Ok(match self.get("mode") {
            "event" => CompletionMode::Event,
            "cooperative" => CompletionMode::Cooperative,
            "hybrid" => CompletionMode::Hybrid,
            "busy-poll" => CompletionMode::busy_poll()?,
            other => return Err(format!("unknown mode {other}").into()),
        })
    }

    fn registered(&self) -> Result<bool> {
        match self.get("registered") {
            "yes" => Ok(true),
            "no" => Ok(false),
            other => Err(format!("invalid registered={other}, must be yes or no").into()),
        }
    }

    fn runtime(&self) -> Result<tokio::runtime::Runtime> {
        let mut builder = match self.get("runtime") {
            "current" => tokio::runtime::Builder::new_current_thread(),
            "multi" => tokio::runtime::Builder::new_multi_thread(),
            other => return Err(format!("unknown runtime {other}").into()),
        };
        Ok(builder.enable_all().build()?)
    }
}

fn run(arguments: &Arguments) -> Result<String> {
    arguments.runtime()?.block_on(echo(arguments))
}

async fn echo(arguments: &Arguments) -> Result<String> {
    let (operations, warmup) = (arguments.number("operations")?, arguments.number("warmup")?);
    let device = Device::open(arguments.get("devices"))?;
    let config = ConnectionConfig::default().mode(arguments.mode()?);
    let address = SocketAddr::new(device.default_path()?.1.gid.to_ip(), 0);
    let listener = Listener::bind_with(&device, address, &config).await?;
    let connecting = Connection::connect_with(&device, listener.local_addr(), &config);
    let (ours, theirs) = tokio::try_join!(connecting, listener.accept())?;
    let registered = arguments.registered()?;
    let answering = tokio::spawn(answer(theirs, registered));

    let bytes = vec![7; arguments.number("size")?];
    let message = match registered {
        true => Message::Buffer(ours.copy_from(&bytes)?.freeze()),
        false => Message::Bytes(bytes.into()),
    };
    let mut times = Vec::with_capacity(operations);
    exchange(&ours, &message, warmup, |_| ()).await?;
    let start = Instant::now();
    if arguments.get("times") == "yes" {
        exchange(&ours, &message, operations, |time| times.push(time)).await?;
    } else {
        exchange(&ours, &message, operations, |_| ()).await?;
    }
    let mean = start.elapsed().as_nanos() / operations.max(1) as u128;
    ours.close().await?;
    answering.await??;

    times.sort_unstable();
    let quantile = |percent| times.get(times.len() * percent / 100).copied().unwrap_or(0);
    Ok(format!(
        "program=echo work=echo mode={} size={} operations={operations} p50_ns={} p99_ns={} \
         mean_ns={mean}",
        arguments.get("mode"),
        message.len(),
        quantile(50),
        quantile(99),
    ))
}

enum Message {
    Bytes(Bytes),
    Buffer(Buf),
}

impl Message {
    fn len(&self) -> usize {
        match self {
            Self::Bytes(bytes) => bytes.len(),
            Self::Buffer(buffer) => buffer.len(),
        }
    }
}

/// Sends `message` and receives the answer, `rounds` times; `taken` gets each time in nanoseconds.
async fn exchange(
    connection: &Connection,
    message: &Message,
    rounds: usize,
    mut taken: impl FnMut(u64),
) -> Result<()> {
    for _ in 0..rounds {
        let start = Instant::now();
        let answer = match message {
            Message::Bytes(bytes) => {
                connection.send(bytes.clone()).await?;
                connection.recv().await?.map(|answer| answer.len())
            }
            Message::Buffer(buffer) => {
                connection.send_buffer(buffer.clone()).await?;
                connection.recv_buffer().await?.map(|answer| answer.len())
            }
        };
        taken(start.elapsed().as_nanos() as u64);
        let len = answer.ok_or("the peer closed")?;
        if len != message.len() {
            return Err(format!("an answer of {len} bytes").into());
        }
    }
    Ok(())
}

/// Sends every message back until the peer closes.
async fn answer(
    connection: Connection,
    registered: bool,
) -> std::result::Result<(), tokio_rdma::MessageError> {
    if registered {
        while let Some(message) = connection.recv_buffer().await? {
            connection.send_buffer(message).await?;
        }
    } else {
        while let Some(message) = connection.recv().await? {
            connection.send(message).await?;
        }
    }
    connection.close().await
}

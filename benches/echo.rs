//! Bytes there and back over a `Connection`, an `RdmaStream` or TCP, in the arguments and the line
//! of output of `benches/verbs.rs`; `benches/c/raw.c work=pingpong` is the same exchange with bare
//! verbs.
//!
//! ```text
//! echo [over=messages|buffers|bytes|registered|traits|tcp] [size=64]
//!      [mode=event|cooperative|hybrid|busy-poll] [operations=10000] [warmup=1000]
//!      [devices=soft0] [times=yes|no] [runtime=current|multi]
//!      [client=task|block-on]
//! ```
//!
//! | over | Sends and receives |
//! |---|---|
//! | `messages` | messages of a `Connection` as `Bytes` |
//! | `buffers` | messages as registered buffers; the answering end sends back what it received |
//! | `bytes` | `write_bytes` and `read_bytes` of an `RdmaStream`; received bytes are sent back |
//! | `registered` | the same, of bytes in a registered buffer |
//! | `traits` | `AsyncRead` and `AsyncWrite` of an `RdmaStream` |
//! | `tcp` | the same of a `TcpStream`, without delay |
//!
//! An operation is `size` bytes in each direction. Each end is a task, or one is the future of
//! `block_on`, for which Tokio polls for I/O in each round. Both have the default settings, except
//! the mode. `scripts/costs` builds and runs it.

mod common;

use std::process::ExitCode;
use std::time::Instant;

use bytes::Bytes;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_rdma::{Buf, Connection, ConnectionConfig, Device, Listener, RdmaListener, RdmaStream};

use common::{Arguments, Result};

fn main() -> ExitCode {
    common::exit("echo", Arguments::new(&DEFAULTS).and_then(run))
}

const DEFAULTS: [(&str, &str); 9] = [
    ("size", "64"),
    ("mode", "event"),
    ("operations", "10000"),
    ("warmup", "1000"),
    ("devices", Device::SOFTWARE),
    ("times", "yes"),
    ("runtime", "current"),
    ("over", "messages"),
    ("client", "task"),
];

fn run(arguments: Arguments) -> Result<String> {
    let runtime = arguments.runtime()?.enable_all().build()?;
    match arguments.get("client") {
        "task" => runtime.block_on(async { tokio::spawn(echo(arguments)).await? }),
        "block-on" => runtime.block_on(echo(arguments)),
        other => Err(format!("unknown client={other}").into()),
    }
}

async fn echo(arguments: Arguments) -> Result<String> {
    let (operations, warmup) = (arguments.number("operations")?, arguments.number("warmup")?);
    let size = arguments.number("size")?;
    let [mut ours, mut theirs] = connect(&arguments, size).await?;
    let answering = tokio::spawn(async move {
        while theirs.answer().await? {}
        theirs.close().await
    });
    let mut times = Vec::with_capacity(operations);
    for _ in 0..warmup {
        ours.exchange().await?;
    }
    let start = Instant::now();
    if arguments.get("times") == "yes" {
        for _ in 0..operations {
            let start = Instant::now();
            ours.exchange().await?;
            times.push(start.elapsed().as_nanos() as u64);
        }
    } else {
        for _ in 0..operations {
            ours.exchange().await?;
        }
    }
    let mean = start.elapsed().as_nanos() / operations.max(1) as u128;
    ours.close().await?;
    answering.await??;

    times.sort_unstable();
    let quantile = |percent| times.get(times.len() * percent / 100).copied().unwrap_or(0);
    Ok(format!(
        "program=echo work=echo mode={} size={size} operations={operations} p50_ns={} p99_ns={} \
         mean_ns={mean}",
        arguments.get("mode"),
        quantile(50),
        quantile(99),
    ))
}

/// Connects two ends of the transport that the arguments name.
async fn connect(arguments: &Arguments, size: usize) -> Result<[End; 2]> {
    let device = Device::open(arguments.get("devices"))?;
    let address = common::address(&device);
    let mode = arguments.mode()?;
    let bytes = Bytes::from(vec![7; size]);
    let over = arguments.get("over").to_owned();
    let ends = match &*over {
        "messages" | "buffers" => {
            let config = ConnectionConfig::default().mode(mode);
            let listener = Listener::bind_with(&device, address, &config).await?;
            let connecting = Connection::connect_with(&device, listener.local_addr()?, &config);
            let (ours, theirs) = tokio::try_join!(connecting, listener.accept())?;
            let end = |connection: Connection| {
                Ok(match &*over {
                    "buffers" => {
                        let message = connection.copy_from(&bytes)?.freeze();
                        End::Buffers(connection, message)
                    }
                    _ => End::Messages(connection, bytes.clone()),
                })
            };
            [ours, theirs].map(end)
        }
        "bytes" | "registered" | "traits" => {
            let config = ConnectionConfig::for_streams().mode(mode);
            let listener = RdmaListener::bind_with(&device, address, &config).await?;
            let connecting = RdmaStream::connect_with(&device, listener.local_addr()?, &config);
            let (ours, (theirs, _)) = tokio::try_join!(connecting, listener.accept())?;
            [ours, theirs].map(|stream| {
                Ok(match &*over {
                    "bytes" => End::Bytes(stream, bytes.clone()),
                    "registered" => {
                        let memory = stream.protection_domain().register(bytes.to_vec())?;
                        End::Bytes(stream, memory.into())
                    }
                    _ => End::Traits(Box::new(stream), bytes.to_vec()),
                })
            })
        }
        "tcp" => {
            let listener = TcpListener::bind(address).await?;
            let connecting = TcpStream::connect(listener.local_addr()?);
            let (ours, (theirs, _)) = tokio::try_join!(connecting, listener.accept())?;
            [ours, theirs].map(|stream| {
                stream.set_nodelay(true)?;
                Ok(End::Traits(Box::new(stream), bytes.to_vec()))
            })
        }
        other => return Err(format!("unknown over={other}").into()),
    };
    let [ours, theirs]: [Result<End>; 2] = ends;
    Ok([ours?, theirs?])
}

trait ByteStream: AsyncRead + AsyncWrite + Unpin + Send {}

impl<S: AsyncRead + AsyncWrite + Unpin + Send> ByteStream for S {}

/// One end, and what it sends.
enum End {
    Messages(Connection, Bytes),
    Buffers(Connection, Buf),
    Bytes(RdmaStream, Bytes),
    Traits(Box<dyn ByteStream>, Vec<u8>),
}

impl End {
    /// Sends and receives once.
    async fn exchange(&mut self) -> Result<()> {
        let (sent, received) = match self {
            Self::Messages(connection, bytes) => {
                connection.send(bytes.clone()).await?;
                (bytes.len(), connection.recv().await?.map_or(0, |answer| answer.len()))
            }
            Self::Buffers(connection, buffer) => {
                connection.send_buffer(buffer.clone()).await?;
                (buffer.len(), connection.recv_buffer().await?.map_or(0, |answer| answer.len()))
            }
            Self::Bytes(stream, bytes) => {
                stream.write_bytes(bytes.clone()).await?;
                let mut received = 0;
                while received < bytes.len()
                    && let Some(part) = stream.read_bytes().await?
                {
                    received += part.len();
                }
                (bytes.len(), received)
            }
            Self::Traits(stream, bytes) => {
                stream.write_all(bytes).await?;
                (bytes.len(), stream.read_exact(bytes).await?)
            }
        };
        match received == sent {
            true => Ok(()),
            false => Err(format!("an answer of {received} bytes").into()),
        }
    }

    /// Sends back what is received. Returns `false` at the end.
    async fn answer(&mut self) -> std::io::Result<bool> {
        match self {
            Self::Messages(connection, _) => {
                let Some(message) = connection.recv().await? else { return Ok(false) };
                connection.send(message).await?;
            }
            Self::Buffers(connection, _) => {
                let Some(message) = connection.recv_buffer().await? else { return Ok(false) };
                connection.send_buffer(message).await?;
            }
            Self::Bytes(stream, _) => {
                let Some(part) = stream.read_bytes().await? else { return Ok(false) };
                stream.write_bytes(part).await?;
            }
            Self::Traits(stream, bytes) => {
                let read = stream.read(bytes).await?;
                if read == 0 {
                    return Ok(false);
                }
                stream.read_exact(&mut bytes[read..]).await?;
                stream.write_all(bytes).await?;
            }
        }
        Ok(true)
    }

    /// Ends this side, and waits for the other.
    async fn close(self) -> std::io::Result<()> {
        match self {
            Self::Messages(connection, _) | Self::Buffers(connection, _) => {
                Ok(connection.close().await?)
            }
            Self::Bytes(mut stream, _) => {
                stream.shutdown().await?;
                while stream.read_bytes().await?.is_some() {}
                Ok(())
            }
            Self::Traits(mut stream, _) => {
                stream.shutdown().await?;
                while stream.read(&mut [0; 64]).await? > 0 {}
                Ok(())
            }
        }
    }
}

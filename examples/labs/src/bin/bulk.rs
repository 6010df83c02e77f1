//! Lab 4: bulk transfer by WRITE and by TCP: chunk size, depth, processor time per byte. See
//! `examples/labs/docs/04-bulk.md`.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use labs::{Peer, Result, check, in_time, processor_time};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_rdma::memory::HostMemory;
use tokio_rdma::{CompletionMode, ExposedRegion, QueuePair, RemoteRegion};

fn main() -> ExitCode {
    labs::run("bulk", client, server)
}

/// Bytes per WRITE, and WRITEs in flight.
const WRITES: [(usize, usize); 6] =
    [(4 << 10, 1), (4 << 10, 16), (64 << 10, 1), (64 << 10, 16), (1 << 20, 1), (1 << 20, 8)];
/// Bytes per write to a socket.
const CHUNKS: [usize; 3] = [4 << 10, 64 << 10, 1 << 20];

fn total(peer: &Peer) -> usize {
    if peer.quick { 4 << 20 } else { 256 << 20 }
}

async fn client(mut peer: Peer) -> Result<()> {
    let total = total(&peer);
    let end = peer.end(&CompletionMode::Hybrid)?;
    let qp = end.queue_pair()?;
    peer.connect(&qp).await?;
    // Registered once; operations send slices of it.
    let source = end.expose(total)?;
    let data: Vec<u8> = (0..total).map(byte).collect();
    source.write(0, &data)?;
    let remote = peer.offered().await?;

    println!(
        "{} MiB\n{:<8} {:>10} {:>6} {:>8} {:>16}",
        total >> 20,
        "",
        "chunk",
        "depth",
        "MB/s",
        "processor ns/KiB"
    );
    for (chunk, depth) in WRITES {
        peer.barrier().await?;
        let (before, start) = (processor_time()?, Instant::now());
        write_all(&qp, &source, remote, chunk, depth).await?;
        let time = start.elapsed();
        report("WRITE", chunk, depth, total, time, peer.used_since(before).await?);
    }
    for chunk in CHUNKS {
        let address: SocketAddr = String::from_utf8(peer.exchange(&[]).await?)?.parse()?;
        peer.barrier().await?;
        let (before, start) = (processor_time()?, Instant::now());
        in_time("TCP", over_tcp(address, &data, chunk)).await?;
        let time = start.elapsed();
        report("TCP", chunk, 0, total, time, peer.used_since(before).await?);
    }
    peer.barrier().await
}

async fn server(mut peer: Peer) -> Result<()> {
    let total = total(&peer);
    let end = peer.end(&CompletionMode::Event)?;
    let qp = end.queue_pair()?;
    peer.connect(&qp).await?;
    let target = end.expose(total)?;
    peer.offer(&target).await?;
    let mut bytes = vec![0; total];
    for _ in WRITES {
        target.write(0, &vec![0; total])?;
        peer.barrier().await?;
        let before = processor_time()?;
        // Waits until the client has written everything.
        peer.used_since(before).await?;
        target.read(0, &mut bytes)?;
        verify(&bytes)?;
    }
    for _ in CHUNKS {
        bytes.fill(0);
        let listener = TcpListener::bind((peer.address()?, 0)).await?;
        peer.exchange(listener.local_addr()?.to_string().as_bytes()).await?;
        peer.barrier().await?;
        let before = processor_time()?;
        in_time("TCP", take_over_tcp(listener, &mut bytes)).await?;
        peer.used_since(before).await?;
        verify(&bytes)?;
    }
    peer.barrier().await
}

/// Keeps `depth` WRITEs in flight.
async fn write_all(
    qp: &QueuePair,
    source: &ExposedRegion,
    remote: RemoteRegion,
    chunk: usize,
    depth: usize,
) -> Result<()> {
    let mut in_flight = VecDeque::with_capacity(depth);
    for start in (0..source.len()).step_by(chunk) {
        if in_flight.len() == depth
            && let Some(oldest) = in_flight.pop_front()
        {
            in_time("a WRITE", oldest).await?;
        }
        let end = source.len().min(start + chunk);
        in_flight.push_back(
            qp.write(source.slice(start..end)?, remote.slice(start as u64..end as u64)?),
        );
    }
    for rest in in_flight {
        in_time("a WRITE", rest).await?;
    }
    // The answer to a READ proves that the WRITEs before it are in the peer's memory.
    let last = qp.protection_domain().register(HostMemory::zeroed(1)?)?;
    in_time("a READ", qp.read(last, remote.slice(..1)?)).await?;
    Ok(())
}

async fn over_tcp(address: SocketAddr, data: &[u8], chunk: usize) -> Result<()> {
    let mut stream = TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    for part in data.chunks(chunk) {
        stream.write_all(part).await?;
    }
    // The peer confirms the arrival, as the completion of a WRITE does.
    check("the answer", stream.read_u8().await?, 1)
}

async fn take_over_tcp(listener: TcpListener, bytes: &mut [u8]) -> Result<()> {
    let (mut stream, _) = listener.accept().await?;
    stream.read_exact(bytes).await?;
    Ok(stream.write_u8(1).await?)
}

fn report(
    what: &str,
    chunk: usize,
    depth: usize,
    total: usize,
    time: Duration,
    processor: Duration,
) {
    let rate = total as f64 / 1e6 / time.as_secs_f64();
    let each = processor.as_nanos() as f64 / (total as f64 / 1024.0);
    let depth = if depth == 0 { "-".to_owned() } else { depth.to_string() };
    println!("{what:<8} {chunk:>10} {depth:>6} {rate:>8.0} {each:>16.0}");
}

/// Returns a byte that depends on the page and on the position in it.
fn byte(at: usize) -> u8 {
    (at ^ at >> 8 ^ at >> 16) as u8
}

fn verify(bytes: &[u8]) -> Result<()> {
    check(
        "the first wrong byte",
        bytes.iter().enumerate().position(|(at, &is)| is != byte(at)),
        None,
    )
}

//! Lab 4: bulk transfer, by WRITE and by TCP: chunks, depth, processor time per byte. `docs/labs/04-bulk.md`

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

/// Bytes of a WRITE, and how many are in flight.
const WRITES: [(usize, usize); 6] =
    [(4 << 10, 1), (4 << 10, 16), (64 << 10, 1), (64 << 10, 16), (1 << 20, 1), (1 << 20, 8)];
/// Bytes of a write to a socket.
const CHUNKS: [usize; 3] = [4 << 10, 64 << 10, 1 << 20];

/// Bytes that are moved.
fn total(peer: &Peer) -> usize {
    if peer.quick { 4 << 20 } else { 256 << 20 }
}

async fn client(mut peer: Peer) -> Result<()> {
    let total = total(&peer);
    let end = peer.end(&CompletionMode::Hybrid)?;
    let qp = end.queue_pair()?;
    peer.connect(&qp).await?;
    // The data are registered once; slices of them are what operations send.
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
        peer.meet().await?;
        let (before, start) = (processor_time()?, Instant::now());
        write_all(&qp, &source, remote, chunk, depth).await?;
        let time = start.elapsed();
        report("WRITE", chunk, depth, total, time, peer.used_since(before).await?);
    }
    for chunk in CHUNKS {
        let address: SocketAddr = String::from_utf8(peer.exchange(&[]).await?)?.parse()?;
        peer.meet().await?;
        let (before, start) = (processor_time()?, Instant::now());
        in_time("TCP", over_tcp(address, &data, chunk)).await?;
        let time = start.elapsed();
        report("TCP", chunk, 0, total, time, peer.used_since(before).await?);
    }
    peer.meet().await
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
        peer.meet().await?;
        let before = processor_time()?;
        // Until the client has written all of it.
        peer.used_since(before).await?;
        target.read(0, &mut bytes)?;
        verify(&bytes)?;
    }
    for _ in CHUNKS {
        bytes.fill(0);
        let listener = TcpListener::bind((peer.address()?, 0)).await?;
        peer.exchange(listener.local_addr()?.to_string().as_bytes()).await?;
        peer.meet().await?;
        let before = processor_time()?;
        in_time("TCP", take_over_tcp(listener, &mut bytes)).await?;
        peer.used_since(before).await?;
        verify(&bytes)?;
    }
    peer.meet().await
}

/// Keeps `depth` WRITEs in flight: as one is done, the next is posted.
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
    // Its answer says that all WRITEs before it are in place.
    let last = qp.protection_domain().register(HostMemory::zeroed(1)?)?;
    in_time("a READ", qp.read(last, remote.slice(..1)?)).await?;
    Ok(())
}

/// The same bytes through a socket, written in chunks.
async fn over_tcp(address: SocketAddr, data: &[u8], chunk: usize) -> Result<()> {
    let mut stream = TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    for part in data.chunks(chunk) {
        stream.write_all(part).await?;
    }
    // It has arrived when the other end says so, as a WRITE has when it is complete.
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

/// Another one at each place of a page, and in each page.
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

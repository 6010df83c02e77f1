//! Lab 4: bulk transfer, by WRITE and by TCP: chunks, depth, processor time per byte. `docs/labs/04-bulk.md`

use std::collections::VecDeque;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use labs::{Lab, Result, check, connect, finish, in_time, processor_time};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_rdma::{CompletionMode, ExposedRegion, HostMemory, QueuePair};

fn main() -> ExitCode {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    finish("bulk", runtime.map_err(Into::into).and_then(|runtime| runtime.block_on(lab())))
}

async fn lab() -> Result<()> {
    let lab = Lab::from_arguments()?;
    let total = if lab.quick { 4 << 20 } else { 256 << 20 };
    let (client, server) = (lab.end(0, &CompletionMode::Hybrid)?, lab.end(1, &CompletionMode::Event)?);
    let (qp, theirs) = (client.queue_pair()?, server.queue_pair()?);
    connect(&qp, &theirs)?;
    // The data are registered once; slices of them are what operations send.
    let source = client.expose(total)?;
    source.write(0, &(0..total).map(byte).collect::<Vec<u8>>())?;
    let target = server.expose(total)?;

    println!("{} MiB\n{:<8} {:>10} {:>6} {:>8} {:>16}", total >> 20, "", "chunk", "depth", "MB/s", "processor ns/KiB");
    for (chunk, depth) in [(4 << 10, 1), (4 << 10, 16), (64 << 10, 1), (64 << 10, 16), (1 << 20, 1), (1 << 20, 8)] {
        target.write(0, &vec![0; total])?;
        let (before, start) = (processor_time()?, Instant::now());
        write_all(&qp, &source, &target, chunk, depth).await?;
        report("WRITE", chunk, depth, total, start.elapsed(), processor_time()? - before);
        let mut bytes = vec![0; total];
        target.read(0, &mut bytes)?;
        verify(&bytes)?;
    }
    for chunk in [4 << 10, 64 << 10, 1 << 20] {
        over_tcp(total, chunk).await?;
    }
    Ok(())
}

/// Keeps `depth` WRITEs in flight: as one is done, the next is posted.
async fn write_all(
    qp: &QueuePair,
    source: &ExposedRegion,
    target: &ExposedRegion,
    chunk: usize,
    depth: usize,
) -> Result<()> {
    let remote = target.grant();
    let mut in_flight = VecDeque::with_capacity(depth);
    for start in (0..source.len()).step_by(chunk) {
        if in_flight.len() == depth
            && let Some(oldest) = in_flight.pop_front()
        {
            in_time("a WRITE", oldest).await?;
        }
        let end = source.len().min(start + chunk);
        in_flight.push_back(qp.write(source.slice(start..end)?, remote.slice(start as u64..end as u64)?));
    }
    for rest in in_flight {
        in_time("a WRITE", rest).await?;
    }
    // Its answer says that all WRITEs before it are in place.
    let last = qp.protection_domain().register(HostMemory::zeroed(1)?)?;
    in_time("a READ", qp.read(last, remote.slice(..1)?)).await?;
    Ok(())
}

/// The same bytes through a socket, written in chunks; a task of this process reads them.
async fn over_tcp(total: usize, chunk: usize) -> Result<()> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    let data: Vec<u8> = (0..total).map(byte).collect();
    let (before, start) = (processor_time()?, Instant::now());
    let sending = async {
        let mut stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        for part in data.chunks(chunk) {
            stream.write_all(part).await?;
        }
        // It has arrived when the other end says so, as a WRITE has when it is complete.
        check("the answer", stream.read_u8().await?, 1)
    };
    let receiving = async {
        let (mut stream, _) = listener.accept().await?;
        let mut bytes = vec![0; total];
        stream.read_exact(&mut bytes).await?;
        stream.write_u8(1).await?;
        Ok::<_, labs::Failure>(bytes)
    };
    let both = async { tokio::try_join!(sending, receiving) };
    let ((), bytes) = in_time("TCP", both).await?;
    report("TCP", chunk, 0, total, start.elapsed(), processor_time()? - before);
    verify(&bytes)
}

fn report(what: &str, chunk: usize, depth: usize, total: usize, time: Duration, processor: Duration) {
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
    check("the first wrong byte", bytes.iter().enumerate().position(|(at, &is)| is != byte(at)), None)
}

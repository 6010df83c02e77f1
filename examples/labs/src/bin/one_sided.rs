//! Lab 2: one-sided WRITE and READ, their order, and selective signalling. See
//! `examples/labs/docs/02-one-sided.md`.

use std::process::ExitCode;
use std::time::Instant;

use labs::{Peer, Result, check, in_time};
use tokio_rdma::{Batch, Buf, CompletionMode, CompletionQueue, Pool, QueuePair, RemoteRegion};

fn main() -> ExitCode {
    labs::run("one_sided", client, server)
}

const BATCH: u64 = 32;

/// Checks its memory after each part.
async fn server(mut peer: Peer) -> Result<()> {
    let end = peer.end(&CompletionMode::Event)?;
    let qp = end.queue_pair()?;
    peer.connect(&qp).await?;
    let memory = end.expose(4096)?;
    peer.offer(&memory).await?;
    peer.barrier().await?;
    check("the word after the last WRITE", memory.load(0)?, 100)?;
    memory.store(0, 1)?;
    peer.barrier().await?;
    peer.barrier().await?;
    check("the WRITE after the fence", memory.load(8)?, 2)?;
    peer.barrier().await?;
    peer.barrier().await?;
    check("data written", memory.load(8 * (BATCH as usize - 1))?, 7)
}

async fn client(mut peer: Peer) -> Result<()> {
    let client = peer.end(&CompletionMode::Hybrid)?;
    let qp = client.queue_pair()?;
    peer.connect(&qp).await?;
    let remote = peer.offered().await?;
    let pool = client.pool(64, 64)?;

    in_time("order", order(&qp, &pool, remote)).await?;
    peer.barrier().await?;
    // The server checks the word and stores 1 in it.
    peer.barrier().await?;
    in_time("fence", fence(&qp, &pool, remote)).await?;
    peer.barrier().await?;
    // The server checks again.
    peer.barrier().await?;

    let rounds = if peer.quick { 20 } else { 3000 };
    println!("\n{:<34} {:>12} {:>12}", "WRITE of 8 bytes, 32 in flight", "ns each", "completions");
    let data = pool.copy_from(&7_u64.to_ne_bytes())?.freeze();
    for (name, signal_every) in
        [("each in a work request of its own", None), ("batch, all signalled", Some(1))]
    {
        signalled(name, signal_every, rounds, &qp, &client.queue, &data, remote).await?;
    }
    for (name, every) in [("batch, every 8th signalled", 8), ("batch, the last signalled", 0)] {
        signalled(name, Some(every), rounds, &qp, &client.queue, &data, remote).await?;
    }
    peer.barrier().await
}

/// Shows that operations of a queue pair execute in order: a READ sees the WRITE posted before it,
/// although the client has not waited for the WRITE.
async fn order(qp: &QueuePair, pool: &Pool, remote: RemoteRegion) -> Result<()> {
    let word = remote.slice(..8)?;
    for value in 1..=100_u64 {
        // The call posts, the await waits: both are in flight here.
        let write = qp.write(pool.copy_from(&value.to_ne_bytes())?, word);
        let read = qp.read(pool.try_alloc(8)?, word);
        check("the READ after the WRITE", &read.await?[..], &value.to_ne_bytes()[..])?;
        write.await?;
    }
    println!("100 READs each saw the WRITE posted before it");
    Ok(())
}

/// Shows that an operation behind a READ may start before the READ's response arrives, unless it is
/// fenced.
async fn fence(qp: &QueuePair, pool: &Pool, remote: RemoteRegion) -> Result<()> {
    let (first, second) = (remote.slice(..8)?, remote.slice(8..16)?);
    let read = qp.read(pool.try_alloc(8)?, first);
    let write = qp.fenced().write(pool.copy_from(&2_u64.to_ne_bytes())?, second);
    // The device starts the WRITE after the READ, so both are complete.
    write.await?;
    check("the READ before the fence", &read.await?[..], &1_u64.to_ne_bytes()[..])?;
    println!("a fenced WRITE executed after the READ before it");
    Ok(())
}

/// Measures batches that signal every `signal_every`-th WRITE; `None` posts WRITEs one by one.
async fn signalled(
    name: &str,
    signal_every: Option<u32>,
    rounds: u32,
    qp: &QueuePair,
    queue: &CompletionQueue,
    data: &Buf,
    remote: RemoteRegion,
) -> Result<()> {
    let (before, start) = (queue.counters().completions, Instant::now());
    let mut batch = Batch::new();
    for _ in 0..rounds {
        match signal_every {
            None => {
                let slot = |word: u64| remote.slice(word * 8..word * 8 + 8);
                let mut writes = Vec::with_capacity(BATCH as usize);
                for word in 0..BATCH {
                    writes.push(qp.write(data.clone(), slot(word)?));
                }
                for write in writes {
                    in_time("a WRITE", write).await?;
                }
            }
            Some(every) => {
                batch.signal_every(every);
                for word in 0..BATCH {
                    batch.write(data.clone(), remote.slice(word * 8..word * 8 + 8)?);
                }
                let posted = async { Ok::<_, labs::Failure>(qp.post_batch(batch).await) };
                let result = in_time("a batch", posted).await?;
                if let Some(error) = result.results().iter().find_map(|result| result.err()) {
                    return Err(error.into());
                }
                batch = result.into_batch();
            }
        }
    }
    let writes = u64::from(rounds) * BATCH;
    let each = start.elapsed().as_nanos() as f64 / writes as f64;
    let completions = queue.counters().completions - before;
    println!("{name:<34} {each:>12.0} {completions:>12}");
    // The last WRITE of a batch always produces a completion.
    let expected = match signal_every {
        None | Some(1) => writes,
        Some(0) => u64::from(rounds),
        Some(every) => writes / u64::from(every),
    };
    check("completions", completions, expected)
}

//! Lab 2: one-sided WRITE and READ, their order, and how often to be told. `docs/labs/02-one-sided.md`

use std::process::ExitCode;
use std::time::Instant;

use labs::{Lab, Result, check, connect, finish, in_time};
use tokio_rdma::{Batch, Buf, CompletionMode, CompletionQueue, ExposedRegion, Pool, QueuePair, RemoteRegion};

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    finish("one_sided", lab().await)
}

/// Writes of one batch.
const BATCH: u64 = 32;

async fn lab() -> Result<()> {
    let lab = Lab::from_arguments()?;
    let (client, server) = (lab.end(0, &CompletionMode::Hybrid)?, lab.end(1, &CompletionMode::Event)?);
    let (qp, theirs) = (client.queue_pair()?, server.queue_pair()?);
    connect(&qp, &theirs)?;
    let memory = server.expose(4096)?;
    let remote = memory.grant();
    let pool = client.pool(64, 64)?;

    in_time("order", order(&qp, &pool, &memory, remote)).await?;
    in_time("fence", fence(&qp, &pool, &memory, remote)).await?;

    let rounds = if lab.quick { 20 } else { 3000 };
    println!("\n{:<34} {:>12} {:>12}", "WRITE of 8 bytes, 32 in flight", "ns each", "completions");
    let data = pool.copy_from(&7_u64.to_ne_bytes())?.freeze();
    for (name, signal_every) in [("each in a work request of its own", None), ("batch, all signalled", Some(1))] {
        signalled(name, signal_every, rounds, &qp, &client.queue, &data, remote).await?;
    }
    for (name, every) in [("batch, every 8th signalled", 8), ("batch, the last signalled", 0)] {
        signalled(name, Some(every), rounds, &qp, &client.queue, &data, remote).await?;
    }
    check("what was written", memory.load(8 * (BATCH as usize - 1))?, 7)
}

/// Operations of one queue pair take place in the order in which they were posted, so a READ sees the WRITE before it,
/// although nobody has waited for that.
async fn order(qp: &QueuePair, pool: &Pool, memory: &ExposedRegion, remote: RemoteRegion) -> Result<()> {
    let word = remote.slice(..8)?;
    for value in 1..=100_u64 {
        // Calling posts, awaiting waits: both are in flight here.
        let write = qp.write(pool.copy_from(&value.to_ne_bytes())?, word);
        let read = qp.read(pool.try_alloc(8)?, word);
        check("the READ behind the WRITE", &read.await?[..], &value.to_ne_bytes()[..])?;
        write.await?;
    }
    check("the word", memory.load(0)?, 100)?;
    println!("100 times a READ saw what the WRITE posted before it wrote");
    Ok(())
}

/// A READ only asks; its answer comes later. What is posted behind it through the same queue pair may start before the
/// answer is there, unless it is fenced: then it waits.
async fn fence(qp: &QueuePair, pool: &Pool, memory: &ExposedRegion, remote: RemoteRegion) -> Result<()> {
    let (first, second) = (remote.slice(..8)?, remote.slice(8..16)?);
    memory.store(0, 1)?;
    let read = qp.read(pool.try_alloc(8)?, first);
    let write = qp.fenced().write(pool.copy_from(&2_u64.to_ne_bytes())?, second);
    // The fence has the device wait for the READ, so when the WRITE is done the READ is, too.
    write.await?;
    check("the READ before the fence", &read.await?[..], &1_u64.to_ne_bytes()[..])?;
    check("the WRITE behind the fence", memory.load(8)?, 2)?;
    println!("a fenced WRITE came after the READ before it");
    Ok(())
}

/// `signal_every`: completions of a batch; without it every WRITE is posted alone.
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
                let place = |word: u64| remote.slice(word * 8..word * 8 + 8);
                let mut writes = Vec::with_capacity(BATCH as usize);
                for word in 0..BATCH {
                    writes.push(qp.write(data.clone(), place(word)?));
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
    // All, one in so many, and the last of each batch in any case.
    let expected = match signal_every {
        None | Some(1) => writes,
        Some(0) => u64::from(rounds),
        Some(every) => writes / u64::from(every),
    };
    check("completions", completions, expected)
}

//! Lab 5: completion modes: latency and processor time. See `examples/labs/docs/05-modes.md`.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use labs::{Peer, Result, check, in_time, processor_time};
use tokio_rdma::op::Recv;
use tokio_rdma::{BufMut, CompletionMode, Pool, QueuePair};

/// Ends a mode early, on a machine with too few processors.
const TIME_LIMIT: Duration = Duration::from_secs(5);
/// The last request.
const LAST: u64 = u64::MAX - 1;

fn main() -> ExitCode {
    labs::run("modes", client, server)
}

fn modes() -> Result<[(&'static str, CompletionMode); 4]> {
    Ok([
        ("event", CompletionMode::Event),
        ("hybrid", CompletionMode::Hybrid),
        ("cooperative", CompletionMode::Cooperative),
        ("busy-poll", CompletionMode::busy_poll()?),
    ])
}

async fn client(mut peer: Peer) -> Result<()> {
    let (rounds, idle) =
        if peer.quick { (50, Duration::from_millis(50)) } else { (5000, Duration::from_secs(1)) };
    println!(
        "{:<13} {:>10} {:>10} {:>15} {:>22}",
        "mode", "p50 µs", "p99 µs", "processor µs", "processor while idle"
    );
    for (name, mode) in modes()? {
        let (mut times, each, idling) = measure(&mut peer, &mode, rounds, idle).await?;
        times.sort_unstable();
        let at = |part: usize| {
            times.get(times.len() * part / 100).map_or(0.0, |time| time.as_secs_f64() * 1e6)
        };
        println!(
            "{name:<13} {:>10.1} {:>10.1} {:>15.1} {:>20.0} %",
            at(50),
            at(99),
            each.as_secs_f64() * 1e6,
            idling * 100.0
        );
    }
    peer.barrier().await
}

async fn server(mut peer: Peer) -> Result<()> {
    for (_, mode) in modes()? {
        let end = peer.end(&mode)?;
        let (qp, pool) = (end.queue_pair()?, end.pool(8, 4)?);
        peer.connect(&qp).await?;
        let first = qp.recv(pool.try_alloc(8)?);
        peer.barrier().await?;
        let before = processor_time()?;
        answer(&qp, &pool, first).await?;
        peer.used_since(before).await?;
    }
    peer.barrier().await
}

/// Returns the times of all round trips, the processor time of one, and the utilisation while idle.
async fn measure(
    peer: &mut Peer,
    mode: &CompletionMode,
    rounds: u32,
    idle: Duration,
) -> Result<(Vec<Duration>, Duration, f64)> {
    let end = peer.end(mode)?;
    let (qp, pool) = (end.queue_pair()?, end.pool(8, 4)?);
    peer.connect(&qp).await?;
    peer.barrier().await?;
    let (before, begin) = (processor_time()?, Instant::now());
    let mut times = Vec::new();
    for round in 0..rounds {
        let over = round + 1 == rounds || begin.elapsed() > TIME_LIMIT;
        let number = if over { LAST } else { u64::from(round) };
        let start = Instant::now();
        let reply = qp.recv(pool.try_alloc(8)?);
        in_time("a message", qp.send(pool.copy_from(&number.to_ne_bytes())?)).await?;
        let reply = in_time("an answer", reply).await?;
        times.push(start.elapsed());
        check("the answer", &reply.buffer[..], &(number + 1).to_ne_bytes()[..])?;
        if over {
            break;
        }
    }
    let each = peer.used_since(before).await? / u32::try_from(times.len())?;

    // No message arrives: the cost of waiting.
    let (before, start) = (processor_time()?, Instant::now());
    let nothing = tokio::time::timeout(idle, qp.recv(pool.try_alloc(8)?)).await;
    check("unexpected message", nothing.is_ok(), false)?;
    let idling = (processor_time()? - before).as_secs_f64() / start.elapsed().as_secs_f64();
    Ok((times, each, idling))
}

/// Answers each number with its successor.
async fn answer(qp: &QueuePair, pool: &Pool, mut next: Recv<BufMut>) -> Result<()> {
    loop {
        let asked = in_time("a request", next).await?;
        let number = u64::from_ne_bytes(asked.buffer[..].try_into()?);
        let answer = number.checked_add(1).ok_or("request out of range")?;
        drop(asked);
        next = qp.recv(pool.try_alloc(8)?);
        in_time("the answer", qp.send(pool.copy_from(&answer.to_ne_bytes())?)).await?;
        if number == LAST {
            return Ok(());
        }
    }
}

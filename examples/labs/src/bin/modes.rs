//! Lab 5: completion modes: how long a wait takes, and what it burns. `docs/labs/05-modes.md`

use std::process::ExitCode;
use std::time::{Duration, Instant};

use labs::{Lab, Result, check, connect, finish, in_time, processor_time};
use tokio_rdma::{CompletionMode, Pool, QueuePair};

/// Enough of one mode, where there are too few processors for it.
const ENOUGH: Duration = Duration::from_secs(5);
/// What is asked last.
const LAST: u64 = u64::MAX - 1;

fn main() -> ExitCode {
    finish("modes", lab())
}

fn lab() -> Result<()> {
    let lab = Lab::from_arguments()?;
    let (rounds, idle) = if lab.quick { (50, Duration::from_millis(50)) } else { (5000, Duration::from_secs(1)) };
    println!("{:<13} {:>10} {:>10} {:>15} {:>22}", "mode", "p50 µs", "p99 µs", "processor µs", "processor while idle");
    for (name, mode) in [
        ("event", CompletionMode::Event),
        ("hybrid", CompletionMode::Hybrid),
        ("cooperative", CompletionMode::Cooperative),
        ("busy-poll", CompletionMode::busy_poll()?),
    ] {
        let (mut times, each, idling) = measure(&lab, &mode, rounds, idle)?;
        times.sort_unstable();
        let at = |part: usize| times.get(times.len() * part / 100).map_or(0.0, |time| time.as_secs_f64() * 1e6);
        println!(
            "{name:<13} {:>10.1} {:>10.1} {:>15.1} {:>20.0} %",
            at(50),
            at(99),
            each.as_secs_f64() * 1e6,
            idling * 100.0
        );
    }
    Ok(())
}

/// Times of all round trips, processor time of one, and the part of a processor that is used while a receive waits.
fn measure(lab: &Lab, mode: &CompletionMode, rounds: u32, idle: Duration) -> Result<(Vec<Duration>, Duration, f64)> {
    let (ours, theirs) = (lab.end(0, mode)?, lab.end(1, mode)?);
    let (qp, peer) = (ours.queue_pair()?, theirs.queue_pair()?);
    connect(&qp, &peer)?;
    let (pool, room) = (ours.pool(8, 4)?, theirs.pool(8, 4)?);

    // The other end has a thread of its own, so that each waits while the other works.
    let answering = std::thread::spawn(move || runtime()?.block_on(answer(peer, room)));
    let asked = runtime()?.block_on(async {
        let (before, begin) = (processor_time()?, Instant::now());
        let mut times = Vec::new();
        for round in 0..rounds {
            let over = round + 1 == rounds || begin.elapsed() > ENOUGH;
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
        let each = (processor_time()? - before) / u32::try_from(times.len())?;

        // Nothing comes: what does it cost to wait for it?
        let (before, start) = (processor_time()?, Instant::now());
        let nothing = tokio::time::timeout(idle, qp.recv(pool.try_alloc(8)?)).await;
        check("messages that came unasked", nothing.is_ok(), false)?;
        let idling = (processor_time()? - before).as_secs_f64() / start.elapsed().as_secs_f64();
        Ok((times, each, idling))
    });
    answering.join().map_err(|_| "the answering thread panicked")??;
    asked
}

/// Answers each number with the next one.
async fn answer(qp: QueuePair, pool: Pool) -> Result<()> {
    let mut next = qp.recv(pool.try_alloc(8)?);
    loop {
        let asked = in_time("a question", next).await?;
        let number = u64::from_ne_bytes(asked.buffer[..].try_into()?);
        let answer = number.checked_add(1).ok_or("a question that has no answer")?;
        drop(asked);
        next = qp.recv(pool.try_alloc(8)?);
        in_time("the answer", qp.send(pool.copy_from(&answer.to_ne_bytes())?)).await?;
        if number == LAST {
            return Ok(());
        }
    }
}

fn runtime() -> Result<tokio::runtime::Runtime> {
    Ok(tokio::runtime::Builder::new_current_thread().enable_all().build()?)
}

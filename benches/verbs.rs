//! The work of `benches/c/raw.c` through this crate, with the same arguments and the same line of
//! output.
//!
//! ```text
//! verbs work=write|read|write-batch|read-batch|read-batch-pool|pingpong|
//!            pingpong-served|pingpong-tasks|memcpy|threads
//!       mode=event|cooperative|hybrid|busy-poll [depth=1] [size=BYTES] [operations=10000]
//!       [warmup=1000] [devices=soft0[,rxe1]] [times=yes|no] [runtime=current|multi]
//! ```
//!
//! `write-batch` and `read-batch` repeatedly post `depth` operations with one doorbell and wait for
//! all; times are of batches. In `read-batch-pool`, the buffers of each batch come from the pool
//! and return to it. `pingpong` runs both ends alternately in one future, like the C program. In
//! `pingpong-served` the other end is a task, and this end is in the future of `block_on`; in
//! `pingpong-tasks` both are tasks. `scripts/bench-verbs` and `scripts/costs` build and run both
//! programs.
//!
//! Two works use no device and are limits of the machine: `memcpy` copies `size` bytes, and
//! `threads` is a ping-pong of two threads over one atomic word.

mod common;

use std::hint::black_box;
use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use tokio_rdma::completion::CompletionQueueCounters;
use tokio_rdma::op::Write;
use tokio_rdma::{
    Access, Batch, BufMut, CompletionMode, CompletionQueue, Device, ExposedRegion, Pool, QueuePair,
    RemoteRegion,
};

use common::{Arguments, Result};

const WORD: usize = 8;
const MESSAGE: usize = 64;
const PAGE: usize = 4096;

fn main() -> ExitCode {
    common::exit("verbs", Work::new().and_then(run))
}

fn run(work: Work) -> Result<String> {
    let runtime = work.arguments.runtime()?.enable_io().build()?;
    if work.get("work") == "pingpong-tasks" {
        return runtime.block_on(async { tokio::spawn(compare(work)).await? });
    }
    runtime.block_on(compare(work))
}

struct Work {
    arguments: Arguments,
    depth: usize,
    /// Bytes per operation.
    size: usize,
    operations: usize,
    warmup: usize,
}

impl Work {
    fn new() -> Result<Self> {
        let arguments = Arguments::new(&DEFAULTS)?;
        let number = |name| arguments.number(name);
        let (depth, operations, warmup) =
            (number("depth")?, number("operations")?, number("warmup")?);
        let size = match number("size")? {
            0 if arguments.get("work").starts_with("pingpong") => MESSAGE,
            0 => WORD,
            size => size,
        };
        if depth == 0 || operations == 0 {
            return Err("depth and operations must not be 0".into());
        }
        Ok(Self { arguments, depth, size, operations, warmup })
    }

    fn get(&self, name: &str) -> &str {
        self.arguments.get(name)
    }
}

const DEFAULTS: [(&str, &str); 9] = [
    ("work", "write"),
    ("mode", "cooperative"),
    ("depth", "1"),
    // 8, or 64 for messages.
    ("size", "0"),
    ("operations", "10000"),
    ("warmup", "1000"),
    ("devices", Device::SOFTWARE),
    ("times", "yes"),
    ("runtime", "current"),
];

// Comparing.

async fn compare(work: Work) -> Result<String> {
    let work = &work;
    let (first, second) = work.get("devices").split_once(',').unwrap_or((work.get("devices"), ""));
    let mode = work.arguments.mode()?;
    let ours = End::open(first, &mode, work)?;
    let theirs = End::open(if second.is_empty() { first } else { second }, &mode, work)?;
    ours.qp.connect(&theirs.qp.endpoint())?;
    theirs.qp.connect(&ours.qp.endpoint())?;

    let mut times = Times::new(0);
    exchange(&ours, &theirs, work, work.warmup, &mut times).await?;
    times = Times::new(if work.get("times") == "yes" { work.operations } else { 0 });
    let before = counters(&ours, &theirs);
    let start = Instant::now();
    exchange(&ours, &theirs, work, work.operations, &mut times).await?;
    let mean = start.elapsed().as_nanos() / work.operations as u128;
    let after = counters(&ours, &theirs);

    Ok(format!(
        "program=rust work={} mode={} depth={} size={} operations={} p50_ns={} p99_ns={} \
         mean_ns={mean} arms={} events={}",
        work.get("work"),
        work.get("mode"),
        work.depth,
        work.size,
        work.operations,
        times.quantile(50),
        times.quantile(99),
        after.arms - before.arms,
        after.events - before.events,
    ))
}

fn counters(ours: &End, theirs: &End) -> CompletionQueueCounters {
    let (mut sum, other) = (ours.queue.counters(), theirs.queue.counters());
    sum.arms += other.arms;
    sum.events += other.events;
    sum
}

async fn exchange(
    ours: &End,
    theirs: &End,
    work: &Work,
    operations: usize,
    times: &mut Times,
) -> Result<()> {
    let depth = work.depth;
    let remote = theirs.region.grant().slice(..work.size as u64)?;
    match (work.get("work"), depth) {
        ("write", 1) => {
            one_by_one(ours, |buffer| ours.qp.write(buffer, remote), operations, times).await
        }
        ("read", 1) => {
            one_by_one(ours, |buffer| ours.qp.read(buffer, remote), operations, times).await
        }
        ("write", _) => {
            window(ours, |buffer| ours.qp.write(buffer, remote), depth, operations, times).await
        }
        ("read", _) => {
            window(ours, |buffer| ours.qp.read(buffer, remote), depth, operations, times).await
        }
        ("write-batch", _) => {
            batches(ours, |batch, buffer| batch.write(buffer, remote), depth, operations, times)
                .await
        }
        ("read-batch", _) => {
            batches(ours, |batch, buffer| batch.read(buffer, remote), depth, operations, times)
                .await
        }
        ("read-batch-pool", _) => batches_from_pool(ours, remote, depth, operations, times).await,
        ("memcpy", 1) => copies(work.size, operations, times),
        ("threads", 1) => ping_pong_of_threads(operations, times),
        ("pingpong", 1) => ping_pong(ours, theirs, operations, times).await,
        ("pingpong-served" | "pingpong-tasks", 1) => {
            ping_pong_served(ours, theirs, operations, times).await
        }
        (other, _) => Err(format!("unknown work {other}, or unsupported depth").into()),
    }
}

/// Times of single operations in nanoseconds; none if `capacity` is 0.
struct Times {
    capacity: usize,
    taken: Vec<u64>,
}

impl Times {
    fn new(capacity: usize) -> Self {
        Self { capacity, taken: Vec::with_capacity(capacity) }
    }

    #[inline]
    fn start(&self) -> Option<Instant> {
        (self.capacity > 0).then(Instant::now)
    }

    #[inline]
    fn stop(&mut self, start: Option<Instant>) {
        if let Some(start) = start {
            self.taken.push(start.elapsed().as_nanos() as u64);
        }
    }

    fn quantile(&mut self, percent: usize) -> u64 {
        self.taken.sort_unstable();
        self.taken.get(self.taken.len() * percent / 100).copied().unwrap_or(0)
    }
}

// The work.

struct End {
    qp: QueuePair,
    queue: CompletionQueue,
    pool: Pool,
    region: ExposedRegion,
    size: usize,
}

impl End {
    fn open(name: &str, mode: &CompletionMode, work: &Work) -> Result<Self> {
        let size = work.size;
        let device = Device::open(name)?;
        let pd = device.protection_domain()?;
        let queue = CompletionQueue::new(&device, mode.clone())?;
        Ok(Self {
            qp: QueuePair::new(&pd, &queue)?,
            queue,
            pool: Pool::new(&pd, size, work.depth.max(2))?,
            size,
            region: ExposedRegion::new(&pd, vec![0; size], Access::REMOTE_ALL)?,
        })
    }

    fn buffer(&self) -> Result<BufMut> {
        Ok(self.pool.try_alloc(self.size)?)
    }
}

#[inline]
async fn one_by_one(
    ours: &End,
    post: impl Fn(BufMut) -> Write<BufMut>,
    operations: usize,
    times: &mut Times,
) -> Result<()> {
    let mut buffer = ours.buffer()?;
    for _ in 0..operations {
        let start = times.start();
        buffer = post(buffer).await?;
        times.stop(start);
    }
    Ok(())
}

/// Keeps `depth` operations in flight: awaits the oldest and posts its buffer again.
#[inline]
async fn window(
    ours: &End,
    post: impl Fn(BufMut) -> Write<BufMut>,
    depth: usize,
    operations: usize,
    times: &mut Times,
) -> Result<()> {
    let mut in_flight = Vec::with_capacity(depth);
    for _ in 0..depth.min(operations) {
        in_flight.push((times.start(), post(ours.buffer()?)));
    }
    let mut left = operations.saturating_sub(depth);
    while left > 0 {
        for (start, oldest) in in_flight.iter_mut().take(left) {
            let buffer = (&mut *oldest).await?;
            times.stop(*start);
            *start = times.start();
            *oldest = post(buffer);
            left -= 1;
        }
    }
    for (start, rest) in in_flight {
        rest.await?;
        times.stop(start);
    }
    Ok(())
}

/// Posts `depth` operations with one doorbell and one completion.
async fn batches(
    ours: &End,
    add: impl for<'a> Fn(&'a mut Batch<BufMut>, BufMut) -> &'a mut Batch<BufMut>,
    depth: usize,
    operations: usize,
    times: &mut Times,
) -> Result<()> {
    let mut buffers = (0..depth).map(|_| ours.buffer()).collect::<Result<Vec<_>>>()?;
    let mut batch = Batch::new();
    for _ in 0..operations / depth {
        let start = times.start();
        for buffer in buffers.drain(..) {
            add(&mut batch, buffer);
        }
        let mut result = ours.qp.post_batch(batch).await;
        if let Some(error) = result.results().iter().find_map(|result| result.err()) {
            return Err(error.into());
        }
        times.stop(start);
        buffers.extend(result.drain());
        batch = result.into_batch();
    }
    Ok(())
}

/// Posts `depth` READs with one doorbell. Their buffers return to the pool after each batch.
async fn batches_from_pool(
    ours: &End,
    remote: RemoteRegion,
    depth: usize,
    operations: usize,
    times: &mut Times,
) -> Result<()> {
    let (mut batch, mut buffers) = (Batch::new(), Vec::with_capacity(depth));
    for _ in 0..operations / depth {
        let start = times.start();
        ours.pool.alloc_many(&mut buffers, depth, ours.size).await?;
        for buffer in buffers.drain(..) {
            batch.read(buffer, remote);
        }
        let result = ours.qp.post_batch(batch).await;
        if let Some(error) = result.results().iter().find_map(|result| result.err()) {
            return Err(error.into());
        }
        batch = result.into_batch();
        times.stop(start);
    }
    Ok(())
}

/// Runs both ends alternately. The completion of an answer is awaited only before its buffer is
/// reused: over a wire, the acknowledgement takes as long as the next question.
async fn ping_pong(ours: &End, theirs: &End, operations: usize, times: &mut Times) -> Result<()> {
    let (mut ping, mut answer, mut question) = (ours.buffer()?, ours.buffer()?, theirs.buffer()?);
    let mut returned = None;
    for _ in 0..operations {
        let start = times.start();
        let answered = ours.qp.recv(answer);
        let asked = theirs.qp.recv(question);
        let sent = ours.qp.send(ping);
        question = asked.await?.buffer;
        let pong = match returned.take() {
            Some(earlier) => earlier.await?,
            None => theirs.buffer()?,
        };
        returned = Some(theirs.qp.send(pong));
        answer = answered.await?.buffer;
        ping = sent.await?;
        times.stop(start);
    }
    if let Some(last) = returned {
        last.await?;
    }
    Ok(())
}

/// Runs this end in place and the other as a task. Each posts its next receive before it sends.
async fn ping_pong_served(
    ours: &End,
    theirs: &End,
    operations: usize,
    times: &mut Times,
) -> Result<()> {
    let first = theirs.qp.recv(theirs.buffer()?);
    let answering = tokio::spawn(answer(theirs.qp.clone(), first, theirs.buffer()?, operations));
    let (mut ping, mut answer) = (ours.buffer()?, ours.buffer()?);
    for _ in 0..operations {
        let start = times.start();
        let answered = ours.qp.recv(answer);
        let sent = ours.qp.send(ping);
        answer = answered.await?.buffer;
        ping = sent.await?;
        times.stop(start);
    }
    answering.await?.map_err(Into::into)
}

async fn answer(
    qp: QueuePair,
    mut question: tokio_rdma::op::Recv<BufMut>,
    mut pong: BufMut,
    operations: usize,
) -> std::result::Result<(), String> {
    for round in 1..=operations {
        let buffer = (&mut question).await.map_err(|error| error.to_string())?.buffer;
        if round < operations {
            question = qp.recv(buffer);
        }
        pong = qp.send(pong).await.map_err(|error| error.to_string())?;
    }
    Ok(())
}

// Limits of the machine.

fn copies(size: usize, operations: usize, times: &mut Times) -> Result<()> {
    // Both start on a page. If the target started a few bytes further within its page, some
    // processors would copy 17 times slower.
    let pages = size.next_multiple_of(PAGE);
    let mut memory = vec![7_u8; 2 * pages + PAGE];
    let first = memory.as_ptr().align_offset(PAGE);
    let (source, target) = memory[first..].split_at_mut(pages);
    for _ in 0..operations {
        let start = times.start();
        black_box(&mut target[..size]).copy_from_slice(black_box(&source[..size]));
        times.stop(start);
    }
    Ok(())
}

/// Lets two threads increment a word alternately. An operation is an increment by each.
fn ping_pong_of_threads(operations: usize, times: &mut Times) -> Result<()> {
    let (word, last) = (AtomicUsize::new(0), 2 * operations);
    let await_value = |value| {
        while word.load(Ordering::Acquire) != value {
            std::hint::spin_loop();
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for value in (1..last).step_by(2) {
                await_value(value);
                word.store(value + 1, Ordering::Release);
            }
        });
        for value in (0..last).step_by(2) {
            let start = times.start();
            word.store(value + 1, Ordering::Release);
            await_value(value + 2);
            times.stop(start);
        }
    });
    Ok(())
}

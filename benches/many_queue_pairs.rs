//! Cost of an operation among many queue pairs: `cargo bench --bench many_queue_pairs`.
//!
//! All queue pairs share one completion queue in one process. In each round every queue pair has an
//! 8-byte WRITE in flight; they are posted and awaited in the same order. Prints the time per
//! operation with 10 and with 10,000 queue pairs (minimum of interleaved rounds), their ratio, and
//! the memory of an idle queue pair. `count <queue pairs> <operations>` only runs operations, for
//! callgrind.

use std::time::{Duration, Instant};

use tokio_rdma::op::Write;
use tokio_rdma::{
    Access, BufMut, CompletionMode, CompletionQueue, Device, ExposedRegion, Pool, ProtectionDomain,
    QueuePair, RemoteRegion,
};

const FEW: usize = 10;
const MANY: usize = 10_000;
const DEPTH: u32 = 4;
const OPERATIONS: usize = 200_000;
const ROUNDS: usize = 7;

/// Queue pairs connected in pairs, on one completion queue.
struct Crowd {
    queue_pairs: Vec<QueuePair>,
    _queue: CompletionQueue,
    region: ExposedRegion,
    buffers: Vec<Option<BufMut>>,
    bytes_each: Option<u64>,
}

impl Crowd {
    fn new(pd: &ProtectionDomain, number: usize) -> Self {
        let capacity = number as u32 * 2 * DEPTH;
        let queue = CompletionQueue::builder(pd.device())
            .capacity(capacity)
            .mode(CompletionMode::Event)
            .build();
        let queue = queue.expect("a completion queue");
        let before = resident();
        let make = || QueuePair::builder(pd, &queue).max_send_wr(DEPTH).max_recv_wr(DEPTH).build();
        let queue_pairs: Vec<_> = (0..number).map(|_| make().expect("a queue pair")).collect();
        let bytes_each = resident()
            .zip(before)
            .map(|(after, before)| (after - before.min(after)) / number as u64);
        for two in queue_pairs.chunks(2) {
            two[0].connect(&two[1].endpoint()).expect("connects");
            two[1].connect(&two[0].endpoint()).expect("connects");
        }
        let region =
            ExposedRegion::new(pd, vec![0; 8 * number], Access::REMOTE_ALL).expect("a region");
        let pool = Pool::new(pd, 8, number).expect("a pool");
        let buffers = (0..number as u64).map(|at| pool.copy_from(&at.to_ne_bytes()).ok()).collect();
        Self { queue_pairs, _queue: queue, region, buffers, bytes_each }
    }

    /// Posts one WRITE per queue pair and awaits all of them, `rounds` times.
    async fn write_all(&mut self, rounds: usize) -> Duration {
        let remote = self.region.grant();
        let word = |at: usize| -> RemoteRegion {
            remote.slice(at as u64 * 8..at as u64 * 8 + 8).expect("a word of the region")
        };
        let mut writes: Vec<Write<BufMut>> = Vec::with_capacity(self.queue_pairs.len());
        let start = Instant::now();
        for _ in 0..rounds {
            for (at, queue_pair) in self.queue_pairs.iter().enumerate() {
                let buffer = self.buffers[at].take().expect("each has its buffer");
                writes.push(queue_pair.write(buffer, word(at)));
            }
            for (at, write) in writes.drain(..).enumerate() {
                self.buffers[at] = Some(write.await.expect("a write"));
            }
        }
        start.elapsed()
    }

    fn verify(&self) {
        for at in 0..self.queue_pairs.len() {
            assert_eq!(self.region.load(at * 8), Ok(at as u64), "queue pair {at} wrote its number");
        }
    }
}

/// Returns the resident memory of this process, if the system reports it.
fn resident() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok().map(|kib| kib * 1024)
}

fn main() {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let device = Device::software().expect("the software device");
    let pd = device.protection_domain().expect("a protection domain");
    let arguments: Vec<String> =
        std::env::args().skip(1).filter(|argument| argument != "--bench").collect();
    if let [command, number, operations] = &arguments[..]
        && command == "count"
    {
        let number: usize = number.parse().expect("a number of queue pairs");
        let operations: usize = operations.parse().expect("a number of operations");
        let mut crowd = Crowd::new(&pd, number);
        runtime.block_on(crowd.write_all(operations.div_ceil(number)));
        return;
    }

    let mut crowds = [FEW, MANY].map(|number| Crowd::new(&pd, number));
    let mut least = [f64::MAX; 2];
    for _ in 0..ROUNDS {
        for (crowd, least) in crowds.iter_mut().zip(&mut least) {
            let rounds = OPERATIONS / crowd.queue_pairs.len();
            let operations = rounds * crowd.queue_pairs.len();
            let elapsed = runtime.block_on(crowd.write_all(rounds));
            *least = least.min(elapsed.as_nanos() as f64 / operations as f64);
        }
    }
    crowds.iter().for_each(Crowd::verify);

    for (crowd, least) in crowds.iter().zip(least) {
        println!("{:6} queue pairs: {least:7.1} ns per awaited WRITE", crowd.queue_pairs.len());
    }
    println!("ratio {:.2}", least[1] / least[0]);
    if let Some(bytes) = crowds[1].bytes_each {
        println!("{bytes} bytes of memory per idle queue pair");
    }
}

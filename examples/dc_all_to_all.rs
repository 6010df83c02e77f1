//! Every node writes into every other, by dynamic connections: `cargo run --release --example dc_all_to_all`.
//!
//! ```text
//! --nodes N        nodes, all in this process; 8, 64 and 512 one after the other unless given
//! --initiators K   initiators of each node; 4 unless given
//! --bytes B        bytes of each write; 8 unless given
//! --measure M      queue pairs made to measure what one takes; 256 unless given, 0 for none
//! --emulated       through libmlx5, on an emulated ConnectX in this process (feature `mlx5`, libmlx5 installed)
//! ```
//!
//! Each node has one target, K initiators in a pool, and an address for each other node. It writes a message of its own into
//! each of them, and all bytes are checked. Printed beside it is what reliable connections would need: one queue pair on each
//! node for each other node, N × (N − 1) in all.
//!
//! Memory is what was allocated by Rust and not freed, exactly, and beside it what the kernel says is resident, which counts
//! whole pages and leaves out what is used again. On the software device that is all that an object takes; on a real one its
//! library takes more (resident), and so do the kernel and the adapter, which is not seen here. What is marked "computed"
//! was not made: the number of queue pairs times what one was measured to take.
//!
//! The device is the one that `TOKIO_RDMA_DEVICE` names, if it has DC, or the software device. Exits with 0 if every byte
//! arrived.

#[path = "../tests/common/live.rs"]
mod live;

use std::fmt;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use tokio_rdma::dc::{DcAddress, DcPool, DcPoolPeer, DcTarget};
use tokio_rdma::memory::HostMemory;
use tokio_rdma::{
    Access, CompletionQueue, Device, ExposedRegion, Pool, ProtectionDomain, QueuePair,
    RemoteRegion, SharedReceiveQueue,
};

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// Nobody waits longer for a write to nodes of the same process.
const DEADLINE: Duration = Duration::from_secs(60);
/// Work requests of a send queue, of an initiator and of a queue pair alike.
const DEPTH: u32 = 32;
/// Writes that a node has underway.
const WINDOW: usize = 16;

struct Options {
    nodes: Vec<usize>,
    initiators: usize,
    bytes: usize,
    measure: usize,
    emulated: bool,
}

fn main() -> ExitCode {
    let options = match options() {
        Ok(options) => options,
        Err(error) => {
            eprintln!(
                "{error}\nusage: dc_all_to_all [--nodes N] [--initiators K] [--bytes B] [--measure M] [--emulated]"
            );
            return ExitCode::from(2);
        }
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    match runtime.map_err(Failure::from).and_then(|runtime| runtime.block_on(run(&options))) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// The device of the adapter that tests of libmlx5 use.
#[cfg(all(feature = "mlx5", target_os = "linux", target_env = "gnu"))]
fn emulated() -> Result<Device, Failure> {
    emulated_connectx::EmulatedConnectX::start(emulated_connectx::Options::default())?;
    Ok(Device::open("mlx5_0")?)
}

#[cfg(not(all(feature = "mlx5", target_os = "linux", target_env = "gnu")))]
fn emulated() -> Result<Device, Failure> {
    Err("--emulated: only with feature mlx5, on Linux".into())
}

fn options() -> Result<Options, lexopt::Error> {
    use lexopt::prelude::{Long, ValueExt};
    let mut options =
        Options { nodes: Vec::new(), initiators: 4, bytes: 8, measure: 256, emulated: false };
    let mut arguments = lexopt::Parser::from_env();
    while let Some(argument) = arguments.next()? {
        match argument {
            Long("nodes") => options.nodes = vec![arguments.value()?.parse()?],
            Long("initiators") => options.initiators = arguments.value()?.parse()?,
            Long("bytes") => options.bytes = arguments.value()?.parse()?,
            Long("measure") => options.measure = arguments.value()?.parse()?,
            Long("emulated") => options.emulated = true,
            other => return Err(other.unexpected()),
        }
    }
    if options.nodes.is_empty() {
        options.nodes = vec![8, 64, 512];
    }
    let (nodes, bytes) = (options.nodes.iter().min().copied().unwrap_or(0), options.bytes);
    if nodes < 2 || bytes < 8 || options.initiators == 0 {
        return Err("at least 2 nodes, 1 initiator and 8 bytes, which say who wrote them".into());
    }
    Ok(options)
}

async fn run(options: &Options) -> Result<(), Failure> {
    let device = if options.emulated { emulated()? } else { Device::open_default()? };
    if device.attr().dc.is_none() {
        return Err(format!("{} has no dynamic connections", device.name()).into());
    }
    println!(
        "device {}, {} initiators for each node, send queues of {DEPTH}",
        device.name(),
        options.initiators
    );
    let queue_pair = match options.measure {
        0 => None,
        count => {
            let each = measure_queue_pairs(&device, count).await?;
            println!("a reliable connection's queue pair: {} (of {count} made)", each);
            Some(each)
        }
    };
    for &nodes in &options.nodes {
        let report = all_to_all(&device, nodes, options).await?;
        print(nodes, options, &report, queue_pair);
    }
    Ok(())
}

/// One node. Fields drop in this order.
struct Node {
    peers: Vec<(DcPoolPeer, RemoteRegion)>,
    pool: DcPool,
    target: DcTarget,
    region: ExposedRegion,
    buffers: Pool,
    /// Last: the others are made of them.
    _queue: CompletionQueue,
    _pd: ProtectionDomain,
}

/// What a node tells the others.
#[derive(Clone, Copy)]
struct Introduction {
    address: DcAddress,
    region: RemoteRegion,
}

impl Node {
    fn new(device: &Device, nodes: usize, options: &Options) -> Result<Self, Failure> {
        let pd = device.protection_domain()?;
        let capacity = DEPTH * options.initiators as u32 + 16;
        let queue = CompletionQueue::builder(device).capacity(capacity).build()?;
        // Writes take no receives; a target is not made without a queue of them.
        let srq = SharedReceiveQueue::new(&pd, &queue, 1, 1)?;
        let target = DcTarget::new(&pd, &srq)?;
        let pool = DcPool::builder(&pd, &queue).initiators(options.initiators);
        let pool = pool.initiator(|each| each.max_send_wr(DEPTH)).build()?;
        let memory = HostMemory::zeroed(nodes * options.bytes)?;
        let region = ExposedRegion::new(&pd, memory, Access::REMOTE_WRITE)?;
        let buffers = Pool::builder(&pd).buffer_size(options.bytes).buffers(WINDOW).build()?;
        Ok(Self { peers: Vec::new(), pool, target, region, buffers, _queue: queue, _pd: pd })
    }

    fn introduction(&self) -> Introduction {
        Introduction { address: self.target.address(), region: self.region.grant() }
    }

    /// Writes a message of its own into its place at every other node.
    async fn write_to_all(&self, number: usize, bytes: usize) -> Result<(), Failure> {
        let others = (0..self.peers.len())
            .map(|at| (number + at) % self.peers.len())
            .filter(|&to| to != number);
        let others: Vec<_> = others.collect();
        for window in others.chunks(WINDOW) {
            let mut writes = Vec::with_capacity(window.len());
            for &to in window {
                let (peer, region) = &self.peers[to];
                let mut buffer = self.buffers.try_alloc(bytes)?;
                fill(&mut buffer, number, to);
                let start = (number * bytes) as u64;
                writes.push(peer.write(buffer, region.slice(start..start + bytes as u64)?));
            }
            for write in writes {
                tokio::time::timeout(DEADLINE, write).await??;
            }
        }
        Ok(())
    }

    /// Checks that what every other node has written is there, and nothing else.
    fn check(&self, number: usize, nodes: usize, bytes: usize) -> Result<(), Failure> {
        let (mut found, mut expected) = (vec![0; bytes], vec![0; bytes]);
        for from in 0..nodes {
            self.region.read(from * bytes, &mut found)?;
            expected.fill(0);
            if from != number {
                fill(&mut expected, from, number);
            }
            if found != expected {
                return Err(format!("node {number} has not what node {from} wrote").into());
            }
        }
        Ok(())
    }
}

/// Bytes that say who wrote them to whom.
fn fill(bytes: &mut [u8], from: usize, to: usize) {
    let tag = (((from as u64 + 1) << 32) | (to as u64 + 1)).to_be_bytes();
    for (at, byte) in bytes.iter_mut().enumerate() {
        *byte = tag[at % 8].wrapping_add((at / 8) as u8);
    }
}

struct Report {
    /// Of all nodes, without their peers.
    base: Memory,
    /// Of all addresses of all nodes.
    peers: Memory,
    /// Of all nodes with all of it, after the writes.
    used: Memory,
    switches: u64,
    elapsed: Duration,
}

async fn all_to_all(device: &Device, nodes: usize, options: &Options) -> Result<Report, Failure> {
    let start = Memory::now()?;
    let mut all =
        (0..nodes).map(|_| Node::new(device, nodes, options)).collect::<Result<Vec<_>, _>>()?;
    let made = Memory::now()?;
    let introductions: Vec<_> = all.iter().map(Node::introduction).collect();
    for node in &mut all {
        node.peers.reserve_exact(nodes);
        for &Introduction { address, region } in &introductions {
            node.peers.push((node.pool.peer(&address)?, region));
        }
    }
    let met = Memory::now()?;

    let began = Instant::now();
    let bytes = options.bytes;
    let mut tasks = tokio::task::JoinSet::new();
    for (number, node) in all.into_iter().enumerate() {
        tasks.spawn(async move {
            let result = node.write_to_all(number, bytes).await;
            (number, node, result)
        });
    }
    let mut done = Vec::with_capacity(nodes);
    while let Some(finished) = tasks.join_next().await {
        let (number, node, result) = finished?;
        result?;
        done.push((number, node));
    }
    let elapsed = began.elapsed();
    let mut switches = 0;
    for (number, node) in &done {
        node.check(*number, nodes, bytes)?;
        let counters = node.pool.counters();
        if counters.repairs > 0 {
            return Err(format!("node {number} had to repair an initiator: {counters:?}").into());
        }
        switches += counters.switches;
    }
    Ok(Report {
        base: made.since(start),
        peers: met.since(made),
        used: Memory::now()?.since(start),
        switches,
        elapsed,
    })
}

fn print(nodes: usize, options: &Options, report: &Report, queue_pair: Option<Memory>) {
    let Options { initiators, bytes, .. } = options;
    let pairs = nodes * (nodes - 1);
    println!(
        "\n{nodes} nodes: {pairs} writes of {bytes} bytes in {:?}, each byte checked",
        report.elapsed
    );
    println!("  dynamic connections, made:");
    println!(
        "    {} queue pairs and targets in all, {} on each node ({initiators} initiators, 1 target)",
        nodes * (initiators + 1),
        initiators + 1
    );
    println!("    node without its peers  {}", report.base.over(nodes));
    println!("    peer of a node          {}", report.peers.over(nodes * nodes));
    println!("    node after its writes   {}", report.used.over(nodes));
    println!("    {} switches of an initiator to another peer", report.switches);
    println!("  reliable connections, computed:");
    println!("    {pairs} queue pairs in all, {} on each node", nodes - 1);
    if let Some(each) = queue_pair {
        println!("    queue pairs of a node   {}", each.times((nodes - 1) as f64));
    }
}

/// What one of `count` queue pairs takes, connected two by two, after a write of each.
async fn measure_queue_pairs(device: &Device, count: usize) -> Result<Memory, Failure> {
    let count = count.next_multiple_of(2);
    let pd = device.protection_domain()?;
    // Their receives are those of one shared queue, as targets have it.
    let queue = CompletionQueue::builder(device).capacity(DEPTH * count as u32 + 16).build()?;
    let srq = SharedReceiveQueue::new(&pd, &queue, 1, 1)?;
    let region = ExposedRegion::new(&pd, HostMemory::zeroed(8)?, Access::REMOTE_WRITE)?;
    let make =
        || QueuePair::builder(&pd, &queue).max_send_wr(DEPTH).shared_receive_queue(&srq).build();
    let mut made = Vec::with_capacity(count);
    let start = Memory::now()?;
    for _ in 0..count / 2 {
        let (one, other) = (make()?, make()?);
        one.connect(&other.endpoint())?;
        other.connect(&one.endpoint())?;
        made.extend([one, other]);
    }
    for queue_pair in &made {
        tokio::time::timeout(DEADLINE, queue_pair.write_inline(b"measured", region.grant()))
            .await??;
    }
    Ok(Memory::now()?.since(start).over(count))
}

/// Memory of this process, in bytes; of one object, so much as it took.
#[derive(Clone, Copy)]
struct Memory {
    /// Allocated by Rust and not freed.
    heap: f64,
    /// In memory, as the kernel says.
    resident: f64,
}

impl Memory {
    fn now() -> Result<Self, Failure> {
        let status = std::fs::read_to_string("/proc/self/status")?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kib = line.and_then(|line| line.trim().split(' ').next()?.parse::<f64>().ok());
        let resident = kib.ok_or("no VmRSS in /proc/self/status")? * 1024.0;
        Ok(Self { heap: live::bytes() as f64, resident })
    }

    fn each(self, other: Self, join: impl Fn(f64, f64) -> f64) -> Self {
        Self { heap: join(self.heap, other.heap), resident: join(self.resident, other.resident) }
    }

    /// Since `before`.
    fn since(self, before: Self) -> Self {
        self.each(before, |now, before| (now - before).max(0.0))
    }

    fn times(self, factor: f64) -> Self {
        self.each(self, |bytes, _| bytes * factor)
    }

    fn over(self, count: usize) -> Self {
        self.times(1.0 / count as f64)
    }
}

impl fmt::Display for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let amount = |bytes: f64| match bytes {
            ..8192.0 => format!("{bytes:.0} B"),
            _ => format!("{:.1} KiB", bytes / 1024.0),
        };
        write!(f, "heap {}, resident {}", amount(self.heap), amount(self.resident))
    }
}

//! All-to-all WRITEs over dynamically connected (DC) transport.
//!
//! ```text
//! cargo run --release --example dc_all_to_all -- [OPTIONS]
//!
//! --nodes N        nodes, all in this process; default: 8, 64 and 512 in succession
//! --initiators K   DC initiators per node; default 4
//! --bytes B        bytes per WRITE; default 8
//! --measure M      queue pairs created to measure the memory of one; default 256, 0 for none
//! --emulated       libmlx5 on an emulated ConnectX (needs feature `mlx5` and libmlx5)
//! ```
//!
//! Each node has one DC target and a pool of K initiators. It writes to every other node, and every
//! byte is checked. For comparison the program computes what reliable connections would need: one
//! queue pair per node for each other node, N × (N − 1) in total.
//!
//! Heap memory is what Rust code has allocated and not freed. Resident memory is the kernel's
//! figure for whole pages, and misses reused memory. The heap is all that an object of the software
//! device takes. A library for a real device takes more (resident); kernel and adapter memory is
//! not measured.
//!
//! The device is the one named by `TOKIO_RDMA_DEVICE`, if it supports DC, or else the software
//! device.

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

const WRITE_TIMEOUT: Duration = Duration::from_secs(60);
/// The send queue length of an initiator, and of a queue pair.
const DEPTH: u32 = 32;
/// The WRITEs that a node keeps in flight.
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
                "{error}\nusage: dc_all_to_all [--nodes N] [--initiators K] [--bytes B] \
                 [--measure M] [--emulated]"
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

#[cfg(all(feature = "mlx5", target_os = "linux", target_env = "gnu"))]
fn emulated() -> Result<Device, Failure> {
    emulated_connectx::EmulatedConnectX::start(emulated_connectx::Options::default())?;
    Ok(Device::open("mlx5_0")?)
}

#[cfg(not(all(feature = "mlx5", target_os = "linux", target_env = "gnu")))]
fn emulated() -> Result<Device, Failure> {
    Err("--emulated needs feature mlx5 on Linux".into())
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
        return Err("needs at least 2 nodes, 1 initiator and 8 bytes".into());
    }
    Ok(options)
}

async fn run(options: &Options) -> Result<(), Failure> {
    let device = if options.emulated { emulated()? } else { Device::open_default_or_software()? };
    if device.attr().dc.is_none() {
        return Err(format!("{} does not support dynamic connections", device.name()).into());
    }
    println!(
        "device {}, {} initiators per node, send queues of {DEPTH}",
        device.name(),
        options.initiators
    );
    let queue_pair = match options.measure {
        0 => None,
        count => {
            let each = measure_queue_pairs(&device, count).await?;
            println!("queue pair of a reliable connection: {each} (mean of {count})");
            Some(each)
        }
    };
    for &nodes in &options.nodes {
        let report = all_to_all(&device, nodes, options).await?;
        print(nodes, options, &report, queue_pair);
    }
    Ok(())
}

/// The fields drop in this order.
struct Node {
    peers: Vec<(DcPoolPeer, RemoteRegion)>,
    pool: DcPool,
    target: DcTarget,
    region: ExposedRegion,
    buffers: Pool,
    _queue: CompletionQueue,
    _pd: ProtectionDomain,
}

#[derive(Clone, Copy)]
struct NodeAddress {
    address: DcAddress,
    region: RemoteRegion,
}

impl Node {
    fn new(device: &Device, nodes: usize, options: &Options) -> Result<Self, Failure> {
        let pd = device.protection_domain()?;
        let capacity = DEPTH * options.initiators as u32 + 16;
        let queue = CompletionQueue::builder(device).capacity(capacity).build()?;
        // WRITEs consume no receives, but a DC target needs a shared receive queue.
        let srq = SharedReceiveQueue::new(&pd, &queue, 1, 1)?;
        let target = DcTarget::new(&pd, &srq)?;
        let pool = DcPool::builder(&pd, &queue).initiators(options.initiators);
        let pool = pool.initiator(|each| each.max_send_wr(DEPTH)).build()?;
        let memory = HostMemory::zeroed(nodes * options.bytes)?;
        let region = ExposedRegion::new(&pd, memory, Access::REMOTE_WRITE)?;
        let buffers = Pool::builder(&pd).buffer_size(options.bytes).buffers(WINDOW).build()?;
        Ok(Self { peers: Vec::new(), pool, target, region, buffers, _queue: queue, _pd: pd })
    }

    fn address(&self) -> NodeAddress {
        NodeAddress { address: self.target.address(), region: self.region.grant() }
    }

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
                tokio::time::timeout(WRITE_TIMEOUT, write).await??;
            }
        }
        Ok(())
    }

    /// Checks that the region holds the messages of all other nodes and nothing else.
    fn check(&self, number: usize, nodes: usize, bytes: usize) -> Result<(), Failure> {
        let (mut found, mut expected) = (vec![0; bytes], vec![0; bytes]);
        for from in 0..nodes {
            self.region.read(from * bytes, &mut found)?;
            expected.fill(0);
            if from != number {
                fill(&mut expected, from, number);
            }
            if found != expected {
                return Err(format!("node {number}: wrong bytes from node {from}").into());
            }
        }
        Ok(())
    }
}

/// Fills `bytes` with a pattern that identifies sender and receiver.
fn fill(bytes: &mut [u8], from: usize, to: usize) {
    let tag = (((from as u64 + 1) << 32) | (to as u64 + 1)).to_be_bytes();
    for (at, byte) in bytes.iter_mut().enumerate() {
        *byte = tag[at % 8].wrapping_add((at / 8) as u8);
    }
}

struct Report {
    /// All nodes, without their peers.
    base: Memory,
    /// All peers of all nodes.
    peers: Memory,
    /// All nodes and peers, after the WRITEs.
    used: Memory,
    switches: u64,
    elapsed: Duration,
}

async fn all_to_all(device: &Device, nodes: usize, options: &Options) -> Result<Report, Failure> {
    let start = Memory::now()?;
    let mut all =
        (0..nodes).map(|_| Node::new(device, nodes, options)).collect::<Result<Vec<_>, _>>()?;
    let created = Memory::now()?;
    let addresses: Vec<_> = all.iter().map(Node::address).collect();
    for node in &mut all {
        node.peers.reserve_exact(nodes);
        for &NodeAddress { address, region } in &addresses {
            node.peers.push((node.pool.peer(&address)?, region));
        }
    }
    let connected = Memory::now()?;

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
            return Err(format!(
                "node {number}: an initiator failed and was repaired: {counters:?}"
            )
            .into());
        }
        switches += counters.switches;
    }
    Ok(Report {
        base: created.since(start),
        peers: connected.since(created),
        used: Memory::now()?.since(start),
        switches,
        elapsed,
    })
}

fn print(nodes: usize, options: &Options, report: &Report, queue_pair: Option<Memory>) {
    let Options { initiators, bytes, .. } = options;
    let pairs = nodes * (nodes - 1);
    println!(
        "\n{nodes} nodes: {pairs} WRITEs of {bytes} bytes in {:?}, every byte checked",
        report.elapsed
    );
    println!("  dynamic connections, measured:");
    println!(
        "    {} queue pairs and targets, {} per node ({initiators} initiators, 1 target)",
        nodes * (initiators + 1),
        initiators + 1
    );
    println!("    node without its peers  {}", report.base.over(nodes));
    println!("    each peer of a node     {}", report.peers.over(nodes * nodes));
    println!("    node after its WRITEs   {}", report.used.over(nodes));
    println!("    {} times an initiator switched to another peer", report.switches);
    println!("  reliable connections, computed:");
    println!("    {pairs} queue pairs, {} per node", nodes - 1);
    if let Some(each) = queue_pair {
        println!("    queue pairs of a node   {}", each.times((nodes - 1) as f64));
    }
}

/// Measures the memory of one of `count` connected queue pairs, after a WRITE on each.
async fn measure_queue_pairs(device: &Device, count: usize) -> Result<Memory, Failure> {
    let count = count.next_multiple_of(2);
    let pd = device.protection_domain()?;
    // All share one receive queue, as with DC targets.
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
        tokio::time::timeout(WRITE_TIMEOUT, queue_pair.write_inline(b"measured", region.grant()))
            .await??;
    }
    Ok(Memory::now()?.since(start).over(count))
}

/// Memory of this process, in bytes.
#[derive(Clone, Copy)]
struct Memory {
    heap: f64,
    resident: f64,
}

impl Memory {
    fn now() -> Result<Self, Failure> {
        let status = std::fs::read_to_string("/proc/self/status")?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kib = line.and_then(|line| line.trim().split(' ').next()?.parse::<f64>().ok());
        let resident = kib.ok_or("VmRSS missing in /proc/self/status")? * 1024.0;
        Ok(Self { heap: live::bytes() as f64, resident })
    }

    fn each(self, other: Self, join: impl Fn(f64, f64) -> f64) -> Self {
        Self { heap: join(self.heap, other.heap), resident: join(self.resident, other.resident) }
    }

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

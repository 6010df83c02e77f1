//! Memory that a node needs to talk to many peers, by kind of connection: `cargo bench --bench
//! scaling`.
//!
//! ```text
//! --peers N     number of peers; 10, 1,000 and 100,000 by default
//! --make M      maximum number of queue pairs and connections created; 1,000 by default
//! --emulated    queues of libmlx5 on an emulated ConnectX (feature `mlx5`, libmlx5 installed)
//! ```
//!
//! Memory is what Rust has allocated and not freed, which includes all objects of the software
//! device. Each end is connected (to another one of the same kind) and has written once.
//! `measured`: all were created. `computed`: fewer were created, the rest is extrapolated. With
//! `--emulated`, memory is the queues that libmlx5 announced to the device: what an adapter
//! accesses in host memory.

#[path = "../tests/common/live.rs"]
mod live;

use std::fmt;
use std::time::Duration;

use tokio_rdma::dc::{DcPool, DcTarget};
use tokio_rdma::memory::HostMemory;
use tokio_rdma::{
    Access, CompletionQueue, Connection, ConnectionConfig, Device, ExposedRegion, ProtectionDomain,
    QueuePair, SharedReceiveQueue,
};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Work requests per send queue and per receive queue.
const DEPTH: u32 = 32;
/// Receives of a shared receive queue for all peers.
const SHARED: u32 = 1024;
/// DC initiators per node.
const INITIATORS: u32 = 4;
/// Maximum number of queue pairs with their own completion queues: each takes a descriptor, and
/// many shells allow 1,024.
const DESCRIPTORS: usize = 256;
/// Maximum wait for a write within the process.
const DEADLINE: Duration = Duration::from_secs(60);

struct Options {
    peers: Vec<usize>,
    make: usize,
    emulated: bool,
}

/// Waits until the objects of `peers` are freed: connections disconnect in the background.
async fn freed(before: usize, peers: usize) -> Result<()> {
    /// Memory retained by the runtime and the process's device.
    const KEPT: usize = 256 << 10;
    /// Tables of the device keep the capacity for as many objects as there were at once.
    const KEPT_OF_EACH: usize = 128;
    let gone = async {
        while live::bytes() > before + KEPT + KEPT_OF_EACH * peers {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(DEADLINE, gone)
        .await
        .map_err(|_| "memory of dropped objects was not freed".into())
}

/// The kind of connection to peers.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Messages,
    Own,
    SharedCompletions,
    SharedReceives,
    Dynamic,
}

/// Memory measured for a number of peers.
#[derive(Clone, Copy)]
struct Measurement {
    peers: usize,
    /// Memory independent of the number of peers, and memory proportional to it.
    base: f64,
    grown: f64,
}

fn main() -> Result<()> {
    let options = options()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let meter = Meter::new(options.emulated)?;
    println!(
        "device {}, send and receive queues of {DEPTH}, shared receives {SHARED}",
        meter.device.name()
    );
    for &peers in &options.peers {
        println!("\n{peers} peers");
        for kind in Kind::ALL {
            // Buffers are host memory, whatever the device.
            if options.emulated && kind == Kind::Messages {
                continue;
            }
            let made = peers.min(kind.maximum(options.make));
            let before = live::bytes();
            let measurement = runtime.block_on(meter.measure(kind, made))?;
            runtime.block_on(freed(before, made))?;
            println!("  {kind:44} {}", Row { kind, peers, measurement });
        }
    }
    Ok(())
}

fn options() -> Result<Options> {
    use lexopt::prelude::{Long, ValueExt};
    let mut options = Options { peers: vec![10, 1_000, 100_000], make: 1_000, emulated: false };
    let mut arguments = lexopt::Parser::from_env();
    while let Some(argument) = arguments.next()? {
        match argument {
            Long("peers") => options.peers = vec![arguments.value()?.parse::<usize>()?.max(2)],
            Long("make") => options.make = arguments.value()?.parse::<usize>()?.max(2),
            Long("emulated") => options.emulated = true,
            Long("bench") => {}
            other => return Err(other.unexpected().into()),
        }
    }
    Ok(options)
}

struct Meter {
    device: Device,
    #[cfg(all(feature = "mlx5", target_os = "linux", target_env = "gnu"))]
    adapter: Option<emulated_connectx::EmulatedConnectX>,
}

impl Meter {
    #[cfg(all(feature = "mlx5", target_os = "linux", target_env = "gnu"))]
    fn new(emulated: bool) -> Result<Self> {
        if !emulated {
            return Ok(Self { device: Device::software()?, adapter: None });
        }
        let adapter =
            emulated_connectx::EmulatedConnectX::start(emulated_connectx::Options::default())?;
        Ok(Self { device: Device::open("mlx5_0")?, adapter: Some(adapter) })
    }

    #[cfg(not(all(feature = "mlx5", target_os = "linux", target_env = "gnu")))]
    fn new(emulated: bool) -> Result<Self> {
        match emulated {
            true => Err("--emulated requires feature mlx5 and glibc on Linux".into()),
            false => Ok(Self { device: Device::software()? }),
        }
    }

    fn bytes(&self) -> f64 {
        #[cfg(all(feature = "mlx5", target_os = "linux", target_env = "gnu"))]
        if let Some(adapter) = &self.adapter {
            return adapter.counters().queue_bytes as f64;
        }
        live::bytes() as f64
    }

    /// Creates connections to `peers` peers and returns their memory.
    async fn measure(&self, kind: Kind, peers: usize) -> Result<Measurement> {
        let pd = self.device.protection_domain()?;
        match kind {
            Kind::Messages => self.connections(&pd, peers, &ConnectionConfig::default()).await,
            Kind::Dynamic => self.dynamic(&pd, peers).await,
            _ => self.reliable(&pd, kind, peers).await,
        }
    }

    async fn reliable(
        &self,
        pd: &ProtectionDomain,
        kind: Kind,
        peers: usize,
    ) -> Result<Measurement> {
        // Two ends per connection: an even number.
        let peers = peers.next_multiple_of(2);
        let region = ExposedRegion::new(pd, HostMemory::zeroed(8)?, Access::REMOTE_WRITE)?;
        let start = self.bytes();
        // Peers of a completion queue, the entries of each, and entries for shared receives.
        let largest = (self.device.attr().max_cqe / (2 * DEPTH)) as usize;
        let (most, depth, shared) = match kind {
            Kind::Own => (1, 2 * DEPTH, 0),
            Kind::SharedReceives => (peers, DEPTH, SHARED),
            _ => (peers.min(largest), 2 * DEPTH, 0),
        };
        let capacity = depth * most as u32 + shared;
        let queues = (0..peers.div_ceil(most))
            .map(|_| CompletionQueue::builder(&self.device).capacity(capacity).build())
            .collect::<std::result::Result<Vec<_>, _>>()?;
        let taken = self.bytes() - start;
        let receives = match shared {
            0 => None,
            _ => Some(SharedReceiveQueue::new(pd, &queues[0], shared, 1)?),
        };
        // Entries of the completion queue for shared receives are independent of the number of
        // peers; all else is proportional to it.
        let fixed = f64::from(shared) / f64::from(capacity);
        let base = self.bytes() - start - taken * (1.0 - fixed);
        let mut ends = Vec::with_capacity(peers);
        for at in 0..peers {
            let queue = &queues[at / most];
            let builder = QueuePair::builder(pd, queue).max_send_wr(DEPTH).max_sge(1);
            let builder = match &receives {
                Some(receives) => builder.shared_receive_queue(receives),
                None => builder.max_recv_wr(DEPTH),
            };
            ends.push(builder.build()?);
        }
        for two in ends.chunks(2) {
            two[0].connect(&two[1].endpoint())?;
            two[1].connect(&two[0].endpoint())?;
        }
        for end in &ends {
            tokio::time::timeout(DEADLINE, end.write_inline(b"measured", region.grant())).await??;
        }
        Ok(Measurement { peers, base, grown: self.bytes() - start - base })
    }

    async fn dynamic(&self, pd: &ProtectionDomain, peers: usize) -> Result<Measurement> {
        let region = ExposedRegion::new(pd, HostMemory::zeroed(8)?, Access::REMOTE_WRITE)?;
        let start = self.bytes();
        let queue =
            CompletionQueue::builder(&self.device).capacity(DEPTH * INITIATORS + SHARED).build()?;
        let receives = SharedReceiveQueue::new(pd, &queue, SHARED, 1)?;
        let target = DcTarget::new(pd, &receives)?;
        let pool = DcPool::builder(pd, &queue).initiators(INITIATORS as usize);
        let pool = pool.initiator(|each| each.max_send_wr(DEPTH).max_sge(1)).build()?;
        // Uses each initiator once, to include memory allocated on first use.
        for _ in 0..INITIATORS {
            let peer = pool.peer(&target.address())?;
            tokio::time::timeout(DEADLINE, peer.write_inline(b"measured", region.grant()))
                .await??;
        }
        let base = self.bytes() - start;
        let mut all = Vec::with_capacity(peers);
        for _ in 0..peers {
            // An address can have any number of peers.
            all.push(pool.peer(&target.address())?);
        }
        for peer in all.iter().take(1_000) {
            tokio::time::timeout(DEADLINE, peer.write_inline(b"measured", region.grant()))
                .await??;
        }
        Ok(Measurement { peers, base, grown: self.bytes() - start - base })
    }

    async fn connections(
        &self,
        pd: &ProtectionDomain,
        peers: usize,
        config: &ConnectionConfig,
    ) -> Result<Measurement> {
        let peers = peers.next_multiple_of(2);
        let start = self.bytes();
        let mut ends = Vec::with_capacity(peers);
        for _ in 0..peers / 2 {
            let (one, other) = (Connection::prepare(pd, config)?, Connection::prepare(pd, config)?);
            let (endpoints, hellos) =
                ([one.endpoint(), other.endpoint()], [one.handshake(&[])?, other.handshake(&[])?]);
            ends.push(one.establish(&endpoints[1], &hellos[1])?);
            ends.push(other.establish(&endpoints[0], &hellos[0])?);
        }
        for two in ends.chunks(2) {
            tokio::time::timeout(DEADLINE, two[0].send("measured")).await??;
            tokio::time::timeout(DEADLINE, two[1].recv()).await??;
        }
        let grown = self.bytes() - start;
        Ok(Measurement { peers, base: 0.0, grown })
    }
}

impl Kind {
    const ALL: [Self; 5] =
        [Self::Messages, Self::Own, Self::SharedCompletions, Self::SharedReceives, Self::Dynamic];

    fn maximum(self, make: usize) -> usize {
        match self {
            Self::Own => make.min(DESCRIPTORS),
            Self::Messages | Self::SharedCompletions | Self::SharedReceives => make,
            Self::Dynamic => usize::MAX,
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Messages => "Connection, default settings, with buffers",
            Self::Own => "RC, a completion queue each",
            Self::SharedCompletions => "RC, shared completion queue",
            Self::SharedReceives => "RC, shared completion and receive queue",
            Self::Dynamic => "DC, 4 initiators and 1 target",
        })
    }
}

struct Row {
    kind: Kind,
    peers: usize,
    measurement: Measurement,
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, peers, measurement } = *self;
        let each = measurement.grown / measurement.peers as f64;
        let total = measurement.base + each * peers as f64;
        let queue_pairs = if kind == Kind::Dynamic { INITIATORS as usize } else { peers };
        write!(f, "{queue_pairs:6} queue pairs {:>12}, each peer {each:7.0} B", Bytes(total))?;
        if measurement.peers >= peers {
            f.write_str(", measured")
        } else {
            write!(f, ", computed from {}", measurement.peers)
        }
    }
}

struct Bytes(f64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&match self.0 {
            ..1048576.0 => format!("{:.1} KiB", self.0 / 1024.0),
            ..1073741824.0 => format!("{:.1} MiB", self.0 / 1048576.0),
            _ => format!("{:.1} GiB", self.0 / 1073741824.0),
        })
    }
}

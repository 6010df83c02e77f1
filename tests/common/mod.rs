//! What the tests share: the device under test, ends to connect, memory, and waiting that cannot hang.
//!
//! The device is the one that `TOKIO_RDMA_DEVICE` names, or a software device on a network of its own, so that
//! faults of one test do not reach another.

#[allow(dead_code, reason = "a program may have one wire only")]
pub(crate) mod by_wire;
pub(crate) mod pair;
pub(crate) mod raw;
pub(crate) mod rxe;
#[allow(dead_code, reason = "a program may have one wire only")]
pub(crate) mod udp;

use std::future::Future;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::time::{Duration, Instant};

use tokio_rdma::memory::HostMemory;
use tokio_rdma::software::{DeviceControl, Faults, Network};
use tokio_rdma::types::{Access, AsyncEvent, RemoteAddr, Sge, Transport};
use tokio_rdma::{CompletionMode, Device, ExposedRegion, ProtectionDomain, RemoteRegion};

/// Only a hang takes this long: it bounds a test and asserts nothing about speed. A real device may be the kernel's, in an
/// emulated machine, with its processors taken by threads that poll.
pub(crate) fn hang() -> Duration {
    // The emulated adapter is as quick as a thread beside all others.
    Duration::from_secs(match hardware() {
        Some(_) if crate::wire() == Wire::Emulated => 60,
        Some(_) => 120,
        None => 60,
    })
}

/// The result of `future`, or a panic if it hangs.
pub(crate) async fn within<T>(what: &str, future: impl Future<Output = T>) -> T {
    match tokio::time::timeout(hang(), future).await {
        Ok(value) => value,
        Err(_) => panic!("hangs: {what}"),
    }
}

/// Lets others run until it is so: what a thread that woke this one is about to do.
pub(crate) async fn until(what: &str, mut ready: impl FnMut() -> bool) {
    within(what, async {
        while !ready() {
            tokio::time::sleep(Duration::from_micros(100)).await;
        }
    })
    .await;
}

/// Calls `ready` until it gives something, or panics if it never does.
pub(crate) fn eventually<T>(what: &str, mut ready: impl FnMut() -> Option<T>) -> T {
    let (start, hang) = (Instant::now(), hang());
    loop {
        if let Some(value) = ready() {
            return value;
        }
        assert!(start.elapsed() < hang, "hangs: {what}");
        std::thread::yield_now();
    }
}

/// Two openings of the device under test, so that asynchronous events of one end are not those of the other.
pub(crate) struct Setup {
    pub(crate) a: Device,
    pub(crate) b: Device,
    network: Option<Network>,
}

impl Setup {
    /// Both ends on one device: all that a real one needs to be tested.
    pub(crate) fn new() -> Self {
        match hardware() {
            Some(name) => {
                let open = || Device::open(&name).unwrap_or_else(|error| panic!("{name}: {error}"));
                Self { a: open(), b: open(), network: None }
            }
            None if crate::wire() == Wire::Udp => Self::apart(),
            None => Self::in_network(&network()),
        }
    }

    /// Each end on a software device of a network of its own.
    fn apart() -> Self {
        let (here, there) = (network(), network());
        let open = |network: &Network| Device::software_in(network, "both").unwrap();
        Self { a: open(&here), b: open(&there), network: Some(here) }
    }

    /// Both ends on the software device `both` of `network`.
    pub(crate) fn in_network(network: &Network) -> Self {
        let open = || Device::software_in(network, "both").unwrap();
        Self { a: open(), b: open(), network: Some(network.clone()) }
    }

    /// Two software devices that can be killed and unplugged; `None`, loudly, elsewhere.
    pub(crate) fn controlled(test: &str) -> Option<(Self, DeviceControl, DeviceControl)> {
        if let Some(name) = hardware() {
            skip(test, &format!("{name} cannot be made to fail"));
            return None;
        }
        let network = network();
        let open = |name| Device::software_in(&network, name).unwrap();
        let (a, b) = (open("a"), open("b"));
        let control = |name| network.control(name).unwrap();
        let (first, second) = (control("a"), control("b"));
        Some((Self { a, b, network: Some(network) }, first, second))
    }

    /// False on a real device, where what only a faithful one does cannot be expected.
    pub(crate) fn is_software(&self) -> bool {
        self.network.is_some()
    }

    /// True if the device is one that does this in its own way.
    pub(crate) fn known(&self, deviation: &rxe::Deviation) -> bool {
        rxe::known(&self.a, deviation)
    }
}

/// How messages travel between software devices; `wire` of each test program returns it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(dead_code, reason = "a program may have one wire only")]
pub(crate) enum Wire {
    /// From memory to memory.
    Memory,
    /// As encoded packets.
    Packets,
    /// As encoded packets through sockets.
    Udp,
    /// As encoded packets that are lost, repeated, overtaken and damaged.
    Faults,
    /// As an emulated ConnectX moves them, under the real libmlx5.
    Emulated,
}

/// A network of its own for a test.
pub(crate) fn network() -> Network {
    match crate::wire() {
        Wire::Memory | Wire::Emulated => Network::new(),
        Wire::Packets => {
            let network = Network::new();
            network.set_faults(Faults::none());
            network
        }
        Wire::Udp => udp::network(&["both", "a", "b", "x"]),
        Wire::Faults => {
            let seed = match std::env::var("TOKIO_RDMA_SEED") {
                Ok(seed) => seed.parse().unwrap(),
                Err(_) => RandomState::new().build_hasher().finish(),
            };
            // Shown if the test fails.
            eprintln!("faults: TOKIO_RDMA_SEED={seed}");
            let faults = Faults::none().loss(0.02).duplicate(0.02).reorder(0.02).corrupt(0.01);
            Network::with_faults(seed, faults.delay(Duration::ZERO..Duration::from_micros(50)))
        }
    }
}

/// Those of `transports` that bring everything across the network there is.
pub(crate) fn transports(transports: &[Transport]) -> impl Iterator<Item = Transport> + use<> {
    let dependable =
        |&transport: &Transport| transport == Transport::Rc || crate::wire() != Wire::Faults;
    transports.iter().copied().filter(dependable).collect::<Vec<_>>().into_iter()
}

/// Name of the real device under test, if it is one.
pub(crate) fn hardware() -> Option<String> {
    std::env::var("TOKIO_RDMA_DEVICE").ok().filter(|name| name != Device::SOFTWARE)
}

/// Says that a test proves nothing here. On the software device nothing is ever missing.
pub(crate) fn skip(test: &str, why: &str) {
    assert!(hardware().is_some(), "skipped on the software device: {test}: {why}");
    eprintln!("SKIPPED {test}: {why}");
}

#[allow(dead_code, reason = "some test binaries mount a part of the suite")]
/// True, loudly, on the emulated ConnectX that does not do what a test asks for, or in its own way: nobody here knows what a
/// real one does.
pub(crate) fn is_made_up(test: &str, why: &str) -> bool {
    let emulated = crate::wire() == Wire::Emulated;
    if emulated {
        skip(test, &format!("emulated: {why}"));
    }
    emulated
}

/// Every way to watch a completion queue.
pub(crate) const MODES: [&str; 4] = ["event", "busy_poll", "cooperative", "hybrid"];

/// A mode by its name; `busy_poll` starts a thread.
pub(crate) fn mode(name: &str) -> CompletionMode {
    match name {
        "event" => CompletionMode::Event,
        "busy_poll" => CompletionMode::busy_poll().unwrap(),
        "cooperative" => CompletionMode::Cooperative,
        "hybrid" => CompletionMode::Hybrid,
        _ => panic!("no such mode: {name}"),
    }
}

/// Runs a scenario on a runtime with one thread or several, bounded.
pub(crate) fn run(threads: usize, what: &str, scenario: impl Future<Output = ()>) {
    let mut builder = match threads {
        1 => tokio::runtime::Builder::new_current_thread(),
        _ => tokio::runtime::Builder::new_multi_thread(),
    };
    if threads > 1 {
        builder.worker_threads(threads);
    }
    builder.enable_all().build().unwrap().block_on(within(what, scenario));
}

/// Makes a test of each scenario (`async fn(mode: &str)`) in each completion mode, and on each kind of runtime.
macro_rules! in_every_mode {
    ($($scenario:ident),* $(,)?) => {
        $(mod $scenario {
            #[test]
            fn by_events() {
                crate::common::run(1, stringify!($scenario), super::$scenario("event"));
            }
            #[test]
            fn by_events_on_threads() {
                crate::common::run(3, stringify!($scenario), super::$scenario("event"));
            }
            #[test]
            fn by_busy_poll() {
                crate::common::run(1, stringify!($scenario), super::$scenario("busy_poll"));
            }
            #[test]
            fn by_busy_poll_on_threads() {
                crate::common::run(3, stringify!($scenario), super::$scenario("busy_poll"));
            }
            #[test]
            fn cooperatively() {
                crate::common::run(1, stringify!($scenario), super::$scenario("cooperative"));
            }
            #[test]
            fn cooperatively_on_threads() {
                crate::common::run(3, stringify!($scenario), super::$scenario("cooperative"));
            }
            #[test]
            fn by_hybrid() {
                crate::common::run(1, stringify!($scenario), super::$scenario("hybrid"));
            }
            #[test]
            fn by_hybrid_on_threads() {
                crate::common::run(3, stringify!($scenario), super::$scenario("hybrid"));
            }
        })*
    };
}
pub(crate) use in_every_mode;

/// Registered memory, page-aligned, that both sides of an operation can name.
pub(crate) struct Memory(pub(crate) ExposedRegion);

impl Memory {
    /// `len` bytes that peers may do everything to.
    pub(crate) fn new(pd: &ProtectionDomain, len: usize) -> Self {
        Self::with(pd, len, Access::REMOTE_ALL)
    }

    pub(crate) fn with(pd: &ProtectionDomain, len: usize, access: Access) -> Self {
        Self(ExposedRegion::new(pd, HostMemory::zeroed(len).unwrap(), access).unwrap())
    }

    /// `len` bytes that follow a pattern of their own.
    pub(crate) fn patterned(pd: &ProtectionDomain, len: usize, seed: u8) -> Self {
        let memory = Self::new(pd, len);
        memory.0.write(0, &pattern(len, seed)).unwrap();
        memory
    }

    /// The element that names `len` bytes from `offset`, also beyond the end.
    pub(crate) fn sge(&self, offset: usize, len: usize) -> Sge {
        let all = self.0.slice(0..0).unwrap().sge();
        Sge { addr: all.addr + offset as u64, length: len as u32, ..all }
    }

    /// What a peer names the byte at `offset`, also beyond the end.
    pub(crate) fn remote(&self, offset: usize) -> RemoteAddr {
        let grant = self.grant();
        RemoteAddr { addr: grant.addr() + offset as u64, rkey: grant.rkey() }
    }

    pub(crate) fn grant(&self) -> RemoteRegion {
        self.0.grant()
    }

    pub(crate) fn bytes(&self, offset: usize, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.0.read(offset, &mut bytes).unwrap();
        bytes
    }

    pub(crate) fn all(&self) -> Vec<u8> {
        self.bytes(0, self.0.len())
    }
}

/// Bytes that tell their place and `seed`: a shifted, swapped or stale copy differs.
pub(crate) fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len)
        .map(|at| (at as u32).wrapping_mul(0x9e37_79b1).wrapping_add(at as u32 >> 8) as u8 ^ seed)
        .collect()
}

/// The asynchronous events that are there.
pub(crate) fn events(device: &Device) -> Vec<AsyncEvent> {
    std::iter::from_fn(|| device.next_event().unwrap_or(None)).collect()
}

//! The device under test, connected ends, registered memory and bounded waits.
//!
//! The device is the one that `TOKIO_RDMA_DEVICE` names, or a software device. Each test has its
//! own network, so that faults of one test do not affect another.

#[allow(dead_code, reason = "a program may have one wire only")]
pub(crate) mod by_wire;
pub(crate) mod pair;
pub(crate) mod raw;
pub(crate) mod rxe;
#[allow(dead_code, reason = "a program may have one wire only")]
pub(crate) mod udp;

use std::future::Future;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::Write as _;
use std::pin::Pin;
use std::time::{Duration, Instant};

use tokio_rdma::memory::HostMemory;
use tokio_rdma::software::{DeviceControl, Faults, Network};
use tokio_rdma::types::{Access, AsyncEvent, RemoteAddr, Sge, Transport};
use tokio_rdma::{CompletionMode, Device, ExposedRegion, ProtectionDomain, RemoteRegion};

/// Returns the time after which a test counts as hung. A real device may be the kernel's in an
/// emulated machine whose processors run polling threads.
pub(crate) fn hang() -> Duration {
    crate::torture::HANG
}

/// Awaits `future`; panics if it hangs.
pub(crate) async fn within<T>(what: &str, future: impl Future<Output = T>) -> T {
    match tokio::time::timeout(hang(), future).await {
        Ok(value) => value,
        Err(_) => panic!("hangs: {what}"),
    }
}

/// Waits for an effect of another thread after it woke this one.
pub(crate) async fn until(what: &str, mut ready: impl FnMut() -> bool) {
    within(what, async {
        while !ready() {
            tokio::time::sleep(Duration::from_micros(100)).await;
        }
    })
    .await;
}

/// Calls `ready` until it returns a value; panics if it never does.
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

/// Two handles of the device under test, each with its own asynchronous events.
pub(crate) struct Setup {
    pub(crate) a: Device,
    pub(crate) b: Device,
    network: Option<Network>,
}

impl Setup {
    /// Opens both ends on one device, or on two networks if the wire is UDP.
    pub(crate) fn new() -> Self {
        match hardware() {
            Some(name) => {
                let open = || Device::open(&name).unwrap_or_else(|error| panic!("{name}: {error}"));
                Self { a: open(), b: open(), network: None }
            }
            None if crate::wire() == Wire::Udp => Self::on_two_networks(),
            None => Self::in_network(&network()),
        }
    }

    fn on_two_networks() -> Self {
        let (here, there) = (network(), network());
        let open = |network: &Network| Device::software_in(network, "both").unwrap();
        Self { a: open(&here), b: open(&there), network: Some(here) }
    }

    pub(crate) fn in_network(network: &Network) -> Self {
        let open = || Device::software_in(network, "both").unwrap();
        Self { a: open(), b: open(), network: Some(network.clone()) }
    }

    /// Opens two software devices with their controls. On a real device, `test` is skipped.
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

    /// Returns the control of a software device; over UDP that of `a`.
    pub(crate) fn control(&self) -> Option<DeviceControl> {
        self.network.as_ref()?.control("both")
    }

    /// Returns false on a real device, which may deviate from the specification.
    pub(crate) fn is_software(&self) -> bool {
        self.network.is_some()
    }

    pub(crate) fn known(&self, deviation: &rxe::Deviation) -> bool {
        rxe::known(&self.a, deviation)
    }
}

/// The transport of messages between devices. Each test program has a function `wire`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(dead_code, reason = "a program may have one wire only")]
pub(crate) enum Wire {
    Memory,
    Packets,
    Udp,
    Faults,
    /// An emulated ConnectX below the real libmlx5.
    Emulated,
}

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
            eprintln!("faults: TOKIO_RDMA_SEED={seed}");
            let faults = Faults::none().loss(0.02).duplicate(0.02).reorder(0.02).corrupt(0.01);
            Network::with_faults(seed, faults.delay(Duration::ZERO..Duration::from_micros(50)))
        }
    }
}

/// Returns the `transports` that the device has and that lose nothing on the wire of this process.
pub(crate) fn transports(transports: &[Transport]) -> impl Iterator<Item = Transport> + use<> {
    let only_rc = crate::wire() == Wire::Faults || is_iwarp();
    let lossless = |&transport: &Transport| transport == Transport::Rc || !only_rc;
    transports.iter().copied().filter(lossless).collect::<Vec<_>>().into_iter()
}

/// Returns the name of the real device under test, if there is one.
pub(crate) fn hardware() -> Option<String> {
    std::env::var("TOKIO_RDMA_DEVICE").ok().filter(|name| name != Device::SOFTWARE)
}

/// Returns true if the device under test is an iWARP device.
pub(crate) fn is_iwarp() -> bool {
    hardware().is_some_and(|name| Device::open(&name).is_ok_and(|device| device.attr().is_iwarp()))
}

/// Reports that `test` is skipped and returns true on an iWARP device, which lacks `what`.
#[allow(dead_code, reason = "some test binaries mount a part of the suite")]
pub(crate) fn skip_on_iwarp(test: &str, what: &str) -> bool {
    let skips = is_iwarp();
    if skips {
        skip(test, &format!("an iWARP device has no {what}"));
    }
    skips
}

/// Reports that `test` is skipped; panics on the software device, which supports everything.
pub(crate) fn skip(test: &str, why: &str) {
    assert!(hardware().is_some(), "skipped on the software device: {test}: {why}");
    skipped(&format!("{test}: {why}"));
}

/// Writes one line to standard error itself: libtest hides what a passed test prints, and the steps
/// on real devices count these lines.
pub(crate) fn skipped(what: &str) {
    writeln!(std::io::stderr(), "SKIPPED {what}").expect("standard error is open");
}

/// Reports that `test` is skipped and returns true on the emulated ConnectX, for behaviour that the
/// emulation lacks or invents.
#[allow(dead_code, reason = "some test binaries mount a part of the suite")]
pub(crate) fn skip_on_emulated_device(test: &str, why: &str) -> bool {
    let emulated = crate::wire() == Wire::Emulated;
    if emulated {
        skip(test, &format!("emulated: {why}"));
    }
    emulated
}

pub(crate) const MODES: [&str; 4] = ["event", "busy_poll", "cooperative", "hybrid"];

pub(crate) fn mode(name: &str) -> CompletionMode {
    match name {
        "event" => CompletionMode::Event,
        "busy_poll" => CompletionMode::busy_poll().unwrap(),
        "cooperative" => CompletionMode::Cooperative,
        "hybrid" => CompletionMode::Hybrid,
        _ => panic!("unknown completion mode: {name}"),
    }
}

/// Runs a scenario; panics if it hangs.
pub(crate) fn run(threads: usize, what: &str, scenario: impl Future<Output = ()>) {
    // Compiles the runtime once, not once for each scenario.
    run_boxed(threads, what, Box::pin(scenario));
}

fn run_boxed(threads: usize, what: &str, scenario: Pin<Box<dyn Future<Output = ()> + '_>>) {
    let mut builder = match threads {
        1 => tokio::runtime::Builder::new_current_thread(),
        _ => tokio::runtime::Builder::new_multi_thread(),
    };
    if threads > 1 {
        builder.worker_threads(threads);
    }
    builder.enable_all().build().unwrap().block_on(within(what, scenario));
}

/// Defines tests of scenarios (`async fn(mode: &str)`) for each mode and kind of runtime.
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

pub(crate) struct Memory(pub(crate) ExposedRegion);

impl Memory {
    pub(crate) fn new(pd: &ProtectionDomain, len: usize) -> Self {
        Self::with(pd, len, Access::REMOTE_ALL)
    }

    pub(crate) fn with(pd: &ProtectionDomain, len: usize, access: Access) -> Self {
        Self(ExposedRegion::new(pd, HostMemory::zeroed(len).unwrap(), access).unwrap())
    }

    pub(crate) fn patterned(pd: &ProtectionDomain, len: usize, seed: u8) -> Self {
        let memory = Self::new(pd, len);
        memory.0.write(0, &pattern(len, seed)).unwrap();
        memory
    }

    /// Returns an element that may exceed the region.
    pub(crate) fn sge(&self, offset: usize, len: usize) -> Sge {
        let all = self.0.slice(0..0).unwrap().sge();
        Sge { addr: all.addr + offset as u64, length: len as u32, ..all }
    }

    /// Returns an address that may exceed the region.
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

/// Returns bytes that depend on position and `seed`, to detect misplaced or stale copies.
pub(crate) fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len)
        .map(|at| (at as u32).wrapping_mul(0x9e37_79b1).wrapping_add(at as u32 >> 8) as u8 ^ seed)
        .collect()
}

pub(crate) fn events(device: &Device) -> Vec<AsyncEvent> {
    std::iter::from_fn(|| device.next_event().unwrap_or(None)).collect()
}

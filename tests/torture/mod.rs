//! Replayable seeds, bounded waits, completion modes and connected pairs for stress tests.

#![allow(dead_code, unreachable_pub, reason = "each test file uses a part of it")]

use std::future::Future;
use std::io::Write as _;
use std::panic::resume_unwind;
use std::pin::pin;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, LazyLock, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::thread;
use std::time::Duration;

use tokio::runtime::{Builder, Runtime};
use tokio::task::JoinHandle;
use tokio_rdma::cm::{self, CmConnection, ConnectConfig};
use tokio_rdma::op::RetryConfig;
use tokio_rdma::software::{Faults, Network};
use tokio_rdma::types::{AckTimeout, RnrTimer};
use tokio_rdma::{
    Access, CompletionMode, CompletionQueue, Device, ExposedRegion, Pool, ProtectionDomain,
    QueuePair,
};

/// Default of `TOKIO_RDMA_SECONDS` for crowds of connections.
pub const CROWD_SECONDS: u64 = if cfg!(debug_assertions) { 1 } else { 2 };

/// The time after which a test concludes that something hangs. It is so long that a busy machine
/// fails no test.
pub const HANG: Duration = Duration::from_secs(600);

/// Longer than anything takes that a scenario limits itself.
pub const LONG: Duration = Duration::from_secs(60);

/// Returns the name of the real device under test, if `TOKIO_RDMA_DEVICE` names one.
pub fn hardware() -> Option<String> {
    std::env::var("TOKIO_RDMA_DEVICE").ok().filter(|name| name != Device::SOFTWARE)
}

/// Writes a line to standard error that libtest does not hide, for CI to count.
pub fn skipped(what: &str) {
    writeln!(std::io::stderr(), "SKIPPED {what}").expect("standard error is open");
}

/// Returns fewer on a real device: in an emulated machine an operation takes a millisecond.
pub fn scaled(count: u64) -> u64 {
    if hardware().is_some() { count / 8 } else { count }
}

fn patience(limit: Duration) -> Duration {
    if hardware().is_some() { limit * 5 } else { limit }
}

/// Runs `test` in a thread; panics if it takes longer than `limit`, or [`HANG`] if that is more.
pub fn bounded<T: Send + 'static>(
    what: &str,
    limit: Duration,
    test: impl FnOnce() -> T + Send + 'static,
) -> T {
    let (limit, (done, ended)) = (patience(limit.max(HANG)), channel());
    let thread = thread::Builder::new().name(what.to_owned()).spawn(move || {
        let result = test();
        done.send(()).ok();
        result
    });
    let thread = thread.expect("a thread can be started");
    match ended.recv_timeout(limit) {
        // If disconnected, the thread panicked, and `join` returns its panic.
        Ok(()) | Err(RecvTimeoutError::Disconnected) => {
            thread.join().unwrap_or_else(|panic| resume_unwind(panic))
        }
        Err(RecvTimeoutError::Timeout) => panic!("{what}: hangs, stopped waiting after {limit:?}"),
    }
}

/// Awaits a task, and panics as it did.
pub async fn joined<T>(task: JoinHandle<T>) -> T {
    task.await.unwrap_or_else(|error| resume_unwind(error.into_panic()))
}

/// Awaits `future`; panics if it hangs.
pub async fn soon<F: Future>(what: &str, future: F) -> F::Output {
    match tokio::time::timeout(patience(HANG), future).await {
        Ok(output) => output,
        Err(_) => panic!("{what}: hangs"),
    }
}

pub fn block_on<F: Future>(future: F) -> F::Output {
    struct Unpark(thread::Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let (mut future, mut context) = (pin!(future), Context::from_waker(&waker));
    loop {
        match future.as_mut().poll(&mut context) {
            Poll::Ready(output) => return output,
            Poll::Pending => thread::park(),
        }
    }
}

/// A seed that is printed if the test fails.
pub struct Seed {
    test: &'static str,
    pub value: u64,
}

impl Seed {
    pub fn new(test: &'static str) -> Self {
        let value = match std::env::var("TOKIO_RDMA_SEED") {
            Ok(given) => given.parse().expect("TOKIO_RDMA_SEED is a number"),
            Err(_) => fastrand::Rng::with_seed(random()).u64(..),
        };
        Self { test, value }
    }

    /// Returns a given seed.
    pub fn chosen(test: &'static str, value: u64) -> Self {
        Self { test, value }
    }
}

/// Returns a random number; fastrand is built without feature `std`.
fn random() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(std::process::id())
}

impl Drop for Seed {
    fn drop(&mut self) {
        if thread::panicking() {
            eprintln!("replay with: TOKIO_RDMA_SEED={} cargo test {}", self.value, self.test);
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    Event,
    BusyPoll,
    Cooperative,
    Hybrid,
}

impl Mode {
    pub const ALL: [Self; 4] = [Self::Event, Self::BusyPoll, Self::Cooperative, Self::Hybrid];

    pub fn make(self) -> CompletionMode {
        match self {
            Self::Event => CompletionMode::Event,
            Self::BusyPoll => CompletionMode::busy_poll().expect("a thread can be started"),
            Self::Cooperative => CompletionMode::Cooperative,
            Self::Hybrid => CompletionMode::Hybrid,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flavour {
    CurrentThread,
    MultiThread,
}

impl Flavour {
    pub const ALL: [Self; 2] = [Self::CurrentThread, Self::MultiThread];

    pub fn runtime(self) -> Runtime {
        let mut builder = match self {
            Self::CurrentThread => Builder::new_current_thread(),
            Self::MultiThread => Builder::new_multi_thread(),
        };
        builder.worker_threads(2).enable_all().build().expect("a runtime can be built")
    }
}

/// Creates a network on which no work completes before its post returns.
pub fn slow_network(seed: u64) -> Network {
    Network::with_faults(
        seed,
        Faults::none().delay(Duration::from_micros(1)..Duration::from_micros(40)),
    )
}

/// Returns options with a short RNR timer, because receives are late on purpose, and a long
/// timeout, because nothing is lost and the machine may be loaded.
pub fn impatient() -> RetryConfig {
    RetryConfig {
        timeout: AckTimeout::from_code(18),
        rnr_timer: RnrTimer::from_code(4),
        ..Default::default()
    }
}

/// The runtime that watches connections by address, as long as the program runs.
static WATCHER: LazyLock<Runtime> = LazyLock::new(|| {
    let mut builder = Builder::new_multi_thread();
    builder.worker_threads(1).enable_all().build().expect("a runtime can be built")
});

/// The connections by address, so that none is closed before its queue pairs.
static LINKS: Mutex<Vec<[CmConnection; 2]>> = Mutex::new(Vec::new());

/// Connects queue pairs in INIT by the connection manager, and returns true, if their device does
/// not connect them otherwise.
pub fn connect_by_address(a: &QueuePair, b: &QueuePair) -> bool {
    let device = |qp: &QueuePair| qp.protection_domain().device().clone();
    if !device(a).attr().is_iwarp() {
        return false;
    }
    let (active, passive) = (a.clone(), b.clone());
    on_watcher(async move {
        let config = ConnectConfig::default();
        let (here, there) = (device(&active), device(&passive));
        let address = (there.default_address().expect("an address"), 0);
        let listener = cm::Listener::bind(&there, address).await.expect("listens");
        let accepting = async { listener.accept().await?.accept(&passive, &config).await };
        let connecting = async {
            cm::resolve(&here, listener.local_addr()).await?.connect(&active, &config).await
        };
        let links = tokio::try_join!(connecting, accepting).expect("connects by address");
        LINKS.lock().expect("not poisoned").push(links.into());
    });
    true
}

/// Runs `work` to its end on the runtime that watches connections by address.
pub fn on_watcher<T: Send + 'static>(work: impl Future<Output = T> + Send + 'static) -> T {
    let (done, result) = channel();
    WATCHER.spawn(async move { done.send(work.await).ok() });
    result.recv().expect("the work does not panic")
}

pub fn connect(a: &QueuePair, b: &QueuePair) {
    if connect_by_address(a, b) {
        return;
    }
    a.connect_with(&b.endpoint(), &impatient()).expect("connects");
    b.connect_with(&a.endpoint(), &impatient()).expect("connects");
}

pub fn device(network: &Network) -> (Device, ProtectionDomain) {
    let Some(name) = hardware() else { return software(network) };
    let device = Device::open(&name).unwrap_or_else(|error| panic!("{name}: {error}"));
    let pd = device.protection_domain().expect("a protection domain");
    (device, pd)
}

pub fn software(network: &Network) -> (Device, ProtectionDomain) {
    let device = Device::software_in(network, "torture0").expect("opens");
    let pd = device.protection_domain().expect("a protection domain");
    (device, pd)
}

/// Returns false on SoftRoCE (Linux 6.1), which may stall fenced work until the next post.
pub fn keeps_fences(device: &Device) -> bool {
    let keeps = device.attr().vendor_id != 0xff_ffff;
    if !keeps {
        skipped("fences: SoftRoCE may stall fenced work");
    }
    keeps
}

pub fn pair(pd: &ProtectionDomain, queue: &CompletionQueue) -> (QueuePair, QueuePair) {
    let new = || QueuePair::new(pd, queue).expect("a queue pair");
    let (a, b) = (new(), new());
    connect(&a, &b);
    (a, b)
}

/// Returns connected queue pairs with capacity for two sends and one receive on a network that
/// stands still, buffers and a region.
pub fn narrow(buffers: usize) -> (Network, [QueuePair; 2], Pool, ExposedRegion) {
    let network = Network::simulated(1, Faults::none());
    let (device, pd) = software(&network);
    let queue = CompletionQueue::new(&device, CompletionMode::Event).unwrap();
    let [a, b] = [(); 2]
        .map(|()| QueuePair::builder(&pd, &queue).max_send_wr(2).max_recv_wr(1).build().unwrap());
    connect(&a, &b);
    let region = ExposedRegion::new(&pd, vec![0; 64], Access::REMOTE_ALL).unwrap();
    (network, [a, b], Pool::new(&pd, 64, buffers).unwrap(), region)
}

pub async fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    soon(what, async {
        while !condition() {
            tokio::task::yield_now().await;
        }
    })
    .await;
}

pub async fn yields(times: u32) {
    for _ in 0..times {
        tokio::task::yield_now().await;
    }
}

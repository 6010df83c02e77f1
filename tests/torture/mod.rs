//! What the hostile tests share: seeds that can be replayed, limits on every wait, modes, connected pairs.

#![allow(dead_code, unreachable_pub, reason = "each test file uses a part of it")]

use std::future::Future;
use std::panic::resume_unwind;
use std::pin::pin;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::task::{Context, Poll, Wake, Waker};
use std::thread;
use std::time::Duration;

use tokio::runtime::{Builder, Runtime};
use tokio_rdma::op::ConnectOptions;
use tokio_rdma::software::{Faults, Network};
use tokio_rdma::types::{AckTimeout, RnrTimer};
use tokio_rdma::{
    Access, CompletionMode, CompletionQueue, Device, ExposedRegion, Pool, ProtectionDomain,
    QueuePair,
};

/// No wait of a test that works takes anywhere near this long, on however slow a machine.
pub const LONG: Duration = Duration::from_secs(60);

/// Name of the real device under test, if `TOKIO_RDMA_DEVICE` names one.
pub fn hardware() -> Option<String> {
    std::env::var("TOKIO_RDMA_DEVICE").ok().filter(|name| name != Device::SOFTWARE)
}

/// `count` on the software device. A real one may be that of an emulated machine: there each operation costs a
/// millisecond, so a test makes do with fewer.
pub fn scaled(count: u64) -> u64 {
    if hardware().is_some() { count / 8 } else { count }
}

/// As long as `limit` on the software device, longer on a real one.
fn patience(limit: Duration) -> Duration {
    if hardware().is_some() { limit * 5 } else { limit }
}

/// Runs `test` in a thread of its own, and fails if it does not end: a hang is a failure that names itself.
pub fn bounded<T: Send + 'static>(
    what: &str,
    limit: Duration,
    test: impl FnOnce() -> T + Send + 'static,
) -> T {
    let (limit, (done, ended)) = (patience(limit), channel());
    let thread = thread::Builder::new().name(what.to_owned()).spawn(move || {
        let result = test();
        done.send(()).ok();
        result
    });
    let thread = thread.expect("a thread can be started");
    match ended.recv_timeout(limit) {
        // Disconnected without a word: it panicked, which `join` tells.
        Ok(()) | Err(RecvTimeoutError::Disconnected) => {
            thread.join().unwrap_or_else(|panic| resume_unwind(panic))
        }
        Err(RecvTimeoutError::Timeout) => panic!("{what}: hangs, given up after {limit:?}"),
    }
}

/// Fails if `future` does not end.
pub async fn soon<F: Future>(what: &str, future: F) -> F::Output {
    match tokio::time::timeout(patience(LONG), future).await {
        Ok(output) => output,
        Err(_) => panic!("{what}: hangs, given up"),
    }
}

/// Drives `future` on this thread without any runtime, as `futures::executor::block_on`.
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

/// A seed, printed if the test that holds it fails.
pub struct Seed {
    test: &'static str,
    pub value: u64,
}

impl Seed {
    /// A new seed, or that of `TOKIO_RDMA_SEED`.
    pub fn new(test: &'static str) -> Self {
        let value = match std::env::var("TOKIO_RDMA_SEED") {
            Ok(given) => given.parse().expect("TOKIO_RDMA_SEED is a number"),
            Err(_) => fastrand::Rng::with_seed(random()).u64(..),
        };
        Self { test, value }
    }
}

/// Without fastrand's `std` feature: hash keys are random.
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

/// The completion modes, each made anew.
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

/// Flavours of Tokio's runtime.
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

/// A network on which nothing is done before the posting verb has returned.
pub fn slow_network(seed: u64) -> Network {
    Network::with_faults(
        seed,
        Faults::none().delay(Duration::from_micros(1)..Duration::from_micros(40)),
    )
}

/// Receivers are late on purpose, so those who find none try again soon. Nothing is lost, so acknowledgements are
/// waited for as long as a loaded machine may take.
pub fn impatient() -> ConnectOptions {
    ConnectOptions {
        timeout: AckTimeout::from_code(18),
        rnr_timer: RnrTimer::from_code(4),
        ..Default::default()
    }
}

/// Connects two queue pairs with each other.
pub fn connect(a: &QueuePair, b: &QueuePair) {
    a.connect_with(&b.endpoint(), &impatient()).expect("connects");
    b.connect_with(&a.endpoint(), &impatient()).expect("connects");
}

/// The device under test with a protection domain: a real one, or one in `network`.
pub fn device(network: &Network) -> (Device, ProtectionDomain) {
    let Some(name) = hardware() else { return software(network) };
    let device = Device::open(&name).unwrap_or_else(|error| panic!("{name}: {error}"));
    let pd = device.protection_domain().expect("a protection domain");
    (device, pd)
}

/// A software device, for what no other can show, with a protection domain.
pub fn software(network: &Network) -> (Device, ProtectionDomain) {
    let device = Device::software_in(network, "torture0").expect("opens");
    let pd = device.protection_domain().expect("a protection domain");
    (device, pd)
}

/// False on SoftRoCE (Linux 6.1): it may miss that what fenced work waits for has ended, and looks again at the next post
/// only. With a full send queue there is none.
pub fn keeps_fences(device: &Device) -> bool {
    let keeps = device.attr().vendor_id != 0xff_ffff;
    if !keeps {
        eprintln!("SKIPPED fences: SoftRoCE may forget fenced work");
    }
    keeps
}

/// A connected pair on one completion queue.
pub fn pair(pd: &ProtectionDomain, queue: &CompletionQueue) -> (QueuePair, QueuePair) {
    let new = || QueuePair::new(pd, queue).expect("a queue pair");
    let (a, b) = (new(), new());
    connect(&a, &b);
    (a, b)
}

/// Two connected queue pairs with room for two sends and one receive, on a network where nothing moves; buffers, and memory of the
/// same device.
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

/// Waits until `condition` holds: what other threads are about to do.
pub async fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    soon(what, async {
        while !condition() {
            tokio::task::yield_now().await;
        }
    })
    .await;
}

/// Lets other tasks run `times` times.
pub async fn yields(times: u32) {
    for _ in 0..times {
        tokio::task::yield_now().await;
    }
}

//! Operations in steady state allocate nothing, in every completion mode and on any thread.

use std::backtrace::Backtrace;
use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::alone::alone;
use crate::connected;
use crate::live;
use crate::torture::{Flavour, LONG, Mode, bounded, device, pair, scaled};
use bytes::Bytes;
use parking_lot::Mutex;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt};
use tokio_rdma::dc::{DcPolicy, DcPool, DcPoolPeer, DcTarget};
use tokio_rdma::software::Network;
use tokio_rdma::{
    Access, Batch, BufMut, CompletionQueue, ConnectionConfig, ExposedRegion, Imm, Pool, QueuePair,
    RdmaListener, RdmaStream, RemoteRegion, SharedReceiveQueue,
};

// On a busy machine, each operation of two threads waits for the time slices of others.
const OPERATIONS: u64 = if cfg!(debug_assertions) { 250 } else { 1_000 };
/// Operations before counting, so that queues and caches reach their final size.
const WARM_UP: u64 = if cfg!(debug_assertions) { 250 } else { 1_000 };

/// Returns `count`, or 1/64 of it on a real device.
fn few(count: u64) -> u64 {
    scaled(scaled(count))
}

/// The largest batch that is documented not to allocate.
const BATCH: u64 = 16;

static ON: AtomicBool = AtomicBool::new(false);
static COUNT: AtomicU64 = AtomicU64::new(0);
static BYTES: AtomicU64 = AtomicU64::new(0);
static SHOWN: AtomicU64 = AtomicU64::new(0);
/// Resolved and printed only if a test fails, because that takes seconds.
static TRACES: Mutex<Vec<(usize, Backtrace)>> = Mutex::new(Vec::new());
const MAX_BACKTRACES: u64 = 3;

thread_local! {
    /// Excludes the allocations of backtraces.
    static SHOWING: Cell<bool> = const { Cell::new(false) };
}

/// Counts an allocation while [`ON`] is set.
fn note(size: usize) {
    if !ON.load(Ordering::Relaxed)
        || SHOWING.try_with(|showing| showing.replace(true)).unwrap_or(true)
    {
        return;
    }
    COUNT.fetch_add(1, Ordering::Relaxed);
    BYTES.fetch_add(size as u64, Ordering::Relaxed);
    if SHOWN.fetch_add(1, Ordering::Relaxed) < MAX_BACKTRACES {
        TRACES.lock().push((size, Backtrace::force_capture()));
    }
    let _ = SHOWING.try_with(|showing| showing.set(false));
}

struct Setup {
    ours: QueuePair,
    theirs: QueuePair,
    pool: Pool,
    remote: RemoteRegion,
    _region: ExposedRegion,
}

impl Setup {
    fn new(mode: Mode) -> Self {
        let (device, pd) = device(&Network::new());
        let queue = CompletionQueue::new(&device, mode.make()).unwrap();
        let (ours, theirs) = pair(&pd, &queue);
        let region = ExposedRegion::new(&pd, vec![0; 4096], Access::REMOTE_ALL).unwrap();
        Self {
            ours,
            theirs,
            pool: Pool::new(&pd, 256, 64).unwrap(),
            remote: region.grant(),
            _region: region,
        }
    }

    fn buffer(&self) -> BufMut {
        self.pool.try_alloc(256).unwrap()
    }

    fn word(&self) -> RemoteRegion {
        self.remote.slice(8..16).unwrap()
    }

    async fn send(&self) {
        let receive = self.theirs.recv(self.buffer());
        self.ours.send(self.buffer()).await.unwrap();
        receive.await.unwrap();
    }

    /// Lets the receiver park before the message is sent.
    async fn receive_first(&self) {
        let receive = self.theirs.recv(self.buffer());
        let (received, sent) = tokio::join!(receive, async {
            tokio::task::yield_now().await;
            self.ours.send(self.buffer()).await
        });
        received.unwrap();
        sent.unwrap();
    }

    async fn send_inline(&self) {
        let receive = self.theirs.recv(self.buffer());
        self.ours.send_inline(&[7; 32]).await.unwrap();
        receive.await.unwrap();
    }

    async fn write(&self) {
        self.ours.write(self.buffer(), self.remote).await.unwrap();
    }

    async fn write_inline(&self) {
        self.ours.write_inline(&[7; 32], self.remote).await.unwrap();
    }

    async fn write_with_imm(&self) {
        let receive = self.theirs.recv(self.buffer());
        self.ours.with_imm(Imm(7)).write(self.buffer(), self.remote).await.unwrap();
        assert!(receive.await.unwrap().written);
    }

    async fn read(&self) {
        self.ours.read(self.buffer(), self.remote).await.unwrap();
    }

    async fn compare_swap(&self) {
        self.ours.compare_swap(self.word(), 0, 0).await.unwrap();
    }

    async fn fetch_add(&self) {
        self.ours.fetch_add(self.word(), 0).await.unwrap();
    }

    /// Stays within the send queue's capacity, because queued work allocates.
    async fn eight_writes_in_flight(&self) {
        let writes: [_; 8] = std::array::from_fn(|_| self.ours.write(self.buffer(), self.remote));
        for write in writes {
            write.await.unwrap();
        }
    }

    async fn batch(&self, mut batch: Batch<BufMut>) -> Batch<BufMut> {
        for at in 0..BATCH {
            let piece = self.remote.slice(at * 256..(at + 1) * 256).unwrap();
            if at % 4 == 3 {
                batch.read(self.buffer(), piece)
            } else {
                batch.write(self.buffer(), piece)
            };
        }
        let result = self.ours.post_batch(batch).await;
        assert!(result.is_ok());
        result.into_batch()
    }
}

/// Calls [`counted_to`] for an operation that must not allocate.
async fn counted(what: &str, operation: impl AsyncFnMut(), found: &mut Vec<String>) {
    counted_to(what, 0, operation, found).await;
}

/// Reports in `found` an operation that allocates more than `each` times in all of twelve counts.
/// Some excesses are no failure: tables and queues double when the work in flight reaches a new
/// maximum, and a lock allocates its wait queue when it is first contended.
async fn counted_to(
    what: &str,
    each: u64,
    mut operation: impl AsyncFnMut(),
    found: &mut Vec<String>,
) {
    // Reading the environment allocates.
    let (warm_up, operations) =
        (few(WARM_UP), few(if each == 0 { OPERATIONS } else { OPERATIONS / 10 }));
    for _ in 0..warm_up {
        operation().await;
    }
    let mut counts = [0; 12];
    for count in &mut counts {
        COUNT.store(0, Ordering::Relaxed);
        // Permitted allocations are not printed.
        SHOWN.store(if each == 0 { 0 } else { MAX_BACKTRACES }, Ordering::Relaxed);
        ON.store(true, Ordering::SeqCst);
        for _ in 0..operations {
            operation().await;
        }
        ON.store(false, Ordering::SeqCst);
        *count = COUNT.load(Ordering::Relaxed);
        if *count <= each * operations {
            TRACES.lock().clear();
            return;
        }
    }
    for (size, trace) in TRACES.lock().drain(..) {
        eprintln!("{what}: allocation of {size} bytes:\n{trace}");
    }
    found.push(format!("{what}: {counts:?} allocations in {operations} operations each"));
}

async fn all(setting: &str, setup: &Setup, found: &mut Vec<String>) {
    macro_rules! count {
        ($($operation:ident),*) => {
            $(
                let what = format!("{setting}: {}", stringify!($operation));
                counted(&what, async || setup.$operation().await, found).await;
            )*
        };
    }
    count!(send, receive_first, send_inline, write, write_inline, write_with_imm, read);
    count!(compare_swap, fetch_add, eight_writes_in_flight);
    let mut batch = Some(Batch::new());
    let once = async || batch = Some(setup.batch(batch.take().unwrap()).await);
    counted(&format!("{setting}: batch"), once, found).await;
}

/// Counts allocations of operations of a DC pool, and the bytes for each further peer.
async fn pooled(setting: &str, mode: Mode, found: &mut Vec<String>) {
    let (device, pd) = device(&Network::new());
    if device.attr().dc.is_none() {
        return;
    }
    let queue = CompletionQueue::new(&device, mode.make()).unwrap();
    let srq = SharedReceiveQueue::new(&pd, &queue, 4, 1).unwrap();
    let target = DcTarget::new(&pd, &srq).unwrap();
    let region = ExposedRegion::new(&pd, vec![0; 4096], Access::REMOTE_ALL).unwrap();
    let (remote, buffers) = (region.grant().slice(..256).unwrap(), Pool::new(&pd, 256, 8).unwrap());
    for policy in [DcPolicy::default(), DcPolicy::Shared] {
        let pool = DcPool::builder(&pd, &queue).initiators(1).policy(policy).build().unwrap();
        let peers = [(); 2].map(|()| pool.peer(&target.address()).unwrap());
        let write = async |peer: &DcPoolPeer| {
            peer.write(buffers.try_alloc(256).unwrap(), remote).await.unwrap();
            peer.write_inline(&[7; 32], remote).await.unwrap();
        };
        counted(
            &format!("{setting}: {policy:?}, one peer"),
            async || write(&peers[0]).await,
            found,
        )
        .await;
        let alternate = async || {
            write(&peers[0]).await;
            write(&peers[1]).await;
        };
        counted(&format!("{setting}: {policy:?}, two peers alternating"), alternate, found).await;
        let lease = async || {
            let lease = peers[0].borrow().await.unwrap();
            lease.write_inline(&[7; 32], remote).await.unwrap();
        };
        counted(&format!("{setting}: {policy:?}, lease"), lease, found).await;

        let mut more = Vec::with_capacity(1000);
        BYTES.store(0, Ordering::Relaxed);
        SHOWN.store(MAX_BACKTRACES, Ordering::Relaxed);
        ON.store(true, Ordering::SeqCst);
        for _ in 0..1000 {
            more.push(pool.peer(&target.address()).unwrap());
        }
        ON.store(false, Ordering::SeqCst);
        let each = BYTES.load(Ordering::Relaxed) / 1000;
        println!("{setting}: {policy:?}: {each} bytes for each peer");
        TRACES.lock().clear();
        if each > 512 {
            found.push(format!("{setting}: {policy:?}: {each} bytes for each peer"));
        }
    }
}

/// Permits one allocation for each message: the `Bytes` that the receiver returns. A registered
/// buffer needs none.
async fn messages(setting: &str, mode: Mode, found: &mut Vec<String>) {
    // Without keepalive, whose timer allocates.
    let (a, b) = connected::pair(&connected::config().mode(mode.make()).keepalive(None));
    let inline: &'static [u8] = &[7; 32];
    let copied: &'static [u8] = &[7; 200];
    let lent: &'static [u8] = &[7; 4096];
    let joined: &'static [u8] = &[7; 20_000];
    for (kind, message) in
        [("inline", inline), ("copied", copied), ("lent", lent), ("joined", joined)]
    {
        let one_way = async || {
            a.send(Bytes::from_static(message)).await.unwrap();
            assert_eq!(b.recv().await.unwrap().unwrap().len(), message.len());
        };
        counted_to(&format!("{setting}: message, {kind}"), 1, one_way, found).await;
        let parts = [&message[..7], &message[7..9], &message[9..]].map(Bytes::from_static);
        let gathered = async || {
            a.send_vectored(&parts).await.unwrap();
            assert_eq!(b.recv().await.unwrap().unwrap().len(), message.len());
        };
        counted_to(&format!("{setting}: message of parts, {kind}"), 1, gathered, found).await;
        if message.len() <= lent.len() {
            let registered = async || {
                a.send(Bytes::from_static(message)).await.unwrap();
                let buffer = b.recv_buffer().await.unwrap().unwrap();
                b.send_buffer(buffer).await.unwrap();
                let back = a.recv_buffer().await.unwrap().unwrap();
                assert_eq!(back.len(), message.len());
            };
            counted(&format!("{setting}: message in a buffer, {kind}"), registered, found).await;
        }
        let receive_first = async || {
            let (received, sent) = tokio::join!(b.recv(), async {
                tokio::task::yield_now().await;
                a.send(Bytes::from_static(message)).await
            });
            sent.unwrap();
            assert_eq!(received.unwrap().unwrap().len(), message.len());
        };
        counted_to(
            &format!("{setting}: message with a parked receiver, {kind}"),
            1,
            receive_first,
            found,
        )
        .await;
    }
}

/// Reads and writes of a stream allocate nothing; `read_bytes` allocates the `Bytes` that it
/// returns.
async fn streams(setting: &str, mode: Mode, found: &mut Vec<String>) {
    let config = ConnectionConfig::for_streams().mode(mode.make()).keepalive(None);
    let (device, _) = device(&Network::new());
    let at = connected::address(&device);
    let listener = RdmaListener::bind_with(&device, at, &config).await.unwrap();
    let connecting = RdmaStream::connect_with(&device, listener.local_addr().unwrap(), &config);
    let (mut a, (mut b, _)) = tokio::try_join!(connecting, listener.accept()).unwrap();
    let bytes: &'static [u8] = &[7; 100_000];
    let mut memory = vec![0; bytes.len()];
    for len in [10, 1_000, 40_000] {
        let (half, rest) = bytes[..len].split_at(len / 2);
        let one_way = async || {
            a.write_all(half).await.unwrap();
            a.write_all(rest).await.unwrap();
            b.read_exact(&mut memory[..len]).await.unwrap();
        };
        counted(&format!("{setting}: stream, {len} bytes"), one_way, found).await;
        let in_place = async || {
            a.write_all(&bytes[..len]).await.unwrap();
            let mut left = len;
            while left > 0 {
                let arrived = b.fill_buf().await.unwrap().len();
                b.consume(arrived);
                left -= arrived;
            }
        };
        counted(&format!("{setting}: stream in place, {len} bytes"), in_place, found).await;
    }
    let frame = Bytes::from_static(&bytes[..20_000]);
    let chunks = async || {
        a.write_bytes(frame.clone()).await.unwrap();
        assert_eq!(b.read_bytes().await.unwrap().unwrap().len(), frame.len());
    };
    counted_to(&format!("{setting}: stream of chunks"), 1, chunks, found).await;
}

// One test, because the process has one allocator.
// Shows C6.
#[test]
fn operations_allocate_nothing_once_warm() {
    if !alone("allocations::operations_allocate_nothing_once_warm") {
        return;
    }
    live::observe(note);
    let found = bounded("allocations", 5 * LONG, || {
        let mut found = Vec::new();
        for (mode, flavour) in
            Mode::ALL.into_iter().flat_map(|mode| Flavour::ALL.map(|flavour| (mode, flavour)))
        {
            let setup = Setup::new(mode);
            flavour.runtime().block_on(all(&format!("{mode:?}, {flavour:?}"), &setup, &mut found));
            flavour.runtime().block_on(pooled(&format!("{mode:?}, {flavour:?}"), mode, &mut found));
            let setting = format!("{mode:?}, {flavour:?}");
            flavour.runtime().block_on(messages(&setting, mode, &mut found));
            flavour.runtime().block_on(streams(&setting, mode, &mut found));
        }
        found
    });
    assert!(found.is_empty(), "{found:#?}");
}

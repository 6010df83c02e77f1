//! Operations whose futures are dropped, timed out, aborted or leaked at random.
//!
//! Buffers return to their pools, a returned buffer does not change, posted work is executed once,
//! and the remaining futures complete.
//!
//! Shows C3.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use crate::torture::{
    self, Flavour, LONG, Mode, Seed, bounded, connect, device, eventually, hardware, impatient,
    scaled, slow_network, soon, yields,
};
use fastrand::Rng;
use tokio_rdma::completion::WorkQueueCounters;
use tokio_rdma::dc::{DcInitiator, DcPeer, DcTarget};
use tokio_rdma::op::{Destination, Posting};
use tokio_rdma::software::Network;
use tokio_rdma::{
    Access, Batch, BufMut, CompletionQueue, Device, ExposedRegion, Imm, Pool, QueuePair,
    RemoteRegion, SharedReceiveQueue,
};

/// Returns the number of operations of one storm. There are 96 storms; on a real device 32, or 48
/// if it has DC.
fn operations() -> u64 {
    scaled(if cfg!(debug_assertions) { 200 } else { 3_200 })
}
const TASKS: u64 = 4;
const SIZE: usize = 256;

// Layout of the region: shared counter, a word for each task, a pattern to read, an area for each
// task.
const COUNTER: u64 = 0;
const WORDS: u64 = 64;
const PATTERN: u64 = 256;
const AREAS: u64 = PATTERN + 2 * SIZE as u64;
const REGION: u64 = AREAS + TASKS * SIZE as u64;

type Work = Pin<Box<dyn Future<Output = ()> + Send>>;

fn pattern(at: usize) -> u8 {
    (at * 31 + 7) as u8
}

/// Fills a buffer with a tag and bytes derived from it.
fn stamp(buffer: &mut [u8], tag: u64) {
    let mut rng = Rng::with_seed(tag);
    for (at, byte) in buffer.iter_mut().enumerate() {
        *byte = if at < 8 { tag.to_le_bytes()[at] } else { rng.u8(..) };
    }
}

fn assert_stamped(what: &str, buffer: &[u8]) {
    let Some(tag) = buffer.first_chunk() else { return };
    let mut wanted = vec![0; buffer.len()];
    stamp(&mut wanted, u64::from_le_bytes(*tag));
    assert!(wanted == buffer, "{what}: foreign bytes in {buffer:?}");
}

struct Storm {
    client: Client,
    remote: RemoteRegion,
    region: ExposedRegion,
    pool: Pool,
    fences: bool,
    /// Posted FETCH_ADDs; each is executed once, even if dropped.
    added: AtomicU64,
    messages: AtomicU64,
    /// Buffers leaked by `forget`.
    leaked: AtomicU64,
    /// Operations whose result was not received.
    abandoned: AtomicU64,
}

#[derive(Debug, Clone, Copy)]
struct Setting {
    mode: Mode,
    flavour: Flavour,
    depth: u32,
    slow: bool,
    ends: Ends,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ends {
    Own,
    Shared,
    Dynamic,
}

#[derive(Clone)]
enum Client {
    Pair(QueuePair),
    Dynamic { initiator: DcInitiator, peers: Vec<DcPeer> },
}

impl Client {
    fn sender(&self, choice: usize, fenced: bool) -> Posting<Destination<'_>> {
        let to = match self {
            Self::Pair(qp) => Posting::from(qp),
            Self::Dynamic { initiator, peers } => initiator.to(&peers[choice % peers.len()]),
        };
        if fenced { to.fenced() } else { to }
    }

    fn counters(&self) -> WorkQueueCounters {
        match self {
            Self::Pair(qp) => qp.send_counters(),
            Self::Dynamic { initiator, .. } => initiator.counters(),
        }
    }
}

struct Poster {
    storm: Arc<Storm>,
    rng: Rng,
    task: u64,
    /// Reused buffers and their contents, which abandoned operations must not change.
    canaries: VecDeque<(BufMut, Vec<u8>)>,
    /// Operations to await later in another order.
    pending: Vec<Work>,
    word: u64,
}

impl Poster {
    async fn run(mut self) {
        for _ in 0..operations() / TASKS {
            let Some((work, buffers)) = self.post() else {
                self.release_canaries(0);
                self.settle().await;
                continue;
            };
            if self.dispose(work, buffers).await {
                self.storm.abandoned.fetch_add(1, Ordering::Relaxed);
            }
            self.watch();
            if self.pending.len() > 6 {
                let at = self.rng.usize(..self.pending.len());
                soon("a deferred operation", self.pending.swap_remove(at)).await;
            }
        }
        self.release_canaries(0);
        for work in std::mem::take(&mut self.pending) {
            soon("a surviving operation", work).await;
        }
    }

    /// Awaits a FETCH_ADD, which completes after all work posted before it.
    async fn settle(&mut self) {
        for work in std::mem::take(&mut self.pending) {
            soon("a deferred operation", work).await;
        }
        let word = self.storm.remote.slice(COUNTER..COUNTER + 8).unwrap();
        let last = self.storm.client.sender(self.rng.usize(..), false).fetch_add(word, 0);
        soon("settling", last).await.unwrap();
    }

    fn buffer(&mut self) -> Option<BufMut> {
        let len = self.rng.usize(1..=SIZE);
        let mut buffer = self.storm.pool.try_alloc(len).ok()?;
        stamp(&mut buffer, self.rng.u64(..));
        Some(buffer)
    }

    fn area(&self) -> RemoteRegion {
        let start = AREAS + self.task * SIZE as u64;
        self.storm.remote.slice(start..start + SIZE as u64).unwrap()
    }

    /// Posts a random operation; returns a future that checks it, and its number of pool buffers.
    fn post(&mut self) -> Option<(Work, u64)> {
        let (storm, task) = (self.storm.clone(), self.task);
        let qp = storm.client.sender(self.rng.usize(..), storm.fences && self.rng.u8(..8) == 0);
        let work: Work = match self.rng.u8(..16) {
            0..=2 => {
                let buffer = self.buffer()?;
                storm.messages.fetch_add(1, Ordering::Relaxed);
                let send = qp.send(buffer);
                Box::pin(async move { assert_stamped("sent", &send.await.unwrap()) })
            }
            3 | 4 => {
                let buffer = self.buffer()?.freeze();
                let write = qp.write(buffer.clone(), self.area());
                Box::pin(async move {
                    assert_stamped("being written", &buffer);
                    assert_stamped("written", &write.await.unwrap());
                })
            }
            5..=8 => {
                let mut buffer = self.buffer()?;
                let (len, from) = (buffer.len() as u64, self.rng.usize(..SIZE));
                buffer.fill(0xee);
                let source =
                    storm.remote.slice(PATTERN + from as u64..PATTERN + from as u64 + len).unwrap();
                let read = qp.read(buffer, source);
                Box::pin(async move {
                    for (at, &byte) in read.await.unwrap().iter().enumerate() {
                        assert_eq!(byte, pattern(from + at), "byte {at} read");
                    }
                })
            }
            9 => {
                let buffer = self.buffer()?;
                storm.messages.fetch_add(1, Ordering::Relaxed);
                let write = qp.with_imm(Imm(task as u32)).write(buffer, self.area());
                Box::pin(async move { assert_stamped("written with imm", &write.await.unwrap()) })
            }
            10 => {
                let mut bytes = [0; 48];
                stamp(&mut bytes, self.rng.u64(..));
                storm.messages.fetch_add(1, Ordering::Relaxed);
                let send = qp.send_inline(&bytes);
                return Some((Box::pin(async move { send.await.unwrap() }), 0));
            }
            11 => {
                let word = storm.remote.slice(COUNTER..COUNTER + 8).unwrap();
                storm.added.fetch_add(1, Ordering::Relaxed);
                let add = qp.fetch_add(word, 1);
                return Some((
                    Box::pin(async move { assert!(add.await.unwrap() < operations()) }),
                    0,
                ));
            }
            12 => {
                // Only this task writes the word, so it holds the previous swap's value.
                let at = WORDS + 8 * task;
                let (before, after) = (self.word, self.rng.u64(..));
                self.word = after;
                let swap = qp.compare_swap(storm.remote.slice(at..at + 8).unwrap(), before, after);
                return Some((Box::pin(async move { assert_eq!(swap.await.unwrap(), before) }), 0));
            }
            _ => return self.post_batch(qp),
        };
        Some((work, 1))
    }

    fn post_batch(&mut self, qp: Posting<Destination<'_>>) -> Option<(Work, u64)> {
        let mut batch = Batch::new();
        let (len, mut reads) = (self.rng.u64(1..=4), Vec::new());
        batch.signal_every(self.rng.u32(..3));
        let buffers = (0..len).map(|_| self.buffer()).collect::<Option<Vec<_>>>()?;
        for mut buffer in buffers {
            if self.rng.bool() {
                batch.write(buffer, self.area());
                reads.push(None);
            } else {
                let from = self.rng.usize(..SIZE);
                let end = PATTERN + (from + buffer.len()) as u64;
                buffer.fill(0xee);
                batch.read(buffer, self.storm.remote.slice(PATTERN + from as u64..end).unwrap());
                reads.push(Some(from));
            }
        }
        let posted = qp.post_batch(batch);
        let work = Box::pin(async move {
            let result = posted.await;
            assert!(result.is_ok(), "{:?}", result.results());
            for (buffer, read) in result.buffers().iter().zip(reads) {
                match read {
                    None => assert_stamped("written in a batch", buffer),
                    Some(from) => assert!(
                        buffer.iter().enumerate().all(|(at, &byte)| byte == pattern(from + at))
                    ),
                }
            }
        });
        Some((work, len))
    }

    /// Awaits or abandons an operation at random; returns whether it was abandoned.
    async fn dispose(&mut self, mut work: Work, buffers: u64) -> bool {
        match self.rng.u8(..24) {
            0..=3 => {
                drop(work);
                true
            }
            4..=6 => {
                let first = std::future::poll_fn(|context| {
                    std::task::Poll::Ready(work.as_mut().poll(context))
                })
                .await;
                yields(self.rng.u32(..3)).await;
                drop(work);
                first.is_pending()
            }
            7..=9 => tokio::time::timeout(Duration::from_nanos(self.rng.u64(..60_000)), work)
                .await
                .is_err(),
            10..=12 => {
                let times = self.rng.u32(..6);
                tokio::select! {
                    biased;
                    () = yields(times) => true,
                    () = work => false,
                }
            }
            13..=15 => {
                let task = tokio::spawn(work);
                yields(self.rng.u32(..4)).await;
                task.abort();
                match soon("an aborted task", task).await {
                    Ok(()) => false,
                    Err(error) => {
                        assert!(error.is_cancelled(), "{error}");
                        true
                    }
                }
            }
            16 => {
                // Registered by one task, awaited by another, dropped by a third.
                if tokio::time::timeout(Duration::ZERO, &mut work).await.is_ok() {
                    return false;
                }
                let second = tokio::spawn(async move {
                    let result = tokio::time::timeout(Duration::from_micros(5), &mut work).await;
                    (work, result.is_err())
                });
                let (work, abandoned) = soon("the second task", second).await.unwrap();
                drop(tokio::spawn(async move { drop(work) }));
                abandoned
            }
            17 if self.storm.leaked.load(Ordering::Relaxed) < 24 => {
                // Leaked with or without a registered waker.
                if self.rng.bool() && tokio::time::timeout(Duration::ZERO, &mut work).await.is_ok()
                {
                    return false;
                }
                self.storm.leaked.fetch_add(buffers, Ordering::Relaxed);
                std::mem::forget(work);
                true
            }
            17..=19 => {
                self.pending.push(work);
                false
            }
            _ => {
                soon("an awaited operation", work).await;
                false
            }
        }
    }

    /// Allocates a buffer to check later that no operation wrote to it.
    fn watch(&mut self) {
        if self.rng.bool()
            && let Ok(mut canary) = self.storm.pool.try_alloc(SIZE)
        {
            self.rng.fill(&mut canary);
            let copy = canary.to_vec();
            self.canaries.push_back((canary, copy));
        }
        let keep = self.rng.usize(4..12);
        self.release_canaries(keep);
    }

    fn release_canaries(&mut self, keep: usize) {
        while self.canaries.len() > keep {
            if let Some((canary, copy)) = self.canaries.pop_front() {
                assert!(
                    canary[..] == copy[..],
                    "an abandoned operation wrote into a reused buffer"
                );
            }
        }
    }
}

#[derive(Clone)]
enum Receiver {
    Own(QueuePair),
    Shared(SharedReceiveQueue),
}

/// Posts receives late and abandons some; returns the number of abandoned ones.
async fn receive(receiver: Receiver, pool: Pool, mut rng: Rng, stop: Arc<AtomicBool>) -> u64 {
    let mut posted: Vec<Work> = Vec::new();
    let (mut abandoned, mut canaries) = (0, VecDeque::new());
    while !stop.load(Ordering::Relaxed) {
        let times = if rng.u8(..4) == 0 { rng.u32(..40) } else { 1 };
        yields(times).await;
        for _ in 0..rng.u32(..4) {
            let Ok(buffer) = pool.try_alloc(SIZE) else { break };
            let recv = match &receiver {
                Receiver::Own(qp) => qp.recv(buffer),
                Receiver::Shared(queue) => queue.recv(buffer),
            };
            let mut work: Work = Box::pin(async move {
                if let Ok(received) = recv.await {
                    assert_eq!(
                        received.written,
                        received.buffer.is_empty() && received.imm.is_some()
                    );
                    assert_stamped("received", &received.buffer);
                }
            });
            match rng.u8(..6) {
                0 => {
                    abandoned += 1;
                    drop(work);
                }
                1 => {
                    let wait =
                        tokio::time::timeout(Duration::from_nanos(rng.u64(..30_000)), &mut work);
                    abandoned += u64::from(wait.await.is_err());
                }
                _ => posted.push(work),
            }
        }
        if let Ok(mut canary) = pool.try_alloc(SIZE) {
            rng.fill(&mut canary);
            let copy = canary.to_vec();
            canaries.push_back((canary, copy));
        }
        if canaries.len() > 6
            && let Some((canary, copy)) = canaries.pop_front()
        {
            assert!(canary[..] == copy[..], "a message arrived in a reused buffer");
        }
        if posted.len() > 8 || pool.available() < 8 {
            canaries.clear();
            let oldest = posted.len().min(4);
            for work in posted.drain(..oldest) {
                // A timeout abandons the receive, which may lose a message.
                let _ = tokio::time::timeout(Duration::from_micros(200), work).await;
            }
        }
    }
    for (canary, copy) in canaries {
        assert!(canary[..] == copy[..], "a message arrived in a reused buffer");
    }
    for work in posted {
        drop(work);
    }
    abandoned
}

async fn storm(setting: Setting, seed: u64) -> u64 {
    let mut rng = Rng::with_seed(seed);
    let network = if setting.slow { slow_network(seed) } else { Network::new() };
    let (device, pd) = device(&network);
    let queue = CompletionQueue::new(&device, setting.mode.make()).unwrap();
    let elsewhere = CompletionQueue::new(&device, setting.mode.make()).unwrap();
    let shared = setting.ends != Ends::Own;
    let srq = shared.then(|| SharedReceiveQueue::new(&pd, &elsewhere, setting.depth, 1).unwrap());
    let mut targets = Vec::new();
    let (client, server) = match &srq {
        Some(srq) if setting.ends == Ends::Dynamic => {
            targets.extend((0..3).map(|_| DcTarget::new(&pd, srq).unwrap()));
            let initiator = DcInitiator::builder(&pd, &queue)
                .max_send_wr(setting.depth)
                .retries(impatient())
                .build();
            let initiator = initiator.unwrap();
            let peers =
                targets.iter().map(|target| initiator.peer(&target.address()).unwrap()).collect();
            (Client::Dynamic { initiator, peers }, None)
        }
        srq => {
            let client =
                QueuePair::builder(&pd, &queue).max_send_wr(setting.depth).build().unwrap();
            let server = QueuePair::builder(&pd, &queue);
            let server = match srq {
                Some(srq) => server.shared_receive_queue(srq).build().unwrap(),
                None => server
                    .max_recv_wr(setting.depth)
                    .receive_completions(&elsewhere)
                    .build()
                    .unwrap(),
            };
            connect(&client, &server);
            (Client::Pair(client), Some(server))
        }
    };
    let region = ExposedRegion::new(&pd, vec![0; REGION as usize], Access::REMOTE_ALL).unwrap();
    let readable: Vec<u8> = (0..2 * SIZE).map(pattern).collect();
    region.write(PATTERN as usize, &readable).unwrap();
    let pool = Pool::new(&pd, SIZE, 160).unwrap();
    let received = Pool::new(&pd, SIZE, 64).unwrap();

    let storm = Arc::new(Storm {
        client: client.clone(),
        remote: region.grant(),
        region,
        pool: pool.clone(),
        fences: torture::keeps_fences(&device),
        added: AtomicU64::new(0),
        messages: AtomicU64::new(0),
        leaked: AtomicU64::new(0),
        abandoned: AtomicU64::new(0),
    });
    let stop = Arc::new(AtomicBool::new(false));
    let receiver = match (&srq, &server) {
        (None, Some(server)) => Receiver::Own(server.clone()),
        (Some(srq), _) => Receiver::Shared(srq.clone()),
        (None, None) => unreachable!("targets have a shared queue"),
    };
    let receiver = tokio::spawn(receive(receiver, received.clone(), rng.fork(), stop.clone()));
    let posters: Vec<_> = (0..TASKS)
        .map(|task| {
            let poster = Poster {
                storm: storm.clone(),
                rng: rng.fork(),
                task,
                canaries: VecDeque::new(),
                pending: Vec::new(),
                word: 0,
            };
            tokio::spawn(poster.run())
        })
        .collect();
    for poster in posters {
        soon("a poster", torture::joined(poster)).await;
    }
    // Completes after all other work.
    let word = storm.remote.slice(COUNTER..COUNTER + 8).unwrap();
    let added = soon("the last operation", client.sender(rng.usize(..), false).fetch_add(word, 0))
        .await
        .unwrap();
    stop.store(true, Ordering::Relaxed);
    let abandoned = soon("the receiver", receiver).await.unwrap();

    assert_eq!(added, storm.added.load(Ordering::Relaxed), "each FETCH_ADD is executed once");
    assert_eq!(storm.region.load(COUNTER as usize), Ok(added));
    let counters = client.counters();
    assert_eq!((counters.in_flight, counters.waiting, counters.failed), (0, 0, 0), "{counters:?}");
    assert_eq!(queue.counters().waiting, 0, "waiters remain: {:?}", queue.counters());
    let leaked = storm.leaked.load(Ordering::Relaxed) as usize;
    // A busy-poll thread may be about to drop completed operations.
    eventually("buffers of sends are returned", || pool.available() == pool.total() - leaked).await;
    let area = &mut [0; SIZE];
    storm.region.read(PATTERN as usize, area).unwrap();
    assert!(area[..] == readable[..SIZE], "memory that is only read is unchanged");

    drop(client);
    if let Some(server) = server {
        soon("closing", server.close()).await;
    }
    let abandoned = storm.abandoned.load(Ordering::Relaxed) + abandoned;
    drop((storm, targets, srq));
    assert_eq!(elsewhere.counters().waiting, 0, "waiters remain: {:?}", elsewhere.counters());
    eventually("buffers of receives are returned", || received.available() == received.total())
        .await;
    abandoned
}

fn storms(mode: Mode) {
    let seed = Seed::new("--test conformance cancel");
    let (mut rng, mut abandoned) = (Rng::with_seed(seed.value), 0);
    let has_dc = device(&Network::new()).0.attr().dc.is_some();
    let speeds: &[bool] = if hardware().is_some() { &[false] } else { &[false, true] };
    for flavour in Flavour::ALL {
        for depth in [4, 128] {
            for &slow in speeds {
                for ends in [Ends::Own, Ends::Shared, Ends::Dynamic] {
                    if ends == Ends::Dynamic && !has_dc {
                        continue;
                    }
                    let setting = Setting { mode, flavour, depth, slow, ends };
                    println!("{setting:?}");
                    let seed = rng.u64(..);
                    abandoned += bounded("storm", 3 * LONG, move || {
                        setting.flavour.runtime().block_on(storm(setting, seed))
                    });
                }
            }
        }
    }
    // 100,000 in the four modes of a release build, 6,000 on a real device.
    println!("{abandoned} abandoned");
    let min = operations() * 8 * speeds.len() as u64 / 2;
    assert!(abandoned >= min, "{abandoned} operations were abandoned");
}

// Shows S1.
#[test]
fn abandoned_operations_lose_and_overwrite_nothing_in_event_mode() {
    storms(Mode::Event);
}

#[test]
fn abandoned_operations_lose_and_overwrite_nothing_in_busy_poll_mode() {
    storms(Mode::BusyPoll);
}

#[test]
fn abandoned_operations_lose_and_overwrite_nothing_in_cooperative_mode() {
    storms(Mode::Cooperative);
}

#[test]
fn abandoned_operations_lose_and_overwrite_nothing_in_hybrid_mode() {
    storms(Mode::Hybrid);
}

/// Returns a connected pair on a network with delays.
fn slow_pair(mode: Mode, depth: u32) -> (QueuePair, QueuePair, ExposedRegion, CompletionQueue) {
    let (device, pd) = device(&slow_network(7));
    let queue = CompletionQueue::new(&device, mode.make()).unwrap();
    let new = || QueuePair::builder(&pd, &queue).max_send_wr(depth).build().unwrap();
    let (a, b) = (new(), new());
    connect(&a, &b);
    let region = ExposedRegion::new(&pd, vec![0; 4096], Access::REMOTE_ALL).unwrap();
    (a, b, region, queue)
}

#[test]
fn abandoned_buffer_is_returned_without_an_awaited_operation() {
    for (mode, flavour) in
        Mode::ALL.into_iter().flat_map(|mode| Flavour::ALL.map(|flavour| (mode, flavour)))
    {
        bounded("an abandoned buffer", 2 * LONG, move || {
            flavour.runtime().block_on(async {
                let (a, _b, region, queue) = slow_pair(mode, 16);
                let pool = Pool::new(a.protection_domain(), 64, 1).unwrap();
                for _ in 0..20 {
                    drop(a.write(pool.try_alloc(64).unwrap(), region.grant()));
                    soon("a buffer", pool.alloc(64)).await.unwrap();
                }
                eventually("the end of all waiters", || queue.counters().waiting == 0).await;
            });
        });
    }
}

#[test]
fn abandoned_queued_work_is_still_executed() {
    for (mode, flavour) in
        Mode::ALL.into_iter().flat_map(|mode| Flavour::ALL.map(|flavour| (mode, flavour)))
    {
        bounded("abandoned work", 2 * LONG, move || {
            flavour.runtime().block_on(async {
                let (a, _b, region, _queue) = slow_pair(mode, 2);
                for _ in 0..50 {
                    drop(a.fetch_add(region.grant().slice(0..8).unwrap(), 1));
                }
                eventually("all additions", || region.load(0) == Ok(50)).await;
            });
        });
    }
}

// On the software device WRITEs complete when posted, so the first poll returns all completions.
// Shows C2.
#[test]
fn completions_polled_by_one_operation_are_dispatched_to_others() {
    for mode in Mode::ALL {
        bounded("dispatch to others", LONG, move || {
            Flavour::CurrentThread.runtime().block_on(async {
                let device = Device::software().unwrap();
                let pd = device.protection_domain().unwrap();
                let queue = CompletionQueue::new(&device, mode.make()).unwrap();
                let (a, b) =
                    (QueuePair::new(&pd, &queue).unwrap(), QueuePair::new(&pd, &queue).unwrap());
                connect(&a, &b);
                let region = ExposedRegion::new(&pd, vec![0; 64], Access::REMOTE_ALL).unwrap();
                let pool = Pool::new(&pd, 64, 3).unwrap();
                for _ in 0..200 {
                    let post = || a.write(pool.try_alloc(64).unwrap(), region.grant());
                    let (first, second, third) = (post(), post(), post());
                    let held = first.await.unwrap();
                    assert!(
                        pool.try_alloc(64).is_err(),
                        "two buffers are in operations that were not polled"
                    );
                    drop(second);
                    drop(
                        soon("the buffer of the dropped operation", pool.alloc(64)).await.unwrap(),
                    );
                    eventually("the third", || third.is_finished()).await;
                    assert_eq!(queue.counters().waiting, 0);
                    drop((third.await.unwrap(), held));
                }
            });
        });
    }
}

// Shows C4.
#[test]
fn completions_polled_by_one_operation_free_slots_for_others() {
    for mode in [Mode::Event, Mode::Cooperative, Mode::Hybrid] {
        bounded("slots of others", LONG, move || {
            Flavour::CurrentThread.runtime().block_on(async {
                let device = Device::software().unwrap();
                let pd = device.protection_domain().unwrap();
                let queue = CompletionQueue::new(&device, mode.make()).unwrap();
                let a = QueuePair::builder(&pd, &queue).max_send_wr(2).build().unwrap();
                let b = QueuePair::new(&pd, &queue).unwrap();
                connect(&a, &b);
                let region = ExposedRegion::new(&pd, vec![0; 64], Access::REMOTE_ALL).unwrap();
                let pool = Pool::new(&pd, 64, 4).unwrap();
                let new = || pool.try_alloc(64).unwrap();
                for _ in 0..10 {
                    let (first, second) =
                        (a.write(new(), region.grant()), a.write(new(), region.grant()));
                    first.await.unwrap();
                    let third = a.try_write(new(), region.grant()).expect("the first one's slot");
                    let fourth = a.try_write(new(), region.grant()).expect("the second one's slot");
                    third.await.unwrap();
                    drop(second.await.unwrap());
                    let mut batch = Batch::new();
                    batch.write(new(), region.grant()).write(new(), region.grant());
                    let batch = a.try_post_batch(batch).expect("both slots");
                    batch.await.into_buffers().unwrap();
                    drop(fourth.await.unwrap());
                }
            });
        });
    }
}

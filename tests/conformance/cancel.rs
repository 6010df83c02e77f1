//! Operations abandoned in every way and at every moment, and what must be true afterwards.
//!
//! Well over 100,000 operations are dropped, timed out, aborted, selected away, leaked or left to a queue pair that
//! goes away. Whatever happens: buffers come back, no byte of a buffer changes once somebody else has it, work that
//! was posted is done exactly once, and who still waits gets an answer.

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
use tokio_rdma::dc::{DcInitiator, DcPeer, DcSender, DcTarget};
use tokio_rdma::op::{Atomic, BatchOp, Read, Send as Sending, Write};
use tokio_rdma::software::Network;
use tokio_rdma::{
    Access, Batch, Buf, BufMut, CompletionQueue, Device, ExposedRegion, Imm, Pool, QueuePair,
    RemoteRegion, SharedReceiveQueue,
};

/// Operations of each storm; there are 96 of them, and 32 on a real device, or 48 if it has DC. Release builds run all of
/// them.
fn operations() -> u64 {
    scaled(if cfg!(debug_assertions) { 800 } else { 3_200 })
}
/// Tasks that post them.
const TASKS: u64 = 4;
/// Bytes of a buffer.
const SIZE: usize = 256;

/// Layout of the exposed region: a word that all add to, words of each task, a pattern to read, room for each task.
const COUNTER: u64 = 0;
const WORDS: u64 = 64;
const PATTERN: u64 = 256;
const AREAS: u64 = PATTERN + 2 * SIZE as u64;
const REGION: u64 = AREAS + TASKS * SIZE as u64;

type Work = Pin<Box<dyn Future<Output = ()> + Send>>;

fn pattern(at: usize) -> u8 {
    (at * 31 + 7) as u8
}

/// Bytes that say themselves what they should be: a tag, then bytes that follow from it.
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

/// One configuration with all that its tasks share.
struct Storm {
    client: Client,
    remote: RemoteRegion,
    region: ExposedRegion,
    pool: Pool,
    /// Whether some operations are fenced.
    fences: bool,
    /// FETCH_ADDs posted: each is done once, dropped or not.
    added: AtomicU64,
    /// Operations that consume a receive.
    messages: AtomicU64,
    /// Buffers that `forget` took out of the world.
    leaked: AtomicU64,
    /// Operations whose answer nobody got.
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

/// What the operations go from and to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ends {
    /// A queue pair with its own receives.
    Own,
    /// One with those of a shared queue.
    Shared,
    /// From an initiator of dynamic connections to some targets, in turn.
    Dynamic,
}

/// Where operations go from.
#[derive(Clone)]
enum Client {
    Pair(QueuePair),
    Dynamic { initiator: DcInitiator, peers: Vec<DcPeer> },
}

/// The same for the next one.
enum Way<'a> {
    Pair(QueuePair),
    Dynamic(DcSender<'a>),
}

/// Calls the same method, of whichever it is.
macro_rules! either {
    ($($method:ident($($argument:ident: $type:ty),*) -> $result:ty;)*) => {
        impl Way<'_> {
            $(fn $method(&self, $($argument: $type),*) -> $result {
                match self {
                    Self::Pair(qp) => qp.$method($($argument),*),
                    Self::Dynamic(sender) => sender.$method($($argument),*),
                }
            })*
        }
    };
}

either! {
    send(buffer: BufMut) -> Sending<BufMut>;
    write(buffer: Buf, remote: RemoteRegion) -> Write<Buf>;
    read(buffer: BufMut, remote: RemoteRegion) -> Read<BufMut>;
    write_with_imm(buffer: BufMut, remote: RemoteRegion, imm: Imm) -> Write<BufMut>;
    send_inline(bytes: &[u8]) -> Sending<()>;
    fetch_add(remote: RemoteRegion, add: u64) -> Atomic;
    compare_swap(remote: RemoteRegion, compare: u64, swap: u64) -> Atomic;
    post_batch(batch: Batch<BufMut>) -> BatchOp<BufMut>;
}

impl Client {
    /// `chance` decides where to, of those that there are.
    fn way(&self, chance: usize, fenced: bool) -> Way<'_> {
        match self {
            Self::Pair(qp) if fenced => Way::Pair(qp.fenced()),
            Self::Pair(qp) => Way::Pair(qp.clone()),
            Self::Dynamic { initiator, peers } => {
                let to = initiator.to(&peers[chance % peers.len()]);
                Way::Dynamic(if fenced { to.fenced() } else { to })
            }
        }
    }

    fn counters(&self) -> WorkQueueCounters {
        match self {
            Self::Pair(qp) => qp.send_counters(),
            Self::Dynamic { initiator, .. } => initiator.counters(),
        }
    }
}

/// A poster of operations with the memory it watches.
struct Poster {
    storm: Arc<Storm>,
    rng: Rng,
    task: u64,
    /// Buffers handed out again while abandoned operations may still be landing, and what is in them.
    canaries: VecDeque<(BufMut, Vec<u8>)>,
    /// Operations that will be awaited later, in another order.
    pending: Vec<Work>,
    word: u64,
}

impl Poster {
    async fn run(mut self) {
        for _ in 0..operations() / TASKS {
            let Some((work, buffers)) = self.post() else {
                // All buffers are in flight or watched.
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
                soon("an operation put aside", self.pending.swap_remove(at)).await;
            }
        }
        self.release_canaries(0);
        for work in std::mem::take(&mut self.pending) {
            soon("a surviving operation", work).await;
        }
    }

    /// Awaits an operation: with it, all that were posted before it are done.
    async fn settle(&mut self) {
        for work in std::mem::take(&mut self.pending) {
            soon("an operation put aside", work).await;
        }
        let word = self.storm.remote.slice(COUNTER..COUNTER + 8).unwrap();
        let last = self.storm.client.way(self.rng.usize(..), false).fetch_add(word, 0);
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

    /// Posts a random operation; the work is to await and check it. With the number of pool buffers it owns.
    fn post(&mut self) -> Option<(Work, u64)> {
        let (storm, task) = (self.storm.clone(), self.task);
        let qp = storm.client.way(self.rng.usize(..), storm.fences && self.rng.u8(..8) == 0);
        let work: Work = match self.rng.u8(..16) {
            0..=2 => {
                let buffer = self.buffer()?;
                storm.messages.fetch_add(1, Ordering::Relaxed);
                let send = qp.send(buffer);
                Box::pin(async move { assert_stamped("sent", &send.await.unwrap()) })
            }
            3 | 4 => {
                // Watched from here while it is in flight.
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
                let write = qp.write_with_imm(buffer, self.area(), Imm(task as u32));
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
                // Of this task alone, and in order: it holds what the one before put there.
                let at = WORDS + 8 * task;
                let (before, after) = (self.word, self.rng.u64(..));
                self.word = after;
                let swap = qp.compare_swap(storm.remote.slice(at..at + 8).unwrap(), before, after);
                return Some((Box::pin(async move { assert_eq!(swap.await.unwrap(), before) }), 0));
            }
            _ => return self.post_batch(&qp),
        };
        Some((work, 1))
    }

    fn post_batch(&mut self, qp: &Way<'_>) -> Option<(Work, u64)> {
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

    /// Ends an operation in one of many ways; true if nobody got its answer.
    async fn dispose(&mut self, mut work: Work, buffers: u64) -> bool {
        match self.rng.u8(..24) {
            0..=3 => {
                drop(work);
                true
            }
            4..=6 => {
                // Polled once, so that a waker is there; then dropped.
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
                let turns = self.rng.u32(..6);
                tokio::select! {
                    biased;
                    () = yields(turns) => true,
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
                let moved = tokio::spawn(async move {
                    let ended = tokio::time::timeout(Duration::from_micros(5), &mut work).await;
                    (work, ended.is_err())
                });
                let (work, abandoned) = soon("the task that took it over", moved).await.unwrap();
                drop(tokio::spawn(async move { drop(work) }));
                abandoned
            }
            17 if self.storm.leaked.load(Ordering::Relaxed) < 24 => {
                // Keeps its buffers for ever, waker registered or not.
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

    /// Takes buffers that have just come back and looks later whether somebody still writes to them.
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
                    "an abandoned operation wrote into a buffer that somebody else owns"
                );
            }
        }
    }
}

/// Where receives come from.
#[derive(Clone)]
enum Receiver {
    Own(QueuePair),
    Shared(SharedReceiveQueue),
}

/// Posts receives late, some of them to be abandoned, until told to stop.
async fn receive(receiver: Receiver, pool: Pool, mut rng: Rng, stop: Arc<AtomicBool>) -> u64 {
    let mut posted: Vec<Work> = Vec::new();
    let (mut abandoned, mut canaries) = (0, VecDeque::new());
    while !stop.load(Ordering::Relaxed) {
        let turns = if rng.u8(..4) == 0 { rng.u32(..40) } else { 1 };
        yields(turns).await;
        for _ in 0..rng.u32(..4) {
            let Ok(buffer) = pool.try_alloc(SIZE) else { break };
            let recv = match &receiver {
                Receiver::Own(qp) => qp.recv(buffer),
                Receiver::Shared(queue) => queue.recv(buffer),
            };
            let mut work: Work = Box::pin(async move {
                // Flushed at the end.
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
            assert!(
                canary[..] == copy[..],
                "a message arrived in a buffer that somebody else owns"
            );
        }
        // Wait a moment for the oldest; all of them if no buffer is left.
        if posted.len() > 8 || pool.available() < 8 {
            canaries.clear();
            let oldest = posted.len().min(4);
            for work in posted.drain(..oldest) {
                // A timeout abandons it: the message that finds it is lost.
                let _ = tokio::time::timeout(Duration::from_micros(200), work).await;
            }
        }
    }
    for (canary, copy) in canaries {
        assert!(canary[..] == copy[..], "a message arrived in a buffer that somebody else owns");
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
                .options(impatient())
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
        if let Err(error) = soon("a poster", poster).await {
            std::panic::resume_unwind(error.into_panic());
        }
    }
    // The last of all: when it is done, everything before it is.
    let word = storm.remote.slice(COUNTER..COUNTER + 8).unwrap();
    let added = soon("the last operation", client.way(rng.usize(..), false).fetch_add(word, 0))
        .await
        .unwrap();
    stop.store(true, Ordering::Relaxed);
    let abandoned = soon("the receiver", receiver).await.unwrap();

    assert_eq!(added, storm.added.load(Ordering::Relaxed), "each FETCH_ADD is done once");
    assert_eq!(storm.region.load(COUNTER as usize), Ok(added));
    let counters = client.counters();
    assert_eq!((counters.in_flight, counters.waiting, counters.failed), (0, 0, 0), "{counters:?}");
    assert_eq!(queue.counters().waiting, 0, "nobody waits: {:?}", queue.counters());
    let leaked = storm.leaked.load(Ordering::Relaxed) as usize;
    // A busy-poll thread may be about to drop what it has just reaped.
    eventually("buffers of sends come back", || pool.available() == pool.total() - leaked).await;
    let area = &mut [0; SIZE];
    storm.region.read(PATTERN as usize, area).unwrap();
    assert!(area[..] == readable[..SIZE], "what is only read stays as it is");

    drop(client);
    if let Some(server) = server {
        soon("closing", server.close()).await;
    }
    let abandoned = storm.abandoned.load(Ordering::Relaxed) + abandoned;
    drop((storm, targets, srq));
    assert_eq!(elsewhere.counters().waiting, 0, "nobody waits: {:?}", elsewhere.counters());
    eventually("buffers of receives come back", || received.available() == received.total()).await;
    abandoned
}

fn storms(mode: Mode) {
    let seed = Seed::new("--test conformance cancel");
    let (mut rng, mut abandoned) = (Rng::with_seed(seed.value), 0);
    // A real device takes the time it takes.
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
    // Four modes of a release build: 100,000 in all; 6,000 on a real device.
    println!("{abandoned} abandoned");
    let least = operations() * 8 * speeds.len() as u64 / 2;
    assert!(abandoned >= least, "{abandoned} operations were abandoned");
}

#[test]
fn nothing_is_lost_or_overwritten_whatever_is_abandoned_in_event_mode() {
    storms(Mode::Event);
}

#[test]
fn nothing_is_lost_or_overwritten_whatever_is_abandoned_in_busy_poll_mode() {
    storms(Mode::BusyPoll);
}

#[test]
fn nothing_is_lost_or_overwritten_whatever_is_abandoned_in_cooperative_mode() {
    storms(Mode::Cooperative);
}

#[test]
fn nothing_is_lost_or_overwritten_whatever_is_abandoned_in_hybrid_mode() {
    storms(Mode::Hybrid);
}

/// A connected pair on a network where nothing is done at once, with memory to write to.
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
fn an_abandoned_buffer_comes_back_though_nobody_waits_for_any_operation() {
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
                eventually("the count", || queue.counters().waiting == 0).await;
            });
        });
    }
}

#[test]
fn abandoned_work_that_waits_for_room_is_done_though_nobody_waits_for_it() {
    for (mode, flavour) in
        Mode::ALL.into_iter().flat_map(|mode| Flavour::ALL.map(|flavour| (mode, flavour)))
    {
        bounded("abandoned work", 2 * LONG, move || {
            flavour.runtime().block_on(async {
                let (a, _b, region, _queue) = slow_pair(mode, 2);
                for _ in 0..50 {
                    drop(a.fetch_add(region.grant().slice(0..8).unwrap(), 1));
                }
                eventually("all of it", || region.load(0) == Ok(50)).await;
            });
        });
    }
}

/// On the software device all three are done when they are posted, and whoever looks first takes all completions.
#[test]
fn completions_that_one_operation_took_for_others_are_theirs_when_they_are_dropped_or_asked() {
    for mode in Mode::ALL {
        bounded("completions of others", LONG, move || {
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
                    assert!(pool.try_alloc(64).is_err(), "two are in flight, or not asked for");
                    drop(second);
                    drop(soon("the buffer that was dropped", pool.alloc(64)).await.unwrap());
                    // It is said to be over before anybody has waited for it.
                    eventually("the third", || third.is_finished()).await;
                    assert_eq!(queue.counters().waiting, 0);
                    drop((third.await.unwrap(), held));
                }
            });
        });
    }
}

#[test]
fn room_of_completions_that_one_operation_took_for_others_is_there_for_who_tries() {
    for mode in [Mode::Event, Mode::Cooperative, Mode::Hybrid] {
        bounded("room of others", LONG, move || {
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
                    let third = a.try_write(new(), region.grant()).expect("room of the first");
                    let fourth = a.try_write(new(), region.grant()).expect("room of the second");
                    third.await.unwrap();
                    drop(second.await.unwrap());
                    let mut batch = Batch::new();
                    batch.write(new(), region.grant()).write(new(), region.grant());
                    let batch = a.try_post_batch(batch).expect("room of both");
                    batch.await.into_buffers().unwrap();
                    drop(fourth.await.unwrap());
                }
            });
        });
    }
}

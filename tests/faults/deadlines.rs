//! Deadlines on a network that delays packets beyond all of them.
//!
//! Each seed posts operations, delivers some packets, and lets the deadlines pass. Whatever is
//! handed back is overwritten, then all delayed packets arrive, and nothing may have changed.

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use fastrand::Rng;
use tokio_rdma::error::Outcome;
use tokio_rdma::op::{BatchOp, DeadlineError, Lease, Read, Recv, RetryConfig, Revocable, Write};
use tokio_rdma::software::{Faults, Network};
use tokio_rdma::types::{AckTimeout, Mtu, QpAttr, QpState, WcStatus};
use tokio_rdma::{
    Access, Batch, BufMut, CompletionMode, CompletionQueue, Device, ExposedRegion, OpError,
    OpErrorKind, Pool, ProtectionDomain, QueuePair, RemoteRegion,
};

use super::campaign::seeds;
use super::chance::{noise, size};
use crate::torture::HANG;

const LARGEST: usize = 6000;
const REVOKED: OpErrorKind = OpErrorKind::TimedOut { outcome: Outcome::MaybeExecuted };

struct Side {
    queue: CompletionQueue,
    pool: Pool,
    pd: ProtectionDomain,
}

impl Side {
    fn new(network: &Network, name: &str) -> Self {
        let device = Device::software_in(network, name).unwrap();
        let pd = device.protection_domain().unwrap();
        let pool = Pool::builder(&pd).buffer_size(LARGEST).buffers(32).growing(true).build();
        let queue = CompletionQueue::new(&device, CompletionMode::Cooperative).unwrap();
        Self { queue, pool: pool.unwrap(), pd }
    }

    fn blank(&self, len: usize) -> BufMut {
        let mut buffer = self.pool.try_alloc(len).unwrap();
        buffer.fill(0);
        buffer
    }
}

fn connect(ends: [&QueuePair; 2], mtu: Mtu, options: &RetryConfig) {
    for (from, to) in [(ends[0], ends[1]), (ends[1], ends[0])] {
        let mut endpoint = to.endpoint();
        endpoint.mtu = mtu;
        from.connect_with(&endpoint, options).unwrap();
    }
}

enum Pending {
    Read(Read<BufMut>, usize),
    Receive(Recv<BufMut>, Vec<&'static [u8]>),
    Write(Write<BufMut>),
    Batch(BatchOp<BufMut>),
}

/// Memory that was handed back.
enum Returned {
    Buffer(BufMut),
    Storage(Vec<u8>),
}

impl Returned {
    fn bytes(&mut self) -> &mut [u8] {
        match self {
            Self::Buffer(buffer) => buffer,
            Self::Storage(bytes) => bytes,
        }
    }
}

#[derive(Default)]
struct Tally {
    done: AtomicU64,
    revoked: AtomicU64,
    failed: AtomicU64,
}

struct Run<'a> {
    network: &'a Network,
    tally: &'a Tally,
    random: Rng,
    returned: Vec<(Returned, u8)>,
}

impl Run<'_> {
    /// Polls a future that needs no more packets.
    fn finish<F: Future + Unpin>(&self, mut future: F) -> F::Output {
        for _ in 0..1000 {
            let context = &mut Context::from_waker(Waker::noop());
            if let Poll::Ready(output) = Pin::new(&mut future).poll(context) {
                return output;
            }
            self.network.step_until(self.network.now());
        }
        panic!("the future waits for packets");
    }

    /// Overwrites memory that an operation or lease has handed back.
    fn reuse(&mut self, mut memory: Returned) {
        let filler = self.random.u8(1..);
        memory.bytes().fill(filler);
        self.returned.push((memory, filler));
    }

    fn count(&self, kind: OpErrorKind) {
        let flushed = kind.status() == Some(WcStatus::WR_FLUSH_ERR);
        assert!(kind == REVOKED || kind.status().is_some(), "{kind}");
        let counter = if kind == REVOKED { &self.tally.revoked } else { &self.tally.failed };
        counter.fetch_add(u64::from(!flushed), Ordering::Relaxed);
    }

    fn ended<O: Revocable<Failure = OpError<BufMut>>>(&mut self, error: DeadlineError<O>) {
        self.count(error.kind());
        let buffer = error.into_buffer().unwrap_or_else(|| panic!("not revoked"));
        self.reuse(Returned::Buffer(buffer));
    }

    fn expire_all(&mut self, mut pending: Vec<Pending>) {
        self.random.shuffle(&mut pending);
        for operation in pending {
            let past = Instant::now();
            match operation {
                Pending::Read(read, at) => match self.finish(read.deadline(past)) {
                    Ok(buffer) => {
                        assert_eq!(buffer[..], noise()[at..at + buffer.len()]);
                        self.tally.done.fetch_add(1, Ordering::Relaxed);
                        self.reuse(Returned::Buffer(buffer));
                    }
                    Err(error) => self.ended(error),
                },
                Pending::Receive(receive, messages) => match self.finish(receive.deadline(past)) {
                    Ok(received) => {
                        assert!(messages.contains(&&received.buffer[..]));
                        self.tally.done.fetch_add(1, Ordering::Relaxed);
                        self.reuse(Returned::Buffer(received.buffer));
                    }
                    Err(error) => self.ended(error),
                },
                Pending::Write(write) => match self.finish(write.deadline(past)) {
                    Ok(buffer) => self.reuse(Returned::Buffer(buffer)),
                    Err(error) => self.ended(error),
                },
                Pending::Batch(batch) => {
                    let mut result = self.finish(batch.deadline(past)).unwrap();
                    let failures: Vec<_> =
                        result.results().iter().filter_map(|result| result.err()).collect();
                    failures.into_iter().for_each(|kind| self.count(kind));
                    let buffers: Vec<_> = result.drain().collect();
                    buffers.into_iter().for_each(|buffer| self.reuse(Returned::Buffer(buffer)));
                }
            }
        }
    }
}

/// Posts operations at `a`, and a message for each receive at `b`.
fn post(
    random: &mut Rng,
    mtu: Mtu,
    [a, b]: [(&Side, &QueuePair); 2],
    [read, written]: [RemoteRegion; 2],
) -> Vec<Pending> {
    let count = random.usize(1..6);
    let kinds: Vec<u8> = (0..count).map(|_| random.u8(..5)).collect();
    let mut sizes = || size(random, mtu, LARGEST).max(1);
    let messages: Vec<&[u8]> = (0..count).map(|at| &noise()[at..][..sizes()]).collect();
    let mut pending = Vec::new();
    for (at, kind) in kinds.into_iter().enumerate() {
        let (len, start) = (messages[at].len(), 64 * at);
        let source = read.slice(start as u64..(start + len) as u64).unwrap();
        let target = written.slice(..len as u64).unwrap();
        pending.push(match kind {
            0 | 1 => Pending::Read(a.1.read(a.0.blank(len), source), start),
            2 => {
                let receive = a.1.recv(a.0.blank(LARGEST));
                drop(b.1.send(b.0.pool.copy_from(messages[at]).unwrap()));
                Pending::Receive(receive, messages.clone())
            }
            3 => Pending::Write(a.1.write(a.0.pool.copy_from(messages[at]).unwrap(), target)),
            _ => {
                let mut batch = Batch::new();
                batch.read(a.0.blank(len), source).write(a.0.blank(len), target);
                Pending::Batch(a.1.post_batch(batch))
            }
        });
    }
    pending
}

fn run(seed: u64, tally: &Tally) {
    let mut random = Rng::with_seed(seed);
    let delay = [Duration::from_micros(3), Duration::from_millis(1), Duration::from_secs(3)];
    let delay = Duration::from_nanos(50)..delay[random.usize(..3)];
    let lossy = random.bool();
    let chance = if lossy { 0.05 } else { 0.0 };
    let faults = Faults::none().loss(chance).duplicate(chance).reorder(chance).delay(delay);
    let network = Network::simulated(seed, faults);
    let (a, b) = (Side::new(&network, "a"), Side::new(&network, "b"));
    let readable = ExposedRegion::new(&b.pd, noise()[..2 * LARGEST].to_vec(), Access::REMOTE_READ);
    let readable = readable.unwrap();
    let mtu = [Mtu::Mtu256, Mtu::Mtu1024, Mtu::Mtu4096][random.usize(..3)];
    let options =
        RetryConfig { timeout: AckTimeout::from_code(random.u8(8..22)), ..RetryConfig::default() };
    let mut run = Run { network: &network, tally, random, returned: Vec::new() };
    // Late packets find the queue pairs of all rounds.
    let (mut alive, mut silent): (Vec<[QueuePair; 2]>, Vec<Recv<BufMut>>) = Default::default();
    for _ in 0..4 {
        let ends = [&a, &b].map(|side| QueuePair::new(&side.pd, &side.queue).unwrap());
        connect([&ends[0], &ends[1]], mtu, &options);
        let written = ExposedRegion::new(&b.pd, vec![0_u8; LARGEST], Access::MW_BIND).unwrap();
        let leasing = ends[1].lease(&written, 0..LARGEST, Access::REMOTE_WRITE);
        let mut lease: Lease = run.finish(leasing).unwrap();
        let grants = [readable.grant(), lease.grant()];
        let pending = post(&mut run.random, mtu, [(&a, &ends[0]), (&b, &ends[1])], grants);
        for _ in 0..run.random.u32(..40) {
            network.step();
        }
        let lease_first = run.random.bool();
        let end_lease = |run: &mut Run<'_>| {
            lease.expire_at(Instant::now()).unwrap();
            assert!(lease.has_expired());
            let storage: Vec<u8> = written.into_storage().unwrap();
            run.reuse(Returned::Storage(storage));
        };
        if lease_first {
            end_lease(&mut run);
            run.expire_all(pending);
        } else {
            run.expire_all(pending);
            end_lease(&mut run);
        }
        if run.random.bool() {
            // Packets of the earlier connection must not reach the next one.
            ends.iter().for_each(|qp| qp.modify(&QpAttr::to_state(QpState::Reset)).unwrap());
            for qp in &ends {
                let again = QpAttr {
                    pkey_index: Some(0),
                    port: Some(tokio_rdma::types::PortNum(1)),
                    access: Some(Access::REMOTE_ALL),
                    ..QpAttr::to_state(QpState::Init)
                };
                qp.modify(&again).unwrap();
            }
            connect([&ends[0], &ends[1]], mtu, &options);
            silent.push(ends[0].recv(a.blank(LARGEST)));
        }
        alive.push(ends);
    }
    assert!(network.run_until_idle(network.now() + Duration::from_secs(3600)));
    for (memory, filler) in &mut run.returned {
        assert!(memory.bytes().iter().all(|byte| byte == filler), "changed after it was returned");
    }
    for mut receive in silent {
        let context = &mut Context::from_waker(Waker::noop());
        assert!(Pin::new(&mut receive).poll(context).is_pending());
    }
    drop(alive);
}

// Shows T1.
#[test]
fn late_packets_change_nothing_that_was_handed_back() {
    let tally = Tally::default();
    if seeds("late_packets_change_nothing_that_was_handed_back", 0.5, |seed, _| run(seed, &tally))
        .is_none()
    {
        return;
    }
    let Tally { done, revoked, failed } = tally;
    let [done, revoked, failed] = [done, revoked, failed].map(AtomicU64::into_inner);
    assert!(done > 0 && revoked > 0, "{done} done, {revoked} revoked, {failed} failed");
    println!("{done} done, {revoked} revoked, {failed} failed otherwise");
}

/// Deadlines expire while responses and messages arrive on other threads.
async fn race(mode: fn() -> CompletionMode, seed: u64) {
    const LEN: usize = 16384;
    let delay = Duration::from_micros(1)..Duration::from_micros(100);
    let network = Network::with_faults(seed, Faults::none().delay(delay));
    let [a, b] = ["a", "b"].map(|name| {
        let device = Device::software_in(&network, name).unwrap();
        let pd = device.protection_domain().unwrap();
        let pool = Pool::builder(&pd).buffer_size(LEN).buffers(8).growing(true).build().unwrap();
        Side { queue: CompletionQueue::new(&device, mode()).unwrap(), pool, pd }
    });
    let bytes = noise()[..LEN].to_vec();
    let readable = ExposedRegion::new(&b.pd, bytes.clone(), Access::REMOTE_READ).unwrap();
    let mut random = Rng::with_seed(seed);
    let (mut canaries, mut alive): (Vec<BufMut>, Vec<QueuePair>) = Default::default();
    let [mut done, mut revoked] = [0; 2];
    for _ in 0..ROUNDS {
        let ends = [&a, &b].map(|side| {
            let builder = QueuePair::builder(&side.pd, &side.queue);
            builder.max_send_wr(4).max_recv_wr(4).build().unwrap()
        });
        connect([&ends[0], &ends[1]], Mtu::Mtu1024, &RetryConfig::default());
        let receive = ends[0].recv(a.blank(LEN));
        let read = ends[0].read(a.blank(LEN), readable.grant());
        drop(ends[1].send(b.pool.copy_from(&bytes).unwrap()));
        let limit = Duration::from_micros(random.u64(..600));
        let (read, receive) = tokio::join!(read.within(limit), receive.within(limit));
        let read =
            read.map_err(|error| error.into_result().unwrap_or_else(|_| panic!("unrevoked")));
        let received = receive
            .map(|received| received.buffer)
            .map_err(|error| error.into_result().unwrap_or_else(|_| panic!("unrevoked")));
        for result in [read, received] {
            match result {
                Ok(buffer) => {
                    assert_eq!(buffer[..], bytes);
                    done += 1;
                }
                Err(error) => {
                    let kind = error.kind();
                    assert!(
                        kind == REVOKED || kind.status() == Some(WcStatus::WR_FLUSH_ERR),
                        "{kind}"
                    );
                    let mut buffer = error.into_buffer();
                    buffer.fill(0xc5);
                    canaries.push(buffer);
                    revoked += 1;
                }
            }
        }
        // Late packets find the latest queue pairs.
        alive.extend(ends);
        alive.drain(..alive.len().saturating_sub(8));
        let intact = canaries.iter().all(|buffer| buffer.iter().all(|&byte| byte == 0xc5));
        assert!(intact, "changed after it was returned");
        canaries.drain(..canaries.len().saturating_sub(8));
    }
    println!("{done} done, {revoked} revoked");
}

const ROUNDS: usize = 60;

// Shows T1.
#[test]
fn results_are_whole_or_revoked_while_packets_arrive() {
    let modes: [fn() -> CompletionMode; 3] = [
        || CompletionMode::Event,
        || CompletionMode::busy_poll().unwrap(),
        || CompletionMode::Hybrid,
    ];
    for (seed, mode) in (0..).zip(modes) {
        let mut runtime = tokio::runtime::Builder::new_multi_thread();
        let runtime = runtime.worker_threads(2).enable_all().build().unwrap();
        let racing = runtime
            .block_on(async { tokio::time::timeout(HANG, tokio::spawn(race(mode, seed))).await });
        racing.expect("the run hangs").unwrap();
    }
}

//! Awaited operations under faults. The test polls the tasks and advances the simulated time.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use fastrand::Rng;
use tokio_rdma::memory::HostMemory;
use tokio_rdma::op::{Atomic, BatchOp, Posting, Read, Received, Send};
use tokio_rdma::software::{LinkCounters, Network};
use tokio_rdma::types::{
    AckTimeout, AddressVector, Mtu, PortNum, Psn, QpAttr, QpState, RnrTimer, WcStatus,
};
use tokio_rdma::{
    Access, Batch, BufMut, CompletionMode, CompletionQueue, Device, ExposedRegion, Imm, Pool,
    ProtectionDomain, QueuePair, RemoteRegion, SharedReceiveQueue,
};

use super::campaign::{Trace, seeds};
use super::chance::{LARGEST, Mix, noise, size};

const STEPS: usize = 16;

#[derive(Debug, PartialEq, Eq)]
struct Outcome {
    hash: u64,
    now: Duration,
    link: LinkCounters,
    failed: usize,
    patient: bool,
    operations: usize,
}

type Task = Option<Pin<Box<dyn Future<Output = ()>>>>;

struct Count(AtomicU64);

impl Wake for Count {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

#[derive(Debug, Clone, Copy)]
struct Expected {
    bytes: &'static [u8],
    imm: Option<Imm>,
    written: Option<usize>,
}

/// One direction, from a sender to a receiver.
struct Direction {
    name: usize,
    messages: RefCell<Vec<Expected>>,
    /// The WRITEs to the peer's region: offset and contents.
    writes: RefCell<Vec<(usize, &'static [u8])>>,
    delivered: Cell<usize>,
    finished: Cell<bool>,
    failed: Cell<Option<WcStatus>>,
    chain: Cell<u64>,
    additions: Cell<u64>,
    operations: Cell<usize>,
}

struct World {
    random: RefCell<Rng>,
    trace: RefCell<Trace>,
    network: Network,
    mtu: Mtu,
    directions: Vec<Direction>,
    /// The previous values that additions returned, by target side.
    sums: [RefCell<Vec<u64>>; 2],
}

enum Pending {
    Sent(Send<BufMut>, &'static [u8]),
    Inline(Send<()>),
    Read(Read<BufMut>, &'static [u8]),
    Added(Atomic),
    Swapped(Atomic, u64),
    Batch(BatchOp<BufMut>, usize),
}

async fn pause() {
    let mut again = true;
    poll_fn(|context| {
        context.waker().wake_by_ref();
        if std::mem::take(&mut again) { Poll::Pending } else { Poll::Ready(()) }
    })
    .await;
}

/// Posts operations concurrently and awaits them in order.
async fn sender(
    world: Rc<World>,
    index: usize,
    [qp, peer]: [QueuePair; 2],
    pool: Pool,
    region: Rc<ExposedRegion>,
    counter: RemoteRegion,
) {
    let this = &world.directions[index];
    let grant = region.grant();
    let words = (8 * (2 + index)) as u64;
    let (mut pending, mut next, mut place) = (VecDeque::new(), 0, 256);
    let ahead = world.random.borrow_mut().usize(1..12);
    while next < STEPS || !pending.is_empty() {
        if next < STEPS && pending.len() < ahead {
            next += 1;
            let (kind, len, at, abandon, fence) = {
                let mut random = world.random.borrow_mut();
                let len = size(&mut random, world.mtu, LARGEST / 2);
                (
                    random.u8(..9),
                    len,
                    random.usize(..LARGEST),
                    random.u8(..8) == 0,
                    random.u8(..4) == 0,
                )
            };
            let bytes = &noise()[at..at + len];
            let qp = if fence { qp.fenced() } else { Posting::from(&qp) };
            let imm = Imm(next as u32);
            let remote = |place: usize| grant.slice(place as u64..(place + len) as u64).unwrap();
            let expect = |bytes, imm, written| {
                this.messages.borrow_mut().push(Expected { bytes, imm, written });
            };
            this.operations.set(this.operations.get() + 1);
            let operation = match kind {
                0 => {
                    expect(bytes, None, None);
                    Pending::Sent(qp.send(pool.copy_from(bytes).unwrap()), bytes)
                }
                1 => {
                    expect(bytes, Some(imm), None);
                    Pending::Sent(qp.with_imm(imm).send(pool.copy_from(bytes).unwrap()), bytes)
                }
                2 => {
                    let bytes = &bytes[..len.min(64)];
                    expect(bytes, None, None);
                    Pending::Inline(qp.send_inline(bytes))
                }
                3 | 4 => {
                    let (buffer, remote) = (pool.copy_from(bytes).unwrap(), remote(place));
                    this.writes.borrow_mut().push((place, bytes));
                    let operation = if kind == 3 {
                        Pending::Sent(qp.write(buffer, remote), bytes)
                    } else {
                        expect(bytes, Some(imm), Some(place));
                        Pending::Sent(qp.with_imm(imm).write(buffer, remote), bytes)
                    };
                    place += len;
                    operation
                }
                5 => {
                    // A READ returns the preceding WRITE, acknowledged or not.
                    let written = this.writes.borrow().last().copied();
                    let (at, bytes) = written.unwrap_or((0, &[]));
                    let remote = grant.slice(at as u64..(at + bytes.len()) as u64).unwrap();
                    Pending::Read(qp.read(pool.try_alloc(bytes.len()).unwrap(), remote), bytes)
                }
                6 => {
                    this.additions.set(this.additions.get() + 1);
                    Pending::Added(qp.fetch_add(counter, 1))
                }
                7 => {
                    let old = this.chain.replace(this.chain.get() + 1);
                    Pending::Swapped(
                        qp.compare_swap(grant.slice(words..words + 8).unwrap(), old, old + 1),
                        old,
                    )
                }
                _ => {
                    let mut batch = Batch::new();
                    let count = world.random.borrow_mut().usize(1..4);
                    batch.signal_every(world.random.borrow_mut().u32(..3));
                    for part in 0..count {
                        let bytes = &bytes[len * part / count..len * (part + 1) / count];
                        expect(bytes, None, None);
                        batch.send(pool.copy_from(bytes).unwrap());
                    }
                    Pending::Batch(qp.post_batch(batch), count)
                }
            };
            // A dropped operation is still executed.
            if !abandon {
                pending.push_back(operation);
            }
            continue;
        }
        let Some(oldest) = pending.pop_front() else { continue };
        let outcome = match oldest {
            Pending::Sent(operation, bytes) => match operation.await {
                Ok(buffer) => {
                    assert!(buffer[..] == *bytes, "the buffer is returned unchanged");
                    Ok(())
                }
                Err(error) => Err(error.kind()),
            },
            Pending::Inline(operation) => operation.await.map_err(|error| error.kind()),
            Pending::Read(operation, bytes) => match operation.await {
                Ok(buffer) => {
                    assert!(buffer[..] == *bytes, "READ returns the written bytes");
                    Ok(())
                }
                Err(error) => Err(error.kind()),
            },
            Pending::Added(operation) => match operation.await {
                Ok(old) => {
                    world.sums[1 - index % 2].borrow_mut().push(old);
                    Ok(())
                }
                Err(error) => Err(error.kind()),
            },
            Pending::Swapped(operation, expected) => match operation.await {
                Ok(old) => {
                    assert_eq!(old, expected, "each swap is executed once");
                    Ok(())
                }
                Err(error) => Err(error.kind()),
            },
            Pending::Batch(operation, count) => {
                let result = operation.await;
                assert_eq!(result.results().len(), count);
                let good = result.results().iter().take_while(|one| one.is_ok()).count();
                assert!(
                    result.results()[good..].iter().all(|one| one.is_err()),
                    "an operation succeeded after a failure"
                );
                result.into_buffers().map(|buffers| assert_eq!(buffers.len(), count))
            }
        };
        let now = world.network.now().as_nanos() as u64;
        let status = match outcome {
            Ok(()) => WcStatus::SUCCESS,
            Err(kind) => kind.status().unwrap_or_else(|| panic!("direction {}: {kind}", this.name)),
        };
        world.trace.borrow_mut().add(&[now, index as u64, next as u64, status.0.into()]);
        world.trace.borrow().print(|| format!("{now} ns, direction {index}: awaited, {status:?}"));
        match (this.failed.get(), status) {
            (None, WcStatus::SUCCESS) => {}
            (None, _) => {
                // An abandoned operation may have failed first, or the peer's direction.
                let known =
                    [WcStatus::RETRY_EXC_ERR, WcStatus::RNR_RETRY_EXC_ERR, WcStatus::WR_FLUSH_ERR];
                assert!(known.contains(&status), "{status:?}");
                this.failed.set(Some(status));
                // A service would notify the peer by other means.
                peer.modify(&QpAttr::to_state(QpState::Err)).unwrap();
                next = STEPS;
            }
            (Some(_), status) => {
                assert_eq!(status, WcStatus::WR_FLUSH_ERR, "operations after a failure are flushed")
            }
        }
    }
    this.finished.set(true);
}

async fn receiver(
    world: Rc<World>,
    index: usize,
    qp: QueuePair,
    pool: Pool,
    region: Rc<ExposedRegion>,
) {
    let this = &world.directions[index];
    let (many, lazy) = {
        let mut random = world.random.borrow_mut();
        (random.usize(1..10), random.u8(..40))
    };
    let mut posted = VecDeque::new();
    loop {
        while posted.len() < many {
            posted.push_back(qp.recv(pool.try_alloc(pool.buffer_size()).unwrap()));
        }
        let Some(oldest) = posted.pop_front() else { return };
        match oldest.await {
            Ok(received) => check(&world, this, &received, &region),
            Err(error) => {
                assert_eq!(error.kind().status(), Some(WcStatus::WR_FLUSH_ERR));
                break;
            }
        }
        while world.random.borrow_mut().u8(..40) < lazy {
            pause().await;
        }
    }
    for rest in posted {
        assert_eq!(
            rest.await.unwrap_err().kind().status(),
            Some(WcStatus::WR_FLUSH_ERR),
            "flushed in order"
        );
    }
}

fn check(world: &World, this: &Direction, received: &Received<BufMut>, region: &ExposedRegion) {
    let number = this.delivered.get();
    this.delivered.set(number + 1);
    let expected =
        this.messages.borrow().get(number).copied().expect("a received message was sent");
    let now = world.network.now().as_nanos() as u64;
    world.trace.borrow_mut().add(&[
        now,
        this.name as u64,
        1 << 32 | number as u64,
        received.len as u64,
    ]);
    world.trace.borrow().print(|| {
        format!("{now} ns, direction {}: message {number}, {} bytes", this.name, received.len)
    });
    assert_eq!(received.len, expected.bytes.len(), "message {number} of direction {}", this.name);
    assert_eq!((received.imm, received.written), (expected.imm, expected.written.is_some()));
    if let Some(at) = expected.written {
        let mut found = vec![0; expected.bytes.len()];
        region.read(at, &mut found).unwrap();
        assert!(found == expected.bytes, "the bytes are written before the receive completes");
    } else {
        assert!(received.buffer[..] == *expected.bytes, "message {number} has wrong contents");
    }
}

/// Checks the messages of all directions that share a receive queue.
async fn shared_receiver(
    world: Rc<World>,
    srq: SharedReceiveQueue,
    qps: Vec<QueuePair>,
    pool: Pool,
    regions: Vec<Rc<ExposedRegion>>,
) {
    let many = world.random.borrow_mut().usize(1..8);
    let mut posted = VecDeque::new();
    loop {
        while posted.len() < many {
            posted.push_back(srq.recv(pool.try_alloc(pool.buffer_size()).unwrap()));
        }
        // Messages of different peers complete in any order.
        let result = poll_fn(|context| {
            for (place, one) in posted.iter_mut().enumerate() {
                if let Poll::Ready(result) = Pin::new(one).poll(context) {
                    return Poll::Ready((place, result));
                }
            }
            Poll::Pending
        });
        let (place, result) = result.await;
        drop(posted.remove(place));
        match result {
            Ok(received) => {
                let pair = qps.iter().position(|qp| qp.qpn() == received.qpn).unwrap();
                check(&world, &world.directions[2 * pair], &received, &regions[pair]);
            }
            Err(error) => assert_eq!(error.kind().status(), Some(WcStatus::WR_FLUSH_ERR)),
        }
    }
}

fn connect(random: &mut Rng, ends: [&QueuePair; 2], mtu: Mtu, patient: bool) {
    let psn = [0, 1].map(|_| Psn::new(0x100_0000 - random.u32(0..100)));
    let reads = random.u8(1..=16);
    for (this, side) in [(ends[0], 0), (ends[1], 1)] {
        let peer = ends[1 - side].endpoint();
        this.modify(&QpAttr {
            address: Some(AddressVector::new(PortNum(1), 0, peer.gid)),
            path_mtu: Some(mtu),
            dest_qpn: Some(peer.qpn),
            rq_psn: Some(psn[1 - side]),
            max_dest_rd_atomic: Some(reads),
            min_rnr_timer: Some(RnrTimer::from_code(random.u8(1..9))),
            ..QpAttr::to_state(QpState::Rtr)
        })
        .unwrap();
        this.modify(&QpAttr {
            sq_psn: Some(psn[side]),
            timeout: Some(AckTimeout::from_code(random.u8(5..9))),
            retry_count: Some(if patient { 7 } else { random.u8(..2) }),
            rnr_retry: Some(7),
            max_rd_atomic: Some(reads),
            ..QpAttr::to_state(QpState::Rts)
        })
        .unwrap();
    }
}

fn run(seed: u64, verbose: bool) -> Outcome {
    let mut random = Rng::with_seed(seed);
    let mix = Mix::draw(&mut random);
    let network = Network::simulated(seed, mix.faults(&mut random));
    let mtu = Mtu::ALL[random.usize(..5)];
    let patient = random.u8(..5) > 0;
    let pairs = random.usize(1..=2);
    let is_shared = random.u8(..4) == 0;
    let trace = Trace::new(verbose);
    trace.print(|| {
        format!(
            "seed {seed}: {mix:?}, {mtu:?}, {pairs} pairs, patient {patient}, shared {is_shared}"
        )
    });
    let devices = ["a", "b"].map(|name| Device::software_in(&network, name).unwrap());
    let pds: [ProtectionDomain; 2] =
        [0, 1].map(|side: usize| devices[side].protection_domain().unwrap());
    let queues = [0, 1].map(|side: usize| {
        CompletionQueue::new(&devices[side], CompletionMode::Cooperative).unwrap()
    });
    let pools = [0, 1].map(|side: usize| {
        Pool::builder(&pds[side]).buffer_size(LARGEST / 2).buffers(8).growing(true).build().unwrap()
    });
    let srq = is_shared
        .then(|| SharedReceiveQueue::new(&pds[1], &queues[1], random.u32(1..8), 1).unwrap());
    let mut qps: Vec<[QueuePair; 2]> = Vec::new();
    for _ in 0..pairs {
        let pair = [0, 1].map(|side: usize| {
            let mut builder = QueuePair::builder(&pds[side], &queues[side]);
            builder = builder.max_send_wr(random.u32(4..12));
            let receives = random.u32(1..12);
            let builder = match srq.as_ref().filter(|_| side == 1) {
                Some(srq) => builder.shared_receive_queue(srq),
                None => builder.max_recv_wr(receives),
            };
            builder.build().unwrap()
        });
        connect(&mut random, pair.each_ref(), mtu, patient);
        qps.push(pair);
    }
    let count = 2 * pairs;
    // Each direction has its own region. The first region of a side contains the counter.
    let area = STEPS * LARGEST / 2 + 256;
    let regions: Vec<_> = (0..count)
        .map(|index| {
            let memory = HostMemory::zeroed(area).unwrap();
            Rc::new(ExposedRegion::new(&pds[1 - index % 2], memory, Access::REMOTE_ALL).unwrap())
        })
        .collect();
    let directions = (0..count)
        .map(|name| Direction {
            name,
            messages: RefCell::default(),
            writes: RefCell::default(),
            delivered: Cell::new(0),
            finished: Cell::new(false),
            failed: Cell::new(None),
            chain: Cell::new(0),
            additions: Cell::new(0),
            operations: Cell::new(0),
        })
        .collect();
    let world = Rc::new(World {
        random: RefCell::new(random),
        trace: RefCell::new(trace),
        network: network.clone(),
        mtu,
        directions,
        sums: Default::default(),
    });
    let mut tasks: Vec<Task> = Vec::new();
    let mut senders = Vec::new();
    for index in 0..count {
        // Direction `index` sends from side `index % 2` to the other.
        let (pair, side) = (&qps[index / 2], index % 2);
        let (qp, peer, region) =
            (pair[side].clone(), pair[1 - side].clone(), regions[index].clone());
        senders.push(tasks.len());
        let counter = regions[side].grant().slice(0..8).unwrap();
        let ends = [qp, peer.clone()];
        tasks.push(Some(Box::pin(sender(
            world.clone(),
            index,
            ends,
            pools[side].clone(),
            region.clone(),
            counter,
        ))));
        if srq.is_none() || side == 1 {
            let pool = pools[1 - side].clone();
            tasks.push(Some(Box::pin(receiver(world.clone(), index, peer, pool, region))));
        }
    }
    if let Some(srq) = &srq {
        let here = qps.iter().map(|pair| pair[1].clone()).collect();
        let theirs = regions.iter().step_by(2).cloned().collect();
        tasks.push(Some(Box::pin(shared_receiver(
            world.clone(),
            srq.clone(),
            here,
            pools[1].clone(),
            theirs,
        ))));
    }
    let wakes = Arc::new(Count(AtomicU64::new(0)));
    let waker = Waker::from(wakes.clone());
    let poll = |tasks: &mut Vec<Task>| {
        for task in tasks.iter_mut() {
            if let Some(running) = task
                && running.as_mut().poll(&mut Context::from_waker(&waker)).is_ready()
            {
                *task = None;
            }
        }
    };
    let mut still = 0;
    let seen = |world: &World| -> (usize, u64) {
        let values =
            world.directions.iter().map(|one| one.delivered.get() + one.operations.get()).sum();
        (values, world.trace.borrow().hash())
    };
    let mut before = seen(&world);
    while senders.iter().any(|&task| tasks[task].is_some()) {
        poll(&mut tasks);
        let steps = world.random.borrow_mut().u8(1..30);
        let moved = (0..steps).filter(|_| network.step()).count();
        if mix == Mix::Changing && world.random.borrow_mut().u8(..20) == 0 {
            network.set_faults(mix.faults(&mut world.random.borrow_mut()));
        }
        // Receivers may pause for some rounds, so several idle rounds are no hang.
        let after = seen(&world);
        still = if moved == 0 && after == before { still + 1 } else { 0 };
        before = after;
        assert!(
            still < 5000,
            "hangs at {:?}, {} wakes",
            network.now(),
            wakes.0.load(Ordering::Relaxed)
        );
        assert!(network.now() < Duration::from_secs(100), "the run does not end");
    }
    // Dropped operations are executed.
    let mut still = 0;
    while still < 300 {
        let moved = (0..200).filter(|_| network.step()).count();
        poll(&mut tasks);
        let after = seen(&world);
        still = if moved == 0 && after == before { still + 1 } else { 0 };
        before = after;
        assert!(network.now() < Duration::from_secs(100), "the run does not end");
    }
    assert!(network.run_until_idle(Duration::ZERO));
    let hash = world.trace.borrow().hash();
    for (index, this) in world.directions.iter().enumerate() {
        let failed =
            this.failed.get().is_some() || world.directions[index ^ 1].failed.get().is_some();
        let is_err = qps[index / 2][index % 2].query().unwrap().0 == QpState::Err;
        assert!(this.finished.get());
        let word = regions[index].load(8 * (2 + index)).unwrap();
        if failed || is_err {
            assert!(this.delivered.get() <= this.messages.borrow().len());
            assert!(word <= this.chain.get());
            continue;
        }
        assert_eq!(this.delivered.get(), this.messages.borrow().len(), "direction {index}");
        assert_eq!(word, this.chain.get(), "direction {index}");
        for &(at, bytes) in this.writes.borrow().iter() {
            let mut found = vec![0; bytes.len()];
            regions[index].read(at, &mut found).unwrap();
            assert!(found == bytes, "direction {index}: WRITE at {at}");
        }
    }
    for side in 0..2 {
        let there = || world.directions.iter().skip(side).step_by(2);
        let (max, added) =
            (there().map(|one| one.additions.get()).sum::<u64>(), regions[side].load(0).unwrap());
        let mut found = world.sums[1 - side].borrow().clone();
        found.sort_unstable();
        assert!(
            found.windows(2).all(|two| two[0] < two[1])
                && found.last().is_none_or(|&last| last < added)
        );
        assert!((found.len() as u64..=max).contains(&added), "{added} of {max} additions");
        let failed = (side..count)
            .step_by(2)
            .any(|index| qps[index / 2][side].query().unwrap().0 == QpState::Err);
        assert!(failed || added == max, "each addition is executed once");
    }
    for pair in &qps {
        pair.iter().for_each(|qp| qp.modify(&QpAttr::to_state(QpState::Err)).unwrap());
    }
    for _ in 0..20 {
        poll(&mut tasks);
        network.run_until_idle(Duration::from_secs(1));
    }
    let left = tasks.iter().filter(|task| task.is_some()).count();
    assert_eq!(left, usize::from(is_shared), "all receives are flushed");
    tasks.clear();
    drop((qps, srq));
    for pool in &pools {
        assert_eq!(pool.available(), pool.total());
    }
    let failed = world.directions.iter().filter(|one| one.failed.get().is_some()).count();
    let operations = world.directions.iter().map(|one| one.operations.get()).sum();
    Outcome { hash, now: network.now(), link: network.counters(), failed, patient, operations }
}

// Shows C1.
#[test]
fn operations_complete_once_with_correct_results() {
    let test = "awaited::operations_complete_once_with_correct_results";
    let Some(outcomes) = seeds(test, 1.0, |seed, verbose| {
        let outcome = run(seed, verbose);
        if verbose || seed % 16 == 0 {
            assert_eq!(run(seed, false), outcome, "a seed determines the whole run");
        }
        outcome
    }) else {
        return;
    };
    let failed =
        |patient| outcomes.iter().filter(|one| one.patient == patient && one.failed > 0).count();
    let operations: usize = outcomes.iter().map(|one| one.operations).sum();
    println!(
        "{operations} operations; {} patient seeds failed, {} others",
        failed(true),
        failed(false)
    );
    if outcomes.len() >= 500 {
        assert!(failed(true) * 100 <= outcomes.len() && failed(false) > 0);
    }
}

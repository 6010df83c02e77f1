//! Shared pools on a device with streams: a failure affects the peers of one stream only.

use tokio_rdma::dc::{DcPolicy, DcPool, DcPoolPeer, PooledOperation};
use tokio_rdma::error::TryError;
use tokio_rdma::op::{BatchResult, ConnectOptions, Write};
use tokio_rdma::types::{Qpn, WcStatus};
use tokio_rdma::{Batch, BufMut, OpErrorKind};

use super::{Home, Node, options, setup, unblock, until};
use crate::common::{Wire, in_every_mode, within};

in_every_mode!(
    dead_peer_fails_alone,
    failures_in_a_row_affect_one_peer,
    dropped_operations_end_with_their_stream,
    lease_ends_although_its_stream_is_reset,
    initiator_whose_streams_all_fail_is_repaired,
    failure_in_a_full_queue_is_of_its_own_stream,
);

const FLUSHED: Option<WcStatus> = Some(WcStatus::WR_FLUSH_ERR);

struct World {
    home: Home,
    there: Node,
    pool: DcPool,
    free: usize,
    initiators: Vec<Qpn>,
}

impl World {
    /// Returns `None`, and reports it, on a device without streams.
    fn new(test: &str, mode: &str, initiators: usize) -> Option<Self> {
        let setup = setup(test)?;
        let (home, there) = (Home::new(&setup.a, mode), Node::new(&setup.b, mode));
        if home.streams() == 0 {
            assert!(crate::wire() != Wire::Emulated, "the emulated device has streams");
            crate::common::skipped(&format!("{test}: {} has no DC streams", setup.a.name()));
            return None;
        }
        let pool = home.pool(initiators, DcPolicy::Shared);
        let free = home.buffers.available();
        let initiators = qpns(&pool);
        Some(Self { home, there, pool, free, initiators })
    }

    fn peer(&self) -> DcPoolPeer {
        self.pool.peer(&self.there.target.address()).unwrap()
    }

    fn write(&self, peer: &DcPoolPeer, at: usize) -> PooledOperation<Write<BufMut>> {
        peer.write(self.home.buffer(&[at as u8 + 1]), self.there.remote(at, 1))
    }

    /// Posts a write that the target refuses.
    fn bad(&self, peer: &DcPoolPeer) -> PooledOperation<Write<BufMut>> {
        peer.write(self.home.buffer(b"bad"), self.there.forbidden())
    }

    fn bytes(&self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.there.region.read(0, &mut bytes).unwrap();
        bytes
    }

    /// Asserts that all work has ended, and that only streams were reset, not initiators.
    async fn assert_kept(&self, resets: u64) {
        self.is_idle().await;
        until("reset streams", || self.pool.counters().stream_resets >= resets).await;
        let counters = self.pool.counters();
        assert_eq!(
            (counters.stream_resets, counters.repairs, counters.failed_repairs),
            (resets, 0, 0),
            "{counters:?}"
        );
        assert_eq!(qpns(&self.pool), self.initiators);
    }

    async fn is_idle(&self) {
        until("an idle pool", || {
            let counters = self.pool.counters();
            counters.initiators.iter().all(|(_, queue)| queue.in_flight == 0 && queue.waiting == 0)
                && self.home.buffers.available() == self.free
                && counters.waiting_peers == 0
        })
        .await;
    }
}

fn qpns(pool: &DcPool) -> Vec<Qpn> {
    pool.counters().initiators.iter().map(|&(qpn, _)| qpn).collect()
}

fn statuses(batch: BatchResult<BufMut>) -> Vec<Option<WcStatus>> {
    let status = |result: &Result<(), OpErrorKind>| match result {
        Ok(()) => None,
        Err(OpErrorKind::Completion(error)) => Some(error.status),
        Err(other) => panic!("{other}"),
    };
    batch.results().iter().map(status).collect()
}

async fn status(write: PooledOperation<Write<BufMut>>) -> Option<WcStatus> {
    let error = within("failing write", write).await.unwrap_err();
    assert!(error.status().is_some(), "{error}");
    error.status()
}

/// Posts writes to a peer without a target between the writes to other peers.
async fn dead_peer_fails_alone(mode: &str) {
    const ROUNDS: usize = 3;
    let Some(world) = World::new("dead_peer_fails_alone", mode, 2) else { return };
    let gone = Node::within(&world.home.pd, &world.home.queue);
    let dead = world.pool.peer(&gone.target.address()).unwrap();
    drop(gone);
    let good: Vec<_> = (1..2 * world.home.streams()).map(|_| world.peer()).collect();
    for round in 0..ROUNDS {
        let (first, others) = good.split_at(good.len() / 2);
        let mut completes: Vec<_> =
            first.iter().enumerate().map(|(at, peer)| world.write(peer, at)).collect();
        // In one batch, so that its first failure cannot be noticed before the rest is posted.
        let mut batch = Batch::new();
        for _ in 0..4 {
            batch.write(world.home.buffer(b"x"), world.there.remote(200, 1));
        }
        let fails = dead.post_batch(batch);
        completes.extend((first.len()..).zip(others).map(|(at, peer)| world.write(peer, at)));
        completes.extend(good.iter().enumerate().map(|(at, peer)| world.write(peer, at)));
        for write in completes {
            within("good write", write).await.unwrap();
        }
        let statuses = statuses(within("dead batch", fails).await);
        assert_ne!(statuses[0], FLUSHED, "round {round}");
        assert_eq!(statuses[1..], [FLUSHED; 3]);
        let expected: Vec<u8> = (0..good.len()).map(|at| at as u8 + 1).collect();
        assert_eq!(world.bytes(good.len()), expected);
        world.assert_kept(round as u64 + 1).await;
    }
    assert_eq!(world.bytes(201)[200], 0);
    let failed: u32 = world.pool.counters().initiators.iter().map(|(_, queue)| queue.failed).sum();
    assert_eq!(failed, 4 * ROUNDS as u32);
}

async fn failures_in_a_row_affect_one_peer(mode: &str) {
    const ROUNDS: usize = 20;
    let Some(world) = World::new("failures_in_a_row", mode, 1) else { return };
    let peers: Vec<_> = (0..world.home.streams().min(4)).map(|_| world.peer()).collect();
    for round in 0..ROUNDS {
        let culprit = &peers[round % peers.len()];
        let beside = |peer: &&DcPoolPeer| !std::ptr::eq(*peer, culprit);
        let mut batch = Batch::new();
        batch.write(world.home.buffer(b"bad"), world.there.forbidden());
        for at in 0..3 {
            batch.write(world.home.buffer(b"x"), world.there.remote(100 + at, 1));
        }
        let failing = culprit.post_batch(batch);
        let others: Vec<_> = peers.iter().filter(beside).map(|peer| world.write(peer, 7)).collect();
        for write in others {
            within("write beside", write).await.unwrap();
        }
        // Half of the rounds leave the failure to others.
        if round % 2 == 0 {
            let statuses = statuses(within("failing batch", failing).await);
            assert_eq!(statuses[0], Some(WcStatus::REM_ACCESS_ERR));
            assert_eq!(statuses[1..], [FLUSHED; 3]);
        } else {
            drop(failing);
            world.assert_kept(round as u64 + 1).await;
        }
        // On another stream, or on the same after its reset.
        within("next write", world.write(culprit, round)).await.unwrap();
        world.assert_kept(round as u64 + 1).await;
    }
    let bytes = world.bytes(103);
    assert_eq!(bytes[..ROUNDS], (1..=ROUNDS as u8).collect::<Vec<_>>());
    assert_eq!(bytes[100..], [0; 3]);
}

/// Drops futures before their stream fails, while it is flushed, and after.
async fn dropped_operations_end_with_their_stream(mode: &str) {
    let Some(world) = World::new("dropped_operations", mode, 1) else { return };
    let (one, other) = (world.peer(), world.peer());
    for round in 0..10 {
        let failing = world.bad(&one);
        // Flushed, or executed in another stream if the failure is noticed between the calls.
        let kept: Vec<_> = (0..12).map(|_| world.write(&one, 50)).collect();
        let beside = world.write(&other, round);
        let failing = if round % 3 == 0 {
            drop(failing);
            None
        } else {
            Some(failing)
        };
        let mut kept = kept.into_iter();
        drop(kept.nth(round));
        if let Some(failing) = failing {
            assert_eq!(status(failing).await, Some(WcStatus::REM_ACCESS_ERR));
        }
        drop(kept);
        within("write beside", beside).await.unwrap();
        world.assert_kept(round as u64 + 1).await;
        within("next write", world.write(&one, 20 + round)).await.unwrap();
    }
    let bytes = world.bytes(30);
    assert_eq!(bytes[..10], (1..=10).collect::<Vec<u8>>());
    assert_eq!(bytes[20..], (21..=30).collect::<Vec<u8>>());
}

async fn lease_ends_although_its_stream_is_reset(mode: &str) {
    let Some(world) = World::new("lease_ends", mode, 1) else { return };
    let (one, other) = (world.peer(), world.peer());
    for round in 0..5 {
        let lease = within("lease", one.borrow()).await.unwrap();
        let beside = within("lease", other.borrow()).await.unwrap();
        let bad = lease.write_inline(b"bad", world.there.forbidden());
        within("bad write", bad).await.unwrap_err();
        world.assert_kept(round + 1).await;
        let remote = world.there.remote(0, 1);
        let late = lease.write(world.home.buffer(b"x"), remote);
        assert_eq!(within("late write", late).await.unwrap_err().status(), FLUSHED);
        let refused = lease.try_write(world.home.buffer(b"x"), remote).unwrap_err();
        assert!(
            matches!(&refused, TryError::Refused(error) if error.status() == FLUSHED),
            "{refused}"
        );
        drop(refused);
        let mut batch = Batch::new();
        batch.write(world.home.buffer(b"x"), remote);
        let batch = within("late batch", lease.post_batch(batch)).await;
        assert!(matches!(batch.results(), [Err(OpErrorKind::Completion(error))]
                if error.status == WcStatus::WR_FLUSH_ERR));
        drop(batch);
        let again = within("lease", one.borrow()).await.unwrap();
        for lease in [&again, &beside] {
            within("write", lease.write_inline(b"y", world.there.remote(1, 1))).await.unwrap();
        }
    }
    assert_eq!(world.bytes(2), b"\0y");
    world.assert_kept(5).await;
}

/// Fails one stream after another without a restoration between, until the device may fail the
/// initiator. Later work waits for the repair.
async fn initiator_whose_streams_all_fail_is_repaired(mode: &str) {
    let Some(world) = World::new("streams_all_fail", mode, 1) else { return };
    let peers: Vec<_> = (0..world.home.streams()).map(|_| world.peer()).collect();
    for _ in 0..3 {
        let failing: Vec<_> = peers.iter().chain(&peers).map(|peer| world.bad(peer)).collect();
        for write in failing {
            status(write).await;
        }
        for (at, peer) in peers.iter().enumerate() {
            // The device may fail the initiator before the pool notices.
            for attempt in 0.. {
                match within("write", world.write(peer, at)).await {
                    Ok(_) => break,
                    Err(error) => assert_eq!(error.status(), FLUSHED, "{error}"),
                }
                assert!(attempt < 1000, "the initiator stays failed");
            }
        }
        world.is_idle().await;
        let expected: Vec<u8> = (0..peers.len()).map(|at| at as u8 + 1).collect();
        assert_eq!(world.bytes(peers.len()), expected);
    }
    let counters = world.pool.counters();
    assert!(counters.repairs + counters.stream_resets >= 3, "{counters:?}");
    assert_eq!(counters.failed_repairs, 0, "{counters:?}");
}

/// Fails the first work request of a full send queue, while writes to another peer are queued. Its
/// completion makes the pool post one of these.
async fn failure_in_a_full_queue_is_of_its_own_stream(mode: &str) {
    let Some(world) = World::new("failure_in_a_full_queue", mode, 1) else { return };
    let pool = DcPool::builder(&world.home.pd, &world.home.queue)
        .initiators(1)
        .policy(DcPolicy::Shared)
        .initiator(|each| each.options(options()).max_send_wr(4))
        .build()
        .unwrap();
    let peer = || pool.peer(&world.there.target.address()).unwrap();
    for round in 1..=5 {
        let (bad, good) = (peer(), peer());
        let failing = world.bad(&bad);
        let writes: Vec<_> = (0..40).map(|at| world.write(&good, at)).collect();
        assert_eq!(status(failing).await, Some(WcStatus::REM_ACCESS_ERR));
        for write in writes {
            within("write beside", write).await.unwrap();
        }
        assert!(bad.has_failed() && !good.has_failed(), "{bad:?}, {good:?}");
        until("reset", || pool.counters().stream_resets == round).await;
        within("next write", world.write(&bad, 0)).await.unwrap();
    }
    assert_eq!(pool.counters().repairs, 0);
}

/// Sends to a peer that has no receive at first.
#[test]
fn revived_peer_works() {
    crate::common::run(1, "revived peer", async {
        let Some(world) = World::new("revived_peer_works", "event", 1) else { return };
        let pool = DcPool::builder(&world.home.pd, &world.home.queue)
            .initiators(1)
            .policy(DcPolicy::Shared)
            .initiator(|each| each.options(ConnectOptions { rnr_retry: 1, ..options() }))
            .build()
            .unwrap();
        let address = world.there.target.address();
        let [silent, other] = [0, 1].map(|_| pool.peer(&address).unwrap());
        for round in 1..=5 {
            let send = silent.send_inline(b"lost");
            let add = other.fetch_add(world.there.word(0), 1);
            assert_eq!(within("add", add).await.unwrap(), round - 1);
            let error = within("send", send).await.unwrap_err();
            assert_eq!(error.status(), Some(WcStatus::RNR_RETRY_EXC_ERR));
            let receive = world.there.srq.recv(world.there.buffers.try_alloc(64).unwrap());
            within("send", silent.send_inline(b"found")).await.unwrap();
            assert_eq!(&within("receive", receive).await.unwrap().buffer[..], b"found");
            until("reset", || pool.counters().stream_resets == round).await;
        }
        assert_eq!(pool.counters().repairs, 0);
    });
}

#[test]
fn peers_take_free_streams_of_all_initiators() {
    crate::common::run(1, "free streams", async {
        const INITIATORS: usize = 3;
        let Some(world) = World::new("free_streams", "event", INITIATORS) else { return };
        let peers: Vec<_> = (0..INITIATORS * world.home.streams()).map(|_| world.peer()).collect();
        // One at a time: the initiators are idle, so their load does not distribute the peers.
        for peer in &peers {
            within("write", world.write(peer, 0)).await.unwrap();
        }
        for culprit in [0, peers.len() / 2, peers.len() - 1] {
            let failing = world.bad(&peers[culprit]);
            let others = peers.iter().enumerate().filter(|&(at, _)| at != culprit);
            let writes: Vec<_> = others.map(|(at, peer)| world.write(peer, at)).collect();
            for write in writes {
                within("write beside", write).await.unwrap();
            }
            status(failing).await;
        }
        world.assert_kept(3).await;
    });
}

#[test]
fn peers_beyond_the_streams_share_them_evenly() {
    crate::common::run(1, "shared streams", async {
        const SHARE: usize = 3;
        let Some(world) = World::new("shared_streams", "event", 1) else { return };
        let streams = world.home.streams();
        let peers: Vec<_> = (0..SHARE * streams).map(|_| world.peer()).collect();
        for round in 0..5 {
            let culprit = round * 7 % peers.len();
            let failing = world.bad(&peers[culprit]);
            let others = peers.iter().enumerate().filter(|&(at, _)| at != culprit);
            let writes: Vec<_> = others.map(|(at, peer)| world.write(peer, at)).collect();
            let mut flushed = 0;
            for write in writes {
                if let Err(error) = within("write beside", write).await {
                    assert_eq!(error.status(), FLUSHED);
                    flushed += 1;
                }
            }
            assert!(flushed < 2 * SHARE, "{flushed} of {} were flushed", peers.len());
            assert_eq!(status(failing).await, Some(WcStatus::REM_ACCESS_ERR));
            // No peer stays on a failed stream.
            for (at, peer) in peers.iter().enumerate() {
                within("write", world.write(peer, at)).await.unwrap();
            }
            world.assert_kept(round as u64 + 1).await;
        }
    });
}

/// Flushes work of one stream behind blocked work of another one, so the reset waits. The peer
/// continues on a third stream.
#[test]
fn peer_does_not_wait_for_the_reset_of_its_stream() {
    crate::common::run(1, "no wait", async {
        let Some(world) = World::new("no_wait", "event", 2) else { return };
        if world.home.streams() < 3 {
            crate::common::skipped("streams: too few of them");
            return;
        }
        let pool = world.home.pool(1, DcPolicy::Shared);
        let address = world.there.target.address();
        let [one, blocked] = [0, 1].map(|_| pool.peer(&address).unwrap());
        let failing = world.bad(&one);
        // Not polled yet: that could take the failure before the next write is posted.
        let blocking = blocked.send_inline(b"blocks");
        let behind = world.write(&one, 60);
        assert_eq!(status(failing).await, Some(WcStatus::REM_ACCESS_ERR));
        let lease = within("lease", one.borrow()).await.unwrap();
        let next = lease.write(world.home.buffer(b"n"), world.there.remote(61, 1));
        assert_eq!((pool.counters().stream_resets, pool.counters().waited), (0, 0));
        unblock(&world.there).await;
        within("blocked send", blocking).await.unwrap();
        assert_eq!(status(behind).await, FLUSHED);
        within("next write", next).await.unwrap();
        assert_eq!(world.bytes(62)[60..], [0, b'n']);
        until("reset", || pool.counters().stream_resets == 1).await;
        // The lease is on the other stream.
        within("lease", lease.write_inline(b"m", world.there.remote(61, 1))).await.unwrap();
    });
}

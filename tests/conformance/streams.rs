//! Streams of DC initiators: a failure affects the peers of one stream only.

use tokio_rdma::dc::{DcAddress, DcInitiator, DcPeer, DcTarget};
use tokio_rdma::memory::HostMemory;
use tokio_rdma::types::{DcKey, QpState, WcStatus};
use tokio_rdma::{Access, Batch, Device, ExposedRegion, OpErrorKind, RemoteRegion};

use super::dynamic::{Node, assert_works, brief_options, setup, state};
use crate::common::{Wire, in_every_mode, pattern, run, within};

const FLUSHED: Option<WcStatus> = Some(WcStatus::WR_FLUSH_ERR);

/// An initiator with streams, a target, and the memory of both.
struct World {
    initiator: DcInitiator,
    here: Node,
    there: Node,
}

impl World {
    /// Returns `None`, and reports it, on a device without streams.
    fn new(test: &str, mode: &str) -> Option<Self> {
        Self::sized(test, mode, 128)
    }

    fn sized(test: &str, mode: &str, max_send_wr: u32) -> Option<Self> {
        let setup = setup(test)?;
        let has_streams = |device: &Device| device.attr().dc.is_some_and(|dc| dc.streams.is_some());
        if !has_streams(&setup.a) {
            assert!(crate::wire() != Wire::Emulated, "the emulated device has streams");
            crate::common::skipped(&format!("{test}: {} has no DC streams", setup.a.name()));
            return None;
        }
        let (here, there) = (Node::new(&setup.a, mode), Node::new(&setup.b, mode));
        let initiator = DcInitiator::builder(&here.pd, &here.queue)
            .options(brief_options())
            .max_send_wr(max_send_wr)
            .build()
            .unwrap();
        assert!(initiator.streams().unwrap() >= 2);
        Some(Self { initiator, here, there })
    }

    fn peer(&self) -> DcPeer {
        self.initiator.peer(&self.there.target.address()).unwrap()
    }

    fn with_wrong_key(&self) -> DcPeer {
        let address = self.there.target.address();
        self.initiator.peer(&DcAddress { key: DcKey(!address.key.0), ..address }).unwrap()
    }

    fn without_target(&self) -> DcPeer {
        let dropped = DcTarget::new(&self.there.pd, &self.there.srq).unwrap();
        self.initiator.peer(&dropped.address()).unwrap()
    }

    /// Waits until the peer's stream is restored: until then, operations fail as flushed.
    async fn is_restored(&self, peer: &DcPeer) {
        for _ in 0..10_000 {
            let write = self.initiator.to(peer).write_inline(b"x", self.there.remote(0, 1));
            match within("write", write).await {
                Ok(()) => return,
                Err(error) => assert_eq!(error.status(), FLUSHED, "{error}"),
            }
            tokio::task::yield_now().await;
        }
        panic!("the stream stays failed");
    }

    fn works(&self) {
        assert_eq!(state(&self.initiator), QpState::Rts);
        assert!(!self.initiator.repair().unwrap());
    }
}

/// Returns the key of memory that is not registered any more.
fn stale(node: &Node) -> RemoteRegion {
    let memory = HostMemory::zeroed(64).unwrap();
    ExposedRegion::new(&node.pd, memory, Access::REMOTE_ALL).unwrap().grant()
}

in_every_mode!(bad_peers_fail_alone, failed_stream_works_again, queued_work_of_others_is_executed);

async fn bad_peers_fail_alone(mode: &str) {
    let Some(world) = World::new("bad_peers_fail_alone", mode) else { return };
    let World { initiator, here, there } = &world;
    let good = [world.peer(), world.peer()];
    for bad in [world.with_wrong_key(), world.without_target()] {
        let bytes = pattern(64, 7);
        let (mut completes, mut fails) = (Vec::new(), Vec::new());
        for at in 0..8 {
            for (peer, place) in good.iter().zip([0, 1024]) {
                let remote = there.remote(place + 64 * at, 64);
                completes.push(initiator.to(peer).write(here.buffer(&bytes), remote));
            }
            fails.push(initiator.to(&bad).write(here.buffer(&bytes), there.remote(4096, 64)));
        }
        for operation in completes {
            within("good", operation).await.unwrap();
        }
        let mut statuses = Vec::new();
        for operation in fails {
            let error = within("bad", operation).await.unwrap_err();
            statuses.push(error.status());
            assert_eq!(&error.into_buffer()[..], bytes);
        }
        assert_ne!(statuses[0], FLUSHED);
        assert!(statuses[0].is_some());
        assert_eq!(statuses[1..], [FLUSHED; 7]);
        assert_eq!(there.bytes(0, 512), bytes.repeat(8));
        assert_eq!(there.bytes(1024, 512), bytes.repeat(8));
        assert_eq!(there.bytes(4096, 64), [0; 64]);
        world.works();
    }
    assert_works(here, initiator, &good[0], there, 9).await;
    assert_eq!(here.pool.available(), 64);
}

async fn failed_stream_works_again(mode: &str) {
    let Some(world) = World::new("failed_stream_works_again", mode) else { return };
    let World { initiator, here, there } = &world;
    let (one, other) = (world.peer(), world.peer());
    for round in 0..20_u8 {
        let failing = initiator.to(&one).write(here.buffer(b"x"), stale(there));
        let behind = initiator.to(&one).write(here.buffer(b"y"), there.remote(100, 1));
        let beside = initiator.to(&other).write(here.buffer(&[round]), there.remote(200, 1));
        // Half of the rounds leave the flush to others.
        if round % 2 == 0 {
            assert_eq!(within("behind", behind).await.unwrap_err().status(), FLUSHED);
        } else {
            drop(behind);
        }
        within("beside", beside).await.unwrap();
        let error = within("failing", failing).await.unwrap_err();
        assert_eq!(error.status(), Some(WcStatus::REM_ACCESS_ERR));
        world.is_restored(&one).await;
        assert_works(here, initiator, &one, there, round).await;
        assert_eq!((there.bytes(100, 1), there.bytes(200, 1)), (vec![0], vec![round]));
        world.works();
    }
    assert_eq!(initiator.counters().in_flight, 0);
}

// The send queue is too small: most work waits in a queue of this crate.
async fn queued_work_of_others_is_executed(mode: &str) {
    let Some(world) = World::sized("queued_work_of_others_is_executed", mode, 4) else { return };
    let World { initiator, here, there } = &world;
    let (good, bad) = (world.peer(), world.with_wrong_key());
    let (mut completes, mut fails) = (Vec::new(), Vec::new());
    for at in 0..24 {
        let remote = there.remote(at, 1);
        completes.push(initiator.to(&good).write(here.buffer(&[at as u8 + 1]), remote));
        fails.push(initiator.to(&bad).write(here.buffer(b"x"), there.remote(100, 1)));
    }
    let mut batch = Batch::new();
    for at in 24..27 {
        batch.write(here.buffer(&[at as u8 + 1]), there.remote(at, 1));
    }
    let batch = initiator.to(&good).post_batch(batch);
    for operation in completes {
        within("good", operation).await.unwrap();
    }
    assert!(within("batch", batch).await.is_ok());
    for operation in fails {
        within("bad", operation).await.unwrap_err();
    }
    assert_eq!(there.bytes(0, 27), (1..28).collect::<Vec<u8>>());
    assert_eq!(there.bytes(100, 1), [0]);
    world.works();
}

#[test]
fn failed_batch_affects_its_stream_only() {
    run(1, "batch", async {
        let Some(world) = World::new("failed_batch_affects_its_stream_only", "event") else {
            return;
        };
        let World { initiator, here, there } = &world;
        let (one, other) = (world.peer(), world.peer());
        let mut batch = Batch::new();
        batch
            .write(here.buffer(b"a"), there.remote(0, 1))
            .write(here.buffer(b"b"), stale(there))
            .write(here.buffer(b"c"), there.remote(2, 1));
        let failing = initiator.to(&one).post_batch(batch);
        let mut batch = Batch::new();
        batch
            .write(here.buffer(b"d"), there.remote(3, 1))
            .write(here.buffer(b"e"), there.remote(4, 1));
        let beside = initiator.to(&other).post_batch(batch);
        assert!(within("beside", beside).await.is_ok());
        let results = within("failing", failing).await;
        let statuses: Vec<_> = results
            .results()
            .iter()
            .map(|part| match part {
                Ok(()) => None,
                Err(OpErrorKind::Completion(error)) => Some(error.status),
                Err(other) => panic!("{other}"),
            })
            .collect();
        let (refused, flushed) = (WcStatus::REM_ACCESS_ERR, WcStatus::WR_FLUSH_ERR);
        assert_eq!(statuses, [None, Some(refused), Some(flushed)]);
        drop(results);
        assert_eq!(there.bytes(0, 5), b"a\0\0de");
        world.is_restored(&one).await;
        world.works();
        assert_eq!(here.pool.available(), 64);
    });
}

#[test]
fn later_peer_works_on_the_stream_of_a_failed_one() {
    run(1, "same stream", async {
        let Some(world) = World::new("later_peer_works_on_the_stream_of_a_failed_one", "event")
        else {
            return;
        };
        let World { initiator, here, there } = &world;
        let streams = initiator.streams().unwrap();
        // All streams but one have a peer, so the next peer gets that one each time.
        let peers: Vec<_> = (1..streams).map(|_| world.peer()).collect();
        for seed in 0..3 {
            let bad = world.with_wrong_key();
            let write = initiator.to(&bad).write(here.buffer(b"x"), there.remote(0, 1));
            within("bad", write).await.unwrap_err();
            drop(bad);
            let good = world.peer();
            world.is_restored(&good).await;
            assert_works(here, initiator, &good, there, seed).await;
        }
        for peer in &peers {
            assert_works(here, initiator, peer, there, 9).await;
        }
        world.works();
    });
}

#[test]
fn peers_beyond_the_streams_share_them() {
    run(1, "shared streams", async {
        let Some(world) = World::new("peers_beyond_the_streams_share_them", "event") else {
            return;
        };
        let World { initiator, here, there } = &world;
        let streams = usize::from(initiator.streams().unwrap());
        let peers: Vec<_> = (0..2 * streams).map(|_| world.peer()).collect();
        let failing = initiator.to(&peers[0]).write(here.buffer(b"x"), stale(there));
        let others: Vec<_> = (1..2 * streams)
            .map(|at| initiator.to(&peers[at]).write(here.buffer(&[1]), there.remote(at, 1)))
            .collect();
        within("failing", failing).await.unwrap_err();
        let mut flushed = Vec::new();
        for (at, other) in (1..).zip(others) {
            if let Err(error) = within("other", other).await {
                assert_eq!(error.status(), FLUSHED);
                flushed.push(at);
            }
        }
        assert_eq!(flushed, [streams], "the peer that shares the stream");
        world.is_restored(&peers[streams]).await;
        for peer in [&peers[0], &peers[streams]] {
            assert_works(here, initiator, peer, there, 3).await;
        }
        world.works();
    });
}

#[test]
fn initiator_whose_streams_all_fail_is_repaired() {
    run(1, "all streams", async {
        let Some(world) = World::new("initiator_whose_streams_all_fail_is_repaired", "event")
        else {
            return;
        };
        let World { initiator, here, there } = &world;
        let limits = there.pd.device().attr().dc.unwrap().streams.unwrap();
        let streams = initiator.streams().unwrap();
        if 1 << limits.max_log_errored > streams {
            crate::common::skipped("streams: all of them may fail");
            return;
        }
        let peers: Vec<_> = (0..streams).map(|_| world.peer()).collect();
        // In one batch of posts, so that no stream is restored before the last one fails.
        let mut failing = Vec::new();
        for _ in 0..2 {
            for peer in &peers {
                failing.push(initiator.to(peer).write(here.buffer(b"x"), stale(there)));
            }
        }
        for operation in failing {
            within("failing", operation).await.unwrap_err();
        }
        if state(initiator) == QpState::Err {
            let write = initiator.to(&peers[1]).write(here.buffer(b"x"), there.remote(0, 1));
            assert_eq!(within("late", write).await.unwrap_err().status(), FLUSHED);
            assert!(initiator.repair().unwrap());
        }
        for peer in &peers {
            world.is_restored(peer).await;
            assert_works(here, initiator, peer, there, 3).await;
        }
        world.works();
    });
}

#[test]
fn reset_restores_failed_streams() {
    run(1, "reset", async {
        let Some(world) = World::new("reset_restores_failed_streams", "event") else { return };
        let World { initiator, here, there } = &world;
        let (one, other) = (world.peer(), world.peer());
        for seed in 0..5 {
            let failing: Vec<_> =
                (0..8).map(|_| initiator.to(&one).write(here.buffer(b"x"), stale(there))).collect();
            let beside = initiator.to(&other).write(here.buffer(b"y"), there.remote(0, 1));
            initiator.reset().unwrap();
            for operation in failing {
                let error = within("failing", operation).await.unwrap_err();
                assert!(
                    error.status().is_some() || matches!(error.kind(), OpErrorKind::Closed),
                    "{error}"
                );
            }
            _ = within("beside", beside).await;
            assert_works(here, initiator, &one, there, seed).await;
            assert_works(here, initiator, &other, there, seed).await;
        }
        world.works();
    });
}

#[test]
fn peer_of_another_initiator_uses_a_stream_of_this_one() {
    run(1, "another initiator", async {
        let Some(world) = World::new("peer_of_another_initiator", "event") else { return };
        let World { initiator, here, there } = &world;
        let plain = DcInitiator::builder(&here.pd, &here.queue).streams(false).build().unwrap();
        assert_eq!(plain.streams(), None);
        let second = DcInitiator::new(&here.pd, &here.queue).unwrap();
        let peers: Vec<_> = (0..initiator.streams().unwrap()).map(|_| world.peer()).collect();
        let last = peers.last().unwrap();
        for (seed, initiator) in [initiator, &plain, &second].into_iter().enumerate() {
            let without = plain.peer(&there.target.address()).unwrap();
            assert_works(here, initiator, last, there, seed as u8).await;
            assert_works(here, initiator, &without, there, seed as u8 + 10).await;
        }
    });
}

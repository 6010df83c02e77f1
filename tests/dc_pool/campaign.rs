//! Random operations, abandoned at random, with errors among them: nothing is lost, nobody hangs, all goes on afterwards.

use std::sync::Arc;
use std::time::Duration;

use tokio_rdma::dc::{DcPolicy, DcPoolPeer};
use tokio_rdma::{Batch, OpErrorKind, RemoteRegion};

use super::{Home, Node, exclusive, setup, until};
use crate::common::{in_every_mode, within};

in_every_mode!(operations_are_abandoned_in_every_way);

const PEERS: usize = 9;
const TASKS: usize = 6;
/// A release build runs all of them.
const ROUNDS: usize = if cfg!(debug_assertions) { 50 } else { 150 };

/// What the tasks share. Each peer has a word that counts.
struct Stage {
    peers: Vec<(DcPoolPeer, RemoteRegion)>,
    bad: (DcPoolPeer, RemoteRegion),
    buffers: tokio_rdma::Pool,
}

async fn operations_are_abandoned_in_every_way(mode: &str) {
    let Some(setup) = setup("operations_are_abandoned") else { return };
    let seed = match std::env::var("TOKIO_RDMA_SEED") {
        Ok(seed) => seed.parse().unwrap(),
        Err(_) => std::hash::BuildHasher::hash_one(&std::hash::RandomState::new(), 0),
    };
    // Shown if the test fails.
    eprintln!("TOKIO_RDMA_SEED={seed}");
    let (home, there) = (Home::new(&setup.a, mode), Node::new(&setup.b, mode));
    for (turn, policy) in [exclusive(1), exclusive(7), DcPolicy::Shared].into_iter().enumerate() {
        let pool = home.pool(3, policy);
        let peer = |_| pool.peer(&there.target.address()).unwrap();
        let stage = Arc::new(Stage {
            peers: (0..PEERS).map(|at| (peer(at), there.word(16 + at))).collect(),
            bad: (peer(0), there.forbidden()),
            buffers: home.buffers.clone(),
        });
        let free = home.buffers.available();
        for at in 0..PEERS {
            there.region.store(8 * (16 + at), 0).unwrap();
        }
        let tasks: Vec<_> = (0..TASKS)
            .map(|task| {
                let random = fastrand::Rng::with_seed(seed ^ (turn * TASKS + task) as u64);
                tokio::spawn(play(stage.clone(), random, policy))
            })
            .collect();
        let (mut called, mut done) = ([0; PEERS], [0; PEERS]);
        for task in tasks {
            let (some_called, some_done) = within("task", task).await.unwrap();
            for at in 0..PEERS {
                called[at] += some_called[at];
                done[at] += some_done[at];
            }
        }
        // Everybody is served, so nothing is in line or broken any more; behind all that was abandoned before.
        for (peer, word) in &stage.peers {
            let add = async {
                while let Err(error) = peer.fetch_add(*word, 0).await {
                    assert!(policy == DcPolicy::Shared, "{error}");
                }
            };
            within("add", add).await;
        }
        until("all is over", || {
            let counters = pool.counters();
            let idle = counters
                .initiators
                .iter()
                .all(|(_, queue)| queue.in_flight == 0 && queue.waiting == 0);
            idle && home.buffers.available() == free && counters.peers_in_line == 0
        })
        .await;
        for at in 0..PEERS {
            let value = there.region.load(8 * (16 + at)).unwrap();
            assert!(
                done[at] <= value && value <= called[at],
                "peer {at}: {} ≤ {value} ≤ {}",
                done[at],
                called[at]
            );
        }
        let counters = pool.counters();
        assert!(counters.repairs > 0 && counters.failed_repairs == 0, "{counters:?}");
    }
}

/// How often it asked each peer to add one, and how often it knows that this was done.
async fn play(
    stage: Arc<Stage>,
    mut random: fastrand::Rng,
    policy: DcPolicy,
) -> ([u64; PEERS], [u64; PEERS]) {
    let (mut called, mut done) = ([0; PEERS], [0; PEERS]);
    let mut kept = Vec::new();
    for _ in 0..ROUNDS {
        let at = random.usize(..PEERS);
        let (peer, word) = &stage.peers[at];
        let ended = |kind: Option<OpErrorKind>| {
            // Only who shares sees errors of others.
            assert!(kind.is_none() || policy == DcPolicy::Shared, "{kind:?}");
            kind.is_none()
        };
        match random.u8(..10) {
            0..4 => {
                called[at] += 1;
                kept.push((at, peer.fetch_add(*word, 1)));
            }
            4 if !kept.is_empty() => {
                let (at, add) = kept.swap_remove(random.usize(..kept.len()));
                done[at] +=
                    u64::from(ended(within("add", add).await.err().map(|error| error.kind())));
            }
            5 if !kept.is_empty() => drop(kept.swap_remove(random.usize(..kept.len()))),
            6 => {
                called[at] += 1;
                let wait = Duration::from_micros(random.u64(..50));
                if let Ok(result) = tokio::time::timeout(wait, peer.fetch_add(*word, 1)).await {
                    done[at] += u64::from(ended(result.err().map(|error| error.kind())));
                }
            }
            7 => {
                let stays = random.bool();
                if stays {
                    // Before it has the lease: what it waits for while it has one may be in line for what is lent.
                    for (at, add) in kept.drain(..) {
                        done[at] += u64::from(ended(
                            within("add", add).await.err().map(|error| error.kind()),
                        ));
                    }
                }
                let borrow = peer.borrow();
                if stays {
                    let lease = within("lease", borrow).await.unwrap();
                    for _ in 0..random.u8(1..5) {
                        called[at] += 1;
                        let add = lease.fetch_add(*word, 1);
                        if random.bool() {
                            done[at] += u64::from(ended(
                                within("add", add).await.err().map(|error| error.kind()),
                            ));
                        }
                    }
                }
            }
            8 => {
                let (bad, remote) = &stage.bad;
                if let Ok(buffer) = stage.buffers.copy_from(b"bad") {
                    let write = bad.write(buffer, *remote);
                    if random.bool() {
                        within("bad", write).await.unwrap_err();
                    }
                }
            }
            _ => {
                let mut batch = Batch::new();
                for _ in 0..random.u8(1..4) {
                    if let Ok(buffer) = stage.buffers.try_alloc(8) {
                        batch.read(buffer, *word);
                    }
                }
                let batch = peer.post_batch(batch);
                if random.bool() {
                    ended(
                        within("batch", batch)
                            .await
                            .results()
                            .iter()
                            .find_map(|result| result.err()),
                    );
                }
            }
        }
        if random.u8(..4) == 0 {
            tokio::task::yield_now().await;
        }
    }
    (called, done)
}

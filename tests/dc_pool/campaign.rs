//! Random operations, with errors, that are abandoned at random.

use std::sync::Arc;
use std::time::Duration;

use tokio_rdma::dc::{DcPolicy, DcPoolPeer};
use tokio_rdma::{Batch, OpErrorKind, RemoteRegion};

use super::{Home, Node, exclusive, setup, until};
use crate::common::{in_every_mode, within};

in_every_mode!(operations_abandoned_at_random_leave_the_pool_working);

const PEERS: usize = 9;
const TASKS: usize = 6;
const ROUNDS: usize = if cfg!(debug_assertions) { 50 } else { 150 };

/// The peers, each with a word that counts its additions.
struct Shared {
    peers: Vec<(DcPoolPeer, RemoteRegion)>,
    bad: (DcPoolPeer, RemoteRegion),
    buffers: tokio_rdma::Pool,
}

// Shows C3.
async fn operations_abandoned_at_random_leave_the_pool_working(mode: &str) {
    let Some(setup) = setup("operations_abandoned_at_random") else { return };
    let seed = match std::env::var("TOKIO_RDMA_SEED") {
        Ok(seed) => seed.parse().unwrap(),
        Err(_) => std::hash::BuildHasher::hash_one(&std::hash::RandomState::new(), 0),
    };
    eprintln!("TOKIO_RDMA_SEED={seed}");
    let (home, there) = (Home::new(&setup.a, mode), Node::new(&setup.b, mode));
    for (round, policy) in [exclusive(1), exclusive(7), DcPolicy::Shared].into_iter().enumerate() {
        let pool = home.pool(3, policy);
        let peer = |_| pool.peer(&there.target.address()).unwrap();
        let shared = Arc::new(Shared {
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
                let random = fastrand::Rng::with_seed(seed ^ (round * TASKS + task) as u64);
                tokio::spawn(run_task(shared.clone(), random, policy))
            })
            .collect();
        let (mut posted, mut done) = ([0; PEERS], [0; PEERS]);
        for task in tasks {
            let (task_posted, task_done) = within("task", task).await.unwrap();
            for at in 0..PEERS {
                posted[at] += task_posted[at];
                done[at] += task_done[at];
            }
        }
        // Each addition completes after the abandoned work of its peer, on a working initiator.
        for (peer, word) in &shared.peers {
            let add = async {
                while let Err(error) = peer.fetch_add(*word, 0).await {
                    assert!(policy == DcPolicy::Shared, "{error}");
                }
            };
            within("add", add).await;
        }
        until("an idle pool", || {
            let counters = pool.counters();
            let idle = counters
                .initiators
                .iter()
                .all(|(_, queue)| queue.in_flight == 0 && queue.waiting == 0);
            idle && home.buffers.available() == free && counters.waiting_peers == 0
        })
        .await;
        for at in 0..PEERS {
            let value = there.region.load(8 * (16 + at)).unwrap();
            assert!(
                done[at] <= value && value <= posted[at],
                "peer {at}: {} ≤ {value} ≤ {}",
                done[at],
                posted[at]
            );
        }
        let counters = pool.counters();
        assert!(counters.repairs > 0 && counters.failed_repairs == 0, "{counters:?}");
    }
}

/// Returns, per peer, the number of additions posted and of those known to have completed.
async fn run_task(
    shared: Arc<Shared>,
    mut random: fastrand::Rng,
    policy: DcPolicy,
) -> ([u64; PEERS], [u64; PEERS]) {
    let (mut posted, mut done) = ([0; PEERS], [0; PEERS]);
    let mut kept = Vec::new();
    for _ in 0..ROUNDS {
        let at = random.usize(..PEERS);
        let (peer, word) = &shared.peers[at];
        let check_result = |kind: Option<OpErrorKind>| {
            // Only peers that share an initiator see errors of others.
            assert!(kind.is_none() || policy == DcPolicy::Shared, "{kind:?}");
            kind.is_none()
        };
        match random.u8(..10) {
            0..4 => {
                posted[at] += 1;
                kept.push((at, peer.fetch_add(*word, 1)));
            }
            4 if !kept.is_empty() => {
                let (at, add) = kept.swap_remove(random.usize(..kept.len()));
                done[at] += u64::from(check_result(
                    within("add", add).await.err().map(|error| error.kind()),
                ));
            }
            5 if !kept.is_empty() => drop(kept.swap_remove(random.usize(..kept.len()))),
            6 => {
                posted[at] += 1;
                let wait = Duration::from_micros(random.u64(..50));
                if let Ok(result) = tokio::time::timeout(wait, peer.fetch_add(*word, 1)).await {
                    done[at] += u64::from(check_result(result.err().map(|error| error.kind())));
                }
            }
            7 => {
                let awaits = random.bool();
                if awaits {
                    // These operations could otherwise wait for the leased initiator.
                    for (at, add) in kept.drain(..) {
                        done[at] += u64::from(check_result(
                            within("add", add).await.err().map(|error| error.kind()),
                        ));
                    }
                }
                let borrow = peer.borrow();
                if awaits {
                    let lease = within("lease", borrow).await.unwrap();
                    for _ in 0..random.u8(1..5) {
                        posted[at] += 1;
                        let add = lease.fetch_add(*word, 1);
                        if random.bool() {
                            done[at] += u64::from(check_result(
                                within("add", add).await.err().map(|error| error.kind()),
                            ));
                        }
                    }
                }
            }
            8 => {
                let (bad, remote) = &shared.bad;
                if let Ok(buffer) = shared.buffers.copy_from(b"bad") {
                    let write = bad.write(buffer, *remote);
                    if random.bool() {
                        within("bad", write).await.unwrap_err();
                    }
                }
            }
            _ => {
                let mut batch = Batch::new();
                for _ in 0..random.u8(1..4) {
                    if let Ok(buffer) = shared.buffers.try_alloc(8) {
                        batch.read(buffer, *word);
                    }
                }
                let batch = peer.post_batch(batch);
                if random.bool() {
                    check_result(
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
    (posted, done)
}

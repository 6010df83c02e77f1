//! Many queue pairs on one completion queue. `cargo bench --bench many_queue_pairs` measures the
//! cost per operation.

use crate::torture::{self, Flavour, LONG, bounded, connect, device, scaled, soon};
use tokio_rdma::software::Network;
use tokio_rdma::{Access, CompletionMode, CompletionQueue, ExposedRegion, Pool, QueuePair};

/// Returns fewer than 10,000 on a real device, where the kernel creates each queue pair.
fn many() -> usize {
    scaled(10_000) as usize
}
const DEPTH: u32 = 2;

#[test]
fn ten_thousand_queue_pairs_share_one_completion_queue() {
    bounded("ten thousand queue pairs", 3 * LONG, || {
        Flavour::MultiThread.runtime().block_on(async {
            let (device, pd) = device(&Network::new());
            let count = many();
            let capacity = count as u32 * 2 * DEPTH;
            let queue = CompletionQueue::builder(&device)
                .capacity(capacity)
                .mode(CompletionMode::Event)
                .build()
                .unwrap();
            let make = || {
                QueuePair::builder(&pd, &queue)
                    .max_send_wr(DEPTH)
                    .max_recv_wr(DEPTH)
                    .build()
                    .unwrap()
            };
            let queue_pairs: Vec<_> = (0..count).map(|_| make()).collect();
            for two in queue_pairs.chunks(2) {
                connect(&two[0], &two[1]);
            }
            let region = ExposedRegion::new(&pd, vec![0; 8 * count], Access::REMOTE_ALL).unwrap();
            let pool = Pool::new(&pd, 8, 2 * count).unwrap();
            let remote = region.grant();

            for round in 1..=3_u64 {
                let receives: Vec<_> = queue_pairs
                    .iter()
                    .map(|queue_pair| queue_pair.recv(pool.try_alloc(8).unwrap()))
                    .collect();
                let works: Vec<_> = queue_pairs
                    .iter()
                    .enumerate()
                    .map(|(at, queue_pair)| {
                        let word = remote.slice(8 * at as u64..8 * at as u64 + 8).unwrap();
                        let add = queue_pair.fetch_add(word, at as u64);
                        let message =
                            pool.copy_from(&(round << 32 | at as u64).to_ne_bytes()).unwrap();
                        (add, queue_pair.send(message))
                    })
                    .collect();
                for (at, (add, send)) in works.into_iter().enumerate() {
                    assert_eq!(soon("an atomic", add).await.unwrap(), (round - 1) * at as u64);
                    soon("a send", send).await.unwrap();
                }
                for (at, receive) in receives.into_iter().enumerate() {
                    let received = soon("a receive", receive).await.unwrap();
                    let from = (at ^ 1) as u64;
                    assert_eq!(
                        received.buffer[..],
                        (round << 32 | from).to_ne_bytes(),
                        "a message of the connected queue pair"
                    );
                    assert_eq!(received.qpn, queue_pairs[at].qpn());
                }
            }
            for at in 0..count {
                assert_eq!(region.load(8 * at).unwrap(), 3 * at as u64);
            }
            for queue_pair in &queue_pairs {
                let (send, receive) = (queue_pair.send_counters(), queue_pair.receive_counters());
                assert_eq!((send.posted, send.in_flight, send.failed), (6, 0, 0));
                assert_eq!((receive.posted, receive.in_flight, receive.failed), (3, 0, 0));
            }
            assert_eq!((pool.available(), queue.counters().waiting), (pool.total(), 0));
            assert_eq!(queue.counters().reserved, capacity);
            drop(queue_pairs);
            assert_eq!(queue.counters().reserved, 0, "dropped queue pairs release their entries");
        });
    });
}

#[test]
fn one_driver_polls_for_all_tasks_of_a_cooperative_queue() {
    bounded("a driven queue", 3 * LONG, || {
        Flavour::CurrentThread.runtime().block_on(async {
            let (device, pd) = device(&Network::new());
            let queue = CompletionQueue::new(&device, CompletionMode::Cooperative).unwrap();
            let (ours, theirs) = torture::pair(&pd, &queue);
            let pool = Pool::new(&pd, 8, 64).unwrap();
            let echo = tokio::spawn({
                let pool = pool.clone();
                async move {
                    for _ in 0..100 {
                        let received = theirs.recv(pool.try_alloc(8).unwrap()).await.unwrap();
                        theirs.send(received.buffer).await.unwrap();
                    }
                }
            });
            let client = async {
                for round in 0..100_u64 {
                    let answer = ours.recv(pool.try_alloc(8).unwrap());
                    ours.send(pool.copy_from(&round.to_ne_bytes()).unwrap()).await.unwrap();
                    assert_eq!(answer.await.unwrap().buffer[..], round.to_ne_bytes());
                }
            };
            soon("the client", queue.drive(client)).await;
            soon("the server", echo).await.unwrap();
            assert_eq!((pool.available(), queue.counters().waiting), (pool.total(), 0));
        });
    });
}

// Shows C2.
#[test]
fn unpolled_driver_blocks_no_other_task() {
    bounded("an idle driver", 3 * LONG, || {
        Flavour::CurrentThread.runtime().block_on(async {
            let (device, pd) = device(&Network::new());
            let queue = CompletionQueue::new(&device, CompletionMode::Cooperative).unwrap();
            let (ours, theirs) = torture::pair(&pd, &queue);
            let pool = Pool::new(&pd, 8, 64).unwrap();
            let idle = queue.drive(std::future::pending::<()>());
            let receive = tokio::spawn(theirs.recv(pool.try_alloc(8).unwrap()));
            tokio::task::yield_now().await;
            soon("a send", ours.send(pool.try_alloc(8).unwrap())).await.unwrap();
            soon("a receive", receive).await.unwrap().unwrap();
            drop(idle);
        });
    });
}

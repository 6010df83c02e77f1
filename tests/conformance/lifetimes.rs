//! Every object can be dropped in any order, from any thread, with work in flight; nothing is left behind.

use std::any::Any;
use std::thread;

use tokio_rdma::software::Network;
use tokio_rdma::types::Transport;
use tokio_rdma::{Batch, CompletionQueue, Device, QueuePair, SharedReceiveQueue};

use crate::common::pair::{Pair, QKEY, Shape};
use crate::common::{MODES, Memory, Setup, mode as mode_of, run};

type Things = Vec<Box<dyn Any + Send>>;

/// Two ends with work in flight of every kind, as a heap of things.
fn everything(setup: Setup, mode: &str, transport: Transport) -> Things {
    let build = |builder: tokio_rdma::op::QueuePairBuilder| builder.max_send_wr(8).max_recv_wr(4);
    let Pair { a, b, setup } =
        Pair::shaped(setup, &Shape { build: &build, ..Shape::new(transport, mode) });
    let mut things: Things = Vec::new();
    let region = b.region(4096);
    let grant = region.grant();
    if transport == Transport::Ud {
        let route = a.route_to(&b);
        for _ in 0..3 {
            things.push(Box::new(a.qp.send_to(a.room(8), &route, b.qp.qpn(), QKEY)));
        }
        things.push(Box::new(route));
    } else {
        // The first finds no receive, so all behind it stays in flight or in line.
        things.push(Box::new(a.qp.send(a.room(8))));
        things.push(Box::new(a.qp.write(vec![a.room(8), a.room(8)], grant)));
        things.push(Box::new(a.qp.read(a.room(64), grant)));
        things.push(Box::new(a.qp.fetch_add(grant.slice(..8).unwrap(), 1)));
        let mut batch = Batch::new();
        for _ in 0..6 {
            batch.write(a.room(8), grant);
        }
        things.push(Box::new(a.qp.post_batch(batch)));
        drop(a.qp.send(a.room(8)));
    }
    for _ in 0..6 {
        things.push(Box::new(a.qp.recv(a.room(8))));
    }
    let srq = SharedReceiveQueue::new(&b.pd, &b.queue, 4, 1).unwrap();
    for _ in 0..6 {
        things.push(Box::new(srq.recv(b.room(8))));
    }
    let sharing = QueuePair::builder(&b.pd, &b.queue)
        .max_send_wr(4)
        .shared_receive_queue(&srq)
        .build()
        .unwrap();
    let buffer = b.buffer(b"shared").freeze();
    things.push(Box::new(buffer.clone()));
    things.push(Box::new(bytes::Bytes::from(buffer)));
    let memory = Memory::new(&a.pd, 64);
    things.push(Box::new(memory.0.slice(0..8).unwrap()));
    things.push(Box::new(memory.0));
    if transport != Transport::Ud && a.pd.device().attr().max_mw > 0 {
        let leased = Memory::with(&a.pd, 64, tokio_rdma::Access::MW_BIND);
        for _ in 0..4 {
            things.push(Box::new(a.qp.lease(&leased.0, 0..64, tokio_rdma::Access::REMOTE_ALL)));
        }
        drop(a.qp.lease(&leased.0, 0..64, tokio_rdma::Access::REMOTE_ALL));
        things.push(Box::new(leased.0));
    }
    things.push(Box::new(region));
    things.push(Box::new((sharing, a.qp.clone())));
    things.push(Box::new(srq));
    let (first, second) = (a, b);
    for side in [first, second] {
        things.push(Box::new(side.qp));
        things.push(Box::new(side.queue));
        things.push(Box::new(side.pool));
        things.push(Box::new(side.pd));
    }
    things.push(Box::new(setup.a.clone()));
    things.push(Box::new(setup));
    things
}

fn software() -> (Setup, Network) {
    let network = crate::common::network();
    (Setup::in_network(&network), network)
}

/// Nobody has the device open any more: all that was made of it is gone. The thread of a poller may be the last
/// to look at a queue.
fn assert_nothing_left(network: &Network, what: &str) {
    crate::common::eventually(what, || network.control("both").is_none().then_some(()));
}

#[test]
fn any_order_on_one_thread_leaves_nothing_behind() {
    for mode in MODES {
        for transport in [Transport::Rc, Transport::Uc, Transport::Ud] {
            for seed in 0..8 {
                let what = format!("{mode}, {transport:?}, seed {seed}");
                run(1, &what, async {
                    let (setup, network) = software();
                    let mut things = everything(setup, mode, transport);
                    fastrand::Rng::with_seed(seed).shuffle(&mut things);
                    for thing in things {
                        drop(thing);
                        tokio::task::yield_now().await;
                    }
                    assert_nothing_left(&network, &what);
                });
            }
        }
    }
}

#[test]
fn any_order_on_many_threads_leaves_nothing_behind() {
    for mode in MODES {
        for seed in 0..8 {
            let what = format!("{mode}, seed {seed}");
            let (setup, network) = software();
            // The futures are made within a runtime and dropped outside of it.
            let mut things = None;
            run(2, &what, async { things = Some(everything(setup, mode, Transport::Rc)) });
            let mut things = things.unwrap();
            fastrand::Rng::with_seed(seed).shuffle(&mut things);
            let mut hands: [Things; 4] = Default::default();
            for (at, thing) in things.into_iter().enumerate() {
                hands[at % 4].push(thing);
            }
            let threads: Vec<_> =
                hands.into_iter().map(|hand| thread::spawn(move || drop(hand))).collect();
            threads.into_iter().for_each(|thread| thread.join().unwrap());
            assert_nothing_left(&network, &what);
        }
    }
}

#[test]
fn device_killed_under_everything_lets_go_of_everything() {
    for mode in MODES {
        for seed in 0..4 {
            let what = format!("{mode}, seed {seed}");
            run(2, &what, async {
                let (setup, network) = software();
                let mut things = everything(setup, mode, Transport::Rc);
                network.control("both").unwrap().kill();
                fastrand::Rng::with_seed(seed).shuffle(&mut things);
                drop(things);
                tokio::task::yield_now().await;
                assert_nothing_left(&network, &what);
                assert!(Device::software_in(&network, "both").is_ok(), "and a new one can be made");
            });
        }
    }
}

#[test]
fn queue_that_outlives_its_queue_pairs_has_its_room_back() {
    let setup = Setup::new();
    let pd = setup.a.protection_domain().unwrap();
    let queue = CompletionQueue::builder(&setup.a)
        .capacity(64)
        .mode(mode_of("cooperative"))
        .build()
        .unwrap();
    for round in 0..50 {
        let qp = QueuePair::builder(&pd, &queue).max_send_wr(16).max_recv_wr(16).build();
        let qp = qp.unwrap_or_else(|error| panic!("round {round}: {error}"));
        assert!(queue.counters().reserved > 0);
        drop(qp);
        assert_eq!(queue.counters().reserved, 0);
    }
}

//! Objects are dropped in any order and on any thread, with work in flight, without leaks.

use std::any::Any;
use std::thread;

use tokio_rdma::software::Network;
use tokio_rdma::types::Transport;
use tokio_rdma::{Batch, CompletionQueue, Device, QueuePair, SharedReceiveQueue};

use crate::common::pair::{Pair, QKEY, Shape};
use crate::common::{MODES, Memory, Setup, mode as mode_of, run};

type Objects = Vec<Box<dyn Any + Send>>;

fn everything(setup: Setup, mode: &str, transport: Transport) -> Objects {
    let build = |builder: tokio_rdma::op::QueuePairBuilder| builder.max_send_wr(8).max_recv_wr(4);
    let Pair { a, b, setup } =
        Pair::shaped(setup, &Shape { build: &build, ..Shape::new(transport, mode) });
    let mut objects: Objects = Vec::new();
    let region = b.region(4096);
    let grant = region.grant();
    if transport == Transport::Ud {
        let route = a.route_to(&b);
        for _ in 0..3 {
            objects.push(Box::new(a.qp.send_to(a.blank(8), &route, b.qp.qpn(), QKEY)));
        }
        objects.push(Box::new(route));
    } else {
        // The first send finds no receive, so the work after it stays in flight or queued.
        objects.push(Box::new(a.qp.send(a.blank(8))));
        objects.push(Box::new(a.qp.write(vec![a.blank(8), a.blank(8)], grant)));
        objects.push(Box::new(a.qp.read(a.blank(64), grant)));
        objects.push(Box::new(a.qp.fetch_add(grant.slice(..8).unwrap(), 1)));
        let mut batch = Batch::new();
        for _ in 0..6 {
            batch.write(a.blank(8), grant);
        }
        objects.push(Box::new(a.qp.post_batch(batch)));
        drop(a.qp.send(a.blank(8)));
    }
    for _ in 0..6 {
        objects.push(Box::new(a.qp.recv(a.blank(8))));
    }
    let srq = SharedReceiveQueue::new(&b.pd, &b.queue, 4, 1).unwrap();
    for _ in 0..6 {
        objects.push(Box::new(srq.recv(b.blank(8))));
    }
    let sharing = QueuePair::builder(&b.pd, &b.queue)
        .max_send_wr(4)
        .shared_receive_queue(&srq)
        .build()
        .unwrap();
    let buffer = b.buffer(b"shared").freeze();
    objects.push(Box::new(buffer.clone()));
    objects.push(Box::new(bytes::Bytes::from(buffer)));
    let memory = Memory::new(&a.pd, 64);
    objects.push(Box::new(memory.0.slice(0..8).unwrap()));
    objects.push(Box::new(memory.0));
    if transport != Transport::Ud && a.pd.device().attr().max_mw > 0 {
        let leased = Memory::with(&a.pd, 64, tokio_rdma::Access::MW_BIND);
        for _ in 0..4 {
            objects.push(Box::new(a.qp.lease(&leased.0, 0..64, tokio_rdma::Access::REMOTE_ALL)));
        }
        drop(a.qp.lease(&leased.0, 0..64, tokio_rdma::Access::REMOTE_ALL));
        objects.push(Box::new(leased.0));
    }
    objects.push(Box::new(region));
    objects.push(Box::new((sharing, a.qp.clone())));
    objects.push(Box::new(srq));
    let (first, second) = (a, b);
    for side in [first, second] {
        objects.push(Box::new(side.qp));
        objects.push(Box::new(side.queue));
        objects.push(Box::new(side.pool));
        objects.push(Box::new(side.pd));
    }
    objects.push(Box::new(setup.a.clone()));
    objects.push(Box::new(setup));
    objects
}

fn software() -> (Setup, Network) {
    let network = crate::common::network();
    (Setup::in_network(&network), network)
}

/// Waits until the device is closed. A polling thread may hold the last reference.
fn assert_nothing_left(network: &Network, what: &str) {
    crate::common::eventually(what, || network.control("both").is_none().then_some(()));
}

#[test]
fn objects_drop_in_any_order_on_one_thread() {
    for mode in MODES {
        for transport in [Transport::Rc, Transport::Uc, Transport::Ud] {
            for seed in 0..8 {
                let what = format!("{mode}, {transport:?}, seed {seed}");
                run(1, &what, async {
                    let (setup, network) = software();
                    let mut objects = everything(setup, mode, transport);
                    fastrand::Rng::with_seed(seed).shuffle(&mut objects);
                    for object in objects {
                        drop(object);
                        tokio::task::yield_now().await;
                    }
                    assert_nothing_left(&network, &what);
                });
            }
        }
    }
}

#[test]
fn objects_drop_in_any_order_on_many_threads() {
    for mode in MODES {
        for seed in 0..8 {
            let what = format!("{mode}, seed {seed}");
            let (setup, network) = software();
            // Futures are created in a runtime and dropped outside of it.
            let mut objects = None;
            run(2, &what, async { objects = Some(everything(setup, mode, Transport::Rc)) });
            let mut objects = objects.unwrap();
            fastrand::Rng::with_seed(seed).shuffle(&mut objects);
            let mut parts: [Objects; 4] = Default::default();
            for (at, object) in objects.into_iter().enumerate() {
                parts[at % 4].push(object);
            }
            let threads: Vec<_> =
                parts.into_iter().map(|part| thread::spawn(move || drop(part))).collect();
            threads.into_iter().for_each(|thread| thread.join().unwrap());
            assert_nothing_left(&network, &what);
        }
    }
}

#[test]
fn killed_device_releases_all_objects() {
    for mode in MODES {
        for seed in 0..4 {
            let what = format!("{mode}, seed {seed}");
            run(2, &what, async {
                let (setup, network) = software();
                let mut objects = everything(setup, mode, Transport::Rc);
                network.control("both").unwrap().kill();
                fastrand::Rng::with_seed(seed).shuffle(&mut objects);
                drop(objects);
                tokio::task::yield_now().await;
                assert_nothing_left(&network, &what);
                assert!(
                    Device::software_in(&network, "both").is_ok(),
                    "a new device can be created"
                );
            });
        }
    }
}

#[test]
fn dropped_queue_pair_frees_completion_queue_entries() {
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

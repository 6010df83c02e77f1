//! Traffic class, partition and other path settings of queue pairs and DC.

use tokio_rdma::PathConfig;
use tokio_rdma::dc::{DcInitiator, DcTarget};
use tokio_rdma::error::LimitError;
use tokio_rdma::types::{Mtu, StaticRate, Transport, WcStatus};
use tokio_rdma::{Device, QueuePair, SetupError};

use super::dynamic::{Node, brief_options, setup};
use crate::common::pair::{Pair, Shape};
use crate::common::{Setup, Wire, in_every_mode, run, rxe};

fn path() -> PathConfig {
    let path = PathConfig::default().dscp(26).service_level(3).hop_limit(8);
    path.max_mtu(Mtu::Mtu512).static_rate(StaticRate::GBPS_25)
}

in_every_mode! {
    connected_queue_pairs_have_the_path_of_their_settings,
    queue_pairs_take_a_partition_by_value_or_index,
    messages_reach_members_of_the_partition_only,
}

async fn connected_queue_pairs_have_the_path_of_their_settings(mode: &str) {
    for transport in [Transport::Rc, Transport::Uc] {
        let shape = Shape {
            build: &|builder| builder.path(path().flow_label(0xf_ffff)),
            ..Shape::new(transport, mode)
        };
        let pair = Pair::shaped(Setup::new(), &shape);
        for side in [&pair.a, &pair.b] {
            let attr = side.qp.query().unwrap().1;
            let address = attr.address.unwrap();
            assert_eq!((address.traffic_class, address.flow_label), (104, 0xf_ffff));
            let device = side.pd.device();
            if !rxe::known(device, &rxe::HOP_LIMIT_OF_ROUTE) {
                assert_eq!(address.hop_limit, 8);
            }
            if !rxe::known(device, &rxe::NO_SERVICE_LEVEL) {
                assert_eq!(address.service_level, 3);
            }
            if pair.setup.is_software() {
                assert_eq!(address.static_rate, StaticRate::GBPS_25);
            }
            assert_eq!(attr.path_mtu, Some(Mtu::Mtu512));
        }
        if transport == Transport::Rc {
            // Two packets of the limited MTU.
            let receive = pair.b.qp.recv(pair.b.blank(1024));
            pair.a.qp.send(pair.a.buffer(&[7; 1024])).await.unwrap();
            assert_eq!(receive.await.unwrap().buffer[..], [7; 1024]);
        }
    }
}

#[test]
fn path_out_of_range_is_refused_when_the_queue_pair_is_built() {
    let pair = Pair::new(Transport::Rc, "event");
    let build = |path| QueuePair::builder(&pair.a.pd, &pair.a.queue).path(path).build();
    let limit = LimitError { field: "dscp", asked: 64, allowed: 63 };
    assert_eq!(build(PathConfig::default().dscp(64)).unwrap_err(), SetupError::Limit(limit));
    let limit = LimitError { field: "service_level", asked: 16, allowed: 15 };
    let refused = build(PathConfig::default().service_level(16)).unwrap_err();
    assert_eq!(refused, SetupError::Limit(limit));
    let datagrams = QueuePair::builder(&pair.a.pd, &pair.a.queue).transport(Transport::Ud);
    let refused = datagrams.path(path()).build().unwrap_err();
    assert!(matches!(refused, SetupError::Unsupported { .. }), "{refused}");
}

#[test]
fn dc_peers_have_the_path_of_their_initiator() {
    let Some(setup) = setup("dc_peers_have_the_path_of_their_initiator") else { return };
    let (here, there) = (Node::new(&setup.a, "event"), Node::new(&setup.b, "event"));
    let initiator = DcInitiator::builder(&here.pd, &here.queue).path(path()).build().unwrap();
    let target = DcTarget::builder(&there.pd, &there.srq).path(path()).build().unwrap();
    assert_eq!((initiator.mtu(), target.address().mtu), (Mtu::Mtu512, Mtu::Mtu512));
    let peer = initiator.peer(&target.address()).unwrap();
    assert_eq!((peer.route().traffic_class, peer.route().hop_limit), (104, 8));
    run(1, "send", async {
        let receive = there.srq.recv(there.pool.try_alloc(1024).unwrap());
        initiator.to(&peer).send(here.pool.copy_from(&[7; 1024]).unwrap()).await.unwrap();
        assert_eq!(receive.await.unwrap().buffer[..], [7; 1024]);
    });
}

async fn queue_pairs_take_a_partition_by_value_or_index(mode: &str) {
    let device = Setup::new().a;
    let port = device.default_path().unwrap().0;
    let table = device.pkey_table(port.port).unwrap();
    let path = PathConfig::default();
    // Limited members do not reach each other, and an entry may be empty.
    for (index, &pkey) in table.iter().enumerate().filter(|(_, pkey)| **pkey > 0x8000) {
        let index = index as u16;
        for path in [path.pkey(pkey), path.pkey_index(index)] {
            let shape =
                Shape { build: &|builder| builder.path(path), ..Shape::new(Transport::Rc, mode) };
            let pair = Pair::shaped(Setup::new(), &shape);
            assert_eq!(pair.a.qp.query().unwrap().1.pkey_index, Some(index));
            let receive = pair.b.qp.recv(pair.b.blank(8));
            pair.a.qp.send(pair.a.buffer(&[7; 8])).await.unwrap();
            assert_eq!(receive.await.unwrap().buffer[..], [7; 8]);
        }
    }
}

#[test]
fn partition_that_the_table_lacks_is_refused_with_the_table() {
    let pair = Pair::new(Transport::Rc, "event");
    let device = pair.a.pd.device();
    let port = device.default_path().unwrap().0;
    let table = device.pkey_table(port.port).unwrap();
    let asked = (1..).find(|asked| table.iter().all(|pkey| pkey & 0x7fff != *asked)).unwrap();
    let missing = SetupError::NoPkey { port: port.port.0, asked, table };
    let allowed = u64::from(port.pkeys - 1);
    let limit = LimitError { field: "pkey_index", asked: allowed + 1, allowed };
    let path = PathConfig::default();
    for transport in [Transport::Rc, Transport::Uc, Transport::Ud] {
        let builder = QueuePair::builder(&pair.a.pd, &pair.a.queue).transport(transport);
        let build = |path| builder.clone().path(path).build();
        assert_eq!(build(path.pkey(asked)).unwrap_err(), missing);
        assert_eq!(build(path.pkey_index(port.pkeys)).unwrap_err(), SetupError::Limit(limit));
        assert!(build(path.pkey_index(0)).is_ok());
    }
}

fn bad_pkeys(device: &Device) -> u32 {
    device.default_path().unwrap().0.bad_pkeys
}

async fn messages_reach_members_of_the_partition_only(mode: &str) {
    let test = "messages_reach_members_of_the_partition_only";
    let Some((setup, ours, theirs)) = Setup::controlled(test) else { return };
    ours.set_pkeys(&[0xffff, 0x8001]);
    theirs.set_pkeys(&[0x0001, 0x8002]);
    let path = PathConfig::default().pkey(0x8001);
    let options = brief_options();
    let shape =
        Shape { options, build: &|builder| builder.path(path), ..Shape::new(Transport::Rc, mode) };
    let pair = Pair::shaped(setup, &shape);
    let receive = pair.b.qp.recv(pair.b.blank(8));
    // With losses, few retries may not suffice.
    if crate::wire() != Wire::Faults {
        pair.a.qp.send(pair.a.buffer(&[7; 8])).await.unwrap();
        assert_eq!(receive.await.unwrap().buffer[..], [7; 8]);
        assert_eq!((bad_pkeys(&pair.setup.a), bad_pkeys(&pair.setup.b)), (0, 0));
    }
    // Index 0 at both ends.
    let pair = Pair::shaped(pair.setup, &Shape { options, ..Shape::new(Transport::Rc, mode) });
    let failed = pair.a.qp.send(pair.a.buffer(&[7; 8])).await.unwrap_err();
    assert_eq!(failed.status(), Some(WcStatus::RETRY_EXC_ERR));
    assert_eq!(bad_pkeys(&pair.setup.a), 0);
    assert!(bad_pkeys(&pair.setup.b) > 0);
}

#[test]
fn dynamic_connections_have_the_partition_of_their_settings() {
    let test = "dynamic_connections_have_the_partition_of_their_settings";
    let Some((setup, ours, theirs)) = Setup::controlled(test) else { return };
    ours.set_pkeys(&[0xffff, 0x8001]);
    theirs.set_pkeys(&[0x8002, 0x0001]);
    let path = PathConfig::default().pkey(0x8001);
    let (here, there) = (Node::new(&setup.a, "event"), Node::new(&setup.b, "event"));
    let initiator = DcInitiator::builder(&here.pd, &here.queue).path(path).build().unwrap();
    let target = DcTarget::builder(&there.pd, &there.srq).path(path).build().unwrap();
    assert_eq!(target.query().unwrap().1.pkey_index, Some(1));
    let peer = initiator.peer(&target.address()).unwrap();
    run(1, "send", async {
        for _ in 0..2 {
            let receive = there.srq.recv(there.pool.try_alloc(8).unwrap());
            initiator.to(&peer).send(here.pool.copy_from(&[7; 8]).unwrap()).await.unwrap();
            assert_eq!(receive.await.unwrap().buffer[..], [7; 8]);
            // The partition outlives a reset.
            initiator.reset().unwrap();
        }
    });
    assert!(
        matches!(
            DcTarget::builder(&there.pd, &there.srq).path(path.pkey(0xffff)).build(),
            Err(SetupError::NoPkey { port: 1, asked: 0xffff, .. })
        ),
        "the table of the other device"
    );
}

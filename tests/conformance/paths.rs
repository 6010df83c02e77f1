//! Traffic class and other path settings of queue pairs and DC.

use tokio_rdma::PathConfig;
use tokio_rdma::dc::{DcInitiator, DcTarget};
use tokio_rdma::error::LimitError;
use tokio_rdma::types::{Mtu, Transport};
use tokio_rdma::{QueuePair, SetupError};

use super::dynamic::{Node, setup};
use crate::common::pair::{Pair, Shape};
use crate::common::{Setup, in_every_mode, run, rxe};

fn path() -> PathConfig {
    PathConfig::default().dscp(26).service_level(3).hop_limit(8).max_mtu(Mtu::Mtu512)
}

in_every_mode! {
    connected_queue_pairs_have_the_path_of_their_settings,
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

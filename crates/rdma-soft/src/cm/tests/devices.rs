//! Tests of ids and channels on a simulated network.

use std::time::Duration;

use rdma_provider::VerbError;
use rdma_provider::cm_contract::{CmChannel as _, CmEventKind, CmId as _};
use rdma_provider::contract::Context as _;
use rdma_provider::types::{QpState, RejectReason, Transport, check_transition};

use super::super::super::tests::over_udp;
use super::super::super::{Context, Faults, Network, Soft};
use super::super::agent;
use super::super::{CmChannel, CmId};
use super::*;
use crate::device::DeviceInner;

const LONG: Duration = Duration::from_secs(60);

struct World {
    network: Network,
    a: CmChannel,
    b: CmChannel,
    contexts: [Context; 2],
}

impl World {
    fn new(seed: u64, faults: Faults) -> Self {
        let network = Network::simulated(seed, faults);
        let contexts = [network.open("a").unwrap(), network.open("b").unwrap()];
        let channel = |context: &Context| context.create_cm_channel().unwrap();
        Self { a: channel(&contexts[0]), b: channel(&contexts[1]), network, contexts }
    }

    fn listen(&self, backlog: u32) -> (CmId, SocketAddr) {
        let id = self.b.create_id().unwrap();
        id.bind("127.0.0.1:0".parse().unwrap()).unwrap();
        id.listen(backlog).unwrap();
        let at = id.local_addr().unwrap();
        (id, at)
    }

    fn request(&self, to: SocketAddr, qpn: u32) -> CmId {
        let id = self.a.create_id().unwrap();
        id.resolve_addr(None, to, LONG).unwrap();
        assert!(matches!(self.next(&self.a, id.key()), CmEventKind::AddressResolved));
        id.resolve_route(LONG).unwrap();
        assert!(matches!(self.next(&self.a, id.key()), CmEventKind::RouteResolved));
        id.connect(&params(qpn, b"")).unwrap();
        id
    }

    /// Returns the next event of a channel, which must be for `key`.
    fn next(&self, channel: &CmChannel, key: u64) -> CmEventKind<Soft> {
        loop {
            if let Some(event) = channel.take_event().unwrap() {
                assert_eq!(event.key, key, "{:?}", event.kind);
                return event.kind;
            }
            assert!(self.network.step(), "the network is idle");
        }
    }

    fn nothing_left(&self) {
        assert!(self.network.run_until_idle(LONG));
        assert_eq!(self.network.0.ports.lock().taken(), 0);
        for name in ["a", "b"] {
            let gid = self.contexts[usize::from(name == "b")]
                .port(rdma_provider::types::PortNum(1))
                .unwrap()
                .gids[0]
                .gid;
            let device = DeviceInner::at(&self.network.0, gid).unwrap();
            assert_eq!(device.cm.sizes(), [0; 6], "{name}");
        }
    }
}

#[test]
fn attributes_match_the_state_transitions() {
    let world = World::new(1, Faults::none());
    let (listener, at) = world.listen(4);
    let ours = world.request(at, 0x100);
    let CmEventKind::ConnectRequest { id: theirs, .. } = world.next(&world.b, listener.key())
    else {
        panic!()
    };
    assert!(ours.qp_attr(QpState::Rtr).is_err(), "the peer is unknown");
    let check = |id: &CmId| {
        let mut from = QpState::Reset;
        for to in [QpState::Init, QpState::Rtr, QpState::Rts] {
            let attr = id.qp_attr(to).unwrap();
            check_transition(Transport::Rc, from, to, attr.mask()).unwrap();
            from = to;
        }
    };
    check(&theirs);
    theirs.accept(&params(0x200, b"")).unwrap();
    assert!(matches!(world.next(&world.a, ours.key()), CmEventKind::ConnectResponse(_)));
    check(&ours);
    ours.establish().unwrap();
    assert!(matches!(world.next(&world.b, theirs.key()), CmEventKind::Established));
    let (route, back) = (ours.route().unwrap(), theirs.route().unwrap());
    assert_eq!((route.source, route.destination), (back.destination, back.source));
    assert_eq!((ours.peer_addr(), theirs.local_addr()), (Some(at), Some(at)));
    assert_eq!(ours.local_addr(), theirs.peer_addr());
    assert_eq!((&*route.device, &*back.device), ("a", "b"));
    ours.disconnect().unwrap();
    assert!(matches!(world.next(&world.b, theirs.key()), CmEventKind::Disconnected));
    assert!(matches!(world.next(&world.a, ours.key()), CmEventKind::Disconnected));
    assert!(world.network.run_until_idle(LONG));
    ours.disconnect().unwrap();
    theirs.disconnect().unwrap();
    assert!(ours.qp_attr(QpState::Rts).is_err());
    drop((ours, theirs, listener));
    world.nothing_left();
}

#[test]
fn unread_events_and_requests_end_with_their_channel() {
    let world = World::new(2, Faults::none());
    let (listener, at) = world.listen(4);
    let ids: Vec<_> = (0..3).map(|number| world.request(at, 0x100 + number)).collect();
    let World { network, a, b, contexts } = world;
    while network.step() {
        if network.now() > Duration::from_millis(1) {
            break;
        }
    }
    drop((listener, b));
    assert!(network.run_until_idle(LONG));
    for id in &ids {
        let event = a.take_event().unwrap().unwrap();
        assert_eq!(event.key, id.key());
        assert!(matches!(event.kind, CmEventKind::Rejected { reason: RejectReason::CONSUMER, .. }));
    }
    drop(ids);
    let b = contexts[1].create_cm_channel().unwrap();
    World { network, a, b, contexts }.nothing_left();
}

#[test]
fn lost_device_notifies_every_id_and_refuses_calls() {
    let world = World::new(3, Faults::none());
    let (listener, at) = world.listen(4);
    let fresh = world.b.create_id().unwrap();
    let ours = world.request(at, 0x100);
    let CmEventKind::ConnectRequest { id: theirs, .. } = world.next(&world.b, listener.key())
    else {
        panic!()
    };
    world.network.control("b").unwrap().kill();
    for id in [&listener, &fresh, &theirs] {
        assert!(matches!(world.next(&world.b, id.key()), CmEventKind::DeviceRemoval));
    }
    for error in [
        theirs.accept(&params(1, b"")).unwrap_err(),
        theirs.disconnect().unwrap_err(),
        fresh.bind(at).unwrap_err(),
        fresh.resolve_addr(None, at, LONG).unwrap_err(),
        world.b.create_id().unwrap_err(),
    ] {
        assert_eq!(error.errno, VerbError::EIO);
    }
    assert!(matches!(world.next(&world.a, ours.key()), CmEventKind::Unreachable(110)));
    drop((ours, theirs, fresh, listener));
    assert!(world.network.run_until_idle(LONG));
    assert_eq!(world.network.0.ports.lock().taken(), 0);
}

#[test]
fn calls_in_the_wrong_order_are_refused() {
    let world = World::new(4, Faults::none());
    let (listener, at) = world.listen(1);
    let refused =
        |result: Result<(), VerbError>| assert_eq!(result.unwrap_err().errno, VerbError::EINVAL);
    refused(listener.bind(at));
    refused(listener.listen(1));
    refused(listener.resolve_addr(None, at, LONG));
    refused(listener.connect(&params(1, b"")));
    refused(listener.accept(&params(1, b"")));
    refused(listener.reject(b""));
    refused(listener.establish());
    refused(listener.disconnect());
    let id = world.a.create_id().unwrap();
    refused(id.listen(1));
    refused(id.resolve_route(LONG));
    refused(id.connect(&params(1, b"")));
    refused(id.resolve_addr(Some("[::1]:0".parse().unwrap()), at, LONG));
    assert_eq!((id.local_addr(), id.peer_addr(), id.route()), (None, None, None));
    id.resolve_addr(None, at, LONG).unwrap();
    refused(id.resolve_addr(None, at, LONG));
    refused(id.connect(&params(1, b"")));
    assert!(matches!(world.next(&world.a, id.key()), CmEventKind::AddressResolved));
    id.resolve_route(LONG).unwrap();
    refused(id.connect(&params(1, &[0; 57])));
    id.connect(&params(0x100, &[0; 56])).unwrap();
    refused(id.connect(&params(0x100, b"")));
    refused(id.establish());
    drop((id, listener));
    world.nothing_left();
}

#[test]
fn connections_over_faulty_network_are_reproducible() {
    let faults = Faults::none().loss(0.2).duplicate(0.2).reorder(0.2).corrupt(0.1);
    let faults = faults.delay(Duration::ZERO..Duration::from_millis(1));
    let run = |seed| {
        let world = World::new(seed, faults.clone());
        let (listener, at) = world.listen(3);
        let mut log = Vec::new();
        let mut ours: Vec<_> = (0..8).map(|number| world.request(at, 0x100 + number)).collect();
        let mut theirs = Vec::new();
        loop {
            while let Some(event) = world.b.take_event().unwrap() {
                log.push(format!(
                    "{:?} b {} {:?}",
                    world.network.now(),
                    event.key,
                    std::mem::discriminant(&event.kind)
                ));
                if let CmEventKind::ConnectRequest { id, .. } = event.kind {
                    id.accept(&params(0x200 + theirs.len() as u32, b"")).unwrap();
                    theirs.push(id);
                }
            }
            while let Some(event) = world.a.take_event().unwrap() {
                log.push(format!(
                    "{:?} a {} {:?}",
                    world.network.now(),
                    event.key,
                    std::mem::discriminant(&event.kind)
                ));
                let id = ours.iter().find(|id| id.key() == event.key);
                match event.kind {
                    CmEventKind::ConnectResponse(_) => id.unwrap().establish().unwrap(),
                    CmEventKind::Unreachable(_) | CmEventKind::Rejected { .. } => {
                        panic!("{log:#?}")
                    }
                    _ => {}
                }
            }
            if !world.network.step() {
                break;
            }
        }
        assert!(theirs.len() >= ours.len());
        assert_eq!(log.iter().filter(|line| line.contains(" a ")).count(), 8, "{log:#?}");
        let counters = world.network.counters();
        ours.clear();
        drop((theirs, listener));
        world.nothing_left();
        (log, counters)
    };
    let mut happened = [0; 3];
    for seed in 0..50 {
        let (first, second) = (run(seed), run(seed));
        assert_eq!(first, second, "seed {seed}");
        let counters = first.1;
        happened[0] += counters.lost;
        happened[1] += counters.duplicated;
        happened[2] += counters.rejected;
    }
    assert!(happened.iter().all(|&count| count > 0), "{happened:?}");
}

#[test]
fn request_with_foreign_source_address_leaves_no_state() {
    let network = over_udp(&["a", "b"]);
    let contexts = ["a", "b"].map(|name| network.open(name).unwrap());
    let [from, to] = contexts
        .each_ref()
        .map(|context| context.port(rdma_provider::types::PortNum(1)).unwrap().gids[0].gid);
    let channel = contexts[1].create_cm_channel().unwrap();
    let listener = channel.create_id().unwrap();
    listener.bind(SocketAddr::new(to.to_ip(), 0)).unwrap();
    listener.listen(4).unwrap();
    let device = DeviceInner::at(&network.0, to).unwrap();
    let request = |source: SocketAddr| {
        let mut machine = Machine::new(from, 1, Mtu::Mtu1024, 0x1111_2222_3333_4444);
        let there = listener.local_addr().unwrap();
        let route =
            Destination { gid: to, local: source, peer: there, mtu: Mtu::Mtu1024, pkey: 0xffff };
        machine.connect(0, route, &params(0x100, b""), Psn::new(1)).unwrap();
        let (_, mad) = Out::of(&mut machine).sent.remove(0);
        agent::on_datagram(&device, from, &mad.encode());
        channel.take_event().unwrap().map(|event| event.kind)
    };
    let other = request(address(1, 40_000));
    assert!(other.is_none(), "{other:?}");
    assert_eq!(device.cm.sizes()[..4], [0; 4]);
    let Some(CmEventKind::ConnectRequest { id, .. }) =
        request(SocketAddr::new(from.to_ip(), 40_000))
    else {
        panic!()
    };
    assert_eq!(id.peer_addr().unwrap().ip(), from.to_ip());
}

//! Two programs, each with its channel, over one real device: `scripts/rxe-vm cargo test --release
//! --features ibverbs --lib cm`.

use std::array;
use std::collections::{HashMap, VecDeque};
use std::fs;
use std::net::SocketAddr;
use std::process::Command;
use std::sync::Mutex as StdMutex;
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};

use super::*;
use crate::ibv_context::Context;
use crate::ibv_pd::Pd;
use crate::{ibv_cq, ibv_qp};
use rdma_provider::cm_contract::{
    CmChannel as _, CmEventKind as Kind, CmId as _, CmParams, CmPeer, CmRoute,
};
use rdma_provider::contract::{Context as _, CqInit, Pd as _, Qp as _, QpInit};
use rdma_provider::types::{
    DirectConfig, PortNum, QpAttr, QpCaps, QpState, Qpn, RejectReason, Transport,
};

/// Time limit far beyond the time for any event.
const LONG: Duration = Duration::from_secs(600);

/// Serialises tests that count descriptors.
static SERIAL: StdMutex<()> = StdMutex::new(());

/// Returns the name of the real device under test.
fn device() -> String {
    let name = std::env::var("TOKIO_RDMA_DEVICE").ok().filter(|name| name != "soft0");
    name.expect("this test needs TOKIO_RDMA_DEVICE, the name of a real device")
}

/// A channel and the other objects of one program.
struct Program {
    channel: CmChannel,
    taken: VecDeque<CmEvent<Ibverbs>>,
    cq: ibv_cq::Cq,
    pd: Pd,
    context: Context,
}

impl Program {
    fn new(name: &str) -> Self {
        let context = Context::open(name).unwrap().unwrap();
        let (pd, cq) = (context.create_pd().unwrap(), context.create_cq(&CqInit::new(16)).unwrap());
        Self {
            channel: context.create_cm_channel().unwrap(),
            taken: VecDeque::new(),
            cq,
            pd,
            context,
        }
    }

    fn address(&self) -> SocketAddr {
        let gids = self.context.port(PortNum(1)).unwrap().gids;
        let ip = gids.iter().map(|entry| entry.gid.to_ip()).find(std::net::IpAddr::is_ipv4);
        SocketAddr::new(ip.expect("an IPv4 address"), 0)
    }

    fn id(&self) -> CmId {
        self.channel.create_id().unwrap()
    }

    fn listen(&self) -> CmId {
        let id = self.id();
        id.bind(self.address()).unwrap();
        id.listen(16).unwrap();
        id
    }

    /// Returns the next event of `id`, and keeps those for other ids.
    fn next(&mut self, id: &CmId) -> Kind<Ibverbs> {
        self.within(id, LONG).expect("an event")
    }

    fn within(&mut self, id: &CmId, limit: Duration) -> Option<Kind<Ibverbs>> {
        let start = Instant::now();
        loop {
            if let Some(at) = self.taken.iter().position(|event| event.key == id.key()) {
                return self.taken.remove(at).map(|event| event.kind);
            }
            match self.channel.take_event().unwrap() {
                Some(event) => self.taken.push_back(event),
                None => {
                    let left = limit.checked_sub(start.elapsed())?;
                    let mut channel = [PollFd::from_borrowed_fd(self.channel.fd(), PollFlags::IN)];
                    poll(&mut channel, Some(&left.try_into().unwrap())).unwrap();
                }
            }
        }
    }

    /// Skips events until the device is removed.
    fn until_removed(&mut self, id: &CmId) {
        while !matches!(self.next(id), Kind::DeviceRemoval) {}
    }

    /// Returns an id that may connect to `to`.
    fn resolved(&mut self, to: SocketAddr) -> CmId {
        let id = self.id();
        id.resolve_addr(None, to, LONG).unwrap();
        match self.next(&id) {
            Kind::RouteResolved => {}
            // In a process that has resolved no route yet.
            Kind::AddressResolved => {
                id.resolve_route(LONG).unwrap();
                assert!(matches!(self.next(&id), Kind::RouteResolved));
            }
            other => panic!("{other:?}"),
        }
        id
    }

    fn request(&mut self, listener: &CmId) -> (CmId, CmPeer) {
        match self.next(listener) {
            Kind::ConnectRequest { id, peer } => (id, peer),
            other => panic!("{other:?}"),
        }
    }

    fn qp(&self) -> ibv_qp::Qp {
        let caps = QpCaps {
            max_send_wr: 1,
            max_recv_wr: 1,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline: 0,
        };
        let init = QpInit {
            transport: Transport::Rc,
            send_cq: &self.cq,
            recv_cq: &self.cq,
            srq: None,
            caps,
            direct: DirectConfig::DEFAULT,
        };
        self.pd.create_qp(&init).unwrap()
    }
}

fn ready(id: &CmId, qp: &ibv_qp::Qp) -> QpAttr {
    for state in [QpState::Init, QpState::Rtr, QpState::Rts] {
        let attr = id.qp_attr(state).unwrap();
        assert_eq!(attr.state, Some(state));
        qp.modify(&attr).unwrap_or_else(|error| panic!("{attr:?}: {error}"));
    }
    qp.query().unwrap().1
}

fn params<'a>(qpn: Qpn, private_data: &'a [u8]) -> CmParams<'a> {
    let timeout = std::time::Duration::from_secs(15);
    CmParams {
        qpn,
        private_data,
        responder_resources: 4,
        initiator_depth: 2,
        retry_count: 6,
        rnr_retry: 6,
        timeout,
        srq: false,
    }
}

/// Returns connected ids with their queue pairs, active and passive.
fn connected(
    a: &mut Program,
    b: &mut Program,
    listener: &CmId,
) -> ((CmId, ibv_qp::Qp), (CmId, ibv_qp::Qp)) {
    let (active, ours) = (a.resolved(listener.local_addr().unwrap()), a.qp());
    active.connect(&params(ours.qpn(), b"question")).unwrap();
    let (passive, peer) = b.request(listener);
    assert_eq!((&peer.private_data[..9], peer.private_data.len()), (&b"question\0"[..], 56));
    assert_eq!((peer.responder_resources, peer.initiator_depth, peer.srq), (2, 4, false));
    let theirs = b.qp();
    let at_b = ready(&passive, &theirs);
    passive
        .accept(&CmParams { responder_resources: 2, ..params(theirs.qpn(), b"answer") })
        .unwrap();
    match a.next(&active) {
        Kind::ConnectResponse(peer) => {
            assert_eq!((&peer.private_data[..7], peer.private_data.len()), (&b"answer\0"[..], 196));
            assert_eq!((peer.responder_resources, peer.initiator_depth), (2, 2));
        }
        other => panic!("{other:?}"),
    }
    let at_a = ready(&active, &ours);
    assert_eq!((at_a.sq_psn, at_a.rq_psn), (at_b.rq_psn, at_b.sq_psn));
    assert_eq!((at_a.dest_qpn, at_b.dest_qpn), (Some(theirs.qpn()), Some(ours.qpn())));
    active.establish().unwrap();
    assert!(matches!(b.next(&passive), Kind::Established));
    ((active, ours), (passive, theirs))
}

/// Waits until the kernel has processed a withdrawal, which raises no event.
fn eventually_refused(id: &CmId) -> bool {
    let start = Instant::now();
    while id.qp_attr(QpState::Rtr).is_ok() {
        assert!(start.elapsed() < LONG, "a request that was taken back");
        thread::sleep(Duration::from_millis(1));
    }
    true
}

fn descriptors() -> usize {
    fs::read_dir("/proc/self/fd").unwrap().count()
}

#[test]
fn channel_without_rdma_cm_fails_with_errno() {
    match CmChannel::new() {
        Ok(channel) => assert!(channel.take_event().unwrap().is_none()),
        Err(error) => {
            assert!(error.verb == "rdma_create_event_channel" && error.errno > 0, "{error:?}")
        }
    }
}

#[test]
#[ignore = "needs a real device"]
fn connection_is_established_and_ends_on_both_sides() {
    let name = device();
    let _serial = SERIAL.lock();
    let (mut a, mut b) = (Program::new(&name), Program::new(&name));
    let listener = b.listen();
    let address = listener.local_addr().unwrap();
    assert!(address.port() != 0 && listener.route().is_none() && listener.peer_addr().is_none());
    for active_first in [true, false] {
        let ((active, _ours), (passive, _theirs)) = connected(&mut a, &mut b, &listener);
        assert_eq!((active.peer_addr(), passive.local_addr()), (Some(address), Some(address)));
        assert_eq!(active.local_addr(), passive.peer_addr());
        let CmRoute { device, port, source, destination, mtu } = active.route().unwrap();
        assert_eq!((&*device, port), (&*name, PortNum(1)));
        assert_eq!((source.to_ip(), destination.to_ip()), (address.ip(), address.ip()));
        assert!(mtu.is_some() && passive.route().unwrap().mtu == mtu);
        let (first, second) = if active_first { (&active, &passive) } else { (&passive, &active) };
        first.disconnect().unwrap();
        // The second program need not call anything: taking the event answers the disconnect
        // request.
        if active_first {
            assert!(matches!(b.next(&passive), Kind::Disconnected));
            assert!(matches!(a.next(&active), Kind::Disconnected));
        } else {
            assert!(matches!(a.next(&active), Kind::Disconnected));
            assert!(matches!(b.next(&passive), Kind::Disconnected));
        }
        first.disconnect().unwrap();
        second.disconnect().unwrap();
        assert!(matches!(a.next(&active), Kind::TimewaitExit));
        assert!(matches!(b.next(&passive), Kind::TimewaitExit));
    }
}

#[test]
#[ignore = "needs a real device"]
fn rejection_refusal_and_unreachable_peer_are_distinguished() {
    let name = device();
    let _serial = SERIAL.lock();
    let (mut a, mut b) = (Program::new(&name), Program::new(&name));
    let listener = b.listen();
    let address = listener.local_addr().unwrap();

    let active = a.resolved(address);
    active.connect(&params(a.qp().qpn(), b"")).unwrap();
    let (passive, _) = b.request(&listener);
    passive.reject(b"not today").unwrap();
    match a.next(&active) {
        Kind::Rejected { reason: RejectReason::CONSUMER, private_data } => {
            assert_eq!((&private_data[..10], private_data.len()), (&b"not today\0"[..], 148));
        }
        other => panic!("{other:?}"),
    }
    // Already answered.
    assert_eq!(passive.reject(b"").unwrap_err().errno, VerbError::EINVAL);
    assert_eq!(passive.accept(&params(Qpn(1), b"")).unwrap_err().errno, VerbError::EINVAL);
    assert_eq!(active.disconnect().unwrap_err().errno, VerbError::EINVAL);

    let active = a.resolved(address);
    active.connect(&params(a.qp().qpn(), b"")).unwrap();
    drop(b.request(&listener));
    assert!(matches!(a.next(&active), Kind::Rejected { reason: RejectReason::CONSUMER, .. }));

    drop(listener);
    let active = a.resolved(address);
    active.connect(&params(a.qp().qpn(), b"")).unwrap();
    assert!(matches!(
        a.next(&active),
        Kind::Rejected { reason: RejectReason::INVALID_SERVICE_ID, .. }
    ));

    // A network for documentation, RFC 5737. Without a route the call fails; otherwise no host
    // answers.
    let active = a.id();
    if active
        .resolve_addr(None, "192.0.2.1:7471".parse().unwrap(), Duration::from_millis(100))
        .is_ok()
    {
        assert!(matches!(a.next(&active), Kind::AddressError(errno) if errno > 0));
    }
}

#[test]
#[ignore = "needs a real device"]
fn ids_dropped_at_each_step_notify_peer_and_leak_nothing() {
    let name = device();
    let _serial = SERIAL.lock();
    let (mut a, mut b) = (Program::new(&name), Program::new(&name));
    let listener = b.listen();
    let address = listener.local_addr().unwrap();
    let before = descriptors();
    for _ in 0..3 {
        // An event is pending.
        let active = a.id();
        let key = active.key();
        active.resolve_addr(None, address, LONG).unwrap();
        drop(active);
        assert!(
            !matches!(a.channel.take_event().unwrap(), Some(event) if event.key == key),
            "of an id that is gone"
        );
        drop(a.resolved(address));

        // A request that is withdrawn before it is answered, or concurrently.
        for answer_at_once in [false, true] {
            let active = a.resolved(address);
            active.connect(&params(a.qp().qpn(), b"")).unwrap();
            let (passive, _) = b.request(&listener);
            drop(active);
            let theirs = b.qp();
            assert!(answer_at_once || eventually_refused(&passive));
            let answer = passive.accept(&params(theirs.qpn(), b""));
            let Kind::Rejected { .. } = b.next(&passive) else { panic!("{answer:?}") };
            assert_eq!(passive.reject(b"").unwrap_err().errno, VerbError::EINVAL);
        }

        // An answer that is not confirmed.
        let active = a.resolved(address);
        active.connect(&params(a.qp().qpn(), b"")).unwrap();
        let (passive, _) = b.request(&listener);
        passive.accept(&params(b.qp().qpn(), b"")).unwrap();
        assert!(matches!(a.next(&active), Kind::ConnectResponse(_)));
        drop(active);
        assert!(matches!(b.next(&passive), Kind::Rejected { .. }));

        // An answer that is withdrawn.
        let active = a.resolved(address);
        active.connect(&params(a.qp().qpn(), b"")).unwrap();
        let (passive, _) = b.request(&listener);
        passive.accept(&params(b.qp().qpn(), b"")).unwrap();
        assert!(matches!(a.next(&active), Kind::ConnectResponse(_)));
        drop(passive);
        assert!(matches!(
            a.next(&active),
            Kind::Rejected { .. } | Kind::ConnectError(_) | Kind::Disconnected
        ));

        for passive_first in [true, false] {
            let (active, passive) = connected(&mut a, &mut b, &listener);
            if passive_first {
                drop(passive);
                assert!(matches!(a.next(&active.0), Kind::Disconnected));
            } else {
                drop(active);
                assert!(matches!(b.next(&passive.0), Kind::Disconnected));
            }
        }
    }
    a.taken.clear();
    b.taken.clear();
    // A listener with pending requests rejects them.
    let waiting = a.resolved(address);
    waiting.connect(&params(a.qp().qpn(), b"")).unwrap();
    drop(listener);
    assert!(matches!(a.next(&waiting), Kind::Rejected { .. }));
    while let Some(event) = b.channel.take_event().unwrap() {
        assert!(!matches!(event.kind, Kind::ConnectRequest { .. }));
    }
    drop(waiting);
    assert_eq!(descriptors(), before);
    assert_eq!((Arc::strong_count(&a.channel.0), Arc::strong_count(&b.channel.0)), (1, 1), "ids");
}

#[test]
#[ignore = "needs a real device"]
fn out_of_order_calls_and_oversized_data_are_refused() {
    let name = device();
    let _serial = SERIAL.lock();
    let (mut a, mut b) = (Program::new(&name), Program::new(&name));
    let listener = b.listen();
    let address = listener.local_addr().unwrap();
    let refused =
        |result: Result<(), VerbError>| assert_eq!(result.unwrap_err().errno, VerbError::EINVAL);

    let id = a.id();
    refused(id.resolve_route(LONG));
    refused(id.connect(&params(Qpn(1), b"")));
    refused(id.accept(&params(Qpn(1), b"")));
    refused(id.reject(b""));
    refused(id.establish());
    refused(id.disconnect());
    assert!(id.local_addr().is_none() && id.peer_addr().is_none() && id.route().is_none());
    assert!(id.qp_attr(QpState::Rtr).is_err());
    id.bind(a.address()).unwrap();
    refused(id.bind(a.address()));
    assert_eq!(a.id().bind(address).unwrap_err().errno, VerbError::EADDRINUSE);
    assert_eq!(
        a.id().bind("192.0.2.1:0".parse().unwrap()).unwrap_err().errno,
        VerbError::EADDRNOTAVAIL
    );

    let active = a.resolved(address);
    refused(active.connect(&params(Qpn(1), &[0; 57])));
    active.connect(&params(a.qp().qpn(), &[7; 56])).unwrap();
    refused(active.connect(&params(a.qp().qpn(), b"")));
    refused(active.establish());
    let (passive, peer) = b.request(&listener);
    assert_eq!(peer.private_data, [7; 56]);
    refused(passive.accept(&params(Qpn(1), &[0; 197])));
    refused(passive.reject(&[0; 149]));
    passive.reject(&[9; 148]).unwrap();
    assert!(
        matches!(a.next(&active), Kind::Rejected { private_data, .. } if private_data == [9; 148])
    );
}

#[test]
#[ignore = "needs a real device"]
fn ids_can_be_destroyed_while_events_are_taken() {
    let name = device();
    let _serial = SERIAL.lock();
    let (mut a, mut b) = (Program::new(&name), Program::new(&name));
    let listener = b.listen();
    let address = listener.local_addr().unwrap();
    // From now on, the route is resolved when the address's event is taken.
    drop(a.resolved(address));
    let (start, done) = (Instant::now(), Mutex::new(false));
    thread::scope(|scope| {
        let channel = &a.channel;
        scope.spawn(|| {
            while !*done.lock() && start.elapsed() < LONG {
                match channel.take_event().unwrap() {
                    Some(event) => drop(event),
                    None => thread::yield_now(),
                }
            }
        });
        for round in 0..200 {
            let id = a.id();
            id.resolve_addr(None, address, LONG).unwrap();
            for _ in 0..round % 7 {
                thread::yield_now();
            }
            drop(id);
        }
        *done.lock() = true;
    });
    assert_eq!(Arc::strong_count(&a.channel.0), 1, "ids");
    assert!(b.within(&listener, Duration::ZERO).is_none());
}

/// Resolves addresses while other threads destroy ids, whose numbers the kernel reuses.
#[test]
#[ignore = "needs a real device"]
fn destroyed_ids_do_not_disturb_others_that_are_resolved() {
    const RESOLVERS: usize = 3;
    const ROUNDS: usize = 1000;
    let name = device();
    let _serial = SERIAL.lock();
    let (mut a, b) = (Program::new(&name), Program::new(&name));
    let listener = b.listen();
    let address = listener.local_addr().unwrap();
    // From now on, the route is resolved when the address's event is taken.
    drop(a.resolved(address));
    let (start, channel) = (Instant::now(), &a.channel);
    let events = Mutex::new(HashMap::new());
    let event_of = |key| {
        while start.elapsed() < LONG {
            if let Some(kind) = events.lock().remove(&key) {
                return kind;
            }
            thread::yield_now();
        }
        "no event".to_owned()
    };
    let resolve = |first| {
        for round in first..first + ROUNDS {
            let id = channel.create_id().unwrap();
            id.resolve_addr(None, address, LONG).unwrap();
            if round % 2 == 0 {
                (0..round % 5).for_each(|_| thread::yield_now());
            } else {
                assert_eq!(event_of(id.key()), "RouteResolved");
            }
        }
    };
    thread::scope(|scope| {
        let resolvers: [_; RESOLVERS] = array::from_fn(|first| scope.spawn(move || resolve(first)));
        while !resolvers.iter().all(|resolver| resolver.is_finished()) {
            match channel.take_event().unwrap() {
                Some(event) => drop(events.lock().insert(event.key, format!("{:?}", event.kind))),
                None => thread::yield_now(),
            }
        }
    });
    assert_eq!(Arc::strong_count(&channel.0), 1, "ids");
}

/// Needs a virtual machine of its own: librdmacm keeps the device open until this program exits,
/// and only then is SoftRoCE removed completely.
#[test]
#[ignore = "needs a real device that may be removed: TOKIO_RDMA_REMOVE"]
fn device_removal_is_reported_to_every_id() {
    let name = device();
    assert!(
        std::env::var_os("TOKIO_RDMA_REMOVE").is_some(),
        "this test takes {name} away, and needs TOKIO_RDMA_REMOVE as permission"
    );
    let (mut a, mut b) = (Program::new(&name), Program::new(&name));
    let listener = b.listen();
    let (active, passive) = connected(&mut a, &mut b, &listener);
    // The command waits until this program exits.
    let delete = r#"rdma link delete "$0" &"#;
    assert!(Command::new("sh").args(["-c", delete, &name]).status().unwrap().success());
    a.until_removed(&active.0);
    b.until_removed(&passive.0);
    b.until_removed(&listener);
    // The result depends on how far the kernel has got with the removal.
    assert_eq!(active.0.disconnect(), Ok(()));
    drop((active, passive, listener));
    assert_eq!((Arc::strong_count(&a.channel.0), Arc::strong_count(&b.channel.0)), (1, 1), "ids");
}

#[test]
#[ignore = "needs a real device"]
fn memberships_end_whether_their_event_was_taken_or_not() {
    let mut program = Program::new(&device());
    let address = program.address();
    let join = |program: &Program, group: [u8; 4]| {
        let id = program.channel.create_datagram_id().unwrap();
        assert_eq!(id.join_multicast(group.into()).unwrap_err().errno, 22, "not bound");
        id.bind(address).unwrap();
        id.join_multicast(group.into()).unwrap();
        assert_eq!(id.join_multicast(group.into()).unwrap_err().errno, 22, "joined already");
        id
    };
    for round in 0..50 {
        drop(join(&program, [239, 9, 1, round]));
        let id = join(&program, [239, 9, 1, round]);
        match program.next(&id) {
            Kind::Joined(group) => {
                let expected = std::net::Ipv4Addr::new(239, 9, 1, round);
                assert_eq!((group.address.dgid, group.qpn), (expected.into(), Qpn::MULTICAST));
                assert_eq!(group.qkey, rdma_provider::types::Qkey::RDMA_UDP);
            }
            other => panic!("{other:?}"),
        }
    }
    let id = program.channel.create_datagram_id().unwrap();
    id.bind(address).unwrap();
    assert_eq!(id.join_multicast([10, 9, 0, 1].into()).unwrap_err().errno, 22, "no group");
    let ipv6 = std::net::Ipv6Addr::new(0xff15, 0, 0, 0, 0, 0, 0, 1);
    let refused = id.join_multicast(ipv6.into()).unwrap_err();
    assert_eq!(refused.errno, VerbError::EOPNOTSUPP, "IPv6 on RoCE v2");
}

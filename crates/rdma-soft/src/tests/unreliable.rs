//! Datagrams and unreliable connections.

use super::*;
use rdma_provider::types::{Gid, Imm, WcFlags, WcOpcode, WcStatus};

fn datagrams() -> Options {
    Options { transport: Transport::Ud, ..Options::default() }
}

#[test]
fn datagram_is_received_after_its_routing_header() {
    for network in [Network::new(), Network::simulated(1, Faults::none())] {
        let (a, b) = connected(&network, &datagrams());
        let (from, to) = (a.buffer(100), b.buffer(200));
        from.fill(0..100);
        b.recv(2, &[to.sge(0, 200)]).unwrap();
        a.send_to(1, &b, b.qp.qpn(), QKEY, &[from.sge(0, 100)]).unwrap();
        assert_eq!(outcome(&a.wait(1)), [(1, WcStatus::SUCCESS)]);
        let received = b.wait(1)[0];
        assert_eq!((received.byte_len, received.flags), (140, WcFlags::GRH));
        assert_eq!(received.src_qpn, a.qp.qpn());
        assert_eq!(to.bytes(40, 100), from.bytes(0, 100));
        let header = to.bytes(20, 20);
        assert_eq!((header[0], header[9]), (0x45, 17));
        assert_eq!(header[12..16], a.address().dgid.0[12..]);
        assert_eq!(header[16..20], b.address().dgid.0[12..]);
    }
}

#[test]
fn unexpected_datagrams_are_dropped() {
    for network in [Network::new(), Network::simulated(1, Faults::none())] {
        let (a, b) = connected(&network, &datagrams());
        let (from, to) = (a.buffer(5000), b.buffer(200));
        let sges = [from.sge(0, 100)];
        // No receive, wrong Q_Key, wrong number.
        a.send_to(1, &b, b.qp.qpn(), QKEY, &sges).unwrap();
        network.run_until_idle(Duration::from_secs(1));
        b.recv(2, &[to.sge(0, 100)]).unwrap();
        a.send_to(2, &b, b.qp.qpn(), Qkey(1), &sges).unwrap();
        a.send_to(3, &b, Qpn(5), QKEY, &sges).unwrap();
        assert_eq!(a.wait(3).len(), 3);
        network.run_until_idle(Duration::from_secs(1));
        assert_eq!(b.poll(), []);
        // Too long for the receive: it fails, and the queue pair continues.
        a.send_to(4, &b, b.qp.qpn(), QKEY, &sges).unwrap();
        assert_eq!(outcome(&b.wait(1)), [(2, WcStatus::LOC_LEN_ERR)]);
        assert_eq!((a.state(), b.state()), (QpState::Rts, QpState::Rts));
        let over = a.send_to(5, &b, b.qp.qpn(), QKEY, &[from.sge(0, 4097)]);
        assert_eq!(over.unwrap_err().error.errno, rdma_provider::VerbError::EINVAL);
    }
}

#[test]
fn local_datagram_error_stops_only_the_send_queue() {
    let (a, b) = connected(&Network::new(), &datagrams());
    let to = a.buffer(100);
    a.recv(9, &[to.sge(0, 100)]).unwrap();
    let bad = Sge { addr: 0, length: 8, lkey: Lkey(1) };
    a.send_to(1, &b, b.qp.qpn(), QKEY, &[bad]).unwrap();
    a.send_to(2, &b, b.qp.qpn(), QKEY, &[]).unwrap();
    assert_eq!(outcome(&a.poll()), [(1, WcStatus::LOC_PROT_ERR), (2, WcStatus::WR_FLUSH_ERR)]);
    assert_eq!(a.state(), QpState::Sqe);
    b.send_to(3, &a, a.qp.qpn(), QKEY, &[]).unwrap();
    assert_eq!(outcome(&a.poll()), [(9, WcStatus::SUCCESS)]);
    a.qp.modify(&QpAttr::to_state(QpState::Rts)).unwrap();
    a.send_to(4, &b, b.qp.qpn(), QKEY, &[]).unwrap();
    assert_eq!(outcome(&a.poll()), [(4, WcStatus::SUCCESS)]);
}

#[test]
fn unreliable_connection_delivers_and_drops_whole_messages() {
    for network in [Network::new(), Network::simulated(1, Faults::none())] {
        let (a, b) =
            connected(&network, &Options { transport: Transport::Uc, ..Options::default() });
        let (from, to) = (a.buffer(5000), b.buffer(5000));
        from.fill((0..5000).map(|at| at as u8));
        // Lost without notification: no receive is posted.
        a.send(1, SendOp::Send, &[from.sge(0, 5000)]).unwrap();
        assert_eq!(outcome(&a.wait(1)), [(1, WcStatus::SUCCESS)]);
        network.run_until_idle(Duration::from_secs(1));
        b.recv(7, &[to.sge(0, 5000)]).unwrap();
        b.recv(8, &[]).unwrap();
        a.send(2, SendOp::Send, &[from.sge(0, 5000)]).unwrap();
        let bad = RemoteAddr { addr: 1, rkey: Rkey(1) };
        a.send(3, SendOp::Write(bad), &[from.sge(0, 8)]).unwrap();
        a.send(4, SendOp::WriteWithImm(to.remote(8), Imm(1)), &[from.sge(0, 8)]).unwrap();
        assert_eq!(a.wait(3).len(), 3);
        assert_eq!(outcome(&b.wait(2)), [(7, WcStatus::SUCCESS), (8, WcStatus::SUCCESS)]);
        assert_eq!(to.bytes(16, 4984), from.bytes(16, 4984));
        assert_eq!(to.bytes(8, 8), from.bytes(0, 8));
        assert_eq!((a.state(), b.state()), (QpState::Rts, QpState::Rts));
        assert!(a.send(5, SendOp::Read(bad), &[]).is_err());
    }
}

/// A group of this process, which no device outside of the test joins.
fn group() -> Gid {
    let [b, c] = (std::process::id() as u16).to_be_bytes();
    std::net::Ipv4Addr::new(239, 253, b, c).into()
}

#[test]
fn members_of_all_devices_with_a_link_receive_datagrams_to_their_group() {
    for network in [Network::new(), Network::simulated(1, Faults::none())] {
        let (a, b) = connected(&network, &datagrams());
        let [c, d] = ["c", "d"].map(|name| End::new(&network, name, &datagrams()));
        connect(&c, &d, &datagrams());
        let to = AddressVector { dgid: group(), ..a.address() };
        let receivers = [&a, &b, &c].map(|end| (end, end.buffer(200)));
        let send = || {
            a.send_at(1, &to, (Qpn::MULTICAST, QKEY), &[]).unwrap();
            network.run_until_idle(Duration::from_secs(1));
            receivers.each_ref().map(|(end, _)| {
                end.poll().iter().filter(|done| done.opcode == WcOpcode::RECV).count()
            })
        };
        for (end, memory) in &receivers {
            end.qp.attach_multicast(group(), 0).unwrap();
            (0..4).for_each(|id| end.recv(id, &[memory.sge(0, 200)]).unwrap());
        }
        assert_eq!(send(), [1, 1, 1]);
        network.control("b").unwrap().set_port(false);
        assert_eq!(send(), [1, 0, 1]);
        network.control("a").unwrap().set_port(false);
        assert_eq!(send(), [0, 0, 0]);
    }
}

#[test]
fn only_datagrams_to_the_multicast_number_reach_a_group() {
    use crate::device::DeviceInner;
    use crate::net::node::Node as _;
    use crate::roce::ip_fields::Origin;
    use crate::roce::packet::{Body, Packet, Part, Tail};

    let network = Network::new();
    let (_, b) = connected(&network, &datagrams());
    let memory = b.buffer(200);
    b.recv(7, &[memory.sge(0, 200)]).unwrap();
    b.qp.attach_multicast(group(), 0).unwrap();
    let device = DeviceInner::at(&network.0, b.address().dgid).unwrap();
    let good = Packet {
        transport: Transport::Ud,
        dest: Qpn::MULTICAST,
        psn: Psn::new(0),
        pkey: DEFAULT_PKEY,
        solicited: false,
        ack_request: false,
        body: Body::Datagram { qkey: QKEY, source: Qpn(9), imm: None },
    };
    let unwanted = |group, packet| {
        let mut packets = std::iter::once((Origin::default(), packet, &[0; 64][..]));
        std::sync::Arc::clone(&device).receive_multicast(group, &mut packets)
    };
    let dropped = || b.qp.counters().1.dropped;
    let other = Gid::from(std::net::Ipv4Addr::new(239, 252, 0, 1));
    // Without a receiver.
    assert_eq!(unwanted(other, good), 1);
    assert_eq!(unwanted(group(), Packet { dest: b.qp.qpn(), ..good }), 1);
    assert_eq!(dropped(), 0);
    // Not for the queue pair.
    let send = Body::Send { part: Part::Only, tail: Tail::None };
    for bad in [
        Packet { transport: Transport::Rc, body: send, ..good },
        Packet { body: send, ..good },
        Packet { body: Body::Datagram { qkey: Qkey(1), source: Qpn(9), imm: None }, ..good },
        Packet { pkey: 0x8001, ..good },
    ] {
        let before = dropped();
        assert_eq!((unwanted(group(), bad), dropped()), (0, before + 1), "{bad:?}");
    }
    assert_eq!(b.poll(), []);
    assert_eq!(unwanted(group(), good), 0);
    assert_eq!(outcome(&b.wait(1)), [(7, WcStatus::SUCCESS)]);
}

#[test]
fn device_over_udp_is_a_member_as_long_as_a_queue_pair_is_attached() {
    let network = over_udp(&["a", "b"]);
    let (a, b) = connected(&network, &datagrams());
    let to = AddressVector { dgid: group(), ..a.address() };
    let memory = b.buffer(200);
    let joined = || {
        let table = std::fs::read_to_string("/proc/net/igmp").unwrap();
        let [.., x, y, z, w] = group().0;
        table.contains(&format!("{:08X}", u32::from_ne_bytes([x, y, z, w])))
    };
    assert!(!joined());
    for round in 0..20 {
        b.qp.attach_multicast(group(), 0).unwrap();
        assert!(joined());
        b.recv(round, &[memory.sge(0, 200)]).unwrap();
        a.send_at(1, &to, (Qpn::MULTICAST, QKEY), &[]).unwrap();
        assert_eq!(outcome(&b.wait(1)), [(round, WcStatus::SUCCESS)]);
        assert_eq!(outcome(&a.wait(1)), [(1, WcStatus::SUCCESS)]);
        b.qp.detach_multicast(group(), 0).unwrap();
        // A thread closes the socket.
        while joined() {
            std::thread::yield_now();
        }
    }
    let other_family =
        b.qp.attach_multicast("ff15::1".parse::<std::net::IpAddr>().unwrap().into(), 0);
    assert_eq!(other_family.unwrap_err().errno, 97);
}

//! Datagrams that are delivered, dropped or refused.

use tokio_rdma::types::{
    AddressVector, Data, Qkey, QpState, Qpn, SendFlags, SendOp, SendWr, Transport, WcFlags,
    WcStatus, WrId,
};

use crate::common::pair::{self, Pair, Shape};
use crate::common::raw::{End, Options, QKEY, connected, outcome, settle};
use crate::common::{Memory, Setup, events, in_every_mode, rxe, within};

fn pair() -> (End, End, Setup) {
    connected(&Options::of(Transport::Ud))
}

/// Sends a valid datagram and checks that it consumes receive `id`, so no earlier datagram did.
fn next_is(a: &End, b: &End, from: &Memory, id: u64) {
    a.send_to(77, b, b.qp.qpn(), QKEY, &[from.sge(0, 8)]).unwrap();
    assert_eq!(outcome(&a.sent(1)), [(77, WcStatus::SUCCESS)]);
    let received = b.received(1);
    assert_eq!((outcome(&received), received[0].byte_len), (vec![(id, WcStatus::SUCCESS)], 48));
    assert_eq!((a.state(), b.state()), (QpState::Rts, QpState::Rts));
    assert_eq!((events(&a.device), events(&b.device)), (vec![], vec![]));
}

#[test]
fn datagram_with_wrong_qkey_or_qpn_is_dropped() {
    let (a, b, _setup) = pair();
    let (from, to) = (a.memory(8), b.memory(64));
    b.recv(1, &[to.sge(0, 64)]).unwrap();
    let qpn = b.qp.qpn();
    for (qpn, qkey) in
        [(qpn, Qkey(QKEY.0 + 1)), (qpn, Qkey(0)), (Qpn(qpn.0 ^ 1), QKEY), (a.qp.qpn(), Qkey(9))]
    {
        a.send_to(5, &b, qpn, qkey, &[from.sge(0, 8)]).unwrap();
        assert_eq!(outcome(&a.sent(1)), [(5, WcStatus::SUCCESS)]);
        settle(&a.device, &b.device);
        assert_eq!(outcome(&b.received(0)), []);
    }
    next_is(&a, &b, &from, 1);
}

#[test]
fn datagram_without_a_receive_is_dropped() {
    let (a, b, _setup) = pair();
    let (from, to) = (a.memory(8), b.memory(64));
    a.send_to(5, &b, b.qp.qpn(), QKEY, &[from.sge(0, 8)]).unwrap();
    assert_eq!(outcome(&a.sent(1)), [(5, WcStatus::SUCCESS)]);
    settle(&a.device, &b.device);
    b.recv(1, &[to.sge(0, 64)]).unwrap();
    assert_eq!(outcome(&b.received(0)), []);
    next_is(&a, &b, &from, 1);
}

#[test]
fn datagram_of_mtu_size_arrives_and_a_longer_one_is_refused() {
    let (a, b, setup) = pair();
    let mtu = setup.a.default_path().unwrap().0.active_mtu.bytes();
    let (from, to) = (Memory::patterned(&a.pd, mtu + 1, 5), b.memory(mtu + 40));
    b.recv(1, &[to.sge(0, mtu + 40)]).unwrap();
    a.send_to(2, &b, b.qp.qpn(), QKEY, &[from.sge(0, mtu)]).unwrap();
    assert_eq!(outcome(&a.sent(1)), [(2, WcStatus::SUCCESS)]);
    let received = b.received(1)[0];
    // Datagrams by LID have no header, but the receive reserves its 40 bytes.
    let header = if b.address().dlid == 0 { WcFlags::GRH } else { WcFlags::empty() };
    assert_eq!((received.byte_len as usize, received.flags), (mtu + 40, header));
    assert_eq!((received.qpn, received.src_qpn), (b.qp.qpn(), a.qp.qpn()));
    assert_eq!(to.bytes(40, mtu), from.bytes(0, mtu));
    if setup.is_software() {
        let refused = a.send_to(3, &b, b.qp.qpn(), QKEY, &[from.sge(0, mtu + 1)]).unwrap_err();
        assert_eq!((refused.posted, refused.error.errno), (0, 22));
    }
    b.recv(4, &[to.sge(0, 64)]).unwrap();
    next_is(&a, &b, &from, 4);
}

#[test]
fn header_and_datagram_are_scattered_over_the_list() {
    let (a, b, _setup) = pair();
    let (from, to) = (Memory::patterned(&a.pd, 100, 6), b.memory(400));
    b.recv(1, &[to.sge(0, 40), to.sge(100, 60), to.sge(200, 60)]).unwrap();
    a.send_to(2, &b, b.qp.qpn(), QKEY, &[from.sge(0, 50), from.sge(50, 50)]).unwrap();
    assert_eq!(b.received(1)[0].byte_len, 140);
    assert_eq!([to.bytes(100, 60), to.bytes(200, 40)].concat(), from.all());
    assert_eq!(to.bytes(240, 20), [0; 20]);
}

#[test]
fn too_short_receive_loses_only_its_datagram() {
    // IBTA 9.8.4: the datagram is dropped or the receive fails; the queue pair stays in RTS.
    let (a, b, setup) = pair();
    let (from, to) = (a.memory(64), b.memory(128));
    b.recv(1, &[to.sge(0, 47)]).unwrap();
    b.recv(2, &[to.sge(0, 128)]).unwrap();
    a.send_to(3, &b, b.qp.qpn(), QKEY, &[from.sge(0, 8)]).unwrap();
    assert_eq!(outcome(&a.sent(1)), [(3, WcStatus::SUCCESS)]);
    if setup.known(&rxe::SHORT_DATAGRAM) {
        let expected = [(1, WcStatus::LOC_QP_OP_ERR), (2, WcStatus::WR_FLUSH_ERR)];
        assert_eq!(outcome(&b.received(2)), expected);
        return assert_eq!((a.state(), b.state()), (QpState::Rts, QpState::Err));
    }
    let seen = b.received(1);
    assert_eq!(outcome(&seen), [(1, WcStatus::LOC_LEN_ERR)]);
    if setup.is_software() {
        assert_eq!((seen[0].byte_len, seen[0].imm_or_rkey), (48, 47), "with the header");
    }
    next_is(&a, &b, &from, 2);
}

#[test]
fn connected_operations_on_a_datagram_queue_pair_are_refused() {
    let (a, b, _setup) = pair();
    let (from, to) = (a.memory(8), b.memory(64));
    let route = a.pd.address_handle(&b.address()).unwrap();
    let sges = [from.sge(0, 8)];
    let remote = to.remote(0);
    let target = Some(route.target(b.qp.qpn(), QKEY).into());
    let wr = |op, target| SendWr {
        wr_id: WrId(1),
        op,
        flags: SendFlags::SIGNALED,
        data: Data::Sges(&sges),
        target,
    };
    for (op, target) in [
        (SendOp::Send, None),
        (SendOp::Write(remote), target),
        (SendOp::WriteWithImm(remote, tokio_rdma::Imm(0)), target),
        (SendOp::Read(remote), target),
        (SendOp::FetchAdd { remote, add: 1 }, target),
        (SendOp::CompareSwap { remote, compare: 0, swap: 1 }, target),
        (SendOp::SendWithInvalidate(remote.rkey), target),
    ] {
        let refused = a.post(&[wr(op, target)]).unwrap_err();
        assert_eq!((refused.posted, refused.error.errno), (0, 22), "{op:?}");
    }
    b.recv(4, &[to.sge(0, 64)]).unwrap();
    next_is(&a, &b, &from, 4);
}

#[test]
fn datagrams_identify_their_senders() {
    let (a, b, setup) = pair();
    let options = Options::of(Transport::Ud);
    let c = End::new(&setup.a, &options);
    c.init(&options);
    c.rtr(&options, &b);
    c.rts(&options);
    let to = b.memory(64);
    for (id, sender) in [&a, &c, &a].into_iter().enumerate() {
        b.recv(id as u64, &[to.sge(0, 64)]).unwrap();
        sender.send_to(1, &b, b.qp.qpn(), QKEY, &[]).unwrap();
        let received = b.received(1)[0];
        assert_eq!((received.src_qpn, received.byte_len), (sender.qp.qpn(), 40));
    }
}

#[test]
fn address_handle_with_unknown_port_or_gid_is_refused() {
    let (a, b, setup) = pair();
    let good = b.address();
    // The kernel returns ENODATA for an unused entry of the GID table.
    let empty = if setup.is_software() { 22 } else { 61 };
    for (port, index, errno) in [(0, 0, 22), (9, 0, 22), (1, 200, empty)] {
        // Routes by LID do not use the GID table.
        if index != 0 && good.dlid != 0 {
            continue;
        }
        let bad = tokio_rdma::types::AddressVector {
            port: tokio_rdma::types::PortNum(port),
            sgid_index: index,
            ..good
        };
        assert_eq!(a.pd.address_handle(&bad).unwrap_err().errno, errno, "port {port}, GID {index}");
    }
}

in_every_mode! {
    datagrams_are_answered_from_where_they_arrived,
}

async fn datagrams_are_answered_from_where_they_arrived(mode: &str) {
    let pair = Pair::shaped(Setup::new(), &Shape::new(Transport::Ud, mode));
    let Pair { a, b, .. } = &pair;
    let default = a.route_to(b);
    let marked = AddressVector { traffic_class: 0x6b, ..*default.address() };
    let marked = a.pd.address_handle(&marked).unwrap();
    for (route, class) in [(&default, default.address().traffic_class), (&marked, 0x6b)] {
        let request = b.qp.recv(b.blank(100));
        a.qp.send_to(a.buffer(b"question"), route, b.qp.qpn(), pair::QKEY).await.unwrap();
        let sender = within("a datagram", request).await.unwrap().sender().unwrap();
        let (ours, theirs) = (a.qp.endpoint(), b.qp.endpoint());
        assert_eq!((sender.qpn, sender.lid), (a.qp.qpn(), ours.lid));
        if default.address().dlid == 0 {
            assert_eq!((sender.gid, sender.destination), (Some(ours.gid), Some(theirs.gid)));
            assert_eq!(sender.traffic_class, class, "{sender:?}");
        }
        let answer = a.qp.recv(a.blank(100));
        let back = sender.address_handle(&b.pd).unwrap();
        // Without the mark of congestion (RFC 3168).
        assert_eq!(
            back.address().traffic_class,
            if sender.traffic_class == 0x6b { 0x6a } else { sender.traffic_class }
        );
        b.qp.send_to(b.buffer(b"answer"), &back, sender.qpn, pair::QKEY).await.unwrap();
        assert_eq!(within("the answer", answer).await.unwrap().buffer[40..], *b"answer");
    }
    // A message that is shorter than the header is none.
    let pair = Pair::new(Transport::Rc, mode);
    let message = pair.b.qp.recv(pair.b.blank(100));
    pair.a.qp.send(pair.a.buffer(b"short")).await.unwrap();
    assert!(message.await.unwrap().sender().is_none());
}

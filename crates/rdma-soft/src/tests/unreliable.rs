//! Datagrams and unreliable connections.

use super::*;
use rdma_provider::types::{Imm, WcFlags, WcStatus};

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

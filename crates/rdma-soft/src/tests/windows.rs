//! Memory windows, as far as they are specific to the device.

use super::*;
use rdma_provider::contract::{CqInit, Mw as _};
use rdma_provider::types::{WcStatus, WindowBind};

fn bind_of(window: &Mw, current: Rkey, buffer: &Buffer, access: Access) -> WindowBind {
    WindowBind {
        window: window.handle(),
        region: buffer.mr.as_ref().unwrap().handle(),
        current,
        rkey: current.next(),
        lkey: buffer.lkey(),
        addr: buffer.addr(),
        len: buffer.len as u64,
        access,
    }
}

fn bind(end: &End, window: &Mw, current: Rkey, buffer: &Buffer, access: Access) -> RemoteAddr {
    let bind = bind_of(window, current, buffer, access);
    end.send_with(9, SendOp::BindWindow, SendFlags::SIGNALED, Data::Window(&bind)).unwrap();
    assert_eq!(outcome(&end.wait(1)), [(9, WcStatus::SUCCESS)]);
    RemoteAddr { addr: buffer.addr(), rkey: bind.rkey }
}

#[test]
fn window_requires_local_write_for_remote_write() {
    let closed = Access::MW_BIND;
    for (access, expected) in [
        (Access::REMOTE_READ, WcStatus::SUCCESS),
        (Access::REMOTE_WRITE, WcStatus::MW_BIND_ERR),
        (Access::REMOTE_ATOMIC | Access::REMOTE_READ, WcStatus::MW_BIND_ERR),
        (Access::LOCAL_WRITE, WcStatus::MW_BIND_ERR),
    ] {
        let (_a, b) = connected(&Network::new(), &Options::default());
        let (buffer, window) = (Buffer::new(&b.pd, 64, closed), b.pd.create_mw().unwrap());
        let bind = bind_of(&window, window.rkey(), &buffer, access);
        b.send_with(1, SendOp::BindWindow, SendFlags::SIGNALED, Data::Window(&bind)).unwrap();
        assert_eq!(outcome(&b.wait(1)), [(1, expected)], "{access:?}");
    }
}

#[test]
fn bind_of_invalid_window_or_region_fails() {
    let cases: [fn(WindowBind) -> WindowBind; 5] = [
        |bind| WindowBind { window: 0, ..bind },
        |bind| WindowBind { window: usize::MAX, ..bind },
        |bind| WindowBind { lkey: Lkey(bind.lkey.0 ^ 1), ..bind },
        |bind| WindowBind { current: bind.rkey, ..bind },
        |bind| WindowBind { rkey: Rkey(bind.rkey.0 ^ 0x100), ..bind },
    ];
    for case in cases {
        let (_a, b) = connected(&Network::new(), &Options::default());
        let (buffer, window) = (Buffer::new(&b.pd, 64, Access::MW_BIND), b.pd.create_mw().unwrap());
        let bind = case(bind_of(&window, window.rkey(), &buffer, Access::REMOTE_READ));
        b.send_with(1, SendOp::BindWindow, SendFlags::SIGNALED, Data::Window(&bind)).unwrap();
        assert_eq!(outcome(&b.wait(1)), [(1, WcStatus::MW_BIND_ERR)], "{bind:?}");
    }
}

#[test]
fn deregistration_revokes_its_windows() {
    let (a, b) = connected(&Network::new(), &Options::default());
    let (from, window) = (a.buffer(8), b.pd.create_mw().unwrap());
    let mut first = Buffer::new(&b.pd, 64, Access::MW_BIND | Access::LOCAL_WRITE);
    let remote = bind(&b, &window, window.rkey(), &first, Access::REMOTE_WRITE);
    first.deregister();
    let second = Buffer::new(&b.pd, 64, Access::MW_BIND | Access::LOCAL_WRITE);
    let again = bind(&b, &window, remote.rkey, &second, Access::REMOTE_WRITE);
    from.fill([7; 8]);
    a.send(1, SendOp::Write(again), &[from.sge(0, 8)]).unwrap();
    a.send(2, SendOp::Write(remote), &[from.sge(0, 8)]).unwrap();
    assert_eq!(outcome(&a.wait(2)), [(1, WcStatus::SUCCESS), (2, WcStatus::REM_ACCESS_ERR)]);
    assert_eq!((first.word(0), second.word(0)), (0, 0x0707_0707_0707_0707));
}

#[test]
fn destroyed_queue_pair_unbinds_its_windows() {
    let network = Network::new();
    let (a, b) = connected(&network, &Options::default());
    let buffer = Buffer::new(&b.pd, 64, Access::MW_BIND | Access::LOCAL_WRITE);
    let window = b.pd.create_mw().unwrap();
    let first = bind(&b, &window, window.rkey(), &buffer, Access::REMOTE_WRITE);
    let End { qp, cq: _cq, pd, context, .. } = b;
    drop(qp);
    let cq = context.create_cq(&CqInit::new(16)).unwrap();
    let init = QpInit {
        transport: Transport::Rc,
        send_cq: &cq,
        recv_cq: &cq,
        srq: None,
        caps: QpCaps {
            max_send_wr: 4,
            max_recv_wr: 4,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline: 0,
        },
        direct: rdma_provider::types::DirectConfig::DEFAULT,
    };
    let qp = pd.create_qp(&init).unwrap();
    let other = End { qp, cq, pd, context, network };
    a.qp.modify(&QpAttr::to_state(QpState::Reset)).unwrap();
    connect(&a, &other, &Options::default());
    bind(&other, &window, first.rkey, &buffer, Access::REMOTE_WRITE);
}

/// Binds, uses and invalidates a window on a faulty network. A packet of an earlier round must
/// neither reach nor invalidate a later binding.
#[test]
fn window_rounds_are_isolated_on_a_faulty_network() {
    for seed in 0..40 {
        let faults = Faults::none().loss(0.05).duplicate(0.1).reorder(0.1).corrupt(0.03);
        let network =
            Network::simulated(seed, faults.delay(Duration::ZERO..Duration::from_micros(50)));
        let options = Options { mtu: Mtu::Mtu256, psn: 0xff_ffc0, ..Options::default() };
        let (a, b) = connected(&network, &options);
        let (from, to) = (a.buffer(600), b.buffer(600));
        let buffer = Buffer::new(&b.pd, 600, Access::MW_BIND | Access::LOCAL_WRITE);
        let window = b.pd.create_mw().unwrap();
        let mut key = window.rkey();
        // More rounds than a key has tags.
        for round in 0..300_usize {
            let remote =
                bind(&b, &window, key, &buffer, Access::REMOTE_WRITE | Access::REMOTE_READ);
            key = remote.rkey;
            let pattern = |at: usize| (at * 7 + round) as u8;
            from.fill((0..600).map(pattern));
            b.recv(1, &[to.sge(0, 600)]).unwrap();
            let length = [0, 8, 600][round % 3];
            a.send(2, SendOp::Write(remote), &[from.sge(0, 600)]).unwrap();
            a.send(3, SendOp::SendWithInvalidate(key), &[from.sge(0, length)]).unwrap();
            assert_eq!(
                outcome(&a.wait(2)),
                [(2, WcStatus::SUCCESS), (3, WcStatus::SUCCESS)],
                "seed {seed}"
            );
            let received = b.wait(1);
            assert_eq!(outcome(&received), [(1, WcStatus::SUCCESS)], "seed {seed}");
            assert_eq!(
                (received[0].invalidated(), received[0].byte_len),
                (Some(key), length as u32)
            );
            assert_eq!(buffer.bytes(0, 600), (0..600).map(pattern).collect::<Vec<_>>());
            assert_eq!(to.bytes(0, length), from.bytes(0, length));
        }
        assert!(a.qp.counters().0.retransmitted > 0, "seed {seed}");
    }
}

#[test]
fn local_work_requests_take_no_window() {
    let network = over_udp(&["a", "b"]);
    let (a, b) = connected(&network, &Options::default());
    let has_window = |end: &End| end.qp.0.sender.lock().holds_window();
    let window = a.pd.create_mw().unwrap();
    let buffer = Buffer::new(&a.pd, 64, Access::LOCAL_WRITE | Access::MW_BIND);
    let bound = bind(&a, &window, window.rkey(), &buffer, Access::REMOTE_WRITE);
    assert!(!has_window(&a), "only a local bind was executed");
    // A send holds the window until it is acknowledged.
    let (from, to) = (a.buffer(8), b.buffer(8));
    // The peer does not answer meanwhile.
    let receiver = b.qp.0.receiver.lock();
    a.send(1, SendOp::Send, &[from.sge(0, 8)]).unwrap();
    assert!(has_window(&a), "nothing is acknowledged yet");
    drop(receiver);
    b.recv(2, &[to.sge(0, 8)]).unwrap();
    assert_eq!(outcome(&a.wait(1)), [(1, WcStatus::SUCCESS)]);
    a.send_with(3, SendOp::LocalInvalidate(bound.rkey), SendFlags::SIGNALED, Data::Sges(&[]))
        .unwrap();
    assert_eq!(outcome(&a.wait(1)), [(3, WcStatus::SUCCESS)]);
    assert!(!has_window(&a));
}

//! Sends, receives and incoming messages in each state.

use tokio_rdma::types::{
    AsyncEvent, Data, QpAttr, QpState, SendFlags, SendOp, Transport, WcStatus,
};

use crate::common::raw::{End, Options, connect, connected, init, outcome, poll, rts, settle};
use crate::common::{Memory, Setup, events, eventually, rxe, skip};

const ALL: [Transport; 3] = [Transport::Rc, Transport::Uc, Transport::Ud];
const EINVAL: i32 = 22;

fn send(from: &End, to: &End, id: u64) -> Result<(), i32> {
    let result = match from.qp.transport() {
        Transport::Ud => from.send_to(id, to, to.qp.qpn(), crate::common::raw::QKEY, &[]),
        _ => from.send(id, SendOp::Send, &[]),
    };
    result.map_err(|refused| refused.error.errno)
}

fn recv(end: &End, id: u64) -> Result<(), i32> {
    end.recv(id, &[end.scratch.sge(0, 64)]).map_err(|refused| refused.error.errno)
}

#[test]
fn reset_refuses_sends_and_receives() {
    let setup = Setup::new();
    for transport in ALL {
        let end = End::new(&setup.a, &Options::of(transport));
        assert_eq!((send(&end, &end, 1), recv(&end, 2)), (Err(EINVAL), Err(EINVAL)));
        assert_eq!((poll(&end.send_cq), poll(&end.recv_cq)), (vec![], vec![]));
    }
}

#[test]
fn init_refuses_sends_and_keeps_receives() {
    let setup = Setup::new();
    for transport in ALL {
        let options = Options::of(transport);
        let (a, b) = (End::new(&setup.a, &options), End::new(&setup.b, &options));
        a.init(&options);
        assert_eq!((send(&a, &b, 1), recv(&a, 2)), (Err(EINVAL), Ok(())));
        b.init(&options);
        b.rtr(&options, &a);
        b.rts(&options);
        if transport != Transport::Rc {
            // The message is dropped and does not consume the receive.
            send(&b, &a, 3).unwrap();
            assert_eq!(outcome(&b.sent(1)), [(3, WcStatus::SUCCESS)]);
            settle(&setup.b, &setup.a);
            assert_eq!(outcome(&a.received(0)), []);
        }
        a.rtr(&options, &b);
        if transport != Transport::Uc {
            recv(&a, 20).unwrap();
            send(&b, &a, 4).unwrap();
            assert_eq!(outcome(&a.received(1)), [(2, WcStatus::SUCCESS)]);
        }
    }
}

#[test]
fn message_to_a_peer_in_init_is_retransmitted_until_rtr() {
    let setup = Setup::new();
    let options = Options { timeout: 12, ..Options::default() };
    let (a, b) = (End::new(&setup.a, &options), End::new(&setup.b, &options));
    a.init(&options);
    recv(&a, 2).unwrap();
    b.init(&options);
    b.rtr(&options, &a);
    b.rts(&options);
    send(&b, &a, 3).unwrap();
    assert_eq!((outcome(&b.sent(0)), outcome(&a.received(0))), (vec![], vec![]));
    a.rtr(&options, &b);
    assert_eq!(outcome(&b.sent(1)), [(3, WcStatus::SUCCESS)]);
    assert_eq!(outcome(&a.received(1)), [(2, WcStatus::SUCCESS)]);
}

#[test]
fn rtr_refuses_sends_and_receives_messages() {
    let setup = Setup::new();
    for transport in ALL {
        let options = Options::of(transport);
        let (a, b) = (End::new(&setup.a, &options), End::new(&setup.b, &options));
        for end in [&a, &b] {
            end.init(&options);
        }
        a.rtr(&options, &b);
        b.rtr(&options, &a);
        b.rts(&options);
        assert_eq!((send(&a, &b, 1), recv(&a, 2)), (Err(EINVAL), Ok(())));
        recv(&a, 3).unwrap();
        assert_eq!(events(&setup.a), []);
        send(&b, &a, 4).unwrap();
        send(&b, &a, 5).unwrap();
        assert_eq!(outcome(&b.sent(2)), [(4, WcStatus::SUCCESS), (5, WcStatus::SUCCESS)]);
        assert_eq!(outcome(&a.received(2)), [(2, WcStatus::SUCCESS), (3, WcStatus::SUCCESS)]);
        if transport != Transport::Ud && !setup.known(&rxe::FEW_EVENTS) {
            assert_eq!(
                events(&setup.a),
                [AsyncEvent::CommunicationEstablished(a.qp.qpn())],
                "{transport:?}"
            );
        }
        a.rts(&options);
        recv(&b, 6).unwrap();
        send(&a, &b, 7).unwrap();
        assert_eq!(outcome(&b.received(1)), [(6, WcStatus::SUCCESS)]);
        assert_eq!((events(&setup.a), events(&setup.b)), (vec![], vec![]));
    }
}

#[test]
fn sqd_delays_sends_and_keeps_receiving() {
    for transport in ALL {
        let (a, b, setup) = connected(&Options::of(transport));
        a.qp.modify(&QpAttr { notify_drained: Some(true), ..QpAttr::to_state(QpState::Sqd) })
            .unwrap();
        eventually("the drained event", || {
            let events = events(&setup.a);
            (events == [AsyncEvent::SendQueueDrained(a.qp.qpn())]).then_some(())
        });
        recv(&b, 1).unwrap();
        recv(&b, 2).unwrap();
        send(&a, &b, 3).unwrap();
        send(&a, &b, 4).unwrap();
        recv(&a, 5).unwrap();
        send(&b, &a, 6).unwrap();
        assert_eq!(outcome(&a.received(1)), [(5, WcStatus::SUCCESS)], "receives continue");
        assert_eq!(outcome(&b.sent(1)), [(6, WcStatus::SUCCESS)]);
        settle(&setup.a, &setup.b);
        assert_eq!(
            (outcome(&a.sent(0)), outcome(&b.received(0))),
            (vec![], vec![]),
            "sends do not start"
        );
        assert_eq!(a.state(), QpState::Sqd);
        a.to(QpState::Rts);
        let mut expected = vec![(3, WcStatus::SUCCESS), (4, WcStatus::SUCCESS)];
        if setup.known(&rxe::RESUMES_AT_NEXT_POST) {
            recv(&b, 7).unwrap();
            send(&a, &b, 8).unwrap();
            expected.push((8, WcStatus::SUCCESS));
        }
        assert_eq!(outcome(&a.sent(expected.len())), expected);
        let received = outcome(&b.received(expected.len()));
        assert_eq!(received[..2], [(1, WcStatus::SUCCESS), (2, WcStatus::SUCCESS)]);
        assert_eq!(events(&setup.a), []);
    }
}

#[test]
fn sqd_finishes_work_in_flight_before_the_drained_event() {
    let (a, b, setup) = connected(&Options::default());
    if setup.known(&rxe::DRAINED_TOO_EARLY) {
        return skip(
            "sqd_finishes_work_in_flight_before_the_drained_event",
            "a message without a receive is delayed with the rest",
        );
    }
    let from = Memory::patterned(&a.pd, 3000, 1);
    let to = b.memory(3000);
    a.send(1, SendOp::Send, &[from.sge(0, 3000)]).unwrap();
    a.qp.modify(&QpAttr { notify_drained: Some(true), ..QpAttr::to_state(QpState::Sqd) }).unwrap();
    a.send(2, SendOp::Send, &[from.sge(0, 3000)]).unwrap();
    assert_eq!(events(&setup.a), []);
    b.recv(7, &[to.sge(0, 3000)]).unwrap();
    b.recv(8, &[to.sge(0, 3000)]).unwrap();
    assert_eq!(outcome(&a.sent(1)), [(1, WcStatus::SUCCESS)]);
    let drained = eventually("the drained event", || events(&setup.a).pop());
    assert_eq!(drained, AsyncEvent::SendQueueDrained(a.qp.qpn()));
    assert_eq!(outcome(&b.received(1)), [(7, WcStatus::SUCCESS)]);
    assert_eq!(outcome(&a.sent(0)), []);
    a.to(QpState::Rts);
    assert_eq!(outcome(&a.sent(1)), [(2, WcStatus::SUCCESS)]);
}

#[test]
fn sqd_without_notification_raises_no_event() {
    for transport in ALL {
        let (a, _b, setup) = connected(&Options::of(transport));
        a.to(QpState::Sqd);
        a.drained();
        a.to(QpState::Rts);
        a.qp.modify(&QpAttr { notify_drained: Some(false), ..QpAttr::to_state(QpState::Sqd) })
            .unwrap();
        a.drained();
        a.to(QpState::Rts);
        assert_eq!(events(&setup.a), []);
    }
}

#[test]
fn error_state_flushes_posted_work_in_order() {
    for transport in ALL {
        let (a, b, setup) = connected(&Options::of(transport));
        recv(&a, 1).unwrap();
        recv(&a, 2).unwrap();
        a.to(QpState::Err);
        a.recv_late(3, &[]).unwrap();
        send(&a, &b, 4).unwrap();
        let unsignalled = match transport {
            Transport::Ud => send(&a, &b, 5),
            _ => a
                .send_with(5, SendOp::Send, SendFlags::empty(), Data::Sges(&[]))
                .map_err(|error| error.error.errno),
        };
        unsignalled.unwrap();
        let flushed =
            |ids: &[u64]| ids.iter().map(|id| (*id, WcStatus::WR_FLUSH_ERR)).collect::<Vec<_>>();
        assert_eq!(outcome(&a.received(3)), flushed(&[1, 2, 3]));
        assert_eq!(outcome(&a.sent(2)), flushed(&[4, 5]));
        // The memory of flushed work is not checked.
        a.recv_late(
            6,
            &[tokio_rdma::types::Sge { addr: 1, length: 1, lkey: tokio_rdma::types::Lkey(1) }],
        )
        .unwrap();
        assert_eq!(outcome(&a.received(1)), flushed(&[6]));
        assert_eq!((events(&setup.a), events(&setup.b)), (vec![], vec![]));
        assert_eq!(b.state(), QpState::Rts);
    }
}

#[test]
fn error_state_flushes_work_in_flight_and_delayed_in_sqd() {
    for path in [&[QpState::Err][..], &[QpState::Sqd, QpState::Err]] {
        let (a, _b, _setup) = connected(&Options::default());
        let none = SendFlags::empty();
        a.send(1, SendOp::Send, &[]).unwrap();
        a.send_with(2, SendOp::Send, none, Data::Sges(&[])).unwrap();
        for state in path {
            a.to(*state);
        }
        a.send(3, SendOp::Send, &[]).unwrap();
        let expected =
            [(1, WcStatus::WR_FLUSH_ERR), (2, WcStatus::WR_FLUSH_ERR), (3, WcStatus::WR_FLUSH_ERR)];
        assert_eq!(outcome(&a.sent(3)), expected);
    }
}

#[test]
fn reset_empties_the_queues_and_permits_reconnection() {
    for transport in ALL {
        let options = Options::of(transport);
        let (a, b, setup) = connected(&options);
        recv(&a, 1).unwrap();
        recv(&b, 2).unwrap();
        send(&a, &b, 3).unwrap();
        eventually("the receive", || (!poll(&b.recv_cq).is_empty()).then_some(()));
        a.to(QpState::Reset);
        b.to(QpState::Reset);
        assert_eq!(recv(&a, 4), Err(EINVAL));
        let left = (outcome(&poll(&a.send_cq)), outcome(&poll(&a.recv_cq)));
        if setup.known(&rxe::RESET_KEEPS_COMPLETIONS) {
            assert!(left.0.iter().all(|left| *left == (3, WcStatus::SUCCESS)), "{left:?}");
            assert_eq!(left.1, []);
        } else {
            assert_eq!(left, (vec![], vec![]), "a reset removes completions");
        }
        connect(&a, &b, &options);
        recv(&b, 5).unwrap();
        send(&a, &b, 6).unwrap();
        assert_eq!(outcome(&a.sent(1)), [(6, WcStatus::SUCCESS)]);
        assert_eq!(outcome(&b.received(1)), [(5, WcStatus::SUCCESS)]);
    }
}

#[test]
fn reset_frees_all_slots() {
    let options = Options::default();
    let (a, b, setup) = connected(&options);
    let depth = rxe::depth(&setup.a, a.qp.caps().max_recv_wr);
    for round in 0..3 {
        for id in 0..u64::from(depth) {
            recv(&a, id).unwrap_or_else(|errno| panic!("round {round}, receive {id}: {errno}"));
        }
        assert_eq!(recv(&a, 0), Err(12));
        a.to(QpState::Reset);
        a.qp.modify(&init(&options)).unwrap();
    }
    a.rtr(&options, &b);
    a.qp.modify(&rts(&options)).unwrap();
    assert_eq!(a.state(), QpState::Rts);
}

#[test]
fn failed_unreliable_send_stops_only_the_send_queue() {
    // IBTA 10.3.1: a failed send moves UC and UD to SQE, where receives continue and sends are
    // flushed.
    for transport in [Transport::Uc, Transport::Ud] {
        let (a, b, setup) = connected(&Options::of(transport));
        let bad = [tokio_rdma::types::Sge { addr: 8, length: 8, lkey: tokio_rdma::types::Lkey(0) }];
        recv(&a, 1).unwrap();
        match transport {
            Transport::Ud => a.send_to(2, &b, b.qp.qpn(), crate::common::raw::QKEY, &bad).unwrap(),
            _ => a.send(2, SendOp::Send, &bad).unwrap(),
        }
        send(&a, &b, 3).unwrap();
        let failed = rxe::SEND_WITHOUT_KEY.on(&setup.a);
        assert_eq!(outcome(&a.sent(2)), [(2, failed), (3, WcStatus::WR_FLUSH_ERR)]);
        if setup.known(&rxe::NO_SQE) {
            assert_eq!(a.state(), QpState::Err, "{transport:?}");
            assert_eq!(outcome(&a.received(1)), [(1, WcStatus::WR_FLUSH_ERR)]);
            continue;
        }
        assert_eq!(a.state(), QpState::Sqe, "{transport:?}");
        send(&b, &a, 4).unwrap();
        assert_eq!(outcome(&a.received(1)), [(1, WcStatus::SUCCESS)], "receives continue");
        for (to, legal) in
            QpState::ALL.into_iter().zip([true, false, false, true, false, false, true])
        {
            if !legal {
                assert!(a.qp.modify(&QpAttr::to_state(to)).is_err(), "{to:?}");
                assert_eq!(a.state(), QpState::Sqe);
            }
        }
        a.to(QpState::Rts);
        recv(&b, 5).unwrap();
        send(&a, &b, 6).unwrap();
        assert_eq!(outcome(&a.sent(1)), [(6, WcStatus::SUCCESS)]);
        assert_eq!(outcome(&b.received(1)), [(5, WcStatus::SUCCESS)]);
        assert_eq!((events(&setup.a), events(&setup.b)), (vec![], vec![]));
    }
}

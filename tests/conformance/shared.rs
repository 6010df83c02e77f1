//! Shared receive queues: limit event, capacity, empty queue, failures.

use tokio_rdma::SetupError;
use tokio_rdma::error::LimitError;
use tokio_rdma::types::{AsyncEvent, QpState, RecvWr, SendOp, SrqCaps, Transport, WcStatus, WrId};
use tokio_rdma::verbs::{Cq, Srq};

use crate::common::raw::{End, Options, connect, outcome, poll, post_shared};
use crate::common::{Memory, Setup, events, eventually, rxe};

/// Receivers on one shared queue and their senders. The order of fields is the drop order.
struct Fan {
    pairs: Vec<(End, End)>,
    srq: Srq,
    recv_cq: Cq,
    setup: Setup,
}

fn fan(width: usize, max_wr: u32, options: &Options) -> Fan {
    let setup = Setup::new();
    let pd = setup.b.protection_domain().unwrap();
    let srq = Srq::new(&pd, SrqCaps { max_wr, max_sge: 2 }).unwrap();
    let recv_cq = Cq::new(&setup.b, 64, None, 0).unwrap();
    let pairs = (0..width)
        .map(|_| {
            let sender = End::new(&setup.a, options);
            let send_cq = Cq::new(&setup.b, 8, None, 0).unwrap();
            let receiver = End::on(&setup.b, options, send_cq, recv_cq.clone(), Some(&srq));
            connect(&sender, &receiver, options);
            (sender, receiver)
        })
        .collect();
    Fan { pairs, srq, recv_cq, setup }
}

/// Sends a message. On a reliable connection it has arrived when this function returns.
fn send(end: &End, id: u64) {
    end.send(id, SendOp::Send, &[]).unwrap();
    assert_eq!(outcome(&end.sent(1)), [(id, WcStatus::SUCCESS)]);
}

#[test]
fn limit_event_is_raised_once_below_the_limit() {
    for transport in [Transport::Rc, Transport::Uc] {
        let Fan { pairs, srq, recv_cq, setup } = fan(2, 8, &Options::of(transport));
        let memory = Memory::new(srq.protection_domain(), 64);
        for id in 0..6 {
            post_shared(&srq, id, &[memory.sge(0, 8)]).unwrap();
        }
        assert_eq!(srq.limit().unwrap(), 0);
        srq.set_limit(4).unwrap();
        assert_eq!(srq.limit().unwrap(), 4);
        let message = |pair: usize, id: u64| {
            send(&pairs[pair].0, id);
            let received = crate::common::raw::take(&recv_cq, 1);
            assert_eq!(received[0].qpn, pairs[pair].1.qp.qpn());
            received[0].wr_id.0
        };
        assert_eq!((message(0, 1), message(1, 2)), (0, 1), "in the order of arrival");
        assert_eq!(events(&setup.b), [], "4 are left, which is not below the limit");
        assert_eq!(message(0, 3), 2);
        assert_eq!(events(&setup.b), [AsyncEvent::SrqLimitReached { srq: srq.id() }]);
        assert_eq!(srq.limit().unwrap(), 0, "the event disarms the limit");
        assert_eq!(message(1, 4), 3);
        assert_eq!(events(&setup.b), []);
        srq.set_limit(2).unwrap();
        assert_eq!(message(0, 5), 4);
        assert_eq!(events(&setup.b), [AsyncEvent::SrqLimitReached { srq: srq.id() }]);
        let beyond = srq.set_limit(srq.caps().max_wr + 1).unwrap_err();
        let asked = u64::from(srq.caps().max_wr) + 1;
        assert_eq!(
            beyond,
            SetupError::Limit(LimitError {
                field: "limit of the shared receive queue",
                asked,
                allowed: asked - 1
            })
        );
    }
}

#[test]
fn empty_shared_queue_is_receiver_not_ready() {
    let Fan { pairs, srq, setup, .. } = fan(1, 8, &Options { rnr_retry: 1, ..Options::default() });
    let (sender, receiver) = &pairs[0];
    sender.send(1, SendOp::Send, &[]).unwrap();
    assert_eq!(outcome(&sender.sent(1)), [(1, WcStatus::RNR_RETRY_EXC_ERR)]);
    assert_eq!(receiver.state(), QpState::Rts);
    post_shared(&srq, 1, &[]).unwrap();
    assert_eq!(events(&setup.b), []);

    // Seven retries mean no limit.
    let Fan { pairs, srq, recv_cq, .. } = fan(1, 8, &Options::default());
    pairs[0].0.send(1, SendOp::Send, &[]).unwrap();
    assert_eq!(outcome(&pairs[0].0.sent(0)), []);
    post_shared(&srq, 2, &[]).unwrap();
    assert_eq!(outcome(&pairs[0].0.sent(1)), [(1, WcStatus::SUCCESS)]);
    assert_eq!(outcome(&crate::common::raw::take(&recv_cq, 1)), [(2, WcStatus::SUCCESS)]);
}

#[test]
fn full_shared_queue_refuses_until_a_completion_is_polled() {
    let Fan { pairs, srq, recv_cq, setup } = fan(1, 4, &Options::default());
    let depth = u64::from(rxe::depth(&setup.b, srq.caps().max_wr));
    for id in 0..depth {
        post_shared(&srq, id, &[]).unwrap();
    }
    let refused = post_shared(&srq, depth, &[]).unwrap_err();
    assert_eq!(
        (refused.posted, refused.error.verb, refused.error.errno),
        (0, "ibv_post_srq_recv", 12)
    );
    send(&pairs[0].0, 1);
    assert_eq!(poll(&recv_cq).len(), 1);
    let elements =
        vec![Memory::new(srq.protection_domain(), 8).sge(0, 1); srq.caps().max_sge as usize + 1];
    assert_eq!(post_shared(&srq, 0, &elements).unwrap_err().error.errno, 22);
    post_shared(&srq, depth, &[]).unwrap();
    assert_eq!(post_shared(&srq, depth, &[]).unwrap_err().error.errno, 12);
}

#[test]
fn full_shared_queue_refuses_further_receives() {
    let Fan { srq, setup, .. } = fan(0, 4, &Options::default());
    let depth = rxe::depth(&setup.b, srq.caps().max_wr);
    let list: Vec<_> =
        (0..u64::from(depth) + 2).map(|id| RecvWr { wr_id: WrId(id), sges: &[] }).collect();
    let mut posted = 0;
    for wr in &list {
        match post_shared(&srq, wr.wr_id.0, wr.sges) {
            Ok(()) => posted += 1,
            Err(refused) => assert_eq!((refused.posted, refused.error.errno), (0, 12)),
        }
    }
    assert_eq!(posted, depth);
}

#[test]
fn queue_pair_on_a_shared_queue_refuses_receives() {
    let Fan { pairs, .. } = fan(1, 4, &Options::default());
    let refused = pairs[0].1.recv(1, &[]).unwrap_err();
    assert_eq!((refused.posted, refused.error.errno), (0, 22));
    assert_eq!(pairs[0].1.qp.caps().max_recv_wr, 0);
}

#[test]
fn failed_queue_pair_leaves_shared_receives_to_others() {
    let Fan { pairs, srq, recv_cq, setup } = fan(2, 8, &Options::default());
    for id in 0..3 {
        post_shared(&srq, id, &[]).unwrap();
    }
    pairs[0].1.to(QpState::Err);
    assert_eq!(poll(&recv_cq), [], "shared receives are not flushed");
    let last = AsyncEvent::LastWqeReached(pairs[0].1.qp.qpn());
    assert_eq!(events(&setup.b), if setup.known(&rxe::FEW_EVENTS) { vec![] } else { vec![last] });
    pairs[0].1.to(QpState::Err);
    assert_eq!(events(&setup.b), [], "once");
    send(&pairs[1].0, 1);
    let received = crate::common::raw::take(&recv_cq, 1);
    assert_eq!((received[0].wr_id.0, received[0].qpn), (0, pairs[1].1.qp.qpn()));
}

#[test]
fn failed_receive_fails_only_its_queue_pair() {
    let Fan { pairs, srq, recv_cq, setup } = fan(2, 8, &Options::default());
    for id in 0..3 {
        post_shared(&srq, id, &[]).unwrap();
    }
    let from = pairs[0].0.memory(8);
    pairs[0].0.send(1, SendOp::Send, &[from.sge(0, 8)]).unwrap();
    assert_eq!(outcome(&pairs[0].0.sent(1)), [(1, rxe::TOO_LONG_HERE.on(&setup.a))]);
    let failed = crate::common::raw::take(&recv_cq, 1);
    let status = rxe::TOO_LONG_THERE.on(&setup.b);
    assert_eq!((outcome(&failed), failed[0].qpn), (vec![(0, status)], pairs[0].1.qp.qpn()));
    if !setup.known(&rxe::FEW_EVENTS) {
        let last = eventually("the last receive", || events(&setup.b).pop());
        assert_eq!(last, AsyncEvent::LastWqeReached(pairs[0].1.qp.qpn()));
    }
    send(&pairs[1].0, 2);
    assert_eq!(outcome(&crate::common::raw::take(&recv_cq, 1)), [(1, WcStatus::SUCCESS)]);
    assert_eq!(pairs[1].1.state(), QpState::Rts);
}

#[test]
fn shared_receive_from_another_domain_fails() {
    let Fan { pairs, srq, recv_cq, setup } = fan(1, 8, &Options::default());
    let other = setup.b.protection_domain().unwrap();
    let foreign = Memory::new(&other, 8);
    post_shared(&srq, 1, &[foreign.sge(0, 8)]).unwrap();
    let from = pairs[0].0.memory(8);
    pairs[0].0.send(1, SendOp::Send, &[from.sge(0, 8)]).unwrap();
    assert_eq!(outcome(&pairs[0].0.sent(1)), [(1, WcStatus::REM_OP_ERR)]);
    assert_eq!(
        outcome(&crate::common::raw::take(&recv_cq, 1)),
        [(1, rxe::RECEIVE_NOT_COVERED.on(&setup.b))]
    );
}

#[test]
fn shared_queue_sizes_over_device_limits_are_refused() {
    let setup = Setup::new();
    let pd = setup.a.protection_domain().unwrap();
    let attr = setup.a.attr();
    let caps = SrqCaps { max_wr: attr.max_srq_wr + 1, max_sge: 1 };
    let asked = u64::from(attr.max_srq_wr) + 1;
    let limit =
        LimitError { field: "max_wr of the shared receive queue", asked, allowed: asked - 1 };
    assert_eq!(Srq::new(&pd, caps).unwrap_err(), SetupError::Limit(limit));
    let caps = SrqCaps { max_wr: 1, max_sge: attr.max_srq_sge + 1 };
    let asked = u64::from(attr.max_srq_sge) + 1;
    let limit =
        LimitError { field: "max_sge of the shared receive queue", asked, allowed: asked - 1 };
    assert_eq!(Srq::new(&pd, caps).unwrap_err(), SetupError::Limit(limit));
}

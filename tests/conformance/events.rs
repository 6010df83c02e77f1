//! A device that fails, ports that go down and come up.

use futures::StreamExt;
use tokio_rdma::types::{
    AckTimeout, AsyncEvent, PortNum, PortState, QpState, SendOp, Transport, WcStatus,
};
use tokio_rdma::{CompletionQueue, Device, OpErrorKind, QueuePair, SharedReceiveQueue};

use crate::common::pair::{Pair, Shape};
use crate::common::raw::{End, Options, connect, outcome};
use crate::common::{Setup, events, in_every_mode, run, within};

in_every_mode! { device_that_is_lost_ends_every_operation }

async fn device_that_is_lost_ends_every_operation(mode: &str) {
    let Some((setup, control, _other)) = Setup::controlled("device_that_is_lost") else { return };
    let shape = Shape {
        options: tokio_rdma::op::ConnectOptions {
            timeout: tokio_rdma::types::AckTimeout::from_code(5),
            retry_count: 1,
            ..Default::default()
        },
        build: &|builder| builder.max_send_wr(4).max_recv_wr(4),
        ..Shape::new(Transport::Rc, mode)
    };
    let Pair { a, b, setup } = Pair::shaped(setup, &shape);
    // In flight for want of a receive, in line for want of room, and receives in both conditions.
    let sends: Vec<_> = (0..8).map(|_| a.qp.send(a.room(8))).collect();
    let receives: Vec<_> = (0..8).map(|_| a.qp.recv(a.room(8))).collect();
    let waiting = tokio::spawn(async move {
        let mut ended = Vec::new();
        for send in sends {
            ended.push(send.await.map(drop).unwrap_err().kind());
        }
        for receive in receives {
            ended.push(receive.await.map(drop).unwrap_err().kind());
        }
        ended
    });
    tokio::task::yield_now().await;
    control.kill();
    for kind in within("operations on a lost device", waiting).await.unwrap() {
        // Its timers may run out between the end of its link and that of its queue pairs.
        let known = matches!(kind.status(), Some(WcStatus::WR_FLUSH_ERR | WcStatus::RETRY_EXC_ERR))
            || matches!(
                kind,
                OpErrorKind::Closed | OpErrorKind::Post(_) | OpErrorKind::CompletionQueue(_)
            );
        assert!(known, "{kind}");
    }
    assert_eq!(setup.a.next_event().unwrap(), Some(AsyncEvent::DeviceFatal));
    assert_eq!(setup.a.next_event().unwrap_err().errno, 19);
    assert!(within("a late send", a.qp.send(a.room(8))).await.is_err());
    // Every verb says so.
    assert_eq!(setup.a.protection_domain().unwrap_err().errno, 5);
    assert_eq!(setup.a.port(PortNum(1)).unwrap_err().errno, 5);
    assert!(a.qp.modify(&tokio_rdma::types::QpAttr::to_state(QpState::Reset)).is_err());
    // The peer hears nothing and finds out by itself.
    let error = within("the peer", b.qp.send(b.room(8))).await.unwrap_err();
    assert_eq!(error.status(), Some(WcStatus::RETRY_EXC_ERR));
    within("close", a.qp.close()).await;
    assert_eq!(a.pool.available(), a.pool.total(), "no buffer is lost");
}

in_every_mode! { device_that_says_that_it_is_lost_and_no_more_ends_every_operation }

/// As an adapter that is pulled out: no completion, no error of a poll, an event and nothing else.
async fn device_that_says_that_it_is_lost_and_no_more_ends_every_operation(mode: &str) {
    let Some((setup, control, _other)) = Setup::controlled("device_that_says_that_it_is_lost")
    else {
        return;
    };
    // It never gives up by itself.
    let forever =
        tokio_rdma::op::ConnectOptions { timeout: AckTimeout::from_code(0), ..Default::default() };
    let Pair { a, b, setup } =
        Pair::shaped(setup, &Shape { options: forever, ..Shape::new(Transport::Rc, mode) });
    let srq = SharedReceiveQueue::new(&a.pd, &a.queue, 4, 1).unwrap();
    control.set_port(false);
    let sends: Vec<_> = (0..3).map(|_| tokio::spawn(a.qp.send(a.room(8)))).collect();
    let receives = [a.qp.recv(a.room(8)), srq.recv(a.room(8))].map(tokio::spawn);
    let (later, shared) = (a.qp.recv(a.room(8)), srq.recv(a.room(8)));
    drop(a.qp.recv(a.room(8)));
    tokio::task::yield_now().await;
    let mut stream = setup.a.events().unwrap();
    assert_eq!(within("port", stream.next()).await, Some(Ok(AsyncEvent::PortError(PortNum(1)))));
    control.announce(AsyncEvent::DeviceFatal);
    let mut ended = Vec::new();
    for send in sends {
        ended.push(within("a send", send).await.unwrap().unwrap_err().kind());
    }
    for receive in receives {
        ended.push(within("a receive", receive).await.unwrap().unwrap_err().kind());
    }
    ended.push(within("a later receive", later).await.unwrap_err().kind());
    ended.push(within("a later shared receive", shared).await.unwrap_err().kind());
    for kind in ended {
        let known = matches!(kind, OpErrorKind::CompletionQueue(error) if error.errno == 5)
            // Its queue pair is flushed by this device, which is not gone at all.
            || kind.status() == Some(WcStatus::WR_FLUSH_ERR);
        assert!(known, "{mode}: {kind:?}");
    }
    crate::common::eventually("buffers", || (a.pool.available() == a.pool.total()).then_some(()));
    assert_eq!(
        within("the event", stream.next()).await,
        Some(Ok(AsyncEvent::DeviceFatal)),
        "it is the user's too"
    );
    assert!(within("a late send", a.qp.send(a.room(8))).await.is_err());
    assert!(a.queue.failure().is_some());
    drop(b);
}

in_every_mode! { queue_that_an_event_calls_dead_ends_its_operations_and_no_others }

async fn queue_that_an_event_calls_dead_ends_its_operations_and_no_others(mode: &str) {
    let Some((setup, control, _other)) = Setup::controlled("queue_that_an_event_calls_dead") else {
        return;
    };
    let Pair { a, b, setup } = Pair::shaped(setup, &Shape::new(Transport::Rc, mode));
    let bystander = CompletionQueue::new(&setup.a, crate::common::mode(mode)).unwrap();
    let qp = QueuePair::builder(&a.pd, &bystander).build().unwrap();
    qp.connect(&qp.endpoint()).unwrap();
    let (dead, alive) = (tokio::spawn(a.qp.recv(a.room(8))), tokio::spawn(qp.recv(a.room(8))));
    tokio::task::yield_now().await;
    control.announce(AsyncEvent::CqError { cq: a.queue.id() });
    let kind = within("on the dead queue", dead).await.unwrap().unwrap_err().kind();
    let known = matches!(kind, OpErrorKind::CompletionQueue(error) if error.errno == 5)
        || kind.status() == Some(WcStatus::WR_FLUSH_ERR);
    assert!(known, "{mode}: {kind:?}");
    within("on another queue", qp.send(a.room(5))).await.unwrap();
    assert_eq!(within("on another queue", alive).await.unwrap().unwrap().len, 5);
    assert_eq!(setup.a.next_event().unwrap(), Some(AsyncEvent::CqError { cq: a.queue.id() }));
    drop(b);
}

#[test]
fn stream_hears_of_events_that_somebody_else_has_read() {
    run(1, "backlog", async {
        let Some((setup, control, _other)) = Setup::controlled("stream_hears") else { return };
        let mut stream = setup.a.events().unwrap();
        let mut second = setup.a.events().unwrap();
        let pd = setup.a.protection_domain().unwrap();
        let queue = CompletionQueue::new(&setup.a, tokio_rdma::CompletionMode::Event).unwrap();
        let srq = SharedReceiveQueue::new(&pd, &queue, 4, 1).unwrap();
        let qp = QueuePair::builder(&pd, &queue).shared_receive_queue(&srq).build().unwrap();
        qp.connect(&qp.endpoint()).unwrap();
        let qpn = qp.endpoint().qpn;
        let waits = tokio::spawn(async move { stream.next().await });
        tokio::task::yield_now().await;
        // The end of the queue pair reads this one, and what came before it.
        control.set_port(false);
        within("close", qp.close()).await;
        assert_eq!(
            within("first", waits).await.unwrap(),
            Some(Ok(AsyncEvent::PortError(PortNum(1))))
        );
        assert_eq!(
            within("second", second.next()).await,
            Some(Ok(AsyncEvent::LastWqeReached(qpn)))
        );
        assert_eq!(events(&setup.a), [], "each is given once");
    });
}

#[test]
fn events_that_nobody_takes_do_not_fill_the_memory() {
    let Some((setup, control, _other)) = Setup::controlled("events_that_nobody_takes") else {
        return;
    };
    for up in [false, true].into_iter().cycle().take(5000) {
        control.set_port(up);
    }
    let kept = events(&setup.a);
    assert_eq!(kept.len(), 4096);
    assert_eq!(kept.last(), Some(&AsyncEvent::PortActive(PortNum(1))), "the latest");
}

#[test]
fn event_stream_gives_each_event_once_and_ends_with_the_device() {
    run(1, "event stream", async {
        let Some((setup, control, _other)) = Setup::controlled("event_stream") else { return };
        let mut stream = setup.a.events().unwrap();
        control.set_port(false);
        control.set_port(false);
        assert_eq!(
            within("down", stream.next()).await,
            Some(Ok(AsyncEvent::PortError(PortNum(1))))
        );
        assert_eq!(setup.a.port(PortNum(1)).unwrap().state, PortState::Down);
        let (up, ()) = tokio::join!(within("up", stream.next()), async { control.set_port(true) });
        assert_eq!(up, Some(Ok(AsyncEvent::PortActive(PortNum(1)))));
        assert_eq!(setup.a.port(PortNum(1)).unwrap().state, PortState::Active);
        let (fatal, ()) = tokio::join!(within("fatal", stream.next()), async { control.kill() });
        assert_eq!(fatal, Some(Ok(AsyncEvent::DeviceFatal)));
        assert_eq!(within("the end", stream.next()).await, None);
        assert_eq!(within("after the end", stream.next()).await, None);
        assert_eq!(events(&setup.b), [], "the other device is another");
    });
}

#[test]
fn port_that_is_down_for_a_while_delays_reliable_work() {
    let Some((setup, _control, other)) = Setup::controlled("port_that_is_down") else { return };
    let options = Options { timeout: 10, ..Options::default() };
    let (a, b) = (End::new(&setup.a, &options), End::new(&setup.b, &options));
    connect(&a, &b, &options);
    let to = b.memory(8);
    other.set_port(false);
    a.send(1, SendOp::Write(to.remote(0)), &[]).unwrap();
    assert_eq!(outcome(&a.sent(0)), []);
    other.set_port(true);
    assert_eq!(outcome(&a.sent(1)), [(1, WcStatus::SUCCESS)]);
    assert_eq!(
        events(&setup.b),
        [AsyncEvent::PortError(PortNum(1)), AsyncEvent::PortActive(PortNum(1))]
    );
    assert_eq!(events(&setup.a), []);
}

#[test]
fn port_that_stays_down_exceeds_the_retries() {
    for end in ["own", "peer's"] {
        let Some((setup, control, other)) = Setup::controlled("port_that_stays_down") else {
            return;
        };
        let options = Options { timeout: 4, retry_count: 1, ..Options::default() };
        let (a, b) = (End::new(&setup.a, &options), End::new(&setup.b, &options));
        connect(&a, &b, &options);
        if end == "own" {
            control.set_port(false)
        } else {
            other.set_port(false)
        };
        a.send(1, SendOp::Send, &[]).unwrap();
        assert_eq!(outcome(&a.sent(1)), [(1, WcStatus::RETRY_EXC_ERR)], "{end} port");
        assert_eq!((a.state(), b.state()), (QpState::Err, QpState::Rts));
    }
}

#[test]
fn every_opening_of_a_device_hears_of_its_port_and_its_end() {
    let network = crate::common::network();
    let open = || Device::software_in(&network, "x").unwrap();
    let (first, second) = (open(), open());
    let control = network.control("x").unwrap();
    control.set_port(false);
    control.kill();
    for device in [&first, &second] {
        assert_eq!(device.next_event().unwrap(), Some(AsyncEvent::PortError(PortNum(1))));
        assert_eq!(device.next_event().unwrap(), Some(AsyncEvent::DeviceFatal));
        assert_eq!(device.next_event().unwrap_err().errno, 19);
    }
    assert!(Device::software_in(&network, "x").is_err(), "still open, so still the dead one");
    drop((first, second, control));
    assert!(Device::software_in(&network, "x").is_ok());
}

#[test]
fn shared_receives_end_with_their_device() {
    for (mode, draws) in
        crate::common::MODES.into_iter().flat_map(|mode| [(mode, false), (mode, true)])
    {
        run(1, mode, async {
            let Some((setup, control, _other)) = Setup::controlled("shared_receives_end") else {
                return;
            };
            let pd = setup.a.protection_domain().unwrap();
            let queue =
                tokio_rdma::CompletionQueue::new(&setup.a, crate::common::mode(mode)).unwrap();
            let srq = tokio_rdma::SharedReceiveQueue::new(&pd, &queue, 4, 1).unwrap();
            let builder = || tokio_rdma::QueuePair::builder(&pd, &queue).shared_receive_queue(&srq);
            let qp = draws.then(|| builder().build().unwrap());
            let pool = tokio_rdma::Pool::new(&pd, 64, 12).unwrap();
            let receive = || srq.recv(pool.try_alloc(8).unwrap());
            // Posted and in line, waited for, abandoned, and looked at later.
            let waiting: Vec<_> = (0..3).map(|_| tokio::spawn(receive())).collect();
            drop(receive());
            let later: Vec<_> = (0..4).map(|_| receive()).collect();
            drop(receive());
            tokio::task::yield_now().await;
            control.kill();
            let mut ended = Vec::new();
            for receive in waiting {
                ended.push(within("a shared receive", receive).await.unwrap());
            }
            for receive in later {
                ended.push(within("a shared receive", receive).await);
            }
            for result in ended {
                let kind = result.unwrap_err().kind();
                assert!(
                    matches!(kind, OpErrorKind::CompletionQueue(error) if error.errno == 5),
                    "{mode}: {kind:?}"
                );
            }
            // Those of abandoned receives too, which the thread of a poller may still have in hand.
            crate::common::eventually("buffers", || (pool.available() == 12).then_some(()));
            let late = within("a late receive", receive()).await.unwrap_err();
            assert!(matches!(late.kind(), OpErrorKind::Closed), "{mode}: {:?}", late.kind());
            drop((qp, srq));
        });
    }
}

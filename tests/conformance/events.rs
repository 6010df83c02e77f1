//! Failures of devices and completion queues, and ports that go down and up.

use futures::StreamExt;
use tokio_rdma::types::{
    AckTimeout, AsyncEvent, PortNum, PortState, QpState, SendOp, Transport, WcStatus,
};
use tokio_rdma::{CompletionQueue, Device, OpErrorKind, QueuePair, SharedReceiveQueue};

use crate::common::pair::{Pair, Shape};
use crate::common::raw::{End, Options, connect, outcome};
use crate::common::{Setup, events, in_every_mode, run, within};

in_every_mode! { lost_device_fails_every_operation }

// Shows C1.
async fn lost_device_fails_every_operation(mode: &str) {
    let Some((setup, control, _other)) = Setup::controlled("lost_device") else { return };
    let shape = Shape {
        options: tokio_rdma::op::RetryConfig {
            timeout: tokio_rdma::types::AckTimeout::from_code(5),
            retry_count: 1,
            ..Default::default()
        },
        build: &|builder| builder.max_send_wr(4).max_recv_wr(4),
        ..Shape::new(Transport::Rc, mode)
    };
    let Pair { a, b, setup } = Pair::shaped(setup, &shape);
    // Four of each are in flight and four are queued.
    let sends: Vec<_> = (0..8).map(|_| a.qp.send(a.blank(8))).collect();
    let receives: Vec<_> = (0..8).map(|_| a.qp.recv(a.blank(8))).collect();
    let waiting = tokio::spawn(async move {
        let mut results = Vec::new();
        for send in sends {
            results.push(send.await.map(drop).unwrap_err().kind());
        }
        for receive in receives {
            results.push(receive.await.map(drop).unwrap_err().kind());
        }
        results
    });
    tokio::task::yield_now().await;
    control.kill();
    for kind in within("operations on a lost device", waiting).await.unwrap() {
        // A retry timer may expire between the failure of the link and of the queue pairs.
        let known = matches!(kind.status(), Some(WcStatus::WR_FLUSH_ERR | WcStatus::RETRY_EXC_ERR))
            || matches!(
                kind,
                OpErrorKind::Closed | OpErrorKind::Post(_) | OpErrorKind::CompletionQueue(_)
            );
        assert!(known, "{kind}");
    }
    assert_eq!(setup.a.next_event().unwrap(), Some(AsyncEvent::DeviceFatal));
    assert_eq!(setup.a.next_event().unwrap_err().errno, 19);
    assert!(within("a late send", a.qp.send(a.blank(8))).await.is_err());
    assert_eq!(setup.a.protection_domain().unwrap_err().errno, 5);
    assert_eq!(setup.a.port(PortNum(1)).unwrap_err().errno, 5);
    assert!(a.qp.modify(&tokio_rdma::types::QpAttr::to_state(QpState::Reset)).is_err());
    let error = within("the peer", b.qp.send(b.blank(8))).await.unwrap_err();
    assert_eq!(error.status(), Some(WcStatus::RETRY_EXC_ERR));
    within("close", a.qp.close()).await;
    assert_eq!(a.pool.available(), a.pool.total(), "buffers are lost");
}

in_every_mode! { device_fatal_event_alone_fails_every_operation }

/// Simulates a pulled-out adapter: an event, but neither completions nor errors of polls.
// Shows C1.
async fn device_fatal_event_alone_fails_every_operation(mode: &str) {
    let Some((setup, control, _other)) = Setup::controlled("device_fatal_event_alone") else {
        return;
    };
    // Timeout 0 is no timeout, so sends never fail by themselves.
    let without_timeout =
        tokio_rdma::op::RetryConfig { timeout: AckTimeout::from_code(0), ..Default::default() };
    let Pair { a, b, setup } =
        Pair::shaped(setup, &Shape { options: without_timeout, ..Shape::new(Transport::Rc, mode) });
    let srq = SharedReceiveQueue::new(&a.pd, &a.queue, 4, 1).unwrap();
    control.set_port(false);
    let sends: Vec<_> = (0..3).map(|_| tokio::spawn(a.qp.send(a.blank(8)))).collect();
    let receives = [a.qp.recv(a.blank(8)), srq.recv(a.blank(8))].map(tokio::spawn);
    let (later, shared) = (a.qp.recv(a.blank(8)), srq.recv(a.blank(8)));
    drop(a.qp.recv(a.blank(8)));
    tokio::task::yield_now().await;
    let mut stream = setup.a.events().unwrap();
    assert_eq!(within("port", stream.next()).await, Some(Ok(AsyncEvent::PortError(PortNum(1)))));
    control.announce(AsyncEvent::DeviceFatal);
    let mut results = Vec::new();
    for send in sends {
        results.push(within("a send", send).await.unwrap().unwrap_err().kind());
    }
    for receive in receives {
        results.push(within("a receive", receive).await.unwrap().unwrap_err().kind());
    }
    results.push(within("a later receive", later).await.unwrap_err().kind());
    results.push(within("a later shared receive", shared).await.unwrap_err().kind());
    for kind in results {
        let known = matches!(kind, OpErrorKind::CompletionQueue(error) if error.errno == 5)
            // This device still works, so it flushes the queue pair.
            || kind.status() == Some(WcStatus::WR_FLUSH_ERR);
        assert!(known, "{mode}: {kind:?}");
    }
    crate::common::eventually("buffers", || (a.pool.available() == a.pool.total()).then_some(()));
    assert_eq!(
        within("the event", stream.next()).await,
        Some(Ok(AsyncEvent::DeviceFatal)),
        "the user's stream receives the event too"
    );
    assert!(within("a late send", a.qp.send(a.blank(8))).await.is_err());
    assert!(a.queue.failure().is_some());
    drop(b);
}

in_every_mode! { cq_error_event_fails_only_its_queue }

// Shows C1.
async fn cq_error_event_fails_only_its_queue(mode: &str) {
    let Some((setup, control, _other)) = Setup::controlled("cq_error_event") else {
        return;
    };
    let Pair { a, b, setup } = Pair::shaped(setup, &Shape::new(Transport::Rc, mode));
    let bystander = CompletionQueue::new(&setup.a, crate::common::mode(mode)).unwrap();
    let qp = QueuePair::builder(&a.pd, &bystander).build().unwrap();
    qp.connect(&qp.endpoint()).unwrap();
    let (failed, working) =
        (tokio::spawn(a.qp.recv(a.blank(8))), tokio::spawn(qp.recv(a.blank(8))));
    tokio::task::yield_now().await;
    control.announce(AsyncEvent::CqError { cq: a.queue.id() });
    let kind = within("on the failed queue", failed).await.unwrap().unwrap_err().kind();
    let known = matches!(kind, OpErrorKind::CompletionQueue(error) if error.errno == 5)
        || kind.status() == Some(WcStatus::WR_FLUSH_ERR);
    assert!(known, "{mode}: {kind:?}");
    within("on another queue", qp.send(a.blank(5))).await.unwrap();
    assert_eq!(within("on another queue", working).await.unwrap().unwrap().len, 5);
    assert_eq!(setup.a.next_event().unwrap(), Some(AsyncEvent::CqError { cq: a.queue.id() }));
    drop(b);
}

#[test]
fn stream_receives_events_that_other_code_has_read() {
    run(1, "backlog", async {
        let Some((setup, control, _other)) = Setup::controlled("stream_receives_events") else {
            return;
        };
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
        // Closing the queue pair reads this event and the last-WQE event.
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
        assert_eq!(events(&setup.a), [], "each event is delivered once");
    });
}

#[test]
fn unread_events_are_bounded() {
    let Some((setup, control, _other)) = Setup::controlled("unread_events") else {
        return;
    };
    for up in [false, true].into_iter().cycle().take(5000) {
        control.set_port(up);
    }
    let unread = events(&setup.a);
    assert_eq!(unread.len(), 4096);
    assert_eq!(
        unread.last(),
        Some(&AsyncEvent::PortActive(PortNum(1))),
        "the newest events are kept"
    );
}

#[test]
fn event_stream_yields_each_event_once_and_ends_with_the_device() {
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
        assert_eq!(events(&setup.b), [], "events of one device do not reach the other");
    });
}

#[test]
fn port_outage_delays_reliable_work() {
    let Some((setup, _control, other)) = Setup::controlled("port_outage") else { return };
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
fn every_handle_of_a_device_receives_its_events() {
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
    assert!(Device::software_in(&network, "x").is_err(), "the failed device is still open");
    drop((first, second, control));
    assert!(Device::software_in(&network, "x").is_ok());
}

// Shows C1.
#[test]
fn shared_receives_fail_with_their_device() {
    for (mode, attached) in
        crate::common::MODES.into_iter().flat_map(|mode| [(mode, false), (mode, true)])
    {
        run(1, mode, async {
            let Some((setup, control, _other)) = Setup::controlled("shared_receives_fail") else {
                return;
            };
            let pd = setup.a.protection_domain().unwrap();
            let queue =
                tokio_rdma::CompletionQueue::new(&setup.a, crate::common::mode(mode)).unwrap();
            let srq = tokio_rdma::SharedReceiveQueue::new(&pd, &queue, 4, 1).unwrap();
            let builder = || tokio_rdma::QueuePair::builder(&pd, &queue).shared_receive_queue(&srq);
            let qp = attached.then(|| builder().build().unwrap());
            let pool = tokio_rdma::Pool::new(&pd, 64, 12).unwrap();
            let receive = || srq.recv(pool.try_alloc(8).unwrap());
            // Posted and queued receives; some are awaited now, some later, some are dropped.
            let waiting: Vec<_> = (0..3).map(|_| tokio::spawn(receive())).collect();
            drop(receive());
            let later: Vec<_> = (0..4).map(|_| receive()).collect();
            drop(receive());
            tokio::task::yield_now().await;
            control.kill();
            let mut results = Vec::new();
            for receive in waiting {
                results.push(within("a shared receive", receive).await.unwrap());
            }
            for receive in later {
                results.push(within("a shared receive", receive).await);
            }
            for result in results {
                let kind = result.unwrap_err().kind();
                assert!(
                    matches!(kind, OpErrorKind::CompletionQueue(error) if error.errno == 5),
                    "{mode}: {kind:?}"
                );
            }
            // A polling thread may be about to drop the buffers of dropped receives.
            crate::common::eventually("buffers", || (pool.available() == 12).then_some(()));
            let late = within("a late receive", receive()).await.unwrap_err();
            assert!(matches!(late.kind(), OpErrorKind::Closed), "{mode}: {:?}", late.kind());
            drop((qp, srq));
        });
    }
}

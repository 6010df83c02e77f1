//! Misuse of the crate gives a status or a typed error, returns the buffers, and never hangs.
//!
//! Shows C4.

use std::hint::black_box;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use tokio_rdma::error::{LimitError, ReceiveLengths, TryError};
use tokio_rdma::memory::{HostMemory, PoolError};
use tokio_rdma::op::{QueuePairBuilder, RetryConfig};
use tokio_rdma::types::{AckTimeout, Mtu, PortNum, QpAttr, QpState, Rkey, Transport, WcStatus};
use tokio_rdma::verbs::{Cq, Qp, QpConfig};
use tokio_rdma::{
    Access, CompletionQueue, ExposedRegion, OpErrorKind, Pool, QueuePair, QueuePairEndpoint,
    RemoteRegion, SetupError, SharedReceiveQueue,
};

use crate::common::pair::{Pair, QKEY, Shape, connect};
use crate::common::raw::Options;
use crate::common::{
    Setup, hardware, in_every_mode, mode as mode_of, pattern, run, rxe, until, within,
};

in_every_mode! {
    work_over_the_queue_capacity_waits,
    dropped_remote_region_is_an_access_error,
    failed_operations_return_their_buffers,
    dropped_queue_pair_fails_pending_operations,
    closed_queue_pair_fails_operations_with_closed,
    reset_fails_pending_operations,
    reset_does_not_wait_for_the_dispatch_of_failures,
    unconnected_queue_pair_refuses_sends,
    short_and_missing_receives_have_their_statuses,
}

fn with_depth(mode: &str, depth: u32, options: RetryConfig) -> Pair {
    let build = move |builder: QueuePairBuilder| builder.max_send_wr(depth).max_recv_wr(depth);
    Pair::shaped(Setup::new(), &Shape { build: &build, options, ..Shape::new(Transport::Rc, mode) })
}

async fn work_over_the_queue_capacity_waits(mode: &str) {
    let Pair { a, b, .. } = with_depth(mode, 4, RetryConfig::default());
    let sends: Vec<_> = (0..20_u8).map(|at| a.qp.send(a.buffer(&[at]))).collect();
    let counters = a.qp.send_counters();
    assert_eq!(
        (counters.in_flight, counters.waiting),
        (4, 16),
        "without a receive, no send completes"
    );
    match a.qp.try_send(a.buffer(b"mine")) {
        Err(TryError::Full(buffer)) => assert_eq!(&buffer[..], b"mine"),
        other => panic!("{other:?}"),
    }
    let region = b.region(8);
    let full = a.qp.try_write(a.buffer(b"mine"), region.grant()).unwrap_err();
    assert!(full.is_full());
    assert_eq!(&full.into_buffer()[..], b"mine");
    assert!(a.qp.try_read(a.blank(8), region.grant()).unwrap_err().is_full());
    assert!(a.qp.try_fetch_add(region.grant(), 1).unwrap_err().is_full());
    assert!(a.qp.try_compare_swap(region.grant(), 0, 1).unwrap_err().is_full());

    let receives: Vec<_> = (0..20).map(|_| b.qp.recv(b.blank(1))).collect();
    let counters = b.qp.receive_counters();
    assert_eq!(counters.posted + counters.waiting as u64, 20);
    // Both ends are awaited at once: a cooperative queue makes progress only while it is awaited.
    let sends = tokio::spawn(async move {
        for (at, send) in sends.into_iter().enumerate() {
            assert_eq!(within("a queued send", send).await.unwrap()[..], [at as u8]);
        }
    });
    for (at, receive) in receives.into_iter().enumerate() {
        let received = within("a queued receive", receive).await.unwrap();
        assert_eq!(received.buffer[..], [at as u8], "first in, first out");
    }
    within("all sends", sends).await.unwrap();
    let counters = a.qp.send_counters();
    assert_eq!(
        (counters.posted, counters.waiting, counters.waited, counters.failed),
        (20, 0, 16, 0)
    );
    let receive = b.qp.try_recv(b.blank(1)).unwrap();
    a.qp.try_send(a.buffer(b"x")).unwrap().await.unwrap();
    assert_eq!(&receive.await.unwrap().buffer[..], b"x");
    let receives: Vec<_> = (0..4).map(|_| b.qp.try_recv(b.blank(1)).unwrap()).collect();
    let full = b.qp.try_recv(b.blank(7)).unwrap_err();
    assert_eq!((full.is_full(), full.into_buffer().len()), (true, 7));
    drop(receives);
}

async fn dropped_remote_region_is_an_access_error(mode: &str) {
    for remote_end in [true, false] {
        let Pair { a, b, .. } = Pair::new(Transport::Rc, mode);
        let region = b.region(64);
        let slice = a.region(64);
        let grant = region.grant();
        // Delayed by a message without a receive.
        let held = a.qp.send(());
        let write = a.qp.write(slice.slice(0..64).unwrap(), grant);
        let behind = a.qp.send(());
        // An operation in flight holds its local region, but not the peer's.
        let kept = if remote_end {
            drop(region);
            slice
        } else {
            drop(slice);
            region
        };
        let receive = b.qp.recv(());
        within("the message", held).await.unwrap();
        within("the receive", receive).await.unwrap();
        if remote_end {
            let error = within("the write", write).await;
            let status = error.as_ref().map(drop).map_err(|error| error.status());
            assert_eq!(status, Err(Some(WcStatus::REM_ACCESS_ERR)));
            let flushed = within("behind it", behind).await.unwrap_err();
            assert_eq!(flushed.status(), Some(WcStatus::WR_FLUSH_ERR));
        } else {
            assert_eq!(within("the write", write).await.unwrap().len(), 64);
            let receive = b.qp.recv(());
            within("behind it", behind).await.unwrap();
            within("its receive", receive).await.unwrap();
        }
        drop(kept);
    }
}

async fn failed_operations_return_their_buffers(mode: &str) {
    let Pair { a, b, .. } = Pair::new(Transport::Rc, mode);
    let bad = RemoteRegion::new(b.region(64).grant().addr(), 64, Rkey(0));
    let receives = [a.qp.recv(a.blank(3)), a.qp.recv(a.blank(4))];
    let list = vec![a.buffer(b"a"), a.buffer(b"bc")];
    let failed = a.qp.write(list, bad);
    let flushed = a.qp.send(a.buffer(b"sent"));
    let error = within("write", failed).await.unwrap_err();
    assert_eq!(error.status(), Some(WcStatus::REM_ACCESS_ERR));
    let buffers = error.into_buffer();
    assert_eq!((&buffers[0][..], &buffers[1][..]), (&b"a"[..], &b"bc"[..]));
    let error = within("send", flushed).await.unwrap_err();
    assert_eq!(error.status(), Some(WcStatus::WR_FLUSH_ERR));
    assert_eq!(&error.into_buffer()[..], b"sent");
    for (receive, len) in receives.into_iter().zip([3, 4]) {
        let error = within("receive", receive).await.unwrap_err();
        assert_eq!(
            (error.status(), error.into_buffer().len()),
            (Some(WcStatus::WR_FLUSH_ERR), len)
        );
    }
    let late = within("late", a.qp.read(a.blank(8), bad)).await.unwrap_err();
    assert_eq!(late.status(), Some(WcStatus::WR_FLUSH_ERR));
    assert_eq!(
        within("late", a.qp.fetch_add(bad.slice(..8).unwrap(), 1)).await.unwrap_err().status(),
        late.status()
    );
    assert_eq!(a.state(), QpState::Err);
    let counters = a.qp.send_counters();
    assert_eq!((counters.failed, counters.flushed, counters.in_flight), (4, 3, 0));
}

fn is_closed_or_flushed(kind: OpErrorKind) -> bool {
    kind == OpErrorKind::Closed || kind.status() == Some(WcStatus::WR_FLUSH_ERR)
}

async fn dropped_queue_pair_fails_pending_operations(mode: &str) {
    let Pair { a, b, .. } = with_depth(mode, 2, RetryConfig::default());
    let (a_qp, pool) = (a.qp, a.pool);
    let buffer = || pool.copy_from(b"12345678").unwrap();
    let sends: Vec<_> = (0..5).map(|_| a_qp.send(buffer())).collect();
    let receives: Vec<_> = (0..5).map(|_| a_qp.recv(buffer())).collect();
    let detached = a_qp.recv(buffer());
    drop(detached);
    drop(a_qp);
    for send in sends {
        let error = within("send", send).await.unwrap_err();
        assert!(is_closed_or_flushed(error.kind()), "{error}");
        assert_eq!(&error.into_buffer()[..], b"12345678");
    }
    for receive in receives {
        let error = within("receive", receive).await.unwrap_err();
        assert!(is_closed_or_flushed(error.kind()), "{error}");
        assert_eq!(error.into_buffer().len(), 8);
    }
    until("the buffer of the dropped receive", || pool.available() == pool.total()).await;
    until("its completion queue entries", || a.queue.counters().reserved == 0).await;
    drop(b);
}

async fn closed_queue_pair_fails_operations_with_closed(mode: &str) {
    let Pair { a, b, .. } = with_depth(mode, 2, RetryConfig::default());
    let sends: Vec<_> = (0..5).map(|_| a.qp.send(a.blank(8))).collect();
    let receives: Vec<_> = (0..5).map(|_| a.qp.recv(a.blank(8))).collect();
    let clone = a.qp.clone();
    within("close", a.qp.clone().close()).await;
    for send in sends {
        let error = within("send", send).await.unwrap_err();
        assert!(is_closed_or_flushed(error.kind()), "{error}");
    }
    for receive in receives {
        let error = within("receive", receive).await.unwrap_err();
        assert!(is_closed_or_flushed(error.kind()), "{error}");
    }
    let error = within("late send", clone.send(a.blank(8))).await.unwrap_err();
    assert_eq!((error.kind(), error.into_buffer().len()), (OpErrorKind::Closed, 8));
    let error = within("late receive", clone.recv(a.blank(8))).await.unwrap_err();
    assert_eq!((error.kind(), error.into_buffer().len()), (OpErrorKind::Closed, 8));
    assert_eq!(clone.query().unwrap_err(), SetupError::Closed);
    assert_eq!(clone.modify(&QpAttr::to_state(QpState::Reset)).unwrap_err(), SetupError::Closed);
    assert_eq!(clone.connect(&b.qp.endpoint()).unwrap_err(), SetupError::Closed);
    within("close twice", clone.close()).await;
    assert_eq!(a.pool.available(), a.pool.total());
}

async fn reset_fails_pending_operations(mode: &str) {
    let Pair { a, b, .. } = with_depth(mode, 2, RetryConfig::default());
    let sends: Vec<_> = (0..5).map(|_| a.qp.send(a.blank(8))).collect();
    let receives: Vec<_> = (0..5).map(|_| a.qp.recv(a.blank(8))).collect();
    a.qp.modify(&QpAttr::to_state(QpState::Reset)).unwrap();
    for send in sends {
        assert_eq!(within("send", send).await.unwrap_err().kind(), OpErrorKind::Closed);
    }
    for receive in receives {
        assert_eq!(within("receive", receive).await.unwrap_err().kind(), OpErrorKind::Closed);
    }
    assert_eq!(a.pool.available(), a.pool.total());
    // The queue pair can be connected again and has its full capacity.
    b.qp.modify(&QpAttr::to_state(QpState::Reset)).unwrap();
    connect_again(&a.qp, &b.qp);
    let receives: Vec<_> = (0..5).map(|_| b.qp.recv(b.blank(8))).collect();
    let sends: Vec<_> = (0..5_u8).map(|at| a.qp.send(a.buffer(&[at; 8]))).collect();
    for (at, (send, receive)) in sends.into_iter().zip(receives).enumerate() {
        within("send after reset", send).await.unwrap();
        assert_eq!(
            &within("receive after reset", receive).await.unwrap().buffer[..],
            [at as u8; 8]
        );
    }
}

/// Connects two queue pairs that were reset.
fn connect_again(a: &QueuePair, b: &QueuePair) {
    for qp in [a, b] {
        let init = QpAttr {
            pkey_index: Some(0),
            port: Some(PortNum(1)),
            access: Some(Access::REMOTE_ALL),
            ..QpAttr::to_state(QpState::Init)
        };
        qp.modify(&init).unwrap();
    }
    connect(a, b, Mtu::Mtu4096, &RetryConfig::default());
}

// A thread dispatches flushed work, and posts queued work, while another resets the queue pair.
async fn reset_does_not_wait_for_the_dispatch_of_failures(mode: &str) {
    let Pair { a, b, .. } = with_depth(mode, 8, RetryConfig::default());
    for _ in 0..30 {
        let sends: Vec<_> = (0..20).map(|_| a.qp.send(a.blank(8))).collect();
        let done = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(Ordering::Acquire) {
                    black_box(sends.iter().filter(|send| send.is_finished()).count());
                }
            });
            a.qp.modify(&QpAttr::to_state(QpState::Err)).unwrap();
            a.qp.modify(&QpAttr::to_state(QpState::Reset)).unwrap();
            done.store(true, Ordering::Release);
        });
        for send in sends {
            within("send", send).await.unwrap_err();
        }
        assert_eq!(a.pool.available(), a.pool.total());
        b.qp.modify(&QpAttr::to_state(QpState::Reset)).unwrap();
        connect_again(&a.qp, &b.qp);
    }
}

async fn unconnected_queue_pair_refuses_sends(mode: &str) {
    let setup = Setup::new();
    let pd = setup.a.protection_domain().unwrap();
    let queue = CompletionQueue::new(&setup.a, mode_of(mode)).unwrap();
    let qp = QueuePair::new(&pd, &queue).unwrap();
    let pool = Pool::new(&pd, 64, 4).unwrap();
    let refused_in = |expected: QpState, kind: OpErrorKind| match kind {
        OpErrorKind::State { qpn, state, error } => {
            assert_eq!((qpn, state, error.errno), (qp.qpn(), expected, 22));
            let expected = format!("queue pair {qpn} is not connected (state {state:?})");
            assert!(kind.to_string().starts_with(&expected), "{kind}");
        }
        other => panic!("{other}"),
    };
    let refused = |kind: OpErrorKind| refused_in(QpState::Init, kind);
    let error = within("send", qp.send(pool.try_alloc(8).unwrap())).await.unwrap_err();
    refused(error.kind());
    assert_eq!(error.into_buffer().len(), 8);
    let mut batch = tokio_rdma::Batch::new();
    batch.send(pool.try_alloc(8).unwrap()).send(pool.try_alloc(8).unwrap());
    let result = within("batch", qp.post_batch(batch)).await;
    result.results().iter().for_each(|result| refused(result.unwrap_err()));
    drop(result);
    let receive = qp.recv(pool.try_alloc(8).unwrap());
    qp.modify(&QpAttr::to_state(QpState::Reset)).unwrap();
    assert_eq!(within("receive", receive).await.unwrap_err().kind(), OpErrorKind::Closed);
    refused_in(
        QpState::Reset,
        within("receive", qp.recv(pool.try_alloc(8).unwrap())).await.unwrap_err().kind(),
    );
    let refusal = qp.try_recv(pool.try_alloc(8).unwrap()).unwrap_err();
    assert!(!refusal.is_full());
    assert_eq!(refusal.into_buffer().len(), 8);
    assert_eq!(pool.available(), 4);
    within("close", qp.close()).await;
}

async fn short_and_missing_receives_have_their_statuses(mode: &str) {
    let Pair { a, b, setup } = Pair::new(Transport::Rc, mode);
    let receive = b.qp.recv(b.blank(4));
    let error = within("send", a.qp.send(a.blank(5))).await.unwrap_err();
    assert_eq!(error.status(), Some(rxe::TOO_LONG_HERE.on(&setup.a)));
    let error = within("receive", receive).await.unwrap_err();
    let status = rxe::TOO_LONG_THERE.on(&setup.b);
    if setup.is_software() {
        let OpErrorKind::Completion(completion) = error.kind() else { panic!("{error}") };
        assert_eq!(completion.lengths, Some(ReceiveLengths { capacity: 4, arrived: 5 }));
        assert!(
            error.to_string().contains("5 bytes of the message had arrived, the receive holds 4"),
            "{error}"
        );
    }
    assert_eq!((error.status(), error.into_buffer().len()), (Some(status), 4));
    // A message of several packets is refused at the packet that does not fit.
    let Pair { a, b, setup } = Pair::new(Transport::Rc, mode);
    if setup.is_software() {
        let receive = b.qp.recv(b.blank(4097));
        let send = a.qp.send(a.blank(3 * 4096));
        let OpErrorKind::Completion(completion) =
            within("receive", receive).await.unwrap_err().kind()
        else {
            panic!()
        };
        let ReceiveLengths { capacity, arrived } = completion.lengths.unwrap();
        assert!(capacity == 4097 && (4098..=8192).contains(&arrived), "{capacity} {arrived}");
        within("send", send).await.unwrap_err();
    }

    let Pair { a, b, .. } = with_depth(mode, 4, RetryConfig { rnr_retry: 1, ..Default::default() });
    let error = within("send", a.qp.send(())).await.unwrap_err();
    assert_eq!(error.status(), Some(WcStatus::RNR_RETRY_EXC_ERR));
    assert_eq!(b.state(), QpState::Rts);

    let options =
        RetryConfig { timeout: AckTimeout::from_code(4), retry_count: 1, ..Default::default() };
    let Pair { a, b, .. } = with_depth(mode, 4, options);
    drop(b);
    let error = within("send", a.qp.send(())).await.unwrap_err();
    assert_eq!(error.status(), Some(WcStatus::RETRY_EXC_ERR));
}

// Shows C4.
#[test]
fn queued_work_proceeds_without_being_awaited() {
    for mode in ["event", "busy_poll", "hybrid"] {
        for threads in [1, 3] {
            run(threads, mode, async {
                let Pair { a, b, .. } = with_depth(mode, 4, RetryConfig::default());
                let kept: Vec<_> = (0..10_u8).map(|at| a.qp.send(a.buffer(&[at]))).collect();
                (10..20_u8).for_each(|at| drop(a.qp.send(a.buffer(&[at]))));
                for at in 0..20 {
                    let received = within("receive", b.qp.recv(b.blank(1))).await.unwrap();
                    assert_eq!(received.buffer[..], [at]);
                }
                for send in kept {
                    within("send", send).await.unwrap();
                }
            });
        }
    }
}

#[test]
fn limit_errors_name_field_asked_and_allowed() {
    run(1, "limits", async {
        let Pair { a, b, setup } = Pair::new(Transport::Rc, "event");
        let region = b.region(8);
        let limit =
            |field, asked, allowed| OpErrorKind::Limit(LimitError { field, asked, allowed });
        let max_inline = a.qp.caps().max_inline as usize;
        let error = a.qp.send_inline(&vec![0; max_inline + 1]).await.unwrap_err();
        assert_eq!(
            error.kind(),
            limit("inline bytes (max_inline)", max_inline as u64 + 1, max_inline as u64)
        );
        let field = "bytes for the remote region";
        let error = a.qp.write(a.blank(9), region.grant()).await.unwrap_err();
        assert_eq!(error.kind(), limit(field, 9, 8));
        assert_eq!(error.into_buffer().len(), 9);
        assert_eq!(
            a.qp.with_imm(tokio_rdma::Imm(0))
                .write(a.blank(9), region.grant())
                .await
                .unwrap_err()
                .kind(),
            limit(field, 9, 8)
        );
        assert_eq!(
            a.qp.write_inline(&[0; 9], region.grant()).await.unwrap_err().kind(),
            limit(field, 9, 8)
        );
        assert_eq!(
            a.qp.read(a.blank(9), region.grant()).await.unwrap_err().kind(),
            limit(field, 9, 8)
        );
        match a.qp.try_write(a.blank(9), region.grant()) {
            Err(TryError::Refused(error)) => assert_eq!(error.kind(), limit(field, 9, 8)),
            other => panic!("{other:?}"),
        }
        let pool = LimitError {
            field: "buffer bytes (PoolBuilder::buffer_size)",
            asked: 16385,
            allowed: 16384,
        };
        match a.pool.try_alloc(16385) {
            Err(PoolError::Limit(error)) => assert_eq!(error, pool),
            other => panic!("{other:?}"),
        }
        assert_eq!(a.qp.send_counters().posted, 0, "no operation reached the device");
        assert_eq!(a.state(), QpState::Rts);

        let attr = setup.a.attr();
        type Build = fn(QueuePairBuilder, u32) -> QueuePairBuilder;
        let cases: [(&str, u32, Build); 4] = [
            ("max_send_wr", attr.max_qp_wr, QueuePairBuilder::max_send_wr),
            ("max_recv_wr", attr.max_qp_wr, QueuePairBuilder::max_recv_wr),
            ("max_send_sge", attr.max_sge, QueuePairBuilder::max_sge),
            ("max_inline", attr.max_inline, QueuePairBuilder::max_inline),
        ];
        for (field, max, build) in cases {
            let error = build(QueuePair::builder(&a.pd, &a.queue), max + 1).build().unwrap_err();
            let allowed = u64::from(max);
            assert_eq!(error, SetupError::Limit(LimitError { field, asked: allowed + 1, allowed }));
        }
        let small = |field| Some(SetupError::TooSmall { field, asked: 0, least: 1 });
        let none = CompletionQueue::builder(&setup.a).mode(mode_of("event")).capacity(0).build();
        assert_eq!(none.err(), small("completion queue entries (capacity)"));
        assert_eq!(
            SharedReceiveQueue::new(&a.pd, &a.queue, 0, 1).err(),
            small("max_wr of the shared receive queue")
        );
        let mode = mode_of("event");
        let queue = CompletionQueue::builder(&setup.a).mode(mode).capacity(64).build().unwrap();
        let _first = QueuePair::builder(&a.pd, &queue).max_send_wr(4).max_recv_wr(4).build();
        let (reserved, capacity) = (queue.counters().reserved, queue.counters().capacity);
        let error = QueuePair::builder(&a.pd, &queue)
            .max_send_wr(capacity)
            .max_recv_wr(1)
            .build()
            .unwrap_err();
        let SetupError::CompletionQueueFull { asked, free } = error else { panic!("{error:?}") };
        assert!(asked > free && free == capacity - reserved, "{error}");
        assert_eq!(queue.counters().reserved, reserved, "no entries stay reserved");
    });
}

#[test]
fn default_completion_queue_holds_64_default_queue_pairs() {
    run(1, "default sizes", async {
        let Pair { a, setup, .. } = Pair::new(Transport::Rc, "event");
        let queue = CompletionQueue::new(&setup.a, mode_of("event")).unwrap();
        let first = queue.capacity();
        // With little locked memory, the queue is smaller.
        if queue.counters().capacity >= 64 * 256 {
            let all: Vec<_> = (0..64).map(|_| QueuePair::new(&a.pd, &queue).unwrap()).collect();
            assert_eq!(all.len(), 64);
            assert_eq!(queue.capacity(), first);
        } else {
            let limit = setup.a.attr().max_cqe;
            assert!(hardware().is_some(), "{} of {limit} entries", queue.counters().capacity);
        }
    });
}

#[test]
fn completion_queue_of_default_capacity_grows_with_its_queue_pairs() {
    run(1, "a queue that grows", async {
        let Pair { a, b, setup } = Pair::new(Transport::Rc, "event");
        let queue = CompletionQueue::new(&setup.a, mode_of("event")).unwrap();
        let first = queue.capacity();
        let build =
            || QueuePair::builder(&a.pd, &queue).max_send_wr(1000).max_recv_wr(1000).build();
        let fitting: Vec<_> = (0..first / 2000).map(|_| build().unwrap()).collect();
        assert_eq!(queue.capacity(), first);
        let last = match build() {
            Ok(last) => last,
            // The direct data path and the emulated ConnectX do not resize queues. SoftRoCE grants
            // its limit at first.
            Err(SetupError::CompletionQueueFull { asked, free }) if !setup.is_software() => {
                let attr = setup.a.attr();
                assert!(attr.vendor_id == 0x2c9 || attr.max_cqe == first, "{asked}, {free}");
                return;
            }
            Err(error) => panic!("{error}"),
        };
        let grown = queue.counters();
        assert!(grown.capacity > first && grown.reserved > first, "{grown:?}");
        let sender = QueuePair::new(&b.pd, &b.queue).unwrap();
        connect(&sender, &last, Mtu::Mtu1024, &RetryConfig::default());
        let (received, message) = (last.recv(a.blank(8)), b.buffer(b"arrived"));
        within("a send", sender.send(message)).await.unwrap();
        assert_eq!(within("a receive", received).await.unwrap().buffer[..], *b"arrived");
        drop((fitting, last));
        assert_eq!(queue.counters().reserved, 0);
        assert_eq!(queue.capacity(), grown.capacity);
    });
}

#[test]
fn misaligned_atomic_is_refused_locally() {
    run(1, "misaligned", async {
        let Pair { a, b, .. } = Pair::new(Transport::Rc, "event");
        let grant = b.region(64).grant();
        for range in [0..4, 0..16, 4..12, 1..9, 8..8] {
            let remote = grant.slice(range).unwrap();
            let expected = OpErrorKind::Misaligned { addr: remote.addr(), len: remote.len() };
            assert_eq!(a.qp.fetch_add(remote, 1).await.unwrap_err().kind(), expected);
            assert_eq!(a.qp.compare_swap(remote, 0, 1).await.unwrap_err().kind(), expected);
        }
        assert_eq!(a.qp.send_counters().posted, 0);
    });
}

#[test]
fn foreign_objects_are_refused_by_name() {
    run(1, "foreign", async {
        let Pair { a, b, setup } = Pair::new(Transport::Rc, "event");
        let other = setup.a.protection_domain().unwrap();
        let foreign = |what| OpErrorKind::Foreign { what };
        let buffer = || other.register(vec![0; 8]).unwrap();
        let region = b.region(8);
        assert_eq!(a.qp.send(buffer()).await.unwrap_err().kind(), foreign("buffer"));
        assert_eq!(a.qp.recv(buffer()).await.unwrap_err().kind(), foreign("buffer"));
        assert_eq!(
            a.qp.write(buffer(), region.grant()).await.unwrap_err().kind(),
            foreign("buffer")
        );
        assert_eq!(
            a.qp.read(buffer(), region.grant()).await.unwrap_err().kind(),
            foreign("buffer")
        );
        let mixed = vec![a.blank(8), buffer(), a.blank(8)];
        let error = a.qp.send(mixed).await.unwrap_err();
        assert_eq!((error.kind(), error.into_buffer().len()), (foreign("buffer"), 3));
        let exposed =
            ExposedRegion::new(&other, HostMemory::zeroed(8).unwrap(), Access::REMOTE_ALL).unwrap();
        assert_eq!(
            a.qp.send(exposed.slice(0..8).unwrap()).await.unwrap_err().kind(),
            foreign("buffer")
        );
        assert_eq!(a.qp.send_counters().posted, 0);

        let Pair { a, b, setup } = Pair::new(Transport::Ud, "event");
        let other = setup.a.protection_domain().unwrap();
        let address = *a.route_to(&b).address();
        let route = other.address_handle(&address).unwrap();
        let error = a.qp.send_to(a.blank(8), &route, b.qp.qpn(), QKEY).await.unwrap_err();
        assert_eq!((error.kind(), error.into_buffer().len()), (foreign("address handle"), 8));

        let foreign = |what| SetupError::Foreign { what };
        let far = CompletionQueue::new(&setup.b, mode_of("event")).unwrap();
        assert_eq!(QueuePair::new(&a.pd, &far).unwrap_err(), foreign("completion queue"));
        let mixed = QueuePair::builder(&a.pd, &a.queue).receive_completions(&far).build();
        assert_eq!(mixed.unwrap_err(), foreign("completion queue"));
        assert_eq!(
            SharedReceiveQueue::new(&a.pd, &far, 4, 1).unwrap_err(),
            foreign("completion queue")
        );
        let srq = SharedReceiveQueue::new(&other, &a.queue, 4, 1).unwrap();
        let mixed = QueuePair::builder(&a.pd, &a.queue).shared_receive_queue(&srq).build();
        assert_eq!(mixed.unwrap_err(), foreign("shared receive queue"));
        let options = QpConfig::new(Transport::Rc, Options::default().caps);
        let [own, far] =
            [a.queue.device(), far.device()].map(|device| Cq::new(device, 8, None, 0).unwrap());
        let bare = Qp::new(&a.pd, &own, &far, None, &options);
        assert_eq!(bare.unwrap_err(), foreign("completion queue"));
    });
}

#[test]
fn invalid_connections_are_refused_with_the_reason() {
    let setup = Setup::new();
    let pd = setup.a.protection_domain().unwrap();
    let queue = CompletionQueue::new(&setup.a, mode_of("cooperative")).unwrap();
    let make = |transport| {
        QueuePair::builder(&pd, &queue)
            .max_send_wr(4)
            .max_recv_wr(4)
            .transport(transport)
            .build()
            .unwrap()
    };
    let (rc, uc, ud) = (make(Transport::Rc), make(Transport::Uc), make(Transport::Ud));
    let error = rc.connect(&uc.endpoint()).unwrap_err();
    let expected = SetupError::Mismatch {
        what: "transports of the queue pair and its peer",
        ours: "Rc".to_owned(),
        theirs: "Uc".to_owned(),
    };
    assert_eq!(error, expected);
    assert!(matches!(rc.activate().unwrap_err(), SetupError::Transition(_)), "it needs a peer");
    assert!(
        matches!(ud.connect(&ud.endpoint()).unwrap_err(), SetupError::Transition(_)),
        "a datagram queue pair has no peer"
    );
    for (field, options) in [
        ("retry_count", RetryConfig { retry_count: 8, ..Default::default() }),
        ("rnr_retry", RetryConfig { rnr_retry: 8, ..Default::default() }),
    ] {
        let error = rc.connect_with(&rc.endpoint(), &options).unwrap_err();
        assert_eq!(error, SetupError::Limit(LimitError { field, asked: 8, allowed: 7 }));
    }
    for qp in [&rc, &uc, &ud] {
        assert_eq!(qp.query().unwrap().0, QpState::Init, "nothing has changed");
    }
    let peer = make(Transport::Rc);
    rc.connect(&peer.endpoint()).unwrap();
    let again = rc.connect(&peer.endpoint()).unwrap_err();
    assert!(again.to_string().starts_with("the queue pair is already connected"), "{again}");
    assert!(matches!(again, SetupError::Transition(_)), "twice");
    assert_eq!(rc.query().unwrap().0, QpState::Rts);
    ud.activate().unwrap();
    assert!(matches!(ud.activate().unwrap_err(), SetupError::Transition(_)), "twice");
}

#[test]
fn gid_is_chosen_by_index_or_peer_and_must_match() {
    let setup = Setup::new();
    let pd = setup.a.protection_domain().unwrap();
    let queue = CompletionQueue::new(&setup.a, mode_of("cooperative")).unwrap();
    let builder = || QueuePair::builder(&pd, &queue).max_send_wr(4).max_recv_wr(4);
    let (port, entry) = setup.a.default_path().unwrap();

    let qp = builder().source(port.port, entry.index).build().unwrap();
    assert_eq!(qp.endpoint().gid, entry.gid);
    for (number, index) in [(port.port, 255), (PortNum(77), entry.index)] {
        assert!(builder().source(number, index).build().is_err(), "the GID table lacks the entry");
    }
    let peer = setup.b.default_path().unwrap().1.gid;
    let ours = setup.a.path_to(peer).unwrap().1;
    assert_eq!(builder().peer(peer).build().unwrap().endpoint().gid, ours.gid);
    let ranked = setup.a.gids(port.port, Some(peer)).unwrap();
    assert_eq!((ranked[0].entry, ranked.len()), (ours, port.gids.len()));

    if entry.is_roce_v2() {
        let other: IpAddr =
            if entry.gid.to_ip().is_ipv4() { [0xfd; 16].into() } else { [10, 9, 9, 9].into() };
        let error =
            qp.connect(&QueuePairEndpoint { gid: other.into(), ..qp.endpoint() }).unwrap_err();
        assert!(matches!(error, SetupError::Mismatch { .. }), "{error}");
        assert_eq!(qp.query().unwrap().0, QpState::Init, "nothing has changed");
    }
}

#[test]
fn queue_pair_can_be_connected_to_itself() {
    run(1, "itself", async {
        let setup = Setup::new();
        let pd = setup.a.protection_domain().unwrap();
        let queue = CompletionQueue::new(&setup.a, mode_of("event")).unwrap();
        let qp = QueuePair::new(&pd, &queue).unwrap();
        qp.connect(&qp.endpoint()).unwrap();
        let pool = Pool::new(&pd, 8192, 4).unwrap();
        let receive = qp.recv(pool.try_alloc(8192).unwrap());
        within("send", qp.send(pool.copy_from(&pattern(8192, 3)).unwrap())).await.unwrap();
        assert_eq!(&within("receive", receive).await.unwrap().buffer[..], pattern(8192, 3));
        let region =
            ExposedRegion::new(&pd, HostMemory::zeroed(64).unwrap(), Access::REMOTE_ALL).unwrap();
        assert_eq!(
            within("atomic", qp.fetch_add(region.grant().slice(..8).unwrap(), 5)).await.unwrap(),
            0
        );
        assert_eq!(region.load(0).unwrap(), 5);
        // The error state flushes both its queues.
        let receive = qp.recv(pool.try_alloc(8).unwrap());
        qp.modify(&QpAttr::to_state(QpState::Err)).unwrap();
        let error = within("a send", qp.send(pool.try_alloc(8).unwrap())).await.unwrap_err();
        assert_eq!(error.status(), Some(WcStatus::WR_FLUSH_ERR));
        assert_eq!(
            within("flush", receive).await.unwrap_err().status(),
            Some(WcStatus::WR_FLUSH_ERR)
        );
    });
}

//! Objects that are dropped or fail with work in flight, in any order and on any thread.

#![allow(unsafe_code, reason = "overruns a queue through raw verbs")]

use std::any::Any;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::thread;
use std::time::Duration;

use crate::torture::{
    self, Flavour, LONG, Mode, Seed, block_on, bounded, connect, device, narrow, pair, scaled,
    slow_network, software, soon,
};
use fastrand::Rng;
use tokio_rdma::op::BatchOp;
use tokio_rdma::software::{Faults, Network};
use tokio_rdma::types::{AsyncEvent, QpAttr, QpCaps, QpState, RecvWr, Transport, WrId};
use tokio_rdma::verbs::{Qp, QpConfig};
use tokio_rdma::{
    Access, Batch, BufMut, CompletionMode, CompletionQueue, ExposedRegion, OpErrorKind, Pool,
    QueuePair, SetupError, SharedReceiveQueue,
};

fn poll<F: Future + Unpin>(future: &mut F) -> Poll<F::Output> {
    Pin::new(future).poll(&mut Context::from_waker(Waker::noop()))
}

#[test]
fn objects_may_be_dropped_in_any_order_from_any_thread() {
    bounded("drops", 3 * LONG, || {
        let seed = Seed::new("--test lifecycle teardown");
        let mut rng = Rng::with_seed(seed.value);
        for round in 0..scaled(160) as usize {
            let mode = Mode::ALL[round % 4];
            let runtime = Flavour::ALL[round / 4 % 2].runtime();
            let network = if rng.bool() { slow_network(rng.u64(..)) } else { Network::new() };
            let mut survivors = Vec::new();
            let mut objects: Vec<Box<dyn Any + Send>> = Vec::new();
            {
                let (device, pd) = device(&network);
                let queue = CompletionQueue::new(&device, mode.make()).unwrap();
                let (a, b) = pair(&pd, &queue);
                let pool = Pool::new(&pd, 128, 64).unwrap();
                let region = ExposedRegion::new(&pd, vec![0; 4096], Access::REMOTE_ALL).unwrap();
                let remote = region.grant();
                for _ in 0..rng.u32(8..40) {
                    let buffer = pool.try_alloc(128).unwrap();
                    let work: Pin<Box<dyn Future<Output = ()> + Send>> = match rng.u8(..5) {
                        0 => Box::pin(finished(a.read(buffer, remote.slice(..128).unwrap()))),
                        1 => Box::pin(finished(a.write(buffer, remote))),
                        2 => Box::pin(finished(b.send(buffer))),
                        3 => Box::pin(finished(a.recv(buffer))),
                        _ => Box::pin(finished(b.fetch_add(remote.slice(8..16).unwrap(), 1))),
                    };
                    match rng.u8(..3) {
                        0 => objects.push(Box::new(work)),
                        1 => objects.push(Box::new(runtime.spawn(work))),
                        _ => survivors.push(runtime.spawn(work)),
                    }
                }
                objects.push(Box::new(device));
                objects.push(Box::new(pd));
                objects.push(Box::new(queue));
                objects.push(Box::new(a));
                objects.push(Box::new(b));
                objects.push(Box::new(pool));
                objects.push(Box::new(region));
                objects.push(Box::new(network));
            }
            rng.shuffle(&mut objects);
            thread::scope(|scope| {
                while !objects.is_empty() {
                    let part = objects.split_off(objects.len().saturating_sub(rng.usize(1..12)));
                    scope.spawn(move || drop(part));
                }
                runtime.block_on(async {
                    for survivor in survivors {
                        soon("a survivor", survivor).await.unwrap();
                    }
                });
            });
        }
    });
}

async fn finished<T, E: std::fmt::Display>(operation: impl Future<Output = Result<T, E>>) {
    if let Err(error) = operation.await {
        assert!(!error.to_string().is_empty());
    }
}

/// A waker that takes and overwrites the buffers of a finished batch, then runs the network.
struct TakesBuffers {
    batch: Mutex<Option<BatchOp<BufMut>>>,
    taken: Mutex<Option<(Vec<BufMut>, Vec<bool>)>>,
    network: Network,
}

impl Wake for TakesBuffers {
    fn wake(self: Arc<Self>) {
        let Some(mut batch) = self.batch.lock().unwrap().take() else { return };
        let Poll::Ready(mut result) = poll(&mut batch) else {
            *self.batch.lock().unwrap() = Some(batch);
            return;
        };
        let succeeded = result.results().iter().map(Result::is_ok).collect();
        let mut buffers: Vec<_> = result.drain().collect();
        buffers.iter_mut().for_each(|buffer| buffer.fill(0x55));
        self.network.run_until_idle(Duration::from_secs(1));
        *self.taken.lock().unwrap() = Some((buffers, succeeded));
    }
}

// Shows S1.
#[test]
fn partly_posted_batch_keeps_its_buffers_until_the_queue_pair_is_destroyed() {
    bounded("half a batch", LONG, || {
        let network = Network::simulated(1, Faults::none());
        let (device, pd) = software(&network);
        let queue = CompletionQueue::new(&device, CompletionMode::Event).unwrap();
        let a = QueuePair::builder(&pd, &queue).max_send_wr(2).build().unwrap();
        let b = QueuePair::new(&pd, &queue).unwrap();
        connect(&a, &b);
        let pool = Pool::new(&pd, 64, 8).unwrap();
        let region = ExposedRegion::new(&pd, vec![0xaa; 64], Access::REMOTE_ALL).unwrap();

        let first = a.read(pool.try_alloc(64).unwrap(), region.grant());
        let mut batch = Batch::new();
        batch.read(pool.try_alloc(64).unwrap(), region.grant());
        batch.read(pool.try_alloc(64).unwrap(), region.grant());
        let batch = a.post_batch(batch);
        assert_eq!(
            (a.send_counters().in_flight, a.send_counters().waiting),
            (2, 1),
            "one work request of the batch is posted"
        );

        let taker = Arc::new(TakesBuffers {
            batch: Mutex::new(Some(batch)),
            taken: Mutex::new(None),
            network: network.clone(),
        });
        let waker = Waker::from(taker.clone());
        let pending = {
            let mut batch = taker.batch.lock().unwrap().take().unwrap();
            let pending = Pin::new(&mut batch).poll(&mut Context::from_waker(&waker)).is_pending();
            *taker.batch.lock().unwrap() = Some(batch);
            pending
        };
        assert!(pending);
        drop(a);
        network.run_until_idle(Duration::from_secs(1));
        let (buffers, succeeded) = taker.taken.lock().unwrap().take().expect("the batch has ended");
        assert_eq!(succeeded, [false, false], "no work request of the batch succeeded");
        for buffer in buffers {
            assert!(
                buffer.iter().all(|&byte| byte == 0x55),
                "a READ changed a buffer that was returned"
            );
        }
        assert!(matches!(
            block_on(first),
            Err(error)
                if matches!(error.kind(), OpErrorKind::Closed | OpErrorKind::Completion(_))
        ));
    });
}

#[test]
fn zero_capacity_queue_refuses_work() {
    bounded("zero capacity", LONG, || {
        let (device, pd) = device(&Network::new());
        let queue = CompletionQueue::new(&device, CompletionMode::Event).unwrap();
        let qp = QueuePair::builder(&pd, &queue).max_send_wr(0).max_recv_wr(0).build().unwrap();
        let pool = Pool::new(&pd, 64, 8).unwrap();
        assert!(matches!(
            block_on(qp.recv(pool.try_alloc(8).unwrap())).unwrap_err().kind(),
            OpErrorKind::Limit(_)
        ));
        connect(&qp, &QueuePair::new(&pd, &queue).unwrap());
        assert!(matches!(
            block_on(qp.send(pool.try_alloc(8).unwrap())).unwrap_err().kind(),
            OpErrorKind::Limit(_)
        ));
        block_on(qp.close());
    });
}

fn overrun(pd: &tokio_rdma::ProtectionDomain, queue: &CompletionQueue) -> Qp {
    let caps = QpCaps {
        max_send_wr: 1,
        max_recv_wr: 4096,
        max_send_sge: 1,
        max_recv_sge: 1,
        max_inline: 0,
    };
    let cq = queue.verbs();
    let raw = Qp::new(pd, cq, cq, None, &QpConfig::new(Transport::Rc, caps)).unwrap();
    let init = QpAttr {
        pkey_index: Some(0),
        port: Some(tokio_rdma::types::PortNum(1)),
        access: Some(Access::empty()),
        ..QpAttr::to_state(QpState::Init)
    };
    raw.modify(&init).unwrap();
    raw.modify(&QpAttr::to_state(QpState::Err)).unwrap();
    // The receives are flushed at once. The queue's driver may poll some of them, so one list may
    // not overrun the queue.
    let list: Vec<_> =
        (0..4096).map(|number| RecvWr { wr_id: WrId(u64::MAX - number), sges: &[] }).collect();
    while queue.software_counters().is_some_and(|counters| counters.lost == 0) {
        // SAFETY: the receives name no memory, and their numbers belong to no operation.
        let _ = unsafe { raw.post_recv(&list) };
    }
    raw
}

// Shows C1.
#[test]
fn overrun_completion_queue_ends_its_operations_and_refuses_work() {
    for mode in Mode::ALL {
        bounded("overrun", LONG, move || {
            Flavour::MultiThread.runtime().block_on(async move {
                let (device, pd) = software(&slow_network(5));
                let queue = CompletionQueue::builder(&device)
                    .capacity(40)
                    .mode(mode.make())
                    .build()
                    .unwrap();
                let others = CompletionQueue::new(&device, CompletionMode::Event).unwrap();
                let pool = Pool::new(&pd, 64, 32).unwrap();
                let srq = SharedReceiveQueue::new(&pd, &queue, 8, 1).unwrap();
                let small = || {
                    QueuePair::builder(&pd, &queue).max_send_wr(8).max_recv_wr(8).build().unwrap()
                };
                let (a, b) = (small(), small());
                connect(&a, &b);
                let mut waiting: Vec<_> =
                    (0..12).map(|_| a.recv(pool.try_alloc(64).unwrap())).collect();
                waiting.extend((0..12).map(|_| srq.recv(pool.try_alloc(64).unwrap())));
                let waiting: Vec<_> = waiting.into_iter().map(tokio::spawn).collect();
                tokio::task::yield_now().await;
                let raw = overrun(&pd, &queue);
                for operation in waiting {
                    soon("an operation", operation).await.unwrap().unwrap_err();
                }
                soon("a later send", a.send(pool.try_alloc(64).unwrap())).await.unwrap_err();
                soon("a later receive", srq.recv(pool.try_alloc(64).unwrap())).await.unwrap_err();
                let refused = QueuePair::builder(&pd, &queue).max_send_wr(1).max_recv_wr(1).build();
                assert!(matches!(refused, Err(SetupError::Verb(_))), "{refused:?}");
                drop((raw, others));
                torture::eventually("buffers", || pool.available() == pool.total()).await;
            });
        });
    }
}

#[test]
fn shared_receive_queue_alone_on_an_overrun_completion_queue_ends() {
    for mode in Mode::ALL {
        bounded("overrun", LONG, move || {
            Flavour::CurrentThread.runtime().block_on(async move {
                let (device, pd) = software(&Network::new());
                let queue = CompletionQueue::builder(&device)
                    .capacity(16)
                    .mode(mode.make())
                    .build()
                    .unwrap();
                let srq = SharedReceiveQueue::new(&pd, &queue, 8, 1).unwrap();
                let pool = Pool::new(&pd, 64, 8).unwrap();
                let waiting = tokio::spawn(srq.recv(pool.try_alloc(64).unwrap()));
                tokio::task::yield_now().await;
                let raw = overrun(&pd, &queue);
                soon("the receive", waiting).await.unwrap().unwrap_err();
                soon("a later receive", srq.recv(pool.try_alloc(64).unwrap())).await.unwrap_err();
                drop(raw);
            });
        });
    }
}

#[test]
fn shared_receive_queue_on_an_overrun_completion_queue_ends_after_its_queue_pairs() {
    for mode in Mode::ALL {
        bounded("overrun", LONG, move || {
            Flavour::CurrentThread.runtime().block_on(async move {
                let (device, pd) = software(&Network::new());
                let queue = CompletionQueue::builder(&device)
                    .capacity(16)
                    .mode(mode.make())
                    .build()
                    .unwrap();
                let other = CompletionQueue::new(&device, mode.make()).unwrap();
                let srq = SharedReceiveQueue::new(&pd, &queue, 8, 1).unwrap();
                // Only receives of the shared queue complete on the overrun queue.
                let drawing =
                    QueuePair::builder(&pd, &other).shared_receive_queue(&srq).build().unwrap();
                let pool = Pool::new(&pd, 64, 8).unwrap();
                let waiting = tokio::spawn(srq.recv(pool.try_alloc(64).unwrap()));
                tokio::task::yield_now().await;
                let raw = overrun(&pd, &queue);
                soon("the receive", waiting).await.unwrap().unwrap_err();
                assert_eq!(
                    drawing.query(),
                    Err(SetupError::Closed),
                    "the queue pair is destroyed before the buffers are returned"
                );
                let refused = QueuePair::builder(&pd, &other).shared_receive_queue(&srq).build();
                assert!(matches!(refused, Err(SetupError::Verb(_))), "{refused:?}");
                drop(raw);
            });
        });
    }
}

#[test]
fn queued_work_is_posted_without_polling_its_queue() {
    for mode in Mode::ALL {
        bounded("queued work", LONG, move || {
            Flavour::CurrentThread.runtime().block_on(async move {
                let (device, pd) = device(&slow_network(3));
                let [ours, theirs] =
                    [(); 2].map(|()| CompletionQueue::new(&device, mode.make()).unwrap());
                let sender = QueuePair::builder(&pd, &ours).max_send_wr(1).build().unwrap();
                let receiver = QueuePair::new(&pd, &theirs).unwrap();
                connect(&sender, &receiver);
                let pool = Pool::new(&pd, 64, 8).unwrap();
                let receives = [(); 3].map(|()| receiver.recv(pool.try_alloc(64).unwrap()));
                let unpolled = [(); 3].map(|()| sender.send(pool.try_alloc(8).unwrap()));
                for receive in receives {
                    soon("a receive", receive).await.unwrap();
                }
                drop(unpolled);
            });
        });
    }
}

#[test]
fn panicking_waker_leaves_no_operation_of_its_queue_pair_pending() {
    struct Panics;
    impl Wake for Panics {
        fn wake(self: Arc<Self>) {
            panic!("a waker that panics");
        }
    }
    struct Woken(AtomicBool);
    impl Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.store(true, Ordering::SeqCst);
        }
    }
    for reset in [false, true] {
        // Outside of a runtime, a pending poll wakes its own task.
        let runtime = Flavour::CurrentThread.runtime();
        let _entered = runtime.enter();
        let (_network, [a, _b], pool, region) = narrow(5);
        let buffer = || pool.try_alloc(64).unwrap();
        let mut writes: Vec<_> = (0..3).map(|_| a.write(buffer(), region.grant())).collect();
        let mut receives: Vec<_> = (0..2).map(|_| a.recv(buffer())).collect();
        let wakers: Vec<_> = (0..5).map(|_| Arc::new(Woken(AtomicBool::new(false)))).collect();
        let first = Waker::from(Arc::new(Panics));
        for (at, (write, woken)) in writes.iter_mut().zip(&wakers).enumerate() {
            let waker = if at == 0 { first.clone() } else { woken.clone().into() };
            assert!(Pin::new(write).poll(&mut Context::from_waker(&waker)).is_pending());
        }
        for (receive, woken) in receives.iter_mut().zip(&wakers[3..]) {
            let waker = woken.clone().into();
            assert!(Pin::new(receive).poll(&mut Context::from_waker(&waker)).is_pending());
        }
        let ends =
            || if reset { a.modify(&QpAttr::to_state(QpState::Reset)).unwrap() } else { drop(a) };
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(ends))
            .expect("the panic of another task's waker");
        assert!(
            wakers[1..].iter().all(|woken| woken.0.load(Ordering::SeqCst)),
            "a waker was not called"
        );
        assert!(writes.iter_mut().all(|write| matches!(poll(write), Poll::Ready(Err(_)))));
        assert!(receives.iter_mut().all(|receive| matches!(poll(receive), Poll::Ready(Err(_)))));
        assert_eq!(pool.available(), 5);
    }
}

#[test]
fn failed_completion_queue_refuses_new_objects_and_releases_its_entries() {
    bounded("dead queue", LONG, || {
        let network = Network::new();
        let (device, pd) = software(&network);
        let queue = CompletionQueue::new(&device, CompletionMode::Event).unwrap();
        let alive = CompletionQueue::new(&device, CompletionMode::Event).unwrap();
        let (a, b) = pair(&pd, &queue);
        let receive = a.recv(pd.register(vec![0; 8]).unwrap());
        assert_eq!(queue.failure(), None);
        let event = AsyncEvent::CqError { cq: queue.id() };
        network.control("torture0").unwrap().announce(event);
        assert_eq!(device.next_event().unwrap(), Some(event));
        block_on(receive).unwrap_err();
        assert!(queue.failure().is_some_and(|error| error.errno == 5));

        let assert_failed = |error: SetupError| {
            assert!(matches!(error, SetupError::Verb(error) if error.errno == 5), "{error}")
        };
        assert_failed(SharedReceiveQueue::new(&pd, &queue, 4, 1).unwrap_err());
        assert_failed(QueuePair::new(&pd, &queue).unwrap_err());
        assert_failed(
            QueuePair::builder(&pd, &alive).receive_completions(&queue).build().unwrap_err(),
        );
        assert_failed(
            QueuePair::builder(&pd, &queue).receive_completions(&alive).build().unwrap_err(),
        );
        // The failure takes precedence over the lack of entries.
        assert_failed(QueuePair::builder(&pd, &queue).max_send_wr(1025).build().unwrap_err());
        assert_eq!((alive.counters().reserved, alive.failure()), (0, None));
        drop((a, b));
        // The thread that reads events may still be destroying the queue pairs.
        while queue.counters().reserved > 0 {
            thread::yield_now();
        }
    });
}

//! Wakers that drop the objects that wake them, use the queue, or panic, without effect on other
//! tasks.

use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::task::{Context, Poll, Wake, Waker};
use std::thread;
use std::time::{Duration, Instant};

use crate::torture::{
    self, Flavour, LONG, Mode, block_on, bounded, device, pair, slow_network, software, soon,
};
use tokio_rdma::op::{Recv, Write};
use tokio_rdma::software::Network;
use tokio_rdma::types::{QpAttr, QpState};
use tokio_rdma::{
    Access, BufMut, CompletionMode, CompletionQueue, ExposedRegion, OpErrorKind, Pool, QueuePair,
};

fn poll<F: Future + Unpin>(future: &mut F) -> Poll<F::Output> {
    Pin::new(future).poll(&mut Context::from_waker(Waker::noop()))
}

/// A task that only its wakers own, and that runs inside `wake`.
struct SelfOwned(Mutex<Option<Pin<Box<dyn Future<Output = ()> + Send>>>>);

impl Wake for SelfOwned {
    fn wake(self: Arc<Self>) {
        let Some(mut future) = self.0.lock().unwrap().take() else { return };
        let waker = Waker::from(self.clone());
        if future.as_mut().poll(&mut Context::from_waker(&waker)).is_pending() {
            *self.0.lock().unwrap() = Some(future);
        }
    }
}

#[test]
fn replaced_waker_may_drop_the_queue_pair_it_waits_for() {
    for mode in [Mode::BusyPoll, Mode::Event, Mode::Hybrid] {
        bounded("a task owned by its waker", LONG, move || {
            let runtime = Flavour::CurrentThread.runtime();
            runtime.block_on(async move {
                let (device, pd) = device(&slow_network(9));
                let queue = CompletionQueue::new(&device, mode.make()).unwrap();
                for _ in 0..100 {
                    let (a, b) = pair(&pd, &queue);
                    let pool = Pool::new(&pd, 64, 2).unwrap();
                    let shared =
                        Arc::new(tokio::sync::Mutex::new(a.recv(pool.try_alloc(64).unwrap())));
                    // The task owns the queue pairs. The waker registered with the receive owns the
                    // task.
                    let receive = shared.clone();
                    let task = async move {
                        let _owned = (a, b);
                        let mut receive = receive.lock().await;
                        let first = std::future::poll_fn(|context| {
                            Poll::Ready(Pin::new(&mut *receive).poll(context))
                        });
                        assert!(first.await.is_pending());
                        drop(receive);
                        std::future::pending::<()>().await;
                    };
                    Waker::from(Arc::new(SelfOwned(Mutex::new(Some(Box::pin(task)))))).wake();
                    // Polling the receive from another task replaces, and so drops, that waker.
                    let mut receive = shared.lock().await;
                    soon("the receive", &mut *receive).await.unwrap_err();
                    drop(receive);
                    torture::eventually("the buffer", || pool.available() == 2).await;
                }
            });
        });
    }
}

struct CountersReader(CompletionQueue);

impl Wake for CountersReader {
    fn wake(self: Arc<Self>) {
        let _ = self.0.counters();
    }
}

#[test]
fn waker_may_read_the_queue_counters() {
    bounded("a waker that reads counters", LONG, || {
        let (device, pd) = device(&Network::new());
        let queue = CompletionQueue::new(&device, CompletionMode::Event).unwrap();
        let (a, b) = pair(&pd, &queue);
        let pool = Pool::new(&pd, 64, 2).unwrap();
        let waker = Waker::from(Arc::new(CountersReader(queue)));
        // More operations than can end before one has to yield.
        for _ in 0..1000 {
            let mut receive = b.recv(pool.try_alloc(64).unwrap());
            let mut send = a.send(pool.try_alloc(8).unwrap());
            while Pin::new(&mut send).poll(&mut Context::from_waker(&waker)).is_pending() {}
            while Pin::new(&mut receive).poll(&mut Context::from_waker(&waker)).is_pending() {}
        }
    });
}

#[derive(Default)]
struct Action(Mutex<Option<Box<dyn FnOnce() + Send>>>);

impl Wake for Action {
    fn wake(self: Arc<Self>) {
        let action = self.0.lock().unwrap().take();
        if let Some(action) = action {
            action();
        }
    }
}

/// A write whose completion is polled together with the completion of a receive.
struct PolledTogether {
    queue: CompletionQueue,
    ends: (QueuePair, QueuePair),
    write: Write<BufMut>,
    /// A pending receive that holds the waker of `action`.
    receive: Recv<BufMut>,
    send: tokio_rdma::op::Send<BufMut>,
    action: Arc<Action>,
}

impl PolledTogether {
    /// Posts the work. If `spins`, polls the write first, and returns `None` if it is complete.
    fn new(mode: Mode, spins: bool) -> Option<Self> {
        let (device, pd) = software(&slow_network(5));
        let queue = CompletionQueue::new(&device, mode.make()).unwrap();
        let ends = pair(&pd, &queue);
        let pool = Pool::new(&pd, 64, 4).unwrap();
        let new = || pool.try_alloc(64).unwrap();
        let region = ExposedRegion::new(&pd, vec![0; 64], Access::REMOTE_ALL).unwrap();
        let action = Arc::<Action>::default();
        let waker = Waker::from(action.clone());
        // A queue takes one completion at once until it has found one.
        let mut first = ends.0.write(new(), region.grant());
        while poll(&mut first).is_pending() {
            thread::yield_now();
        }
        let mut receive = ends.0.recv(new());
        while queue.counters().waiting == 0 {
            assert!(Pin::new(&mut receive).poll(&mut Context::from_waker(&waker)).is_pending());
        }
        let mut write = ends.0.write(new(), region.grant());
        if spins && poll(&mut write).is_ready() {
            return None;
        }
        // Without a reactor, nothing polls during the sleeps.
        thread::sleep(Duration::from_millis(5));
        let send = ends.1.send(new());
        thread::sleep(Duration::from_millis(5));
        Some(Self { queue, ends, write, receive, send, action })
    }
}

/// Limit of attempts to poll both completions at once.
const ATTEMPTS: usize = 200;

// Shows C1.
#[test]
fn waker_may_drop_the_queue_that_calls_it() {
    bounded("last reference to a queue", LONG, || {
        for _ in 0..ATTEMPTS {
            let Some(PolledTogether { queue, ends, mut write, receive, send, action }) =
                PolledTogether::new(Mode::Hybrid, true)
            else {
                continue;
            };
            let (before, at_end) = (queue.counters().spin_rounds, Arc::new(Mutex::new(None)));
            let seen = at_end.clone();
            *action.0.lock().unwrap() = Some(Box::new(move || {
                *seen.lock().unwrap() = Some(queue.counters().spin_rounds);
                drop((send, receive, ends, queue));
            }));
            let found = poll(&mut write);
            // The action is left if the message had not arrived.
            let missed = action.0.lock().unwrap().take();
            drop(missed);
            if let (Poll::Ready(result), Some(at_end)) = (found, *at_end.lock().unwrap()) {
                result.unwrap();
                // The queue updates its counters before it calls wakers, which may drop it. Without
                // a spin round, this proves nothing.
                if at_end != before {
                    return;
                }
            }
        }
        panic!("no poll found both completions, or spin rounds were not counted");
    });
}

// Shows C1.
#[test]
fn panicking_waker_of_another_task_does_not_lose_a_result() {
    for mode in [Mode::Event, Mode::Hybrid] {
        bounded("a waker that panics", LONG, move || {
            for _ in 0..ATTEMPTS {
                let Some(mut together) = PolledTogether::new(mode, false) else { continue };
                *together.action.0.lock().unwrap() =
                    Some(Box::new(|| resume_unwind(Box::new("woken"))));
                let found = catch_unwind(AssertUnwindSafe(|| poll(&mut together.write)));
                let found = found.expect("the panic of another task's waker");
                if together.action.0.lock().unwrap().take().is_some() {
                    continue;
                }
                let Poll::Ready(result) = found else { panic!("the write is pending") };
                result.unwrap();
                return;
            }
            panic!("no poll found both completions");
        });
    }
}

#[test]
fn waker_called_by_a_reset_may_modify_the_queue_pair() {
    bounded("a reset", LONG, || {
        let (device, pd) = device(&Network::new());
        let queue = CompletionQueue::new(&device, CompletionMode::Event).unwrap();
        let qp = QueuePair::new(&pd, &queue).unwrap();
        let pool = Pool::new(&pd, 64, 1).unwrap();
        let (receive, woken) = (qp.recv(pool.try_alloc(64).unwrap()), qp.clone());
        let task = async move {
            assert!(
                matches!(receive.await, Err(error) if matches!(error.kind(), OpErrorKind::Closed))
            );
            woken.modify(&QpAttr::to_state(QpState::Reset)).unwrap();
        };
        Waker::from(Arc::new(SelfOwned(Mutex::new(Some(Box::pin(task)))))).wake();
        qp.modify(&QpAttr::to_state(QpState::Reset)).unwrap();
        assert_eq!(pool.available(), 1);
    });
}

/// A waker that counts wake-ups, and panics while `panics` is set.
#[derive(Default)]
struct Counting {
    woken: AtomicUsize,
    panics: AtomicBool,
}

impl Wake for Counting {
    fn wake(self: Arc<Self>) {
        self.woken.fetch_add(1, Ordering::SeqCst);
        if self.panics.load(Ordering::SeqCst) {
            resume_unwind(Box::new("woken"));
        }
    }
}

/// Polls `future` until the queue counts it as waiting.
fn let_wait<F: Future + Unpin>(queue: &CompletionQueue, waker: &Waker, future: &mut F) {
    let before = queue.counters().waiting;
    while queue.counters().waiting == before {
        assert!(Pin::new(&mut *future).poll(&mut Context::from_waker(waker)).is_pending());
    }
}

#[test]
fn panicking_waker_does_not_suppress_other_wakeups() {
    bounded("wakers that panic", LONG, || {
        let (device, pd) = device(&Network::new());
        let queue = CompletionQueue::new(&device, CompletionMode::Event).unwrap();
        let qp = QueuePair::new(&pd, &queue).unwrap();
        let pool = Pool::new(&pd, 64, 4).unwrap();
        let wakers = [(); 4].map(|()| Arc::new(Counting::default()));
        let mut receives: Vec<_> =
            wakers.iter().map(|_| qp.recv(pool.try_alloc(64).unwrap())).collect();
        for (receive, waker) in receives.iter_mut().zip(&wakers) {
            let_wait(&queue, &Waker::from(waker.clone()), receive);
        }
        for (waker, panics) in wakers.iter().zip([true, false, true, false]) {
            // Without a runtime, a pending poll wakes its own task, which is not counted.
            waker.woken.store(0, Ordering::SeqCst);
            waker.panics.store(panics, Ordering::SeqCst);
        }
        let reset = catch_unwind(AssertUnwindSafe(|| qp.modify(&QpAttr::to_state(QpState::Reset))));
        reset.expect("the panic of another task's waker").unwrap();
        assert_eq!(wakers.map(|waker| waker.woken.load(Ordering::SeqCst)), [1; 4]);
        for mut receive in receives {
            let Poll::Ready(Err(error)) = poll(&mut receive) else {
                panic!("the receive is pending")
            };
            assert!(matches!(error.kind(), OpErrorKind::Closed), "{error}");
        }
        assert_eq!(pool.available(), 4);
    });
}

/// Polls `future` to completion with a waker that panics.
fn poll_with_a_panicking_waker<F: Future>(what: &str, future: F) -> F::Output {
    let (mut future, waker) =
        (Box::pin(future), Arc::new(Counting { panics: true.into(), ..Counting::default() }));
    let waker = Waker::from(waker);
    loop {
        let poll = || future.as_mut().poll(&mut Context::from_waker(&waker));
        match catch_unwind(AssertUnwindSafe(poll))
            .unwrap_or_else(|_| panic!("{what}: its poll panicked"))
        {
            Poll::Ready(output) => return output,
            Poll::Pending => thread::sleep(Duration::from_micros(10)),
        }
    }
}

// Shows C1.
#[test]
fn operation_completes_although_its_own_waker_panics() {
    for mode in Mode::ALL {
        for flavour in [None, Some(Flavour::CurrentThread), Some(Flavour::MultiThread)] {
            bounded(&format!("{mode:?} {flavour:?}"), LONG, move || {
                let runtime = flavour.map(Flavour::runtime);
                let _entered = runtime.as_ref().map(|runtime| runtime.enter());
                let (device, pd) = software(&slow_network(7));
                let queue = CompletionQueue::new(&device, mode.make()).unwrap();
                let ((a, b), pool) = (pair(&pd, &queue), Pool::new(&pd, 64, 4).unwrap());
                let region = ExposedRegion::new(&pd, vec![0; 64], Access::REMOTE_ALL).unwrap();
                let word = region.grant().slice(..8).unwrap();
                let new = || pool.try_alloc(64).unwrap();
                for _ in 0..20 {
                    let receive = b.recv(new());
                    poll_with_a_panicking_waker("send", a.send(new())).unwrap();
                    poll_with_a_panicking_waker("receive", receive).unwrap();
                    poll_with_a_panicking_waker("write", a.write(new(), region.grant())).unwrap();
                    poll_with_a_panicking_waker("inline write", a.write_inline(&[1; 8], word))
                        .unwrap();
                    poll_with_a_panicking_waker("read", a.read(new(), region.grant())).unwrap();
                    poll_with_a_panicking_waker("addition", a.fetch_add(word, 1)).unwrap();
                    poll_with_a_panicking_waker("exchange", a.compare_swap(word, 1, 2)).unwrap();
                    poll_with_a_panicking_waker(
                        "driver",
                        queue.drive(b.read(new(), region.grant())),
                    )
                    .unwrap();
                }
                poll_with_a_panicking_waker("close", a.close());
            });
        }
    }
}

struct PanicsAgain;

impl Drop for PanicsAgain {
    fn drop(&mut self) {
        resume_unwind(Box::new("dropped"));
    }
}

#[derive(Default)]
struct Panicking {
    woken: AtomicUsize,
    panics: AtomicBool,
}

impl Wake for Panicking {
    fn wake(self: Arc<Self>) {
        self.woken.fetch_add(1, Ordering::SeqCst);
        if self.panics.load(Ordering::SeqCst) {
            resume_unwind(Box::new(PanicsAgain));
        }
    }
}

/// Completes, three times, a receive whose waker panics and a receive that a task awaits.
async fn panics_beside_a_task(
    queue: CompletionQueue,
    ends: [(QueuePair, QueuePair); 2],
    pool: Pool,
) {
    let [(a, b), (c, d)] = ends;
    for _ in 0..3 {
        let waker = Arc::new(Panicking::default());
        let mut receive = b.recv(pool.try_alloc(64).unwrap());
        let_wait(&queue, &Waker::from(waker.clone()), &mut receive);
        waker.panics.store(true, Ordering::SeqCst);
        let waiting = queue.counters().waiting;
        let task = tokio::spawn(d.recv(pool.try_alloc(64).unwrap()));
        torture::eventually("the task that waits", || queue.counters().waiting > waiting).await;
        soon("the send that ends the first", a.send(pool.try_alloc(8).unwrap())).await.unwrap();
        torture::eventually("the waker", || waker.woken.load(Ordering::SeqCst) > 0).await;
        soon("the send that ends the second", c.send(pool.try_alloc(8).unwrap())).await.unwrap();
        assert_eq!(soon("the task", task).await.expect("it does not panic").unwrap().len, 8);
        assert_eq!(soon("the receive of the waker", receive).await.unwrap().len, 8);
    }
    let idle = queue.counters().waiting;
    assert_eq!(idle, 0, "operations that are over are not counted");
}

// Shows C1.
#[test]
fn panicking_waker_affects_no_other_task_in_any_mode() {
    for mode in Mode::ALL {
        for flavour in Flavour::ALL {
            bounded(&format!("{mode:?} {flavour:?}"), LONG, move || {
                let runtime = flavour.runtime();
                let (device, pd) = device(&Network::new());
                let queue = CompletionQueue::new(&device, mode.make()).unwrap();
                let (ends, pool) =
                    ([pair(&pd, &queue), pair(&pd, &queue)], Pool::new(&pd, 64, 8).unwrap());
                let test = panics_beside_a_task(queue.clone(), ends, pool);
                if mode == Mode::Cooperative {
                    // Without a driver, each operation polls for itself.
                    runtime.block_on(queue.drive(test));
                } else {
                    // Spawned, so that a worker thread and not this one runs the I/O driver.
                    runtime
                        .block_on(async { tokio::spawn(test).await.expect("it does not panic") });
                }
            });
        }
    }
}

#[test]
fn returning_a_buffer_survives_a_panicking_waker() {
    bounded("a pool", LONG, || {
        let (_device, pd) = device(&Network::new());
        let pool = Pool::new(&pd, 64, 1).unwrap();
        let buffer = pool.try_alloc(64).unwrap();
        let waker = Arc::new(Panicking { panics: true.into(), ..Panicking::default() });
        let mut first = Box::pin(pool.alloc(64));
        assert!(
            first.as_mut().poll(&mut Context::from_waker(&Waker::from(waker.clone()))).is_pending()
        );
        drop(buffer);
        assert_eq!(waker.woken.load(Ordering::SeqCst), 1);
        drop(first);
        assert!(pool.try_alloc(64).is_ok(), "the dropped future left the wait queue");
    });
}

#[test]
fn polling_thread_survives_a_panicking_waker() {
    bounded("a poller", LONG, || {
        let (device, pd) = device(&Network::new());
        let queue = CompletionQueue::new(&device, Mode::BusyPoll.make()).unwrap();
        let (a, b) = pair(&pd, &queue);
        let pool = Pool::new(&pd, 64, 4).unwrap();
        let waker = Arc::new(Counting { panics: true.into(), ..Counting::default() });
        for round in 1..=3 {
            let mut receive = b.recv(pool.try_alloc(64).unwrap());
            let_wait(&queue, &Waker::from(waker.clone()), &mut receive);
            let send = a.send(pool.try_alloc(8).unwrap());
            while waker.woken.load(Ordering::SeqCst) < round {
                thread::sleep(Duration::from_millis(1));
            }
            block_on(send).unwrap();
            assert_eq!(block_on(receive).unwrap().len, 8);
        }
    });
}

fn soon_after_now() -> Instant {
    Instant::now() + Duration::from_millis(20)
}

/// A waker that blocks until the sender is dropped.
struct Blocks(Mutex<mpsc::Receiver<()>>, mpsc::Sender<()>);

impl Wake for Blocks {
    fn wake(self: Arc<Self>) {
        self.1.send(()).unwrap();
        let _ = self.0.lock().unwrap().recv();
    }
}

// Shows T1.
#[test]
fn lease_expires_while_a_waker_blocks() {
    bounded("a waker that blocks", LONG, || {
        Flavour::CurrentThread.runtime().block_on(async {
            let (device, pd) = device(&Network::new());
            let queue = CompletionQueue::new(&device, CompletionMode::Event).unwrap();
            let (a, b) = pair(&pd, &queue);
            let memory = vec![0_u8; 64];
            let region = Arc::new(ExposedRegion::new(&pd, memory, Access::MW_BIND).unwrap());
            let mut lease = b.lease(&region, 0..64, Access::REMOTE_WRITE).await.unwrap();
            let (release, released) = mpsc::channel();
            let (blocked, is_blocked) = mpsc::channel();
            let waker = Waker::from(Arc::new(Blocks(Mutex::new(released), blocked)));
            let pool = Pool::new(&pd, 64, 1).unwrap();
            // The deadline wakes a task: the time has come, or the device has revoked the receive.
            let mut receive = a.recv(pool.try_alloc(64).unwrap()).deadline(soon_after_now());
            while Pin::new(&mut receive).poll(&mut Context::from_waker(&waker)).is_ready() {
                receive = a.recv(pool.try_alloc(64).unwrap()).deadline(soon_after_now());
            }
            is_blocked.recv().unwrap();
            lease.expire_at(soon_after_now()).unwrap();
            while !lease.has_expired() {
                thread::yield_now();
            }
            drop(release);
            lease.expired().await;
        });
    });
}

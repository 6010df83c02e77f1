//! Wakers are code of users: they may end what woke them, look at the queue, panic. No other task or operation is affected.

use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::thread;
use std::time::Duration;

use crate::torture::{
    self, Flavour, LONG, Mode, block_on, bounded, device, pair, slow_network, software, soon,
};
use tokio_rdma::op::{Recv, Write};
use tokio_rdma::software::Network;
use tokio_rdma::types::{QpAttr, QpState};
use tokio_rdma::{
    Access, BufMut, CompletionMode, CompletionQueue, ExposedRegion, OpErrorKind, Pool, QueuePair,
};

/// Polls once, from nowhere.
fn poll<F: Future + Unpin>(future: &mut F) -> Poll<F::Output> {
    Pin::new(future).poll(&mut Context::from_waker(Waker::noop()))
}

/// An executor whose tasks are owned by their wakers alone.
struct Lonely(Mutex<Option<Pin<Box<dyn Future<Output = ()> + Send>>>>);

impl Wake for Lonely {
    fn wake(self: Arc<Self>) {
        let Some(mut future) = self.0.lock().unwrap().take() else { return };
        let waker = Waker::from(self.clone());
        if future.as_mut().poll(&mut Context::from_waker(&waker)).is_pending() {
            *self.0.lock().unwrap() = Some(future);
        }
    }
}

#[test]
fn the_last_waker_of_a_task_may_end_the_queue_pair_it_waits_for() {
    for mode in [Mode::BusyPoll, Mode::Event, Mode::Hybrid] {
        bounded("a lonely task", LONG, move || {
            let runtime = Flavour::CurrentThread.runtime();
            runtime.block_on(async move {
                let (device, pd) = device(&slow_network(9));
                let queue = CompletionQueue::new(&device, mode.make()).unwrap();
                for _ in 0..100 {
                    let (a, b) = pair(&pd, &queue);
                    let pool = Pool::new(&pd, 64, 2).unwrap();
                    let shared =
                        Arc::new(tokio::sync::Mutex::new(a.recv(pool.try_alloc(64).unwrap())));
                    // The task owns both queue pairs, and is owned by the waker it leaves with the receive.
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
                    Waker::from(Arc::new(Lonely(Mutex::new(Some(Box::pin(task)))))).wake();
                    // Another task takes the receive over, and with that replaces the waker.
                    let mut receive = shared.lock().await;
                    soon("the receive", &mut *receive).await.unwrap_err();
                    drop(receive);
                    torture::eventually("the buffer", || pool.available() == 2).await;
                }
            });
        });
    }
}

/// A waker that looks at the queue.
struct Curious(CompletionQueue);

impl Wake for Curious {
    fn wake(self: Arc<Self>) {
        let _ = self.0.counters();
    }
}

#[test]
fn a_waker_may_look_at_the_queue() {
    bounded("a curious waker", LONG, || {
        let (device, pd) = device(&Network::new());
        let queue = CompletionQueue::new(&device, CompletionMode::Event).unwrap();
        let (a, b) = pair(&pd, &queue);
        let pool = Pool::new(&pd, 64, 2).unwrap();
        let waker = Waker::from(Arc::new(Curious(queue)));
        // More than end at once before one of them yields.
        for _ in 0..1000 {
            let mut receive = b.recv(pool.try_alloc(64).unwrap());
            let mut send = a.send(pool.try_alloc(8).unwrap());
            while Pin::new(&mut send).poll(&mut Context::from_waker(&waker)).is_pending() {}
            while Pin::new(&mut receive).poll(&mut Context::from_waker(&waker)).is_pending() {}
        }
    });
}

/// A waker that does what it was given, once.
#[derive(Default)]
struct Deed(Mutex<Option<Box<dyn FnOnce() + Send>>>);

impl Wake for Deed {
    fn wake(self: Arc<Self>) {
        let deed = self.0.lock().unwrap().take();
        if let Some(deed) = deed {
            deed();
        }
    }
}

/// A write whose completion is found together with that of a receive, for which somebody waits.
struct Together {
    queue: CompletionQueue,
    ends: (QueuePair, QueuePair),
    write: Write<BufMut>,
    /// Polled until it waited, with the waker of `deed`.
    receive: Recv<BufMut>,
    send: tokio_rdma::op::Send<BufMut>,
    deed: Arc<Deed>,
}

impl Together {
    /// `spins`: the write was looked for before; `None` if it was done by then.
    fn new(mode: Mode, spins: bool) -> Option<Self> {
        let (device, pd) = software(&slow_network(5));
        let queue = CompletionQueue::new(&device, mode.make()).unwrap();
        let ends = pair(&pd, &queue);
        let pool = Pool::new(&pd, 64, 4).unwrap();
        let new = || pool.try_alloc(64).unwrap();
        let region = ExposedRegion::new(&pd, vec![0; 64], Access::REMOTE_ALL).unwrap();
        let deed = Arc::<Deed>::default();
        let waker = Waker::from(deed.clone());
        let mut receive = ends.0.recv(new());
        while queue.counters().waiting == 0 {
            assert!(Pin::new(&mut receive).poll(&mut Context::from_waker(&waker)).is_pending());
        }
        let mut write = ends.0.write(new(), region.grant());
        if spins && poll(&mut write).is_ready() {
            return None;
        }
        // Nobody looks meanwhile: there is no reactor.
        thread::sleep(Duration::from_millis(5));
        let send = ends.1.send(new());
        thread::sleep(Duration::from_millis(5));
        Some(Self { queue, ends, write, receive, send, deed })
    }
}

/// Times that a thing is tried whose moment may be missed.
const TRIES: usize = 200;

#[test]
fn whoever_is_woken_by_an_operation_may_drop_all_that_it_is_of() {
    bounded("the last of its queue", LONG, || {
        for _ in 0..TRIES {
            let Some(Together { queue, ends, mut write, receive, send, deed }) =
                Together::new(Mode::Hybrid, true)
            else {
                continue;
            };
            let (before, at_end) = (queue.counters().spin_rounds, Arc::new(Mutex::new(None)));
            let seen = at_end.clone();
            *deed.0.lock().unwrap() = Some(Box::new(move || {
                *seen.lock().unwrap() = Some(queue.counters().spin_rounds);
                drop((send, receive, ends, queue));
            }));
            let found = poll(&mut write);
            // Still there if they were not found together: the message had not arrived yet.
            let missed = deed.0.lock().unwrap().take();
            drop(missed);
            if let (Poll::Ready(result), Some(at_end)) = (found, *at_end.lock().unwrap()) {
                result.unwrap();
                // What the queue counts it has counted while it is sure to be there. Found before the first round, there was
                // nothing to count.
                if at_end != before {
                    return;
                }
            }
        }
        panic!("never found together, or the rounds were not counted");
    });
}

#[test]
fn operation_that_wakes_a_waker_that_panics_has_its_result() {
    for mode in [Mode::Event, Mode::Hybrid] {
        bounded("a waker that panics", LONG, move || {
            for _ in 0..TRIES {
                let Some(mut together) = Together::new(mode, false) else { continue };
                *together.deed.0.lock().unwrap() =
                    Some(Box::new(|| resume_unwind(Box::new("woken"))));
                let found = catch_unwind(AssertUnwindSafe(|| poll(&mut together.write)));
                let found = found.expect("the panic of another task's waker");
                if together.deed.0.lock().unwrap().take().is_some() {
                    // Not found together.
                    continue;
                }
                let Poll::Ready(result) = found else { panic!("it was found") };
                result.unwrap();
                return;
            }
            panic!("never found together");
        });
    }
}

#[test]
fn who_is_woken_by_a_reset_may_change_the_state_at_once() {
    bounded("a reset", LONG, || {
        let (device, pd) = device(&Network::new());
        let queue = CompletionQueue::new(&device, CompletionMode::Event).unwrap();
        let qp = QueuePair::new(&pd, &queue).unwrap();
        let pool = Pool::new(&pd, 64, 1).unwrap();
        let (receive, woken) = (qp.recv(pool.try_alloc(64).unwrap()), qp.clone());
        // Runs where it is woken.
        let task = async move {
            assert!(
                matches!(receive.await, Err(error) if matches!(error.kind(), OpErrorKind::Closed))
            );
            woken.modify(&QpAttr::to_state(QpState::Reset)).unwrap();
        };
        Waker::from(Arc::new(Lonely(Mutex::new(Some(Box::pin(task)))))).wake();
        qp.modify(&QpAttr::to_state(QpState::Reset)).unwrap();
        assert_eq!(pool.available(), 1);
    });
}

/// A waker that counts, and panics from when it shall.
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

/// Lets `future` wait with `waker`.
fn let_wait<F: Future + Unpin>(queue: &CompletionQueue, waker: &Waker, future: &mut F) {
    let before = queue.counters().waiting;
    while queue.counters().waiting == before {
        assert!(Pin::new(&mut *future).poll(&mut Context::from_waker(waker)).is_pending());
    }
}

#[test]
fn waker_that_panics_leaves_nobody_asleep() {
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
            // Without a runtime whoever waits is asked to look again at once.
            waker.woken.store(0, Ordering::SeqCst);
            waker.panics.store(panics, Ordering::SeqCst);
        }
        let reset = catch_unwind(AssertUnwindSafe(|| qp.modify(&QpAttr::to_state(QpState::Reset))));
        reset.expect("the panic of another task's waker").unwrap();
        assert_eq!(wakers.map(|waker| waker.woken.load(Ordering::SeqCst)), [1; 4]);
        for mut receive in receives {
            let Poll::Ready(Err(error)) = poll(&mut receive) else { panic!("it is over") };
            assert!(matches!(error.kind(), OpErrorKind::Closed), "{error}");
        }
        assert_eq!(pool.available(), 4);
    });
}

/// Polls `future` until it is over, with a waker that panics.
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

#[test]
fn operation_that_wakes_its_own_task_survives_a_waker_that_panics() {
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

/// The payload of a panic, whose destructor panics as well.
struct PanicsAgain;

impl Drop for PanicsAgain {
    fn drop(&mut self) {
        resume_unwind(Box::new("dropped"));
    }
}

/// Panics when it is woken, from when it shall.
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

/// Three rounds in which one receive has a waker that panics and another, of the same queue, has a task that waits.
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

#[test]
fn waker_that_panics_affects_no_other_task_in_any_mode_on_any_runtime() {
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
                    // Without a driver each operation polls for itself, and no other wakes it.
                    runtime.block_on(queue.drive(test));
                } else {
                    // As a task, so that the thread that waits here leaves the I/O driver to a worker.
                    runtime
                        .block_on(async { tokio::spawn(test).await.expect("it does not panic") });
                }
            });
        }
    }
}

#[test]
fn task_that_returns_a_buffer_survives_the_waker_of_one_that_waits_for_it() {
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
        assert!(
            pool.try_alloc(64).is_ok(),
            "the place of the first in the queue goes with its future"
        );
    });
}

#[test]
fn thread_that_polls_survives_a_waker_that_panics() {
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

//! Which runtime, if any, drives an operation: several on one completion queue, one that stops, none at all.

use std::future::Future;
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use crate::torture::{Flavour, LONG, Mode, block_on, bounded, connect, device, pair, slow_network, soon};
use tokio::runtime::Builder;
use tokio_rdma::{Access, CompletionQueue, ExposedRegion, Pool, QueuePair, RemoteRegion};

/// A connected pair on a network where nothing is done at once.
struct Setup {
    ours: QueuePair,
    theirs: QueuePair,
    queue: CompletionQueue,
    pool: Pool,
    region: ExposedRegion,
}

impl Setup {
    fn new(mode: Mode) -> Self {
        let (device, pd) = device(&slow_network(3));
        let queue = CompletionQueue::builder(&device).capacity(2048).mode(mode.make()).build().unwrap();
        let (ours, theirs) = pair(&pd, &queue);
        let pool = Pool::new(&pd, 64, 64).unwrap();
        let region = ExposedRegion::new(&pd, vec![0; 64], Access::REMOTE_ALL).unwrap();
        Self { ours, theirs, queue, pool, region }
    }

    fn word(&self) -> RemoteRegion {
        self.region.grant().slice(0..8).unwrap()
    }

    /// A round of everything that completes at one end or at both.
    async fn exchange(&self, rounds: u32) {
        for round in 0..rounds {
            let bytes = round.to_le_bytes();
            let receive = self.theirs.recv(self.pool.try_alloc(64).unwrap());
            let send = self.ours.send(self.pool.copy_from(&bytes).unwrap());
            send.await.unwrap();
            assert_eq!(receive.await.unwrap().buffer[..], bytes);
            let before = self.region.load(0).unwrap();
            assert_eq!(self.ours.fetch_add(self.word(), 1).await.unwrap(), before);
        }
    }
}

#[test]
fn a_thread_without_any_runtime_drives_its_operations_itself() {
    for mode in Mode::ALL {
        bounded("no runtime", LONG, move || block_on(Setup::new(mode).exchange(50)));
    }
}

#[test]
fn a_runtime_without_io_drives_its_operations_by_polling() {
    for mode in Mode::ALL {
        bounded("no I/O driver", LONG, move || {
            let runtime = Builder::new_current_thread().enable_time().build().unwrap();
            runtime.block_on(soon("exchange", Setup::new(mode).exchange(50)));
        });
    }
}

#[test]
fn objects_outlive_the_runtime_that_used_them_first() {
    for (mode, flavour) in Mode::ALL.into_iter().flat_map(|mode| Flavour::ALL.map(|flavour| (mode, flavour))) {
        bounded("a second runtime", 2 * LONG, move || {
            let setup = Setup::new(mode);
            for _ in 0..4 {
                let runtime = flavour.runtime();
                runtime.block_on(soon("exchange", setup.exchange(10)));
                // In flight when the runtime ends: receives that nothing will ever find, and work that goes on.
                let receive = setup.ours.recv(setup.pool.try_alloc(64).unwrap());
                let add = setup.ours.fetch_add(setup.word(), 1);
                runtime.spawn(async move {
                    let _ = add.await;
                    let _ = receive.await;
                });
                runtime.block_on(tokio::task::yield_now());
                drop(runtime);
                flavour.runtime().block_on(soon("exchange", setup.exchange(10)));
            }
            assert_eq!(setup.region.load(0), Ok(84));
        });
    }
}

#[test]
fn an_operation_moves_from_a_runtime_that_ended_to_another() {
    for (mode, flavour) in Mode::ALL.into_iter().flat_map(|mode| Flavour::ALL.map(|flavour| (mode, flavour))) {
        bounded("moved", LONG, move || {
            let setup = Setup::new(mode);
            let mut receive = setup.theirs.recv(setup.pool.try_alloc(64).unwrap());
            for _ in 0..3 {
                flavour.runtime().block_on(async {
                    let waited = tokio::time::timeout(Duration::from_millis(1), &mut receive).await;
                    assert!(waited.is_err(), "nothing was sent");
                });
            }
            let sent = setup.ours.send(setup.pool.copy_from(b"late").unwrap());
            let received = flavour.runtime().block_on(soon("the receive", receive)).unwrap();
            assert_eq!(received.buffer[..], *b"late");
            flavour.runtime().block_on(soon("the send", sent)).unwrap();
        });
    }
}

#[test]
fn a_runtime_that_is_not_driven_holds_up_no_other_on_the_same_queue() {
    for mode in Mode::ALL {
        bounded("a sleeping runtime", LONG, move || {
            let setup = Setup::new(mode);
            let asleep = Flavour::CurrentThread.runtime();
            let receive = setup.ours.recv(setup.pool.try_alloc(64).unwrap());
            let waiting = asleep.spawn(receive);
            // Long enough to register and to arm, then never driven while the other works.
            asleep.block_on(tokio::task::yield_now());
            for flavour in Flavour::ALL {
                flavour.runtime().block_on(soon("exchange", setup.exchange(100)));
            }
            // What came for it meanwhile is there when it goes on.
            let sent = setup.theirs.send(setup.pool.copy_from(b"hello").unwrap());
            Flavour::CurrentThread.runtime().block_on(soon("send", sent)).unwrap();
            let received = asleep.block_on(soon("receive", waiting)).unwrap().unwrap();
            assert_eq!(received.buffer[..], *b"hello");
        });
    }
}

#[test]
fn two_runtimes_share_a_queue() {
    for mode in Mode::ALL {
        bounded("two runtimes", LONG, move || {
            let setup = Setup::new(mode);
            thread::scope(|scope| {
                for flavour in Flavour::ALL {
                    let pd = setup.ours.protection_domain();
                    let (ours, theirs) = pair(pd, &setup.queue);
                    let pool = Pool::new(pd, 64, 4).unwrap();
                    let region = ExposedRegion::new(pd, vec![0; 64], Access::REMOTE_ALL).unwrap();
                    let mine = Setup { ours, theirs, queue: setup.queue.clone(), pool, region };
                    scope.spawn(move || flavour.runtime().block_on(soon("exchange", mine.exchange(200))));
                }
            });
            assert_eq!(setup.queue.counters().waiting, 0);
        });
    }
}

/// Tokio asks a task that has spent its budget to yield, by waking its waker. The waker that the reactor has of us
/// looks at the channel right away, which must not ask again, and again.
#[test]
fn the_first_wait_of_a_task_without_budget_does_not_recurse() {
    for (mode, flavour) in Mode::ALL.into_iter().flat_map(|mode| Flavour::ALL.map(|flavour| (mode, flavour))) {
        bounded("no budget", LONG, move || {
            let setup = Setup::new(mode);
            flavour.runtime().block_on(async {
                let receive = setup.theirs.recv(setup.pool.try_alloc(64).unwrap());
                let (sender, mut receiver) = tokio::sync::mpsc::unbounded_channel();
                (0..1000).for_each(|number| sender.send(number).unwrap());
                while tokio::task::coop::has_budget_remaining() {
                    receiver.recv().await.unwrap();
                }
                let sent = setup.ours.send(setup.pool.copy_from(b"x").unwrap());
                assert_eq!(soon("the receive", receive).await.unwrap().len, 1);
                soon("the send", sent).await.unwrap();
            });
        });
    }
}

/// A thread may wait in the context of a runtime that another thread drives, and ends.
#[test]
fn a_wait_outlives_the_reactor_it_relied_on() {
    for (mode, flavour) in Mode::ALL.into_iter().flat_map(|mode| Flavour::ALL.map(|flavour| (mode, flavour))) {
        bounded("a reactor that ends", LONG, move || {
            let (device, pd) = device(&slow_network(4));
            // Nobody else looks at the queue it waits for.
            let [mine, other] = [mode, mode].map(|mode| CompletionQueue::new(&device, mode.make()).unwrap());
            let (ours, theirs) = (QueuePair::new(&pd, &other).unwrap(), QueuePair::new(&pd, &mine).unwrap());
            connect(&ours, &theirs);
            let pool = Pool::new(&pd, 64, 2).unwrap();
            let runtime = flavour.runtime();
            let mut receive = theirs.recv(pool.try_alloc(64).unwrap());
            let (handle, (waits, began)) = (runtime.handle().clone(), channel());
            let waiter = thread::spawn(move || {
                handle.block_on(async move {
                    let first = std::future::poll_fn(|context| {
                        let first = std::pin::Pin::new(&mut receive).poll(context);
                        std::task::Poll::Ready(first)
                    });
                    assert!(first.await.is_pending());
                    waits.send(()).unwrap();
                    receive.await
                })
            });
            began.recv().unwrap();
            drop(runtime);
            block_on(ours.send(pool.copy_from(b"still there").unwrap())).unwrap();
            assert_eq!(waiter.join().unwrap().unwrap().buffer[..], *b"still there");
        });
    }
}

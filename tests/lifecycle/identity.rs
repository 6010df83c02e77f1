//! Futures polled with wakers that have unusual results of `Waker::will_wake`, which is best
//! effort.
//!
//! Each public future, stream and sink is polled with wakers whose `will_wake` is always false, and
//! with one waker shared by all tasks. Wakers of the first kind are otherwise strict: only the
//! waker of the latest poll wakes, and only a task that was woken is polled.

#![allow(unsafe_code, reason = "a waker whose clones differ is unsafe to implement")]

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::task::{Context, Poll, RawWaker, RawWakerVTable, Wake, Waker};

use futures::future::join_all;
use futures::{Sink, SinkExt, StreamExt};
use tokio_rdma::cm::{self, ConnectConfig};
use tokio_rdma::dc::{DcPool, DcTarget};
use tokio_rdma::software::Network;
use tokio_rdma::{
    Access, Batch, CompletionQueue, Connection, ConnectionConfig, Device, ExposedRegion, Listener,
    Pool, QueuePair, SharedReceiveQueue,
};

use crate::connected;
use crate::torture::{
    self, Flavour, LONG, Mode, bounded, pair, slow_network, software, soon, yields,
};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Identity {
    /// False, even for a waker and its clone.
    Never,
    /// True, even between tasks. Waking one wakes all.
    Always,
}

/// A poll that makes more clones is in an endless loop.
const MAX_CLONES: usize = 100;

/// A sleeping future that is polled more often wakes itself endlessly.
const MAX_POLLS: usize = 100_000;

struct Task {
    outer: Mutex<Waker>,
    woken: AtomicBool,
    /// Number of the latest poll. Only the waker of that poll wakes.
    poll: AtomicUsize,
    clones: AtomicUsize,
}

impl Task {
    fn wake(&self) {
        self.woken.store(true, Ordering::SeqCst);
        let outer = self.outer.lock().unwrap().clone();
        outer.wake();
    }
}

/// The data of a waker of [`Identity::Never`]. Each clone has an allocation of its own.
struct Unique {
    task: Arc<Task>,
    poll: usize,
}

impl Unique {
    const TABLE: RawWakerVTable =
        RawWakerVTable::new(Self::clone, Self::wake, Self::wake_by_ref, Self::drop);

    fn waker(task: &Arc<Task>, poll: usize) -> Waker {
        // SAFETY: the table keeps the contract of `RawWaker`: each waker owns its box, and `Task`
        // is `Send` and `Sync`.
        unsafe { Waker::from_raw(Self::raw(task, poll)) }
    }

    fn raw(task: &Arc<Task>, poll: usize) -> RawWaker {
        let data = Box::new(Self { task: task.clone(), poll });
        RawWaker::new(Box::into_raw(data).cast_const().cast(), &Self::TABLE)
    }

    unsafe fn clone(data: *const ()) -> RawWaker {
        // SAFETY: `raw` made the data, and its waker is alive.
        let this = unsafe { &*data.cast::<Self>() };
        let clones = this.task.clones.fetch_add(1, Ordering::SeqCst);
        assert!(clones < MAX_CLONES, "a poll clones its waker without end");
        Self::raw(&this.task, this.poll)
    }

    unsafe fn wake(data: *const ()) {
        // SAFETY: as in `wake_by_ref` and `drop`. This consumes the waker.
        unsafe {
            Self::wake_by_ref(data);
            Self::drop(data);
        }
    }

    unsafe fn wake_by_ref(data: *const ()) {
        // SAFETY: `raw` made the data, and its waker is alive.
        let this = unsafe { &*data.cast::<Self>() };
        if this.task.poll.load(Ordering::SeqCst) == this.poll {
            this.task.wake();
        }
    }

    unsafe fn drop(data: *const ()) {
        // SAFETY: `raw` made the data, and this consumes its waker.
        drop(unsafe { Box::from_raw(data.cast_mut().cast::<Self>()) });
    }
}

/// The tasks that the shared waker of [`Identity::Always`] wakes.
#[derive(Default)]
struct WakesAll(Mutex<Vec<Weak<Task>>>);

impl Wake for WakesAll {
    fn wake(self: Arc<Self>) {
        let tasks: Vec<_> = {
            let mut tasks = self.0.lock().unwrap();
            tasks.retain(|task| task.strong_count() > 0);
            tasks.iter().filter_map(Weak::upgrade).collect()
        };
        tasks.iter().for_each(|task| task.wake());
    }
}

#[derive(Clone)]
struct Wakers {
    identity: Identity,
    all: Arc<WakesAll>,
    shared: Waker,
    /// True in modes in which waiting futures do not wake themselves.
    sleeps: bool,
}

impl Wakers {
    fn new(identity: Identity, mode: Mode) -> Self {
        let all = Arc::<WakesAll>::default();
        let sleeps = matches!(mode, Mode::Event | Mode::BusyPoll);
        Self { identity, shared: all.clone().into(), all, sleeps }
    }

    async fn soon<F: Future>(&self, what: &str, future: F) -> F::Output {
        soon(what, self.wrap(what, future)).await
    }

    fn wrap<F: Future>(&self, what: &str, future: F) -> Checked<F> {
        let task = Arc::new(Task {
            outer: Mutex::new(Waker::noop().clone()),
            woken: true.into(),
            poll: AtomicUsize::new(0),
            clones: AtomicUsize::new(0),
        });
        self.all.0.lock().unwrap().push(Arc::downgrade(&task));
        Checked { what: what.to_owned(), future: Box::pin(future), task, wakers: self.clone() }
    }
}

/// A future that is polled with the wakers of a test, and only after a wake-up.
struct Checked<F> {
    what: String,
    future: Pin<Box<F>>,
    task: Arc<Task>,
    wakers: Wakers,
}

impl<F: Future> Future for Checked<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
        self.task.outer.lock().unwrap().clone_from(context.waker());
        if !self.task.woken.swap(false, Ordering::SeqCst) {
            return Poll::Pending;
        }
        self.task.clones.store(0, Ordering::SeqCst);
        let poll = self.task.poll.fetch_add(1, Ordering::SeqCst) + 1;
        assert!(!self.wakers.sleeps || poll < MAX_POLLS, "{}: polled without end", self.what);
        let waker = match self.wakers.identity {
            Identity::Never => Unique::waker(&self.task, poll),
            Identity::Always => self.wakers.shared.clone(),
        };
        self.future.as_mut().poll(&mut Context::from_waker(&waker))
    }
}

/// Runs `scenario` with both kinds of wakers in `modes` on each runtime flavour.
fn everywhere<F: Future<Output = ()>>(
    what: &'static str,
    modes: &'static [Mode],
    scenario: impl Fn(Wakers, Mode) -> F + Send + Copy + 'static,
) {
    for identity in [Identity::Never, Identity::Always] {
        for &mode in modes {
            for flavour in Flavour::ALL {
                let name = format!("{what}, {identity:?}, {mode:?}, {flavour:?}");
                bounded(&name, 2 * LONG, move || {
                    flavour.runtime().block_on(scenario(Wakers::new(identity, mode), mode));
                });
            }
        }
    }
}

#[test]
fn test_wakers_behave_as_documented() {
    let [never, always] =
        [Identity::Never, Identity::Always].map(|identity| Wakers::new(identity, Mode::Event));
    let (one, two) = (never.wrap("one", async {}), always.wrap("two", async {}));
    let unique = Unique::waker(&one.task, 0);
    assert!(!unique.will_wake(&unique.clone()) && !unique.clone().will_wake(&unique));
    assert!(always.shared.will_wake(&always.shared.clone()));
    for (task, waker) in [(&one.task, &unique), (&two.task, &always.shared)] {
        task.woken.store(false, Ordering::SeqCst);
        let clone = waker.clone();
        clone.wake();
        assert!(task.woken.load(Ordering::SeqCst));
    }
    one.task.woken.store(false, Ordering::SeqCst);
    one.task.poll.store(1, Ordering::SeqCst);
    unique.wake();
    assert!(!one.task.woken.load(Ordering::SeqCst), "the waker of an earlier poll does not wake");
}

#[test]
fn operations_end_whatever_will_wake_returns() {
    everywhere("operations", &Mode::ALL, async |wakers, mode| {
        let (device, pd) = software(&slow_network(3));
        let queue = CompletionQueue::new(&device, mode.make()).unwrap();
        let (a, b) = pair(&pd, &queue);
        let pool = Pool::new(&pd, 64, 64).unwrap();
        let region =
            ExposedRegion::new(&pd, vec![0; 64], Access::REMOTE_ALL | Access::MW_BIND).unwrap();
        let (new, remote) = (|| pool.try_alloc(8).unwrap(), region.grant().slice(..8).unwrap());
        for round in 0..4 {
            let what = |name: &str| format!("{name} in round {round}");
            let received = wakers.wrap("receive", b.recv(pool.try_alloc(64).unwrap()));
            let sent = wakers.wrap("send", a.send(new()));
            let inlined = wakers.wrap("inline", a.write_inline(b"12345678", remote));
            let written = wakers.wrap("write", a.write(new(), remote));
            let read = wakers.wrap("read", a.read(new(), remote));
            let swapped = wakers.wrap("swap", a.compare_swap(remote, 0, 1));
            let added = wakers.wrap("add", a.fetch_add(remote, 1));
            let mut batch = Batch::new();
            batch.write(new(), remote).write(new(), remote);
            let batch = wakers.wrap("batch", a.post_batch(batch));
            let all = async {
                tokio::join!(received, sent, inlined, written, read, swapped, added, batch)
            };
            let (received, sent, inlined, written, read, swapped, added, batch) =
                soon(&what("operations"), all).await;
            assert_eq!(received.unwrap().len, 8);
            sent.unwrap();
            inlined.unwrap();
            written.unwrap();
            read.unwrap();
            swapped.unwrap();
            added.unwrap();
            assert!(batch.is_ok());
            let lease =
                wakers.soon("lease", b.lease(&region, 0..8, Access::REMOTE_READ)).await.unwrap();
            wakers.soon("invalidation", lease.invalidate()).await.unwrap();
        }
        let few = QueuePair::builder(&pd, &queue).max_send_wr(2).build().unwrap();
        let other = QueuePair::new(&pd, &queue).unwrap();
        torture::connect(&few, &other);
        let writes = (0..40).map(|_| wakers.wrap("queued write", few.write(new(), remote)));
        for written in soon("writes to a full queue", join_all(writes)).await {
            written.unwrap();
        }
        let one = Pool::new(&pd, 64, 1).unwrap();
        let waits = (0..8).map(|_| {
            wakers.wrap("buffer", async {
                let buffer = one.alloc(8).await.unwrap();
                few.write(buffer, remote).await.unwrap();
            })
        });
        soon("waits for one buffer", join_all(waits)).await;
        let (drive, write) = (queue.clone(), few.write(new(), remote));
        wakers.soon("drive", drive.drive(write)).await.unwrap();
        let flushed = wakers.wrap("flush", b.recv(new()));
        let closed = wakers.wrap("close", b.clone().close());
        let (flushed, ()) = soon("close", async { tokio::join!(flushed, closed) }).await;
        flushed.unwrap_err();
    });
}

#[test]
fn connection_futures_end_whatever_will_wake_returns() {
    everywhere("connection", &Mode::ALL, async |wakers, mode| {
        let config = connected::config().mode(mode.make());
        let (a, b) = connected::pair(&config);
        // A message of 8193 bytes is not copied, so the flush waits for its fetch.
        a.send(vec![7; 8193]).await.unwrap();
        let (flushed, received) = soon("fetch", async {
            tokio::join!(wakers.wrap("flush", a.flush()), wakers.wrap("receive", b.recv()))
        })
        .await;
        flushed.unwrap();
        assert_eq!(received.unwrap().unwrap().len(), 8193);

        let few = config.clone().receive_buffers(1).spare_buffers(0).send_buffers(1).max_send_wr(4);
        let (a, b) = connected::pair(&few.receive_memory(1).send_memory(1));
        const MESSAGES: usize = 60;
        let sending = async {
            // The sends wait for credits, buffers and memory, and the flushes for each other.
            let (a, wakers) = (&a, &wakers);
            let sends = (0..MESSAGES).map(|number| {
                wakers.wrap("send", async move {
                    a.send(vec![1; [10, 5000, 20_000][number % 3]]).await.unwrap();
                    a.flush().await.unwrap();
                })
            });
            join_all(sends).await;
        };
        let receiving = async {
            let waits = (0..MESSAGES).map(|_| wakers.wrap("receive", b.recv()));
            for message in join_all(waits).await {
                assert!(message.unwrap().is_some());
            }
        };
        soon("concurrent sends", async { tokio::join!(sending, receiving) }).await;
        let remote = b.expose(vec![0; 64], Access::REMOTE_ALL).unwrap();
        let word = remote.grant().slice(..8).unwrap();
        wakers.soon("write", a.write(a.copy_from(b"8 bytes!").unwrap(), word)).await.unwrap();
        wakers.soon("read", a.read(a.try_alloc(8).unwrap(), word)).await.unwrap();
        let ends = async {
            tokio::join!(wakers.wrap("close", a.close()), wakers.wrap("close", b.close()))
        };
        let (a_end, b_end) = soon("close", ends).await;
        a_end.unwrap();
        b_end.unwrap();
    });
}

#[test]
fn sinks_and_streams_end_whatever_will_wake_returns() {
    everywhere("handles", &Mode::ALL, async |wakers, mode| {
        let config = connected::config().mode(mode.make()).receive_buffers(2).send_buffers(1);
        let (a, mut b) = connected::pair(&config);
        let (mut sink, mut stream) = (a.clone(), a);
        const MESSAGES: usize = 20;
        let sending = async {
            for number in 0..MESSAGES {
                wakers
                    .wrap("ready", poll_fn(|context| Pin::new(&mut sink).poll_ready(context)))
                    .await
                    .unwrap();
                Pin::new(&mut sink)
                    .start_send(vec![1; [10, 5000, 8193][number % 3]].into())
                    .unwrap();
                if number % 4 == 0 {
                    wakers
                        .wrap("sink's flush", SinkExt::<bytes::Bytes>::flush(&mut sink))
                        .await
                        .unwrap();
                }
            }
            wakers.wrap("sink's close", SinkExt::<bytes::Bytes>::close(&mut sink)).await.unwrap();
        };
        let answering = async {
            while let Some(message) = wakers.wrap("next", b.next()).await {
                wakers.wrap("answer", SinkExt::send(&mut b, message.unwrap())).await.unwrap();
            }
            wakers.wrap("close", Connection::close(&b)).await.unwrap();
        };
        let receiving = async {
            let mut received = 0;
            while let Some(message) = wakers.wrap("answer's arrival", stream.next()).await {
                message.unwrap();
                received += 1;
            }
            assert_eq!(received, MESSAGES);
        };
        soon("talk", async { tokio::join!(sending, answering, receiving) }).await;
        sink.flush().await.unwrap();
    });
}

#[test]
fn connects_and_accepts_end_whatever_will_wake_returns() {
    everywhere("connecting", &[Mode::Event, Mode::BusyPoll], async |wakers, mode| {
        let network = Network::new();
        let [active, passive] =
            ["active", "passive"].map(|name| Device::software_in(&network, name).unwrap());
        let config = ConnectionConfig::default().mode(mode.make());
        let address = (passive.default_path().unwrap().1.gid.to_ip(), 0);
        let listener = Listener::bind_with(&passive, address, &config);
        let listener = wakers.soon("bind", listener).await.unwrap();
        let to = listener.local_addr().unwrap();
        let connect = || wakers.wrap("connect", Connection::connect_with(&active, to, &config));
        let accepted =
            async { tokio::join!(connect(), connect(), wakers.wrap("accept", listener.accept())) };
        let (first, second, peer) = soon("accept", accepted).await;
        let (first, second) = (first.unwrap(), second.unwrap());
        let other = wakers.soon("second accept", listener.accept()).await.unwrap();
        let ends = [first, second, peer.unwrap(), other];
        let closed = join_all(ends.iter().map(|end| wakers.wrap("close", end.close())));
        for end in soon("close", closed).await {
            end.unwrap();
        }
        let answered = async {
            let request = wakers.wrap("request", listener.request()).await.unwrap();
            wakers.wrap("accept of a request", request.accept()).await.unwrap();
            wakers.wrap("request", listener.request()).await.unwrap().reject(b"no").await.unwrap();
        };
        let asked = async { (connect().await, connect().await) };
        let (asked, ()) = soon("request", async { tokio::join!(asked, answered) }).await;
        asked.0.unwrap();
        asked.1.unwrap_err();

        let listener = wakers.soon("cm bind", cm::Listener::bind(&passive, address)).await.unwrap();
        let make = |device: &Device| {
            let pd = device.protection_domain().unwrap();
            let queue = CompletionQueue::new(device, mode.make()).unwrap();
            (pd, queue)
        };
        let ((a_pd, a_queue), (b_pd, b_queue)) = (make(&active), make(&passive));
        let options = ConnectConfig::default();
        let asking = async {
            let route =
                wakers.wrap("resolve", cm::resolve(&active, listener.local_addr())).await.unwrap();
            let qp = route.prepare(QueuePair::builder(&a_pd, &a_queue)).build().unwrap();
            let link = wakers.wrap("cm connect", route.connect(&qp, &options)).await.unwrap();
            (qp, link)
        };
        let answering = async {
            let request = wakers.wrap("cm accept", listener.accept()).await.unwrap();
            let qp = request.prepare(QueuePair::builder(&b_pd, &b_queue)).build().unwrap();
            let link = wakers.wrap("establish", request.accept(&qp, &options)).await.unwrap();
            (qp, link)
        };
        let ((_qp, link), (_peer_qp, peer)) =
            soon("cm", async { tokio::join!(asking, answering) }).await;
        let end = async {
            tokio::join!(
                wakers.wrap("disconnected", peer.disconnected()),
                wakers.wrap("disconnect", link.disconnect())
            )
        };
        soon("end", end).await.1.unwrap();
        let drained = async {
            tokio::join!(
                wakers.wrap("drained", link.drained()),
                wakers.wrap("drained", peer.drained())
            )
        };
        let drained = soon("timewait", drained).await;
        drained.0.unwrap();
        drained.1.unwrap();
    });
}

#[test]
fn dc_pool_and_device_events_end_whatever_will_wake_returns() {
    everywhere("dc pool", &Mode::ALL, async |wakers, mode| {
        let network = slow_network(4);
        let (device, pd) = software(&network);
        let queue = CompletionQueue::new(&device, mode.make()).unwrap();
        let srq = SharedReceiveQueue::new(&pd, &queue, 64, 1).unwrap();
        let target = DcTarget::new(&pd, &srq).unwrap();
        let region = ExposedRegion::new(&pd, vec![0; 64], Access::REMOTE_ALL).unwrap();
        let buffers = Pool::new(&pd, 64, 128).unwrap();
        let pool = DcPool::builder(&pd, &queue).initiators(1).build().unwrap();
        let peers: Vec<_> = (0..6).map(|_| pool.peer(&target.address()).unwrap()).collect();
        let word = region.grant().slice(..8).unwrap();
        for _ in 0..3 {
            let writes = peers.iter().map(|peer| {
                wakers.wrap("pooled write", async {
                    peer.write(buffers.try_alloc(8).unwrap(), word).await.unwrap();
                    peer.fetch_add(word, 1).await.unwrap();
                })
            });
            let leases = peers.iter().map(|peer| {
                wakers.wrap("pooled lease", async {
                    let lease = peer.borrow().await.unwrap();
                    lease.write(buffers.try_alloc(8).unwrap(), word).await.unwrap();
                })
            });
            soon("pool", async { tokio::join!(join_all(writes), join_all(leases)) }).await;
        }
        let mut events = device.events().unwrap();
        let seen = wakers.wrap("event", events.next());
        let port = async {
            yields(10).await;
            network.control("torture0").unwrap().set_port(false);
        };
        let (seen, ()) = soon("events", async { tokio::join!(seen, port) }).await;
        seen.unwrap().unwrap();
    });
}

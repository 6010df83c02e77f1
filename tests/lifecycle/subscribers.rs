//! A `tracing` subscriber that uses the crate for each event.
//!
//! It hangs if the crate emits an event under one of its locks.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use futures::FutureExt;
use tokio::io::AsyncWriteExt;
use tokio_rdma::dc::{DcPool, DcTarget};
use tokio_rdma::software::{Faults, Network};
use tokio_rdma::types::{QpAttr, QpState, Rkey};
use tokio_rdma::{
    CompletionMode, CompletionQueue, Connection, Device, Listener, Pool, RdmaListener, RdmaStream,
    RemoteRegion, SharedReceiveQueue,
};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

use crate::alone::alone;
use crate::connected::{config, pair_in};
use crate::torture::{Flavour, HANG, LONG, bounded, pair, slow_network, soon};

type Use = Arc<dyn Fn() + Send + Sync>;

/// Calls `uses` for each event, and counts events by their message.
#[derive(Clone, Default)]
struct User {
    uses: Arc<Mutex<Vec<Use>>>,
    events: Arc<Mutex<BTreeMap<String, u64>>>,
    begun: Arc<AtomicUsize>,
    ended: Arc<AtomicUsize>,
}

thread_local! {
    static IN_USE: Cell<bool> = const { Cell::new(false) };
}

impl User {
    fn with(&self, each: impl Fn() + Send + Sync + 'static) {
        self.uses.lock().unwrap().push(Arc::new(each));
    }

    fn shows(&self, object: impl Debug + Send + Sync + 'static) {
        self.with(move || drop(format!("{object:?}")));
    }

    fn has(&self, message: &str) -> bool {
        self.events.lock().unwrap().keys().any(|known| known.contains(message))
    }
}

struct Message(String);

impl Visit for Message {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        if field.name() == "message" {
            self.0 = format!("{value:?}");
        }
    }
}

impl Subscriber for User {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target().contains("rdma")
    }

    fn new_span(&self, _span: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _span: &Id, _values: &Record<'_>) {}

    fn record_follows_from(&self, _span: &Id, _follows: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut message = Message(String::new());
        event.record(&mut message);
        *self.events.lock().unwrap().entry(message.0).or_default() += 1;
        // The uses cause events, too.
        if !IN_USE.replace(true) {
            let uses = self.uses.lock().unwrap().clone();
            // The crate contains panics of subscribers.
            self.begun.fetch_add(1, Ordering::Relaxed);
            uses.iter().for_each(|each| each());
            self.ended.fetch_add(1, Ordering::Relaxed);
            IN_USE.set(false);
        }
    }

    fn enter(&self, _span: &Id) {}

    fn exit(&self, _span: &Id) {}
}

/// Creates and drops objects of a device of its own, which nothing else uses.
fn makes_new_handles() {
    let device = Device::software_in(&Network::new(), "new").unwrap();
    let pd = device.protection_domain().unwrap();
    let queue = CompletionQueue::builder(&device).capacity(1024).build().unwrap();
    let (a, _b) = pair(&pd, &queue);
    let pool = Pool::new(&pd, 8, 1).unwrap();
    drop(a.write(pool.try_alloc(8).unwrap(), RemoteRegion::new(8, 8, Rkey(1))));
}

async fn use_everything(user: &User, network: &Network) {
    let [(device, pd), (other, other_pd)] = crate::connected::two(network);
    let events = AtomicUsize::new(0);
    user.with(move || {
        if events.fetch_add(1, Ordering::Relaxed).is_multiple_of(16) {
            makes_new_handles();
        }
    });

    // Queue pairs: work that succeeds, work that fails, resets, a flush.
    let queue = CompletionQueue::new(&device, CompletionMode::Event).unwrap();
    let (good, receiver) = pair(&pd, &queue);
    let (bad, _bad_receiver) = pair(&pd, &queue);
    let pool = Pool::new(&pd, 64, 64).unwrap();
    let region = tokio_rdma::ExposedRegion::new(&pd, vec![0; 64], tokio_rdma::Access::REMOTE_ALL);
    let region = region.unwrap();
    let to = region.grant();
    let (qp, near) = (good.clone(), to.slice(..3).unwrap());
    user.with(move || {
        drop(qp.write_inline(b"log", near).now_or_never());
        // The device may be lost.
        let buffer =
            Pool::new(qp.protection_domain(), 8, 1).ok().and_then(|pool| pool.try_alloc(8).ok());
        drop(buffer.map(|buffer| qp.recv(buffer).now_or_never()));
        let _ = qp.send_counters();
    });
    user.shows((good.clone(), bad.clone(), queue.clone(), pool.clone(), device.clone()));
    let counted = pool.clone();
    user.with(move || drop((counted.available(), counted.try_alloc(8))));
    let wrong = RemoteRegion::new(to.addr(), 8, Rkey(!to.rkey().0));
    let receive = receiver.recv(pool.try_alloc(64).unwrap());
    drop(receive);
    soon("a write", good.write(pool.try_alloc(64).unwrap(), to)).await.unwrap();
    soon("a wrong key", bad.write(pool.try_alloc(8).unwrap(), wrong)).await.unwrap_err();
    bad.modify(&QpAttr::to_state(QpState::Reset)).unwrap();

    // Connections and streams: one is aborted, one is closed, one ends with its runtime.
    let listener = Listener::bind(&device, "127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (accepted, connected) =
        tokio::join!(listener.accept(), Connection::connect(&other, address));
    let (served, client) = (accepted.unwrap(), Arc::new(connected.unwrap()));
    let streams = RdmaListener::bind(&device, "127.0.0.1:0").await.unwrap();
    let local = streams.local_addr().unwrap();
    let (accepted, connected) = tokio::join!(streams.accept(), RdmaStream::connect(&other, local));
    let (stream, peer) = (accepted.unwrap().0, connected.unwrap());
    // Or the messages of the subscriber use up all receives.
    let received = served.clone();
    tokio::spawn(async move { while received.recv().await.is_ok() {} });
    let used = client.clone();
    user.with(move || {
        let _ = (used.counters(), used.close_reason(), used.try_send("log"));
        drop(used.recv().now_or_never());
        drop(format!("{used:?}"));
    });
    let stats = Arc::new(listener);
    let shown = stats.clone();
    user.with(move || drop((shown.stats(), format!("{shown:?}"))));
    let (read, mut write) = stream.into_split();
    let counters = peer;
    user.with(move || {
        let _ = (counters.counters(), counters.close_reason());
    });
    soon("a stream's bytes", write.write_all(b"bytes")).await.unwrap();
    soon("a message", client.send(vec![1; 1 << 16])).await.unwrap();
    let (one, two) = pair_in(&pd, &other_pd, &config(), &config());
    soon("a message", one.send("short")).await.unwrap();
    one.abort();
    soon("the end", two.closed()).await;
    drop((read, write));
    served.abort();

    // DC.
    let srq = SharedReceiveQueue::new(&other_pd, &queue_of(&other), 8, 1).unwrap();
    let target = DcTarget::builder(&other_pd, &srq).build().unwrap();
    let dc = DcPool::builder(&pd, &queue).initiators(1).build().unwrap();
    let peer = dc.peer(&target.address()).unwrap();
    let from_pool = peer.clone();
    user.with(move || {
        drop(from_pool.write_inline(b"log", RemoteRegion::new(8, 3, Rkey(1))).now_or_never());
        drop(format!("{from_pool:?}"));
    });
    let refused = peer.write(pool.try_alloc(8).unwrap(), RemoteRegion::new(8, 8, Rkey(1)));
    soon("a refusal", refused).await.unwrap_err();

    // The loss of a device.
    network.control("one").unwrap().kill();
    soon("a lost device", good.write_inline(b"x", to.slice(..1).unwrap())).await.unwrap_err();
    drop((good, receiver, dc, stats));
}

fn queue_of(device: &Device) -> CompletionQueue {
    CompletionQueue::new(device, CompletionMode::Event).unwrap()
}

// Shows F2.
#[test]
fn subscriber_may_use_the_crate_in_each_event() {
    // The subscriber is the only one of the process.
    if !alone("subscribers::subscriber_may_use_the_crate_in_each_event") {
        return;
    }
    let user = User::default();
    tracing::subscriber::set_global_default(user.clone()).unwrap();
    for make in [Network::new, || slow_network(7), || Network::with_faults(7, Faults::none())] {
        for flavour in [Flavour::CurrentThread, Flavour::MultiThread] {
            let user = user.clone();
            bounded("subscriber", LONG, move || {
                let runtime = flavour.runtime();
                runtime.block_on(use_everything(&user, &make()));
                drop(runtime);
                let uses = std::mem::take(&mut *user.uses.lock().unwrap());
                drop(uses);
            });
        }
    }
    for message in [
        "posted",
        "completed",
        "work request failed",
        "work request flushed",
        "queue pair changed state",
        "connection closed",
        "connection established",
        "asynchronous event",
        "device lost",
    ] {
        assert!(user.has(message), "no event {message:?}");
    }
    assert!(user.ended.load(Ordering::Relaxed) > 0);
    // A thread of the network may still be in an event.
    let deadline = Instant::now() + HANG;
    while user.ended.load(Ordering::Relaxed) < user.begun.load(Ordering::Relaxed) {
        assert!(Instant::now() < deadline, "a use panicked");
        std::thread::yield_now();
    }
}

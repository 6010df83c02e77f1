//! Futures that are ready again and again, beside another task of a current-thread runtime: both
//! make progress. On the software device, where a loop of operations never waits by itself.
//!
//! Shows F1.

use std::cell::Cell;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures::{SinkExt, StreamExt};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt};
use tokio::task::coop::unconstrained;
use tokio::task::{LocalSet, spawn_local, yield_now};
use tokio_rdma::cm;
use tokio_rdma::memory::BufMut;
use tokio_rdma::op::Batch;
use tokio_rdma::peers::{PeerSet, PeerSetConfig, Reconnect, ReconnectPolicy};
use tokio_rdma::software::Network;
use tokio_rdma::types::AsyncEvent;
use tokio_rdma::{
    Access, CompletionMode, CompletionQueue, Connection, Device, ExposedRegion, Imm, Listener,
    Pool, ProtectionDomain, QueuePair, RdmaListener, RdmaStream,
};

use crate::torture::{Flavour, LONG, bounded, connect, soon};

const ROUNDS: u32 = 4000;

/// Turns of the other task in [`ROUNDS`] rounds, at least. Tokio's budget is 128 operations.
const TURNS: u32 = ROUNDS / 500;

struct Sibling {
    turns: Rc<Cell<u32>>,
}

impl Sibling {
    fn start() -> Self {
        let turns = Rc::new(Cell::new(0));
        let count = turns.clone();
        spawn_local(async move {
            loop {
                count.set(count.get() + 1);
                yield_now().await;
            }
        });
        Self { turns }
    }

    /// Asserts that the other task runs beside a loop of `round`.
    async fn runs_beside(&self, what: &str, mut round: impl AsyncFnMut()) {
        yield_now().await;
        self.turns.set(0);
        for _ in 0..ROUNDS {
            round().await;
        }
        let turns = self.turns.get();
        assert!(turns >= TURNS, "{what}: {turns} turns of the other task in {ROUNDS} rounds");
    }
}

fn run<F: Future<Output = ()>>(
    what: &'static str,
    test: impl FnOnce(Sibling) -> F + Send + 'static,
) {
    bounded(what, LONG, move || {
        let local = LocalSet::new();
        local.block_on(&Flavour::CurrentThread.runtime(), async { test(Sibling::start()).await });
    });
}

fn software() -> (Device, ProtectionDomain) {
    let device = Device::software_in(&Network::new(), "fair0").unwrap();
    let pd = device.protection_domain().unwrap();
    (device, pd)
}

fn any_port() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], 0))
}

async fn connected(device: &Device) -> (Connection, Connection) {
    let listener = Listener::bind(device, any_port()).await.unwrap();
    let both = async {
        tokio::join!(listener.accept(), Connection::connect(device, listener.local_addr().unwrap()))
    };
    let (theirs, ours) = soon("connected", both).await;
    (ours.unwrap(), theirs.unwrap())
}

/// Receives without a budget, so that only what is sent counts.
async fn drain(connection: &Connection) {
    unconstrained(connection.recv()).await.unwrap().unwrap();
}

// Shows F1.
#[test]
fn messages_that_are_always_ready_let_other_tasks_run() {
    run("messages", |sibling| async move {
        let (device, _pd) = software();
        let (a, b) = connected(&device).await;
        let x = Bytes::from_static(b"x");
        let send = async || {
            a.send("x").await.unwrap();
            drain(&b).await;
        };
        sibling.runs_beside("send", send).await;
        let send_buffer = async || {
            a.send_buffer(a.copy_from(b"x").unwrap()).await.unwrap();
            drain(&b).await;
        };
        sibling.runs_beside("send_buffer", send_buffer).await;
        let send_vectored = async || {
            a.send_vectored(&[x.clone(), x.clone()]).await.unwrap();
            drain(&b).await;
        };
        sibling.runs_beside("send_vectored", send_vectored).await;
        let recv = async || {
            unconstrained(a.send("x")).await.unwrap();
            assert_eq!(b.recv().await.unwrap().unwrap(), x);
        };
        sibling.runs_beside("recv", recv).await;
        let recv_buffer = async || {
            unconstrained(a.send("x")).await.unwrap();
            assert_eq!(b.recv_buffer().await.unwrap().unwrap()[..], x);
        };
        sibling.runs_beside("recv_buffer", recv_buffer).await;
        sibling.runs_beside("flush", async || a.flush().await.unwrap()).await;

        {
            let region = b.expose(vec![0; 8], Access::REMOTE_WRITE).unwrap();
            let mut notifications = b.notifications();
            let notify = async || {
                let buffer = a.copy_from(b"12345678").unwrap();
                a.write_with_imm(buffer, region.grant(), Imm(1)).await.unwrap();
                unconstrained(notifications.next()).await.unwrap().unwrap();
            };
            sibling.runs_beside("write_with_imm", notify).await;
            let mut notifications = b.notifications();
            let notified = async || {
                let buffer = a.copy_from(b"12345678").unwrap();
                unconstrained(a.write_with_imm(buffer, region.grant(), Imm(1))).await.unwrap();
                notifications.next().await.unwrap().unwrap();
            };
            sibling.runs_beside("notifications", notified).await;
        }

        let (mut sink, mut stream) = (a.clone(), a.clone());
        let feed = async || {
            sink.feed(x.clone()).await.unwrap();
            unconstrained(b.recv()).await.unwrap().unwrap();
        };
        sibling.runs_beside("SinkExt::feed", feed).await;
        let flush = async || SinkExt::flush(&mut sink).await.unwrap();
        sibling.runs_beside("SinkExt::flush", flush).await;
        let next = async || {
            unconstrained(b.send("x")).await.unwrap();
            assert_eq!(stream.next().await.unwrap().unwrap(), x);
        };
        sibling.runs_beside("StreamExt::next", next).await;
        let close = async || SinkExt::close(&mut sink).await.unwrap();
        sibling.runs_beside("SinkExt::close", close).await;

        let (closed, other) = soon("closed", async { tokio::join!(a.close(), b.close()) }).await;
        closed.unwrap();
        other.unwrap();
        let closed = async || _ = a.closed().await;
        sibling.runs_beside("closed", closed).await;
        sibling.runs_beside("close", async || a.close().await.unwrap()).await;
        sibling.runs_beside("failed send", async || drop(a.send("x").await.unwrap_err())).await;
        sibling.runs_beside("failed recv", async || drop(a.recv().await)).await;
    });
}

#[test]
fn memory_and_leases_that_are_always_ready_let_other_tasks_run() {
    run("memory", |sibling| async move {
        let (device, pd) = software();
        let pool = Pool::new(&pd, 64, 4).unwrap();
        sibling.runs_beside("alloc", async || drop(pool.alloc(8).await.unwrap())).await;
        sibling.runs_beside("refused alloc", async || drop(pool.alloc(65).await)).await;
        let many = async || pool.alloc_many(&mut Vec::new(), 2, 8).await.unwrap();
        sibling.runs_beside("alloc_many", many).await;
        let growing = Pool::builder(&pd).buffer_size(64).buffers(1).growing(true).build().unwrap();
        sibling.runs_beside("grow", async || drop(growing.alloc(8).await.unwrap())).await;

        let (a, _b) = connected(&device).await;
        let region = a.expose(vec![0; 64], Access::MW_BIND).unwrap();
        let mut lease = a.lease(&region, 0..64, Access::REMOTE_WRITE).await.unwrap();
        lease.expire_at(Instant::now()).unwrap();
        soon("expired", lease.expired()).await;
        sibling.runs_beside("expired", async || lease.expired().await).await;
    });
}

#[test]
fn supervised_connections_always_ready_let_other_tasks_run() {
    run("supervised", |sibling| async move {
        let (device, _pd) = software();
        let listener = Listener::bind(&device, any_port()).await.unwrap();
        let address = listener.local_addr().unwrap();
        let config = Default::default();
        let client = Reconnect::new(&device, address, &config, ReconnectPolicy::default()).unwrap();
        let both = async { tokio::join!(listener.accept(), client.connected()) };
        let (server, connected) = soon("connected", both).await;
        let _both = (server.unwrap(), connected.unwrap());
        sibling.runs_beside("connected", async || drop(client.connected().await.unwrap())).await;
        sibling.runs_beside("states", async || drop(client.states().next().await.unwrap())).await;

        let settings = PeerSetConfig::default();
        let peers = PeerSet::new(&device, &config, settings, move |_: &u32| async move {
            Ok::<_, std::io::Error>(address)
        })
        .unwrap();
        let both = async { tokio::join!(listener.accept(), peers.get(&1)) };
        let (server, peer) = soon("peer", both).await;
        let _both = (server.unwrap(), peer.unwrap());
        sibling.runs_beside("get", async || drop(peers.get(&1).await.unwrap())).await;
        drop(client.close().await);
        sibling.runs_beside("ended", async || drop(client.connected().await.unwrap_err())).await;
        sibling.runs_beside("close", async || client.close().await.unwrap()).await;
    });
}

#[test]
fn streams_that_are_always_ready_let_other_tasks_run() {
    run("streams", |sibling| async move {
        let (device, _pd) = software();
        let listener = RdmaListener::bind(&device, any_port()).await.unwrap();
        let address = listener.local_addr().unwrap();
        let both = async { tokio::join!(listener.accept(), RdmaStream::connect(&device, address)) };
        let (theirs, ours) = soon("connected", both).await;
        let ((mut b, _), mut a) = (theirs.unwrap(), ours.unwrap());
        a.set_nodelay(true).unwrap();
        let write = async || {
            a.write_all(b"x").await.unwrap();
            unconstrained(b.read_exact(&mut [0])).await.unwrap();
        };
        sibling.runs_beside("write", write).await;
        let write = async || {
            a.write_bytes("x").await.unwrap();
            unconstrained(b.read_exact(&mut [0])).await.unwrap();
        };
        sibling.runs_beside("write_bytes", write).await;
        let read = async || {
            unconstrained(a.write_all(b"x")).await.unwrap();
            b.read_exact(&mut [0]).await.unwrap();
        };
        sibling.runs_beside("read", read).await;
        let read = async || {
            unconstrained(a.write_all(b"x")).await.unwrap();
            b.read_bytes().await.unwrap().unwrap();
        };
        sibling.runs_beside("read_bytes", read).await;
        unconstrained(a.write_all(&[7; 4000])).await.unwrap();
        let read = async || {
            assert!(!b.fill_buf().await.unwrap().is_empty());
            b.consume(1);
        };
        sibling.runs_beside("fill_buf", read).await;
        sibling.runs_beside("flush", async || a.flush().await.unwrap()).await;
        a.abort();
        soon("closed", a.closed()).await;
        sibling.runs_beside("closed", async || _ = a.closed().await).await;
        sibling.runs_beside("failed", async || drop(a.write(b"x").await.unwrap_err())).await;
    });
}

#[test]
fn verbs_that_are_always_ready_let_other_tasks_run() {
    run("verbs", |sibling| async move {
        let (device, pd) = software();
        let queue = CompletionQueue::new(&device, CompletionMode::Event).unwrap();
        let [a, b] = [(); 2].map(|()| QueuePair::new(&pd, &queue).unwrap());
        connect(&a, &b);
        let region = ExposedRegion::new(&pd, vec![0; 64], Access::REMOTE_ALL).unwrap();
        let (pool, remote) = (Pool::new(&pd, 64, 64).unwrap(), region.grant());
        let bytes = || pool.copy_from(&[7; 64]).unwrap();
        sibling.runs_beside("write", async || drop(a.write(bytes(), remote).await.unwrap())).await;
        let word = remote.slice(..8).unwrap();
        let add = async || _ = a.fetch_add(word, 1).await.unwrap();
        sibling.runs_beside("fetch_add", add).await;
        let exchange = async || {
            let receive = b.recv(pool.try_alloc(64).unwrap());
            a.send(bytes()).await.unwrap();
            receive.await.unwrap();
        };
        sibling.runs_beside("recv", exchange).await;
        let last_first = async || {
            let posted = [(); 8].map(|()| a.write(bytes(), remote));
            for write in posted.into_iter().rev() {
                write.await.unwrap();
            }
        };
        sibling.runs_beside("completed before", last_first).await;
        let finished = async || {
            let write = a.write(bytes(), remote);
            while !write.is_finished() {
                std::thread::yield_now();
            }
            write.await.unwrap();
        };
        sibling.runs_beside("finished before", finished).await;
        let finished = async || {
            let mut batch = Batch::new();
            batch.write(bytes(), remote);
            let batch = a.post_batch(batch);
            // Finds the completion of the batch, too.
            let write = a.write(bytes(), remote);
            while !write.is_finished() {
                std::thread::yield_now();
            }
            assert!(batch.await.is_ok());
            unconstrained(write).await.unwrap();
        };
        sibling.runs_beside("batch finished before", finished).await;
        b.close().await;
        let closed = QueuePair::new(&pd, &queue).unwrap();
        sibling.runs_beside("refused", async || drop(closed.write(bytes(), remote).await)).await;
        let refused = async || {
            let mut batch = Batch::new();
            batch.write(bytes(), remote);
            drop(closed.post_batch(batch).await);
        };
        sibling.runs_beside("refused batch", refused).await;
        let empty = async || drop(closed.post_batch(Batch::<BufMut>::new()).await);
        sibling.runs_beside("empty batch", empty).await;
        let refused = async || drop(closed.fetch_add(remote, 1).await);
        sibling.runs_beside("refused atomic", refused).await;
    });
}

#[test]
fn events_that_are_always_ready_let_other_tasks_run() {
    run("events", |sibling| async move {
        let network = Network::new();
        let device = Device::software_in(&network, "fair0").unwrap();
        let control = network.control("fair0").unwrap();
        let mut events = device.events().unwrap();
        let event = async || {
            control.announce(AsyncEvent::DeviceFatal);
            events.next().await.unwrap().unwrap();
        };
        sibling.runs_beside("events", event).await;

        let (_, pd) = (&device, device.protection_domain().unwrap());
        let queue = CompletionQueue::new(&device, CompletionMode::Event).unwrap();
        let listener = cm::Listener::bind(&device, any_port()).await.unwrap();
        let options = cm::ConnectConfig::default();
        let active = cm::connect(&device, listener.local_addr(), &options, |route| {
            route.prepare(QueuePair::builder(&pd, &queue)).build()
        });
        let passive = async {
            let request = listener.accept().await?;
            let qp = request.prepare(QueuePair::builder(&pd, &queue)).build()?;
            Ok((request.accept(&qp, &options).await?, qp))
        };
        let ((_ours, link), _theirs) =
            soon("connection", async { tokio::try_join!(active, passive) }).await.unwrap();
        soon("disconnect", link.disconnect()).await.unwrap();
        sibling.runs_beside("disconnected", async || _ = link.disconnected().await).await;
        sibling.runs_beside("disconnect", async || link.disconnect().await.unwrap()).await;
        soon("drained", link.drained()).await.unwrap();
        sibling.runs_beside("drained", async || link.drained().await.unwrap()).await;
        let resolve = async || drop(cm::resolve(&device, listener.local_addr()).await.unwrap());
        sibling.runs_beside("resolve", resolve).await;
    });
}

// Shows F1.
#[test]
fn message_is_not_lost_by_a_receive_without_budget() {
    run("budget", |_| async move {
        let (device, _pd) = software();
        let (a, b) = connected(&device).await;
        for number in 0..ROUNDS {
            a.send(number.to_le_bytes().to_vec()).await.unwrap();
            // Each is dropped after one poll, which the budget may have ended.
            let received = loop {
                let once = tokio::time::timeout(Duration::ZERO, b.recv()).await;
                match once {
                    Ok(received) => break received.unwrap().unwrap(),
                    Err(_) => yield_now().await,
                }
            };
            assert_eq!(received[..], number.to_le_bytes());
        }
    });
}

//! Byte streams beside TCP and bare verbs: `cargo bench --bench stream --
//! rounds=20000 mode=event`.
//!
//! Both ends are tasks on one thread of this process. The device is the one that
//! `TOKIO_RDMA_DEVICE` names, or the software device; TCP uses the same address.
//!
//! | Row | Sends and receives |
//! |---|---|
//! | `verbs` | SEND and RECV futures of a queue pair, whose receives are posted before |
//! | `bytes` | `write_bytes` and `read_bytes` |
//! | `traits` | `write_all` and `read_exact` |
//! | `tcp` | the same of a `TcpStream` without delay |
//!
//! Echo: half of a round trip, p50 and p99. Bulk: 256 MiB in one direction in writes of 64 KiB.
//! CPU: time of all threads of the process, both ends together, per echo or per MiB.
//!
//! The bench of the same name in `crates/tokio-rdma-http` adds rows for gRPC; `docs/streams.md` has
//! the command that runs both.

mod common;

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use bytes::Bytes;
use hdrhistogram::Histogram;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_rdma::op::Recv;
use tokio_rdma::{
    Buf, BufMut, CompletionMode, CompletionQueue, ConnectionConfig, Device, Pool, QueuePair,
    RdmaListener, RdmaStream,
};

use common::{address, cpu};

const SIZES: [(usize, u32); 3] = [(64, 1), (16 << 10, 2), (1 << 20, 50)];

const BULK: usize = 256 << 20;

/// The bytes of a bulk write.
const WRITE: usize = 64 << 10;

/// One end of a connection that sends and receives blocks of one size.
trait End: Sized + 'static {
    const NAME: &'static str;

    async fn send(&mut self);
    async fn recv(&mut self);
}

/// `write_bytes` and `read_bytes`.
struct InBytes(RdmaStream, Bytes);

impl End for InBytes {
    const NAME: &'static str = "bytes";

    async fn send(&mut self) {
        self.0.write_bytes(self.1.clone()).await.expect("writes");
    }

    async fn recv(&mut self) {
        let mut left = self.1.len();
        while left > 0 {
            left -= self.0.read_bytes().await.expect("reads").expect("not the end").len();
        }
    }
}

/// The traits of Tokio.
struct ByTraits<S>(S, Vec<u8>);

impl<S: Named + AsyncRead + AsyncWrite + Unpin + 'static> End for ByTraits<S> {
    const NAME: &'static str = S::NAME;

    async fn send(&mut self) {
        self.0.write_all(&self.1).await.expect("writes");
    }

    async fn recv(&mut self) {
        self.0.read_exact(&mut self.1).await.expect("reads");
    }
}

trait Named {
    const NAME: &'static str;
}

impl Named for RdmaStream {
    const NAME: &'static str = "traits";
}

impl Named for TcpStream {
    const NAME: &'static str = "tcp";
}

/// A queue pair with one posted receive.
struct Verbs {
    qp: QueuePair,
    pool: Pool,
    message: Buf,
    receive: Option<Recv<BufMut>>,
}

impl Verbs {
    fn new(device: &Device, mode: &CompletionMode, size: usize) -> Self {
        let pd = device.protection_domain().expect("a protection domain");
        let queue = CompletionQueue::new(device, mode.clone()).expect("a completion queue");
        let qp = QueuePair::new(&pd, &queue).expect("a queue pair");
        let pool = Pool::new(&pd, size, 3).expect("buffers");
        let message = pool.try_alloc(size).expect("a buffer").freeze();
        Self { qp, pool, message, receive: None }
    }

    fn connect(&mut self, peer: &Self) {
        self.qp.connect(&peer.qp.endpoint()).expect("connects");
        self.post();
    }

    fn post(&mut self) {
        self.receive = Some(self.qp.recv(self.pool.try_alloc(self.message.len()).expect("free")));
    }
}

impl End for Verbs {
    const NAME: &'static str = "verbs";

    async fn send(&mut self) {
        self.qp.send(self.message.clone()).await.expect("sends");
    }

    async fn recv(&mut self) {
        let receive = self.receive.take().expect("posted");
        drop(receive.await.expect("receives"));
        self.post();
    }
}

async fn streams(device: &Device, mode: &CompletionMode) -> [RdmaStream; 2] {
    let config = ConnectionConfig::for_streams().mode(mode.clone());
    let listener = RdmaListener::bind_with(device, address(device), &config).await;
    let listener = listener.expect("listens");
    let to = listener.local_addr().expect("an address");
    let connecting = RdmaStream::connect_with(device, to, &config);
    let (a, (b, _)) = tokio::try_join!(connecting, listener.accept()).expect("connects");
    [a, b]
}

async fn sockets(at: SocketAddr) -> [TcpStream; 2] {
    let listener = TcpListener::bind(at).await.expect("listens");
    let connecting = TcpStream::connect(listener.local_addr().expect("an address"));
    let (a, (b, _)) = tokio::try_join!(connecting, listener.accept()).expect("connects");
    [a, b].map(|socket| {
        socket.set_nodelay(true).expect("a socket");
        socket
    })
}

async fn echo<E: End>([mut a, mut b]: [E; 2], size: usize, rounds: u32) {
    let warm_up = rounds / 10;
    let answering = tokio::task::spawn_local(async move {
        for _ in 0..warm_up + rounds {
            b.recv().await;
            b.send().await;
        }
        b
    });
    let mut times = Histogram::<u64>::new(3).expect("a histogram");
    let mut before = cpu();
    for round in 0..warm_up + rounds {
        if round == warm_up {
            before = cpu();
            times.reset();
        }
        let start = Instant::now();
        a.send().await;
        a.recv().await;
        times.record(start.elapsed().as_nanos() as u64 / 2).expect("within range");
    }
    let spent = cpu().saturating_sub(before) / rounds;
    let p = |quantile| Duration::from_nanos(times.value_at_quantile(quantile));
    println!(
        "{:>6}  echo {size:>8} B  p50 {:>10.2?}  p99 {:>10.2?}  cpu {spent:>9.2?}",
        E::NAME,
        p(0.5),
        p(0.99)
    );
    drop(answering.await);
}

async fn bulk<E: End>([mut a, mut b]: [E; 2]) {
    let writes = BULK / WRITE;
    let reading = tokio::task::spawn_local(async move {
        for _ in 0..writes {
            b.recv().await;
        }
        b.send().await;
        b
    });
    let (start, before) = (Instant::now(), cpu());
    for _ in 0..writes {
        a.send().await;
    }
    a.recv().await;
    let (elapsed, spent) = (start.elapsed(), cpu().saturating_sub(before));
    println!(
        "{:>6}  bulk                     {:>9.1} MB/s          cpu {:>9.2?}",
        E::NAME,
        BULK as f64 / 1e6 / elapsed.as_secs_f64(),
        spent / (BULK >> 20) as u32
    );
    drop(reading.await);
}

async fn all(device: &Device, mode: &CompletionMode, rounds: u32) {
    let at = address(device);
    let in_bytes = |stream, size| InBytes(stream, vec![7; size].into());
    for (size, fewer) in SIZES {
        let rounds = (rounds / fewer).max(10);
        let [mut a, mut b] = [(); 2].map(|()| Verbs::new(device, mode, size));
        a.connect(&b);
        b.connect(&a);
        echo([a, b], size, rounds).await;
        let ends = streams(device, mode).await;
        echo(ends.map(|stream| in_bytes(stream, size)), size, rounds).await;
        let ends = streams(device, mode).await;
        echo(ends.map(|stream| ByTraits(stream, vec![7; size])), size, rounds).await;
        let ends = sockets(at).await;
        echo(ends.map(|socket| ByTraits(socket, vec![7; size])), size, rounds).await;
    }
    bulk(streams(device, mode).await.map(|stream| in_bytes(stream, WRITE))).await;
    bulk(streams(device, mode).await.map(|stream| ByTraits(stream, vec![7; WRITE]))).await;
    bulk(sockets(at).await.map(|socket| ByTraits(socket, vec![7; WRITE]))).await;
}

fn main() {
    common::on_one_thread(all);
}

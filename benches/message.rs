//! Messages compared with Tokio's TCP: `cargo bench --bench message --
//! rounds=20000 mode=event`.
//!
//! Both ends are tasks on one thread of this process, for RDMA and TCP alike. The device is the one
//! that `TOKIO_RDMA_DEVICE` names, or the software device; TCP uses the same address. Over TCP, a
//! message is a length of four bytes and the payload, sent without delay and read into a new
//! buffer.
//!
//! Ping-pong: half of a round trip, p50 and p99. Stream: messages in one direction, the last one
//! answered. CPU: time of all threads of the process per message, both ends together.

mod common;

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use bytes::Bytes;
use hdrhistogram::Histogram;
use tokio::io::{AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio_rdma::{CompletionMode, Connection, ConnectionConfig, Device, Listener};

use common::{address, cpu};

const SIZES: [(usize, u32); 3] = [(64, 1), (4 << 10, 1), (1 << 20, 50)];

/// One end of a transport of messages.
trait End: Sized + 'static {
    const NAME: &'static str;

    async fn send(&mut self, message: &Bytes);
    async fn recv(&mut self) -> Bytes;
}

struct Rdma(Connection);

impl End for Rdma {
    const NAME: &'static str = "rdma";

    async fn send(&mut self, message: &Bytes) {
        self.0.send(message.clone()).await.expect("sends");
    }

    async fn recv(&mut self) -> Bytes {
        self.0.recv().await.expect("receives").expect("a message")
    }
}

struct Tcp(BufReader<TcpStream>);

impl End for Tcp {
    const NAME: &'static str = "tcp";

    async fn send(&mut self, message: &Bytes) {
        let len = (message.len() as u32).to_be_bytes();
        // One system call, if the socket takes everything.
        let mut both = bytes::Buf::chain(&len[..], &message[..]);
        while bytes::Buf::has_remaining(&both) {
            self.0.get_mut().write_buf(&mut both).await.expect("writes");
        }
    }

    async fn recv(&mut self) -> Bytes {
        let len = self.0.read_u32().await.expect("reads");
        let mut message = vec![0; len as usize];
        self.0.read_exact(&mut message).await.expect("reads");
        message.into()
    }
}

async fn rdma(device: &Device, mode: &CompletionMode) -> (Rdma, Rdma) {
    let config = ConnectionConfig::default().mode(mode.clone());
    let listener = Listener::bind_with(device, address(device), &config).await.expect("listens");
    let connecting = Connection::connect_with(device, listener.local_addr().unwrap(), &config);
    let (a, b) = tokio::try_join!(connecting, listener.accept()).expect("connects");
    (Rdma(a), Rdma(b))
}

async fn tcp(address: SocketAddr) -> (Tcp, Tcp) {
    let listener = TcpListener::bind(address).await.expect("listens");
    let connecting = TcpStream::connect(listener.local_addr().expect("an address"));
    let (a, b) = tokio::try_join!(connecting, listener.accept()).expect("connects");
    let end = |stream: TcpStream| {
        stream.set_nodelay(true).expect("a socket");
        Tcp(BufReader::with_capacity(64 << 10, stream))
    };
    (end(a), end(b.0))
}

async fn ping_pong<E: End>(mut a: E, mut b: E, size: usize, rounds: u32) -> (E, E) {
    let message = Bytes::from(vec![7; size]);
    let echo = tokio::task::spawn_local(async move {
        for _ in 0..rounds + rounds / 10 {
            let message = b.recv().await;
            b.send(&message).await;
        }
        b
    });
    let mut times = Histogram::<u64>::new(3).expect("a histogram");
    let (mut begun, mut before) = (Instant::now(), cpu());
    for round in 0..rounds + rounds / 10 {
        if round == rounds / 10 {
            (begun, before) = (Instant::now(), cpu());
            times.reset();
        }
        let start = Instant::now();
        a.send(&message).await;
        assert_eq!(a.recv().await.len(), size);
        times.record(start.elapsed().as_nanos() as u64 / 2).expect("within range");
    }
    let (elapsed, spent) = (begun.elapsed(), cpu().saturating_sub(before));
    let p = |quantile| Duration::from_nanos(times.value_at_quantile(quantile));
    let messages = 2 * rounds;
    println!(
        "{:>5}  ping-pong {size:>8} B  p50 {:>10.2?}  p99 {:>10.2?}  {:>9.0}/s  cpu {:>9.2?}",
        E::NAME,
        p(0.5),
        p(0.99),
        f64::from(messages) / elapsed.as_secs_f64(),
        spent / messages
    );
    (a, echo.await.expect("echoes"))
}

async fn stream<E: End>(mut a: E, mut b: E, size: usize, rounds: u32) {
    let message = Bytes::from(vec![7; size]);
    let sink = tokio::task::spawn_local(async move {
        for _ in 0..rounds {
            assert_eq!(b.recv().await.len(), size);
        }
        b.send(&Bytes::from_static(b"done")).await;
        b
    });
    let (start, before) = (Instant::now(), cpu());
    for _ in 0..rounds {
        a.send(&message).await;
    }
    assert_eq!(a.recv().await, "done");
    let (elapsed, spent) = (start.elapsed(), cpu().saturating_sub(before));
    println!(
        "{:>5}  stream    {size:>8} B  {:>9.0}/s  {:>9.1} MB/s  cpu {:>9.2?}",
        E::NAME,
        f64::from(rounds) / elapsed.as_secs_f64(),
        f64::from(rounds) * size as f64 / 1e6 / elapsed.as_secs_f64(),
        spent / rounds
    );
    drop(sink.await);
}

fn main() {
    common::on_one_thread(async |device, mode, rounds| {
        for (size, fewer) in SIZES {
            let rounds = (rounds / fewer).max(10);
            let (a, b) = rdma(device, mode).await;
            let (a, b) = ping_pong(a, b, size, rounds).await;
            stream(a, b, size, rounds * 2).await;
            let (a, b) = tcp(address(device)).await;
            let (a, b) = ping_pong(a, b, size, rounds).await;
            stream(a, b, size, rounds * 2).await;
        }
    });
}

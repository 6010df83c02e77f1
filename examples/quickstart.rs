//! The whole tour in one program: `cargo run --release --example quickstart`.
//!
//! Two tasks, a server and a client, each with an open device of its own, connect two queue pairs and do
//! everything that the crate can do with a reliable connection, three times: with completions found by events,
//! by a busy-polling thread, and by both. Each step checks what it did. At the end come the latencies.
//!
//! ```text
//!   client                                     server
//!     │ ◀────── endpoints, any channel ───────▶ │      QueuePair::endpoint, connect
//!     │ ◀────── SEND: key of its memory ─────── │      ExposedRegion::grant
//!     │ ─────── WRITE, READ ──────────────────▶ │      (the server does nothing)
//!     │ ─────── WRITE_WITH_IMM ───────────────▶ │      and is told
//!     │ ─────── compare-and-swap, fetch-add ──▶ │      (the server does nothing)
//!     │ ─────── SEND ─────────────────────────▶ │
//!     │ ◀───────────────────────────── SEND ─── │
//!     │ ─────── WRITE with a wrong key ───────▶ ✗      both ends are told, and connect anew
//! ```

use std::error::Error;
use std::fmt::Debug;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use tokio::sync::mpsc;
use tokio_rdma::types::{Rkey, WcStatus};
use tokio_rdma::{
    Access, Buf, BufMut, CompletionMode, CompletionQueue, Device, ExposedRegion, Imm, Pool, ProtectionDomain,
    QueuePair, QueuePairEndpoint, Recv, RemoteRegion,
};

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

/// How often each operation is timed, in each mode.
const ROUNDS: u32 = 5_000;

/// Of one kind of operation.
const ENOUGH: Duration = Duration::from_secs(2);
/// A mode that has not finished by then never will.
const DEADLINE: Duration = Duration::from_secs(30);

/// What is where in the server's memory.
const TEXT: std::ops::Range<u64> = 0..13;
const COUNTER: std::ops::Range<u64> = 64..72;
const SCRATCH: std::ops::Range<u64> = 128..136;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let modes = [
        ("event", CompletionMode::Event),
        ("busy-poll", CompletionMode::busy_poll()?),
        ("hybrid", CompletionMode::Hybrid),
    ];
    let mut latencies = Vec::new();
    for (name, mode) in modes {
        println!("{name}");
        latencies.push((name, tokio::time::timeout(DEADLINE, tour(mode)).await??));
        println!();
    }
    print_table(&latencies);
    Ok(())
}

/// Everything once, and the latencies that the client saw.
async fn tour(mode: CompletionMode) -> Result<Vec<Latency>> {
    let (to_client, from_server) = mpsc::channel(1);
    let (to_server, from_client) = mpsc::channel(1);
    let server = Peer::open("server", &mode, to_client, from_client)?;
    let client = Peer::open("client", &mode, to_server, from_server)?;

    let server = task(serve(server));
    let client = task(request(client));
    let (latencies, ()) = tokio::try_join!(client, server)?;
    Ok(latencies)
}

async fn task<T: Send + 'static>(work: impl Future<Output = Result<T>> + Send + 'static) -> Result<T> {
    tokio::spawn(work).await?
}

// The server.

async fn serve(mut peer: Peer) -> Result<()> {
    let qp = peer.connect().await?;

    // Memory that others may reach is a type of its own; `grant` names it and holds its key.
    let region = ExposedRegion::new(&peer.pd, vec![0; 4096], Access::REMOTE_ALL)?;
    qp.send(peer.pool.copy_from(&region.grant().to_bytes())?).await?;
    peer.did("exposed 4096 bytes and sent their key");

    wait_for_write(&peer, &qp, &region).await?;
    let next = answer_message(&peer, &qp, &region).await?;
    wait_for_the_end(&peer, next).await?;

    // The region is still exposed: the client's grant works over the new connection too.
    let qp = peer.connect().await?;
    answer_everything(&peer, &qp).await?;
    qp.close().await;
    Ok(())
}

/// WRITE and READ pass unnoticed. WRITE_WITH_IMM consumes a receive, and so we learn of it.
async fn wait_for_write(peer: &Peer, qp: &QueuePair, region: &ExposedRegion) -> Result<()> {
    let news = qp.recv(peer.pool.try_alloc(64)?).await?;
    check("immediate", news.imm, Some(Imm(7)))?;
    check("is a write", news.written, true)?;

    let mut text = [0; 13];
    region.read(TEXT.start as usize, &mut text)?;
    check("text", &text, b"hello, remote")?;
    peer.did("was told of WRITE_WITH_IMM, and found the text in its memory");
    Ok(())
}

/// Gives the receive for what comes next: posted before the answer is sent, so that whatever comes finds it.
async fn answer_message(peer: &Peer, qp: &QueuePair, region: &ExposedRegion) -> Result<Recv<BufMut>> {
    let message = qp.recv(peer.pool.try_alloc(64)?).await?;
    check("message", &message.buffer[..], b"ping")?;
    check("counter", region.load(COUNTER.start as usize)?, 42)?;
    let next = qp.recv(peer.pool.try_alloc(64)?);
    qp.send(peer.pool.copy_from(b"pong")?).await?;
    peer.did("received a message and answered it");
    Ok(next)
}

/// The client uses a wrong key. Our device refuses and ends the connection: receives come back unfilled.
async fn wait_for_the_end(peer: &Peer, next: Recv<BufMut>) -> Result<()> {
    match next.await {
        Ok(message) => Err(format!("expected the end, received {message:?}").into()),
        Err(error) => {
            check("status of the receive", error.status(), Some(WcStatus::WR_FLUSH_ERR))?;
            peer.did(&format!("lost the connection: {error}"));
            Ok(())
        }
    }
}

/// Answers messages and writes until an empty message comes.
async fn answer_everything(peer: &Peer, qp: &QueuePair) -> Result<()> {
    let mut next = qp.recv(peer.pool.try_alloc(64)?);
    loop {
        let request = next.await?;
        if request.len == 0 {
            return Ok(());
        }
        next = qp.recv(peer.pool.try_alloc(64)?);
        qp.send(request.buffer).await?;
    }
}

// The client.

async fn request(mut peer: Peer) -> Result<Vec<Latency>> {
    let qp = peer.connect().await?;
    let key = qp.recv(peer.pool.try_alloc(RemoteRegion::ENCODED_LEN)?).await?;
    let remote = RemoteRegion::from_bytes(&key.buffer).ok_or("that is no key")?;

    write_and_read(&peer, &qp, remote).await?;
    change_atomically(&peer, &qp, remote).await?;
    exchange_messages(&peer, &qp).await?;
    use_wrong_key(&peer, &qp, remote).await?;

    let qp = peer.connect().await?;
    peer.did("connected anew");
    let latencies = measure(&peer, &qp, remote).await?;
    qp.send(peer.pool.try_alloc(0)?).await?;
    qp.close().await;
    Ok(latencies)
}

async fn write_and_read(peer: &Peer, qp: &QueuePair, remote: RemoteRegion) -> Result<()> {
    let text = remote.slice(TEXT)?;
    // An operation owns its buffer while the device uses it, and gives it back with the result.
    let mut buffer = qp.write(peer.pool.copy_from(b"hello, remote")?, text).await?;
    peer.did("wrote 13 bytes to the server's memory");

    buffer.fill(0);
    let buffer = qp.read(buffer, text).await?;
    check("what was read", &buffer[..], b"hello, remote")?;
    peer.did("read them back");

    qp.write_with_imm(buffer, text, Imm(7)).await?;
    Ok(())
}

async fn change_atomically(peer: &Peer, qp: &QueuePair, remote: RemoteRegion) -> Result<()> {
    let counter = remote.slice(COUNTER)?;
    check("before compare-and-swap", qp.compare_swap(counter, 0, 40).await?, 0)?;
    check("a second one does nothing", qp.compare_swap(counter, 0, 1).await?, 40)?;
    peer.did("compared and swapped: 0 became 40");
    check("before fetch-and-add", qp.fetch_add(counter, 2).await?, 40)?;
    peer.did("fetched and added: 40 became 42");
    Ok(())
}

async fn exchange_messages(peer: &Peer, qp: &QueuePair) -> Result<()> {
    // Calling posts, awaiting waits: the receive is there before the answer can come.
    let answer = qp.recv(peer.pool.try_alloc(64)?);
    qp.send(peer.pool.copy_from(b"ping")?).await?;
    check("answer", &answer.await?.buffer[..], b"pong")?;
    peer.did("sent a message and received the answer");
    Ok(())
}

async fn use_wrong_key(peer: &Peer, qp: &QueuePair, remote: RemoteRegion) -> Result<()> {
    let forged = RemoteRegion::new(remote.addr(), remote.len(), Rkey(!remote.rkey().0));
    let Err(error) = qp.write(peer.pool.copy_from(b"intruder")?, forged).await else {
        return Err("a wrong key opened the door".into());
    };
    check("status", error.status(), Some(WcStatus::REM_ACCESS_ERR))?;
    peer.did(&format!("was refused: {error}"));
    // The error carries the buffer.
    let buffer = error.into_buffer();
    check("buffer", &buffer[..], b"intruder")?;

    // A failure ends a reliable connection; what is posted from then on is flushed.
    let flushed = qp.write(buffer, remote).await;
    check("status afterwards", flushed.err().and_then(|error| error.status()), Some(WcStatus::WR_FLUSH_ERR))
}

// Latencies.

/// Of one operation, in nanoseconds.
type Latency = (&'static str, Histogram<u64>);

async fn measure(peer: &Peer, qp: &QueuePair, remote: RemoteRegion) -> Result<Vec<Latency>> {
    let (word, counter) = (remote.slice(SCRATCH)?, remote.slice(COUNTER)?);
    let payload = peer.pool.copy_from(&[1; 8])?.freeze();
    Ok(vec![
        ("WRITE 8 B", time(|| async { done(qp.write(payload.clone(), word).await) }).await?),
        ("READ 8 B", time(|| async { done(qp.read(peer.pool.try_alloc(8)?, word).await) }).await?),
        ("compare-and-swap", time(|| async { done(qp.compare_swap(counter, 42, 42).await) }).await?),
        ("fetch-and-add", time(|| async { done(qp.fetch_add(counter, 1).await) }).await?),
        ("WRITE_WITH_IMM + answer", time(|| told(peer, qp, &payload, word)).await?),
        ("SEND 8 B + answer", time(|| asked(peer, qp, &payload)).await?),
    ])
}

async fn time<F: Future<Output = Result<()>>>(operation: impl Fn() -> F) -> Result<Histogram<u64>> {
    let mut histogram = Histogram::new(3)?;
    let begin = Instant::now();
    for round in 0..ROUNDS + ROUNDS / 100 {
        let start = Instant::now();
        operation().await?;
        // The first ones warm up.
        if round >= ROUNDS / 100 {
            histogram.record(start.elapsed().as_nanos() as u64)?;
        }
        // A slow device need not go through all of them.
        if begin.elapsed() > ENOUGH && !histogram.is_empty() {
            break;
        }
    }
    Ok(histogram)
}

fn done<T, E: Error + Send + Sync + 'static>(result: std::result::Result<T, E>) -> Result<()> {
    Ok(result.map(drop)?)
}

/// Writes, and waits for the server to say that it was told.
async fn told(peer: &Peer, qp: &QueuePair, payload: &Buf, word: RemoteRegion) -> Result<()> {
    let answer = qp.recv(peer.pool.try_alloc(64)?);
    qp.write_with_imm(payload.clone(), word, Imm(1)).await?;
    done(answer.await)
}

/// Sends, and waits for the answer.
async fn asked(peer: &Peer, qp: &QueuePair, payload: &Buf) -> Result<()> {
    let answer = qp.recv(peer.pool.try_alloc(64)?);
    qp.send(payload.clone()).await?;
    done(answer.await)
}

fn print_table(modes: &[(&str, Vec<Latency>)]) {
    print!("{:<24}", "latency in µs");
    modes.iter().for_each(|(mode, _)| print!("{mode:>10} p50     p99"));
    println!();
    let Some((_, operations)) = modes.first() else { return };
    for (row, (operation, _)) in operations.iter().enumerate() {
        print!("{operation:<24}");
        for (_, latencies) in modes {
            let at = |quantile| latencies[row].1.value_at_quantile(quantile) as f64 / 1000.0;
            print!("{:>14.2}{:>8.2}", at(0.5), at(0.99));
        }
        println!();
    }
}

// Either end.

/// One end: an open device, and what is made once and used for ever.
struct Peer {
    name: &'static str,
    pd: ProtectionDomain,
    queue: CompletionQueue,
    pool: Pool,
    /// Stands for whatever brings services together: TCP, gRPC, a database.
    to_peer: mpsc::Sender<QueuePairEndpoint>,
    from_peer: mpsc::Receiver<QueuePairEndpoint>,
}

impl Peer {
    fn open(
        name: &'static str,
        mode: &CompletionMode,
        to_peer: mpsc::Sender<QueuePairEndpoint>,
        from_peer: mpsc::Receiver<QueuePairEndpoint>,
    ) -> Result<Self> {
        let device = Device::open_default()?;
        let pd = device.protection_domain()?;
        let queue = CompletionQueue::new(&device, mode.clone())?;
        let pool = Pool::new(&pd, 64, 16)?;
        Ok(Self { name, pd, queue, pool, to_peer, from_peer })
    }

    /// A new connection: each end tells the other what it needs to know.
    async fn connect(&mut self) -> Result<QueuePair> {
        let qp = QueuePair::new(&self.pd, &self.queue)?;
        self.to_peer.send(qp.endpoint()).await?;
        let theirs = self.from_peer.recv().await.ok_or("the peer is gone")?;
        qp.connect(&theirs)?;
        Ok(qp)
    }

    fn did(&self, what: &str) {
        println!("  {}  {what}", self.name);
    }
}

fn check<T: Debug + PartialEq>(what: &str, is: T, expected: T) -> Result<()> {
    if is == expected { Ok(()) } else { Err(format!("{what}: {is:?} instead of {expected:?}").into()) }
}

//! The whole tour in one program: `cargo run --release --example quickstart`.
//!
//! Two tasks, a server and a client, each with an open device of its own, connect two queue pairs and do
//! everything that the crate can do with a reliable connection, three times: with completions found by events,
//! by a busy-polling thread, and by both. Each step checks what it did. At the end come the latencies.
//!
//! The same between two processes, or two hosts, which meet by address:
//!
//! ```text
//! quickstart --listen 127.0.0.1:7471
//! quickstart --connect 127.0.0.1:7471 [--from ADDRESS]
//! ```
//!
//! Either has a software device that speaks RoCE v2 over UDP: at the address that it listens at, or that leads to the
//! other (for one on loopback, the first that is free from 127.0.0.254 down; port 4791 has room for one program at each
//! address), unless there is a real one at the address, or `TOKIO_RDMA_DEVICE` names one.
//!
//! ```text
//!   client                                     server
//!     │ ◀────── endpoints, any channel ───────▶ │      QueuePair::endpoint, connect; or cm::resolve, cm::Listener
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
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use tokio::sync::mpsc;
use tokio_rdma::cm::{self, Link};
use tokio_rdma::op::{ConnectOptions, Recv};
use tokio_rdma::types::{AckTimeout, Rkey, WcStatus};
use tokio_rdma::{
    Access, Buf, BufMut, CompletionMode, CompletionQueue, Device, ExposedRegion, Imm, Pool,
    ProtectionDomain, QueuePair, QueuePairEndpoint, RemoteRegion,
};

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

/// How often each operation is timed, in each mode.
const ROUNDS: u32 = 5_000;

/// Of one kind of operation.
const ENOUGH: Duration = Duration::from_secs(2);
/// A mode that has not finished by then never will.
const DEADLINE: Duration = Duration::from_secs(30);
/// How long a server waits for its client.
const PATIENCE: Duration = Duration::from_secs(300);

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
    let place = Place::find().await?;
    let mut latencies = Vec::new();
    for (name, mode) in modes {
        println!("{name}");
        let limit = if matches!(place, Place::Server(..)) { PATIENCE } else { DEADLINE };
        latencies.extend(
            tokio::time::timeout(limit, tour(&place, mode))
                .await??
                .map(|measured| (name, measured)),
        );
        println!();
    }
    print_table(&latencies);
    Ok(())
}

/// Everything once, and the latencies that the client saw, if it is here.
async fn tour(place: &Place, mode: CompletionMode) -> Result<Option<Vec<Latency>>> {
    let [server, client] = place.peers(&mode)?;
    let server = server.map(|peer| task(serve(peer)));
    let client = client.map(|peer| task(request(peer)));
    let (latencies, _) = tokio::try_join!(optional(client), optional(server))?;
    Ok(latencies)
}

async fn optional<T>(work: Option<impl Future<Output = Result<T>>>) -> Result<Option<T>> {
    match work {
        Some(work) => work.await.map(Some),
        None => Ok(None),
    }
}

async fn task<T: Send + 'static>(
    work: impl Future<Output = Result<T>> + Send + 'static,
) -> Result<T> {
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
async fn answer_message(
    peer: &Peer,
    qp: &QueuePair,
    region: &ExposedRegion,
) -> Result<Recv<BufMut>> {
    let message = qp.recv(peer.pool.try_alloc(64)?).await?;
    check("message", &message.buffer[..], b"ping")?;
    check("counter", region.load(COUNTER.start as usize)?, 42)?;
    let next = qp.recv(peer.pool.try_alloc(64)?);
    let answer = qp.send(peer.pool.copy_from(b"pong")?).await;
    // The client ends the connection once it has the answer: what it does for that may overtake its acknowledgement.
    if let Err(error) = answer {
        check("status of the answer", error.status(), Some(WcStatus::WR_FLUSH_ERR))?;
    }
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
    check(
        "status afterwards",
        flushed.err().and_then(|error| error.status()),
        Some(WcStatus::WR_FLUSH_ERR),
    )
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
        (
            "compare-and-swap",
            time(|| async { done(qp.compare_swap(counter, 42, 42).await) }).await?,
        ),
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
    let Some((_, operations)) = modes.first() else { return };
    print!("{:<24}", "latency in µs");
    modes.iter().for_each(|(mode, _)| print!("{mode:>10} p50     p99"));
    println!();
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
    device: Device,
    pd: ProtectionDomain,
    queue: CompletionQueue,
    pool: Pool,
    meeting: Meeting,
    /// Of a connection made by address: it lasts as long as this.
    link: Option<Link>,
}

/// What is not acknowledged is repeated after half a second, and given up after seven times that: the other end may be a
/// process that has to wait for a processor, as those who poll take them all.
fn patient() -> cm::Options {
    let transport =
        ConnectOptions { timeout: AckTimeout::from_code(17), ..ConnectOptions::default() };
    cm::Options::default().transport(transport)
}

/// How it finds the other end.
enum Meeting {
    /// Stands for whatever brings services together: TCP, gRPC, a database.
    Channel(mpsc::Sender<QueuePairEndpoint>, mpsc::Receiver<QueuePairEndpoint>),
    Listener(Arc<cm::Listener>),
    Address(SocketAddr),
}

impl Peer {
    fn new(
        name: &'static str,
        device: Device,
        mode: &CompletionMode,
        meeting: Meeting,
    ) -> Result<Self> {
        let pd = device.protection_domain()?;
        let queue = CompletionQueue::new(&device, mode.clone())?;
        let pool = Pool::new(&pd, 64, 16)?;
        Ok(Self { name, device, pd, queue, pool, meeting, link: None })
    }

    /// A new connection: each end tells the other what it needs to know.
    async fn connect(&mut self) -> Result<QueuePair> {
        let builder = QueuePair::builder(&self.pd, &self.queue);
        match &mut self.meeting {
            Meeting::Channel(to_peer, from_peer) => {
                let qp = builder.build()?;
                to_peer.send(qp.endpoint()).await?;
                let theirs = from_peer.recv().await.ok_or("the peer is gone")?;
                qp.connect(&theirs)?;
                Ok(qp)
            }
            Meeting::Listener(listener) => {
                let request = listener.accept().await?;
                let qp = request.prepare(builder).build()?;
                self.link = Some(request.accept(&qp, &patient()).await?);
                Ok(qp)
            }
            Meeting::Address(address) => {
                let route = cm::resolve(&self.device, *address).await?;
                let qp = route.prepare(builder).build()?;
                self.link = Some(route.connect(&qp, &patient()).await?);
                Ok(qp)
            }
        }
    }

    fn did(&self, what: &str) {
        println!("  {}  {what}", self.name);
    }
}

fn check<T: Debug + PartialEq>(what: &str, is: T, expected: T) -> Result<()> {
    if is == expected {
        Ok(())
    } else {
        Err(format!("{what}: {is:?} instead of {expected:?}").into())
    }
}

// Where the two ends are.

enum Place {
    /// Both here.
    Here,
    Server(Device, Arc<cm::Listener>),
    Client(Device, SocketAddr),
}

impl Place {
    /// By the arguments.
    async fn find() -> Result<Self> {
        use lexopt::prelude::{Long, ValueExt};
        let (mut listen, mut connect, mut from) = (None, None, None);
        let mut arguments = lexopt::Parser::from_env();
        while let Some(argument) = arguments.next()? {
            match argument {
                Long("listen") => listen = Some(arguments.value()?.parse()?),
                Long("connect") => connect = Some(arguments.value()?.parse::<SocketAddr>()?),
                Long("from") => from = Some(arguments.value()?.parse()?),
                other => return Err(other.unexpected().into()),
            }
        }
        match (listen, connect, from) {
            (None, None, None) => Ok(Self::Here),
            (Some(address), None, None) => {
                let device = Device::open_default_at(SocketAddr::ip(&address))?;
                let listener = cm::Listener::bind(&device, address).await?;
                println!("listening on {} of {}", listener.local_addr(), device.name());
                Ok(Self::Server(device, Arc::new(listener)))
            }
            (None, Some(address), from) => {
                let device = match from {
                    Some(from) => Device::open_default_at(from)?,
                    None => Device::open_default_to(address.ip())?,
                };
                println!("connecting from {} to {address}", device.name());
                Ok(Self::Client(device, address))
            }
            _ => Err("usage: quickstart [--listen ADDRESS:PORT | --connect ADDRESS:PORT [--from ADDRESS]]".into()),
        }
    }

    /// Server and client, those of them that are here.
    fn peers(&self, mode: &CompletionMode) -> Result<[Option<Peer>; 2]> {
        match self {
            Self::Here => {
                let (to_client, from_server) = mpsc::channel(1);
                let (to_server, from_client) = mpsc::channel(1);
                let server = Meeting::Channel(to_client, from_client);
                let client = Meeting::Channel(to_server, from_server);
                Ok([
                    Some(Peer::new("server", Device::open_default()?, mode, server)?),
                    Some(Peer::new("client", Device::open_default()?, mode, client)?),
                ])
            }
            Self::Server(device, listener) => {
                let meeting = Meeting::Listener(Arc::clone(listener));
                Ok([Some(Peer::new("server", device.clone(), mode, meeting)?), None])
            }
            Self::Client(device, address) => Ok([
                None,
                Some(Peer::new("client", device.clone(), mode, Meeting::Address(*address))?),
            ]),
        }
    }
}

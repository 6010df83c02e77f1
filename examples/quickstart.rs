//! A tour of reliable connections: `cargo run --release --example quickstart`.
//!
//! A server task and a client task each open a device, connect two queue pairs, and run every
//! operation of a reliable connection in three completion modes: event, busy-poll and hybrid. Each
//! step checks its result. At the end the program prints latencies. The ends can also be two
//! processes or hosts:
//!
//! ```text
//! quickstart --listen 127.0.0.1:7471
//! quickstart --connect 127.0.0.1:7471 [--from ADDRESS]
//! ```
//!
//! Each process then uses a real device with that address, or the one named by `TOKIO_RDMA_DEVICE`,
//! or a software device that sends RoCE v2 over UDP. UDP port 4791 of an address belongs to one
//! program, so on loopback the client takes the first free address from 127.0.0.254 downwards.
//!
//! ```text
//!   client                                     server
//!     │ ◀────── endpoints, any channel ───────▶ │    QueuePair::endpoint, connect; or cm
//!     │ ◀────── SEND: address and key ───────── │    ExposedRegion::grant
//!     │ ─────── WRITE, READ ──────────────────▶ │    (the server does nothing)
//!     │ ─────── WRITE_WITH_IMM ───────────────▶ │    consumes a receive of the server
//!     │ ─────── compare-and-swap, fetch-add ──▶ │    (the server does nothing)
//!     │ ─────── SEND ─────────────────────────▶ │
//!     │ ◀───────────────────────────── SEND ─── │
//!     │ ─────── WRITE with a wrong key ───────▶ ✗    both queue pairs fail and reconnect
//! ```

use std::error::Error;
use std::fmt::Debug;
use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use tokio::sync::mpsc;
use tokio_rdma::cm::{self, CmConnection};
use tokio_rdma::op::{Recv, RetryConfig};
use tokio_rdma::types::{AckTimeout, AtomicCapability, Rkey, WcStatus};
use tokio_rdma::{
    Access, Buf, BufMut, CompletionMode, CompletionQueue, Device, ExposedRegion, Imm, Pool,
    ProtectionDomain, QueuePair, QueuePairEndpoint, RemoteRegion,
};

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

const ROUNDS: u32 = 5_000;

/// Ends the measurement of one operation early.
const TIME_LIMIT: Duration = Duration::from_secs(2);
const DEADLINE: Duration = Duration::from_secs(30);
const SERVER_DEADLINE: Duration = Duration::from_secs(300);

/// The layout of the server's memory.
const TEXT: std::ops::Range<u64> = 0..13;
const COUNTER: std::ops::Range<u64> = 64..72;
const SCRATCH: std::ops::Range<u64> = 128..136;

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    match run().await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("quickstart: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn run() -> Result<()> {
    let modes = [
        ("event", CompletionMode::Event),
        ("busy-poll", CompletionMode::busy_poll()?),
        ("hybrid", CompletionMode::Hybrid),
    ];
    let place = Place::find().await?;
    let mut latencies = Vec::new();
    for (name, mode) in modes {
        println!("{name}");
        let limit = if matches!(place, Place::Server(..)) { SERVER_DEADLINE } else { DEADLINE };
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

/// Runs all steps once. Returns the latencies if the client is in this process.
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
    let (qp, [hello, written, message]) = peer.connect().await?;
    hello.await?;

    // Peers may access an `ExposedRegion`. `grant` returns its address, length and key.
    let region = ExposedRegion::new(&peer.pd, vec![0; 4096], Access::REMOTE_ALL)?;
    qp.send(peer.pool.copy_from(&region.grant().to_bytes())?).await?;
    peer.did("exposed 4096 bytes and sent their address and key");

    wait_for_write(&peer, written, &region).await?;
    let next = answer_message(&peer, &qp, message, &region).await?;
    wait_for_disconnect(&peer, next).await?;

    // The client's grant is also valid on the new connection.
    let (qp, [first]) = peer.connect().await?;
    answer_until_empty(&peer, &qp, first).await?;
    qp.close().await;
    Ok(())
}

/// Waits for WRITE_WITH_IMM, which consumes a receive, or for a message if the device has no
/// immediate data. WRITE and READ produce no completion here.
async fn wait_for_write(peer: &Peer, written: Recv<BufMut>, region: &ExposedRegion) -> Result<()> {
    let received = written.await?;
    let has_immediate = peer.device.attr().immediate;
    check("immediate", received.imm, has_immediate.then_some(Imm(7)))?;
    check("is a write", received.written, has_immediate)?;

    let mut text = [0; 13];
    region.read(TEXT.start as usize, &mut text)?;
    check("text", &text, b"hello, remote")?;
    peer.did("learned of the text and found it in its memory");
    Ok(())
}

/// Answers a message. Returns the next receive, posted before the answer is sent so that the next
/// message always finds it.
async fn answer_message(
    peer: &Peer,
    qp: &QueuePair,
    message: Recv<BufMut>,
    region: &ExposedRegion,
) -> Result<Recv<BufMut>> {
    let message = message.await?;
    check("message", &message.buffer[..], b"ping")?;
    if has_atomics(peer) {
        check("counter", region.load(COUNTER.start as usize)?, 42)?;
    }
    let next = qp.recv(peer.pool.try_alloc(64)?);
    let answer = qp.send(peer.pool.copy_from(b"pong")?).await;
    // The client's next step may overtake the acknowledgement of this SEND and flush it.
    if let Err(error) = answer {
        check("status of the answer", error.status(), Some(WcStatus::WR_FLUSH_ERR))?;
    }
    peer.did("received a message and answered it");
    Ok(next)
}

/// Waits for the connection to fail: this device refuses the client's wrong key and flushes the
/// receives.
async fn wait_for_disconnect(peer: &Peer, next: Recv<BufMut>) -> Result<()> {
    match next.await {
        Ok(message) => Err(format!("expected a disconnect, received {message:?}").into()),
        Err(error) => {
            check("status of the receive", error.status(), Some(WcStatus::WR_FLUSH_ERR))?;
            peer.did(&format!("lost the connection: {error}"));
            Ok(())
        }
    }
}

async fn answer_until_empty(peer: &Peer, qp: &QueuePair, mut next: Recv<BufMut>) -> Result<()> {
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
    let (qp, [key]) = peer.connect().await?;
    // The side that connects sends first, as iWARP requires.
    qp.send_inline(b"hello").await?;
    let key = key.await?;
    let remote = RemoteRegion::from_bytes(&key.buffer).ok_or("invalid address and key")?;

    write_and_read(&peer, &qp, remote).await?;
    if has_atomics(&peer) {
        change_atomically(&peer, &qp, remote).await?;
    } else {
        peer.did("changed nothing atomically: the device has no atomics");
    }
    exchange_messages(&peer, &qp).await?;
    use_wrong_key(&peer, &qp, remote).await?;

    let (qp, []) = peer.connect().await?;
    peer.did("reconnected");
    let latencies = measure(&peer, &qp, remote).await?;
    qp.send(peer.pool.try_alloc(0)?).await?;
    qp.close().await;
    Ok(latencies)
}

async fn write_and_read(peer: &Peer, qp: &QueuePair, remote: RemoteRegion) -> Result<()> {
    let text = remote.slice(TEXT)?;
    // An operation owns its buffer while in flight, and returns it with the result.
    let mut buffer = qp.write(peer.pool.copy_from(b"hello, remote")?, text).await?;
    peer.did("wrote 13 bytes to the server's memory");

    buffer.fill(0);
    let buffer = qp.read(buffer, text).await?;
    check("data read", &buffer[..], b"hello, remote")?;
    peer.did("read them back");

    if peer.device.attr().immediate {
        qp.with_imm(Imm(7)).write(buffer, text).await?;
    } else {
        // A message arrives after the WRITEs before it.
        qp.write(buffer, text).await?;
        qp.send_inline(b"written").await?;
    }
    Ok(())
}

fn has_atomics(peer: &Peer) -> bool {
    peer.device.attr().atomic != AtomicCapability::None
}

async fn change_atomically(peer: &Peer, qp: &QueuePair, remote: RemoteRegion) -> Result<()> {
    let counter = remote.slice(COUNTER)?;
    check("before compare-and-swap", qp.compare_swap(counter, 0, 40).await?, 0)?;
    check("second compare-and-swap", qp.compare_swap(counter, 0, 1).await?, 40)?;
    peer.did("compare-and-swap changed 0 to 40");
    check("before fetch-and-add", qp.fetch_add(counter, 2).await?, 40)?;
    peer.did("fetch-and-add changed 40 to 42");
    Ok(())
}

async fn exchange_messages(peer: &Peer, qp: &QueuePair) -> Result<()> {
    // The call posts, the await waits: the receive is posted before the answer can arrive.
    let answer = qp.recv(peer.pool.try_alloc(64)?);
    qp.send(peer.pool.copy_from(b"ping")?).await?;
    check("answer", &answer.await?.buffer[..], b"pong")?;
    peer.did("sent a message and received the answer");
    Ok(())
}

async fn use_wrong_key(peer: &Peer, qp: &QueuePair, remote: RemoteRegion) -> Result<()> {
    let forged = RemoteRegion::new(remote.addr(), remote.len(), Rkey(!remote.rkey().0));
    if peer.device.attr().is_iwarp() {
        // A WRITE completes when TCP has it, so only a READ shows that the peer refuses the key.
        let Err(error) = qp.read(peer.pool.try_alloc(8)?, forged.slice(..8)?).await else {
            return Err("a READ with a wrong key succeeded".into());
        };
        peer.did(&format!("was refused: {error}"));
        return Ok(());
    }
    let Err(error) = qp.write(peer.pool.copy_from(b"intruder")?, forged).await else {
        return Err("a WRITE with a wrong key succeeded".into());
    };
    check("status", error.status(), Some(WcStatus::REM_ACCESS_ERR))?;
    peer.did(&format!("was refused: {error}"));
    // The error returns the buffer.
    let buffer = error.into_buffer();
    check("buffer", &buffer[..], b"intruder")?;

    // The queue pair is in the error state, which flushes later operations.
    let flushed = qp.write(buffer, remote).await;
    check(
        "status afterwards",
        flushed.err().and_then(|error| error.status()),
        Some(WcStatus::WR_FLUSH_ERR),
    )
}

// Latencies.

/// An operation and its latencies in nanoseconds.
type Latency = (&'static str, Histogram<u64>);

async fn measure(peer: &Peer, qp: &QueuePair, remote: RemoteRegion) -> Result<Vec<Latency>> {
    let (word, counter) = (remote.slice(SCRATCH)?, remote.slice(COUNTER)?);
    let payload = peer.pool.copy_from(&[1; 8])?.freeze();
    let mut measured = vec![
        ("WRITE 8 B", time(|| async { done(qp.write(payload.clone(), word).await) }).await?),
        ("READ 8 B", time(|| async { done(qp.read(peer.pool.try_alloc(8)?, word).await) }).await?),
    ];
    if has_atomics(peer) {
        let swap = || async { done(qp.compare_swap(counter, 42, 42).await) };
        measured.push(("compare-and-swap", time(swap).await?));
        let add = || async { done(qp.fetch_add(counter, 1).await) };
        measured.push(("fetch-and-add", time(add).await?));
    }
    if peer.device.attr().immediate {
        let write = || write_and_wait(peer, qp, &payload, word);
        measured.push(("WRITE_WITH_IMM + answer", time(write).await?));
    }
    measured.push(("SEND 8 B + answer", time(|| send_and_wait(peer, qp, &payload)).await?));
    Ok(measured)
}

async fn time<F: Future<Output = Result<()>>>(operation: impl Fn() -> F) -> Result<Histogram<u64>> {
    let mut histogram = Histogram::new(3)?;
    let begin = Instant::now();
    for round in 0..ROUNDS + ROUNDS / 100 {
        let start = Instant::now();
        operation().await?;
        // Warm-up.
        if round >= ROUNDS / 100 {
            histogram.record(start.elapsed().as_nanos() as u64)?;
        }
        if begin.elapsed() > TIME_LIMIT && !histogram.is_empty() {
            break;
        }
    }
    Ok(histogram)
}

fn done<T, E: Error + Send + Sync + 'static>(result: std::result::Result<T, E>) -> Result<()> {
    Ok(result.map(drop)?)
}

async fn write_and_wait(
    peer: &Peer,
    qp: &QueuePair,
    payload: &Buf,
    word: RemoteRegion,
) -> Result<()> {
    let answer = qp.recv(peer.pool.try_alloc(64)?);
    qp.with_imm(Imm(1)).write(payload.clone(), word).await?;
    done(answer.await)
}

async fn send_and_wait(peer: &Peer, qp: &QueuePair, payload: &Buf) -> Result<()> {
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

/// One end: an open device and the objects that serve all connections.
struct Peer {
    name: &'static str,
    device: Device,
    pd: ProtectionDomain,
    queue: CompletionQueue,
    pool: Pool,
    rendezvous: Rendezvous,
    /// Dropping it disconnects the queue pair.
    link: Option<CmConnection>,
}

/// Sets an ACK timeout of 0.5 s with seven retries: polling threads may occupy all processors.
fn long_ack_timeout() -> cm::ConnectConfig {
    let transport = RetryConfig { timeout: AckTimeout::from_code(17), ..RetryConfig::default() };
    cm::ConnectConfig::default().retries(transport)
}

/// The channel by which the ends exchange queue pair addresses.
enum Rendezvous {
    /// Any transport will do: TCP, gRPC, a database.
    Channel(mpsc::Sender<QueuePairEndpoint>, mpsc::Receiver<QueuePairEndpoint>),
    Listener(Arc<cm::Listener>),
    Address(SocketAddr),
}

impl Peer {
    fn new(
        name: &'static str,
        device: Device,
        mode: &CompletionMode,
        rendezvous: Rendezvous,
    ) -> Result<Self> {
        let pd = device.protection_domain()?;
        let queue = CompletionQueue::new(&device, mode.clone())?;
        let pool = Pool::new(&pd, 64, 16)?;
        Ok(Self { name, device, pd, queue, pool, rendezvous, link: None })
    }

    /// Posts `N` receives and connects. Receives come first, so that each message finds one: an
    /// InfiniBand or RoCE device would repeat a message, an iWARP device fails.
    async fn connect<const N: usize>(&mut self) -> Result<(QueuePair, [Recv<BufMut>; N])> {
        let builder = QueuePair::builder(&self.pd, &self.queue);
        let pool = &self.pool;
        let post = |qp: &QueuePair| -> Result<[Recv<BufMut>; N]> {
            let all = (0..N).map(|_| Ok(qp.recv(pool.try_alloc(64)?)));
            Ok(all.collect::<Result<Vec<_>>>()?.try_into().map_err(|_| "not N receives")?)
        };
        match &mut self.rendezvous {
            Rendezvous::Channel(to_peer, from_peer) => {
                let qp = builder.build()?;
                let receives = post(&qp)?;
                to_peer.send(qp.endpoint()).await?;
                let theirs = from_peer.recv().await.ok_or("the peer has exited")?;
                qp.connect(&theirs)?;
                Ok((qp, receives))
            }
            Rendezvous::Listener(listener) => {
                let request = listener.accept().await?;
                let qp = request.prepare(builder).build()?;
                let receives = post(&qp)?;
                self.link = Some(request.accept(&qp, &long_ack_timeout()).await?);
                Ok((qp, receives))
            }
            Rendezvous::Address(address) => {
                let route = cm::resolve(&self.device, *address).await?;
                let qp = route.prepare(builder).build()?;
                let receives = post(&qp)?;
                self.link = Some(route.connect(&qp, &long_ack_timeout()).await?);
                Ok((qp, receives))
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
        Err(format!("{what}: expected {expected:?}, got {is:?}").into())
    }
}

// Location of the ends.

enum Place {
    Here,
    /// Both ends on an iWARP device, which connects by address only.
    HereByAddress(Device, Arc<cm::Listener>),
    Server(Device, Arc<cm::Listener>),
    Client(Device, SocketAddr),
}

impl Place {
    /// Parses the arguments and opens device and listener.
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
            (None, None, None) => {
                let device = Device::open_default_or_software()?;
                if !device.attr().is_iwarp() {
                    return Ok(Self::Here);
                }
                let listener = cm::Listener::bind(&device, (device.default_address()?, 0)).await?;
                Ok(Self::HereByAddress(device, Arc::new(listener)))
            }
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
            _ => Err("usage: quickstart [--listen ADDRESS:PORT | \
                 --connect ADDRESS:PORT [--from ADDRESS]]"
                .into()),
        }
    }

    /// Returns server and client, as far as they are in this process.
    fn peers(&self, mode: &CompletionMode) -> Result<[Option<Peer>; 2]> {
        match self {
            Self::Here => {
                let (to_client, from_server) = mpsc::channel(1);
                let (to_server, from_client) = mpsc::channel(1);
                let server = Rendezvous::Channel(to_client, from_client);
                let client = Rendezvous::Channel(to_server, from_server);
                Ok([
                    Some(Peer::new("server", Device::open_default_or_software()?, mode, server)?),
                    Some(Peer::new("client", Device::open_default_or_software()?, mode, client)?),
                ])
            }
            Self::HereByAddress(device, listener) => {
                let server = Rendezvous::Listener(Arc::clone(listener));
                let client = Rendezvous::Address(listener.local_addr());
                Ok([
                    Some(Peer::new("server", device.clone(), mode, server)?),
                    Some(Peer::new("client", device.clone(), mode, client)?),
                ])
            }
            Self::Server(device, listener) => {
                let rendezvous = Rendezvous::Listener(Arc::clone(listener));
                Ok([Some(Peer::new("server", device.clone(), mode, rendezvous)?), None])
            }
            Self::Client(device, address) => Ok([
                None,
                Some(Peer::new("client", device.clone(), mode, Rendezvous::Address(*address))?),
            ]),
        }
    }
}

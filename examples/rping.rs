//! `rping(1)` of rdmacm-utils in Rust. Client and server interoperate with the C program.
//!
//! ```text
//! rping -s [--udp ADDRESS] [-a ADDRESS] [-p PORT] [-C COUNT] [-S SIZE] [-v] [-V]
//! rping -c [--udp ADDRESS] -a ADDRESS [-I ADDRESS] [-p PORT] [-C COUNT] [-S SIZE] [-v] [-V]
//! ```
//!
//! `-s` serves one client, `-c` is the client; without either both ends run in this process.
//!
//! ```text
//!   client                                               server
//!     │ ─── SEND: address, key, length of its source ──────▶ │
//!     │ ◀────────────────────────────────────── RDMA READ ── │
//!     │ ◀──────────────────────────────── SEND: go ahead ─── │
//!     │ ─── SEND: address, key, length of its sink ────────▶ │
//!     │ ◀───────────────────────────────────── RDMA WRITE ── │
//!     │ ◀──────────────────────────────── SEND: go ahead ─── │
//! ```
//!
//! The client repeats this COUNT times (1,000) and then disconnects. With -V both ends check the
//! data; the C program's server does not. With --udp the device is a software device that sends
//! RoCE v2 from ADDRESS; otherwise the one named by `TOKIO_RDMA_DEVICE`, or the first.

use std::error::Error;
use std::fmt::Debug;
use std::net::{IpAddr, SocketAddr};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use tokio_rdma::cm::{self, CmConnection, ConnectConfig, Listener};
use tokio_rdma::op::{QueuePairBuilder, Recv, RetryConfig};
use tokio_rdma::software::{Network, UdpConfig};
use tokio_rdma::types::{AckTimeout, Rkey};
use tokio_rdma::{
    Access, BufMut, CompletionMode, CompletionQueue, Device, ExposedRegion, Pool, ProtectionDomain,
    QueuePair, RemoteRegion,
};

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

const DEADLINE: Duration = Duration::from_secs(30);
const ACCEPT_TIMEOUT: Duration = Duration::from_secs(120);
/// The sizes that rping allows: at least its text, less than 64 KiB.
const SIZES: std::ops::RangeInclusive<usize> = 26..=65535;

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let options = match Options::from_arguments() {
        Ok(options) => options,
        Err(error) => {
            eprintln!(
                "{error}\nusage: rping [-s | -c] [--udp ADDRESS] [-a ADDRESS] [-I ADDRESS] \
                 [-p PORT] [-C COUNT] [-S SIZE] [-v] [-V]"
            );
            return ExitCode::from(2);
        }
    };
    match run(&options).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("rping: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn run(options: &Options) -> Result<()> {
    let device = match options.udp {
        Some(address) => {
            let network = Network::udp(&UdpConfig::new().address(address).expose())?;
            Device::software_in(&network, &address.to_string())?
        }
        None => Device::open_default()?,
    };
    let address = match options.address {
        Some(address) => address,
        None => device.default_address()?,
    };
    let address = SocketAddr::new(address, options.port);
    match options.role {
        Role::Server => {
            serve(&listen(&device, address).await?, Resources::new(device)?, options).await
        }
        Role::Client => ping(Resources::new(device)?, address, options).await,
        Role::Both => {
            let listener = listen(&device, SocketAddr::new(address.ip(), 0)).await?;
            let (server, client) = (Resources::new(device.clone())?, Resources::new(device)?);
            let address = listener.local_addr();
            tokio::try_join!(serve(&listener, server, options), ping(client, address, options))?;
            Ok(())
        }
    }
}

// The server.

async fn listen(device: &Device, address: SocketAddr) -> Result<Listener> {
    let listener = Listener::bind(device, address).await?;
    // Scripts wait for this line.
    println!("server: listening on {}", listener.local_addr());
    Ok(listener)
}

async fn serve(listener: &Listener, resources: Resources, options: &Options) -> Result<()> {
    let request = tokio::time::timeout(ACCEPT_TIMEOUT, listener.accept()).await??;
    let qp = request.prepare(resources.builder()).build()?;
    // Posted first: the client may send as soon as the server accepts.
    let receive = resources.receive(&qp).await?;
    let link = request.accept(&qp, &long_ack_timeout(&resources.device)).await?;
    let start = Instant::now();
    let mut rounds = 0;
    if let Err(error) = answer(&link, &qp, receive, &resources, options, &mut rounds).await {
        return Err(explained(error, rounds, &link, &qp).await);
    }
    report("server", rounds, start);
    link.disconnect().await?;
    Ok(())
}

/// Answers the client until it ends the run by disconnecting.
async fn answer(
    link: &CmConnection,
    qp: &QueuePair,
    mut receive: Recv<BufMut>,
    resources: &Resources,
    options: &Options,
    rounds: &mut u32,
) -> Result<()> {
    while let Some(message) = next(link, receive).await? {
        let source = Advertisement::parse(&message)?;
        let ping =
            within("RDMA READ", qp.read(resources.pool.alloc(source.len()).await?, source.0))
                .await?;
        if options.verbose {
            println!("server ping data: {}", text(&ping));
        }
        if options.validate {
            check("data read", &ping[..], &pattern(*rounds, ping.len())[..])?;
        }
        receive = resources.receive(qp).await?;
        resources.go_ahead(qp).await?;

        let message =
            next(link, receive).await?.ok_or("the client disconnected in the middle of a round")?;
        let sink = Advertisement::parse(&message)?;
        // A sink shorter than the source receives only a part.
        let mut pong = ping;
        pong.truncate(sink.len());
        let sink = sink.0.slice(..pong.len() as u64)?;
        within("RDMA WRITE", qp.write(pong, sink)).await?;
        receive = resources.receive(qp).await?;
        *rounds += 1;
        match resources.go_ahead(qp).await {
            // The client may disconnect before it acknowledges this SEND, which then fails.
            Err(_) if disconnects(link).await => break,
            sent => sent?,
        }
    }
    Ok(())
}

/// Returns the next message, or `None` if the connection has ended.
async fn next(link: &CmConnection, receive: Recv<BufMut>) -> Result<Option<BufMut>> {
    tokio::select! {
        biased;
        received = tokio::time::timeout(DEADLINE, receive) => match received? {
            Ok(received) => Ok(Some(received.buffer)),
            Err(_) if disconnects(link).await => Ok(None),
            Err(error) => Err(error.into()),
        },
        _ = link.disconnected() => Ok(None),
    }
}

/// Waits up to [`DEADLINE`] for the link to disconnect. An operation can fail earlier: a lost
/// disconnect request is retransmitted after seconds, and a failed keepalive probe flushes the
/// receives first.
async fn disconnects(link: &CmConnection) -> bool {
    tokio::time::timeout(DEADLINE, link.disconnected()).await.is_ok()
}

// The client.

async fn ping(resources: Resources, address: SocketAddr, options: &Options) -> Result<()> {
    let source = ExposedRegion::new(&resources.pd, vec![0; options.size], Access::REMOTE_READ)?;
    let sink = ExposedRegion::new(&resources.pd, vec![0; options.size], Access::REMOTE_WRITE)?;
    let connecting = long_ack_timeout(&resources.device);
    let connecting = match options.source {
        Some(source) => connecting.source(source),
        None => connecting,
    };
    let route = cm::resolve_with(&resources.device, address, &connecting).await?;
    let qp = route.prepare(resources.builder()).build()?;
    let link = route.connect(&qp, &connecting).await?;
    let start = Instant::now();
    let mut pong = vec![0; options.size];
    for round in 0..options.count {
        let sent = pattern(round, options.size);
        source.write(0, &sent)?;
        for region in [&source, &sink] {
            if let Err(error) = resources.advertise(&qp, region).await {
                return Err(explained(error, round, &link, &qp).await);
            }
        }
        sink.read(0, &mut pong)?;
        if options.validate {
            check("data in the sink", &pong[..], &sent[..])?;
        }
        if options.verbose {
            println!("ping data: {}", text(&pong));
        }
        // A missing WRITE shows in the next round.
        sink.write(0, &vec![0; options.size])?;
    }
    report("client", options.count, start);
    link.disconnect().await?;
    Ok(())
}

/// Returns the text of the round, letters that start one later each round, and a zero.
fn pattern(round: u32, size: usize) -> Vec<u8> {
    const LETTERS: std::ops::RangeInclusive<u8> = b'A'..=b'z';
    let mut bytes = format!("rdma-ping-{round}: ").into_bytes();
    let letters = LETTERS.cycle().skip(round as usize % LETTERS.len());
    bytes.extend(letters.take(size - 1 - bytes.len()));
    bytes.push(0);
    bytes
}

// Either end.

/// Sets an ACK timeout of 0.5 s, which is retried six times: the peer may wait for a processor. The
/// keepalive detects a killed peer while this end waits to receive; on iWARP, TCP has both.
fn long_ack_timeout(device: &Device) -> ConnectConfig {
    let transport = RetryConfig { timeout: AckTimeout::from_code(17), ..RetryConfig::default() };
    let keepalive = (!device.attr().is_iwarp()).then_some(Duration::from_secs(1));
    ConnectConfig::default().retries(transport).keepalive(keepalive)
}

/// Adds the round, how the connection ended, and the counters: the end of a connection flushes all
/// operations, whatever its cause.
async fn explained(
    error: Box<dyn Error + Send + Sync>,
    round: u32,
    link: &CmConnection,
    qp: &QueuePair,
) -> Box<dyn Error + Send + Sync> {
    let counters = qp.software_counters();
    let end = match tokio::time::timeout(DEADLINE, link.disconnected()).await {
        Ok(end) => format!("ended: {end:?}"),
        Err(_) => "has not ended".to_owned(),
    };
    format!("round {round}: {error}; the connection {end}; {counters:?}").into()
}

struct Resources {
    device: Device,
    pd: ProtectionDomain,
    queue: CompletionQueue,
    pool: Pool,
}

impl Resources {
    fn new(device: Device) -> Result<Self> {
        let pd = device.protection_domain()?;
        let queue = CompletionQueue::new(&device, CompletionMode::Event)?;
        let pool = Pool::new(&pd, *SIZES.end(), 4)?;
        Ok(Self { device, pd, queue, pool })
    }

    fn builder(&self) -> QueuePairBuilder {
        QueuePair::builder(&self.pd, &self.queue).max_send_wr(4).max_recv_wr(2)
    }

    async fn receive(&self, qp: &QueuePair) -> Result<Recv<BufMut>> {
        Ok(qp.recv(self.pool.alloc(Advertisement::LEN).await?))
    }

    /// Sends a message with the length of an advertisement. The peer ignores its content.
    async fn go_ahead(&self, qp: &QueuePair) -> Result<()> {
        within("SEND", qp.send(self.pool.copy_from(&[0; Advertisement::LEN])?)).await?;
        Ok(())
    }

    /// Grants a region to the server, and waits until the server has used it.
    async fn advertise(&self, qp: &QueuePair, region: &ExposedRegion) -> Result<()> {
        let answer = self.receive(qp).await?;
        within("SEND", qp.send(self.pool.copy_from(&Advertisement(region.grant()).bytes())?))
            .await?;
        let answer = within("go ahead", answer).await?;
        check("length of the answer", answer.len as usize, Advertisement::LEN)
    }
}

/// A region in rping's format: address (8 bytes), key (4) and length (4), big-endian.
struct Advertisement(RemoteRegion);

impl Advertisement {
    const LEN: usize = 16;

    fn bytes(&self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        bytes[..8].copy_from_slice(&self.0.addr().to_be_bytes());
        bytes[8..12].copy_from_slice(&self.0.rkey().0.to_be_bytes());
        bytes[12..].copy_from_slice(&(self.0.len() as u32).to_be_bytes());
        bytes
    }

    fn parse(bytes: &[u8]) -> Result<Self> {
        let bytes: &[u8; Self::LEN] = bytes.try_into().map_err(|_| {
            format!("expected a message of {} bytes, got {}", Self::LEN, bytes.len())
        })?;
        let word = |at: usize| {
            u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        let (addr, len) = (u64::from(word(0)) << 32 | u64::from(word(4)), word(12));
        if !SIZES.contains(&(len as usize)) {
            return Err(format!(
                "region of {len} bytes advertised; expected {} to {}",
                SIZES.start(),
                SIZES.end()
            )
            .into());
        }
        Ok(Self(RemoteRegion::new(addr, len.into(), Rkey(word(8)))))
    }

    fn len(&self) -> usize {
        self.0.len() as usize
    }
}

async fn within<T, E: Error + Send + Sync + 'static>(
    what: &str,
    operation: impl Future<Output = std::result::Result<T, E>>,
) -> Result<T> {
    let result = tokio::time::timeout(DEADLINE, operation).await;
    Ok(result.map_err(|_| format!("{what} timed out after {DEADLINE:?}"))??)
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).trim_end_matches('\0').to_owned()
}

fn report(role: &str, rounds: u32, start: Instant) {
    println!("{role}: {rounds} rounds in {:.1?}", start.elapsed());
}

fn check<T: Debug + PartialEq>(what: &str, is: T, expected: T) -> Result<()> {
    if is == expected {
        Ok(())
    } else {
        Err(format!("{what}: expected {expected:?}, got {is:?}").into())
    }
}

// Arguments.

enum Role {
    Server,
    Client,
    Both,
}

struct Options {
    role: Role,
    address: Option<IpAddr>,
    source: Option<IpAddr>,
    udp: Option<IpAddr>,
    port: u16,
    count: u32,
    size: usize,
    verbose: bool,
    validate: bool,
}

impl Options {
    fn from_arguments() -> std::result::Result<Self, lexopt::Error> {
        use lexopt::prelude::{Long, Short, ValueExt};
        let mut options = Self {
            role: Role::Both,
            address: None,
            source: None,
            udp: None,
            // The defaults of rping.
            port: 7174,
            count: 1000,
            size: 64,
            verbose: false,
            validate: false,
        };
        let mut arguments = lexopt::Parser::from_env();
        while let Some(argument) = arguments.next()? {
            match argument {
                Short('s') => options.role = Role::Server,
                Short('c') => options.role = Role::Client,
                Short('a') => options.address = Some(arguments.value()?.parse()?),
                Long("udp") => options.udp = Some(arguments.value()?.parse()?),
                Short('I') => options.source = Some(arguments.value()?.parse()?),
                Short('p') => options.port = arguments.value()?.parse()?,
                Short('C') => options.count = arguments.value()?.parse()?,
                Short('S') => options.size = arguments.value()?.parse()?,
                Short('v') => options.verbose = true,
                Short('V') => options.validate = true,
                other => return Err(other.unexpected()),
            }
        }
        if !SIZES.contains(&options.size) {
            return Err(
                format!("-S: expected a size from {} to {}", SIZES.start(), SIZES.end()).into()
            );
        }
        Ok(options)
    }
}

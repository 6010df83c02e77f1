//! `rping(1)` of rdmacm-utils, in Rust: talks to the one in C as client and as server.
//!
//! ```text
//! rping -s [--udp ADDRESS] [-a ADDRESS] [-p PORT] [-C COUNT] [-S SIZE] [-v] [-V]    serves one client
//! rping -c [--udp ADDRESS] -a ADDRESS [-I ADDRESS] [-p PORT] [-C COUNT] [-S SIZE] [-v] [-V]
//! rping                                                             both, in this process
//! ```
//!
//! ```text
//!   client                                               server
//!     │ ─── SEND: address, key, size of its source ────────▶ │
//!     │ ◀────────────────────────────────────── RDMA READ ── │
//!     │ ◀──────────────────────────────── SEND: go ahead ─── │
//!     │ ─── SEND: address, key, size of its sink ──────────▶ │
//!     │ ◀───────────────────────────────────── RDMA WRITE ── │
//!     │ ◀──────────────────────────────── SEND: go ahead ─── │
//! ```
//!
//! That is a round, COUNT of them are made (1,000 unless set; the client says when it is over). With -V the client
//! compares what came back with what it had exposed, and, which the one in C does not, the server what it read with what
//! rping always sends. The device is a software device that speaks RoCE v2 over UDP from the address that --udp names, or
//! else that of `TOKIO_RDMA_DEVICE`, or the first there is. Exits with 0 if all went well.

use std::error::Error;
use std::fmt::Debug;
use std::net::{IpAddr, SocketAddr};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use tokio_rdma::cm::{self, Link, Listener, Options as CmOptions};
use tokio_rdma::op::{ConnectOptions, QueuePairBuilder, Recv};
use tokio_rdma::software::{Network, UdpConfig};
use tokio_rdma::types::{AckTimeout, Rkey};
use tokio_rdma::{
    Access, BufMut, CompletionMode, CompletionQueue, Device, ExposedRegion, Pool, ProtectionDomain,
    QueuePair, RemoteRegion,
};

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

/// A peer that is there answers long before.
const DEADLINE: Duration = Duration::from_secs(30);
/// How long a server waits for its client.
const PATIENCE: Duration = Duration::from_secs(120);
/// Bytes of a ping, as rping allows: room for its text, and less than 64 KiB.
const SIZES: std::ops::RangeInclusive<usize> = 26..=65535;

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let options = match Options::from_arguments() {
        Ok(options) => options,
        Err(error) => {
            eprintln!(
                "{error}\nusage: rping [-s | -c] [--udp ADDRESS] [-a ADDRESS] [-I ADDRESS] [-p PORT] [-C COUNT] [-S SIZE] \
                 [-v] [-V]"
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
        // The first of the device.
        None => device.default_path()?.1.gid.to_ip(),
    };
    let address = SocketAddr::new(address, options.port);
    match options.role {
        Role::Server => serve(&listen(&device, address).await?, Side::new(device)?, options).await,
        Role::Client => ping(Side::new(device)?, address, options).await,
        Role::Both => {
            let listener = listen(&device, SocketAddr::new(address.ip(), 0)).await?;
            let (server, client) = (Side::new(device.clone())?, Side::new(device)?);
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

async fn serve(listener: &Listener, side: Side, options: &Options) -> Result<()> {
    let request = tokio::time::timeout(PATIENCE, listener.accept()).await??;
    let qp = request.prepare(side.builder()).build()?;
    // Posted before we accept, since the client may send at once.
    let mut news = side.receive(&qp).await?;
    let link = request.accept(&qp, &patient()).await?;
    let start = Instant::now();
    let mut rounds = 0;
    // Where the client's goodbye stands instead of a source, it is over.
    while let Some(message) = next(&link, news).await? {
        let source = Advertisement::parse(&message)?;
        let ping =
            within("RDMA READ", qp.read(side.pool.alloc(source.len()).await?, source.0)).await?;
        if options.verbose {
            println!("server ping data: {}", text(&ping));
        }
        if options.validate {
            check("what was read", &ping[..], &pattern(rounds, ping.len())[..])?;
        }
        news = side.receive(&qp).await?;
        side.go_ahead(&qp).await?;

        let message = next(&link, news).await?.ok_or("the client left within a round")?;
        let sink = Advertisement::parse(&message)?;
        // A client that gives less room than it has sent gets as much.
        let mut pong = ping;
        pong.truncate(sink.len());
        let sink = sink.0.slice(..pong.len() as u64)?;
        within("RDMA WRITE", qp.write(pong, sink)).await?;
        news = side.receive(&qp).await?;
        rounds += 1;
        match side.go_ahead(&qp).await {
            // The client may leave as soon as it has this SEND. If the acknowledgement is lost then, the SEND fails.
            Err(_) if ends_soon(&link).await => break,
            sent => sent?,
        }
    }
    report("server", rounds, start);
    link.disconnect().await?;
    Ok(())
}

/// The next message, or `None` if the connection has ended, for whatever reason.
async fn next(link: &Link, receive: Recv<BufMut>) -> Result<Option<BufMut>> {
    tokio::select! {
        biased;
        received = tokio::time::timeout(DEADLINE, receive) => match received? {
            Ok(received) => Ok(Some(received.buffer)),
            // Flushed with the connection.
            Err(_) if ends_soon(link).await => Ok(None),
            Err(error) => Err(error.into()),
        },
        _ = link.disconnected() => Ok(None),
    }
}

/// Waits up to [`DEADLINE`] for the link to end, and says whether it did. An operation can fail first: a disconnect request that was
/// lost is repeated after seconds, and a failed probe of the keepalive flushes the receives before the link ends.
async fn ends_soon(link: &Link) -> bool {
    tokio::time::timeout(DEADLINE, link.disconnected()).await.is_ok()
}

// The client.

async fn ping(side: Side, address: SocketAddr, options: &Options) -> Result<()> {
    let source = ExposedRegion::new(&side.pd, vec![0; options.size], Access::REMOTE_READ)?;
    let sink = ExposedRegion::new(&side.pd, vec![0; options.size], Access::REMOTE_WRITE)?;
    let connecting = match options.source {
        Some(source) => patient().source(source),
        None => patient(),
    };
    let route = cm::resolve_with(&side.device, address, &connecting).await?;
    let qp = route.prepare(side.builder()).build()?;
    let link = route.connect(&qp, &connecting).await?;
    let start = Instant::now();
    let mut pong = vec![0; options.size];
    for round in 0..options.count {
        let sent = pattern(round, options.size);
        source.write(0, &sent)?;
        side.advertise(&qp, &source).await?;
        side.advertise(&qp, &sink).await?;
        sink.read(0, &mut pong)?;
        if options.validate {
            check("what came back", &pong[..], &sent[..])?;
        }
        if options.verbose {
            println!("ping data: {}", text(&pong));
        }
        // Not to be found there again if nobody writes it.
        sink.write(0, &vec![0; options.size])?;
    }
    report("client", options.count, start);
    link.disconnect().await?;
    Ok(())
}

/// The text of a round and then letters, from another one each time, up to a zero.
fn pattern(round: u32, size: usize) -> Vec<u8> {
    const LETTERS: std::ops::RangeInclusive<u8> = b'A'..=b'z';
    let mut bytes = format!("rdma-ping-{round}: ").into_bytes();
    let letters = LETTERS.cycle().skip(round as usize % LETTERS.len());
    bytes.extend(letters.take(size - 1 - bytes.len()));
    bytes.push(0);
    bytes
}

// Either side.

/// What is not acknowledged is repeated after half a second, and given up after seven times that: the other end may be a
/// process that has to wait for a processor. A peer that is killed while this side waits to receive is noticed, too.
fn patient() -> CmOptions {
    let transport =
        ConnectOptions { timeout: AckTimeout::from_code(17), ..ConnectOptions::default() };
    CmOptions::default().transport(transport).keepalive(Some(Duration::from_secs(1)))
}

/// What queue pairs are made of.
struct Side {
    device: Device,
    pd: ProtectionDomain,
    queue: CompletionQueue,
    pool: Pool,
}

impl Side {
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

    /// As long as an advertisement; what it says means nothing.
    async fn go_ahead(&self, qp: &QueuePair) -> Result<()> {
        within("SEND", qp.send(self.pool.copy_from(&[0; Advertisement::LEN])?)).await?;
        Ok(())
    }

    /// Tells the server of a region, and waits until it has done with it.
    async fn advertise(&self, qp: &QueuePair, region: &ExposedRegion) -> Result<()> {
        let answer = self.receive(qp).await?;
        within("SEND", qp.send(self.pool.copy_from(&Advertisement(region.grant()).bytes())?))
            .await?;
        let answer = within("go ahead", answer).await?;
        check("length of the answer", answer.len as usize, Advertisement::LEN)
    }
}

/// A region as rping describes it: address (8 bytes), key (4) and length (4), big-endian.
struct Advertisement(RemoteRegion);

impl Advertisement {
    const LEN: usize = 16;

    fn bytes(&self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        bytes[..8].copy_from_slice(&self.0.addr().to_be_bytes());
        bytes[8..12].copy_from_slice(&self.0.rkey().0.to_be_bytes());
        // At most 64 KiB.
        bytes[12..].copy_from_slice(&(self.0.len() as u32).to_be_bytes());
        bytes
    }

    fn parse(bytes: &[u8]) -> Result<Self> {
        let bytes: &[u8; Self::LEN] = bytes
            .try_into()
            .map_err(|_| format!("a message of {} bytes instead of {}", bytes.len(), Self::LEN))?;
        let word = |at: usize| {
            u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        let (addr, len) = (u64::from(word(0)) << 32 | u64::from(word(4)), word(12));
        if !SIZES.contains(&(len as usize)) {
            return Err(format!(
                "a region of {len} bytes; {} to {} are possible",
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
    Ok(result.map_err(|_| format!("{what} is not done after {DEADLINE:?}"))??)
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).trim_end_matches('\0').to_owned()
}

fn report(who: &str, rounds: u32, start: Instant) {
    println!("{who}: {rounds} rounds in {:.1?}", start.elapsed());
}

fn check<T: Debug + PartialEq>(what: &str, is: T, expected: T) -> Result<()> {
    if is == expected {
        Ok(())
    } else {
        Err(format!("{what}: {is:?} instead of {expected:?}").into())
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
            // Those of rping.
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
            return Err(format!("-S takes {} to {}", SIZES.start(), SIZES.end()).into());
        }
        Ok(options)
    }
}

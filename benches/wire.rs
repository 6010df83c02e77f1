//! RoCE v2 over UDP compared with TCP, between two processes over loopback: latency of 8 bytes,
//! throughput of 64 KiB, and CPU cost.
//!
//! ```text
//! cargo bench --bench wire                  the table
//! cargo bench --bench wire -- only=WRITE    lines that contain a word
//! ```
//!
//! The other process runs this program too. Rounds of all lines are interleaved, so that
//! disturbances affect all; the median round counts. CPU time is the sum of both processes.

use std::error::Error;
use std::fs;
use std::io::{BufRead, BufReader};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_rdma::software::{Network, UdpConfig, UdpError};
use tokio_rdma::{
    Access, BufMut, CompletionMode, CompletionQueue, Device, ExposedRegion, Pool, QueuePair,
    QueuePairEndpoint, RemoteRegion,
};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

const WORD: usize = 8;
const BLOCK: usize = 64 << 10;
/// Blocks in flight.
const DEPTH: usize = 8;
const ROUNDS: usize = 7;
/// Operations per round, for latency and for throughput.
const WORDS: usize = 3000;
const BLOCKS: usize = 3000;

fn main() -> ExitCode {
    let done = match std::env::var("TOKIO_RDMA_WIRE") {
        Ok(mode) => runtime().and_then(|runtime| runtime.block_on(serve(&mode))),
        Err(_) => runtime().and_then(|runtime| runtime.block_on(compare())),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("wire: {error}");
            ExitCode::FAILURE
        }
    }
}

fn runtime() -> Result<tokio::runtime::Runtime> {
    Ok(tokio::runtime::Builder::new_current_thread().enable_all().build()?)
}

// The other process.

struct End {
    qp: QueuePair,
    pool: Pool,
    region: ExposedRegion,
    _network: Network,
}

impl End {
    fn open(mode: CompletionMode) -> Result<Self> {
        let network = network()?;
        let device = Device::software_in(&network, "wire")?;
        let pd = device.protection_domain()?;
        let queue = CompletionQueue::new(&device, mode)?;
        let qp = QueuePair::new(&pd, &queue)?;
        let pool = Pool::builder(&pd).buffer_size(BLOCK).buffers(DEPTH).build()?;
        let region = ExposedRegion::new(&pd, vec![0; BLOCK], Access::REMOTE_ALL)?;
        Ok(Self { qp, pool, region, _network: network })
    }

    /// Exchanges endpoints over `stream` and connects; returns the region of the other end.
    async fn connect(&self, stream: &mut TcpStream) -> Result<RemoteRegion> {
        stream.write_all(&self.qp.endpoint().to_bytes()).await?;
        stream.write_all(&self.region.grant().to_bytes()).await?;
        let mut endpoint = [0; QueuePairEndpoint::ENCODED_LEN];
        stream.read_exact(&mut endpoint).await?;
        let mut region = [0; RemoteRegion::ENCODED_LEN];
        stream.read_exact(&mut region).await?;
        self.qp.connect(&QueuePairEndpoint::from_bytes(&endpoint)?)?;
        // Both ends are connected before either sends.
        stream.write_u8(0).await?;
        stream.read_u8().await?;
        RemoteRegion::from_bytes(&region).ok_or_else(|| "not a region".into())
    }
}

/// Creates a network over UDP with one device at a loopback address of this process.
fn network() -> Result<Network> {
    let id = std::process::id();
    let mut port = UdpConfig::PORT;
    for attempt in 0..100 {
        let [_, high, middle, low] = (id * 7 + attempt).to_be_bytes();
        let address = IpAddr::V4(Ipv4Addr::new(127, 64 | high & 63, middle, low));
        match Network::udp(&UdpConfig::new().device("wire", address).port(port)) {
            Err(UdpError::PortTaken { soft_roce: true, .. }) => port = UdpConfig::PORT + 1,
            Err(UdpError::PortTaken { .. }) => {}
            result => return Ok(result?),
        }
    }
    Err("none of 100 loopback addresses is free".into())
}

/// Serves one connection: echoes words, receives blocks, or exposes its memory.
async fn serve(mode: &str) -> Result<()> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    println!("{}", listener.local_addr()?);
    let (mut stream, _) = listener.accept().await?;
    stream.set_nodelay(true)?;
    let mut block = vec![0; BLOCK];
    match mode {
        "echo" => loop {
            if stream.read_exact(&mut block[..WORD]).await.is_err() {
                return Ok(());
            }
            stream.write_all(&block[..WORD]).await?;
        },
        "sink" => loop {
            if stream.read_exact(&mut block).await.is_err() {
                return Ok(());
            }
            stream.write_all(&block[..1]).await?;
        },
        _ => {
            let end = End::open(CompletionMode::Event)?;
            end.connect(&mut stream).await?;
            match stream.read_u8().await {
                Ok(_) | Err(_) => Ok(()),
            }
        }
    }
}

/// The other process.
struct Peer {
    child: Child,
    stream: TcpStream,
}

impl Peer {
    async fn start(mode: &str) -> Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        let mut child = command
            .env("TOKIO_RDMA_WIRE", mode)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()?;
        let output = child.stdout.take().ok_or("no output")?;
        let line = BufReader::new(output).lines().next().ok_or("the peer process exited")??;
        let address: SocketAddr = line.parse()?;
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        Ok(Self { child, stream })
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // It exits when its stream closes, or is killed; errors do not matter.
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

// Comparing.

struct Line {
    name: String,
    /// Name of the line to compare with.
    baseline: &'static str,
    work: Work,
    peer: Peer,
    end: Option<(End, RemoteRegion)>,
    rounds: Vec<Round>,
}

#[derive(Debug, Clone, Copy)]
enum Work {
    Echo,
    Sink,
    Write,
    Read,
    Blocks,
    BlocksRead,
}

impl Work {
    const fn operations(self) -> usize {
        match self {
            Self::Echo | Self::Write | Self::Read => WORDS,
            Self::Sink | Self::Blocks | Self::BlocksRead => BLOCKS,
        }
    }
}

#[derive(Debug, Clone, Copy)]
struct Round {
    time: Duration,
    processor: Duration,
}

async fn compare() -> Result<()> {
    let only =
        std::env::args().find_map(|argument| argument.strip_prefix("only=").map(str::to_owned));
    let wanted = |name: &str| only.as_ref().is_none_or(|only| name.contains(only.as_str()));
    let mut lines = Vec::new();
    for (name, mode, work) in
        [("TCP echo, 8 B", "echo", Work::Echo), ("TCP stream, 64 KiB", "sink", Work::Sink)]
    {
        let peer = Peer::start(mode).await?;
        lines.push(Line {
            name: name.to_owned(),
            baseline: name,
            work,
            peer,
            end: None,
            rounds: Vec::new(),
        });
    }
    for (label, mode) in [("event", CompletionMode::Event), ("hybrid", CompletionMode::Hybrid)] {
        for (name, baseline, work) in [
            ("WRITE, 8 B", "TCP echo, 8 B", Work::Write),
            ("READ, 8 B", "TCP echo, 8 B", Work::Read),
            ("WRITE, 64 KiB", "TCP stream, 64 KiB", Work::Blocks),
            ("READ, 64 KiB", "TCP stream, 64 KiB", Work::BlocksRead),
        ] {
            let name = format!("{name}, {label}");
            if wanted(&name) {
                let mut peer = Peer::start("memory").await?;
                let end = End::open(mode.clone())?;
                let remote = end.connect(&mut peer.stream).await?;
                lines.push(Line {
                    name,
                    baseline,
                    work,
                    peer,
                    end: Some((end, remote)),
                    rounds: Vec::new(),
                });
            }
        }
    }
    // The first round is a warm-up.
    for round in 0..=ROUNDS {
        for line in &mut lines {
            let measured = line.round().await?;
            if round > 0 {
                line.rounds.push(measured);
            }
        }
    }
    println!(
        "| Work, two processes over loopback | µs each | processor µs each | MB/s | of TCP (time) \
         |\n|---|---|---|---|---|"
    );
    for line in &lines {
        let (time, processor) = line.median();
        let base = lines
            .iter()
            .find(|other| other.name == line.baseline)
            .map_or(time, |other| other.median().0);
        let bytes = if matches!(line.work, Work::Sink | Work::Blocks | Work::BlocksRead) {
            BLOCK
        } else {
            WORD
        };
        let rate = bytes as f64 / time;
        println!("| {} | {time:.1} | {processor:.1} | {rate:.0} | {:.2} |", line.name, time / base);
    }
    for line in &lines {
        if let Some((end, _)) = &line.end {
            let counters = end.qp.software_counters().ok_or("no counters")?.0;
            println!(
                "{}: {} packets, {} retransmitted, {} timeouts",
                line.name, counters.packets, counters.retransmitted, counters.timeouts
            );
        }
    }
    Ok(())
}

impl Line {
    /// Returns the elapsed time and the CPU time of an operation in microseconds.
    fn median(&self) -> (f64, f64) {
        let count = self.work.operations() as f64;
        let mut rounds = self.rounds.clone();
        rounds.sort_by_key(|round| round.time);
        let round = rounds[rounds.len() / 2];
        (round.time.as_secs_f64() * 1e6 / count, round.processor.as_secs_f64() * 1e6 / count)
    }

    async fn round(&mut self) -> Result<Round> {
        let used = |peer: &Peer| {
            Ok::<_, Box<dyn Error>>(processor("self")? + processor(&peer.child.id().to_string())?)
        };
        let before = used(&self.peer)?;
        let start = Instant::now();
        let count = self.work.operations();
        match &self.end {
            Some((end, remote)) => operations(end, *remote, self.work, count).await?,
            None => exchange(&mut self.peer.stream, self.work, count).await?,
        }
        Ok(Round { time: start.elapsed(), processor: used(&self.peer)?.saturating_sub(before) })
    }
}

/// Runs operations over TCP: words echoed one by one, blocks streamed.
async fn exchange(stream: &mut TcpStream, work: Work, count: usize) -> Result<()> {
    let mut block = vec![1; BLOCK];
    if matches!(work, Work::Echo) {
        for _ in 0..count {
            stream.write_all(&block[..WORD]).await?;
            stream.read_exact(&mut block[..WORD]).await?;
        }
        return Ok(());
    }
    let (mut reader, mut writer) = stream.split();
    let sending = async {
        for _ in 0..count {
            writer.write_all(&block).await?;
        }
        Ok::<_, std::io::Error>(())
    };
    let receiving = async {
        let mut taken = vec![0; count];
        reader.read_exact(&mut taken).await
    };
    tokio::try_join!(sending, receiving)?;
    Ok(())
}

async fn operations(end: &End, remote: RemoteRegion, work: Work, count: usize) -> Result<()> {
    let word = remote.slice(..WORD as u64)?;
    let mut buffer = end.pool.try_alloc(WORD)?;
    match work {
        Work::Write => {
            for _ in 0..count {
                buffer = end.qp.write(buffer, word).await?;
            }
        }
        Work::Read => {
            for _ in 0..count {
                buffer = end.qp.read(buffer, word).await?;
            }
        }
        _ => {
            drop(buffer);
            let each = (0..DEPTH).map(|_| blocks(end, remote, work, count / DEPTH));
            for done in join_all(each.collect()).await {
                done?;
            }
        }
    }
    Ok(())
}

async fn blocks(end: &End, remote: RemoteRegion, work: Work, count: usize) -> Result<()> {
    let mut buffer: BufMut = end.pool.try_alloc(BLOCK)?;
    for _ in 0..count {
        buffer = match work {
            Work::Blocks => end.qp.write(buffer, remote).await?,
            _ => end.qp.read(buffer, remote).await?,
        };
    }
    Ok(())
}

/// Polls all futures until each is ready; returns their results.
async fn join_all<T>(futures: Vec<impl Future<Output = T>>) -> Vec<T> {
    let mut futures: Vec<_> = futures.into_iter().map(|future| (Box::pin(future), None)).collect();
    std::future::poll_fn(|context| {
        let mut ready = true;
        for (future, result) in &mut futures {
            if result.is_none() {
                match future.as_mut().poll(context) {
                    std::task::Poll::Ready(value) => *result = Some(value),
                    std::task::Poll::Pending => ready = false,
                }
            }
        }
        if ready { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
    })
    .await;
    futures.into_iter().filter_map(|(_, result)| result).collect()
}

/// Returns the CPU time of all threads of a process, from `schedstat`.
fn processor(process: &str) -> Result<Duration> {
    let mut total = 0;
    for task in fs::read_dir(format!("/proc/{process}/task"))? {
        let text = fs::read_to_string(task?.path().join("schedstat"))?;
        total += text.split(' ').next().ok_or("schedstat is empty")?.parse::<u64>()?;
    }
    Ok(Duration::from_nanos(total))
}

//! Cost of awaiting: awaited operations of 8 bytes, the same work with bare `verbs` objects, and an
//! 8-byte echo over TCP on loopback, in one run: `cargo bench --bench post_poll`.
//!
//! Rounds are interleaved, so that disturbances affect all alike. Fails if an awaited WRITE is less
//! than [`FACTOR`] times faster than the echo. `POST_POLL_QUICK=1` shortens it.
//!
//! `post_poll count <side> <operation> <depth> <operations>` only runs operations, for
//! `scripts/instructions`. There, `batch` is also an operation: `depth` WRITEs with one doorbell
//! and one completion, rebuilt from the same buffers each time.

#![allow(unsafe_code)]

use std::error::Error;
use std::hint::spin_loop;
use std::process::ExitCode;
use std::time::Instant;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_rdma::op::Write;
use tokio_rdma::types::{
    AckTimeout, AddressVector, Data, Psn, QpAttr, QpCaps, QpState, Qpn, RemoteAddr, RnrTimer,
    SendFlags, SendOp, SendWr, Sge, Transport, WorkCompletion, WrId,
};
use tokio_rdma::verbs::{Cq, Qp, QpConfig};
use tokio_rdma::{
    Access, Batch, BufMut, CompletionMode, CompletionQueue, Device, ExposedRegion, Pool,
    ProtectionDomain, QueuePair, RemoteRegion,
};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// Required speed of an awaited WRITE relative to the echo. A TCP round trip costs two system calls
/// and a scheduler pass at each end; an operation already complete when awaited costs neither.
const FACTOR: f64 = 10.0;

const BYTES: usize = 8;
const DEPTHS: [usize; 2] = [1, 32];
const OPERATIONS: [Kind; 2] = [Kind::Write, Kind::Read];
const COUNTED: [Kind; 3] = [Kind::Write, Kind::Read, Kind::Batch];
const SIDES: [Side; 5] = [Side::Bare, Side::Event, Side::Cooperative, Side::Hybrid, Side::BusyPoll];

fn main() -> ExitCode {
    let arguments: Vec<String> =
        std::env::args().skip(1).filter(|argument| argument != "--bench").collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let result = match arguments[..] {
        ["count", side, kind, depth, operations] => {
            count(side, kind, depth, operations).map(|()| true)
        }
        _ => compare(),
    };
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Write,
    Read,
    Batch,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Side {
    Bare,
    Event,
    Cooperative,
    Hybrid,
    BusyPoll,
}

impl Side {
    fn name(self) -> &'static str {
        match self {
            Self::Bare => "bare verbs",
            Self::Event => "event",
            Self::Cooperative => "cooperative",
            Self::Hybrid => "hybrid",
            Self::BusyPoll => "busy-poll",
        }
    }

    /// Returns the completion mode; `None` if nothing is awaited.
    fn mode(self) -> Result<Option<CompletionMode>> {
        Ok(match self {
            Self::Bare => None,
            Self::Event => Some(CompletionMode::Event),
            Self::Cooperative => Some(CompletionMode::Cooperative),
            Self::Hybrid => Some(CompletionMode::Hybrid),
            Self::BusyPoll => Some(CompletionMode::busy_poll()?),
        })
    }
}

// Comparing.

/// Nanoseconds per operation, one for each round.
struct Series {
    label: String,
    side: &'static str,
    rounds: Vec<f64>,
}

impl Series {
    fn new(label: &str, side: &'static str) -> Self {
        Self { label: label.to_owned(), side, rounds: Vec::new() }
    }

    fn min(&self) -> f64 {
        self.rounds.iter().copied().fold(f64::INFINITY, f64::min)
    }

    fn median(&self) -> f64 {
        median(self.rounds.clone())
    }

    /// Returns the median of the ratios to `base` in the same round.
    fn ratio(&self, base: &Self) -> f64 {
        median(self.rounds.iter().zip(&base.rounds).map(|(ours, theirs)| ours / theirs).collect())
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn compare() -> Result<bool> {
    let quick = std::env::var_os("POST_POLL_QUICK").is_some();
    let (rounds, operations) = if quick { (5, 2_000) } else { (21, 20_000) };
    let cases: Vec<_> = OPERATIONS
        .into_iter()
        .flat_map(|kind| DEPTHS.map(|depth| (kind, depth)))
        .flat_map(|(kind, depth)| SIDES.map(|side| (kind, depth, side)))
        .collect();
    let mut series: Vec<Series> = cases
        .iter()
        .map(|&(kind, depth, side)| Series::new(&label(kind, depth), side.name()))
        .collect();
    let mut echo = Series::new("TCP echo, 1 in flight", "Tokio");
    for _ in 0..rounds {
        for (series, &(kind, depth, side)) in series.iter_mut().zip(&cases) {
            series.rounds.push(measure(side, kind, depth, operations)?);
        }
        echo.rounds.push(measure_echo(operations / 4)?);
    }
    println!(
        "{BYTES} bytes, {rounds} interleaved rounds of {operations} operations on one thread\n"
    );
    print_table(&series, &echo);
    Ok(check(&series, &echo))
}

fn label(kind: Kind, depth: usize) -> String {
    format!("{kind:?}, {depth} in flight").replace("Write", "WRITE").replace("Read", "READ")
}

fn print_table(series: &[Series], echo: &Series) {
    println!(
        "{:<22}{:<13}{:>9}{:>11}{:>15}{:>15}",
        "work", "how", "min ns", "median ns", "of bare verbs", "of TCP echo"
    );
    let mut bare = None;
    for line in series {
        bare = if line.side == Side::Bare.name() { Some(line) } else { bare };
        let of_bare = bare.map_or(1.0, |bare| line.ratio(bare));
        print!("{:<22}{:<13}{:>9.0}{:>11.0}", line.label, line.side, line.min(), line.median());
        println!("{of_bare:>14.2}x{:>14.3}x", line.ratio(echo));
    }
    println!("{:<22}{:<13}{:>9.0}{:>11.0}", echo.label, echo.side, echo.min(), echo.median());
}

/// Checks that the modes that poll on the task's own thread beat the echo. Busy polling is only in
/// the table: its gain depends on a core of its own.
fn check(series: &[Series], echo: &Series) -> bool {
    println!();
    let mut good = true;
    for line in series.iter().filter(|line| line.label == label(Kind::Write, 1)) {
        if [Side::Bare, Side::BusyPoll].map(Side::name).contains(&line.side) {
            continue;
        }
        let faster = echo.ratio(line);
        let verdict = if faster >= FACTOR { "ok" } else { "FAILED" };
        println!(
            "{verdict}: awaited WRITE ({}) is {faster:.1} times faster than TCP, at least {FACTOR} \
             required",
            line.side
        );
        good &= faster >= FACTOR;
    }
    good
}

fn measure(side: Side, kind: Kind, depth: usize, operations: usize) -> Result<f64> {
    let Some(mode) = side.mode()? else {
        let bare = Bare::new()?;
        bare.run(kind, depth, operations / 10)?;
        let start = Instant::now();
        bare.run(kind, depth, operations)?;
        return Ok(start.elapsed().as_nanos() as f64 / operations as f64);
    };
    runtime()?.block_on(async {
        let awaited = Awaited::new(mode)?;
        awaited.run(kind, depth, operations / 10).await?;
        let start = Instant::now();
        awaited.run(kind, depth, operations).await?;
        Ok(start.elapsed().as_nanos() as f64 / operations as f64)
    })
}

fn measure_echo(operations: usize) -> Result<f64> {
    runtime()?.block_on(async {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        tokio::spawn(async move { serve_echo(listener).await.ok() });
        let mut stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        echo(&mut stream, operations / 10).await?;
        let start = Instant::now();
        echo(&mut stream, operations).await?;
        Ok(start.elapsed().as_nanos() as f64 / operations as f64)
    })
}

async fn serve_echo(listener: TcpListener) -> std::io::Result<()> {
    let (mut stream, _) = listener.accept().await?;
    stream.set_nodelay(true)?;
    let mut bytes = [0; BYTES];
    loop {
        stream.read_exact(&mut bytes).await?;
        stream.write_all(&bytes).await?;
    }
}

async fn echo(stream: &mut TcpStream, operations: usize) -> Result<()> {
    let mut bytes = [0; BYTES];
    for _ in 0..operations {
        stream.write_all(&bytes).await?;
        stream.read_exact(&mut bytes).await?;
    }
    Ok(())
}

fn runtime() -> Result<tokio::runtime::Runtime> {
    Ok(tokio::runtime::Builder::new_current_thread().enable_io().build()?)
}

// Counting.

fn count(side: &str, kind: &str, depth: &str, operations: &str) -> Result<()> {
    let side = SIDES
        .into_iter()
        .find(|known| known.name().replace(' ', "-") == side)
        .ok_or("unknown side")?;
    let kind = COUNTED.into_iter().find(|known| format!("{known:?}").to_lowercase() == kind);
    let (kind, depth, operations) =
        (kind.ok_or("unknown operation")?, depth.parse()?, operations.parse()?);
    match side.mode()? {
        None => Bare::new()?.run(kind, depth, operations),
        Some(mode) => {
            runtime()?.block_on(async { Awaited::new(mode)?.run(kind, depth, operations).await })
        }
    }
}

// The work, awaited.

struct Awaited {
    qp: QueuePair,
    _peer: QueuePair,
    pool: Pool,
    remote: RemoteRegion,
    _region: ExposedRegion,
}

impl Awaited {
    fn new(mode: CompletionMode) -> Result<Self> {
        let device = Device::software()?;
        let pd = device.protection_domain()?;
        let queue = CompletionQueue::new(&device, mode)?;
        let (qp, peer) = (QueuePair::new(&pd, &queue)?, QueuePair::new(&pd, &queue)?);
        qp.connect(&peer.endpoint())?;
        peer.connect(&qp.endpoint())?;
        let region = ExposedRegion::new(&pd, vec![0; BYTES], Access::REMOTE_ALL)?;
        let pool = Pool::new(&pd, BYTES, 64)?;
        Ok(Self { qp, _peer: peer, pool, remote: region.grant(), _region: region })
    }

    async fn run(&self, kind: Kind, depth: usize, operations: usize) -> Result<()> {
        match (kind, depth) {
            (Kind::Write, 1) => {
                self.one_by_one(|buffer| self.qp.write(buffer, self.remote), operations).await
            }
            (Kind::Read, 1) => {
                self.one_by_one(|buffer| self.qp.read(buffer, self.remote), operations).await
            }
            (Kind::Write, _) => {
                self.window(|buffer| self.qp.write(buffer, self.remote), depth, operations).await
            }
            (Kind::Read, _) => {
                self.window(|buffer| self.qp.read(buffer, self.remote), depth, operations).await
            }
            (Kind::Batch, _) => self.batches(depth, operations).await,
        }
    }

    #[inline]
    async fn batches(&self, depth: usize, operations: usize) -> Result<()> {
        let mut buffers = (0..depth)
            .map(|_| self.pool.try_alloc(BYTES))
            .collect::<std::result::Result<Vec<_>, _>>()?;
        let mut batch = Batch::new();
        for _ in 0..operations / depth {
            for buffer in buffers.drain(..) {
                batch.write(buffer, self.remote);
            }
            let mut result = self.qp.post_batch(batch).await;
            if let Some(error) = result.results().iter().find_map(|result| result.err()) {
                return Err(error.into());
            }
            buffers.extend(result.drain());
            batch = result.into_batch();
        }
        Ok(())
    }

    #[inline]
    async fn one_by_one(
        &self,
        post: impl Fn(BufMut) -> Write<BufMut>,
        operations: usize,
    ) -> Result<()> {
        let mut buffer = self.pool.try_alloc(BYTES)?;
        for _ in 0..operations {
            buffer = post(buffer).await?;
        }
        Ok(())
    }

    /// Keeps `depth` operations in flight: awaits the oldest and posts its buffer again.
    #[inline]
    async fn window(
        &self,
        post: impl Fn(BufMut) -> Write<BufMut>,
        depth: usize,
        operations: usize,
    ) -> Result<()> {
        let mut in_flight = Vec::with_capacity(depth);
        for _ in 0..depth {
            in_flight.push(post(self.pool.try_alloc(BYTES)?));
        }
        let mut left = operations.saturating_sub(depth);
        while left > 0 {
            for oldest in in_flight.iter_mut().take(left) {
                *oldest = post((&mut *oldest).await?);
                left -= 1;
            }
        }
        for rest in in_flight {
            rest.await?;
        }
        Ok(())
    }
}

// The same work with bare objects.

struct Bare {
    // First: queue pairs are destroyed before the memory that they use.
    qp: Qp,
    _peer: Qp,
    cq: Cq,
    buffers: Vec<BufMut>,
    remote: RemoteAddr,
    _region: ExposedRegion,
}

impl Bare {
    fn new() -> Result<Self> {
        let device = Device::software()?;
        let pd = device.protection_domain()?;
        let cq = Cq::new(&device, 1024, None, 0)?;
        let (qp, peer) = (queue_pair(&pd, &cq)?, queue_pair(&pd, &cq)?);
        connect(&device, &qp, peer.qpn())?;
        connect(&device, &peer, qp.qpn())?;
        let region = ExposedRegion::new(&pd, vec![0; BYTES], Access::REMOTE_ALL)?;
        let pool = Pool::new(&pd, BYTES, 64)?;
        let buffers =
            (0..32).map(|_| pool.try_alloc(BYTES)).collect::<std::result::Result<_, _>>()?;
        let remote = RemoteAddr { addr: region.grant().addr(), rkey: region.grant().rkey() };
        Ok(Self { qp, _peer: peer, cq, buffers, remote, _region: region })
    }

    #[inline]
    fn run(&self, kind: Kind, depth: usize, operations: usize) -> Result<()> {
        let op = match kind {
            Kind::Write => SendOp::Write(self.remote),
            Kind::Read => SendOp::Read(self.remote),
            Kind::Batch => return self.run_batches(depth, operations),
        };
        let sges: Vec<[Sge; 1]> = self.buffers.iter().map(|buffer| [buffer.sge()]).collect();
        let mut completions = [WorkCompletion::default(); 32];
        let (mut posted, mut done) = (0, 0);
        while done < operations {
            while posted < operations && posted - done < depth {
                let data = Data::Sges(&sges[posted % sges.len()]);
                let wr = SendWr {
                    wr_id: WrId(posted as u64),
                    op,
                    flags: SendFlags::SIGNALED,
                    data,
                    target: None,
                };
                // SAFETY: S1: nothing else accesses the buffers, which outlive the queue pair.
                unsafe { self.qp.post_send(&[wr]) }?;
                posted += 1;
            }
            let taken = self.cq.poll(&mut completions)?;
            for completion in &completions[..taken] {
                if !completion.status.is_success() {
                    return Err(completion.status.to_string().into());
                }
            }
            if taken == 0 {
                spin_loop();
            }
            done += taken;
        }
        Ok(())
    }

    fn run_batches(&self, depth: usize, operations: usize) -> Result<()> {
        let sges: Vec<[Sge; 1]> =
            self.buffers.iter().take(depth).map(|buffer| [buffer.sge()]).collect();
        let mut list = Vec::with_capacity(depth);
        for _ in 0..operations / depth {
            list.clear();
            list.extend(sges.iter().enumerate().map(|(index, sge)| SendWr {
                wr_id: WrId(index as u64),
                op: SendOp::Write(self.remote),
                flags: if index + 1 == depth { SendFlags::SIGNALED } else { SendFlags::empty() },
                data: Data::Sges(sge),
                target: None,
            }));
            // SAFETY: S1: nothing else accesses the buffers, which outlive the queue pair.
            unsafe { self.qp.post_send(&list) }?;
            let mut completion = [WorkCompletion::default()];
            while self.cq.poll(&mut completion)? == 0 {
                spin_loop();
            }
            if !completion[0].status.is_success() {
                return Err(completion[0].status.to_string().into());
            }
        }
        Ok(())
    }
}

fn queue_pair(pd: &ProtectionDomain, cq: &Cq) -> Result<Qp> {
    let caps = QpCaps {
        max_send_wr: 128,
        max_recv_wr: 1,
        max_send_sge: 1,
        max_recv_sge: 1,
        max_inline: 0,
    };
    Ok(Qp::new(pd, cq, cq, None, &QpConfig::new(Transport::Rc, caps))?)
}

fn connect(device: &Device, qp: &Qp, peer: Qpn) -> Result<()> {
    let (port, gid) = device.default_path()?;
    qp.modify(&QpAttr {
        pkey_index: Some(0),
        port: Some(port.port),
        access: Some(Access::REMOTE_ALL),
        ..QpAttr::to_state(QpState::Init)
    })?;
    qp.modify(&QpAttr {
        address: Some(AddressVector::new(port.port, gid.index, gid.gid)),
        path_mtu: Some(port.active_mtu),
        dest_qpn: Some(peer),
        rq_psn: Some(Psn::new(0)),
        max_dest_rd_atomic: Some(16),
        min_rnr_timer: Some(RnrTimer::from_code(12)),
        ..QpAttr::to_state(QpState::Rtr)
    })?;
    qp.modify(&QpAttr {
        sq_psn: Some(Psn::new(0)),
        timeout: Some(AckTimeout::from_code(14)),
        retry_count: Some(7),
        rnr_retry: Some(7),
        max_rd_atomic: Some(16),
        ..QpAttr::to_state(QpState::Rts)
    })?;
    Ok(())
}

//! A service with one thread, runtime and completion queue per core.
//!
//! ```text
//! cargo run --release --example thread_per_core -- [OPTIONS]
//!
//! --cores N          cores of the service; default: half of the processors, at least 2
//! --connections N    connections of the clients; default: 4 per core
//! --requests N       requests per connection; default 20,000
//! --quick            100 requests per connection, for tests
//! ```
//!
//! ```text
//!  main thread: Listener ─▶ ConnectionRequest ─▶ channel of the core with the fewest connections
//!                                                  │
//!  thread per core: current-thread runtime, driven completion queue on a vector of its own,
//!                   accepts the connection and owns it and all state that its requests use
//! ```
//!
//! The queue pair is created by the core that accepts the request, on the completion queue of that
//! core. Its completions are polled and its tasks run there only, so the state of a core is an `Rc`
//! without locks. Data that belongs to another core would travel in a channel
//! like the requests do, or the client would connect to the core that has it: give each core a
//! `Listener` with a port of its own then.
//!
//! Each core polls in cooperative mode, and so never sleeps. For a service with idle times, use
//! `CompletionMode::Hybrid` and omit `drive`: then the vector's interrupt wakes the core.
//!
//! The clients check each answer: the requests of a connection are served by one core, in order,
//! and the counters of all cores, which no atomic operation protects, miss none.
//!
//! The device is the one named by `TOKIO_RDMA_DEVICE`, another real one, or the software device.

use std::cell::Cell;
use std::fmt;
use std::process::ExitCode;
use std::rc::Rc;
use std::thread;
use std::time::{Duration, Instant};

use tokio::runtime::Builder;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::oneshot;
use tokio::task::{JoinSet, LocalSet};
use tokio::time::timeout;
use tokio_rdma::connection::ConnectionRequest;
use tokio_rdma::{
    CompletionMode, CompletionQueue, Connection, ConnectionConfig, Device, Listener,
    ListenerConfig, MessageError,
};

type Failure = Box<dyn std::error::Error + Send + Sync>;

const USAGE: &str = "usage: thread_per_core [--cores N] [--connections N] [--requests N] [--quick]";
const DEADLINE: Duration = Duration::from_secs(240);
/// The requests that a client keeps in flight on a connection.
const WINDOW: u32 = 16;
const SENDS: u32 = 64;
const RECEIVES: u32 = 32;
/// The entries that a connection takes of the completion queue, see
/// [`ConnectionConfig::completion_queue`].
const ENTRIES: u32 = SENDS + RECEIVES + 12;

fn config() -> ConnectionConfig {
    ConnectionConfig::default().max_send_wr(SENDS).receive_buffers(RECEIVES).send_buffers(32)
}

struct Options {
    cores: usize,
    connections: usize,
    requests: u32,
}

fn main() -> ExitCode {
    let options = match options() {
        Ok(options) => options,
        Err(error) => {
            eprintln!("{error}\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    match run(&options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("thread_per_core: {error}");
            ExitCode::FAILURE
        }
    }
}

fn options() -> Result<Options, lexopt::Error> {
    use lexopt::prelude::{Long, ValueExt};
    let half = thread::available_parallelism().map_or(1, |processors| processors.get() / 2);
    let mut options = Options { cores: half.max(2), connections: 0, requests: 20_000 };
    let mut arguments = lexopt::Parser::from_env();
    while let Some(argument) = arguments.next()? {
        match argument {
            Long("cores") => options.cores = arguments.value()?.parse()?,
            Long("connections") => options.connections = arguments.value()?.parse()?,
            Long("requests") => options.requests = arguments.value()?.parse()?,
            Long("quick") => options.requests = 100,
            other => return Err(other.unexpected()),
        }
    }
    if options.connections == 0 {
        options.connections = 4 * options.cores;
    }
    if options.cores == 0 || options.requests == 0 {
        return Err("needs at least 1 core and 1 request".into());
    }
    Ok(options)
}

/// A core of the service, as the listener sees it.
struct Shard {
    requests: UnboundedSender<ConnectionRequest>,
    thread: thread::JoinHandle<Result<Report, Failure>>,
}

/// The result of a core.
struct Report {
    core: usize,
    processor: Option<usize>,
    vector: u32,
    connections: u64,
    requests: u64,
    completions: u64,
}

fn run(options: &Options) -> Result<(), Failure> {
    let device = Device::open_default_or_software()?;
    let address = (device.default_path()?.1.gid.to_ip(), 0);
    let runtime = Builder::new_current_thread().enable_all().build()?;
    let listening = ListenerConfig::new(config()).backlog(0);
    let listener = runtime.block_on(Listener::bind_with(&device, address, listening))?;
    let address = listener.local_addr()?;
    let shards = (0..options.cores).map(|core| start(core, &device, options));
    let shards = shards.collect::<Result<Vec<_>, _>>()?;

    let start = Instant::now();
    let (running, ended) = oneshot::channel::<()>();
    let client = {
        let (device, connections, requests) = (device, options.connections, options.requests);
        thread::spawn(move || {
            let _running = running;
            clients(&device, address, connections, requests)
        })
    };
    runtime.block_on(async {
        tokio::select! {
            distributed = distribute(&listener, &shards, options) => distributed,
            // They have failed.
            _ = ended => Ok(()),
        }
    })?;
    let counted = client.join().map_err(|_| "the clients panicked")??;
    // The channels end, and the cores when their connections do.
    let threads: Vec<_> = shards.into_iter().map(|shard| shard.thread).collect();
    let elapsed = start.elapsed();
    let mut reports = Vec::new();
    for thread in threads {
        reports.push(thread.join().map_err(|_| "a core panicked")??);
    }

    let rate = |requests: u64| requests as f64 / elapsed.as_secs_f64();
    for report in &reports {
        println!("{report}: {:.0} requests/s", rate(report.requests));
    }
    let total: u64 = reports.iter().map(|report| report.requests).sum();
    println!("total: {total} requests, {:.0} requests/s", rate(total));
    let expected = options.connections as u64 * u64::from(options.requests);
    if (total, counted) != (expected, expected) {
        return Err(format!("{total} requests, {counted} answers instead of {expected}").into());
    }
    Ok(())
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "core {}", self.core)?;
        match self.processor {
            Some(processor) => write!(f, " on processor {processor}")?,
            None => write!(f, ", not pinned")?,
        }
        write!(
            f,
            ", vector {}: {} connections, {} requests, {} completions",
            self.vector, self.connections, self.requests, self.completions
        )
    }
}

/// Gives each request to the core with the fewest connections.
async fn distribute(
    listener: &Listener,
    shards: &[Shard],
    options: &Options,
) -> Result<(), Failure> {
    let mut given = vec![0_usize; shards.len()];
    for _ in 0..options.connections {
        let request = listener.request().await?;
        let least = given.iter().enumerate().min_by_key(|(_, given)| **given);
        let core = least.map_or(0, |(core, _)| core);
        given[core] += 1;
        shards[core].requests.send(request).map_err(|_| format!("core {core} has ended"))?;
    }
    Ok(())
}

/// Starts the thread of a core.
fn start(core: usize, device: &Device, options: &Options) -> Result<Shard, Failure> {
    let (requests, receiver) = unbounded_channel();
    let connections = options.connections.div_ceil(options.cores) as u32;
    let device = device.clone();
    let thread = thread::Builder::new()
        .name(format!("core-{core}"))
        .spawn(move || serve(core, &device, connections, receiver))?;
    Ok(Shard { requests, thread })
}

/// Runs a core on this thread until `requests` and all connections end.
fn serve(
    core: usize,
    device: &Device,
    connections: u32,
    requests: UnboundedReceiver<ConnectionRequest>,
) -> Result<Report, Failure> {
    let processor = pin(core);
    let vector = core as u32 % device.attr().completion_vectors.max(1);
    let queue = CompletionQueue::builder(device)
        .capacity(connections * ENTRIES)
        .mode(CompletionMode::Cooperative)
        .vector(vector)
        .build()?;
    let config = config().completion_queue(&queue);
    let runtime = Builder::new_current_thread().enable_all().build()?;
    let (local, state) = (LocalSet::new(), Rc::new(State { core, ..State::default() }));
    let accepting = local.run_until(accept(requests, config, state.clone()));
    runtime.block_on(queue.drive(accepting))?;
    Ok(Report {
        core,
        processor,
        vector,
        connections: state.connections.get(),
        requests: state.requests.get(),
        completions: queue.counters().completions,
    })
}

/// Pins this thread to one of the processors that it may use, and returns its number.
#[cfg(target_os = "linux")]
fn pin(core: usize) -> Option<usize> {
    use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
    let allowed = sched_getaffinity(None).ok()?;
    let processors: Vec<_> = (0..CpuSet::MAX_CPU).filter(|&at| allowed.is_set(at)).collect();
    let processor = *processors.get(core)?;
    let mut only = CpuSet::new();
    only.set(processor);
    sched_setaffinity(None, &only).is_ok().then_some(processor)
}

#[cfg(not(target_os = "linux"))]
fn pin(_core: usize) -> Option<usize> {
    None
}

/// The state of a core, which no other thread uses.
#[derive(Default)]
struct State {
    core: usize,
    connections: Cell<u64>,
    requests: Cell<u64>,
}

async fn accept(
    mut requests: UnboundedReceiver<ConnectionRequest>,
    config: ConnectionConfig,
    state: Rc<State>,
) -> Result<(), Failure> {
    let mut connections = JoinSet::new();
    while let Some(request) = requests.recv().await {
        let (config, state) = (config.clone(), state.clone());
        // Each handshake in its own task: a slow peer delays no other.
        connections.spawn_local(async move {
            let connection = request.accept_with(&config).await?;
            state.connections.set(state.connections.get() + 1);
            answer(&connection, &state).await?;
            Ok::<_, Failure>(())
        });
    }
    while let Some(ended) = connections.join_next().await {
        ended??;
    }
    Ok(())
}

/// Answers each request with the number of the core and the count of its requests.
async fn answer(connection: &Connection, state: &State) -> Result<(), MessageError> {
    while connection.recv().await?.is_some() {
        state.requests.set(state.requests.get() + 1);
        let answer = [state.core as u64, state.requests.get()].map(u64::to_le_bytes).concat();
        connection.send(answer).await?;
    }
    connection.close().await
}

/// Sends `requests` on each connection and returns the number of answers.
fn clients(
    device: &Device,
    address: std::net::SocketAddr,
    connections: usize,
    requests: u32,
) -> Result<u64, Failure> {
    let runtime = Builder::new_current_thread().enable_all().build()?;
    let all = async {
        let mut clients = JoinSet::new();
        for _ in 0..connections {
            let device = device.clone();
            clients.spawn(async move { client(&device, address, requests).await });
        }
        let mut answers = 0;
        while let Some(ended) = clients.join_next().await {
            answers += ended??;
        }
        Ok(answers)
    };
    runtime.block_on(async { timeout(DEADLINE, all).await? })
}

async fn client(
    device: &Device,
    address: std::net::SocketAddr,
    requests: u32,
) -> Result<u64, Failure> {
    let connection = Connection::connect_with(device, address, &config()).await?;
    let (mut sent, mut answered, mut last) = (0, 0, None);
    while answered < requests {
        while sent < requests.min(answered + WINDOW) {
            connection.send(sent.to_le_bytes().to_vec()).await?;
            sent += 1;
        }
        let answer = connection.recv().await?.ok_or("the service has finished")?;
        let (core, count) = answer.split_at_checked(8).ok_or("a short answer")?;
        let (core, count) =
            (u64::from_le_bytes(core.try_into()?), u64::from_le_bytes(count.try_into()?));
        if last.is_some_and(|(of, before)| core != of || count <= before) {
            return Err(format!("answer {count} of core {core} after {last:?}").into());
        }
        last = Some((core, count));
        answered += 1;
    }
    connection.close().await?;
    Ok(u64::from(answered))
}

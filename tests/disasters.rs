//! A peer's process that is killed, a link that goes down, a device that is removed, all under load.
//!
//! They happen to the device that `TOKIO_RDMA_DEVICE` names: `scripts/rxe-vm cargo test --features ibverbs --test disasters`.
//! The link and the device are touched only if it is SoftRoCE and we are root, as in that machine; other tests of the
//! same device must not run meanwhile, so these run one after the other. What the software device does when it is killed
//! or unplugged is in `teardown.rs` and `faults`.
//!
//! The removal of the interface below the device is left out: SoftRoCE of Linux 6.1 then at times neither ends nor repeats
//! what is in flight, in a queue pair that stays in RTS, and `unregister_netdevice` waits for it for ever.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tokio::sync::Semaphore;
use tokio::task::{JoinHandle, JoinSet};
use tokio_rdma::op::ConnectOptions;
use tokio_rdma::types::{Gid, LinkLayer, Mtu, PortState, Psn, Qpn, Transport, WcStatus};
use tokio_rdma::{
    Access, BufMut, CompletionMode, CompletionQueue, Device, ExposedRegion, OpErrorKind, Pool,
    QueuePair, QueuePairEndpoint, RemoteRegion,
};

/// Only a hang takes this long.
const HANG: Duration = Duration::from_secs(60);
/// SoftRoCE of Linux 6.1, when its link goes down between a request and its answer, at times forgets to repeat the request
/// (the queue pair stays in RTS, with all that was posted in flight), and after an error to flush receives. So long it is
/// waited for; then closing must end it all.
const STALL: Duration = Duration::from_secs(10);
const SOFT_ROCE: u32 = 0xff_ffff;
/// Operations in flight.
const DEPTH: usize = 16;
const BLOCK: usize = 1024;
/// What is written into memory that was handed back.
const MARK: u8 = 0xa5;

static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// The real device under test, or `None` with a word about it.
fn device() -> Option<String> {
    let name = std::env::var("TOKIO_RDMA_DEVICE").ok().filter(|name| name != Device::SOFTWARE);
    if name.is_none() {
        eprintln!("SKIPPED: TOKIO_RDMA_DEVICE names no real device");
    }
    name
}

fn modes() -> [(&'static str, CompletionMode); 4] {
    [
        ("event", CompletionMode::Event),
        ("busy_poll", CompletionMode::busy_poll().unwrap()),
        ("cooperative", CompletionMode::Cooperative),
        ("hybrid", CompletionMode::Hybrid),
    ]
}

/// One end of a connection, with memory of its own.
struct End {
    qp: QueuePair,
    pool: Pool,
    region: ExposedRegion,
}

impl End {
    fn open(name: &str, mode: CompletionMode) -> Self {
        let device = Device::open(name).unwrap_or_else(|error| panic!("{name}: {error}"));
        let pd = device.protection_domain().unwrap();
        let queue = CompletionQueue::new(&device, mode).unwrap();
        let qp = QueuePair::new(&pd, &queue).unwrap();
        let pool = Pool::builder(&pd).buffer_size(BLOCK).buffers(16).growing(true).build().unwrap();
        let region = ExposedRegion::new(&pd, vec![0; DEPTH * BLOCK], Access::REMOTE_ALL).unwrap();
        Self { qp, pool, region }
    }

    fn connect(&self, to: &QueuePairEndpoint) {
        self.qp.connect_with(to, &ConnectOptions::default()).unwrap();
    }

    fn room(&self) -> BufMut {
        self.pool.try_alloc(BLOCK).unwrap()
    }
}

/// How operations ended.
#[derive(Debug, Default)]
struct Load {
    done: u64,
    ends: BTreeMap<String, u32>,
    kept: Vec<BufMut>,
}

/// Keeps operations of every kind in flight until each kind has failed.
async fn load(end: &End, remote: RemoteRegion, shout: impl FnOnce()) -> Load {
    let mut shout = Some(shout);
    let mut load = Load::default();
    let mut work: JoinSet<(u64, OpErrorKind, Option<BufMut>)> = JoinSet::new();
    let under_way = Arc::new(Semaphore::new(0));
    for at in 0..DEPTH {
        let (qp, pool, under_way) = (end.qp.clone(), end.pool.clone(), under_way.clone());
        let block = remote.slice(at as u64 * BLOCK as u64..(at as u64 + 1) * BLOCK as u64).unwrap();
        work.spawn(async move {
            let mut done = 0;
            let mut buffer = pool.try_alloc(BLOCK).unwrap();
            loop {
                let result = match at % 4 {
                    0 => qp.write(buffer, block).await,
                    1 => qp.read(buffer, block).await,
                    2 => qp.send(buffer).await,
                    _ => match qp.fetch_add(block.slice(..8).unwrap(), 1).await {
                        Ok(_) => Ok(buffer),
                        Err(error) => return (done, error.kind(), None),
                    },
                };
                match result {
                    Ok(back) => buffer = back,
                    Err(error) => return (done, error.kind(), Some(error.into_buffer())),
                }
                if done == 0 {
                    under_way.add_permits(1);
                }
                done += 1;
            }
        });
    }
    for _ in 0..4 {
        let (qp, buffer) = (end.qp.clone(), end.room());
        work.spawn(async move {
            match qp.recv(buffer).await {
                Ok(message) => panic!("nobody sends: {message:?}"),
                Err(error) => (0, error.kind(), Some(error.into_buffer())),
            }
        });
    }
    // All have done something, and most are at it again.
    let all = tokio::time::timeout(HANG, under_way.acquire_many(DEPTH as u32)).await;
    drop(all.expect("the load does not get under way"));
    shout.take().unwrap()();
    let start = Instant::now();
    let mut stalls = end.qp.protection_domain().device().attr().vendor_id == SOFT_ROCE;
    loop {
        let patience = if stalls { STALL } else { HANG };
        let Ok(ended) = tokio::time::timeout(patience, work.join_next()).await else {
            if stalls {
                println!(
                    "  SoftRoCE stalls: {:?}; closing",
                    end.qp.query().map(|(state, _)| state)
                );
                stalls = false;
                end.qp.clone().close().await;
                continue;
            }
            let (state, sent) = (end.qp.query().map(|(state, _)| state), end.qp.send_counters());
            panic!("{} operations hang; {:?} ended; {state:?}, {sent:?}", work.len(), load.ends);
        };
        let Some(ended) = ended else { break };
        let (done, kind, buffer) = ended.unwrap();
        load.done += done;
        let name =
            kind.status().map_or_else(|| format!("{kind:?}"), |status| format!("{status:?}"));
        *load.ends.entry(name).or_default() += 1;
        if let Some(mut buffer) = buffer {
            buffer.fill(MARK);
            load.kept.push(buffer);
        }
    }
    println!("  {} operations, then after {:?}: {:?}", load.done, start.elapsed(), load.ends);
    assert!(load.done > 0, "nothing worked before");
    load
}

/// Two ends of one device, connected.
fn connected(name: &str, mode: &CompletionMode) -> (End, End) {
    let (a, b) = (End::open(name, mode.clone()), End::open(name, mode.clone()));
    a.connect(&b.qp.endpoint());
    b.connect(&a.qp.endpoint());
    (a, b)
}

/// Closes both ends after `load`: what `receiving` had posted at the peer ends, and no memory is touched any more.
async fn ended((end, peer): (End, End), receiving: JoinHandle<()>, load: &Load) {
    // Nothing tells it that nobody will send any more.
    peer.qp.clone().close().await;
    drop((end, peer));
    tokio::time::timeout(HANG, receiving).await.expect("receives hang").unwrap();
    untouched(load).await;
}

/// Nothing writes to memory that was handed back. What does not happen cannot be awaited, only given time to.
async fn untouched(load: &Load) {
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert!(
        load.kept.iter().all(|buffer| buffer.iter().all(|&byte| byte == MARK)),
        "touched after it was handed back"
    );
}

/// The device can be opened again, and works.
async fn works(name: &str) {
    let (a, b) = connected(name, &CompletionMode::Event);
    let result = tokio::time::timeout(HANG, a.qp.write(a.room(), b.region.grant())).await;
    result.expect("hangs afterwards").expect("does not work afterwards");
}

fn runtime(mode: &str) -> tokio::runtime::Runtime {
    let mut builder = match mode {
        "cooperative" => tokio::runtime::Builder::new_current_thread(),
        _ => tokio::runtime::Builder::new_multi_thread(),
    };
    builder.enable_all().build().unwrap()
}

fn only_as(ends: &BTreeMap<String, u32>, allowed: &[WcStatus]) {
    let mut allowed: Vec<_> = allowed.iter().map(|status| format!("{status:?}")).collect();
    // By `load`, if SoftRoCE stalls.
    allowed.push("Closed".to_owned());
    assert!(ends.keys().all(|status| allowed.contains(status)), "{ends:?} instead of {allowed:?}");
}

#[test]
fn peer_that_is_killed_ends_every_operation_in_the_time_of_its_retries() {
    let Some(name) = device() else { return };
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    for (label, mode) in modes() {
        println!("{label}");
        runtime(label).block_on(async {
            let end = End::open(&name, mode);
            let mut child = Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "the_peer", "--nocapture", "--test-threads=1"])
                .env("TOKIO_RDMA_PEER_OF", encode(&end.qp.endpoint()))
                .stdout(Stdio::piped())
                .stdin(Stdio::piped())
                .spawn()
                .unwrap();
            let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
            let said = lines.find_map(|line| {
                line.unwrap().split_once("PEER ").map(|(_, rest)| rest.to_owned())
            });
            let said = said.expect("the peer's process says where it is");
            let (endpoint, region) = said.split_once(' ').unwrap();
            end.connect(&decode(endpoint));
            let remote = RemoteRegion::from_bytes(&unhex(region)).unwrap();
            child.stdin.take().unwrap().write_all(b"go\n").unwrap();
            let load = load(&end, remote, || {
                child.kill().unwrap();
                child.wait().unwrap();
            })
            .await;
            // The kernel may take the peer's memory away before its queue pair.
            let causes = [WcStatus::RETRY_EXC_ERR, WcStatus::REM_ACCESS_ERR, WcStatus::REM_OP_ERR];
            only_as(&load.ends, &[&causes[..], &[WcStatus::WR_FLUSH_ERR]].concat());
            assert!(
                load.ends.keys().any(|end| end != "WR_FLUSH_ERR"),
                "the first to fail says why"
            );
            drop(end);
            untouched(&load).await;
            works(&name).await;
        });
    }
}

/// The process that is killed; of no use alone.
#[test]
fn the_peer() {
    let Ok(endpoint) = std::env::var("TOKIO_RDMA_PEER_OF") else { return };
    let name = std::env::var("TOKIO_RDMA_DEVICE").unwrap();
    runtime("event").block_on(async {
        let end = End::open(&name, CompletionMode::Event);
        end.connect(&decode(&endpoint));
        let region: String =
            end.region.grant().to_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
        println!("PEER {} {region}", encode(&end.qp.endpoint()));
        // Not before the other end can receive.
        std::io::stdin().lines().next();
        let mut receives = JoinSet::new();
        for _ in 0..DEPTH {
            let (qp, mut buffer) = (end.qp.clone(), end.room());
            receives.spawn(async move {
                while let Ok(message) = qp.recv(buffer).await {
                    buffer = message.buffer;
                }
            });
        }
        // Until it is killed, or the one that would do it is gone.
        tokio::time::timeout(HANG, async { while receives.join_next().await.is_some() {} })
            .await
            .ok();
    });
}

/// The interface that SoftRoCE device `name` lies on, if we may take it down.
fn interface(name: &str) -> Option<String> {
    let parent = std::fs::read_to_string(format!("/sys/class/infiniband/{name}/parent"));
    let root = Command::new("id").arg("-u").output().is_ok_and(|output| output.stdout == b"0\n");
    match parent {
        Ok(parent) if root => Some(parent.trim().to_owned()),
        _ => {
            eprintln!("SKIPPED: {name} is not SoftRoCE, or we are not root");
            None
        }
    }
}

fn run(command: &str) {
    let mut words = command.split(' ');
    let status = Command::new(words.next().unwrap()).args(words).status();
    assert!(status.as_ref().is_ok_and(std::process::ExitStatus::success), "{command}: {status:?}");
}

/// Waits until a port of the device is active again.
fn active(name: &str) {
    let start = Instant::now();
    while !Device::open(name).is_ok_and(|device| {
        device
            .default_path()
            .is_ok_and(|(port, gid)| port.state == PortState::Active && gid.gid.to_ip().is_ipv4())
    }) {
        assert!(start.elapsed() < HANG, "{name} does not come back");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn link_that_goes_down_ends_every_operation() {
    let Some(name) = device() else { return };
    let Some(interface) = interface(&name) else { return };
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    for (label, mode) in modes() {
        println!("{label}");
        runtime(label).block_on(async {
            let (end, peer) = connected(&name, &mode);
            let receiving = receive(&peer);
            let load =
                load(&end, peer.region.grant(), || run(&format!("ip link set {interface} down")))
                    .await;
            run(&format!("ip link set {interface} up"));
            ended((end, peer), receiving, &load).await;
            active(&name);
            works(&name).await;
        });
    }
}

#[test]
fn device_that_is_removed_serves_until_it_is_closed_and_can_be_opened_when_it_is_back() {
    let Some(name) = device() else { return };
    let Some(interface) = interface(&name) else { return };
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    for (label, mode) in modes() {
        println!("{label}");
        runtime(label).block_on(async {
            let (end, peer) = connected(&name, &mode);
            let receiving = receive(&peer);
            let mut removal = None;
            let load = load(&end, peer.region.grant(), || {
                removal =
                    Some(Command::new("rdma").args(["link", "delete", &name]).spawn().unwrap());
                // SoftRoCE cannot take a device away from those who use it: the command waits for them, unnoticed.
                let (qp, name) = (end.qp.clone(), name.clone());
                tokio::spawn(async move {
                    while Device::open(&name).is_ok() {
                        tokio::time::sleep(Duration::from_millis(20)).await;
                    }
                    qp.close().await;
                });
            })
            .await;
            assert!(Device::open(&name).is_err(), "it is there for nobody else");
            ended((end, peer), receiving, &load).await;
            // The buffers are the last that hold it.
            drop(load);
            let removed = removal.unwrap().wait().unwrap();
            assert!(removed.success(), "rdma link delete: {removed}");
            run(&format!("rdma link add {name} type rxe netdev {interface}"));
            active(&name);
            works(&name).await;
        });
    }
}

/// Receives until that fails.
fn receive(end: &End) -> JoinHandle<()> {
    let (qp, pool) = (end.qp.clone(), end.pool.clone());
    tokio::spawn(async move {
        let post = || qp.recv(pool.try_alloc(BLOCK).unwrap());
        let mut posted: std::collections::VecDeque<_> = (0..2 * DEPTH).map(|_| post()).collect();
        while let Some(next) = posted.pop_front() {
            if next.await.is_err() {
                return;
            }
            posted.push_back(post());
        }
    })
}

// What two processes tell each other.

fn encode(endpoint: &QueuePairEndpoint) -> String {
    let QueuePairEndpoint { qpn, psn, gid, lid, mtu, reads, link_layer, .. } = endpoint;
    let ethernet = u8::from(*link_layer == LinkLayer::Ethernet);
    let gid: String = gid.0.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{}:{}:{gid}:{lid}:{}:{reads}:{ethernet}", qpn.0, psn.value(), *mtu as u8)
}

fn decode(text: &str) -> QueuePairEndpoint {
    let parts: Vec<_> = text.split(':').collect();
    let number = |at: usize| parts[at].parse::<u32>().unwrap();
    QueuePairEndpoint {
        transport: Transport::Rc,
        qpn: Qpn(number(0)),
        psn: Psn::new(number(1)),
        gid: Gid(unhex(parts[2]).try_into().unwrap()),
        lid: number(3) as u16,
        link_layer: if number(6) == 1 { LinkLayer::Ethernet } else { LinkLayer::InfiniBand },
        mtu: Mtu::from_code(number(4) as u8).unwrap(),
        reads: number(5) as u8,
    }
}

fn unhex(text: &str) -> Vec<u8> {
    (0..text.len() / 2)
        .map(|at| u8::from_str_radix(&text[2 * at..2 * at + 2], 16).unwrap())
        .collect()
}

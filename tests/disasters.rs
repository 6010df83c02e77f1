//! A killed peer process, a link that goes down and a removed device, all under load.
//!
//! The tests use the device that `TOKIO_RDMA_DEVICE` names:
//! `scripts/rxe-vm cargo test --features ibverbs --test disasters -- --include-ignored`.
//! They change the link and the device only as root, only for SoftRoCE, and only with
//! `TOKIO_RDMA_DISASTERS=1`. No other test may use the device meanwhile.
//!
//! Removal of the network interface is not tested: SoftRoCE of Linux 6.1 then sometimes neither
//! completes nor retransmits work in flight, the queue pair stays in RTS, and
//! `unregister_netdevice` never returns.

mod torture;

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use futures::StreamExt;
use tokio::sync::Semaphore;
use tokio::task::{JoinHandle, JoinSet};
use tokio_rdma::op::RetryConfig;
use tokio_rdma::peers::{Reconnect, ReconnectCause, ReconnectPolicy, ReconnectState};
use tokio_rdma::types::{Gid, LinkLayer, Mtu, PortState, Psn, Qpn, Transport, WcStatus};
use tokio_rdma::{
    Access, BufMut, CompletionMode, CompletionQueue, Connection, ConnectionConfig, Device,
    ExposedRegion, Listener, OpErrorKind, Pool, QueuePair, QueuePairEndpoint, RemoteRegion,
};

use torture::HANG;

/// The time after which a SoftRoCE queue pair counts as stalled; closing it must then end all work.
///
/// If the link goes down between a request and its answer, SoftRoCE of Linux 6.1 sometimes does not
/// retransmit (the queue pair stays in RTS with its work in flight), or does not flush receives
/// after an error.
const STALL: Duration = Duration::from_secs(10);
const SOFT_ROCE: u32 = 0xff_ffff;
const DEPTH: usize = 16;
const BLOCK: usize = 1024;
const MARK: u8 = 0xa5;

static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// Returns the name of the real device under test.
fn device() -> String {
    let name = std::env::var("TOKIO_RDMA_DEVICE").ok().filter(|name| name != Device::SOFTWARE);
    name.expect("this test needs TOKIO_RDMA_DEVICE, the name of a real device")
}

fn modes() -> [(&'static str, CompletionMode); 4] {
    [
        ("event", CompletionMode::Event),
        ("busy_poll", CompletionMode::busy_poll().unwrap()),
        ("cooperative", CompletionMode::Cooperative),
        ("hybrid", CompletionMode::Hybrid),
    ]
}

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
        self.qp.connect_with(to, &RetryConfig::default()).unwrap();
    }

    fn buffer(&self) -> BufMut {
        self.pool.try_alloc(BLOCK).unwrap()
    }
}

#[derive(Debug, Default)]
struct Load {
    done: u64,
    ends: BTreeMap<String, u32>,
    kept: Vec<BufMut>,
}

/// Keeps operations of every kind in flight, calls `disaster`, and waits until all have failed.
async fn load(end: &End, remote: RemoteRegion, disaster: impl FnOnce()) -> Load {
    let mut disaster = Some(disaster);
    let mut load = Load::default();
    let mut work: JoinSet<(u64, OpErrorKind, Option<BufMut>)> = JoinSet::new();
    let started = Arc::new(Semaphore::new(0));
    for at in 0..DEPTH {
        let (qp, pool, started) = (end.qp.clone(), end.pool.clone(), started.clone());
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
                    started.add_permits(1);
                }
                done += 1;
            }
        });
    }
    for _ in 0..4 {
        let (qp, buffer) = (end.qp.clone(), end.buffer());
        work.spawn(async move {
            match qp.recv(buffer).await {
                Ok(message) => panic!("received without a sender: {message:?}"),
                Err(error) => (0, error.kind(), Some(error.into_buffer())),
            }
        });
    }
    let all = tokio::time::timeout(HANG, started.acquire_many(DEPTH as u32)).await;
    drop(all.expect("the load does not start"));
    disaster.take().unwrap()();
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
            panic!("{} operations hang; {:?} failed; {state:?}, {sent:?}", work.len(), load.ends);
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
    println!(
        "  {} operations succeeded; failures within {:?}: {:?}",
        load.done,
        start.elapsed(),
        load.ends
    );
    assert!(load.done > 0, "no operation succeeded before the disaster");
    load
}

fn connected(name: &str, mode: &CompletionMode) -> (End, End) {
    let (a, b) = (End::open(name, mode.clone()), End::open(name, mode.clone()));
    a.connect(&b.qp.endpoint());
    b.connect(&a.qp.endpoint());
    (a, b)
}

/// Closes both ends after `load`; checks that `receiving` finishes and no buffer is written.
async fn ended((end, peer): (End, End), receiving: JoinHandle<()>, load: &Load) {
    // Its receives would otherwise wait for messages.
    peer.qp.clone().close().await;
    drop((end, peer));
    tokio::time::timeout(HANG, receiving).await.expect("receives hang").unwrap();
    untouched(load).await;
}

/// Checks that no returned buffer is written to, after giving the device time to do so.
async fn untouched(load: &Load) {
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert!(
        load.kept.iter().all(|buffer| buffer.iter().all(|&byte| byte == MARK)),
        "buffer written after it was returned"
    );
}

async fn works(name: &str) {
    let (a, b) = connected(name, &CompletionMode::Event);
    let result = tokio::time::timeout(HANG, a.qp.write(a.buffer(), b.region.grant())).await;
    result.expect("a WRITE hangs afterwards").expect("a WRITE fails afterwards");
}

fn runtime(mode: &str) -> tokio::runtime::Runtime {
    let mut builder = match mode {
        "cooperative" => tokio::runtime::Builder::new_current_thread(),
        _ => tokio::runtime::Builder::new_multi_thread(),
    };
    builder.enable_all().build().unwrap()
}

fn assert_only(ends: &BTreeMap<String, u32>, allowed: &[WcStatus]) {
    let mut allowed: Vec<_> = allowed.iter().map(|status| format!("{status:?}")).collect();
    // `load` closes a stalled SoftRoCE queue pair.
    allowed.push("Closed".to_owned());
    assert!(ends.keys().all(|status| allowed.contains(status)), "{ends:?} instead of {allowed:?}");
}

// Shows S1.
#[test]
#[ignore = "needs a real device"]
fn killed_peer_fails_every_operation_within_the_retry_time() {
    let name = device();
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    for (label, mode) in modes() {
        println!("{label}");
        runtime(label).block_on(async {
            let end = End::open(&name, mode);
            let mut child = Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "peer_process", "--ignored", "--nocapture", "--test-threads=1"])
                .env("TOKIO_RDMA_PEER_OF", encode(&end.qp.endpoint()))
                .stdout(Stdio::piped())
                .stdin(Stdio::piped())
                .spawn()
                .unwrap();
            let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
            let endpoints = lines.find_map(|line| {
                line.unwrap().split_once("PEER ").map(|(_, rest)| rest.to_owned())
            });
            let endpoints = endpoints.expect("the peer process prints its endpoint");
            let (endpoint, region) = endpoints.split_once(' ').unwrap();
            end.connect(&decode(endpoint));
            let remote = RemoteRegion::from_bytes(&unhex(region)).unwrap();
            child.stdin.take().unwrap().write_all(b"go\n").unwrap();
            let load = load(&end, remote, || {
                child.kill().unwrap();
                child.wait().unwrap();
            })
            .await;
            // The kernel may deregister the peer's memory before it destroys the queue pair.
            let causes = [WcStatus::RETRY_EXC_ERR, WcStatus::REM_ACCESS_ERR, WcStatus::REM_OP_ERR];
            assert_only(&load.ends, &[&causes[..], &[WcStatus::WR_FLUSH_ERR]].concat());
            assert!(
                load.ends.keys().any(|end| end != "WR_FLUSH_ERR"),
                "the first failure has a cause"
            );
            drop(end);
            untouched(&load).await;
            works(&name).await;
        });
    }
}

/// Runs in the child process that the test above kills.
#[test]
#[ignore = "a process that another test starts"]
fn peer_process() {
    let Ok(endpoint) = std::env::var("TOKIO_RDMA_PEER_OF") else { return };
    let name = std::env::var("TOKIO_RDMA_DEVICE").unwrap();
    runtime("event").block_on(async {
        let end = End::open(&name, CompletionMode::Event);
        end.connect(&decode(&endpoint));
        let region: String =
            end.region.grant().to_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
        println!("PEER {} {region}", encode(&end.qp.endpoint()));
        // The other end must be connected before the first receive completes.
        std::io::stdin().lines().next();
        let mut receives = JoinSet::new();
        for _ in 0..DEPTH {
            let (qp, mut buffer) = (end.qp.clone(), end.buffer());
            receives.spawn(async move {
                while let Ok(message) = qp.recv(buffer).await {
                    buffer = message.buffer;
                }
            });
        }
        // The parent kills this process; the timeout ends it if the parent is gone.
        tokio::time::timeout(HANG, async { while receives.join_next().await.is_some() {} })
            .await
            .ok();
    });
}

/// Returns the network interface of SoftRoCE device `name`, which the test takes down.
///
/// Panics without permission: the interface may be the only connection to this machine.
fn interface(name: &str) -> String {
    assert!(
        std::env::var("TOKIO_RDMA_DISASTERS").as_deref() == Ok("1"),
        "this test takes the network interface of {name} down, and needs TOKIO_RDMA_DISASTERS=1 as \
         permission; scripts/rxe-vm sets it in its guest"
    );
    let root = Command::new("id").arg("-u").output().is_ok_and(|output| output.stdout == b"0\n");
    assert!(root, "this test takes the network interface of {name} down, and must run as root");
    let parent = std::fs::read_to_string(format!("/sys/class/infiniband/{name}/parent"));
    parent.unwrap_or_else(|error| panic!("{name} is not SoftRoCE: {error}")).trim().to_owned()
}

fn run(command: &str) {
    let mut words = command.split(' ');
    let status = Command::new(words.next().unwrap()).args(words).status();
    assert!(status.as_ref().is_ok_and(std::process::ExitStatus::success), "{command}: {status:?}");
}

fn active(name: &str) {
    let start = Instant::now();
    while !Device::open(name).is_ok_and(|device| {
        device
            .default_path()
            .is_ok_and(|(port, gid)| port.state == PortState::Active && gid.gid.to_ip().is_ipv4())
    }) {
        assert!(start.elapsed() < HANG, "{name} does not become active");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
#[ignore = "needs SoftRoCE, root and TOKIO_RDMA_DISASTERS=1"]
fn link_down_fails_every_operation() {
    let name = device();
    let interface = interface(&name);
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

/// Exchanges a message on the next connection, and returns its generation and both ends.
async fn reconnected(client: &Reconnect, listener: &Listener) -> (u64, Connection, Connection) {
    let both = async { tokio::join!(client.connected(), listener.accept()) };
    let (connected, accepted) = tokio::time::timeout(HANG, both).await.expect("no connection");
    let ((generation, ours), theirs) = (connected.unwrap(), accepted.unwrap());
    ours.send("request").await.unwrap();
    let received = tokio::time::timeout(HANG, theirs.recv()).await.expect("no message");
    assert_eq!(received.unwrap().as_deref(), Some(&b"request"[..]));
    (generation, ours, theirs)
}

async fn until(client: &Reconnect, what: &str, is: impl Fn(&ReconnectState) -> bool) {
    let mut states = client.states();
    let found = async {
        while let Some(state) = states.next().await {
            if is(&state) {
                return;
            }
        }
    };
    if tokio::time::timeout(HANG, found).await.is_err() {
        panic!("{what} is not reached: {}", client.state());
    }
}

fn waits_for(state: &ReconnectState, is: impl Fn(&ReconnectCause) -> bool) -> bool {
    matches!(state, ReconnectState::Waiting { cause, .. } if is(cause))
}

#[test]
#[ignore = "needs SoftRoCE, root and TOKIO_RDMA_DISASTERS=1"]
fn reconnect_makes_no_attempt_while_the_link_is_down() {
    interface(&device());
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    // librdmacm keeps the device open in its process, and the removal of the device waits for that.
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "reconnect_process", "--ignored", "--nocapture"])
        .env("TOKIO_RDMA_RECONNECT", "1")
        .status();
    assert!(child.unwrap().success());
}

/// Runs in the child process of the test above.
#[test]
#[ignore = "a process that another test starts"]
fn reconnect_process() {
    if std::env::var_os("TOKIO_RDMA_RECONNECT").is_none() {
        return;
    }
    let name = std::env::var("TOKIO_RDMA_DEVICE").unwrap();
    let interface = interface(&name);
    runtime("event").block_on(async {
        let device = Device::open(&name).unwrap();
        let ip = device.default_path().unwrap().1.gid.to_ip();
        let listener = Listener::bind(&device, (ip, 0)).await.unwrap();
        let policy = ReconnectPolicy::default().first_delay(HANG / 6).greatest_delay(10 * HANG);
        let config = ConnectionConfig::default();
        let client =
            Reconnect::new(&device, listener.local_addr().unwrap(), &config, policy).unwrap();
        let (generation, ours, theirs) = reconnected(&client, &listener).await;
        assert_eq!(generation, 1);
        ours.abort();
        until(&client, "a wait", |state| {
            waits_for(state, |cause| matches!(cause, ReconnectCause::Lost { .. }))
        })
        .await;
        drop((ours, theirs));
        run(&format!("ip link set {interface} down"));
        until(&client, "the wait for a port", |state| {
            waits_for(state, |cause| matches!(cause, ReconnectCause::PortDown { .. }))
        })
        .await;
        // Only an event ends a long wait in time.
        until(&client, "a long delay", |state| {
            let is_long =
                matches!(state, ReconnectState::Waiting { delay, .. } if *delay >= 2 * HANG);
            if !is_long {
                client.retry_now();
            }
            is_long
        })
        .await;
        run(&format!("ip link set {interface} up"));
        let (generation, _ours, _theirs) = reconnected(&client, &listener).await;
        assert_eq!(generation, 2);
    });
}

#[test]
#[ignore = "needs SoftRoCE, root and TOKIO_RDMA_DISASTERS=1"]
fn removed_device_works_until_closed_and_can_be_reopened() {
    let name = device();
    let interface = interface(&name);
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
                // SoftRoCE does not revoke an open device: the command waits until it is closed.
                let (qp, name) = (end.qp.clone(), name.clone());
                tokio::spawn(async move {
                    while Device::open(&name).is_ok() {
                        tokio::time::sleep(Duration::from_millis(20)).await;
                    }
                    qp.close().await;
                });
            })
            .await;
            assert!(Device::open(&name).is_err(), "a removed device cannot be opened");
            ended((end, peer), receiving, &load).await;
            // Its buffers hold the last references to the device.
            drop(load);
            let removed = removal.unwrap().wait().unwrap();
            assert!(removed.success(), "rdma link delete: {removed}");
            run(&format!("rdma link add {name} type rxe netdev {interface}"));
            active(&name);
            works(&name).await;
        });
    }
}

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

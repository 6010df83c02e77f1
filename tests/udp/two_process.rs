//! Two processes over loopback: every operation and transport in both directions, with and without
//! packet faults, and the death of a process.
//!
//! Each test starts its own binary as the other process, which runs the same scenario from the
//! other side. A TCP connection synchronises the two and exchanges addresses. The program
//! `conformance` runs its scenarios over the same wire (`over_udp`), but with both ends in one
//! process.

mod campaign;
mod errors;
mod shim;
mod ucmatose;

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::common::udp;
use crate::torture::HANG;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::task::JoinSet;
use tokio_rdma::memory::HostMemory;
use tokio_rdma::op::RetryConfig;
use tokio_rdma::software::{Faults, Network, UdpConfig};
use tokio_rdma::types::{
    AckTimeout, AddressVector, Gid, Mtu, PortNum, Qkey, QpState, RnrTimer, Transport, WcStatus,
};
use tokio_rdma::{
    Access, BufMut, CompletionMode, CompletionQueue, Device, ExposedRegion, Imm, OpErrorKind,
    PathConfig, Pool, ProtectionDomain, QueuePair, QueuePairEndpoint, RemoteRegion,
};

const QKEY: Qkey = Qkey(0x1111_2222);
/// Lengths around the packet sizes of each MTU, and long ones.
const LENGTHS: [usize; 22] = [
    0,
    1,
    3,
    4,
    255,
    256,
    257,
    511,
    512,
    513,
    1023,
    1024,
    1025,
    2047,
    2048,
    2049,
    4095,
    4096,
    4097,
    65_537,
    262_144,
    1 << 20,
];
/// Number of lengths up to just above the largest packet. Unreliable connections lose none of these
/// over loopback.
const SHORT: usize = 19;
const LARGEST: usize = 1 << 20;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Role {
    Client,
    Server,
}

trait Stream: AsyncRead + AsyncWrite + Unpin + Send {}

impl<T: AsyncRead + AsyncWrite + Unpin + Send> Stream for T {}

/// The stream to the other process, and its GID if the choice of the local GID depends on it.
struct Meeting(Box<dyn Stream>, Option<Gid>);

impl Meeting {
    /// Exchanges `bytes` with the other process. Each waits for the other.
    async fn swap(&mut self, bytes: &[u8]) -> Vec<u8> {
        let exchange = async {
            self.0.write_u32(bytes.len() as u32).await.unwrap();
            self.0.write_all(bytes).await.unwrap();
            let mut theirs = vec![0; self.0.read_u32().await.unwrap() as usize];
            self.0.read_exact(&mut theirs).await.unwrap();
            theirs
        };
        tokio::time::timeout(HANG, exchange).await.expect("no answer of the other process")
    }

    async fn meet(&mut self) {
        self.swap(&[]).await;
    }
}

struct End {
    qp: QueuePair,
    pd: ProtectionDomain,
    pool: Pool,
    region: ExposedRegion,
    /// The region of the other end.
    remote: RemoteRegion,
    peer: QueuePairEndpoint,
}

impl End {
    async fn new(
        device: &Device,
        meeting: &mut Meeting,
        transport: Transport,
        mtu: Mtu,
        options: &RetryConfig,
    ) -> Self {
        let pd = device.protection_domain().unwrap();
        let queue = CompletionQueue::new(device, CompletionMode::Event).unwrap();
        let builder = QueuePair::builder(&pd, &queue).transport(transport);
        let builder = if let Some(peer) = meeting.1 { builder.peer(peer) } else { builder };
        // scripts/wire-interop finds these fields in the packets, those of datagrams too.
        let path = PathConfig::default().dscp(26).hop_limit(9).flow_label(0xa3b7);
        let builder =
            if transport == Transport::Ud { builder.qkey(QKEY) } else { builder.path(path) };
        let qp = builder.build().unwrap();
        let pool =
            Pool::builder(&pd).buffer_size(LARGEST).buffers(4).growing(true).build().unwrap();
        let region =
            ExposedRegion::new(&pd, HostMemory::zeroed(LARGEST + 64).unwrap(), Access::REMOTE_ALL)
                .unwrap();
        let theirs = meeting.swap(&qp.endpoint().to_bytes()).await;
        let mut peer = QueuePairEndpoint::from_bytes(&theirs).unwrap();
        let remote =
            RemoteRegion::from_bytes(&meeting.swap(&region.grant().to_bytes()).await).unwrap();
        peer.mtu = peer.mtu.min(mtu);
        if transport == Transport::Ud {
            qp.activate().unwrap();
        } else {
            qp.connect_with(&peer, options).unwrap();
        }
        meeting.meet().await;
        Self { qp, pd, pool, region, remote, peer }
    }

    fn alloc(&self, len: usize) -> BufMut {
        self.pool.try_alloc(len).unwrap()
    }

    fn buffer(&self, bytes: &[u8]) -> BufMut {
        self.pool.copy_from(bytes).unwrap()
    }

    fn written(&self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.region.read(0, &mut bytes).unwrap();
        bytes
    }
}

/// Returns bytes that depend on position and `seed`.
fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len)
        .map(|at| (at as u32).wrapping_mul(0x9e37_79b1).wrapping_add(at as u32 >> 8) as u8 ^ seed)
        .collect()
}

/// Runs each operation in both directions, in step with the other process.
async fn every_operation(end: &End, meeting: &mut Meeting, role: Role, lengths: &[usize]) {
    let transport = end.qp.transport();
    for (direction, active) in [role == Role::Client, role == Role::Server].into_iter().enumerate()
    {
        for (at, &len) in lengths.iter().enumerate() {
            let seed = (direction * 50 + at) as u8;
            let bytes = pattern(len, seed);
            let qp = &end.qp;
            if active {
                meeting.meet().await;
                qp.send(end.buffer(&bytes)).await.unwrap();
                qp.with_imm(Imm(len as u32)).send(end.buffer(&bytes)).await.unwrap();
                qp.write(end.buffer(&bytes), end.remote).await.unwrap();
                qp.with_imm(Imm(!0))
                    .write(end.buffer(&bytes[..len / 2]), end.remote)
                    .await
                    .unwrap();
                meeting.meet().await;
                if transport == Transport::Rc {
                    let back = qp
                        .read(end.alloc(len), end.remote.slice(..len as u64).unwrap())
                        .await
                        .unwrap();
                    assert_eq!(&back[..], bytes, "READ of {len}");
                    let word = end.remote.slice(LARGEST as u64..LARGEST as u64 + 8).unwrap();
                    let before = qp.fetch_add(word, 3).await.unwrap();
                    assert_eq!(
                        qp.compare_swap(word, before + 3, before + 4).await.unwrap(),
                        before + 3
                    );
                    assert_eq!(
                        qp.compare_swap(word, before, 0).await.unwrap(),
                        before + 4,
                        "the compared value differs"
                    );
                }
            } else {
                end.region.write(0, &vec![0; len]).unwrap();
                let before = end.region.load(LARGEST).unwrap();
                let receives =
                    [qp.recv(end.alloc(len)), qp.recv(end.alloc(len)), qp.recv(end.alloc(0))];
                meeting.meet().await;
                let [plain, imm, written] = receives;
                let plain = plain.await.unwrap();
                assert_eq!((&plain.buffer[..], plain.imm), (&bytes[..], None), "SEND of {len}");
                let imm = imm.await.unwrap();
                assert_eq!(
                    (&imm.buffer[..], imm.imm),
                    (&bytes[..], Some(Imm(len as u32))),
                    "SEND_IMM of {len}"
                );
                let written = written.await.unwrap();
                assert_eq!(
                    (written.len, written.imm, written.written),
                    (len / 2, Some(Imm(!0)), true)
                );
                assert_eq!(end.written(len), bytes, "WRITE of {len}");
                meeting.meet().await;
                meeting.meet().await;
                if transport == Transport::Rc {
                    assert_eq!(end.region.load(LARGEST).unwrap(), before + 4);
                }
                continue;
            }
            meeting.meet().await;
        }
    }
}

fn status(kind: OpErrorKind) -> Option<WcStatus> {
    match kind {
        OpErrorKind::Completion(error) => Some(error.status),
        _ => None,
    }
}

async fn datagrams(end: &End, meeting: &mut Meeting, role: Role) {
    let index = end.pd.device().default_path().unwrap().1.index;
    let route = end
        .pd
        .address_handle(&AddressVector {
            traffic_class: 104,
            hop_limit: 9,
            flow_label: 0xa3b7,
            ..AddressVector::new(PortNum(1), index, end.peer.gid)
        })
        .unwrap();
    for active in [role == Role::Client, role == Role::Server] {
        for len in LENGTHS.into_iter().filter(|&len| len <= 4096) {
            let bytes = pattern(len, 9);
            if active {
                meeting.meet().await;
                end.qp.send_to(end.buffer(&bytes), &route, end.peer.qpn, QKEY).await.unwrap();
            } else {
                let receive = end.qp.recv(end.alloc(40 + len));
                meeting.meet().await;
                let received = receive.await.unwrap();
                assert_eq!(&received.buffer[40..], bytes);
                assert_eq!(received.src_qpn, end.peer.qpn);
            }
            meeting.meet().await;
        }
    }
}

/// Leases memory to the other process, which accesses it and invalidates the lease.
async fn leases(end: &End, meeting: &mut Meeting, role: Role) {
    for active in [role == Role::Client, role == Role::Server] {
        if active {
            let lent = RemoteRegion::from_bytes(&meeting.swap(&[]).await).unwrap();
            end.qp.write(end.buffer(&[7; 100]), lent).await.unwrap();
            assert_eq!(end.qp.read(end.alloc(100), lent).await.unwrap()[..], [7; 100]);
            end.qp.invalidating(lent).send(end.buffer(b"done")).await.unwrap();
            meeting.meet().await;
        } else {
            let memory = HostMemory::zeroed(100).unwrap();
            let region = ExposedRegion::new(&end.pd, memory, Access::MW_BIND).unwrap();
            let rights = Access::REMOTE_WRITE | Access::REMOTE_READ;
            let lease = end.qp.lease(&region, 0..100, rights).await.unwrap();
            let receive = end.qp.recv(end.alloc(4));
            meeting.swap(&lease.grant().to_bytes()).await;
            let received = receive.await.unwrap();
            assert_eq!(
                (&received.buffer[..], received.invalidated),
                (&b"done"[..], Some(lease.rkey()))
            );
            meeting.meet().await;
            let mut bytes = [0; 100];
            region.read(0, &mut bytes).unwrap();
            assert_eq!(bytes, [7; 100]);
        }
    }
}

async fn load(device: &Device, meeting: &mut Meeting, options: &RetryConfig, rounds: usize) {
    const BLOCK: usize = 20_000;
    let mut ends = Vec::new();
    for _ in 0..8 {
        ends.push(End::new(device, meeting, Transport::Rc, Mtu::Mtu1024, options).await);
    }
    let mut work = JoinSet::new();
    for end in ends {
        work.spawn(async move {
            let mut receives: Vec<_> = (0..4).map(|_| end.qp.recv(end.alloc(BLOCK))).collect();
            for round in 0..rounds {
                let bytes = pattern(BLOCK, round as u8);
                let target = end.remote.slice((round % 8 * BLOCK) as u64..).unwrap();
                let counter = end.remote.slice(LARGEST as u64..LARGEST as u64 + 8).unwrap();
                let (sent, written, added) = tokio::join!(
                    end.qp.send(end.buffer(&bytes)),
                    end.qp.write(end.buffer(&bytes), target),
                    end.qp.fetch_add(counter, 1),
                );
                sent.unwrap();
                written.unwrap();
                assert_eq!(added.unwrap(), round as u64, "once each, in order");
                let back = end
                    .qp
                    .read(end.alloc(BLOCK), target.slice(..BLOCK as u64).unwrap())
                    .await
                    .unwrap();
                assert_eq!(&back[..], bytes);
                let received = receives.remove(0).await.unwrap();
                assert_eq!(&received.buffer[..], bytes);
                receives.push(end.qp.recv(received.buffer));
            }
            end
        });
    }
    let mut ends = Vec::new();
    while let Some(end) = work.join_next().await {
        ends.push(end.unwrap());
    }
    // The other process may still have work in flight.
    meeting.meet().await;
}

/// Returns options for frequent losses: all retries take a minute, within which a busy machine runs
/// the peer. The device repairs a loss after 67 ms nevertheless.
fn patient() -> RetryConfig {
    RetryConfig { timeout: AckTimeout::from_code(21), ..Default::default() }
}

fn faults() -> Faults {
    let faults = Faults::none().loss(0.02).duplicate(0.02).reorder(0.02).corrupt(0.01);
    faults.delay(Duration::ZERO..Duration::from_micros(50))
}

async fn clean(network: &Network, meeting: &mut Meeting, role: Role) {
    let device = Device::software_in(network, "one").unwrap();
    for transport in [Transport::Rc, Transport::Uc] {
        for mtu in Mtu::ALL {
            let end = End::new(&device, meeting, transport, mtu, &RetryConfig::default()).await;
            let lengths = if transport == Transport::Rc { &LENGTHS[..] } else { &LENGTHS[..SHORT] };
            every_operation(&end, meeting, role, lengths).await;
            if transport == Transport::Rc {
                leases(&end, meeting, role).await;
            }
            meeting.meet().await;
        }
    }
    let end =
        End::new(&device, meeting, Transport::Ud, Mtu::Mtu4096, &RetryConfig::default()).await;
    datagrams(&end, meeting, role).await;
    meeting.meet().await;
    load(&device, meeting, &patient(), 20).await;
    let counters = network.counters();
    assert!(
        counters.received > 10_000 && counters.sent > 10_000,
        "the packets used UDP: {counters:?}"
    );
    assert_eq!((counters.rejected, counters.corrupted), (0, 0), "{counters:?}");
}

async fn lossy(network: &Network, meeting: &mut Meeting, role: Role) {
    network.set_faults(faults());
    let device = Device::software_in(network, "one").unwrap();
    let end = End::new(&device, meeting, Transport::Rc, Mtu::Mtu1024, &patient()).await;
    every_operation(&end, meeting, role, &LENGTHS).await;
    meeting.meet().await;
    load(&device, meeting, &patient(), 20).await;
    let counters = network.counters();
    let each = [counters.lost, counters.corrupted, counters.duplicated, counters.reordered];
    assert!(each.iter().all(|&count| count > 0), "{counters:?}");
    let rejected = u64::from_be_bytes(
        meeting.swap(&counters.corrupted.to_be_bytes()).await.try_into().unwrap(),
    );
    // Packets were lost or duplicated, and a flipped congestion bit is not detected.
    assert!(counters.rejected > rejected / 2, "{counters:?}, the peer damaged {rejected}");
    network.set_faults(Faults::none());
    meeting.meet().await;
}

async fn refusals(network: &Network, meeting: &mut Meeting, role: Role) {
    let device = Device::software_in(network, "one").unwrap();
    let client = role == Role::Client;
    let end =
        End::new(&device, meeting, Transport::Rc, Mtu::Mtu1024, &RetryConfig::default()).await;
    if client {
        let region = RemoteRegion::new(
            end.remote.addr(),
            8,
            tokio_rdma::types::Rkey(end.remote.rkey().0 ^ 0x5500),
        );
        let error = end.qp.write(end.buffer(b"x"), region).await.unwrap_err();
        assert_eq!(status(error.kind()), Some(WcStatus::REM_ACCESS_ERR));
    }
    meeting.meet().await;
    assert_eq!(end.qp.query().unwrap().0, QpState::Err, "both ends");
    let end =
        End::new(&device, meeting, Transport::Rc, Mtu::Mtu1024, &RetryConfig::default()).await;
    let receive = end.qp.recv(end.alloc(2));
    meeting.meet().await;
    if client {
        let error = end.qp.send(end.buffer(b"long")).await.unwrap_err();
        assert_eq!(status(error.kind()), Some(WcStatus::REM_INV_REQ_ERR));
    } else {
        assert_eq!(status(receive.await.unwrap_err().kind()), Some(WcStatus::LOC_LEN_ERR));
    }
    meeting.meet().await;
    let options = RetryConfig { rnr_timer: RnrTimer::from_code(10), ..Default::default() };
    let end = End::new(&device, meeting, Transport::Rc, Mtu::Mtu1024, &options).await;
    if client {
        let sent = end.qp.send(end.buffer(&pattern(3000, 1)));
        while end.qp.software_counters().unwrap().0.rnr_naks < 2 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        meeting.meet().await;
        sent.await.unwrap();
    } else {
        meeting.meet().await;
        assert_eq!(&end.qp.recv(end.alloc(3000)).await.unwrap().buffer[..], pattern(3000, 1));
    }
    meeting.meet().await;
}

async fn killed(network: &Network, meeting: &mut Meeting, role: Role, child: Option<&mut Child>) {
    let device = Device::software_in(network, "one").unwrap();
    let options =
        RetryConfig { timeout: AckTimeout::from_code(14), retry_count: 3, ..Default::default() };
    let end = End::new(&device, meeting, Transport::Rc, Mtu::Mtu1024, &options).await;
    if role == Role::Server {
        tokio::time::sleep(HANG).await;
        return;
    }
    let mut done = 0;
    let mut child = child;
    let error = loop {
        if done == 50
            && let Some(child) = child.take()
        {
            child.kill().unwrap();
            child.wait().unwrap();
        }
        match end.qp.write(end.buffer(&pattern(10_000, 0)), end.remote).await {
            Ok(_) => done += 1,
            Err(error) => break error,
        }
    };
    assert_eq!(status(error.kind()), Some(WcStatus::RETRY_EXC_ERR));
    assert_eq!(end.qp.query().unwrap().0, QpState::Err);
}

async fn scenario(name: &str, meeting: &mut Meeting, role: Role, child: Option<&mut Child>) {
    let network = udp::network(&["one"]);
    let run = async {
        match name {
            "clean" => clean(&network, meeting, role).await,
            "lossy" => lossy(&network, meeting, role).await,
            "refusals" => refusals(&network, meeting, role).await,
            "killed" => killed(&network, meeting, role, child).await,
            "errors" => {
                let device = Device::software_in(&network, "one").unwrap();
                errors::every_error(&device, meeting, role).await;
            }
            _ => panic!("unknown scenario {name}"),
        }
    };
    tokio::time::timeout(HANG, run).await.unwrap_or_else(|_| panic!("{name} hangs as {role:?}"));
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

/// The other process, which is killed on drop.
struct Other(Child);

impl Drop for Other {
    fn drop(&mut self) {
        // Fails if the process has already ended.
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

fn between_processes(name: &str) {
    runtime().block_on(async {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "two_process::the_peer", "--nocapture", "--test-threads=1"])
            .env("TOKIO_RDMA_MEETING", format!("{name} {}", listener.local_addr().unwrap()))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn();
        let mut other = Other(child.unwrap());
        let accepted = tokio::time::timeout(HANG, listener.accept())
            .await
            .expect("the other process did not connect");
        let stream = accepted.unwrap().0;
        stream.set_nodelay(true).unwrap();
        let mut meeting = Meeting(Box::new(stream), None);
        scenario(name, &mut meeting, Role::Client, Some(&mut other.0)).await;
        if name != "killed" {
            assert!(other.0.wait().unwrap().success(), "the other process failed");
        }
    });
}

/// Runs the other process of [`between_processes`].
#[test]
fn the_peer() {
    let Ok(meeting) = std::env::var("TOKIO_RDMA_MEETING") else { return };
    let (name, address) = meeting.split_once(' ').unwrap();
    let address: SocketAddr = address.parse().unwrap();
    runtime().block_on(async {
        let stream = TcpStream::connect(address).await.unwrap();
        stream.set_nodelay(true).unwrap();
        scenario(name, &mut Meeting(Box::new(stream), None), Role::Server, None).await;
    });
}

/// Runs one end between the software device and another, only within scripts/wire-interop.
///
/// `TOKIO_RDMA_WIRE` holds four words:
/// - `listen` or `connect`;
/// - the address of the TCP connection;
/// - the address of a software device, or `real` for the device that `TOKIO_RDMA_DEVICE` names;
/// - `clean`, or `lossy` for a wire that loses packets.
#[test]
fn one_end_of_a_wire() {
    let Ok(setting) = std::env::var("TOKIO_RDMA_WIRE") else { return };
    let [role, address, device, wire] = setting.split(' ').collect::<Vec<_>>()[..] else {
        panic!("{setting}")
    };
    let address: SocketAddr = address.parse().unwrap();
    let device = match device.parse() {
        Ok(ip) => {
            let network = Network::udp(&UdpConfig::new().device("one", ip).expose()).unwrap();
            Device::software_in(&network, "one").unwrap()
        }
        Err(_) => Device::open_default_or_software().unwrap(),
    };
    runtime().block_on(async {
        let (stream, role) = match role {
            "listen" => {
                let listener = TcpListener::bind(address).await.unwrap();
                println!("listening");
                (
                    tokio::time::timeout(HANG, listener.accept()).await.unwrap().unwrap().0,
                    Role::Server,
                )
            }
            _ => (TcpStream::connect(address).await.unwrap(), Role::Client),
        };
        stream.set_nodelay(true).unwrap();
        let peer = stream.peer_addr().unwrap().ip();
        let mut meeting = Meeting(Box::new(stream), Some(Gid::from(peer)));
        let run = wired(&device, &mut meeting, role, wire == "lossy", peer.is_ipv4());
        tokio::time::timeout(4 * HANG, run).await.expect("hangs");
    });
}

async fn wired(device: &Device, meeting: &mut Meeting, role: Role, lossy: bool, v4: bool) {
    let timeout = AckTimeout::from_code(if lossy { 15 } else { 17 });
    let options = RetryConfig { timeout, retry_count: 7, ..Default::default() };
    if lossy {
        let end = End::new(device, meeting, Transport::Rc, Mtu::Mtu1024, &options).await;
        return every_operation(&end, meeting, role, &LENGTHS[..=SHORT]).await;
    }
    for (transport, mtu, lengths) in [
        (Transport::Rc, Mtu::Mtu1024, &LENGTHS[..]),
        (Transport::Rc, Mtu::Mtu4096, &LENGTHS[..]),
        (Transport::Rc, Mtu::Mtu256, &LENGTHS[..SHORT]),
        (Transport::Uc, Mtu::Mtu1024, &LENGTHS[..SHORT]),
    ] {
        let end = End::new(device, meeting, transport, mtu, &options).await;
        every_operation(&end, meeting, role, lengths).await;
        meeting.meet().await;
        println!(
            "{transport:?}, {mtu:?}: every operation, both ways, up to {} bytes",
            lengths[lengths.len() - 1]
        );
    }
    if v4 {
        let end = End::new(device, meeting, Transport::Ud, Mtu::Mtu4096, &options).await;
        datagrams(&end, meeting, role).await;
        meeting.meet().await;
        println!("datagrams, both ways");
    }
    load(device, meeting, &options, 5).await;
    println!("8 connections with work of all kinds at once");
}

/// Returns a network with a device at `near` and a shim in place of `far`, or `None` if an address
/// is in use.
async fn shimmed(
    near: IpAddr,
    far: IpAddr,
    paths: (&Path, &Path),
    seed: u64,
) -> Option<(Network, shim::Shim)> {
    let network = Network::udp(&UdpConfig::new().port(SHIM_PORT).device("one", near)).ok()?;
    let shim = shim::Shim::start(near, SocketAddr::new(far, SHIM_PORT), paths, seed).await?;
    Some((network, shim))
}

/// The port differs from the RoCE v2 port, which SoftRoCE may use.
const SHIM_PORT: u16 = UdpConfig::PORT + 2;

async fn over_the_shim(
    network: &Network,
    shim: &shim::Shim,
    meeting: &mut Meeting,
    role: Role,
    seeds: (u64, u64),
) {
    let device = Device::software_in(network, "one").unwrap();
    campaign::campaign(&device, meeting, role, seeds.0..seeds.0 + seeds.1).await;
    let faults = &shim.faults;
    let counts = [&faults.passed, &faults.lost, &faults.repeated, &faults.held, &faults.damaged];
    let counts = counts.map(|count| count.load(Ordering::Relaxed));
    let counters = network.counters();
    eprintln!("{role:?}: passed, lost, repeated, held back, damaged: {counts:?}; {counters:?}");
    let damaged = meeting.swap(&counts[4].to_be_bytes()).await;
    let damaged = u64::from_be_bytes(damaged.try_into().unwrap());
    // With few seeds, a fault may not occur at all.
    if seeds.1 >= 10 {
        assert!(counts[0] > 100 * seeds.1 && counts.iter().all(|&count| count > 0), "{counts:?}");
        // Some damaged packets are lost at the socket, and the ICRC misses some damage.
        assert!(counters.rejected > damaged / 2, "{counters:?}, {damaged} were damaged");
    }
    meeting.meet().await;
}

/// Returns the first seed and the number of seeds.
fn seeds() -> (u64, u64) {
    let number = |name| std::env::var(name).ok().map(|value| value.parse::<u64>().unwrap());
    match number("TOKIO_RDMA_SEED") {
        Some(seed) => (seed, 1),
        None => {
            (0, number("TOKIO_RDMA_SEEDS").unwrap_or(if cfg!(debug_assertions) { 6 } else { 30 }))
        }
    }
}

fn long(seeds: u64) -> Duration {
    HANG + Duration::from_secs(5 * seeds)
}

/// Runs the other process of `random_work_completes_exactly_once_over_a_faulty_wire`.
#[test]
fn the_peer_behind_the_shim() {
    let Ok(setting) = std::env::var("TOKIO_RDMA_SHIM") else { return };
    let [directory, near, far, first, count] = setting.split(' ').collect::<Vec<_>>()[..] else {
        panic!("{setting}")
    };
    let (near, far) = (near.parse().unwrap(), far.parse().unwrap());
    let seeds: (u64, u64) = (first.parse().unwrap(), count.parse().unwrap());
    let directory = Path::new(directory);
    runtime().block_on(async {
        let paths = (&*directory.join("there"), &*directory.join("here"));
        let (network, shim) =
            shimmed(near, far, paths, !seeds.0).await.expect("free addresses in a new namespace");
        let mut meeting =
            Meeting(Box::new(UnixStream::connect(directory.join("meeting")).await.unwrap()), None);
        let run = over_the_shim(&network, &shim, &mut meeting, Role::Server, seeds);
        tokio::time::timeout(long(seeds.1), run).await.expect("hangs");
    });
}

struct Directory(PathBuf);

impl Drop for Directory {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).ok();
    }
}

#[test]
#[ignore = "needs network namespaces without privilege"]
fn random_work_completes_exactly_once_over_a_faulty_wire() {
    let mut command = shim::in_namespace(&std::env::current_exe().unwrap())
        .expect("this test needs network namespaces without privilege: `unshare` or `ip` failed");
    let seeds = seeds();
    runtime().block_on(async {
        let directory =
            Directory(std::env::temp_dir().join(format!("tokio-rdma-shim-{}", std::process::id())));
        std::fs::create_dir(&directory.0).unwrap();
        let paths = (&*directory.0.join("here"), &*directory.0.join("there"));
        let mut made = None;
        for _ in 0..100 {
            let (near, far) = (udp::address(), udp::address());
            made = shimmed(near, far, paths, seeds.0).await.map(|made| (made, near, far));
            if made.is_some() {
                break;
            }
        }
        let ((network, shim), near, far) = made.expect("two free addresses among 100 pairs");
        let listener = UnixListener::bind(directory.0.join("meeting")).unwrap();
        let setting = format!("{} {far} {near} {} {}", directory.0.display(), seeds.0, seeds.1);
        let child = command
            .args([
                "--exact",
                "two_process::the_peer_behind_the_shim",
                "--nocapture",
                "--test-threads=1",
            ])
            .env("TOKIO_RDMA_SHIM", setting)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn();
        let mut other = Other(child.unwrap());
        let accepted = tokio::time::timeout(HANG, listener.accept())
            .await
            .expect("the other process did not connect");
        let mut meeting = Meeting(Box::new(accepted.unwrap().0), None);
        let run = over_the_shim(&network, &shim, &mut meeting, Role::Client, seeds);
        tokio::time::timeout(long(seeds.1), run).await.expect("hangs");
        assert!(other.0.wait().unwrap().success(), "the other process failed");
    });
}

#[test]
fn each_error_is_reported_across_processes() {
    between_processes("errors");
}

#[test]
fn every_operation_works_in_both_directions() {
    between_processes("clean");
}

#[test]
fn operations_succeed_over_a_lossy_wire() {
    between_processes("lossy");
}

// Shows S4.
#[test]
fn refusals_reach_the_other_process() {
    between_processes("refusals");
}

#[test]
fn killed_peer_fails_work_in_flight() {
    between_processes("killed");
}

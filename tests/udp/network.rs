//! Networks over UDP: their configuration, and packets of unknown senders.

use crate::common::udp;
use crate::torture::HANG;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use tokio_rdma::error::OpenError;
use tokio_rdma::op::RetryConfig;
use tokio_rdma::software::{Network, UdpConfig, UdpError};
use tokio_rdma::types::{AckTimeout, QpState, WcStatus};
use tokio_rdma::{
    Access, BufMut, CompletionMode, CompletionQueue, Device, ExposedRegion, OpErrorKind, Pool,
    QueuePair,
};

const BLOCK: usize = 64 << 10;

struct End {
    qp: QueuePair,
    pool: Pool,
    region: ExposedRegion,
}

impl End {
    fn new(device: &Device) -> Self {
        Self::watched(device, CompletionMode::Event)
    }

    fn watched(device: &Device, mode: CompletionMode) -> Self {
        let pd = device.protection_domain().unwrap();
        let queue = CompletionQueue::new(device, mode).unwrap();
        let qp = QueuePair::new(&pd, &queue).unwrap();
        let pool = Pool::builder(&pd).buffer_size(BLOCK).buffers(2).growing(true).build().unwrap();
        let region = ExposedRegion::new(&pd, vec![0; BLOCK], Access::REMOTE_ALL).unwrap();
        Self { qp, pool, region }
    }

    fn connect(&self, to: &Self) {
        let options = RetryConfig {
            timeout: AckTimeout::from_code(14),
            retry_count: 3,
            ..Default::default()
        };
        self.qp.connect_with(&to.qp.endpoint(), &options).unwrap();
    }

    fn buffer(&self, len: usize) -> BufMut {
        self.pool.copy_from(&vec![7; len]).unwrap()
    }
}

fn only(network: &Network) -> (Device, SocketAddr) {
    let device = Device::software_in(network, "one").unwrap();
    let ip = device.default_path().unwrap().1.gid.to_ip();
    let port = if Network::udp(&UdpConfig::new().address(udp::address())).is_ok() {
        UdpConfig::PORT
    } else {
        UdpConfig::PORT + 1
    };
    (device, SocketAddr::new(ip, port))
}

fn run(scenario: impl Future<Output = ()>) {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async { tokio::time::timeout(HANG, scenario).await.expect("hangs") });
}

#[test]
fn port_is_in_use_until_network_and_devices_are_dropped() {
    let network = udp::network(&["one"]);
    let (device, address) = only(&network);
    let config = UdpConfig::new().device("two", address.ip()).port(address.port());
    let name = Some(device.name().to_owned());
    let taken = UdpError::PortTaken {
        address: address.ip(),
        port: address.port(),
        soft_roce: false,
        device: name,
    };
    assert_eq!(Network::udp(&config).unwrap_err(), taken);
    drop(network);
    assert_eq!(Network::udp(&config).unwrap_err(), taken, "the device is open");
    drop(device);
    Network::udp(&config).unwrap();
}

#[test]
fn failed_network_releases_its_addresses() {
    // A documentation address (RFC 5737), assigned to no host.
    let unassigned: IpAddr = "192.0.2.1".parse().unwrap();
    let (address, port) = (udp::address(), UdpConfig::PORT + 1);
    let config = UdpConfig::new().port(port).device("one", address).device("two", unassigned);
    assert_eq!(Network::udp(&config).unwrap_err(), UdpError::NotLoopback { address: unassigned });
    assert_eq!(
        Network::udp(&config.expose()).unwrap_err(),
        UdpError::NotLocal { address: unassigned }
    );
    Network::udp(&UdpConfig::new().port(port).device("one", address)).unwrap();
}

#[test]
fn network_has_exactly_the_configured_devices() {
    let network = udp::network(&["one", "two"]);
    match Device::software_in(&network, "three") {
        Err(OpenError::NotFound { mut available, .. }) => {
            available.sort();
            assert_eq!(available, ["one", "two"]);
        }
        other => panic!("{other:?}"),
    }
    let (one, two) = (
        Device::software_in(&network, "one").unwrap(),
        Device::software_in(&network, "two").unwrap(),
    );
    let gid = |device: &Device| device.default_path().unwrap().1.gid;
    assert_ne!(gid(&one), gid(&two));
    assert_eq!(gid(&Device::software_in(&network, "one").unwrap()), gid(&one), "the same device");
}

#[test]
fn operations_work_over_ipv6() {
    let loopback = IpAddr::V6(Ipv6Addr::LOCALHOST);
    // There is only one loopback address, and another program may use the port.
    let network = (0..100).find_map(|offset| {
        Network::udp(&UdpConfig::new().device("one", loopback).port(UdpConfig::PORT + 100 + offset))
            .ok()
    });
    let network = network.expect("a free port of 100, and IPv6");
    run(async {
        let device = Device::software_in(&network, "one").unwrap();
        let (a, b) = (End::new(&device), End::new(&device));
        a.connect(&b);
        b.connect(&a);
        a.qp.write(a.buffer(BLOCK), b.region.grant()).await.unwrap();
        let back = a.qp.read(a.pool.try_alloc(BLOCK).unwrap(), b.region.grant()).await.unwrap();
        assert_eq!(&back[..], [7; BLOCK]);
        let counters = network.counters();
        assert!(counters.received >= 32 && counters.rejected == 0, "{counters:?}");
    });
}

fn counted(network: &Network, enough: impl Fn(&tokio_rdma::software::LinkCounters) -> bool) {
    let start = Instant::now();
    while !enough(&network.counters()) {
        assert!(start.elapsed() < HANG, "{:?}", network.counters());
        std::thread::sleep(Duration::from_millis(1));
    }
}

// Shows S4.
#[test]
fn noise_is_dropped_and_not_answered() {
    let network = udp::network(&["one"]);
    let (_device, address) = only(&network);
    let stranger = UdpSocket::bind((udp::address(), 0)).unwrap();
    let mut random = 1_u32;
    let mut byte = || {
        random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (random >> 24) as u8
    };
    let lengths = (0..64).chain([100, 1500, 4200, 9000]);
    let mut sent = 0;
    for length in lengths.filter(|&length| length > 0) {
        let noise: Vec<u8> = (0..length).map(|_| byte()).collect();
        stranger.send_to(&noise, address).unwrap();
        sent += 1;
    }
    counted(&network, |counters| counters.received >= sent);
    let counters = network.counters();
    assert_eq!((counters.received, counters.sent), (sent, 0));
    // The packets are too short for an ICRC or have a wrong one. In one of 500 runs, one is correct
    // by chance.
    assert_eq!(counters.rejected + counters.unwanted, sent, "{counters:?}");
}

// Shows S4.
#[test]
fn packets_from_disallowed_peers_are_ignored() {
    let here = udp::network(&["one"]);
    let (mine, address) = only(&here);
    let elsewhere: IpAddr = "127.0.0.200".parse().unwrap();
    let theirs =
        udp::configured(&["one"], |config| config.port(address.port()).allow(elsewhere, 32));
    run(async {
        let (a, b) = (End::new(&mine), End::new(&Device::software_in(&theirs, "one").unwrap()));
        a.connect(&b);
        b.connect(&a);
        let error = a.qp.write(a.buffer(8), b.region.grant()).await.unwrap_err();
        assert!(matches!(
            error.kind(),
            OpErrorKind::Completion(error) if error.status == WcStatus::RETRY_EXC_ERR
        ));
        // The last packet may still be in the socket.
        counted(&theirs, |counters| counters.unwanted >= 4);
        assert_eq!(theirs.counters().sent, 0);
    });
}

/// Sends with all numbers of a connection, but from another address.
// Shows S4.
#[test]
fn queue_pair_ignores_packets_from_other_addresses() {
    let (here, there, elsewhere) =
        (udp::network(&["one"]), udp::network(&["one"]), udp::network(&["one"]));
    run(async {
        let end = |network| End::new(&Device::software_in(network, "one").unwrap());
        let (a, b, stranger) = (end(&here), end(&there), end(&elsewhere));
        a.connect(&b);
        b.connect(&a);
        stranger.connect(&b);
        let error = stranger.qp.write(stranger.buffer(8), b.region.grant()).await.unwrap_err();
        assert!(matches!(
            error.kind(),
            OpErrorKind::Completion(error) if error.status == WcStatus::RETRY_EXC_ERR
        ));
        assert_eq!(b.qp.query().unwrap().0, QpState::Rts, "the connection is not affected");
        a.qp.write(a.buffer(8), b.region.grant()).await.unwrap();
    });
}

/// Lets a task receive instead of the device's thread, which must take over when no task waits.
#[test]
fn peers_are_served_while_the_receiving_runtime_is_idle() {
    for mode in [CompletionMode::Event, CompletionMode::Cooperative, CompletionMode::Hybrid] {
        let (here, there) = (udp::network(&["one"]), udp::network(&["one"]));
        let a = End::watched(&Device::software_in(&here, "one").unwrap(), mode.clone());
        let b = End::new(&Device::software_in(&there, "one").unwrap());
        a.connect(&b);
        b.connect(&a);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let write = async {
                for _ in 0..50 {
                    a.qp.write(a.buffer(8), b.region.grant()).await.unwrap();
                }
            };
            tokio::time::timeout(HANG, write).await.expect("hangs");
        });
        run(async {
            for _ in 0..50 {
                b.qp.write(b.buffer(5000), a.region.grant()).await.unwrap();
            }
        });
        let mut bytes = [0; 5000];
        a.region.read(0, &mut bytes).unwrap();
        assert_eq!(bytes, [7; 5000], "{mode:?}");
        drop(runtime);
    }
}

/// Receives in several threads and runtimes besides the device's thread.
#[test]
fn concurrent_receivers_miss_no_packet() {
    let (here, there) = (udp::network(&["one"]), udp::network(&["one"]));
    let (mine, theirs) =
        (Device::software_in(&here, "one").unwrap(), Device::software_in(&there, "one").unwrap());
    let modes = [
        CompletionMode::Event,
        CompletionMode::Event,
        CompletionMode::Cooperative,
        CompletionMode::Hybrid,
        CompletionMode::busy_poll().unwrap(),
    ];
    std::thread::scope(|scope| {
        for mode in modes {
            let (mine, theirs) = (&mine, &theirs);
            scope.spawn(move || {
                let (a, b) = (End::watched(mine, mode.clone()), End::watched(theirs, mode));
                let options = RetryConfig::default();
                a.qp.connect_with(&b.qp.endpoint(), &options).unwrap();
                b.qp.connect_with(&a.qp.endpoint(), &options).unwrap();
                run(async {
                    for round in 0..60 {
                        // Too few bytes in flight to overflow a socket.
                        let len = if round % 8 == 0 { 5000 } else { 8 };
                        let (written, read) = tokio::join!(
                            a.qp.write(a.buffer(len), b.region.grant()),
                            b.qp.read(
                                b.pool.try_alloc(len).unwrap(),
                                a.region.grant().slice(..len as u64).unwrap()
                            ),
                        );
                        written.unwrap();
                        read.unwrap();
                    }
                });
            });
        }
    });
    // No socket was full, so each packet was received.
    for (from, to) in [(&here, &there), (&there, &here)] {
        counted(to, |counters| counters.received == from.counters().sent);
    }
}

#[test]
fn many_queue_pairs_share_the_path_to_a_peer() {
    let (here, there) = (udp::network(&["one"]), udp::network(&["one"]));
    run(async {
        let (mine, theirs) = (
            Device::software_in(&here, "one").unwrap(),
            Device::software_in(&there, "one").unwrap(),
        );
        let pairs: Vec<_> = (0..48).map(|_| (End::new(&mine), End::new(&theirs))).collect();
        let mut work = tokio::task::JoinSet::new();
        for (a, b) in pairs {
            // On a busy machine, some of the 48 queue pairs are served late.
            let options = RetryConfig { timeout: AckTimeout::from_code(17), ..Default::default() };
            a.qp.connect_with(&b.qp.endpoint(), &options).unwrap();
            b.qp.connect_with(&a.qp.endpoint(), &options).unwrap();
            work.spawn(async move {
                for _ in 0..4 {
                    let (written, read) = tokio::join!(
                        a.qp.write(a.buffer(BLOCK), b.region.grant()),
                        b.qp.read(b.pool.try_alloc(BLOCK).unwrap(), a.region.grant()),
                    );
                    written.unwrap();
                    read.unwrap();
                }
                (a, b)
            });
        }
        let mut done = Vec::new();
        while let Some(pair) = work.join_next().await {
            done.push(pair.unwrap());
        }
        assert_eq!(done.len(), 48);
        println!("{:?}\n{:?}", here.counters(), there.counters());
    });
}

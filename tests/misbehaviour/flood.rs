//! Listeners under a flood of forged requests beside honest ones.

use std::future::Future;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tokio_rdma::connection::Handshake;
use tokio_rdma::software::{Network, UdpConfig};
use tokio_rdma::types::Gid;
use tokio_rdma::{Connection, Device, Listener};

const HANG: Duration = Duration::from_secs(120);

const HONEST: u32 = 24;

/// Forged requests before each honest one: in total more than a manager keeps.
const FORGED: u32 = 300;

fn run<F: Future<Output = ()>>(test: impl FnOnce() -> F) {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async { tokio::time::timeout(HANG, test()).await.expect("the test hangs") });
}

/// Sends forged requests from `sources` addresses in turn.
struct Forger {
    network: Network,
    to: SocketAddr,
    sources: u32,
    sent: u32,
}

impl Forger {
    fn send(&mut self, count: u32) {
        let handshake =
            Handshake { buffer_size: 8192, receives: 68, max_message: 1 << 20, grows: false }
                .encode(b"")
                .unwrap();
        for _ in 0..count {
            self.sent += 1;
            let from = Ipv4Addr::from(0x7f40_0000 + self.sent % self.sources);
            self.network.forge_request(Gid::from(from), self.sent, self.to, &handshake);
        }
    }
}

async fn serve_beside_forged(sources: u32) {
    let network = Network::new();
    let (server, client) = (
        Device::software_in(&network, "server").unwrap(),
        Device::software_in(&network, "client").unwrap(),
    );
    let gid = server.default_path().unwrap().1.gid;
    let listener = Listener::bind(&server, (gid.to_ip(), 0)).await.unwrap();
    let to = listener.local_addr().unwrap();
    let mut forger = Forger { network: network.clone(), to, sources, sent: 0 };
    let honest = async {
        let mut kept = Vec::new();
        for _ in 0..HONEST {
            forger.send(FORGED);
            let connection =
                Connection::connect(&client, to).await.expect("an honest client connects");
            connection.send("here").await.unwrap();
            assert_eq!(connection.recv().await.unwrap().unwrap(), "here");
            kept.push(connection);
        }
        kept
    };
    let serve = async {
        let mut kept = Vec::new();
        for _ in 0..HONEST {
            let connection = listener.accept().await.unwrap();
            let message = connection.recv().await.unwrap().unwrap();
            connection.send(message).await.unwrap();
            kept.push(connection);
        }
        kept
    };
    let (theirs, ours) = tokio::join!(honest, serve);
    let stats = listener.stats();
    assert_eq!((stats.open, stats.accepted), (HONEST, u64::from(HONEST)));
    let forged = u64::from(HONEST * FORGED);
    // One source exceeds its own limit in each round. Many sources' requests may expire before the
    // total limit is reached.
    assert!(stats.evicted <= forged && (stats.evicted > 0 || sources > 1), "{stats:?}");
    let control = network.control("server").unwrap();
    let (queue_pairs, known) = (control.queue_pairs(), control.connections());
    assert_eq!(queue_pairs, HONEST as usize, "no queue pair for unconfirmed peers");
    assert!(
        known as u64 <= forged - stats.evicted + u64::from(HONEST),
        "{known} connections known, {stats:?}"
    );
    drop((theirs, ours));
}

#[test]
fn honest_clients_are_served_during_a_flood_from_one_address() {
    run(|| serve_beside_forged(1));
}

// Shows S4.
#[test]
fn honest_clients_are_served_during_a_flood_from_200_addresses() {
    run(|| serve_beside_forged(200));
}

/// Sends forged requests over UDP at `rate` per second until `stop`. Returns their number.
fn flood(to: SocketAddr, sources: u8, rate: u32, stop: &AtomicBool) -> u32 {
    let handshake =
        Handshake { buffer_size: 8192, receives: 68, max_message: 1 << 20, grows: false }
            .encode(b"")
            .unwrap();
    let sockets: Vec<_> = (1..=sources)
        .map(|host| {
            let address = IpAddr::from([127, 99, 0, host]);
            (address, UdpSocket::bind((address, UdpConfig::PORT)).unwrap())
        })
        .collect();
    let (start, mut sent) = (Instant::now(), 0);
    while !stop.load(Ordering::Relaxed) {
        let due = (start.elapsed().as_secs_f64() * f64::from(rate)) as u32;
        while sent < due {
            let (from, socket) = &sockets[sent as usize % sockets.len()];
            let datagram = Network::forged_datagram(*from, sent + 1, to, &handshake);
            socket.send_to(&datagram, (to.ip(), UdpConfig::PORT)).unwrap();
            sent += 1;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    sent
}

async fn echo_once(client: &Device, to: SocketAddr) -> Result<(), Box<dyn std::error::Error>> {
    let connection = Connection::connect(client, to).await?;
    connection.send("here").await?;
    let message = connection.recv().await?;
    assert_eq!(message.ok_or("no message")?, "here");
    Ok(())
}

/// Measures the numbers in docs/messages.md:
/// `cargo test --release --test conformance flood -- --ignored --nocapture`
#[test]
#[ignore = "measures for a minute"]
fn measure_connect_time_during_a_udp_flood() {
    let network = |host| {
        let config = UdpConfig::new().device("one", IpAddr::from([127, 98, 0, host]));
        Device::software_in(&Network::udp(&config).unwrap(), "one").unwrap()
    };
    run(|| async {
        let (server, client) = (network(1), network(2));
        for (sources, rate) in [(0, 0), (1, 1_000), (200, 1_000), (1, 10_000), (200, 10_000)] {
            let listener =
                Listener::bind(&server, (IpAddr::from([127, 98, 0, 1]), 0)).await.unwrap();
            let (to, stop) = (listener.local_addr().unwrap(), AtomicBool::new(false));
            let (mut times, mut failed) = (Vec::new(), Vec::new());
            let honest = async {
                let start = Instant::now();
                while start.elapsed() < Duration::from_secs(8) {
                    let begun = Instant::now();
                    match echo_once(&client, to).await {
                        Ok(()) => times.push(begun.elapsed()),
                        Err(error) => failed.push((begun.elapsed(), error.to_string())),
                    }
                }
            };
            let serve = async {
                loop {
                    let connection = listener.accept().await.unwrap();
                    tokio::spawn(async move {
                        while let Ok(Some(message)) = connection.recv().await {
                            if connection.send(message).await.is_err() {
                                break;
                            }
                        }
                    });
                }
            };
            let sent = std::thread::scope(|threads| {
                let flooding =
                    threads.spawn(|| if sources > 0 { flood(to, sources, rate, &stop) } else { 0 });
                tokio::task::block_in_place(|| {
                    tokio::runtime::Handle::current().block_on(async {
                        tokio::select! {
                            () = honest => {}
                            () = serve => {}
                        }
                    });
                });
                stop.store(true, Ordering::Relaxed);
                flooding.join().unwrap()
            });
            times.sort_unstable();
            let at = |part: usize| {
                times.get(times.len().saturating_sub(1) * part / 100).copied().unwrap_or_default()
            };
            let (count, last) = (times.len(), at(100));
            eprintln!(
                "{sources} sources, {sent} forged: {count} connections, \
                 p50 {:?}, p99 {:?}, longest {last:?}; {:?}",
                at(50),
                at(99),
                listener.stats()
            );
            for (after, error) in failed {
                eprintln!("failed after {after:?}: {error}");
            }
        }
    });
}

//! Connections by address between two processes over UDP, without root or RDMA hardware.

use crate::common::udp;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::SocketAddr;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::Duration;

use crate::connected::{self, pair_in, pattern, recv};
use crate::torture::{Flavour, LONG, Mode, bounded, eventually, joined, soon};
use bytes::Bytes;
use tokio::sync::mpsc;
use tokio_rdma::cm::{self, ConnectError, Disconnection};
use tokio_rdma::op::{Recv, RetryConfig};
use tokio_rdma::types::{AckTimeout, WcStatus};
use tokio_rdma::{
    Access, BufMut, CloseReason, CompletionMode, CompletionQueue, Connection, ConnectionConfig,
    Device, EstablishError, Listener, ListenerConfig, MessageError, Pool, ProtectionDomain,
    QueuePair, RemoteRegion,
};

/// Environment variable that is set in the other process.
const ROLE: &str = "TOKIO_RDMA_CONNECTIONS_UDP";

/// Returns an ACK timeout of 0.27 s and seven retries. That suffices on a busy machine, and detects
/// a lost peer in about two seconds.
fn config() -> ConnectionConfig {
    let options =
        RetryConfig { timeout: AckTimeout::from_code(16), retry_count: 7, ..Default::default() };
    ConnectionConfig::default().retries(options)
}

fn run<F: Future<Output = ()>>(what: &'static str, test: impl FnOnce() -> F + Send + 'static) {
    bounded(what, 2 * LONG, move || Flavour::MultiThread.runtime().block_on(test()));
}

fn device() -> Device {
    Device::software_in(&udp::network(&["here"]), "here").unwrap()
}

/// The other process, which is killed on drop.
struct Peer {
    child: Child,
    /// The listener for messages.
    address: SocketAddr,
    /// The listener for plain queue pairs.
    plain: SocketAddr,
    stdin: Option<ChildStdin>,
}

impl Peer {
    fn start() -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "connections::the_peer", "--nocapture", "--test-threads=1"])
            .env(ROLE, "serve")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let stdin = child.stdin.take();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let addresses = lines
            .find_map(|line| line.unwrap().split_once("PEER ").map(|(_, rest)| rest.to_owned()));
        let addresses = addresses.expect("a line with the addresses of the other process");
        let (address, plain) = addresses.split_once(' ').unwrap();
        // Drains the pipe, so that the other process does not block.
        std::thread::spawn(move || {
            lines.for_each(|line| println!("  peer: {}", line.unwrap_or_default()))
        });
        Self { child, address: address.parse().unwrap(), plain: plain.parse().unwrap(), stdin }
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Closes standard input, which ends the process, and checks its status.
    fn finish(mut self) {
        drop(self.stdin.take());
        assert!(self.child.wait().unwrap().success());
    }

    async fn connect(
        &self,
        device: &Device,
        behaviour: &'static str,
    ) -> Result<Connection, EstablishError> {
        soon(
            "connect",
            Connection::connect_with(device, self.address, &config().user_data(behaviour)),
        )
        .await
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // Fails if the process has already ended.
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

/// Runs the other process of [`Peer::start`].
#[test]
fn the_peer() {
    if std::env::var_os(ROLE).is_none() {
        return;
    }
    Flavour::MultiThread.runtime().block_on(async {
        let device = device();
        let ip = device.default_path().unwrap().1.gid.to_ip();
        let config = ListenerConfig::new(config().user_data("from the peer")).backlog(0);
        let listener = Listener::bind_with(&device, (ip, 0), config).await.unwrap();
        let plain = cm::Listener::bind(&device, "0.0.0.0:0").await.unwrap();
        let plain_address = SocketAddr::new(ip, plain.local_addr().port());
        let mut out = std::io::stdout();
        writeln!(out, "PEER {} {plain_address}", listener.local_addr().unwrap()).unwrap();
        tokio::spawn(serve(listener));
        tokio::spawn(answer(plain, device.clone()));
        let input_closed = tokio::task::spawn_blocking(|| std::io::stdin().read(&mut [0]).unwrap());
        tokio::time::timeout(2 * LONG, input_closed)
            .await
            .expect("standard input was not closed in time")
            .unwrap();
    });
}

async fn serve(listener: Listener) {
    loop {
        let request = listener.request().await.unwrap();
        tokio::spawn(async move {
            let behaviour = request.user_data().clone();
            if behaviour == "refuse me" {
                return request.reject(b"as requested").await.unwrap();
            }
            let connection = request.accept().await.unwrap();
            match &behaviour[..] {
                b"echo" => {
                    while let Some(message) = connection.recv().await.unwrap() {
                        connection.send(message).await.unwrap();
                    }
                    connection.close().await.unwrap();
                }
                b"close" => {
                    connection.send("the last").await.unwrap();
                    connection.close().await.unwrap();
                }
                b"drop" => drop(connection.recv().await),
                b"expose" => {
                    let region = connection.expose(vec![0; 1 << 20], Access::REMOTE_ALL).unwrap();
                    connection.send(region.grant()).await.unwrap();
                    while connection.recv().await.unwrap().is_some() {}
                    connection.close().await.unwrap();
                }
                other => panic!("{other:?}"),
            }
        });
    }
}

/// Echoes the first message on plain queue pairs, then disconnects or waits for that.
async fn answer(listener: cm::Listener, device: Device) {
    let (pd, queue) = queues(&device);
    let pool = Pool::new(&pd, 4096, 64).unwrap();
    loop {
        let request = listener.accept().await.unwrap();
        let (qp, pool) =
            (request.prepare(QueuePair::builder(&pd, &queue)).build().unwrap(), pool.clone());
        tokio::spawn(async move {
            if request.private_data().starts_with(b"no") {
                return request.reject(b"no, then").await.unwrap();
            }
            let received = qp.recv(pool.alloc(4096).await.unwrap());
            let options = cm::ConnectConfig::default().private_data(b"welcome".to_vec());
            let link = request.accept(&qp, &options).await.unwrap();
            let received = received.await.unwrap();
            let disconnect = received.buffer.starts_with(b"disconnect");
            qp.send(received.buffer).await.unwrap();
            if disconnect {
                link.disconnect().await.unwrap();
            } else {
                assert_eq!(link.disconnected().await, Disconnection::Peer);
            }
        });
    }
}

fn queues(device: &Device) -> (ProtectionDomain, CompletionQueue) {
    (
        device.protection_domain().unwrap(),
        CompletionQueue::new(device, CompletionMode::Event).unwrap(),
    )
}

#[test]
fn thousand_messages_of_mixed_sizes_are_echoed() {
    run("messages", || async {
        let (peer, device) = (Peer::start(), device());
        let connection = peer.connect(&device, "echo").await.unwrap();
        assert_eq!(connection.user_data(), "from the peer");
        assert_eq!(connection.peer_addr().unwrap(), peer.address);
        // Around the MTU, a receive buffer and the longest copied message, and many packets long.
        let lengths = [
            0, 1, 5, 64, 1023, 1024, 1025, 4095, 4096, 4097, 16_384, 16_385, 65_536, 65_537,
            200_001,
        ];
        let length = |number: usize| {
            if number % 100 == 99 { 3_000_000 + number } else { lengths[number % lengths.len()] }
        };
        let sending = async {
            for number in 0..1000 {
                connection.send(pattern(length(number), number as u64)).await.unwrap();
            }
            connection.finish().unwrap();
        };
        let receiving = async {
            for number in 0..1000 {
                let message = recv(&connection).await;
                assert!(
                    message == pattern(length(number), number as u64),
                    "message {number}, {} bytes",
                    message.len()
                );
            }
            assert_eq!(soon("the end", connection.recv()).await.unwrap(), None);
        };
        tokio::join!(sending, receiving);
        soon("close", connection.close()).await.unwrap();
        eventually("a clean end", || connection.close_reason() == Some(CloseReason::Clean)).await;
        peer.finish();
    });
}

#[test]
fn many_connections_work_in_parallel_and_in_sequence() {
    run("connections", || async {
        let (peer, device) = (Peer::start(), device());
        let talk = async |number: u64| {
            let connection = peer.connect(&device, "echo").await.unwrap();
            connection.send(pattern(10_000, number)).await.unwrap();
            assert!(recv(&connection).await == pattern(10_000, number));
            soon("close", connection.close()).await.unwrap();
        };
        futures::future::join_all((0..50).map(talk)).await;
        for number in 0..50 {
            talk(number).await;
        }
        peer.finish();
    });
}

#[test]
fn either_side_may_close_or_drop_the_connection() {
    run("ends", || async {
        let (peer, device) = (Peer::start(), device());
        let closed_there = peer.connect(&device, "close").await.unwrap();
        assert_eq!(recv(&closed_there).await, "the last");
        assert_eq!(soon("the end", closed_there.recv()).await.unwrap(), None);
        soon("close", closed_there.close()).await.unwrap();

        let dropped_there = peer.connect(&device, "drop").await.unwrap();
        dropped_there.send("go").await.unwrap();
        let end = soon("the end", dropped_there.recv()).await;
        assert_eq!(end, Err(MessageError::Closed(CloseReason::Dropped)));

        let dropped_here = peer.connect(&device, "drop").await.unwrap();
        drop(dropped_here);
        let echo = peer.connect(&device, "echo").await.unwrap();
        echo.send("still there?").await.unwrap();
        assert_eq!(recv(&echo).await, "still there?");
        soon("close", echo.close()).await.unwrap();
        peer.finish();
    });
}

#[test]
fn rejections_carry_the_data_of_the_other_process() {
    run("refusals", || async {
        let (peer, device) = (Peer::start(), device());
        match peer.connect(&device, "refuse me").await {
            Err(EstablishError::Rejected { user_data, .. }) => {
                assert_eq!(&user_data[..], b"as requested")
            }
            other => panic!("{other:?}"),
        }
        // The process has no listener at this port.
        let unused = SocketAddr::new(peer.address.ip(), 1);
        match soon("refusal", Connection::connect_with(&device, unused, &config())).await {
            Err(EstablishError::Connect(ConnectError::Refused { address, in_process: false })) => {
                assert_eq!(address, unused)
            }
            other => panic!("{other:?}"),
        }
        let (pd, queue) = queues(&device);
        let route = cm::resolve(&device, peer.plain).await.unwrap();
        let qp = route.prepare(QueuePair::builder(&pd, &queue)).build().unwrap();
        let options = cm::ConnectConfig::default().private_data(b"no".to_vec());
        match soon("refusal", route.connect(&qp, &options)).await {
            Err(ConnectError::Rejected { private_data, .. }) => {
                assert_eq!(&private_data[..8], b"no, then")
            }
            other => panic!("{other:?}"),
        }
        peer.finish();
    });
}

#[test]
fn queue_pairs_exchange_private_data_and_either_side_disconnects() {
    run("queue pairs", || async {
        let (peer, device) = (Peer::start(), device());
        let (pd, queue) = queues(&device);
        let pool = Pool::new(&pd, 4096, 4).unwrap();
        for disconnects in ["here", "there"] {
            let route = cm::resolve(&device, peer.plain).await.unwrap();
            let qp = route.prepare(QueuePair::builder(&pd, &queue)).build().unwrap();
            let received = qp.recv(pool.alloc(4096).await.unwrap());
            let options = cm::ConnectConfig::default().private_data(b"good morning".to_vec());
            let link = soon("connect", route.connect(&qp, &options)).await.unwrap();
            assert_eq!(&link.private_data()[..8], b"welcome\0");
            assert_eq!(link.peer_addr(), peer.plain);
            let text = if disconnects == "there" { &b"disconnect"[..] } else { b"wait" };
            qp.send(pool.copy_from(text).unwrap()).await.unwrap();
            assert_eq!(&soon("answer", received).await.unwrap().buffer[..], text);
            if disconnects == "there" {
                assert_eq!(soon("disconnection", link.disconnected()).await, Disconnection::Peer);
            } else {
                soon("disconnect", link.disconnect()).await.unwrap();
                assert_eq!(link.disconnected().await, Disconnection::Local);
            }
            soon("timewait", link.drained()).await.unwrap();
        }
        peer.finish();
    });
}

#[test]
fn peer_process_memory_is_read_and_written_alongside_messages() {
    run("memory", || async {
        let (peer, device) = (Peer::start(), device());
        let connection = peer.connect(&device, "expose").await.unwrap();
        let remote = RemoteRegion::from_bytes(&recv(&connection).await).unwrap();
        let most = remote.len() as usize;
        for (at, len) in [1, 8, 1023, 1024, 1025, 4096, 4097, 100_000, most].into_iter().enumerate()
        {
            let text = pattern(len, at as u64);
            let there = remote.slice(..len as u64).unwrap();
            let written = connection.write(connection.copy_from(&text).unwrap(), there);
            soon("write", written).await.unwrap();
            let found = soon("read", connection.read(connection.try_alloc(len).unwrap(), there))
                .await
                .unwrap();
            assert!(found[..] == text[..], "{len} bytes");
        }
        let counter = remote.slice(..8).unwrap();
        let before = soon("add", connection.fetch_add(counter, 2)).await.unwrap();
        assert_eq!(
            soon("swap", connection.compare_swap(counter, before + 2, 7)).await.unwrap(),
            before + 2
        );
        assert_eq!(soon("add", connection.fetch_add(counter, 0)).await.unwrap(), 7);
        soon("close", connection.close()).await.unwrap();
        peer.finish();
    });
}

/// Connects a plain queue pair with a receive in flight.
async fn idle(
    peer: &Peer,
    device: &Device,
    options: &cm::ConnectConfig,
) -> (cm::CmConnection, QueuePair, Recv<BufMut>) {
    let (pd, queue) = queues(device);
    let pool = Pool::new(&pd, 4096, 4).unwrap();
    let route = cm::resolve(device, peer.plain).await.unwrap();
    let qp = route.prepare(QueuePair::builder(&pd, &queue)).build().unwrap();
    let waits = qp.recv(pool.alloc(4096).await.unwrap());
    let link = soon("connect", route.connect(&qp, options)).await.unwrap();
    (link, qp, waits)
}

#[test]
fn keepalive_detects_a_killed_idle_process() {
    run("killed while idle", || async {
        for signal in ["TERM", "KILL"] {
            let (mut peer, device) = (Peer::start(), device());
            let transport = RetryConfig {
                timeout: AckTimeout::from_code(13),
                retry_count: 7,
                ..Default::default()
            };
            let options = cm::ConnectConfig::default()
                .retries(transport)
                .keepalive(Some(Duration::from_millis(50)));
            let (link, qp, waits) = idle(&peer, &device, &options).await;
            eventually("probes", || qp.send_counters().posted >= 2).await;
            assert!(link.is_connected());
            let pid = peer.child.id().to_string();
            assert!(
                Command::new("kill").args([format!("-{signal}"), pid]).status().unwrap().success()
            );
            peer.child.wait().unwrap();
            let error = soon("the receive", waits).await.unwrap_err();
            assert_eq!(error.kind().status(), Some(WcStatus::WR_FLUSH_ERR), "SIG{signal}");
            assert_eq!(
                soon("the end", link.disconnected()).await,
                Disconnection::Silent,
                "SIG{signal}"
            );
        }
    });
}

#[test]
fn returning_from_main_disconnects_the_peers() {
    run("returned", || async {
        let (peer, device) = (Peer::start(), device());
        let (link, _qp, waits) = idle(&peer, &device, &cm::ConnectConfig::default()).await;
        let connection = peer.connect(&device, "echo").await.unwrap();
        peer.finish();
        assert_eq!(soon("the end", link.disconnected()).await, Disconnection::Peer);
        soon("the receive", waits).await.unwrap_err();
        soon("the end of messages", connection.recv()).await.unwrap_err();
    });
}

#[test]
fn killed_peer_fails_connections_and_a_new_peer_is_reachable() {
    run("kill", || async {
        let (mut peer, device) = (Peer::start(), device());
        let (echo, idle) = (
            peer.connect(&device, "echo").await.unwrap(),
            peer.connect(&device, "echo").await.unwrap(),
        );
        echo.send("there?").await.unwrap();
        assert_eq!(recv(&echo).await, "there?");
        peer.kill();
        // Sends succeed until the retries are exceeded.
        let end = soon("the end", async {
            loop {
                if let Err(error) = echo.send(pattern(100, 1)).await {
                    return error;
                }
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        });
        let error = end.await;
        assert!(matches!(error, MessageError::Closed(CloseReason::Operation(_))), "{error:?}");
        is_refused(soon("refusal", Connection::connect(&device, peer.address)).await);
        drop((echo, idle));
        let next = Peer::start();
        let echo = next.connect(&device, "echo").await.unwrap();
        echo.send("a new peer?").await.unwrap();
        assert_eq!(recv(&echo).await, "a new peer?");
        soon("close", echo.close()).await.unwrap();
        next.finish();
    });
}

/// Asserts that the host has refused the request, because no process has the port.
#[track_caller]
fn is_refused(connected: Result<Connection, EstablishError>) {
    match connected {
        Err(EstablishError::Connect(error @ ConnectError::Unreachable { errno: 111, .. })) => {
            assert_eq!(error.io_kind(), std::io::ErrorKind::ConnectionRefused);
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn address_without_a_process_refuses_and_other_connections_lose_nothing() {
    run("unused address", || async {
        let network = udp::network(&["one", "two"]);
        let [(device, pd), (_, far)] = connected::two(&network);
        let (ours, theirs) = pair_in(&pd, &far, &config(), &config());
        for number in 0..20 {
            let unused = SocketAddr::new(udp::address(), 7471);
            let request = async {
                ours.send(vec![number; 10_000]).await.unwrap();
                assert_eq!(recv(&theirs).await, vec![number; 10_000]);
            };
            let connecting = Connection::connect(&device, unused);
            is_refused(soon("refusal", async { tokio::join!(connecting, request).0 }).await);
        }
        assert_eq!(network.counters().lost, 0);
        let outside = "192.0.2.1:7471".parse::<SocketAddr>().unwrap();
        match soon("no route", cm::resolve(&device, outside)).await {
            Err(ConnectError::Resolve { address, .. }) => assert_eq!(address, outside),
            other => panic!("{other:?}"),
        }
    });
}

#[test]
fn message_that_arrives_while_the_runtime_is_blocked_is_received() {
    for mode in Mode::ALL {
        bounded("blocked runtime", LONG, move || {
            Flavour::CurrentThread.runtime().block_on(async {
                // No timer wakes the driver.
                let config = config().mode(mode.make()).keepalive(None).shrink_after(2 * LONG);
                let [one, other] = [(); 2].map(|()| device().protection_domain().unwrap());
                let (ours, theirs) = pair_in(&one, &other, &config, &config);
                let (received, mut numbers) = mpsc::unbounded_channel();
                let receiving = tokio::spawn(async move {
                    while let Some(number) = theirs.recv().await.unwrap() {
                        received.send(number).unwrap();
                    }
                });
                for number in 0..10 {
                    let message = Bytes::from(vec![number; 10]);
                    ours.send(message.clone()).await.unwrap();
                    if number % 2 == 1 {
                        // The thread of the device receives meanwhile.
                        std::thread::sleep(Duration::from_millis(20));
                    }
                    assert_eq!(soon("a message", numbers.recv()).await, Some(message));
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
                ours.finish().unwrap();
                joined(receiving).await;
            });
        });
    }
}

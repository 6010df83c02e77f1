//! Two processes on one machine that meet by address and talk RoCE v2 over UDP: the whole stack, from the connection manager's
//! messages to those of a service. No root, no RDMA. The other process is this test binary again, see `the_peer`.

use crate::common::udp;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::SocketAddr;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::Duration;

use crate::connected::{pattern, recv};
use crate::torture::{Flavour, LONG, bounded, eventually, soon};
use tokio_rdma::cm::{self, ConnectError, Disconnection};
use tokio_rdma::op::{ConnectOptions, Recv};
use tokio_rdma::types::{AckTimeout, WcStatus};
use tokio_rdma::{
    Access, BufMut, CloseReason, CompletionMode, CompletionQueue, Connection, ConnectionConfig,
    Device, EstablishError, Listener, MessageError, Pool, ProtectionDomain, QueuePair,
    RemoteRegion,
};

/// Set in the other process.
const ROLE: &str = "TOKIO_RDMA_CONNECTIONS_UDP";

/// 33 ms, seven times: a machine with other things to do is no peer that is gone, and one that is gone is found out in a
/// second or so.
fn config() -> ConnectionConfig {
    let options =
        ConnectOptions { timeout: AckTimeout::from_code(13), retry_count: 7, ..Default::default() };
    ConnectionConfig::default().options(options)
}

fn run<F: Future<Output = ()>>(what: &'static str, test: impl FnOnce() -> F + Send + 'static) {
    bounded(what, 2 * LONG, move || Flavour::MultiThread.runtime().block_on(test()));
}

/// A device of this process, at an address of its own.
fn device() -> Device {
    Device::software_in(&udp::network(&["here"]), "here").unwrap()
}

/// The other process, and where it listens. It ends when this is dropped.
struct Peer {
    child: Child,
    /// Of messages.
    address: SocketAddr,
    /// Of queue pairs without any.
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
        let said = lines
            .find_map(|line| line.unwrap().split_once("PEER ").map(|(_, rest)| rest.to_owned()));
        let said = said.expect("the other process says where it is");
        let (address, plain) = said.split_once(' ').unwrap();
        // What it says later must go somewhere.
        std::thread::spawn(move || {
            lines.for_each(|line| println!("  peer: {}", line.unwrap_or_default()))
        });
        Self { child, address: address.parse().unwrap(), plain: plain.parse().unwrap(), stdin }
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// It ends as it should.
    fn finish(mut self) {
        drop(self.stdin.take());
        assert!(self.child.wait().unwrap().success());
    }

    async fn connect(
        &self,
        device: &Device,
        wish: &'static str,
    ) -> Result<Connection, EstablishError> {
        soon("connect", Connection::connect_with(device, self.address, &config().user_data(wish)))
            .await
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // Fails if it has ended, which is as well.
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

/// The other process; of no use alone.
#[test]
fn the_peer() {
    if std::env::var_os(ROLE).is_none() {
        return;
    }
    Flavour::MultiThread.runtime().block_on(async {
        let device = device();
        let ip = device.default_path().unwrap().1.gid.to_ip();
        let listener = Listener::bind_with(&device, (ip, 0), &config().user_data("from the peer"))
            .await
            .unwrap();
        // The unspecified address is that of the device.
        let plain = cm::Listener::bind(&device, "0.0.0.0:0").await.unwrap();
        let plain_address = SocketAddr::new(ip, plain.local_addr().port());
        let mut out = std::io::stdout();
        writeln!(out, "PEER {} {plain_address}", listener.local_addr()).unwrap();
        tokio::spawn(serve(listener));
        tokio::spawn(answer(plain, device.clone()));
        let told = tokio::task::spawn_blocking(|| std::io::stdin().read(&mut [0]).unwrap());
        tokio::time::timeout(2 * LONG, told)
            .await
            .expect("the other process is forgotten")
            .unwrap();
    });
}

/// Does for each connection what it wishes.
async fn serve(listener: Listener) {
    loop {
        let request = listener.request().await.unwrap();
        tokio::spawn(async move {
            let wish = request.user_data().clone();
            if wish == "refuse me" {
                return request.reject(b"as you wish").await.unwrap();
            }
            let connection = request.accept().await.unwrap();
            match &wish[..] {
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

/// Queue pairs without a protocol: each first message is sent back, and a goodbye answered.
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
            let options = cm::Options::default().private_data(b"welcome".to_vec());
            let link = request.accept(&qp, &options).await.unwrap();
            let received = received.await.unwrap();
            let leave = received.buffer.starts_with(b"leave");
            qp.send(received.buffer).await.unwrap();
            if leave {
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
fn a_thousand_messages_of_mixed_sizes_go_and_come_back() {
    run("messages", || async {
        let (peer, device) = (Peer::start(), device());
        let connection = peer.connect(&device, "echo").await.unwrap();
        assert_eq!(connection.user_data(), "from the peer");
        assert_eq!(connection.peer_addr(), Some(peer.address));
        // Up to 8 KiB into a receive, above fetched; around the MTU, and several times it.
        let lengths =
            [0, 1, 5, 64, 1023, 1024, 1025, 4095, 4096, 4097, 8192, 8193, 20_000, 65_536, 200_001];
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
fn many_connections_at_once_and_one_after_the_other() {
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
fn either_side_may_end_it_cleanly_or_not() {
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
        // The other process is as before.
        let echo = peer.connect(&device, "echo").await.unwrap();
        echo.send("still there?").await.unwrap();
        assert_eq!(recv(&echo).await, "still there?");
        soon("close", echo.close()).await.unwrap();
        peer.finish();
    });
}

#[test]
fn requests_are_refused_with_what_the_other_side_has_to_say() {
    run("refusals", || async {
        let (peer, device) = (Peer::start(), device());
        match peer.connect(&device, "refuse me").await {
            Err(EstablishError::Rejected { user_data, .. }) => {
                assert_eq!(&user_data[..], b"as you wish")
            }
            other => panic!("{other:?}"),
        }
        // The process is there, and nobody in it listens.
        let nobody = SocketAddr::new(peer.address.ip(), 1);
        match soon("refusal", Connection::connect_with(&device, nobody, &config())).await {
            Err(EstablishError::Connect(ConnectError::Refused { address })) => {
                assert_eq!(address, nobody)
            }
            other => panic!("{other:?}"),
        }
        // Without messages.
        let (pd, queue) = queues(&device);
        let route = cm::resolve(&device, peer.plain).await.unwrap();
        let qp = route.prepare(QueuePair::builder(&pd, &queue)).build().unwrap();
        let options = cm::Options::default().private_data(b"no".to_vec());
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
fn queue_pairs_meet_with_private_data_and_part_from_either_side() {
    run("queue pairs", || async {
        let (peer, device) = (Peer::start(), device());
        let (pd, queue) = queues(&device);
        let pool = Pool::new(&pd, 4096, 4).unwrap();
        for leaves in ["here", "there"] {
            let route = cm::resolve(&device, peer.plain).await.unwrap();
            let qp = route.prepare(QueuePair::builder(&pd, &queue)).build().unwrap();
            let received = qp.recv(pool.alloc(4096).await.unwrap());
            let options = cm::Options::default().private_data(b"good morning".to_vec());
            let link = soon("connect", route.connect(&qp, &options)).await.unwrap();
            assert_eq!(&link.private_data()[..8], b"welcome\0");
            assert_eq!(link.peer_addr(), peer.plain);
            let text = if leaves == "there" { &b"leave"[..] } else { b"stay" };
            qp.send(pool.copy_from(text).unwrap()).await.unwrap();
            assert_eq!(&soon("answer", received).await.unwrap().buffer[..], text);
            if leaves == "there" {
                assert_eq!(soon("goodbye", link.disconnected()).await, Disconnection::Peer);
            } else {
                soon("goodbye", link.disconnect()).await.unwrap();
                assert_eq!(link.disconnected().await, Disconnection::Local);
            }
            soon("timewait", link.drained()).await.unwrap();
        }
        peer.finish();
    });
}

#[test]
fn memory_of_the_other_process_is_read_and_written_beside_messages() {
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
            let found =
                soon("read", connection.read(connection.alloc(len).unwrap(), there)).await.unwrap();
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

/// A link without messages to the other process, idle, with a receive that waits.
async fn idle(
    peer: &Peer,
    device: &Device,
    options: &cm::Options,
) -> (cm::Link, QueuePair, Recv<BufMut>) {
    let (pd, queue) = queues(device);
    let pool = Pool::new(&pd, 4096, 4).unwrap();
    let route = cm::resolve(device, peer.plain).await.unwrap();
    let qp = route.prepare(QueuePair::builder(&pd, &queue)).build().unwrap();
    let waits = qp.recv(pool.alloc(4096).await.unwrap());
    let link = soon("connect", route.connect(&qp, options)).await.unwrap();
    (link, qp, waits)
}

#[test]
fn process_that_is_killed_while_nothing_is_in_flight_is_noticed_by_keepalive() {
    run("killed while idle", || async {
        for signal in ["TERM", "KILL"] {
            let (mut peer, device) = (Peer::start(), device());
            let transport = ConnectOptions {
                timeout: AckTimeout::from_code(13),
                retry_count: 7,
                ..Default::default()
            };
            let options = cm::Options::default()
                .transport(transport)
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
fn process_that_returns_from_main_disconnects_its_peers() {
    run("returned", || async {
        let (peer, device) = (Peer::start(), device());
        let (link, _qp, waits) = idle(&peer, &device, &cm::Options::default()).await;
        let connection = peer.connect(&device, "echo").await.unwrap();
        peer.finish();
        assert_eq!(soon("the end", link.disconnected()).await, Disconnection::Peer);
        soon("the receive", waits).await.unwrap_err();
        soon("the end of messages", connection.recv()).await.unwrap_err();
    });
}

#[test]
fn peer_that_is_killed_is_an_error_and_its_address_can_be_used_again() {
    run("kill", || async {
        let (mut peer, device) = (Peer::start(), device());
        let (echo, idle) = (
            peer.connect(&device, "echo").await.unwrap(),
            peer.connect(&device, "echo").await.unwrap(),
        );
        echo.send("there?").await.unwrap();
        assert_eq!(recv(&echo).await, "there?");
        peer.kill();
        // Until its retries are over, sends are only on their way.
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
        // Nobody is there any more, and nobody answers.
        let hasty = config().connect_timeout(Duration::from_millis(500));
        match soon("no answer", Connection::connect_with(&device, peer.address, &hasty)).await {
            Err(EstablishError::Connect(ConnectError::TimedOut { .. })) => {}
            other => panic!("{other:?}"),
        }
        // Another process knows nothing of the old connections.
        drop((echo, idle));
        let next = Peer::start();
        let echo = next.connect(&device, "echo").await.unwrap();
        echo.send("who is there?").await.unwrap();
        assert_eq!(recv(&echo).await, "who is there?");
        soon("close", echo.close()).await.unwrap();
        next.finish();
    });
}

#[test]
fn address_of_nobody_is_given_up_at_the_deadline() {
    run("nobody", || async {
        let device = device();
        let nobody = SocketAddr::new(udp::address(), 7471);
        let after = Duration::from_millis(1_500);
        match soon(
            "no answer",
            Connection::connect_with(&device, nobody, &config().connect_timeout(after)),
        )
        .await
        {
            Err(EstablishError::Connect(ConnectError::TimedOut { .. })) => {}
            other => panic!("{other:?}"),
        }
        // A loopback device has no way to other hosts.
        let outside = "192.0.2.1:7471".parse::<SocketAddr>().unwrap();
        match soon("no route", cm::resolve(&device, outside)).await {
            Err(ConnectError::Resolve { address, .. }) => assert_eq!(address, outside),
            other => panic!("{other:?}"),
        }
    });
}

//! Connections over a simulated network, run by `software::drive`.

use std::io::ErrorKind;
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::runtime::Builder;
use tokio_rdma::software::{self, Faults, LinkCounters, Network};
use tokio_rdma::types::WcStatus;
use tokio_rdma::{
    Access, CloseReason, CompletionMode, Connection, ConnectionConfig, Device, Listener,
    MessageError, RdmaListener, RdmaStream, RemoteRegion,
};

use super::chance::noise;
use crate::torture::HANG;

/// Runs `test` on a current-thread runtime; fails if it hangs.
fn driven<T>(network: &Network, test: impl Future<Output = T>) -> T {
    let runtime = Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let driven = software::drive(network, test);
        tokio::time::timeout(HANG, driven).await.expect("hangs")
    })
}

fn config(mode: &CompletionMode) -> ConnectionConfig {
    // Without `preallocate`, a thread would register memory for messages, at any time.
    ConnectionConfig::default().mode(mode.clone()).preallocate(true)
}

struct Nodes {
    network: Network,
    devices: [Device; 2],
}

impl Nodes {
    fn new(seed: u64, faults: Faults) -> Self {
        let network = Network::simulated(seed, faults);
        let devices = ["server", "client"].map(|name| Device::software_in(&network, name).unwrap());
        Self { network, devices }
    }

    /// Returns the server's and the client's end.
    async fn connect(&self, mode: &CompletionMode) -> [Connection; 2] {
        let [server, client] = &self.devices;
        let address = (server.default_path().unwrap().1.gid.to_ip(), 0);
        let listener = Listener::bind_with(server, address, &config(mode)).await.unwrap();
        let config = config(mode);
        let connecting = Connection::connect_with(client, listener.local_addr().unwrap(), &config);
        let (server, client) = tokio::try_join!(listener.accept(), connecting).unwrap();
        [server, client]
    }

    fn link(&self, from: &str, to: &str) -> software::LinkControl {
        self.network.link(from, to).unwrap()
    }
}

fn lossy() -> Faults {
    let delay = Duration::from_micros(2)..Duration::from_micros(20);
    Faults::none().loss(0.03).duplicate(0.02).reorder(0.02).corrupt(0.01).delay(delay)
}

/// The results that two runs with one seed have in common.
#[derive(Debug, PartialEq, Eq)]
struct Run {
    now: Duration,
    link: LinkCounters,
    counters: [u64; 4],
}

fn exchange(seed: u64, mode: &CompletionMode) -> Run {
    const MESSAGES: usize = 60;
    let nodes = Nodes::new(seed, lossy());
    let counters = driven(&nodes.network, async {
        let [server, client] = nodes.connect(mode).await;
        let region = server.expose(vec![0; 4096], Access::REMOTE_ALL).unwrap();
        server.send(region.grant()).await.unwrap();
        let grant = client.recv().await.unwrap().unwrap();
        let remote = RemoteRegion::from_bytes(&grant).unwrap();
        let message = |number: usize| &noise()[number * 100..][..number * 997 % 8000];
        let receive = client.clone();
        let echo = tokio::spawn(async move {
            while let Some(message) = server.recv().await.unwrap() {
                server.send(message).await.unwrap();
            }
            server.close().await.unwrap();
            server
        });
        let received = tokio::spawn(async move {
            for number in 0..MESSAGES {
                assert!(receive.recv().await.unwrap().unwrap() == message(number));
            }
            assert_eq!(receive.recv().await, Ok(None));
        });
        for number in 0..MESSAGES {
            client.send(message(number)).await.unwrap();
        }
        client.finish().unwrap();
        received.await.unwrap();
        client.close().await.unwrap();
        let server = echo.await.unwrap();
        assert!(client.write_inline(b"late", remote.slice(..4).unwrap()).await.is_err());
        let of = |connection: &Connection| connection.counters();
        [of(&client).acks, of(&client).received, of(&server).acks, of(&server).received]
    });
    Run { now: nodes.network.now(), link: nodes.network.counters(), counters }
}

#[test]
fn seed_determines_a_run_of_connections() {
    for mode in [CompletionMode::Event, CompletionMode::Cooperative] {
        let mut times = Vec::new();
        for seed in 0..8 {
            let run = exchange(seed, &mode);
            assert!(run.link.lost > 0, "{run:?}");
            assert_eq!(exchange(seed, &mode), run, "seed {seed}, {mode:?}");
            times.push(run.now);
        }
        times.sort_unstable();
        times.dedup();
        assert!(times.len() > 4, "the seed has no effect: {times:?}");
    }
}

fn is_unreachable(reason: CloseReason) -> bool {
    let CloseReason::Operation(kind) = reason else { return false };
    kind.status() == Some(WcStatus::RETRY_EXC_ERR)
}

/// Does the same with Tokio's clock paused.
fn driven_and_paused<T>(network: &Network, test: impl Future<Output = T>) -> T {
    let runtime = Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
    runtime.block_on(software::drive(network, test))
}

#[test]
fn keepalive_ends_a_silent_partition_in_virtual_time() {
    let run = |paused: bool| {
        let nodes = Nodes::new(1, Faults::none());
        let test = async {
            let [server, client] = nodes.connect(&CompletionMode::Event).await;
            nodes.network.partition("client", "server").unwrap();
            let begin = software::now();
            let (ours, theirs) = tokio::join!(client.closed(), server.closed());
            assert!(is_unreachable(ours) && is_unreachable(theirs), "{ours:?}, {theirs:?}");
            software::now() - begin
        };
        let after = if paused {
            driven_and_paused(&nodes.network, test)
        } else {
            driven(&nodes.network, test)
        };
        // The interval, then the retransmissions of the `Ping`, which end before its timeout.
        assert!((Duration::from_secs(10)..Duration::from_secs(15)).contains(&after), "{after:?}");
        (after, nodes.network.now())
    };
    assert_eq!(run(false), run(false));
    assert_eq!(run(true), run(true));
}

#[test]
fn writes_to_a_dropped_stream_fail_after_a_round_trip() {
    let nodes = Nodes::new(41, Faults::none());
    driven(&nodes.network, async {
        let [server, client] = &nodes.devices;
        let address = (server.default_path().unwrap().1.gid.to_ip(), 0);
        let config = ConnectionConfig::for_streams().preallocate(true);
        let listener = RdmaListener::bind_with(server, address, &config).await.unwrap();
        let address = listener.local_addr().unwrap();
        let connecting = RdmaStream::connect_with(client, address, &config);
        let ((mut server, _), mut client) =
            tokio::try_join!(listener.accept(), connecting).unwrap();
        server.write_all(b"answer").await.unwrap();
        drop(server);
        client.readable().await.unwrap();
        // As with TCP, the answer to the bytes ends the writes, and not the end of the linger time.
        let start = software::now();
        let mut error = None;
        for _ in 0..10_000 {
            error = client.write_all(&[7; 1000]).await.err();
            if error.is_some() {
                break;
            }
        }
        let error = error.expect("the dropped stream takes bytes");
        assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{error}");
        assert!(software::now() - start < Duration::from_millis(100), "it lingers for 1 s");
        let mut answer = Vec::new();
        client.read_to_end(&mut answer).await.unwrap();
        assert_eq!(answer, b"answer");
        assert_eq!(client.closed().await, CloseReason::Dropped);
    });
}

#[test]
fn default_settings_outlast_an_outage_of_five_seconds() {
    for mode in [CompletionMode::Event, CompletionMode::Cooperative] {
        // At each of its times, `keepalive` asks or does not ask during the outage.
        for second in 0..8 {
            let nodes = Nodes::new(second, Faults::none());
            driven(&nodes.network, async {
                let [server, client] = nodes.connect(&mode).await;
                let start = software::now() + Duration::from_secs(second);
                until(start).await;
                nodes.network.partition("client", "server").unwrap();
                client.send("during the outage").await.unwrap();
                until(start + Duration::from_secs(5)).await;
                nodes.network.heal("client", "server").unwrap();
                assert!(server.recv().await.unwrap().is_some());
                until(start + Duration::from_secs(30)).await;
                assert_eq!((client.close_reason(), server.close_reason()), (None, None));
            });
        }
    }
}

/// Waits until an instant of virtual time.
async fn until(instant: std::time::Instant) {
    while software::now() < instant {
        tokio::task::yield_now().await;
    }
}

#[test]
fn paused_clock_of_tokio_advances_with_the_network() {
    let nodes = Nodes::new(3, lossy());
    driven_and_paused(&nodes.network, async {
        let [server, client] = nodes.connect(&CompletionMode::Event).await;
        let (begin, tokio) = (software::now(), tokio::time::Instant::now());
        let pause = Duration::from_secs(3600);
        let sends = tokio::spawn(async move {
            for _ in 0..3 {
                tokio::time::sleep(pause).await;
                let before = software::now();
                client.send("hourly").await.unwrap();
                assert!(client.recv().await.unwrap().is_some());
                assert!(
                    software::now() - before < Duration::from_secs(10),
                    "an echo took too long"
                );
            }
        });
        for _ in 0..3 {
            let message = server.recv().await.unwrap().unwrap();
            server.send(message).await.unwrap();
        }
        sends.await.unwrap();
        let (ours, theirs) = (software::now() - begin, tokio.elapsed());
        assert!(ours > 3 * pause && ours < 3 * pause + Duration::from_secs(30), "{ours:?}");
        assert!(ours.abs_diff(theirs) < Duration::from_millis(2), "{ours:?}, {theirs:?}");
        let limit = tokio::time::timeout(pause, server.recv());
        let end = limit.await;
        assert_eq!(end.unwrap(), Err(MessageError::Closed(CloseReason::Dropped)));
    });
}

#[test]
fn leases_and_deadlines_follow_virtual_time() {
    let nodes = Nodes::new(1, Faults::none());
    driven(&nodes.network, async {
        let [server, client] = nodes.connect(&CompletionMode::Event).await;
        let region = server.expose(vec![0; 64], Access::REMOTE_ALL | Access::MW_BIND).unwrap();
        let mut lease = server.lease(&region, 0..64, Access::REMOTE_WRITE).await.unwrap();
        let hour = Duration::from_secs(3600);
        lease.expire_at(software::now() + hour).unwrap();
        let begin = software::now();
        client.write_inline(b"granted", lease.grant().slice(..7).unwrap()).await.unwrap();
        assert!(software::now() - begin < Duration::from_secs(1));
        lease.expired().await;
        assert!(software::now() - begin >= hour);
        let refused = client.write_inline(b"revoked", lease.grant().slice(..7).unwrap()).await;
        assert!(refused.is_err());
        let waited = server.recv().await;
        assert!(waited.is_err(), "the refusal has failed the connection: {waited:?}");
    });
}

#[test]
fn partition_fails_both_sides_after_their_retries_in_virtual_time() {
    let nodes = Nodes::new(1, Faults::none());
    driven(&nodes.network, async {
        let [server, client] = nodes.connect(&CompletionMode::Event).await;
        client.send("before").await.unwrap();
        assert_eq!(server.recv().await.unwrap().as_deref(), Some(&b"before"[..]));
        nodes.network.partition("client", "server").unwrap();
        client.send("lost").await.unwrap();
        server.send("lost").await.unwrap();
        let (ours, theirs) = tokio::join!(client.closed(), server.closed());
        assert!(is_unreachable(ours) && is_unreachable(theirs), "{ours:?}, {theirs:?}");
        assert_eq!(server.recv().await.unwrap_err(), theirs.into());
    });
    let took = nodes.network.now();
    assert!(took > Duration::from_millis(100), "{took:?} for all retries");
}

#[test]
fn partition_that_heals_in_time_loses_nothing_and_spares_other_nodes() {
    let nodes = Nodes::new(1, Faults::none());
    let third = Device::software_in(&nodes.network, "third").unwrap();
    driven(&nodes.network, async {
        let mode = CompletionMode::Event;
        let [server, client] = nodes.connect(&mode).await;
        let [server, third] = {
            let address = (nodes.devices[0].default_path().unwrap().1.gid.to_ip(), 0);
            let listener = Listener::bind(&nodes.devices[0], address).await.unwrap();
            let connecting = Connection::connect(&third, listener.local_addr().unwrap());
            let (accepted, third) = tokio::try_join!(listener.accept(), connecting).unwrap();
            nodes.network.partition("client", "server").unwrap();
            client.send("delayed").await.unwrap();
            third.send("not delayed").await.unwrap();
            let received = accepted.recv().await.unwrap();
            assert_eq!(received.as_deref(), Some(&b"not delayed"[..]));
            assert_eq!(server.counters().inbox, 0, "nothing crosses the partition");
            [server, third]
        };
        drop(third);
        nodes.network.heal("server", "client").unwrap();
        assert_eq!(server.recv().await.unwrap().as_deref(), Some(&b"delayed"[..]));
        assert_eq!(tokio::join!(server.close(), client.close()), (Ok(()), Ok(())));
    });
}

#[test]
fn loss_in_one_direction_lets_the_other_pass() {
    let nodes = Nodes::new(1, Faults::none());
    driven(&nodes.network, async {
        let [server, client] = nodes.connect(&CompletionMode::Event).await;
        nodes.link("server", "client").set_loss(1.0);
        client.send("arrives without an acknowledgement").await.unwrap();
        assert!(server.recv().await.unwrap().is_some());
        let lost = client.closed().await;
        assert!(is_unreachable(lost), "{lost:?}");
    });
}

#[test]
fn each_single_loss_is_repaired() {
    let run = |lost: Option<(&str, &str, u64)>| {
        let nodes = Nodes::new(1, Faults::none());
        let sent = driven(&nodes.network, async {
            let [server, client] = nodes.connect(&CompletionMode::Cooperative).await;
            if let Some((from, to, n)) = lost {
                nodes.link(from, to).lose(n);
            }
            let before = ["server", "client"].map(|name| nodes.link(name, other(name)).sent());
            for number in 0..3 {
                client.send(vec![number; 5000]).await.unwrap();
                let message = server.recv().await.unwrap().unwrap();
                server.send(message).await.unwrap();
                assert_eq!(client.recv().await.unwrap().unwrap(), vec![number; 5000]);
            }
            let after = ["server", "client"].map(|name| nodes.link(name, other(name)).sent());
            assert_eq!(tokio::join!(server.close(), client.close()), (Ok(()), Ok(())));
            [after[0] - before[0], after[1] - before[1]]
        });
        assert_eq!(nodes.network.counters().lost, u64::from(lost.is_some()));
        sent
    };
    let counts = run(None);
    assert!(counts.iter().all(|&count| count > 6), "{counts:?}");
    for (from, count) in ["server", "client"].into_iter().zip(counts) {
        for n in 1..=count {
            run(Some((from, other(from), n)));
        }
    }
}

fn other(name: &str) -> &'static str {
    if name == "server" { "client" } else { "server" }
}

#[test]
fn unknown_devices_have_no_link() {
    let network = Network::new();
    let _device = Device::software_in(&network, "known").unwrap();
    for (from, to) in [("known", "unknown"), ("unknown", "known")] {
        let error = network.link(from, to).unwrap_err();
        assert!(error.to_string().contains("\"unknown\" not found"), "{error}");
        assert!(network.partition(from, to).is_err() && network.heal(from, to).is_err());
    }
    assert_eq!(network.link("known", "known").unwrap().sent(), 0);
}

//! Peers that break the protocol with invalid handshakes and frames, by silence, and by access to
//! memory that is not granted.
//!
//! Each connection closes with a reason within a time limit, without a panic or exposed memory.

use std::time::Duration;

use crate::connected::{self, config, pattern, recv, two};
use crate::torture::{Flavour, LONG, Seed, bounded, eventually, soon};
use futures::{FutureExt, StreamExt};
use tokio_rdma::connection::{Handshake, HandshakeError, RefusalReason, Violation};
use tokio_rdma::software::{Faults, Network, drive};
use tokio_rdma::types::{Imm, Rkey, WcStatus};
use tokio_rdma::{
    Access, CloseReason, CompletionMode, CompletionQueue, Connection, ConnectionConfig, Device,
    EstablishError, Listener, ListenerConfig, MessageError, Pool, ProtectionDomain, QueuePair,
    RemoteRegion, cm,
};

/// A plain queue pair with receives, controlled by the test.
struct Peer {
    qp: QueuePair,
    pool: Pool,
    receives: Vec<tokio_rdma::op::Recv<tokio_rdma::BufMut>>,
    _pd: ProtectionDomain,
    _device: Device,
}

const HANDSHAKE: Handshake =
    Handshake { buffer_size: 4096, receives: 68, max_message: 1 << 20, grows: false };

const DATA: u32 = 0;
const OFFER: u32 = 1;
const ACK: u32 = 2;
const PING: u32 = 3;
const FIN: u32 = 4;
const ABORT: u32 = 5;
const PART: u32 = 6;
const RESIZE: u32 = 7;

fn header(kind: u32, released: u32, done: u32) -> Imm {
    Imm(kind << 29 | released << 14 | done)
}

impl Peer {
    async fn send(&self, payload: &[u8], imm: Imm) {
        let sent = self.qp.with_imm(imm).send(self.pool.copy_from(payload).unwrap());
        // The send may fail. The test checks the other end.
        drop(soon("send", sent).await);
    }

    /// Receives a frame: payload and header.
    async fn recv(&mut self) -> (Vec<u8>, u32) {
        let received = soon("frame", self.receives.remove(0)).await.unwrap();
        (received.buffer.to_vec(), received.imm.unwrap().0)
    }
}

fn connect_peer(network: &Network, config: &ConnectionConfig) -> (Connection, Peer) {
    let [(_, pd), (peer_device, peer_pd)] = two(network);
    let queue = CompletionQueue::new(&peer_device, CompletionMode::Event).unwrap();
    let qp =
        QueuePair::builder(&peer_pd, &queue).max_send_wr(256).max_recv_wr(128).build().unwrap();
    let pool =
        Pool::builder(&peer_pd).buffer_size(8192).buffers(128).growing(true).build().unwrap();
    let receives = (0..100).map(|_| qp.recv(pool.try_alloc(8192).unwrap())).collect();
    let prepared = Connection::prepare(&pd, config).unwrap();
    qp.connect(&prepared.endpoint()).unwrap();
    let hello = HANDSHAKE.encode(b"").unwrap();
    let connection = prepared.establish(&qp.endpoint(), &hello).unwrap();
    (connection, Peer { qp, pool, receives, _pd: peer_pd, _device: peer_device })
}

fn run<F: Future<Output = ()>>(what: &'static str, test: impl FnOnce() -> F + Send + 'static) {
    bounded(what, LONG, move || Flavour::CurrentThread.runtime().block_on(test()));
}

async fn reason(connection: &Connection) -> CloseReason {
    loop {
        match soon("reason", connection.recv()).await {
            Ok(Some(_)) => {}
            Ok(None) => panic!("a clean end"),
            Err(MessageError::Closed(reason)) => return reason,
            Err(other) => panic!("{other:?}"),
        }
    }
}

#[test]
fn notifications_beyond_the_window_or_after_fin_close_the_connection() {
    run("notifications", || async {
        for after_fin in [false, true] {
            let settings = config().receive_buffers(4).preallocate(true);
            let (connection, peer) = connect_peer(&Network::new(), &settings);
            let region = connection.expose(vec![0; 8], Access::REMOTE_WRITE).unwrap();
            let notify = |imm| {
                let buffer = peer.pool.copy_from(b"hostile").unwrap();
                let remote = region.grant().slice(..7).unwrap();
                peer.qp.with_imm(Imm(imm)).write(buffer, remote)
            };
            if after_fin {
                peer.send(b"", header(FIN, 0, 0)).await;
            }
            // The service takes none, so at most the window is kept: four receives and four more.
            let writes: Vec<_> = (0..if after_fin { 1 } else { 9 }).map(notify).collect();
            for write in writes {
                drop(soon("write", write).await);
            }
            let violation =
                if after_fin { Violation::AfterFinish } else { Violation::Window { receives: 8 } };
            let closed = soon("closed", connection.closed()).await;
            assert_eq!(closed, CloseReason::Violation(violation));
            let kept = connection.notifications().filter(|next| std::future::ready(next.is_ok()));
            assert_eq!(kept.count().await, if after_fin { 0 } else { 8 });
        }
    });
}

// Shows S4.
#[test]
fn each_violation_closes_the_connection_with_its_reason() {
    run("violations", || async {
        let region = |addr, len| RemoteRegion::new(addr, len, Rkey(7)).to_bytes();
        let max_message = 64 << 20;
        let resized = |what, fields @ [receives, .., size]: [u32; 4]| {
            let payload = fields.map(u32::to_be_bytes).concat();
            (what, payload, header(RESIZE, 0, 0), Violation::Resize { receives, size })
        };
        let cases: [(&str, Vec<u8>, Imm, Violation); 20] = [
            ("empty part", vec![], header(PART, 0, 0), Violation::FrameLength { len: 0 }),
            ("short change", vec![1], header(RESIZE, 0, 0), Violation::FrameLength { len: 1 }),
            ("skipped receive", vec![], header(RESIZE, 0, 0), Violation::Skip),
            resized("fewer receives", [67, 0, 68, 4096]),
            resized("more receives than in the handshake", [77, 0, 68, 4096]),
            resized("longer receives than in the handshake", [68, 0, 68, 4097]),
            resized("change of a receive that is not posted", [68, 0, 69, 512]),
            resized("too few receives left", [68, 64, 68, 4096]),
            (
                "acknowledged Fin that was not sent",
                vec![],
                Imm(1 << 28 | ACK << 29),
                Violation::NotFinished,
            ),
            ("credits", vec![], header(ACK, 1, 0), Violation::Credits { announced: 1, in_use: 0 }),
            (
                "decreased credits",
                vec![],
                header(ACK, 0x3fff, 0),
                Violation::Credits { announced: 0x3fff, in_use: 0 },
            ),
            ("done", vec![], header(PING, 0, 1), Violation::Done { announced: 1, offered: 0 }),
            ("ack with payload", vec![1], header(ACK, 0, 0), Violation::FrameLength { len: 1 }),
            ("fin with payload", vec![1; 9], header(FIN, 0, 0), Violation::FrameLength { len: 9 }),
            ("short offer", vec![1; 19], header(OFFER, 0, 0), Violation::FrameLength { len: 19 }),
            ("long offer", vec![1; 21], header(OFFER, 0, 0), Violation::FrameLength { len: 21 }),
            (
                "empty offer",
                region(9, 0).to_vec(),
                header(OFFER, 0, 0),
                Violation::Offer { addr: 9, len: 0 },
            ),
            (
                "offer that wraps around",
                region(u64::MAX, 2).to_vec(),
                header(OFFER, 0, 0),
                Violation::Offer { addr: u64::MAX, len: 2 },
            ),
            (
                "large offer",
                region(9, max_message + 1).to_vec(),
                header(OFFER, 0, 0),
                Violation::TooLong { len: max_message + 1, allowed: max_message },
            ),
            (
                "huge offer",
                region(9, 1 << 62).to_vec(),
                header(OFFER, 0, 0),
                Violation::TooLong { len: 1 << 62, allowed: max_message },
            ),
        ];
        for (what, payload, imm, violation) in cases {
            let (connection, peer) = connect_peer(&Network::new(), &config());
            peer.send(b"fine", header(DATA, 0, 0)).await;
            peer.send(&payload, imm).await;
            assert_eq!(reason(&connection).await, CloseReason::Violation(violation), "{what}");
            assert_eq!(
                connection.send("x").await,
                Err(MessageError::Closed(CloseReason::Violation(violation)))
            );
        }
        let (connection, peer) = connect_peer(&Network::new(), &config());
        peer.send(b"", header(FIN, 0, 0)).await;
        peer.send(b"after", header(DATA, 0, 0)).await;
        // The end may be received before the violation is detected.
        let ended = async {
            while connection.close_reason().is_none() {
                tokio::task::yield_now().await;
            }
        };
        soon("end", ended).await;
        assert_eq!(connection.close_reason(), Some(CloseReason::Violation(Violation::AfterFinish)));

        let (connection, peer) = connect_peer(&Network::new(), &config());
        drop(peer.qp.send(peer.pool.copy_from(b"bare").unwrap()).await);
        assert_eq!(
            reason(&connection).await,
            CloseReason::Violation(Violation::Header { header: 0 })
        );

        let (connection, peer) = connect_peer(&Network::new(), &config());
        peer.send(b"", header(ABORT, 0, 0)).await;
        assert_eq!(reason(&connection).await, CloseReason::Dropped);
    });
}

// Shows S4.
#[test]
fn messages_of_several_frames_are_continued_and_within_the_limits() {
    run("parts", || async {
        let offer = RemoteRegion::new(9, 9, Rkey(7)).to_bytes();
        let incomplete = Violation::Incomplete { len: 5 };
        let others: [(&str, &[u8], u32); 5] = [
            ("offer", &offer, OFFER),
            ("ack", b"", ACK),
            ("ping", b"", PING),
            ("fin", b"", FIN),
            ("abort", b"", ABORT),
        ];
        for (what, payload, kind) in others {
            let (connection, peer) = connect_peer(&Network::new(), &config());
            peer.send(b"whole", header(DATA, 0, 0)).await;
            peer.send(b"begin", header(PART, 0, 0)).await;
            peer.send(payload, header(kind, 0, 0)).await;
            assert_eq!(recv(&connection).await, "whole");
            let reason = reason(&connection).await;
            // An `Abort` terminates before its place matters.
            let expected = match kind {
                ABORT => CloseReason::Dropped,
                _ => CloseReason::Violation(incomplete),
            };
            assert_eq!(reason, expected, "{what}");
        }

        let (connection, peer) = connect_peer(&Network::new(), &config().max_message(100));
        for kind in [PART, DATA] {
            peer.send(&[1; 50], header(kind, 0, 0)).await;
        }
        assert_eq!(recv(&connection).await.len(), 100);
        for kind in [PART, PART, DATA] {
            peer.send(&[1; 50], header(kind, 0, 0)).await;
        }
        let too_long = Violation::TooLong { len: 150, allowed: 100 };
        assert_eq!(reason(&connection).await, CloseReason::Violation(too_long));

        // A message that never ends holds no more than its receives.
        let (connection, peer) = connect_peer(&Network::new(), &config().receive_buffers(8));
        for _ in 0..7 {
            peer.send(b"more", header(PART, 0, 0)).await;
        }
        let endless = Violation::Frames { allowed: 7 };
        assert_eq!(reason(&connection).await, CloseReason::Violation(endless));
    });
}

#[test]
fn message_longer_than_a_buffer_closes_the_connection() {
    run("overlong", || async {
        let (connection, peer) = connect_peer(&Network::new(), &config().receive_buffer_size(100));
        peer.send(&[1; 101], header(DATA, 0, 0)).await;
        match reason(&connection).await {
            CloseReason::Operation(kind) => assert_eq!(kind.status(), Some(WcStatus::LOC_LEN_ERR)),
            other => panic!("{other:?}"),
        }
    });
}

#[test]
fn message_above_max_message_closes_the_connection() {
    run("over the limit", || async {
        let (len, allowed) = (1001, 1000);
        let offer = RemoteRegion::new(4096, len, Rkey(7)).to_bytes();
        for (payload, kind) in [(&[1; 1001][..], DATA), (&offer, OFFER)] {
            let (connection, peer) =
                connect_peer(&Network::new(), &config().preallocate(true).max_message(allowed));
            peer.send(&[1; 1000], header(DATA, 0, 0)).await;
            peer.send(payload, header(kind, 0, 0)).await;
            let expected = CloseReason::Violation(Violation::TooLong { len, allowed });
            assert_eq!(reason(&connection).await, expected);
        }
    });
}

#[test]
fn offer_of_unregistered_memory_closes_the_connection() {
    run("offers", || async {
        for len in [100, 5 << 20] {
            let (connection, peer) = connect_peer(&Network::new(), &config());
            peer.send(&RemoteRegion::new(4096, len, Rkey(0xbad)).to_bytes(), header(OFFER, 0, 0))
                .await;
            match reason(&connection).await {
                CloseReason::Operation(kind) => {
                    assert_eq!(kind.status(), Some(WcStatus::REM_ACCESS_ERR))
                }
                other => panic!("{other:?}"),
            }
        }
    });
}

#[test]
fn sends_beyond_the_credits_find_no_receive() {
    run("flood", || async {
        let config = config().receive_buffers(4).preallocate(true);
        let (connection, peer) = connect_peer(&Network::new(), &config);
        // 8 receives are posted, and the application receives nothing.
        let flood: Vec<_> = (0..200)
            .map(|_| peer.qp.with_imm(header(DATA, 0, 0)).send(peer.pool.copy_from(b"x").unwrap()))
            .collect();
        let inbox = || connection.counters().inbox;
        eventually("8 received messages", || inbox() >= 8).await;
        assert_eq!(inbox(), 8);
        // Each receive that becomes free takes a message, or reveals that the peer had no credit.
        for _ in 0..8 {
            drop(soon("message", connection.recv()).await);
        }
        eventually("further messages", || inbox() >= 8 || connection.close_reason().is_some())
            .await;
        assert!(inbox() <= 8);
        drop((connection, flood));
    });
}

#[test]
fn peer_that_frees_no_buffer_blocks_senders_until_the_stall_timeout() {
    run("credits", || async {
        let (connection, mut peer) =
            connect_peer(&Network::new(), &config().stall_timeout(Some(Duration::from_millis(50))));
        let mut sent = 0;
        let stalled = loop {
            match soon("send", connection.send("x")).await {
                Ok(()) => sent += 1,
                Err(error) => break error,
            }
        };
        assert_eq!(stalled, MessageError::Closed(CloseReason::Stalled));
        assert_eq!(sent, 65, "messages leave three of its receives");
        assert_eq!(peer.recv().await.0, b"x");

        // Without a stall timeout, a cancelled send leaves the connection open.
        let (connection, _peer) = connect_peer(&Network::new(), &config());
        while connection.send("x").now_or_never().is_some() {}
        let waits = tokio::time::timeout(Duration::from_millis(20), connection.send("y")).await;
        assert!(waits.is_err() && connection.close_reason().is_none());
    });
}

#[test]
fn freed_receive_of_an_unfetched_message_is_a_violation() {
    run("unfetched", || async {
        let (connection, mut peer) = connect_peer(&Network::new(), &config().max_eager(0));
        for _ in 0..2 {
            soon("send", connection.send(pattern(5_000, 1))).await.unwrap();
            assert_eq!(peer.recv().await.1 >> 29, OFFER);
        }
        // Otherwise a peer could cause an unlimited number of registrations, each of a page, for
        // few bytes.
        peer.send(&[], header(ACK, 1, 0)).await;
        let violation = Violation::Unfetched { in_use: 1, offered: 2 };
        assert_eq!(reason(&connection).await, CloseReason::Violation(violation));
    });
}

// Shows E2.
#[test]
fn silent_peer_closes_the_connection_by_timeout() {
    run("silent", || async {
        let keepalive = Some((Duration::from_millis(10), Duration::from_millis(40)));
        let (connection, mut peer) = connect_peer(&Network::new(), &config().keepalive(keepalive));
        assert_eq!(reason(&connection).await, CloseReason::Silent);
        assert_eq!(peer.recv().await.1, PING << 29, "a ping was sent");

        // This peer neither fetches nor finishes.
        let config = config().keepalive(None).close_timeout(Duration::from_millis(40));
        let (connection, _peer) = connect_peer(&Network::new(), &config);
        connection.send(pattern(100_000, 1)).await.unwrap();
        assert!(tokio::time::timeout(Duration::from_millis(20), connection.flush()).await.is_err());
        assert_eq!(
            soon("close", connection.close()).await,
            Err(MessageError::Closed(CloseReason::CloseTimeout))
        );
    });
}

// Shows S1.
#[test]
fn memory_of_a_message_is_inaccessible_once_fetched() {
    run("revoked", || async {
        let (connection, mut peer) = connect_peer(&Network::new(), &config());
        let message = pattern(100_000, 3);
        connection.send(message.clone()).await.unwrap();
        let (payload, _) = peer.recv().await;
        let region = RemoteRegion::from_bytes(&payload).unwrap();
        let part = peer.pool.try_alloc(5000).unwrap();
        let part = soon("read", peer.qp.read(part, region.slice(50..5050).unwrap())).await.unwrap();
        assert_eq!(part[..], message[50..5050]);
        peer.send(b"", header(ACK, 1, 1)).await;
        soon("flush", connection.flush()).await.unwrap();
        assert!(message.try_into_mut().is_ok(), "the connection still references the message");
        let again = peer.pool.try_alloc(8).unwrap();
        let refused =
            soon("read", peer.qp.read(again, region.slice(..8).unwrap())).await.unwrap_err();
        assert_eq!(refused.status(), Some(WcStatus::REM_ACCESS_ERR));
    });
}

// Shows S2.
#[test]
fn memory_of_a_message_refuses_remote_writes() {
    run("written", || async {
        let (connection, mut peer) = connect_peer(&Network::new(), &config());
        let message = pattern(100_000, 3);
        connection.send(message.clone()).await.unwrap();
        let region = RemoteRegion::from_bytes(&peer.recv().await.0).unwrap();
        let write = peer.qp.write(peer.pool.copy_from(b"damage").unwrap(), region);
        assert_eq!(
            soon("write", write).await.unwrap_err().status(),
            Some(WcStatus::REM_ACCESS_ERR)
        );
        assert!(message == pattern(100_000, 3));
    });
}

// Shows S4.
#[test]
fn random_frames_do_no_harm() {
    let seed = Seed::new("--test connections random_frames");
    let value = seed.value;
    bounded("random frames", 2 * LONG, move || {
        Flavour::CurrentThread.runtime().block_on(async {
            let mut random = fastrand::Rng::with_seed(value);
            let mut reasons = std::collections::BTreeMap::<_, u32>::new();
            for _ in 0..200 {
                let config =
                    config().receive_buffers(random.u32(1..8)).keepalive(None).max_message(1 << 20);
                let (connection, peer) = connect_peer(&Network::new(), &config);
                for _ in 0..random.u32(1..30) {
                    let payload: Vec<u8> = match random.u8(..4) {
                        0 => (0..random.usize(..100)).map(|_| random.u8(..)).collect(),
                        1 => RemoteRegion::new(
                            random.u64(..),
                            random.u64(..) >> 35,
                            Rkey(random.u32(..)),
                        )
                        .to_bytes()
                        .to_vec(),
                        _ => vec![],
                    };
                    // Mostly valid headers reach more checks.
                    let imm = if random.u8(..4) == 0 {
                        Imm(random.u32(..))
                    } else {
                        header(random.u32(..5), 0, 0)
                    };
                    drop(peer.qp.with_imm(imm).send(peer.pool.copy_from(&payload).unwrap()));
                    if random.bool() {
                        drop(connection.send(pattern(random.usize(..20_000), 1)).now_or_never());
                    }
                    if random.bool() {
                        drop(connection.recv().now_or_never());
                    }
                    tokio::task::yield_now().await;
                }
                let all = async { while let Ok(Some(_)) = connection.recv().await {} };
                drop(tokio::time::timeout(Duration::from_millis(3), all).await);
                let name = connection
                    .close_reason()
                    .map(|reason| format!("{reason:?}").chars().take(17).collect::<String>());
                *reasons.entry(name).or_default() += 1;
            }
            eprintln!("{reasons:?}");
            assert!(reasons.len() > 3, "{reasons:?}");
        });
    });
    drop(seed);
}

#[test]
fn invalid_handshakes_are_refused_at_both_ends() {
    run("hellos", || async {
        let network = Network::new();
        let good = HANDSHAKE.encode(b"").unwrap();
        let with = |at: usize, value: u8| {
            let mut bytes = good.clone();
            bytes[at] = value;
            bytes
        };
        let bad = [
            (vec![], "empty"),
            (good[..10].to_vec(), "truncated"),
            (with(0, b'x'), "magic"),
            (with(4, 9), "version"),
            (with(5, 1), "flags"),
        ];
        let [(device, pd), (client, client_pd)] = two(&network);
        for (bytes, what) in &bad {
            let prepared = Connection::prepare(&pd, &config()).unwrap();
            let other = Connection::prepare(&client_pd, &config()).unwrap();
            let refused = prepared.establish(&other.endpoint(), bytes);
            assert!(matches!(refused, Err(EstablishError::Handshake(_))), "{what}: {refused:?}");
        }

        let listener = Listener::bind_with(&device, "127.0.0.1:0", &config()).await.unwrap();
        let address = listener.local_addr().unwrap();
        let accepting = tokio::spawn(async move { (listener.accept().await.unwrap(), listener) });
        let queue = CompletionQueue::new(&client, CompletionMode::Event).unwrap();
        for (bytes, what) in bad {
            let options = cm::ConnectConfig::default().private_data(bytes);
            let make =
                |route: &cm::Route| route.prepare(QueuePair::builder(&client_pd, &queue)).build();
            let refused = soon("reject", cm::connect(&client, address, &options, make)).await;
            assert!(
                matches!(refused, Err(cm::ConnectError::Rejected { .. })),
                "{what}: {refused:?}"
            );
        }
        let connection =
            soon("connect", Connection::connect_with(&client, address, &config())).await.unwrap();
        let (accepted, listener) = soon("accept", accepting).await.unwrap();
        connection.send("x").await.unwrap();
        assert_eq!(connected::recv(&accepted).await, "x");
        let _accepting = tokio::spawn(async move { listener.accept().await.map(drop) });

        // A client without the message protocol learns that the listener expects it.
        let make =
            |route: &cm::Route| route.prepare(QueuePair::builder(&client_pd, &queue)).build();
        let plain =
            soon("reject", cm::connect(&client, address, &cm::ConnectConfig::default(), make))
                .await
                .unwrap_err();
        let (text, expected) =
            (plain.to_string(), format!("waiting for {address} to answer the connection request"));
        assert!(
            text.starts_with(&expected) && text.contains("connect with tokio_rdma::Connection"),
            "{text}"
        );

        // In the reverse case, the listener accepts but sends no valid handshake.
        let other = cm::Listener::bind(&device, "127.0.0.1:0").await.unwrap();
        let (address, server_queue) =
            (other.local_addr(), CompletionQueue::new(&device, CompletionMode::Event).unwrap());
        let serving = async |answer: &str| {
            let request = other.accept().await.unwrap();
            let qp = request.prepare(QueuePair::builder(&pd, &server_queue)).build().unwrap();
            drop(request.accept(&qp, &cm::ConnectConfig::default().private_data(answer)).await);
        };
        let config = config();
        let connecting = || Connection::connect_with(&client, address, &config);
        let ((), refused) =
            soon("connect", async { tokio::join!(serving(""), connecting()) }).await;
        let text = refused.unwrap_err().to_string();
        let expected = format!(
            "{address} accepted the connection request but is not a tokio_rdma::Listener \
             or RdmaListener"
        );
        assert!(
            text.starts_with(&expected) && text.contains("the peer sent no handshake"),
            "{text}"
        );
        let ((), refused) =
            soon("connect", async { tokio::join!(serving("HTTP/1.1"), connecting()) }).await;
        assert!(
            matches!(
                &refused,
                Err(EstablishError::OtherProtocol {
                    error: HandshakeError::Magic { found: [b'H', b'T', b'T', b'P'] },
                    ..
                })
            ),
            "{refused:?}"
        );
    });
}

fn device(network: &Network, name: &str) -> (Device, std::net::IpAddr) {
    let device = Device::software_in(network, name).unwrap();
    let address = device.default_path().unwrap().1.gid.to_ip();
    (device, address)
}

// Shows S4.
#[test]
fn peers_beyond_the_limits_get_the_reason_and_are_counted() {
    run("limits", || async {
        // In virtual time no answer is late. A late one would be repeated, and counted again.
        let network = Network::simulated(1, Faults::none());
        let (server, at) = device(&network, "server");
        let limits = ListenerConfig::new(config()).max_connections(3).max_connections_per_source(2);
        let bound = Listener::bind_with(&server, (at, 0), &limits);
        let listener = drive(&network, bound).await.unwrap();
        let address = listener.local_addr().unwrap();
        let clients = ["one", "two", "three"].map(|name| device(&network, name).0);
        let accepted = std::sync::Mutex::new(Vec::new());
        let serve = async {
            loop {
                let connection = listener.accept().await.unwrap();
                accepted.lock().unwrap().push(connection);
            }
        };
        let test = async {
            let open = async |count: u32| {
                eventually("accepted", || listener.stats().open == count).await;
            };
            let config = config();
            let connect = |client: usize| {
                let (device, config) = (clients[client].clone(), config.clone());
                async move {
                    let connecting = Connection::connect_with(&device, address, &config);
                    soon("answer", connecting).await
                }
            };
            let one = (connect(0).await.unwrap(), connect(0).await.unwrap());
            open(2).await;
            assert_eq!(
                connect(0).await.unwrap_err(),
                EstablishError::Refused { address, reason: RefusalReason::SourceFull }
            );
            let two = connect(1).await.unwrap();
            open(3).await;
            let full = connect(2).await.unwrap_err();
            assert_eq!(
                full,
                EstablishError::Refused { address, reason: RefusalReason::ListenerFull }
            );
            assert!(full.to_string().contains("max_connections"), "{full}");
            assert_eq!(std::io::Error::from(full).kind(), std::io::ErrorKind::ConnectionRefused);
            let stats = listener.stats();
            assert_eq!((stats.accepted, stats.refused_full, stats.refused_source), (3, 1, 1));
            drop(one);
            eventually("ends", || {
                accepted
                    .lock()
                    .unwrap()
                    .retain(|connection: &Connection| connection.close_reason().is_none());
                listener.stats().open == 1
            })
            .await;
            let three = connect(2).await.unwrap();
            open(2).await;
            drop((two, three));
        };
        drive(&network, async {
            tokio::select! {
                () = serve => unreachable!("the loop never returns"),
                () = test => {}
            }
        })
        .await;
        assert_eq!(listener.stats().accepted, 4);
    });
}

#[test]
fn limits_apply_to_requests_accepted_by_the_program() {
    run("limits by request", || async {
        let network = Network::new();
        let (server, at) = device(&network, "server");
        let listener =
            Listener::bind_with(&server, (at, 0), ListenerConfig::new(config()).max_connections(1))
                .await
                .unwrap();
        let (address, (client, _)) = (listener.local_addr().unwrap(), device(&network, "client"));
        let serve = async {
            let first = listener.request().await.unwrap().accept().await.unwrap();
            let second = listener.request().await.unwrap().accept().await.unwrap_err();
            (first, second)
        };
        let ask = async {
            let first = Connection::connect_with(&client, address, &config()).await.unwrap();
            (first, Connection::connect_with(&client, address, &config()).await.unwrap_err())
        };
        let ((_ours, here), (_theirs, there)) =
            soon("answers", async { tokio::join!(serve, ask) }).await;
        assert_eq!(there, EstablishError::Refused { address, reason: RefusalReason::ListenerFull });
        assert!(
            matches!(here, EstablishError::Refused { reason: RefusalReason::ListenerFull, .. }),
            "{here:?}"
        );
    });
}

#[test]
fn first_message_timeout_closes_only_silent_peers() {
    run("first message", || async {
        let network = Network::new();
        let (server, at) = device(&network, "server");
        // Long enough for a first message on a busy machine.
        let limit = Duration::from_secs(3);
        let patient = ListenerConfig::new(config()).first_message_timeout(Some(limit));
        let listener = Listener::bind_with(&server, (at, 0), &patient).await.unwrap();
        let (address, (client, _)) = (listener.local_addr().unwrap(), device(&network, "client"));
        let connect = async || {
            let theirs = config();
            let (theirs, ours) = tokio::join!(
                Connection::connect_with(&client, address, &theirs),
                listener.accept()
            );
            (theirs.unwrap(), ours.unwrap())
        };
        let (speaks, heard) = connect().await;
        speaks.send("first").await.unwrap();
        let (_silent, waited) = connect().await;
        assert_eq!(reason(&waited).await, CloseReason::NoFirstMessage);
        // The timeout of this connection has expired as well. A message counts even if the
        // application has not received it yet.
        assert_eq!(heard.close_reason(), None);
        assert_eq!(heard.recv().await.unwrap().unwrap(), "first");
        let none = ListenerConfig::new(config()).first_message_timeout(Some(Duration::ZERO));
        assert!(Listener::bind_with(&server, (at, 0), &none).await.is_err());
    });
}

#[test]
fn peer_lost_at_any_step_leaves_a_close_reason() {
    run("vanishes", || async {
        for step in 0..6 {
            let keepalive = Some((Duration::from_millis(10), Duration::from_millis(50)));
            let (connection, mut peer) =
                connect_peer(&Network::new(), &config().keepalive(keepalive));
            if step >= 1 {
                peer.send(b"hello", header(DATA, 0, 0)).await;
            }
            if step >= 2 {
                connection.send(pattern(100_000, 1)).await.unwrap();
            }
            if step >= 3 {
                peer.recv().await;
            }
            if step >= 4 {
                peer.send(&RemoteRegion::new(8, 3 << 20, Rkey(1)).to_bytes(), header(OFFER, 0, 0))
                    .await;
            }
            if step >= 5 {
                drop(connection.send("more").now_or_never());
            }
            drop(peer);
            let reason = reason(&connection).await;
            assert!(
                matches!(reason, CloseReason::Operation(_) | CloseReason::Silent),
                "step {step}: {reason:?}"
            );
        }
    });
}

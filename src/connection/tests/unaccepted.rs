//! Peers that disconnect, fall silent or exceed the limits before they are accepted.

use std::future::Future;
use std::net::SocketAddr;
use std::time::Duration;

use futures::future::{join_all, poll_immediate};

use super::silent_peer::SilentPeer;
use crate::cm::{ConnectError, ConnectStep};
use crate::connection::{
    CloseReason, Connection, ConnectionConfig, EstablishError, Listener, ListenerConfig,
    MessageError, RefusalReason,
};
use crate::contained::tests::HANG;
use crate::software::Network;
use crate::verbs::Device;

fn run<F: Future<Output = ()>>(test: impl FnOnce() -> F) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async { tokio::time::timeout(HANG, test()).await.expect("timed out") });
}

struct Sides {
    network: Network,
    client: Device,
    listener: Listener,
    address: SocketAddr,
}

impl Sides {
    /// Creates a listener whose device answers requests from now on, which nothing accepts.
    async fn new(config: impl Into<ListenerConfig>) -> Self {
        let config = config.into().backlog(0);
        let network = Network::new();
        let (server, client) = (
            Device::software_in(&network, "server").unwrap(),
            Device::software_in(&network, "client").unwrap(),
        );
        let address = server.default_path().unwrap().1.gid.to_ip();
        let listener = Listener::bind_with(&server, (address, 0), config).await.unwrap();
        assert!(poll_immediate(Box::pin(listener.accept())).await.is_none());
        let address = listener.local_addr().unwrap();
        Self { network, client, listener, address }
    }

    /// Returns true if the listener's connection manager holds no connection, TIMEWAIT included.
    fn forgotten(&self) -> bool {
        self.network.control("server").is_some_and(|server| server.connections() == 0)
    }
}

#[test]
fn request_of_a_disconnected_peer_fails_as_disconnected() {
    run(|| async {
        let sides = Sides::new(&ConnectionConfig::default()).await;
        let connection = Connection::connect(&sides.client, sides.address).await.unwrap();
        let request = sides.listener.request().await.unwrap();
        let peer = request.peer_addr();
        drop(connection);
        while !sides.forgotten() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let error = request.accept().await.map(drop).unwrap_err();
        let EstablishError::Connect(error @ ConnectError::Disconnected { .. }) = &error else {
            panic!("{error:?}")
        };
        assert_eq!((error.step(), error.address()), (Some(ConnectStep::Prepare), Some(peer)));
        let stats = sides.listener.stats();
        assert_eq!((stats.open, stats.accepted, stats.failed), (0, 0, 1));
    });
}

#[test]
fn accept_skips_a_peer_that_disconnects_before_its_handshake() {
    run(|| async {
        let sides = Sides::new(&ConnectionConfig::default()).await;
        let (client, address) = (sides.client.clone(), sides.address);
        let (connected, leave) =
            (tokio::sync::oneshot::channel(), std::sync::mpsc::channel::<()>());
        let peer = std::thread::spawn(move || {
            let runtime =
                tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let connection = Connection::connect(&client, address).await.unwrap();
                connected.0.send(()).unwrap();
                leave.1.recv().unwrap();
                connection.abort();
                drop(connection.close().await);
            });
        });
        connected.1.await.unwrap();
        while !sides.listener.has_requests() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        leave.0.send(()).unwrap();
        peer.join().unwrap();
        for _ in 0..2000 {
            if sides.forgotten() {
                break;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(sides.forgotten());
        let (next, theirs) =
            tokio::join!(sides.listener.accept(), Connection::connect(&sides.client, address));
        let (next, theirs) = (next.expect("the listener continues"), theirs.unwrap());
        next.send("next").await.unwrap();
        assert_eq!(theirs.recv().await.unwrap().unwrap(), "next");
        let stats = sides.listener.stats();
        assert_eq!((stats.open, stats.accepted), (1, 1));
    });
}

#[test]
fn service_that_accepts_requests_one_by_one_serves_peers_behind_silent_ones() {
    run(|| async {
        // Longer than a client waits.
        let patient = ConnectionConfig::default().connect_timeout(2 * HANG);
        let sides = Sides::new(&patient).await;
        drop(poll_immediate(Box::pin(sides.listener.request())).await);
        let mut silent: Vec<_> = (0..4)
            .map(|number| SilentPeer::new(&sides.network, &format!("silent{number}")))
            .collect();
        for peer in &mut silent {
            peer.request(sides.address);
        }
        let serve = async {
            let mut evicted = 0;
            loop {
                match sides.listener.request().await.unwrap().accept().await {
                    Ok(connection) => {
                        connection.send("served").await.unwrap();
                        return (connection, evicted);
                    }
                    Err(EstablishError::Connect(ConnectError::TimedOut {
                        step: ConnectStep::Establish,
                        ..
                    })) => evicted += 1,
                    Err(error) => panic!("{error:?}"),
                }
            }
        };
        let connect = async {
            let connection = Connection::connect(&sides.client, sides.address)
                .await
                .expect("a working client connects");
            assert_eq!(connection.recv().await.unwrap().unwrap(), "served");
            connection
        };
        let ((_ours, evicted), _theirs) = tokio::join!(serve, connect);
        assert_eq!((evicted, sides.listener.stats().evicted), (4, 4));
    });
}

#[test]
fn answered_peers_beyond_the_limit_learn_the_refusal_reason() {
    const ALL: usize = 20;
    run(|| async {
        let sides = Sides::new(ListenerConfig::default().max_connections(2)).await;
        let serve = async {
            let mut kept = Vec::new();
            loop {
                let connection = sides.listener.accept().await.unwrap();
                connection.send("served").await.unwrap();
                kept.push(connection);
            }
        };
        let ask = async {
            let asked =
                join_all((0..ALL).map(|_| Connection::connect(&sides.client, sides.address))).await;
            let (mut served, mut refused) = (Vec::new(), 0);
            for asked in asked {
                match asked {
                    Ok(connection) => match connection.recv().await {
                        Ok(message) => {
                            assert_eq!(message.unwrap(), "served");
                            served.push(connection);
                        }
                        Err(MessageError::Closed(CloseReason::Refused(
                            RefusalReason::ListenerFull,
                        ))) => refused += 1,
                        Err(error) => panic!("{error:?}"),
                    },
                    Err(EstablishError::Refused {
                        reason: RefusalReason::ListenerFull, ..
                    }) => refused += 1,
                    Err(error) => panic!("{error:?}"),
                }
            }
            assert_eq!((served.len(), refused), (2, ALL - 2));
            let stats = sides.listener.stats();
            assert_eq!(
                (stats.open, stats.accepted, stats.refused_full, stats.failed),
                (2, 2, ALL as u64 - 2, 0)
            );
        };
        tokio::select! {
            () = serve => unreachable!("the accept loop never returns"),
            () = ask => {}
        }
    });
}

#[test]
fn answered_peer_learns_that_the_service_rejects_it() {
    run(|| async {
        let sides = Sides::new(&ConnectionConfig::default()).await;
        let connection = Connection::connect(&sides.client, sides.address).await.unwrap();
        sides.listener.request().await.unwrap().reject(b"no").await.unwrap();
        let error = connection.recv().await.unwrap_err();
        assert_eq!(error, MessageError::Closed(CloseReason::Rejected));
    });
}

//! A listener and peers that leave, fall silent or are too many before they are accepted.

use std::future::Future;
use std::net::SocketAddr;
use std::time::Duration;

use futures::future::{join_all, poll_immediate};
use futures::pin_mut;

use super::stranger::Stranger;
use crate::cm::{ConnectError, Step};
use crate::message::{
    CloseReason, Connection, ConnectionConfig, EstablishError, Listener, MessageError, Refusal,
};
use crate::software::Network;
use crate::verbs::Device;

/// Only a hang takes this long.
const HANG: Duration = Duration::from_secs(60);

fn run<F: Future<Output = ()>>(test: impl FnOnce() -> F) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async { tokio::time::timeout(HANG, test()).await.expect("hangs") });
}

struct Sides {
    network: Network,
    client: Device,
    listener: Listener,
    address: SocketAddr,
}

impl Sides {
    /// A listener whose device answers peers from now on.
    async fn new(config: &ConnectionConfig) -> Self {
        let network = Network::new();
        let (server, client) = (
            Device::software_in(&network, "server").unwrap(),
            Device::software_in(&network, "client").unwrap(),
        );
        let address = server.default_path().unwrap().1.gid.to_ip();
        let listener = Listener::bind_with(&server, (address, 0), config).await.unwrap();
        assert!(poll_immediate(Box::pin(listener.accept())).await.is_none());
        let address = listener.local_addr();
        Self { network, client, listener, address }
    }

    /// True if the manager of the listener's device has forgotten all connections, TIMEWAIT included.
    fn forgotten(&self) -> bool {
        self.network.control("server").is_some_and(|server| server.connections() == 0)
    }
}

#[test]
fn request_whose_peer_has_left_fails_as_disconnected() {
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
        assert_eq!((error.step(), error.address()), (Some(Step::Prepare), Some(peer)));
        let stats = sides.listener.stats();
        assert_eq!((stats.open, stats.accepted, stats.failed), (0, 0, 1));
    });
}

#[test]
fn accept_passes_over_a_peer_that_leaves_before_its_handshake_runs() {
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
        let accept = sides.listener.accept();
        pin_mut!(accept);
        while !sides.listener.has_requests() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        // `accept` begins the handshake, whose task runs when this one waits.
        let pop = std::future::poll_fn(|context| {
            assert!(accept.as_mut().poll(context).is_pending());
            leave.0.send(()).unwrap();
            std::task::Poll::Ready(())
        });
        pop.await;
        peer.join().unwrap();
        for _ in 0..2000 {
            if sides.forgotten() {
                break;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(sides.forgotten());
        let (next, theirs) = tokio::join!(accept, Connection::connect(&sides.client, address));
        let (next, theirs) = (next.expect("the service goes on"), theirs.unwrap());
        next.send("next").await.unwrap();
        assert_eq!(theirs.recv().await.unwrap().unwrap(), "next");
        let stats = sides.listener.stats();
        assert_eq!((stats.open, stats.accepted, stats.failed), (1, 1, 1));
    });
}

#[test]
fn service_that_accepts_each_request_in_turn_serves_peers_behind_silent_ones() {
    run(|| async {
        // Longer than an honest client waits.
        let patient = ConnectionConfig::default().connect_timeout(2 * HANG);
        let sides = Sides::new(&patient).await;
        drop(poll_immediate(Box::pin(sides.listener.request())).await);
        let mut silent: Vec<_> = (0..4)
            .map(|number| Stranger::new(&sides.network, &format!("silent{number}")))
            .collect();
        for peer in &mut silent {
            peer.request(sides.address);
        }
        let serve = async {
            let mut gave_way = 0;
            loop {
                match sides.listener.request().await.unwrap().accept().await {
                    Ok(connection) => {
                        connection.send("served").await.unwrap();
                        return (connection, gave_way);
                    }
                    Err(EstablishError::Connect(ConnectError::TimedOut {
                        step: Step::Establish,
                        ..
                    })) => gave_way += 1,
                    Err(error) => panic!("{error:?}"),
                }
            }
        };
        let connect = async {
            let connection = Connection::connect(&sides.client, sides.address)
                .await
                .expect("an honest client connects");
            assert_eq!(connection.recv().await.unwrap().unwrap(), "served");
            connection
        };
        let ((_ours, gave_way), _theirs) = tokio::join!(serve, connect);
        assert_eq!((gave_way, sides.listener.stats().gave_way), (4, 4));
    });
}

#[test]
fn peers_beyond_the_limit_that_were_answered_are_told_why_they_end() {
    const ALL: usize = 20;
    run(|| async {
        let sides = Sides::new(&ConnectionConfig::default().max_connections(2)).await;
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
            let (mut served, mut told) = (Vec::new(), 0);
            for asked in asked {
                match asked {
                    Ok(connection) => match connection.recv().await {
                        Ok(message) => {
                            assert_eq!(message.unwrap(), "served");
                            served.push(connection);
                        }
                        Err(MessageError::Closed(CloseReason::Refused(Refusal::ListenerFull))) => {
                            told += 1
                        }
                        Err(error) => panic!("{error:?}"),
                    },
                    Err(EstablishError::Refused { refusal: Refusal::ListenerFull, .. }) => {
                        told += 1
                    }
                    Err(error) => panic!("{error:?}"),
                }
            }
            assert_eq!((served.len(), told), (2, ALL - 2));
            let stats = sides.listener.stats();
            assert_eq!(
                (stats.open, stats.accepted, stats.refused_full, stats.failed),
                (2, 2, ALL as u64 - 2, 0)
            );
        };
        tokio::select! {
            () = serve => unreachable!("it accepts for ever"),
            () = ask => {}
        }
    });
}

#[test]
fn peer_that_was_answered_learns_that_the_service_rejects_it() {
    run(|| async {
        let sides = Sides::new(&ConnectionConfig::default()).await;
        let connection = Connection::connect(&sides.client, sides.address).await.unwrap();
        sides.listener.request().await.unwrap().reject(b"no").await.unwrap();
        let error = connection.recv().await.unwrap_err();
        assert_eq!(error, MessageError::Closed(CloseReason::Rejected));
    });
}

//! What a service needs besides messages: the end of a connection as an event, properties of the
//! halves, and the listener as a stream.
//!
//! Uses the device that `TOKIO_RDMA_DEVICE` names, or the software device.

use std::pin::pin;

use futures::future::poll_immediate;
use futures::{FutureExt, StreamExt};
use tokio_rdma::software::Network;
use tokio_rdma::{CloseReason, Connection, Listener};

use crate::connected::{self, config, pair, recv, run};
use crate::torture::{device, soon};

fn is_lost(reason: CloseReason) -> bool {
    matches!(reason, CloseReason::Dropped | CloseReason::Disconnected)
}

#[test]
fn closed_returns_the_reason_on_both_sides_while_messages_are_exchanged() {
    run("closed", || async {
        for reason in [CloseReason::Clean, CloseReason::Dropped, CloseReason::Aborted] {
            let (a, b) = pair(&config());
            {
                let (mut ours, mut theirs) = (pin!(a.closed()), pin!(b.closed()));
                assert!(poll_immediate(&mut ours).await.is_none());
                assert!(poll_immediate(&mut theirs).await.is_none());
                // Each flush wakes all waiters of the same FIFO.
                for _ in 0..3 {
                    a.send("message").await.unwrap();
                    soon("flush", a.flush()).await.unwrap();
                    assert_eq!(recv(&b).await, "message");
                    assert!(poll_immediate(&mut ours).await.is_none());
                }
                b.send("last").await.unwrap();
                soon("flush", b.flush()).await.unwrap();
                if reason == CloseReason::Clean {
                    let closing = async { tokio::join!(a.close(), b.close()) };
                    assert_eq!(soon("close", closing).await, (Ok(()), Ok(())));
                } else {
                    b.abort();
                }
                let (ours, theirs) = soon("closed", async { tokio::join!(ours, theirs) }).await;
                match reason {
                    CloseReason::Clean => assert_eq!((ours, theirs), (reason, reason)),
                    _ => assert_eq!((ours, theirs), (CloseReason::Dropped, CloseReason::Aborted)),
                }
                if reason != CloseReason::Clean {
                    assert_eq!(recv(&a).await, "last", "what arrived can still be received");
                }
            }
            assert_eq!(a.closed().now_or_never(), a.close_reason(), "it is known at once");
        }
    });
}

#[test]
fn dropped_waits_for_the_end_leave_no_waiter_behind() {
    run("dropped waits", || async {
        let (a, b) = pair(&config());
        for _ in 0..100 {
            assert!(poll_immediate(pin!(a.closed())).await.is_none());
        }
        let (ours, theirs) = a.into_split();
        let waiting = [ours.closed().boxed_local(), theirs.closed().boxed_local()];
        let waiting = futures::future::join_all(waiting);
        let (reasons, ()) =
            soon("closed", async { tokio::join!(waiting, async { drop(b) }) }).await;
        assert!(reasons.into_iter().all(is_lost));
        assert!(ours.close_reason().is_some_and(is_lost));
        assert_eq!(ours.close_reason(), theirs.close_reason());
    });
}

#[test]
fn halves_have_the_address_and_counters_of_their_connection() {
    run("halves", || async {
        let (device, _) = device(&Network::new());
        let listener =
            Listener::bind_with(&device, connected::address(&device), &config()).await.unwrap();
        let config = config();
        let connecting = Connection::connect_with(&device, listener.local_addr(), &config);
        let (theirs, ours) =
            soon("connect", async { tokio::try_join!(listener.accept(), connecting) })
                .await
                .unwrap();
        ours.send("hello").await.unwrap();
        assert_eq!(recv(&theirs).await, "hello");
        let (expected, peer) = (ours.counters(), ours.peer_addr());
        assert_eq!((expected.sent, peer), (1, Some(listener.local_addr())));
        let (send, receive) = ours.into_split();
        assert_eq!((send.peer_addr(), receive.peer_addr()), (peer, peer));
        assert_eq!((send.counters().sent, receive.counters().sent), (1, 1));
        let (send, receive) = theirs.into_split();
        assert_eq!((send.counters().received, receive.counters().received), (1, 1));
    });
}

#[test]
fn listener_is_a_stream_that_does_not_hinder_accept() {
    run("stream of connections", || async {
        let (device, _) = device(&Network::new());
        let config = config();
        let mut listener =
            Listener::bind_with(&device, connected::address(&device), &config).await.unwrap();
        let address = listener.local_addr();
        let connect = async || {
            let connection = Connection::connect_with(&device, address, &config).await.unwrap();
            connection.send("hello").await.unwrap();
            connection
        };
        let mut clients = Vec::new();
        for round in 0..3 {
            // The stream waits, and is not polled again before `accept` returns.
            assert!(poll_immediate(listener.next()).await.is_none());
            let (client, server) =
                soon("accept", async { tokio::join!(connect(), listener.accept()) }).await;
            let server = server.unwrap();
            assert_eq!(recv(&server).await, "hello");
            clients.push((client, server));
            let (client, server) =
                soon("next", async { tokio::join!(connect(), listener.next()) }).await;
            let server = server.unwrap().unwrap();
            assert_eq!(recv(&server).await, "hello");
            clients.push((client, server));
            assert_eq!(listener.stats().accepted, 2 * (round + 1));
        }
    });
}

#[test]
fn stream_of_a_listener_ends_after_its_device_was_removed() {
    run("end of the stream", || async {
        let network = Network::new();
        let device = tokio_rdma::Device::software_in(&network, "server").unwrap();
        let mut listener = Listener::bind(&device, "127.0.0.1:0").await.unwrap();
        assert!(poll_immediate(listener.next()).await.is_none());
        network.control("server").unwrap().kill();
        let last = soon("error", listener.next()).await;
        assert!(matches!(last, Some(Err(tokio_rdma::EstablishError::Connect(_)))), "{last:?}");
        assert!(soon("end", listener.next()).await.is_none());
    });
}

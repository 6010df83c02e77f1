//! Services: the end of a connection as an event, properties of handles, the listener as a
//! stream, and its shutdown.
//!
//! Uses the device that `TOKIO_RDMA_DEVICE` names, or the software device.

use std::future::poll_fn;
use std::pin::pin;
use std::time::Duration;

use futures::future::{poll_immediate, try_join_all};
use futures::{FutureExt, StreamExt};
use tokio::task::JoinHandle;
use tokio_rdma::connection::{BufferBudget, RefusalReason, ShutdownReport};
use tokio_rdma::software::Network;
use tokio_rdma::{
    CloseReason, Connection, ConnectionConfig, Device, EstablishError, Listener, ListenerConfig,
    MessageError,
};

use crate::connected::{self, config, pair, recv, run};
use crate::torture::{device, eventually, hardware, soon};

const HOUR: Duration = Duration::from_secs(3600);

/// Returns true for the reasons of a peer that has gone. The queue pair may fail before the
/// connection manager reports the end.
fn is_lost(reason: CloseReason) -> bool {
    matches!(reason, CloseReason::Dropped | CloseReason::Disconnected | CloseReason::Operation(_))
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
        let (ours, theirs) = (a.clone(), a);
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
fn handles_have_the_address_and_counters_of_their_connection() {
    run("handles", || async {
        let (device, _) = device(&Network::new());
        let listener =
            Listener::bind_with(&device, connected::address(&device), &config()).await.unwrap();
        let config = config();
        let connecting = Connection::connect_with(&device, listener.local_addr().unwrap(), &config);
        let (theirs, ours) =
            soon("connect", async { tokio::try_join!(listener.accept(), connecting) })
                .await
                .unwrap();
        ours.send("hello").await.unwrap();
        assert_eq!(recv(&theirs).await, "hello");
        let (expected, peer) = (ours.counters(), ours.peer_addr().unwrap());
        assert_eq!((expected.sent, peer), (1, listener.local_addr().unwrap()));
        let (send, receive) = (ours.clone(), ours);
        assert_eq!((send.peer_addr().unwrap(), receive.peer_addr().unwrap()), (peer, peer));
        assert_eq!((send.counters().sent, receive.counters().sent), (1, 1));
        let (send, receive) = (theirs.clone(), theirs);
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
        let address = listener.local_addr().unwrap();
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
fn connections_are_established_before_accept_up_to_the_backlog() {
    run("backlog", || async {
        let (device, _) = device(&Network::new());
        let budget = BufferBudget::new(1 << 20);
        let config = ListenerConfig::new(config().budget(&budget)).backlog(3);
        let listener = Listener::bind_with(&device, connected::address(&device), &config).await;
        let listener = listener.unwrap();
        let client = connected::config();
        let mut clients = Vec::new();
        for number in 0..3 {
            let connecting =
                Connection::connect_with(&device, listener.local_addr().unwrap(), &client);
            let client = soon("connect", connecting).await.unwrap();
            client.send(vec![number]).await.unwrap();
            // The listener's device has it, in a receive of the connection.
            soon("flush", client.flush()).await.unwrap();
            clients.push(client);
        }
        eventually("all established", || listener.stats().open == 3).await;
        assert!((1..64 << 10).contains(&budget.counters().used), "{:?}", budget.counters());
        let mut found = Vec::new();
        for _ in 0..3 {
            let server = soon("accept", listener.accept()).await.unwrap();
            found.extend_from_slice(&recv(&server).await);
        }
        found.sort_unstable();
        assert_eq!(found, [0, 1, 2]);
    });
}

#[test]
fn connections_beyond_the_backlog_wait_until_others_are_accepted() {
    run("full backlog", || async {
        const ALL: usize = 12;
        let (device, _) = device(&Network::new());
        // A kernel does not answer for the listener, so requests beyond the handshakes evict those
        // that take longer than 0.1 s.
        let handshakes = if hardware().is_some() { ALL as u32 } else { 1 };
        let config = config();
        let limits = ListenerConfig::new(config.clone()).backlog(2).handshakes(handshakes);
        let listener = Listener::bind_with(&device, connected::address(&device), limits).await;
        let listener = listener.unwrap();
        let connect = || Connection::connect_with(&device, listener.local_addr().unwrap(), &config);
        let clients = try_join_all((0..ALL).map(|_| connect()));
        let serve = async {
            // Two, and the handshakes that were running when these were complete.
            eventually("backlog", || listener.stats().open >= 2).await;
            for _ in 0..100 {
                assert!(listener.stats().open <= 2 + handshakes, "{:?}", listener.stats());
                tokio::task::yield_now().await;
            }
            let mut served = Vec::new();
            for _ in 0..ALL {
                served.push(listener.accept().await.unwrap());
            }
            Ok(served)
        };
        let all = soon("all", async { tokio::try_join!(clients, serve) }).await;
        let (clients, served) = all.unwrap();
        assert_eq!((clients.len(), served.len()), (ALL, ALL));
    });
}

#[test]
fn request_returns_established_connections_first() {
    run("requests", || async {
        let (device, _) = device(&Network::new());
        let config = config();
        let listener = Listener::bind_with(&device, connected::address(&device), &config).await;
        let listener = listener.unwrap();
        let connect = || Connection::connect_with(&device, listener.local_addr().unwrap(), &config);
        let accepted = soon("connect", connect()).await.unwrap();
        eventually("established", || listener.stats().open == 1).await;
        let rejected = soon("connect", connect()).await.unwrap();
        eventually("established", || listener.stats().open == 2).await;
        let request = soon("request", listener.request()).await.unwrap();
        assert_eq!(request.peer_addr(), accepted.local_addr().unwrap());
        assert_eq!(request.device().name(), device.name());
        let server = soon("accept", request.accept()).await.unwrap();
        server.send("accepted").await.unwrap();
        assert_eq!(recv(&accepted).await, "accepted");
        let request = soon("request", listener.request()).await.unwrap();
        soon("reject", request.reject(b"no")).await.unwrap();
        let reason = soon("end", rejected.closed()).await;
        assert!(is_lost(reason), "{reason:?}");
        eventually("closed", || listener.stats().open == 1).await;

        // Now nothing is established before the service decides.
        let decide = async {
            let request = listener.request().await.unwrap();
            assert_eq!(listener.stats().open, 1);
            request.accept().await.unwrap()
        };
        let (client, server) = soon("third", async { tokio::join!(connect(), decide) }).await;
        assert_eq!(client.unwrap().local_addr().unwrap(), server.peer_addr().unwrap());
    });
}

#[test]
fn accepted_connection_costs_at_most_three_polls_of_the_listener() {
    run("polls", || async {
        let (device, _) = device(&Network::new());
        let config = config();
        let listener = Listener::bind_with(&device, connected::address(&device), &config).await;
        let listener = listener.unwrap();
        for _ in 0..20 {
            let mut polls = 0;
            let mut accept = pin!(listener.accept());
            let accept = poll_fn(|context| {
                polls += 1;
                accept.as_mut().poll(context)
            });
            // In a task of its own, so that only the listener wakes this one.
            let (device, config, to) =
                (device.clone(), config.clone(), listener.local_addr().unwrap());
            let connecting =
                tokio::spawn(async move { Connection::connect_with(&device, to, &config).await });
            let _server = accept.await.unwrap();
            let _client = soon("connect", connecting).await.unwrap().unwrap();
            assert!(polls <= 3, "{polls} polls");
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

/// A listener and its clients. Every timeout is an hour, so that a test that depends on one hangs.
struct Service {
    device: Device,
    config: ConnectionConfig,
    listener: Listener,
}

impl Service {
    async fn new() -> Self {
        let (device, _) = device(&Network::new());
        // Without keepalive, no deadline ends a wait by chance.
        let config = config().close_timeout(HOUR).keepalive(None);
        let address = connected::address(&device);
        let listener = Listener::bind_with(&device, address, &config).await.unwrap();
        Self { device, config, listener }
    }

    /// Returns the client's and the service's end.
    async fn connect(&self) -> [Connection; 2] {
        let address = self.listener.local_addr().unwrap();
        let connecting = Connection::connect_with(&self.device, address, &self.config);
        let both = async { tokio::try_join!(connecting, self.listener.accept()) };
        soon("connect", both).await.unwrap().into()
    }

    async fn shut_down(self, limit: Duration) -> [usize; 3] {
        let report = soon("shutdown", self.listener.shutdown(limit)).await;
        let ShutdownReport { clean, unclean, aborted, .. } = report;
        [clean, unclean, aborted]
    }
}

/// Answers each message, then closes the connection or drops it.
fn answer(connection: Connection, closes: bool) -> JoinHandle<Result<(), MessageError>> {
    tokio::spawn(async move {
        while let Some(request) = connection.recv().await? {
            connection.send(request).await?;
        }
        if closes { connection.close().await } else { Ok(()) }
    })
}

#[test]
fn shutdown_answers_what_has_arrived_and_closes_cleanly() {
    run("shutdown", || async {
        for closes in [true, false] {
            let service = Service::new().await;
            let (mut clients, mut services) = (Vec::new(), Vec::new());
            for _ in 0..3 {
                let [client, server] = service.connect().await;
                client.send("request").await.unwrap();
                client.send(vec![7; 100_000]).await.unwrap();
                while server.counters().inbox < 2 {
                    tokio::task::yield_now().await;
                }
                clients.push(client);
                services.push(server);
            }
            let serving = services.into_iter().map(|server| answer(server, closes));
            let serving: Vec<_> = serving.collect();
            // At once: the service waits only a second for a client that has not closed.
            let receiving = futures::future::join_all(clients.iter().map(async |client| {
                assert_eq!(recv(client).await, "request");
                assert_eq!(recv(client).await, vec![7; 100_000]);
                assert_eq!(soon("end", client.recv()).await, Ok(None));
                soon("close", client.close()).await.unwrap();
            }));
            // At first nothing receives: the requests are answered after the shutdown has begun.
            let (report, _) = tokio::join!(service.shut_down(HOUR), receiving);
            assert_eq!(report, [3, 0, 0]);
            for server in serving {
                soon("service", server).await.unwrap().unwrap();
            }
        }
    });
}

#[test]
fn idle_client_delays_the_shutdown_by_its_grace_only() {
    run("idle client", || async {
        let service = Service::new().await;
        let [idle, server] = service.connect().await;
        idle.send("request").await.unwrap();
        let serving = answer(server, true);
        assert_eq!(recv(&idle).await, "request");
        let [dropped, server] = service.connect().await;
        let dropping = answer(server, false);
        // Neither notices that the service ends.
        assert_eq!(service.shut_down(HOUR).await, [0, 2, 0]);
        let closed = soon("service", serving).await.unwrap();
        assert_eq!(closed, Err(MessageError::Closed(CloseReason::Local)));
        soon("service", dropping).await.unwrap().unwrap();
        for client in [&idle, &dropped] {
            assert_eq!(soon("end", client.recv()).await, Ok(None));
            let reason = soon("reason", client.closed()).await;
            assert!(is_lost(reason), "{reason}");
        }
    });
}

#[test]
fn messages_after_the_shutdown_has_begun_are_discarded() {
    run("late messages", || async {
        let service = Service::new().await;
        let [client, server] = service.connect().await;
        client.send("early").await.unwrap();
        while server.counters().inbox < 1 {
            tokio::task::yield_now().await;
        }
        let mut shutdown = pin!(service.shut_down(HOUR));
        assert!(poll_immediate(&mut shutdown).await.is_none());
        client.send("late").await.unwrap();
        soon("arrival", client.flush()).await.unwrap();
        while server.counters().inbox < 2 {
            tokio::task::yield_now().await;
        }
        assert_eq!(recv(&server).await, "early");
        for _ in 0..2 {
            assert_eq!(soon("end", server.recv()).await, Ok(None));
        }
        server.send("answer").await.unwrap();
        let closing = async { tokio::join!(server.close(), client.close()) };
        let (closed, report) = soon("close", async { tokio::join!(closing, shutdown) }).await;
        assert_eq!((closed, report), ((Ok(()), Ok(())), [1, 0, 0]));
        assert_eq!((server.counters().received, server.counters().discarded), (1, 1));
    });
}

#[test]
fn shutdown_aborts_at_its_limit() {
    run("limit", || async {
        let service = Service::new().await;
        let [client, server] = service.connect().await;
        let [finished, closed] = service.connect().await;
        let closing = async { tokio::join!(finished.close(), closed.close()) };
        assert_eq!(soon("close", closing).await, (Ok(()), Ok(())));
        // Its service does not notice, and holds the connection. The other was closed before.
        assert_eq!(service.shut_down(Duration::from_millis(1)).await, [0, 0, 1]);
        assert_eq!(server.close_reason(), Some(CloseReason::Shutdown));
        assert_eq!(server.send("x").await, Err(MessageError::Closed(CloseReason::Shutdown)));
        assert!(is_lost(soon("closed", client.closed()).await));
        drop(closed);
    });
}

#[test]
fn shutdown_refuses_new_connections_and_releases_the_address() {
    run("refusal", || async {
        let service = Service::new().await;
        let (device, config, address) = (
            service.device.clone(),
            service.config.clone(),
            service.listener.local_addr().unwrap(),
        );
        // The device does not answer by itself before `accept`, so the request waits.
        let connecting = Connection::connect_with(&device, address, &config);
        let mut connecting = pin!(connecting);
        let request = tokio::select! {
            request = soon("request", service.listener.request()) => request.unwrap(),
            early = &mut connecting => panic!("{early:?}"),
        };
        assert_eq!(service.shut_down(HOUR).await, [0, 0, 0]);
        let error = soon("refusal", async { tokio::join!(connecting, request.accept()) }).await;
        let shutting_down = |error: &EstablishError| {
            matches!(error, EstablishError::Refused { reason: RefusalReason::ShuttingDown, .. })
        };
        let (theirs, ours) = (error.0.unwrap_err(), error.1.unwrap_err());
        assert!(shutting_down(&theirs) && shutting_down(&ours), "{theirs:?}, {ours:?}");

        let refused = soon("connect", Connection::connect_with(&device, address, &config)).await;
        assert!(matches!(refused, Err(EstablishError::Connect(_))), "{refused:?}");
        // The kernel may keep the port for a while.
        if hardware().is_none() {
            let again = Listener::bind_with(&device, address, &config).await.unwrap();
            let connecting = Connection::connect_with(&device, address, &config);
            let both = async { tokio::try_join!(connecting, again.accept()) };
            soon("connect", both).await.unwrap();
        }
    });
}

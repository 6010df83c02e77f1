//! Events of the device: ports that go down and up, changed GIDs, a device that is removed.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use futures::StreamExt;
use futures::future::join_all;
use tokio::time::Instant;
use tokio_rdma::error::OpenError;
use tokio_rdma::peers::{
    Reconnect, ReconnectCause, ReconnectError, ReconnectPolicy, ReconnectState,
};
use tokio_rdma::software::Network;
use tokio_rdma::types::{AsyncEvent, PortNum};
use tokio_rdma::{CloseReason, Connection, Device};

use super::setup::{
    HOUR, Hosts, MS, config, config_of_silent_client, eager, is_waiting, paused, run, serve,
};
use crate::connected::recv;
use crate::torture::{eventually, soon};

/// Returns a policy whose delays only an event can end once they have [grown](until_grown).
fn patient() -> ReconnectPolicy {
    eager().greatest_delay(HOUR)
}

/// Ends waits until a delay has grown to half of the greatest one of [`patient`].
async fn until_grown(client: &Reconnect) {
    eventually("a long delay", || waits_long_or_retries(client, HOUR / 2)).await;
}

/// Returns true if the delay is at least `least`; otherwise ends it.
fn waits_long_or_retries(client: &Reconnect, least: Duration) -> bool {
    let is_long = matches!(client.state(), ReconnectState::Waiting { delay, .. } if delay >= least);
    if !is_long {
        client.retry_now();
    }
    is_long
}

fn cause(state: &ReconnectState) -> Option<&ReconnectCause> {
    match state {
        ReconnectState::Waiting { cause, .. } => Some(cause),
        _ => None,
    }
}

fn down() -> ReconnectCause {
    ReconnectCause::PortDown { device: "client".to_owned() }
}

fn removed() -> ReconnectCause {
    ReconnectCause::DeviceRemoved { device: "client".to_owned() }
}

async fn echoed(client: &Reconnect) -> u64 {
    let (generation, connection) = soon("connection", client.connected()).await.unwrap();
    connection.send("request").await.unwrap();
    assert_eq!(recv(&connection).await, "request");
    generation
}

#[test]
fn port_that_is_active_again_ends_the_wait_and_no_attempt_was_made() {
    run("port", || async {
        let hosts = Hosts::new().await;
        let control = hosts.network.control("client").unwrap();
        control.set_port(false);
        let serving = serve(hosts.listen().await);
        let client = hosts.reconnect(patient());
        until_grown(&client).await;
        assert_eq!(cause(&client.state()), Some(&down()));
        assert_eq!(control.queue_pairs(), 0);
        let mut states =
            pin!(client.states().skip_while(|state| std::future::ready(is_waiting(state))));
        control.set_port(true);
        let next = soon("attempt", states.next()).await.unwrap();
        let first = matches!(next, ReconnectState::Connecting { attempt: 1 });
        assert!(first || next == ReconnectState::Connected { generation: 1 }, "{next:?}");
        assert_eq!(echoed(&client).await, 1);
        serving.abort();
    });
}

#[test]
fn port_that_stays_down_uses_up_the_deadline_without_an_attempt() {
    run("deadline", || async {
        let hosts = Hosts::new().await;
        hosts.network.control("client").unwrap().set_port(false);
        let client = hosts.reconnect(eager().deadline(Some(20 * MS)));
        let error = soon("deadline", client.connected()).await.unwrap_err();
        let expected = ReconnectError::TimedOut { after: 20 * MS, attempts: 0, cause: down() };
        assert_eq!(error, expected);
        assert!(error.to_string().contains("device client has no active port"), "{error}");
    });
}

#[test]
fn gid_change_ends_the_wait_also_if_the_service_reads_the_event() {
    run("GID", || async {
        for reads in [false, true] {
            let hosts = Hosts::new().await;
            let client = hosts.reconnect(patient());
            until_grown(&client).await;
            let mut events = hosts.client.events().unwrap();
            let reading = reads.then(|| tokio::spawn(async move { events.next().await }));
            tokio::task::yield_now().await;
            let serving = serve(hosts.listen().await);
            let control = hosts.network.control("client").unwrap();
            control.announce(AsyncEvent::GidChange(PortNum(1)));
            assert_eq!(echoed(&client).await, 1);
            let event = match reading {
                Some(reading) => soon("event", reading).await.unwrap(),
                None => soon("event", hosts.client.events().unwrap().next()).await,
            };
            assert_eq!(event, Some(Ok(AsyncEvent::GidChange(PortNum(1)))));
            serving.abort();
        }
    });
}

#[test]
fn handles_of_a_device_spread_their_attempts_after_an_event_over_the_first_delay() {
    const CLIENTS: usize = 32;
    paused("jitter", || async {
        let hosts = Hosts::new().await;
        let control = hosts.network.control("client").unwrap();
        control.set_port(false);
        let serving = serve(hosts.listen().await);
        let policy = patient().first_delay(HOUR).greatest_delay(100 * HOUR);
        let clients: Vec<_> = (0..CLIENTS).map(|_| hosts.reconnect(policy.clone())).collect();
        for client in &clients {
            eventually("a long delay", || waits_long_or_retries(client, 50 * HOUR)).await;
        }
        control.set_port(true);
        // The clock advances while a thread notifies one handle after the other, so each delay
        // counts from its own state.
        let attempts = clients.iter().map(|client| async move {
            let mut states = pin!(client.states().skip_while(|state| {
                let long = matches!(state, ReconnectState::Waiting { delay, .. } if *delay > HOUR);
                std::future::ready(long)
            }));
            let next = states.next().await;
            let start = Instant::now();
            let Some(ReconnectState::Waiting { delay, .. }) = next else { panic!("{next:?}") };
            assert_eq!(states.next().await, Some(ReconnectState::Connecting { attempt: 1 }));
            let waited = start.elapsed();
            assert!(
                waited >= delay && waited < delay + Duration::from_secs(1),
                "{waited:?}, {delay:?}"
            );
            delay
        });
        let mut after = join_all(attempts).await;
        after.sort();
        let (first, last) = (after[0], after[CLIENTS - 1]);
        assert!(first >= HOUR / 2 && last <= HOUR, "{after:?}");
        assert!(last - first > HOUR / 10, "no jitter: {after:?}");
        serving.abort();
    });
}

#[test]
fn event_does_not_prolong_a_wait_and_retry_now_ends_its_delay() {
    paused("short wait", || async {
        let hosts = Hosts::new().await;
        let control = hosts.network.control("client").unwrap();
        control.set_port(false);
        let serving = serve(hosts.listen().await);
        // The delays do not grow, so that the rest of a wait is shorter than a delay.
        let policy = patient().first_delay(HOUR).greatest_delay(HOUR);
        for retry in [false, true] {
            control.set_port(false);
            let client = hosts.reconnect(policy.clone());
            eventually("wait", || is_waiting(&client.state())).await;
            let ReconnectState::Waiting { delay, .. } = client.state() else { unreachable!() };
            tokio::time::sleep(delay - Duration::from_secs(60)).await;
            let start = Instant::now();
            control.set_port(true);
            if retry {
                tokio::time::sleep(MS).await;
                client.retry_now();
            }
            client.connected().await.unwrap();
            let limit = Duration::from_secs(if retry { 1 } else { 61 });
            assert!(start.elapsed() < limit, "{:?}", start.elapsed());
        }
        serving.abort();
    });
}

#[test]
fn short_outage_of_a_port_harms_no_connection() {
    run("flap", || async {
        let hosts = Hosts::new().await;
        let control = hosts.network.control("client").unwrap();
        let serving = serve(hosts.listen().await);
        let client = hosts.reconnect(eager());
        for _ in 0..20 {
            assert_eq!(echoed(&client).await, 1);
            control.set_port(false);
            tokio::task::yield_now().await;
            control.set_port(true);
        }
        assert_eq!(echoed(&client).await, 1);
        serving.abort();
    });
}

#[test]
fn peer_lost_during_an_outage_is_noticed_when_the_port_is_active_again() {
    run("probe", || async {
        for by_connector in [false, true] {
            let config = config_of_silent_client();
            let hosts = Hosts::on(Network::new(), config.clone()).await;
            let listener = hosts.listen().await;
            let client = if by_connector {
                let (device, address) = (hosts.client.clone(), hosts.address);
                let connect = move || {
                    let (device, config) = (device.clone(), config.clone());
                    async move { Connection::connect_with(&device, address, &config).await }
                };
                Reconnect::with_connector(patient(), connect).unwrap()
            } else {
                hosts.reconnect(patient())
            };
            let (_, ours, theirs) = Hosts::next(&client, &listener).await;
            let control = hosts.network.control("client").unwrap();
            control.set_port(false);
            hosts.network.control("server").unwrap().kill();
            soon("end at the peer", theirs.closed()).await;
            assert_eq!(client.state(), ReconnectState::Connected { generation: 1 });
            control.set_port(true);
            let reason = soon("end", ours.closed()).await;
            assert!(matches!(reason, CloseReason::Operation(_)), "{reason}");
        }
    });
}

#[test]
fn removal_of_the_only_device_ends_attempts() {
    run("removed", || async {
        for connects in [false, true] {
            let hosts = Hosts::new().await;
            // The policy cannot bring the device back.
            let mut client = hosts.reconnect(patient().retry_when(|_| true));
            let mut ends = None;
            if connects {
                let listener = hosts.listen().await;
                drop(client);
                client = hosts.reconnect(patient());
                ends = Some(Hosts::next(&client, &listener).await);
            } else {
                until_grown(&client).await;
            }
            hosts.network.control("client").unwrap().kill();
            let failed = |state: &ReconnectState| matches!(state, ReconnectState::Failed(_));
            eventually("removal", || failed(&client.state())).await;
            let error = client.connected().await.unwrap_err();
            let ReconnectError::Permanent { cause, attempts } = &error else { panic!("{error:?}") };
            assert_eq!((cause, *attempts == 0), (&removed(), connects));
            if connects {
                let expected =
                    "stopped connecting before the next attempt: device client was removed";
                assert_eq!(error.to_string(), expected);
            }
            drop(ends);
        }
    });
}

#[test]
fn removed_device_is_opened_anew_when_it_is_back() {
    run("device back", || async {
        let network = Network::new();
        let server = Device::software_in(&network, "server").unwrap();
        let ip = server.default_path().unwrap().1.gid.to_ip();
        let listener = tokio_rdma::Listener::bind_with(&server, (ip, 0), &config()).await.unwrap();
        let opened = Arc::new(AtomicU32::new(0));
        let (inner, counted) = (network.clone(), opened.clone());
        let open = move || {
            let device = Device::software_in(&inner, "client")?;
            counted.fetch_add(1, Ordering::Relaxed);
            Ok(device)
        };
        let address = listener.local_addr().unwrap();
        let client = Reconnect::with_device(open, address, &config(), eager()).unwrap();
        for generation in 1..=3 {
            let (found, ours, theirs) = Hosts::next(&client, &listener).await;
            assert_eq!((found, opened.load(Ordering::Relaxed)), (generation, generation as u32));
            network.control("client").unwrap().kill();
            // The device cannot be opened while the old connection exists.
            eventually("failed open", || {
                matches!(cause(&client.state()), Some(ReconnectCause::Open(OpenError::Verb { .. })))
            })
            .await;
            soon("end", ours.closed()).await;
            drop(ours);
            drop(theirs);
        }
        assert_eq!(Hosts::next(&client, &listener).await.0, 4);
        let control = network.control("client").unwrap();
        drop(client);
        eventually("release", || control.queue_pairs() == 0).await;
    });
}

#[test]
fn device_that_cannot_be_opened_is_tried_until_the_deadline() {
    paused("no device", || async {
        let missing = || OpenError::NotFound {
            name: "absent".to_owned(),
            available: Vec::new(),
            reason: None,
        };
        let opened = Arc::new(AtomicU32::new(0));
        let counted = opened.clone();
        let open = move || {
            counted.fetch_add(1, Ordering::Relaxed);
            Err(missing())
        };
        let policy = ReconnectPolicy::default().deadline(Some(HOUR)).greatest_delay(60_000 * MS);
        let client = Reconnect::with_device(open, "127.0.0.1:9", &config(), policy).unwrap();
        let error = client.connected().await.unwrap_err();
        let cause = ReconnectCause::Open(missing());
        assert_eq!(error, ReconnectError::TimedOut { after: HOUR, attempts: 0, cause });
        // At least half of each delay is waited for.
        let opened = opened.load(Ordering::Relaxed);
        assert!((60..=150).contains(&opened), "{opened} calls");
    });
}

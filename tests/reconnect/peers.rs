//! Sets of peers: shared attempts, limits, eviction, timeouts and resolution.

use std::collections::{BTreeMap, VecDeque};
use std::future::pending;
use std::io;
use std::pin::pin;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::FutureExt;
use futures::future::{join_all, poll_immediate};
use tokio_rdma::cm::ConnectError;
use tokio_rdma::message::{Peer, PeerError, PeerSet, PeerSetConfig};
use tokio_rdma::{CloseReason, EstablishError};

use crate::setup::{Hosts, MS, config, paused, run, serve};
use crate::torture::{LONG, Seed, eventually, soon};

type Peers = PeerSet<u32>;

fn settings() -> PeerSetConfig {
    PeerSetConfig::default().attempt_timeout(LONG).wait(Some(LONG)).idle_timeout(None)
}

/// Returns a set whose peers are all at the address of the server, and the number of attempts.
fn peers(hosts: &Hosts, settings: PeerSetConfig) -> (Peers, Arc<AtomicU32>) {
    let attempts = Arc::new(AtomicU32::new(0));
    let (counted, address) = (attempts.clone(), hosts.address);
    let peers = PeerSet::new(&hosts.client, &config(), settings, move |_: &u32| {
        counted.fetch_add(1, Ordering::Relaxed);
        std::future::ready(Ok::<_, io::Error>(address))
    });
    (peers.unwrap(), attempts)
}

async fn get(peers: &Peers, key: u32) -> Peer<u32> {
    soon("peer", peers.get(&key)).await.unwrap()
}

async fn echo(peer: &Peer<u32>) {
    peer.send("hello").await.unwrap();
    assert_eq!(crate::connected::recv(peer).await, "hello");
}

fn is_busy(result: Result<Peer<u32>, PeerError>, name: &str, allowed: usize) -> bool {
    let error = result.unwrap_err();
    matches!(error, PeerError::Busy { field, limit, .. } if field == name && limit == allowed)
}

#[test]
fn callers_of_one_peer_share_an_attempt_and_its_connection() {
    run("shared attempt", || async {
        let hosts = Hosts::new().await;
        // Nothing accepts yet, so the attempt waits.
        let listener = hosts.listen().await;
        let (peers, attempts) = peers(&hosts, settings());
        let mut first = Box::pin(peers.get(&1));
        let mut others: Vec<_> = (0..8).map(|_| peers.get(&1).boxed()).collect();
        assert!(poll_immediate(&mut first).await.is_none());
        for waiting in &mut others {
            assert!(poll_immediate(waiting).await.is_none());
        }
        // The others continue the attempt that the first has started.
        drop(first);
        let serving = serve(listener);
        let got = soon("peers", join_all(others)).await;
        let generations = got.iter().map(|peer| peer.as_ref().unwrap().generation());
        let generations: Vec<_> = generations.collect();
        assert!(generations.iter().all(|&generation| generation == generations[0]));
        assert_eq!(attempts.load(Ordering::Relaxed), 1);
        let counters = peers.counters();
        assert_eq!((counters.connected, counters.peers, counters.in_flight), (1, 1, 8));
        drop(got);
        let counters = peers.counters();
        assert_eq!((counters.peers, counters.idle, counters.in_flight), (1, 1, 0));
        echo(&get(&peers, 1).await).await;
        assert_eq!(attempts.load(Ordering::Relaxed), 1, "the connection is used again");
        serving.abort();
    });
}

#[test]
fn error_of_an_attempt_reaches_all_its_callers_and_the_next_call_tries_again() {
    run("shared error", || async {
        let hosts = Hosts::new().await;
        let (peers, attempts) = peers(&hosts, settings());
        let calls = join_all((0..4).map(|_| peers.get(&1)));
        for result in soon("errors", calls).await {
            let refused = ConnectError::Refused { address: hosts.address };
            assert_eq!(result.unwrap_err(), PeerError::Connect(refused.into()));
        }
        assert_eq!(attempts.load(Ordering::Relaxed), 1);
        let counters = peers.counters();
        assert_eq!((counters.peers, counters.failed, counters.in_flight), (0, 1, 0));
        let serving = serve(hosts.listen().await);
        echo(&get(&peers, 1).await).await;
        assert_eq!(attempts.load(Ordering::Relaxed), 2);
        serving.abort();
    });
}

#[test]
fn attempt_is_dropped_with_its_last_caller() {
    run("dropped attempt", || async {
        let held = Arc::new(());
        let inner = held.clone();
        let peers = PeerSet::with_connector(settings().max_peers(1), move |_: &u32| {
            let inner = inner.clone();
            async move {
                pending::<()>().await;
                drop(inner);
                unreachable!()
            }
        })
        .unwrap();
        for _ in 0..3 {
            let mut calls: Vec<_> = (0..3).map(|_| Box::pin(peers.get(&1))).collect();
            for call in &mut calls {
                assert!(poll_immediate(call).await.is_none());
            }
            assert_eq!(Arc::strong_count(&held), 3);
            drop(calls);
            assert_eq!(Arc::strong_count(&held), 2);
            assert_eq!(peers.counters().peers, 0);
        }
        // A hanging attempt is given up.
        let hanging = PeerSet::with_connector(settings().attempt_timeout(MS), |_: &u32| pending());
        let error = soon("timeout", hanging.unwrap().get(&1)).await.unwrap_err();
        assert_eq!(error, PeerError::ConnectTimedOut { after: MS });
    });
}

/// Compares the set with a model of busy and idle peers, the idle ones in the order of use.
#[test]
fn eviction_takes_the_least_recently_used_idle_peer_and_never_a_busy_one() {
    const PLACES: usize = 4;
    run("eviction", || async {
        let seed =
            Seed::new("eviction_takes_the_least_recently_used_idle_peer_and_never_a_busy_one");
        let mut random = fastrand::Rng::with_seed(seed.value);
        let hosts = Hosts::new().await;
        let serving = serve(hosts.listen().await);
        let (peers, _) = peers(&hosts, settings().max_peers(PLACES).wait(None));
        let mut busy: BTreeMap<u32, Vec<Peer<u32>>> = BTreeMap::new();
        let mut idle: VecDeque<(u32, u64)> = VecDeque::new();
        let mut evictions = 0;
        for _ in 0..150 {
            let key = random.u32(..8);
            if random.bool() {
                let known = idle.iter().position(|&(idle, _)| idle == key);
                let expected = match (busy.get(&key), known) {
                    (Some(guards), _) => Some(guards[0].generation()),
                    (None, Some(at)) => idle.remove(at).map(|(_, generation)| generation),
                    (None, None) => None,
                };
                let all_busy = expected.is_none() && busy.len() == PLACES;
                if expected.is_none() && busy.len() + idle.len() == PLACES && !all_busy {
                    idle.pop_front();
                    evictions += 1;
                }
                let result = soon("peer", peers.get(&key)).await;
                if all_busy {
                    assert!(is_busy(result, "max_peers", PLACES));
                    continue;
                }
                let peer = result.unwrap();
                if let Some(expected) = expected {
                    assert_eq!(peer.generation(), expected, "the same connection");
                }
                busy.entry(key).or_default().push(peer);
            } else if let Some(guards) = busy.get_mut(&key) {
                let last = guards.pop().unwrap();
                if guards.is_empty() {
                    busy.remove(&key);
                    idle.push_back((key, last.generation()));
                }
            }
            for peer in busy.values().flatten() {
                assert_eq!(peer.close_reason(), None);
            }
            let counters = peers.counters();
            assert_eq!((counters.peers, counters.idle), (busy.len() + idle.len(), idle.len()));
            assert_eq!(counters.evicted, evictions);
        }
        assert!(evictions > 0);
        for peer in busy.values().flatten() {
            echo(peer).await;
        }
        serving.abort();
    });
}

#[test]
fn callers_wait_in_order_for_a_place() {
    run("waiting", || async {
        let hosts = Hosts::new().await;
        let serving = serve(hosts.listen().await);
        let (peers, _) = peers(&hosts, settings().max_peers(2));
        let mut held = vec![get(&peers, 0).await, get(&peers, 1).await];
        let mut calls: VecDeque<_> = (2..5).map(|key| Box::pin(peers.get(&KEYS[key]))).collect();
        for call in &mut calls {
            assert!(poll_immediate(call).await.is_none());
        }
        while let Some(first) = calls.pop_front() {
            held.remove(0);
            held.push(soon("place", first).await.unwrap());
            for later in &mut calls {
                assert!(poll_immediate(later).await.is_none(), "{peers:?}");
            }
        }
        assert_eq!(peers.counters().evicted, 3);
        // A caller that gives up leaves its position.
        let mut call = Box::pin(peers.get(&KEYS[5]));
        let mut next = Box::pin(peers.get(&KEYS[6]));
        assert!(poll_immediate(&mut call).await.is_none());
        assert!(poll_immediate(&mut next).await.is_none());
        drop(call);
        held.remove(0);
        soon("place", next).await.unwrap();
        serving.abort();
    });
}

const KEYS: [u32; 8] = [0, 1, 2, 3, 4, 5, 6, 7];

#[test]
fn wait_for_a_place_or_a_permit_ends_at_its_limit() {
    paused("limit of the wait", || async {
        let hosts = Hosts::new().await;
        let serving = serve(hosts.listen().await);
        let wait = Duration::from_secs(30);
        let settings = settings().max_peers(1).max_in_flight_per_peer(2).wait(Some(wait));
        let (peers, _) = peers(&hosts, settings);
        let held = [peers.get(&1).await.unwrap(), peers.get(&1).await.unwrap()];
        for (key, field, limit) in [(2, "max_peers", 1), (1, "max_in_flight_per_peer", 2)] {
            let start = tokio::time::Instant::now();
            let error = peers.get(&key).await.unwrap_err();
            assert_eq!(error, PeerError::Busy { field, limit, waited: Some(wait) });
            assert!(start.elapsed() >= wait && start.elapsed() < 2 * wait);
        }
        drop(held);
        assert!(peers.get(&2).await.is_ok());
        serving.abort();
    });
}

#[test]
fn guards_are_limited_per_peer_and_in_total() {
    run("in flight", || async {
        let hosts = Hosts::new().await;
        let serving = serve(hosts.listen().await);
        let limits = settings().max_in_flight(3).max_in_flight_per_peer(2);
        let (peers, _) = peers(&hosts, limits.wait(None));
        let mut held = vec![get(&peers, 1).await, get(&peers, 1).await];
        assert!(is_busy(peers.get(&1).await, "max_in_flight_per_peer", 2));
        held.push(get(&peers, 2).await);
        assert!(is_busy(peers.get(&2).await, "max_in_flight", 3));
        assert!(is_busy(peers.get(&3).await, "max_in_flight", 3));
        assert_eq!(peers.counters().peers, 2, "a refused caller leaves no peer behind");
        held.remove(0);
        held.push(get(&peers, 2).await);
        assert_eq!(peers.counters().in_flight, 3);
        drop(held);
        assert_eq!(peers.counters().in_flight, 0);
        serving.abort();
    });
}

#[test]
fn idle_connections_are_closed_cleanly_after_their_timeout() {
    paused("idle timeout", || async {
        let hosts = Hosts::new().await;
        let listener = hosts.listen().await;
        let idle = Duration::from_secs(60);
        let (peers, _) = peers(&hosts, settings().idle_timeout(Some(idle)));
        let (peer, accepted) = tokio::join!(peers.get(&1), listener.accept());
        let (peer, server) = (peer.unwrap(), accepted.unwrap());
        // A busy peer is kept.
        tokio::time::sleep(10 * idle).await;
        assert_eq!((peer.close_reason(), peers.counters().expired), (None, 0));
        drop(peer);
        for _ in 0..5 {
            tokio::time::sleep(idle / 2).await;
            assert_eq!(peers.get(&1).await.unwrap().generation(), 1, "each use extends the time");
        }
        let expiry = async {
            tokio::time::sleep(2 * idle).await;
            peers.counters()
        };
        let (counters, end) = tokio::join!(expiry, server.recv());
        assert_eq!((counters.expired, counters.peers), (1, 0));
        assert_eq!(end, Ok(None), "the peer sees a clean end");
        server.close().await.unwrap();
        let (peer, accepted) = tokio::join!(peers.get(&1), listener.accept());
        assert_eq!(peer.unwrap().generation(), 2);
        drop(accepted);
    });
}

#[test]
fn lost_connections_are_replaced_at_the_next_use() {
    run("lost", || async {
        let hosts = Hosts::new().await;
        let listener = hosts.listen().await;
        let (peers, _) = peers(&hosts, settings());
        let mut last = 0;
        for held in [true, false, true, false] {
            let both = async { tokio::join!(peers.get(&1), listener.accept()) };
            let (peer, server) = soon("connection", both).await;
            let peer = peer.unwrap();
            assert!(peer.generation() > last);
            last = peer.generation();
            server.unwrap().abort();
            soon("end", peer.closed()).await;
            if held {
                // The guard of the lost connection does not prevent a new one.
                let both = async { tokio::join!(peers.get(&1), listener.accept()) };
                let (newer, server) = soon("connection", both).await;
                let newer = newer.unwrap();
                assert!(newer.generation() > peer.generation());
                last = newer.generation();
                server.unwrap().abort();
                soon("end", newer.closed()).await;
            }
        }
        assert_eq!(peers.counters().lost, 6);
        drop(listener);
        assert!(soon("refusal", peers.get(&1)).await.is_err());
        assert_eq!(peers.counters().peers, 0);
        hosts.assert_clean().await;
    });
}

#[test]
fn peers_are_resolved_for_each_attempt() {
    run("resolution", || async {
        let (old, new) = (Hosts::new().await, Hosts::new().await);
        let serving = [serve(old.listen().await)];
        let address = Arc::new(Mutex::new(Err("not in the directory")));
        let directory = address.clone();
        let peers = PeerSet::new(&old.client, &config(), settings(), move |_: &u32| {
            let found = *directory.lock().unwrap();
            async move { found.map_err(io::Error::other) }
        })
        .unwrap();
        let error = soon("lookup", peers.get(&1)).await.unwrap_err();
        let PeerError::Connect(EstablishError::Connect(ConnectError::Lookup { message, .. })) =
            &error
        else {
            panic!("{error:?}")
        };
        assert_eq!(message, "not in the directory");

        *address.lock().unwrap() = Ok(old.address);
        let before = get(&peers, 1).await;
        echo(&before).await;
        // A later change does not affect the connection that exists, until it is disconnected.
        let other = std::net::SocketAddr::new(new.address.ip(), 9);
        *address.lock().unwrap() = Ok(other);
        assert_eq!(get(&peers, 1).await.generation(), before.generation());
        assert!(peers.disconnect(&1));
        assert!(!peers.disconnect(&1));
        assert!(soon("other address", peers.get(&1)).await.is_err());
        echo(&before).await;
        *address.lock().unwrap() = Ok(old.address);
        assert!(get(&peers, 1).await.generation() > before.generation());
        drop(before);
        assert!(peers.disconnect(&1), "an idle peer");
        assert_eq!(peers.counters().peers, 0);
        serving.iter().for_each(|task| task.abort());
    });
}

#[test]
fn dropped_set_closes_all_connections() {
    run("dropped set", || async {
        let hosts = Hosts::new().await;
        let serving = serve(hosts.listen().await);
        let (peers, _) = peers(&hosts, settings());
        let busy = get(&peers, 1).await;
        drop(get(&peers, 2).await);
        assert_eq!(peers.counters().idle, 1);
        drop(peers);
        assert_eq!(busy.close_reason(), Some(CloseReason::Aborted));
        let control = hosts.network.control("client").unwrap();
        eventually("release of all queue pairs", || control.queue_pairs() == 0).await;
        drop(busy);
        serving.abort();
    });
}

#[test]
fn many_tasks_share_few_peers_without_a_lost_wake_up() {
    run("many tasks", || async {
        let hosts = Hosts::new().await;
        let serving = serve(hosts.listen().await);
        let limits = settings().max_peers(3).max_in_flight(6).max_in_flight_per_peer(2);
        let (peers, _) = peers(&hosts, limits);
        let peers = Arc::new(peers);
        let mut tasks = tokio::task::JoinSet::new();
        for task in 0..24 {
            let peers = peers.clone();
            tasks.spawn(async move {
                for round in 0..12 {
                    let call = peers.get(&KEYS[(task * 5 + round * 3) % KEYS.len()]);
                    let mut call = pin!(call);
                    // Some callers give up.
                    if (task + round) % 4 == 0 {
                        drop(poll_immediate(&mut call).await);
                        continue;
                    }
                    let peer = call.await.unwrap();
                    peer.send("request").await.unwrap();
                    peer.flush().await.unwrap();
                    tokio::task::yield_now().await;
                }
            });
        }
        while let Some(ended) = soon("task", tasks.join_next()).await {
            ended.unwrap();
        }
        let counters = peers.counters();
        assert_eq!((counters.in_flight, counters.failed), (0, 0), "{peers:?}");
        assert!(counters.peers <= 3 && counters.peers == counters.idle, "{peers:?}");
        assert!(counters.evicted > 0);
        serving.abort();
    });
}

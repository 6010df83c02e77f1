//! Sets of peers: shared attempts, limits, eviction, timeouts and resolution.

use std::collections::{BTreeMap, VecDeque};
use std::future::pending;
use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::FutureExt;
use futures::future::{join_all, poll_immediate};
use tokio_rdma::CloseReason;
use tokio_rdma::cm::ConnectError;
use tokio_rdma::peers::{Peer, PeerError, PeerLink, PeerSet, PeerSetConfig};
use tokio_rdma::software::Network;

use super::links::{Dc, Directory, Entry, Rc, Server};
use super::setup::{Hosts, MS, config_of_silent_client, paused, run};
use crate::torture::{HANG, Seed, eventually, soon};

/// Makes a test over connections and a test over peers of a DC pool. In virtual time with
/// `paused`, else with `run` by each flavour of runtimes.
macro_rules! over_both {
    ($($run:ident: $test:ident),* $(,)?) => {
        $(mod $test {
            #[test]
            fn over_rc() {
                super::$run(stringify!($test), super::$test::<super::Rc>);
            }
            #[test]
            fn over_dc() {
                super::$run(stringify!($test), super::$test::<super::Dc>);
            }
        })*
    };
}

over_both!(
    run: callers_of_one_peer_share_an_attempt_and_its_link,
    run: error_of_an_attempt_reaches_all_its_callers_and_the_next_call_tries_again,
    run: eviction_takes_the_least_recently_used_idle_peer_and_never_a_busy_one,
    run: callers_wait_in_order_for_a_place,
    paused: wait_for_a_place_or_a_permit_ends_at_its_limit,
    run: guards_are_limited_per_peer_and_in_total,
    paused: idle_links_are_closed_after_their_timeout,
    run: ended_links_are_replaced_at_the_next_use,
    run: peers_are_resolved_for_each_attempt,
    run: many_tasks_share_few_peers_without_a_lost_wake_up,
);

fn settings() -> PeerSetConfig {
    PeerSetConfig::default().attempt_timeout(HANG).wait(Some(HANG)).idle_timeout(None)
}

/// Starts a server, and returns it with a set whose peers are all at its address.
async fn start<S: Server>(settings: PeerSetConfig) -> (S, PeerSet<u32, S::Link>) {
    let server = S::start().await;
    let peers = server.peers(settings, &Directory::new(Entry::Found));
    (server, peers)
}

async fn get<L: PeerLink>(peers: &PeerSet<u32, L>, key: u32) -> Peer<u32, L> {
    soon("peer", peers.get(&key)).await.unwrap()
}

/// Returns true if the limit `name` of `allowed` has refused the call.
fn is_busy<L: PeerLink>(
    result: Result<Peer<u32, L>, PeerError>,
    name: &str,
    allowed: usize,
) -> bool {
    result.is_err_and(|error| match error {
        PeerError::Busy { field, limit, .. } => field == name && limit == allowed,
        _ => false,
    })
}

async fn callers_of_one_peer_share_an_attempt_and_its_link<S: Server>() {
    let (server, directory) = (S::start().await, Directory::new(Entry::Pending));
    let peers = server.peers(settings(), &directory);
    let mut first = Box::pin(peers.get(&1));
    let mut others: Vec<_> = (0..8).map(|_| peers.get(&1).boxed()).collect();
    assert!(poll_immediate(&mut first).await.is_none());
    for waiting in &mut others {
        assert!(poll_immediate(waiting).await.is_none());
    }
    // The others continue the attempt that the first has started.
    drop(first);
    directory.set(Entry::Found);
    let got = soon("peers", join_all(others)).await;
    let generations = got.iter().map(|peer| peer.as_ref().unwrap().generation());
    let generations: Vec<_> = generations.collect();
    assert!(generations.iter().all(|&generation| generation == generations[0]));
    assert_eq!(directory.calls(), 1);
    let counters = peers.counters();
    assert_eq!((counters.connected, counters.peers, counters.in_flight), (1, 1, 8));
    drop(got);
    let counters = peers.counters();
    assert_eq!((counters.peers, counters.idle, counters.in_flight), (1, 1, 0));
    let peer = get(&peers, 1).await;
    server.exchange(&peer).await;
    assert_eq!(directory.calls(), 1, "the link is used again");
}

async fn error_of_an_attempt_reaches_all_its_callers_and_the_next_call_tries_again<S: Server>() {
    let (server, directory) = (S::start().await, Directory::new(Entry::Pending));
    let peers = server.peers(settings(), &directory);
    let mut calls = join_all((0..4).map(|_| peers.get(&1)));
    assert!(poll_immediate(&mut calls).await.is_none());
    directory.set(Entry::Missing);
    for result in soon("errors", calls).await {
        assert_eq!(result.unwrap_err(), not_found());
    }
    assert_eq!(directory.calls(), 1);
    let counters = peers.counters();
    assert_eq!((counters.peers, counters.failed, counters.in_flight), (0, 1, 0));
    directory.set(Entry::Found);
    let peer = get(&peers, 1).await;
    server.exchange(&peer).await;
    assert_eq!(directory.calls(), 2);
}

fn not_found() -> PeerError {
    let message = "not in the directory".to_owned();
    PeerError::Connect(
        ConnectError::Lookup { host: None, kind: std::io::ErrorKind::Other, message }.into(),
    )
}

#[test]
fn refused_connection_is_an_error_of_all_its_callers() {
    run("refused", || async {
        let hosts = Hosts::new().await;
        let peers = PeerSet::new(&hosts.client, &hosts.config, settings(), {
            let address = hosts.address;
            move |_: &u32| std::future::ready(Ok(address))
        })
        .unwrap();
        for result in soon("errors", join_all((0..4).map(|_| peers.get(&1)))).await {
            let refused = ConnectError::Refused { address: hosts.address, in_process: true };
            assert_eq!(result.unwrap_err(), PeerError::Connect(refused.into()));
        }
        assert_eq!(peers.counters().failed, 1);
        hosts.assert_clean().await;
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
async fn eviction_takes_the_least_recently_used_idle_peer_and_never_a_busy_one<S: Server>() {
    const PLACES: usize = 4;
    let seed = Seed::new("eviction_takes_the_least_recently_used_idle_peer_and_never_a_busy_one");
    let mut random = fastrand::Rng::with_seed(seed.value);
    let (server, peers) = start::<S>(settings().max_peers(PLACES).wait(None)).await;
    let mut busy: BTreeMap<u32, Vec<Peer<u32, S::Link>>> = BTreeMap::new();
    let mut idle: VecDeque<(u32, u64)> = VecDeque::new();
    let mut evictions = 0;
    let mut steps = 0;
    // With some seeds, more steps are needed for one eviction.
    while steps < 150 || evictions == 0 {
        steps += 1;
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
                assert_eq!(peer.generation(), expected, "the same link");
            }
            busy.entry(key).or_default().push(peer);
        } else if let Some(guards) = busy.get_mut(&key) {
            let last = guards.pop().unwrap();
            if guards.is_empty() {
                busy.remove(&key);
                idle.push_back((key, last.generation()));
            }
        }
        assert!(busy.values().flatten().all(|peer| !peer.has_ended()));
        let counters = peers.counters();
        assert_eq!((counters.peers, counters.idle), (busy.len() + idle.len(), idle.len()));
        assert_eq!(counters.evicted, evictions);
    }
    for peer in busy.values().flatten() {
        server.exchange(peer).await;
    }
}

async fn callers_wait_in_order_for_a_place<S: Server>() {
    let (_server, peers) = start::<S>(settings().max_peers(2)).await;
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
}

const KEYS: [u32; 8] = [0, 1, 2, 3, 4, 5, 6, 7];

async fn wait_for_a_place_or_a_permit_ends_at_its_limit<S: Server>() {
    let wait = Duration::from_secs(30);
    let settings = settings().max_peers(1).max_in_flight_per_peer(2).wait(Some(wait));
    let (_server, peers) = start::<S>(settings).await;
    let held = [peers.get(&1).await.unwrap(), peers.get(&1).await.unwrap()];
    for (key, field, limit) in [(2, "max_peers", 1), (1, "max_in_flight_per_peer", 2)] {
        let start = tokio::time::Instant::now();
        let error = peers.get(&key).await.unwrap_err();
        assert_eq!(error, PeerError::Busy { field, limit, waited: Some(wait) });
        assert!(start.elapsed() >= wait && start.elapsed() < 2 * wait);
    }
    drop(held);
    assert!(peers.get(&2).await.is_ok());
}

async fn guards_are_limited_per_peer_and_in_total<S: Server>() {
    let limits = settings().max_in_flight(3).max_in_flight_per_peer(2);
    let (_server, peers) = start::<S>(limits.wait(None)).await;
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
}

async fn idle_links_are_closed_after_their_timeout<S: Server>() {
    let idle = Duration::from_secs(60);
    let (_server, peers) = start::<S>(settings().idle_timeout(Some(idle))).await;
    let peer = peers.get(&1).await.unwrap();
    // A busy peer is kept.
    tokio::time::sleep(10 * idle).await;
    assert_eq!((peer.has_ended(), peers.counters().expired), (false, 0));
    drop(peer);
    for _ in 0..5 {
        tokio::time::sleep(idle / 2).await;
        assert_eq!(peers.get(&1).await.unwrap().generation(), 1, "each use extends the time");
    }
    tokio::time::sleep(2 * idle).await;
    let counters = peers.counters();
    assert_eq!((counters.expired, counters.peers), (1, 0));
    assert_eq!(peers.get(&1).await.unwrap().generation(), 2);
}

#[test]
fn idle_connections_are_closed_cleanly() {
    paused("clean close", || async {
        let hosts = Hosts::new().await;
        let listener = hosts.listen().await;
        let address = hosts.address;
        let idle = Duration::from_secs(60);
        let settings = settings().idle_timeout(Some(idle));
        let resolve = move |_: &u32| std::future::ready(Ok(address));
        let peers = PeerSet::new(&hosts.client, &hosts.config, settings, resolve).unwrap();
        let (peer, accepted) = tokio::join!(peers.get(&1), listener.accept());
        let server = accepted.unwrap();
        drop(peer.unwrap());
        let (_, end) = tokio::join!(tokio::time::sleep(2 * idle), server.recv());
        assert_eq!(end, Ok(None), "the peer sees a clean end");
        server.close().await.unwrap();
    });
}

async fn ended_links_are_replaced_at_the_next_use<S: Server>() {
    let (server, directory) = (S::start().await, Directory::new(Entry::Found));
    let peers = server.peers(settings(), &directory);
    let mut last = 0;
    for held in [true, false, true, false] {
        let peer = get(&peers, 1).await;
        assert!(peer.generation() > last);
        last = peer.generation();
        server.exchange(&peer).await;
        server.lose(&peer).await;
        assert!(peer.has_ended());
        if held {
            // The guard of the ended link does not prevent a new one.
            let newer = get(&peers, 1).await;
            assert!(newer.generation() > peer.generation());
            last = newer.generation();
            server.lose(&newer).await;
        }
    }
    assert_eq!(peers.counters().lost, 6);
    directory.set(Entry::Missing);
    assert_eq!(soon("lookup", peers.get(&1)).await.unwrap_err(), not_found());
    assert_eq!(peers.counters().peers, 0);
}

async fn peers_are_resolved_for_each_attempt<S: Server>() {
    let (server, directory) = (S::start().await, Directory::new(Entry::Missing));
    let peers = server.peers(settings(), &directory);
    assert_eq!(soon("lookup", peers.get(&1)).await.unwrap_err(), not_found());
    directory.set(Entry::Found);
    let before = get(&peers, 1).await;
    // A later change does not affect the link that exists, until it is disconnected.
    directory.set(Entry::Missing);
    assert_eq!(get(&peers, 1).await.generation(), before.generation());
    assert!(peers.disconnect(&1));
    assert!(!peers.disconnect(&1));
    assert_eq!(soon("lookup", peers.get(&1)).await.unwrap_err(), not_found());
    server.exchange(&before).await;
    directory.set(Entry::Found);
    assert!(get(&peers, 1).await.generation() > before.generation());
    drop(before);
    assert!(peers.disconnect(&1), "an idle peer");
    assert_eq!(peers.counters().peers, 0);
    assert_eq!(directory.calls(), 4);
}

#[test]
fn peers_lost_during_an_outage_are_noticed_when_the_port_is_active_again() {
    run("outage", || async {
        let hosts = Hosts::on(Network::new(), config_of_silent_client()).await;
        let (listener, address) = (hosts.listen().await, hosts.address);
        let resolve = move |_: &u32| std::future::ready(Ok(address));
        let peers = PeerSet::new(&hosts.client, &hosts.config, settings(), resolve).unwrap();
        let both = async |key| {
            let both = async { tokio::join!(peers.get(&key), listener.accept()) };
            let (peer, server) = soon("connection", both).await;
            (peer.unwrap(), server.unwrap())
        };
        let (busy, first) = both(1).await;
        let (idle, second) = both(2).await;
        drop(idle);
        let control = hosts.network.control("client").unwrap();
        control.set_port(false);
        hosts.network.control("server").unwrap().kill();
        for theirs in [first, second] {
            soon("end at the peer", theirs.closed()).await;
        }
        assert_eq!((busy.close_reason(), control.queue_pairs()), (None, 2));
        control.set_port(true);
        let reason = soon("end", busy.closed()).await;
        assert!(matches!(reason, CloseReason::Operation(_)), "{reason}");
        eventually("end of the idle connection", || control.queue_pairs() == 0).await;
        assert_eq!(peers.counters().idle, 1, "the next use replaces it");
    });
}

#[test]
fn connections_of_a_removed_device_are_not_returned() {
    run("removed device", || async {
        let (server, peers) = start::<Rc>(settings()).await;
        let (busy, used) = (get(&peers, 1).await, get(&peers, 2).await);
        server.hosts.network.control("client").unwrap().kill();
        soon("end", busy.closed()).await;
        soon("end", used.closed()).await;
        drop(used);
        for key in [1, 2] {
            let error = soon("error", peers.get(&key)).await.unwrap_err();
            assert!(matches!(error, PeerError::Connect(_)), "{error:?}");
        }
        assert_eq!(peers.counters().peers, 1, "the guard is left");
    });
}

#[test]
fn dropped_set_closes_all_connections() {
    run("dropped set", || async {
        let (server, peers) = start::<Rc>(settings()).await;
        let busy = get(&peers, 1).await;
        drop(get(&peers, 2).await);
        assert_eq!(peers.counters().idle, 1);
        drop(peers);
        assert_eq!(busy.close_reason(), Some(CloseReason::Aborted));
        let control = server.hosts.network.control("client").unwrap();
        eventually("release of all queue pairs", || control.queue_pairs() == 0).await;
    });
}

#[test]
fn guards_of_dc_peers_outlive_the_set() {
    run("dropped set", || async {
        let (server, peers) = start::<Dc>(settings()).await;
        let busy = get(&peers, 1).await;
        drop(peers);
        server.exchange(&busy).await;
    });
}

/// A link that counts how it ends.
struct Session {
    key: u32,
    ends: Arc<Mutex<Vec<(&'static str, u32)>>>,
}

impl PeerLink for Session {
    fn has_ended(&self) -> bool {
        false
    }

    async fn close(&self) {
        self.ends.lock().unwrap().push(("closed", self.key));
    }

    fn abort(&self) {
        self.ends.lock().unwrap().push(("aborted", self.key));
    }
}

#[test]
fn links_of_the_service_are_closed_when_evicted_and_aborted_with_the_set() {
    run("own links", || async {
        let ends = Arc::new(Mutex::new(Vec::new()));
        let made = ends.clone();
        let peers = PeerSet::with_links(settings().max_peers(2), move |&key: &u32| {
            let ends = made.clone();
            async move { Ok(Session { key, ends }) }
        })
        .unwrap();
        for key in 0..3 {
            assert_eq!(get(&peers, key).await.key, key);
        }
        eventually("close", || *ends.lock().unwrap() == [("closed", 0)]).await;
        drop(peers);
        let mut ended = std::mem::take(&mut *ends.lock().unwrap());
        ended.sort_unstable();
        assert_eq!(ended, [("aborted", 1), ("aborted", 2), ("closed", 0)]);
    });
}

async fn many_tasks_share_few_peers_without_a_lost_wake_up<S: Server>() {
    let limits = settings().max_peers(3).max_in_flight(6).max_in_flight_per_peer(2);
    let (server, peers) = start::<S>(limits).await;
    let shared = Arc::new((server, peers));
    let mut tasks = tokio::task::JoinSet::new();
    for task in 0..24 {
        let shared = shared.clone();
        tasks.spawn(async move {
            let (server, peers) = &*shared;
            for round in 0..12 {
                let call = peers.get(&KEYS[(task * 5 + round * 3) % KEYS.len()]);
                let mut call = pin!(call);
                // Some callers give up.
                if (task + round) % 4 == 0 {
                    drop(poll_immediate(&mut call).await);
                    continue;
                }
                let peer = call.await.unwrap();
                server.exchange(&peer).await;
                tokio::task::yield_now().await;
            }
        });
    }
    while let Some(ended) = soon("task", tasks.join_next()).await {
        ended.unwrap();
    }
    let peers = &shared.1;
    let counters = peers.counters();
    assert_eq!((counters.in_flight, counters.failed), (0, 0), "{peers:?}");
    assert!(counters.peers <= 3 && counters.peers == counters.idle, "{peers:?}");
    assert!(counters.evicted > 0);
}

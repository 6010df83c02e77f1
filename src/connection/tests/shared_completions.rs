//! Which connections share completion queues, and for how long.

use std::sync::Arc;

use tokio::runtime::{Builder, Runtime};

use crate::connection::resources::ResourceCache;
use crate::connection::shared_completions::QueueLease;
use crate::engine::{BusyPoller, CompletionMode, CompletionQueue};
use crate::software::Network;
use crate::types::AsyncEvent;
use crate::verbs::Device;

/// Entries of a connection with default settings.
const ENTRIES: [u32; 2] = [128, 76];

fn cache(name: &str) -> (Network, Arc<ResourceCache>) {
    let network = Network::new();
    let device = Device::software_in(&network, name).unwrap();
    (network, ResourceCache::of(&device))
}

fn runtime() -> Runtime {
    Builder::new_current_thread().enable_all().build().unwrap()
}

/// Leases queues for some connections made in a runtime.
fn lease(
    runtime: &Runtime,
    cache: &Arc<ResourceCache>,
    mode: &CompletionMode,
    number: usize,
) -> Vec<QueueLease> {
    let _context = runtime.enter();
    let lease = |_| QueueLease::new(cache.clone(), mode, ENTRIES).unwrap();
    (0..number).map(lease).collect()
}

fn distinct(leases: &[QueueLease]) -> Vec<CompletionQueue> {
    let mut distinct = Vec::<CompletionQueue>::new();
    for queue in leases.iter().map(|lease| &lease.queues[0]) {
        if !distinct.iter().any(|other| other.same(queue)) {
            distinct.push(queue.clone());
        }
    }
    distinct
}

#[test]
fn connections_share_queues_with_those_of_their_runtime_and_mode() {
    let (_network, cache) = cache("shared");
    let (one, other) = (runtime(), runtime());
    let pollers = [BusyPoller::new().unwrap(), BusyPoller::new().unwrap()];
    let modes = [CompletionMode::Event, CompletionMode::Cooperative, CompletionMode::Hybrid];
    let modes = modes.into_iter().chain(pollers.map(CompletionMode::BusyPoll));
    let mut all = Vec::new();
    for mode in modes.collect::<Vec<_>>() {
        for runtime in [&one, &other] {
            let leases = lease(runtime, &cache, &mode, 2);
            assert_eq!(distinct(&leases).len(), 1, "{mode:?}");
            let [sends, receives] = &leases[0].queues;
            assert_eq!(sends.same(receives), !matches!(mode, CompletionMode::Event));
            all.extend(leases);
        }
    }
    assert_eq!(distinct(&all).len(), 5 * 2);
}

#[test]
fn runtime_of_many_threads_has_queues_for_each() {
    let (_network, cache) = cache("threads");
    let threads = Builder::new_multi_thread().worker_threads(3).build().unwrap();
    let leases = lease(&threads, &cache, &CompletionMode::Event, 9);
    let queues = distinct(&leases);
    assert_eq!(queues.len(), 3);
    for queue in queues {
        let users = leases.iter().filter(|lease| lease.queues[0].same(&queue)).count();
        assert_eq!(users, 3);
    }
}

#[test]
fn queues_of_many_threads_are_small_until_all_are_full() {
    let (_network, cache) = cache("many");
    let threads = Builder::new_multi_thread().worker_threads(16).build().unwrap();
    let mut leases = lease(&threads, &cache, &CompletionMode::Event, 16 * 4);
    let capacities =
        |leases: &[_]| distinct(leases).iter().map(CompletionQueue::capacity).collect::<Vec<_>>();
    assert_eq!(capacities(&leases), [512; 16]);
    leases.extend(lease(&threads, &cache, &CompletionMode::Event, 1));
    assert_eq!(capacities(&leases)[16..], [16 * 512]);
}

#[test]
fn full_queues_are_followed_by_as_large_ones_as_all_before_them() {
    let (_network, cache) = cache("full");
    let leases = lease(&runtime(), &cache, &CompletionMode::Event, 1000);
    let queues = distinct(&leases);
    let mut before = 0;
    for queue in &queues {
        assert_eq!(queue.capacity(), u32::max(before, 512));
        let users = leases.iter().filter(|lease| lease.queues[0].same(queue)).count() as u32;
        assert!(users * ENTRIES[0] <= queue.capacity(), "{users} of {}", queue.capacity());
        before += queue.capacity();
    }
    assert!(before < 4 * 1000 * ENTRIES[0], "{before} entries");
}

#[test]
fn connection_with_more_entries_than_usual_has_queues_that_fit() {
    let (_network, cache) = cache("large");
    let runtime = runtime();
    let _context = runtime.enter();
    for mode in [CompletionMode::Event, CompletionMode::Hybrid] {
        let lease = QueueLease::new(cache.clone(), &mode, [1_000, 5_000]).unwrap();
        let [sends, receives] = lease.queues.each_ref().map(CompletionQueue::capacity);
        let separate = matches!(mode, CompletionMode::Event);
        assert!(sends >= 1_000 && receives >= if separate { 5_000 } else { 6_000 });
    }
}

#[test]
fn released_entries_are_used_again_and_one_unused_pair_is_kept() {
    let (_network, cache) = cache("released");
    let runtime = runtime();
    let leases = lease(&runtime, &cache, &CompletionMode::Event, 100);
    let queues = distinct(&leases).len();
    assert!(queues > 2);
    let weak: Vec<_> =
        leases.iter().map(|lease| Arc::downgrade(lease.queues[0].shared())).collect();
    drop(leases);
    let live = || weak.iter().filter(|queue| queue.strong_count() > 0).count();
    let kept = live();
    let again = lease(&runtime, &cache, &CompletionMode::Event, 2);
    assert_eq!((live(), distinct(&again).len()), (kept, 1), "the kept queue has entries for two");
    let busy = CompletionMode::busy_poll().unwrap();
    let polled = lease(&runtime, &cache, &busy, 1);
    let polled_queue = Arc::downgrade(polled[0].queues[0].shared());
    drop(polled);
    assert_eq!(polled_queue.strong_count(), 0, "a thread polls no unused queue");
}

#[test]
fn failed_queues_are_not_used_for_new_connections() {
    let (network, cache) = cache("failed");
    let runtime = runtime();
    let old = lease(&runtime, &cache, &CompletionMode::Event, 2);
    let event = AsyncEvent::CqError { cq: old[0].queues[1].id() };
    network.control("failed").unwrap().announce(event);
    assert_eq!(cache.device().next_event().unwrap(), Some(event));
    old[0].queues[1].shared().drain();
    assert!(old[0].queues[1].failure().is_some());
    let new = lease(&runtime, &cache, &CompletionMode::Event, 2);
    assert_eq!(distinct(&new).len(), 1);
    assert!(!new[0].queues[0].same(&old[0].queues[0]));
    drop((old, new));
}

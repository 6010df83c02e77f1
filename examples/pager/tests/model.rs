//! Random reads and writes by many tasks, verified against a model. All roles run in one process on
//! software devices.

use std::future::poll_fn;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::task::Poll;
use std::time::Duration;

use axum::Router;
use axum::extract::Request;
use axum::http::Method;
use axum::middleware::{Next, from_fn};
use pager::{
    Config, Conflict, Content, Directory, DirectoryError, Ledger, Map, NodeError, Owner,
    OwnerConfig, PAGE, Pager, PagerError, Settings, StartError, Verdict, Wanted, service,
};
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio_rdma::Device;
use tokio_rdma::software::{Faults, Network};

/// Limit for a test and everything in it.
const LONG: Duration = Duration::from_secs(120);

const CONTENT: Content = Content { seed: 7 };

/// A coordinator, and owners of the same pages.
struct Cluster {
    device: Device,
    address: SocketAddr,
    directory: Directory,
    service: tokio::task::JoinHandle<()>,
    owners: Vec<Owner>,
}

impl Cluster {
    async fn start(device: Device, replicas: u32, pages: u64) -> Self {
        Self::start_with(device, replicas, pages, service::router()).await
    }

    async fn start_with(device: Device, replicas: u32, pages: u64, router: Router) -> Self {
        // A separate address, so that a restarted coordinator finds its port free.
        static CLUSTERS: AtomicU8 = AtomicU8::new(1);
        let host = Ipv4Addr::new(127, 0, 76, CLUSTERS.fetch_add(1, Ordering::Relaxed));
        let listener = TcpListener::bind((host, 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let directory = Directory::new(&format!("http://{address}"));
        let service = tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
        let mut cluster = Self { device, address, directory, service, owners: Vec::new() };
        for replica in 0..replicas {
            let owner =
                cluster.owner(&format!("owner-{replica}"), 0, pages, replica).await.unwrap();
            cluster.owners.push(owner);
        }
        cluster
    }

    async fn owner(
        &self,
        name: &str,
        first: u64,
        pages: u64,
        replica: u32,
    ) -> Result<Owner, StartError> {
        let address = "127.0.0.1:0".parse().unwrap();
        let config =
            OwnerConfig { name: name.to_owned(), address, first, pages, replica, content: CONTENT };
        Owner::start(&self.device, &self.directory, &config).await
    }

    async fn pager(&self, config: &Config) -> Pager {
        Pager::connect(&self.device, &self.directory, config).await.unwrap()
    }

    /// Stops the coordinator, which loses its state.
    async fn stop_coordinator(&self) {
        self.service.abort();
        // Existing connections are served for a moment.
        while !matches!(self.map().await, Err(DirectoryError::Http { .. })) {
            tokio::task::yield_now().await;
        }
    }

    /// Starts another coordinator at the same address.
    async fn start_coordinator(&mut self) {
        let listener = TcpListener::bind(self.address).await.unwrap();
        self.service =
            tokio::spawn(async move { axum::serve(listener, service::router()).await.unwrap() });
    }

    async fn map(&self) -> Result<Map, DirectoryError> {
        self.directory.map(Wanted::default(), Duration::ZERO).await
    }
}

fn software() -> Device {
    Device::software_in(&Network::new(), "soft").unwrap()
}

fn small(cache: usize, in_flight: usize) -> Config {
    Config { cache, in_flight, readahead: 8, patience: Duration::ZERO, ..Config::default() }
}

/// Runs a test on its own runtime, within [`LONG`].
fn run<F: Future<Output = ()>>(threads: usize, test: F) {
    let runtime = if threads == 0 {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
    } else {
        tokio::runtime::Builder::new_multi_thread()
            .worker_threads(threads)
            .enable_all()
            .build()
            .unwrap()
    };
    runtime.block_on(async { tokio::time::timeout(LONG, test).await.expect("timed out") });
}

/// Runs tasks that randomly read, write, read in order, prefetch, flush and drop futures, `uses`
/// times each.
async fn crowd(
    pager: &Pager,
    ledger: &Arc<Ledger>,
    seed: u64,
    tasks: u64,
    uses: u64,
) -> Result<(), Verdict> {
    crowd_until(pager, ledger, seed, tasks, move |number| number == uses).await
}

/// Runs the tasks of [`crowd`] until `enough` accepts a task's number of accesses.
async fn crowd_until(
    pager: &Pager,
    ledger: &Arc<Ledger>,
    seed: u64,
    tasks: u64,
    enough: impl Fn(u64) -> bool + Clone + Send + 'static,
) -> Result<(), Verdict> {
    let mut crowd: JoinSet<Result<(), Verdict>> = JoinSet::new();
    for task in 0..tasks {
        let (pager, ledger, enough) = (pager.clone(), ledger.clone(), enough.clone());
        crowd.spawn(async move {
            let mut random = fastrand::Rng::with_seed(seed << 32 | task);
            let (mut in_order, mut number) = (0, 0);
            while !enough(number) {
                number += 1;
                let page = random.u64(..pager.pages());
                match random.u8(..100) {
                    0..30 => ledger.write(&pager, page).await?,
                    30..34 => pager.prefetch(page..page + random.u64(..20)),
                    34..36 => pager.flush().await?,
                    // Drops the future at some point, and verifies that this changed nothing.
                    36..44 => {
                        let read = ledger.read(&pager, page);
                        if let Some(read) = give_up(read, random.u8(..4)).await {
                            read?;
                        }
                    }
                    44..60 => {
                        in_order = (in_order + 1) % pager.pages();
                        ledger.read(&pager, in_order).await?;
                    }
                    _ => ledger.read(&pager, page).await?,
                }
            }
            Ok(())
        });
    }
    while let Some(done) = crowd.join_next().await {
        done.unwrap()?;
    }
    Ok(())
}

async fn uses(pager: &Pager, more: u64) {
    let count = || {
        let counters = pager.report().counters;
        counters.hits + counters.misses
    };
    let begin = count();
    while count() < begin + more {
        tokio::task::yield_now().await;
    }
}

/// Polls a future `polls` times, once per scheduling round.
async fn give_up<F: Future>(future: F, polls: u8) -> Option<F::Output> {
    let mut future = std::pin::pin!(future);
    for poll in 0..polls {
        if poll > 0 {
            tokio::task::yield_now().await;
        }
        let once = poll_fn(|context| Poll::Ready(future.as_mut().poll(context)));
        if let Poll::Ready(output) = once.await {
            return Some(output);
        }
    }
    None
}

/// Asserts that all owners have the last version of all pages.
fn verify_owners(owners: &[Owner], ledger: &Ledger, pages: u64) {
    for owner in owners {
        for page in 0..pages {
            ledger.is_last(page, &owner.page(page).unwrap()).unwrap();
        }
    }
}

#[test]
fn no_page_is_wrong_with_small_caches_and_concurrent_accesses() {
    for (seed, threads, cache, in_flight, pages) in [
        (1, 0, 2, 1, 16),
        (2, 2, 4, 2, 16),
        (3, 2, 8, 4, 64),
        (4, 3, 16, 4, 64),
        (5, 2, 64, 16, 64),
        (6, 0, 24, 12, 300),
    ] {
        run(threads, async {
            let cluster = Cluster::start(software(), 2, pages).await;
            let pager = cluster.pager(&small(cache, in_flight)).await;
            let ledger = Arc::new(Ledger::new(CONTENT, pages));
            crowd(&pager, &ledger, seed, 8, 2000)
                .await
                .unwrap_or_else(|error| panic!("seed {seed}: {error}"));
            pager.flush().await.unwrap();
            verify_owners(&cluster.owners, &ledger, pages);
            let counters = pager.report().counters;
            assert!(
                counters.hits > 0 && counters.misses > 0 && counters.written_back > 0,
                "{counters:?}"
            );
            assert_eq!(counters.failed, 0);
            assert!(pager.lost().is_empty());
        });
    }
}

#[test]
fn no_page_is_wrong_over_a_network_that_loses_duplicates_and_reorders() {
    let (mut lost, mut duplicated, mut reordered) = (0, 0, 0);
    for seed in 11..15 {
        let faults = Faults::none().loss(0.02).duplicate(0.02).reorder(0.02);
        let network = Network::with_faults(seed, faults);
        run(2, async {
            let cluster =
                Cluster::start(Device::software_in(&network, "soft").unwrap(), 2, 64).await;
            let pager = cluster.pager(&small(16, 8)).await;
            let ledger = Arc::new(Ledger::new(CONTENT, 64));
            crowd(&pager, &ledger, seed, 8, 50)
                .await
                .unwrap_or_else(|error| panic!("seed {seed}: {error}"));
            pager.flush().await.unwrap();
            verify_owners(&cluster.owners, &ledger, 64);
            assert!(pager.lost().is_empty(), "seed {seed}: {:?}", pager.lost());
        });
        let counters = network.counters();
        (lost, duplicated) = (lost + counters.lost, duplicated + counters.duplicated);
        reordered += counters.reordered;
    }
    // Each fault hits one in fifty of thousands of packets.
    assert!(
        lost > 0 && duplicated > 0 && reordered > 0,
        "{lost} lost, {duplicated} duplicated, {reordered} reordered"
    );
}

#[test]
fn dead_owner_is_replaced_by_its_replica_and_removed_from_the_map() {
    for seed in [21, 22, 23] {
        run(2, async {
            let mut cluster = Cluster::start(software(), 3, 64).await;
            let pager = cluster.pager(&small(16, 8)).await;
            let ledger = Arc::new(Ledger::new(CONTENT, 64));
            // Failures that were detected and followed by enough accesses.
            let survived = Arc::new(AtomicUsize::new(0));
            let enough = survived.clone();
            let used =
                crowd_until(&pager, &ledger, seed, 8, move |_| enough.load(Ordering::Relaxed) == 2);
            let dying = async {
                for deaths in 1..=2 {
                    uses(&pager, 50 * seed).await;
                    // The owner from which pages are read dies first.
                    drop(cluster.owners.remove(0));
                    while pager.lost().len() < deaths {
                        tokio::task::yield_now().await;
                    }
                    uses(&pager, 1000).await;
                    survived.store(deaths, Ordering::Relaxed);
                }
                Ok(())
            };
            tokio::try_join!(used, dying).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
            pager.flush().await.unwrap();
            verify_owners(&cluster.owners, &ledger, 64);
            let lost: Vec<String> = pager.lost().into_iter().map(|(node, _)| node).collect();
            assert_eq!(lost, ["owner-0", "owner-1"]);
            // New clients do not see nodes that lack writes.
            let map = cluster.map().await.unwrap();
            assert_eq!(map.shares.keys().collect::<Vec<_>>(), ["owner-2"]);
            let next = cluster.pager(&small(16, 8)).await;
            for page in 0..64 {
                let mut bytes = [0; PAGE];
                next.read(page, 0, &mut bytes).await.unwrap();
                ledger.is_last(page, &bytes).unwrap();
            }
        });
    }
}

#[test]
fn error_after_the_last_owner_died_names_page_node_and_cause() {
    run(2, async {
        let mut cluster = Cluster::start(software(), 1, 64).await;
        let other = cluster.owner("other", 64, 64, 0).await.unwrap();
        let pager = cluster.pager(&Config { readahead: 0, ..small(8, 4) }).await;
        let ledger = Arc::new(Ledger::new(CONTENT, 128));
        for page in 0..3 {
            ledger.write(&pager, page).await.unwrap();
        }
        drop(cluster.owners.pop());
        let error = pager.read(5, 0, &mut [0; PAGE]).await.unwrap_err();
        let PagerError::Lost { page: 5, node, cause } = &error else { panic!("{error}") };
        assert_eq!(node, "owner-0");
        assert!(matches!(cause, NodeError::Ended(_) | NodeError::Operation(_)), "{cause:?}");
        assert!(error.to_string().contains("page 5") && error.to_string().contains("owner-0"));
        // Dirty pages are neither lost nor do they block pages that have an owner.
        assert!(matches!(pager.flush().await, Err(PagerError::Lost { .. })));
        for page in 64..128 {
            ledger.read(&pager, page).await.unwrap();
        }
        for page in 0..3 {
            ledger.read(&pager, page).await.unwrap();
        }
        // A client that reaches no node removes none from the map.
        let map = cluster.map().await.unwrap();
        assert_eq!(map.shares.len(), 2);
        drop(other);
        assert!(matches!(
            ledger.read(&pager, 99).await,
            Err(Verdict::Pager(PagerError::Lost { page: 99, .. }))
        ));
    });
}

#[test]
fn page_stays_dirty_until_a_dead_replica_is_removed_from_the_map() {
    run(2, async {
        let mut cluster = Cluster::start(software(), 2, 64).await;
        let pager = cluster.pager(&small(8, 4)).await;
        let ledger = Arc::new(Ledger::new(CONTENT, 64));
        ledger.write(&pager, 3).await.unwrap();
        cluster.stop_coordinator().await;
        drop(cluster.owners.pop());
        let error = pager.flush().await.unwrap_err();
        assert!(
            matches!(&error, PagerError::Unsure { page: 3, node, .. } if node == "owner-1"),
            "{error}"
        );
        // The page is still in the cache and blocks no other.
        ledger.read(&pager, 3).await.unwrap();
        for page in 10..40 {
            ledger.read(&pager, page).await.unwrap();
        }
        ledger.read(&pager, 3).await.unwrap();
    });
}

#[test]
fn page_is_fetched_once_for_all_waiters() {
    run(2, async {
        let cluster = Cluster::start(software(), 1, 64).await;
        let pager = cluster.pager(&Config { readahead: 0, ..small(16, 8) }).await;
        let mut crowd = JoinSet::new();
        for _ in 0..100 {
            let pager = pager.clone();
            crowd.spawn(async move {
                let mut bytes = [0; PAGE];
                pager.read(9, 0, &mut bytes).await.unwrap();
                assert_eq!(bytes, CONTENT.of(9, 0));
            });
        }
        crowd.join_all().await;
        let counters = pager.report().counters;
        assert_eq!((counters.fetched, counters.hits + counters.misses), (1, 100), "{counters:?}");
    });
}

#[test]
fn more_pages_in_flight_than_a_connection_holds_all_arrive() {
    run(2, async {
        let slow = Faults::none().delay(Duration::ZERO..Duration::from_millis(2));
        let device = Device::software_in(&Network::with_faults(41, slow), "soft").unwrap();
        let cluster = Cluster::start(device, 2, 1024).await;
        let pager = cluster.pager(&Config { readahead: 0, ..small(2048, 1024) }).await;
        let ledger = Arc::new(Ledger::new(CONTENT, 1024));
        for write in [false, true] {
            let mut crowd = JoinSet::new();
            for page in 0..1024 {
                let (pager, ledger) = (pager.clone(), ledger.clone());
                crowd.spawn(async move {
                    let used = if write {
                        ledger.write(&pager, page).await
                    } else {
                        ledger.read(&pager, page).await
                    };
                    used.unwrap();
                });
            }
            crowd.join_all().await;
            pager.flush().await.unwrap();
        }
        verify_owners(&cluster.owners, &ledger, 1024);
        let counters = pager.report().counters;
        assert_eq!((counters.fetched, counters.written_back), (1024, 1024), "{counters:?}");
        assert!(pager.lost().is_empty(), "{:?}", pager.lost());
    });
}

#[test]
fn sequential_reader_hits_prefetched_pages() {
    run(2, async {
        let cluster = Cluster::start(software(), 1, 512).await;
        let pager = cluster.pager(&Config { readahead: 16, ..small(128, 64) }).await;
        let ledger = Ledger::new(CONTENT, 512);
        for page in 0..512 {
            ledger.read(&pager, page).await.unwrap();
        }
        let counters = pager.report().counters;
        assert!(counters.prefetched > 400, "{counters:?}");
        assert_eq!(counters.fetched, 512, "{counters:?}");
    });
}

#[test]
fn parts_of_pages_are_read_and_written_and_nothing_beyond_them() {
    run(0, async {
        let cluster = Cluster::start(software(), 2, 8).await;
        let pager = cluster.pager(&small(4, 2)).await;
        pager.write(5, 100, b"in the middle").await.unwrap();
        pager.write(5, PAGE - 3, b"end").await.unwrap();
        let mut expected = CONTENT.of(5, 0);
        expected[100..113].copy_from_slice(b"in the middle");
        expected[PAGE - 3..].copy_from_slice(b"end");
        pager.flush().await.unwrap();
        assert_eq!(cluster.owners[0].page(5).unwrap(), expected);
        assert_eq!(cluster.owners[1].page(5).unwrap(), expected);
        let mut part = [0; 8];
        pager.read(5, 105, &mut part).await.unwrap();
        assert_eq!(part, expected[105..113]);
        assert!(matches!(
            pager.read(8, 0, &mut part).await,
            Err(PagerError::NoPage { page: 8, pages: 8 })
        ));
        assert!(matches!(pager.read(u64::MAX, 0, &mut part).await, Err(PagerError::NoPage { .. })));
        for offset in [PAGE - 7, PAGE, usize::MAX] {
            assert!(matches!(
                pager.write(5, offset, &part).await,
                Err(PagerError::Bounds { page: 5, .. })
            ));
        }
    });
}

#[test]
fn owners_join_before_clients_and_invalid_settings_are_named() {
    run(2, async {
        let cluster = Cluster::start(software(), 1, 8).await;
        let connect = async |config: Config| {
            Pager::connect(&cluster.device, &cluster.directory, &config).await
        };
        let setting = |result: Result<Pager, StartError>| match result {
            Err(StartError::Setting { field, .. }) => field,
            other => panic!("{other:?}"),
        };
        assert_eq!(setting(connect(small(1, 1)).await), "cache");
        assert_eq!(setting(connect(small(8, 8)).await), "in_flight");
        assert_eq!(setting(connect(small(8, 0)).await), "in_flight");
        let two = Wanted { pages: 8, copies: 2 };
        let refused = connect(Config { wanted: two, ..small(8, 4) }).await;
        assert!(matches!(
            &refused,
            Err(StartError::Directory(DirectoryError::Refused { status, .. })) if *status == 404
        ));
        let second = cluster.owner("second", 0, 8, 1).await.unwrap();
        connect(Config { wanted: two, ..small(8, 4) }).await.unwrap();
        let late = cluster.owner("late", 0, 8, 2).await;
        assert!(
            matches!(&late, Err(StartError::Directory(DirectoryError::Conflict(Conflict::Sealed)))),
            "{late:?}"
        );
        second.leave(&cluster.directory).await.unwrap();
        assert_eq!(cluster.map().await.unwrap().shares.len(), 1);
    });
}

/// Returns the conflict reported by the coordinator.
fn conflict(error: &PagerError) -> Option<&Conflict> {
    match error {
        PagerError::NotWriter { cause: DirectoryError::Conflict(conflict), .. }
        | PagerError::Unsure { cause: DirectoryError::Conflict(conflict), .. }
        | PagerError::Unended(DirectoryError::Conflict(conflict)) => Some(conflict),
        _ => None,
    }
}

#[test]
fn restarted_coordinator_refuses_nodes_and_clients_of_its_predecessor() {
    run(2, async {
        let mut cluster = Cluster::start(software(), 2, 64).await;
        let pager = cluster.pager(&small(16, 8)).await;
        pager.write(3, 0, b"of old").await.unwrap();
        pager.flush().await.unwrap();
        pager.write(4, 0, b"of old, too").await.unwrap();
        // Page 4 is not flushed; a node that lacks it dies later, unknown to the new coordinator.
        for owner in &cluster.owners {
            owner.confirm(&cluster.directory).await.unwrap();
        }
        let before = cluster.map().await.unwrap().instance;
        cluster.stop_coordinator().await;
        cluster.start_coordinator().await;
        for owner in &cluster.owners {
            let error = owner.confirm(&cluster.directory).await.unwrap_err();
            let DirectoryError::Conflict(Conflict::Stale { before: of, now }) = &error else {
                panic!("{error}")
            };
            assert!(*of == before && *now != before, "{error}");
        }
        let none = cluster.map().await;
        assert!(
            matches!(&none, Err(DirectoryError::Refused { status, .. }) if *status == 404),
            "{none:?}"
        );
        // New memory joins, even under a name used before.
        let fresh = cluster.owner("owner-1", 0, 64, 0).await.unwrap();
        drop(cluster.owners.pop());
        let error = pager.flush().await.unwrap_err();
        assert!(
            matches!(conflict(&error), Some(Conflict::Instance { asked, .. }) if *asked == before),
            "{error}"
        );
        // A client of another map cannot remove a node from this one.
        assert_eq!(cluster.map().await.unwrap().shares.keys().collect::<Vec<_>>(), ["owner-1"]);
        let next = cluster.pager(&small(16, 8)).await;
        for page in 0..64 {
            let mut bytes = [0; PAGE];
            next.read(page, 0, &mut bytes).await.unwrap();
            assert!(bytes == CONTENT.of(page, 0), "page {page}");
        }
        // The old client keeps its cache.
        let mut bytes = [0; 6];
        for page in [3, 4] {
            pager.read(page, 0, &mut bytes).await.unwrap();
            assert_eq!(&bytes, b"of old");
        }
        // An owner of the old map cannot remove the new owner of the same name.
        cluster.owners.pop().unwrap().leave(&cluster.directory).await.unwrap();
        fresh.confirm(&cluster.directory).await.unwrap();
    });
}

#[test]
fn owner_removed_from_the_map_cannot_rejoin() {
    run(2, async {
        let cluster = Cluster::start(software(), 2, 8).await;
        let instance = cluster.map().await.unwrap().instance;
        cluster.directory.leave("owner-1", instance).await.unwrap();
        let error = cluster.owners[1].confirm(&cluster.directory).await.unwrap_err();
        assert!(matches!(error, DirectoryError::Conflict(Conflict::Stale { .. })), "{error}");
        assert_eq!(cluster.map().await.unwrap().shares.len(), 1);
        cluster.owners[0].confirm(&cluster.directory).await.unwrap();
    });
}

#[test]
fn one_client_writes_at_a_time_until_it_flushes() {
    run(2, async {
        let cluster = Cluster::start(software(), 2, 64).await;
        let (a, b) = (cluster.pager(&small(16, 8)).await, cluster.pager(&small(16, 8)).await);
        // Repeatedly, with many tasks: each starts to write, and all flush.
        for round in 0..20_u8 {
            let (writes, waits) = if round % 2 == 0 { (&a, &b) } else { (&b, &a) };
            let mut tasks = JoinSet::new();
            for page in 0..8 {
                let writes = writes.clone();
                tasks.spawn(async move { writes.write(page, usize::from(round), &[round]).await });
            }
            while let Some(written) = tasks.join_next().await {
                written.unwrap().unwrap();
            }
            let error = waits.write(9, 0, b"not now").await.unwrap_err();
            assert!(matches!(&error, PagerError::NotWriter { page: 9, .. }), "{error}");
            assert_eq!(conflict(&error), Some(&Conflict::Writing));
            let mut bytes = [0; PAGE];
            waits.read(9, 0, &mut bytes).await.unwrap();
            assert!(bytes == CONTENT.of(9, 0), "it was written to");
            writes.flush().await.unwrap();
        }
        let map = cluster.map().await.unwrap();
        assert!(!map.unclean);
        // A flush by a client without the lease does not end another client's lease.
        a.write(1, 0, b"x").await.unwrap();
        b.flush().await.unwrap();
        assert_eq!(conflict(&b.write(1, 0, b"y").await.unwrap_err()), Some(&Conflict::Writing));
        a.flush().await.unwrap();
    });
}

#[test]
fn new_clients_are_refused_after_a_writer_died() {
    run(2, async {
        let router = service::router_with(Settings { lease: Duration::from_millis(50) });
        let cluster = Cluster::start_with(software(), 2, 64, router).await;
        let there = cluster.pager(&small(16, 8)).await;
        let dies = cluster.pager(&small(16, 8)).await;
        dies.write(3, 0, b"half").await.unwrap();
        drop(dies);
        while !cluster.map().await.unwrap().unclean {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let refused = Pager::connect(&cluster.device, &cluster.directory, &small(16, 8)).await;
        assert!(matches!(refused, Err(StartError::Unclean { .. })), "{refused:?}");
        assert_eq!(conflict(&there.write(3, 0, b"x").await.unwrap_err()), Some(&Conflict::Unclean));
        let knows = cluster.pager(&Config { unclean_too: true, ..small(16, 8) }).await;
        knows.read(3, 0, &mut [0; PAGE]).await.unwrap();
        // May lapse if this process gets no processor for too long.
        match knows.write(3, 0, b"x").await {
            Ok(()) => {}
            Err(error) => assert_eq!(conflict(&error), Some(&Conflict::Lapsed)),
        }
    });
}

#[test]
fn client_without_its_lease_writes_nothing_back() {
    run(2, async {
        let router = service::router_with(Settings { lease: Duration::from_millis(200) });
        let mut cluster = Cluster::start_with(software(), 1, 64, router).await;
        let pager = cluster.pager(&small(8, 4)).await;
        pager.write(3, 0, b"mine").await.unwrap();
        cluster.stop_coordinator().await;
        cluster.start_coordinator().await;
        // The client learns this by renewing its lease.
        let error = loop {
            match pager.write(5, 0, b"more").await {
                Ok(()) => tokio::time::sleep(Duration::from_millis(1)).await,
                Err(error) => break error,
            }
        };
        let gone =
            |conflict: &Conflict| matches!(conflict, Conflict::Instance { .. } | Conflict::Lapsed);
        assert!(matches!(&error, PagerError::NotWriter { page: 5, .. }), "{error}");
        assert!(conflict(&error).is_some_and(gone), "{error}");
        // The cache remains usable for reads.
        for page in 10..40 {
            pager.read(page, 0, &mut [0; PAGE]).await.unwrap();
        }
        assert!(conflict(&pager.flush().await.unwrap_err()).is_some_and(gone));
        assert_eq!(cluster.owners[0].page(3).unwrap(), CONTENT.of(3, 0));
        let mut bytes = [0; 4];
        pager.read(3, 0, &mut bytes).await.unwrap();
        assert_eq!(&bytes, b"mine");
    });
}

#[test]
fn unresponsive_coordinator_is_not_asked_for_each_page() {
    run(2, async {
        let asked = Arc::new(AtomicUsize::new(0));
        let counts = asked.clone();
        // Removals from the map never get a response.
        let mute = from_fn(move |request: Request, next: Next| {
            let counts = counts.clone();
            async move {
                if request.method() == Method::DELETE && request.uri().path().starts_with("/nodes/")
                {
                    counts.fetch_add(1, Ordering::Relaxed);
                    return std::future::pending().await;
                }
                next.run(request).await
            }
        });
        let mut cluster =
            Cluster::start_with(software(), 2, 256, service::router().layer(mute)).await;
        cluster.directory = cluster.directory.clone().patience(Duration::from_secs(1));
        let pager = cluster.pager(&Config { readahead: 0, ..small(128, 4) }).await;
        for page in 0..64 {
            pager.write(page, 0, b"changed").await.unwrap();
        }
        drop(cluster.owners.pop());
        // One by one, these would be at least sixteen requests, with four pages in flight.
        let error = pager.flush().await.unwrap_err();
        assert!(matches!(&error, PagerError::Unsure { node, .. } if node == "owner-1"), "{error}");
        // Dirty pages fill the cache; evicting others for reads sends no request.
        for page in 0..256 {
            pager.read(page, 0, &mut [0; 1]).await.unwrap();
        }
        let asked = asked.load(Ordering::Relaxed);
        assert!((1..8).contains(&asked), "asked {asked} times");
        assert_eq!(pager.report().counters.written_back, 0);
    });
}

#[test]
fn dropped_write_changes_nothing() {
    run(0, async {
        let cluster = Cluster::start(software(), 2, 64).await;
        let pager = cluster.pager(&Config { readahead: 0, ..small(4, 2) }).await;
        let (mut given_up, mut done) = (0, 0);
        for round in 0..400_u32 {
            let page = u64::from(round % 64);
            let mut before = [0; PAGE];
            pager.read(page, 0, &mut before).await.unwrap();
            // The page is cached, or evicted so that it and perhaps a dirty page must move first.
            if round % 3 > 0 {
                for other in 1..=4 {
                    pager.read((page + other) % 64, 0, &mut [0; 1]).await.unwrap();
                }
            }
            let new = (round + 1).to_be_bytes();
            let written = give_up(pager.write(page, 8, &new), (round % 16) as u8).await;
            let mut expected = before;
            match written {
                Some(written) => {
                    written.unwrap();
                    expected[8..12].copy_from_slice(&new);
                    done += 1;
                }
                None => given_up += 1,
            }
            pager.read((page + 7) % 64, 0, &mut [0; 1]).await.unwrap();
            if round % 5 == 0 {
                pager.flush().await.unwrap();
            }
            let mut after = [0; PAGE];
            pager.read(page, 0, &mut after).await.unwrap();
            assert!(
                after == expected,
                "round {round}: {:?} instead of {:?}",
                &after[8..12],
                &expected[8..12]
            );
        }
        assert!(given_up > 50 && done > 50, "{given_up} given up, {done} done");
        pager.flush().await.unwrap();
    });
}

#[test]
fn dropped_flush_continues_and_the_next_completes_it() {
    run(0, async {
        // A delay, so that flushes have to wait.
        let slow = Faults::none().delay(Duration::ZERO..Duration::from_micros(200));
        let device = Device::software_in(&Network::with_faults(31, slow), "soft").unwrap();
        let cluster = Cluster::start(device, 2, 64).await;
        let pager = cluster.pager(&Config { readahead: 0, ..small(32, 4) }).await;
        let other = cluster.pager(&small(4, 2)).await;
        let mut given_up = 0;
        for round in 0..100_u32 {
            for page in 0..16 {
                pager.write(page, 0, &round.to_be_bytes()).await.unwrap();
            }
            given_up += u32::from(give_up(pager.flush(), (round % 20) as u8).await.is_none());
            if round % 2 == 0 {
                // The dropped flush completes on its own.
                let written = || {
                    (0..16).all(|page| {
                        cluster.owners[1].page(page).unwrap()[..4] == round.to_be_bytes()
                    })
                };
                while round % 20 > 0 && !written() {
                    tokio::task::yield_now().await;
                }
            }
            pager.flush().await.unwrap();
            for owner in &cluster.owners {
                for page in 0..16 {
                    assert_eq!(
                        owner.page(page).unwrap()[..4],
                        round.to_be_bytes(),
                        "round {round}, page {page}"
                    );
                }
            }
            // The lease has ended: another client may write.
            other.write(40, 0, &round.to_be_bytes()).await.unwrap();
            other.flush().await.unwrap();
        }
        assert!(given_up > 20, "{given_up} of 100");
        assert!(!cluster.map().await.unwrap().unclean);
    });
}

//! Many tasks that read and write pages at random, against a model: no page is ever wrong. Owners, coordinator and client are in
//! one process, the devices are software.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use pager::{
    Config, Content, Directory, DirectoryError, Ledger, NodeError, Owner, OwnerConfig, PAGE, Pager, PagerError,
    StartError, Verdict, Wanted, service,
};
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio_rdma::Device;
use tokio_rdma::software::{Faults, Network};

/// Longest that a test takes, or anything in it.
const LONG: Duration = Duration::from_secs(120);

const CONTENT: Content = Content { seed: 7 };

/// A coordinator, and owners of the same pages.
struct Cluster {
    device: Device,
    directory: Directory,
    service: tokio::task::JoinHandle<()>,
    owners: Vec<Owner>,
}

impl Cluster {
    async fn start(device: Device, replicas: u32, pages: u64) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let directory = Directory::new(&format!("http://{}", listener.local_addr().unwrap()));
        let service = tokio::spawn(async move { axum::serve(listener, service::router()).await.unwrap() });
        let mut cluster = Self { device, directory, service, owners: Vec::new() };
        for replica in 0..replicas {
            let owner = cluster.owner(&format!("owner-{replica}"), 0, pages, replica).await.unwrap();
            cluster.owners.push(owner);
        }
        cluster
    }

    async fn owner(&self, name: &str, first: u64, pages: u64, replica: u32) -> Result<Owner, StartError> {
        let address = "127.0.0.1:0".parse().unwrap();
        let config = OwnerConfig { name: name.to_owned(), address, first, pages, replica, content: CONTENT };
        Owner::start(&self.device, &self.directory, &config).await
    }

    async fn pager(&self, config: &Config) -> Pager {
        Pager::connect(&self.device, &self.directory, config).await.unwrap()
    }
}

fn software() -> Device {
    Device::software_in(&Network::new(), "soft").unwrap()
}

fn small(cache: usize, in_flight: usize) -> Config {
    Config { cache, in_flight, readahead: 8, patience: Duration::ZERO, ..Config::default() }
}

/// Test after test on a runtime of its own, within a time.
fn run<F: Future<Output = ()>>(threads: usize, test: F) {
    let runtime = if threads == 0 {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
    } else {
        tokio::runtime::Builder::new_multi_thread().worker_threads(threads).enable_all().build().unwrap()
    };
    runtime.block_on(async { tokio::time::timeout(LONG, test).await.expect("it takes too long") });
}

/// Tasks that read, write, read in order, hint, flush and give up, all at once.
async fn crowd(pager: &Pager, ledger: &Arc<Ledger>, seed: u64, tasks: u64, uses: u64) -> Result<(), Verdict> {
    let mut crowd: JoinSet<Result<(), Verdict>> = JoinSet::new();
    for task in 0..tasks {
        let (pager, ledger) = (pager.clone(), ledger.clone());
        crowd.spawn(async move {
            let mut random = fastrand::Rng::with_seed(seed << 32 | task);
            let mut in_order = 0;
            for _ in 0..uses {
                let page = random.u64(..pager.pages());
                match random.u8(..100) {
                    0..30 => ledger.write(&pager, page).await?,
                    30..34 => pager.prefetch(page..page + random.u64(..20)),
                    34..36 => pager.flush().await?,
                    // Gives up at some point, and finds out that this has changed nothing.
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

/// Polls a future so many times, in as many turns of the runtime.
async fn give_up<F: Future>(future: F, polls: u8) -> Option<F::Output> {
    let mut future = std::pin::pin!(future);
    for _ in 0..polls {
        let once = poll_fn(|context| Poll::Ready(future.as_mut().poll(context)));
        if let Poll::Ready(output) = once.await {
            return Some(output);
        }
        tokio::task::yield_now().await;
    }
    None
}

/// All owners hold the last version of all pages.
fn verify_owners(owners: &[Owner], ledger: &Ledger, pages: u64) {
    for owner in owners {
        for page in 0..pages {
            ledger.is_last(page, &owner.page(page).unwrap()).unwrap();
        }
    }
}

#[test]
fn no_page_is_ever_wrong_however_small_the_cache_and_whatever_is_done_at_once() {
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
            crowd(&pager, &ledger, seed, 8, 2000).await.unwrap_or_else(|error| panic!("seed {seed}: {error}"));
            pager.flush().await.unwrap();
            verify_owners(&cluster.owners, &ledger, pages);
            let counters = pager.report().counters;
            assert!(counters.hits > 0 && counters.misses > 0 && counters.written_back > 0, "{counters:?}");
            assert_eq!(counters.failed, 0);
            assert!(pager.lost().is_empty());
        });
    }
}

#[test]
fn no_page_is_wrong_over_a_network_that_loses_repeats_and_reorders() {
    run(2, async {
        let faults = Faults::none().loss(0.01).duplicate(0.01).reorder(0.01);
        let device = Device::software_in(&Network::with_faults(11, faults), "soft").unwrap();
        let cluster = Cluster::start(device, 2, 64).await;
        let pager = cluster.pager(&small(16, 8)).await;
        let ledger = Arc::new(Ledger::new(CONTENT, 64));
        crowd(&pager, &ledger, 12, 8, 50).await.unwrap();
        pager.flush().await.unwrap();
        verify_owners(&cluster.owners, &ledger, 64);
    });
}

#[test]
fn an_owner_that_dies_is_replaced_by_its_replica_and_taken_off_the_map() {
    for seed in [21, 22, 23] {
        run(2, async {
            let mut cluster = Cluster::start(software(), 3, 64).await;
            let pager = cluster.pager(&small(16, 8)).await;
            let ledger = Arc::new(Ledger::new(CONTENT, 64));
            for deaths in 0..3 {
                let dying = cluster.owners.len() - 1;
                let (used, ()) = tokio::join!(crowd(&pager, &ledger, seed + 100 * deaths, 8, 1000), async {
                    // Somewhere within: what matters is that all is right whenever it is.
                    for _ in 0..50 * seed {
                        tokio::task::yield_now().await;
                    }
                    // The first to be read from goes first.
                    if deaths < 2 {
                        drop(cluster.owners.remove(0));
                    }
                });
                used.unwrap_or_else(|error| panic!("seed {seed}: {error}"));
                assert!(cluster.owners.len() >= dying.max(1));
            }
            pager.flush().await.unwrap();
            verify_owners(&cluster.owners, &ledger, 64);
            let lost: Vec<String> = pager.lost().into_iter().map(|(node, _)| node).collect();
            assert_eq!(lost, ["owner-0", "owner-1"]);
            // Whoever comes now does not see those who lack what was written.
            let map = cluster.directory.map(Wanted::default(), Duration::ZERO).await.unwrap();
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
fn pages_whose_last_owner_dies_are_an_error_that_names_page_node_and_cause() {
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
        // What was not written back is neither lost nor in the way of pages that have an owner.
        assert!(matches!(pager.flush().await, Err(PagerError::Lost { .. })));
        for page in 64..128 {
            ledger.read(&pager, page).await.unwrap();
        }
        for page in 0..3 {
            ledger.read(&pager, page).await.unwrap();
        }
        // One who reaches nobody does not say that others are lost.
        let map = cluster.directory.map(Wanted::default(), Duration::ZERO).await.unwrap();
        assert_eq!(map.shares.len(), 2);
        drop(other);
        assert!(matches!(ledger.read(&pager, 99).await, Err(Verdict::Pager(PagerError::Lost { page: 99, .. }))));
    });
}

#[test]
fn what_a_dead_replica_lacks_is_not_written_back_before_the_coordinator_knows() {
    run(2, async {
        let mut cluster = Cluster::start(software(), 2, 64).await;
        let pager = cluster.pager(&small(8, 4)).await;
        let ledger = Arc::new(Ledger::new(CONTENT, 64));
        ledger.write(&pager, 3).await.unwrap();
        cluster.service.abort();
        while cluster.directory.map(Wanted::default(), Duration::ZERO).await.is_ok() {
            tokio::task::yield_now().await;
        }
        drop(cluster.owners.pop());
        let error = pager.flush().await.unwrap_err();
        assert!(matches!(&error, PagerError::Unsure { page: 3, node, .. } if node == "owner-1"), "{error}");
        // It is still here, and in nobody's way.
        ledger.read(&pager, 3).await.unwrap();
        for page in 10..40 {
            ledger.read(&pager, page).await.unwrap();
        }
        ledger.read(&pager, 3).await.unwrap();
    });
}

#[test]
fn a_page_is_fetched_once_however_many_ask_for_it() {
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
fn a_reader_in_order_finds_pages_there() {
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
        assert!(matches!(pager.read(8, 0, &mut part).await, Err(PagerError::NoPage { page: 8, pages: 8 })));
        assert!(matches!(pager.read(u64::MAX, 0, &mut part).await, Err(PagerError::NoPage { .. })));
        for offset in [PAGE - 7, PAGE, usize::MAX] {
            assert!(matches!(pager.write(5, offset, &part).await, Err(PagerError::Bounds { page: 5, .. })));
        }
    });
}

#[test]
fn owners_join_before_clients_do_and_settings_that_do_not_work_are_named() {
    run(2, async {
        let cluster = Cluster::start(software(), 1, 8).await;
        let connect = async |config: Config| Pager::connect(&cluster.device, &cluster.directory, &config).await;
        let setting = |result: Result<Pager, StartError>| match result {
            Err(StartError::Setting { field, .. }) => field,
            other => panic!("{other:?}"),
        };
        assert_eq!(setting(connect(small(1, 1)).await), "cache");
        assert_eq!(setting(connect(small(8, 8)).await), "in_flight");
        assert_eq!(setting(connect(small(8, 0)).await), "in_flight");
        let two = Wanted { pages: 8, copies: 2 };
        let refused = connect(Config { wanted: two, ..small(8, 4) }).await;
        assert!(
            matches!(&refused, Err(StartError::Directory(DirectoryError::Refused { status, .. })) if *status == 404)
        );
        // Nobody has the map so far.
        let second = cluster.owner("second", 0, 8, 1).await.unwrap();
        connect(Config { wanted: two, ..small(8, 4) }).await.unwrap();
        let late = cluster.owner("late", 0, 8, 2).await;
        assert!(matches!(&late, Err(StartError::Directory(DirectoryError::Refused { status, .. })) if *status == 409));
        second.leave(&cluster.directory).await.unwrap();
        assert_eq!(cluster.directory.map(Wanted::default(), Duration::ZERO).await.unwrap().shares.len(), 1);
    });
}

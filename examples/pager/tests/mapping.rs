//! Access to remote pages by pointers, if the system permits it.
#![cfg(feature = "userfaultfd")]
#![allow(unsafe_code)]

use std::io::{Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::time::Duration;

use pager::{
    Config, Content, Directory, Mapping, MappingError, Owner, OwnerConfig, PAGE, Pager, service,
};
use tokio::net::TcpListener;
use tokio_rdma::Device;
use tokio_rdma::software::Network;

const CONTENT: Content = Content { seed: 3 };
const PAGES: u64 = 128;
/// Set in a process that is expected to die.
const DYING: &str = "PAGER_MAPPING_DYING";

async fn start() -> (Owner, Pager) {
    let device = Device::software_in(&Network::new(), "soft").unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let directory = Directory::new(&format!("http://{}", listener.local_addr().unwrap()));
    tokio::spawn(async move { axum::serve(listener, service::router()).await });
    let address = "127.0.0.1:0".parse().unwrap();
    let config = OwnerConfig {
        name: "owner".to_owned(),
        address,
        first: 0,
        pages: PAGES,
        replica: 0,
        content: CONTENT,
    };
    let owner = Owner::start(&device, &directory, &config).await.unwrap();
    let config = Config { cache: 16, in_flight: 8, ..Config::default() };
    (owner, Pager::connect(&device, &directory, &config).await.unwrap())
}

fn map(pager: &Pager, max_resident: usize) -> Mapping {
    Mapping::new(pager, 0..PAGES, max_resident)
        .unwrap_or_else(|error| panic!("this test needs userfaultfd: {error}"))
}

/// Reads a whole page.
fn page(mapping: &Mapping, page: u64) -> [u8; PAGE] {
    assert!(page < PAGES);
    // SAFETY: within the live mapping, and no task writes to its pages.
    unsafe { mapping.as_ptr().add(page as usize * PAGE).cast::<[u8; PAGE]>().read_volatile() }
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

fn run<F: Future<Output = ()>>(test: F) {
    runtime().block_on(async {
        tokio::time::timeout(Duration::from_secs(60), test).await.expect("timed out")
    });
}

#[test]
#[ignore = "needs userfaultfd"]
fn threads_read_remote_pages_by_pointer_within_the_memory_limit() {
    run(async {
        let (_owner, pager) = start().await;
        let mapping = map(&pager, 24);
        assert_eq!((mapping.len(), mapping.resident()), (PAGES as usize * PAGE, 0));
        let mapping = std::sync::Arc::new(mapping);
        let threads: Vec<_> = (0..4)
            .map(|seed| {
                let mapping = mapping.clone();
                tokio::task::spawn_blocking(move || {
                    let mut random = fastrand::Rng::with_seed(seed);
                    for _ in 0..500 {
                        let number = random.u64(..PAGES);
                        assert!(page(&mapping, number) == CONTENT.of(number, 0), "page {number}");
                    }
                })
            })
            .collect();
        for thread in threads {
            thread.await.unwrap();
        }
        assert!(mapping.resident() <= 24, "{}", mapping.resident());
    });
}

#[test]
#[ignore = "needs userfaultfd and CAP_SYS_PTRACE"]
fn kernel_reads_remote_pages() {
    run(async {
        let (_owner, pager) = start().await;
        let mapping = map(&pager, 24);
        let written = tokio::task::spawn_blocking(move || {
            let (mut there, mut here) = std::io::pipe().unwrap();
            // SAFETY: within the live mapping, and no task writes to its pages.
            let pages = unsafe { std::slice::from_raw_parts(mapping.as_ptr().add(PAGE), PAGE) };
            // Does not block: a pipe holds 64 KiB.
            here.write_all(pages)?;
            let mut bytes = [0; PAGE];
            there.read_exact(&mut bytes)?;
            Ok::<_, std::io::Error>(bytes)
        });
        match written.await.unwrap() {
            Ok(bytes) => assert!(bytes == CONTENT.of(1, 0)),
            Err(error) => panic!("this test needs CAP_SYS_PTRACE: {error}"),
        }
    });
}

#[test]
#[ignore = "needs userfaultfd"]
fn lost_page_raises_a_signal() {
    if std::env::var_os(DYING).is_some() {
        return run(async {
            let (owner, pager) = start().await;
            let mapping = map(&pager, 24);
            drop(owner);
            tokio::task::spawn_blocking(move || page(&mapping, 5)).await.unwrap();
        });
    }
    run(async {
        let (_owner, pager) = start().await;
        drop(map(&pager, 24));
        let this = std::env::current_exe().unwrap();
        let test = "lost_page_raises_a_signal";
        let died = Command::new(this)
            .args(["--exact", test, "--ignored", "--nocapture"])
            .env(DYING, "1")
            .output()
            .unwrap();
        let output = String::from_utf8_lossy(&died.stderr);
        assert_eq!(died.status.signal(), Some(11), "{output}");
        assert!(output.contains("page 5 is lost"), "{output}");
    });
}

#[test]
fn invalid_settings_are_named() {
    run(async {
        let (_owner, pager) = start().await;
        for (pages, max_resident, name) in [
            (0..PAGES + 1, 1, "end of pages"),
            (0..0, 1, "end of pages"),
            (5..5, 1, "start of pages"),
            (0..1, 1, "max_resident"),
        ] {
            let error = Mapping::new(&pager, pages, max_resident).unwrap_err();
            assert!(
                matches!(error, MappingError::Setting { field, .. } if field == name),
                "{error}"
            );
        }
    });
}

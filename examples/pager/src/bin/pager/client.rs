//! The client: accesses pages and verifies each.

use std::io::IsTerminal;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use indicatif::{ProgressBar, ProgressStyle};
use pager::{Config, Content, Directory, Ledger, Pager, Verdict, Wanted};
use tokio::task::JoinSet;
use tokio_rdma::Device;

use crate::args::{Client, Work};
use crate::{PATIENCE, Result};

/// Without a terminal, progress is printed at least every so many pages.
const PROGRESS_PAGES: u64 = 10_000;

/// Runs until all pages are read, or until Ctrl-C.
pub(crate) async fn run(options: &Client) -> Result<()> {
    let directory = Directory::new(&options.common.coordinator);
    let wanted = Wanted { pages: options.pages, copies: options.copies.into() };
    let device = match options.address {
        Some(address) => Device::open_default_at(address)?,
        None => Device::open_default_towards(an_owner(&directory, wanted).await?)?,
    };
    let work = &options.work;
    let (cache, in_flight, readahead) = (work.cache, work.in_flight, work.readahead);
    let unclean_too = options.unclean_too;
    let config = Config { cache, in_flight, readahead, wanted, patience: PATIENCE, unclean_too };
    let pager = Pager::connect(&device, &directory, &config).await?;
    println!("{} pages available", pager.pages());
    let ledger = Arc::new(Ledger::new(Content { seed: options.common.seed }, pager.pages()));
    let verified = Arc::new(AtomicU64::new(0));
    let start = Instant::now();
    let done = use_pages(work, &pager, &ledger, &verified).await;
    let (verified, time) = (verified.load(Ordering::Relaxed), start.elapsed().as_secs_f64());
    println!("{verified} pages verified in {time:.2} s, {:.0} per second", verified as f64 / time);
    for (node, cause) in pager.lost() {
        println!("node {node} was lost: {cause}");
    }
    println!("{}", pager.report());
    done?;
    // The next client expects the initial contents.
    Ok(ledger.restore(&pager).await?)
}

async fn an_owner(directory: &Directory, wanted: Wanted) -> Result<IpAddr> {
    let map = directory.map(wanted, PATIENCE).await?;
    Ok(map.shares.values().next().ok_or("the map has no nodes")?.address.ip())
}

async fn use_pages(
    work: &Work,
    pager: &Pager,
    ledger: &Arc<Ledger>,
    verified: &Arc<AtomicU64>,
) -> std::result::Result<(), Verdict> {
    let bar = bar(work.reads);
    let every = (work.reads / 10).clamp(1, PROGRESS_PAGES);
    let begun = Arc::new(AtomicU64::new(0));
    let stop = begun.clone();
    let stopping = tokio::spawn(async move {
        if tokio::signal::ctrl_c().await.is_ok() {
            stop.store(u64::MAX / 2, Ordering::Relaxed);
        }
    });
    let mut tasks = JoinSet::new();
    for task in 0..work.tasks {
        let (pager, ledger, begun, verified, bar) =
            (pager.clone(), ledger.clone(), begun.clone(), verified.clone(), bar.clone());
        let (work, pages) = (work.clone(), pager.pages());
        // The same pages in each run.
        let mut random = fastrand::Rng::with_seed(task.into());
        tasks.spawn(async move {
            loop {
                let number = begun.fetch_add(1, Ordering::Relaxed);
                if number >= work.reads {
                    return Ok(());
                }
                let page = if work.in_order { number % pages } else { random.u64(..pages) };
                if random.u8(..100) < work.writes {
                    ledger.write(&pager, page).await?;
                }
                ledger.read(&pager, page).await?;
                let count = verified.fetch_add(1, Ordering::Relaxed) + 1;
                bar.inc(1);
                if bar.is_hidden() && count.is_multiple_of(every) {
                    let lost = pager.lost().len();
                    println!("{count} of {} pages verified, {lost} nodes lost", work.reads);
                }
            }
        });
    }
    let mut done = Ok(());
    while let Some(ended) = tasks.join_next().await {
        // On the first failure, dropping the set aborts the other tasks.
        done = ended.unwrap_or_else(|error| std::panic::resume_unwind(error.into_panic()));
        if done.is_err() {
            break;
        }
    }
    stopping.abort();
    bar.finish_and_clear();
    done
}

fn bar(pages: u64) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template(
        "{bar:40} {pos} of {len} pages verified, {per_sec}, {eta} left",
    );
    ProgressBar::new(pages).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

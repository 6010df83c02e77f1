//! Remote memory in pages of 4 KiB. In three terminals:
//!
//! ```text
//! pager coordinator                            keeps the map of pages and owners
//! pager owner a                                lends 1 GiB
//! pager client                                 reads 100,000 random pages and verifies each
//! ```
//!
//! `pager demo` does all of it and kills an owner. `pager --help` lists the options;
//! examples/pager/README.md describes the output.

mod args;
mod client;
mod demo;

use std::error::Error;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use pager::{Content, Directory, DirectoryError, OwnerConfig, PAGE, Settings, service};
use tokio::net::TcpListener;
use tokio_rdma::Device;

use crate::args::{Options, Role};

/// An error that is printed to the user.
type Failure = Box<dyn Error + Send + Sync>;
type Result<T> = std::result::Result<T, Failure>;

/// Maximum wait for the coordinator, owners and pages.
const PATIENCE: Duration = Duration::from_secs(30);

/// Interval at which an owner checks that it is on the map.
const CONFIRM_INTERVAL: Duration = Duration::from_secs(5);

#[tokio::main]
async fn main() -> ExitCode {
    let done = match Options::parse().role {
        Role::Coordinator { listen, lease } => coordinate(listen, lease).await,
        Role::Owner(options) => own(&options).await,
        Role::Client(options) => client::run(&options).await,
        Role::Demo(options) => demo::run(&options).await,
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("pager: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn coordinate(listen: std::net::SocketAddr, lease: u64) -> Result<()> {
    let settings = Settings { lease: Duration::from_secs(lease) };
    let listener = TcpListener::bind(listen).await?;
    println!("coordinator at http://{}", listener.local_addr()?);
    let stop = async {
        // Without signal handling, serve until killed.
        if tokio::signal::ctrl_c().await.is_err() {
            std::future::pending::<()>().await;
        }
    };
    Ok(axum::serve(listener, service::router_with(settings)).with_graceful_shutdown(stop).await?)
}

async fn own(options: &args::Owner) -> Result<()> {
    let directory = Directory::new(&options.common.coordinator);
    let (first, pages, replica) = match &options.replica_of {
        None => (options.first, options.memory * ((1 << 20) / PAGE as u64), 0),
        Some(node) => {
            let share = directory.find(node, PATIENCE).await?;
            let pages = share.pages()?;
            (share.first, pages.end - pages.start, share.replica.saturating_add(1))
        }
    };
    let config = OwnerConfig {
        name: options.name.clone(),
        address: (options.address, 0).into(),
        first,
        pages,
        replica,
        content: Content { seed: options.common.seed },
    };
    let owner =
        pager::Owner::start(&Device::open_default_at(options.address)?, &directory, &config)
            .await?;
    println!(
        "{} lends pages {first} to {} at {}",
        options.name,
        first + pages - 1,
        owner.share().address
    );
    tokio::select! {
        stopped = tokio::signal::ctrl_c() => stopped?,
        () = confirm(&options.name, &owner, &directory) => {}
    }
    Ok(owner.leave(&directory).await?)
}

/// Reports when the pages are off the map. The owner keeps serving its clients.
async fn confirm(name: &str, owner: &pager::Owner, directory: &Directory) {
    loop {
        tokio::time::sleep(CONFIRM_INTERVAL).await;
        // Other errors may be temporary: the coordinator may be restarted.
        if let Err(DirectoryError::Conflict(conflict)) = owner.confirm(directory).await {
            eprintln!("{name} is off the map: {conflict}");
            return std::future::pending().await;
        }
    }
}

//! Command-line arguments.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use clap::{Args, Parser, Subcommand};

/// The coordinator's default address.
const COORDINATOR: &str = "127.0.0.1:7490";

/// Remote memory in pages of 4 KiB.
///
/// Uses the real device (feature ibverbs) named by TOKIO_RDMA_DEVICE or with the address of the
/// owner or client. Otherwise it uses a software device, RoCE v2 over UDP, at that address. On
/// loopback each process needs its own address: 127.0.0.1 to 127.255.255.254.
#[derive(Debug, Parser)]
#[command(version)]
pub(crate) struct Options {
    #[command(subcommand)]
    pub(crate) role: Role,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Role {
    /// Keeps the map of pages and owners.
    Coordinator {
        /// Address to listen at.
        #[arg(long, default_value = COORDINATOR)]
        listen: SocketAddr,
        /// Seconds without renewal after which a client that writes is considered dead, and copies
        /// may differ.
        #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..))]
        lease: u64,
    },
    /// Lends memory until Ctrl-C.
    Owner(Owner),
    /// Reads random pages and verifies each.
    Client(Client),
    /// Runs all roles as processes and kills an owner, with a replica and without.
    Demo(Demo),
}

#[derive(Debug, Args)]
pub(crate) struct Common {
    /// URL of the coordinator.
    #[arg(long, default_value_t = format!("http://{COORDINATOR}"))]
    pub(crate) coordinator: String,
    /// Seed of the page contents, the same for owners and clients.
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
}

#[derive(Debug, Args)]
pub(crate) struct Owner {
    /// Name at the coordinator.
    pub(crate) name: String,
    /// Memory to lend, in MiB.
    #[arg(long, default_value_t = 1024, value_parser = clap::value_parser!(u64).range(1..1 << 24))]
    pub(crate) memory: u64,
    /// Number of its first page.
    #[arg(long, default_value_t = 0)]
    pub(crate) first: u64,
    /// Lends another copy of the pages of this node.
    #[arg(long, conflicts_with_all = ["memory", "first"])]
    pub(crate) replica_of: Option<String>,
    /// Address at which clients reach the owner.
    #[arg(long, default_value_t = Ipv4Addr::LOCALHOST.into())]
    pub(crate) address: IpAddr,
    #[command(flatten)]
    pub(crate) common: Common,
}

#[derive(Debug, Args)]
pub(crate) struct Client {
    #[command(flatten)]
    pub(crate) work: Work,
    /// Copies of each page required before it begins.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) copies: u16,
    /// Pages required before it begins; 0: any number.
    #[arg(long, default_value_t = 0)]
    pub(crate) pages: u64,
    /// Begins even if an earlier client died while writing, so that copies may differ.
    #[arg(long)]
    pub(crate) unclean_too: bool,
    /// Address from which owners are reached; a free one by default.
    #[arg(long)]
    pub(crate) address: Option<IpAddr>,
    #[command(flatten)]
    pub(crate) common: Common,
}

#[derive(Debug, Clone, Args)]
pub(crate) struct Work {
    /// Pages to read.
    #[arg(long, default_value_t = 100_000)]
    pub(crate) reads: u64,
    /// Percentage of accesses that write a new version of the page.
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=100))]
    pub(crate) writes: u8,
    /// Accesses pages in order instead of randomly.
    #[arg(long)]
    pub(crate) in_order: bool,
    /// Number of tasks that access pages.
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) tasks: u16,
    /// Capacity of the cache, in pages.
    #[arg(long, default_value_t = 4096)]
    pub(crate) cache: usize,
    /// Pages in flight at once.
    #[arg(long, default_value_t = 64)]
    pub(crate) in_flight: usize,
    /// Maximum number of pages to prefetch for a sequential reader.
    #[arg(long, default_value_t = 32)]
    pub(crate) readahead: u64,
}

#[derive(Debug, Args)]
pub(crate) struct Demo {
    #[command(flatten)]
    pub(crate) work: Work,
    /// Memory of each owner, in MiB.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u64).range(1..1 << 24))]
    pub(crate) memory: u64,
    /// Addresses of the two owners and the client; on a real device, three times the same.
    #[arg(long, num_args = 3, default_values = ["127.0.74.1", "127.0.74.2", "127.0.74.3"])]
    pub(crate) addresses: Vec<IpAddr>,
    /// Kills so many owners that have a replica, and prints the slowest page of each run. By
    /// default, one owner with and one without a replica is killed.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub(crate) repeat: Option<u32>,
}

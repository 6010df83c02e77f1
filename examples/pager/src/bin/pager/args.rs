//! What is asked for.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use clap::{Args, Parser, Subcommand};

/// Where the coordinator is, unless somebody says otherwise.
const COORDINATOR: &str = "127.0.0.1:7490";

/// Remote memory in pages of 4 KiB.
///
/// The device is a real one (feature ibverbs), which TOKIO_RDMA_DEVICE names or which has the address of the owner or client,
/// or else a software device over UDP, RoCE v2, at that address; on loopback each needs an address of its own, 127.0.0.1 to
/// 127.255.255.254.
#[derive(Debug, Parser)]
#[command(version)]
pub(crate) struct Options {
    #[command(subcommand)]
    pub(crate) role: Role,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Role {
    /// Knows who lends which pages.
    Coordinator {
        /// Where to listen.
        #[arg(long, default_value = COORDINATOR)]
        listen: SocketAddr,
        /// Seconds for which a client may write that is not heard of; then copies may differ.
        #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..))]
        lease: u64,
    },
    /// Lends memory, until it is told to stop (Ctrl-C).
    Owner(Owner),
    /// Reads random pages and verifies each.
    Client(Client),
    /// All of it in processes of its own, one of which is killed: with a replica, and without.
    Demo(Demo),
}

#[derive(Debug, Args)]
pub(crate) struct Common {
    /// Where the coordinator is.
    #[arg(long, default_value_t = format!("http://{COORDINATOR}"))]
    pub(crate) coordinator: String,
    /// Of what pages hold; the same for owners and clients.
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
}

#[derive(Debug, Args)]
pub(crate) struct Owner {
    /// Its name at the coordinator.
    pub(crate) name: String,
    /// Memory to lend, in MiB.
    #[arg(long, default_value_t = 1024, value_parser = clap::value_parser!(u64).range(1..1 << 24))]
    pub(crate) memory: u64,
    /// Number of its first page.
    #[arg(long, default_value_t = 0)]
    pub(crate) first: u64,
    /// Lends the same pages as this node, as another copy of them.
    #[arg(long, conflicts_with_all = ["memory", "first"])]
    pub(crate) replica_of: Option<String>,
    /// Address to be reached at.
    #[arg(long, default_value_t = Ipv4Addr::LOCALHOST.into())]
    pub(crate) address: IpAddr,
    #[command(flatten)]
    pub(crate) common: Common,
}

#[derive(Debug, Args)]
pub(crate) struct Client {
    #[command(flatten)]
    pub(crate) work: Work,
    /// Copies of each page that must be there before it begins.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) copies: u16,
    /// Pages that must be there before it begins; 0: any.
    #[arg(long, default_value_t = 0)]
    pub(crate) pages: u64,
    /// Begins though another client wrote and did not come to an end of it, so that copies may differ.
    #[arg(long)]
    pub(crate) unclean_too: bool,
    /// Address to reach the owners from; one that is free unless given.
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
    /// Of 100 uses, those that write a new version of the page instead.
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=100))]
    pub(crate) writes: u8,
    /// One page after the other, instead of random ones.
    #[arg(long)]
    pub(crate) in_order: bool,
    /// Tasks that use pages at once.
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) tasks: u16,
    /// Pages that the cache holds.
    #[arg(long, default_value_t = 4096)]
    pub(crate) cache: usize,
    /// Pages on their way at once.
    #[arg(long, default_value_t = 64)]
    pub(crate) in_flight: usize,
    /// Pages to fetch ahead of a task that reads in order.
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
    /// Addresses of the two owners and the client; of a real device, three times the same.
    #[arg(long, num_args = 3, default_values = ["127.0.74.1", "127.0.74.2", "127.0.74.3"])]
    pub(crate) addresses: Vec<IpAddr>,
}

//! The command line.

#[path = "../../common/seconds.rs"]
mod seconds;

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};

/// A key-value service: clients READ the server's memory to get, and send messages to write.
#[derive(Debug, Parser)]
#[command(name = "kv", version)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Serve an empty table until the process is terminated
    Serve {
        /// Address for clients, and for the server's software device
        #[arg(long, value_name = "ADDRESS:PORT")]
        listen: SocketAddr,
        #[command(flatten)]
        table: Table,
    },
    /// Print the value of a key
    Get {
        #[command(flatten)]
        client: Client,
        /// Send a message to the server instead of reading its memory
        #[arg(long)]
        by_message: bool,
        key: String,
    },
    /// Set the value of a key
    Put {
        #[command(flatten)]
        client: Client,
        key: String,
        value: String,
    },
    /// Delete a key
    Delete {
        #[command(flatten)]
        client: Client,
        key: String,
    },
    /// Measure latency and throughput, by default of a server in this process
    Load {
        #[command(flatten)]
        place: Place,
        #[command(flatten)]
        load: LoadOptions,
    },
    /// Run many clients and check every answer, by default with a server in this process
    Check {
        #[command(flatten)]
        place: Place,
        #[command(flatten)]
        check: CheckOptions,
    },
    /// Kill servers, and measure the time until the next ones answer
    Failover(FailoverOptions),
}

#[derive(Debug, Clone, Args)]
pub(crate) struct FailoverOptions {
    /// Servers to kill, one after the other
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub(crate) repeat: u32,
    /// Addresses of two servers and their software devices; on a real device, twice the same
    #[arg(long, num_args = 2, default_values = ["127.0.79.1", "127.0.79.2"])]
    pub(crate) addresses: Vec<IpAddr>,
    /// Seed of the times for which the servers serve
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
}

#[derive(Debug, Clone, Args)]
pub(crate) struct Client {
    /// The server's address
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub(crate) connect: SocketAddr,
    /// Address of the client's UDP software device; by default one that routes to the server
    #[arg(long, value_name = "ADDRESS")]
    pub(crate) from: Option<IpAddr>,
}

#[derive(Debug, Clone, Args)]
pub(crate) struct Table {
    /// Number of buckets
    #[arg(long, default_value_t = 8192)]
    pub(crate) buckets: u32,
    /// Slots per bucket; each holds one key
    #[arg(long, default_value_t = 8)]
    pub(crate) slots: u32,
    /// Maximum key length in bytes
    #[arg(long, default_value_t = 32)]
    pub(crate) max_key: u32,
    /// Maximum value length in bytes
    #[arg(long, default_value_t = 256)]
    pub(crate) max_value: u32,
}

#[derive(Debug, Clone, Args)]
pub(crate) struct Place {
    /// Use the server at this address instead of one in this process
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub(crate) connect: Option<SocketAddr>,
    /// Address of the clients' UDP software device; by default one that routes to the server
    #[arg(long, value_name = "ADDRESS", requires = "connect")]
    pub(crate) from: Option<IpAddr>,
    /// Give server and clients a UDP software device each; a device named by TOKIO_RDMA_DEVICE
    /// takes precedence
    #[arg(long, conflicts_with = "connect")]
    pub(crate) udp: bool,
    #[command(flatten)]
    pub(crate) table: Table,
}

#[derive(Debug, Clone, Args)]
pub(crate) struct LoadOptions {
    /// Connections
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=256))]
    pub(crate) clients: u32,
    /// Concurrent calls per connection
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(crate) depth: u32,
    /// Number of keys
    #[arg(
        long,
        default_value_t = 10_000,
        value_parser = clap::value_parser!(u32).range(1..=10_000_000)
    )]
    pub(crate) keys: u32,
    /// Distribution of keys
    #[arg(long, value_enum, default_value = "zipf")]
    pub(crate) choice: Choice,
    /// Bytes per value
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(4..))]
    pub(crate) value: u32,
    /// PUTs per 100 calls; the others are GETs
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u8).range(0..=100))]
    pub(crate) puts: u8,
    /// Kind of GET; with "both", each GET picks one at random
    #[arg(long, value_enum, default_value = "both")]
    pub(crate) get: GetBy,
    /// Seconds to measure
    #[arg(long, default_value = "3", value_parser = seconds::parse)]
    pub(crate) duration: Duration,
    /// Seed of the random choices
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
    /// Print the report as JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Choice {
    /// The key of rank n is n^0.99 times rarer than rank 1, as in YCSB
    Zipf,
    /// All keys are equally frequent
    Uniform,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum GetBy {
    Read,
    Message,
    Both,
}

#[derive(Debug, Clone, Args)]
pub(crate) struct CheckOptions {
    /// Connections
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=256))]
    pub(crate) clients: u32,
    /// Concurrent calls per connection
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(crate) depth: u32,
    /// Number of keys that all clients share; fewer keys cause more conflicts
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub(crate) keys: u32,
    /// Maximum value length in bytes, at least 16; by default the table's
    #[arg(long, value_parser = clap::value_parser!(u32).range(16..))]
    pub(crate) value: Option<u32>,
    /// Seconds to run; all calls are kept in memory until they are checked
    #[arg(long, default_value = "3", value_parser = seconds::parse)]
    pub(crate) duration: Duration,
    /// Seed of the random choices
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
    /// Accept READs without verifying their checksums, which the check must detect
    #[arg(long)]
    pub(crate) accept_torn: bool,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn invalid_arguments_are_refused_by_name() {
        Arguments::command().debug_assert();
        for (line, option) in [
            ("load --udp --connect 127.0.0.1:1", "--connect"),
            ("load --puts 101", "--puts"),
            ("check --value 15", "--value"),
            ("get key", "--connect"),
            ("load --duration never", "--duration"),
            ("load --duration -1", "-1"),
            ("load --duration=-1", "--duration"),
            ("load --duration NaN", "--duration"),
            ("load --duration 3600.1", "--duration"),
        ] {
            let arguments = std::iter::once("kv").chain(line.split(' '));
            let error = Arguments::try_parse_from(arguments).expect_err(line).to_string();
            assert!(error.contains(option), "{line}: {error}");
        }
    }

    #[test]
    fn durations_are_fractional_seconds() {
        let duration = |text| match Arguments::try_parse_from(["kv", "load", "--duration", text])
            .expect(text)
            .command
        {
            Command::Load { load, .. } => load.duration,
            other => panic!("{other:?}"),
        };
        for (text, milliseconds) in
            [("0", 0), ("0.2", 200), ("3", 3000), ("1e1", 10_000), ("3600", 3_600_000)]
        {
            assert_eq!(duration(text), Duration::from_millis(milliseconds), "{text}");
        }
    }
}

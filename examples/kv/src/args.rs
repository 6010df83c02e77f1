//! What is asked for on the command line.

#[path = "../../common/seconds.rs"]
mod seconds;

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};

/// A key-value service: readers READ the server's memory, writers ask the server.
#[derive(Debug, Parser)]
#[command(name = "kv", version)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Serve an empty table, until this is ended
    Serve {
        /// Where clients find it; also the address of a software device
        #[arg(long, value_name = "ADDRESS:PORT")]
        listen: SocketAddr,
        #[command(flatten)]
        table: Table,
    },
    /// Print the value of a key
    Get {
        #[command(flatten)]
        client: Client,
        /// Ask the server, instead of reading its memory
        #[arg(long)]
        by_message: bool,
        key: String,
    },
    /// Give a key a value
    Put {
        #[command(flatten)]
        client: Client,
        key: String,
        value: String,
    },
    /// Take a key away
    Delete {
        #[command(flatten)]
        client: Client,
        key: String,
    },
    /// Measure latency and throughput, of a server in this process unless told otherwise
    Load {
        #[command(flatten)]
        place: Place,
        #[command(flatten)]
        load: LoadOptions,
    },
    /// Have many clients read and write at once, and check every answer; with a server in this process unless told otherwise
    Check {
        #[command(flatten)]
        place: Place,
        #[command(flatten)]
        check: CheckOptions,
    },
}

#[derive(Debug, Clone, Args)]
pub(crate) struct Client {
    /// The server
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub(crate) connect: SocketAddr,
    /// Address of the client's software device over UDP; unless given, one that reaches the server
    #[arg(long, value_name = "ADDRESS")]
    pub(crate) from: Option<IpAddr>,
}

#[derive(Debug, Clone, Args)]
pub(crate) struct Table {
    /// Buckets of the table
    #[arg(long, default_value_t = 8192)]
    pub(crate) buckets: u32,
    /// Slots of a bucket: keys that it has room for
    #[arg(long, default_value_t = 8)]
    pub(crate) slots: u32,
    /// Bytes of the longest key
    #[arg(long, default_value_t = 32)]
    pub(crate) max_key: u32,
    /// Bytes of the longest value
    #[arg(long, default_value_t = 256)]
    pub(crate) max_value: u32,
}

#[derive(Debug, Clone, Args)]
pub(crate) struct Place {
    /// A server that is there, instead of one in this process
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub(crate) connect: Option<SocketAddr>,
    /// Address of the clients' software device over UDP; unless given, one that reaches the server
    #[arg(long, value_name = "ADDRESS", requires = "connect")]
    pub(crate) from: Option<IpAddr>,
    /// Server and clients each on a software device of their own, which speak over UDP on loopback, unless TOKIO_RDMA_DEVICE
    /// names a real one
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
    /// Calls at once on each
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(crate) depth: u32,
    /// Keys
    #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    pub(crate) keys: u32,
    /// How keys are chosen
    #[arg(long, value_enum, default_value = "zipf")]
    pub(crate) choice: Choice,
    /// Bytes of a value
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(4..))]
    pub(crate) value: u32,
    /// PUTs in 100 calls; the others are GETs
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u8).range(0..=100))]
    pub(crate) puts: u8,
    /// How a GET goes; both: each by a throw of dice, so that whatever else the machine does hits both
    #[arg(long, value_enum, default_value = "both")]
    pub(crate) get: GetBy,
    /// Seconds
    #[arg(long, default_value = "3", value_parser = seconds::parse)]
    pub(crate) duration: Duration,
    /// Of the choice of keys and calls
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
    /// Report for programs
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Choice {
    /// The key of rank n is n^0.99 times rarer than that of rank 1, as in YCSB
    Zipf,
    /// All alike
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
    /// Calls at once on each
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(crate) depth: u32,
    /// Keys that all of them write and read: the fewer, the more often they meet
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub(crate) keys: u32,
    /// Bytes of the longest value, of at least 16; what the table takes unless given
    #[arg(long, value_parser = clap::value_parser!(u32).range(16..))]
    pub(crate) value: Option<u32>,
    /// Seconds; all calls are kept in memory until they are checked
    #[arg(long, default_value = "3", value_parser = seconds::parse)]
    pub(crate) duration: Duration,
    /// Of the choice of keys and calls
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
    /// Take what is read without looking at its checksum: this check must fail then
    #[arg(long)]
    pub(crate) accept_torn: bool,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn options_are_put_together_as_they_should() {
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
    fn durations_are_seconds_and_parts_of_them() {
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

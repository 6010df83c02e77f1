//! The command line.

#[path = "../../common/seconds.rs"]
mod seconds;

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, CommandFactory, Parser, Subcommand, ValueEnum};

use crate::case::{Case, Mode, Over, Verb, Work};

/// Latency and bandwidth of RDMA operations, compared with TCP.
#[derive(Debug, Parser)]
#[command(name = "perf", version, args_conflicts_with_subcommands = true)]
struct Arguments {
    #[command(subcommand)]
    setup: Option<Steps>,
    /// Quantity to measure; not with --listen
    #[arg(value_enum, requires = "verb")]
    work: Option<Work>,
    /// Operation to measure
    #[arg(value_enum)]
    verb: Option<Verb>,
    /// Listen at this address and serve one client
    #[arg(long, value_name = "ADDRESS:PORT", conflicts_with_all = ["connect", "work"])]
    listen: Option<SocketAddr>,
    /// Use the server at this address instead of one in this process
    #[arg(long, value_name = "ADDRESS:PORT")]
    connect: Option<SocketAddr>,
    /// Address of the client's UDP software device; by default one that routes to the server
    #[arg(long, value_name = "ADDRESS", requires = "connect")]
    from: Option<IpAddr>,
    /// Bytes per operation; several sizes are separated by commas
    #[arg(long, value_delimiter = ',', default_value = "8", value_parser = bytes)]
    size: Vec<usize>,
    /// Measure sizes from 8 bytes to 512 KiB, in steps of a factor of four
    #[arg(long, conflicts_with = "size")]
    sweep: bool,
    /// Operations in flight on each queue pair (bandwidth)
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=4096))]
    depth: u32,
    /// Queue pairs that run the operation in parallel
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    queue_pairs: u32,
    /// Threads of each end's runtime
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=256))]
    threads: u32,
    /// Operations per doorbell and completion (bandwidth of send, write, write-imm, read)
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=4096))]
    batch: u32,
    /// Copy the data into the work request (send, write)
    #[arg(long)]
    inline: bool,
    /// Completion mode
    #[arg(long, value_enum, default_value = "event")]
    mode: Mode,
    /// Seconds to measure in each round
    #[arg(long, default_value = "1", value_parser = seconds::parse)]
    duration: Duration,
    /// Rounds; rates are the median round's, percentiles cover all rounds
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// Seconds to run before each round without measuring
    #[arg(long, default_value = "0.1", value_parser = seconds::parse)]
    warm_up: Duration,
    /// Run the same work over TCP in alternating rounds, and compare
    #[arg(long, value_enum)]
    against: Option<Against>,
    /// Measure over RDMA or TCP only
    #[arg(long, value_enum, default_value = "rdma", conflicts_with_all = ["against", "plot"])]
    over: Over,
    /// Print the report as JSON
    #[arg(long)]
    json: bool,
    /// Draw the result into this file
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
enum Steps {
    /// Measure registrations, queue pairs and connections, all in this process
    Setup(SetupOptions),
}

#[derive(Debug, Args)]
pub(crate) struct SetupOptions {
    /// Bytes per registration; several sizes are separated by commas
    #[arg(long, value_delimiter = ',', default_value = "4K,64K,1M,16M", value_parser = bytes)]
    pub(crate) size: Vec<usize>,
    /// Connections at once, besides one at a time
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(crate) parallel: u32,
    /// Give both ends a UDP software device each; a device named by TOKIO_RDMA_DEVICE takes
    /// precedence
    #[arg(long)]
    pub(crate) udp: bool,
    /// Seconds to measure in each round of each step
    #[arg(long, default_value = "0.2", value_parser = seconds::parse)]
    pub(crate) duration: Duration,
    /// Rounds; rates are the median round's, percentiles cover all rounds
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(crate) rounds: u32,
    /// Print the report as JSON
    #[arg(long)]
    pub(crate) json: bool,
}

impl SetupOptions {
    /// Returns the time to run before the first round without measuring.
    pub(crate) fn warm_up(&self) -> Duration {
        self.duration / 4
    }
}

/// The work of this process.
#[derive(Debug)]
pub(crate) enum Request {
    Operations(Options),
    Setup(SetupOptions),
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Against {
    Tcp,
}

#[derive(Debug)]
pub(crate) struct Options {
    pub(crate) place: Place,
    /// One per size; each runs over all of `overs`.
    pub(crate) cases: Vec<Case>,
    pub(crate) overs: Vec<Over>,
    pub(crate) threads: usize,
    pub(crate) duration: Duration,
    pub(crate) warm_up: Duration,
    pub(crate) rounds: u32,
    pub(crate) json: bool,
    pub(crate) plot: Option<PathBuf>,
}

/// The ends that this process runs.
#[derive(Debug)]
pub(crate) enum Place {
    Here,
    Listen(SocketAddr),
    Connect(SocketAddr, Option<IpAddr>),
}

/// The maximum bytes in flight on one queue pair.
const MAX_IN_FLIGHT: usize = 1 << 30;

impl Request {
    /// Parses the arguments, or exits with a message.
    pub(crate) fn from_arguments() -> Self {
        let mut arguments = Arguments::parse();
        match arguments.setup.take() {
            Some(Steps::Setup(options)) => Self::Setup(options),
            None => Self::Operations(Options::from_arguments(arguments)),
        }
    }
}

impl Options {
    fn from_arguments(arguments: Arguments) -> Self {
        Self::check(arguments).unwrap_or_else(|error| {
            Arguments::command().error(clap::error::ErrorKind::ValueValidation, error).exit()
        })
    }

    fn check(arguments: Arguments) -> Result<Self, String> {
        let place = match (arguments.listen, arguments.connect) {
            (Some(address), _) => Place::Listen(address),
            (None, Some(address)) => Place::Connect(address, arguments.from),
            (None, None) => Place::Here,
        };
        let cases = match (arguments.work, arguments.verb, &place) {
            (Some(work), Some(verb), _) => cases(&arguments, work, verb)?,
            (_, _, Place::Listen(_)) => Vec::new(),
            _ => return Err("nothing to measure; for example: perf latency write".to_owned()),
        };
        Ok(Self {
            place,
            cases,
            overs: if arguments.against.is_some() {
                vec![Over::Rdma, Over::Tcp]
            } else {
                vec![arguments.over]
            },
            threads: arguments.threads as usize,
            duration: arguments.duration,
            warm_up: arguments.warm_up,
            rounds: arguments.rounds,
            json: arguments.json,
            plot: arguments.plot,
        })
    }
}

fn cases(arguments: &Arguments, work: Work, verb: Verb) -> Result<Vec<Case>, String> {
    let sizes = match verb {
        Verb::CompareSwap | Verb::FetchAdd => vec![8],
        _ if arguments.sweep => {
            (0..).map(|step| 8 << (2 * step)).take_while(|&size| size <= 1 << 20).collect()
        }
        _ => arguments.size.clone(),
    };
    let depth = if work == Work::Latency { 1 } else { arguments.depth as usize };
    let batch = if work == Work::Latency { 1 } else { arguments.batch as usize };
    if batch > 1 && !verb.batches() {
        return Err(format!("--batch: {verb} does not support batches"));
    }
    if batch > 1 && arguments.inline {
        return Err("--batch: a batch needs registered memory; remove --inline".to_owned());
    }
    if arguments.inline && !verb.inlines() {
        return Err(format!("--inline: {verb} does not support inline data; send and write do"));
    }
    if !depth.is_multiple_of(batch) {
        return Err(format!("--depth: {depth} is not a multiple of --batch {batch}"));
    }
    let case = |size: usize| {
        if size.saturating_mul(depth) > MAX_IN_FLIGHT {
            return Err(format!(
                "--size: {depth} operations of {size} bytes exceed {MAX_IN_FLIGHT} bytes in flight"
            ));
        }
        Ok(Case {
            work,
            verb,
            over: Over::Rdma,
            size,
            depth,
            lanes: arguments.queue_pairs as usize,
            queues: arguments.threads as usize,
            batch,
            inline: arguments.inline,
            mode: arguments.mode,
        })
    };
    sizes.into_iter().map(case).collect()
}

/// Parses a number of bytes with an optional unit K, M or G (powers of 1024).
fn bytes(text: &str) -> Result<usize, String> {
    let (number, unit) = match text.strip_suffix(['K', 'M', 'G']) {
        Some(number) => (number, &text[number.len()..]),
        None => (text, ""),
    };
    let shift = match unit {
        "K" => 10,
        "M" => 20,
        "G" => 30,
        _ => 0,
    };
    let number: usize = number
        .parse()
        .map_err(|_| format!("invalid number of bytes {text:?}; for example 8, 64K, 1M"))?;
    match number.checked_mul(1 << shift) {
        Some(size) if (1..=MAX_IN_FLIGHT).contains(&size) => Ok(size),
        _ => Err(format!("{text} bytes; expected 1 to {MAX_IN_FLIGHT}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Options, String> {
        let arguments = std::iter::once("perf").chain(line.split(' '));
        Arguments::try_parse_from(arguments)
            .map_err(|error| error.to_string())
            .and_then(Options::check)
    }

    #[test]
    fn sizes_accept_units_and_sweep_covers_the_range() {
        let sizes =
            |line| parse(line).unwrap().cases.iter().map(|case| case.size).collect::<Vec<_>>();
        assert_eq!(sizes("latency write --size 8,64K"), [8, 65536]);
        let sweep = sizes("bandwidth read --sweep");
        assert_eq!((sweep.first(), sweep.last(), sweep.len()), (Some(&8), Some(&524_288), 9));
        assert_eq!(sizes("latency compare-swap --size 64"), [8], "an atomic has 8 bytes");
    }

    #[test]
    fn invalid_arguments_are_refused_by_option_name() {
        for (line, option) in [
            ("bandwidth fetch-add --batch 4", "--batch"),
            ("bandwidth write --batch 3 --depth 16", "--depth"),
            ("latency read --inline", "--inline"),
            ("bandwidth write --size 1G --depth 16", "--size"),
            ("latency write --size none", "--size"),
            ("latency", "<VERB>"),
            ("setup --size none", "--size"),
            ("setup --parallel 0", "--parallel"),
        ] {
            let error = parse(line).expect_err(line);
            assert!(error.contains(option), "{line}: {error}");
        }
    }

    #[test]
    fn tcp_runs_with_rdma_or_alone() {
        let overs = |line| parse(line).map(|options| options.overs);
        assert_eq!(overs("latency write"), Ok(vec![Over::Rdma]));
        assert_eq!(overs("latency write --against tcp"), Ok(vec![Over::Rdma, Over::Tcp]));
        assert_eq!(overs("latency write --over tcp"), Ok(vec![Over::Tcp]));
        assert!(overs("latency write --over tcp --against tcp").is_err());
    }

    #[test]
    fn latency_has_one_operation_in_flight() {
        assert_eq!(parse("latency write --depth 64").unwrap().cases[0].depth, 1);
    }
}

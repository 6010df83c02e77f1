//! Latency and bandwidth of every operation, beside TCP: what perftest is to C.
//!
//! ```text
//! perf latency write --size 8                          both ends in this process
//! perf --listen 127.0.0.1:7471                         the server of two processes, or hosts: serves one client
//! perf bandwidth read --sweep --connect 127.0.0.1:7471 its client
//! perf latency send --against tcp --plot send.svg      the same work over TCP, in rounds that take turns
//! ```
//!
//! `perf --help` has all options, docs/perf.md says what is measured and how. The device is a real one, which
//! `TOKIO_RDMA_DEVICE` names or which has the address, or else a software device: within the process, or, of two processes,
//! over UDP from the address that they meet at.
//!
//! | File | What |
//! |---|---|
//! | `args.rs` | what is asked for |
//! | `case.rs` | a measurement, as both ends know it |
//! | `device.rs` | which device |
//! | `meet.rs` | the channel over which the ends meet |
//! | `server.rs` | the end that answers |
//! | `client.rs` | the end that measures: rounds, in turn |
//! | `lane.rs` | one stream of work; `queue_pair.rs`, `messages.rs`, `tcp.rs` are the kinds |
//! | `measure.rs` | time, processor time, what became of them |
//! | `report.rs`, `plot.rs` | tables, JSON, a picture |

mod args;
mod case;
mod client;
mod device;
mod lane;
mod measure;
mod meet;
mod messages;
mod plot;
mod queue_pair;
mod report;
mod server;
mod tcp;

use std::error::Error;
use std::process::ExitCode;

use tokio::runtime::{Builder, Runtime};

use crate::args::{Options, Place};
use crate::device::Reach;
use crate::report::Report;

/// What goes wrong is told to whoever runs the program, in words.
type Failure = Box<dyn Error + Send + Sync>;
type Result<T> = std::result::Result<T, Failure>;

fn main() -> ExitCode {
    let options = Options::from_arguments();
    match run(&options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("perf: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(options: &Options) -> Result<()> {
    match &options.place {
        Place::Listen(address) => runtime(options.threads)?.block_on(server::listen(*address)),
        Place::Connect(address, from) => {
            let reach = from.map_or_else(|| Reach::To(address.ip()), Reach::From);
            let report = runtime(options.threads)?
                .block_on(client::measure(options, *address, &reach, false))?;
            show(options, &report)
        }
        Place::Here => {
            // The server has a thread and a runtime of its own, as if it were another process.
            let (listening, address) = server::bind_here()?;
            let threads = options.threads;
            let server = std::thread::spawn(move || {
                runtime(threads)?.block_on(server::serve_here(listening))
            });
            let measured = runtime(threads)?.block_on(client::measure(
                options,
                address,
                &Reach::Process,
                true,
            ));
            let served = server.join().map_err(|_| "the server's thread panicked")?;
            // Of two errors the client's says more, unless the server went first.
            let report = measured.map_err(|error| match &served {
                Err(cause) => format!("{error} (server: {cause})").into(),
                Ok(()) => error,
            })?;
            served?;
            show(options, &report)
        }
    }
}

/// With one thread there is no other to hand tasks to.
fn runtime(threads: usize) -> Result<Runtime> {
    let mut builder =
        if threads == 1 { Builder::new_current_thread() } else { Builder::new_multi_thread() };
    if threads > 1 {
        builder.worker_threads(threads);
    }
    Ok(builder.enable_all().build()?)
}

fn show(options: &Options, report: &Report) -> Result<()> {
    if options.json {
        println!("{}", serde_json::to_string_pretty(report)?);
    } else {
        print!("{report}");
    }
    if let Some(path) = &options.plot {
        plot::draw(report, path)?;
        eprintln!("drawn: {}", path.display());
    }
    Ok(())
}

//! Latency and bandwidth of every operation, compared with TCP: a counterpart of perftest.
//!
//! ```text
//! perf latency write --size 8                           both ends in this process
//! perf --listen 127.0.0.1:7471                          the server, which serves one client
//! perf bandwidth read --sweep --connect 127.0.0.1:7471  its client
//! perf latency send --against tcp --plot send.svg       alternating rounds of RDMA and TCP
//! perf setup                                            registrations, queue pairs, connections
//! ```
//!
//! `perf --help` lists all options; `examples/perf/README.md` describes the method. The device is
//! the one named by `TOKIO_RDMA_DEVICE`, or a real device with the given address, or a software
//! device, which between two processes sends RoCE v2 over UDP.

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
mod setup;
mod tcp;

use std::error::Error;
use std::process::ExitCode;

use tokio::runtime::{Builder, Runtime};

use crate::args::{Options, Place, Request, SetupOptions};
use crate::device::Reach;
use crate::report::Report;

type Failure = Box<dyn Error + Send + Sync>;
type Result<T> = std::result::Result<T, Failure>;

fn main() -> ExitCode {
    let done = match Request::from_arguments() {
        Request::Operations(options) => run(&options),
        Request::Setup(options) => set_up(&options),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("perf: {error}");
            ExitCode::FAILURE
        }
    }
}

fn set_up(options: &SetupOptions) -> Result<()> {
    let report = runtime(1)?.block_on(setup::measure(options))?;
    if options.json {
        println!("{}", serde_json::to_string_pretty(&report)?);
    } else {
        print!("{report}");
    }
    Ok(())
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
            // Like a process of its own.
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
            // The client's error is more precise, unless the server failed first: print both.
            let report = measured.map_err(|error| match &served {
                Err(cause) => format!("{error} (server: {cause})").into(),
                Ok(()) => error,
            })?;
            served?;
            show(options, &report)
        }
    }
}

/// Builds a current-thread runtime for one thread.
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
        eprintln!("wrote {}", path.display());
    }
    Ok(())
}

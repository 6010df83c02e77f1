//! Code shared by the labs. The labs are the programs in `src/bin`; each has a page in
//! `examples/labs/docs`.
//!
//! A lab consists of a client and a server, each with a [`Peer`]. They run on two threads of one
//! process or, with `--listen` and `--connect`, in two processes.

mod peer;
mod place;

use std::error::Error;
use std::fmt::Debug;
use std::future::Future;
use std::process::ExitCode;
use std::time::Duration;

use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeVal;
use tokio_rdma::Device;

pub use peer::{End, Peer, long_ack_timeout};
use place::{Arguments, Place};

/// An error of a lab, which is printed.
pub type Failure = Box<dyn Error + Send + Sync>;
/// The result of a lab's functions.
pub type Result<T> = std::result::Result<T, Failure>;

const DEADLINE: Duration = Duration::from_secs(30);

/// Runs a lab as its arguments ask. The exit status is 0 only if every check passed.
pub fn run<C, S>(
    name: &'static str,
    client: impl FnOnce(Peer) -> C,
    server: impl FnOnce(Peer) -> S + Send + 'static,
) -> ExitCode
where
    C: Future<Output = Result<()>>,
    S: Future<Output = Result<()>>,
{
    match Arguments::parse().and_then(|arguments| start(name, &arguments, client, server)) {
        Ok(()) => {
            println!("{name}: all checks held");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("{name}: {error}");
            ExitCode::FAILURE
        }
    }
}

fn start<C, S>(
    name: &'static str,
    arguments: &Arguments,
    client: impl FnOnce(Peer) -> C,
    server: impl FnOnce(Peer) -> S + Send + 'static,
) -> Result<()>
where
    C: Future<Output = Result<()>>,
    S: Future<Output = Result<()>>,
{
    let quick = arguments.quick;
    match arguments.place {
        Place::Listen(address) => runtime()?.block_on(async {
            let device = Device::open_default_at(address.ip())?;
            let listener = tokio::net::TcpListener::bind(address).await?;
            // Scripts wait for this line.
            println!("listening on {} with {}", listener.local_addr()?, device.name());
            let (stream, _) = listener.accept().await?;
            server(Peer::new(name, quick, device, stream, false).await?).await
        }),
        Place::Connect(address) => runtime()?.block_on(async {
            let device = Device::open_default_to(address.ip())?;
            client(Peer::new(name, quick, device, place::connect(address).await?, false).await?)
                .await
        }),
        Place::Here { udp } => {
            let (listener, address) = place::listen_here()?;
            // Like a process of its own.
            let serving = std::thread::spawn(move || {
                runtime()?.block_on(async {
                    let device = place::device_here(udp, 1)?;
                    server(
                        Peer::new(name, quick, device, place::accept(listener).await?, true)
                            .await?,
                    )
                    .await
                })
            });
            let client_result = runtime()?.block_on(async {
                let device = place::device_here(udp, 0)?;
                client(Peer::new(name, quick, device, place::connect(address).await?, true).await?)
                    .await
            });
            let server_result = serving.join().map_err(|_| "the server's thread panicked")?;
            match (client_result, server_result) {
                (Err(error), Err(cause)) => Err(format!("client: {error}; server: {cause}").into()),
                (client_result, server_result) => client_result.and(server_result),
            }
        }
    }
}

fn runtime() -> Result<tokio::runtime::Runtime> {
    Ok(tokio::runtime::Builder::new_current_thread().enable_all().build()?)
}

/// Compares a value with the expected one.
///
/// # Errors
///
/// The values differ.
pub fn check<T: Debug + PartialEq>(what: &str, is: T, expected: T) -> Result<()> {
    if is != expected {
        return Err(format!("{what}: expected {expected:?}, got {is:?}").into());
    }
    Ok(())
}

/// Limits `work` to 30 seconds.
///
/// # Errors
///
/// The error of `work`, or a timeout.
pub async fn in_time<T, E: Into<Failure>>(
    what: &str,
    work: impl Future<Output = std::result::Result<T, E>>,
) -> Result<T> {
    let done = tokio::time::timeout(DEADLINE, work).await;
    done.map_err(|_| format!("{what} timed out after {DEADLINE:?}"))?.map_err(Into::into)
}

/// Returns the processor time of this process.
///
/// # Errors
///
/// `getrusage(2)` failed.
pub fn processor_time() -> Result<Duration> {
    let usage = getrusage(UsageWho::RUSAGE_SELF)?;
    let time = |time: TimeVal| {
        Duration::from_micros((time.tv_sec() * 1_000_000 + time.tv_usec()).unsigned_abs())
    };
    Ok(time(usage.user_time()) + time(usage.system_time()))
}

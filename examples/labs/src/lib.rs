//! What the labs share: the two ends, how they meet, checks, and processor time. The labs are the programs in `src/bin`; each
//! has a page in `docs/labs`.
//!
//! A lab is two functions, a client and a server, each of which has a [`Peer`]: its end. They run on two threads of one
//! process, or, with `--listen` and `--connect`, in two processes.

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

pub use peer::{End, Peer, patient};
use place::{Arguments, Place};

/// What goes wrong is told to whoever runs the lab, in words.
pub type Failure = Box<dyn Error + Send + Sync>;
/// Of everything here.
pub type Result<T> = std::result::Result<T, Failure>;

/// A peer that is there answers long before.
const DEADLINE: Duration = Duration::from_secs(30);

/// Runs a lab as its arguments say, and gives what the shell is told: 0 only if every check held.
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
            client(Peer::new(name, quick, device, place::call(address).await?, false).await?).await
        }),
        Place::Here { udp } => {
            let (listener, address) = place::listen_here()?;
            // The server has a thread and a runtime of its own, as if it were another process.
            let serving = std::thread::spawn(move || {
                runtime()?.block_on(async {
                    let device = place::device_here(udp, 1)?;
                    server(
                        Peer::new(name, quick, device, place::answer(listener).await?, true)
                            .await?,
                    )
                    .await
                })
            });
            let asked = runtime()?.block_on(async {
                let device = place::device_here(udp, 0)?;
                client(Peer::new(name, quick, device, place::call(address).await?, true).await?)
                    .await
            });
            let served = serving.join().map_err(|_| "the server's thread panicked")?;
            match (asked, served) {
                (Err(error), Err(cause)) => Err(format!("client: {error}; server: {cause}").into()),
                (asked, served) => asked.and(served),
            }
        }
    }
}

fn runtime() -> Result<tokio::runtime::Runtime> {
    Ok(tokio::runtime::Builder::new_current_thread().enable_all().build()?)
}

/// Says what was done, if it is as it should be.
///
/// # Errors
///
/// If it is not.
pub fn check<T: Debug + PartialEq>(what: &str, is: T, expected: T) -> Result<()> {
    if is != expected {
        return Err(format!("{what}: {is:?} instead of {expected:?}").into());
    }
    Ok(())
}

/// Fails if it takes longer than anything here takes.
///
/// # Errors
///
/// Those of `work`, or that it is not done.
pub async fn in_time<T, E: Into<Failure>>(
    what: &str,
    work: impl Future<Output = std::result::Result<T, E>>,
) -> Result<T> {
    let done = tokio::time::timeout(DEADLINE, work).await;
    done.map_err(|_| format!("{what} is not done after {DEADLINE:?}"))?.map_err(Into::into)
}

/// Time of processors that this process has used.
///
/// # Errors
///
/// If the kernel does not say.
pub fn processor_time() -> Result<Duration> {
    let usage = getrusage(UsageWho::RUSAGE_SELF)?;
    let time = |time: TimeVal| {
        Duration::from_micros((time.tv_sec() * 1_000_000 + time.tv_usec()).unsigned_abs())
    };
    Ok(time(usage.user_time()) + time(usage.system_time()))
}

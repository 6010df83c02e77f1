//! What the labs share: the two ends, checks, and processor time. The labs are the programs in `src/bin`; each has a page
//! in `docs/labs`.

use std::error::Error;
use std::fmt::Debug;
use std::future::Future;
use std::net::{IpAddr, Ipv4Addr};
use std::process::ExitCode;
use std::time::Duration;

use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeVal;
use tokio_rdma::software::{Network, UdpConfig};
use tokio_rdma::types::AckTimeout;
use tokio_rdma::{
    Access, CompletionMode, CompletionQueue, ConnectOptions, Device, ExposedRegion, HostMemory, Pool, ProtectionDomain,
    QueuePair,
};

/// What goes wrong is told to whoever runs the lab, in words.
pub type Failure = Box<dyn Error + Send + Sync>;
/// Of everything here.
pub type Result<T> = std::result::Result<T, Failure>;

/// A peer that is there answers long before.
const DEADLINE: Duration = Duration::from_secs(30);

/// How the lab was started.
#[derive(Debug, Clone, Copy)]
pub struct Lab {
    /// `--quick`: as little as shows that it works.
    pub quick: bool,
    /// `--udp`: the ends speak over UDP on loopback, so that their packets can be captured.
    udp: bool,
}

impl Lab {
    /// By the arguments.
    ///
    /// # Errors
    ///
    /// If there is another one.
    pub fn from_arguments() -> Result<Self> {
        let mut lab = Self { quick: false, udp: false };
        let mut arguments = lexopt::Parser::from_env();
        while let Some(argument) = arguments.next()? {
            match argument {
                lexopt::Arg::Long("quick") => lab.quick = true,
                lexopt::Arg::Long("udp") => lab.udp = true,
                other => return Err(format!("{} (a lab takes --quick and --udp)", other.unexpected()).into()),
            }
        }
        Ok(lab)
    }

    /// The device of end number `index`: with `--udp` a software device of its own, at 127.0.73.1 and on, else the one that
    /// `TOKIO_RDMA_DEVICE` names, or the first there is.
    ///
    /// # Errors
    ///
    /// If it does not open; with `--udp` also if another program has port 4791 of the address.
    pub fn device(&self, index: u8) -> Result<Device> {
        if !self.udp {
            return Ok(Device::open_default()?);
        }
        let address = IpAddr::V4(Ipv4Addr::new(127, 0, 73, index + 1));
        let network = Network::udp(&UdpConfig::new().address(address))?;
        Ok(Device::software_in(&network, &address.to_string())?)
    }

    /// End number `index`.
    ///
    /// # Errors
    ///
    /// As [`device`](Self::device), or if the device refuses.
    pub fn end(&self, index: u8, mode: &CompletionMode) -> Result<End> {
        let pd = self.device(index)?.protection_domain()?;
        let queue = CompletionQueue::new(pd.device(), mode.clone())?;
        Ok(End { pd, queue })
    }
}

/// One end: what queue pairs and memory are made of.
#[derive(Debug)]
pub struct End {
    /// Who may reach what.
    pub pd: ProtectionDomain,
    /// Where completions arrive.
    pub queue: CompletionQueue,
}

impl End {
    /// A queue pair of reliable connection, to be connected.
    ///
    /// # Errors
    ///
    /// If the device refuses.
    pub fn queue_pair(&self) -> Result<QueuePair> {
        Ok(QueuePair::new(&self.pd, &self.queue)?)
    }

    /// Zeroed memory that peers may read, write and change atomically.
    ///
    /// # Errors
    ///
    /// If there is no such memory, or it cannot be registered.
    pub fn expose(&self, bytes: usize) -> Result<ExposedRegion> {
        Ok(ExposedRegion::new(&self.pd, HostMemory::zeroed(bytes)?, Access::REMOTE_ALL)?)
    }

    /// Registered buffers.
    ///
    /// # Errors
    ///
    /// If they cannot be registered.
    pub fn pool(&self, bytes: usize, buffers: usize) -> Result<Pool> {
        Ok(Pool::new(&self.pd, bytes, buffers)?)
    }
}

/// Connects two queue pairs of one process. Between two, the endpoints travel over any channel.
///
/// # Errors
///
/// If they do not fit together.
pub fn connect(a: &QueuePair, b: &QueuePair) -> Result<()> {
    // What is not acknowledged is repeated after half a second instead of 67 ms: on a busy machine the other end may have to
    // wait for a processor.
    let patient = ConnectOptions { timeout: AckTimeout::from_code(17), ..ConnectOptions::default() };
    a.connect_with(&b.endpoint(), &patient)?;
    b.connect_with(&a.endpoint(), &patient)?;
    Ok(())
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
    let time = |time: TimeVal| Duration::from_micros((time.tv_sec() * 1_000_000 + time.tv_usec()).unsigned_abs());
    Ok(time(usage.user_time()) + time(usage.system_time()))
}

/// What a lab returns to the shell: 0 only if every check held.
pub fn finish(name: &str, result: Result<()>) -> ExitCode {
    match result {
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

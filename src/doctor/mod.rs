//! Diagnosis of RDMA on this machine: what works, what does not, and how to fix it.
//!
//! [`examine()`] reads hardware, kernel modules, device nodes, limits and container from the
//! system, then opens and tests every device. The [`Report`] lists the facts, its [`Finding`]s the
//! conclusions with advice. The examination needs no RDMA, does not panic, and ends when every
//! device's deadline has passed.
//!
//! ```
//! let report = tokio_rdma::doctor::examine();
//! println!("{report}");
//! assert!(report.works("soft0"), "the software device works everywhere");
//! ```

mod display;
mod findings;
mod host;
#[cfg(test)]
mod tests;
mod trial;

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

pub use host::{Container, Host, KernelDevice, KernelPort, LockLimit, NodeAccess, PciFunction};

use crate::error::VerbError;
use crate::op::default_traffic_class;
use crate::types::{DeviceAttr, PortAttr, RankedGid};
use crate::verbs::Device;

/// Examines the machine and all devices. See [`Examination::run`].
#[must_use]
pub fn examine() -> Report {
    Examination::new().run()
}

/// A builder for an examination of this machine.
///
/// ```
/// use std::time::Duration;
/// use tokio_rdma::doctor::Examination;
///
/// let examination = Examination::new().device("soft0").memory(1 << 20);
/// let report = examination.deadline(Duration::from_secs(30)).run();
/// assert!(report.works("soft0"), "{report}");
/// ```
#[derive(Debug, Clone)]
pub struct Examination {
    memory: Option<u64>,
    device: Option<String>,
    deadline: Duration,
}

impl Default for Examination {
    fn default() -> Self {
        // Devices answer within milliseconds; firmware that recovers from an error takes seconds.
        Self { memory: None, device: None, deadline: Duration::from_secs(10) }
    }
}

impl Examination {
    /// Creates an examination of all devices.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Reports whether so many bytes can be registered.
    #[must_use]
    pub fn memory(mut self, bytes: u64) -> Self {
        self.memory = Some(bytes);
        self
    }

    /// Examines only the device of this name. If it does not exist, a [`Finding`] reports that.
    #[must_use]
    pub fn device(mut self, name: impl Into<String>) -> Self {
        self.device = Some(name.into());
        self
    }

    /// Sets the time within which each device must answer; 10 s by default.
    #[must_use]
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// Runs the examination.
    ///
    /// Takes some milliseconds for each working device, and at most the deadline for any other.
    ///
    /// The call blocks: in a task, use `tokio::task::spawn_blocking`. Each device is tested on its
    /// own thread, which is left behind if the device does not answer.
    #[must_use]
    pub fn run(&self) -> Report {
        let host = Host::read(Path::new("/"));
        let library = library();
        let names = Device::list()
            .into_iter()
            .filter(|name| self.device.as_ref().is_none_or(|only| only == name));
        let devices = names.map(|name| trial::examine(&name, self.deadline)).collect();
        let traffic_class = default_traffic_class();
        let mut report = Report { host, library, traffic_class, devices, findings: Vec::new() };
        report.findings = findings::of(&report, self);
        report
    }
}

fn library() -> LibraryState {
    #[cfg(feature = "ibverbs")]
    return match rdma_ibverbs::devices() {
        Ok(names) => LibraryState::Devices(names),
        Err(error) => match error.errno {
            VerbError::EOPNOTSUPP => LibraryState::Missing,
            VerbError::ENOSYS => LibraryState::NoKernelSupport,
            errno => LibraryState::Failed(errno),
        },
    };
    #[cfg(not(feature = "ibverbs"))]
    LibraryState::NotBuilt
}

/// The state of libibverbs, through which real devices are reached.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum LibraryState {
    /// The crate was built without feature `ibverbs`.
    NotBuilt,
    /// The library cannot be loaded.
    Missing,
    /// The library is loaded, but the kernel has no RDMA support loaded.
    NoKernelSupport,
    /// The library failed to list devices, with this `errno`.
    Failed(i32),
    /// Names of the devices that the library lists.
    Devices(Vec<String>),
}

/// The result of an examination.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Report {
    /// The machine according to its kernel.
    pub host: Host,
    /// State of libibverbs.
    pub library: LibraryState,
    /// Value of environment variable `TOKIO_RDMA_TRAFFIC_CLASS`, the default of
    /// [`PathConfig::traffic_class`](crate::PathConfig::traffic_class); `None` if it is not set.
    pub traffic_class: Result<Option<u8>, VerbError>,
    /// Devices that [`Device::open`] accepts, or the requested one.
    pub devices: Vec<DeviceReport>,
    /// Conclusions, worst first.
    pub findings: Vec<Finding>,
}

impl Report {
    /// Returns true if this device was examined and an awaited WRITE to itself succeeded.
    #[must_use]
    pub fn works(&self, device: &str) -> bool {
        self.devices.iter().any(|found| found.name == device && found.works())
    }
}

/// The facts about a device.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct DeviceReport {
    /// Name of the device.
    pub name: String,
    /// Limits and identity; `None` if the device could not be opened.
    pub attr: Option<DeviceAttr>,
    /// The ports.
    pub ports: Vec<PortReport>,
    /// Capabilities: tested where a test is cheap, otherwise as the device reports them.
    pub capabilities: Vec<Capability>,
    /// Why the report is incomplete.
    pub error: Option<String>,
}

impl DeviceReport {
    /// Returns true for the software device of this process.
    #[must_use]
    pub fn is_software(&self) -> bool {
        self.name == Device::SOFTWARE
    }

    /// Returns true if an awaited WRITE to itself succeeded.
    #[must_use]
    pub fn works(&self) -> bool {
        let write = self.capabilities.iter().find(|capability| capability.name == trial::WRITE);
        write.is_some_and(|write| matches!(write.status, CapabilityStatus::Works(_)))
    }
}

/// The facts about a port.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct PortReport {
    /// State and limits.
    pub attr: PortAttr,
    /// GIDs with the reasons for their rank, best first, for an unknown peer.
    pub gids: Vec<RankedGid>,
    /// The partition key table, by index.
    pub pkeys: Vec<u16>,
    /// The [counters](Device::port_counters) when the device was examined.
    pub counters: BTreeMap<String, u64>,
}

/// A function that devices may support.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Capability {
    /// Short name.
    pub name: &'static str,
    /// Whether the device supports it.
    pub status: CapabilityStatus,
}

/// Whether a device supports a function.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum CapabilityStatus {
    /// The test succeeded, with this observation.
    Works(String),
    /// Untested; the device reports support.
    Claimed(String),
    /// The device reports no support.
    Absent,
    /// The test failed, with this error.
    Failed(String),
    /// Untested; the device reports nothing.
    Unknown,
}

/// A conclusion of the examination, with advice.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Finding {
    /// Severity.
    pub severity: Severity,
    /// The observation.
    pub what: String,
    /// Advice; empty if there is none.
    pub advice: String,
}

/// The severity of a [`Finding`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Severity {
    /// A function does not work.
    Problem,
    /// A function is slow or fails in some cases.
    Warning,
    /// Information.
    Note,
}

//! What works on this machine, what does not, why, and what to do about it.
//!
//! [`examine()`] looks at the machine (hardware, kernel modules, device nodes, limits, container), opens every device
//! and tries what a program needs; the [`Report`] says what was found, and its [`Finding`]s what to do. It works
//! without any RDMA, never panics and always ends: what does not answer by the deadline is reported as such.
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

use std::path::Path;
use std::time::Duration;

pub use host::{Container, Host, KernelDevice, LockLimit, NodeAccess, PciFunction};

#[cfg(feature = "ibverbs")]
use crate::error::VerbError;
use crate::types::{DeviceAttr, PortAttr, RankedGid};
use crate::verbs::Device;

/// Examines the machine and all devices, as [`Examine::run`].
#[must_use]
pub fn examine() -> Report {
    Examine::new().run()
}

/// What to examine, and for what purpose.
///
/// ```
/// use std::time::Duration;
/// use tokio_rdma::doctor::Examine;
///
/// let examine = Examine::new().device("soft0").memory(1 << 20).deadline(Duration::from_secs(30));
/// let report = examine.run();
/// assert!(report.works("soft0"), "{report}");
/// ```
#[derive(Debug, Clone)]
pub struct Examine {
    memory: Option<u64>,
    device: Option<String>,
    deadline: Duration,
}

impl Default for Examine {
    fn default() -> Self {
        // Devices answer within milliseconds; firmware that recovers from an error takes some seconds.
        Self { memory: None, device: None, deadline: Duration::from_secs(10) }
    }
}

impl Examine {
    /// All devices, no particular purpose.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Says whether this many bytes can be registered.
    #[must_use]
    pub fn memory(mut self, bytes: u64) -> Self {
        self.memory = Some(bytes);
        self
    }

    /// This device only. If there is none of this name, that is a [`Finding`].
    #[must_use]
    pub fn device(mut self, name: impl Into<String>) -> Self {
        self.device = Some(name.into());
        self
    }

    /// Time that each device has to answer; 10 s unless set.
    #[must_use]
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// Examines. Takes some milliseconds for each device that works, and at most the deadline for one that does not.
    ///
    /// It blocks: from a task, call it by `tokio::task::spawn_blocking`. A device that does not answer holds up a
    /// thread of its own, which is left behind.
    #[must_use]
    pub fn run(&self) -> Report {
        let host = Host::read(Path::new("/"));
        let library = library();
        let names = Device::list()
            .into_iter()
            .filter(|name| self.device.as_ref().is_none_or(|only| only == name));
        let devices = names.map(|name| trial::examine(&name, self.deadline)).collect();
        let mut report = Report { host, library, devices, findings: Vec::new() };
        report.findings = findings::of(&report, self);
        report
    }
}

/// What libibverbs says.
fn library() -> Library {
    #[cfg(feature = "ibverbs")]
    return match rdma_ibverbs::devices() {
        Ok(names) => Library::Devices(names),
        Err(error) => match error.errno {
            VerbError::EOPNOTSUPP => Library::Missing,
            VerbError::ENOSYS => Library::NoKernelSupport,
            errno => Library::Failed(errno),
        },
    };
    #[cfg(not(feature = "ibverbs"))]
    Library::NotBuilt
}

/// State of the library that real devices are reached through.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Library {
    /// The crate was built without feature `ibverbs`.
    NotBuilt,
    /// It cannot be loaded.
    Missing,
    /// It is there, and the kernel has no RDMA support loaded.
    NoKernelSupport,
    /// It refuses to list devices, with this `errno`.
    Failed(i32),
    /// Names of the devices it lists.
    Devices(Vec<String>),
}

/// What was found.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Report {
    /// The machine, as its kernel shows it.
    pub host: Host,
    /// The library that real devices are reached through.
    pub library: Library,
    /// Devices that [`Device::open`] takes, or the one asked for.
    pub devices: Vec<DeviceReport>,
    /// What follows from all this, worst first.
    pub findings: Vec<Finding>,
}

impl Report {
    /// True if the device of this name was examined and works: an awaited WRITE to itself succeeded.
    #[must_use]
    pub fn works(&self, device: &str) -> bool {
        self.devices.iter().any(|found| found.name == device && found.works())
    }
}

/// What was found about a device.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct DeviceReport {
    /// Its name.
    pub name: String,
    /// Limits and identity; `None` if it does not open.
    pub attr: Option<DeviceAttr>,
    /// Its ports.
    pub ports: Vec<PortReport>,
    /// What it can do, as tried out where that is cheap, else as it says.
    pub abilities: Vec<Ability>,
    /// Why the rest is missing.
    pub error: Option<String>,
}

impl DeviceReport {
    /// True if it is the software device of this process.
    #[must_use]
    pub fn is_software(&self) -> bool {
        self.name == Device::SOFTWARE
    }

    /// True if an awaited WRITE to itself succeeded.
    #[must_use]
    pub fn works(&self) -> bool {
        let write = self.abilities.iter().find(|ability| ability.name == trial::WRITE);
        write.is_some_and(|write| matches!(write.verdict, Verdict::Works(_)))
    }
}

/// What was found about a port.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct PortReport {
    /// State and limits.
    pub attr: PortAttr,
    /// Its GIDs, best first, with reasons, for an unknown peer.
    pub gids: Vec<RankedGid>,
    /// The partition key table, by index.
    pub pkeys: Vec<u16>,
}

/// Something that a device may be able to do.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Ability {
    /// Short name.
    pub name: &'static str,
    /// Whether it can.
    pub verdict: Verdict,
}

/// Whether a device can do something.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Verdict {
    /// Tried, and it works; with what was seen.
    Works(String),
    /// Not tried; the device says that it can.
    Claimed(String),
    /// The device says that it cannot.
    Absent,
    /// Tried, and it failed; with the error.
    Failed(String),
    /// Neither tried nor said.
    Unknown,
}

/// Something to know or to do.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Finding {
    /// How bad it is.
    pub severity: Severity,
    /// What was found.
    pub what: String,
    /// What to do; empty if there is nothing.
    pub advice: String,
}

/// How bad a [`Finding`] is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Severity {
    /// Something does not work.
    Problem,
    /// Something will not work well, or not in all cases.
    Warning,
    /// Good to know.
    Note,
}

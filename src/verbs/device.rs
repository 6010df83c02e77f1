//! Find, choose and open a device.

use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::ProtectionDomain;
use crate::error::{OpenError, SetupError, VerbError};
use crate::provider::contract::Context as _;
use crate::provider::dispatch::Context;
use crate::provider::soft;
use crate::types::{AsyncEvent, DeviceAttr, GidEntry, PortAttr, PortNum, PortState, Psn};

/// An open device; clones share it.
#[derive(Clone)]
pub struct Device {
    inner: Arc<Inner>,
}

struct Inner {
    context: Context,
    /// Completion queues that were given a vector so far.
    vectors: AtomicU32,
}

impl Device {
    /// Name of the software device of this process.
    pub const SOFTWARE: &'static str = "soft0";

    /// Opens the software device of this process: no hardware, no kernel module, no root.
    ///
    /// # Errors
    ///
    /// [`OpenError::Verb`] if the process has no file descriptor left.
    pub fn software() -> Result<Self, OpenError> {
        Self::software_in(soft::Network::global(), Self::SOFTWARE)
    }

    /// Opens the software device `name` of a network of your own, made on first use.
    ///
    /// Devices of one network reach each other, and no others.
    ///
    /// # Errors
    ///
    /// As [`software`](Self::software).
    pub fn software_in(network: &soft::Network, name: &str) -> Result<Self, OpenError> {
        let context = network.open(name)?;
        Ok(Self::new(Context::Soft(context)))
    }

    /// Names of the devices that [`open`](Self::open) takes: those of libibverbs, if feature `ibverbs` is on, and the
    /// software device.
    #[must_use]
    pub fn list() -> Vec<String> {
        real_devices().unwrap_or_default().into_iter().chain([Self::SOFTWARE.to_owned()]).collect()
    }

    /// Opens a device by name.
    ///
    /// # Errors
    ///
    /// [`OpenError::NotFound`] with the names there are; [`OpenError::Verb`] if the device refuses.
    pub fn open(name: &str) -> Result<Self, OpenError> {
        if name == Self::SOFTWARE {
            return Self::software();
        }
        #[cfg(feature = "ibverbs")]
        if real_devices().is_ok()
            && let Some(context) = crate::provider::ibverbs::Context::open(name)?
        {
            tracing::debug!(device = name, "opened");
            return Ok(Self::new(Context::Ibverbs(context)));
        }
        Err(OpenError::NotFound { name: name.to_owned(), available: Self::list(), reason: real_devices().err() })
    }

    /// Opens the device that `TOKIO_RDMA_DEVICE` names. If that is not set: the first real device with an active port,
    /// or else, with a warning, the software device.
    ///
    /// # Errors
    ///
    /// As [`open`](Self::open); a name that does not exist is an error and never replaced by another device.
    pub fn open_default() -> Result<Self, OpenError> {
        if let Ok(name) = std::env::var("TOKIO_RDMA_DEVICE") {
            return Self::open(&name);
        }
        let reason = match real_devices() {
            Ok(names) => {
                for name in &names {
                    match Self::open(name) {
                        Ok(device) if device.default_path().is_ok() => return Ok(device),
                        Ok(_) => tracing::warn!(device = name, "not used: no active port with a GID"),
                        Err(error) => tracing::warn!(device = name, %error, "not used: it does not open"),
                    }
                }
                if names.is_empty() { "libibverbs finds no device" } else { "no real device can be used" }
            }
            Err(reason) => reason,
        };
        tracing::warn!(device = Self::SOFTWARE, reason, "using the software device");
        Self::software()
    }

    /// Limits and identity.
    #[must_use]
    pub fn attr(&self) -> &DeviceAttr {
        self.inner.context.attr()
    }

    /// Name, for example `mlx5_0` or `soft0`.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.attr().name
    }

    /// Current state of a port.
    ///
    /// # Errors
    ///
    /// [`VerbError`] with EINVAL for a port the device does not have.
    pub fn port(&self, port: PortNum) -> Result<PortAttr, VerbError> {
        self.inner.context.port(port)
    }

    /// A new protection domain: objects of one may be used together, `ibv_alloc_pd(3)`.
    ///
    /// # Errors
    ///
    /// [`VerbError`] as the provider gives it.
    pub fn protection_domain(&self) -> Result<ProtectionDomain, VerbError> {
        ProtectionDomain::new(self)
    }

    /// First active port and the entry of its GID table to send from: RoCE v2 before others, and of these one that is
    /// not of the link alone.
    ///
    /// Each RoCE device has a GID made from its MAC address, `fe80::…`, mostly the first one, whether or not its
    /// interface has that address or IPv6 at all: from it no router is reached, and perhaps nobody.
    ///
    /// # Errors
    ///
    /// [`SetupError::NoGid`] if no port is active or the active one has no GID.
    pub fn default_path(&self) -> Result<(PortAttr, GidEntry), SetupError> {
        let mut last = SetupError::NoGid { port: 1 };
        for number in 1..=self.attr().ports {
            let port = self.port(PortNum(number))?;
            let best = port
                .gids
                .iter()
                .max_by_key(|entry| {
                    (entry.is_roce_v2(), !entry.gid.is_unicast_link_local(), std::cmp::Reverse(entry.index))
                })
                .copied();
            match best {
                Some(gid) if port.state == PortState::Active => return Ok((port, gid)),
                _ => last = SetupError::NoGid { port: number },
            }
        }
        Err(last)
    }

    /// Descriptor that is readable while [`next_event`](Self::next_event) has something to give.
    pub(crate) fn event_fd(&self) -> BorrowedFd<'_> {
        self.inner.context.event_fd()
    }

    /// Next asynchronous event, `ibv_get_async_event(3)`; `None` if there is none now.
    ///
    /// Each event is given once. Services rather await them: [`events`](crate::events()).
    ///
    /// # Errors
    ///
    /// [`VerbError`] with ENODEV once the device is gone.
    pub fn next_event(&self) -> Result<Option<AsyncEvent>, VerbError> {
        self.inner.context.next_event()
    }

    /// A first packet sequence number that nobody can guess.
    pub(crate) fn random_psn(&self) -> Result<Psn, VerbError> {
        Ok(Psn::new(self.inner.context.random()? as u32))
    }

    /// A completion vector for the next completion queue: each in turn, so that their interrupts are spread.
    pub(crate) fn next_vector(&self) -> u32 {
        self.inner.vectors.fetch_add(1, Ordering::Relaxed) % self.attr().completion_vectors.max(1)
    }

    fn new(context: Context) -> Self {
        Self { inner: Arc::new(Inner { context, vectors: AtomicU32::new(0) }) }
    }

    pub(crate) fn context(&self) -> &Context {
        &self.inner.context
    }

    /// True if both are the same open device.
    pub(crate) fn same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device").field("name", &self.name()).finish_non_exhaustive()
    }
}

/// Names of the devices that libibverbs finds, or why it finds none.
fn real_devices() -> Result<Vec<String>, &'static str> {
    #[cfg(feature = "ibverbs")]
    return crate::provider::ibverbs::devices().map_err(|error| match error.errno {
        VerbError::EOPNOTSUPP => "libibverbs.so.1 cannot be loaded: rdma-core is not installed",
        VerbError::ENOSYS => "the kernel has no RDMA support loaded: there is no /sys/class/infiniband_verbs",
        _ => "libibverbs cannot list its devices",
    });
    #[cfg(not(feature = "ibverbs"))]
    Err("built without feature `ibverbs`")
}

//! Find, choose and open a device.

use std::fmt;
use std::net::IpAddr;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use super::ProtectionDomain;
use super::async_events::{Events, Listener};
use super::gid_routes::{best_path, is_at, rank_gids, source_to, sources_to};
use crate::dispatch::Context;
use crate::error::{OpenError, SetupError, UdpError, VerbError};
use crate::types::{
    AsyncEvent, DeviceAttr, Gid, GidEntry, PortAttr, PortNum, PortState, Psn, RankedGid,
};
use rdma_provider::contract::Context as _;
use rdma_soft as soft;
use rdma_soft::interface_at;

/// An open device; clones share it.
#[derive(Clone)]
pub struct Device {
    inner: Arc<Inner>,
}

struct Inner {
    context: Context,
    /// Completion queues that were given a vector so far.
    vectors: AtomicU32,
    events: Events,
    /// There is an [`Inlet`].
    watched: AtomicBool,
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
    /// Devices of one network within the process reach each other, and no others. A network over UDP has the devices of its
    /// configuration.
    ///
    /// # Errors
    ///
    /// As [`software`](Self::software); [`OpenError::NotFound`] if a network over UDP has no device of this name.
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
    /// Real devices are posted to by `ibv_wr_*` where their driver has them; SoftRoCE, which gets them wrong, by
    /// `ibv_post_send(3)`. `TOKIO_RDMA_POST` set to `extended` or `chain` decides for all.
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
            && let Some(context) = rdma_ibverbs::Context::open(name).map_err(OpenError::of(name))?
        {
            tracing::debug!(device = name, "opened");
            return Ok(Self::new(Context::Ibverbs(context)));
        }
        Err(OpenError::NotFound {
            name: name.to_owned(),
            available: Self::list(),
            reason: real_devices().err(),
        })
    }

    /// Opens the device that `TOKIO_RDMA_DEVICE` names. If that is not set: the first real device with an active port,
    /// or else, with a warning, the software device.
    ///
    /// # Errors
    ///
    /// As [`open`](Self::open); a name that does not exist is an error and never replaced by another device.
    pub fn open_default() -> Result<Self, OpenError> {
        if let Some(name) = named() {
            return Self::open(&name);
        }
        let usable = |device: &Self| {
            let usable = device.default_path().is_ok();
            if !usable {
                tracing::warn!(device = device.name(), "not used: no active port with a GID");
            }
            usable
        };
        Self::first_real(usable).or_else(|reason| {
            tracing::warn!(device = Self::SOFTWARE, reason, "using the software device");
            Self::software()
        })
    }

    /// Opens the device for a service at `address` of this host, which other processes and hosts are to reach: as
    /// [`open_default`](Self::open_default), but for
    ///
    /// - the real device, which, unless `TOKIO_RDMA_DEVICE` names one, is the first with an active port that has this address
    ///   as a GID (so none has one of loopback), or the first if the address is `0.0.0.0` or `::`. A port of InfiniBand, whose
    ///   GIDs are no addresses, has those of IP over InfiniBand on it;
    /// - the software device, which is one of its own, named by the address, that speaks RoCE v2 over UDP there,
    ///   [`Network::udp`](crate::software::Network::udp), until it and all that was made on it is dropped.
    ///
    /// Clients take [`open_default_to`](Self::open_default_to). Port 4791 of RoCE v2 has room for one program at each address, so
    /// several services on loopback need several of its addresses, 127.0.0.1 to 127.255.255.254; `::1` is the only one of IPv6.
    /// It asks the kernel alone; a port that is taken is waited for for 0.1 s.
    ///
    /// # Security
    ///
    /// A software device at an address that other hosts reach hears all of them, and RoCE v2 has neither encryption nor
    /// passwords. To hear some only, make the network with [`UdpConfig::allow`](crate::software::UdpConfig::allow) and open its
    /// device by [`software_in`](Self::software_in). docs/software-device.md has more.
    ///
    /// # Errors
    ///
    /// Of a real device as [`open`](Self::open); one that `TOKIO_RDMA_DEVICE` names is never replaced by another. Of a software
    /// device [`OpenError::Udp`]:
    ///
    /// - [`PortTaken`](crate::software::UdpError::PortTaken): another program has port 4791 there, or the kernel, which takes it
    ///   at all addresses with module `rdma_rxe` (`soft_roce`);
    /// - [`NotLocal`](crate::software::UdpError::NotLocal): this host does not have the address;
    /// - [`NotOneHost`](crate::software::UdpError::NotOneHost): `0.0.0.0`, `::`, or the address of a group;
    /// - [`NotLinux`](crate::software::UdpError::NotLinux), [`System`](crate::software::UdpError::System).
    ///
    /// # Examples
    ///
    /// ```no_run
    /// use std::net::SocketAddr;
    /// use tokio_rdma::{Connection, Device, Listener};
    ///
    /// async fn serve(address: SocketAddr) -> Result<(), Box<dyn std::error::Error>> {
    ///     let device = Device::open_default_at(address.ip())?;
    ///     let listener = Listener::bind(&device, address).await?;
    ///     // ...
    /// #   let _ = listener;
    ///     Ok(())
    /// }
    ///
    /// async fn call(server: SocketAddr) -> Result<Connection, Box<dyn std::error::Error>> {
    ///     let device = Device::open_default_to(server.ip())?;
    ///     Ok(Connection::connect(&device, server).await?)
    /// }
    /// ```
    pub fn open_default_at(address: IpAddr) -> Result<Self, OpenError> {
        let address = address.to_canonical();
        match named() {
            Some(name) if name != Self::SOFTWARE => Self::open(&name),
            Some(_) => Self::over_udp(&[address], None),
            None => Self::real_at(address).or_else(|()| Self::over_udp(&[address], None)),
        }
    }

    /// Opens the device for a client of the service at `peer`: as [`open_default_at`](Self::open_default_at), at the address from
    /// which the kernel would send to `peer`.
    ///
    /// To a peer on this host that would be the peer's own, or that of another service. So a software device is at the first free
    /// address from 127.0.0.254 down to 127.0.0.2 then, or, for a peer by IPv6, at `::1`. That is one address only: a
    /// software device at `::1` has no clients on IPv6, so let its service listen in 127.0.0.0/8 instead.
    ///
    /// A software device hears `peer` only: packets from all other addresses are dropped before the device reads them, as by
    /// [`UdpConfig::allow`](crate::software::UdpConfig::allow). A client of several hosts takes
    /// [`open_default_towards`](Self::open_default_towards). A real device hears every host, and so does SoftRoCE. RoCE v2
    /// has no authentication, so a host that forges the address of `peer` is heard as well.
    ///
    /// Nothing is sent, and nothing is waited for but what is said there.
    ///
    /// # Errors
    ///
    /// As [`open_default_at`](Self::open_default_at); besides [`OpenError::Udp`] with
    ///
    /// - [`NoRoute`](crate::software::UdpError::NoRoute): nothing leads from this host to the peer. That is so of all link-local
    ///   addresses of IPv6 (`fe80::/10`), which mean nothing without their interface;
    /// - [`AllTaken`](crate::software::UdpError::AllTaken): other programs have the port at all the addresses of loopback;
    /// - [`NotOneHost`](crate::software::UdpError::NotOneHost): `peer` is `0.0.0.0`, `::`, or the address of a group.
    pub fn open_default_to(peer: IpAddr) -> Result<Self, OpenError> {
        Self::open_client(peer, Some(peer.to_canonical()))
    }

    /// Opens the device at the address from which `peer` is reached, chosen as by [`open_default_to`](Self::open_default_to),
    /// and hears every host: for a client that connects to several hosts, or listens itself.
    ///
    /// # Security
    ///
    /// As [`open_default_at`](Self::open_default_at).
    ///
    /// # Errors
    ///
    /// As [`open_default_to`](Self::open_default_to).
    pub fn open_default_towards(peer: IpAddr) -> Result<Self, OpenError> {
        Self::open_client(peer, None)
    }

    /// Opens the device at the address from which `peer` is reached. A software device hears `only` that address, if there is
    /// one.
    fn open_client(peer: IpAddr, only: Option<IpAddr>) -> Result<Self, OpenError> {
        let (peer, named) = (peer.to_canonical(), named());
        if let Some(name) = named.as_ref().filter(|name| *name != Self::SOFTWARE) {
            return Self::open(name);
        }
        UdpError::check_host(peer)?;
        let by_route = source_to(peer)?;
        let software =
            || Self::over_udp(&sources_to(peer, by_route, interface_at(peer).is_some()), only);
        if named.is_some() { software() } else { Self::real_at(by_route).or_else(|()| software()) }
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

    /// The partition key table of a port, by index; empty entries are 0. Bit 15: full member. One system call for each of its
    /// [entries](PortAttr::pkeys).
    ///
    /// # Errors
    ///
    /// As [`port`](Self::port).
    pub fn pkey_table(&self, port: PortNum) -> Result<Vec<u16>, VerbError> {
        self.inner.context.pkey_table(port)
    }

    /// A new protection domain: objects of one may be used together, `ibv_alloc_pd(3)`.
    ///
    /// # Errors
    ///
    /// [`VerbError`] as the provider gives it.
    pub fn protection_domain(&self) -> Result<ProtectionDomain, VerbError> {
        ProtectionDomain::new(self)
    }

    /// The GID table of a port, best first, with the reasons.
    ///
    /// In this order: entries whose interface is up and in this network namespace; RoCE v2 before v1; then, if `peer`
    /// is given, its address family, its subnet, the address from which the kernel routes to it; interfaces without
    /// VLAN; addresses that are not link-local, unless the peer's is; the lowest index. On InfiniBand the subnet prefix
    /// of the peer, then the lowest index.
    ///
    /// # Errors
    ///
    /// As [`port`](Self::port).
    pub fn gids(&self, port: PortNum, peer: Option<Gid>) -> Result<Vec<RankedGid>, VerbError> {
        Ok(rank_gids(&self.port(port)?, peer))
    }

    /// Active port and entry of its GID table to send from when nothing is known of the peer: the first of
    /// [`gids`](Self::gids), of several active ports the one whose first is better, else the lower one.
    ///
    /// # Errors
    ///
    /// [`SetupError::NoGid`] if no port is active or no active one has a GID.
    pub fn default_path(&self) -> Result<(PortAttr, GidEntry), SetupError> {
        self.path(None)
    }

    /// Active port and entry of its GID table to reach `peer` from, chosen as by [`default_path`](Self::default_path).
    ///
    /// # Errors
    ///
    /// As [`default_path`](Self::default_path).
    pub fn path_to(&self, peer: Gid) -> Result<(PortAttr, GidEntry), SetupError> {
        self.path(Some(peer))
    }

    fn path(&self, peer: Option<Gid>) -> Result<(PortAttr, GidEntry), SetupError> {
        let ports: Result<Vec<_>, _> =
            (1..=self.attr().ports).map(|number| self.port(PortNum(number))).collect();
        let best = best_path(ports?, |port| rank_gids(port, peer));
        let Some((port, gid)) = best else {
            return Err(SetupError::NoGid { port: self.attr().ports });
        };
        tracing::debug!(device = self.name(), port = port.port.0, %gid, "path");
        Ok((port, gid.entry))
    }

    /// An active port and the entry of its GID table with this index.
    ///
    /// # Errors
    ///
    /// [`SetupError::NoGid`] if the port is not active or has no such entry; as [`port`](Self::port) otherwise.
    pub(crate) fn path_from(
        &self,
        port: PortNum,
        gid_index: u8,
    ) -> Result<(PortAttr, GidEntry), SetupError> {
        let attr = self.port(port)?;
        let entry = attr
            .gids
            .iter()
            .find(|entry| entry.index == gid_index && attr.state == PortState::Active);
        let entry = *entry.ok_or(SetupError::NoGid { port: port.0 })?;
        Ok((attr, entry))
    }

    /// Descriptor that is readable while [`next_event`](Self::next_event) has something to give.
    pub(crate) fn event_fd(&self) -> BorrowedFd<'_> {
        self.inner.context.event_fd()
    }

    /// Next asynchronous event, `ibv_get_async_event(3)`; `None` if there is none now.
    ///
    /// Each event is given once. Services rather await them: [`events`](Self::events).
    ///
    /// # Errors
    ///
    /// [`VerbError`] with ENODEV once the device is gone.
    pub fn next_event(&self) -> Result<Option<AsyncEvent>, VerbError> {
        self.inner.events.next(|| self.inner.context.next_event())
    }

    /// Reads the asynchronous events that there are: sees to what they mean, and leaves them to the user.
    pub(crate) fn read_events(&self) {
        self.inner.events.take(|| self.inner.context.next_event());
    }

    /// Calls `listener` whenever events were read by anybody, as long as it lives: what made the descriptor readable may be
    /// gone from it.
    pub(crate) fn on_events(&self, listener: &Arc<Listener>) -> Result<(), VerbError> {
        self.inner.events.listen(listener)
    }

    pub(super) fn async_events(&self) -> &Events {
        &self.inner.events
    }

    /// A first packet sequence number that nobody can guess.
    pub(crate) fn random_psn(&self) -> Result<Psn, VerbError> {
        Ok(Psn::new(self.random()? as u32))
    }

    /// A number that nobody can guess.
    pub(crate) fn random(&self) -> Result<u64, VerbError> {
        self.inner.context.random()
    }

    /// A completion vector for the next completion queue: each in turn, so that their interrupts are spread.
    pub(crate) fn next_vector(&self) -> u32 {
        self.inner.vectors.fetch_add(1, Ordering::Relaxed) % self.attr().completion_vectors.max(1)
    }

    /// What tells that something has arrived which the device has not seen to; `None` if the device sees to it without
    /// anybody's help, or somebody else has it: each is woken by all that arrives, and one is enough.
    pub(crate) fn inlet(&self) -> std::io::Result<Option<Inlet>> {
        let Some(fd) = self.inner.context.inlet() else { return Ok(None) };
        if self.inner.watched.swap(true, Ordering::AcqRel) {
            return Ok(None);
        }
        let release = |_: &_| self.inner.watched.store(false, Ordering::Release);
        // A descriptor of its own: one cannot be registered twice.
        let fd = fd.try_clone_to_owned().inspect_err(release)?;
        Ok(Some(Inlet { fd, device: self.clone() }))
    }

    /// Sees to what has arrived, if the device is a program and nobody is at it; true if there was anything.
    pub(crate) fn serve(&self) -> bool {
        self.inner.context.serve()
    }

    /// Whoever called [`serve`](Self::serve) goes to sleep, and has no [`Inlet`] that wakes it.
    pub(crate) fn leave(&self) {
        self.inner.context.leave();
    }

    /// The first real device that opens and is `usable`, or why there is none.
    fn first_real(usable: impl Fn(&Self) -> bool) -> Result<Self, &'static str> {
        let names = real_devices()?;
        for name in &names {
            match Self::open(name) {
                Ok(device) if usable(&device) => return Ok(device),
                Ok(_) => {}
                Err(error) => tracing::warn!(device = name, %error, "not used: it does not open"),
            }
        }
        Err(if names.is_empty() {
            "libibverbs finds no device"
        } else {
            "no real device can be used"
        })
    }

    /// The first real device at this address.
    fn real_at(address: IpAddr) -> Result<Self, ()> {
        let ports = |device: &Self| (1..=device.attr().ports).map(PortNum);
        let is_here = |device: &Self| {
            let mut ports = ports(device).filter_map(|number| device.port(number).ok());
            ports.any(|port| is_at(Path::new("/"), device.name(), &port, address))
        };
        Self::first_real(is_here).map_err(|reason| {
            if address.is_loopback() {
                tracing::debug!(%address, reason, "using a software device over UDP");
            } else {
                tracing::warn!(%address, reason, "using a software device over UDP");
            }
        })
    }

    /// A software device that speaks over UDP, at the first of these addresses that is free; with `only`, it hears no other
    /// address.
    fn over_udp(addresses: &[IpAddr], only: Option<IpAddr>) -> Result<Self, OpenError> {
        let (network, address) =
            soft::Network::at_first_free(soft::UdpConfig::PORT, addresses, only)?;
        Self::software_in(&network, &address.to_string())
    }

    fn new(context: Context) -> Self {
        let (vectors, watched) = (AtomicU32::new(0), AtomicBool::new(false));
        Self { inner: Arc::new(Inner { context, vectors, events: Events::default(), watched }) }
    }

    pub(crate) fn context(&self) -> &Context {
        &self.inner.context
    }

    /// True if both are the same open device.
    pub(crate) fn same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }
}

/// See [`Device::inlet`].
pub(crate) struct Inlet {
    fd: OwnedFd,
    device: Device,
}

impl Inlet {
    /// As [`Device::serve`].
    pub(crate) fn serve(&self) -> bool {
        self.device.serve()
    }
}

impl AsRawFd for Inlet {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

impl Drop for Inlet {
    fn drop(&mut self) {
        self.device.inner.watched.store(false, Ordering::Release);
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device").field("name", &self.name()).finish_non_exhaustive()
    }
}

/// What `TOKIO_RDMA_DEVICE` says.
fn named() -> Option<String> {
    std::env::var("TOKIO_RDMA_DEVICE").ok()
}

/// Names of the devices that libibverbs finds, or why it finds none.
fn real_devices() -> Result<Vec<String>, &'static str> {
    #[cfg(feature = "ibverbs")]
    return rdma_ibverbs::devices().map_err(|error| match error.errno {
        VerbError::EOPNOTSUPP => "libibverbs.so.1 cannot be loaded: rdma-core is not installed",
        VerbError::ENOSYS => {
            "the kernel has no RDMA support loaded: there is no /sys/class/infiniband_verbs"
        }
        _ => "libibverbs cannot list its devices",
    });
    #[cfg(not(feature = "ibverbs"))]
    Err("built without feature `ibverbs`")
}

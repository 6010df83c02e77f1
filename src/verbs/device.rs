use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use rdma_provider::locks::Mutex;

use super::ProtectionDomain;
use super::async_events::{EventKind, Events, Listener, PortEvents};
use super::gid_routes::{best_path, is_at, mac_of, rank_gids, source_to, sources_to};
use super::interfaces::addresses_of_mac;
use crate::dispatch::Context;
use crate::error::{OpenError, SetupError, UdpError, VerbError};
use crate::forked::Opened;
use crate::types::{
    AsyncEvent, ClockAttr, DcAttr, DeviceAttr, Gid, GidEntry, PortAttr, PortNum, PortState, Psn,
    RankedGid,
};
use rdma_provider::contract::Context as _;
use rdma_soft as soft;
use rdma_soft::interface_at;

/// An open device. Clones refer to the same device.
///
/// ```no_run
/// use std::net::SocketAddr;
/// use tokio_rdma::{Connection, Device, Listener};
/// # type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;
///
/// async fn serve(address: SocketAddr) -> Result<Listener> {
///     let device = Device::open_default_at(address.ip())?;
///     Ok(Listener::bind(&device, address).await?)
/// }
///
/// async fn call(server: SocketAddr) -> Result<Connection> {
///     let device = Device::open_default_to(server.ip())?;
///     Ok(Connection::connect(&device, server).await?)
/// }
/// ```
#[derive(Clone)]
pub struct Device {
    inner: Arc<Inner>,
}

struct Inner {
    context: Context,
    vectors: AtomicU32,
    events: Events,
    /// The attributes of ports, valid while [`Events::port_changes`] returns the number beside.
    ports: Mutex<BTreeMap<u8, (u64, Arc<PortAttr>)>>,
    watched: AtomicBool,
    _opened: Opened,
}

impl Device {
    /// The name of the software device of this process.
    pub const SOFTWARE: &'static str = "soft0";

    /// Opens the software device of this process, which needs no hardware, kernel module or root
    /// rights. It reaches only this process; [`open_default_at`](Self::open_default_at) reaches
    /// others.
    ///
    /// # Errors
    ///
    /// [`OpenError::Verb`] if the process has no file descriptor left.
    pub fn software() -> Result<Self, OpenError> {
        Self::software_in(soft::Network::global(), Self::SOFTWARE)
    }

    /// Opens the software device `name` of `network`, which reaches that network's devices. It is
    /// created on first use, except in a network over UDP, which has only the configured devices.
    ///
    /// # Errors
    ///
    /// As for [`software`](Self::software); [`OpenError::NotFound`] if a network over UDP has no
    /// such device.
    pub fn software_in(network: &soft::Network, name: &str) -> Result<Self, OpenError> {
        let context = network.open(name)?;
        Ok(Self::new(Context::Soft(context)))
    }

    /// Returns the names that [`open`](Self::open) accepts.
    #[must_use]
    pub fn list() -> Vec<String> {
        real_devices().unwrap_or_default().into_iter().chain([Self::SOFTWARE.to_owned()]).collect()
    }

    /// Opens the device with this name.
    ///
    /// With feature `mlx5`, the crate posts to ConnectX adapters and polls them directly. For other
    /// devices, and for adapters that lack something, which is logged, it uses `ibv_wr_*`, or
    /// `ibv_post_send(3)` if the driver has no correct `ibv_wr_*`; see
    /// [`DeviceAttr::data_path`](crate::types::DeviceAttr::data_path). Two environment variables
    /// change this; invalid values fail with EINVAL:
    ///
    /// - `TOKIO_RDMA_POST`: `direct`, which fails if it is impossible, `extended` (`ibv_wr_*`), or
    ///   `chain` (`ibv_post_send(3)`).
    /// - `TOKIO_RDMA_CQE_COMPRESSION`: `1` allows compressed completion queue entries on the direct
    ///   path; default `0`.
    ///
    /// # Errors
    ///
    /// [`OpenError::NotFound`] lists available names; [`OpenError::Verb`] if the device refuses.
    pub fn open(name: &str) -> Result<Self, OpenError> {
        if name == Self::SOFTWARE {
            return Self::software();
        }
        #[cfg(feature = "ibverbs")]
        if real_devices().is_ok()
            && let Some(context) = rdma_ibverbs::Context::open(name).map_err(OpenError::of(name))?
        {
            rdma_provider::debug!(device = name, "opened device");
            return Ok(Self::new(Context::Ibverbs(context)));
        }
        Err(OpenError::NotFound {
            name: name.to_owned(),
            available: Self::list(),
            reason: real_devices().err(),
        })
    }

    /// Opens the device named by environment variable `TOKIO_RDMA_DEVICE`, else the first real
    /// device with an active port.
    ///
    /// # Errors
    ///
    /// As for [`open`](Self::open), and [`OpenError::NoUsableDevice`].
    pub fn open_default() -> Result<Self, OpenError> {
        match device_from_env() {
            Some(name) => Self::open(&name),
            None => Self::first_active().map_err(|reason| OpenError::NoUsableDevice { reason }),
        }
    }

    /// Opens [`open_default`](Self::open_default)'s device or, with a warning in the log if none is
    /// usable, the [software device](Self::software), for programs without peers in other
    /// processes, such as tests.
    ///
    /// # Errors
    ///
    /// As for [`open`](Self::open).
    pub fn open_default_or_software() -> Result<Self, OpenError> {
        match device_from_env() {
            Some(name) => Self::open(&name),
            None => Self::first_active().or_else(|reason| {
                rdma_provider::warn!(device = Self::SOFTWARE, reason, "using the software device");
                Self::software()
            }),
        }
    }

    /// Opens the device for a service at `address` of this host whose clients, in any process or
    /// host, use [`open_default_to`](Self::open_default_to):
    ///
    /// 1. the real device named by `TOKIO_RDMA_DEVICE`;
    /// 2. else the first real device with an active port that has `address` as a GID (on
    ///    InfiniBand, as an address of IP over InfiniBand), or with any active port for `0.0.0.0`
    ///    and `::`;
    /// 3. else, or if `TOKIO_RDMA_DEVICE` is `soft0`, a software device that uses RoCE v2 over UDP,
    ///    [`Network::udp`](crate::software::Network::udp), until everything created from it is
    ///    dropped. Its name is the address.
    ///
    /// UDP port 4791 (RoCE v2) of an address serves one program; the call waits up to 0.1 s for it.
    /// So each service on loopback needs its own address of 127.0.0.0/8; IPv6 has only `::1`.
    ///
    /// # Security
    ///
    /// A software device accepts packets from every host that can reach it, and RoCE v2 neither
    /// encrypts nor authenticates. [`UdpConfig::allow`](crate::software::UdpConfig::allow)
    /// restricts the hosts of a network for [`software_in`](Self::software_in).
    ///
    /// # Errors
    ///
    /// As for [`open`](Self::open); for a software device [`OpenError::Udp`], for example
    /// [`PortTaken`](crate::software::UdpError::PortTaken).
    pub fn open_default_at(address: IpAddr) -> Result<Self, OpenError> {
        let address = address.to_canonical();
        match device_from_env() {
            Some(name) if name != Self::SOFTWARE => Self::open(&name),
            Some(_) => Self::over_udp(&[address], None),
            None => Self::real_device_at(address).or_else(|()| Self::over_udp(&[address], None)),
        }
    }

    /// Opens the device for a client of the service at `peer`, like
    /// [`open_default_at`](Self::open_default_at) at the address from which the kernel would send
    /// to `peer`. Sends nothing.
    ///
    /// If `peer` is on this host, a software device uses the first free address from 127.0.0.254
    /// down to 127.0.0.2, or `::1` for IPv6, because the kernel's choice may belong to another
    /// service. A service at `::1` therefore leaves no address for clients.
    ///
    /// A software device accepts packets only from `peer`, or from a host that forges its address.
    /// Real devices, SoftRoCE included, accept packets from every host.
    ///
    /// # Errors
    ///
    /// As for [`open_default_at`](Self::open_default_at). There is [no
    /// route](crate::software::UdpError::NoRoute) to a link-local IPv6 address, which names no
    /// interface: use `open_default_at` with this host's address of the interface.
    pub fn open_default_to(peer: IpAddr) -> Result<Self, OpenError> {
        Self::open_client(peer, Some(peer.to_canonical()))
    }

    /// Opens the device like [`open_default_to`](Self::open_default_to), but accepts packets from
    /// every host ([security](Self::open_default_at)), for clients that have several peers or also
    /// listen.
    ///
    /// # Errors
    ///
    /// As for `open_default_to`.
    pub fn open_default_towards(peer: IpAddr) -> Result<Self, OpenError> {
        Self::open_client(peer, None)
    }

    fn open_client(peer: IpAddr, only: Option<IpAddr>) -> Result<Self, OpenError> {
        let (peer, named) = (peer.to_canonical(), device_from_env());
        if let Some(name) = named.as_ref().filter(|name| *name != Self::SOFTWARE) {
            return Self::open(name);
        }
        UdpError::check_host(peer)?;
        let by_route = source_to(peer)?;
        let software =
            || Self::over_udp(&sources_to(peer, by_route, interface_at(peer).is_some()), only);
        if named.is_some() {
            software()
        } else {
            Self::real_device_at(by_route).or_else(|()| software())
        }
    }

    /// Returns its limits and identity.
    #[must_use]
    pub fn attr(&self) -> &DeviceAttr {
        self.inner.context.attr()
    }

    /// Returns its name, for example `mlx5_0` or `soft0`.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.attr().name
    }

    pub(crate) fn dc(&self) -> Result<DcAttr, SetupError> {
        let what = "the device lacks the dynamically connected transport (DC)";
        self.attr().dc.ok_or(SetupError::Unsupported { what })
    }

    pub(crate) fn clock_attr(&self) -> Result<ClockAttr, SetupError> {
        let what = "the device lacks completion timestamps";
        self.attr().clock.ok_or(SetupError::Unsupported { what })
    }

    /// Returns the current attributes of a port, `ibv_query_port(3)`.
    ///
    /// # Errors
    ///
    /// [`VerbError`] with EINVAL if the device has no such port.
    pub fn port(&self, port: PortNum) -> Result<PortAttr, VerbError> {
        self.inner.context.port(port)
    }

    /// Queries the port again after each event that may have changed it; a change of the MTU raises
    /// none.
    pub(crate) fn known_port(&self, port: PortNum) -> Result<Arc<PortAttr>, VerbError> {
        self.read_events();
        // Before the query, so that a change during the query makes its result invalid.
        let changes = self.inner.events.port_changes();
        let known = self.inner.ports.lock().get(&port.0).cloned();
        if let Some((of, attr)) = known
            && changes == Some(of)
        {
            return Ok(attr);
        }
        let attr = Arc::new(self.port(port)?);
        if let Some(changes) = changes {
            self.inner.ports.lock().insert(port.0, (changes, attr.clone()));
        }
        Ok(attr)
    }

    /// Returns the partition keys of a port by index. Empty entries are 0; bit 15 marks a full
    /// member. Each [entry](PortAttr::pkeys) costs a system call.
    ///
    /// # Errors
    ///
    /// As for [`port`](Self::port).
    pub fn pkey_table(&self, port: PortNum) -> Result<Vec<u16>, VerbError> {
        self.inner.context.pkey_table(port)
    }

    /// Returns the counters of a port by name: packets, retransmissions, errors, congestion.
    ///
    /// A real device has those of `/sys/class/infiniband/<device>/ports/<port>/counters` and
    /// `hw_counters`, with the driver's names and meanings; on InfiniBand and ConnectX,
    /// `port_rcv_data` and `port_xmit_data` count 4 bytes each. They cover all users of the port.
    /// `hw_counters` may be old by its `lifespan`, usually 10 ms. Each read blocks for the
    /// firmware, typically less than a millisecond.
    ///
    /// A software device has the sums over its queue pairs, without DC targets, since it was
    /// opened, under SoftRoCE's names where it has them, and `bad_pkeys` of the whole device.
    ///
    /// # Errors
    ///
    /// As for [`port`](Self::port).
    pub fn port_counters(&self, port: PortNum) -> Result<BTreeMap<String, u64>, VerbError> {
        self.inner.context.port_counters(port)
    }

    /// Creates a protection domain, `ibv_alloc_pd(3)`. Objects of one domain may be used together.
    ///
    /// # Errors
    ///
    /// [`VerbError`].
    pub fn protection_domain(&self) -> Result<ProtectionDomain, VerbError> {
        ProtectionDomain::new(self)
    }

    /// Returns the GID table of a port, best entry first, with reasons. Criteria, in order:
    ///
    /// 1. the interface is up and in this network namespace;
    /// 2. RoCE v2 before v1;
    /// 3. with a `peer`: its address family, its subnet, the kernel's source address for it;
    /// 4. interfaces without VLAN;
    /// 5. addresses that are not link-local, unless the peer's is;
    /// 6. the lowest index.
    ///
    /// On InfiniBand: the peer's subnet prefix, then the lowest index.
    ///
    /// # Errors
    ///
    /// As for [`port`](Self::port).
    pub fn gids(&self, port: PortNum, peer: Option<Gid>) -> Result<Vec<RankedGid>, VerbError> {
        Ok(rank_gids(&self.port(port)?, peer))
    }

    /// Returns the best active port and GID for an unknown peer, in the order of
    /// [`gids`](Self::gids). Of equal ones, the lower port wins.
    ///
    /// # Errors
    ///
    /// [`SetupError::NoGid`] if no active port has a GID.
    pub fn default_path(&self) -> Result<(PortAttr, GidEntry), SetupError> {
        self.path(None)
    }

    /// Returns the IP address to listen at for clients on the network of
    /// [`default_path`](Self::default_path): that of its GID or, on an iWARP device, the first of
    /// the network interface.
    ///
    /// # Errors
    ///
    /// [`SetupError::NoGid`] as for `default_path`, or if that interface has no address.
    pub fn default_address(&self) -> Result<IpAddr, SetupError> {
        let (port, entry) = self.default_path()?;
        let own = mac_of(entry).map(|mac| addresses_of_mac(Path::new("/"), mac));
        match own {
            None => Ok(entry.gid.to_ip()),
            Some(own) => own.first().copied().ok_or(SetupError::NoGid { port: port.port.0 }),
        }
    }

    /// Returns the best active port and GID to reach `peer` from.
    ///
    /// # Errors
    ///
    /// As for [`default_path`](Self::default_path).
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
        rdma_provider::debug!(device = self.name(), port = port.port.0, %gid, "chose port and GID");
        Ok((port, gid.entry))
    }

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

    pub(crate) fn event_fd(&self) -> BorrowedFd<'_> {
        self.inner.context.event_fd()
    }

    /// Returns the next asynchronous event, if one is pending, `ibv_get_async_event(3)`.
    /// [`events`](Self::events) awaits them.
    ///
    /// # Errors
    ///
    /// [`VerbError`] with ENODEV once the device is gone.
    pub fn next_event(&self) -> Result<Option<AsyncEvent>, VerbError> {
        self.inner.events.next(|| self.inner.context.next_event())
    }

    pub(crate) fn read_events(&self) {
        self.inner.events.take(|| self.inner.context.next_event());
    }

    pub(crate) fn port_events(&self) -> PortEvents {
        self.inner.events.ports()
    }

    /// Calls `listener`, until it is dropped, whenever events were read, even by another reader.
    pub(crate) fn on_events(
        &self,
        kind: EventKind,
        listener: &Arc<Listener>,
    ) -> Result<(), VerbError> {
        self.inner.events.listen(kind, listener)
    }

    pub(super) fn async_events(&self) -> &Events {
        &self.inner.events
    }

    pub(crate) fn random_psn(&self) -> Result<Psn, VerbError> {
        Ok(Psn::new(self.random()? as u32))
    }

    pub(crate) fn random(&self) -> Result<u64, VerbError> {
        self.inner.context.random()
    }

    pub(crate) fn next_vector(&self) -> u32 {
        self.inner.vectors.fetch_add(1, Ordering::Relaxed) % self.attr().completion_vectors.max(1)
    }

    /// Readable when unprocessed packets have arrived. `None` if the device processes them itself,
    /// or if another `PacketSource` exists: one thread suffices.
    pub(crate) fn packet_source(&self) -> std::io::Result<Option<PacketSource>> {
        let Some(fd) = self.inner.context.packet_fd() else { return Ok(None) };
        if self.inner.watched.swap(true, Ordering::AcqRel) {
            return Ok(None);
        }
        let release = |_: &_| self.inner.watched.store(false, Ordering::Release);
        // A descriptor can be registered only once.
        let fd = fd.try_clone_to_owned().inspect_err(release)?;
        Ok(Some(PacketSource { fd, device: self.clone() }))
    }

    /// Returns false if no packets of a software device had arrived, or another thread processes
    /// them.
    pub(crate) fn process_packets(&self) -> bool {
        self.inner.context.process_packets()
    }

    /// A caller of [`process_packets`](Self::process_packets) sleeps without a [`PacketSource`] to
    /// wake it.
    pub(crate) fn stop_processing(&self) {
        self.inner.context.stop_processing();
    }

    fn first_active() -> Result<Self, String> {
        Self::first_real(|device| device.default_path().is_ok(), "no active port with a GID")
    }

    /// Returns the first usable real device, or why there is none. `fault` describes unusable ones.
    fn first_real(usable: impl Fn(&Self) -> bool, fault: &str) -> Result<Self, String> {
        let mut skipped = Vec::new();
        for name in real_devices()? {
            match Self::open(&name) {
                Ok(device) if usable(&device) => return Ok(device),
                Ok(_) => skipped.push(format!("{name} has {fault}")),
                Err(error) => skipped.push(error.to_string()),
            }
        }
        Err(match &skipped[..] {
            [] => "libibverbs finds no device".to_owned(),
            _ => skipped.join(", "),
        })
    }

    fn real_device_at(address: IpAddr) -> Result<Self, ()> {
        let ports = |device: &Self| (1..=device.attr().ports).map(PortNum);
        let is_here = |device: &Self| {
            let mut ports = ports(device).filter_map(|number| device.port(number).ok());
            ports.any(|port| is_at(Path::new("/"), device.name(), &port, address))
        };
        Self::first_real(is_here, "no active port with this address").map_err(|reason| {
            // No real device has a loopback address, so this is expected.
            if address.is_loopback() {
                rdma_provider::debug!(%address, reason, "using a software device over UDP");
            } else {
                rdma_provider::warn!(%address, reason, "using a software device over UDP");
            }
        })
    }

    fn over_udp(addresses: &[IpAddr], only: Option<IpAddr>) -> Result<Self, OpenError> {
        let (network, address) =
            soft::Network::at_first_free(soft::UdpConfig::PORT, addresses, only)?;
        Self::software_in(&network, &address.to_string())
    }

    fn new(context: Context) -> Self {
        Self {
            inner: Arc::new(Inner {
                context,
                vectors: AtomicU32::new(0),
                events: Events::default(),
                ports: Mutex::default(),
                watched: AtomicBool::new(false),
                _opened: Opened::new(),
            }),
        }
    }

    /// Returns true if registering and deregistering memory may take milliseconds.
    pub(crate) fn may_block(&self) -> bool {
        self.context().may_block()
    }

    pub(crate) fn context(&self) -> &Context {
        &self.inner.context
    }

    pub(crate) fn same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }

    pub(crate) fn address(&self) -> usize {
        Arc::as_ptr(&self.inner).addr()
    }
}

pub(crate) struct PacketSource {
    fd: OwnedFd,
    device: Device,
}

impl PacketSource {
    pub(crate) fn process_packets(&self) -> bool {
        self.device.process_packets()
    }
}

impl AsRawFd for PacketSource {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

impl Drop for PacketSource {
    fn drop(&mut self) {
        self.device.inner.watched.store(false, Ordering::Release);
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device").field("name", &self.name()).finish_non_exhaustive()
    }
}

fn device_from_env() -> Option<String> {
    std::env::var("TOKIO_RDMA_DEVICE").ok()
}

fn real_devices() -> Result<Vec<String>, &'static str> {
    #[cfg(feature = "ibverbs")]
    return rdma_ibverbs::devices().map_err(|error| match error.errno {
        VerbError::EOPNOTSUPP => "libibverbs.so.1 cannot be loaded: rdma-core is not installed",
        VerbError::ENOSYS => {
            "RDMA support of the kernel is not loaded: /sys/class/infiniband_verbs does not exist"
        }
        _ => "libibverbs cannot list its devices",
    });
    #[cfg(not(feature = "ibverbs"))]
    Err("built without feature `ibverbs`")
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::software::Network;

    #[test]
    fn default_device_is_the_software_device_only_if_asked_for() {
        match (device_from_env(), Device::open_default()) {
            (Some(name), device) => assert_eq!(device.unwrap().name(), name),
            (None, Ok(device)) => assert_ne!(device.name(), Device::SOFTWARE),
            (None, Err(error)) => {
                let OpenError::NoUsableDevice { reason } = &error else { panic!("{error}") };
                let text = error.to_string();
                assert!(
                    text.contains(reason) && text.contains("open_default_or_software"),
                    "{text}"
                );
                let device = Device::open_default_or_software().unwrap();
                assert_eq!(device.name(), Device::SOFTWARE);
            }
        }
    }

    #[test]
    fn known_port_is_queried_again_after_an_event_of_a_port() {
        let network = Network::new();
        let device = Device::software_in(&network, "known").unwrap();
        let port = || device.known_port(PortNum(1)).unwrap();
        let first = port();
        assert!(Arc::ptr_eq(&first, &port()));
        let control = network.control("known").unwrap();
        control.set_port(false);
        assert_eq!((first.state, port().state), (PortState::Active, PortState::Down));
        control.set_port(true);
        // The user still gets the events.
        assert_eq!(device.next_event(), Ok(Some(AsyncEvent::PortError(PortNum(1)))));
        assert_eq!(port().state, PortState::Active);
        assert!(device.known_port(PortNum(2)).is_err());
        control.kill();
        assert!(device.known_port(PortNum(1)).is_err());
    }
}

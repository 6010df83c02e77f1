//! A network of devices, with its clock and fault model, in this process or over UDP.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::task::{Context as TaskContext, Poll, Waker};

use rdma_provider::locks::{Mutex, RwLock};
use std::time::{Duration, Instant};

use rdma_provider::VerbError;
use smallvec::SmallVec;

use crate::{OpenError, UdpError};
use rdma_provider::types::Gid;

use super::faults::{Faults, Link, LinkCounters, OneWay};
use super::node::Node;
use super::ports::Ports;
use super::scheduler::{Job, Scheduler};
use super::udp::{Endpoint, UdpConfig};
use crate::roce::ip_fields::{IpFields, Origin};
use crate::roce::packet::{self, Packet, WireError};

/// A network of software devices, in this process or [over UDP](Self::udp).
///
/// Devices of one in-process network reach each other. Without faults it builds no packets: the
/// posting thread copies the data. A clone is another handle.
///
/// ```
/// use rdma_soft::contract::Context as _;
/// use rdma_soft::types::PortNum;
/// use rdma_soft::{Faults, Network};
/// use std::time::Duration;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let network = Network::simulated(7, Faults::none().loss(0.1));
/// let (a, b) = (network.open("a")?, network.open("b")?);
/// assert_ne!(a.port(PortNum(1))?.gids, b.port(PortNum(1))?.gids);
/// // Nothing was posted, so no packet is in flight.
/// assert!(network.run_until_idle(Duration::from_secs(1)));
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Network(pub(crate) Arc<NetworkInner>);

pub(crate) struct NetworkInner {
    /// Permanent addresses. The lock is held while a device is created.
    pub(crate) names: Mutex<HashMap<String, Gid>>,
    /// Ordered, so that simulated runs are reproducible.
    nodes: RwLock<BTreeMap<Gid, Weak<dyn Node>>>,
    /// The scheduler delivers packets. Never reset: direct copies would overtake them.
    queued: AtomicBool,
    link: Mutex<Link>,
    pub(crate) ports: Mutex<Ports>,
    /// Ports of datagram services.
    pub(crate) datagram_ports: Mutex<Ports>,
    pub(crate) scheduler: Arc<Scheduler>,
    /// Seeded generator; `None` for the system's.
    random: Option<Mutex<fastrand::Rng>>,
    /// Endpoints over UDP; the fault model applies before their sockets.
    endpoints: HashMap<Gid, Arc<Endpoint>>,
    faulty: AtomicBool,
}

struct Delivery {
    network: Weak<NetworkInner>,
    route: (Gid, Gid),
    ip_fields: IpFields,
    /// With checksum.
    image: Vec<u8>,
}

impl Network {
    /// Creates a network without faults, in real time.
    #[must_use]
    pub fn new() -> Self {
        Self::with(Scheduler::real(), None, 0, Faults::none(), false)
    }

    /// Creates a network with faults drawn from `seed`, in real time. Thread timing matters too;
    /// use [`simulated`](Self::simulated) to reproduce runs.
    #[must_use]
    pub fn with_faults(seed: u64, faults: Faults) -> Self {
        Self::with(Scheduler::real(), None, seed, faults, true)
    }

    /// Creates a network in virtual time, which advances only in [`step`](Self::step) and
    /// [`run_until_idle`](Self::run_until_idle). Everything is drawn from `seed`, including numbers
    /// and keys, so a single-threaded program is reproducible.
    #[must_use]
    pub fn simulated(seed: u64, faults: Faults) -> Self {
        let random = fastrand::Rng::with_seed(seed ^ 0x9e37_79b9_7f4a_7c15);
        Self::with(Scheduler::virtual_time(), Some(Mutex::new(random)), seed, faults, true)
    }

    /// Returns the network of this process, with device `soft0`.
    #[must_use]
    pub fn global() -> &'static Self {
        static GLOBAL: OnceLock<Network> = OnceLock::new();
        GLOBAL.get_or_init(Self::new)
    }

    /// Creates a network over UDP with the devices of `config`, whose sockets receive until the
    /// network and all its objects are dropped.
    ///
    /// Peers can be other processes with this crate, kernels with SoftRoCE, or adapters. Linux
    /// only, unprivileged. docs/software-device.md describes costs and exposure.
    ///
    /// # Errors
    ///
    /// [`UdpError`]: invalid configuration, port in use, or address not of this host.
    pub fn udp(config: &UdpConfig) -> Result<Self, UdpError> {
        Self::over_sockets(config, true)
    }

    /// Creates a network over UDP with one device at the first address whose port is free; waits
    /// only for the last. With `only`, drops packets from other addresses.
    ///
    /// # Errors
    ///
    /// [`UdpError`], as for [`udp`](Self::udp); [`UdpError::AllTaken`] if every port is in use.
    pub fn at_first_free(
        port: u16,
        addresses: &[IpAddr],
        only: Option<IpAddr>,
    ) -> Result<(Self, IpAddr), UdpError> {
        let (&[first, ..], &[.., last]) = (addresses, addresses) else {
            return Err(UdpError::NoDevice);
        };
        for &address in addresses {
            // Naming an address exposes it.
            let config = UdpConfig::new().address(address).port(port).expose();
            let config = only
                .into_iter()
                .fold(config, |config, peer| config.allow(peer, UdpConfig::whole(peer)));
            match Self::over_sockets(&config, first == last) {
                Ok(network) => return Ok((network, address)),
                Err(UdpError::PortTaken { soft_roce: false, .. }) if first != last => {}
                Err(error) => return Err(error),
            }
        }
        Err(UdpError::AllTaken { first, last, port })
    }

    fn over_sockets(config: &UdpConfig, wait_for_port: bool) -> Result<Self, UdpError> {
        config.check()?;
        let config = Arc::new(config.clone());
        let mut network = Self::inner(Scheduler::real(), None, 0, Faults::none(), true);
        for (name, address) in config.devices() {
            let gid = Gid::from(address);
            match Endpoint::open(&config, address, wait_for_port) {
                Ok(endpoint) => network.endpoints.insert(gid, endpoint),
                // Dropping the network closes the open endpoints.
                Err(error) => return Err(error),
            };
            network.names.get_mut().insert(name.to_owned(), gid);
        }
        Ok(Self(Arc::new(network)))
    }

    fn with(
        scheduler: Arc<Scheduler>,
        random: Option<Mutex<fastrand::Rng>>,
        seed: u64,
        faults: Faults,
        queued: bool,
    ) -> Self {
        Self(Arc::new(Self::inner(scheduler, random, seed, faults, queued)))
    }

    fn inner(
        scheduler: Arc<Scheduler>,
        random: Option<Mutex<fastrand::Rng>>,
        seed: u64,
        faults: Faults,
        queued: bool,
    ) -> NetworkInner {
        NetworkInner {
            names: Mutex::default(),
            nodes: RwLock::default(),
            queued: AtomicBool::new(queued),
            link: Mutex::new(Link::new(seed, faults)),
            ports: Mutex::default(),
            datagram_ports: Mutex::default(),
            scheduler,
            random,
            endpoints: HashMap::new(),
            faulty: AtomicBool::new(false),
        }
    }

    /// Returns the address of a device that was opened before, or is configured.
    pub(crate) fn gid_of(&self, name: &str) -> Result<Gid, OpenError> {
        let names = self.0.names.lock();
        names.get(name).copied().ok_or_else(|| OpenError::NotFound {
            name: name.to_owned(),
            available: names.keys().cloned().collect(),
            reason: None,
        })
    }

    /// Changes the fault model and encodes packets from now on. Over UDP it applies to sent packets
    /// only.
    pub fn set_faults(&self, faults: Faults) {
        self.0.link.lock().faults = faults;
        self.0.encode();
    }

    /// Changes the probability of loss; see [`set_faults`](Self::set_faults).
    pub fn set_loss(&self, probability: f64) {
        self.0.link.lock().faults.loss = probability;
        self.0.encode();
    }

    /// Returns packet counters; all 0 on an in-process network without faults.
    #[must_use]
    pub fn counters(&self) -> LinkCounters {
        let mut counters = self.0.link.lock().counters;
        for endpoint in self.0.endpoints.values() {
            endpoint.count_into(&mut counters);
        }
        counters
    }

    /// Returns the age of the network, virtual if simulated.
    #[must_use]
    pub fn now(&self) -> Duration {
        Duration::from_nanos(self.0.scheduler.now())
    }

    /// Returns the present by the clock of the network, which is [`Instant::now`] unless it is
    /// simulated.
    #[must_use]
    pub fn instant(&self) -> Instant {
        self.0.scheduler.began() + self.now()
    }

    /// Returns true if the network has virtual time.
    #[must_use]
    pub fn is_simulated(&self) -> bool {
        self.0.scheduler.is_virtual()
    }

    /// Wakes `waker` at an instant by the clock of the network.
    #[must_use]
    pub fn wake_at(&self, instant: Instant, waker: Waker) -> Alarm {
        let alarm = Arc::new(Mutex::new(Some(waker)));
        let age = instant.saturating_duration_since(self.0.scheduler.began());
        let at = u64::try_from(age.as_nanos()).unwrap_or(u64::MAX);
        self.0.scheduler.schedule(at, Job::Alarm(Arc::downgrade(&alarm)));
        Alarm { waker: alarm, network: Arc::downgrade(&self.0) }
    }

    /// Lets the clock of a simulated network follow another clock, which returns the age of the
    /// network: the greater one of both is its age.
    pub fn follow(&self, clock: Option<Box<dyn Fn() -> Duration + Send>>) {
        self.0.scheduler.follow(clock);
    }

    /// Returns the age at which the next packet or timer of a simulated network is due. `Pending`
    /// without one. In both cases the task is woken when another one is added.
    pub fn poll_next(&self, context: &TaskContext<'_>) -> Poll<Duration> {
        match self.0.scheduler.next(context.waker()) {
            Some(at) => Poll::Ready(Duration::from_nanos(at)),
            None => Poll::Pending,
        }
    }

    /// Processes the next packet or timer of a simulated network. Returns false if none exists, and
    /// always in real time.
    pub fn step(&self) -> bool {
        self.0.scheduler.step(u64::MAX)
    }

    /// Does the same if the packet or timer is due when the network has the age `limit`.
    pub fn step_until(&self, limit: Duration) -> bool {
        self.0.scheduler.step(u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX))
    }

    /// Steps until idle, or for `limit` of virtual time; returns true if idle.
    pub fn run_until_idle(&self, limit: Duration) -> bool {
        let limit = self
            .0
            .scheduler
            .now()
            .saturating_add(u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX));
        while self.0.scheduler.step(limit) {}
        self.0.scheduler.is_idle()
    }
}

/// A wake-up by the clock of a network, see [`Network::wake_at`]. Dropping it cancels the wake-up.
#[derive(Debug)]
pub struct Alarm {
    waker: Arc<Mutex<Option<Waker>>>,
    network: Weak<NetworkInner>,
}

impl Alarm {
    /// Returns true if the clock of `network` fires it.
    #[must_use]
    pub fn is_of(&self, network: &Network) -> bool {
        std::ptr::eq(self.network.as_ptr(), Arc::as_ptr(&network.0))
    }

    /// Lets it wake `waker` instead, and returns the earlier one.
    ///
    /// # Errors
    ///
    /// `waker` itself if the alarm has fired.
    pub fn redirect(&self, waker: Waker) -> Result<Waker, Waker> {
        match &mut *self.waker.lock() {
            Some(registered) => Ok(std::mem::replace(registered, waker)),
            None => Err(waker),
        }
    }
}

impl Default for Network {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Debug for NetworkInner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Network")
            .field("queued", &self.is_queued())
            .field("udp", &self.endpoints)
            .field("simulated", &self.scheduler.is_virtual())
            .finish_non_exhaustive()
    }
}

impl NetworkInner {
    /// Changes or reads the faults of one direction, and encodes packets from now on.
    pub(crate) fn with_one_way<R>(
        &self,
        route: (Gid, Gid),
        change: impl FnOnce(&mut OneWay) -> R,
    ) -> R {
        let result = change(self.link.lock().one_way(route));
        self.encode();
        result
    }

    fn encode(&self) {
        self.queued.store(true, Ordering::Release);
        self.faulty.store(true, Ordering::Release);
    }

    pub(crate) fn is_udp(&self) -> bool {
        !self.endpoints.is_empty()
    }

    pub(crate) fn is_faulty(&self) -> bool {
        self.faulty.load(Ordering::Acquire)
    }

    #[inline]
    pub(crate) fn is_queued(&self) -> bool {
        self.queued.load(Ordering::Acquire)
    }

    pub(crate) fn node(&self, gid: Gid) -> Option<Arc<dyn Node>> {
        self.nodes.read().get(&gid)?.upgrade()
    }

    /// Returns all nodes, by address.
    pub(crate) fn nodes(&self) -> SmallVec<[Arc<dyn Node>; 8]> {
        self.nodes.read().values().filter_map(Weak::upgrade).collect()
    }

    pub(crate) fn add_node(&self, gid: Gid, node: Weak<dyn Node>) {
        self.nodes.write().insert(gid, node);
    }

    pub(crate) fn endpoint(&self, gid: Gid) -> Option<&Arc<Endpoint>> {
        self.endpoints.get(&gid)
    }

    /// Returns the address of `name`. Over UDP only configured names have one; otherwise a new name
    /// gets the next.
    pub(crate) fn address_of(
        &self,
        names: &mut HashMap<String, Gid>,
        name: &str,
    ) -> Result<Gid, OpenError> {
        if self.is_udp() && !names.contains_key(name) {
            let available = names.keys().cloned().collect();
            let reason = Some("a network over UDP has only the devices of its configuration");
            return Err(OpenError::NotFound { name: name.to_owned(), available, reason });
        }
        let next = names.len();
        Ok(*names.entry(name.to_owned()).or_insert_with(|| address(next)))
    }

    /// Returns an unpredictable number; seeded if simulated.
    pub(crate) fn random(&self) -> Result<u64, VerbError> {
        match &self.random {
            Some(seeded) => Ok(seeded.lock().u64(..)),
            None => getrandom::u64().map_err(|error| {
                VerbError::new("getrandom", error.raw_os_error().unwrap_or(VerbError::EIO))
            }),
        }
    }

    /// Sends an encoded packet through the fault model.
    pub(crate) fn transmit(
        self: &Arc<Self>,
        route: (Gid, Gid),
        mut ip_fields: IpFields,
        mut image: Vec<u8>,
    ) {
        let endpoint = self.endpoints.get(&route.0);
        match endpoint {
            Some(endpoint) => endpoint.seal(&mut image, route.1),
            None => packet::seal(&mut image),
        }
        let passes = |image: &[u8]| match endpoint {
            Some(endpoint) => endpoint.may_hold(image, route.1),
            None => packet::unseal(image).is_ok(),
        };
        let now = self.scheduler.now();
        let packet = (&mut image[..], &mut ip_fields);
        let [first, second] = self.link.lock().send(now, route, packet, passes);
        let deliver = |at, image| {
            let delivery = Delivery { network: Arc::downgrade(self), route, ip_fields, image };
            self.scheduler.schedule(at, Job::Deliver(Box::new(|| delivery.run())));
        };
        if let Some(at) = second {
            deliver(at, image.clone());
        }
        if let Some(at) = first {
            deliver(at, image);
        }
    }
}

impl Drop for NetworkInner {
    fn drop(&mut self) {
        self.scheduler.stop();
        for endpoint in self.endpoints.values() {
            endpoint.close();
        }
    }
}

impl Delivery {
    fn run(self) {
        let Some(network) = self.network.upgrade() else { return };
        let (source, destination) = self.route;
        if let Some(endpoint) = network.endpoints.get(&source) {
            endpoint.send_sealed(&self.image, (destination, self.ip_fields));
            return;
        }
        let (packet, payload) = match packet::unseal(&self.image).and_then(Packet::parse) {
            Ok(parsed) => parsed,
            Err(error) => {
                rdma_provider::trace!(?error, %source, "packet dropped");
                if error == WireError::Checksum {
                    network.link.lock().counters.rejected += 1;
                }
                return;
            }
        };
        rdma_provider::trace!(%source, ?packet, "packet arrived");
        let origin = Origin { gid: source, ip_fields: self.ip_fields };
        let arrival = (origin, packet, payload);
        if destination.is_multicast() {
            for node in network.nodes() {
                node.receive_multicast(destination, &mut std::iter::once(arrival));
            }
        } else if let Some(node) = network.node(destination) {
            node.receive(&mut std::iter::once(arrival));
        }
    }
}

fn address(index: usize) -> Gid {
    const FIRST: u32 = u32::from_be_bytes([127, 1, 0, 1]);
    // Wrapping only makes names collide.
    Ipv4Addr::from(FIRST + (index as u32 & 0x00ff_ffff) % 0x00fe_0000).into()
}

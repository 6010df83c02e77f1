//! A network of devices, with its clock and fault model, in this process or over UDP.

use std::collections::HashMap;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::task::{Context as TaskContext, Poll, Waker};

use rdma_provider::locks::{Mutex, RwLock};
use std::time::{Duration, Instant};

use rdma_provider::VerbError;

use crate::{OpenError, UdpError};
use rdma_provider::types::{AsyncEvent, Gid, Qkey, Qpn, Transport};

use super::faults::{Faults, Link, LinkCounters, OneWay};
use super::ports::Ports;
use super::scheduler::{Job, Scheduler};
use super::udp::{DeferredAnswer, Endpoint, UdpConfig};
use crate::cm::Manager;
use crate::dc::Header;
use crate::device::DeviceInner;
use crate::device::dct::DctInner;
use crate::device::outbox::Outbox;
use crate::device::pump::Half;
use crate::device::queue_pair::QpInner;
use crate::memory::dma::Payload;
use crate::roce::packet::{self, Body, Packet, WireError};
use crate::verbs::Context;

/// Management queue pair and its key (IBTA 3.5.10 and 10.2.5).
const MANAGEMENT: Qpn = Qpn(1);
const MANAGEMENT_QKEY: Qkey = Qkey(0x8001_0000);
/// Bytes of a management datagram (IBTA 13.4.2).
pub(crate) const MAD: usize = 256;

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
    names: Mutex<HashMap<String, NamedDevice>>,
    by_gid: RwLock<HashMap<Gid, Weak<DeviceInner>>>,
    /// The scheduler delivers packets. Never reset: direct copies would overtake them.
    queued: AtomicBool,
    link: Mutex<Link>,
    pub(crate) ports: Mutex<Ports>,
    pub(crate) scheduler: Arc<Scheduler>,
    /// Seeded generator; `None` for the system's.
    random: Option<Mutex<fastrand::Rng>>,
    /// Endpoints over UDP; the fault model applies before their sockets.
    endpoints: HashMap<Gid, Arc<Endpoint>>,
    faulty: AtomicBool,
}

/// A permanent address of a name, and its device while open.
#[derive(Debug)]
struct NamedDevice {
    gid: Gid,
    device: Weak<DeviceInner>,
}

#[derive(Debug)]
pub(crate) struct Delivery {
    network: Weak<NetworkInner>,
    route: (Gid, Gid),
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
            network
                .names
                .get_mut()
                .insert(name.to_owned(), NamedDevice { gid, device: Weak::new() });
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
            by_gid: RwLock::default(),
            queued: AtomicBool::new(queued),
            link: Mutex::new(Link::new(seed, faults)),
            ports: Mutex::default(),
            scheduler,
            random,
            endpoints: HashMap::new(),
            faulty: AtomicBool::new(false),
        }
    }

    /// Opens device `name`, and creates it if necessary. Over UDP only configured devices exist.
    ///
    /// # Errors
    ///
    /// [`OpenError`]: the device is unknown or lost, or the network's thread cannot be started.
    pub fn open(&self, name: &str) -> Result<Context, OpenError> {
        // Without its thread nothing would be retransmitted.
        let started = self.0.scheduler.start();
        started.map_err(|error| OpenError::of(name)(VerbError::no_thread(&error)))?;
        let mut names = self.0.names.lock();
        let next = names.len();
        if self.0.is_udp() && !names.contains_key(name) {
            let available = names.keys().cloned().collect();
            let reason = Some("a network over UDP has only the devices of its configuration");
            return Err(OpenError::NotFound { name: name.to_owned(), available, reason });
        }
        let known = names
            .entry(name.to_owned())
            .or_insert_with(|| NamedDevice { gid: address(next), device: Weak::new() });
        let device = match known.device.upgrade() {
            Some(device) => device,
            None => {
                let endpoint = self.0.endpoints.get(&known.gid).cloned();
                let made = DeviceInner::new(name, known.gid, Arc::clone(&self.0), endpoint);
                let device = made.map_err(OpenError::of(name))?;
                known.device = Arc::downgrade(&device);
                let mut by_gid = self.0.by_gid.write();
                by_gid.insert(known.gid, Arc::downgrade(&device));
                device
            }
        };
        drop(names);
        Context::open(device).map_err(OpenError::of(name))
    }

    /// Returns a control of device `name`, if open.
    #[must_use]
    pub fn control(&self, name: &str) -> Option<DeviceControl> {
        self.0.names.lock().get(name)?.device.upgrade().map(DeviceControl)
    }

    /// Returns the address of a device that was opened before, or is configured.
    pub(crate) fn gid_of(&self, name: &str) -> Result<Gid, OpenError> {
        let names = self.0.names.lock();
        names.get(name).map(|device| device.gid).ok_or_else(|| OpenError::NotFound {
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

    pub(crate) fn device(&self, gid: Gid) -> Option<Arc<DeviceInner>> {
        self.by_gid.read().get(&gid)?.upgrade()
    }

    pub(crate) fn queue_pair(&self, gid: Gid, qpn: Qpn) -> Option<Arc<QpInner>> {
        self.device(gid)?.queue_pair(qpn)
    }

    pub(crate) fn target(&self, gid: Gid, number: Qpn) -> Option<Arc<DctInner>> {
        self.device(gid)?.target(number)
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
    pub(crate) fn transmit(self: &Arc<Self>, route: (Gid, Gid), mut image: Vec<u8>) {
        match self.endpoints.get(&route.0) {
            Some(endpoint) => endpoint.seal(&mut image, route.1),
            None => packet::seal(&mut image),
        }
        let now = self.scheduler.now();
        let [first, second] = self.link.lock().send(now, route, &mut image);
        if let Some(at) = second {
            let copy = Delivery { network: Arc::downgrade(self), route, image: image.clone() };
            self.scheduler.schedule(at, Job::Deliver(Box::new(|| copy.run())));
        }
        if let Some(at) = first {
            let delivery = Delivery { network: Arc::downgrade(self), route, image };
            self.scheduler.schedule(at, Job::Deliver(Box::new(|| delivery.run())));
        }
    }
}

impl NetworkInner {
    /// Sends a management datagram between queue pairs 1 (IBTA 13.5.1); it may be lost.
    pub(crate) fn transmit_management(&self, device: &Arc<DeviceInner>, to: Gid, mad: &[u8; MAD]) {
        let packet = Packet {
            transport: Transport::Ud,
            dest: MANAGEMENT,
            psn: device.next_management_psn(),
            solicited: false,
            ack_request: false,
            body: Body::Datagram { qkey: MANAGEMENT_QKEY, source: MANAGEMENT, imm: None },
        };
        Outbox::new(device).push(&packet, to, &Payload::Bytes(mad));
    }

    /// Processes a packet; returns false without a receiver. `answer` defers the response.
    pub(crate) fn on_packet(
        device: &Arc<DeviceInner>,
        source: Gid,
        packet: &Packet,
        payload: &[u8],
        answer: &mut DeferredAnswer,
    ) -> bool {
        if packet.transport == Transport::Dci {
            return Self::on_framed(device, source, packet, payload, answer);
        }
        if packet.dest != MANAGEMENT {
            // DC initiators receive only from their targets.
            let taken =
                device.queue_pair(packet.dest).filter(|qp| qp.transport() != Transport::Dci);
            let Some(qp) = taken else { return Self::on_early(device, source, packet) };
            let half = qp.on_packet(packet, source, payload);
            answer.defer(qp, half);
        } else if let Body::Datagram { qkey: MANAGEMENT_QKEY, imm: None, .. } = packet.body {
            Manager::on_datagram(device, source, payload);
        } else {
            return false;
        }
        true
    }

    /// Makes the peer wait for a queue pair that is not ready, if the connection manager has
    /// announced its number; returns true if so.
    #[cold]
    pub(crate) fn on_early(device: &Arc<DeviceInner>, source: Gid, packet: &Packet) -> bool {
        let Some(reply) = Manager::on_early(device, source, packet) else { return false };
        Outbox::new(device).push(&reply, source, &Payload::Bytes(&[]));
        true
    }

    fn on_framed(
        device: &Arc<DeviceInner>,
        source: Gid,
        packet: &Packet,
        payload: &[u8],
        answer: &mut DeferredAnswer,
    ) -> bool {
        let Ok((header, payload)) = Header::parse(payload) else { return false };
        if packet.body.is_dc_response() {
            let Some(qp) = device.queue_pair(packet.dest) else { return false };
            qp.on_answer((packet, &header), source, payload);
            answer.defer(qp, Half::Sender);
        } else {
            let Some(target) = device.target(packet.dest) else { return false };
            target.on_packet((packet, &header), source, payload);
            answer.defer_target(target);
        }
        true
    }

    pub(crate) fn reject(&self) {
        self.link.lock().counters.rejected += 1;
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
    pub(crate) fn run(self) {
        let Some(network) = self.network.upgrade() else { return };
        let (source, destination) = self.route;
        if let Some(endpoint) = network.endpoints.get(&source) {
            endpoint.send_sealed(&self.image, destination);
            return;
        }
        let Some(device) = network.device(destination).filter(|device| device.is_linked()) else {
            return;
        };
        let (packet, payload) = match packet::unseal(&self.image).and_then(Packet::parse) {
            Ok(parsed) => parsed,
            Err(error) => {
                rdma_provider::trace!(?error, %source, "packet dropped");
                if error == WireError::Checksum {
                    network.reject();
                }
                return;
            }
        };
        rdma_provider::trace!(%source, ?packet, "packet arrived");
        let mut answer = DeferredAnswer::default();
        NetworkInner::on_packet(&device, source, &packet, payload, &mut answer);
        answer.flush();
    }
}

/// A control of a device, for tests of programs that must survive its failure.
#[derive(Debug, Clone)]
pub struct DeviceControl(pub(crate) Arc<DeviceInner>);

impl DeviceControl {
    /// Removes the device: it raises `DEVICE_FATAL`, queue pairs enter ERR and flush, and verbs
    /// fail. Once its objects are dropped, its name opens a new device.
    pub fn kill(&self) {
        self.0.kill();
    }

    /// Sets the port up or down; while down, it loses all packets.
    pub fn set_port(&self, up: bool) {
        self.0.set_port(up);
    }

    /// Raises `event` in every context, without other effects. An unplugged adapter raises
    /// [`AsyncEvent::DeviceFatal`] like this, then nothing.
    pub fn announce(&self, event: AsyncEvent) {
        self.0.announce(event);
    }

    /// Returns the number of queue pairs.
    #[must_use]
    pub fn queue_pairs(&self) -> usize {
        self.0.queue_pair_count()
    }

    /// Returns the number of connections, including unconfirmed ones and TIMEWAIT.
    #[must_use]
    pub fn connections(&self) -> usize {
        self.0.cm.connections()
    }
}

fn address(index: usize) -> Gid {
    const FIRST: u32 = u32::from_be_bytes([127, 1, 0, 1]);
    // Wrapping only makes names collide.
    Ipv4Addr::from(FIRST + (index as u32 & 0x00ff_ffff) % 0x00fe_0000).into()
}

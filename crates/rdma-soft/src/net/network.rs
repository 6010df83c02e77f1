//! A network: its devices, its clock, its faults; within this process, or over UDP.

use std::collections::HashMap;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use parking_lot::{Mutex, RwLock};
use std::time::Duration;

use rdma_provider::VerbError;

use crate::{OpenError, UdpError};
use rdma_provider::types::{AsyncEvent, Gid, Qkey, Qpn, Transport};

use super::faults::{Faults, Link, LinkCounters};
use super::udp::{Endpoint, Outbox, Turn, UdpConfig};
use crate::cm::{Manager, Ports};
use crate::dc::{DctInner, Header};
use crate::device::dma::Payload;
use crate::device::pump::Half;
use crate::device::queue_pair::QpInner;
use crate::device::scheduler::{Job, Scheduler};
use crate::device::{Context, DeviceInner};
use crate::roce::packet::{self, Body, Packet, WireError};

/// The queue pair of management on every port, and its queue key (IBTA 3.5.10 and 10.2.5).
const MANAGEMENT: Qpn = Qpn(1);
const MANAGEMENT_QKEY: Qkey = Qkey(0x8001_0000);
/// Bytes of a management datagram (IBTA 13.4.2).
pub(crate) const MAD: usize = 256;

/// A network of software devices: within this process, or over [`udp`](Self::udp) with other processes, hosts and adapters.
///
/// Devices of one network within the process reach each other; devices of different networks do not. On such a network
/// without faults no packets are built: the posting thread copies the data itself.
///
/// A clone is another handle to the same network.
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
    names: Mutex<HashMap<String, Known>>,
    by_gid: RwLock<HashMap<Gid, Weak<DeviceInner>>>,
    /// Packets are encoded and delivered by the scheduler. Never false again once true, so that
    /// packets underway are not overtaken.
    queued: AtomicBool,
    link: Mutex<Link>,
    /// Addresses that listeners and connections have taken.
    pub(crate) ports: Mutex<Ports>,
    pub(crate) scheduler: Arc<Scheduler>,
    /// Seeded numbers of a simulated network; `None`: the system's.
    random: Option<Mutex<fastrand::Rng>>,
    /// Where its devices are, on a network over UDP; the fault model then stands between them and their sockets.
    endpoints: HashMap<Gid, Arc<Endpoint>>,
    faulty: AtomicBool,
}

/// Device of a name. The address stays with the name; the device goes when nobody has it open.
#[derive(Debug)]
struct Known {
    gid: Gid,
    device: Weak<DeviceInner>,
}

/// A packet on its way.
#[derive(Debug)]
pub(crate) struct Delivery {
    network: Weak<NetworkInner>,
    route: (Gid, Gid),
    /// With its check.
    image: Vec<u8>,
}

impl Network {
    /// Creates a network without faults, in real time.
    #[must_use]
    pub fn new() -> Self {
        Self::with(Scheduler::real(), None, 0, Faults::none(), false)
    }

    /// Creates a network with faults, in real time. The faults are drawn from `seed`, but the outcome also depends
    /// on the timing of threads. [`simulated`](Self::simulated) networks repeat exactly.
    #[must_use]
    pub fn with_faults(seed: u64, faults: Faults) -> Self {
        Self::with(Scheduler::real(), None, seed, faults, true)
    }

    /// Creates a network in virtual time: nothing moves until [`step`](Self::step) or
    /// [`run_until_idle`](Self::run_until_idle) is called. Everything is drawn from `seed`, including queue pair
    /// numbers and keys, so a program that uses the network from one thread repeats exactly.
    #[must_use]
    pub fn simulated(seed: u64, faults: Faults) -> Self {
        let random = fastrand::Rng::with_seed(seed ^ 0x9e37_79b9_7f4a_7c15);
        Self::with(Scheduler::virtual_time(), Some(Mutex::new(random)), seed, faults, true)
    }

    /// Returns the network of this process, which has the device `soft0`.
    #[must_use]
    pub fn global() -> &'static Self {
        static GLOBAL: OnceLock<Network> = OnceLock::new();
        GLOBAL.get_or_init(Self::new)
    }

    /// Creates a network that speaks RoCE v2 over UDP, with the devices of `config`. Their sockets are bound and receive from
    /// now on, until the network and all objects opened in it are dropped.
    ///
    /// Any RoCE v2 implementation can be the peer: another process with this crate, a kernel with SoftRoCE, an adapter. UDP
    /// needs Linux, but no privilege. docs/software-device.md describes the costs and what the device exposes to the network.
    ///
    /// # Errors
    ///
    /// [`UdpError`]: the configuration cannot work, a port is taken, an address is not of this host.
    pub fn udp(config: &UdpConfig) -> Result<Self, UdpError> {
        Self::of_sockets(config, true)
    }

    /// Creates a network over UDP with one device, at the first of these addresses whose port is free. Only the last
    /// address is waited for. With `only`, the device accepts packets from no other address.
    ///
    /// # Errors
    ///
    /// [`UdpError`]: as [`udp`](Self::udp); [`UdpError::AllTaken`] if every port is taken.
    pub fn at_first_free(
        port: u16,
        addresses: &[IpAddr],
        only: Option<IpAddr>,
    ) -> Result<(Self, IpAddr), UdpError> {
        let (&[first, ..], &[.., last]) = (addresses, addresses) else {
            return Err(UdpError::NoDevice);
        };
        for &address in addresses {
            // A caller that names an address wants it to be reached.
            let config = UdpConfig::new().address(address).port(port).expose();
            let config = only
                .into_iter()
                .fold(config, |config, peer| config.allow(peer, UdpConfig::whole(peer)));
            match Self::of_sockets(&config, first == last) {
                Ok(network) => return Ok((network, address)),
                Err(UdpError::PortTaken { soft_roce: false, .. }) if first != last => {}
                Err(error) => return Err(error),
            }
        }
        Err(UdpError::AllTaken { first, last, port })
    }

    /// `patient`: waits a little for ports that are taken.
    fn of_sockets(config: &UdpConfig, patient: bool) -> Result<Self, UdpError> {
        config.check()?;
        let config = Arc::new(config.clone());
        let mut network = Self::inner(Scheduler::real(), None, 0, Faults::none(), true);
        for (name, address) in config.devices() {
            let gid = Gid::from(address);
            match Endpoint::open(&config, address, patient) {
                Ok(endpoint) => network.endpoints.insert(gid, endpoint),
                // Those that are open close as the network is dropped.
                Err(error) => return Err(error),
            };
            network.names.get_mut().insert(name.to_owned(), Known { gid, device: Weak::new() });
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

    /// Opens the device `name`, and creates it if it does not exist. Over UDP only the devices of the configuration exist.
    ///
    /// # Errors
    ///
    /// [`OpenError`]: the device does not exist and cannot be created, or it is lost.
    pub fn open(&self, name: &str) -> Result<Context, OpenError> {
        let mut names = self.0.names.lock();
        let next = names.len();
        if self.0.is_udp() && !names.contains_key(name) {
            let available = names.keys().cloned().collect();
            let reason = Some("a network over UDP has the devices of its configuration");
            return Err(OpenError::NotFound { name: name.to_owned(), available, reason });
        }
        let known = names
            .entry(name.to_owned())
            .or_insert_with(|| Known { gid: address(next), device: Weak::new() });
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

    /// Returns control over the device `name`; `None` if it is not open.
    #[must_use]
    pub fn control(&self, name: &str) -> Option<DeviceControl> {
        self.0.names.lock().get(name)?.device.upgrade().map(DeviceControl)
    }

    /// Changes the fault model. From then on packets are encoded, also if the network was created
    /// without faults. Over UDP the model applies to packets that the devices of this network send, not to packets that they
    /// receive.
    pub fn set_faults(&self, faults: Faults) {
        self.0.link.lock().faults = faults;
        self.0.encode();
    }

    /// Changes only the probability of loss; see [`set_faults`](Self::set_faults).
    pub fn set_loss(&self, probability: f64) {
        self.0.link.lock().faults.loss = probability;
        self.0.encode();
    }

    /// Returns counters of packets. On a network within the process and without faults they stay 0.
    #[must_use]
    pub fn counters(&self) -> LinkCounters {
        let mut counters = self.0.link.lock().counters;
        for endpoint in self.0.endpoints.values() {
            endpoint.count_into(&mut counters);
        }
        counters
    }

    /// Returns the time since the network was created; virtual if the network is simulated.
    #[must_use]
    pub fn now(&self) -> Duration {
        Duration::from_nanos(self.0.scheduler.now())
    }

    /// Handles the next packet or timer of a simulated network and advances the clock to it. False if there
    /// is none; always false in real time.
    pub fn step(&self) -> bool {
        self.0.scheduler.step(u64::MAX)
    }

    /// Steps until the network is idle, or until `limit` of virtual time has passed. True if the network is idle.
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
    /// Packets are encoded from now on, and pass the fault model.
    fn encode(&self) {
        self.queued.store(true, Ordering::Release);
        self.faulty.store(true, Ordering::Release);
    }

    /// Packets leave by UDP.
    pub(crate) fn is_udp(&self) -> bool {
        !self.endpoints.is_empty()
    }

    /// Packets pass the fault model before they leave.
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

    /// A number that peers cannot predict; from the seed where the network is simulated.
    pub(crate) fn random(&self) -> Result<u64, VerbError> {
        match &self.random {
            Some(seeded) => Ok(seeded.lock().u64(..)),
            None => getrandom::u64().map_err(|error| {
                VerbError::new("getrandom", error.raw_os_error().unwrap_or(VerbError::EIO))
            }),
        }
    }

    /// Puts an encoded packet on the way, through the fault model.
    pub(crate) fn transmit(self: &Arc<Self>, route: (Gid, Gid), mut image: Vec<u8>) {
        match self.endpoints.get(&route.0) {
            Some(endpoint) => endpoint.seal(&mut image, route.1),
            None => packet::seal(&mut image),
        }
        let now = self.scheduler.now();
        let [first, second] = self.link.lock().send(now, route, &mut image);
        if let Some(at) = second {
            let copy = Delivery { network: Arc::downgrade(self), route, image: image.clone() };
            self.scheduler.schedule(at, Job::Deliver(Box::new(copy)));
        }
        if let Some(at) = first {
            let delivery = Delivery { network: Arc::downgrade(self), route, image };
            self.scheduler.schedule(at, Job::Deliver(Box::new(delivery)));
        }
    }
}

impl NetworkInner {
    /// Sends a management datagram (MAD) from the connection manager of `device` to that at `to`: from queue pair 1 to
    /// queue pair 1 (IBTA 13.5.1). May be lost on the way, as any packet.
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

    /// A packet with a valid check arrived at `device`; false if it is for nobody here. It is answered at the end of its
    /// `turn`.
    pub(crate) fn on_packet(
        device: &Arc<DeviceInner>,
        source: Gid,
        packet: &Packet,
        payload: &[u8],
        turn: &mut Turn,
    ) -> bool {
        if packet.transport == Transport::Dci {
            return Self::on_framed(device, source, packet, payload, turn);
        }
        if packet.dest != MANAGEMENT {
            // Initiators of dynamic connections hear their targets only.
            let taken =
                device.queue_pair(packet.dest).filter(|qp| qp.transport() != Transport::Dci);
            let Some(qp) = taken else { return Self::on_early(device, source, packet) };
            let half = qp.on_packet(packet, source, payload);
            turn.next(qp, half);
        } else if let Body::Datagram { qkey: MANAGEMENT_QKEY, imm: None, .. } = packet.body {
            Manager::on_datagram(device, source, payload);
        } else {
            return false;
        }
        true
    }

    /// A packet for a queue pair that is not ready; true if the connection manager has told its number to a peer, who is asked
    /// to wait then.
    #[cold]
    pub(crate) fn on_early(device: &Arc<DeviceInner>, source: Gid, packet: &Packet) -> bool {
        let Some(reply) = Manager::on_early(device, source, packet) else { return false };
        Outbox::new(device).push(&reply, source, &Payload::Bytes(&[]));
        true
    }

    /// The same of a dynamic connection.
    fn on_framed(
        device: &Arc<DeviceInner>,
        source: Gid,
        packet: &Packet,
        payload: &[u8],
        turn: &mut Turn,
    ) -> bool {
        let Ok((header, payload)) = Header::parse(payload) else { return false };
        if packet.body.is_dc_response() {
            let Some(qp) = device.queue_pair(packet.dest) else { return false };
            qp.on_answer((packet, &header), source, payload);
            turn.next(qp, Half::Sender);
        } else {
            let Some(target) = device.target(packet.dest) else { return false };
            target.on_packet((packet, &header), source, payload);
            turn.next_target(target);
        }
        true
    }

    /// A damaged packet was found out.
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
                tracing::trace!(?error, %source, "packet dropped");
                if error == WireError::Checksum {
                    network.reject();
                }
                return;
            }
        };
        tracing::trace!(%source, ?packet, "packet arrived");
        let mut turn = Turn::default();
        NetworkInner::on_packet(&device, source, &packet, payload, &mut turn);
        turn.end();
    }
}

/// Control over a device, for tests of programs that must survive its failure.
#[derive(Debug, Clone)]
pub struct DeviceControl(pub(crate) Arc<DeviceInner>);

impl DeviceControl {
    /// Removes the device: it raises `DEVICE_FATAL`, every queue pair enters ERR and flushes, later verbs fail.
    /// Once all its objects are dropped, opening its name creates a new device.
    pub fn kill(&self) {
        self.0.kill();
    }

    /// Takes the port down or up. While the port is down, packets are lost in both directions.
    pub fn set_port(&self, up: bool) {
        self.0.set_port(up);
    }

    /// Raises `event` at every opening of the device and changes nothing else. An adapter that is unplugged behaves like
    /// this: it raises [`AsyncEvent::DeviceFatal`] and is silent from then on.
    pub fn announce(&self, event: AsyncEvent) {
        self.0.announce(event);
    }

    /// Returns the number of queue pairs that exist.
    #[must_use]
    pub fn queue_pairs(&self) -> usize {
        self.0.queue_pair_count()
    }

    /// Returns the number of connections that the device's connection manager knows, including connections that are not
    /// confirmed yet or in TIMEWAIT.
    #[must_use]
    pub fn connections(&self) -> usize {
        self.0.cm.connections()
    }
}

/// Address of the `index`th device of a network: its own loopback address, from 127.1.0.1 up.
fn address(index: usize) -> Gid {
    const FIRST: u32 = u32::from_be_bytes([127, 1, 0, 1]);
    // 16 million loopback addresses; wrapping around would only make names collide.
    Ipv4Addr::from(FIRST + (index as u32 & 0x00ff_ffff) % 0x00fe_0000).into()
}

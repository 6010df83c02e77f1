//! A device's place on the network: its socket, the thread that receives there, what it counts.

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use parking_lot::{Mutex, RwLock};

use rdma_provider::VerbError;

use crate::UdpError;
use crate::dc::DctInner;
use crate::device::DeviceInner;
use crate::device::pump::Half;
use crate::device::queue_pair::QpInner;
use crate::device::scheduler::Scheduler;
use crate::net::faults::LinkCounters;
use crate::net::network::NetworkInner;
use crate::net::udp::interface::mtu_at;
use crate::roce::packet::Packet;
use rdma_provider::types::{Gid, Mtu};

use super::batch::Batch;
use super::config::UdpConfig;
use super::duty::Duty;
use super::pace::Pace;
use super::peer_link::PeerLink;
use super::socket::{Inbox, Socket};
use crate::roce::icrc::{CHECK, Header};

/// Bytes of a packet of RoCE v2 besides its payload, IPv6 header and all extensions included: what SoftRoCE leaves too.
const OVERHEAD: usize = 80;
/// What every route takes, were nothing known of it.
const SMALLEST_ROUTE: usize = 1280;
/// Batches kept for the next to send.
const SPARE: usize = 8;
/// How long nothing is received after the kernel refused to: it may be out of memory.
const PAUSE: Duration = Duration::from_millis(10);
/// Pauses in which a port that is taken may become free.
const LEAVING: u32 = 10;
/// Times that somebody who waits empties its inbox before it leaves the rest to the thread: what one has to wait for is little,
/// and a runtime's thread is not for more.
const ROUNDS: u32 = 4;

/// See the module.
pub(crate) struct Endpoint {
    socket: Socket,
    /// Dropped after the socket.
    _held: Held,
    config: Arc<UdpConfig>,
    /// Who it is for, while somebody has it open.
    device: RwLock<Weak<DeviceInner>>,
    spare: Mutex<Vec<Batch>>,
    /// Ways to peers, as long as a queue pair has one.
    links: Mutex<HashMap<Gid, Weak<PeerLink>>>,
    pace: Pace,
    /// The kernel cuts messages into datagrams.
    cuts: AtomicBool,
    closed: AtomicBool,
    duty: Duty,
    thread: Mutex<Option<JoinHandle<()>>>,
    counters: Counters,
}

/// Packets, by what became of them.
#[derive(Debug, Default)]
struct Counters {
    sent: AtomicU64,
    /// The kernel did not take them.
    lost: AtomicU64,
    received: AtomicU64,
    /// Their check does not hold.
    rejected: AtomicU64,
    /// From who is not to be listened to, for nobody, or of a kind that is not spoken.
    unwanted: AtomicU64,
}

fn add(counter: &AtomicU64, count: u64) {
    counter.fetch_add(count, Ordering::Relaxed);
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Endpoint").field("local", &self.socket.local()).finish_non_exhaustive()
    }
}

impl Endpoint {
    /// Binds the socket of `address` and begins to receive; `patient`: after waiting a little for the port, if it is taken.
    pub(crate) fn open(
        config: &Arc<UdpConfig>,
        address: IpAddr,
        patient: bool,
    ) -> Result<Arc<Self>, UdpError> {
        let system = |verb, error: &io::Error| UdpError::System {
            address,
            error: VerbError::new(verb, error.raw_os_error().unwrap_or(VerbError::EIO)),
        };
        let port = config.port;
        let local = SocketAddr::new(address, port);
        let bound = if patient { bind(local) } else { Socket::bind(local) };
        let socket = bound.map_err(|error| match error.kind() {
            io::ErrorKind::AddrInUse => {
                let device = Held::device_at(local);
                UdpError::PortTaken {
                    address,
                    port,
                    soft_roce: device.is_none() && soft_roce_has(port),
                    device,
                }
            }
            io::ErrorKind::Unsupported => UdpError::NotLinux,
            io::ErrorKind::AddrNotAvailable => UdpError::NotLocal { address },
            _ => system("bind", &error),
        })?;
        let name = config.devices().find(|&(_, of)| of == address).map_or("", |(name, _)| name);
        let endpoint = Arc::new(Self {
            socket,
            _held: Held::new(local, name),
            config: Arc::clone(config),
            device: RwLock::default(),
            spare: Mutex::default(),
            links: Mutex::default(),
            pace: Pace::default(),
            cuts: AtomicBool::new(true),
            closed: AtomicBool::new(false),
            duty: Duty::new(),
            thread: Mutex::default(),
            counters: Counters::default(),
        });
        let receiver = Arc::clone(&endpoint);
        let thread = thread::Builder::new()
            .name("rdma-soft-udp".into())
            .spawn(move || receiver.work())
            .map_err(|error| system("clone", &error))?;
        *endpoint.thread.lock() = Some(thread);
        Ok(endpoint)
    }

    /// From now on packets are for `device`.
    pub(crate) fn attach(&self, device: &Arc<DeviceInner>) {
        *self.device.write() = Arc::downgrade(device);
    }

    /// Stops receiving and gives the port back.
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::Release);
        self.socket.close();
        let thread = self.thread.lock().take();
        // The receiving thread itself may have dropped the last of the network.
        if let Some(thread) = thread.filter(|handle| handle.thread().id() != thread::current().id())
        {
            thread.thread().unpark();
            // How it ended it has said itself.
            let _ = thread.join();
        }
    }

    /// The way to `peer`, the same for all who ask.
    pub(crate) fn link_to(&self, peer: Gid, scheduler: &Arc<Scheduler>) -> Arc<PeerLink> {
        let mut links = self.links.lock();
        if let Some(link) = links.get(&peer).and_then(Weak::upgrade) {
            return link;
        }
        if links.len() == links.capacity() {
            links.retain(|_, link| link.strong_count() > 0);
        }
        let link = Arc::new(PeerLink::new(scheduler));
        links.insert(peer, Arc::downgrade(&link));
        link
    }

    /// Of packets that nobody acknowledges.
    pub(crate) const fn pace(&self) -> &Pace {
        &self.pace
    }

    /// Its socket holds what Linux gives by default (`net.core.rmem_max` 212992).
    #[cfg(test)]
    pub(crate) fn limit_receive_buffer(&self) {
        self.socket.limit_receive_buffer(212_992).unwrap();
    }

    /// Path MTU of the route to `peer`; fails if there is none.
    pub(crate) fn path_mtu(&self, peer: Gid) -> Result<Mtu, VerbError> {
        let peer = SocketAddr::new(peer.to_ip(), self.config.port);
        let route = self.socket.route_mtu(peer);
        let errno = |error: io::Error| {
            VerbError::new("connect", error.raw_os_error().unwrap_or(VerbError::EIO))
        };
        // A peer on this host is reached over the loopback interface, and takes what its own takes.
        let own = mtu_at(peer.ip()).unwrap_or(usize::MAX);
        route.map(|route| fitting(route.min(own))).map_err(errno)
    }

    /// The MTU of packets that pass everywhere that the address of this device leads: its own interface's.
    pub(crate) fn own_mtu(&self) -> Mtu {
        fitting(mtu_at(self.socket.local().ip()).unwrap_or(SMALLEST_ROUTE))
    }

    /// Room for packets to be sent together.
    pub(super) fn batch(&self) -> Batch {
        self.spare.lock().pop().unwrap_or_else(Batch::new)
    }

    pub(super) fn keep(&self, mut batch: Batch) {
        batch.clear();
        let mut spare = self.spare.lock();
        if spare.len() < SPARE {
            spare.push(batch);
        }
    }

    /// Adds a packet to `batch`; `write` appends all but the check.
    pub(super) fn push(&self, batch: &mut Batch, to: Gid, write: impl FnOnce(&mut Vec<u8>)) {
        let (header, address) = self.header_to(to);
        batch.push(&header, address, self.cuts.load(Ordering::Relaxed), write);
    }

    /// Appends the check of a packet that leaves alone.
    pub(crate) fn seal(&self, image: &mut Vec<u8>, to: Gid) {
        let check = self.header_to(to).0.check(image, 0);
        image.extend_from_slice(&check.to_le_bytes());
    }

    /// True if the check of a packet to `to` holds, or may, see [`Header::verify`].
    #[cfg(test)]
    pub(crate) fn may_hold(&self, image: &[u8], to: Gid) -> bool {
        let Some((covered, check)) = image.split_last_chunk::<CHECK>() else { return false };
        self.header_to(to).0.verify(covered, u32::from_le_bytes(*check))
    }

    /// Sends a packet that has its check, or the wrong one.
    pub(crate) fn send_sealed(&self, image: &[u8], to: Gid) {
        let mut batch = self.batch();
        batch.push_sealed(image, self.header_to(to).1);
        self.send(&mut batch);
        self.keep(batch);
    }

    /// Adds what it has counted.
    pub(crate) fn count_into(&self, counters: &mut LinkCounters) {
        let Counters { sent, lost, received, rejected, unwanted } = &self.counters;
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        counters.sent += get(sent);
        counters.lost += get(lost);
        counters.received += get(received);
        counters.rejected += get(rejected);
        counters.unwanted += get(unwanted);
    }

    fn header_to(&self, to: Gid) -> (Header, SocketAddr) {
        let local = self.socket.local();
        let destination = to.to_ip();
        let header = Header {
            source: local.ip(),
            source_port: local.port(),
            destination,
            destination_port: self.config.port,
        };
        (header, SocketAddr::new(destination, self.config.port))
    }

    /// Sends what is in `batch`. What the kernel refuses is lost, as on any network.
    pub(super) fn send(&self, batch: &mut Batch) {
        if batch.is_empty() {
            return;
        }
        add(&self.counters.sent, batch.len());
        if let Err((lost, error)) = self.socket.send(batch) {
            add(&self.counters.lost, lost);
            // Without checksums by the interface the kernel cannot cut (EIO): from now on each packet goes alone.
            if error.raw_os_error() == Some(VerbError::EIO)
                && self.cuts.swap(false, Ordering::Relaxed)
            {
                tracing::warn!(endpoint = ?self, "the interface does not segment; packets are sent one by one");
            }
            tracing::debug!(endpoint = ?self, %error, lost, "packets not sent");
        }
        batch.clear();
    }

    /// Readable when something has arrived.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.socket.fd()
    }

    /// Receives what has arrived, in place of the thread, unless somebody is at it; true if there was anything. Takes locks
    /// of queue pairs and completion queues, and waits for nothing.
    pub(crate) fn serve(&self) -> bool {
        // Outlives the inbox's lock: the last of a network waits for the thread, which may wait for the lock.
        let device = self.device.read().upgrade();
        let mut any = false;
        for _ in 0..ROUNDS {
            let Some(mut inbox) = self.duty.try_take() else { return any };
            let _deaf = Deaf::new(self);
            if let Err(error) = self.socket.receive(&mut inbox, false) {
                tracing::debug!(endpoint = ?self, %error, "cannot receive; the thread will see");
                return any;
            }
            self.on_inbox(&inbox, device.as_ref());
            if !inbox.is_empty() {
                any = true;
                self.duty.taken();
            }
            let full = inbox.is_full();
            drop(inbox);
            if !full && !self.duty.is_wanted() {
                return any;
            }
        }
        self.leave();
        any
    }

    /// Leaves what comes to the thread.
    pub(crate) fn leave(&self) {
        if self.duty.leave()
            && let Some(thread) = &*self.thread.lock()
        {
            thread.thread().unpark();
        }
    }

    fn on_inbox(&self, inbox: &Inbox, device: Option<&Arc<DeviceInner>>) {
        let mut turn = Turn::default();
        for (source, datagram) in inbox.datagrams() {
            self.on_datagram(device, source, datagram, &mut turn);
        }
        turn.end();
    }

    /// The receiving thread.
    fn work(&self) {
        let _deaf = Deaf::new(self);
        let over = || self.closed.load(Ordering::Acquire);
        while !over() {
            self.receive_until_wanted();
            // What came before the inbox was free nobody else may have noticed.
            if !self.socket.is_readable() {
                self.duty.stand_by(over, || self.socket.is_readable());
            }
        }
    }

    /// The receiving thread: receives until somebody else would.
    fn receive_until_wanted(&self) {
        let mut inbox = self.duty.take();
        let mut failing = false;
        while !self.closed.load(Ordering::Acquire) {
            match self.socket.receive(&mut inbox, true) {
                Ok(()) => {
                    failing = false;
                    let device = self.device.read().upgrade();
                    self.on_inbox(&inbox, device.as_ref());
                    if self.duty.is_wanted() {
                        return;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    if !std::mem::replace(&mut failing, true) {
                        tracing::warn!(endpoint = ?self, %error, "cannot receive; trying again");
                    }
                    thread::sleep(PAUSE);
                }
            }
        }
    }

    fn on_datagram(
        &self,
        device: Option<&Arc<DeviceInner>>,
        source: SocketAddr,
        datagram: &[u8],
        turn: &mut Turn,
    ) {
        add(&self.counters.received, 1);
        let ip = source.ip().to_canonical();
        let (Some((covered, check)), true) =
            (datagram.split_last_chunk::<CHECK>(), self.config.allows(ip))
        else {
            add(&self.counters.unwanted, 1);
            return;
        };
        let local = self.socket.local();
        let header = Header {
            source: ip,
            source_port: source.port(),
            destination: local.ip(),
            destination_port: local.port(),
        };
        if !header.verify(covered, u32::from_le_bytes(*check)) {
            tracing::trace!(%source, "packet with a wrong check dropped");
            add(&self.counters.rejected, 1);
            return;
        }
        let parsed = Packet::parse(covered);
        let (Some(device), Ok((packet, payload))) =
            (device.filter(|device| device.is_linked()), parsed)
        else {
            tracing::trace!(%source, ?parsed, "packet dropped");
            add(&self.counters.unwanted, 1);
            return;
        };
        tracing::trace!(%source, ?packet, "packet arrived");
        if !NetworkInner::on_packet(device, Gid::from(ip), &packet, payload, turn) {
            add(&self.counters.unwanted, 1);
        }
    }
}

/// A device in whose midst the thread that receives has panicked is lost, and says so.
struct Deaf<'a> {
    endpoint: &'a Endpoint,
    /// Of something else: whoever waits may do so in a destructor.
    panicking: bool,
}

impl<'a> Deaf<'a> {
    fn new(endpoint: &'a Endpoint) -> Self {
        Self { endpoint, panicking: thread::panicking() }
    }
}

impl Drop for Deaf<'_> {
    fn drop(&mut self) {
        if thread::panicking() && !self.panicking {
            tracing::error!(endpoint = ?self.endpoint, "panic while receiving");
            if let Some(device) = self.endpoint.device.read().upgrade() {
                device.kill();
            }
        }
    }
}

/// Half of a queue pair, or DC target, whose packets arrive one after the other: it answers once, after the last.
#[derive(Debug, Default)]
pub(crate) struct Turn(Option<Party>);

#[derive(Debug)]
enum Party {
    Pair(Arc<QpInner>, Half),
    Target(Arc<DctInner>),
}

impl Turn {
    /// A packet for `qp` was accepted.
    pub(crate) fn next(&mut self, qp: Arc<QpInner>, half: Half) {
        if !matches!(&self.0, Some(Party::Pair(before, of)) if *of == half && Arc::ptr_eq(before, &qp))
        {
            self.end();
        }
        self.0 = Some(Party::Pair(qp, half));
    }

    /// A packet for a DC target was accepted.
    pub(crate) fn next_target(&mut self, target: Arc<DctInner>) {
        if !matches!(&self.0, Some(Party::Target(before)) if Arc::ptr_eq(before, &target)) {
            self.end();
        }
        self.0 = Some(Party::Target(target));
    }

    pub(crate) fn end(&mut self) {
        match self.0.take() {
            Some(Party::Pair(qp, half)) => qp.answer(half),
            Some(Party::Target(target)) => target.answer(),
            None => {}
        }
    }
}

/// A socket at `local`. That of a network that is gone may be there a moment longer: a thread that was about to hand a packet
/// to its device when the last handle was dropped is what gives it back.
fn bind(local: SocketAddr) -> io::Result<Socket> {
    for _ in 0..LEAVING {
        match Socket::bind(local) {
            Err(error)
                if error.kind() == io::ErrorKind::AddrInUse && !soft_roce_has(local.port()) =>
            {
                thread::sleep(PAUSE);
            }
            result => return result,
        }
    }
    Socket::bind(local)
}

/// The largest MTU whose packets fit.
fn fitting(bytes: usize) -> Mtu {
    let fits = |mtu: &&Mtu| mtu.bytes() + OVERHEAD <= bytes;
    Mtu::ALL.iter().rev().find(fits).copied().unwrap_or(Mtu::Mtu256)
}

/// Addresses of the sockets of this process, with the names of their devices.
static HELD: Mutex<Vec<(SocketAddr, String)>> = Mutex::new(Vec::new());

/// An entry of [`HELD`], from which its drop removes it.
struct Held(SocketAddr);

impl Held {
    fn new(local: SocketAddr, device: &str) -> Self {
        HELD.lock().push((local, device.to_owned()));
        Self(local)
    }

    fn device_at(local: SocketAddr) -> Option<String> {
        HELD.lock().iter().find(|(held, _)| *held == local).map(|(_, device)| device.clone())
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let mut held = HELD.lock();
        if let Some(at) = held.iter().position(|(local, _)| *local == self.0) {
            held.swap_remove(at);
        }
    }
}

/// True if it is the kernel's SoftRoCE that has the port.
fn soft_roce_has(port: u16) -> bool {
    port == UdpConfig::PORT && Path::new("/sys/module/rdma_rxe").exists()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mtu_leaves_room_for_headers() {
        let cases = [
            (65536, 4096),
            (4200, 4096),
            (4175, 2048),
            (1500, 1024),
            (1280, 1024),
            (600, 512),
            (0, 256),
        ];
        for (route, mtu) in cases {
            assert_eq!(fitting(route).bytes(), mtu, "{route}");
        }
    }
}

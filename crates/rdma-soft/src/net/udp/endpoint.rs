//! The socket of a device, its receiving thread and its counters.

use std::collections::HashMap;
use std::fmt;
use std::fs;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rdma_provider::locks::{Mutex, MutexGuard, RwLock};

use rdma_provider::VerbError;

use crate::UdpError;
use crate::net::faults::LinkCounters;
use crate::net::node::{Arrival, Node};
use crate::net::scheduler::Scheduler;
use crate::net::udp::interface::{mtu_at, scope_of};
use crate::roce::ip_fields::{IpFields, Origin};
use crate::roce::packet::Packet;
use rdma_provider::types::{Gid, Mtu};

use super::batch::Batch;
use super::config::UdpConfig;
use super::inbox_lock::InboxLock;
use super::pace::Pace;
use super::peer_link::PeerLink;
use super::socket::{Datagram, Inbox, Socket};
use crate::roce::icrc::{CHECK, Header};

/// Maximum bytes besides the payload: IPv6 header and all extensions, as in SoftRoCE.
const OVERHEAD: usize = 80;
/// MTU assumed if the interface's is unknown.
const SMALLEST_ROUTE: usize = 1280;
/// Maximum batches kept for reuse.
const SPARE: usize = 8;
/// Delay before a retry; the kernel may be out of memory.
pub(super) const RETRY_DELAY: Duration = Duration::from_millis(10);
const BIND_RETRIES: u32 = 10;
/// Maximum receives of a caller before the thread takes over: runtime threads have other work.
const ROUNDS: u32 = 4;

pub(crate) struct Endpoint {
    socket: Socket,
    /// Dropped after the socket.
    _bound_port: BoundPort,
    config: Arc<UdpConfig>,
    /// Receiver of packets, while open.
    node: RwLock<Option<Weak<dyn Node>>>,
    spare: Mutex<Vec<Batch>>,
    links: Mutex<HashMap<Gid, Weak<PeerLink>>>,
    pace: Pace,
    /// The kernel segments messages.
    cuts: AtomicBool,
    closed: AtomicBool,
    inbox: InboxLock,
    thread: Mutex<Option<JoinHandle<()>>>,
    counters: Counters,
}

#[derive(Debug, Default)]
struct Counters {
    sent: AtomicU64,
    /// Refused by the kernel.
    lost: AtomicU64,
    received: AtomicU64,
    /// Wrong ICRC.
    rejected: AtomicU64,
    /// Disallowed source, unknown destination or unsupported kind.
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
    /// Binds `address` and starts to receive; `wait_for_port`: retries while in use.
    pub(crate) fn open(
        config: &Arc<UdpConfig>,
        address: IpAddr,
        wait_for_port: bool,
    ) -> Result<Arc<Self>, UdpError> {
        let system = |verb, error: &io::Error| UdpError::System {
            address,
            error: VerbError::new(verb, error.raw_os_error().unwrap_or(VerbError::EIO)),
        };
        let port = config.port;
        let mut local = SocketAddr::new(address, port);
        if let SocketAddr::V6(local) = &mut local {
            // The socket then sends to link-local addresses of the same interface.
            local.set_scope_id(scope_of(address));
        }
        let bound = if wait_for_port { bind(local) } else { Socket::bind(local) };
        let socket = bound.map_err(|error| match error.kind() {
            io::ErrorKind::AddrInUse => {
                let device = BoundPort::device_at(local);
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
            _bound_port: BoundPort::new(local, name),
            config: Arc::clone(config),
            node: RwLock::default(),
            spare: Mutex::default(),
            links: Mutex::default(),
            pace: Pace::default(),
            cuts: AtomicBool::new(true),
            closed: AtomicBool::new(false),
            inbox: InboxLock::new(),
            thread: Mutex::default(),
            counters: Counters::default(),
        });
        let receiver = Arc::clone(&endpoint);
        let thread = thread::Builder::new()
            .name("rdma-soft-udp".into())
            .spawn(move || receiver.work())
            .map_err(|error| UdpError::System { address, error: VerbError::no_thread(&error) })?;
        *endpoint.thread.lock() = Some(thread);
        Ok(endpoint)
    }

    pub(crate) fn attach(&self, node: Weak<dyn Node>) {
        *self.node.write() = Some(node);
    }

    fn node(&self) -> Option<Arc<dyn Node>> {
        self.node.read().as_ref()?.upgrade()
    }

    /// Stops receiving and releases the port.
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::Release);
        self.socket.close();
        let thread = self.thread.lock().take();
        // The receiving thread itself may drop the last handle.
        if let Some(thread) = thread.filter(|handle| handle.thread().id() != thread::current().id())
        {
            thread.thread().unpark();
            // A panic was already logged.
            let _ = thread.join();
        }
    }

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

    pub(crate) const fn pace(&self) -> &Pace {
        &self.pace
    }

    /// Limits the receive buffer to Linux's default (`net.core.rmem_max` 212992).
    #[cfg(test)]
    pub(crate) fn limit_receive_buffer(&self) {
        self.socket.limit_receive_buffer(212_992).unwrap();
    }

    pub(crate) fn path_mtu(&self, peer: Gid) -> Result<Mtu, VerbError> {
        let peer = SocketAddr::new(peer.to_ip(), self.config.port);
        let route = self.socket.route_mtu(peer);
        let errno = |error: io::Error| {
            VerbError::new("connect", error.raw_os_error().unwrap_or(VerbError::EIO))
        };
        // A peer on this host is reached over loopback, but accepts only its own interface's MTU.
        let own = mtu_at(peer.ip()).unwrap_or(usize::MAX);
        route.map(|route| fitting(route.min(own))).map_err(errno)
    }

    /// Returns the index of the device's interface if its address is link-local, else 0.
    pub(crate) fn scope(&self) -> u32 {
        match self.socket.local() {
            SocketAddr::V6(local) => local.scope_id(),
            SocketAddr::V4(_) => 0,
        }
    }

    /// Returns the MTU of this device's interface.
    pub(crate) fn own_mtu(&self) -> Mtu {
        fitting(mtu_at(self.socket.local().ip()).unwrap_or(SMALLEST_ROUTE))
    }

    pub(crate) fn batch(&self) -> Batch {
        self.spare.lock().pop().unwrap_or_else(Batch::new)
    }

    pub(crate) fn keep(&self, mut batch: Batch) {
        batch.clear();
        let mut spare = self.spare.lock();
        if spare.len() < SPARE {
            spare.push(batch);
        }
    }

    /// Adds a packet; `write` appends all but the ICRC.
    pub(crate) fn push(
        &self,
        batch: &mut Batch,
        (to, ip_fields): (Gid, IpFields),
        write: impl FnOnce(&mut Vec<u8>),
    ) {
        let (header, address) = self.header_to(to);
        batch.push(&header, (address, ip_fields), self.cuts.load(Ordering::Relaxed), write);
    }

    /// Appends the ICRC of a single packet.
    pub(crate) fn seal(&self, image: &mut Vec<u8>, to: Gid) {
        let check = self.header_to(to).0.check(image, 0);
        image.extend_from_slice(&check.to_le_bytes());
    }

    /// Returns true if the ICRC may be correct, see [`Header::verify`].
    pub(crate) fn may_hold(&self, image: &[u8], to: Gid) -> bool {
        let Some((covered, check)) = image.split_last_chunk::<CHECK>() else { return false };
        self.header_to(to).0.verify(covered, u32::from_le_bytes(*check), 0)
    }

    /// Sends a packet with its ICRC, right or wrong.
    pub(crate) fn send_sealed(&self, image: &[u8], (to, ip_fields): (Gid, IpFields)) {
        let mut batch = self.batch();
        batch.push_sealed(image, (self.header_to(to).1, ip_fields));
        self.send(&mut batch);
        self.keep(batch);
    }

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

    /// Sends `batch`; refused packets are lost, as on any network.
    pub(crate) fn send(&self, batch: &mut Batch) {
        if batch.is_empty() {
            return;
        }
        add(&self.counters.sent, batch.len());
        if let Err((lost, error)) = self.socket.send(batch) {
            add(&self.counters.lost, lost);
            // Without checksum offload the kernel cannot segment (EIO): send single packets from
            // now on.
            if error.raw_os_error() == Some(VerbError::EIO)
                && self.cuts.swap(false, Ordering::Relaxed)
            {
                rdma_provider::warn!(
                    endpoint = ?self,
                    "failed to send segmented messages; sending packets one by one from now on"
                );
            }
            rdma_provider::debug!(
                endpoint = ?self,
                %error,
                lost,
                "failed to send packets; dropped them"
            );
        }
        batch.clear();
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.socket.fd()
    }

    /// Receives packets unless another thread does; returns true if any arrived. Locks queue pairs
    /// and completion queues, but does not block.
    pub(crate) fn process_packets(&self) -> bool {
        // Outlives the inbox lock: dropping a network joins the thread, which may wait for the
        // lock.
        let node = self.node();
        let mut any = false;
        for _ in 0..ROUNDS {
            let Some(mut inbox) = self.inbox.try_lock() else { return any };
            let _guard = PanicGuard::new(self);
            if let Err(error) = self.socket.receive(&mut inbox, false) {
                rdma_provider::debug!(
                    endpoint = ?self,
                    %error,
                    "failed to receive packets; leaving them to the device's thread"
                );
                return any;
            }
            self.on_inbox(&inbox, node.as_ref());
            if !inbox.is_empty() {
                any = true;
                self.inbox.note_received();
            }
            let full = inbox.is_full();
            drop(inbox);
            if !full && !self.inbox.is_wanted() {
                return any;
            }
        }
        self.stop_processing();
        any
    }

    /// Leaves reception to the thread.
    pub(crate) fn stop_processing(&self) {
        if self.inbox.stop_processing()
            && let Some(thread) = &*self.thread.lock()
        {
            thread.thread().unpark();
        }
    }

    pub(super) const fn local(&self) -> SocketAddr {
        self.socket.local()
    }

    /// Processes packets to the multicast group `group`.
    pub(super) fn on_group_inbox(&self, inbox: &Inbox, group: SocketAddr) {
        let datagrams = inbox.datagrams();
        let mut packets = datagrams.filter_map(|datagram| self.check_datagram(datagram, group));
        let unwanted = match self.node() {
            Some(node) => node.receive_multicast(Gid::from(group.ip()), &mut packets),
            None => packets.count(),
        };
        add(&self.counters.unwanted, unwanted as u64);
    }

    fn on_inbox(&self, inbox: &Inbox, node: Option<&Arc<dyn Node>>) {
        let local = self.socket.local();
        let datagrams = inbox.datagrams();
        let mut packets = datagrams.filter_map(|datagram| self.check_datagram(datagram, local));
        let unwanted = match node {
            Some(node) => Arc::clone(node).receive(&mut packets),
            None => packets.count(),
        };
        add(&self.counters.unwanted, unwanted as u64);
        if let Some(node) = node {
            inbox.refusals().for_each(|(to, packet)| on_refusal(node, to, packet));
        }
    }

    fn work(&self) {
        let _guard = PanicGuard::new(self);
        let closed = || self.closed.load(Ordering::Acquire);
        while !closed() {
            self.receive_until_wanted();
            // Callers may have missed packets that arrived while the inbox was locked.
            if !self.socket.is_readable() {
                self.inbox.stand_by(closed, || self.socket.is_readable());
            }
        }
    }

    /// Receives until a caller wants to.
    fn receive_until_wanted(&self) {
        let mut inbox = self.inbox.lock();
        let mut failing = false;
        while !self.closed.load(Ordering::Acquire) {
            MutexGuard::run_later(&mut inbox);
            match self.socket.receive(&mut inbox, true) {
                Ok(()) => {
                    failing = false;
                    self.on_inbox(&inbox, self.node().as_ref());
                    if self.inbox.is_wanted() {
                        return;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    if !std::mem::replace(&mut failing, true) {
                        rdma_provider::warn!(
                            endpoint = ?self,
                            %error,
                            "failed to receive packets; retrying"
                        );
                    }
                    thread::sleep(RETRY_DELAY);
                }
            }
        }
    }

    /// Counts a datagram, and returns its packet if it is allowed and intact.
    fn check_datagram<'a>(
        &self,
        datagram: Datagram<'a>,
        destination: SocketAddr,
    ) -> Option<Arrival<'a>> {
        let Datagram { source, ip_fields, segment, bytes } = datagram;
        add(&self.counters.received, 1);
        let ip = source.ip().to_canonical();
        let (Some((covered, check)), true) =
            (bytes.split_last_chunk::<CHECK>(), self.config.allows(ip))
        else {
            add(&self.counters.unwanted, 1);
            return None;
        };
        let header = Header {
            source: ip,
            source_port: source.port(),
            destination: destination.ip(),
            destination_port: destination.port(),
        };
        if !header.verify(covered, u32::from_le_bytes(*check), segment) {
            rdma_provider::trace!(%source, "packet with a wrong ICRC dropped");
            add(&self.counters.rejected, 1);
            return None;
        }
        let parsed = Packet::parse(covered);
        rdma_provider::trace!(%source, ?parsed, "packet arrived");
        let Ok((packet, payload)) = parsed else {
            add(&self.counters.unwanted, 1);
            return None;
        };
        Some((Origin { gid: Gid::from(ip), ip_fields }, packet, payload))
    }
}

/// Ends a connection request to a host at which no process has the port.
fn on_refusal(node: &Arc<dyn Node>, to: SocketAddr, packet: &[u8]) {
    rdma_provider::trace!(%to, "port is closed");
    if let Some((covered, _)) = packet.split_last_chunk::<CHECK>()
        && let Ok((_, payload)) = Packet::parse(covered)
    {
        Arc::clone(node).on_refusal(Gid::from(to.ip().to_canonical()), payload);
    }
}

/// A guard that kills the device when receiving panics.
pub(super) struct PanicGuard<'a> {
    endpoint: &'a Endpoint,
    /// Panicking before: callers may be in destructors.
    panicking: bool,
}

impl<'a> PanicGuard<'a> {
    pub(super) fn new(endpoint: &'a Endpoint) -> Self {
        Self { endpoint, panicking: thread::panicking() }
    }
}

impl Drop for PanicGuard<'_> {
    fn drop(&mut self) {
        if thread::panicking() && !self.panicking {
            rdma_provider::error!(
                endpoint = ?self.endpoint,
                "panicked while processing packets; the device is lost"
            );
            if let Some(node) = self.endpoint.node() {
                node.kill();
            }
        }
    }
}

/// Binds a socket, with retries: after a network is dropped, a thread that processes a packet may
/// still hold its socket.
fn bind(local: SocketAddr) -> io::Result<Socket> {
    for _ in 0..BIND_RETRIES {
        match Socket::bind(local) {
            Err(error)
                if error.kind() == io::ErrorKind::AddrInUse && !soft_roce_has(local.port()) =>
            {
                thread::sleep(RETRY_DELAY);
            }
            result => return result,
        }
    }
    Socket::bind(local)
}

/// Returns the largest MTU whose packets fit.
fn fitting(bytes: usize) -> Mtu {
    let fits = |mtu: &&Mtu| mtu.bytes() + OVERHEAD <= bytes;
    Mtu::ALL.iter().rev().find(fits).copied().unwrap_or(Mtu::Mtu256)
}

/// Bound addresses of this process, with device names.
static BOUND_PORTS: Mutex<Vec<(SocketAddr, String)>> = Mutex::new(Vec::new());

struct BoundPort(SocketAddr);

impl BoundPort {
    fn new(local: SocketAddr, device: &str) -> Self {
        BOUND_PORTS.lock().push((local, device.to_owned()));
        Self(local)
    }

    fn device_at(local: SocketAddr) -> Option<String> {
        BOUND_PORTS.lock().iter().find(|(held, _)| *held == local).map(|(_, device)| device.clone())
    }
}

impl Drop for BoundPort {
    fn drop(&mut self) {
        let mut held = BOUND_PORTS.lock();
        if let Some(at) = held.iter().position(|(local, _)| *local == self.0) {
            held.swap_remove(at);
        }
    }
}

/// Returns true if the kernel's SoftRoCE probably has the port: its module is loaded, and a socket
/// has the port at all addresses.
fn soft_roce_has(port: u16) -> bool {
    let is_bound = |table| {
        fs::read_to_string(table).is_ok_and(|table: String| is_bound_everywhere(&table, port))
    };
    port == UdpConfig::PORT
        && Path::new("/sys/module/rdma_rxe").exists()
        && ["/proc/net/udp", "/proc/net/udp6"].into_iter().any(is_bound)
}

/// Returns true if a socket of the kernel's table, see `proc_net(5)`, has `port` at all addresses.
fn is_bound_everywhere(table: &str, port: u16) -> bool {
    table.lines().filter_map(|line| line.split_whitespace().nth(1)?.split_once(':')).any(
        |(address, bound)| {
            address.bytes().all(|digit| digit == b'0') && u16::from_str_radix(bound, 16) == Ok(port)
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_socket_at_all_addresses_may_be_that_of_the_kernel() {
        const HEADER: &str =
            "   sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid";
        let has = |entry: &str| is_bound_everywhere(&format!("{HEADER}\n{entry}\n"), 4791);
        assert!(has(
            "  315: 00000000:12B7 00000000:0000 07 00000000:00000000 00:00000000 00000000"
        ));
        assert!(has("  315: 00000000000000000000000000000000:12B7 0000000000000000:0000 07"));
        assert!(!has("  315: 0100007F:12B7 00000000:0000 07 00000000:00000000 00:00000000 0000"));
        assert!(!has("  315: 00000000:12B8 00000000:0000 07 00000000:00000000 00:00000000 0000"));
        assert!(!has(""));
    }

    #[test]
    fn path_mtu_leaves_space_for_headers() {
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

//! Event channels and ids: the CM contract on top of the device's [`agent`].

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Weak};
use std::time::Duration;

use rdma_provider::locks::Mutex;

use rdma_provider::VerbError;
use rdma_provider::cm_contract::{
    self, Admit, CmAnswer, CmDatagram, CmEvent, CmEventKind, CmParams, CmRoute,
};
use rdma_provider::types::{Access, AddressVector, Gid, Mtu, Psn, Qkey, QpAttr, QpState, Qpn};

use super::super::Soft;
use super::super::device::DeviceInner;
use super::super::device::completion_channel::{Mailbox, os_error};
use super::super::net::node::PORT;
use super::agent;
use super::machine::Destination;
use super::manager::Events;
use super::message::CommId;
use crate::net::ports::{Ports, canonical};

/// An event channel, see [`cm_contract::CmChannel`].
#[derive(Debug)]
pub struct CmChannel {
    device: Arc<DeviceInner>,
    events: Arc<Events>,
}

impl CmChannel {
    pub(crate) fn new(device: &Arc<DeviceInner>) -> Result<Self, VerbError> {
        const VERB: &str = "rdma_create_event_channel";
        device.check_alive(VERB)?;
        let events = Mailbox::new().map_err(|error| os_error(VERB, &error))?;
        Ok(Self { device: Arc::clone(device), events: Arc::new(events) })
    }
}

impl cm_contract::CmChannel<Soft> for CmChannel {
    fn fd(&self) -> BorrowedFd<'_> {
        self.events.fd()
    }

    fn may_block(&self) -> bool {
        false
    }

    fn port_space(&self) -> usize {
        Arc::as_ptr(&self.device.network).addr()
    }

    fn take_event(&self) -> Result<Option<CmEvent<Soft>>, VerbError> {
        Ok(self.events.pop())
    }

    fn create_id(&self) -> Result<CmId, VerbError> {
        self.device.check_alive("rdma_create_id")?;
        let key = agent::with(&self.device, |state, _| state.new_key(&self.events));
        Ok(CmId::new(&self.device, &self.events, key, Known::default()))
    }

    fn create_datagram_id(&self) -> Result<CmId, VerbError> {
        self.create_id().map(CmId::of_datagrams)
    }
}

/// A listener or a connection, see [`cm_contract::CmId`].
#[derive(Debug)]
pub struct CmId {
    device: Arc<DeviceInner>,
    /// Weak because events in the channel own ids.
    channel: Weak<Events>,
    key: u64,
    /// Boxed: events that own ids are moved.
    known: Box<Mutex<Known>>,
}

#[derive(Debug, Default)]
struct Known {
    /// The id is of port space UDP.
    datagrams: bool,
    role: Role,
    local: Option<SocketAddr>,
    peer: Option<SocketAddr>,
    destination: Option<Gid>,
    mtu: Option<Mtu>,
    claim: Option<(u16, u64)>,
    /// The queue pair number in the REP, if the queue pair is not created yet.
    reserved: Option<Qpn>,
    /// Set by accept and establish.
    may_disconnect: bool,
}

#[derive(Debug, Default, Clone, Copy)]
enum Role {
    #[default]
    New,
    Resolved,
    Routed,
    Listener,
    Connection(CommId),
    /// Member of a multicast group.
    Member,
}

const fn invalid(verb: &'static str) -> VerbError {
    VerbError::new(verb, VerbError::EINVAL)
}

impl CmId {
    fn new(device: &Arc<DeviceInner>, channel: &Arc<Events>, key: u64, known: Known) -> Self {
        Self {
            device: Arc::clone(device),
            channel: Arc::downgrade(channel),
            key,
            known: Box::new(Mutex::new(known)),
        }
    }

    pub(super) fn from_request(
        device: &Arc<DeviceInner>,
        channel: &Arc<Events>,
        key: u64,
        connection: CommId,
        (local, peer): (SocketAddr, SocketAddr),
        (destination, mtu): (Gid, Mtu),
        reserved: Option<Qpn>,
    ) -> Self {
        let known = Known {
            role: Role::Connection(connection),
            local: Some(local),
            peer: Some(peer),
            destination: Some(destination),
            mtu: Some(mtu),
            reserved,
            // The peer considers the connection established.
            may_disconnect: reserved.is_some(),
            ..Known::default()
        };
        Self::new(device, channel, key, known)
    }

    /// Makes it an id of port space UDP.
    pub(super) fn of_datagrams(mut self) -> Self {
        self.known.get_mut().datagrams = true;
        self
    }

    /// Returns the index of the connection's partition, which the active side chooses.
    fn pkey_index(&self) -> Option<u16> {
        let Role::Connection(connection) = self.known.lock().role else { return None };
        let pkey =
            agent::with(&self.device, |state, _| Some(state.machine.connection(connection)?.pkey));
        self.device.pkeys.find(pkey?)
    }

    fn raise(&self, kind: CmEventKind<Soft>) {
        if let Some(channel) = self.channel.upgrade() {
            channel.push(CmEvent { key: self.key, kind });
        }
    }

    fn connection(&self, verb: &'static str) -> Result<CommId, VerbError> {
        self.device.check_alive(verb)?;
        match self.known.lock().role {
            Role::Connection(connection) => Ok(connection),
            _ => Err(invalid(verb)),
        }
    }

    /// Returns the bound ports of the id's port space.
    fn ports(&self, datagrams: bool) -> &Mutex<Ports> {
        let network = &self.device.network;
        if datagrams { &network.datagram_ports } else { &network.ports }
    }

    fn claim(&self, known: &mut Known, address: SocketAddr) -> Result<(), VerbError> {
        let ip = address.ip();
        if !ip.is_unspecified() && !self.is_shared(ip) && Gid::from(ip) != self.device.gid {
            return Err(VerbError::new("rdma_bind_addr", VerbError::EADDRNOTAVAIL));
        }
        let claim = self.ports(known.datagrams).lock().claim(address, self.device.gid)?;
        known.local = Some(SocketAddr::new(ip, claim.0));
        known.claim = Some(claim);
        Ok(())
    }

    /// Returns true for a link-local address with the index of another interface than the device's.
    fn is_of_another_link(&self, address: SocketAddr) -> bool {
        matches!(address, SocketAddr::V6(v6) if v6.ip().is_unicast_link_local()
            && v6.scope_id() != 0 && v6.scope_id() != self.device.scope())
    }

    /// Adds the index of the device's interface to a link-local address.
    fn with_scope(&self, mut address: SocketAddr) -> SocketAddr {
        if let SocketAddr::V6(v6) = &mut address
            && v6.ip().is_unicast_link_local()
        {
            v6.set_scope_id(self.device.scope());
        }
        address
    }

    /// Returns true for loopback addresses within a process, which all devices share. Over UDP each
    /// address belongs to one device.
    fn is_shared(&self, ip: IpAddr) -> bool {
        !self.device.network.is_udp() && is_loopback(ip)
    }

    /// Returns the device at `address` and the path MTU, or an `errno(3)` value.
    fn locate(&self, datagrams: bool, address: SocketAddr) -> Result<(Gid, Mtu), i32> {
        /// `EHOSTUNREACH` of `errno(3)`.
        const UNREACHABLE: i32 = 113;
        let (network, own) = (&self.device.network, self.device.gid);
        let gid = if self.is_shared(address.ip()) {
            // Without a listener, this device rejects the request itself.
            self.ports(datagrams).lock().listener(address).unwrap_or(own)
        } else {
            Gid::from(address.ip())
        };
        // Over UDP only an answer shows whether the address has a device.
        if !network.is_udp() && gid != own && network.node(gid).is_none() {
            return Err(UNREACHABLE);
        }
        Ok((gid, self.device.path_mtu(gid).map_err(|error| error.errno)?))
    }
}

impl cm_contract::CmId for CmId {
    fn key(&self) -> u64 {
        self.key
    }

    fn bind(&self, address: SocketAddr) -> Result<(), VerbError> {
        const VERB: &str = "rdma_bind_addr";
        self.device.check_alive(VERB)?;
        let mut known = self.known.lock();
        if known.claim.is_some() || !matches!(known.role, Role::New) {
            return Err(invalid(VERB));
        }
        if self.is_of_another_link(address) {
            return Err(VerbError::new(VERB, VerbError::EADDRNOTAVAIL));
        }
        self.claim(&mut known, canonical(address))
    }

    fn listen(&self, backlog: u32) -> Result<(), VerbError> {
        const VERB: &str = "rdma_listen";
        self.device.check_alive(VERB)?;
        let mut known = self.known.lock();
        let (Some(local), Some((port, claim)), Role::New) = (known.local, known.claim, known.role)
        else {
            return Err(invalid(VERB));
        };
        known.role = Role::Listener;
        agent::with(&self.device, |state, _| {
            if known.datagrams {
                state.machine.serve(self.key, local, backlog);
            } else {
                state.machine.listen(self.key, local, backlog);
            }
        });
        self.ports(known.datagrams).lock().listen(port, claim);
        Ok(())
    }

    fn answer(&self, admit: Arc<dyn Admit>) -> bool {
        agent::with(&self.device, |state, _| state.machine.answer(self.key, admit))
    }

    fn answer_late(&self, answer: &CmAnswer) -> bool {
        let mut known = self.known.lock();
        let Role::Connection(connection) = known.role else { return false };
        let taken = agent::with(&self.device, |state, now| {
            state.answer_late(now, connection, self.key, answer, || {
                self.device.reserve_number().ok()
            })
        });
        if taken {
            known.role = Role::New;
        }
        taken
    }

    fn reserved(&self) -> Option<Qpn> {
        self.known.lock().reserved
    }

    fn resolve_addr(
        &self,
        source: Option<SocketAddr>,
        destination: SocketAddr,
        _: Duration,
    ) -> Result<(), VerbError> {
        const VERB: &str = "rdma_resolve_addr";
        /// `EAFNOSUPPORT` of `errno(3)`.
        const OTHER_FAMILY: i32 = 97;
        /// `ENETUNREACH` of `errno(3)`.
        const OTHER_LINK: i32 = 101;
        self.device.check_alive(VERB)?;
        let mut known = self.known.lock();
        let bound = known.claim.is_some();
        if !matches!(known.role, Role::New) || (bound && source.is_some()) {
            return Err(invalid(VERB));
        }
        if self.is_of_another_link(destination) {
            drop(known);
            self.raise(CmEventKind::AddressError(OTHER_LINK));
            return Ok(());
        }
        let (own, udp) = (self.device.gid.to_ip(), self.device.network.is_udp());
        let destination = canonical(destination);
        let destination = match destination.ip() {
            // Over UDP the host's address is the device's.
            ip if ip.is_unspecified() && udp => SocketAddr::new(own, destination.port()),
            IpAddr::V4(Ipv4Addr::UNSPECIFIED) => {
                SocketAddr::new(Ipv4Addr::LOCALHOST.into(), destination.port())
            }
            IpAddr::V6(Ipv6Addr::UNSPECIFIED) => {
                SocketAddr::new(Ipv6Addr::LOCALHOST.into(), destination.port())
            }
            _ => destination,
        };
        let nearest = if self.is_shared(destination.ip()) { destination.ip() } else { own };
        if let Some(source) = source
            && self.is_of_another_link(source)
        {
            return Err(VerbError::new(VERB, VerbError::EADDRNOTAVAIL));
        }
        let wish = source.map(canonical).or(known.local);
        let source = wish.unwrap_or(SocketAddr::new(nearest, 0));
        let from = if source.ip().is_unspecified() { nearest } else { source.ip() };
        if from.is_ipv4() != destination.is_ipv4() {
            if wish.is_none() && udp {
                // The device has one address; another device of the host may have a suitable one.
                drop(known);
                self.raise(CmEventKind::AddressError(OTHER_FAMILY));
                return Ok(());
            }
            return Err(invalid(VERB));
        }
        if bound {
            known.local = Some(SocketAddr::new(from, source.port()));
        } else {
            self.claim(&mut known, SocketAddr::new(from, source.port()))?;
        }
        known.peer = Some(destination);
        let (gid, mtu) = match self.locate(known.datagrams, destination) {
            Ok(found) => found,
            Err(errno) => {
                drop(known);
                self.raise(CmEventKind::AddressError(errno));
                return Ok(());
            }
        };
        known.destination = Some(gid);
        known.mtu = Some(mtu);
        known.role = Role::Resolved;
        drop(known);
        self.raise(CmEventKind::AddressResolved);
        Ok(())
    }

    fn resolve_route(&self, _: Duration) -> Result<(), VerbError> {
        const VERB: &str = "rdma_resolve_route";
        self.device.check_alive(VERB)?;
        let mut known = self.known.lock();
        if !matches!(known.role, Role::Resolved) {
            return Err(invalid(VERB));
        }
        known.role = Role::Routed;
        drop(known);
        self.raise(CmEventKind::RouteResolved);
        Ok(())
    }

    fn connect(&self, params: &CmParams<'_>) -> Result<(), VerbError> {
        const VERB: &str = "rdma_connect";
        self.device.check_alive(VERB)?;
        let asking = self.device.queue_pair(params.qpn);
        let pkey = asking.map_or(self.device.pkeys.first(), |qp| qp.pkey());
        let mut known = self.known.lock();
        let (Role::Routed, Some(gid), Some(mtu), Some(local), Some(peer)) =
            (known.role, known.destination, known.mtu, known.local, known.peer)
        else {
            return Err(invalid(VERB));
        };
        let psn = Psn::new(self.device.network.random()? as u32);
        let connection = agent::with(&self.device, |state, now| {
            let to = Destination { gid, local, peer, mtu, pkey };
            let connection = if known.datagrams {
                state.machine.query(now, to, params)?
            } else {
                state.machine.connect(now, to, params, psn)?
            };
            state.add(connection, self.key);
            Ok(connection)
        })?;
        known.role = Role::Connection(connection);
        Ok(())
    }

    fn accept(&self, params: &CmParams<'_>) -> Result<(), VerbError> {
        let connection = self.connection("rdma_accept")?;
        if self.known.lock().datagrams {
            let queue_pair = (params.qpn, Qkey::RDMA_UDP);
            return agent::with(&self.device, |state, _| {
                state.machine.answer_query(connection, queue_pair, params.private_data)
            });
        }
        if let Some(qp) = self.device.queue_pair(params.qpn) {
            // Set before the REP is sent, so before the first packet can arrive.
            qp.receiver.lock().unconfirmed = Some(connection);
        }
        agent::with(&self.device, |state, now| state.machine.accept(now, connection, params))?;
        self.known.lock().may_disconnect = true;
        Ok(())
    }

    fn reject(&self, private_data: &[u8]) -> Result<(), VerbError> {
        let connection = self.connection("rdma_reject")?;
        if self.known.lock().datagrams {
            let refused =
                agent::with(&self.device, |state, _| state.machine.refuse_query(connection));
            return if refused { Ok(()) } else { Err(invalid("rdma_reject")) };
        }
        agent::with(&self.device, |state, now| state.machine.reject(now, connection, private_data))
    }

    fn establish(&self) -> Result<(), VerbError> {
        let connection = self.connection("rdma_establish")?;
        agent::with(&self.device, |state, _| state.machine.establish(connection))?;
        self.known.lock().may_disconnect = true;
        Ok(())
    }

    fn disconnect(&self) -> Result<(), VerbError> {
        let connection = self.connection("rdma_disconnect")?;
        let may_disconnect = self.known.lock().may_disconnect;
        agent::with(&self.device, |state, now| {
            if may_disconnect && state.machine.connection(connection).is_none() {
                return Ok(());
            }
            state.machine.disconnect(now, connection)
        })
    }

    fn join_multicast(&self, group: IpAddr) -> Result<(), VerbError> {
        const VERB: &str = "rdma_join_multicast";
        self.device.check_alive(VERB)?;
        let mut known = self.known.lock();
        let bound = known.datagrams && known.claim.is_some() && matches!(known.role, Role::New);
        if !bound || !group.is_multicast() {
            return Err(invalid(VERB));
        }
        // The device joins the IP group when a queue pair is attached.
        let gid = Gid::from(group);
        (known.role, known.destination) = (Role::Member, Some(gid));
        drop(known);
        self.raise(CmEventKind::Joined(CmDatagram {
            address: AddressVector::new(PORT, 0, gid),
            qpn: Qpn::MULTICAST,
            qkey: Qkey::RDMA_UDP,
        }));
        Ok(())
    }

    fn qp_attr(&self, state: QpState) -> Result<QpAttr, VerbError> {
        const VERB: &str = "rdma_init_qp_attr";
        self.device.check_alive(VERB)?;
        if state == QpState::Init {
            self.route().ok_or(invalid(VERB))?;
            return Ok(QpAttr {
                pkey_index: self.pkey_index(),
                port: Some(PORT),
                access: Some(Access::REMOTE_ALL),
                ..QpAttr::to_state(QpState::Init)
            });
        }
        let connection = self.connection(VERB)?;
        let attr =
            agent::with(&self.device, |all, _| all.machine.connection(connection)?.qp_attr(state));
        attr.ok_or(invalid(VERB))
    }

    fn local_addr(&self) -> Option<SocketAddr> {
        self.known.lock().local.map(|address| self.with_scope(address))
    }

    fn peer_addr(&self) -> Option<SocketAddr> {
        self.known.lock().peer.map(|address| self.with_scope(address))
    }

    fn route(&self) -> Option<CmRoute<'_>> {
        let known = self.known.lock();
        Some(CmRoute {
            device: self.device.attr().name.as_str().into(),
            port: PORT,
            source: self.device.gid,
            destination: known.destination?,
            mtu: known.mtu,
        })
    }
}

impl Drop for CmId {
    fn drop(&mut self) {
        let (key, role, claim, datagrams) = {
            let known = self.known.get_mut();
            (self.key, known.role, known.claim, known.datagrams)
        };
        if let Some((port, claim)) = claim {
            self.ports(datagrams).lock().release(port, claim);
        }
        agent::with(&self.device, |state, now| match role {
            Role::Connection(connection) => state.release(now, connection, key),
            Role::Listener | Role::New | Role::Resolved | Role::Routed | Role::Member => {
                state.forget(key);
            }
        });
    }
}

fn is_loopback(ip: IpAddr) -> bool {
    ip == IpAddr::V4(Ipv4Addr::LOCALHOST) || ip == IpAddr::V6(Ipv6Addr::LOCALHOST)
}

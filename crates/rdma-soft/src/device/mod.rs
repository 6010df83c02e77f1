//! The software device: its objects, and the transfer of packets between them.
//!
//! `queue_pair`, `dct`, `completion_queue` and `shared_receive_queue` have the state of objects;
//! `pump` and `dc_pump` move packets between the state machines of queue pairs and targets. To its
//! network the device is a `node`. The handles of the objects are in `verbs`.
//!
//! # Lock order
//!
//! 1. The requester half of one queue pair.
//! 2. The responder half of one queue pair, or a DC target.
//! 3. One of completion queue, shared receive queue, channel, windows, scheduler.
//!
//! Actions that need another order, such as failing a second queue pair, go to a [`Deferred`] list
//! and run when no lock is held.

pub(crate) mod completion_channel;
pub(crate) mod completion_queue;
mod control;
mod dc_pump;
pub(crate) mod dct;
pub(crate) mod deferred;
pub(crate) mod dma_buf;
pub(crate) mod events;
mod groups;
mod multicast;
mod node;
mod numbers;
pub(crate) mod outbox;
mod pd_numbers;
mod pkeys;
mod port_counters;
pub(crate) mod pump;
pub(crate) mod queue_pair;
mod refusals;
pub(crate) mod shared_receive_queue;

use std::any::Any;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::{fmt, io};

use rdma_provider::locks::{Mutex, RwLock};

pub use self::completion_channel::Channel;
pub use self::completion_queue::CqCounters;
use self::completion_queue::CqInner;
pub use self::control::DeviceControl;
use self::dct::DctInner;
use self::deferred::Deferred;
use self::events::Events;
use self::groups::{Groups, MAX_GROUPS, MAX_MEMBERS};
use self::numbers::Numbers;
use self::pd_numbers::{MAX_PDS, PdNumbers};
use self::pkeys::Pkeys;
use self::port_counters::PortCounters;
use self::queue_pair::QpInner;
use self::refusals::Refusals;
use super::cm::Manager;
use super::memory::keys::{Keys, MAX_REGISTRATIONS};
use super::net::network::NetworkInner;
use super::net::node::PORT;
use super::net::udp::Endpoint;
use super::roce::requester::SendCounters;
use super::roce::responder::ReceiveCounters;
use rdma_provider::VerbError;
use rdma_provider::types::{
    AsyncEvent, AtomicCapability, ClockAttr, DcAttr, DeviceAttr, Gid, Mtu, PortState, Psn, Qpn,
};

/// Limited by the address space only.
pub(super) const MAX_MR_SIZE: u64 = 1 << 47;

pub(super) struct DeviceInner {
    pub(super) gid: Gid,
    pub(super) network: Arc<NetworkInner>,
    pub(super) mtu: Mtu,
    endpoint: Option<Arc<Endpoint>>,
    pub(super) keys: Keys,
    pub(super) cm: Manager,
    attr: DeviceAttr,
    numbers: Numbers,
    queue_pairs: RwLock<BTreeMap<Qpn, Weak<QpInner>>>,
    /// The counters of destroyed queue pairs. Locked after `queue_pairs`.
    past: Mutex<PortCounters>,
    /// DC targets, in the number space of queue pairs. Locked after `queue_pairs`.
    targets: RwLock<BTreeMap<Qpn, Weak<DctInner>>>,
    /// Numbers sent to peers by the connection manager, for queue pairs created on confirmation.
    /// Locked after `targets`.
    reserved: Mutex<BTreeSet<Qpn>>,
    /// By number.
    completion_queues: Mutex<BTreeMap<u64, Weak<CqInner>>>,
    /// Of each context.
    events: Mutex<Vec<Weak<Events>>>,
    next_id: AtomicU64,
    pub(super) pd_numbers: Mutex<PdNumbers>,
    management_psn: AtomicU32,
    dead: AtomicBool,
    port_up: AtomicBool,
    /// Alive and port up, as one flag for the hot path.
    linked: AtomicBool,
    pub(super) refusals: Refusals,
    pub(super) pkeys: Pkeys,
    /// Not locked together with another field.
    pub(super) groups: Groups<QpInner>,
}

impl fmt::Debug for DeviceInner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device")
            .field("name", &self.attr.name)
            .field("gid", &self.gid)
            .field("linked", &self.is_linked())
            .finish_non_exhaustive()
    }
}

impl DeviceInner {
    /// Creates the device at `gid` of `network`.
    pub(super) fn new(
        name: &str,
        gid: Gid,
        network: &Arc<NetworkInner>,
    ) -> Result<Arc<Self>, VerbError> {
        let endpoint = network.endpoint(gid).cloned();
        let mut attr = DeviceAttr::named(name);
        // Locally administered, derived from the address.
        attr.guid = 0x0200_5eff_fe00_0000
            | u64::from(u32::from_be_bytes([0, gid.0[13], gid.0[14], gid.0[15]]));
        attr.firmware = env!("CARGO_PKG_VERSION").to_owned();
        attr.ports = 1;
        attr.max_qp = 1 << 20;
        attr.max_qp_wr = 16384;
        attr.max_sge = 16;
        attr.max_read_sge = attr.max_sge;
        attr.max_inline = 256;
        attr.max_cq = 1 << 20;
        attr.max_cqe = 1 << 22;
        attr.max_mr = MAX_REGISTRATIONS;
        attr.max_mr_size = MAX_MR_SIZE;
        attr.max_mw = MAX_REGISTRATIONS;
        attr.max_pd = MAX_PDS;
        attr.max_qp_rd_atom = 16;
        attr.max_qp_init_rd_atom = 16;
        attr.max_srq = 1 << 20;
        attr.max_srq_wr = 16384;
        attr.max_srq_sge = 16;
        attr.max_mcast_grp = MAX_GROUPS;
        attr.max_mcast_qp_attach = MAX_MEMBERS;
        attr.completion_vectors = 1;
        attr.atomic = AtomicCapability::Global;
        attr.on_demand_paging = true;
        attr.places_by_key = true;
        attr.dma_buf = true;
        attr.dc = Some(DcAttr::new(16, 16));
        // The clock of the network, in nanoseconds.
        attr.clock = ClockAttr::new(1_000_000, u64::MAX);
        let mtu = endpoint.as_ref().map_or(Mtu::Mtu4096, |endpoint| endpoint.own_mtu());
        let management_psn = AtomicU32::new(network.random()? as u32);
        let device = Arc::new(Self {
            gid,
            mtu,
            endpoint,
            keys: Keys::new(),
            cm: Manager::new(gid, attr.guid, mtu, network.random()?),
            numbers: Numbers::new(network.random()?),
            network: Arc::clone(network),
            attr,
            queue_pairs: RwLock::default(),
            targets: RwLock::default(),
            reserved: Mutex::default(),
            completion_queues: Mutex::default(),
            events: Mutex::default(),
            next_id: AtomicU64::new(1),
            pd_numbers: Mutex::new(PdNumbers::new(MAX_PDS)),
            management_psn,
            dead: AtomicBool::new(false),
            port_up: AtomicBool::new(true),
            linked: AtomicBool::new(true),
            past: Mutex::default(),
            refusals: Refusals::new(),
            pkeys: Pkeys::new(),
            groups: Groups::new(),
        });
        if let Some(endpoint) = &device.endpoint {
            endpoint.attach(Arc::<Self>::downgrade(&device));
        }
        network.add_node(gid, Arc::<Self>::downgrade(&device));
        Ok(device)
    }

    #[inline]
    /// Returns the index of the interface if the device has a link-local address over UDP, else 0.
    pub(crate) fn scope(&self) -> u32 {
        self.endpoint.as_ref().map_or(0, |endpoint| endpoint.scope())
    }

    pub(super) const fn endpoint(&self) -> Option<&Arc<Endpoint>> {
        self.endpoint.as_ref()
    }

    /// Returns the largest MTU on the path to `peer`, or fails without a route.
    pub(super) fn path_mtu(&self, peer: Gid) -> Result<Mtu, VerbError> {
        let route = self.endpoint.as_ref().map(|endpoint| endpoint.path_mtu(peer)).transpose()?;
        Ok(route.map_or(self.mtu, |route| route.min(self.mtu)))
    }

    pub(super) const fn attr(&self) -> &DeviceAttr {
        &self.attr
    }

    /// Fails with EBUSY if a test injected refusals.
    pub(super) fn check_destroy(&self, verb: &'static str) -> Result<(), VerbError> {
        if self.refusals.destroy() { Err(VerbError::new(verb, VerbError::EBUSY)) } else { Ok(()) }
    }

    #[inline]
    pub(super) fn is_linked(&self) -> bool {
        self.linked.load(Ordering::Relaxed)
    }

    pub(super) fn is_dead(&self) -> bool {
        self.dead.load(Ordering::Acquire)
    }

    pub(super) fn port_state(&self) -> PortState {
        if self.is_linked() { PortState::Active } else { PortState::Down }
    }

    /// Fails with EIO once the device is lost.
    pub(super) fn check_alive(&self, verb: &'static str) -> Result<(), VerbError> {
        if self.is_dead() { Err(VerbError::new(verb, VerbError::EIO)) } else { Ok(()) }
    }

    pub(super) fn id(&self) -> u64 {
        self.next_id.fetch_add(1, Ordering::Relaxed)
    }

    pub(super) fn next_management_psn(&self) -> Psn {
        Psn::new(self.management_psn.fetch_add(1, Ordering::Relaxed))
    }

    /// Returns the device at `gid`. All nodes of a network are devices.
    pub(super) fn at(network: &NetworkInner, gid: Gid) -> Option<Arc<Self>> {
        let node: Arc<dyn Any + Send + Sync> = network.node(gid)?;
        node.downcast().ok()
    }

    /// Returns all devices of a network, by address.
    fn all(network: &NetworkInner) -> impl Iterator<Item = Arc<Self>> {
        let nodes = network.nodes().into_iter();
        nodes.filter_map(|node| {
            let node: Arc<dyn Any + Send + Sync> = node;
            node.downcast().ok()
        })
    }

    pub(super) fn queue_pair(&self, qpn: Qpn) -> Option<Arc<QpInner>> {
        self.queue_pairs.read().get(&qpn)?.upgrade()
    }

    pub(super) fn queue_pair_count(&self) -> usize {
        self.queue_pairs.read().len()
    }

    /// Registers the queue pair that `make` creates, under the `reserved` number or an
    /// unpredictable one.
    pub(super) fn add_queue_pair(
        &self,
        reserved: Option<Qpn>,
        make: impl FnOnce(Qpn) -> Arc<QpInner>,
    ) -> Result<Arc<QpInner>, VerbError> {
        let mut table = self.queue_pairs.write();
        let qpn = match reserved {
            None => self.unused_number(&table, &self.targets.read(), "ibv_create_qp")?,
            Some(qpn) if self.reserved.lock().contains(&qpn) && !table.contains_key(&qpn) => qpn,
            Some(_) => return Err(VerbError::new("ibv_create_qp", VerbError::EINVAL)),
        };
        let made = make(qpn);
        table.insert(qpn, Arc::downgrade(&made));
        Ok(made)
    }

    pub(super) fn reserve_number(&self) -> Result<Qpn, VerbError> {
        // This lock excludes every other choice of a number.
        let pairs = self.queue_pairs.write();
        let qpn = self.unused_number(&pairs, &self.targets.read(), "rdma_accept")?;
        self.reserved.lock().insert(qpn);
        Ok(qpn)
    }

    /// Releases a reserved number; a queue pair created under it keeps it.
    pub(super) fn release_number(&self, qpn: Qpn) {
        self.reserved.lock().remove(&qpn);
    }

    /// Returns whether the number is reserved, used or not.
    pub(super) fn is_reserved(&self, qpn: Qpn) -> bool {
        self.reserved.lock().contains(&qpn)
    }

    /// Assigns a number to a DC target, which receives packets from now on.
    pub(super) fn add_target(&self, target: &Arc<DctInner>) -> Result<Qpn, VerbError> {
        let pairs = self.queue_pairs.read();
        let mut table = self.targets.write();
        let number = self.unused_number(&pairs, &table, "ibv_modify_qp")?;
        table.insert(number, Arc::downgrade(target));
        Ok(number)
    }

    pub(super) fn target(&self, number: Qpn) -> Option<Arc<DctInner>> {
        self.targets.read().get(&number)?.upgrade()
    }

    pub(super) fn remove_target(&self, number: Qpn) {
        self.targets.write().remove(&number);
    }

    fn unused_number(
        &self,
        pairs: &BTreeMap<Qpn, Weak<QpInner>>,
        targets: &BTreeMap<Qpn, Weak<DctInner>>,
        verb: &'static str,
    ) -> Result<Qpn, VerbError> {
        if pairs.len() + targets.len() >= self.attr.max_qp as usize {
            return Err(VerbError::new(verb, VerbError::ENOMEM));
        }
        loop {
            let qpn = self.numbers.next();
            // 0 and 1 are for management, 0xffffff for multicast (IBTA 3.5.10).
            let taken =
                pairs.contains_key(&qpn) || targets.contains_key(&qpn) || self.is_reserved(qpn);
            if qpn.0 > 1 && qpn != Qpn::MAX && !taken {
                return Ok(qpn);
            }
        }
    }

    /// Removes a queue pair with its last counters, so that the sums never fall.
    pub(super) fn remove_queue_pair(&self, qpn: Qpn, counters: (SendCounters, ReceiveCounters)) {
        let mut table = self.queue_pairs.write();
        table.remove(&qpn);
        self.past.lock().add(counters);
    }

    pub(super) fn port_counters(&self) -> PortCounters {
        let (mut sum, pairs) = {
            let table = self.queue_pairs.read();
            let pairs: Vec<_> = table.values().filter_map(Weak::upgrade).collect();
            (*self.past.lock(), pairs)
        };
        pairs.iter().for_each(|qp| sum.add(qp.counters()));
        sum
    }

    /// Fails the queue pairs and targets of a completion queue that has lost a completion.
    #[cold]
    pub(super) fn fail_overrun(self: &Arc<Self>, cq: &Arc<CqInner>, deferred: &Deferred) {
        let (device, cq) = (Arc::clone(self), Arc::clone(cq));
        deferred.push(move |deferred| {
            rdma_provider::error!(
                cq = cq.id,
                "completion queue overrun; completions lost, failing its queue pairs"
            );
            cq.raise_error();
            for qpn in cq.queue_pairs() {
                if let Some(qp) = device.queue_pair(qpn) {
                    qp.fail(None, Some(AsyncEvent::QpFatal(qpn)), deferred);
                }
                if let Some(target) = device.target(qpn) {
                    target.fail(Some(AsyncEvent::QpFatal(qpn)), deferred);
                }
            }
        });
    }

    pub(super) fn announce(&self, event: AsyncEvent) {
        self.events
            .lock()
            .retain(|events| events.upgrade().map(|events| events.raise(event)).is_some());
    }

    /// Registers a completion queue for device loss, until
    /// [`remove_completion_queue`](Self::remove_completion_queue).
    pub(super) fn add_completion_queue(&self, cq: &Arc<CqInner>) {
        let mut all = self.completion_queues.lock();
        all.insert(cq.id, Arc::downgrade(cq));
        // `kill` may have run before the queue was in the table.
        if self.is_dead() {
            cq.mark_lost();
        }
    }

    pub(super) fn remove_completion_queue(&self, id: u64) {
        self.completion_queues.lock().remove(&id);
    }

    /// Creates the events of a context.
    pub(super) fn add_events(&self) -> io::Result<Arc<Events>> {
        let events = Arc::new(Events::new(&self.attr.name)?);
        let mut all = self.events.lock();
        if all.len() == all.capacity() {
            all.retain(|events| events.strong_count() > 0);
        }
        all.push(Arc::downgrade(&events));
        Ok(events)
    }

    pub(super) fn set_port(&self, up: bool) {
        if self.is_dead() || self.port_up.swap(up, Ordering::AcqRel) == up {
            return;
        }
        self.linked.store(up, Ordering::Relaxed);
        self.announce(if up { AsyncEvent::PortActive(PORT) } else { AsyncEvent::PortError(PORT) });
    }
}

#[cfg(test)]
mod tests {
    use rdma_provider::contract::{Context as _, CqInit, Dct as _, DctInit, Pd as _};
    use rdma_provider::types::{
        Access, AddressVector, DcKey, PortNum, QpAttr, QpState, RnrTimer, SrqCaps,
    };

    use super::*;
    use crate::Network;

    #[test]
    fn destroyed_target_leaves_the_table_of_its_device() {
        let network = Network::new();
        let context = network.open("a").unwrap();
        let device = network.control("a").unwrap().0;
        let (pd, cq) = (context.create_pd().unwrap(), context.create_cq(&CqInit::new(16)).unwrap());
        let srq = pd.create_srq(SrqCaps { max_wr: 16, max_sge: 1 }).unwrap();
        for _ in 0..3 {
            let target =
                pd.create_dct(&DctInit { srq: &srq, recv_cq: &cq, key: DcKey(1) }).unwrap();
            let init = QpAttr {
                pkey_index: Some(0),
                port: Some(PortNum(1)),
                access: Some(Access::empty()),
                ..QpAttr::to_state(QpState::Init)
            };
            target.modify(&init).unwrap();
            let rtr = QpAttr {
                address: Some(AddressVector::new(PortNum(1), 0, device.gid)),
                path_mtu: Some(Mtu::Mtu1024),
                min_rnr_timer: Some(RnrTimer::from_code(1)),
                ..QpAttr::to_state(QpState::Rtr)
            };
            target.modify(&rtr).unwrap();
            assert_eq!(device.targets.read().keys().copied().next(), target.number());
            drop(target);
            assert!(device.targets.read().is_empty());
        }
    }
}

//! The adapter: what all that have opened it share.
//!
//! # Order of locks
//!
//! 1. The requester half of one queue pair.
//! 2. The responder half of one queue pair, or a DC target.
//! 3. One of completion queue, shared receive queue, channel, windows, scheduler.
//!
//! An action that needs another order, for example a queue pair whose failure puts a second one into the error state, goes to
//! a [`Deferred`] list and runs when no lock is held.

pub(crate) mod completion_channel;
pub(crate) mod completion_queue;
mod context;
pub(crate) mod deferred;
pub(crate) mod dma;
mod dma_buf;
pub(crate) mod keys;
pub(crate) mod memory_windows;
mod numbers;
pub(crate) mod pump;
pub(crate) mod queue_pair;
mod refusals;
pub(crate) mod ring;
pub(crate) mod scheduler;
pub(crate) mod shared_receive_queue;

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::{Mutex, RwLock};

pub use self::completion_channel::Channel;
use self::completion_queue::CqInner;
pub use self::completion_queue::{Cq, CqCounters};
pub(super) use self::context::ContextInner;
pub use self::context::{Ah, Context, Mr, Mw, Pd};
use self::context::{MAX_PDS, PdNumbers};
use self::deferred::Deferred;
use self::keys::{Keys, MAX_REGISTRATIONS};
use self::numbers::Numbers;
pub use self::queue_pair::Qp;
use self::queue_pair::QpInner;
use self::refusals::Refusals;
pub use self::shared_receive_queue::Srq;
use super::cm::Manager;
use super::dc::DctInner;
use super::net::network::NetworkInner;
use super::net::udp::Endpoint;
use rdma_provider::VerbError;
use rdma_provider::types::{
    AsyncEvent, AtomicCapability, DcAttr, DeviceAttr, Gid, Mtu, PortNum, PortState, Psn, Qpn,
};

/// The only port.
pub(super) const PORT: PortNum = PortNum(1);

/// Registrations are bounded by the address space.
const MAX_MR_SIZE: u64 = 1 << 47;

/// What all open contexts of a device share.
pub(super) struct DeviceInner {
    pub(super) gid: Gid,
    pub(super) network: Arc<NetworkInner>,
    /// Of its port.
    mtu: Mtu,
    endpoint: Option<Arc<Endpoint>>,
    pub(super) keys: Keys,
    pub(super) cm: Manager,
    attr: DeviceAttr,
    numbers: Numbers,
    queue_pairs: RwLock<HashMap<Qpn, Weak<QpInner>>>,
    /// Targets of dynamic connections, whose numbers are of the same space. Locked after `queue_pairs`.
    targets: RwLock<HashMap<Qpn, Weak<DctInner>>>,
    /// Numbers that the connection manager has told peers, for queue pairs that are made when those have confirmed. Locked
    /// after `targets`.
    reserved: Mutex<HashSet<Qpn>>,
    completion_queues: Mutex<Vec<Weak<CqInner>>>,
    contexts: Mutex<Vec<Weak<ContextInner>>>,
    next_id: AtomicU64,
    pub(super) pd_numbers: Mutex<PdNumbers>,
    management_psn: AtomicU32,
    dead: AtomicBool,
    port_up: AtomicBool,
    /// Packets pass: neither dead nor down. One word for the hot path.
    linked: AtomicBool,
    /// Requested by a test.
    pub(super) refusals: Refusals,
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
    /// A device; `endpoint`: its place on a network over UDP.
    pub(super) fn new(
        name: &str,
        gid: Gid,
        network: Arc<NetworkInner>,
        endpoint: Option<Arc<Endpoint>>,
    ) -> Result<Arc<Self>, VerbError> {
        let mut attr = DeviceAttr::named(name);
        // Locally administered, from the address.
        attr.guid = 0x0200_5eff_fe00_0000
            | u64::from(u32::from_be_bytes([0, gid.0[13], gid.0[14], gid.0[15]]));
        attr.firmware = env!("CARGO_PKG_VERSION").to_owned();
        attr.ports = 1;
        attr.max_qp = 1 << 20;
        attr.max_qp_wr = 16384;
        attr.max_sge = 16;
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
        attr.completion_vectors = 1;
        attr.atomic = AtomicCapability::Global;
        // Nothing is ever pinned.
        attr.on_demand_paging = true;
        attr.dma_buf = true;
        attr.dc = Some(DcAttr::new(16, 16));
        let mtu = endpoint.as_ref().map_or(Mtu::Mtu4096, |endpoint| endpoint.own_mtu());
        let management_psn = AtomicU32::new(network.random()? as u32);
        let device = Arc::new(Self {
            gid,
            mtu,
            endpoint,
            keys: Keys::new(),
            cm: Manager::new(gid, attr.guid, mtu, network.random()?),
            numbers: Numbers::new(network.random()?),
            network,
            attr,
            queue_pairs: RwLock::default(),
            targets: RwLock::default(),
            reserved: Mutex::default(),
            completion_queues: Mutex::default(),
            contexts: Mutex::default(),
            next_id: AtomicU64::new(1),
            pd_numbers: Mutex::new(PdNumbers::new(MAX_PDS)),
            management_psn,
            dead: AtomicBool::new(false),
            port_up: AtomicBool::new(true),
            linked: AtomicBool::new(true),
            refusals: Refusals::new(),
        });
        if let Some(endpoint) = &device.endpoint {
            endpoint.attach(&device);
        }
        Ok(device)
    }

    /// Where it sends and receives, on a network over UDP.
    #[inline]
    pub(super) const fn endpoint(&self) -> Option<&Arc<Endpoint>> {
        self.endpoint.as_ref()
    }

    /// Largest MTU on the way to `peer`; fails if the system knows no way.
    pub(super) fn path_mtu(&self, peer: Gid) -> Result<Mtu, VerbError> {
        let route = self.endpoint.as_ref().map(|endpoint| endpoint.path_mtu(peer)).transpose()?;
        Ok(route.map_or(self.mtu, |route| route.min(self.mtu)))
    }

    pub(super) const fn attr(&self) -> &DeviceAttr {
        &self.attr
    }

    /// Fails with EBUSY if a test has the device refuse to destroy objects.
    pub(super) fn ends(&self, verb: &'static str) -> Result<(), VerbError> {
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

    /// EIO once the device is lost.
    pub(super) fn alive(&self, verb: &'static str) -> Result<(), VerbError> {
        if self.is_dead() { Err(VerbError::new(verb, VerbError::EIO)) } else { Ok(()) }
    }

    fn id(&self) -> u64 {
        self.next_id.fetch_add(1, Ordering::Relaxed)
    }

    /// Of the next management datagram.
    pub(super) fn next_management_psn(&self) -> Psn {
        Psn::new(self.management_psn.fetch_add(1, Ordering::Relaxed))
    }

    pub(super) fn queue_pair(&self, qpn: Qpn) -> Option<Arc<QpInner>> {
        self.queue_pairs.read().get(&qpn)?.upgrade()
    }

    pub(super) fn queue_pair_count(&self) -> usize {
        self.queue_pairs.read().len()
    }

    /// Makes a queue pair under the `reserved` number, or one that is not in use and that peers cannot predict.
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

    /// Reserves a number for a queue pair that may be made later.
    pub(super) fn reserve_number(&self) -> Result<Qpn, VerbError> {
        // Others that look for a number meanwhile either hold the table for writing or come here.
        let pairs = self.queue_pairs.write();
        let qpn = self.unused_number(&pairs, &self.targets.read(), "rdma_accept")?;
        self.reserved.lock().insert(qpn);
        Ok(qpn)
    }

    /// Gives a reserved number back. A queue pair that was made under it keeps it.
    pub(super) fn release_number(&self, qpn: Qpn) {
        self.reserved.lock().remove(&qpn);
    }

    /// True if a queue pair may be made under this number, or was.
    pub(super) fn is_reserved(&self, qpn: Qpn) -> bool {
        self.reserved.lock().contains(&qpn)
    }

    /// Gives a target of dynamic connections its number; packets for it arrive from now on.
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
        pairs: &HashMap<Qpn, Weak<QpInner>>,
        targets: &HashMap<Qpn, Weak<DctInner>>,
        verb: &'static str,
    ) -> Result<Qpn, VerbError> {
        if pairs.len() + targets.len() >= self.attr.max_qp as usize {
            return Err(VerbError::new(verb, VerbError::ENOMEM));
        }
        loop {
            let qpn = self.numbers.next();
            // 0 and 1 are management, 0xffffff is multicast (IBTA 3.5.10).
            let taken =
                pairs.contains_key(&qpn) || targets.contains_key(&qpn) || self.is_reserved(qpn);
            if qpn.0 > 1 && qpn != Qpn::MAX && !taken {
                return Ok(qpn);
            }
        }
    }

    pub(super) fn remove_queue_pair(&self, qpn: Qpn) {
        self.queue_pairs.write().remove(&qpn);
    }

    pub(super) fn announce(&self, event: AsyncEvent) {
        self.contexts
            .lock()
            .retain(|context| context.upgrade().map(|context| context.event(event)).is_some());
    }

    pub(super) fn kill(self: &Arc<Self>) {
        if self.dead.swap(true, Ordering::AcqRel) {
            return;
        }
        tracing::error!(device = self.attr.name, "device lost");
        self.linked.store(false, Ordering::Relaxed);
        self.announce(AsyncEvent::DeviceFatal);
        let mut all: Vec<_> = {
            let table = self.queue_pairs.read();
            table.values().filter_map(Weak::upgrade).collect()
        };
        // In a fixed order, for reproducible simulations.
        all.sort_unstable_by_key(|qp| qp.qpn());
        let deferred = Deferred::new();
        for qp in all {
            qp.fail(None, None, &deferred);
        }
        let mut targets: Vec<_> = self.targets.read().values().filter_map(Weak::upgrade).collect();
        targets.sort_unstable_by_key(|target| target.number());
        for target in targets {
            target.fail(None, &deferred);
        }
        deferred.run();
        // After all flushes: what no flush ends, as receives of a shared queue, ends by the error.
        for cq in self.completion_queues.lock().iter().filter_map(Weak::upgrade) {
            cq.lose();
        }
        Manager::kill(self);
    }

    /// Knows of a completion queue until it is gone.
    fn add_completion_queue(&self, cq: &Cq) {
        let mut all = self.completion_queues.lock();
        if all.len() == all.capacity() {
            all.retain(|cq| cq.strong_count() > 0);
        }
        all.push(Arc::downgrade(&cq.0));
        // Lost meanwhile, without being told.
        if self.is_dead() {
            cq.0.lose();
        }
    }

    pub(super) fn set_port(&self, up: bool) {
        if self.is_dead() || self.port_up.swap(up, Ordering::AcqRel) == up {
            return;
        }
        self.linked.store(up, Ordering::Relaxed);
        self.announce(if up { AsyncEvent::PortActive(PORT) } else { AsyncEvent::PortError(PORT) });
    }
}

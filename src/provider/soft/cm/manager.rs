//! A device's manager: the machine under a lock, with what its messages and events are for.
//!
//! Messages travel by the network's scheduler, as encoded packets do, and are lost, repeated and delayed with them.
//! Locks: the manager of one device, then one of ports, link, scheduler, mailbox. Nothing that owns an id is dropped
//! under the lock, as the drop takes it.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use crate::provider::cm_contract::{CmEvent, CmEventKind};
use crate::types::{Gid, Psn};

use super::super::Soft;
use super::super::device::DeviceInner;
use super::super::network::NetworkInner;
use super::super::scheduler::Job;
use super::channel::{ChannelInner, CmId};
use super::machine::{Event, Machine, Output};
use super::message::{CommId, Mad};

/// `ETIMEDOUT` of `errno(3)`.
const ETIMEDOUT: i32 = 110;

/// See the module.
pub(in super::super) struct Manager(Mutex<State>);

#[derive(Debug)]
pub(super) struct State {
    pub(super) machine: Machine,
    /// Keys of the ids that there are, and where their events go: weak, for events in a channel own ids, which would
    /// keep it alive.
    owners: HashMap<u64, Weak<ChannelInner>>,
    /// Those that are connections.
    connections: HashMap<CommId, u64>,
    last_key: u64,
    /// When a job for the machine's deadline comes, if one does.
    scheduled: Option<u64>,
}

/// A message on its way.
#[derive(Debug)]
pub(in super::super) struct Letter {
    network: Weak<NetworkInner>,
    route: (Gid, Gid),
    mad: Mad,
    /// It was not damaged.
    intact: bool,
}

impl Manager {
    pub(in super::super) fn new(gid: Gid, guid: u64, seed: u64) -> Self {
        Self(Mutex::new(State {
            machine: Machine::new(gid, guid, seed),
            owners: HashMap::new(),
            connections: HashMap::new(),
            last_key: 0,
            scheduled: None,
        }))
    }

    /// Calls `f` with the state and the time, and does what follows from it.
    pub(super) fn with<R>(device: &Arc<DeviceInner>, f: impl FnOnce(&mut State, u64) -> R) -> R {
        let (result, _held) = {
            let mut state = device.cm.0.lock();
            let now = device.network.scheduler.now();
            let result = f(&mut state, now);
            (result, state.flush(device, now))
        };
        result
    }

    /// A deadline has come.
    pub(in super::super) fn on_timer(device: &Arc<DeviceInner>) {
        Self::with(device, |state, now| {
            // Another job may come earlier by now; this one was the earliest then.
            if state.scheduled.is_some_and(|at| at <= now) {
                state.scheduled = None;
            }
            state.machine.on_timer(now);
        });
    }

    fn on_message(device: &Arc<DeviceInner>, from: Gid, mad: Mad) {
        let psn = || device.network.random().ok().map(|random| Psn::new(random as u32));
        Self::with(device, |state, now| state.machine.on_message(now, from, mad, psn));
    }

    /// A management datagram arrived from `from`. Nothing of it has been looked at.
    pub(in super::super) fn on_datagram(device: &Arc<DeviceInner>, from: Gid, mad: &[u8]) {
        tracing::debug!(device = device.attr().name, %from, len = mad.len(), "management datagram dropped: no manager yet");
    }

    /// The device is lost: every id is told, and nothing more happens.
    pub(in super::super) fn kill(device: &Arc<DeviceInner>) {
        let _held: Vec<_> = {
            let mut state = device.cm.0.lock();
            state.machine = Machine::new(device.gid, device.attr().guid, 0);
            state.connections.clear();
            let mut owners: Vec<_> = state.owners.drain().collect();
            // In a fixed order, for reproducible simulations.
            owners.sort_unstable_by_key(|&(key, _)| key);
            let alive = owners.into_iter().filter_map(|(key, channel)| Some((key, channel.upgrade()?)));
            let told = alive.map(|(key, channel)| {
                channel.events.push(CmEvent { key, kind: CmEventKind::DeviceRemoval });
                channel
            });
            told.collect()
        };
    }

    /// Sizes of all tables; for tests of what is left behind.
    #[cfg(test)]
    pub(super) fn sizes(&self) -> [usize; 6] {
        let state = self.0.lock();
        let [connections, requests, queue_pairs, timers] = state.machine.sizes();
        [connections, requests, queue_pairs, timers, state.owners.len(), state.connections.len()]
    }
}

impl State {
    /// Key of a new id with events in `channel`.
    pub(super) fn new_key(&mut self, channel: &Arc<ChannelInner>) -> u64 {
        self.last_key += 1;
        self.owners.insert(self.last_key, Arc::downgrade(channel));
        self.last_key
    }

    /// The id `key` is this connection.
    pub(super) fn add(&mut self, connection: CommId, key: u64) {
        self.connections.insert(connection, key);
    }

    /// The id of a connection is gone.
    pub(super) fn release(&mut self, now: u64, connection: CommId, key: u64) {
        self.owners.remove(&key);
        // Not of a later connection with the same number.
        if self.connections.get(&connection) == Some(&key) {
            self.connections.remove(&connection);
            self.machine.release(now, connection);
        }
    }

    /// The id of a listener, or of nothing yet, is gone.
    pub(super) fn forget(&mut self, key: u64) {
        self.owners.remove(&key);
        self.machine.stop_listening(key);
    }

    fn owner(&self, key: u64) -> Option<Arc<ChannelInner>> {
        self.owners.get(&key)?.upgrade()
    }

    /// Sends messages, gives events out, asks for a call at the deadline. What comes back may be the last share of a
    /// channel, and is to be dropped without the lock.
    fn flush(&mut self, device: &Arc<DeviceInner>, now: u64) -> Vec<Arc<ChannelInner>> {
        let mut held = Vec::new();
        while let Some(output) = self.machine.next_output() {
            match output {
                Output::Send { to, mad } => post(device, to, &mad, now),
                Output::Event { connection, event } => {
                    let Some(&key) = self.connections.get(&connection) else { continue };
                    let Some(channel) = self.owner(key) else { continue };
                    channel.events.push(CmEvent { key, kind: kind(event) });
                    held.push(channel);
                }
                Output::Request { listener, connection, peer } => {
                    let known = self.machine.connection(connection).map(|known| (known.addresses, known.peer));
                    let (Some((addresses, gid)), Some(channel)) = (known, self.owner(listener)) else {
                        self.machine.release(now, connection);
                        continue;
                    };
                    let key = self.new_key(&channel);
                    self.add(connection, key);
                    let id = CmId::of_request(device, &channel, key, connection, addresses, gid);
                    channel.events.push(CmEvent { key: listener, kind: CmEventKind::ConnectRequest { id, peer } });
                    held.push(channel);
                }
            }
        }
        if let Some(at) = self.machine.deadline()
            && self.scheduled.is_none_or(|scheduled| at < scheduled)
        {
            self.scheduled = Some(at);
            device.network.scheduler.schedule(at, Job::ConnectionTimer(Arc::downgrade(device)));
        }
        held
    }
}

fn kind(event: Event) -> CmEventKind<Soft> {
    match event {
        Event::Response(peer) => CmEventKind::ConnectResponse(peer),
        Event::Established => CmEventKind::Established,
        Event::Rejected(reason, private_data) => CmEventKind::Rejected { reason, private_data },
        Event::Unreachable => CmEventKind::Unreachable(ETIMEDOUT),
        Event::Disconnected => CmEventKind::Disconnected,
        Event::TimewaitExit => CmEventKind::TimewaitExit,
    }
}

/// Puts a message on the way.
fn post(device: &Arc<DeviceInner>, to: Gid, mad: &Mad, now: u64) {
    let network = &device.network;
    if !device.is_linked() {
        return;
    }
    let route = (device.gid, to);
    for (at, intact) in network.carry(now, route) {
        let letter = Letter { network: Arc::downgrade(network), route, mad: mad.clone(), intact };
        network.scheduler.schedule(at, Job::Message(Box::new(letter)));
    }
}

impl Letter {
    pub(in super::super) fn run(self) {
        let Some(network) = self.network.upgrade() else { return };
        let (source, destination) = self.route;
        let Some(device) = network.device(destination).filter(|device| device.is_linked()) else { return };
        if !self.intact {
            network.reject();
            return;
        }
        tracing::trace!(%source, mad = ?self.mad, "message arrived");
        Manager::on_message(&device, source, self.mad);
    }
}

impl fmt::Debug for Manager {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Manager").finish_non_exhaustive()
    }
}

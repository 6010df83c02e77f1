//! The state of a device's manager: the state machine, and the channels of its ids.
//!
//! An object that owns an id must not be dropped under the lock, because the drop takes it.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Weak};

use rdma_provider::locks::Mutex;

use rdma_provider::cm_contract::{CmAnswer, CmEvent};
use rdma_provider::types::{Gid, Mtu, Qpn};

use super::machine::Machine;
use super::message::CommId;
use crate::Soft;
use crate::device::completion_channel::Mailbox;

/// The events of a channel.
pub(super) type Events = Mailbox<CmEvent<Soft>>;

pub(crate) struct Manager(pub(super) Mutex<State>);

#[derive(Debug)]
pub(super) struct State {
    pub(super) machine: Machine,
    /// Event channels by id. Weak, because events in a channel own ids.
    pub(super) owners: BTreeMap<u64, Weak<Events>>,
    pub(super) connections: BTreeMap<CommId, u64>,
    last_key: u64,
    /// The earliest scheduled timer job.
    pub(super) scheduled: Option<u64>,
}

impl Manager {
    pub(crate) fn new(gid: Gid, guid: u64, mtu: Mtu, seed: u64) -> Self {
        Self(Mutex::new(State {
            machine: Machine::new(gid, guid, mtu, seed),
            owners: BTreeMap::new(),
            connections: BTreeMap::new(),
            last_key: 0,
            scheduled: None,
        }))
    }

    /// Returns the connection that `number` is reserved for.
    pub(crate) fn reserved_for(&self, number: Qpn) -> Option<CommId> {
        self.0.lock().machine.reserved.get(&number).copied()
    }

    /// Returns the number of connections, including unconfirmed ones and TIMEWAIT.
    pub(crate) fn connections(&self) -> usize {
        self.0.lock().machine.connections()
    }

    #[cfg(test)]
    pub(super) fn sizes(&self) -> [usize; 6] {
        let state = self.0.lock();
        let [connections, requests, queue_pairs, timers] = state.machine.sizes();
        [connections, requests, queue_pairs, timers, state.owners.len(), state.connections.len()]
    }
}

impl State {
    pub(super) fn new_key(&mut self, channel: &Arc<Events>) -> u64 {
        self.last_key += 1;
        self.owners.insert(self.last_key, Arc::downgrade(channel));
        self.last_key
    }

    pub(super) fn add(&mut self, connection: CommId, key: u64) {
        self.connections.insert(connection, key);
    }

    pub(super) fn release(&mut self, now: u64, connection: CommId, key: u64) {
        self.owners.remove(&key);
        // A later connection may have the same id.
        if self.connections.get(&connection) == Some(&key) {
            self.connections.remove(&connection);
            self.machine.release(now, connection);
        }
    }

    /// Auto-accepts a request that the program has received. False if it is no longer open.
    pub(super) fn answer_late(
        &mut self,
        now: u64,
        connection: CommId,
        key: u64,
        answer: &CmAnswer,
        number: impl FnOnce() -> Option<Qpn>,
    ) -> bool {
        if self.connections.get(&connection) != Some(&key) || !self.machine.waits(connection) {
            return false;
        }
        self.connections.remove(&connection);
        self.owners.remove(&key);
        if !self.machine.auto_accept(now, connection, answer, number) {
            // Forgotten without an answer; the peer retransmits its REQ.
            self.machine.forget(connection);
        }
        true
    }

    /// Handles the drop of an id that is not a connection.
    pub(super) fn forget(&mut self, key: u64) {
        self.owners.remove(&key);
        self.machine.stop_listening(key);
    }

    pub(super) fn owner(&self, key: u64) -> Option<Arc<Events>> {
        self.owners.get(&key)?.upgrade()
    }
}

impl fmt::Debug for Manager {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Manager").finish_non_exhaustive()
    }
}

//! The manager of a device: the state machine under a lock, connected to the network and channels.
//!
//! Messages are datagrams between queue pairs 1, subject to loss, duplication and delay.
//!
//! Lock order: the device's manager, then one of ports, link, scheduler or mailbox. An object that
//! owns an id must not be dropped under the lock, because the drop takes it.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Weak};

use rdma_provider::locks::Mutex;

use rdma_provider::cm_contract::{CmAnswer, CmEvent, CmEventKind};
use rdma_provider::types::{Gid, Mtu, Psn, Qpn, RnrTimer, Transport};

use super::super::Soft;
use super::super::device::DeviceInner;
use super::super::net::scheduler::{Scheduled, Task};
use super::super::roce::packet::{Aeth, Body, Packet, Syndrome};
use super::channel::{ChannelInner, CmId};
use super::machine::{Event, Machine, Numbers, Output};
use super::mad::MadError;
use super::message::{CommId, Mad, Message};

/// `ETIMEDOUT` and `ECONNREFUSED` of `errno(3)`.
const ETIMEDOUT: i32 = 110;
const ECONNREFUSED: i32 = 111;

/// The RNR delay until the local queue pair is created, which takes less than these 0.64 ms.
const NOT_READY: RnrTimer = RnrTimer::from_code(12);

struct DeviceNumbers<'a>(&'a Arc<DeviceInner>);

impl Numbers for DeviceNumbers<'_> {
    fn psn(&mut self) -> Option<Psn> {
        self.0.network.random().ok().map(|random| Psn::new(random as u32))
    }

    fn id(&mut self) -> Option<CommId> {
        self.0.network.random().ok().map(|random| random as u32)
    }

    fn reserve(&mut self) -> Option<Qpn> {
        self.0.reserve_number().ok()
    }
}

pub(crate) struct Manager(Mutex<State>);

#[derive(Debug)]
pub(super) struct State {
    pub(super) machine: Machine,
    /// Event channels by id. Weak, because events in a channel own ids.
    owners: BTreeMap<u64, Weak<ChannelInner>>,
    connections: BTreeMap<CommId, u64>,
    last_key: u64,
    /// The earliest scheduled timer job.
    scheduled: Option<u64>,
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

    /// Calls `f` with the state and the time, then processes the machine's outputs.
    pub(super) fn with<R>(device: &Arc<DeviceInner>, f: impl FnOnce(&mut State, u64) -> R) -> R {
        let (result, _held) = {
            let mut state = device.cm.0.lock();
            let now = device.network.scheduler.now();
            let result = f(&mut state, now);
            (result, state.flush(device, now))
        };
        result
    }

    /// Processes a management datagram from `from`. It causes at most one answer.
    pub(crate) fn on_datagram(device: &Arc<DeviceInner>, from: Gid, bytes: &[u8]) {
        let mad = Mad::decode(bytes);
        rdma_provider::trace!(%from, ?mad, "management datagram received");
        match mad {
            // Programs trust the source in a request. Within a process, devices have several
            // addresses.
            Ok(Mad { message: Message::Req(req), .. })
                if device.network.is_udp() && Gid::from(req.source.ip()) != from =>
            {
                rdma_provider::debug!(
                    device = device.attr().name,
                    %from,
                    source = %req.source,
                    "dropped connection request: its source address is not the sender's"
                );
            }
            Ok(mad) => Self::with(device, |state, now| {
                state.machine.on_message(now, from, mad, DeviceNumbers(device))
            }),
            Err(MadError::Request { transaction, remote_id, reason }) => {
                Self::with(device, |state, now| {
                    state.machine.reject_unacceptable(now, from, transaction, remote_id, reason)
                });
            }
            Err(error) => {
                rdma_provider::debug!(
                    device = device.attr().name,
                    %from,
                    ?error,
                    "dropped management datagram: not a connection manager message"
                );
            }
        }
    }

    /// Processes a report that no process at `from` has the port to which `bytes` were sent.
    pub(crate) fn on_refusal(device: &Arc<DeviceInner>, from: Gid, bytes: &[u8]) {
        if let Ok(Mad { transaction, message: Message::Req(req) }) = Mad::decode(bytes) {
            Self::with(device, |state, _| {
                state.machine.on_refusal(from, transaction, req.local_id)
            });
        }
    }

    pub(crate) fn on_traffic(device: &Arc<DeviceInner>, connection: CommId, qpn: Qpn) {
        Self::with(device, |state, _| state.machine.on_traffic(connection, qpn));
    }

    /// Handles a packet at a queue pair that is not ready. Returns an RNR NAK if its number is
    /// reserved and this is the peer's first packet.
    pub(crate) fn on_early(
        device: &Arc<DeviceInner>,
        from: Gid,
        packet: &Packet,
    ) -> Option<Packet> {
        let asks = packet.transport == Transport::Rc && !packet.body.is_response();
        if !asks || !device.is_reserved(packet.dest) {
            return None;
        }
        let dest =
            Self::with(device, |state, _| state.machine.on_early(from, packet.dest, packet.psn))?;
        let aeth = Aeth { syndrome: Syndrome::RnrNak(NOT_READY.code()), msn: 0 };
        let body = Body::Acknowledge(aeth);
        Some(Packet {
            transport: Transport::Rc,
            dest,
            psn: packet.psn,
            solicited: false,
            ack_request: false,
            body,
        })
    }

    pub(crate) fn reserved_for(device: &Arc<DeviceInner>, number: Qpn) -> Option<CommId> {
        device.cm.0.lock().machine.reserved.get(&number).copied()
    }

    /// Notifies every id that the device is lost, and resets the state.
    pub(crate) fn kill(device: &Arc<DeviceInner>) {
        let _held: Vec<_> = {
            let mut state = device.cm.0.lock();
            state.machine = Machine::new(device.gid, device.attr().guid, state.machine.mtu, 0);
            state.connections.clear();
            let owners = std::mem::take(&mut state.owners);
            let alive =
                owners.into_iter().filter_map(|(key, channel)| Some((key, channel.upgrade()?)));
            let notified = alive.map(|(key, channel)| {
                channel.events.push(CmEvent { key, kind: CmEventKind::DeviceRemoval });
                channel
            });
            notified.collect()
        };
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

impl Scheduled for DeviceInner {
    /// Processes the timeouts of its connections.
    fn run(self: Arc<Self>, _timer: Task) {
        Manager::with(&self, |state, now| {
            // A later timer may still follow.
            if state.scheduled.is_some_and(|at| at <= now) {
                state.scheduled = None;
            }
            state.machine.on_timer(now);
        });
    }
}

impl State {
    pub(super) fn new_key(&mut self, channel: &Arc<ChannelInner>) -> u64 {
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

    fn owner(&self, key: u64) -> Option<Arc<ChannelInner>> {
        self.owners.get(&key)?.upgrade()
    }

    /// Processes the machine's outputs. Drop the result without the lock: it may hold a channel's
    /// last reference.
    fn flush(&mut self, device: &Arc<DeviceInner>, now: u64) -> Vec<Arc<ChannelInner>> {
        let mut held = Vec::new();
        while let Some(output) = self.machine.next_output() {
            match output {
                Output::Release(number) => device.release_number(number),
                Output::Send { to, mad } => {
                    device.network.transmit_management(device, to, &mad.encode())
                }
                Output::Event { connection, event } => {
                    let Some(&key) = self.connections.get(&connection) else { continue };
                    let Some(channel) = self.owner(key) else { continue };
                    channel.events.push(CmEvent { key, kind: kind(event) });
                    held.push(channel);
                }
                Output::Request { listener, connection, peer } => {
                    let known = self.machine.connection(connection);
                    let known = known.map(|known| (known.addresses, (known.peer, known.mtu)));
                    let (Some((addresses, path)), Some(channel)) = (known, self.owner(listener))
                    else {
                        self.machine.release(now, connection);
                        continue;
                    };
                    let key = self.new_key(&channel);
                    self.add(connection, key);
                    let reserved =
                        self.machine.connection(connection).filter(|known| known.reserved);
                    let reserved = reserved.map(|known| known.local_qpn);
                    let id = CmId::from_request(
                        device, &channel, key, connection, addresses, path, reserved,
                    );
                    channel.events.push(CmEvent {
                        key: listener,
                        kind: CmEventKind::ConnectRequest { id, peer },
                    });
                    held.push(channel);
                }
            }
        }
        if let Some(at) = self.machine.deadline()
            && self.scheduled.is_none_or(|scheduled| at < scheduled)
        {
            self.scheduled = Some(at);
            device.network.scheduler.run_at(at, device, Task::Timer);
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
        Event::PortClosed => CmEventKind::Unreachable(ECONNREFUSED),
        Event::Disconnected => CmEventKind::Disconnected,
        Event::TimewaitExit => CmEventKind::TimewaitExit,
    }
}

impl fmt::Debug for Manager {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Manager").finish_non_exhaustive()
    }
}

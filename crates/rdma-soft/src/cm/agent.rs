//! The agent of a device: connects its manager with the network and the channels.
//!
//! Messages are datagrams between queue pairs 1, subject to loss, duplication and delay.
//!
//! Lock order: the device's manager, then one of ports, link, scheduler or mailbox.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use rdma_provider::cm_contract::{CmDatagram, CmEvent, CmEventKind};
use rdma_provider::types::{AddressVector, Gid, Psn, Qkey, Qpn, RejectReason, RnrTimer, Transport};

use super::channel::CmId;
use super::machine::{Event, Machine, Numbers, Output};
use super::mad::{MadError, SIZE};
use super::manager::{Events, State};
use super::message::{CommId, Mad, Message, SidrReq};
use crate::Soft;
use crate::device::DeviceInner;
use crate::device::outbox::Outbox;
use crate::memory::dma::Payload;
use crate::net::node::PORT;
use crate::net::scheduler::{Scheduled, Task};
use crate::roce::packet::{Aeth, Body, Packet, Syndrome};

/// Management queue pair and its key (IBTA 3.5.10 and 10.2.5).
pub(crate) const MANAGEMENT: Qpn = Qpn(1);
pub(crate) const MANAGEMENT_QKEY: Qkey = Qkey(0x8001_0000);

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

/// Calls `f` with the state and the time, then processes the machine's outputs.
pub(super) fn with<R>(device: &Arc<DeviceInner>, f: impl FnOnce(&mut State, u64) -> R) -> R {
    let (result, _held) = {
        let mut state = device.cm.0.lock();
        let now = device.network.scheduler.now();
        let result = f(&mut state, now);
        (result, flush(&mut state, device, now))
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
        Ok(Mad { message: Message::SidrReq(req), .. }) if !is_acceptable(device, from, &req) => {
            rdma_provider::debug!(
                device = device.attr().name,
                %from,
                pkey = req.pkey,
                "dropped a query for datagrams: forged source address, or another partition"
            );
        }
        Ok(Mad { transaction, message: Message::Req(req) })
            if device.pkeys.find(req.pkey).is_none() =>
        {
            rdma_provider::debug!(
                device = device.attr().name,
                %from,
                pkey = req.pkey,
                "rejected connection request: the port lacks its partition"
            );
            let (remote_id, reason) = (req.local_id, RejectReason::UNSUPPORTED);
            with(device, |state, now| {
                state.machine.reject_unacceptable(now, from, transaction, remote_id, reason)
            });
        }
        Ok(mad) => with(device, |state, now| {
            state.machine.on_message(now, from, mad, DeviceNumbers(device))
        }),
        Err(MadError::Request { transaction, remote_id, reason }) => {
            with(device, |state, now| {
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

/// Returns false for a query whose source address is not the sender's, or of another partition.
fn is_acceptable(device: &DeviceInner, from: Gid, req: &SidrReq) -> bool {
    let forged = |(source, _): (SocketAddr, IpAddr)| Gid::from(source.ip()) != from;
    !(device.network.is_udp() && req.addresses.is_some_and(forged))
        && device.pkeys.find(req.pkey).is_some()
}

/// Processes a report that no process at `from` has the port to which `bytes` were sent.
pub(crate) fn on_refusal(device: &Arc<DeviceInner>, from: Gid, bytes: &[u8]) {
    let Ok(Mad { transaction, message }) = Mad::decode(bytes) else { return };
    with(device, |state, _| match message {
        Message::Req(req) => state.machine.on_refusal(from, transaction, req.local_id),
        Message::SidrReq(req) => {
            state.machine.on_query_refusal(from, transaction, req.request_id);
        }
        _ => {}
    });
}

pub(crate) fn on_traffic(device: &Arc<DeviceInner>, connection: CommId, qpn: Qpn) {
    with(device, |state, _| state.machine.on_traffic(connection, qpn));
}

/// Handles a packet at a queue pair that is not ready. Returns an RNR NAK if its number is
/// reserved and this is the peer's first packet.
pub(crate) fn on_early(device: &Arc<DeviceInner>, from: Gid, packet: &Packet) -> Option<Packet> {
    let asks = packet.transport == Transport::Rc && !packet.body.is_for_requester();
    if !asks || !device.is_reserved(packet.dest) {
        return None;
    }
    let dest = with(device, |state, _| {
        state.machine.on_early(from, packet.dest, packet.psn, packet.pkey)
    })?;
    let aeth = Aeth { syndrome: Syndrome::RnrNak(NOT_READY.code()), msn: 0 };
    let body = Body::Acknowledge(aeth);
    Some(Packet {
        transport: Transport::Rc,
        pkey: packet.pkey,
        dest,
        psn: packet.psn,
        solicited: false,
        ack_request: false,
        body,
    })
}

/// Makes the peer wait for a queue pair that is not ready, if the manager has announced its number.
/// Returns true if so.
#[cold]
pub(crate) fn answer_early(device: &Arc<DeviceInner>, source: Gid, packet: &Packet) -> bool {
    let Some(reply) = on_early(device, source, packet) else { return false };
    Outbox::new(device).push(&reply, source, &Payload::Bytes(&[]));
    true
}

/// Notifies every id that the device is lost, and resets the state.
pub(crate) fn kill(device: &Arc<DeviceInner>) {
    let _held: Vec<_> = {
        let mut state = device.cm.0.lock();
        state.machine = Machine::new(device.gid, device.attr().guid, state.machine.mtu, 0);
        state.connections.clear();
        let owners = std::mem::take(&mut state.owners);
        let alive = owners.into_iter().filter_map(|(key, channel)| Some((key, channel.upgrade()?)));
        let notified = alive.map(|(key, channel)| {
            channel.push(CmEvent { key, kind: CmEventKind::DeviceRemoval });
            channel
        });
        notified.collect()
    };
}

impl Scheduled for DeviceInner {
    /// Processes the timeouts of its connections.
    fn run(self: Arc<Self>, _timer: Task) {
        with(&self, |state, now| {
            // A later timer may still follow.
            if state.scheduled.is_some_and(|at| at <= now) {
                state.scheduled = None;
            }
            state.machine.on_timer(now);
        });
    }
}

/// Processes the machine's outputs. Drop the result without the lock: it may hold a channel's
/// last reference.
fn flush(state: &mut State, device: &Arc<DeviceInner>, now: u64) -> Vec<Arc<Events>> {
    let mut held = Vec::new();
    while let Some(output) = state.machine.next_output() {
        match output {
            Output::Release(number) => device.release_number(number),
            Output::Send { to, mad } => transmit(device, to, &mad.encode()),
            Output::Event { connection, event } => {
                let Some(&key) = state.connections.get(&connection) else { continue };
                let Some(channel) = state.owner(key) else { continue };
                channel.push(CmEvent { key, kind: kind(event) });
                held.push(channel);
            }
            Output::Request { listener, connection, peer } => {
                let known = state.machine.request_path(connection);
                let (Some((addresses, path)), Some(channel)) = (known, state.owner(listener))
                else {
                    state.machine.release(now, connection);
                    continue;
                };
                let key = state.new_key(&channel);
                state.add(connection, key);
                let reserved = state.machine.connection(connection).filter(|known| known.reserved);
                let reserved = reserved.map(|known| known.local_qpn);
                let id = CmId::from_request(
                    device, &channel, key, connection, addresses, path, reserved,
                );
                let id = if state.machine.connection(connection).is_some() {
                    id
                } else {
                    id.of_datagrams()
                };
                channel.push(CmEvent {
                    key: listener,
                    kind: CmEventKind::ConnectRequest { id, peer },
                });
                held.push(channel);
            }
        }
    }
    if let Some(at) = state.machine.deadline()
        && state.scheduled.is_none_or(|scheduled| at < scheduled)
    {
        state.scheduled = Some(at);
        device.network.scheduler.run_at(at, device, Task::Timer);
    }
    held
}

/// Sends a management datagram between queue pairs 1 (IBTA 13.5.1); it may be lost.
fn transmit(device: &Arc<DeviceInner>, to: Gid, mad: &[u8; SIZE]) {
    let packet = Packet {
        transport: Transport::Ud,
        pkey: device.pkeys.first(),
        dest: MANAGEMENT,
        psn: device.next_management_psn(),
        solicited: false,
        ack_request: false,
        body: Body::Datagram { qkey: MANAGEMENT_QKEY, source: MANAGEMENT, imm: None },
    };
    Outbox::new(device).push(&packet, to, &Payload::Bytes(mad));
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
        Event::ServiceFound { peer, qpn, qkey, private_data } => {
            let address = AddressVector::new(PORT, 0, peer);
            CmEventKind::ServiceFound { service: CmDatagram { address, qpn, qkey }, private_data }
        }
    }
}

//! Transfer of packets between the state machines of queue pairs.
//!
//! [`pump`](QpInner::pump), called with the requester half locked, passes packets directly to the
//! peer's responder half, which replies at once, or encodes them onto the network. It moves a
//! bounded slice. The scheduler continues the rest, alternating with other queue pairs: no post
//! blocks for the length of a large message. `execute` delivers a message of one packet before it
//! is queued, and counts it towards the slice of its post.

use std::sync::Arc;

use rdma_provider::locks::MutexGuard;

use rdma_provider::types::{Access, Data, Gid, Psn, SendWr, Transport};

use super::DeviceInner;
use super::deferred::Deferred;
use super::outbox::Outbox;
use super::queue_pair::{QpInner, ReceiveSide, ReceiverHalf, SendSide, Sender};
use crate::cm::agent;
use crate::memory::dma::{Gather, Payload};
use crate::net::scheduler::{Scheduled, Task};
use crate::net::udp::Pace;
use crate::roce::ip_fields::Origin;
use crate::roce::packet::{Body, Packet};
use crate::roce::partition::{are_full_members, may_communicate};
use crate::roce::requester::{Destination, DirectMessage, Outgoing, Requester, Source};
use crate::roce::responder::Responder;

/// Minimum nanoseconds between congestion notifications of a queue pair, as adapters have it.
const NOTIFICATION_INTERVAL: u64 = 50_000;

/// The rest of a slice.
///
/// 256 KiB or 64 small packets or messages take about 20 µs, well below the time for which a task
/// may block an executor's thread. A message without packets may exceed it by its length.
pub(crate) struct Budget {
    packets: u32,
    bytes: usize,
}

impl Budget {
    pub(crate) const fn slice() -> Self {
        Self { packets: 64, bytes: 256 << 10 }
    }

    pub(crate) const fn spend(&mut self, bytes: usize) {
        self.packets = self.packets.saturating_sub(1);
        self.bytes = self.bytes.saturating_sub(bytes);
    }

    pub(crate) const fn is_spent(&self) -> bool {
        self.packets == 0 || self.bytes == 0
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Half {
    Sender,
    Receiver,
}

impl QpInner {
    /// Sends queued work within the budget, then settles the requester and unlocks it.
    #[inline]
    pub(crate) fn pump(
        self: &Arc<Self>,
        mut sender: MutexGuard<'_, Sender>,
        budget: Budget,
        deferred: &Deferred,
    ) {
        if self.device.network.is_queued() {
            self.pump_queued(sender, budget, deferred);
        } else {
            self.pump_memory(&mut sender, budget, deferred);
        }
    }

    /// Sends within the process.
    #[inline(never)]
    fn pump_memory(self: &Arc<Self>, sender: &mut Sender, budget: Budget, deferred: &Deferred) {
        if !sender.continuing && sender.machine.has_work() {
            let more = budget.is_spent()
                || match self.transport() {
                    Transport::Rc | Transport::Uc => self.pump_connected(sender, budget, deferred),
                    Transport::Ud => self.pump_datagrams(sender, budget, deferred),
                    Transport::Dci => self.pump_initiator(sender, budget, deferred),
                };
            if more {
                self.continue_later(sender);
            }
        }
        self.settle(sender, deferred);
    }

    /// Sends over a network, and reports what is in flight to the path.
    #[inline(never)]
    fn pump_queued(
        self: &Arc<Self>,
        mut sender: MutexGuard<'_, Sender>,
        budget: Budget,
        deferred: &Deferred,
    ) {
        if !sender.continuing && sender.machine.has_work() {
            let more = if self.transport() == Transport::Dci {
                self.pump_initiator_queued(&mut sender, budget, deferred)
            } else {
                self.send_queued(&mut sender, budget, deferred)
            };
            if more {
                self.continue_later(&mut sender);
            }
        }
        // Also after responses, and for work that is local or stalled and sent nothing.
        sender.update_window();
        self.settle(&mut sender, deferred);
    }

    /// Schedules the next slice.
    #[cold]
    fn continue_later(self: &Arc<Self>, sender: &mut Sender) {
        sender.continuing = true;
        let scheduler = &self.device.network.scheduler;
        let now = scheduler.now();
        let at = self.pace().map_or(now, |pace| pace.resumes(sender.passed_over).max(now));
        scheduler.run_at(at, self, Task::Continue);
    }

    /// Executes a work request on the connected peer without the send queue, or queues it if that
    /// is not possible or the budget is spent. Returns true if the caller must [pump](Self::pump).
    #[inline(always)]
    pub(crate) fn execute_or_queue(
        &self,
        sender: &mut Sender,
        wr: &SendWr<'_>,
        length: u32,
        budget: &mut Budget,
        deferred: &Deferred,
    ) -> bool {
        let acknowledged =
            if budget.is_spent() { None } else { self.execute(sender, wr, length, deferred) };
        let mut out = SendSide { qp: self, deferred };
        if acknowledged == Some(true) {
            sender.machine.unqueued_sent(wr, length, &mut out);
            budget.spend(length as usize);
            return false;
        }
        sender.machine.post(wr, length, &mut out);
        if acknowledged.is_some() {
            sender.machine.fast_path_sent(1, false, &mut out);
            budget.spend(length as usize);
        }
        true
    }

    /// Executes a work request on the connected peer, if it is a message of one packet, nothing is
    /// queued before it, and the peer executes it at once. Returns whether it was acknowledged, or
    /// `None` if it was not executed.
    #[inline(always)]
    fn execute(
        &self,
        sender: &Sender,
        wr: &SendWr<'_>,
        length: u32,
        deferred: &Deferred,
    ) -> Option<bool> {
        let Sender { machine, peer: Some(peer), continuing: false, .. } = sender else {
            return None;
        };
        let here = &self.device;
        if self.transport() != Transport::Rc || here.network.is_queued() {
            return None;
        }
        let (psn, message) = machine.unqueued(wr, length)?;
        let mut receiver = peer.reached_from(here)?;
        let ReceiverHalf { device: there, machine: responder, .. } = &mut *receiver;
        let connected = responder.config.peer == self.qpn();
        if !connected || !are_full_members(machine.config.pkey, responder.config.pkey) {
            return None;
        }
        let mut peer_out = ReceiveSide { qp: peer, deferred };
        let pd = machine.config.pd;
        let acknowledged =
            self.deliver((psn, &message), 1, pd, responder, (there, &mut peer_out))?;
        rdma_provider::trace!(qpn = %self.qpn(), ?psn, length, acknowledged, "message");
        Some(acknowledged)
    }

    /// Locks the receiver, unless the queue pair is destroyed or a device has no link.
    #[inline(always)]
    fn reached_from(&self, device: &DeviceInner) -> Option<MutexGuard<'_, ReceiverHalf>> {
        if !device.is_linked() {
            return None;
        }
        let receiver = self.receiver.lock();
        if self.is_destroyed() || !receiver.device.is_linked() {
            return None;
        }
        Some(receiver)
    }

    /// Executes a message that is `packets` long on the peer's responder. Returns whether it was
    /// acknowledged, or `None` if it must go by packets.
    #[inline(always)]
    fn deliver(
        &self,
        (psn, message): (Psn, &DirectMessage<'_>),
        packets: u32,
        pd: u32,
        responder: &mut Responder,
        (there, out): (&DeviceInner, &mut ReceiveSide<'_>),
    ) -> Option<bool> {
        let here = &self.device;
        let reads_back = message.op.reads_back();
        let segment;
        let payload = match message.data {
            Data::Inline(bytes) => Payload::Bytes(bytes),
            Data::Sges([sge]) => {
                let need = if reads_back { Access::LOCAL_WRITE } else { Access::empty() };
                let found = here.keys.resolve(sge.lkey.0, pd, sge.addr, message.length, need);
                segment = found.ok()?;
                Payload::Segment(&segment)
            }
            Data::Sges(_) | Data::Window(_) => return None,
        };
        match payload {
            Payload::Segment(into) if reads_back => responder
                .on_direct_read((psn, packets), &here.gid, message.op, into, &there.keys)
                .map(|()| true),
            _ if reads_back => None,
            _ => responder.on_direct_message(
                (psn, packets),
                &here.gid,
                message,
                &payload,
                &there.keys,
                out,
            ),
        }
    }

    /// Sends directly to a connected peer. Returns whether work is left.
    #[inline(never)]
    fn pump_connected(
        self: &Arc<Self>,
        sender: &mut Sender,
        mut budget: Budget,
        deferred: &Deferred,
    ) -> bool {
        self.find_peer(sender);
        let Sender { machine, peer, peer_at, .. } = sender;
        let Some((peer, mut receiver)) =
            peer.as_ref().and_then(|peer| Some((peer, peer.reached_from(&self.device)?)))
        else {
            return self.pump_lost(machine, *peer_at, budget, deferred);
        };
        let ReceiverHalf { device: there, machine: responder, unconfirmed, .. } = &mut *receiver;
        let here = &self.device;
        // Replies go elsewhere if the peer is connected to another queue pair.
        let answers = responder.config.peer == self.qpn()
            && may_communicate(machine.config.pkey, responder.config.pkey);
        let unreliable = self.transport() != Transport::Rc;
        let mut out = SendSide { qp: self, deferred };
        let mut peer_out = ReceiveSide { qp: peer, deferred };
        let mut gather = Gather::new();
        let mut reply_gather = Gather::new();
        loop {
            while let Some(reply) =
                responder.next_reply(&there.keys, &mut reply_gather, &mut peer_out)
            {
                let payload = Payload::Segments(&reply_gather);
                if answers {
                    rdma_provider::trace!(qpn = %self.qpn(), ?reply, "reply");
                    machine.on_response(&reply, &payload, &here.keys, &mut out);
                }
                if !reply_gather.is_empty() {
                    budget.spend(payload.len());
                    reply_gather.clear();
                    if budget.is_spent() {
                        return true;
                    }
                }
            }
            if budget.is_spent() {
                return machine.has_work();
            }
            if answers && let Some((psn, message, packets)) = machine.direct_head() {
                let (length, pd) = (message.length, machine.config.pd);
                let of_peer = (&**there, &mut peer_out);
                let done = self.deliver((psn, &message), packets, pd, responder, of_peer);
                if let Some(acknowledged) = done {
                    rdma_provider::trace!(qpn = %self.qpn(), ?psn, length, acknowledged, "message");
                    machine.fast_path_sent(packets, acknowledged, &mut out);
                    budget.spend(length);
                    continue;
                }
            }
            let Some(outgoing) = machine.next_packet(&here.keys, &mut gather, &mut out) else {
                return false;
            };
            rdma_provider::trace!(qpn = %self.qpn(), packet = ?outgoing.packet, "request");
            let payload = payload_of(machine, &outgoing, &gather);
            let origin = Origin { gid: here.gid, ip_fields: peer_at.ip_fields };
            responder.on_request(&outgoing.packet, origin, &payload, &there.keys, &mut peer_out);
            budget.spend(payload.len());
            gather.clear();
            if unconfirmed.is_some()
                && !responder.is_receiving()
                && let Some(reply) = agent::on_early(there, here.gid, &outgoing.packet)
            {
                machine.on_response(&reply, &Payload::Bytes(&[]), &here.keys, &mut out);
            }
            if unreliable {
                machine.on_sent(&mut out);
            }
        }
    }

    /// Sends packets to a missing queue pair: they are lost, unless the connection manager reserved
    /// its number and replies.
    #[cold]
    fn pump_lost(
        self: &Arc<Self>,
        machine: &mut Requester,
        at: Destination,
        mut budget: Budget,
        deferred: &Deferred,
    ) -> bool {
        let here = &self.device;
        let there = DeviceInner::at(&here.network, at.gid)
            .filter(|there| here.is_linked() && there.is_linked());
        let mut out = SendSide { qp: self, deferred };
        let mut gather = Gather::new();
        while let Some(lost) = machine.next_packet(&here.keys, &mut gather, &mut out) {
            gather.clear();
            machine.on_sent(&mut out);
            if let Some(there) = &there
                && let Some(reply) = agent::on_early(there, here.gid, &lost.packet)
            {
                machine.on_response(&reply, &Payload::Bytes(&[]), &here.keys, &mut out);
            }
            budget.spend(0);
            if budget.is_spent() {
                return machine.has_work();
            }
        }
        false
    }

    #[inline(never)]
    fn pump_datagrams(
        self: &Arc<Self>,
        sender: &mut Sender,
        mut budget: Budget,
        deferred: &Deferred,
    ) -> bool {
        let here = &self.device;
        let mut out = SendSide { qp: self, deferred };
        let mut gather = Gather::new();
        while let Some(outgoing) = sender.machine.next_packet(&here.keys, &mut gather, &mut out) {
            let group = Some(outgoing.to.gid).filter(|gid| gid.is_multicast());
            if group.is_none() {
                let (before, to) = (sender.peer_at, outgoing.to);
                if before.gid != to.gid || before.qpn != to.qpn {
                    sender.peer_at = to;
                    sender.peer = None;
                }
                self.find_peer(sender);
            }
            let payload = payload_of(&sender.machine, &outgoing, &gather);
            let origin = Origin { gid: here.gid, ip_fields: outgoing.to.ip_fields };
            if let Some(group) = group {
                self.send_to_group(&outgoing.packet, (origin, group), &payload, deferred);
            } else if let Some(peer) = &sender.peer
                && let Some(mut receiver) = peer.reached_from(here)
            {
                let ReceiverHalf { device: there, machine: responder, .. } = &mut *receiver;
                let mut peer_out = ReceiveSide { qp: peer, deferred };
                let packet = &outgoing.packet;
                responder.on_request(packet, origin, &payload, &there.keys, &mut peer_out);
            }
            budget.spend(payload.len());
            gather.clear();
            sender.machine.on_sent(&mut out);
            if budget.is_spent() {
                return sender.machine.has_work();
            }
        }
        false
    }

    /// Replaces a missing or destroyed `sender.peer`.
    #[inline]
    fn find_peer(&self, sender: &mut Sender) {
        if sender.peer.as_ref().is_none_or(|peer| peer.is_destroyed()) {
            sender.peer = self.resolve(sender.peer_at);
        }
    }

    #[cold]
    pub(crate) fn resolve(&self, at: Destination) -> Option<Arc<Self>> {
        DeviceInner::at(&self.device.network, at.gid)?.queue_pair(at.qpn)
    }

    /// Returns the pace of UC and UD over UDP, which no acknowledgement limits.
    fn pace(&self) -> Option<&Pace> {
        match self.transport() {
            Transport::Uc | Transport::Ud => self.device.endpoint().map(|endpoint| endpoint.pace()),
            Transport::Rc | Transport::Dci => None,
        }
    }

    /// Encodes packets onto the network. Returns whether work is left.
    ///
    /// Sends without the lock, because the thread that receives the responses needs it and may
    /// otherwise run, and wait, before the system call returns. `continuing` keeps the packets in
    /// order: other threads only queue meanwhile, and this one continues with their work.
    fn send_queued(
        self: &Arc<Self>,
        sender: &mut MutexGuard<'_, Sender>,
        mut budget: Budget,
        deferred: &Deferred,
    ) -> bool {
        loop {
            let mut outbox = Outbox::new(&self.device);
            let more = self.fill_outbox(sender, &mut outbox, &mut budget, deferred);
            if outbox.is_empty() {
                return more;
            }
            // Before responses arrive.
            sender.update_window();
            sender.continuing = true;
            MutexGuard::unlocked(sender, || drop(outbox));
            sender.continuing = false;
            if more {
                return sender.machine.has_work();
            }
        }
    }

    /// Makes packets within the window, the pace and the budget. Returns whether work is left.
    fn fill_outbox(
        self: &Arc<Self>,
        sender: &mut Sender,
        outbox: &mut Outbox<'_>,
        budget: &mut Budget,
        deferred: &Deferred,
    ) -> bool {
        let here = &self.device;
        if !sender.acquire_window() {
            return false;
        }
        let pace = self.pace().map(|pace| (pace, here.network.scheduler.now()));
        let mut out = SendSide { qp: self, deferred };
        let mut gather = Gather::new();
        sender.passed_over = true;
        while !pace.is_some_and(|(pace, now)| pace.is_spent(now)) {
            sender.passed_over = false;
            let Some(outgoing) = sender.machine.next_packet(&here.keys, &mut gather, &mut out)
            else {
                return false;
            };
            let payload = payload_of(&sender.machine, &outgoing, &gather);
            let to = if self.transport() == Transport::Ud { outgoing.to } else { sender.peer_at };
            outbox.set_ip_fields(to.ip_fields);
            outbox.push(&outgoing.packet, to.gid, &payload);
            budget.spend(payload.len());
            if let Some((pace, now)) = pace {
                pace.spend(now, payload.len());
            }
            gather.clear();
            sender.machine.on_sent(&mut out);
            if budget.is_spent() {
                break;
            }
        }
        sender.machine.has_work()
    }

    /// Handles a packet from the network.
    ///
    /// The caller must call [`answer`](Self::answer) for the returned half, at once or after more
    /// packets.
    pub(crate) fn on_packet(
        self: &Arc<Self>,
        packet: &Packet,
        origin: Origin,
        payload: &[u8],
    ) -> Half {
        let deferred = Deferred::new();
        let mut early = false;
        let marked = origin.ip_fields.is_marked();
        if marked {
            self.notify_of_congestion(origin.gid);
        }
        let payload = Payload::Bytes(payload);
        let keys = &self.device.keys;
        let half = if packet.body.is_for_requester() {
            let mut sender = self.sender.lock();
            if origin.gid == sender.peer_at.gid {
                // The requester has asked for this traffic, so it also slows down.
                if marked && matches!(packet.body, Body::ReadResponse { .. }) {
                    sender.machine.slow_down();
                }
                sender.machine.on_response(
                    packet,
                    &payload,
                    keys,
                    &mut SendSide { qp: self, deferred: &deferred },
                );
            }
            Half::Sender
        } else {
            let mut receiver = self.receiver.lock();
            if !self.is_destroyed() {
                let mut out = ReceiveSide { qp: self, deferred: &deferred };
                let dropped = receiver.machine.counters.dropped;
                receiver.machine.on_request(packet, origin, &payload, keys, &mut out);
                if receiver.unconfirmed.is_some() {
                    if receiver.machine.counters.dropped == dropped {
                        if let Some(connection) = receiver.unconfirmed.take() {
                            let qp = Arc::clone(self);
                            deferred.push(move |_| {
                                agent::on_traffic(&qp.device, connection, qp.qpn());
                            });
                        }
                    } else {
                        early = !receiver.machine.is_receiving();
                    }
                }
            }
            Half::Receiver
        };
        deferred.run();
        if early {
            agent::answer_early(&self.device, origin.gid, packet);
        }
        half
    }

    /// Counts a marked packet. If it is of the connected peer, sends a congestion notification to
    /// it, unless one was sent shortly before.
    #[cold]
    fn notify_of_congestion(&self, source: Gid) {
        let now = self.device.network.scheduler.now();
        let mut receiver = self.receiver.lock();
        receiver.machine.counters.marked += 1;
        let config = &receiver.machine.config;
        let connected = matches!(self.transport(), Transport::Rc | Transport::Uc)
            && config.peer_gid == source
            && !self.is_destroyed();
        if !connected || now < receiver.notify_after {
            return;
        }
        let packet = Packet::congestion_notification(config.pkey, config.peer);
        receiver.notify_after = now + NOTIFICATION_INTERVAL;
        receiver.machine.counters.congestion_notifications += 1;
        let ip_fields = receiver.ip_fields.not_markable();
        drop(receiver);
        let mut outbox = Outbox::new(&self.device);
        outbox.set_ip_fields(ip_fields);
        outbox.push(&packet, source, &Payload::Bytes(&[]));
    }

    /// Sends packets or replies of a half, after received packets or an admission to the window.
    pub(crate) fn answer(self: &Arc<Self>, half: Half) {
        let deferred = Deferred::new();
        match half {
            Half::Sender => {
                self.pump(self.sender.lock(), Budget::slice(), &deferred);
            }
            Half::Receiver => {
                let mut receiver = self.receiver.lock();
                if !self.is_destroyed() {
                    self.reply(&mut receiver, &deferred);
                }
            }
        }
        deferred.run();
    }

    pub(crate) fn reply(self: &Arc<Self>, receiver: &mut ReceiverHalf, deferred: &Deferred) {
        if receiver.replying {
            return;
        }
        let to = receiver.machine.config.peer_gid;
        let mut out = ReceiveSide { qp: self, deferred };
        let mut outbox = Outbox::new(&self.device);
        outbox.set_ip_fields(receiver.ip_fields);
        let mut budget = Budget::slice();
        let mut gather = Gather::new();
        while let Some(reply) =
            receiver.machine.next_reply(&self.device.keys, &mut gather, &mut out)
        {
            let payload = Payload::Segments(&gather);
            outbox.push(&reply, to, &payload);
            budget.spend(payload.len());
            gather.clear();
            if budget.is_spent() && receiver.machine.has_replies() {
                receiver.replying = true;
                let scheduler = &self.device.network.scheduler;
                scheduler.run_at(scheduler.now(), self, Task::Reply);
                return;
            }
        }
    }

    fn on_timer(&self, sender: &mut Sender, deferred: &Deferred) {
        let now = self.device.network.scheduler.now();
        while sender.scheduled.last().is_some_and(|&at| at <= now) {
            sender.scheduled.pop();
        }
        sender.machine.on_timer(now, &mut SendSide { qp: self, deferred });
    }

    #[cold]
    pub(crate) fn schedule_timer(self: &Arc<Self>, sender: &mut Sender, deadline: u64) {
        // A job that runs too early is rescheduled, so only an earlier deadline needs a new one.
        // Unless all are recorded, each is rescheduled and their number grows.
        if sender.scheduled.last().is_none_or(|&earliest| deadline < earliest) {
            sender.scheduled.push(deadline);
            self.device.network.scheduler.run_at(deadline, self, Task::Timer);
        }
    }
}

impl Scheduled for QpInner {
    fn run(self: Arc<Self>, task: Task) {
        let deferred = Deferred::new();
        if task == Task::Reply {
            let mut receiver = self.receiver.lock();
            receiver.replying = false;
            self.reply(&mut receiver, &deferred);
        } else {
            let mut sender = self.sender.lock();
            match task {
                Task::Timer => self.on_timer(&mut sender, &deferred),
                Task::Continue => sender.continuing = false,
                Task::Admitted | Task::Reply => {}
            }
            self.pump(sender, Budget::slice(), &deferred);
        }
        deferred.run();
    }
}

#[inline]
pub(crate) fn payload_of<'a, 'k>(
    machine: &'a Requester,
    outgoing: &Outgoing,
    gather: &'a Gather<'k>,
) -> Payload<'a, 'k> {
    match outgoing.source {
        Source::Gathered => Payload::Segments(gather),
        source => Payload::Bytes(machine.inline(source)),
    }
}

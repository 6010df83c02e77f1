//! Transport of packets between initiators and targets, directly or over the network.

use std::sync::Arc;

use rdma_provider::types::Gid;

use crate::dc::{Header, Outcome, SessionKey};
use crate::memory::dma::{Gather, Payload};
use crate::net::scheduler::{Scheduled, Task};
use crate::roce::packet::Packet;
use crate::roce::requester::{Destination, Requester};

use super::DeviceInner;
use super::dct::{DctInner, State, TargetSide};
use super::deferred::Deferred;
use super::outbox::Outbox;
use super::pump::{Budget, payload_of};
use super::queue_pair::{QpInner, SendSide, Sender};

impl QpInner {
    /// Executes requests directly. True if work remains after a slice.
    #[inline(never)]
    pub(crate) fn pump_initiator(
        self: &Arc<Self>,
        sender: &mut Sender,
        mut budget: Budget,
        deferred: &Deferred,
    ) -> bool {
        let here = &self.device;
        let mut out = SendSide { qp: self, deferred };
        let mut gather = Gather::new();
        let mut answered = true;
        loop {
            if answered
                && let Some(target) = sender.target.upgrade()
                && self.take_replies(&mut sender.machine, &target, &mut budget, deferred)
            {
                return true;
            }
            if budget.is_spent() {
                return sender.machine.has_work();
            }
            let Some(outgoing) = sender.machine.next_packet(&here.keys, &mut gather, &mut out)
            else {
                return false;
            };
            let Some(header) = sender.machine.header() else { return false };
            rdma_provider::trace!(qpn = %self.qpn(), packet = ?outgoing.packet, ?header, "request");
            let target = self.find_target(sender, outgoing.to);
            let payload = payload_of(&sender.machine, &outgoing, &gather);
            budget.spend(payload.len());
            let outcome = match target {
                Some(target) => {
                    target.execute((&outgoing.packet, &header), self, &payload, deferred)
                }
                None => Outcome::Nothing,
            };
            gather.clear();
            answered = matches!(outcome, Outcome::Session(_));
            if let Outcome::Answer((packet, header)) = outcome {
                let payload = Payload::Bytes(&[]);
                sender.machine.on_answer(
                    (&packet, &header),
                    outgoing.to.gid,
                    &payload,
                    &here.keys,
                    &mut out,
                );
            }
        }
    }

    /// Processes the session's replies. True if the slice is spent.
    fn take_replies(
        self: &Arc<Self>,
        machine: &mut Requester,
        target: &DctInner,
        budget: &mut Budget,
        deferred: &Deferred,
    ) -> bool {
        let Some(header) = machine.header() else { return false };
        let (here, there) = (&self.device, &target.device);
        if !here.is_linked() || !there.is_linked() {
            return false;
        }
        let key = SessionKey::new(here.gid, self.qpn(), header.session.incarnation);
        let mut out = SendSide { qp: self, deferred };
        let mut target_out = TargetSide { dct: target, deferred };
        let mut gather = Gather::new();
        let mut state = target.state.lock();
        while let Some((packet, header)) =
            state.machine.next_reply(&key, &there.keys, &mut gather, &mut target_out)
        {
            rdma_provider::trace!(qpn = %self.qpn(), ?packet, ?header, "reply");
            let payload = Payload::Segments(&gather);
            machine.on_answer((&packet, &header), there.gid, &payload, &here.keys, &mut out);
            if !gather.is_empty() {
                budget.spend(payload.len());
                gather.clear();
                if budget.is_spent() {
                    return true;
                }
            }
        }
        false
    }

    fn find_target(&self, sender: &mut Sender, to: Destination) -> Option<Arc<DctInner>> {
        sender.set_destination(to);
        sender.target.upgrade().or_else(|| {
            let found = DeviceInner::at(&self.device.network, to.gid)?.target(to.qpn)?;
            sender.target = Arc::downgrade(&found);
            Some(found)
        })
    }

    /// Sends requests over the network. True if work remains after a slice.
    #[inline(never)]
    pub(crate) fn pump_initiator_queued(
        self: &Arc<Self>,
        sender: &mut Sender,
        mut budget: Budget,
        deferred: &Deferred,
    ) -> bool {
        let here = &self.device;
        // Nothing is in flight to the previous target, so the window of the new path applies.
        if let Some(to) = sender.machine.next_target() {
            sender.switch_destination(self, to);
        }
        if !sender.acquire_window() {
            return false;
        }
        let mut out = SendSide { qp: self, deferred };
        let mut outbox = Outbox::new(here);
        let mut gather = Gather::new();
        while let Some(outgoing) = sender.machine.next_packet(&here.keys, &mut gather, &mut out) {
            let Some(header) = sender.machine.header() else { return false };
            let payload = payload_of(&sender.machine, &outgoing, &gather);
            outbox.set_ip_fields(outgoing.to.ip_fields);
            outbox.push_framed(&(outgoing.packet, header), outgoing.to.gid, &payload);
            budget.spend(payload.len());
            gather.clear();
            if budget.is_spent() {
                return sender.machine.has_work();
            }
        }
        false
    }

    pub(crate) fn on_answer(
        self: &Arc<Self>,
        framed: (&Packet, &Header),
        source: Gid,
        payload: &[u8],
    ) {
        let deferred = Deferred::new();
        {
            let mut sender = self.sender.lock();
            let mut out = SendSide { qp: self, deferred: &deferred };
            sender.machine.on_answer(
                framed,
                source,
                &Payload::Bytes(payload),
                &self.device.keys,
                &mut out,
            );
        }
        deferred.run();
    }

    /// Sends CLOSE to the current target, if any.
    pub(crate) fn close_session(self: &Arc<Self>, sender: &mut Sender, deferred: &Deferred) {
        let Some(header) = sender.machine.header() else { return };
        let Some(outgoing) = sender.machine.close_session() else { return };
        let framed = (outgoing.packet, header);
        let nothing = Payload::Bytes(&[]);
        if self.device.network.is_queued() {
            Outbox::new(&self.device).push_framed(&framed, outgoing.to.gid, &nothing);
        } else if let Some(target) = sender.target.upgrade() {
            target.execute((&framed.0, &framed.1), self, &nothing, deferred);
        }
    }
}

impl DctInner {
    fn execute(
        &self,
        framed: (&Packet, &Header),
        from: &QpInner,
        payload: &Payload<'_, '_>,
        deferred: &Deferred,
    ) -> Outcome {
        let (here, there) = (&self.device, &from.device);
        if !here.is_linked() || !there.is_linked() {
            return Outcome::Nothing;
        }
        let mut out = TargetSide { dct: self, deferred };
        self.state.lock().machine.on_request(framed, there.gid, payload, &here.keys, &mut out)
    }

    /// Handles a packet from the network. Call [`answer`](Self::answer) afterwards to send replies.
    pub(crate) fn on_packet(
        self: &Arc<Self>,
        framed: (&Packet, &Header),
        source: Gid,
        payload: &[u8],
    ) {
        let deferred = Deferred::new();
        {
            let mut state = self.state.lock();
            let mut out = TargetSide { dct: self, deferred: &deferred };
            let payload = Payload::Bytes(payload);
            match state.machine.on_request(framed, source, &payload, &self.device.keys, &mut out) {
                Outcome::Nothing => {}
                Outcome::Answer(answer) => {
                    Outbox::new(&self.device).push_framed(&answer, source, &Payload::Bytes(&[]));
                }
                Outcome::Session(key) => state.machine.put_due(key),
            }
        }
        deferred.run();
    }

    /// Sends replies unless the scheduler already does.
    pub(crate) fn answer(self: &Arc<Self>) {
        let deferred = Deferred::new();
        {
            let mut state = self.state.lock();
            if !state.replying {
                self.reply(&mut state, &deferred);
            }
        }
        deferred.run();
    }

    /// Sends a slice of replies, session by session.
    fn reply(self: &Arc<Self>, state: &mut State, deferred: &Deferred) {
        let device = &self.device;
        let mut out = TargetSide { dct: self, deferred };
        let mut outbox = Outbox::new(device);
        let mut budget = Budget::slice();
        let mut gather = Gather::new();
        while let Some(key) = state.machine.take_due() {
            while let Some(framed) =
                state.machine.next_reply(&key, &device.keys, &mut gather, &mut out)
            {
                let payload = Payload::Segments(&gather);
                outbox.push_framed(&framed, key.gid, &payload);
                budget.spend(payload.len());
                gather.clear();
                if budget.is_spent() {
                    state.machine.put_due(key);
                    state.replying = true;
                    let scheduler = &device.network.scheduler;
                    scheduler.run_at(scheduler.now(), self, Task::Reply);
                    return;
                }
            }
        }
    }
}

impl Scheduled for DctInner {
    /// Continues to send replies.
    fn run(self: Arc<Self>, _reply: Task) {
        let deferred = Deferred::new();
        {
            let mut state = self.state.lock();
            state.replying = false;
            self.reply(&mut state, &deferred);
        }
        deferred.run();
    }
}

//! A device as a node of its network: arriving packets, and loss of the device.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use rdma_provider::types::{AsyncEvent, Gid, Transport};

use super::DeviceInner;
use super::dct::DctInner;
use super::deferred::Deferred;
use super::multicast::deliver_to_members;
use super::pump::Half;
use super::queue_pair::QpInner;
use crate::cm::agent::{self, MANAGEMENT, MANAGEMENT_QKEY};
use crate::dc::Header;
use crate::memory::dma::Payload;
use crate::net::node::{Arrival, Node};
use crate::roce::ip_fields::Origin;
use crate::roce::packet::{Body, Packet};

impl Node for DeviceInner {
    fn receive(self: Arc<Self>, packets: &mut dyn Iterator<Item = Arrival<'_>>) -> usize {
        let mut answer = DeferredAnswer::default();
        let unwanted = packets
            .filter(|(origin, packet, payload)| {
                !self.is_linked() || !self.on_packet(*origin, packet, payload, &mut answer)
            })
            .count();
        answer.flush();
        unwanted
    }

    fn receive_multicast(
        self: Arc<Self>,
        group: Gid,
        packets: &mut dyn Iterator<Item = Arrival<'_>>,
    ) -> usize {
        let deferred = Deferred::new();
        let members = self.groups.members(group);
        let unwanted = packets
            .filter(|(origin, packet, payload)| {
                let payload = Payload::Bytes(payload);
                let route = (*origin, group);
                !self.is_linked()
                    || !deliver_to_members(&members, packet, route, &payload, &deferred)
            })
            .count();
        deferred.run();
        unwanted
    }

    fn on_refusal(self: Arc<Self>, peer: Gid, payload: &[u8]) {
        agent::on_refusal(&self, peer, payload);
    }

    /// Raises `DEVICE_FATAL`, fails queue pairs and targets, then completion queues.
    fn kill(self: Arc<Self>) {
        if self.dead.swap(true, Ordering::AcqRel) {
            return;
        }
        rdma_provider::error!(device = self.attr.name, "device lost; failing its queue pairs");
        self.linked.store(false, Ordering::Relaxed);
        self.announce(AsyncEvent::DeviceFatal);
        let all: Vec<_> = {
            let table = self.queue_pairs.read();
            table.values().filter_map(Weak::upgrade).collect()
        };
        let deferred = Deferred::new();
        for qp in all {
            qp.fail(None, None, &deferred);
        }
        let targets: Vec<_> = self.targets.read().values().filter_map(Weak::upgrade).collect();
        for target in targets {
            target.fail(None, &deferred);
        }
        deferred.run();
        // After all flushes: failed polls end work that no flush completes, such as shared
        // receives.
        for cq in self.completion_queues.lock().values().filter_map(Weak::upgrade) {
            cq.mark_lost();
        }
        agent::kill(&self);
    }
}

impl DeviceInner {
    /// Processes a packet; returns false without a receiver. `answer` defers the response.
    fn on_packet(
        self: &Arc<Self>,
        origin: Origin,
        packet: &Packet,
        payload: &[u8],
        answer: &mut DeferredAnswer,
    ) -> bool {
        let source = origin.gid;
        if packet.transport == Transport::Dci {
            return self.on_framed(source, packet, payload, answer);
        }
        if packet.dest != MANAGEMENT {
            // DC initiators receive only from their targets.
            let taken = self.queue_pair(packet.dest).filter(|qp| qp.transport() != Transport::Dci);
            let Some(qp) = taken else {
                return packet.body != Body::Congestion
                    && agent::answer_early(self, source, packet);
            };
            let half = qp.on_packet(packet, origin, payload);
            answer.defer(qp, half);
        } else if self.pkeys.find(packet.pkey).is_none() {
            self.pkeys.count_violation();
            return false;
        } else if let Body::Datagram { qkey: MANAGEMENT_QKEY, imm: None, .. } = packet.body {
            agent::on_datagram(self, source, payload);
        } else {
            return false;
        }
        true
    }

    fn on_framed(
        &self,
        source: Gid,
        packet: &Packet,
        payload: &[u8],
        answer: &mut DeferredAnswer,
    ) -> bool {
        let Ok((header, payload)) = Header::parse(payload) else { return false };
        if packet.body.is_dc_response() {
            let Some(qp) = self.queue_pair(packet.dest) else { return false };
            qp.on_answer((packet, &header), source, payload);
            answer.defer(qp, Half::Sender);
        } else {
            let Some(target) = self.target(packet.dest) else { return false };
            target.on_packet((packet, &header), source, payload);
            answer.defer_target(target);
        }
        true
    }
}

/// The receiver of consecutive packets, which answers once, after the last.
#[derive(Debug, Default)]
struct DeferredAnswer(Option<Answerer>);

#[derive(Debug)]
enum Answerer {
    Pair(Arc<QpInner>, Half),
    Target(Arc<DctInner>),
}

impl DeferredAnswer {
    fn defer(&mut self, qp: Arc<QpInner>, half: Half) {
        if !matches!(
            &self.0,
            Some(Answerer::Pair(before, of)) if *of == half && Arc::ptr_eq(before, &qp)
        ) {
            self.flush();
        }
        self.0 = Some(Answerer::Pair(qp, half));
    }

    fn defer_target(&mut self, target: Arc<DctInner>) {
        if !matches!(&self.0, Some(Answerer::Target(before)) if Arc::ptr_eq(before, &target)) {
            self.flush();
        }
        self.0 = Some(Answerer::Target(target));
    }

    fn flush(&mut self) {
        match self.0.take() {
            Some(Answerer::Pair(qp, half)) => qp.answer(half),
            Some(Answerer::Target(target)) => target.answer(),
            None => {}
        }
    }
}

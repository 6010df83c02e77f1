//! How a requester shares the way to its peer with others, over UDP.

use std::sync::{Arc, Weak};

use rdma_provider::types::Gid;

use super::{QpInner, Sender};
use crate::roce::requester::{Destination, Flow};

impl Sender {
    /// Who sends to `peer` from now on shares the way with others, over UDP.
    pub(crate) fn take_way(&mut self, qp: &Arc<QpInner>, peer: Gid) {
        let device = qp.device();
        let link =
            device.endpoint().map(|endpoint| endpoint.link_to(peer, &device.network.scheduler));
        self.place = link.map(|link| link.place(Arc::downgrade(qp)));
        if self.place.is_some() {
            self.machine.config.flow = Flow::of(1);
        }
    }

    /// An initiator of dynamic connections, of whom nothing is underway, turns to `to`, over a network.
    pub(crate) fn turn_to(&mut self, qp: &Arc<QpInner>, to: Destination) {
        if self.peer_at.gid != to.gid || self.place.is_none() {
            self.rest();
            self.take_way(qp, to.gid);
        }
        self.follow(to);
    }

    /// An initiator of dynamic connections sends to `to`.
    pub(crate) fn follow(&mut self, to: Destination) {
        if (self.peer_at.gid, self.peer_at.qpn) != (to.gid, to.qpn) {
            self.target = Weak::new();
        }
        self.peer_at = to;
    }

    /// True if it may send now, at most its share; false if it waits for its turn, and comes again then.
    pub(crate) fn may_go(&mut self) -> bool {
        let Self { machine, place: Some(place), .. } = self else { return true };
        let flow = place.go(machine.asks(), machine.is_answered(), machine.config.mtu);
        machine.pause(flow.is_none());
        let Some(flow) = flow else { return false };
        // One that nobody answers tries with little.
        machine.config.flow = if machine.is_silent() { Flow::of(1) } else { flow };
        true
    }

    /// After something was sent, acknowledged, or given up: leaves the way to others if nothing is on it.
    pub(crate) fn rest(&mut self) {
        let Self { machine, place: Some(place), .. } = self else { return };
        match machine.underway() {
            0 => place.rest(machine.is_answered()),
            packets => place.tell(packets, machine.counters.packets, machine.config.mtu),
        }
    }

    /// True if it takes part in the use of the way to the peer.
    #[cfg(test)]
    pub(crate) fn is_on_the_way(&self) -> bool {
        self.place.as_ref().is_some_and(|place| place.is_on())
    }
}

//! A requester's part of the window of a UDP path.
//!
//! All queue pairs of a device that send to one peer share a window, see
//! [`link_to`](crate::net::udp::Endpoint::link_to).

use std::sync::{Arc, Weak};

use rdma_provider::types::Gid;

use super::{QpInner, Sender};
use crate::roce::requester::{Destination, Flow};

impl Sender {
    /// Takes a slot in the window of the path to `peer`.
    pub(crate) fn join_path(&mut self, qp: &Arc<QpInner>, peer: Gid) {
        let device = &qp.device;
        let link =
            device.endpoint().map(|endpoint| endpoint.link_to(peer, &device.network.scheduler));
        self.window_slot = link.map(|link| link.slot(Arc::<QpInner>::downgrade(qp)));
        if self.window_slot.is_some() {
            self.machine.config.flow = Flow::with_window(1);
        }
    }

    /// Switches a DC initiator with nothing in flight to another destination and path.
    pub(crate) fn switch_destination(&mut self, qp: &Arc<QpInner>, to: Destination) {
        if self.peer_at.gid != to.gid || self.window_slot.is_none() {
            self.update_window();
            self.join_path(qp, to.gid);
        }
        self.set_destination(to);
    }

    pub(crate) fn set_destination(&mut self, to: Destination) {
        if (self.peer_at.gid, self.peer_at.qpn) != (to.gid, to.qpn) {
            self.target = Weak::new();
            self.machine.forget_congestion();
        }
        self.peer_at = to;
    }

    /// Requests the window and sets the quota. Returns false if the request is queued;
    /// `Task::Admitted` resumes it.
    pub(crate) fn acquire_window(&mut self) -> bool {
        let Self { machine, window_slot: Some(slot), .. } = self else { return true };
        let flow =
            slot.request(machine.window_request(), machine.all_acknowledged(), machine.config.mtu);
        machine.set_awaiting_window(flow.is_none());
        let Some(flow) = flow else { return false };
        machine.config.flow = flow;
        true
    }

    /// Reports the packets in flight to the path; with none, releases the window.
    pub(crate) fn update_window(&mut self) {
        let Self { machine, window_slot: Some(slot), .. } = self else { return };
        match machine.in_flight() {
            0 => slot.release(machine.all_acknowledged()),
            packets => slot.update(packets, machine.counters.packets, machine.config.mtu),
        }
    }

    #[cfg(test)]
    pub(crate) fn holds_window(&self) -> bool {
        self.window_slot.as_ref().is_some_and(|slot| slot.is_admitted())
    }
}

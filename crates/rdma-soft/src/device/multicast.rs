//! Delivery of datagrams to the members of multicast groups.

use std::sync::Arc;

use rdma_provider::types::{Gid, Qpn};

use super::DeviceInner;
use super::deferred::Deferred;
use super::queue_pair::{QpInner, ReceiveSide};
use crate::memory::dma::Payload;
use crate::roce::ip_fields::Origin;
use crate::roce::packet::Packet;

impl QpInner {
    /// Delivers a datagram to the members of a group in this process, of all devices.
    pub(super) fn send_to_group(
        &self,
        packet: &Packet,
        (origin, group): (Origin, Gid),
        payload: &Payload<'_, '_>,
        deferred: &Deferred,
    ) {
        if !self.device.is_linked() {
            return;
        }
        for there in DeviceInner::all(&self.device.network).filter(|there| there.is_linked()) {
            let members = there.groups.members(group);
            deliver_to_members(&members, packet, (origin, group), payload, deferred);
        }
    }
}

/// Delivers a datagram to each of `members`. Returns false if there are none, or if it is not
/// addressed to a group.
pub(super) fn deliver_to_members(
    members: &[Arc<QpInner>],
    packet: &Packet,
    route: (Origin, Gid),
    payload: &Payload<'_, '_>,
    deferred: &Deferred,
) -> bool {
    if packet.dest != Qpn::MULTICAST {
        return false;
    }
    let mut any = false;
    for qp in members {
        let mut receiver = qp.receiver.lock();
        if qp.is_destroyed() {
            continue;
        }
        any = true;
        let (keys, mut out) = (&qp.device.keys, ReceiveSide { qp, deferred });
        receiver.machine.on_multicast(packet, route, payload, keys, &mut out);
    }
    any
}

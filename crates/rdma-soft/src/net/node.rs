//! What a network knows of its devices.

use std::any::Any;
use std::sync::Arc;

use rdma_provider::types::{Gid, PortNum};

use crate::roce::ip_fields::Origin;
use crate::roce::packet::Packet;

/// The only port of a device.
pub(crate) const PORT: PortNum = PortNum(1);

/// A packet that has arrived at a node, with its origin and payload.
pub(crate) type Arrival<'a> = (Origin, Packet, &'a [u8]);

/// A device, as its network sees it.
pub(crate) trait Node: Any + Send + Sync {
    /// Processes packets. Returns the number of those that it has no use for.
    fn receive(self: Arc<Self>, packets: &mut dyn Iterator<Item = Arrival<'_>>) -> usize;

    /// Processes packets to a multicast group, in the same way.
    fn receive_multicast(
        self: Arc<Self>,
        group: Gid,
        packets: &mut dyn Iterator<Item = Arrival<'_>>,
    ) -> usize;

    /// Processes a report that no process at `peer` has the port to which `payload` was sent.
    fn on_refusal(self: Arc<Self>, peer: Gid, payload: &[u8]);

    /// Fails all objects of the device, and all calls from now on.
    fn kill(self: Arc<Self>);
}

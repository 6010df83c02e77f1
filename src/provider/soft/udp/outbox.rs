//! Packets of one turn of a queue pair: to the network of the process one by one, to that of UDP together.

use std::sync::Arc;

use crate::provider::soft::device::DeviceInner;
use crate::provider::soft::dma::Payload;
use crate::provider::soft::wire::Packet;
use crate::types::Gid;

use super::batch::Batch;

/// Sends what is in it when it is dropped, which must be before the lock is let go under which the packets were made: else
/// those of another thread overtake them.
pub(in crate::provider::soft) struct Outbox<'a> {
    device: &'a Arc<DeviceInner>,
    batch: Option<Batch>,
}

impl<'a> Outbox<'a> {
    pub(in crate::provider::soft) const fn new(device: &'a Arc<DeviceInner>) -> Self {
        Self { device, batch: None }
    }

    pub(in crate::provider::soft) fn push(&mut self, packet: &Packet, to: Gid, payload: &Payload<'_, '_>) {
        let device = self.device;
        if !device.is_linked() {
            return;
        }
        tracing::trace!(%to, ?packet, "packet leaves");
        let write = |out: &mut Vec<u8>| packet.emit(payload.len(), out, |out| payload.append_to(out));
        let Some(endpoint) = device.endpoint().filter(|_| !device.network.is_faulty()) else {
            let mut image = Vec::with_capacity(64 + payload.len());
            write(&mut image);
            device.network.transmit((device.gid, to), image);
            return;
        };
        let batch = self.batch.get_or_insert_with(|| endpoint.batch());
        if !batch.has_room() {
            endpoint.send(batch);
        }
        endpoint.push(batch, to, write);
    }
}

impl Drop for Outbox<'_> {
    fn drop(&mut self) {
        if let (Some(mut batch), Some(endpoint)) = (self.batch.take(), self.device.endpoint()) {
            endpoint.send(&mut batch);
            endpoint.keep(batch);
        }
    }
}

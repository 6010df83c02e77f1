//! Packets of one quantum of a queue pair: single in the process, batched over UDP.

use std::sync::Arc;

use crate::dc::{Framed, Header};
use crate::memory::dma::Payload;
use crate::roce::ip_fields::IpFields;
use crate::roce::packet::Packet;
use rdma_provider::types::{Gid, Transport};

use super::DeviceInner;
use crate::net::udp::Batch;

/// A packet buffer, sent when dropped. Until then no other thread may send packets of the same half
/// of a queue pair, which would overtake.
pub(crate) struct Outbox<'a> {
    device: &'a Arc<DeviceInner>,
    batch: Option<Batch>,
    ip_fields: IpFields,
}

impl<'a> Outbox<'a> {
    pub(crate) fn new(device: &'a Arc<DeviceInner>) -> Self {
        Self { device, batch: None, ip_fields: IpFields::default() }
    }

    /// Marks the packets that are pushed next.
    pub(crate) const fn set_ip_fields(&mut self, ip_fields: IpFields) {
        self.ip_fields = ip_fields;
    }

    /// Returns true if dropping it sends nothing.
    pub(crate) const fn is_empty(&self) -> bool {
        self.batch.is_none()
    }

    pub(crate) fn push(&mut self, packet: &Packet, to: Gid, payload: &Payload<'_, '_>) {
        self.write(packet, to, payload.len(), |out| payload.append_to(out));
    }

    /// Adds a packet of a dynamic connection, built as an RC packet.
    pub(crate) fn push_framed(
        &mut self,
        (packet, header): &Framed,
        to: Gid,
        payload: &Payload<'_, '_>,
    ) {
        let packet = Packet { transport: Transport::Dci, ..*packet };
        self.write(&packet, to, Header::LEN + payload.len(), |out| {
            header.append_to(out);
            payload.append_to(out);
        });
    }

    #[inline]
    fn write(
        &mut self,
        packet: &Packet,
        to: Gid,
        length: usize,
        payload: impl FnOnce(&mut Vec<u8>),
    ) {
        let device = self.device;
        if !device.is_linked() {
            return;
        }
        rdma_provider::trace!(%to, ?packet, "packet sent");
        let write = |out: &mut Vec<u8>| packet.emit(length, out, payload);
        let Some(endpoint) = device.endpoint().filter(|_| !device.network.is_faulty()) else {
            let mut image = Vec::with_capacity(64 + length);
            write(&mut image);
            device.network.transmit((device.gid, to), self.ip_fields, image);
            return;
        };
        let batch = self.batch.get_or_insert_with(|| endpoint.batch());
        if !batch.has_capacity() {
            endpoint.send(batch);
        }
        endpoint.push(batch, (to, self.ip_fields), write);
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

//! Requests in the names of others, for tests of the layers above.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use super::super::machine::{Destination, Machine};
use super::super::manager::Manager;
use super::Out;
use crate::provider::cm_contract::CmParams;
use crate::provider::soft::Network;
use crate::provider::soft::network::MAD;
use crate::provider::soft::wire::{Body, Packet};
use crate::types::{Gid, Mtu, Psn, Qkey, Qpn, Transport};

impl Network {
    /// Gives the device at `to` a connection request in the name of `from`. The answer reaches no device.
    pub(crate) fn spoof_request(&self, from: Gid, number: u32, to: SocketAddr, private_data: &[u8]) {
        let device = self.0.device(Gid::from(to.ip())).unwrap();
        Manager::on_datagram(&device, from, &Self::forged_request(from, number, to, private_data));
    }

    /// A connection request in the name of `from`.
    fn forged_request(from: Gid, number: u32, to: SocketAddr, private_data: &[u8]) -> [u8; MAD] {
        let gid = Gid::from(to.ip());
        let mut machine = Machine::new(from, 1, Mtu::Mtu1024, u64::from(number));
        let local = SocketAddr::new(from.to_ip(), 40_000);
        let route = Destination { gid, local, peer: to, mtu: Mtu::Mtu1024 };
        let params = CmParams {
            qpn: Qpn(0x100 + number % 0x00f0_0000),
            private_data,
            responder_resources: 4,
            initiator_depth: 4,
            retry_count: 7,
            rnr_retry: 7,
            timeout: Duration::from_secs(1),
            srq: false,
        };
        machine.connect(0, route, &params, Psn::new(number)).unwrap();
        let (_, mad) = Out::of(&mut machine).sent.remove(0);
        mad.encode()
    }

    /// The same as a datagram of UDP to port 4791, with its check.
    pub(crate) fn forged_datagram(from: IpAddr, number: u32, to: SocketAddr, private_data: &[u8]) -> Vec<u8> {
        let mad = Self::forged_request(from.into(), number, to, private_data);
        let packet = Packet {
            transport: Transport::Ud,
            dest: Qpn(1),
            psn: Psn::new(number),
            solicited: false,
            ack_request: false,
            body: Body::Datagram { qkey: Qkey(0x8001_0000), source: Qpn(1), imm: None },
        };
        let mut image = Vec::new();
        packet.emit(mad.len(), &mut image, |out| out.extend_from_slice(&mad));
        Self::seal_between(from, to.ip(), &mut image);
        image
    }

    /// Queue pairs of the device at `gid`, and connections that its manager knows.
    pub(crate) fn known_at(&self, gid: Gid) -> (usize, usize) {
        let device = self.0.device(gid).unwrap();
        (device.queue_pair_count(), device.cm.sizes()[0])
    }
}

//! Connection requests with a forged source, for tests of the layers above.

#![allow(clippy::expect_used, reason = "a test that misuses these functions fails")]

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use rdma_provider::cm_contract::CmParams;
use rdma_provider::types::{Gid, Mtu, Psn, Qkey, Qpn, Transport};

use super::agent;
use super::machine::{Destination, Machine, Output};
use super::mad::SIZE;
use crate::device::DeviceInner;
use crate::net::network::Network;
use crate::roce::packet::{Body, Packet};
use crate::roce::partition::DEFAULT_PKEY;

impl Network {
    /// Delivers a connection request from `from` to the device at `to`. The answer is lost.
    ///
    /// # Panics
    ///
    /// If no device of this network has the address.
    #[doc(hidden)]
    pub fn forge_request(&self, from: Gid, number: u32, to: SocketAddr, private_data: &[u8]) {
        let device =
            DeviceInner::at(&self.0, Gid::from(to.ip())).expect("a device has the address");
        agent::on_datagram(&device, from, &Self::forged_request(from, number, to, private_data));
    }

    /// Returns a connection request from `from`.
    fn forged_request(from: Gid, number: u32, to: SocketAddr, private_data: &[u8]) -> [u8; SIZE] {
        let gid = Gid::from(to.ip());
        let mut machine = Machine::new(from, 1, Mtu::Mtu1024, u64::from(number));
        let local = SocketAddr::new(from.to_ip(), 40_000);
        let route = Destination { gid, local, peer: to, mtu: Mtu::Mtu1024, pkey: DEFAULT_PKEY };
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
        machine.connect(0, route, &params, Psn::new(number)).expect("a new machine connects");
        loop {
            if let Output::Send { mad, .. } =
                machine.next_output().expect("a machine that connects sends a request")
            {
                return mad.encode();
            }
        }
    }

    /// Returns a connection request as a UDP payload for port 4791, with its ICRC.
    #[doc(hidden)]
    #[must_use]
    pub fn forged_datagram(
        from: IpAddr,
        number: u32,
        to: SocketAddr,
        private_data: &[u8],
    ) -> Vec<u8> {
        let mad = Self::forged_request(from.into(), number, to, private_data);
        let packet = Packet {
            transport: Transport::Ud,
            pkey: DEFAULT_PKEY,
            dest: Qpn(1),
            psn: Psn::new(number),
            solicited: false,
            ack_request: false,
            body: Body::Datagram { qkey: Qkey(0x8001_0000), source: Qpn(1), imm: None },
        };
        let mut image = Vec::new();
        packet.emit(mad.len(), &mut image, |out| out.extend_from_slice(&mad));
        crate::roce::icrc::seal(from, to.ip(), &mut image);
        image
    }
}

//! Senders of datagrams, and how to answer them.

use std::net::Ipv4Addr;
use std::ops::Deref;

use super::Received;
use crate::error::SetupError;
use crate::memory::Scatter;
use crate::types::{AddressVector, Gid, GidEntry, PortAttr, PortNum, PortState, Qpn, WcFlags};
use crate::verbs::{AddressHandle, Device, ProtectionDomain, entry_with};

/// Length in bytes of the header in front of each datagram, see [`WcFlags::GRH`].
const HEADER: usize = 40;
/// Offset of the IPv4 header in it.
const IPV4: usize = 20;
const UDP: u8 = 17;

/// The sender of a datagram, see [`Received::sender`].
///
/// `qpn` and `gid`, or on InfiniBand without routing headers `qpn` and `lid`, identify a queue pair
/// in the network. A sender can forge them, as it can the addresses of UDP.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct DatagramSender {
    /// Queue pair of the sender.
    pub qpn: Qpn,
    /// Address of the sender; `None` if the datagram has no routing header.
    pub gid: Option<Gid>,
    /// LID of the sender on InfiniBand, 0 on RoCE.
    pub lid: u16,
    /// Address to which the datagram was sent, perhaps that of a multicast group.
    pub destination: Option<Gid>,
    /// Traffic class of the datagram: DSCP and ECN bits.
    pub traffic_class: u8,
    /// Flow label of the datagram, 20 bits; 0 for IPv4.
    pub flow_label: u32,
    /// Service level of the datagram.
    pub service_level: u8,
}

impl DatagramSender {
    fn set_route(&mut self, header: &[u8; HEADER]) {
        let address = |at: usize| header[at..].first_chunk::<16>().map(|bytes| Gid(*bytes));
        let ipv4 =
            |at: usize| header[at..].first_chunk::<4>().map(|&bytes| Ipv4Addr::from(bytes).into());
        if is_ipv4(header) {
            (self.gid, self.destination) = (ipv4(IPV4 + 12), ipv4(IPV4 + 16));
            self.traffic_class = header[IPV4 + 1];
        } else {
            (self.gid, self.destination) = (address(8), address(24));
            let word = u32::from_be_bytes([header[0], header[1], header[2], header[3]]);
            self.traffic_class = (word >> 20) as u8;
            self.flow_label = word & 0xf_ffff;
        }
    }

    /// Returns the route for an answer, `ibv_create_ah_from_wc(3)`: in the traffic class of the
    /// datagram without a mark of congestion (RFC 3168), with hop limit 64, from the address to
    /// which it was sent. If no active port has that address, as of a multicast group, it is from
    /// the best port and address for the sender; without a routing header, from the default port.
    ///
    /// On most devices this is a system call; keep the handle for further datagrams to this sender.
    ///
    /// # Errors
    ///
    /// [`SetupError::NoGid`] if no active port has an address that reaches the sender, and
    /// [`SetupError::Verb`].
    pub fn address_handle(&self, pd: &ProtectionDomain) -> Result<AddressHandle, SetupError> {
        let (port, entry) = match (self.arrived_at(pd.device())?, self.gid) {
            (Some(found), _) => found,
            (None, Some(gid)) => pd.device().path_to(gid)?,
            (None, None) => pd.device().default_path()?,
        };
        let gid = self.gid.unwrap_or_default();
        Ok(pd.address_handle(&AddressVector {
            dlid: self.lid,
            service_level: self.service_level,
            traffic_class: unmarked(self.traffic_class),
            flow_label: self.flow_label,
            ..AddressVector::new(port.port, entry.index, gid)
        })?)
    }

    /// Returns the active port and the entry of its GID table to which the datagram was sent.
    fn arrived_at(&self, device: &Device) -> Result<Option<(PortAttr, GidEntry)>, SetupError> {
        let (Some(gid), Some(destination)) = (self.gid, self.destination) else { return Ok(None) };
        for number in 1..=device.attr().ports {
            let port = device.port(PortNum(number))?;
            if port.state == PortState::Active
                && let Some(entry) = entry_with(&port, destination, gid)
            {
                return Ok(Some((port, entry)));
            }
        }
        Ok(None)
    }
}

/// CE becomes ECT(0), which is more usual than ECT(1).
const fn unmarked(traffic_class: u8) -> u8 {
    const CE: u8 = 3;
    if traffic_class & CE == CE { traffic_class & !1 } else { traffic_class }
}

/// Returns true if the header is one of IPv4.
///
/// An IPv4 header fills the last 20 bytes; the 20 before it are undefined. If these do not look
/// like IPv6, the version decides, because SoftRoCE leaves out the checksum of a packet that stays
/// on its device. If they do, protocol and checksum decide. IPv6 addresses in their place pass by
/// chance once in 2^32, or if the sender chose them; it could forge its address anyway.
fn is_ipv4(header: &[u8; HEADER]) -> bool {
    let ip = &header[IPV4..];
    if header[0] >> 4 != 6 {
        return ip[0] >> 4 == 4;
    }
    let words = ip.chunks_exact(2).map(|word| u32::from(word[0]) << 8 | u32::from(word[1]));
    ip[0] == 0x45 && ip[9] == UDP && words.sum::<u32>() % 0xffff == 0
}

impl<B: Scatter + Deref<Target = [u8]>> Received<B> {
    /// Returns who sent a datagram, to answer it. [`DatagramListener`](crate::cm::DatagramListener)
    /// has an example.
    ///
    /// For receives of datagram queue pairs (UD) only: of other messages the first 40 bytes are the
    /// peer's data, and the result means nothing. Returns `None` if the buffer has fewer bytes.
    #[must_use]
    pub fn sender(&self) -> Option<DatagramSender> {
        let header = self.buffer.first_chunk::<HEADER>()?;
        let mut sender = DatagramSender {
            qpn: self.src_qpn,
            gid: None,
            lid: self.src_lid,
            destination: None,
            traffic_class: 0,
            flow_label: 0,
            service_level: self.service_level,
        };
        if self.flags.contains(WcFlags::GRH) {
            sender.set_route(header);
        }
        Some(sender)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn sender(header: [u8; HEADER]) -> DatagramSender {
        let mut sender = DatagramSender {
            qpn: Qpn(1),
            gid: None,
            lid: 0,
            destination: None,
            traffic_class: 0,
            flow_label: 0,
            service_level: 0,
        };
        sender.set_route(&header);
        sender
    }

    /// A header of 10.0.0.1 to 10.0.0.2, class 0x68, with its checksum.
    const IPV4_HEADER: [u8; 20] =
        [0x45, 0x68, 0, 72, 0, 0, 0x40, 0, 64, 17, 0x26, 0x3b, 10, 0, 0, 1, 10, 0, 0, 2];

    #[test]
    fn ipv4_header_is_found_behind_any_bytes() {
        for front in [0_u8, 0x60, 0xff] {
            let mut header = [front; HEADER];
            header[IPV4..].copy_from_slice(&IPV4_HEADER);
            let sender = sender(header);
            let gid = |last| Some(Gid::from(Ipv4Addr::new(10, 0, 0, last)));
            assert_eq!((sender.gid, sender.destination), (gid(1), gid(2)), "{front:#x}");
            assert_eq!((sender.traffic_class, sender.flow_label), (0x68, 0));
        }
    }

    #[test]
    fn ipv4_header_needs_no_checksum_behind_bytes_that_are_not_ipv6() {
        for front in [0_u8, 0xff] {
            let mut header = [front; HEADER];
            header[IPV4..].copy_from_slice(&IPV4_HEADER);
            header[IPV4 + 10..IPV4 + 12].fill(0);
            assert_eq!(sender(header).gid, Some(Gid::from(Ipv4Addr::new(10, 0, 0, 1))));
        }
    }

    #[test]
    fn ipv6_header_whose_addresses_resemble_ipv4_is_one_of_ipv6() {
        let mut header = [0; HEADER];
        header[..4].copy_from_slice(&0x6681_2345_u32.to_be_bytes());
        header[IPV4..].copy_from_slice(&IPV4_HEADER);
        header[IPV4 + 10] ^= 1;
        let sender = sender(header);
        assert_eq!(sender.gid.unwrap().0[..], header[8..24]);
        assert_eq!(sender.destination.unwrap().0[..], header[24..]);
        assert_eq!((sender.traffic_class, sender.flow_label), (0x68, 0x1_2345));
    }
}

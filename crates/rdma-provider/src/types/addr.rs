//! Addresses and routes of queue pairs.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::PortNum;

/// A global identifier (GID) of a port. On RoCE v2 it is an IP address (IPv4 in mapped form).
///
/// ```
/// use rdma_provider::types::Gid;
/// use std::net::{IpAddr, Ipv4Addr};
///
/// let gid = Gid::from(Ipv4Addr::new(10, 9, 0, 1));
/// assert_eq!(gid.to_string(), "::ffff:10.9.0.1");
/// assert_eq!(gid.to_ip(), IpAddr::from([10, 9, 0, 1]));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Gid(pub [u8; 16]);

impl Gid {
    /// Returns the IP address of a RoCE v2 GID.
    #[must_use]
    pub fn to_ip(self) -> IpAddr {
        let v6 = Ipv6Addr::from(self.0);
        v6.to_ipv4_mapped().map_or(IpAddr::V6(v6), IpAddr::V4)
    }

    /// Returns true for the GID of a multicast group: ff00::/8 or, for IPv4, ::ffff:224.0.0.0/100.
    #[must_use]
    pub fn is_multicast(self) -> bool {
        self.to_ip().is_multicast()
    }

    /// Returns true for the GID of an empty table entry.
    #[must_use]
    pub fn is_zero(self) -> bool {
        self.0 == [0; 16]
    }
}

impl From<IpAddr> for Gid {
    fn from(ip: IpAddr) -> Self {
        match ip {
            IpAddr::V4(v4) => v4.into(),
            IpAddr::V6(v6) => Self(v6.octets()),
        }
    }
}

impl From<Ipv4Addr> for Gid {
    fn from(ip: Ipv4Addr) -> Self {
        Self(ip.to_ipv6_mapped().octets())
    }
}

impl fmt::Debug for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Gid({self})")
    }
}

impl fmt::Display for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Ipv6Addr::from(self.0).fmt(f)
    }
}

/// The type of a GID, which selects the packet format: `gid_type` of `struct ibv_gid_entry`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GidKind {
    /// InfiniBand: subnet prefix and GUID of the port.
    InfiniBand,
    /// RoCE v1: Ethernet frames, not routable.
    RoceV1,
    /// RoCE v2: UDP packets to port 4791, sent from the GID's IP address.
    RoceV2,
    /// iWARP: the MAC address of the network interface, which no packet contains.
    Iwarp,
}

impl fmt::Display for GidKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::InfiniBand => "InfiniBand",
            Self::RoceV1 => "RoCE v1",
            Self::RoceV2 => "RoCE v2",
            Self::Iwarp => "iWARP",
        })
    }
}

/// An entry of a port's GID table, `ibv_query_gid_ex(3)`.
///
/// ```
/// use rdma_provider::types::{Gid, GidEntry, GidKind};
/// use std::net::Ipv4Addr;
///
/// let gid = Gid::from(Ipv4Addr::new(10, 9, 0, 1));
/// let entry = GidEntry::new(3, gid, GidKind::RoceV2).on_interface(2);
/// assert!(entry.is_roce_v2());
/// assert_eq!(entry.interface, Some(2));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct GidEntry {
    /// Index for [`AddressVector::sgid_index`]. Entries from 256 on cannot be named, so they are
    /// omitted.
    pub index: u8,
    /// GID of the entry.
    pub gid: Gid,
    /// Type of packets sent from it.
    pub kind: GidKind,
    /// Index of the network interface, `ndev_ifindex` of `struct ibv_gid_entry`; `None` if unknown.
    pub interface: Option<u32>,
}

impl GidEntry {
    /// Creates an entry without a network interface.
    #[must_use]
    pub const fn new(index: u8, gid: Gid, kind: GidKind) -> Self {
        Self { index, gid, kind, interface: None }
    }

    /// Sets the index of the network interface; 0 means none.
    #[must_use]
    pub const fn on_interface(self, index: u32) -> Self {
        Self { interface: if index == 0 { None } else { Some(index) }, ..self }
    }

    /// Returns true for RoCE v2.
    #[must_use]
    pub const fn is_roce_v2(&self) -> bool {
        matches!(self.kind, GidKind::RoceV2)
    }
}

/// A path MTU: maximum payload of a packet.
///
/// ```
/// use rdma_provider::types::Mtu;
///
/// assert_eq!(Mtu::from_code(3), Some(Mtu::Mtu1024));
/// assert_eq!(Mtu::Mtu1024.bytes(), 1024);
/// assert_eq!(Mtu::from_code(6), None);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Mtu {
    /// 256 bytes.
    Mtu256 = 1,
    /// 512 bytes.
    Mtu512 = 2,
    /// 1024 bytes.
    Mtu1024 = 3,
    /// 2048 bytes.
    Mtu2048 = 4,
    /// 4096 bytes.
    Mtu4096 = 5,
}

impl Mtu {
    /// All MTUs in ascending order.
    pub const ALL: [Self; 5] =
        [Self::Mtu256, Self::Mtu512, Self::Mtu1024, Self::Mtu2048, Self::Mtu4096];

    /// Returns the payload in bytes.
    #[must_use]
    pub const fn bytes(self) -> usize {
        128 << self as usize
    }

    /// Returns the MTU of a code of `enum ibv_mtu` (1 to 5).
    #[must_use]
    pub fn from_code(code: u8) -> Option<Self> {
        Self::ALL.get(usize::from(code).checked_sub(1)?).copied()
    }
}

/// The link layer of a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LinkLayer {
    /// InfiniBand: addressed by LID, and by GID across subnets.
    InfiniBand,
    /// Ethernet (RoCE): addressed by GID only.
    Ethernet,
    /// A code this crate does not know.
    Other(u8),
}

/// A route to a peer, `struct ibv_ah_attr` of `ibv_create_ah(3)`.
///
/// ```
/// use rdma_provider::types::{AddressVector, Gid, PortNum};
/// use std::net::Ipv4Addr;
///
/// let peer = Gid::from(Ipv4Addr::new(10, 9, 0, 2));
/// let route = AddressVector { traffic_class: 26 << 2, ..AddressVector::new(PortNum(1), 3, peer) };
/// assert_eq!((route.dgid, route.sgid_index, route.hop_limit), (peer, 3, 64));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct AddressVector {
    /// Local port that sends.
    pub port: PortNum,
    /// GID of the peer; always used on RoCE.
    pub dgid: Gid,
    /// Index of the local source GID.
    pub sgid_index: u8,
    /// LID of the peer (InfiniBand); 0 on RoCE.
    pub dlid: u16,
    /// Service level, 0 to 15.
    pub service_level: u8,
    /// Hop limit of RoCE packets.
    pub hop_limit: u8,
    /// DSCP and ECN bits.
    pub traffic_class: u8,
    /// IPv6 flow label, 20 bits.
    pub flow_label: u32,
    /// Limit of the rate of packets.
    pub static_rate: StaticRate,
}

impl AddressVector {
    /// The hop limit of [`new`](Self::new), rdma_cm and Linux. 1 would stop at the first router.
    pub const DEFAULT_HOP_LIMIT: u8 = 64;

    /// Creates a route with hop limit 64 and all optional fields 0.
    #[must_use]
    pub const fn new(port: PortNum, sgid_index: u8, dgid: Gid) -> Self {
        Self {
            port,
            dgid,
            sgid_index,
            dlid: 0,
            service_level: 0,
            hop_limit: Self::DEFAULT_HOP_LIMIT,
            traffic_class: 0,
            flow_label: 0,
            static_rate: StaticRate::PORT,
        }
    }
}

/// A limit of the rate at which a device sends to a peer: a code of `enum ibv_rate`.
///
/// ```
/// use rdma_provider::types::StaticRate;
///
/// // IBV_RATE_600_GBPS.
/// assert_eq!(StaticRate::from_code(22).code(), 22);
/// assert_eq!(StaticRate::default(), StaticRate::PORT);
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct StaticRate(u8);

impl StaticRate {
    /// The rate of the port: no limit.
    pub const PORT: Self = Self(0);
    /// 10 Gbit/s.
    pub const GBPS_10: Self = Self(3);
    /// 25 Gbit/s.
    pub const GBPS_25: Self = Self(15);
    /// 40 Gbit/s.
    pub const GBPS_40: Self = Self(7);
    /// 50 Gbit/s.
    pub const GBPS_50: Self = Self(20);
    /// 100 Gbit/s.
    pub const GBPS_100: Self = Self(16);
    /// 200 Gbit/s.
    pub const GBPS_200: Self = Self(17);
    /// 400 Gbit/s.
    pub const GBPS_400: Self = Self(21);

    /// Creates the rate of a code, for rates without a name here.
    #[must_use]
    pub const fn from_code(code: u8) -> Self {
        Self(code)
    }

    /// Returns the code.
    #[must_use]
    pub const fn code(self) -> u8 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mtu_codes_and_bytes_agree() {
        for (code, bytes) in [(1, 256), (2, 512), (3, 1024), (4, 2048), (5, 4096)] {
            assert_eq!(Mtu::from_code(code).map(Mtu::bytes), Some(bytes));
        }
        assert_eq!(Mtu::from_code(0), None);
        assert_eq!(Mtu::from_code(6), None);
    }

    #[test]
    fn gid_of_ipv4_is_mapped() {
        let ip: IpAddr = "10.9.0.1".parse().unwrap();
        assert_eq!(Gid::from(ip).to_string(), "::ffff:10.9.0.1");
        assert_eq!(Gid::from(ip).to_ip(), ip);
    }
}

//! Conversion of IP addresses to and from `sockaddr_in` (`ip(7)`) and `sockaddr_in6` (`ipv6(7)`).

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};

/// `AF_INET` of Linux.
const INET: u16 = 2;
/// `AF_INET6` of Linux.
const INET6: u16 = 10;

/// Size of `sockaddr_in6`, the larger of the two.
pub(super) const LEN: usize = 28;

/// An address of either family; librdmacm reads as many bytes as the family has.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(8))]
pub(super) struct Address(pub(super) [u8; LEN]);

impl From<SocketAddr> for Address {
    fn from(address: SocketAddr) -> Self {
        let mut raw = [0; LEN];
        raw[2..4].copy_from_slice(&address.port().to_be_bytes());
        match address {
            SocketAddr::V4(address) => {
                raw[..2].copy_from_slice(&INET.to_ne_bytes());
                raw[4..8].copy_from_slice(&address.ip().octets());
            }
            SocketAddr::V6(address) => {
                raw[..2].copy_from_slice(&INET6.to_ne_bytes());
                raw[4..8].copy_from_slice(&address.flowinfo().to_ne_bytes());
                raw[8..24].copy_from_slice(&address.ip().octets());
                raw[24..].copy_from_slice(&address.scope_id().to_ne_bytes());
            }
        }
        Self(raw)
    }
}

impl Address {
    /// Converts back. Returns `None` for another family, for example if no address was written.
    pub(super) fn to_ip(self) -> Option<SocketAddr> {
        let part = |at: usize| [self.0[at], self.0[at + 1], self.0[at + 2], self.0[at + 3]];
        let port = u16::from_be_bytes([self.0[2], self.0[3]]);
        match u16::from_ne_bytes([self.0[0], self.0[1]]) {
            INET => Some(SocketAddrV4::new(Ipv4Addr::from(part(4)), port).into()),
            INET6 => {
                let ip: [u8; 16] = std::array::from_fn(|at| self.0[8 + at]);
                let (flow, scope) = (u32::from_ne_bytes(part(4)), u32::from_ne_bytes(part(24)));
                Some(SocketAddrV6::new(Ipv6Addr::from(ip), port, flow, scope).into())
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_address_families_round_trip() {
        for text in
            ["10.9.0.1:7471", "0.0.0.0:0", "[::]:65535", "[fe80::1%3]:7471", "[2001:db8::9]:1"]
        {
            let address: SocketAddr = text.parse().unwrap();
            assert_eq!(Address::from(address).to_ip(), Some(address));
        }
        assert_eq!(Address([0; LEN]).to_ip(), None);
        // Byte order of <netinet/in.h>.
        let raw = Address::from("1.2.3.4:258".parse::<SocketAddr>().unwrap()).0;
        assert_eq!(raw[2..8], [1, 2, 1, 2, 3, 4]);
    }
}

//! The configuration of a network over UDP.

use std::net::IpAddr;

use crate::UdpError;

/// The configuration of a [`Network`](crate::Network) over UDP.
///
/// Each device has an address of this host and a socket. By default only loopback is accepted: RoCE
/// v2 has no encryption or authentication, so any peer that reaches the socket can access queue
/// pairs.
///
/// ```
/// use rdma_soft::UdpConfig;
///
/// let config = UdpConfig::new()
///     .device("left", "127.0.0.2".parse()?)
///     .device("right", "127.0.0.3".parse()?);
/// # Ok::<(), std::net::AddrParseError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UdpConfig {
    devices: Vec<(String, IpAddr)>,
    pub(super) port: u16,
    exposed: bool,
    peers: Vec<(IpAddr, u8)>,
}

impl UdpConfig {
    /// UDP port of RoCE v2.
    pub const PORT: u16 = 4791;

    /// Creates a configuration for loopback on [`PORT`](Self::PORT), without devices or peer
    /// filter.
    #[must_use]
    pub const fn new() -> Self {
        Self { devices: Vec::new(), port: Self::PORT, exposed: false, peers: Vec::new() }
    }

    /// Adds a device named by its address.
    #[must_use]
    pub fn address(self, address: IpAddr) -> Self {
        self.device(&address.to_string(), address)
    }

    /// Adds the device `name` at `address`.
    #[must_use]
    pub fn device(mut self, name: &str, address: IpAddr) -> Self {
        self.devices.push((name.to_owned(), address.to_canonical()));
        self
    }

    /// Sets the port. Kernels and NICs require [`PORT`](Self::PORT), and all devices an equal one.
    #[must_use]
    pub const fn port(mut self, port: u16) -> Self {
        self.port = port;
        self
    }

    /// Allows addresses that other hosts can reach.
    #[must_use]
    pub const fn expose(mut self) -> Self {
        self.exposed = true;
        self
    }

    /// Allows peers whose address begins with `prefix` bits of `address`, and drops packets of all
    /// others.
    #[must_use]
    pub fn allow(mut self, address: IpAddr, prefix: u8) -> Self {
        self.peers.push((address.to_canonical(), prefix));
        self
    }

    pub(crate) const fn whole(address: IpAddr) -> u8 {
        bits(address)
    }

    pub(crate) fn devices(&self) -> impl Iterator<Item = (&str, IpAddr)> {
        self.devices.iter().map(|(name, address)| (name.as_str(), *address))
    }

    pub(crate) fn check(&self) -> Result<(), UdpError> {
        if self.devices.is_empty() {
            return Err(UdpError::NoDevice);
        }
        if self.port == 0 {
            return Err(UdpError::NoPort);
        }
        for (at, (name, address)) in self.devices.iter().enumerate() {
            let address = *address;
            if self.devices[..at].iter().any(|(other, taken)| other == name || *taken == address) {
                return Err(UdpError::Repeated { name: name.clone(), address });
            }
            UdpError::check_host(address)?;
            if !address.is_loopback() && !self.exposed {
                return Err(UdpError::NotLoopback { address });
            }
        }
        match self.peers.iter().find(|(address, prefix)| *prefix > bits(*address)) {
            Some(&(address, prefix)) => {
                Err(UdpError::Prefix { address, prefix, longest: bits(address) })
            }
            None => Ok(()),
        }
    }

    pub(super) fn allows(&self, peer: IpAddr) -> bool {
        self.peers.is_empty()
            || self.peers.iter().any(|&(address, prefix)| begins_with(peer, address, prefix))
    }
}

impl Default for UdpConfig {
    fn default() -> Self {
        Self::new()
    }
}

const fn bits(address: IpAddr) -> u8 {
    if address.is_ipv4() { 32 } else { 128 }
}

fn begins_with(address: IpAddr, of: IpAddr, prefix: u8) -> bool {
    let number = |address: IpAddr| match address {
        IpAddr::V4(v4) => u128::from(v4.to_bits()) << 96,
        IpAddr::V6(v6) => v6.to_bits(),
    };
    let differing = number(address) ^ number(of);
    address.is_ipv4() == of.is_ipv4()
        && differing.checked_shr(128 - u32::from(prefix)).unwrap_or(0) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn invalid_configurations_are_refused() {
        let config = UdpConfig::new;
        assert_eq!(config().check(), Err(UdpError::NoDevice));
        assert_eq!(config().address(ip("::1")).check(), Ok(()));
        assert_eq!(config().address(ip("::1")).port(0).check(), Err(UdpError::NoPort));
        let outside = ip("192.0.2.1");
        assert_eq!(
            config().address(outside).check(),
            Err(UdpError::NotLoopback { address: outside })
        );
        assert_eq!(config().address(outside).expose().check(), Ok(()));
        for address in
            ["0.0.0.0", "::", "224.0.0.1", "ff02::1", "255.255.255.255", "127.255.255.255"].map(ip)
        {
            assert_eq!(
                config().address(address).expose().check(),
                Err(UdpError::NotOneHost { address })
            );
        }
        let twice = config().device("a", ip("127.0.0.2")).device("b", ip("::ffff:127.0.0.2"));
        assert!(
            matches!(twice.check(), Err(UdpError::Repeated { .. })),
            "the same address in another form"
        );
        assert!(
            config().device("a", ip("127.0.0.2")).device("a", ip("127.0.0.3")).check().is_err()
        );
        let wide = config().address(ip("::1")).allow(ip("10.0.0.0"), 33);
        assert_eq!(
            wide.check(),
            Err(UdpError::Prefix { address: ip("10.0.0.0"), prefix: 33, longest: 32 })
        );
    }

    #[test]
    fn peers_are_filtered_by_prefix() {
        let all = UdpConfig::new();
        assert!(all.allows(ip("192.0.2.1")) && all.allows(ip("fd00::1")));
        let some = UdpConfig::new().allow(ip("10.1.0.0"), 16).allow(ip("fd00::1"), 128);
        for (peer, allowed) in [
            ("10.1.255.1", true),
            ("10.2.0.1", false),
            ("fd00::1", true),
            ("fd00::2", false),
            ("a01::", false),
        ] {
            assert_eq!(some.allows(ip(peer)), allowed, "{peer}");
        }
        let whole_family = UdpConfig::new().allow(ip("0.0.0.0"), 0);
        assert!(whole_family.allows(ip("192.0.2.1")) && !whole_family.allows(ip("fd00::1")));
    }
}

//! Errors of creating a network over UDP.

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use rdma_provider::VerbError;

/// The error of creating a network over UDP.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum UdpError {
    /// The configuration has no device.
    NoDevice,
    /// The port is 0, which peers cannot address.
    NoPort,
    /// An earlier device has the same name or address.
    Repeated {
        /// Name of the later device.
        name: String,
        /// Its address.
        address: IpAddr,
    },
    /// The address is unspecified, multicast or broadcast.
    NotOneHost {
        /// Rejected address.
        address: IpAddr,
    },
    /// Other hosts can reach the address, and [`UdpConfig::expose`](crate::UdpConfig::expose) was
    /// not called.
    NotLoopback {
        /// Rejected address.
        address: IpAddr,
    },
    /// The prefix has more bits than the address.
    Prefix {
        /// Address of the peers.
        address: IpAddr,
        /// Bits of the prefix.
        prefix: u8,
        /// Maximum bits of a prefix.
        longest: u8,
    },
    /// Another socket occupies the port.
    PortTaken {
        /// Address of the device.
        address: IpAddr,
        /// Port of the configuration.
        port: u16,
        /// A socket occupies the port at all addresses, and module `rdma_rxe` is loaded, which does
        /// so in its network namespace, even without a device.
        soft_roce: bool,
        /// Device that occupies the port, if it is in this process.
        device: Option<String>,
    },
    /// The port is in use at every candidate address.
    AllTaken {
        /// First address tried.
        first: IpAddr,
        /// Last address tried.
        last: IpAddr,
        /// Port, the same at all addresses.
        port: u16,
    },
    /// This host has no route to the peer.
    NoRoute {
        /// Address of the peer.
        peer: IpAddr,
        /// Error of the kernel.
        error: VerbError,
    },
    /// This host does not have the address.
    NotLocal {
        /// Rejected address.
        address: IpAddr,
    },
    /// The system is not Linux. The ICRC covers header fields that only Linux sockets control.
    NotLinux,
    /// A system call failed.
    System {
        /// Address of the device, or of its intended peer.
        address: IpAddr,
        /// System call and its error.
        error: VerbError,
    },
}

impl UdpError {
    /// Checks that the address can belong to one host.
    ///
    /// # Errors
    ///
    /// [`NotOneHost`](Self::NotOneHost) if the address is unspecified, multicast or broadcast.
    pub fn check_host(address: IpAddr) -> Result<(), Self> {
        let broadcast = [Ipv4Addr::BROADCAST, Ipv4Addr::new(127, 255, 255, 255)].map(IpAddr::V4);
        let bad =
            address.is_unspecified() || address.is_multicast() || broadcast.contains(&address);
        if bad { Err(Self::NotOneHost { address }) } else { Ok(()) }
    }
}

impl fmt::Display for UdpError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoDevice => {
                f.write_str("UDP network without a device; add one with UdpConfig::device")
            }
            Self::NoPort => {
                f.write_str("UDP port 0 is invalid: all peers use the same port; choose 1 to 65535")
            }
            Self::Repeated { name, address } => {
                write!(
                    f,
                    "device {name:?} at {address} repeats the name or address of an earlier device \
                     of the UDP network"
                )
            }
            Self::NotOneHost { address } => {
                write!(
                    f,
                    "{address} is unspecified, multicast or broadcast; a software device over UDP \
                     needs the address of one host"
                )
            }
            Self::NotLoopback { address } => {
                write!(
                    f,
                    "other hosts could reach the software device at {address}; use a loopback \
                     address, or allow it with UdpConfig::expose"
                )
            }
            Self::Prefix { address, prefix, longest } => {
                write!(
                    f,
                    "invalid network of peers {address}/{prefix}: at most {longest} bits allowed"
                )
            }
            Self::PortTaken { address, port, device: Some(device), .. } => {
                write!(
                    f,
                    "UDP port {port} of {address} is in use by device {device:?} of this process; \
                     use that device"
                )?;
                other_address(f, *address)
            }
            Self::PortTaken { address, port, soft_roce: true, .. } => {
                write!(
                    f,
                    "UDP port {port} is in use at all addresses, probably by the kernel's \
                     SoftRoCE: module rdma_rxe is loaded; for {address}, unload it, use another \
                     network namespace, or use another port for all software devices"
                )
            }
            Self::PortTaken { address, port, soft_roce: false, .. } => {
                write!(f, "UDP port {port} of {address} is in use by another program")?;
                other_address(f, *address)
            }
            Self::AllTaken { first, last, port } => {
                write!(
                    f,
                    "UDP port {port} is in use at every address from {first} to {last}; stop a \
                     program that uses it"
                )
            }
            Self::NoRoute { peer, error } => {
                write!(f, "failed to find a route to {peer}: {error}")?;
                if matches!(peer, IpAddr::V6(v6) if v6.is_unicast_link_local()) {
                    f.write_str(
                        "; a link-local address names no interface: open the device with \
                         Device::open_default_at, at this host's address of the interface",
                    )?;
                }
                Ok(())
            }
            Self::NotLocal { address } => {
                write!(f, "failed to bind UDP address {address}: it does not belong to this host")
            }
            Self::NotLinux => f.write_str("software devices over UDP require Linux"),
            Self::System { address, error } => {
                write!(f, "failed to open a software device over UDP for {address}: {error}")
            }
        }
    }
}

fn other_address(f: &mut fmt::Formatter<'_>, taken: IpAddr) -> fmt::Result {
    if taken == IpAddr::V6(Ipv6Addr::LOCALHOST) {
        f.write_str("; IPv6 has no other loopback address, but IPv4 has 127.0.0.0/8")?;
    }
    Ok(())
}

impl std::error::Error for UdpError {}

impl From<UdpError> for io::Error {
    fn from(error: UdpError) -> Self {
        let kind = match &error {
            UdpError::PortTaken { .. } | UdpError::AllTaken { .. } => io::ErrorKind::AddrInUse,
            UdpError::NotLocal { .. } => io::ErrorKind::AddrNotAvailable,
            UdpError::NoRoute { .. } => io::ErrorKind::NetworkUnreachable,
            UdpError::NotLinux => io::ErrorKind::Unsupported,
            UdpError::System { error, .. } => Self::from(*error).kind(),
            _ => io::ErrorKind::InvalidInput,
        };
        Self::new(kind, error)
    }
}

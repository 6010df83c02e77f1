//! Why a software device cannot speak over UDP.

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use rdma_provider::VerbError;

/// Why a network over UDP could not be made.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum UdpError {
    /// The configuration has no device.
    NoDevice,
    /// Port 0, which peers could not know.
    NoPort,
    /// A name or an address that an earlier device has.
    Repeated {
        /// Name of the later one.
        name: String,
        /// Its address.
        address: IpAddr,
    },
    /// An address that is not one host's: unspecified, of a group, or of all.
    NotOneHost {
        /// As given.
        address: IpAddr,
    },
    /// An address that others reach, without [`UdpConfig::expose`](crate::UdpConfig::expose).
    NotLoopback {
        /// As given.
        address: IpAddr,
    },
    /// More bits than the address has.
    Prefix {
        /// Address of the peers.
        address: IpAddr,
        /// Bits asked for.
        prefix: u8,
        /// Bits there are.
        longest: u8,
    },
    /// Another socket has the port.
    PortTaken {
        /// Of the device.
        address: IpAddr,
        /// Of the configuration.
        port: u16,
        /// It is the kernel: module `rdma_rxe` takes the port of RoCE v2 on all addresses of its network namespace, even
        /// while it has no device.
        soft_roce: bool,
        /// Name of the device that has it, if that is one of this process.
        device: Option<String>,
    },
    /// The port is taken at each address from which the peer could be reached.
    AllTaken {
        /// The first that was tried.
        first: IpAddr,
        /// The last.
        last: IpAddr,
        /// The same of all.
        port: u16,
    },
    /// Nothing leads from this host to the peer.
    NoRoute {
        /// As given.
        peer: IpAddr,
        /// What the kernel says of it.
        error: VerbError,
    },
    /// This host does not have the address.
    NotLocal {
        /// As given.
        address: IpAddr,
    },
    /// This is not Linux, whose sockets alone tell what the check of RoCE v2 must cover.
    NotLinux,
    /// The system refused.
    System {
        /// Address of the device, or of the peer that it is opened for.
        address: IpAddr,
        /// The call and its error.
        error: VerbError,
    },
}

impl UdpError {
    /// `Ok` unless it is seen from the address that more than one host has it, or none.
    ///
    /// # Errors
    ///
    /// [`NotOneHost`](Self::NotOneHost) of such an address.
    pub fn check_host(address: IpAddr) -> Result<(), Self> {
        let broadcast = [Ipv4Addr::BROADCAST, Ipv4Addr::new(127, 255, 255, 255)].map(IpAddr::V4);
        let bad = address.is_unspecified() || address.is_multicast() || broadcast.contains(&address);
        if bad { Err(Self::NotOneHost { address }) } else { Ok(()) }
    }
}

impl fmt::Display for UdpError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoDevice => f.write_str("a network over UDP needs a device, none is configured"),
            Self::NoPort => f.write_str("port 0 cannot be known to peers; 1 to 65535 are allowed"),
            Self::Repeated { name, address } => {
                write!(f, "device {name:?} at {address}: an earlier device has this name or this address")
            }
            Self::NotOneHost { address } => write!(f, "{address} is not the address of one host"),
            Self::NotLoopback { address } => {
                write!(
                    f,
                    "{address} can be reached by other hosts: only loopback addresses are taken unless `expose` is called"
                )
            }
            Self::Prefix { address, prefix, longest } => {
                write!(f, "prefix of {prefix} bits of {address}; at most {longest} are allowed")
            }
            Self::PortTaken { address, port, device: Some(device), .. } => {
                write!(f, "port {port} of {address} is taken by device {device:?} of this process; use that device")?;
                other_address(f, *address)
            }
            Self::PortTaken { address, port, soft_roce: true, .. } => {
                write!(
                    f,
                    "port {port} of {address} is taken by the kernel's SoftRoCE: unload module rdma_rxe, or use another \
                     network namespace, or another port between software devices"
                )
            }
            Self::PortTaken { address, port, soft_roce: false, .. } => {
                write!(f, "port {port} of {address} is taken by another program")?;
                other_address(f, *address)
            }
            Self::AllTaken { first, last, port } => {
                write!(f, "port {port} is taken at all addresses tried, first {first}, last {last}")
            }
            Self::NoRoute { peer, error } => write!(f, "no way to {peer}: {error}"),
            Self::NotLocal { address } => write!(f, "{address} is not an address of this host"),
            Self::NotLinux => f.write_str("this is not Linux, which software devices over UDP need"),
            Self::System { address, error } => write!(f, "opening a software device over UDP for {address}: {error}"),
        }
    }
}

/// Says whether another address of this host may help.
fn other_address(f: &mut fmt::Formatter<'_>, taken: IpAddr) -> fmt::Result {
    if taken == IpAddr::V6(Ipv6Addr::LOCALHOST) {
        f.write_str("; IPv6 has no other loopback address, IPv4 has 127.0.0.0/8")?;
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

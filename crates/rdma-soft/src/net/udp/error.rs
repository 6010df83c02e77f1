//! Errors of creating a network over UDP.

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use rdma_provider::VerbError;

/// Error of creating a network over UDP.
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
        /// Address as given.
        address: IpAddr,
    },
    /// Other hosts can reach the address, and [`UdpConfig::expose`](crate::UdpConfig::expose) was not called.
    NotLoopback {
        /// Address as given.
        address: IpAddr,
    },
    /// The prefix has more bits than the address.
    Prefix {
        /// Address of the peers.
        address: IpAddr,
        /// Bits of the prefix.
        prefix: u8,
        /// Bits of the address.
        longest: u8,
    },
    /// Another socket has the port.
    PortTaken {
        /// Address of the device.
        address: IpAddr,
        /// Port of the configuration.
        port: u16,
        /// The kernel has the port: module `rdma_rxe` takes the port of RoCE v2 on all addresses of its network namespace,
        /// even without a device.
        soft_roce: bool,
        /// Name of the device that has the port, if it belongs to this process.
        device: Option<String>,
    },
    /// The port is taken at each address from which the peer could be reached.
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
        /// Address as given.
        peer: IpAddr,
        /// Error of the kernel.
        error: VerbError,
    },
    /// This host does not have the address.
    NotLocal {
        /// Address as given.
        address: IpAddr,
    },
    /// The system is not Linux. The ICRC covers header fields that only sockets of Linux control.
    NotLinux,
    /// A system call failed.
    System {
        /// Address of the device, or of the peer for which it is opened.
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
            Self::NoDevice => f.write_str("a network over UDP needs a device, none is configured"),
            Self::NoPort => f.write_str("port 0 cannot be known to peers; 1 to 65535 are allowed"),
            Self::Repeated { name, address } => {
                write!(
                    f,
                    "device {name:?} at {address}: an earlier device has this name or this address"
                )
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
                write!(
                    f,
                    "port {port} of {address} is taken by device {device:?} of this process; use that device"
                )?;
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
            Self::NotLinux => {
                f.write_str("this is not Linux, which software devices over UDP need")
            }
            Self::System { address, error } => {
                write!(f, "opening a software device over UDP for {address}: {error}")
            }
        }
    }
}

/// Says whether another address of this host is available.
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

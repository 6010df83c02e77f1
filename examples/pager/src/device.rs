//! Which device.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};

use tokio_rdma::Device;
use tokio_rdma::software::{Network, UdpConfig, UdpError};

use crate::StartError;

/// The real device that `TOKIO_RDMA_DEVICE` names, or else a software device that other processes and hosts reach, by RoCE v2
/// over UDP, at the first of these addresses that is free. Exposed to the network if that is not loopback.
///
/// # Errors
///
/// If it does not open.
pub fn open(addresses: &[IpAddr]) -> Result<Device, StartError> {
    if std::env::var("TOKIO_RDMA_DEVICE").is_ok_and(|name| name != Device::SOFTWARE) {
        return Ok(Device::open_default()?);
    }
    let mut last = UdpError::NoDevice;
    for &address in addresses {
        match Network::udp(&UdpConfig::new().address(address).expose()) {
            Ok(network) => return Ok(Device::software_in(&network, &address.to_string())?),
            Err(error) => last = error,
        }
    }
    Err(StartError::Network(last))
}

/// Addresses of this host to reach `peer` from. Port 4791 has room for one program at each address, so that several of them on
/// loopback need several of its addresses.
///
/// # Errors
///
/// If there is no route.
pub fn sources(peer: SocketAddr) -> io::Result<Vec<IpAddr>> {
    let socket = UdpSocket::bind(if peer.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" })?;
    socket.connect(peer)?;
    Ok(match socket.local_addr()?.ip() {
        IpAddr::V4(ip) if ip.is_loopback() => {
            (2..=254).rev().map(|host| Ipv4Addr::new(127, 0, 0, host).into()).collect()
        }
        ip => vec![ip],
    })
}

//! Which device.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};

use tokio_rdma::Device;
use tokio_rdma::software::{Network, UdpConfig, UdpError};

use crate::Result;

/// For a server at `address`.
pub(crate) fn listening(address: IpAddr) -> Result<Device> {
    real_or_udp([address])
}

/// For clients of the server at `server`.
pub(crate) fn connecting(server: SocketAddr, from: Option<IpAddr>) -> Result<Device> {
    match from {
        Some(from) => real_or_udp([from]),
        None => real_or_udp(sources(server)?),
    }
}

/// For both ends in one process, with the address at which the server listens.
pub(crate) fn both(udp: bool) -> Result<[Device; 2]> {
    if udp {
        // Not 127.0.0.1: that is for whoever says so.
        let free = || over_udp((1..=254).map(|host| Ipv4Addr::new(127, 0, 74, host).into()));
        return Ok([free()?, free()?]);
    }
    let device = Device::open_default()?;
    Ok([device.clone(), device])
}

/// Address of a device.
pub(crate) fn address(device: &Device) -> Result<IpAddr> {
    Ok(device.default_path()?.1.gid.to_ip())
}

/// The real device that is named, or a software device over UDP.
fn real_or_udp(addresses: impl IntoIterator<Item = IpAddr>) -> Result<Device> {
    let real = std::env::var("TOKIO_RDMA_DEVICE").is_ok_and(|name| name != Device::SOFTWARE);
    if real { Ok(Device::open_default()?) } else { over_udp(addresses) }
}

/// A software device that speaks RoCE v2 from the first of the addresses that is free.
fn over_udp(addresses: impl IntoIterator<Item = IpAddr>) -> Result<Device> {
    let mut last = "no address".into();
    for address in addresses {
        // Whoever names an address wants it to be reached.
        match Network::udp(&UdpConfig::new().address(address).expose()) {
            Ok(network) => return Ok(Device::software_in(&network, &address.to_string())?),
            Err(error @ UdpError::PortTaken { soft_roce: false, .. }) => last = error.into(),
            Err(error) => return Err(error.into()),
        }
    }
    Err(last)
}

/// Addresses from which to reach `peer`, best first. Port 4791 has room for one program at each address, so that two of them
/// on loopback need two of its addresses.
fn sources(peer: SocketAddr) -> Result<Vec<IpAddr>> {
    let socket = UdpSocket::bind(if peer.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" })?;
    socket.connect(peer)?;
    Ok(match socket.local_addr()?.ip() {
        IpAddr::V4(ip) if ip.is_loopback() => (2..=254).map(|host| Ipv4Addr::new(127, 0, 0, host).into()).collect(),
        ip => vec![ip],
    })
}

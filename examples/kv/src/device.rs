//! Which device.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use tokio_rdma::Device;

use crate::Result;

/// For clients of the server at `server`.
pub(crate) fn connecting(server: SocketAddr, from: Option<IpAddr>) -> Result<Device> {
    Ok(match from {
        Some(from) => Device::open_default_at(from)?,
        None => Device::open_default_to(server.ip())?,
    })
}

/// For both ends in one process, with the address at which the server listens.
pub(crate) fn both(udp: bool) -> Result<[Device; 2]> {
    if udp {
        // As two processes would, wherever nobody else is.
        let free = || Device::open_default_towards(Ipv4Addr::LOCALHOST.into());
        return Ok([free()?, free()?]);
    }
    let device = Device::open_default()?;
    Ok([device.clone(), device])
}

/// Address of a device.
pub(crate) fn address(device: &Device) -> Result<IpAddr> {
    Ok(device.default_path()?.1.gid.to_ip())
}

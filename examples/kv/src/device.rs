//! Selection of the device.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use tokio_rdma::Device;

use crate::Result;

pub(crate) fn connecting(server: SocketAddr, from: Option<IpAddr>) -> Result<Device> {
    Ok(match from {
        Some(from) => Device::open_default_at(from)?,
        None => Device::open_default_to(server.ip())?,
    })
}

/// Opens the devices of server and clients in one process.
pub(crate) fn both(udp: bool) -> Result<[Device; 2]> {
    if udp {
        // Each takes a free loopback address, as two processes would.
        let free = || Device::open_default_towards(Ipv4Addr::LOCALHOST.into());
        return Ok([free()?, free()?]);
    }
    let device = Device::open_default_or_software()?;
    Ok([device.clone(), device])
}

pub(crate) fn address(device: &Device) -> Result<IpAddr> {
    Ok(device.default_path()?.1.gid.to_ip())
}

//! Which device.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};

use tokio_rdma::software::{Network, UdpConfig, UdpError};
use tokio_rdma::{CompletionMode, CompletionQueue, Device, SetupError};

use crate::Result;
use crate::case::{Case, Mode};

/// How far a software device reaches.
#[derive(Debug)]
pub(crate) enum Reach {
    /// Other devices of this process.
    Process,
    /// Other processes and hosts, by RoCE v2 over UDP from the first of these addresses that is free.
    From(Vec<IpAddr>),
}

/// The real device that is named, or a software device.
pub(crate) fn open(reach: &Reach) -> Result<Device> {
    let addresses = match reach {
        Reach::From(addresses) if !is_real() => addresses,
        _ => return Ok(Device::open_default()?),
    };
    let mut last = "no address".into();
    for &address in addresses {
        // Whoever names an address wants it to be reached.
        match Network::udp(&UdpConfig::new().address(address).expose()) {
            Ok(network) => return Ok(Device::software_in(&network, &address.to_string())?),
            Err(error @ UdpError::PortTaken { soft_roce: false, .. }) => last = error.into(),
            Err(error) => return Err(error.into()),
        }
    }
    Err(last)
}

/// Its name, with what it is.
pub(crate) fn describe(device: &Device) -> String {
    // Only the software device has no vendor.
    if device.attr().vendor_id == 0 { format!("software device {}", device.name()) } else { device.name().to_owned() }
}

fn is_real() -> bool {
    std::env::var("TOKIO_RDMA_DEVICE").is_ok_and(|name| name != Device::SOFTWARE)
}

/// The peer to choose a GID for: of a real device, another host. A software device has one GID.
pub(crate) fn peer_of(address: IpAddr) -> Option<IpAddr> {
    (is_real() && !address.is_loopback()).then_some(address)
}

/// Addresses from which to reach `peer`, best first. Port 4791 has room for one program at each address, so that two of them
/// on loopback need two of its addresses.
pub(crate) fn sources(peer: SocketAddr) -> Result<Vec<IpAddr>> {
    let socket = UdpSocket::bind(if peer.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" })?;
    socket.connect(peer)?;
    Ok(match socket.local_addr()?.ip() {
        IpAddr::V4(ip) if ip.is_loopback() => (2..=254).map(|host| Ipv4Addr::new(127, 0, 0, host).into()).collect(),
        ip => vec![ip],
    })
}

/// Completion queues of a case, each with room for the lanes that use it.
pub(crate) fn queues(device: &Device, case: &Case) -> Result<Vec<CompletionQueue>> {
    let lanes = case.lanes.div_ceil(case.queues);
    let capacity = u32::try_from(lanes * crate::queue_pair::completions(case))?;
    let queue = || {
        let mode = match case.mode {
            Mode::Event => CompletionMode::Event,
            Mode::BusyPoll => CompletionMode::busy_poll().map_err(|error| format!("no thread to poll: {error}"))?,
            Mode::Cooperative => CompletionMode::Cooperative,
            Mode::Hybrid => CompletionMode::Hybrid,
        };
        let made: std::result::Result<_, SetupError> =
            CompletionQueue::builder(device).capacity(capacity).mode(mode).build();
        Ok(made?)
    };
    (0..case.queues.min(case.lanes)).map(|_| queue()).collect()
}

//! Networks over UDP for tests that run concurrently with each other and with other programs.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::net::{IpAddr, Ipv4Addr};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use tokio_rdma::software::{Network, UdpConfig, UdpError};

/// Returns a loopback address that is unlikely to be in use: from 127.64.0.0, at a random offset.
pub(crate) fn address() -> IpAddr {
    static NEXT: OnceLock<AtomicU32> = OnceLock::new();
    let next =
        NEXT.get_or_init(|| AtomicU32::new(RandomState::new().build_hasher().finish() as u32));
    let number = next.fetch_add(1, Ordering::Relaxed) % 0x0080_0000;
    Ipv4Addr::from(u32::from_be_bytes([127, 64, 0, 0]) + number).into()
}

pub(crate) fn network(names: &[&str]) -> Network {
    configured(names, |config| config)
}

/// Creates a network with a changed configuration. If SoftRoCE occupies the port, all devices use
/// the next one.
pub(crate) fn configured(names: &[&str], more: impl Fn(UdpConfig) -> UdpConfig) -> Network {
    let mut port = UdpConfig::PORT;
    for _ in 0..100 {
        let config = names
            .iter()
            .fold(UdpConfig::new().port(port), |config, name| config.device(name, address()));
        match Network::udp(&more(config)) {
            Ok(network) => return network,
            Err(UdpError::PortTaken { soft_roce: true, .. }) => port = UdpConfig::PORT + 1,
            Err(UdpError::PortTaken { .. }) => {}
            Err(error) => panic!("{error}"),
        }
    }
    panic!("none of 100 addresses is free");
}

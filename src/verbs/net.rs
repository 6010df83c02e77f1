//! What the kernel says about network interfaces and routes, for the choice of a GID.

use std::collections::HashMap;
use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::path::Path;

use if_addrs::IfAddr;

use crate::types::{Gid, IpPrefix, LinkLayer, NetInterface, Peer, PortAttr, RankedGid, rank};

/// UDP port of RoCE v2.
const ROCE: u16 = 4791;

/// The entries of a port's table, best first; asks the kernel only if that can make a difference.
pub(crate) fn rank_gids(port: &PortAttr, peer: Option<Gid>) -> Vec<RankedGid> {
    let of_interfaces = port.gids.iter().any(|entry| entry.interface.is_some());
    let asks = port.link_layer == LinkLayer::Ethernet && (of_interfaces || port.gids.len() > 1);
    let interfaces = if asks { interfaces(Path::new("/"), &addresses()) } else { Vec::new() };
    let peer = peer.map(|gid| Peer { gid, from: if asks { source_to(gid.to_ip()) } else { None } });
    rank(&port.gids, &interfaces, peer)
}

/// Addresses of this network namespace, by name of the interface; none if the kernel does not say.
pub(crate) fn addresses() -> HashMap<String, Vec<IpPrefix>> {
    let mut found: HashMap<String, Vec<IpPrefix>> = HashMap::new();
    for interface in if_addrs::get_if_addrs().unwrap_or_default() {
        let prefix = match interface.addr {
            IfAddr::V4(v4) => IpPrefix::new(v4.ip.into(), v4.prefixlen),
            IfAddr::V6(v6) => IpPrefix::new(v6.ip.into(), v6.prefixlen),
        };
        found.entry(interface.name).or_default().push(prefix);
    }
    found
}

/// Interfaces of this network namespace, of a file system that starts at `root`; what cannot be read is left out.
pub(crate) fn interfaces(root: &Path, addresses: &HashMap<String, Vec<IpPrefix>>) -> Vec<NetInterface> {
    // What is mounted at /sys may be that of another namespace; /proc/net is always our own.
    let own = fs::read_to_string(root.join("proc/net/dev")).ok();
    let is_own = |name: &str| {
        let mut names = own.iter().flat_map(|text| text.lines()).filter_map(|line| line.split_once(':'));
        own.is_none() || names.any(|(own, _)| own.trim() == name)
    };
    let mut found = Vec::new();
    for entry in fs::read_dir(root.join("sys/class/net")).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let read = |file| fs::read_to_string(entry.path().join(file)).unwrap_or_default().trim().to_owned();
        let Some(index) = read("ifindex").parse().ok().filter(|_| is_own(&name)) else { continue };
        let is_vlan = read("uevent").lines().any(|line| line == "DEVTYPE=vlan");
        found.push(NetInterface {
            index,
            // Software interfaces are `unknown` for ever.
            up: !["down", "lowerlayerdown", "notpresent"].contains(&read("operstate").as_str()),
            vlan: is_vlan,
            mtu: read("mtu").parse().ok(),
            addresses: addresses.get(&name).cloned().unwrap_or_default(),
            name,
        });
    }
    found.sort_by_key(|interface| interface.index);
    found
}

/// Our address from which the kernel would send to `peer`. Nothing is sent.
fn source_to(peer: IpAddr) -> Option<IpAddr> {
    let any: IpAddr = if peer.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind(SocketAddr::new(any, 0)).ok()?;
    socket.connect(SocketAddr::new(peer, ROCE)).ok()?;
    Some(socket.local_addr().ok()?.ip())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_is_found_and_routed_to() {
        let interfaces = interfaces(Path::new("/"), &addresses());
        let local: IpAddr = Ipv4Addr::LOCALHOST.into();
        let loopback = interfaces.iter().find(|interface| interface.name == "lo").unwrap();
        assert!(loopback.up && !loopback.vlan && loopback.mtu.is_some());
        assert!(loopback.addresses.iter().any(|address| address.contains(local)), "{loopback:?}");
        assert_eq!(source_to(local), Some(local));
    }
}

//! What the kernel says about network interfaces and routes, for the choice of a GID.

use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::path::Path;

use if_addrs::IfAddr;

use crate::types::{Gid, GidEntry, IpPrefix, LinkLayer, NetInterface, Peer, PortAttr, PortState, RankedGid, rank};

/// UDP port of RoCE v2.
const ROCE: u16 = 4791;

/// The entries of a port's table, best first; asks the kernel only if that can make a difference.
pub(crate) fn rank_gids(port: &PortAttr, peer: Option<Gid>) -> Vec<RankedGid> {
    let of_interfaces = port.gids.iter().any(|entry| entry.interface.is_some());
    let asks = port.link_layer == LinkLayer::Ethernet && (of_interfaces || port.gids.len() > 1);
    let interfaces = if asks { interfaces_of(&port.gids) } else { Vec::new() };
    let peer = peer.map(|gid| Peer { gid, from: if asks { source_to(gid.to_ip()) } else { None } });
    rank(&port.gids, &interfaces, peer)
}

/// The best entry of all active ports; of equals that of the lower port.
pub(super) fn best_path(
    ports: impl IntoIterator<Item = PortAttr>,
    rank: impl Fn(&PortAttr) -> Vec<RankedGid>,
) -> Option<(PortAttr, RankedGid)> {
    let active = ports.into_iter().filter(|port| port.state == PortState::Active);
    let firsts = active.filter_map(|port| rank(&port).into_iter().next().map(|first| (port, first)));
    firsts.min_by_key(|(port, first)| (first.merit(), port.port.0))
}

/// Interfaces that these entries belong to. Where every entry names its own, only those are looked at, for a host of
/// containers has hundreds, and each queue pair asks.
fn interfaces_of(gids: &[GidEntry]) -> Vec<NetInterface> {
    let (root, addresses) = (Path::new("/"), addresses());
    let name_of = |index: u32| addresses.iter().find(|(_, of)| of.index == Some(index)).map(|(name, _)| name);
    let wanted: BTreeSet<Option<u32>> = gids.iter().map(|entry| entry.interface).collect();
    let names: Option<Vec<&String>> = wanted.into_iter().map(|index| name_of(index?)).collect();
    match names {
        Some(names) => names.into_iter().filter_map(|name| interface(root, name, &addresses)).collect(),
        None => interfaces(root, &addresses),
    }
}

/// Addresses of an interface of this network namespace.
#[derive(Debug, Default)]
pub(crate) struct Addresses {
    index: Option<u32>,
    prefixes: Vec<IpPrefix>,
}

/// Addresses of this network namespace, by name of the interface; none if the kernel does not say.
pub(crate) fn addresses() -> HashMap<String, Addresses> {
    let mut found: HashMap<String, Addresses> = HashMap::new();
    for interface in if_addrs::get_if_addrs().unwrap_or_default() {
        let prefix = match interface.addr {
            IfAddr::V4(v4) => IpPrefix::new(v4.ip.into(), v4.prefixlen),
            IfAddr::V6(v6) => IpPrefix::new(v6.ip.into(), v6.prefixlen),
        };
        let addresses = found.entry(interface.name).or_default();
        addresses.index = interface.index;
        addresses.prefixes.push(prefix);
    }
    found
}

/// Interfaces of this network namespace, of a file system that starts at `root`; what cannot be read is left out.
pub(crate) fn interfaces(root: &Path, addresses: &HashMap<String, Addresses>) -> Vec<NetInterface> {
    // What is mounted at /sys may be that of another namespace; /proc/net is always our own.
    let own = fs::read_to_string(root.join("proc/net/dev")).ok();
    let own: Option<BTreeSet<&str>> =
        own.as_deref().map(|text| text.lines().filter_map(|line| Some(line.split_once(':')?.0.trim())).collect());
    let names = fs::read_dir(root.join("sys/class/net")).into_iter().flatten().flatten();
    let names = names.map(|entry| entry.file_name().to_string_lossy().into_owned());
    let names = names.filter(|name| own.as_ref().is_none_or(|own| own.contains(name.as_str())));
    let mut found: Vec<NetInterface> = names.filter_map(|name| interface(root, &name, addresses)).collect();
    found.sort_by_key(|interface| interface.index);
    found
}

fn interface(root: &Path, name: &str, addresses: &HashMap<String, Addresses>) -> Option<NetInterface> {
    let directory = root.join("sys/class/net").join(name);
    let read = |file| fs::read_to_string(directory.join(file)).unwrap_or_default().trim().to_owned();
    Some(NetInterface {
        index: read("ifindex").parse().ok()?,
        name: name.to_owned(),
        // Software interfaces are `unknown` for ever.
        up: !["down", "lowerlayerdown", "notpresent"].contains(&read("operstate").as_str()),
        vlan: read("uevent").lines().any(|line| line == "DEVTYPE=vlan"),
        mtu: read("mtu").parse().ok(),
        addresses: addresses.get(name).map(|of| of.prefixes.clone()).unwrap_or_default(),
    })
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
    use crate::types::{GidKind, PortNum};

    #[test]
    fn loopback_is_found_and_routed_to() {
        let interfaces = interfaces(Path::new("/"), &addresses());
        let local: IpAddr = Ipv4Addr::LOCALHOST.into();
        let loopback = interfaces.iter().find(|interface| interface.name == "lo").unwrap();
        assert!(loopback.up && !loopback.vlan && loopback.mtu.is_some());
        assert!(loopback.addresses.iter().any(|address| address.contains(local)), "{loopback:?}");
        assert_eq!(source_to(local), Some(local));
    }

    fn entry(index: u8, address: &str) -> GidEntry {
        GidEntry::new(index, Gid::from(address.parse::<IpAddr>().unwrap()), GidKind::RoceV2)
    }

    #[test]
    fn entries_that_name_their_interface_ask_for_no_other() {
        let all = interfaces(Path::new("/"), &addresses());
        let loopback = all.iter().find(|interface| interface.name == "lo").unwrap();
        let named = entry(0, "127.0.0.1").on_interface(loopback.index);
        assert_eq!(interfaces_of(&[named]), std::slice::from_ref(loopback));
        // One that is not known by its number may be known by its address.
        assert_eq!(interfaces_of(&[named, entry(1, "127.0.0.2")]), all);
        assert_eq!(interfaces_of(&[named, entry(1, "127.0.0.2").on_interface(u32::MAX)]), all);
    }

    #[test]
    fn best_path_is_that_of_the_better_active_port() {
        let port = |number, addresses: &[&str]| {
            let gids = addresses.iter().enumerate().map(|(index, address)| entry(index as u8, address)).collect();
            PortAttr::ethernet(PortNum(number), gids)
        };
        let down = |port: PortAttr| PortAttr { state: PortState::Down, ..port };
        let ours = ["10.1.0.1/24", "10.2.0.1/24"].map(|text| {
            let (address, len) = text.split_once('/').unwrap();
            IpPrefix::new(address.parse().unwrap(), len.parse().unwrap())
        });
        let interface = |index: u32, prefix| NetInterface {
            index,
            name: format!("eth{index}"),
            up: true,
            vlan: false,
            mtu: None,
            addresses: vec![prefix],
        };
        let interfaces = [interface(1, ours[0]), interface(2, ours[1])];
        let best = |ports: Vec<PortAttr>, peer: Option<&str>| {
            let peer = peer.map(|text| Peer { gid: text.parse::<IpAddr>().unwrap().into(), from: None });
            best_path(ports, |port| rank(&port.gids, &interfaces, peer))
                .map(|(port, gid)| (port.port.0, gid.entry.index))
        };
        let (one, two) = (|| port(1, &["fe80::1", "10.1.0.1"]), || port(2, &["fe80::2", "10.2.0.1"]));
        assert_eq!(best(vec![one(), two()], None), Some((1, 1)), "of equals the lower port");
        assert_eq!(best(vec![one(), two()], Some("10.2.0.9")), Some((2, 1)), "the one in the peer's subnet");
        assert_eq!(best(vec![down(one()), two()], Some("10.1.0.9")), Some((2, 1)), "the active one");
        assert_eq!(best(vec![port(1, &["fe80::1"]), two()], None), Some((2, 1)), "the one with an address");
        assert_eq!(best(vec![port(1, &[]), down(two())], None), None);
    }
}

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::path::Path;

use crate::error::{UdpError, VerbError};
use rdma_soft::interface_at;

use super::gid_rank::{NetInterface, Peer, RankedGid, rank};
use crate::types::{Gid, GidEntry, GidKind, LinkLayer, PortAttr, PortState};
use crate::verbs::interfaces::{addresses, addresses_of_mac, interface, interfaces};

const ROCE_PORT: u16 = 4791;

/// Queries the kernel only if that can change the ranking.
pub(crate) fn rank_gids(port: &PortAttr, peer: Option<Gid>) -> Vec<RankedGid> {
    let of_interfaces = port.gids.iter().any(|entry| entry.interface.is_some());
    let queries_kernel =
        port.link_layer == LinkLayer::Ethernet && (of_interfaces || port.gids.len() > 1);
    let interfaces = if queries_kernel { interfaces_of(&port.gids) } else { Vec::new() };
    let peer = peer.map(|gid| Peer {
        gid,
        from: if queries_kernel { source_to(gid.to_ip()).ok() } else { None },
    });
    rank(&port.gids, &interfaces, peer)
}

/// The best entry by [`rank_gids`]. Queries the kernel only if several interfaces have that GID.
pub(crate) fn entry_with(port: &PortAttr, gid: Gid, peer: Gid) -> Option<GidEntry> {
    let same = || port.gids.iter().filter(|entry| entry.gid == gid);
    let first = same().next()?;
    if same().all(|entry| entry.interface == first.interface) {
        // Entries with the same GID and interface differ in nothing else that affects the ranking.
        return same().min_by_key(|entry| (!entry.is_roce_v2(), entry.index)).copied();
    }
    let ranked = rank_gids(port, Some(peer));
    ranked.into_iter().map(|ranked| ranked.entry).find(|entry| entry.gid == gid)
}

pub(super) fn best_path(
    ports: impl IntoIterator<Item = PortAttr>,
    rank: impl Fn(&PortAttr) -> Vec<RankedGid>,
) -> Option<(PortAttr, RankedGid)> {
    let active = ports.into_iter().filter(|port| port.state == PortState::Active);
    let firsts =
        active.filter_map(|port| rank(&port).into_iter().next().map(|first| (port, first)));
    firsts.min_by_key(|(port, first)| (first.penalty(), port.port.0))
}

/// Returns true if packets to `address` of this host reach this port. On InfiniBand, `address`
/// belongs to IP over InfiniBand. `root` contains /sys.
pub(super) fn is_at(root: &Path, device: &str, port: &PortAttr, address: IpAddr) -> bool {
    if port.state != PortState::Active || port.gids.is_empty() {
        return false;
    }
    match port.link_layer {
        _ if address.is_unspecified() => true,
        LinkLayer::Ethernet => port.gids.iter().any(|&entry| match mac_of(entry) {
            Some(mac) => addresses_of_mac(root, mac).contains(&address),
            None => entry.gid == Gid::from(address),
        }),
        LinkLayer::InfiniBand => {
            interface_at(address).is_some_and(|name| is_ipoib(root, &name, device))
        }
        LinkLayer::Other(_) => false,
    }
}

/// Returns the MAC address of the network interface of an iWARP device.
pub(super) fn mac_of(entry: GidEntry) -> Option<[u8; 6]> {
    let mac = entry.gid.0.first_chunk().copied();
    mac.filter(|_| entry.kind == GidKind::Iwarp)
}

fn is_ipoib(root: &Path, interface: &str, device: &str) -> bool {
    let interface = root.join("sys/class/net").join(interface);
    let kind = fs::read_to_string(interface.join("type"));
    // 32 is ARPHRD_INFINIBAND.
    kind.is_ok_and(|kind| kind.trim() == "32")
        && interface.join("device/infiniband").join(device).exists()
}

/// Returns all interfaces only if an entry does not name its own: each connected queue pair calls
/// this, and a container host has hundreds of them.
fn interfaces_of(gids: &[GidEntry]) -> Vec<NetInterface> {
    let (root, addresses) = (Path::new("/"), addresses());
    let name_of =
        |index: u32| addresses.iter().find(|(_, of)| of.index == Some(index)).map(|(name, _)| name);
    let wanted: BTreeSet<Option<u32>> = gids.iter().map(|entry| entry.interface).collect();
    let names: Option<Vec<&String>> = wanted.into_iter().map(|index| name_of(index?)).collect();
    match names {
        Some(names) => {
            names.into_iter().filter_map(|name| interface(root, name, &addresses)).collect()
        }
        None => interfaces(root, &addresses),
    }
}

/// Returns the kernel's source address for `peer`. Sends nothing.
pub(super) fn source_to(peer: IpAddr) -> Result<IpAddr, UdpError> {
    let system = |verb, error: io::Error| {
        VerbError::new(verb, error.raw_os_error().unwrap_or(VerbError::EIO))
    };
    let any: IpAddr =
        if peer.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let refused =
        |verb| move |error| UdpError::System { address: peer, error: system(verb, error) };
    let socket = UdpSocket::bind(SocketAddr::new(any, 0)).map_err(refused("bind"))?;
    let no_route = |error| UdpError::NoRoute { peer, error: system("connect", error) };
    socket.connect(SocketAddr::new(peer, ROCE_PORT)).map_err(no_route)?;
    Ok(socket.local_addr().map_err(refused("getsockname"))?.ip())
}

/// Returns the local addresses from which to send to `peer`, best first: the kernel's choice
/// `by_route`, or, if the peer is on this host (`here`), loopback addresses, because the kernel's
/// choice may belong to the peer or another service. High ones come first, because low ones are
/// usually configured by hand.
pub(super) fn sources_to(peer: IpAddr, by_route: IpAddr, here: bool) -> Vec<IpAddr> {
    match (here, peer) {
        (false, _) => vec![by_route],
        // 127.0.0.1 is left to services configured for it.
        (true, IpAddr::V4(_)) => (2..=254)
            .rev()
            .map(|host| IpAddr::from([127, 0, 0, host]))
            .filter(|&address| address != peer)
            .collect(),
        // The only IPv6 loopback address.
        (true, IpAddr::V6(_)) => vec![Ipv6Addr::LOCALHOST.into()],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::{GidKind, IpPrefix, PortNum};

    #[test]
    fn source_address_for_loopback_is_loopback() {
        let local: IpAddr = Ipv4Addr::LOCALHOST.into();
        assert_eq!(source_to(local).unwrap(), local);
    }

    #[test]
    fn peers_on_this_host_are_reached_from_loopback() {
        let sources = |peer: &str, by_route: &str, here: bool| -> Vec<String> {
            let sources = sources_to(peer.parse().unwrap(), by_route.parse().unwrap(), here);
            sources.iter().map(ToString::to_string).collect()
        };
        let loopback = sources("127.0.0.1", "127.0.0.1", true);
        assert_eq!(
            (loopback.len(), &*loopback[0], &*loopback[252]),
            (253, "127.0.0.254", "127.0.0.2")
        );
        let beside = sources("127.0.0.254", "127.0.0.1", true);
        assert_eq!(
            (beside.len(), &*beside[0]),
            (252, "127.0.0.253"),
            "without the address of the peer"
        );
        // The kernel would choose the address itself, or another of the interface that a service
        // may use.
        assert_eq!(sources("192.0.2.1", "192.0.2.1", true), loopback);
        assert_eq!(sources("192.0.2.2", "192.0.2.1", true), loopback);
        assert_eq!(sources("::1", "::1", true), ["::1"]);
        assert_eq!(sources("fd00::1", "fd00::1", true), ["::1"]);
        assert_eq!(sources("192.0.2.1", "192.0.2.2", false), ["192.0.2.2"]);
        assert_eq!(sources("fd00::1", "fd00::2", false), ["fd00::2"]);
    }

    fn entry(index: u8, address: &str) -> GidEntry {
        GidEntry::new(index, Gid::from(address.parse::<IpAddr>().unwrap()), GidKind::RoceV2)
    }

    #[test]
    fn only_interfaces_named_by_entries_are_read() {
        let all = interfaces(Path::new("/"), &addresses());
        let loopback = all.iter().find(|interface| interface.name == "lo").unwrap();
        let named = entry(0, "127.0.0.1").on_interface(loopback.index);
        assert_eq!(interfaces_of(&[named]), std::slice::from_ref(loopback));
        // An entry with an unknown index may still be matched by its address.
        assert_eq!(interfaces_of(&[named, entry(1, "127.0.0.2")]), all);
        assert_eq!(interfaces_of(&[named, entry(1, "127.0.0.2").on_interface(u32::MAX)]), all);
    }

    #[test]
    fn entry_with_a_gid_is_the_best_of_that_gid() {
        let of = |index, kind, interface| {
            let gid = Gid::from(IpAddr::from([192, 0, 2, 1]));
            GidEntry::new(index, gid, kind).on_interface(interface)
        };
        let (v1, v2) = (GidKind::RoceV1, GidKind::RoceV2);
        let peer = Gid::from(IpAddr::from([192, 0, 2, 2]));
        let chosen = |entries: Vec<GidEntry>| {
            let port = PortAttr::ethernet(PortNum(1), entries);
            let (found, missing) = (entry_with(&port, port.gids[0].gid, peer), peer);
            assert_eq!(entry_with(&port, missing, peer), None);
            let ranked = rank_gids(&port, Some(peer));
            assert_eq!(found, ranked.first().map(|ranked| ranked.entry), "as ranked");
            found.map(|entry| entry.index)
        };
        assert_eq!(chosen(vec![of(0, v1, 7), of(1, v2, 7), of(2, v2, 7)]), Some(1));
        assert_eq!(chosen(vec![of(3, v1, 7), of(2, v1, 7)]), Some(2));
        assert_eq!(chosen(vec![of(0, v1, u32::MAX), of(1, v2, u32::MAX - 1)]), Some(1));
    }

    #[test]
    fn port_matches_the_addresses_of_its_gids() {
        let port = PortAttr::ethernet(PortNum(1), vec![entry(0, "fe80::1"), entry(1, "10.1.0.1")]);
        let root = std::env::temp_dir().join(format!("tokio-rdma-net-{}", std::process::id()));
        let at =
            |port: &PortAttr, address: &str| is_at(&root, "mlx5_0", port, address.parse().unwrap());
        assert!(
            at(&port, "10.1.0.1")
                && at(&port, "fe80::1")
                && at(&port, "0.0.0.0")
                && at(&port, "::")
        );
        assert!(!at(&port, "10.1.0.2") && !at(&port, "127.0.0.1") && !at(&port, "::1"));
        let mut down = port.clone();
        down.state = PortState::Down;
        assert!(!at(&down, "10.1.0.1") && !at(&down, "0.0.0.0"));
        assert!(!at(&PortAttr::ethernet(PortNum(1), Vec::new()), "0.0.0.0"));
        let mut infiniband = port;
        infiniband.link_layer = LinkLayer::InfiniBand;
        assert!(
            at(&infiniband, "0.0.0.0")
                && !at(&infiniband, "10.1.0.1")
                && !at(&infiniband, "127.0.0.1")
        );
        // Makes loopback look like IP over InfiniBand.
        let lo = root.join("sys/class/net/lo");
        fs::create_dir_all(lo.join("device/infiniband/mlx5_0")).unwrap();
        fs::write(lo.join("type"), "32\n").unwrap();
        assert!(at(&infiniband, "127.0.0.1") && !at(&infiniband, "198.51.100.1"));
        assert!(
            !is_at(&root, "mlx5_1", &infiniband, "127.0.0.1".parse().unwrap()),
            "interface of another device"
        );
        fs::write(lo.join("type"), "772\n").unwrap();
        assert!(!at(&infiniband, "127.0.0.1"));
        fs::remove_dir_all(&root).unwrap();
    }

    #[test]
    fn best_path_uses_the_better_active_port() {
        let port = |number, addresses: &[&str]| {
            let gids = addresses
                .iter()
                .enumerate()
                .map(|(index, address)| entry(index as u8, address))
                .collect();
            PortAttr::ethernet(PortNum(number), gids)
        };
        let down = |mut port: PortAttr| {
            port.state = PortState::Down;
            port
        };
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
            let peer =
                peer.map(|text| Peer { gid: text.parse::<IpAddr>().unwrap().into(), from: None });
            best_path(ports, |port| rank(&port.gids, &interfaces, peer))
                .map(|(port, gid)| (port.port.0, gid.entry.index))
        };
        let (one, two) =
            (|| port(1, &["fe80::1", "10.1.0.1"]), || port(2, &["fe80::2", "10.2.0.1"]));
        assert_eq!(best(vec![one(), two()], None), Some((1, 1)), "the lower of equal ports");
        assert_eq!(
            best(vec![one(), two()], Some("10.2.0.9")),
            Some((2, 1)),
            "the port in the subnet of the peer"
        );
        assert_eq!(
            best(vec![down(one()), two()], Some("10.1.0.9")),
            Some((2, 1)),
            "the active port"
        );
        assert_eq!(
            best(vec![port(1, &["fe80::1"]), two()], None),
            Some((2, 1)),
            "the port with an address"
        );
        assert_eq!(best(vec![port(1, &[]), down(two())], None), None);
    }
}

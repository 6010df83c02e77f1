//! A wrong GID table entry is the most frequent failure of a first set-up, because most entries do
//! not reach a given peer.

use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::fmt;
use std::net::IpAddr;

use crate::types::{Gid, GidEntry, GidKind};

/// An IP address with the prefix length of its network.
///
/// ```
/// use tokio_rdma::types::IpPrefix;
///
/// let network = IpPrefix::new("10.9.0.1".parse()?, 24);
/// assert_eq!(network.to_string(), "10.9.0.0/24");
/// assert!(network.contains("10.9.0.200".parse()?));
/// assert!(!network.contains("10.9.1.1".parse()?));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct IpPrefix {
    address: IpAddr,
    len: u8,
}

impl IpPrefix {
    /// Creates a prefix of `len` bits, at most the length of the address.
    #[must_use]
    pub fn new(address: IpAddr, len: u8) -> Self {
        let longest = if address.is_ipv4() { 32 } else { 128 };
        Self { address, len: len.min(longest) }
    }

    /// Returns the address.
    #[must_use]
    pub const fn address(self) -> IpAddr {
        self.address
    }

    /// Returns true if `other` is in the same network.
    #[must_use]
    pub fn contains(self, other: IpAddr) -> bool {
        self.address.is_ipv4() == other.is_ipv4() && self.masked(other) == self.masked(self.address)
    }

    fn masked(self, address: IpAddr) -> u128 {
        let mask = |bits: u32| u128::MAX.checked_shl(bits - u32::from(self.len)).unwrap_or(0);
        match address {
            IpAddr::V4(v4) => u128::from(v4.to_bits()) & mask(32),
            IpAddr::V6(v6) => v6.to_bits() & mask(128),
        }
    }
}

impl fmt::Display for IpPrefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let masked = self.masked(self.address);
        let network = match self.address {
            IpAddr::V4(_) => IpAddr::V4((masked as u32).into()),
            IpAddr::V6(_) => IpAddr::V6(masked.into()),
        };
        write!(f, "{network}/{}", self.len)
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NetInterface {
    pub(crate) index: u32,
    pub(crate) name: String,
    pub(crate) up: bool,
    pub(crate) vlan: bool,
    pub(crate) mtu: Option<u32>,
    pub(crate) addresses: Vec<IpPrefix>,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Peer {
    pub(crate) gid: Gid,
    pub(crate) from: Option<IpAddr>,
}

/// A reason for or against an entry of a GID table.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum GidReason {
    /// RoCE v2, in a table with both versions.
    RoceV2,
    /// RoCE v1, which routers do not forward.
    RoceV1,
    /// An address of the peer's family, in a table with both families.
    PeerFamily,
    /// An address of another family than the peer's.
    OtherFamily,
    /// The peer is in this network of the entry.
    PeerSubnet(IpPrefix),
    /// The peer is not in this network of the entry.
    OtherSubnet(IpPrefix),
    /// The kernel sends to the peer from this address.
    Routed,
    /// The interface is a VLAN.
    Vlan {
        /// The name of the interface.
        interface: String,
    },
    /// The address is link-local.
    LinkLocal,
    /// The interface is down.
    Down {
        /// The name of the interface.
        interface: String,
    },
    /// The interface is in another network namespace.
    OtherNamespace,
    /// The lowest index of otherwise equal entries.
    LowestIndex,
}

impl GidReason {
    /// Returns true if this is a reason for the entry, not against it.
    #[must_use]
    pub const fn favours(&self) -> bool {
        matches!(
            self,
            Self::RoceV2
                | Self::PeerFamily
                | Self::PeerSubnet(_)
                | Self::Routed
                | Self::LowestIndex
        )
    }
}

impl fmt::Display for GidReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::RoceV2 => f.write_str("RoCE v2 over v1"),
            Self::RoceV1 => f.write_str("RoCE v1, which routers do not forward"),
            Self::PeerFamily => f.write_str("address family of the peer"),
            Self::OtherFamily => f.write_str("not the address family of the peer"),
            Self::PeerSubnet(prefix) => write!(f, "in the peer's subnet {prefix}"),
            Self::OtherSubnet(prefix) => write!(f, "the peer is not in its subnet {prefix}"),
            Self::Routed => f.write_str("the kernel routes to the peer from this address"),
            Self::Vlan { interface } => write!(f, "VLAN interface {interface}"),
            Self::LinkLocal => f.write_str("link-local address"),
            Self::Down { interface } => write!(f, "interface {interface} is down"),
            Self::OtherNamespace => f.write_str("its interface is not in this network namespace"),
            Self::LowestIndex => f.write_str("lowest index of equal entries"),
        }
    }
}

/// A ranked entry of a GID table.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct RankedGid {
    /// The entry.
    pub entry: GidEntry,
    /// The name of its network interface, if known.
    pub interface: Option<String>,
    /// The reasons for and against it, most important first.
    pub reasons: Vec<GidReason>,
    penalty: Penalty,
}

impl RankedGid {
    /// Returns true unless its interface is down or in another network namespace.
    #[must_use]
    pub const fn is_usable(&self) -> bool {
        !self.penalty.unusable
    }

    pub(crate) const fn penalty(&self) -> Penalty {
        self.penalty
    }
}

impl fmt::Display for RankedGid {
    /// Prints a line like `3: 10.9.0.1, RoCE v2, eth0.5 (+ RoCE v2 over v1; - VLAN interface
    /// eth0.5)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let GidEntry { index, gid, kind, .. } = self.entry;
        match kind {
            GidKind::RoceV2 => write!(f, "{index}: {}, {kind}", gid.to_ip())?,
            _ => write!(f, "{index}: {gid}, {kind}")?,
        }
        if let Some(interface) = &self.interface {
            write!(f, ", {interface}")?;
        }
        for (number, reason) in self.reasons.iter().enumerate() {
            let sign = if reason.favours() { '+' } else { '-' };
            write!(f, "{}{sign} {reason}", if number == 0 { " (" } else { "; " })?;
        }
        if self.reasons.is_empty() { Ok(()) } else { f.write_str(")") }
    }
}

/// The criteria in order of importance; true counts against an entry.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Penalty {
    unusable: bool,
    roce_v1: bool,
    other_family: bool,
    not_in_peers_subnet: bool,
    not_routed: bool,
    vlan: bool,
    link_local: bool,
}

/// Ranks a table, best first, by the criteria of [`Device::gids`](crate::Device::gids).
pub(crate) fn rank(
    entries: &[GidEntry],
    interfaces: &[NetInterface],
    peer: Option<Peer>,
) -> Vec<RankedGid> {
    let mut ranked: Vec<RankedGid> =
        entries.iter().map(|entry| evaluate(*entry, interfaces, peer.as_ref())).collect();
    ranked.sort_by_key(|gid| {
        (gid.penalty, gid.entry.index, gid.entry.gid, Reverse(gid.entry.is_roce_v2()))
    });
    remove_undecisive_reasons(&mut ranked);
    ranked
}

fn evaluate(entry: GidEntry, interfaces: &[NetInterface], peer: Option<&Peer>) -> RankedGid {
    let mut reasons = Vec::new();
    if entry.kind == GidKind::Iwarp {
        // There is one, and no packet has it.
        return RankedGid { entry, interface: None, reasons, penalty: Penalty::default() };
    }
    if entry.kind == GidKind::InfiniBand {
        let not_in_peers_subnet =
            peer.is_some_and(|peer| evaluate_prefix(entry.gid, peer.gid, &mut reasons));
        let penalty = Penalty { not_in_peers_subnet, ..Penalty::default() };
        return RankedGid { entry, interface: None, reasons, penalty };
    }
    let address = entry.gid.to_ip();
    let interface = interface_of(&entry, interfaces);
    let peers = peer.map(|peer| peer.gid.to_ip());

    // If no interface could be read, no entry counts as elsewhere.
    let elsewhere = entry.interface.is_some() && interface.is_none() && !interfaces.is_empty();
    let down = interface.is_some_and(|interface| !interface.up);
    let vlan = interface.is_some_and(|interface| interface.vlan);
    let other_family = peers.is_some_and(|peer| peer.is_ipv4() != address.is_ipv4());
    let subnet = subnet_of(address, interface);
    let in_peers_subnet =
        peers.is_some_and(|peer| subnet.is_some_and(|subnet| subnet.contains(peer)));
    let routed = peer.is_some_and(|peer| peer.from == Some(address));
    let link_local = is_link_local(address);

    if let (true, Some(interface)) = (down, interface) {
        reasons.push(GidReason::Down { interface: interface.name.clone() });
    }
    if elsewhere {
        reasons.push(GidReason::OtherNamespace);
    }
    reasons.push(if entry.is_roce_v2() { GidReason::RoceV2 } else { GidReason::RoceV1 });
    if peer.is_some() {
        reasons.push(if other_family { GidReason::OtherFamily } else { GidReason::PeerFamily });
        match subnet {
            Some(subnet) if in_peers_subnet => reasons.push(GidReason::PeerSubnet(subnet)),
            Some(subnet) if !other_family => reasons.push(GidReason::OtherSubnet(subnet)),
            _ => {}
        }
    }
    if routed {
        reasons.push(GidReason::Routed);
    }
    if let (true, Some(interface)) = (vlan, interface) {
        reasons.push(GidReason::Vlan { interface: interface.name.clone() });
    }
    let link_local = link_local && !peers.is_some_and(is_link_local);
    if link_local {
        reasons.push(GidReason::LinkLocal);
    }
    let penalty = Penalty {
        unusable: down || elsewhere,
        roce_v1: !entry.is_roce_v2(),
        other_family,
        not_in_peers_subnet: peer.is_some() && !in_peers_subnet,
        not_routed: peer.is_some_and(|peer| peer.from.is_some()) && !routed,
        vlan,
        link_local,
    };
    RankedGid {
        entry,
        interface: interface.map(|interface| interface.name.clone()),
        reasons,
        penalty,
    }
}

/// The upper half of a GID is the subnet prefix.
fn evaluate_prefix(ours: Gid, peers: Gid, reasons: &mut Vec<GidReason>) -> bool {
    let subnet = IpPrefix::new(IpAddr::V6(ours.0.into()), 64);
    let same = subnet.contains(IpAddr::V6(peers.0.into()));
    reasons.push(if same { GidReason::PeerSubnet(subnet) } else { GidReason::OtherSubnet(subnet) });
    !same
}

/// Finds the interface by the entry's index or else by its address. An index may belong to another
/// network namespace, so the interface must also have the address, except for link-local ones,
/// which devices make up.
fn interface_of<'a>(entry: &GidEntry, interfaces: &'a [NetInterface]) -> Option<&'a NetInterface> {
    let address = entry.gid.to_ip();
    let has_address =
        |interface: &&NetInterface| interface.addresses.iter().any(|own| own.address() == address);
    match entry.interface {
        Some(index) => {
            let interface = interfaces.iter().find(|interface| interface.index == index);
            interface.filter(|interface| is_link_local(address) || has_address(interface))
        }
        None => interfaces.iter().filter(|_| !is_link_local(address)).find(has_address),
    }
}

fn subnet_of(address: IpAddr, interface: Option<&NetInterface>) -> Option<IpPrefix> {
    let known = interface
        .and_then(|interface| interface.addresses.iter().find(|own| own.address() == address));
    match (known, address) {
        (Some(known), _) => Some(*known),
        // The prefix length of link-local networks is fixed.
        (None, IpAddr::V6(v6)) if v6.is_unicast_link_local() => Some(IpPrefix::new(address, 64)),
        _ => None,
    }
}

fn is_link_local(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(v4) => v4.is_link_local(),
        IpAddr::V6(v6) => v6.is_unicast_link_local(),
    }
}

/// Removes reasons that all entries share, and adds the index if it alone puts the first entry
/// ahead.
fn remove_undecisive_reasons(ranked: &mut [RankedGid]) {
    let kinds: BTreeSet<bool> = ranked.iter().map(|gid| gid.entry.is_roce_v2()).collect();
    let families: BTreeSet<bool> =
        ranked.iter().map(|gid| gid.entry.gid.to_ip().is_ipv4()).collect();
    for gid in ranked.iter_mut() {
        gid.reasons.retain(|reason| match reason {
            GidReason::RoceV2 => kinds.len() > 1,
            GidReason::PeerFamily => families.len() > 1,
            _ => true,
        });
    }
    if let [first, second, ..] = ranked
        && first.penalty == second.penalty
    {
        first.reasons.push(GidReason::LowestIndex);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(index: u8, gid: &str, kind: GidKind, interface: u32) -> GidEntry {
        GidEntry::new(index, Gid::from(gid.parse::<IpAddr>().unwrap()), kind)
            .on_interface(interface)
    }

    fn interface(index: u32, name: &str, addresses: &[&str]) -> NetInterface {
        let prefix = |text: &&str| {
            let (address, len) = text.split_once('/').unwrap();
            IpPrefix::new(address.parse().unwrap(), len.parse().unwrap())
        };
        let addresses = addresses.iter().map(prefix).collect();
        NetInterface {
            index,
            name: name.into(),
            up: true,
            vlan: name.contains('.'),
            mtu: Some(1500),
            addresses,
        }
    }

    fn to(peer: &str) -> Option<Peer> {
        Some(Peer { gid: Gid::from(peer.parse::<IpAddr>().unwrap()), from: None })
    }

    /// Returns the indices, best first.
    #[track_caller]
    fn order(entries: &[GidEntry], interfaces: &[NetInterface], peer: Option<Peer>) -> Vec<u8> {
        let order = |entries: &[GidEntry]| -> Vec<u8> {
            rank(entries, interfaces, peer).iter().map(|gid| gid.entry.index).collect()
        };
        let found = order(entries);
        let mut shuffled = entries.to_vec();
        let mut random = fastrand::Rng::with_seed(7);
        for _ in 0..20 {
            random.shuffle(&mut shuffled);
            assert_eq!(order(&shuffled), found, "the order depends on the order of the input");
        }
        found
    }

    use GidKind::{InfiniBand, RoceV1, RoceV2};

    /// Returns v1 and v2 entries of link-local IPv6, IPv4, IPv4 of VLAN 5 and global IPv6.
    fn connectx() -> (Vec<GidEntry>, Vec<NetInterface>) {
        let addresses = ["fe80::e42:a1ff:fe5b:1", "10.9.0.1", "10.5.0.1", "2001:db8::1"];
        let entries = addresses.iter().zip([4, 4, 9, 4]).enumerate().flat_map(
            |(number, (address, interface))| {
                [(0, RoceV1), (1, RoceV2)]
                    .map(|(plus, kind)| entry(number as u8 * 2 + plus, address, kind, interface))
            },
        );
        let plain =
            interface(4, "ens1", &["10.9.0.1/24", "2001:db8::1/64", "fe80::e42:a1ff:fe5b:1/64"]);
        (
            entries.collect(),
            vec![
                interface(1, "lo", &["127.0.0.1/8"]),
                plain,
                interface(9, "ens1.5", &["10.5.0.1/16"]),
            ],
        )
    }

    #[test]
    fn table_of_a_connectx_without_peer() {
        let (entries, interfaces) = connectx();
        assert_eq!(order(&entries, &interfaces, None), [3, 7, 1, 5, 2, 6, 0, 4]);
        let ranked = rank(&entries, &interfaces, None);
        assert_eq!(ranked[0].reasons, [GidReason::RoceV2, GidReason::LowestIndex]);
        assert_eq!(
            ranked[0].to_string(),
            "3: 10.9.0.1, RoCE v2, ens1 (+ RoCE v2 over v1; + lowest index of equal entries)"
        );
        assert_eq!(
            ranked[7].to_string(),
            "4: ::ffff:10.5.0.1, RoCE v1, ens1.5 (- RoCE v1, which routers do not forward; \
             - VLAN interface ens1.5)"
        );
    }

    #[test]
    fn table_of_a_connectx_with_peers() {
        let (entries, interfaces) = connectx();
        for (peer, best) in [
            ("10.9.0.77", 3),
            ("10.5.200.1", 5),
            ("192.168.1.1", 3),
            ("2001:db8::9", 7),
            ("2001:db8:1::9", 7),
            ("fe80::9", 1),
        ] {
            assert_eq!(order(&entries, &interfaces, to(peer))[0], best, "peer {peer}");
        }
        let ranked = rank(&entries, &interfaces, to("10.5.200.1"));
        let text = ranked[0].to_string();
        assert!(
            text.contains("+ in the peer's subnet 10.5.0.0/16; - VLAN interface ens1.5"),
            "{text}"
        );
        let text = ranked[1].to_string();
        assert!(text.contains("- the peer is not in its subnet 10.9.0.0/24"), "{text}");
    }

    #[test]
    fn table_of_rxe() {
        let entries =
            [entry(0, "fe80::5054:ff:fe12:1", RoceV2, 2), entry(1, "192.168.122.7", RoceV2, 2)];
        let interfaces = [interface(2, "eth0", &["192.168.122.7/24", "fe80::77/64"])];
        assert_eq!(order(&entries, &interfaces, None), [1, 0]);
        assert_eq!(order(&entries, &interfaces, to("192.168.122.8")), [1, 0]);
        // rxe derives this entry from the MAC; the interface need not have it.
        assert_eq!(order(&entries, &interfaces, to("fe80::1")), [0, 1]);
        // All entries are RoCE v2, so that is no reason.
        assert_eq!(rank(&entries, &interfaces, None)[1].reasons, [GidReason::LinkLocal]);
    }

    #[test]
    fn peer_subnet_decides_before_route() {
        let entries = [
            entry(0, "10.1.0.1", RoceV2, 2),
            entry(1, "10.2.0.1", RoceV2, 2),
            entry(2, "10.3.0.1", RoceV2, 3),
        ];
        let interfaces = [
            interface(2, "eth0", &["10.1.0.1/24", "10.2.0.1/24"]),
            interface(3, "eth1", &["10.3.0.1/31"]),
        ];
        assert_eq!(order(&entries, &interfaces, to("10.2.0.9")), [1, 0, 2]);
        assert_eq!(order(&entries, &interfaces, to("10.3.0.0")), [2, 0, 1]);
        // A fabric of point-to-point links: no local subnet contains the peer, so routing decides.
        let from = Some("10.3.0.1".parse().unwrap());
        let peer = to("10.77.0.1").map(|peer| Peer { from, ..peer });
        assert_eq!(order(&entries, &interfaces, peer), [2, 0, 1]);
        assert!(rank(&entries, &interfaces, peer)[0].reasons.contains(&GidReason::Routed));
    }

    #[test]
    fn infiniband_ranks_by_subnet_prefix_then_index() {
        let entries = [
            entry(0, "fe80::2:c903:1:1", InfiniBand, 0),
            entry(1, "fec0:0:0:1:2:c903:1:1", InfiniBand, 0),
        ];
        assert_eq!(order(&entries, &[], None), [0, 1]);
        assert_eq!(order(&entries, &[], to("fe80::2:c903:9:9")), [0, 1]);
        assert_eq!(order(&entries, &[], to("fec0:0:0:1:2:c903:9:9")), [1, 0]);
        let text = rank(&entries, &[], to("fe80::9"))[0].to_string();
        assert_eq!(text, "0: fe80::2:c903:1:1, InfiniBand (+ in the peer's subnet fe80::/64)");
    }

    #[test]
    fn entries_of_down_or_foreign_interfaces_rank_last() {
        let entries = [
            entry(0, "10.1.0.1", RoceV2, 2),
            entry(1, "10.2.0.1", RoceV2, 3),
            entry(2, "10.3.0.1", RoceV1, 4),
        ];
        let mut interfaces =
            [interface(2, "eth0", &["10.1.0.1/24"]), interface(4, "eth2", &["10.3.0.1/24"])];
        interfaces[0].up = false;
        assert_eq!(order(&entries, &interfaces, None), [2, 0, 1]);
        let ranked = rank(&entries, &interfaces, None);
        assert_eq!(
            ranked.iter().map(RankedGid::is_usable).collect::<Vec<_>>(),
            [true, false, false]
        );
        assert_eq!(ranked[1].reasons[0], GidReason::Down { interface: "eth0".into() });
        assert_eq!(ranked[2].reasons[0], GidReason::OtherNamespace);
        // The index names a different interface in this namespace.
        let entries = [entry(0, "10.99.0.1", RoceV2, 4), entry(1, "10.3.0.1", RoceV2, 4)];
        assert_eq!(order(&entries, &interfaces, None), [1, 0]);
    }

    #[test]
    fn entries_stay_usable_when_interfaces_are_unknown() {
        let entries = [entry(0, "10.1.0.1", RoceV2, 2), entry(1, "10.2.0.1", RoceV2, 0)];
        assert!(rank(&entries, &[], None).iter().all(RankedGid::is_usable));
        // Without an index, the address identifies the interface.
        let interfaces =
            [interface(7, "eth7", &["10.2.0.1/24"]), interface(2, "eth0", &["10.1.0.1/24"])];
        assert_eq!(
            rank(&entries, &interfaces, to("10.2.0.2"))[0].interface.as_deref(),
            Some("eth7")
        );
        assert!(rank(&[], &interfaces, None).is_empty());
    }

    #[test]
    fn order_is_total_and_stable_under_additions() {
        let addresses = ["fe80::1", "10.1.0.1", "10.2.0.1", "2001:db8::1", "169.254.3.4"];
        let interfaces = [
            interface(1, "eth0", &["10.1.0.1/24", "fe80::1/64"]),
            interface(2, "eth0.7", &["10.2.0.1/24", "2001:db8::1/48"]),
        ];
        let peers = [
            None,
            to("10.2.0.9"),
            to("fe80::2"),
            to("2001:db8:0:1::2"),
            to("172.16.0.1"),
            to("169.254.9.9"),
        ];
        for seed in 0..2_000 {
            let mut random = fastrand::Rng::with_seed(seed);
            let entries: Vec<GidEntry> = (0..random.u8(2..12))
                .map(|index| {
                    let kind = if random.bool() { RoceV1 } else { RoceV2 };
                    entry(index, addresses[random.usize(..addresses.len())], kind, random.u32(..4))
                })
                .collect();
            let peer = peers[random.usize(..peers.len())];
            let all = order(&entries, &interfaces, peer);
            assert_eq!(all.len(), entries.len(), "seed {seed}");
            let fewer: Vec<GidEntry> = entries.iter().copied().filter(|_| random.bool()).collect();
            let remaining: Vec<u8> = all
                .into_iter()
                .filter(|index| fewer.iter().any(|entry| entry.index == *index))
                .collect();
            assert_eq!(
                order(&fewer, &interfaces, peer),
                remaining,
                "seed {seed}: the order of two depends on others"
            );
        }
    }

    #[test]
    fn prefixes_contain_and_print() {
        let prefix = |address: &str, len| IpPrefix::new(address.parse().unwrap(), len);
        for (network, inside, outside) in [
            (prefix("10.9.1.1", 24), "10.9.1.255", "10.9.2.0"),
            (prefix("10.9.1.1", 32), "10.9.1.1", "10.9.1.2"),
            (prefix("2001:db8::1", 64), "2001:db8::ffff:0:0:9", "2001:db8:0:1::1"),
            (prefix("2001:db8::1", 128), "2001:db8::1", "2001:db8::2"),
        ] {
            assert!(
                network.contains(inside.parse().unwrap())
                    && !network.contains(outside.parse().unwrap())
            );
        }
        let all = prefix("10.9.1.1", 0);
        assert!(all.contains("1.2.3.4".parse().unwrap()) && !all.contains("::1".parse().unwrap()));
        assert!(prefix("::1", 0).contains("ffff::".parse().unwrap()));
        assert_eq!(prefix("10.9.1.1", 200).to_string(), "10.9.1.1/32");
        assert_eq!(prefix("10.9.1.1", 20).to_string(), "10.9.0.0/20");
    }
}

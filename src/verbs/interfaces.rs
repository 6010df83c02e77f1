use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::net::IpAddr;
use std::path::Path;

use if_addrs::IfAddr;

use crate::verbs::gid_rank::{IpPrefix, NetInterface};

#[derive(Debug, Default)]
pub(crate) struct Addresses {
    pub(crate) index: Option<u32>,
    prefixes: Vec<IpPrefix>,
}

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

pub(crate) fn interfaces(root: &Path, addresses: &HashMap<String, Addresses>) -> Vec<NetInterface> {
    // The /sys mounted here may belong to another namespace; /proc/net always belongs to this one.
    let own = fs::read_to_string(root.join("proc/net/dev")).ok();
    let own: Option<BTreeSet<&str>> = own
        .as_deref()
        .map(|text| text.lines().filter_map(|line| Some(line.split_once(':')?.0.trim())).collect());
    let names = fs::read_dir(root.join("sys/class/net")).into_iter().flatten().flatten();
    let names = names.map(|entry| entry.file_name().to_string_lossy().into_owned());
    let names = names.filter(|name| own.as_ref().is_none_or(|own| own.contains(name.as_str())));
    let mut found: Vec<NetInterface> =
        names.filter_map(|name| interface(root, &name, addresses)).collect();
    found.sort_by_key(|interface| interface.index);
    found
}

pub(crate) fn interface(
    root: &Path,
    name: &str,
    addresses: &HashMap<String, Addresses>,
) -> Option<NetInterface> {
    let directory = root.join("sys/class/net").join(name);
    let read =
        |file| fs::read_to_string(directory.join(file)).unwrap_or_default().trim().to_owned();
    Some(NetInterface {
        index: read("ifindex").parse().ok()?,
        name: name.to_owned(),
        // The state of software interfaces is always `unknown`.
        up: !["down", "lowerlayerdown", "notpresent"].contains(&read("operstate").as_str()),
        vlan: read("uevent").lines().any(|line| line == "DEVTYPE=vlan"),
        mtu: read("mtu").parse().ok(),
        addresses: addresses.get(name).map(|of| of.prefixes.clone()).unwrap_or_default(),
    })
}

/// Returns the addresses of the interface with this MAC address, IPv4 first and link-local last.
/// `root` contains /sys.
pub(crate) fn addresses_of_mac(root: &Path, mac: [u8; 6]) -> Vec<IpAddr> {
    let mac = mac.map(|byte| format!("{byte:02x}")).join(":");
    let has_mac = |name: &str| {
        let found = fs::read_to_string(root.join("sys/class/net").join(name).join("address"));
        found.is_ok_and(|found| found.trim() == mac)
    };
    let all = addresses().into_iter().filter(|(name, _)| has_mac(name));
    let mut found: Vec<_> =
        all.flat_map(|(_, of)| of.prefixes).map(|prefix| prefix.address()).collect();
    found.sort_by_key(|address| match address {
        IpAddr::V4(v4) => (v4.is_link_local(), false),
        IpAddr::V6(v6) => (v6.is_unicast_link_local(), true),
    });
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_is_found() {
        let interfaces = interfaces(Path::new("/"), &addresses());
        let loopback = interfaces.iter().find(|interface| interface.name == "lo").unwrap();
        assert!(loopback.up && !loopback.vlan && loopback.mtu.is_some());
        let local = "127.0.0.1".parse().unwrap();
        assert!(loopback.addresses.iter().any(|address| address.contains(local)), "{loopback:?}");
    }
}

//! Finds the network interface of an address.

use std::fs;
use std::net::IpAddr;
use std::path::Path;

/// Returns the network interface that has `address`, if any.
#[must_use]
pub fn interface_at(address: IpAddr) -> Option<String> {
    if address.is_loopback() {
        // The loopback interface accepts all of 127.0.0.0/8.
        return Some("lo".to_owned());
    }
    let interfaces = if_addrs::get_if_addrs().unwrap_or_default();
    // Link-local addresses repeat.
    let found = interfaces
        .into_iter()
        .filter(|interface| interface.ip() == address)
        .min_by_key(|found| found.index);
    found.map(|interface| interface.name)
}

/// Returns the index of the interface that has `address`, if that is a link-local one, else 0. Of
/// several interfaces it is the one with the lowest index.
pub(super) fn scope_of(address: IpAddr) -> u32 {
    if !matches!(address, IpAddr::V6(v6) if v6.is_unicast_link_local()) {
        return 0;
    }
    let interfaces = if_addrs::get_if_addrs().unwrap_or_default();
    let indices = interfaces.iter().filter(|interface| interface.ip() == address);
    indices.filter_map(|interface| interface.index).min().unwrap_or(0)
}

/// Returns the index of the interface that has `address`, or 0 if none has it.
pub(super) fn index_of(address: IpAddr) -> u32 {
    let Some(name) = interface_at(address) else { return 0 };
    let index = fs::read_to_string(Path::new("/sys/class/net").join(name).join("ifindex"));
    index.ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0)
}

/// Returns the interface's MTU in bytes of an IP packet.
pub(crate) fn mtu_at(address: IpAddr) -> Option<usize> {
    let directory = Path::new("/sys/class/net").join(interface_at(address)?);
    fs::read_to_string(directory.join("mtu")).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_this_host_have_an_interface_and_others_none() {
        let mtu = |address: &str| mtu_at(address.parse().unwrap());
        assert!(mtu("127.0.0.1").is_some_and(|mtu| mtu >= 1280));
        assert_eq!(mtu("127.0.0.1"), mtu("127.3.2.1"));
        // Reserved for documentation.
        assert_eq!(mtu("198.51.100.1"), None);
        let ours =
            if_addrs::get_if_addrs().unwrap().into_iter().find(|interface| interface.name != "lo");
        if let Some(interface) = ours {
            assert!(interface_at(interface.ip()).is_some(), "{interface:?}");
        }
    }
}

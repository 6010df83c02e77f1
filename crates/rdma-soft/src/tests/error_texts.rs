//! The exact text of every public error of this crate.

use std::error::Error;
use std::io;
use std::net::{IpAddr, Ipv6Addr};

use rdma_provider::VerbError;

use crate::{OpenError, UdpError};

const VERB: VerbError = VerbError { verb: "socket", errno: 24 };

/// Checks the texts of an error type, at least one for each pattern. A variant without a pattern
/// does not compile.
macro_rules! texts {
    ($type:ident { $($pattern:pat => [$($value:expr => $text:expr),+ $(,)?]),+ $(,)? }) => {{
        let _exhaustive = |error: &$type| match error { $($pattern => {}),+ };
        $($(
            let error: $type = $value;
            assert!(matches!(error, $pattern), "{error:?} is not {}", stringify!($pattern));
            check(error, $text);
        )+)+
    }};
}

/// Checks the text, its style, and that the error prints its whole cause.
fn check<E: Error + Send + Sync + 'static>(error: E, expected: &str) {
    let text = error.to_string();
    assert_eq!(text, expected, "{error:?}");
    assert!(!text.is_empty() && !text.ends_with('.') && !text.contains('\n'), "{text:?}");
    let first = text.split(' ').next().unwrap_or_default();
    assert!(
        !first.starts_with(char::is_uppercase) || !first.contains(char::is_lowercase),
        "{text:?} starts with a capital"
    );
    assert!(error.source().is_none(), "{error:?} prints its cause and returns it");
    assert_eq!(io::Error::other(error).to_string(), expected);
}

#[test]
fn every_public_error_has_its_exact_text() {
    let not_found = |available: &[&str], reason| OpenError::NotFound {
        name: "soft9".into(),
        available: available.iter().map(|&name| name.into()).collect(),
        reason,
    };
    texts!(OpenError {
        OpenError::NotFound { .. } => [
            not_found(&["soft0", "soft1"], None) =>
                "device \"soft9\" not found; available: soft0, soft1",
            not_found(&[], Some("a network over UDP has only the devices of its configuration")) =>
                "device \"soft9\" not found: a network over UDP has only the devices of its \
                 configuration; available: none",
        ],
        OpenError::Verb { .. } => [
            OpenError::Verb { device: "soft0".into(), error: VERB } =>
                "failed to open device \"soft0\": socket: Too many open files (os error 24)",
        ],
    });
    let address = IpAddr::from([192, 0, 2, 1]);
    let taken = |address, soft_roce, device: Option<&str>| UdpError::PortTaken {
        address,
        port: 4791,
        soft_roce,
        device: device.map(str::to_owned),
    };
    texts!(UdpError {
        UdpError::NoDevice => [
            UdpError::NoDevice => "UDP network without a device; add one with UdpConfig::device",
        ],
        UdpError::NoPort => [
            UdpError::NoPort =>
                "UDP port 0 is invalid: all peers use the same port; choose 1 to 65535",
        ],
        UdpError::Repeated { .. } => [
            UdpError::Repeated { name: "a".into(), address } =>
                "device \"a\" at 192.0.2.1 repeats the name or address of an earlier device of \
                 the UDP network",
        ],
        UdpError::NotOneHost { .. } => [
            UdpError::NotOneHost { address: [0, 0, 0, 0].into() } =>
                "0.0.0.0 is unspecified, multicast or broadcast; a software device over UDP needs \
                 the address of one host",
        ],
        UdpError::NotLoopback { .. } => [
            UdpError::NotLoopback { address } =>
                "other hosts could reach the software device at 192.0.2.1; use a loopback \
                 address, or allow it with UdpConfig::expose",
        ],
        UdpError::Prefix { .. } => [
            UdpError::Prefix { address, prefix: 33, longest: 32 } =>
                "invalid network of peers 192.0.2.1/33: at most 32 bits allowed",
        ],
        UdpError::PortTaken { .. } => [
            taken(address, false, None) =>
                "UDP port 4791 of 192.0.2.1 is in use by another program",
            taken(Ipv6Addr::LOCALHOST.into(), false, None) =>
                "UDP port 4791 of ::1 is in use by another program; IPv6 has no other loopback \
                 address, but IPv4 has 127.0.0.0/8",
            taken(address, true, None) =>
                "UDP port 4791 is in use at all addresses, probably by the kernel's SoftRoCE: \
                 module rdma_rxe is loaded; for 192.0.2.1, unload it, use another network \
                 namespace, or use another port for all software devices",
            taken(address, false, Some("soft0")) =>
                "UDP port 4791 of 192.0.2.1 is in use by device \"soft0\" of this process; use \
                 that device",
        ],
        UdpError::AllTaken { .. } => [
            UdpError::AllTaken { first: address, last: [192, 0, 2, 9].into(), port: 4791 } =>
                "UDP port 4791 is in use at every address from 192.0.2.1 to 192.0.2.9; stop a \
                 program that uses it",
        ],
        UdpError::NoRoute { .. } => [
            UdpError::NoRoute { peer: address, error: VerbError::new("connect", 101) } =>
                "failed to find a route to 192.0.2.1: connect: Network is unreachable (os error \
                 101)",
            UdpError::NoRoute {
                peer: "fe80::1".parse().unwrap(),
                error: VerbError::new("connect", 22),
            } => "failed to find a route to fe80::1: connect: Invalid argument (os error 22); a \
                  link-local address names no interface: open the device with \
                  Device::open_default_at, at this host's address of the interface",
        ],
        UdpError::NotLocal { .. } => [
            UdpError::NotLocal { address } =>
                "failed to bind UDP address 192.0.2.1: it does not belong to this host",
        ],
        UdpError::NotLinux => [
            UdpError::NotLinux => "software devices over UDP require Linux",
        ],
        UdpError::System { .. } => [
            UdpError::System { address, error: VERB } =>
                "failed to open a software device over UDP for 192.0.2.1: socket: Too many open \
                 files (os error 24)",
        ],
    });
}

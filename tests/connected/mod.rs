//! Connected ends, for the tests of messages: over an exchange in this process, or by address.

#![allow(dead_code, unreachable_pub, reason = "each test file uses a part of it")]

use std::cell::Cell;
use std::net::SocketAddr;

use bytes::Bytes;
use tokio_rdma::op::ConnectOptions;
use tokio_rdma::software::Network;
use tokio_rdma::types::AckTimeout;
use tokio_rdma::{Connection, ConnectionConfig, Device, ProtectionDomain};

use crate::torture::{self, Flavour, LONG, Mode, bounded, soon};

thread_local! {
    static MODE: Cell<Mode> = const { Cell::new(Mode::Event) };
}

/// What [`config`] gives on this thread from now on has this mode.
pub fn use_mode(mode: Mode) {
    MODE.set(mode);
}

/// Runs `test` in every completion mode, on the runtime that services use.
pub fn modes<F: Future<Output = ()>>(
    what: &'static str,
    test: impl Fn() -> F + Send + Copy + 'static,
) {
    for mode in Mode::ALL {
        bounded(what, LONG, move || {
            use_mode(mode);
            Flavour::MultiThread.runtime().block_on(test());
        });
    }
}

/// Runs `test` in every completion mode, and the usual one on each runtime.
pub fn run<F: Future<Output = ()>>(
    what: &'static str,
    test: impl Fn() -> F + Send + Copy + 'static,
) {
    let settings = [
        (Mode::Event, Flavour::CurrentThread),
        (Mode::Event, Flavour::MultiThread),
        (Mode::BusyPoll, Flavour::MultiThread),
        (Mode::Cooperative, Flavour::CurrentThread),
        (Mode::Hybrid, Flavour::MultiThread),
    ];
    for (mode, flavour) in settings {
        bounded(what, LONG, move || {
            use_mode(mode);
            flavour.runtime().block_on(test());
        });
    }
}

/// Settings of tests: a peer that is gone is found out in some tens of milliseconds on the software device.
pub fn config() -> ConnectionConfig {
    let config = ConnectionConfig::default().mode(MODE.get().make());
    match torture::hardware() {
        Some(_) => config,
        None => config.options(brief()),
    }
}

/// Timeouts of the software device, which answers at once.
pub fn brief() -> ConnectOptions {
    ConnectOptions { timeout: AckTimeout::from_code(10), retry_count: 3, ..Default::default() }
}

/// Two connected ends on one device.
pub fn pair(config: &ConnectionConfig) -> (Connection, Connection) {
    let (_, pd) = torture::device(&Network::new());
    pair_in(&pd, &pd, config, config)
}

/// Two connected ends in these protection domains.
pub fn pair_in(
    a_pd: &ProtectionDomain,
    b_pd: &ProtectionDomain,
    a: &ConnectionConfig,
    b: &ConnectionConfig,
) -> (Connection, Connection) {
    let (a, b) = (Connection::prepare(a_pd, a).unwrap(), Connection::prepare(b_pd, b).unwrap());
    let (a_end, b_end) = (a.endpoint(), b.endpoint());
    let (a_hello, b_hello) = (a.handshake(b"from a").unwrap(), b.handshake(b"from b").unwrap());
    (a.establish(&b_end, &b_hello).unwrap(), b.establish(&a_end, &a_hello).unwrap())
}

/// Two software devices that can be unplugged and lost.
pub fn two(network: &Network) -> [(Device, ProtectionDomain); 2] {
    ["one", "two"].map(|name| {
        let device = Device::software_in(network, name).unwrap();
        let pd = device.protection_domain().unwrap();
        (device, pd)
    })
}

/// Where a listener on `device` can be reached, at any port.
pub fn address(device: &Device) -> SocketAddr {
    match torture::hardware() {
        Some(_) => SocketAddr::new(device.default_path().unwrap().1.gid.to_ip(), 0),
        None => SocketAddr::from(([127, 0, 0, 1], 0)),
    }
}

/// Bytes that tell their place and `seed`.
pub fn pattern(len: usize, seed: u64) -> Bytes {
    let mut word = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        word ^= word << 13;
        word ^= word >> 7;
        word ^= word << 17;
        bytes.extend_from_slice(&word.to_le_bytes());
    }
    bytes.truncate(len);
    bytes.into()
}

/// The next message, which there must be.
pub async fn recv(connection: &Connection) -> Bytes {
    soon("a message", connection.recv()).await.expect("no error").expect("not the end")
}

/// No receive was ever missing, at either end.
pub fn assert_ready(connections: [&Connection; 2]) {
    for connection in connections {
        if let Some((sent, _)) = connection.software_counters() {
            assert_eq!(sent.rnr_naks, 0, "{connection:?}");
        }
    }
}

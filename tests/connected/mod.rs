//! Pairs of connected ends for tests of messages.

#![allow(dead_code, unreachable_pub, reason = "each test file uses a part of it")]

use std::cell::Cell;
use std::net::SocketAddr;
use std::panic::resume_unwind;
use std::thread;

use bytes::Bytes;
use tokio_rdma::op::RetryConfig;
use tokio_rdma::software::Network;
use tokio_rdma::types::AckTimeout;
use tokio_rdma::{Connection, ConnectionConfig, Device, Listener, ProtectionDomain};

use crate::torture::{self, Flavour, LONG, Mode, bounded, soon};

thread_local! {
    static MODE: Cell<Mode> = const { Cell::new(Mode::Event) };
}

/// Sets the completion mode that [`config`] uses on this thread.
pub fn use_mode(mode: Mode) {
    MODE.set(mode);
}

pub fn modes<F: Future<Output = ()>>(
    what: &'static str,
    test: impl Fn() -> F + Send + Copy + 'static,
) {
    each(what, Mode::ALL.map(|mode| (mode, Flavour::MultiThread)), test);
}

/// Runs `test` in each completion mode, and the event mode on each runtime flavour.
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
    each(what, settings, test);
}

/// Runs `test` in each of `settings`: all at once, because most tests wait for timeouts, or one by
/// one on a real device.
pub fn each<F: Future<Output = ()>, const N: usize>(
    what: &'static str,
    settings: [(Mode, Flavour); N],
    test: impl Fn() -> F + Send + Copy + 'static,
) {
    let run = move |(mode, flavour): (Mode, Flavour)| {
        bounded(what, LONG, move || {
            use_mode(mode);
            flavour.runtime().block_on(test());
        });
    };
    if torture::hardware().is_some() {
        return settings.into_iter().for_each(run);
    }
    let runs = settings.map(|setting| (setting, thread::spawn(move || run(setting))));
    for (setting, run) in runs {
        if let Err(panic) = run.join() {
            eprintln!("{what}: failed in {setting:?}");
            resume_unwind(panic);
        }
    }
}

/// Returns settings of which the retransmissions outlast the pauses of threads on a busy machine.
pub fn config() -> ConnectionConfig {
    let config = ConnectionConfig::default().mode(MODE.get().make());
    match torture::hardware() {
        Some(_) => config,
        None => config.retries(patient()),
    }
}

/// Returns the settings of [`config`], but detects a lost peer in tens of milliseconds on the
/// software device. A pause of a thread can look like one, too.
pub fn config_of_lost_peer() -> ConnectionConfig {
    match torture::hardware() {
        Some(_) => config(),
        None => config().retries(brief()),
    }
}

pub fn patient() -> RetryConfig {
    RetryConfig { timeout: AckTimeout::from_code(17), retry_count: 6, ..Default::default() }
}

pub fn brief() -> RetryConfig {
    RetryConfig { timeout: AckTimeout::from_code(10), retry_count: 3, ..Default::default() }
}

pub fn pair(config: &ConnectionConfig) -> (Connection, Connection) {
    let (_, pd) = torture::device(&Network::new());
    pair_in(&pd, &pd, config, config)
}

pub fn pair_in(
    a_pd: &ProtectionDomain,
    b_pd: &ProtectionDomain,
    a: &ConnectionConfig,
    b: &ConnectionConfig,
) -> (Connection, Connection) {
    if a_pd.device().attr().is_iwarp() {
        return pair_by_address(a_pd, b_pd, a, b);
    }
    let (a, b) = (Connection::prepare(a_pd, a).unwrap(), Connection::prepare(b_pd, b).unwrap());
    let (a_end, b_end) = (a.endpoint(), b.endpoint());
    let (a_hello, b_hello) = (a.handshake(b"from a").unwrap(), b.handshake(b"from b").unwrap());
    (a.establish(&b_end, &b_hello).unwrap(), b.establish(&a_end, &a_hello).unwrap())
}

/// Connects by the address of the device, because it connects in no other way.
fn pair_by_address(
    a_pd: &ProtectionDomain,
    b_pd: &ProtectionDomain,
    a: &ConnectionConfig,
    b: &ConnectionConfig,
) -> (Connection, Connection) {
    let (here, there) = (a_pd.device().clone(), b_pd.device().clone());
    let a = a.clone().protection_domain(a_pd).user_data("from a");
    let b = b.clone().protection_domain(b_pd).user_data("from b");
    torture::on_watcher(async move {
        let listener = Listener::bind_with(&there, address(&there), &b).await.unwrap();
        let connecting = Connection::connect_with(&here, listener.local_addr().unwrap(), &a);
        let (ours, theirs) = tokio::join!(connecting, listener.accept());
        (ours.unwrap(), theirs.unwrap())
    })
}

pub fn two(network: &Network) -> [(Device, ProtectionDomain); 2] {
    ["one", "two"].map(|name| {
        let device = Device::software_in(network, name).unwrap();
        let pd = device.protection_domain().unwrap();
        (device, pd)
    })
}

pub fn address(device: &Device) -> SocketAddr {
    match torture::hardware() {
        Some(_) => SocketAddr::new(device.default_address().unwrap(), 0),
        None => SocketAddr::from(([127, 0, 0, 1], 0)),
    }
}

/// Returns pseudo-random bytes, so that data of another position or seed is detected.
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

pub async fn recv(connection: &Connection) -> Bytes {
    soon("a message", connection.recv()).await.expect("no error").expect("not the end")
}

/// Asserts that each message found a posted receive.
pub fn assert_ready(connections: [&Connection; 2]) {
    for connection in connections {
        if let Some((sent, _)) = connection.software_counters() {
            assert_eq!(sent.rnr_naks, 0, "{connection:?}");
        }
    }
}

//! The wire of this process, and runs of this program on other wires.

use std::process::Command;
use std::sync::OnceLock;

use tokio_rdma::Device;

use crate::common::Wire;

const SETTING: &str = "TOKIO_RDMA_SUITE_WIRE";

/// Returns the wire of this process; the default is [`Wire::Memory`].
pub(crate) fn wire() -> Wire {
    static WIRE: OnceLock<Wire> = OnceLock::new();
    *WIRE.get_or_init(|| match std::env::var(SETTING).as_deref() {
        Err(_) => Wire::Memory,
        Ok("packets") => Wire::Packets,
        Ok("udp") => Wire::Udp,
        Ok("faults") => Wire::Faults,
        Ok(other) => panic!("{SETTING}={other}: expected packets, udp or faults"),
    })
}

/// Runs the tests with one of `names` in their names on `wire`; at least `count` must pass.
pub(crate) fn run(wire: &str, names: &[&str], count: usize) {
    if let Ok(device) = std::env::var("TOKIO_RDMA_DEVICE")
        && device != Device::SOFTWARE
    {
        eprintln!("SKIPPED wire {wire}: TOKIO_RDMA_DEVICE names {device}");
        return;
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    let output =
        command.args(names).args(["--skip", "by_wire::"]).env(SETTING, wire).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    // "test result: ok. 469 passed; 0 failed; ..."
    let passed = text.split("test result: ok. ").nth(1).and_then(|rest| rest.split(' ').next());
    let passed: usize = passed.map_or(0, |number| number.parse().unwrap());
    assert!(
        output.status.success() && passed >= count,
        "wire {wire}: {}, {passed} tests passed of at least {count}; \
         repeat with {SETTING}={wire}\n{text}\n{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    println!("wire {wire}: {passed} tests passed");
}

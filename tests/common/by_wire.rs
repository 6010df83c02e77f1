//! The wire of this process, and runs of this program on other wires.

use std::process::{Command, Output};
use std::sync::OnceLock;

use tokio_rdma::Device;

use crate::common::Wire;

const SETTING: &str = "TOKIO_RDMA_SUITE_WIRE";

/// `full` runs each scenario in every mode over every wire.
const SUITE: &str = "TOKIO_RDMA_SUITE";

/// Last parts of the names of tests that [`in_every_mode`](crate::common::in_every_mode) defines.
const MODES: [&str; 8] = [
    "::by_events",
    "::by_events_on_threads",
    "::by_busy_poll",
    "::by_busy_poll_on_threads",
    "::cooperatively",
    "::cooperatively_on_threads",
    "::by_hybrid",
    "::by_hybrid_on_threads",
];

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

/// Runs the tests with one of `names` in their names on `wire`; there must be `scenarios` of them
/// or more, not counting the modes of one scenario.
///
/// In memory each scenario runs in every mode, so one mode of each is enough here. Consecutive
/// scenarios and different wires take different modes. `TOKIO_RDMA_SUITE=full` runs all.
pub(crate) fn run(wire: &str, names: &[&str], scenarios: usize) {
    if let Ok(device) = std::env::var("TOKIO_RDMA_DEVICE")
        && device != Device::SOFTWARE
    {
        super::skipped(&format!("wire {wire}: TOKIO_RDMA_DEVICE names {device}"));
        return;
    }
    let full = match std::env::var(SUITE).as_deref() {
        Err(_) => false,
        Ok("full") => true,
        Ok(other) => panic!("{SUITE}={other}: expected full"),
    };
    let listed = this_program(wire, names, &["--list"]);
    let listed = String::from_utf8(listed.stdout).unwrap();
    let tests: Vec<_> = listed.lines().filter_map(|line| line.strip_suffix(": test")).collect();
    let paired = pairs(&tests, ["packets", "udp", "faults"].iter().position(|&of| of == wire));
    assert!(
        paired.len() >= scenarios,
        "{} of at least {scenarios} scenarios have one of {names:?} in their names",
        paired.len()
    );
    let chosen = if full { tests } else { paired };
    let output = this_program(wire, &chosen, &["--exact"]);
    let text = String::from_utf8_lossy(&output.stdout);
    // "test result: ok. 469 passed; 0 failed; ..."
    let passed = text.split("test result: ok. ").nth(1).and_then(|rest| rest.split(' ').next());
    let passed: usize = passed.map_or(0, |number| number.parse().unwrap());
    assert!(
        output.status.success() && passed == chosen.len(),
        "wire {wire}: {}, {passed} of {} tests passed; repeat with {SETTING}={wire}\n{text}\n{}",
        output.status,
        chosen.len(),
        String::from_utf8_lossy(&output.stderr)
    );
    println!("wire {wire}: {passed} tests passed");
}

/// Returns the tests that have no mode, and one mode of each scenario that has several.
fn pairs<'a>(tests: &[&'a str], wire: Option<usize>) -> Vec<&'a str> {
    let mut scenarios: Vec<&str> = Vec::new();
    let chosen = tests.iter().filter(|test| {
        let Some((mode, scenario)) =
            MODES.iter().enumerate().find_map(|(at, mode)| Some((at, test.strip_suffix(mode)?)))
        else {
            return true;
        };
        let number = scenarios.iter().position(|&of| of == scenario).unwrap_or_else(|| {
            scenarios.push(scenario);
            scenarios.len() - 1
        });
        mode == (number + 3 * wire.unwrap_or(0)) % MODES.len()
    });
    chosen.copied().collect()
}

fn this_program(wire: &str, names: &[&str], arguments: &[&str]) -> Output {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(names).args(arguments).args(["--skip", "by_wire::"]).env(SETTING, wire);
    command.output().unwrap()
}

//! tokio-rdma beside drivers that refuse, devices that do not flush and peers that forge requests, by the private test
//! controls of the software device.

#[allow(dead_code, reason = "these tests use a part of it")]
#[path = "../../../../tests/common/mod.rs"]
mod common;
#[path = "../../../../tests/connected/mod.rs"]
mod connected;
#[path = "../../../../tests/torture/mod.rs"]
mod torture;

mod destruction;
mod flood;
mod posting;

use common::by_wire::{run, wire};

#[test]
fn over_packets() {
    run("packets", &["posting::part_that_is_refused"], 8);
}

#[test]
fn over_udp() {
    run("udp", &["posting::part_that_is_refused"], 8);
}

#[test]
fn with_faults() {
    run("faults", &["posting::part_that_is_refused"], 8);
}

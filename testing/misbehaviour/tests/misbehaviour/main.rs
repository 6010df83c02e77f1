//! tokio-rdma with drivers that refuse calls, devices that do not flush and peers that forge
//! requests, by the software device's private test controls.

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
    run("packets", &["posting::partly_refused_batch_fails"], 8);
}

#[test]
fn over_udp() {
    run("udp", &["posting::partly_refused_batch_fails"], 8);
}

#[test]
fn with_faults() {
    run("faults", &["posting::partly_refused_batch_fails"], 8);
}

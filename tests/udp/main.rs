//! RoCE v2 over UDP between networks and between processes, on the loopback interface.

#[allow(dead_code, unused_macros, unused_imports, reason = "the conformance suite uses the rest")]
#[path = "../common/mod.rs"]
mod common;
#[path = "../connected/mod.rs"]
mod connected;
#[path = "../torture/mod.rs"]
mod torture;

mod connections;
mod default_device;
mod network;
mod two_process;

fn wire() -> common::Wire {
    common::Wire::Udp
}

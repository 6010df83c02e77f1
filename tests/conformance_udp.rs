//! The conformance suite on RoCE v2 over UDP: both ends are devices of networks of their own, and meet by sockets only.

mod common;

#[path = "conformance/mod.rs"]
mod suite;

const WIRE: common::Wire = common::Wire::Udp;

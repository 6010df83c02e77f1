//! The conformance suite on a software network that encodes every packet: segments, acknowledgements, timers.

mod common;

#[path = "conformance/mod.rs"]
mod suite;

const WIRE: common::Wire = common::Wire::Packets;

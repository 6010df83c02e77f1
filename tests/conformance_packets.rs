//! The conformance suite on a software network that encodes every packet: segments, acknowledgements, timers.

mod common;

#[path = "conformance/mod.rs"]
mod suite;

/// Whether the software device exchanges encoded packets.
const PACKETS: bool = true;

//! Pools of DC initiators over encoded packets, which a thread delivers: answers come later than on a network that moves the
//! bytes at once.

#[allow(dead_code, reason = "most of it is of the conformance suite")]
mod common;

#[path = "dc_pool/mod.rs"]
mod suite;

const WIRE: common::Wire = common::Wire::Packets;

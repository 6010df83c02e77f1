//! Pools of DC initiators: who gets one, in which order, and what an error ends.
//!
//! It runs on the software device; with `TOKIO_RDMA_DEVICE` set it runs on that one.

#[allow(dead_code, reason = "most of it is of the conformance suite")]
mod common;

#[path = "dc_pool/mod.rs"]
mod suite;

const WIRE: common::Wire = common::Wire::Memory;

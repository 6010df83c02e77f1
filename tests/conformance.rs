//! The conformance suite: what a device and this crate on top of it must do, said once for every device.
//!
//! It runs on the software device; with `TOKIO_RDMA_DEVICE` set it runs on that one.

mod common;

#[path = "conformance/mod.rs"]
mod suite;

const WIRE: common::Wire = common::Wire::Memory;

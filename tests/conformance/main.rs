//! The conformance suite: what a device and this crate on top of it must do, said once for every device.
//!
//! It runs on the software device; with `TOKIO_RDMA_DEVICE` set it runs on that one. [`by_wire`] runs it on the other wires of
//! the software device, with the pools of DC initiators (`pool`). The program also has the operations that are abandoned in
//! every way (`cancel`) and shared receive queues and completion queues (`shared_queues`).

#[path = "../common/mod.rs"]
mod common;
#[path = "../torture/mod.rs"]
mod torture;

mod by_wire;
mod cancel;
#[path = "../dc_pool/mod.rs"]
mod pool;
mod shared_queues;
#[path = "mod.rs"]
mod suite;

use common::by_wire::wire;

//! The conformance suite: required behaviour of a device and of this crate on top of it.
//!
//! It runs on the device that `TOKIO_RDMA_DEVICE` names; the default is the software device.
//! [`by_wire`] repeats `suite` and `pool` (DC initiators) on the other wires of the software
//! device. The program also contains `cancel` (abandoned operations),
//! `shared_queues` and `misbehaviour` (faulty drivers).

#[path = "../common/mod.rs"]
mod common;
#[path = "../connected/mod.rs"]
mod connected;
#[path = "../torture/mod.rs"]
mod torture;

mod by_wire;
mod cancel;
#[path = "../misbehaviour/mod.rs"]
mod misbehaviour;
#[path = "../dc_pool/mod.rs"]
mod pool;
mod shared_queues;
#[path = "mod.rs"]
mod suite;

use common::by_wire::wire;

//! The conformance suites over an emulated ConnectX: on the direct data path with InfiniBand ports
//! and with RoCE ports, with compressed completion entries, and through the real libmlx5.
//!
//! They test this crate's use of libmlx5 and of its formats, not a real ConnectX:
//! `testing/emulated-connectx` invents the behaviour of the device.

#![cfg(all(
    feature = "mlx5",
    target_os = "linux",
    target_env = "gnu",
    any(target_arch = "x86_64", target_arch = "aarch64")
))]
#![allow(unsafe_code, reason = "the emulated device starts before main")]

#[path = "../common/mod.rs"]
mod common;
#[path = "../emulated/mod.rs"]
mod emulated;
#[path = "../torture/mod.rs"]
mod torture;

#[path = "../conformance/cancel.rs"]
mod cancel;
mod direct_config;
#[path = "../dc_pool/mod.rs"]
mod pool;
mod resets;
#[path = "../conformance/shared_queues.rs"]
mod shared_queues;
#[path = "../conformance/mod.rs"]
mod suite;

fn wire() -> common::Wire {
    common::Wire::Emulated
}

//! The suites on the real libibverbs and libmlx5, over an emulated ConnectX with RoCE ports.
//!
//! It shows that this crate drives libmlx5 rightly, and says nothing of a ConnectX: what the device does is made up in
//! `tests/emulated-connectx`.

#![cfg(all(
    feature = "mlx5",
    target_os = "linux",
    target_env = "gnu",
    any(target_arch = "x86_64", target_arch = "aarch64")
))]
#![allow(unsafe_code, clippy::duplicate_mod, reason = "whole suites are mounted, each with what it shares")]

mod common;
mod emulated;

#[path = "cancel.rs"]
mod cancel;
#[path = "dc_pool/mod.rs"]
mod pool;
#[path = "shared_queues.rs"]
mod shared_queues;
#[path = "conformance/mod.rs"]
mod suite;

const WIRE: common::Wire = common::Wire::Emulated;

emulated::before_main!(emulated_connectx::Link::Roce);

//! Dynamically connected transport on the emulated device, through the real libmlx5, on InfiniBand.
//!
//! The answers to a wrong key and an unknown target are made up: see README.md.

mod common;
mod dc_suite;

use common::start;
use emulated_connectx::EmulatedConnectX;

fn device() -> EmulatedConnectX {
    start(|_| {})
}

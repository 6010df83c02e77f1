//! Dynamically connected transport on the emulated device, through the real libmlx5, on an InfiniBand link.
//!
//! How a device answers a wrong key or an unknown target is made up: see README.md.

mod common;
mod dc_suite;

use common::start;
use emulated_connectx::EmulatedConnectX;

fn device() -> EmulatedConnectX {
    start(|_| {})
}

//! Dynamically connected transport on the emulated device, through the real libmlx5, on RoCE.

mod common;
mod dc_suite;

use common::start;
use emulated_connectx::{EmulatedConnectX, Link};

fn device() -> EmulatedConnectX {
    start(|options| options.link = Link::Roce)
}

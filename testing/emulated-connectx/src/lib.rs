//! An emulated ConnectX for tests.
//!
//! The unmodified libibverbs and libmlx5 of the distribution open a device `mlx5_0` inside the test
//! process. This crate interposes the libc functions by which they reach the kernel. A thread reads
//! the WQEs that libmlx5 writes, moves the data and writes CQEs. README.md says which parts are
//! real and which are made up.
//!
//! ```no_run
//! use emulated_connectx::{EmulatedConnectX, Link, Options};
//!
//! let mut options = Options::default();
//! options.link = Link::Roce;
//! let device = EmulatedConnectX::start(options).unwrap();
//! // ... verbs, by libibverbs as always ...
//! device.assert_clean();
//! ```
//!
//! A process has one device, started once, which the tests of one file share. Tests that need
//! another link go into another file.

#[cfg(not(all(
    target_os = "linux",
    target_env = "gnu",
    any(target_arch = "x86_64", target_arch = "aarch64")
)))]
compile_error!("emulated-connectx supports only glibc on Linux, on x86-64 and aarch64");

mod abi;
mod channel;
mod commands;
mod completion;
mod control;
mod cqe;
mod engine;
mod interpose;
mod lint;
mod memory;
mod objects;
mod port;
mod requester;
mod rerun;
mod responder;
mod state;
mod sysfs;
mod uar;
mod uverbs;
mod window;
mod wqe;

pub use control::{Counters, EmulatedConnectX, Link, Options, Release, Status};
pub use lint::{Finding, Problem};
pub use rerun::this_program;

//! An emulated ConnectX, for tests.
//!
//! The distribution's own libibverbs and libmlx5 open a device `mlx5_0` that is in the test process itself: this crate
//! defines the calls of libc by which they reach the kernel, a thread reads the work queues that libmlx5 writes, moves the
//! bytes and writes completions. README.md says what of it is real and what is made up.
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
//! One process has one device, started once: tests in one file share it, and those that need another link are another file.

#[cfg(not(all(
    target_os = "linux",
    target_env = "gnu",
    any(target_arch = "x86_64", target_arch = "aarch64")
)))]
compile_error!("the calls that are taken over are those of glibc on Linux, x86-64 or aarch64");

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
mod responder;
mod state;
mod sysfs;
mod uar;
mod uverbs;
mod wqe;

pub use control::{Counters, EmulatedConnectX, Link, Options, Release, Status};
pub use lint::{Finding, Problem};

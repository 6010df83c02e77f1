//! Equality of the direct data path with libmlx5, on an emulated ConnectX.
//!
//! Each test does the same on two queues of one device: on a queue of this crate, which posts and
//! polls directly, and on a queue of the unmodified libmlx5. Then it compares the bytes in the
//! rings, the doorbell records and registers, and the completions. The device does not execute
//! anything: `world` takes its registers away.
//!
//! ```text
//! world ──▶ direct, library: a queue pair each ──▶ memory: rings, records, registers
//!   requests ──▶ send_queue (WQEs, doorbells)     entries ──▶ completions, cleaning
//!                receives                         registers
//! ```

#![cfg(all(
    feature = "mlx5",
    target_os = "linux",
    target_env = "gnu",
    any(target_arch = "x86_64", target_arch = "aarch64")
))]
#![allow(unsafe_code, reason = "calls libmlx5, and reads the memory that it shares with a device")]
#![allow(unreachable_pub)]

mod cleaning;
mod completions;
mod direct;
mod library;
mod memory;
mod receives;
mod registers;
mod requests;
mod send_queue;
mod world;

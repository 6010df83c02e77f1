//! The provider for real devices: libibverbs, librdmacm and libmlx5. The binding, rdma-mummy-sys, opens the libraries when
//! the program starts, so a program builds and runs without them.
//!
//! Each object owns one handle of the C library and frees it on drop. The caller keeps parents alive longer than their
//! children. Each function is one verb.
//!
//! ```text
//!   traits of rdma-provider ──▶ ibv_context, ibv_qp, ibv_cq, … ──▶ owned handle ──▶ libibverbs.so.1
//!                               cm ──────────────────────────────────────▶ librdmacm.so.1
//!                               mlx5_dc ─────────────────────────────────▶ libmlx5.so.1
//! ```
//!
//! `sys` undoes the C library's four ways to report an error, and `convert` translates values between C and Rust.
//!
//! ```
//! match rdma_ibverbs::devices() {
//!     Ok(names) => println!("devices: {names:?}"),
//!     Err(error) => println!("no rdma-core on this machine: {error}"),
//! }
//! ```
//!
//! `examples/devices.rs` opens the devices and lists their ports and GIDs.

#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::todo, clippy::unimplemented))]

mod cm;
mod convert;
mod ibv_ah;
mod ibv_channel;
mod ibv_context;
mod ibv_cq;
mod ibv_mr;
mod ibv_post;
mod ibv_qp;
mod ibv_srq;
mod mlx5_dc;
mod owned;
mod sys;

use rdma_provider::contract::Provider;

pub use cm::{CmChannel, CmId};
pub use ibv_ah::Ah;
pub use ibv_channel::Channel;
pub use ibv_context::{Context, devices};
pub use ibv_cq::Cq;
pub use ibv_mr::{Mr, Mw, Pd};
pub use ibv_qp::Qp;
pub use ibv_srq::Srq;
pub use mlx5_dc::Dct;

/// The provider that calls libibverbs.
#[derive(Debug)]
pub struct Ibverbs;

impl Provider for Ibverbs {
    type Context = Context;
    type Pd = Pd;
    type Mr = Mr;
    type Mw = Mw;
    type Channel = Channel;
    type Cq = Cq;
    type Qp = Qp;
    type Dct = Dct;
    type Srq = Srq;
    type Ah = Ah;
    type CmChannel = CmChannel;
    type CmId = CmId;
}

/// Compiles the examples of the README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
#[derive(Debug)]
pub struct Readme;

//! The provider for real devices: libibverbs, librdmacm and libmlx5.
//!
//! The libraries are opened when a function is first called ([`ffi`]), so programs build and run
//! without them. Each object owns one C handle and frees it on drop; the caller must drop
//! children before their parents. Each function is one verb.
//!
//! ```text
//! traits of rdma-provider ──▶ ibv_context, ibv_qp, ibv_cq, … ──▶ owned handle ──▶ libibverbs.so.1
//!                             cm ──────────────────────────────────────▶ librdmacm.so.1
//!                             mlx5::dc ────────────────────────────────▶ libmlx5.so.1
//!                             mlx5::direct ────────────────────────────▶ the adapter
//! ```
//!
//! `sys` unifies the C library's four error conventions. `convert` translates values between C and
//! Rust.
//!
//! ```
//! match rdma_ibverbs::devices() {
//!     Ok(names) => println!("devices: {names:?}"),
//!     Err(error) => println!("no rdma-core on this machine: {error}"),
//! }
//! ```
//!
//! [`Context::open`] opens a device by name. All objects implement the traits in [`contract`];
//! their values are in [`types`].
//!
//! ```no_run
//! use rdma_ibverbs::Context;
//! use rdma_ibverbs::contract::{Context as _, CqInit};
//! use rdma_ibverbs::types::PortNum;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let context = Context::open("mlx5_0")?.ok_or("no such device")?;
//! println!("{} queue pairs", context.attr().max_qp);
//! println!("port 1: {:?}", context.port(PortNum(1))?.state);
//! let pd = context.create_pd()?;
//! let cq = context.create_cq(&CqInit::new(16))?;
//! # drop((pd, cq));
//! # Ok(())
//! # }
//! ```
//!
//! `examples/devices.rs` opens the devices and lists their ports and GIDs.

#![cfg_attr(
    not(test),
    deny(clippy::unwrap_used, clippy::expect_used, clippy::todo, clippy::unimplemented)
)]

mod cm;
mod convert;
pub mod ffi;
mod ibv_ah;
mod ibv_channel;
mod ibv_context;
mod ibv_cq;
mod ibv_mcast;
mod ibv_mr;
mod ibv_pd;
mod ibv_post;
mod ibv_qp;
mod ibv_srq;
pub mod mlx5;
mod owned;
mod posting;
mod supported;
mod sys;
mod vendor;

pub use cm::{CmChannel, CmId};
pub use ibv_ah::Ah;
pub use ibv_channel::Channel;
pub use ibv_context::{Context, devices};
pub use ibv_cq::Cq;
pub use ibv_mr::{Mr, Mw};
pub use ibv_pd::Pd;
pub use ibv_qp::Qp;
pub use ibv_srq::Srq;
pub use mlx5::dc::Dct;

pub use rdma_provider::{VerbError, cm_contract, contract, types};

/// The provider for real devices.
#[derive(Debug)]
pub struct Ibverbs;

impl contract::Provider for Ibverbs {
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

/// Compiles the README's examples.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
#[derive(Debug)]
pub struct Readme;

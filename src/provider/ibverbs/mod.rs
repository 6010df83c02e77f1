//! The provider for real devices: libibverbs, through rdma-mummy-sys, which opens the library when the program starts
//! and so builds and runs without it.
//!
//! Each object is one handle of the C library and frees it on drop; parents outlive their children because the layer
//! above holds them. [`sys`] undoes the C library's four ways to report an error, [`convert`] puts values from one form
//! into the other. What is left in the other files is one verb per function; [`dc`] has those of libmlx5.

mod ah;
mod channel;
mod cm;
mod context;
mod convert;
mod cq;
mod dc;
mod memory;
mod owned;
mod post;
mod qp;
mod srq;
mod sys;

use super::contract::Provider;

pub(crate) use context::{Context, devices};

/// The provider that calls libibverbs.
#[derive(Debug)]
pub(crate) struct Ibverbs;

impl Provider for Ibverbs {
    type Context = Context;
    type Pd = memory::Pd;
    type Mr = memory::Mr;
    type Mw = memory::Mw;
    type Channel = channel::Channel;
    type Cq = cq::Cq;
    type Qp = qp::Qp;
    type Dct = dc::Dct;
    type Srq = srq::Srq;
    type Ah = ah::Ah;
    type CmChannel = cm::CmChannel;
    type CmId = cm::CmId;
}

//! The interface between RDMA devices and the layers above: verbs values, the error of a verb, and
//! the contract of a provider.
//!
//! ```text
//!   tokio-rdma      futures, connections, messages
//!       │ uses the traits
//!  rdma-provider    contract: Context ▸ Pd, Mr, Cq, Qp, Srq, …    cm_contract: CmChannel ▸ CmId
//!       ▲           types: values passed to and from devices      shared_memory: copies
//!       │ implement the traits
//!   rdma-soft       the software RoCE v2 device
//!   rdma-ibverbs    libibverbs, librdmacm and libmlx5
//! ```
//!
//! The traits serve the providers of this workspace and may change with any version. The types are
//! the values of [`ibv_post_send(3)`](https://man7.org/linux/man-pages/man3/ibv_post_send.3.html)
//! and related verbs; tokio-rdma and rdma-soft re-export them.
//!
//! ```
//! use rdma_provider::types::{QpAttrMask, QpState, Transport, transition};
//!
//! // The attributes that ibv_modify_qp(3) requires for RC from RTR to RTS.
//! let to_rts = transition(Transport::Rc, QpState::Rtr, QpState::Rts).unwrap();
//! assert!(to_rts.required.contains(QpAttrMask::SQ_PSN | QpAttrMask::TIMEOUT));
//! ```

#![cfg_attr(
    not(test),
    deny(clippy::unwrap_used, clippy::expect_used, clippy::todo, clippy::unimplemented)
)]

pub mod cm_contract;
pub mod contract;
mod error;
#[cfg(test)]
mod error_texts;
#[doc(hidden)]
pub mod events;
#[doc(hidden)]
pub mod later;
#[doc(hidden)]
pub mod locks;
mod prefetch;
pub mod shared_memory;
#[cfg(miri)]
mod std_locks;
pub mod types;

pub use error::VerbError;
pub use prefetch::prefetch;

/// Compiles the examples of the README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
#[derive(Debug)]
pub struct Readme;

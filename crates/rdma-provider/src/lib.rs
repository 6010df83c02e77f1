//! The interface between RDMA devices and the layers above them: the values of the verbs interface, the error of a verb, and
//! the contract that each provider keeps.
//!
//! ```text
//!   tokio-rdma      futures, connections, messages
//!       │ names the traits
//!  rdma-provider    contract: Context ▸ Pd, Mr, Cq, Qp, Srq, …    cm_contract: CmChannel ▸ CmId
//!       ▲ implement them                                          types: what is passed     shared_memory: copies
//!   rdma-soft       the software RoCE v2 device
//!   rdma-ibverbs    libibverbs, librdmacm and libmlx5
//! ```
//!
//! The traits are for these providers and may change with any version. The types are those of
//! [`ibv_post_send(3)`](https://man7.org/linux/man-pages/man3/ibv_post_send.3.html) and related verbs; tokio-rdma and
//! rdma-soft re-export them.
//!
//! ```
//! use rdma_provider::types::{QpAttrMask, QpState, Transport, transition};
//!
//! // The attributes that ibv_modify_qp(3) requires of a reliable connection on its way to RTS.
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
#[cfg(miri)]
mod locks;
pub mod shared_memory;
pub mod types;

pub use error::VerbError;
#[cfg(miri)]
#[doc(hidden)]
pub use locks::{Condvar, Mutex, MutexGuard, RwLock};

/// Compiles the examples of the README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
#[derive(Debug)]
pub struct Readme;

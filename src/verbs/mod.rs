//! The objects of the verbs interface.
//!
//! ```text
//! Device ── ProtectionDomain ── Registration ── BufMut, Buf, Pool, ExposedRegion, DmaBufRegion
//!   │              ├─────────── Qp, Dct, Srq
//!   │              ├─────────── MemoryWindow
//!   │              └─────────── AddressHandle
//!   └────── Channel ─────────── Cq
//! ```
//!
//! A child holds its parent by `Arc`, so objects may be dropped in any order. All methods are
//! synchronous; [`QueuePair`](crate::QueuePair) and [`CompletionQueue`](crate::CompletionQueue)
//! build futures on them.

mod address_handle;
mod async_events;
mod channel;
mod cq;
mod dct;
mod device;
mod device_clock;
pub(crate) mod gid_rank;
mod gid_routes;
pub(crate) mod interfaces;
mod protection_domain;
mod qp;
mod srq;

pub use address_handle::AddressHandle;
pub(crate) use async_events::{EventKind, Listener};
pub use channel::Channel;
pub use cq::Cq;
pub use dct::Dct;
pub use device::Device;
pub(crate) use device::PacketSource;
pub use device_clock::DeviceClock;
pub(crate) use gid_routes::entry_with;
pub use protection_domain::ProtectionDomain;
pub(crate) use protection_domain::{Indexed, PdId};
pub use qp::{Qp, QpConfig};
pub use rdma_provider::contract::PostError;
pub use srq::Srq;

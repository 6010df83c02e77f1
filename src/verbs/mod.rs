//! `[3]` The objects of the verbs interface, each freed after all that was made from it.
//!
//! ```text
//! Device ── ProtectionDomain ── Registration ── BufMut, Buf, Pool, ExposedRegion, DmaBufRegion
//!   │              ├─────────── Qp, Dct, SharedQueue (Srq)
//!   │              ├─────────── MemoryWindow
//!   │              └─────────── AddressHandle
//!   └────── Channel ─────────── Cq
//! ```
//!
//! A child holds its parent by `Arc`, so there is no wrong order to drop them in. `Qp`, `Cq` and `Srq`
//! are the bare objects: post, poll, arm. Nothing here waits and nothing knows about tasks; the futures
//! are made of these by [`QueuePair`](crate::QueuePair) and [`CompletionQueue`](crate::CompletionQueue).

mod ah;
mod buf;
mod channel;
mod cq;
mod dct;
mod device;
mod dma_buf;
mod events;
mod exposed;
mod net;
mod pd;
mod pool;
mod qp;
mod read_only;
mod registration;
mod source;
mod srq;
mod window;
mod window_set;

pub use ah::AddressHandle;
pub use buf::{Buf, BufMut};
pub use channel::Channel;
pub use cq::Cq;
pub use dct::Dct;
pub use device::Device;
pub(crate) use device::Inlet;
pub use dma_buf::DmaBufRegion;
pub(crate) use events::Listener;
pub use exposed::{ExposedRegion, ExposedSlice};
pub use pd::ProtectionDomain;
pub use pool::{Pool, PoolBuilder, PoolError};
pub use qp::{PostError, Qp, QpOptions};
pub(crate) use read_only::ReadOnlyRegion;
pub(crate) use source::{PdKey, Sealed, SgeList};
pub use source::{Source, Target};
pub use srq::Srq;
pub use window::MemoryWindow;
pub(crate) use window_set::{BoundWindow, WindowSet};

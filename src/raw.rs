//! Handles of the C libraries, for verbs that this crate does not wrap.
//!
//! ```no_run
//! use tokio_rdma::Device;
//! use tokio_rdma::raw::ffi;
//!
//! let device = Device::open("mlx5_0")?;
//! if let Some(context) = device.as_raw() {
//!     // SAFETY: the query changes nothing, and `device` outlives it.
//!     let attr = unsafe {
//!         let mut attr: ffi::ibv_device_attr = std::mem::zeroed();
//!         assert_eq!(ffi::ibv_query_device(context.as_ptr(), &mut attr), 0);
//!         attr
//!     };
//!     println!("{} ports", attr.phys_port_cnt);
//! }
//! # Ok::<(), tokio_rdma::error::OpenError>(())
//! ```
//!
//! [`ffi`] declares what this crate calls. With feature `rdma-sys`, `as_rdma_sys` returns the same
//! handles for the functions of [rdma-mummy-sys](https://docs.rs/rdma-mummy-sys), which has the
//! interface of the crate rdma-sys and builds with current compilers. Building it needs cmake and
//! libclang.
//!
//! # Safety
//!
//! Obtaining a handle is safe; each call with it is unsafe. A handle is valid while its object
//! lives, and a queue pair's until the queue pair is closed, so keep a clone of the object. A call
//! must not:
//!
//! - destroy the handle, or any other object that the crate made from it;
//! - consume what the crate waits for: completions, asynchronous events, events of the connection
//!   manager;
//! - post work with the number (`wr_id`) of an operation, or to a completion queue that the crate
//!   polls: its completion could complete an operation in flight, and return its buffer;
//! - change the state of a queue pair, except by [`QueuePair::modify`]; `ibv_modify_qp(3)` of other
//!   attributes, such as the RNR timer in RTS, is allowed;
//! - change the `context` of an id of the connection manager, which points to state of this crate;
//! - post, poll, arm or resize queues of a device that is used directly
//!   ([`DataPath::Direct`](crate::types::DataPath::Direct)), except those that the caller creates:
//!   libmlx5 does not know this crate's entries.

#![forbid(unsafe_code)]

use std::ptr::NonNull;

pub use rdma_ibverbs::ffi;

use ffi::{ibv_context, ibv_cq, ibv_mr, ibv_pd, ibv_qp, ibv_srq, rdma_cm_id};

use crate::cm::CmConnection;
use crate::engine::CompletionQueue;
use crate::memory::{BufMut, DmaBufRegion, ExposedRegion};
use crate::op::{QueuePair, SharedReceiveQueue};
use crate::verbs::{Cq, Device, ProtectionDomain, Qp, Srq};

macro_rules! handles {
    ($($object:ty, $handle:ident, $verb:literal, $this:ident => $raw:expr;)*) => {
        $(
            impl $object {
                #[doc = concat!("Returns the `", stringify!($handle), "` made by ", $verb, ".")]
                ///
                /// Returns `None` for an object of the software device, and for a closed one. See
                /// [`raw`](crate::raw#safety) for what calls must not do with it.
                #[must_use]
                pub fn as_raw(&self) -> Option<NonNull<$handle>> {
                    let $this = self;
                    Some($raw?.as_raw())
                }

                /// Returns [`as_raw`](Self::as_raw) for functions of rdma-mummy-sys.
                #[cfg(feature = "rdma-sys")]
                #[must_use]
                pub fn as_rdma_sys(&self) -> Option<NonNull<rdma_sys::$handle>> {
                    self.as_raw().map(NonNull::cast)
                }
            }
        )*
    };
}

handles! {
    Device, ibv_context, "`ibv_open_device(3)`", this => this.context().ibverbs().ok();
    ProtectionDomain, ibv_pd, "`ibv_alloc_pd(3)`", this => this.raw().ibverbs().ok();
    Cq, ibv_cq, "`ibv_create_cq(3)`", this => this.raw().ibverbs().ok();
    CompletionQueue, ibv_cq, "`ibv_create_cq(3)`", this => this.cq().raw().ibverbs().ok();
    Qp, ibv_qp, "`ibv_create_qp(3)`", this => this.raw().ibverbs().ok();
    QueuePair, ibv_qp, "`ibv_create_qp(3)`", this =>
        this.verbs().as_ref().and_then(|qp| qp.raw().ibverbs().ok());
    Srq, ibv_srq, "`ibv_create_srq(3)`", this => this.raw().ibverbs().ok();
    SharedReceiveQueue, ibv_srq, "`ibv_create_srq(3)`", this => this.verbs().raw().ibverbs().ok();
    BufMut, ibv_mr, "`ibv_reg_mr(3)`, which all buffers of a pool share", this =>
        this.registration().raw().and_then(|raw| raw.ibverbs().ok());
    ExposedRegion, ibv_mr, "`ibv_reg_mr(3)`", this =>
        this.registration().raw().and_then(|raw| raw.ibverbs().ok());
    DmaBufRegion, ibv_mr, "`ibv_reg_dmabuf_mr(3)`", this =>
        this.registration().raw().and_then(|raw| raw.ibverbs().ok());
    CmConnection, rdma_cm_id, "`rdma_create_id(3)`", this =>
        this.id().ibverbs().ok();
}

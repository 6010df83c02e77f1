//! Dynamically connected transport: one target and a few initiators for any number of peers.
//!
//! ```text
//!  node A                                                   node B
//!  DcInitiator ── to(&peer) ── write, read, send, …  ──▶  DcTarget ── SharedReceiveQueue
//!       peer = initiator.peer(&address)                      │
//!                       ▲                                    │
//!                       └──────────── DcAddress ◀────────────┘ address(), by any channel
//! ```

mod address;
mod initiator;
mod operations;
mod pool;
mod target;

pub use address::DcAddress;
pub use initiator::{DcInitiator, DcInitiatorBuilder, DcPeer};
pub use pool::{
    DcLease, DcPolicy, DcPool, DcPoolBuilder, DcPoolCounters, DcPoolPeer, PendingDcLease,
    PooledOperation,
};
pub use target::{DcTarget, DcTargetBuilder};

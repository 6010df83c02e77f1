//! `[5]` Operations: each a future that owns what the device touches.
//!
//! Calling posts, awaiting waits: two operations called one after the other are in flight together, in that
//! order. A result brings the buffer home, an error too. Dropping the future detaches: the work goes on, and
//! its buffers return to where they came from when the device is done with them.

#![forbid(unsafe_code)]

mod atomic;
mod batch;
mod checked;
mod dc;
mod endpoint;
mod future;
mod lease;
mod queue_pair;
mod read;
mod recv;
mod send;
mod srq;
mod write;

pub use atomic::Atomic;
pub use batch::{Batch, BatchOp, BatchResult};
pub use dc::{
    DcAddress, DcInitiator, DcInitiatorBuilder, DcLease, DcPeer, DcPolicy, DcPool, DcPoolBuilder, DcPoolCounters,
    DcPoolPeer, DcSender, DcTarget, DcTargetBuilder, Lending, Pooled,
};
pub use endpoint::{ConnectOptions, EndpointError, QueuePairEndpoint};
pub use future::Operation;
pub use lease::{Invalidate, Lease, Leasing};
pub(crate) use queue_pair::{Path, WeakQueuePair};
pub use queue_pair::{QueuePair, QueuePairBuilder};
pub use read::Read;
pub use recv::{Received, Recv};
pub use send::{Send, SendTo};
pub use srq::SharedReceiveQueue;
pub use write::Write;

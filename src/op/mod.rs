//! Operations: each a future that owns what the device touches.
//!
//! Calling posts, awaiting waits: two operations called one after the other are in flight together, in that
//! order. A result brings the buffer home, an error too. Dropping the future detaches: the work goes on, and
//! its buffers return to where they came from when the device is done with them.

#![forbid(unsafe_code)]

pub(crate) mod address_codec;
mod atomic;
mod batch;
mod checked;
mod lease;
mod operation;
mod post;
mod queue_pair;
mod queue_pair_endpoint;
mod read;
mod recv;
mod send;
mod shared_receive_queue;
mod write;

pub use address_codec::EndpointError;
pub use atomic::Atomic;
pub(crate) use atomic::AtomicRequest;
pub use batch::{Batch, BatchOp, BatchResult};
pub use lease::{Invalidate, Lease, PendingLease};
pub use operation::Operation;
pub(crate) use post::{Destination, SendRequest};
pub(crate) use queue_pair::{Path, WeakQueuePair};
pub use queue_pair::{QueuePair, QueuePairBuilder};
pub use queue_pair_endpoint::{ConnectOptions, QueuePairEndpoint};
pub use read::Read;
pub use recv::{Received, Recv};
pub use send::{Send, SendTo};
pub use shared_receive_queue::SharedReceiveQueue;
pub use write::Write;

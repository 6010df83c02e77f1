//! Queue pairs, and work requests as futures that own the memory the device uses.
//!
//! Calling a method posts the work request; awaiting the future waits for its completion.
//! Operations called one after the other are in flight together, in that order. The result returns
//! the buffer, even after an error. Dropping the future does not cancel the work request, see
//! [`Operation`].

#![forbid(unsafe_code)]

pub(crate) mod address_codec;
mod atomic;
mod batch;
mod checked;
mod datagram;
mod deadline;
mod destination;
mod expiry;
mod lease;
mod operation;
mod path;
mod post_state;
mod posting;
mod queue_pair;
mod queue_pair_endpoint;
mod read;
mod recv;
mod send;
mod shared_receive_queue;
mod write;

pub use address_codec::EndpointError;
pub use atomic::Atomic;
pub use batch::{Batch, BatchOp, BatchResult};
pub use datagram::DatagramSender;
pub(crate) use deadline::Work;
pub use deadline::{DeadlineError, Revocable, Within};
pub use destination::Destination;
pub use lease::{Invalidate, Lease, PendingLease};
pub use operation::{Operation, Timestamped};
pub use path::PathConfig;
pub(crate) use path::default_traffic_class;
pub(crate) use posting::operations;
pub use posting::{Poster, Posting};
pub use queue_pair::{QueuePair, QueuePairBuilder};
pub(crate) use queue_pair::{Source, WeakQueuePair};
pub use queue_pair_endpoint::{QueuePairEndpoint, RetryConfig};
pub use read::Read;
pub use recv::{Received, Recv};
pub use send::{Send, SendTo};
pub use shared_receive_queue::SharedReceiveQueue;
pub use write::Write;

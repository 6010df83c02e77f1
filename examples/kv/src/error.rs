//! The errors of the service.

use std::time::Duration;

use thiserror::Error;
use tokio_rdma::memory::PoolError;
use tokio_rdma::peers::ReconnectError;
use tokio_rdma::{EstablishError, MessageError, OpErrorKind, RemoteRegion, SetupError};

use crate::layout::Layout;

/// The reason why a call failed.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum KvError {
    /// The table refused the call and is unchanged.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The deadline passed. A PUT or DELETE may have taken effect, or may still do so.
    #[error("no result within {0:?}")]
    Deadline(Duration),
    /// Connecting failed.
    #[error(transparent)]
    Establish(#[from] EstablishError),
    /// The connection failed. A PUT or DELETE may have taken effect.
    #[error(transparent)]
    Connection(#[from] MessageError),
    /// The server closed the connection. A PUT or DELETE may have taken effect.
    #[error("the server closed the connection")]
    ServerClosed,
    /// A client of several servers connects no more.
    #[error(transparent)]
    Reconnect(#[from] ReconnectError),
    /// A client of several servers was given none.
    #[error("no servers given")]
    NoServers,
    /// A READ failed, which puts the connection into the error state.
    #[error("READ failed: {0}")]
    Read(OpErrorKind),
    /// The peer violates the protocol.
    #[error(transparent)]
    Protocol(#[from] ProtocolError),
    /// Memory or queues could not be created.
    #[error(transparent)]
    Setup(#[from] SetupError),
    /// A buffer for a READ could not be allocated.
    #[error(transparent)]
    Buffer(#[from] PoolError),
}

impl KvError {
    /// Returns true if the connection to the server has failed or was closed.
    pub(crate) fn is_failure_of_server(&self) -> bool {
        matches!(self, Self::Connection(_) | Self::Read(_) | Self::ServerClosed)
    }
}

/// The reason why a table refuses a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum Refusal {
    /// The key is empty or too long.
    #[error("key of {len} bytes refused; expected 1 to {allowed}")]
    KeyLength {
        /// The length in bytes.
        len: u64,
        /// The maximum in bytes.
        allowed: u64,
    },
    /// The value is too long.
    #[error("value of {len} bytes refused; the limit is {allowed}")]
    ValueLength {
        /// The length in bytes.
        len: u64,
        /// The maximum in bytes.
        allowed: u64,
    },
    /// All slots of the key's bucket hold other keys.
    #[error("bucket full: all {slots} slots of the key's bucket hold other keys")]
    Full {
        /// The slots of the bucket.
        slots: u64,
    },
}

/// A violation of the protocol by the peer.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ProtocolError {
    /// The server's user data has another format.
    #[error("not a kv server: {len} bytes of unknown user data")]
    UserData {
        /// The length in bytes.
        len: usize,
    },
    /// The server's layout is invalid.
    #[error(transparent)]
    Layout(#[from] SetupError),
    /// The server's memory does not match its layout, or wraps around the address space.
    #[error("the server's memory {table:?} does not match its layout {layout:?}")]
    Table {
        /// The layout.
        layout: Layout,
        /// The memory.
        table: RemoteRegion,
    },
    /// The message is too short or too long for its kind.
    #[error("message of {len} bytes from the peer: invalid length for its kind")]
    Length {
        /// The length in bytes.
        len: usize,
    },
    /// The kind of the message is unknown.
    #[error("message of unknown kind {0} from the peer")]
    Kind(u8),
    /// The answer belongs to a request that was not made.
    #[error("answer from the server to unknown request {0}")]
    UnknownRequest(u64),
    /// The answer does not fit the kind of the request.
    #[error("answer from the server does not fit the request")]
    Answer,
}

//! What can go wrong.

use std::time::Duration;

use thiserror::Error;
use tokio_rdma::memory::PoolError;
use tokio_rdma::{EstablishError, MessageError, OpErrorKind, RemoteRegion, SetupError};

use crate::layout::Layout;

/// Why a call did not do what it was asked for.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum KvError {
    /// It cannot be done; nothing was changed.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// No result came in time. A PUT or DELETE may have been done, or may still be.
    #[error("no result within {0:?}")]
    Deadline(Duration),
    /// There is no connection.
    #[error("no connection: {0}")]
    Establish(#[from] EstablishError),
    /// The connection has ended. A PUT or DELETE may have been done.
    #[error(transparent)]
    Connection(#[from] MessageError),
    /// The server has finished; it was not to. A PUT or DELETE may have been done.
    #[error("the server has left")]
    ServerLeft,
    /// A READ failed, and with it the connection.
    #[error("READ: {0}")]
    Read(OpErrorKind),
    /// The peer does not keep to the protocol.
    #[error("the peer: {0}")]
    Protocol(#[from] ProtocolError),
    /// Memory or queues could not be had.
    #[error(transparent)]
    Setup(#[from] SetupError),
    /// No buffer for a READ.
    #[error("no buffer: {0}")]
    Buffer(#[from] PoolError),
}

/// What a table does not do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum Refusal {
    /// The key has no byte, or too many.
    #[error("a key of {len} bytes; 1 to {allowed} are allowed")]
    KeyLength {
        /// Bytes of the key.
        len: u64,
        /// Longest key.
        allowed: u64,
    },
    /// The value is too long.
    #[error("a value of {len} bytes; at most {allowed} are allowed")]
    ValueLength {
        /// Bytes of the value.
        len: u64,
        /// Longest value.
        allowed: u64,
    },
    /// The table is full where the key belongs: all slots of its bucket have other keys.
    #[error("the table is full: all {slots} slots of the key's bucket have other keys")]
    Full {
        /// Slots of the bucket.
        slots: u64,
    },
}

/// How a peer breaks the protocol.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ProtocolError {
    /// What a server says to a client that connects has another form.
    #[error("no server of this kind: {len} bytes of welcome")]
    Welcome {
        /// Bytes.
        len: usize,
    },
    /// The layout is not one.
    #[error(transparent)]
    Layout(#[from] SetupError),
    /// The memory is not as long as a table of the layout, or nowhere.
    #[error("{table:?} is no memory for {layout:?}")]
    Table {
        /// Of the table.
        layout: Layout,
        /// The memory.
        table: RemoteRegion,
    },
    /// A message ends too early, or too late.
    #[error("a message of {len} bytes, which its kind does not have")]
    Length {
        /// Bytes.
        len: usize,
    },
    /// A message of no known kind.
    #[error("a message of kind {0}")]
    Kind(u8),
    /// An answer to what was not asked.
    #[error("an answer to request {0}, which was not made")]
    Unasked(u64),
    /// An answer of a kind that the request does not have.
    #[error("an answer to something else")]
    Answer,
}

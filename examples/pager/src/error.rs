//! What goes wrong: with which page, at which node, and why.

use std::time::Duration;

use tokio_rdma::{CloseReason, EstablishError, OpErrorKind, OpenError, OutOfBounds, PoolError, SetupError, VerbError};

use crate::DirectoryError;

/// Why a page could not be had, or kept.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum PagerError {
    /// There is no such page.
    #[error("page {page}: there are {pages}, from 0 on")]
    NoPage {
        /// Asked for.
        page: u64,
        /// Pages there are.
        pages: u64,
    },
    /// The bytes asked for are not all within the page.
    #[error("page {page}: {bounds}")]
    Bounds {
        /// Asked for.
        page: u64,
        /// By how much.
        bounds: OutOfBounds,
    },
    /// All nodes that had the page are lost. If it was to be written back, it is still in the cache.
    #[error("page {page} is lost: no node has it any more, and the last, {node}: {cause}")]
    Lost {
        /// The page.
        page: u64,
        /// The last that was tried.
        node: String,
        /// What became of it.
        cause: NodeError,
    },
    /// A node was not written to, and the coordinator could not be told that it lacks this page. It is still in the cache.
    #[error("page {page} is not written back: node {node} does not have it and is still on the map: {cause}")]
    Unsure {
        /// The page.
        page: u64,
        /// Who lacks it.
        node: String,
        /// Why the coordinator does not know.
        cause: DirectoryError,
    },
    /// No buffer for the page.
    #[error("page {page}: {cause}")]
    NoBuffer {
        /// The page.
        page: u64,
        /// Why not.
        cause: PoolError,
    },
    /// The runtime that the pager was made on has shut down.
    #[error("page {page}: the runtime of the pager has shut down")]
    Runtime {
        /// The page.
        page: u64,
    },
}

/// Why a node is lost. It stays lost, as it lacks what is written from then on.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NodeError {
    /// It was never reached.
    #[error("not connected: {0}")]
    Connect(EstablishError),
    /// Its connection has ended.
    #[error("the connection has ended: {0}")]
    Ended(CloseReason),
    /// A READ or WRITE failed.
    #[error(transparent)]
    Operation(OpErrorKind),
    /// A READ or WRITE was not done in time.
    #[error("nothing is done for {0:?}")]
    Deadline(Duration),
}

/// Why an owner or a client does not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// A setting that does not work.
    #[error("{field}: asked for {asked}, {least} to {most} work")]
    Setting {
        /// Which.
        field: &'static str,
        /// How much was asked.
        asked: u64,
        /// The least.
        least: u64,
        /// The most.
        most: u64,
    },
    /// The device does not open.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The device refuses.
    #[error(transparent)]
    Setup(#[from] SetupError),
    /// No address to listen at.
    #[error(transparent)]
    Listen(#[from] EstablishError),
    /// No memory to lend.
    #[error("{bytes} bytes of memory: {cause}")]
    Memory {
        /// Asked for.
        bytes: u64,
        /// Why not.
        cause: std::io::Error,
    },
    /// The pages were not filled.
    #[error("the pages are not filled: {0}")]
    Fill(#[from] std::io::Error),
    /// Nothing to count latencies with.
    #[error(transparent)]
    Meter(#[from] hdrhistogram::CreationError),
    /// The coordinator says no.
    #[error(transparent)]
    Directory(#[from] DirectoryError),
    /// None of the nodes can be reached.
    #[error("no node can be reached; {node}: {cause}")]
    Alone {
        /// One of them.
        node: String,
        /// Why not.
        cause: NodeError,
    },
}

impl From<VerbError> for StartError {
    fn from(error: VerbError) -> Self {
        Self::Setup(error.into())
    }
}

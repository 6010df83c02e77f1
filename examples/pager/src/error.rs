//! What goes wrong: with which page, at which node, and why.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio_rdma::error::{OpenError, OutOfBounds};
use tokio_rdma::memory::PoolError;
use tokio_rdma::{CloseReason, EstablishError, OpErrorKind, SetupError, VerbError};

use crate::{DirectoryError, Instance};

/// Why the coordinator does not do what may be right of itself: it does not go with what it knows.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Conflict {
    /// Nobody joins any more.
    #[error("clients have the map already; a node that joins would not have what they write")]
    Sealed,
    /// Memory that was lent before, and was not on the map all the time since.
    #[error(
        "this memory was lent by the map of coordinator {before} and is not on that of coordinator {now}: it may lack what was \
         written since; start the owner anew"
    )]
    Stale {
        /// When it joined.
        before: Instance,
        /// Who was asked.
        now: Instance,
    },
    /// Somebody has a map that is no more.
    #[error(
        "the coordinator was started anew: asked for {asked}, it is {now} and knows nothing of the nodes of that map"
    )]
    Instance {
        /// Of the map.
        asked: Instance,
        /// Who was asked.
        now: Instance,
    },
    /// One client writes at a time.
    #[error("another client writes")]
    Writing,
    /// A client that wrote was not heard of any more.
    #[error(
        "a client has not come to the end of writing: copies of a page may differ, or be half of one and half of another"
    )]
    Unclean,
    /// Nothing was heard of this one for too long.
    #[error(
        "this client does not write, or was not heard of for so long that others were told that copies may differ"
    )]
    Lapsed,
}

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
    #[error(
        "page {page} is not written back: node {node} does not have it and is still on the map: {cause}"
    )]
    Unsure {
        /// The page.
        page: u64,
        /// Who lacks it.
        node: String,
        /// Why the coordinator does not know.
        cause: DirectoryError,
    },
    /// This client does not write, or no more: there is another one, or the coordinator was started anew, or it has not heard of
    /// this one for too long. What was changed before is still in the cache.
    #[error("page {page} is not written to: {cause}")]
    NotWriter {
        /// The page.
        page: u64,
        /// Why not.
        cause: DirectoryError,
    },
    /// All is written back, and the coordinator could not be told: it will say of the map that copies may differ.
    #[error("all pages are written back, which the coordinator does not know: {0}")]
    Unended(DirectoryError),
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
    Connect(Box<EstablishError>),
    /// Its connection has ended.
    #[error("the connection has ended: {0}")]
    Ended(CloseReason),
    /// A READ or WRITE failed.
    #[error(transparent)]
    Operation(OpErrorKind),
    /// No READ or WRITE was done for so long, though some were under way.
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
    /// A client has not come to the end of writing: copies of a page may differ. [`Config::unclean_too`](crate::Config) says that
    /// this is fine.
    #[error(
        "coordinator {instance}: {}; owners and coordinator started anew are alike",
        Conflict::Unclean
    )]
    Unclean {
        /// Of the map.
        instance: Instance,
    },
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

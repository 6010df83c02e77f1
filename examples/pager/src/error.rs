//! Errors: which page, at which node, and why.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio_rdma::error::{OpenError, OutOfBounds};
use tokio_rdma::memory::PoolError;
use tokio_rdma::{CloseReason, EstablishError, OpErrorKind, SetupError, VerbError};

use crate::{DirectoryError, Instance};

/// A request that is valid in itself but conflicts with the coordinator's state.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Conflict {
    /// A client has the map, so that no node can join.
    #[error("clients have the map already, and a node that joins would lack their writes")]
    Sealed,
    /// The memory was lent before and has not been on the map ever since.
    #[error(
        "memory lent by the map of coordinator {before} is not on the map of coordinator {now} and \
         may lack writes; restart the owner"
    )]
    Stale {
        /// The coordinator that it joined.
        before: Instance,
        /// The coordinator asked.
        now: Instance,
    },
    /// The map is another coordinator's.
    #[error(
        "map is from coordinator {asked}, but coordinator {now} is running and lacks its nodes"
    )]
    Instance {
        /// The coordinator that the map is from.
        asked: Instance,
        /// The coordinator asked.
        now: Instance,
    },
    /// Another client has the lease to write.
    #[error("another client is writing")]
    Writing,
    /// A client stopped renewing its lease while writing.
    #[error(
        "a client stopped without finishing its writes: copies of a page may differ or be torn"
    )]
    Unclean,
    /// This client has no lease to write.
    #[error("this client has no lease to write or did not renew it in time")]
    Lapsed,
}

/// Why a page cannot be accessed or written back.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum PagerError {
    /// The page does not exist.
    #[error("page {page} does not exist: {pages} pages available")]
    NoPage {
        /// The page requested.
        page: u64,
        /// Number of pages.
        pages: u64,
    },
    /// The bytes requested exceed the page.
    #[error("page {page}: {bounds}")]
    Bounds {
        /// The page requested.
        page: u64,
        /// Bounds of the request.
        bounds: OutOfBounds,
    },
    /// All nodes with the page are lost. A dirty page is still in the cache.
    #[error("page {page} is lost: all nodes with a copy failed; last node {node}: {cause}")]
    Lost {
        /// The page.
        page: u64,
        /// The last node tried.
        node: String,
        /// Cause of its failure.
        cause: NodeError,
    },
    /// A node was not written to, and the coordinator did not confirm its removal from the map. The
    /// page is still in the cache.
    #[error(
        "page {page} is not written back: node {node} lacks it and is still on the map: {cause}"
    )]
    Unsure {
        /// The page.
        page: u64,
        /// The node that lacks the page.
        node: String,
        /// Why the removal failed.
        cause: DirectoryError,
    },
    /// This client has no lease to write: another client writes, or the coordinator was restarted
    /// or considers this client dead. Earlier changes are still in the cache.
    #[error("cannot write to page {page}: {cause}")]
    NotWriter {
        /// The page.
        page: u64,
        /// Why not.
        cause: DirectoryError,
    },
    /// All pages are written back, but the coordinator was not notified: its map will say that
    /// copies may differ.
    #[error("all pages are written back, but the coordinator was not notified: {0}")]
    Unended(DirectoryError),
    /// The pool has no buffer for the page.
    #[error("no buffer for page {page}: {cause}")]
    NoBuffer {
        /// The page.
        page: u64,
        /// Why not.
        cause: PoolError,
    },
    /// The pager's runtime has shut down.
    #[error("cannot access page {page}: the pager's runtime has shut down")]
    Runtime {
        /// The page.
        page: u64,
    },
}

/// Why a node is lost. It stays lost, since it lacks later writes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NodeError {
    /// The connection could not be established.
    #[error("failed to connect: {0}")]
    Connect(Box<EstablishError>),
    /// The connection closed.
    #[error("connection closed: {0}")]
    Ended(CloseReason),
    /// A READ or WRITE failed.
    #[error(transparent)]
    Operation(OpErrorKind),
    /// No READ or WRITE completed for this time, though some were in flight.
    #[error("no operation completed for {0:?}")]
    Deadline(Duration),
}

/// Why an owner or a client cannot start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// A setting is out of range.
    #[error("invalid {field}: {asked}, must be {min} to {max}")]
    Setting {
        /// The setting.
        field: &'static str,
        /// The value given.
        asked: u64,
        /// The minimum.
        min: u64,
        /// The maximum.
        max: u64,
    },
    /// The device cannot be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The device refuses to create an object.
    #[error(transparent)]
    Setup(#[from] SetupError),
    /// The owner cannot listen at its address.
    #[error(transparent)]
    Listen(#[from] EstablishError),
    /// The address of the owner's listener is unknown.
    #[error(transparent)]
    Address(#[from] std::io::Error),
    /// The memory to lend cannot be allocated.
    #[error("failed to allocate {bytes} bytes: {cause}")]
    Memory {
        /// Size requested.
        bytes: u64,
        /// Why not.
        cause: std::io::Error,
    },
    /// The pages could not be filled.
    #[error("failed to fill the pages: {0}")]
    Fill(std::io::Error),
    /// The histograms cannot be created.
    #[error(transparent)]
    Meter(#[from] hdrhistogram::CreationError),
    /// The request to the coordinator failed.
    #[error(transparent)]
    Directory(#[from] DirectoryError),
    /// A client died while writing: copies of a page may differ.
    /// [`Config::unclean_too`](crate::Config) accepts this.
    #[error(
        "coordinator {instance}: {}; restart owners and coordinator, or set unclean_too",
        Conflict::Unclean
    )]
    Unclean {
        /// The coordinator of the map.
        instance: Instance,
    },
    /// No node can be reached.
    #[error("cannot reach any node; {node}: {cause}")]
    Alone {
        /// One of the nodes.
        node: String,
        /// Why it cannot be reached.
        cause: NodeError,
    },
}

impl From<VerbError> for StartError {
    fn from(error: VerbError) -> Self {
        Self::Setup(error.into())
    }
}

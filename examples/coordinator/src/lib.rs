//! Two nodes that find each other through an HTTP service and then access each other's memory by
//! RDMA.
//!
//! ```text
//!   node a ── POST /nodes/a/rdma/endpoint ──▶ service ◀── POST /nodes/b/rdma/endpoint ── node b
//!          ── GET  /nodes/b/rdma/endpoint ──▶         ◀── GET  /nodes/a/rdma/endpoint ──
//!          ◀────────────────────── WRITE, READ, SEND ──────────────────────▶
//! ```
//!
//! A client that can POST here can gain access to the nodes' memory: protect the service like your
//! secrets.

pub mod node;
pub mod service;

use serde::{Deserialize, Serialize};
use tokio_rdma::{QueuePairEndpoint, RemoteRegion};

/// A queue pair and memory, offered to the peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Announcement {
    /// The queue pair to connect to.
    pub endpoint: QueuePairEndpoint,
    /// The memory that the peer may read and write.
    pub region: RemoteRegion,
}

//! Nodes find each other through a small HTTP service, then write and read each other's memory by RDMA.
//!
//! ```text
//!   node a ── POST /nodes/a/rdma/endpoint ──▶ service ◀── POST /nodes/b/rdma/endpoint ── node b
//!          ── GET  /nodes/b/rdma/endpoint ──▶         ◀── GET  /nodes/a/rdma/endpoint ──
//!          ◀────────────────────── WRITE, READ, SEND ──────────────────────▶
//! ```
//!
//! What travels by HTTP is JSON: the queue pair's endpoint and the region that the node grants. Whoever can post there can
//! have memory of the nodes read and written: put such a service where your other secrets are safe.

pub mod node;
pub mod service;

use serde::{Deserialize, Serialize};
use tokio_rdma::{QueuePairEndpoint, RemoteRegion};

/// What one node tells the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Announcement {
    /// To connect to.
    pub endpoint: QueuePairEndpoint,
    /// To write to and read from.
    pub region: RemoteRegion,
}

//! The operations on a software network with faults: a reliable connection must not let anything of them through.
//!
//! `TOKIO_RDMA_SEED` replays the faults of a failure that printed it, as far as threads run as they did.

#[allow(dead_code, reason = "only a part of the suite is mounted")]
mod common;

#[path = "conformance/batches.rs"]
mod batches;
#[path = "conformance/leases.rs"]
mod leases;
#[path = "conformance/operations.rs"]
mod operations;

const WIRE: common::Wire = common::Wire::Faults;

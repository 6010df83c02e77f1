//! The suites on each wire of the software device.
//!
//! The wire is a setting of the process, so each test starts this program again. Each scenario runs
//! in one of its modes there, and in every mode with `TOKIO_RDMA_SUITE=full`.
//! `TOKIO_RDMA_SUITE_WIRE=udp cargo test --test conformance NAME` runs one scenario on wire `udp`.

use crate::common::by_wire::run;

/// A batch that the driver refuses in part.
const BATCH: &str = "misbehaviour::posting::partly_refused_batch_fails";

// A thread delivers packets, so DC pools receive answers later than on the memory wire.
#[test]
fn suites_pass_over_packets() {
    run("packets", &["suite::", "pool::", BATCH], 112);
}

// The ends are devices of two networks, which communicate only through sockets.
#[test]
fn suites_pass_over_udp() {
    run("udp", &["suite::", BATCH], 82);
}

// `TOKIO_RDMA_SEED` replays the faults of a failed run, as far as threads run in the same order.
#[test]
fn operations_pass_with_faults() {
    run("faults", &["suite::batches::", "suite::leases::", "suite::operations::", BATCH], 33);
}

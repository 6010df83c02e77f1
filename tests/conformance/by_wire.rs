//! The suites on each wire of the software device. The wire is a setting of the process, so each test here starts this
//! program again.
//!
//! `TOKIO_RDMA_SUITE_WIRE=udp cargo test --test conformance NAME` runs a single scenario on the wire `udp`.

use crate::common::by_wire::run;

/// Over encoded packets: segments, acknowledgements, timers. A thread delivers them, so pools of DC initiators get their
/// answers later than from memory.
#[test]
fn over_packets() {
    run("packets", &["suite::", "pool::"], 608);
}

/// RoCE v2 over UDP: each end is a device of its own network, and the networks share nothing but sockets.
#[test]
fn over_udp() {
    run("udp", &["suite::"], 461);
}

/// The operations on a network with faults, which a reliable connection must hide. `TOKIO_RDMA_SEED` replays the faults of a
/// failure that printed it, as far as threads run in the same order.
#[test]
fn with_faults() {
    run("faults", &["suite::batches::", "suite::leases::", "suite::operations::"], 220);
}

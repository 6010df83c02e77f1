//! Seeded campaigns of queue pairs over a simulated network with faults, and of services under
//! [`chaos`].
//!
//! A seed determines the whole run, which is the same each time on any machine.
//!
//! ```text
//! TOKIO_RDMA_SEEDS=20000 cargo test --test faults
//!     runs 20000 seeds; the default is 120, or 2000 with --release
//! TOKIO_RDMA_SEED=17 cargo test --test faults <test> -- --nocapture
//!     runs one seed and prints each step
//! ```

#![allow(missing_docs)]

#[path = "../common/alone.rs"]
mod alone;
mod awaited;
mod campaign;
mod chance;
mod chaos;
mod deadlines;
mod driven;
mod dynamic;
mod links;
mod memory;
mod model;
mod real_time;
mod reliable;
mod setup;
#[path = "../torture/mod.rs"]
mod torture;
mod unreliable;

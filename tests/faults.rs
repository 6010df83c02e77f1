//! Seeded campaigns of queue pairs over a simulated network with faults.
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

#[path = "faults/awaited.rs"]
mod awaited;
#[path = "faults/campaign.rs"]
mod campaign;
#[path = "faults/chance.rs"]
mod chance;
#[path = "faults/deadlines.rs"]
mod deadlines;
#[path = "faults/driven.rs"]
mod driven;
#[path = "faults/dynamic.rs"]
mod dynamic;
#[path = "faults/links.rs"]
mod links;
#[path = "faults/memory.rs"]
mod memory;
#[path = "faults/model.rs"]
mod model;
#[path = "faults/real_time.rs"]
mod real_time;
#[path = "faults/reliable.rs"]
mod reliable;
#[path = "faults/setup.rs"]
mod setup;
#[path = "faults/unreliable.rs"]
mod unreliable;

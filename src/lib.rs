//! RDMA that you await.

pub mod types;

mod error;
mod provider;

pub use error::VerbError;

/// The software device's own interface: networks within this process, their faults and their clock.
pub mod software {
    pub use crate::provider::soft::{
        CqCounters, DeviceControl, Faults, LinkCounters, Network, ReceiveCounters, SendCounters,
    };
}

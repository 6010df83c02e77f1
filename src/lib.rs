//! RDMA that you await.

pub mod types;

mod error;
mod provider;

pub use error::VerbError;

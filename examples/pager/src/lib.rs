//! Remote memory in pages of 4 KiB: nodes lend memory, and clients use it like slow local memory.
//!
//! ```text
//!   owner a ── POST /nodes/a/pages ──▶ coordinator ◀── GET /pages ── client
//!   owner b ── POST /nodes/b/pages ──▶                                  │
//!      ▲   ▲                                                            │
//!      │   └──────────── READ a page that is not in the cache ──────────┤   Pager
//!      └──────────────── WRITE one that was changed, to all copies ─────┘
//! ```
//!
//! Owners only lend: their network adapters serve the pages without their processors.
//!
//! examples/pager/README.md describes how to run it, and the measurements.
//!
//! ```no_run
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! use pager::{Config, Directory, Pager};
//! use tokio_rdma::Device;
//!
//! let directory = Directory::new("http://127.0.0.1:7490");
//! let device = Device::open_default_at("127.0.0.3".parse()?)?;
//! let pager = Pager::connect(&device, &directory, &Config::default()).await?;
//! let mut bytes = [0; 100];
//! pager.read(17, 0, &mut bytes).await?;
//! pager.write(17, 100, b"new").await?;
//! pager.prefetch(18..50);
//! pager.flush().await?;
//! # Ok(())
//! # }
//! ```

mod cache;
mod directory;
mod error;
mod known;
mod lease;
mod ledger;
mod map;
#[cfg(feature = "userfaultfd")]
mod mapping;
mod meter;
mod node;
mod owner;
mod page;
mod pager;
mod progress;
mod readahead;
mod replicas;
pub mod service;
mod strike;

pub use directory::{Directory, DirectoryError};
pub use error::{Conflict, NodeError, PagerError, StartError};
pub use known::Settings;
pub use ledger::{Ledger, Verdict};
pub use map::{Instance, Map, Share, ShareError, Wanted, WriterId};
#[cfg(feature = "userfaultfd")]
pub use mapping::{Mapping, MappingError};
pub use meter::{Counters, Latency, Report};
pub use owner::{Owner, OwnerConfig};
pub use page::{Content, PAGE};
pub use pager::{Config, Pager};

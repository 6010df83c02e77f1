//! Remote memory in pages of 4 KiB: nodes lend theirs, clients use it as if it were slow memory of their own.
//!
//! ```text
//!   owner a ── POST /nodes/a/pages ──▶ coordinator ◀── GET /pages ── client
//!   owner b ── POST /nodes/b/pages ──▶                                  │
//!      ▲   ▲                                                            │
//!      │   └──────────── READ a page that is not in the cache ──────────┤   Pager
//!      └──────────────── WRITE one that was changed, to all copies ─────┘
//! ```
//!
//! Owners do nothing but lend: their pages are read and written by their adapters, without their processors.
//!
//! | File | What |
//! |---|---|
//! | `page.rs` | pages, and contents that can be computed |
//! | `map.rs` | who has which pages |
//! | `known.rs` | what the coordinator knows of them: a machine without I/O |
//! | `service.rs`, `directory.rs` | the coordinator, and how it is asked |
//! | `owner.rs` | the end that lends |
//! | `node.rs` | the client's connection to an owner |
//! | `progress.rs` | whether anything is done there |
//! | `strike.rs` | nodes that lack something are taken off the map |
//! | `lease.rs` | one client writes at a time, and says when it has written all |
//! | `replicas.rs` | all of them: reads go to one, writes to all |
//! | `cache.rs` | which pages are here, on their way here, or away: a machine without I/O |
//! | `readahead.rs` | who reads in order, and what comes next: another |
//! | `pager.rs` | pages for the asking |
//! | `ledger.rs` | whether pages hold what was written to them |
//! | `meter.rs` | what that took |
//! | `mapping.rs` | pages by dereferencing a pointer (feature `userfaultfd`) |
//!
//! docs/pager.md says how to run it, and what was measured.
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

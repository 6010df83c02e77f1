//! A key-value service on tokio-rdma: readers READ the server's hash table, writers ask the server.
//!
//! ```text
//!   KvClient::get ── RDMA READ ──▶ ┌ table ──────────────┐    the server's processor has no part in it
//!                                  │ bucket │ bucket │ … │
//!   KvClient::put ── message ────▶ └─────────▲───────────┘
//!                 ◀── answer ──── Server ────╯ Table::put
//! ```
//!
//! A reader may find a slot in the middle of being written. It knows by the slot's checksum, reads again, and, when that
//! happens too often, asks the server. `docs/kv.md` has the design of a slot and why nobody accepts a torn value, what was
//! measured, and what happens when one side fails.
//!
//! ```
//! use kv::{KvClient, Layout, Server};
//! use tokio_rdma::Device;
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let device = Device::software()?;
//! let server = Server::bind(&device, "127.0.0.1:0", Layout::new(1024, 4, 32, 256)?).await?;
//! let address = server.local_addr();
//! tokio::spawn(server.run());
//!
//! let client = KvClient::connect(&device, address).await?;
//! let version = client.put(b"colour", b"red").await?;
//! let found = client.get(b"colour").await?.ok_or("it was put")?;
//! assert_eq!((&found.value[..], found.version), (&b"red"[..], version));
//! client.delete(b"colour").await?;
//! assert_eq!(client.get(b"colour").await?, None);
//! client.close().await?;
//! # Ok(())
//! # }
//! ```
//!
//! | File | What |
//! |---|---|
//! | `slot.rs` | what a reader finds, and how it knows that it is whole |
//! | `layout.rs` | where the slots are |
//! | `table.rs` | the server's side of the table |
//! | `protocol.rs` | messages |
//! | `server.rs` | clients come, ask and go |
//! | `client.rs`, `calls.rs` | GET, PUT and DELETE; which answer belongs to which call |
//! | `history.rs`, `stamp.rs` | was every answer right? values that tell where they are from |

mod calls;
mod client;
mod error;
pub mod history;
mod layout;
mod protocol;
mod server;
mod slot;
pub mod stamp;
mod table;
#[cfg(test)]
mod torn;

pub use client::{ClientConfig, KvClient, ReadCounters};
pub use error::{KvError, ProtocolError, Refusal};
pub use layout::Layout;
pub use server::Server;
pub use table::{Table, Versioned};

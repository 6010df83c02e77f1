//! A key-value service on tokio-rdma: clients READ the server's hash table, and send messages to
//! write.
//!
//! ```text
//!   KvClient::get ── RDMA READ ──▶ ┌ table ──────────────┐    no work for the server's processor
//!                                  │ bucket │ bucket │ … │
//!   KvClient::put ── message ────▶ └─────────▲───────────┘
//!                 ◀── answer ──── Server ────╯ Table::put
//! ```
//!
//! A READ may overlap with a write of the same slot, which the slot's checksum reveals. The client
//! repeats a torn READ, and sends a message after several. `examples/kv/README.md` describes the
//! design, measurements and failures.
//!
//! ```
//! use kv::{KvClient, Layout, Server};
//! use tokio_rdma::Device;
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let device = Device::software()?;
//! let server = Server::bind(&device, "127.0.0.1:0", Layout::new(1024, 4, 32, 256)?).await?;
//! let address = server.local_addr()?;
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

mod calls;
mod client;
mod error;
mod failover;
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
pub use failover::FailoverClient;
pub use layout::Layout;
pub use server::Server;
pub use table::{Table, Versioned};

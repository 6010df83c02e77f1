//! The link of RoCE v2: packets in datagrams of UDP, on port 4791, between processes and hosts.
//!
//! ```text
//!   queue pair ── packets ──▶ Outbox ── Batch, with checks ──▶ Socket ──▶ kernel
//!   queue pair ◀── packets ── Endpoint's thread ◀── Inbox, checks verified ◀── Socket
//!                             or whoever waits
//! ```
//!
//! Linux only: elsewhere nothing says which identification the kernel writes into IPv4 headers, see [`icrc`](crate::roce::icrc).

mod batch;
mod config;
mod duty;
mod endpoint;
mod error;
pub(crate) mod interface;
mod outbox;
mod pace;
mod peer_link;
#[cfg_attr(not(target_os = "linux"), path = "socket_elsewhere.rs")]
mod socket;

#[cfg(test)]
mod tests;

pub use config::UdpConfig;
pub(crate) use endpoint::{Endpoint, Turn};
pub use error::UdpError;
pub(crate) use outbox::Outbox;
pub(crate) use pace::Pace;
pub(crate) use peer_link::{PeerLink, Place};

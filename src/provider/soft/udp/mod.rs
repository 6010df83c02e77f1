//! The link of RoCE v2: packets in datagrams of UDP, on port 4791, between processes and hosts.
//!
//! ```text
//!   queue pair ── packets ──▶ Outbox ── Batch, with checks ──▶ Socket ──▶ kernel
//!   queue pair ◀── packets ── Endpoint's thread ◀── Inbox, checks verified ◀── Socket
//!                             or whoever waits
//! ```
//!
//! Linux only: elsewhere nothing says which identification the kernel writes into IPv4 headers, see [`icrc`].

mod batch;
mod config;
mod duty;
mod endpoint;
mod icrc;
mod outbox;
mod pace;
mod peer_link;
#[cfg_attr(not(target_os = "linux"), path = "socket_elsewhere.rs")]
mod socket;

#[cfg(test)]
mod tests;

pub use config::UdpConfig;
pub(super) use endpoint::{Endpoint, Turn};
pub(super) use outbox::Outbox;
pub(super) use pace::Pace;
pub(super) use peer_link::{PeerLink, Place};

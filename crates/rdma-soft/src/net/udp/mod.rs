//! RoCE v2 over UDP port 4791, between processes and hosts.
//!
//! ```text
//!   queue pair ── packets ──▶ Outbox ── Batch, ICRCs added ──▶ Socket ──▶ kernel
//!   queue pair ◀── packets ── Endpoint's thread ◀── Inbox, ICRCs verified ◀── Socket
//!                             or a waiting caller
//! ```
//!
//! Linux only: other systems do not define the IPv4 identification, see
//! [`icrc`](crate::roce::icrc).

mod batch;
mod config;
#[cfg(target_os = "linux")]
mod control_messages;
mod endpoint;
mod error;
mod inbox_lock;
pub(crate) mod interface;
mod membership;
mod pace;
mod peer_link;
#[cfg_attr(not(target_os = "linux"), path = "socket_elsewhere.rs")]
mod socket;

#[cfg(test)]
mod tests;

pub(crate) use batch::Batch;
pub use config::UdpConfig;
pub(crate) use endpoint::Endpoint;
pub use error::UdpError;
pub(crate) use membership::Membership;
pub(crate) use pace::Pace;
pub(crate) use peer_link::WindowSlot;

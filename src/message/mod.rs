//! Connections that carry messages, and one-sided operations on the same queue pair.
//!
//! ```text
//!   Connection                        connection.rs               handles of the service
//!        │                            one_sided.rs                access to the peer's memory
//!   Listener                          listener.rs, admission.rs   accepts and refuses peers
//!   RdmaStream, RdmaListener          stream/                     bytes instead of messages
//!        │                            resources.rs, shared_completions.rs: objects of many
//!        │ driver.rs: deadlines, and progress while the service is idle
//!        ▼
//!      core.rs: I/O of one side       inbox.rs, outbox.rs, waiting.rs, receives.rs: its state
//!        │                            inbound.rs, fetching.rs, outbound.rs, growth.rs, ending.rs
//!        │ headers, events, time ▼ ▲ headers to send, actions, deadline
//!        ▼
//!      rdma_message_proto: no I/O; validates what the peer sends
//! ```

#![forbid(unsafe_code)]

mod admission;
mod after_unlock;
mod budget;
mod config;
mod connection;
mod core;
mod driver;
mod ending;
mod error;
mod fetching;
mod helper;
mod inbound;
mod inbox;
mod jobs;
mod listener;
mod message_memory;
mod notifications;
mod one_sided;
mod outbound;
mod outbox;
mod outcome;
mod receives;
mod resources;
mod send_memory;
mod shared;
mod shared_completions;
pub mod stream;
#[cfg(all(test, not(loom)))]
mod tests;
mod waiting;

pub use admission::ListenerStats;
pub use budget::{BudgetCounters, BufferBudget};
pub use config::ConnectionConfig;
pub use connection::{Connection, PreparedConnection};
pub use core::ConnectionCounters;
pub use error::{CloseReason, EstablishError, MessageError, TrySendError};
pub use inbox::Notification;
pub use listener::{ConnectionRequest, Listener, ShutdownReport};
pub use notifications::Notifications;
#[doc(inline)]
pub use rdma_message_proto::Violation;
#[doc(inline)]
pub use rdma_message_proto::handshake::{Content, Handshake, HandshakeError};
#[doc(inline)]
pub use rdma_message_proto::refusal::RefusalReason;

//! Connections that carry messages, and one-sided operations on the same queue pair.
//!
//! ```text
//!   Connection                        handle.rs                   handles of the application
//!        │                            one_sided.rs                access to the peer's memory
//!   Listener                          listener.rs, admission.rs   accepts and refuses peers
//!        │                            resources.rs, shared_completions.rs: objects of many
//!        │ driver.rs: deadlines, and progress while the application is idle
//!        ▼
//!      state.rs: I/O                  inbox.rs, outbox.rs, waiting.rs, receives.rs: its state
//!        │                            inbound.rs, fetching.rs, outbound.rs, growth.rs, ending.rs
//!        │                            writing.rs, reading.rs: of a stream's bytes
//!        │ headers, events, time ▼ ▲ headers to send, actions, deadline
//!        ▼
//!      rdma_message_proto: no I/O; validates what the peer sends
//! ```

#![forbid(unsafe_code)]

mod admission;
mod budget;
mod config;
mod driver;
mod ending;
mod error;
mod fetching;
mod handle;
mod helper;
mod inbound;
mod inbox;
mod jobs;
mod listener;
mod listener_config;
mod message_memory;
mod notifications;
mod one_sided;
mod outbound;
mod outbox;
mod outcome;
mod reading;
mod receives;
mod resources;
mod send_memory;
mod shared;
mod shared_completions;
mod state;
mod stream_state;

#[cfg(all(test, not(loom)))]
mod tests;
mod waiting;
mod writing;

pub use admission::ListenerStats;
pub use budget::{BudgetCounters, BufferBudget};
pub use config::ConnectionConfig;
pub use error::{CloseReason, EstablishError, MessageError, TrySendError};
pub(crate) use handle::Handle;
pub use handle::{Connection, PreparedConnection};
pub use inbox::Notification;
pub use listener::{ConnectionRequest, Listener, ShutdownReport};
pub use listener_config::ListenerConfig;
pub use notifications::Notifications;
#[doc(inline)]
pub use rdma_message_proto::Violation;
#[doc(inline)]
pub use rdma_message_proto::handshake::{Handshake, HandshakeError, Service};
#[doc(inline)]
pub use rdma_message_proto::refusal::RefusalReason;
pub(crate) use reading::{Chunk, Taken};
pub(crate) use shared::WaitGuard;
pub use state::ConnectionCounters;
pub(crate) use state::ConnectionState;

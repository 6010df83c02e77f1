//! Connections that carry messages, and one-sided operations beside them.
//!
//! ```text
//!   Connection ─ SendHalf, RecvHalf        connection.rs, halves.rs    what a service holds
//!        │                                 one_sided.rs               the peer's memory
//!   Listener                               listener.rs, admission.rs   which peers become connections
//!        │ driver.rs: time, and progress when nobody asks for any
//!        ▼
//!      core.rs: one end at work            inbound.rs, fetching.rs, message_memory.rs, outbound.rs, ending.rs, waiters.rs
//!        │ asks, tells
//!        ▼
//!      protocol.rs: frames and time in, frames, actions and a deadline out      pure, judges what a peer sends
//!        │                                 frame.rs, handshake.rs
//!        └─ lifecycle.rs: phases           flow_control.rs: credits           timers.rs: deadlines
//! ```

#![forbid(unsafe_code)]

mod admission;
mod config;
mod connection;
mod core;
mod driver;
mod ending;
mod error;
mod fetching;
mod flow_control;
#[cfg(all(test, not(loom)))]
mod flow_model;
mod frame;
#[cfg(any(fuzzing, all(test, not(loom))))]
#[allow(unreachable_pub, reason = "a fuzzer reaches it")]
pub mod fuzzing;
mod halves;
mod handshake;
mod helper;
mod inbound;
mod lifecycle;
mod listener;
mod message_memory;
mod one_sided;
mod outbound;
mod protocol;
mod shared;
#[cfg(all(test, not(loom)))]
mod tests;
mod timers;
mod waiters;

pub use admission::{ListenerStats, Refusal};
pub use config::ConnectionConfig;
pub use connection::{Connection, PreparedConnection};
pub use core::ConnectionCounters;
pub use error::{CloseReason, EstablishError, MessageError, Violation};
pub use halves::{RecvHalf, SendHalf};
pub use handshake::{Handshake, HandshakeError};
pub use listener::{ConnectionRequest, Listener};

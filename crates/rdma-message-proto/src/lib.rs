//! The message protocol of tokio-rdma without I/O, tasks, clocks or buffers.
//!
//! [`Protocol`](protocol::Protocol) checks what the peer sends, and decides what one end of a
//! connection sends and when it ends. tokio-rdma posts the frames, moves the bytes and calls the
//! wakers.
//!
//! ```text
//!   protocol           one end of a connection
//!      ├─ lifecycle    its phases; end: why it ended
//!      ├─ flow         credits, and the proof that two ends never wait for each other
//!      │    └─ window  how receives change; frame: the header of each SEND
//!      ├─ growth       when receives change
//!      ├─ incoming     checks of received frames beyond credits
//!      ├─ framing      the length and the number of the frames of a message
//!      ├─ sending      how a message is sent, and what senders and flushes wait for
//!      └─ timers       deadlines
//!   handshake          private data of a connection request; refusal: of a rejection
//! ```
//!
//! tokio-rdma re-exports the types of [`handshake`], [`RefusalReason`] and [`Violation`]. The rest
//! of the interface may change with any version.
//!
//! [`RefusalReason`]: refusal::RefusalReason

#![forbid(unsafe_code)]
#![allow(missing_docs, reason = "most modules are for tokio-rdma only; the others warn")]
#![cfg_attr(
    not(test),
    deny(clippy::unwrap_used, clippy::expect_used, clippy::todo, clippy::unimplemented)
)]

pub mod end;
pub mod flow;
pub mod frame;
pub mod framing;
#[cfg(any(fuzzing, test))]
#[doc(hidden)]
pub mod fuzzing;
mod growth;
pub mod handshake;
pub mod incoming;
pub mod lifecycle;
#[cfg(test)]
mod model;
pub mod protocol;
pub mod refusal;
pub mod sending;
#[cfg(test)]
mod texts;
pub mod timers;
mod violation;
pub mod window;

pub use violation::Violation;

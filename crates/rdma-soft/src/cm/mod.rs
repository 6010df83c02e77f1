//! The software device's connection manager: InfiniBand's CM protocol (IBTA 12) with IP addresses.
//!
//! ```text
//!   CmId  ── calls ──▶  agent  ── calls, messages, time ──▶  Machine
//!   CmChannel ◀── events ─┘  └──▶ network's scheduler ──▶ peer's agent
//! ```
//!
//! - [`machine`], [`arrivals`] and [`answering`] are the protocol as a pure state machine.
//! - [`message`] has the messages, [`mad`] their bytes.
//! - [`manager`] has the state of a device, [`agent`] connects it with the network; [`channel`]
//!   implements the contract.
//! - [`limits`] bounds what peers can demand.
//!
//! A device's IP address is its GID. All devices of a network share 127.0.0.1 and ::1: a connection
//! there goes to the device that listens on the port. The device that owns an address rejects
//! requests without a listener; an address without a device is unreachable.

pub(crate) mod agent;
mod answering;
mod arrivals;
mod channel;
mod connection;
mod forged;
#[cfg(any(fuzzing, test))]
#[allow(unreachable_pub, reason = "a fuzzer reaches it")]
pub mod fuzzing;
mod limits;
mod machine;
mod mad;
mod manager;
mod message;
mod sidr;

#[cfg(test)]
mod tests;

pub use channel::{CmChannel, CmId};
pub(super) use manager::Manager;

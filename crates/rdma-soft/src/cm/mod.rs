//! The software device's connection manager: the protocol of InfiniBand's (IBTA 12), by the addresses of IP.
//!
//! ```text
//!   CmId  ── calls ──▶  Manager  ── calls, messages, time ──▶  Machine
//!   CmChannel ◀── events ──┘  └──▶ network's scheduler ──▶ manager of the peer
//! ```
//!
//! [`machine`] is pure, with [`arrivals`] for what messages do to it and [`answering`] for what it answers in a listener's name.
//! [`message`] is what it sends and [`mad`] the bytes of that, [`manager`] puts a lock and the network around it, [`channel`] is
//! what the layers above see. [`ports`] knows which addresses are taken, [`limits`] how much peers may ask for.
//!
//! A device has the IP address of its GID. 127.0.0.1 and ::1 are shared by all devices of a network, as by the programs
//! of a machine: a connection there goes to whichever device listens at that port. An address of which nobody listens is
//! refused by the device that has it, and one that no device has cannot be reached.

mod answering;
mod arrivals;
mod channel;
mod connection;
#[cfg(feature = "testing")]
mod forged;
#[cfg(any(fuzzing, test))]
#[allow(unreachable_pub, reason = "a fuzzer reaches it")]
pub mod fuzzing;
mod limits;
mod machine;
mod mad;
mod manager;
mod message;
mod ports;

#[cfg(test)]
mod tests;

pub use channel::{CmChannel, CmId};
pub(super) use manager::Manager;
pub(super) use ports::Ports;

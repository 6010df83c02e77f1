//! The software device: a complete verbs device in user space that needs neither hardware nor privilege.
//!
//! It is not a mock: it has the state machine, the checks, the completion statuses and the events of a
//! device for RoCE v2, and its channels are real file descriptors.
//!
//! ```text
//!   post_send                                              poll
//!      │                                                     ▲
//!      ▼                 packets                             │
//!  ┌───────────┐  ───────────────────▶  ┌───────────┐     ┌──────┐
//!  │ requester │         network        │ responder │ ──▶ │  cq  │ ──▶ channel (descriptor)
//!  └───────────┘  ◀───────────────────  └───────────┘     └──────┘
//!      │  ▲              replies           │    ▲
//!      ▼  │ timers                         ▼    │ receives
//!    network's thread                 dma ◀─ keys  srq
//! ```
//!
//! # Use
//!
//! The API is synchronous verbs: a [`Network`] opens devices, a device creates objects, a queue pair posts, a completion
//! queue polls. No runtime is involved. The methods are those of the traits in [`contract`]; the values are in [`types`].
//!
//! ```
//! use rdma_soft::Network;
//! use rdma_soft::contract::Context as _;
//! use rdma_soft::types::PortNum;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let network = Network::new();
//! let context = network.open("a")?;
//! assert_eq!(context.attr().name, "a");
//! println!("{:?}", context.port(PortNum(1))?.gids);
//! # Ok(())
//! # }
//! ```
//!
//! `examples/write.rs` continues from there: it connects two devices and executes a WRITE between them.
//!
//! | Network | Made by | Devices | Time |
//! |---|---|---|---|
//! | in memory | [`Network::new`] | of this process; a post copies the data once | real |
//! | with faults | [`Network::with_faults`] | of this process, by encoded packets | real |
//! | simulated | [`Network::simulated`] | of this process, by encoded packets | virtual, drawn from a seed |
//! | UDP | [`Network::udp`] | of processes and hosts that speak RoCE v2 | real |
//!
//! # Structure
//!
//! Requester and responder are pure: packets and time go in, packets and deadlines come out. On a
//! network without faults the thread that posts runs the whole exchange and copies the data once from the memory
//! of the sender to the memory of the receiver. With faults, or in virtual time, the same state machines
//! exchange encoded packets.

#![cfg_attr(
    not(test),
    deny(clippy::unwrap_used, clippy::expect_used, clippy::todo, clippy::unimplemented)
)]

// Under Miri, which parking_lot does not run on, the locks of that name are those of the standard library.
#[cfg(miri)]
extern crate rdma_provider as parking_lot;

mod cm;
mod dc;
mod device;
mod error;
#[cfg(any(fuzzing, test))]
#[allow(unreachable_pub, reason = "reachable for a fuzzer only")]
mod hostile;
mod net;
mod roce;

#[cfg(test)]
#[allow(unsafe_code)]
mod tests;

pub use cm::{CmChannel, CmId};
pub use dc::{Dct, TargetCounters};
pub use device::{Ah, Channel, Context, Cq, CqCounters, Mr, Mw, Pd, Qp, Srq};
pub use error::OpenError;
pub use net::{DeviceControl, Faults, LinkCounters, Network, UdpConfig, UdpError, interface_at};
pub use roce::{ReceiveCounters, SendCounters};

pub use rdma_provider::{VerbError, cm_contract, contract, types};

/// What a fuzzer feeds.
#[cfg(fuzzing)]
#[allow(unreachable_pub, reason = "reachable for a fuzzer only")]
pub mod fuzzing {
    pub use super::cm::fuzzing::*;
    pub use super::hostile::*;
}

/// The provider of software devices: names their object types.
#[derive(Debug, Clone, Copy)]
pub enum Soft {}

impl contract::Provider for Soft {
    type Context = Context;
    type Pd = Pd;
    type Mr = Mr;
    type Mw = Mw;
    type Channel = Channel;
    type Cq = Cq;
    type Qp = Qp;
    type Dct = Dct;
    type Srq = Srq;
    type Ah = Ah;
    type CmChannel = cm::CmChannel;
    type CmId = cm::CmId;
}

/// Compiles the examples of the README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
#[derive(Debug)]
pub struct Readme;

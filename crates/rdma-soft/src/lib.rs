//! The software device: a complete verbs device in user space that needs neither hardware nor
//! privilege.
//!
//! It has the states, checks, completion statuses and events of a RoCE v2 adapter. Its channels are
//! file descriptors, or call wakers.
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
//! The API is synchronous verbs without a runtime: a [`Network`] opens devices, a device creates
//! objects, a queue pair posts, a completion queue polls. Methods are in the traits of
//! [`contract`], values in [`types`].
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
//! `examples/write.rs` connects two devices and executes a WRITE.
//!
//! | Network | Created by | Devices | Time |
//! |---|---|---|---|
//! | in memory | [`Network::new`] | in this process; a post copies the data once | real |
//! | with faults | [`Network::with_faults`] | in this process; packets are encoded | real |
//! | simulated | [`Network::simulated`] | in this process; packets are encoded | virtual, seeded |
//! | UDP | [`Network::udp`] | in processes and hosts that speak RoCE v2 | real |
//!
//! # Structure
//!
//! ```text
//!   verbs       the contract: handles that own an object of a device
//!   cm          the connection manager
//!   device      queue pairs, queues, targets; moves packets between the machines
//!   net         the network: clock and scheduler, faults, sockets; knows its devices as nodes
//!   roce, dc    the protocol, as pure state machines
//!   memory      registered memory: keys and copies
//! ```
//!
//! Requester and responder are pure state machines: packets and time in, packets and deadlines out.
//! In memory and without faults the posting thread runs both and copies the data once. Otherwise
//! they exchange encoded packets.

#![cfg_attr(
    not(test),
    deny(clippy::unwrap_used, clippy::expect_used, clippy::todo, clippy::unimplemented)
)]

mod cm;
mod dc;
mod device;
mod error;
#[cfg(any(fuzzing, test))]
#[allow(unreachable_pub, reason = "reachable for a fuzzer only")]
mod hostile;
mod memory;
mod net;
mod ring;
mod roce;
mod verbs;

#[cfg(test)]
#[allow(unsafe_code)]
mod tests;

pub use cm::{CmChannel, CmId};
pub use dc::TargetCounters;
pub use device::{Channel, CqCounters, DeviceControl};
pub use error::OpenError;
pub use net::{
    Alarm, Bottleneck, Faults, LinkControl, LinkCounters, Network, UdpConfig, UdpError,
    interface_at,
};
pub use roce::{ReceiveCounters, SendCounters};
pub use verbs::{Ah, Context, Cq, Dct, Mr, Mw, Pd, Qp, Srq};

pub use rdma_provider::{VerbError, cm_contract, contract, types};

/// Entry points of fuzzers.
#[cfg(fuzzing)]
#[allow(unreachable_pub, reason = "reachable for a fuzzer only")]
pub mod fuzzing {
    pub use super::cm::fuzzing::*;
    pub use super::hostile::*;
}

/// The provider of software devices, which names their object types.
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

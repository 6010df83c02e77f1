//! The software device: a complete verbs device in user space, no hardware and no privilege needed.
//!
//! Not a mock. It has the state machine, the checks, the completion statuses and the events of a
//! device for RoCE v2, and its channels are real descriptors, so that the layers above cannot tell.
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
//! ```
//! use rdma_provider::contract::Context as _;
//! use rdma_provider::types::PortNum;
//! use rdma_soft::Network;
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
//! `examples/write.rs` goes on from there: a WRITE between two devices, without a runtime.
//!
//! Requester and responder are pure: packets and time go in, packets and deadlines come out. On a
//! network without faults the thread that posts runs the whole exchange, copying once from the memory
//! of the sender to the memory of the receiver; with faults, or in virtual time, the same machines
//! exchange encoded packets.
//!
//! Locks, in the order they are taken: requester half of one queue pair, responder half of one queue
//! pair or a DC target, then one of completion queue, shared receive queue, channel, windows, scheduler. What would need
//! another order (a queue pair that takes a second one down with it) is put on a
//! [`Deferred`](device::deferred::Deferred) list and done when no lock is held.

#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::todo, clippy::unimplemented))]

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

use rdma_provider::contract;

/// What a fuzzer feeds.
#[cfg(fuzzing)]
#[allow(unreachable_pub, reason = "reachable for a fuzzer only")]
pub mod fuzzing {
    pub use super::cm::fuzzing::*;
    pub use super::hostile::*;
}

/// The provider.
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

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
//! Requester and responder are pure: packets and time go in, packets and deadlines come out. On a
//! network without faults the thread that posts runs the whole exchange, copying once from the memory
//! of the sender to the memory of the receiver; with faults, or in virtual time, the same machines
//! exchange encoded packets.
//!
//! Locks, in the order they are taken: requester half of one queue pair, responder half of one queue
//! pair or a DC target, then one of completion queue, shared receive queue, channel, windows, scheduler. What would need
//! another order (a queue pair that takes a second one down with it) is put on a
//! [`Deferred`](deferred::Deferred) list and done when no lock is held.

mod channel;
mod cm;
mod cq;
mod dc;
mod deferred;
mod device;
mod dma;
mod dma_buf;
mod exchange;
mod faults;
#[cfg(any(fuzzing, test))]
#[allow(unreachable_pub, reason = "reachable for a fuzzer only")]
mod hostile;
mod keys;
mod network;
mod qp;
mod requester;
mod responder;
mod ring;
mod scheduler;
mod srq;
mod udp;
mod windows;
mod wire;

#[cfg(test)]
#[allow(unsafe_code)]
mod tests;

pub(crate) use channel::Channel;
pub(crate) use cq::Cq;
pub use cq::CqCounters;
pub(crate) use dc::Dct;
pub use dc::TargetCounters;
pub(crate) use device::{Ah, Context, Mr, Mw, Pd};
pub use faults::{Faults, LinkCounters};
pub use network::{DeviceControl, Network};
pub(crate) use qp::Qp;
pub use requester::SendCounters;
pub use responder::ReceiveCounters;
pub(crate) use srq::Srq;
pub use udp::UdpConfig;

use super::contract;

/// What a fuzzer feeds.
#[cfg(fuzzing)]
#[allow(unreachable_pub, reason = "reachable for a fuzzer only")]
pub mod fuzzing {
    pub use super::cm::fuzzing::*;
    pub use super::hostile::*;
}

/// The provider.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Soft {}

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

//! RoCE v2 as machines: what a packet says, and what a requester and a responder do with it.
//!
//! No lock, no clock and no socket: packets, time and random numbers go in; packets, deadlines and completions come out.

pub(crate) mod icrc;
pub(crate) mod packet;
pub(crate) mod requester;
pub(crate) mod responder;

pub use self::requester::SendCounters;
pub use self::responder::ReceiveCounters;

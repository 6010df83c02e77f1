//! The RoCE v2 protocol.
//!
//! Requester and responder are state machines without lock, clock or socket. Their inputs are
//! packets, time and random numbers; their outputs are packets, deadlines and completions.

pub(crate) mod icrc;
pub(crate) mod ip_fields;
pub(crate) mod packet;
pub(crate) mod partition;
pub(crate) mod requester;
pub(crate) mod responder;

pub use self::requester::SendCounters;
pub use self::responder::ReceiveCounters;

//! Dynamic connections (DC): initiators that work with a target at a time, and targets that serve any number of them.
//!
//! What mlx5 adapters say to each other is not public. This is a protocol of its own, between software devices only, with
//! the packets of RC in it: an opcode class that IBTA leaves to manufacturers, and a [`Header`] of its own before the payload.
//! Every other device drops such packets.
//!
//! ```text
//!  initiator                                              target
//!    OPEN  key, MTU, session, first PSN            ──▶    makes a session, or refuses
//!          ◀──  ACCEPT  cookie   |   NAK, RNR NAK
//!    requests of RC, with session and cookie       ──▶    its responder, one for each session
//!          ◀──  answers of RC    |   GONE                 (no such session)
//!    CLOSE, before it goes to another target       ──▶    forgets the session
//! ```
//!
//! A session is made by OPEN only, and what belongs to it is known by the cookie that the target draws: so no packet that
//! comes late, twice, or after the session has been forgotten is executed a second time, and a target need not remember
//! sessions that it has forgotten.

mod dct;
mod header;
mod pump;
mod sessions;
mod target;

pub use dct::Dct;
pub(super) use dct::{DctInner, create};
pub(super) use header::{Header, SessionNumber};
pub(super) use target::Framed;
pub use target::TargetCounters;
#[cfg(any(fuzzing, test))]
pub(super) use target::{Outcome, Surroundings, Target};

//! Dynamic connections (DC): initiators that work with one target at a time, and targets that serve
//! any number of initiators.
//!
//! mlx5's protocol is not public. This one works between software devices only. It wraps RC's
//! packets in an opcode class that IBTA reserves for manufacturers, with a [`Header`] before the
//! payload. Other devices drop such packets.
//!
//! ```text
//!  initiator                                              target
//!    OPEN  key, MTU, session, first PSN            ──▶    creates a session, or refuses
//!          ◀──  ACCEPT  cookie   |   NAK, RNR NAK
//!    RC requests, with session and cookie          ──▶    the session's responder
//!          ◀──  RC answers   |   GONE                     (no such session)
//!    CLOSE, before it changes to another target    ──▶    removes the session
//! ```
//!
//! Only OPEN creates a session. All packets of a session contain a cookie that the target draws. So
//! delayed or duplicate packets are not executed again, and a target need not remember removed
//! sessions.

mod header;
mod sessions;
mod target;

pub(super) use header::{Header, SessionNumber};
pub(super) use sessions::{MAX_SESSIONS, SessionKey};
pub use target::TargetCounters;
pub(super) use target::{Environment, Framed, Outcome, Target};

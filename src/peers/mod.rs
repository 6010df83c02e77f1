//! Connections to peers that come and go. They use connections as a program does.
//!
//! ```text
//!   PeerSet     peer_set.rs     links to many peers by key: connections, or peers of a DC pool
//!   Reconnect   reconnect.rs    one connection, made anew when it ends
//! ```

#![forbid(unsafe_code)]

mod peer_set;
mod reconnect;

pub use peer_set::{Peer, PeerError, PeerLink, PeerSet, PeerSetConfig, PeerSetCounters};
pub use reconnect::{
    Reconnect, ReconnectCause, ReconnectError, ReconnectPolicy, ReconnectState, ReconnectStates,
};

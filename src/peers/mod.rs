//! Connections to peers that come and go: [`Reconnect`] keeps one connection, [`PeerSet`] links to
//! many peers.

#![forbid(unsafe_code)]

mod peer_set;
mod reconnect;

pub use peer_set::{Peer, PeerError, PeerLink, PeerSet, PeerSetConfig, PeerSetCounters};
pub use reconnect::{
    Reconnect, ReconnectCause, ReconnectError, ReconnectPolicy, ReconnectState, ReconnectStates,
};

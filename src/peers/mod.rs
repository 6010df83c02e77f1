//! Connections to peers that come and go: [`Reconnect`] keeps one connection, [`PeerSet`] links to
//! many peers.

#![forbid(unsafe_code)]

mod peer_set;
mod reconnect;

use crate::engine::{PortChanges, all_ports_are_down};
use crate::verbs::Device;

pub use peer_set::{Peer, PeerError, PeerLink, PeerSet, PeerSetConfig, PeerSetCounters};
pub use reconnect::{
    Reconnect, ReconnectCause, ReconnectError, ReconnectPolicy, ReconnectState, ReconnectStates,
};

/// Waits for a change that leaves a port active, after which connections are probed.
async fn change_to_active_port(changes: &mut PortChanges, device: &Device) {
    loop {
        changes.wait_by_readers().await;
        // While all ports are down, a probe would end connections that survive a short outage.
        if !all_ports_are_down(device) {
            return;
        }
    }
}

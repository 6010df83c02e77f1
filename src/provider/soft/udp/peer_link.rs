//! The way to a peer, shared by all queue pairs that send there.
//!
//! A peer's socket holds what its kernel gives it, 208 KiB by default, whoever sends. So what is underway to one peer from one
//! device is bounded, and queue pairs with something underway share that equally. Each may always have one packet underway, so
//! none waits for another; with very many the bound is exceeded, packets may be lost, and are sent again.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::provider::soft::requester::Flow;
use crate::types::Mtu;

/// Bytes underway to a peer.
const TO_PEER: u32 = 128 << 10;
/// Of them, bytes of one queue pair.
const OF_ONE: u32 = 64 << 10;
/// Packets of one queue pair, however small: each also costs its receiver some hundred bytes.
const PACKETS: u32 = 64;

/// See the module.
#[derive(Debug, Default)]
pub(in crate::provider::soft) struct PeerLink {
    /// Queue pairs with something underway.
    busy: AtomicU32,
}

impl PeerLink {
    /// One more has something underway, until the result is dropped.
    pub(in crate::provider::soft) fn enter(self: &Arc<Self>) -> Busy {
        self.busy.fetch_add(1, Ordering::Relaxed);
        Busy(Arc::clone(self))
    }

    /// What one queue pair may have underway now.
    pub(in crate::provider::soft) fn share(&self, mtu: Mtu) -> Flow {
        let busy = self.busy.load(Ordering::Relaxed).max(1);
        let bytes = (TO_PEER / busy).min(OF_ONE);
        Flow::of((bytes / mtu.bytes() as u32).clamp(1, PACKETS))
    }
}

/// A queue pair with something underway.
#[derive(Debug)]
pub(in crate::provider::soft) struct Busy(Arc<PeerLink>);

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.busy.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queue_pairs_share_equally_and_none_starves() {
        let link = Arc::new(PeerLink::default());
        let first = link.enter();
        assert_eq!(link.share(Mtu::Mtu4096), Flow::of(16));
        assert_eq!(link.share(Mtu::Mtu256), Flow::of(64));
        let more: Vec<_> = (0..3).map(|_| link.enter()).collect();
        assert_eq!(link.share(Mtu::Mtu4096), Flow::of(8));
        let many: Vec<_> = (0..1000).map(|_| link.enter()).collect();
        assert_eq!(link.share(Mtu::Mtu4096), Flow::of(1));
        drop((more, many));
        assert_eq!(link.share(Mtu::Mtu4096), Flow::of(16));
        drop(first);
        assert_eq!(link.busy.load(Ordering::Relaxed), 0);
    }
}

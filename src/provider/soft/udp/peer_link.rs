//! The way to a peer, shared by all queue pairs that send there.
//!
//! A peer's socket holds what its kernel gives it, 208 KiB by default, whoever sends. So what is underway to one peer from one
//! device is bounded, and queue pairs with something underway share that equally. Who comes when others still have the larger
//! shares of before waits for these to shrink. Each may always have one packet underway, or what one READ asks for, so none
//! waits for ever; with very many the bound is exceeded, packets may be lost, and are sent again.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::provider::soft::requester::Flow;
use crate::types::Mtu;

/// Bytes underway to a peer. As much as fits: with half of it a receiver has taken in all before the next comes, and both ends
/// sleep in turns.
pub(super) const TO_PEER: u32 = 128 << 10;
/// Packets of one queue pair, however small: each also costs its receiver some hundred bytes.
pub(super) const PACKETS: u32 = 64;

/// See the module.
#[derive(Debug, Default)]
pub(in crate::provider::soft) struct PeerLink {
    /// Queue pairs with something underway.
    busy: AtomicU32,
    /// Bytes that they have underway, or are answers to what they have asked for.
    underway: AtomicU32,
}

impl PeerLink {
    /// One more has something underway, until the result is dropped.
    pub(in crate::provider::soft) fn enter(self: &Arc<Self>) -> Busy {
        self.busy.fetch_add(1, Ordering::Relaxed);
        Busy { link: Arc::clone(self), underway: 0, allowed: TO_PEER }
    }
}

/// A queue pair with something underway.
#[derive(Debug)]
pub(in crate::provider::soft) struct Busy {
    link: Arc<PeerLink>,
    /// Bytes, as last told.
    underway: u32,
    /// Bytes, as last said.
    allowed: u32,
}

impl Busy {
    /// What it may have underway now.
    pub(in crate::provider::soft) fn share(&mut self, mtu: Mtu) -> Flow {
        let mtu = mtu.bytes() as u32;
        let PeerLink { busy, underway } = &*self.link;
        let equal = TO_PEER / busy.load(Ordering::Relaxed).max(1);
        let others = underway.load(Ordering::Relaxed).saturating_sub(self.underway);
        let packets = (equal.min(TO_PEER.saturating_sub(others)) / mtu).clamp(1, PACKETS);
        self.allowed = packets * mtu;
        Flow::of(packets)
    }

    /// So many packets are underway. What is above its share does not count: it was sent when that was larger, and is acknowledged
    /// soon, or lost, and sent again a share at a time.
    pub(in crate::provider::soft) fn tell(&mut self, packets: u32, mtu: Mtu) {
        let now = packets.saturating_mul(mtu.bytes() as u32).min(self.allowed);
        // Wraps around to what it would be by addition and subtraction.
        self.link.underway.fetch_add(now.wrapping_sub(self.underway), Ordering::Relaxed);
        self.underway = now;
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.link.underway.fetch_sub(self.underway, Ordering::Relaxed);
        self.link.busy.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queue_pairs_share_equally_and_none_starves() {
        let link = Arc::new(PeerLink::default());
        let mut first = link.enter();
        assert_eq!(first.share(Mtu::Mtu4096), Flow::of(32));
        assert_eq!(first.share(Mtu::Mtu256), Flow::of(64));
        let more: Vec<_> = (0..3).map(|_| link.enter()).collect();
        assert_eq!(first.share(Mtu::Mtu4096), Flow::of(8));
        let many: Vec<_> = (0..1000).map(|_| link.enter()).collect();
        assert_eq!(first.share(Mtu::Mtu4096), Flow::of(1));
        drop((more, many));
        assert_eq!(first.share(Mtu::Mtu4096), Flow::of(32));
        drop(first);
        assert_eq!(link.busy.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn who_comes_later_waits_for_the_shares_of_the_others_to_shrink() {
        let mtu = Mtu::Mtu4096;
        let link = Arc::new(PeerLink::default());
        let mut first = link.enter();
        assert_eq!(first.share(mtu), Flow::of(32));
        first.tell(32, mtu);
        let mut second = link.enter();
        assert_eq!(second.share(mtu), Flow::of(1), "all there is has been taken");
        second.tell(1, mtu);
        first.tell(20, mtu);
        assert_eq!(second.share(mtu), Flow::of(12));
        first.tell(4, mtu);
        assert_eq!((first.share(mtu), second.share(mtu)), (Flow::of(16), Flow::of(16)), "no more than its equal share");
        // One whose peer is gone counts with its share only.
        first.tell(32, mtu);
        assert_eq!(second.share(mtu), Flow::of(16));
        drop(first);
        assert_eq!(second.share(mtu), Flow::of(32));
        drop(second);
        assert_eq!((link.busy.load(Ordering::Relaxed), link.underway.load(Ordering::Relaxed)), (0, 0));
    }
}

use std::num::NonZeroUsize;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use rdma_provider::contract::{PEER_LINES, STATE_LINES};
use rdma_provider::prefetch;

use crate::engine::{QUEUE_LINES, WorkQueue};
use crate::verbs::Qp;

/// The addresses of the state that each post to a connected queue pair uses.
///
/// They are prefetched and never accessed, so they may be stale. Prefetched together when a post
/// begins, they cost one wait, instead of one for each pointer on the path. Each handle has a copy,
/// because a common object would cost a wait itself. Only the handle that connects the queue pair,
/// and clones made later, know the peer and the slot.
pub(super) struct PostState {
    own: Option<NonZeroUsize>,
    /// The peer's state, or this queue pair's own while the peer is unknown.
    peer: AtomicUsize,
    qp: usize,
    queue: usize,
    /// While at most one operation is in flight; 0 if unknown.
    slot: AtomicUsize,
}

impl PostState {
    pub(super) fn new(qp: &Qp, queue: &Arc<WorkQueue>) -> Self {
        let own = qp.post_state().map_or(0, <*const ()>::addr);
        Self {
            own: NonZeroUsize::new(own),
            peer: AtomicUsize::new(own),
            qp: ptr::from_ref(qp).addr(),
            queue: queue.address().addr(),
            slot: AtomicUsize::new(0),
        }
    }

    pub(super) fn connected(&self, qp: &Qp, queue: &Arc<WorkQueue>) {
        if let Some(peer) = qp.peer_post_state() {
            self.peer.store(peer.addr(), Ordering::Relaxed);
            self.slot.store(queue.next_slot().map_or(0, <*const ()>::addr), Ordering::Relaxed);
        }
    }

    #[inline]
    pub(super) fn prefetch(&self) {
        if let Some(own) = self.own {
            prefetch::<PEER_LINES>(ptr::without_provenance(self.peer.load(Ordering::Relaxed)));
            prefetch::<STATE_LINES>(ptr::without_provenance(own.get()));
            prefetch::<QUEUE_LINES>(ptr::without_provenance(self.queue));
            prefetch::<1>(ptr::without_provenance(self.qp));
            prefetch::<1>(ptr::without_provenance(self.slot.load(Ordering::Relaxed)));
        }
    }
}

impl Clone for PostState {
    fn clone(&self) -> Self {
        let copy = |address: &AtomicUsize| AtomicUsize::new(address.load(Ordering::Relaxed));
        Self { peer: copy(&self.peer), slot: copy(&self.slot), ..*self }
    }
}

//! Prefetching of the state that a post uses.

use std::num::NonZeroUsize;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use rdma_provider::contract::{PEER_LINES, STATE_LINES};
use rdma_provider::prefetch;

use crate::engine::WorkQueue;
use crate::verbs::Qp;

/// The addresses of the state that each post to a connected queue pair uses.
///
/// They are prefetched and never accessed, so they may be stale. Prefetched together when a post
/// begins, they cost one wait, instead of one wait for each pointer on the path.
pub(super) struct PostState {
    /// The provider's state; `None` if there is none to prefetch.
    own: Option<NonZeroUsize>,
    /// The peer's state, or this queue pair's own while the peer is unknown.
    peer: AtomicUsize,
    /// The [`Qp`], which holds the provider's object.
    qp: usize,
}

impl PostState {
    pub(super) fn new(qp: &Qp) -> Self {
        let own = qp.post_state().map_or(0, <*const ()>::addr);
        Self {
            own: NonZeroUsize::new(own),
            peer: AtomicUsize::new(own),
            qp: ptr::from_ref(qp).addr(),
        }
    }

    /// Notes the peer that the queue pair is now connected to.
    pub(super) fn set_peer(&self, qp: &Qp) {
        if let Some(peer) = qp.peer_post_state() {
            self.peer.store(peer.addr(), Ordering::Relaxed);
        }
    }

    /// Prefetches the state that the next post to `queue` uses.
    #[inline(always)]
    pub(super) fn prefetch(&self, queue: &Arc<WorkQueue>) {
        if let Some(own) = self.own {
            prefetch::<PEER_LINES>(ptr::without_provenance(self.peer.load(Ordering::Relaxed)));
            prefetch::<STATE_LINES>(ptr::without_provenance(own.get()));
            queue.prefetch();
            prefetch::<1>(ptr::without_provenance(self.qp));
        }
    }
}

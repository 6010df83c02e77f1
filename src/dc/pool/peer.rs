use std::collections::VecDeque;
use std::fmt;
use std::future::{Ready, ready};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};

use rdma_provider::locks::{Mutex, MutexGuard};
use smallvec::SmallVec;

use super::core::{Core, Member};
use super::pooled::{Entry, PooledOperation, Waiting, Work};
use crate::dc::DcPeer;
use crate::engine::WorkQueue;
use crate::error::{CompletionError, OpError, OpErrorKind, TryError};
use crate::op::{Destination, Poster};

/// A switch costs a connection, so a peer leaves a shared initiator only for one with this many
/// fewer work requests.
const REBALANCE_MARGIN: usize = 8;

pub(super) struct Peer {
    pub(super) core: Arc<Core>,
    pub(super) to: DcPeer,
    pub(super) state: Mutex<PeerState>,
}

#[derive(Default)]
pub(super) struct PeerState {
    pub(super) assignment: Option<usize>,
    pub(super) used: u32,
    pub(super) leases: u32,
    /// Counts assignments. A lease is valid within its epoch.
    epoch: u64,
    /// The position behind the peer's last work on a shared initiator.
    mark: u32,
    generation: u32,
    failed: bool,
    pub(super) queued: bool,
    pub(super) waiting: VecDeque<Arc<dyn Waiting>>,
}

impl PeerState {
    pub(super) fn set_assignment(&mut self, at: usize, members: &[Member]) {
        self.clear_assignment(members);
        (self.assignment, self.used) = (Some(at), 0);
        self.generation = members[at].generation();
    }

    pub(super) fn clear_assignment(&mut self, members: &[Member]) {
        self.failed = self.has_failed(members);
        (self.assignment, self.leases) = (None, 0);
        self.epoch += 1;
    }

    fn has_failed(&self, members: &[Member]) -> bool {
        let initiator_failed =
            |queue: &WorkQueue| queue.failures() != self.generation || !queue.is_open();
        self.failed || self.assignment.is_some_and(|at| initiator_failed(members[at].queue()))
    }

    #[inline]
    pub(super) fn has_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    fn withdraw(&mut self, entry: *const ()) -> Option<Arc<dyn Waiting>> {
        let is_entry = |waiting: &Arc<dyn Waiting>| Arc::as_ptr(waiting).cast::<()>() == entry;
        self.waiting.remove(self.waiting.iter().position(is_entry)?)
    }

    pub(super) fn joins_wait_queue(&mut self) -> bool {
        self.has_waiting() && !std::mem::replace(&mut self.queued, true)
    }

    pub(super) fn mark(&mut self, member: &Member) {
        self.mark = member.queue().mark();
    }
}

pub(super) struct Grant<'a> {
    to: Destination<'a>,
    member: &'a Member,
    own: &'a mut PeerState,
}

struct PostGuard<'a> {
    own: MutexGuard<'a, PeerState>,
    gate: Option<MutexGuard<'a, ()>>,
    peer: &'a Peer,
    member: &'a Member,
}

impl PostGuard<'_> {
    fn grant(&mut self) -> Grant<'_> {
        self.peer.grant(self.member, &mut self.own)
    }
}

impl Drop for PostGuard<'_> {
    fn drop(&mut self) {
        if self.gate.is_some() {
            self.own.mark(self.member);
        }
    }
}

impl Peer {
    #[inline]
    pub(super) fn grant<'a>(&'a self, member: &'a Member, own: &'a mut PeerState) -> Grant<'a> {
        Grant { to: member.initiator.destination(&self.to), member, own }
    }

    fn submit<F, W>(self: &Arc<Self>, for_lease: bool, work: W) -> PooledOperation<F>
    where
        F: Send + 'static,
        W: for<'g> FnOnce(Result<Grant<'g>, OpErrorKind>) -> F + Send + 'static,
    {
        match self.try_enter(for_lease) {
            Some(mut guard) => PooledOperation::posted(work(Ok(guard.grant()))),
            None => self.enqueue(Box::new(work)),
        }
    }

    fn try_enter(self: &Arc<Self>, for_lease: bool) -> Option<PostGuard<'_>> {
        self.enter(true, for_lease).or_else(|| self.acquire(for_lease))
    }

    #[inline]
    fn enter(&self, with_quota: bool, for_lease: bool) -> Option<PostGuard<'_>> {
        let mut own = self.state.lock();
        if own.has_waiting() {
            return None;
        }
        let shared = !self.core.is_exclusive();
        if shared {
            self.rebalance(&mut own);
        }
        let member = &self.core.members[own.assignment?];
        if !member.is_sound() {
            // The gate may be locked for as long as the repair takes.
            return None;
        }
        let gate = if shared { Some(member.gate.lock()) } else { None };
        if !member.is_sound() || with_quota && self.core.must_yield(&own, for_lease) {
            return None;
        }
        own.used = own.used.saturating_add(1);
        self.core.touch(member);
        Some(PostGuard { own, gate, peer: self, member })
    }

    #[cold]
    fn acquire(self: &Arc<Self>, for_lease: bool) -> Option<PostGuard<'_>> {
        let assigned = self.core.assign_now(&mut self.core.state.lock(), self, for_lease);
        // Another task may have reassigned the initiator.
        if assigned { self.enter(false, for_lease) } else { None }
    }

    fn rebalance(&self, own: &mut PeerState) {
        let members = &self.core.members;
        let Some(at) = own.assignment.filter(|_| own.leases == 0) else { return };
        let queue = members[at].queue();
        if !members[at].is_sound() || queue.is_idle() || !queue.has_passed(own.mark) {
            return;
        }
        let others = members.iter().enumerate().filter(|(_, member)| member.is_sound());
        let least = others.map(|(at, member)| (member.queue().load(), at)).min();
        if let Some((load, other)) = least
            && load + REBALANCE_MARGIN < queue.load()
        {
            own.set_assignment(other, members);
            self.core.switches.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[cold]
    fn enqueue<F: Send + 'static>(self: &Arc<Self>, work: Work<F>) -> PooledOperation<F> {
        let entry = Entry::new(work);
        let mut state = self.core.state.lock();
        if state.is_closed() {
            drop(state);
            entry.resolve(Err(OpErrorKind::Closed));
        } else {
            self.state.lock().waiting.push_back(entry.clone());
            self.core.enqueue(&mut state, self);
            self.core.advance(state);
        }
        PooledOperation::queued(entry, self.clone())
    }

    pub(super) fn withdraw(&self, entry: *const ()) {
        let mut own = self.state.lock();
        let abandoned = own.withdraw(entry);
        let was_last = !own.has_waiting() && own.queued;
        drop(own);
        drop(abandoned);
        if was_last {
            self.core.peer_abandoned();
        }
    }

    pub(super) fn watch_completions(&self, context: &mut Context<'_>) {
        self.core.cq().ensure_watched_for(context);
    }
}

/// A peer of a [`DcPool`](super::DcPool). Clones refer to the same peer.
///
/// Operations work like those of [`DcInitiator::to`](super::DcInitiator::to). If the peer has no
/// initiator, an operation waits in a queue, and is posted when the peer gets one, even if the
/// future is not polled.
///
/// Operations are posted in the order of the calls, over all clones. After a failure, operations
/// called before the pool noticed it are flushed, or executed on a repaired initiator in undefined
/// order. Use [`borrow`](Self::borrow) for a sequence that must end with its first failure.
#[derive(Clone)]
pub struct DcPoolPeer {
    peer: Arc<Peer>,
}

impl DcPoolPeer {
    pub(super) fn new(core: Arc<Core>, to: DcPeer) -> Self {
        let peer = Arc::new(Peer { core, to, state: Mutex::new(PeerState::default()) });
        Self { peer }
    }

    /// Returns the target, which initiators outside the pool can also use.
    #[must_use]
    pub fn peer(&self) -> &DcPeer {
        &self.peer.to
    }

    /// Returns true if work of this peer has failed in flight, or if the pool was closed. The
    /// target may have moved, so make another peer from a current address, as a
    /// [`PeerSet`](crate::peers::PeerSet) does.
    #[must_use]
    pub fn has_failed(&self) -> bool {
        let core = &self.peer.core;
        core.state.lock().is_closed() || self.peer.state.lock().has_failed(&core.members)
    }

    /// Returns the number of operations that wait for an initiator.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.peer.state.lock().waiting.len()
    }

    /// Leases an initiator for a burst of operations to this peer, until the lease is dropped.
    ///
    /// Treat the lease like a lock: a task that holds one and awaits another lease, or an operation
    /// to another peer, deadlocks if all initiators are leased. Other operations to this peer use
    /// the leased initiator too, but wait behind earlier calls of `borrow`.
    ///
    /// # Errors
    ///
    /// [`OpErrorKind::Closed`] if the pool is closed, or the error of the repair if no initiator
    /// can be repaired.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves the queue, or returns an initiator that was already assigned.
    pub fn borrow(&self) -> PooledOperation<PendingDcLease> {
        let peer = self.peer.clone();
        self.peer.submit(true, move |grant| {
            let lease = grant.map(|Grant { member, own, .. }| {
                own.leases += 1;
                DcLease {
                    at: own.assignment.unwrap_or(0),
                    epoch: own.epoch,
                    generation: member.generation(),
                    peer,
                }
            });
            PendingDcLease { lease: ready(lease.map_err(|kind| OpError::new(kind, ()))) }
        })
    }
}

impl Poster for &DcPoolPeer {
    type Posted<F> = PooledOperation<F>;

    fn submit<F, W>(self, work: W) -> PooledOperation<F>
    where
        F: Send + 'static,
        W: FnOnce(Destination<'_>) -> F + Send + 'static,
    {
        self.peer.submit(false, move |grant| {
            work(grant.map_or_else(Destination::refused, |grant| grant.to))
        })
    }

    fn submit_inline<F, W>(self, bytes: &[u8], work: W) -> PooledOperation<F>
    where
        F: Send + 'static,
        W: FnOnce(Destination<'_>, &[u8]) -> F + Send + 'static,
    {
        if let Some(mut guard) = self.peer.try_enter(false) {
            return PooledOperation::posted(work(guard.grant().to, bytes));
        }
        let bytes: SmallVec<[u8; 64]> = SmallVec::from_slice(bytes);
        self.submit(move |to| work(to, &bytes))
    }

    fn try_submit<F, B>(
        self,
        held: B,
        work: impl FnOnce(Destination<'_>, B) -> Result<F, TryError<B>>,
    ) -> Result<F, TryError<B>> {
        match self.peer.try_enter(false) {
            Some(mut guard) => work(guard.grant().to, held),
            None => Err(match self.peer.core.refusal() {
                Some(kind) => TryError::Refused(OpError::new(kind, held)),
                None => TryError::Full(held),
            }),
        }
    }
}

impl fmt::Debug for DcPoolPeer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let own = self.peer.state.lock();
        let initiator = own.assignment.map(|at| self.peer.core.members[at].initiator.qpn());
        f.debug_struct("DcPoolPeer")
            .field("target", &self.peer.to.number())
            .field("initiator", &initiator)
            .field("waiting", &own.waiting.len())
            .field("leases", &own.leases)
            .finish_non_exhaustive()
    }
}

/// An initiator of a [`DcPool`](super::DcPool), leased to one peer. Its operations work like those
/// of [`DcInitiator::to`](super::DcInitiator::to), but once any operation on the initiator has
/// failed, all later ones of the lease are flushed
/// ([`WR_FLUSH_ERR`](crate::types::WcStatus::WR_FLUSH_ERR)).
pub struct DcLease {
    peer: Arc<Peer>,
    at: usize,
    epoch: u64,
    generation: u32,
}

impl DcLease {
    fn enter<R>(&self, work: impl FnOnce(Result<Destination<'_>, OpErrorKind>) -> R) -> R {
        let mut own = self.peer.state.lock();
        let member = &self.peer.core.members[self.at];
        let gate = if self.peer.core.is_exclusive() { None } else { Some(member.gate.lock()) };
        if own.epoch != self.epoch || member.queue().failures() != self.generation {
            let flushed = CompletionError::flushed(member.initiator.qpn());
            let open = member.queue().is_open();
            return work(Err(if open {
                OpErrorKind::Completion(flushed)
            } else {
                OpErrorKind::Closed
            }));
        }
        own.used = own.used.saturating_add(1);
        let mut guard = PostGuard { own, gate, peer: &self.peer, member };
        work(Ok(guard.grant().to))
    }
}

impl Poster for &DcLease {
    type Posted<F> = F;

    fn submit<F, W: FnOnce(Destination<'_>) -> F>(self, work: W) -> F {
        self.enter(|to| work(to.unwrap_or_else(Destination::refused)))
    }

    fn submit_inline<F, W: FnOnce(Destination<'_>, &[u8]) -> F>(self, bytes: &[u8], work: W) -> F {
        self.enter(|to| work(to.unwrap_or_else(Destination::refused), bytes))
    }

    fn try_submit<F, B>(
        self,
        held: B,
        work: impl FnOnce(Destination<'_>, B) -> Result<F, TryError<B>>,
    ) -> Result<F, TryError<B>> {
        self.enter(|to| match to {
            Ok(to) => work(to, held),
            Err(kind) => Err(TryError::Refused(OpError::new(kind, held))),
        })
    }
}

impl Drop for DcLease {
    fn drop(&mut self) {
        let mut own = self.peer.state.lock();
        if own.epoch == self.epoch {
            own.leases -= 1;
        }
        let last = own.leases == 0;
        drop(own);
        if last && self.peer.core.queued_peers() > 0 {
            self.peer.core.advance_now();
        }
    }
}

impl fmt::Debug for DcLease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let initiator = self.peer.core.members[self.at].initiator.qpn();
        f.debug_struct("DcLease")
            .field("initiator", &initiator)
            .field("target", &self.peer.to.number())
            .finish_non_exhaustive()
    }
}

/// The future of [`DcPoolPeer::borrow`], which returns a [`DcLease`].
///
/// # Cancel safety
///
/// As for `borrow`.
#[derive(Debug)]
pub struct PendingDcLease {
    lease: Ready<Result<DcLease, OpError<()>>>,
}

impl Future for PendingDcLease {
    type Output = Result<DcLease, OpError<()>>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.lease).poll(context)
    }
}

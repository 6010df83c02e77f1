//! A peer of a pool: its place, its turn, and what it lends.

use std::collections::VecDeque;
use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};

use parking_lot::{Mutex, MutexGuard};
use smallvec::SmallVec;

use super::core::{Core, Member};
use super::pooled::{Entry, Pooled, Waiting, Work};
use crate::dc::{DcPeer, DcSender};
use crate::engine::Deferral;
use crate::error::{CompletionError, OpError, OpErrorKind, TryError};
use crate::op::Destination;
use crate::types::{SendFlags, WcStatus};

/// How much more work an initiator must have than another before a peer that shares it goes over to that: each change costs
/// a connection.
const SLACK: usize = 8;

/// What all handles of a peer share.
pub(super) struct Peer {
    pub(super) core: Arc<Core>,
    pub(super) to: DcPeer,
    pub(super) state: Mutex<PeerState>,
}

#[derive(Default)]
pub(super) struct PeerState {
    /// The initiator that its work goes to.
    pub(super) seat: Option<usize>,
    /// Operations since it has that.
    pub(super) used: u32,
    /// Leases in force.
    pub(super) leases: u32,
    /// Number of its stay: of a lease that is told apart from a later one.
    turn: u64,
    /// Up to where its work was given to an initiator that is shared.
    mark: u32,
    /// It stands in the line of the pool.
    pub(super) lined: bool,
    pub(super) waiting: VecDeque<Arc<dyn Waiting>>,
}

impl PeerState {
    /// Has an initiator from now on.
    pub(super) fn arrive(&mut self, at: usize) {
        (self.seat, self.used, self.leases) = (Some(at), 0, 0);
        self.turn += 1;
    }

    /// Has none any more.
    pub(super) fn leave(&mut self) {
        (self.seat, self.leases) = (None, 0);
        self.turn += 1;
    }

    /// True if it is to be put into the line of the pool now, where it is not yet.
    pub(super) fn joins(&mut self) -> bool {
        !self.waiting.is_empty() && !std::mem::replace(&mut self.lined, true)
    }

    pub(super) fn mark(&mut self, member: &Member) {
        self.mark = member.queue().mark();
    }
}

/// Leave to post to an initiator.
pub(super) struct Grant<'a> {
    pub(super) to: DcSender<'a>,
    member: &'a Member,
    own: &'a mut PeerState,
}

impl<'a> Grant<'a> {
    fn destination(self, flags: SendFlags) -> Destination<'a> {
        DcSender { flags, ..self.to }.destination()
    }
}

/// It is this peer's turn, as long as this lives.
struct Turn<'a> {
    own: MutexGuard<'a, PeerState>,
    gate: Option<MutexGuard<'a, ()>>,
    peer: &'a Peer,
    member: &'a Member,
    /// Dropped last.
    _deferral: Deferral,
}

impl Turn<'_> {
    fn grant(&mut self) -> Grant<'_> {
        self.peer.grant(self.member, &mut self.own)
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        if self.gate.is_some() {
            self.own.mark(self.member);
        }
    }
}

impl Peer {
    #[inline]
    pub(super) fn grant<'a>(&'a self, member: &'a Member, own: &'a mut PeerState) -> Grant<'a> {
        Grant {
            to: DcSender { flags: SendFlags::empty(), ..member.initiator.to(&self.to) },
            member,
            own,
        }
    }

    /// Posts at once if it can, otherwise lines up. Not the same for what `lends` as for operations: see
    /// [`has_had_its_turn`](super::core::Core::has_had_its_turn).
    fn submit<F, W>(self: &Arc<Self>, lends: bool, work: W) -> Pooled<F>
    where
        F: Send + 'static,
        W: for<'g> FnOnce(Result<Grant<'g>, OpErrorKind>) -> F + Send + 'static,
    {
        match self.enter_somehow(lends) {
            Some(mut turn) => Pooled::posted(work(Ok(turn.grant()))),
            None => self.line_up(Box::new(work)),
        }
    }

    fn enter_somehow(self: &Arc<Self>, lends: bool) -> Option<Turn<'_>> {
        self.enter(true, lends).or_else(|| self.take_seat(lends))
    }

    /// The turn of this peer, if it has an initiator.
    #[inline]
    fn enter(&self, with_quota: bool, lends: bool) -> Option<Turn<'_>> {
        let deferral = Deferral::begin();
        let mut own = self.state.lock();
        if !own.waiting.is_empty() {
            return None;
        }
        let shared = !self.core.is_exclusive();
        if shared {
            self.choose(&mut own);
        }
        let member = &self.core.members[own.seat?];
        if !member.is_sound() {
            // Its gate may be closed for as long as it is repaired.
            return None;
        }
        let gate = if shared { Some(member.gate.lock()) } else { None };
        if !member.is_sound() || with_quota && self.core.has_had_its_turn(&own, lends) {
            return None;
        }
        own.used = own.used.saturating_add(1);
        self.core.touch(member);
        Some(Turn { own, gate, peer: self, member, _deferral: deferral })
    }

    /// Its turn, if there is an initiator to be had.
    #[cold]
    fn take_seat(self: &Arc<Self>, lends: bool) -> Option<Turn<'_>> {
        let deferral = Deferral::begin();
        let seated = self.core.seat_now(&mut self.core.state.lock(), self, lends);
        drop(deferral);
        // Somebody else may have been faster.
        if seated { self.enter(false, lends) } else { None }
    }

    /// Goes over to another initiator if its own is busy with work of others.
    fn choose(&self, own: &mut PeerState) {
        let members = &self.core.members;
        let Some(at) = own.seat.filter(|_| own.leases == 0) else { return };
        let queue = members[at].queue();
        if !members[at].is_sound() || queue.is_idle() || !queue.has_passed(own.mark) {
            return;
        }
        let others = members.iter().enumerate().filter(|(_, member)| member.is_sound());
        let least = others.map(|(at, member)| (member.queue().load(), at)).min();
        if let Some((load, other)) = least
            && load + SLACK < queue.load()
        {
            own.arrive(other);
            self.core.switches.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[cold]
    fn line_up<F: Send + 'static>(self: &Arc<Self>, work: Work<F>) -> Pooled<F> {
        let entry = Entry::new(work);
        let deferral = Deferral::begin();
        let mut state = self.core.state.lock();
        if state.is_closed() {
            drop(state);
            entry.decide(Err(OpErrorKind::Closed));
        } else {
            self.state.lock().waiting.push_back(entry.clone());
            self.core.line_up(&mut state, self);
            self.core.advance(state, &deferral);
        }
        Pooled::lined(entry, self.clone())
    }

    /// One that waited has given up.
    pub(super) fn step_out(&self, entry: *const ()) {
        let mut own = self.state.lock();
        let at = own.waiting.iter().position(|waiting| Arc::as_ptr(waiting).cast::<()>() == entry);
        let gone = at.and_then(|at| own.waiting.remove(at));
        let was_last = own.waiting.is_empty() && own.lined;
        drop(own);
        drop(gone);
        if was_last {
            self.core.gave_up();
        }
    }

    /// For a task that waits for a turn of this peer.
    pub(super) fn attend(&self, context: &mut Context<'_>) {
        self.core.cq().attend_for(context);
    }
}

/// A peer of a [`DcPool`](super::DcPool): operations to it, whichever initiator they take. Clones are the same peer.
///
/// Each operation is that of [`DcSender`] with the same name. It is posted by the call if the peer has an initiator or there
/// is one that is idle; otherwise it stands in line, and is posted when its turn comes, whether it is polled or not.
///
/// Operations to one peer are given to the device in the order in which they were called, over all clones; one after the other
/// on the same initiator, they arrive in that order. After one has failed nothing is said of the order of those behind it that
/// were called before its failure was seen: they are flushed, or follow on a repaired initiator. For a sequence that shall end
/// with its first failure, [`borrow`](Self::borrow).
#[derive(Clone)]
pub struct DcPoolPeer {
    peer: Arc<Peer>,
    flags: SendFlags,
}

impl DcPoolPeer {
    pub(super) fn new(core: Arc<Core>, to: DcPeer) -> Self {
        let peer = Arc::new(Peer { core, to, state: Mutex::new(PeerState::default()) });
        Self { peer, flags: SendFlags::empty() }
    }

    /// The target.
    #[must_use]
    pub fn peer(&self) -> &DcPeer {
        &self.peer.to
    }

    /// Operations of this peer that wait for an initiator.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.peer.state.lock().waiting.len()
    }

    /// The same peer; what is posted through this handle waits for all READs and atomics that its initiator has posted before.
    #[must_use]
    pub fn fenced(&self) -> Self {
        Self { peer: self.peer.clone(), flags: self.flags | SendFlags::FENCE }
    }

    /// The same peer; messages sent through this handle raise a solicited event at the receiver.
    #[must_use]
    pub fn solicited(&self) -> Self {
        Self { peer: self.peer.clone(), flags: self.flags | SendFlags::SOLICITED }
    }

    /// Has an initiator for a burst of operations to this peer, which stays with it until the lease is dropped, busy or not.
    ///
    /// Hold it as you would hold a lock: nobody else has that initiator meanwhile, and who waits for an operation to another
    /// peer, or for another lease of this one, while it holds a lease may wait for itself if all initiators are lent. Operations
    /// to this peer that are not called through the lease go on with it, but not past another lease that was asked for before.
    ///
    /// # Errors
    ///
    /// Of the future: [`OpErrorKind::Closed`] if the pool is closed, or why no initiator can be repaired.
    ///
    /// # Cancel safety
    ///
    /// Dropped while it waits, those behind it move up; dropped when the initiator is there already, it goes back.
    pub fn borrow(&self) -> Pooled<PendingDcLease> {
        let (peer, flags) = (self.peer.clone(), self.flags);
        self.peer.submit(true, move |grant| {
            let lease = grant.map(|Grant { member, own, .. }| {
                own.leases += 1;
                DcLease {
                    at: own.seat.unwrap_or(0),
                    turn: own.turn,
                    life: member.life(),
                    peer,
                    flags,
                }
            });
            PendingDcLease::new(lease)
        })
    }

    /// Posts by `work`, now or when the turn of the peer comes.
    pub(in crate::dc) fn submit<F, W>(&self, work: W) -> Pooled<F>
    where
        F: Send + 'static,
        W: for<'g> FnOnce(Destination<'g>) -> F + Send + 'static,
    {
        let flags = self.flags;
        self.peer.submit(false, move |grant| {
            work(grant.map_or_else(Destination::refused, |grant| grant.destination(flags)))
        })
    }

    /// Posts by `work`, as [`submit`](Self::submit); the bytes are copied if they have to wait.
    pub(in crate::dc) fn submit_inline<F, W>(&self, bytes: &[u8], work: W) -> Pooled<F>
    where
        F: Send + 'static,
        W: for<'g> FnOnce(Destination<'g>, &[u8]) -> F + Send + 'static,
    {
        if let Some(mut turn) = self.peer.enter_somehow(false) {
            return Pooled::posted(work(turn.grant().destination(self.flags), bytes));
        }
        let bytes: SmallVec<[u8; 64]> = SmallVec::from_slice(bytes);
        self.submit(move |to| work(to, &bytes))
    }

    /// Posts by `work` if there is an initiator for it now.
    pub(in crate::dc) fn try_submit<F, B>(
        &self,
        held: B,
        work: impl FnOnce(Destination<'_>, B) -> Result<F, TryError<B>>,
    ) -> Result<F, TryError<B>> {
        match self.peer.enter_somehow(false) {
            Some(mut turn) => work(turn.grant().destination(self.flags), held),
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
        let initiator = own.seat.map(|at| self.peer.core.members[at].initiator.qpn());
        f.debug_struct("DcPoolPeer")
            .field("target", &self.peer.to.number())
            .field("initiator", &initiator)
            .field("waiting", &own.waiting.len())
            .field("leases", &own.leases)
            .finish_non_exhaustive()
    }
}

/// An initiator of a [`DcPool`](super::DcPool), lent for a burst of operations to one peer: they are those of a
/// [`DcSender`], posted by the call.
///
/// Once one of them, or another operation to the same peer, has failed with a completion, all that are called through this
/// lease later fail, too, as flushed ([`WR_FLUSH_ERR`](crate::types::WcStatus::WR_FLUSH_ERR)): the initiator is repaired
/// meanwhile, for a new lease.
pub struct DcLease {
    peer: Arc<Peer>,
    flags: SendFlags,
    at: usize,
    turn: u64,
    life: u32,
}

impl DcLease {
    /// The same; what is posted through it from now on waits for all READs and atomics posted before.
    #[must_use]
    pub fn fenced(mut self) -> Self {
        self.flags |= SendFlags::FENCE;
        self
    }

    /// The same; messages sent through it from now on raise a solicited event at the receiver.
    #[must_use]
    pub fn solicited(mut self) -> Self {
        self.flags |= SendFlags::SOLICITED;
        self
    }

    /// Calls `work` with the destination while it is the turn of this lease, or with the reason why the lease has ended.
    fn enter<R>(&self, work: impl FnOnce(Result<Destination<'_>, OpErrorKind>) -> R) -> R {
        let deferral = Deferral::begin();
        let mut own = self.peer.state.lock();
        let member = &self.peer.core.members[self.at];
        let gate = if self.peer.core.is_exclusive() { None } else { Some(member.gate.lock()) };
        if own.turn != self.turn || member.queue().failures() != self.life {
            let flushed = CompletionError {
                status: WcStatus::WR_FLUSH_ERR,
                vendor_error: 0,
                qpn: member.initiator.qpn(),
                lengths: None,
            };
            let open = member.queue().is_open();
            return work(Err(if open {
                OpErrorKind::Completion(flushed)
            } else {
                OpErrorKind::Closed
            }));
        }
        own.used = own.used.saturating_add(1);
        let mut turn = Turn { own, gate, peer: &self.peer, member, _deferral: deferral };
        work(Ok(turn.grant().destination(self.flags)))
    }

    pub(in crate::dc) fn submit<F>(&self, work: impl FnOnce(Destination<'_>) -> F) -> F {
        self.enter(|to| work(to.unwrap_or_else(Destination::refused)))
    }

    pub(in crate::dc) fn submit_inline<F>(
        &self,
        bytes: &[u8],
        work: impl FnOnce(Destination<'_>, &[u8]) -> F,
    ) -> F {
        self.submit(|to| work(to, bytes))
    }

    pub(in crate::dc) fn try_submit<F, B>(
        &self,
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
        if own.turn == self.turn {
            own.leases -= 1;
        }
        let last = own.leases == 0;
        drop(own);
        if last && self.peer.core.is_crowded() {
            self.peer.core.go_on();
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

/// What [`DcPoolPeer::borrow`] waits for; gives the [`DcLease`].
///
/// # Cancel safety
///
/// Dropped with its [`Pooled`], which gives the initiator back if it is there already.
#[derive(Debug)]
pub struct PendingDcLease {
    lease: Option<Result<DcLease, OpErrorKind>>,
}

impl PendingDcLease {
    fn new(lease: Result<DcLease, OpErrorKind>) -> Self {
        Self { lease: Some(lease) }
    }
}

impl Future for PendingDcLease {
    type Output = Result<DcLease, OpError<()>>;

    fn poll(mut self: Pin<&mut Self>, _context: &mut Context<'_>) -> Poll<Self::Output> {
        match self.lease.take() {
            Some(lease) => Poll::Ready(lease.map_err(|kind| OpError::new(kind, ()))),
            None => panic!("a lease was polled after it was there"),
        }
    }
}

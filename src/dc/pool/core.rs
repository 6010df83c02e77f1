//! Who has which initiator: the line, turns, recalls and repairs.
//!
//! ```text
//!  peer wants one ─▶ idle one? ── yes ──▶ it takes that which was idle for longest: a switch
//!                       │ no
//!                       ▼
//!                     line ─▶ those that have had their quota are recalled: what they call waits
//!                       ▲                  │ in flight: nothing more
//!                       └── has more ◀─────┴──▶ first in line takes it
//!
//!  work fails ─▶ initiator taken from its peer ─▶ all flushed ─▶ repaired ─▶ free again, or set aside
//! ```
//!
//! Locks are taken in this order: the state of the pool, the state of a peer (two at once only by who holds the former), the
//! gate of an initiator, those of the queues below. An operation whose peer has an initiator takes only that of its peer.
//! Nobody is woken under them: whoever takes one has begun a [`Deferral`] before.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::task::{Wake, Waker};

use parking_lot::{Mutex, MutexGuard};
use smallvec::SmallVec;

use super::DcPolicy;
use super::peer::{Peer, PeerState};
use crate::dc::DcInitiator;
use crate::engine::{CompletionQueueCore, Deferral, WorkQueue};
use crate::error::{OpErrorKind, SetupError};

/// What all handles of a pool share.
pub(super) struct Core {
    pub(super) members: Box<[Member]>,
    pub(super) policy: DcPolicy,
    pub(super) state: Mutex<State>,
    /// Peers in line.
    crowd: AtomicUsize,
    /// Advances with each switch: initiators note when they were used last.
    tick: AtomicU64,
    pub(super) switches: AtomicU64,
    pub(super) waited: AtomicU64,
    pub(super) repairs: AtomicU64,
    pub(super) failed_repairs: AtomicU64,
    /// Rung when one that was asked for is idle, and when work fails.
    bell: Waker,
    span: tracing::Span,
}

/// An initiator.
pub(super) struct Member {
    pub(super) initiator: DcInitiator,
    /// Failures up to which it was repaired.
    seen: AtomicU32,
    /// Tick of its last use.
    stamp: AtomicU64,
    /// Closed while it is repaired; of use when peers share it, for then it is nobody's to be taken from.
    pub(super) gate: Mutex<()>,
}

impl Member {
    #[inline]
    pub(super) fn queue(&self) -> &Arc<WorkQueue> {
        self.initiator.queue_pair().send_queue()
    }

    /// True if nothing has failed on it since it was repaired.
    #[inline]
    pub(super) fn is_sound(&self) -> bool {
        self.queue().failures() == self.seen.load(Ordering::Relaxed)
    }

    /// The number of its life.
    pub(super) fn life(&self) -> u32 {
        self.seen.load(Ordering::Relaxed)
    }
}

/// Who has what.
#[derive(Default)]
pub(super) struct State {
    seats: Vec<Seat>,
    /// Peers without an initiator that have work for one; some may have given up.
    line: VecDeque<Weak<Peer>>,
    /// Those who have given up since they were looked for.
    gone: usize,
    closed: bool,
}

impl State {
    pub(super) fn is_closed(&self) -> bool {
        self.closed
    }

    /// Why no operation can begin: it is closed, or no initiator is left that works or may yet.
    fn refusal(&self) -> Option<OpErrorKind> {
        let failed = self.seats.iter().map(|seat| match seat.health {
            Health::Failed(kind) => Some(kind),
            _ => None,
        });
        if self.closed {
            Some(OpErrorKind::Closed)
        } else {
            failed.min_by_key(Option::is_some).flatten()
        }
    }
}

/// What is known of an initiator.
struct Seat {
    /// Whose it is, if they do not share.
    owner: Weak<Peer>,
    health: Health,
    /// Its peer has had its quota: what it calls waits until this one was handed on, or nobody is in line any more.
    recalled: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Health {
    Sound,
    /// Work has failed; to be repaired when all of it was flushed.
    Broken,
    Repairing,
    /// Why it could not be repaired.
    Failed(OpErrorKind),
}

/// Rings a pool that may be gone.
struct Bell(Weak<Core>);

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        if let Some(core) = self.0.upgrade() {
            core.go_on();
        }
    }
}

/// Has those in line look again.
struct Rouser(Weak<Core>);

impl Wake for Rouser {
    fn wake(self: Arc<Self>) {
        if let Some(core) = self.0.upgrade() {
            core.rouse();
        }
    }
}

impl Core {
    pub(super) fn new(initiators: Vec<DcInitiator>, policy: DcPolicy) -> Arc<Self> {
        let span = tracing::debug_span!("dc_pool", initiators = initiators.len(), ?policy);
        let seat = |_| Seat { owner: Weak::new(), health: Health::Sound, recalled: false };
        let seats = (0..initiators.len()).map(seat).collect();
        let member = |initiator| Member {
            initiator,
            seen: AtomicU32::new(0),
            stamp: AtomicU64::new(0),
            gate: Mutex::new(()),
        };
        let core = Arc::new_cyclic(|core| Self {
            members: initiators.into_iter().map(member).collect(),
            policy,
            state: Mutex::new(State { seats, ..State::default() }),
            crowd: AtomicUsize::new(0),
            tick: AtomicU64::new(0),
            switches: AtomicU64::new(0),
            waited: AtomicU64::new(0),
            repairs: AtomicU64::new(0),
            failed_repairs: AtomicU64::new(0),
            bell: Arc::new(Bell(core.clone())).into(),
            span,
        });
        let rouser = Waker::from(Arc::new(Rouser(Arc::downgrade(&core))));
        for member in &core.members {
            member.queue().when_failed(&core.bell, 0);
            member.queue().when_roused(&rouser);
        }
        core
    }

    /// A reactor is gone: those who wait find another, or do without.
    #[cold]
    fn rouse(&self) {
        let _deferral = Deferral::begin();
        let state = self.state.lock();
        for peer in
            state.seats.iter().map(|seat| &seat.owner).chain(&state.line).filter_map(Weak::upgrade)
        {
            peer.state.lock().waiting.iter().for_each(|waiting| waiting.rouse());
        }
    }

    pub(super) fn cq(&self) -> &Arc<CompletionQueueCore> {
        self.members[0].queue().cq()
    }

    #[inline]
    fn quota(&self) -> Option<u32> {
        match self.policy {
            DcPolicy::Exclusive { quota } => Some(quota),
            DcPolicy::Shared => None,
        }
    }

    pub(super) fn is_exclusive(&self) -> bool {
        self.quota().is_some()
    }

    /// True if a peer should let others have its initiator, before it begins an operation or another loan (`lends`). What is
    /// lent stays, so that nothing is gained by stopping its operations; but loans upon loans would never end.
    #[inline]
    pub(super) fn has_had_its_turn(&self, own: &PeerState, lends: bool) -> bool {
        self.crowd.load(Ordering::Relaxed) > 0
            && (lends || own.leases == 0)
            && self.quota().is_some_and(|quota| own.used >= quota)
    }

    /// Notes a use of `member`.
    #[inline]
    pub(super) fn touch(&self, member: &Member) {
        let now = self.tick.load(Ordering::Relaxed);
        if member.stamp.load(Ordering::Relaxed) != now {
            member.stamp.store(now, Ordering::Relaxed);
        }
    }

    pub(super) fn is_crowded(&self) -> bool {
        self.crowd.load(Ordering::Relaxed) > 0
    }

    pub(super) fn counted_crowd(&self) -> usize {
        self.crowd.load(Ordering::Relaxed)
    }

    /// Why no operation can begin, if none can.
    pub(super) fn refusal(&self) -> Option<OpErrorKind> {
        self.state.lock().refusal()
    }

    /// Looks at everything again.
    #[cold]
    pub(super) fn go_on(&self) {
        let deferral = Deferral::begin();
        self.advance(self.state.lock(), &deferral);
    }

    /// A peer in line has nobody waiting any more. They leave the line by halves: behind one who waits for long there may
    /// come any number who do not.
    #[cold]
    pub(super) fn gave_up(&self) {
        let deferral = Deferral::begin();
        let mut state = self.state.lock();
        state.gone += 1;
        if state.gone * 2 > state.line.len() {
            state.gone = 0;
            state.line.retain(|peer| {
                peer.upgrade().is_some_and(|peer| {
                    let mut own = peer.state.lock();
                    own.lined = !own.waiting.is_empty();
                    own.lined
                })
            });
        }
        self.advance(state, &deferral);
    }

    /// Gives `peer`, which has nobody waiting, an initiator if that can be done at once; true if it has one now.
    pub(super) fn seat_now(&self, state: &mut State, peer: &Arc<Peer>, lends: bool) -> bool {
        let mut own = peer.state.lock();
        if state.closed || !own.waiting.is_empty() {
            return false;
        }
        if let Some(at) = own.seat {
            let seat = &state.seats[at];
            if !self.members[at].is_sound() || seat.recalled {
                return false;
            }
            // As many are recalled as are waited for: more would stop for nothing. Those may have work that does not end, so
            // that is for one more quota.
            let recalled = state.seats.iter().filter(|seat| seat.recalled).count();
            let goes_on = || {
                recalled >= state.line.len()
                    && self.quota().is_none_or(|quota| own.used / 2 < quota)
            };
            return !self.has_had_its_turn(&own, lends) || goes_on();
        }
        if !state.line.is_empty() {
            return false;
        }
        let Some(at) = self.pick(state) else { return false };
        self.take(state, at, peer, &mut own);
        true
    }

    /// Lets `peer`, which has somebody waiting, wait for its turn.
    pub(super) fn line_up(&self, state: &mut State, peer: &Arc<Peer>) {
        let mut own = peer.state.lock();
        for seat in &mut state.seats {
            // One more try for each that asks.
            if matches!(seat.health, Health::Failed(_)) {
                seat.health = Health::Broken;
            }
        }
        match own.seat {
            Some(at) if self.is_exclusive() => state.seats[at].recalled = true,
            seat => {
                if seat.is_some() {
                    own.leave();
                }
                if own.joins() {
                    state.line.push_back(Arc::downgrade(peer));
                }
            }
        }
        self.waited.fetch_add(1, Ordering::Relaxed);
    }

    /// Does all that can be done now: initiators to those in line, turns that go on, repairs; and sees to it that the bell
    /// rings when there is more to do.
    pub(super) fn advance<'a>(&'a self, mut state: MutexGuard<'a, State>, _deferral: &Deferral) {
        let _entered = self.span.enter();
        loop {
            self.notice(&mut state);
            while self.serve_next(&mut state) {}
            if state.line.is_empty() {
                self.resume(&mut state);
            }
            self.crowd.store(state.line.len(), Ordering::Relaxed);
            let broken = self.take_broken(&mut state);
            if !broken.is_empty() {
                drop(state);
                let results: SmallVec<[_; 8]> =
                    broken.iter().map(|&at| (at, self.repair(at))).collect();
                state = self.state.lock();
                for (at, health) in results {
                    state.seats[at].health = health;
                }
            } else if state.line.is_empty() || !self.watch(&state) {
                break;
            }
        }
        if let Some(kind) = state.refusal() {
            self.fail_all(&mut state, kind);
        }
    }

    /// Takes initiators on which work has failed away from their peers.
    fn notice(&self, state: &mut State) {
        for at in 0..self.members.len() {
            let member = &self.members[at];
            if !matches!(state.seats[at].health, Health::Sound | Health::Broken) {
                continue;
            }
            let health = if !member.queue().is_open() {
                // What it has in flight may never end.
                Health::Failed(self.kind_of(SetupError::Closed))
            } else if state.seats[at].health == Health::Sound && !member.is_sound() {
                Health::Broken
            } else {
                continue;
            };
            let seat = &mut state.seats[at];
            (seat.health, seat.recalled) = (health, false);
            if let Some(owner) = std::mem::take(&mut seat.owner).upgrade() {
                let mut own = owner.state.lock();
                own.leave();
                if own.joins() {
                    state.line.push_back(Arc::downgrade(&owner));
                }
            }
        }
    }

    /// Gives an initiator to the first in line, if there is one and somebody waits; true if so.
    fn serve_next(&self, state: &mut State) -> bool {
        let peer = loop {
            let Some(first) = state.line.front() else { return false };
            if let Some(peer) = first.upgrade() {
                let mut own = peer.state.lock();
                if !own.waiting.is_empty() {
                    drop(own);
                    break peer;
                }
                own.lined = false;
            }
            state.line.pop_front();
        };
        let Some(at) = self.pick(state) else { return false };
        state.line.pop_front();
        let mut own = peer.state.lock();
        own.lined = false;
        self.take(state, at, &peer, &mut own);
        self.post_waiting(state, at, &peer, &mut own);
        true
    }

    /// An initiator to be taken: of those that are nobody's or idle, the one that was used last the longest ago; if they are
    /// shared, the one with the least work.
    fn pick(&self, state: &mut State) -> Option<usize> {
        let sound =
            |&at: &usize| state.seats[at].health == Health::Sound && self.members[at].is_sound();
        let mut order: SmallVec<[usize; 32]> = (0..self.members.len()).filter(sound).collect();
        if !self.is_exclusive() {
            return order.into_iter().min_by_key(|&at| self.members[at].queue().load());
        }
        order.sort_by_key(|&at| self.members[at].stamp.load(Ordering::Relaxed));
        if let Some(&at) = order.iter().find(|&&at| self.vacate(state, at)) {
            return Some(at);
        }
        // Some may be idle but for completions that nobody has looked at.
        self.cq().drain();
        order.into_iter().find(|&at| self.vacate(state, at))
    }

    /// Takes an idle initiator from whoever has it; false if it is not idle, or lent.
    fn vacate(&self, state: &mut State, at: usize) -> bool {
        let (seat, member) = (&mut state.seats[at], &self.members[at]);
        // In this order: what made it idle may have been a failure, which was counted before.
        let is_free = || member.queue().is_idle() && member.is_sound();
        let Some(owner) = seat.owner.upgrade() else { return is_free() };
        let mut own = owner.state.lock();
        if own.leases > 0 || !is_free() {
            return false;
        }
        own.leave();
        (seat.owner, seat.recalled) = (Weak::new(), false);
        if own.joins() {
            state.line.push_back(Arc::downgrade(&owner));
        }
        true
    }

    fn take(&self, state: &mut State, at: usize, peer: &Arc<Peer>, own: &mut PeerState) {
        own.arrive(at);
        let (seat, member) = (&mut state.seats[at], &self.members[at]);
        if self.is_exclusive() {
            seat.owner = Arc::downgrade(peer);
        }
        self.tick.fetch_add(1, Ordering::Relaxed);
        self.touch(member);
        self.switches.fetch_add(1, Ordering::Relaxed);
        tracing::trace!(initiator = %member.initiator.qpn(), peer = %peer.to.number(), "taken");
    }

    /// Posts what waits, as far as the quota goes while others are in line.
    fn post_waiting(&self, state: &mut State, at: usize, peer: &Peer, own: &mut PeerState) {
        let member = &self.members[at];
        let _gate = member.gate.lock();
        let quota = if state.line.is_empty() { None } else { self.quota() };
        while quota.is_none_or(|quota| own.leases > 0 || own.used < quota)
            && let Some(next) = own.waiting.pop_front()
        {
            own.used = own.used.saturating_add(1);
            next.decide(Ok(peer.grant(member, own)));
        }
        if !self.is_exclusive() {
            own.mark(member);
        }
        state.seats[at].recalled = !own.waiting.is_empty();
    }

    /// Nobody is in line: those that were to let others have their initiators go on.
    fn resume(&self, state: &mut State) {
        for at in 0..self.members.len() {
            if std::mem::take(&mut state.seats[at].recalled)
                && let Some(owner) = state.seats[at].owner.upgrade()
            {
                let mut own = owner.state.lock();
                own.used = 0;
                self.post_waiting(state, at, &owner, &mut own);
            }
        }
    }

    /// Those that are to be repaired and have nothing in flight any more; of the others the bell tells.
    fn take_broken(&self, state: &mut State) -> SmallVec<[usize; 8]> {
        let mut broken = SmallVec::new();
        for (at, seat) in state.seats.iter_mut().enumerate() {
            if seat.health == Health::Broken && self.members[at].queue().when_idle(&self.bell) {
                seat.health = Health::Repairing;
                broken.push(at);
            }
        }
        broken
    }

    /// Without the lock of the pool: those that have an initiator go on meanwhile.
    fn repair(&self, at: usize) -> Health {
        let member = &self.members[at];
        let _gate = member.gate.lock();
        // In whatever state it says that it is: work has failed, so it will be in the error state, if it is not yet.
        if let Err(error) = member.initiator.reset() {
            let kind = self.kind_of(error);
            self.failed_repairs.fetch_add(1, Ordering::Relaxed);
            tracing::warn!(initiator = %member.initiator.qpn(), error = %kind, "not repaired");
            return Health::Failed(kind);
        }
        self.repairs.fetch_add(1, Ordering::Relaxed);
        tracing::debug!(initiator = %member.initiator.qpn(), "repaired");
        let failures = member.queue().failures();
        member.seen.store(failures, Ordering::Relaxed);
        member.queue().when_failed(&self.bell, failures);
        Health::Sound
    }

    fn kind_of(&self, error: SetupError) -> OpErrorKind {
        match (self.cq().failure(), error) {
            (Some(error), _) => OpErrorKind::CompletionQueue(error),
            (None, SetupError::Verb(error)) => OpErrorKind::Post(error),
            (None, _) => OpErrorKind::Closed,
        }
    }

    /// Has the bell rung when an initiator is idle that somebody waits for; true if one is already.
    fn watch(&self, state: &State) -> bool {
        let idle = |(seat, member): (&Seat, &Member)| {
            if seat.health != Health::Sound || !member.is_sound() {
                return false;
            }
            let Some(owner) = seat.owner.upgrade() else {
                return member.queue().when_idle(&self.bell);
            };
            // Under the lock of who could give it work. When a loan ends it is looked at again.
            let own = owner.state.lock();
            own.leases == 0 && member.queue().when_idle(&self.bell)
        };
        state.seats.iter().zip(&self.members).any(idle)
    }

    /// Ends all that waits.
    fn fail_all(&self, state: &mut State, kind: OpErrorKind) {
        let owners = state.seats.iter().map(|seat| seat.owner.clone());
        for peer in
            owners.chain(state.line.drain(..)).collect::<Vec<_>>().iter().filter_map(Weak::upgrade)
        {
            let mut own = peer.state.lock();
            own.lined = false;
            for waiting in std::mem::take(&mut own.waiting) {
                waiting.decide(Err(kind));
            }
        }
        self.crowd.store(0, Ordering::Relaxed);
    }

    /// No more operations begin, those that wait fail, and the initiators end.
    pub(super) fn close(&self) {
        let deferral = Deferral::begin();
        let mut state = self.state.lock();
        state.closed = true;
        self.fail_all(&mut state, OpErrorKind::Closed);
        drop(state);
        drop(deferral);
        for member in &self.members {
            member.initiator.end();
        }
    }
}

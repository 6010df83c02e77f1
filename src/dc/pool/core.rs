//! Assignment of initiators to peers: wait queue, quotas, recalls and repairs.
//!
//! ```text
//!  peer needs one ─▶ idle one? ── yes ──▶ takes the least recently used one: a switch
//!                       │ no
//!                       ▼
//!                  wait queue ─▶ initiators of peers beyond their quota are recalled:
//!                       ▲        new operations of these peers wait
//!                       │                  │ nothing in flight
//!                       └── has more ◀─────┴──▶ first queued peer takes it
//!
//!  work fails ─▶ taken from its peer ─▶ all flushed ─▶ repaired ─▶ idle, or set aside
//! ```
//!
//! Lock order: pool state, peer state (two at a time only while the pool state is locked), gate of
//! an initiator, queues of the engine. An operation whose peer has an initiator locks only the
//! peer. Wakers are called after the last lock is released.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::task::{Wake, Waker};

use rdma_provider::locks::{Mutex, MutexGuard};
use smallvec::SmallVec;

use super::DcPolicy;
use super::peer::{Peer, PeerState};
use crate::dc::DcInitiator;
use crate::engine::{Drainer, WorkQueue};
use crate::error::{OpErrorKind, SetupError};

pub(super) struct Core {
    pub(super) members: Box<[Member]>,
    pub(super) policy: DcPolicy,
    pub(super) state: Mutex<State>,
    queued_peers: AtomicUsize,
    tick: AtomicU64,
    pub(super) switches: AtomicU64,
    pub(super) waited: AtomicU64,
    pub(super) repairs: AtomicU64,
    pub(super) failed_repairs: AtomicU64,
    /// Called when work fails, or when an awaited initiator is idle.
    advance_waker: Waker,
}

pub(super) struct Member {
    pub(super) initiator: DcInitiator,
    repaired_failures: AtomicU32,
    last_used: AtomicU64,
    /// Locked during repair, and by posts to a shared initiator, which no peer's lock protects.
    pub(super) gate: Mutex<()>,
}

impl Member {
    #[inline]
    pub(super) fn queue(&self) -> &Arc<WorkQueue> {
        self.initiator.queue_pair().send_queue()
    }

    #[inline]
    pub(super) fn is_sound(&self) -> bool {
        self.queue().failures() == self.repaired_failures.load(Ordering::Relaxed)
    }

    pub(super) fn generation(&self) -> u32 {
        self.repaired_failures.load(Ordering::Relaxed)
    }
}

#[derive(Default)]
pub(super) struct State {
    assignments: Vec<Assignment>,
    /// May contain peers whose waiting operations were all dropped.
    wait_queue: VecDeque<Weak<Peer>>,
    abandoned: usize,
    closed: bool,
}

impl State {
    pub(super) fn is_closed(&self) -> bool {
        self.closed
    }

    fn peers(&self) -> impl Iterator<Item = Arc<Peer>> {
        let owners = self.assignments.iter().map(|assignment| &assignment.owner);
        owners.chain(&self.wait_queue).filter_map(Weak::upgrade)
    }

    fn refusal(&self) -> Option<OpErrorKind> {
        let failed = self.assignments.iter().map(|assignment| match assignment.health {
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

struct Assignment {
    owner: Weak<Peer>,
    health: Health,
    /// The peer has used its quota. Its new operations wait until the initiator is reassigned or
    /// the wait queue is empty.
    recalled: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Health {
    Sound,
    /// To be repaired when all work is flushed.
    Broken,
    Repairing,
    Failed(OpErrorKind),
}

struct PoolWaker {
    core: Weak<Core>,
    action: fn(&Core),
}

impl Wake for PoolWaker {
    fn wake(self: Arc<Self>) {
        if let Some(core) = self.core.upgrade() {
            (self.action)(&core);
        }
    }
}

impl Core {
    pub(super) fn new(initiators: Vec<DcInitiator>, policy: DcPolicy) -> Arc<Self> {
        rdma_provider::debug!(initiators = initiators.len(), ?policy, "created DC pool");
        let assignment =
            |_| Assignment { owner: Weak::new(), health: Health::Sound, recalled: false };
        let assignments = (0..initiators.len()).map(assignment).collect();
        let member = |initiator| Member {
            initiator,
            repaired_failures: AtomicU32::new(0),
            last_used: AtomicU64::new(0),
            gate: Mutex::new(()),
        };
        let waker = |core: &Weak<Self>, action| {
            Waker::from(Arc::new(PoolWaker { core: core.clone(), action }))
        };
        let core = Arc::new_cyclic(|core| Self {
            members: initiators.into_iter().map(member).collect(),
            policy,
            state: Mutex::new(State { assignments, ..State::default() }),
            queued_peers: AtomicUsize::new(0),
            tick: AtomicU64::new(0),
            switches: AtomicU64::new(0),
            waited: AtomicU64::new(0),
            repairs: AtomicU64::new(0),
            failed_repairs: AtomicU64::new(0),
            advance_waker: waker(core, Self::advance_now),
        });
        let repoll_waker = waker(&Arc::downgrade(&core), Self::wake_tasks);
        for member in &core.members {
            member.queue().when_failed(&core.advance_waker, 0);
            member.queue().on_wake_to_repoll(&repoll_waker);
        }
        core
    }

    #[cold]
    fn wake_tasks(&self) {
        let state = self.state.lock();
        for peer in state.peers() {
            peer.state.lock().waiting.iter().for_each(|waiting| waiting.wake_task());
        }
    }

    pub(super) fn cq(&self) -> &Arc<Drainer> {
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

    /// A peer yields its initiator before another operation or lease (`for_lease`).
    #[inline]
    pub(super) fn must_yield(&self, own: &PeerState, for_lease: bool) -> bool {
        // Operations under a lease do not yield, because the initiator would stay leased. Further
        // leases must yield, or leases that overlap could keep the initiator for ever.
        self.queued_peers() > 0
            && (for_lease || own.leases == 0)
            && self.quota().is_some_and(|quota| own.used >= quota)
    }

    #[inline]
    pub(super) fn touch(&self, member: &Member) {
        let now = self.tick.load(Ordering::Relaxed);
        if member.last_used.load(Ordering::Relaxed) != now {
            member.last_used.store(now, Ordering::Relaxed);
        }
    }

    pub(super) fn queued_peers(&self) -> usize {
        self.queued_peers.load(Ordering::Relaxed)
    }

    pub(super) fn refusal(&self) -> Option<OpErrorKind> {
        self.state.lock().refusal()
    }

    #[cold]
    pub(super) fn advance_now(&self) {
        self.advance(self.state.lock());
    }

    /// Compacts the wait queue when half of its peers have no waiting operation. Otherwise any
    /// number of them could collect behind a peer that waits for long.
    #[cold]
    pub(super) fn peer_abandoned(&self) {
        let mut state = self.state.lock();
        state.abandoned += 1;
        if state.abandoned * 2 > state.wait_queue.len() {
            state.abandoned = 0;
            state.wait_queue.retain(|peer| {
                peer.upgrade().is_some_and(|peer| {
                    let mut own = peer.state.lock();
                    own.queued = own.has_waiting();
                    own.queued
                })
            });
        }
        self.advance(state);
    }

    pub(super) fn assign_now(&self, state: &mut State, peer: &Arc<Peer>, for_lease: bool) -> bool {
        let mut own = peer.state.lock();
        if state.closed || own.has_waiting() {
            return false;
        }
        if let Some(at) = own.assignment {
            let assignment = &state.assignments[at];
            if !self.members[at].is_sound() || assignment.recalled {
                return false;
            }
            // Once as many initiators are recalled as peers wait, recalling more would only stop
            // work. But recalled initiators may never become idle, so a peer continues only up to
            // twice its quota.
            let recalled =
                state.assignments.iter().filter(|assignment| assignment.recalled).count();
            let goes_on = || {
                recalled >= state.wait_queue.len()
                    && self.quota().is_none_or(|quota| own.used / 2 < quota)
            };
            return !self.must_yield(&own, for_lease) || goes_on();
        }
        if !state.wait_queue.is_empty() {
            return false;
        }
        let Some(at) = self.pick(state) else { return false };
        self.assign(state, at, peer, &mut own);
        true
    }

    pub(super) fn enqueue(&self, state: &mut State, peer: &Arc<Peer>) {
        let mut own = peer.state.lock();
        for assignment in &mut state.assignments {
            // Each new waiter allows one more repair.
            if matches!(assignment.health, Health::Failed(_)) {
                assignment.health = Health::Broken;
            }
        }
        match own.assignment {
            Some(at) if self.is_exclusive() => state.assignments[at].recalled = true,
            _ => self.requeue(&mut state.wait_queue, peer, &mut own),
        }
        self.waited.fetch_add(1, Ordering::Relaxed);
    }

    /// Also queues the peer if it has waiting work.
    fn requeue(
        &self,
        wait_queue: &mut VecDeque<Weak<Peer>>,
        peer: &Arc<Peer>,
        own: &mut PeerState,
    ) {
        own.clear_assignment(&self.members);
        if own.joins_wait_queue() {
            wait_queue.push_back(Arc::downgrade(peer));
        }
    }

    /// Makes all progress that is possible now, and arms wakers for the rest.
    pub(super) fn advance<'a>(&'a self, mut state: MutexGuard<'a, State>) {
        loop {
            self.detect_failures(&mut state);
            while self.serve_next(&mut state) {}
            if state.wait_queue.is_empty() {
                self.resume_recalled(&mut state);
            }
            self.queued_peers.store(state.wait_queue.len(), Ordering::Relaxed);
            let broken = self.take_broken(&mut state);
            if !broken.is_empty() {
                drop(state);
                let results: SmallVec<[_; 8]> =
                    broken.iter().map(|&at| (at, self.repair(at))).collect();
                state = self.state.lock();
                for (at, health) in results {
                    state.assignments[at].health = health;
                }
            } else if state.wait_queue.is_empty() || !self.arm_idle_wakers(&state) {
                break;
            }
        }
        if let Some(kind) = state.refusal() {
            self.fail_all(&mut state, kind);
        }
    }

    fn detect_failures(&self, state: &mut State) {
        for at in 0..self.members.len() {
            let member = &self.members[at];
            if !matches!(state.assignments[at].health, Health::Sound | Health::Broken) {
                continue;
            }
            let health = if !member.queue().is_open() {
                // Not `Broken`, because its work in flight may never complete.
                Health::Failed(self.kind_of(SetupError::Closed))
            } else if state.assignments[at].health == Health::Sound && !member.is_sound() {
                Health::Broken
            } else {
                continue;
            };
            let assignment = &mut state.assignments[at];
            (assignment.health, assignment.recalled) = (health, false);
            if let Some(owner) = std::mem::take(&mut assignment.owner).upgrade() {
                self.requeue(&mut state.wait_queue, &owner, &mut owner.state.lock());
            }
        }
    }

    fn serve_next(&self, state: &mut State) -> bool {
        let peer = loop {
            let Some(first) = state.wait_queue.front() else { return false };
            if let Some(peer) = first.upgrade() {
                let mut own = peer.state.lock();
                if own.has_waiting() {
                    drop(own);
                    break peer;
                }
                own.queued = false;
            }
            state.wait_queue.pop_front();
        };
        let Some(at) = self.pick(state) else { return false };
        state.wait_queue.pop_front();
        let mut own = peer.state.lock();
        own.queued = false;
        self.assign(state, at, &peer, &mut own);
        self.post_waiting(state, at, &peer, &mut own);
        true
    }

    /// Returns the least recently used of the idle initiators, or of shared ones that with the
    /// least work.
    fn pick(&self, state: &mut State) -> Option<usize> {
        let sound = |&at: &usize| {
            state.assignments[at].health == Health::Sound && self.members[at].is_sound()
        };
        let mut order: SmallVec<[usize; 32]> = (0..self.members.len()).filter(sound).collect();
        if !self.is_exclusive() {
            return order.into_iter().min_by_key(|&at| self.members[at].queue().load());
        }
        order.sort_by_key(|&at| self.members[at].last_used.load(Ordering::Relaxed));
        if let Some(&at) = order.iter().find(|&&at| self.reclaim(state, at)) {
            return Some(at);
        }
        // Some may be idle except for unpolled completions.
        self.cq().drain();
        order.into_iter().find(|&at| self.reclaim(state, at))
    }

    fn reclaim(&self, state: &mut State, at: usize) -> bool {
        let (assignment, member) = (&mut state.assignments[at], &self.members[at]);
        // Idle is checked first, because a failure is counted before it makes the queue idle.
        let is_free = || member.queue().is_idle() && member.is_sound();
        let Some(owner) = assignment.owner.upgrade() else { return is_free() };
        let mut own = owner.state.lock();
        if own.leases > 0 || !is_free() {
            return false;
        }
        (assignment.owner, assignment.recalled) = (Weak::new(), false);
        self.requeue(&mut state.wait_queue, &owner, &mut own);
        true
    }

    fn assign(&self, state: &mut State, at: usize, peer: &Arc<Peer>, own: &mut PeerState) {
        let (assignment, member) = (&mut state.assignments[at], &self.members[at]);
        own.set_assignment(at, &self.members);
        if self.is_exclusive() {
            assignment.owner = Arc::downgrade(peer);
        }
        self.tick.fetch_add(1, Ordering::Relaxed);
        self.touch(member);
        self.switches.fetch_add(1, Ordering::Relaxed);
        rdma_provider::trace!(
            initiator = %member.initiator.qpn(),
            peer = %peer.to.number(),
            "assigned DC initiator"
        );
    }

    fn post_waiting(&self, state: &mut State, at: usize, peer: &Peer, own: &mut PeerState) {
        let member = &self.members[at];
        let _gate = member.gate.lock();
        let quota = if state.wait_queue.is_empty() { None } else { self.quota() };
        while quota.is_none_or(|quota| own.leases > 0 || own.used < quota)
            && let Some(next) = own.waiting.pop_front()
        {
            own.used = own.used.saturating_add(1);
            next.resolve(Ok(peer.grant(member, own)));
        }
        if !self.is_exclusive() {
            own.mark(member);
        }
        state.assignments[at].recalled = own.has_waiting();
    }

    fn resume_recalled(&self, state: &mut State) {
        for at in 0..self.members.len() {
            if std::mem::take(&mut state.assignments[at].recalled)
                && let Some(owner) = state.assignments[at].owner.upgrade()
            {
                let mut own = owner.state.lock();
                own.used = 0;
                self.post_waiting(state, at, &owner, &mut own);
            }
        }
    }

    fn take_broken(&self, state: &mut State) -> SmallVec<[usize; 8]> {
        let mut broken = SmallVec::new();
        for (at, assignment) in state.assignments.iter_mut().enumerate() {
            if assignment.health == Health::Broken
                && self.members[at].queue().when_idle(&self.advance_waker)
            {
                assignment.health = Health::Repairing;
                broken.push(at);
            }
        }
        broken
    }

    /// Called without a lock of the pool, so that peers with other initiators continue.
    fn repair(&self, at: usize) -> Health {
        let member = &self.members[at];
        let _gate = member.gate.lock();
        // Not only in the error state, which may follow the reported failure.
        if let Err(error) = member.initiator.reset() {
            let kind = self.kind_of(error);
            self.failed_repairs.fetch_add(1, Ordering::Relaxed);
            rdma_provider::warn!(
                initiator = %member.initiator.qpn(),
                error = %kind,
                "failed to repair DC initiator; setting it aside"
            );
            return Health::Failed(kind);
        }
        self.repairs.fetch_add(1, Ordering::Relaxed);
        rdma_provider::debug!(initiator = %member.initiator.qpn(), "repaired DC initiator");
        let failures = member.queue().failures();
        member.repaired_failures.store(failures, Ordering::Relaxed);
        member.queue().when_failed(&self.advance_waker, failures);
        Health::Sound
    }

    fn kind_of(&self, error: SetupError) -> OpErrorKind {
        match (self.cq().failure(), error) {
            (Some(error), _) => OpErrorKind::CompletionQueue(error),
            (None, SetupError::Verb(error)) => OpErrorKind::Post(error),
            (None, _) => OpErrorKind::Closed,
        }
    }

    fn arm_idle_wakers(&self, state: &State) -> bool {
        let idle = |(assignment, member): (&Assignment, &Member)| {
            if assignment.health != Health::Sound || !member.is_sound() {
                return false;
            }
            let Some(owner) = assignment.owner.upgrade() else {
                return member.queue().when_idle(&self.advance_waker);
            };
            // Locked, because the peer could post work. The end of a lease calls `advance`.
            let own = owner.state.lock();
            own.leases == 0 && member.queue().when_idle(&self.advance_waker)
        };
        state.assignments.iter().zip(&self.members).any(idle)
    }

    fn fail_all(&self, state: &mut State, kind: OpErrorKind) {
        for peer in state.peers() {
            let mut own = peer.state.lock();
            own.queued = false;
            while let Some(waiting) = own.waiting.pop_front() {
                waiting.resolve(Err(kind));
            }
        }
        state.wait_queue.clear();
        self.queued_peers.store(0, Ordering::Relaxed);
    }

    pub(super) fn close(&self) {
        let mut state = self.state.lock();
        state.closed = true;
        self.fail_all(&mut state, OpErrorKind::Closed);
        drop(state);
        for member in &self.members {
            member.initiator.queue_pair().shut_down();
        }
    }
}

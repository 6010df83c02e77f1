//! The state machine of one work request in flight, from post to result; [`Phase`] draws it. Three
//! parties take part, each with exclusive rights:
//!
//! - the poster claims the slot, under the lock of its work queue;
//! - the drainer finishes it, under the lock of the completion queue, or of the work queue if the
//!   work request was never posted;
//! - the future of the operation registers a waker, takes the result or detaches.
//!
//! During a generation the slot references its work queue `Q` on behalf of the operation, which
//! only has a pointer to the slot: a [`Claim`](super::claim::Claim). The party that frees the slot
//! takes the reference out first and drops it last.

#![allow(unsafe_code)]

mod parts;
mod phase;
#[cfg(all(test, not(loom)))]
mod tests;

use std::any::Any;
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::task::Waker;

pub(super) use self::parts::{FailedParts, MAX_PARTS};
use self::phase::Phase;
use super::work_request_id::GENERATION;
use crate::error::OpErrorKind;
use crate::sync::{AtomicPtr, AtomicU16, AtomicU32, AtomicU64, Ordering, UnsafeCell};
use crate::types::{WorkCompletion, WrId};

const FREE: u16 = Phase::Free as u16;
const SUBMITTED: u16 = Phase::Submitted as u16;
const WAITING: u16 = Phase::Waiting as u16;
const WAKING: u16 = Phase::Waking as u16;
const COMPLETE: u16 = Phase::Complete as u16;
const DETACHED: u16 = Phase::Detached as u16;
const PHASE: u16 = 15;

// Flags beside the phase.

/// A `tracing` subscriber saw the post and is to see the completion.
const TRACED: u16 = 16;
/// The operation has spun.
const SPUN: u16 = 32;
/// A thread polls the completion queue, so futures do not contend for its lock.
const POLLED: u16 = 64;
/// A part of the batch has failed.
const FAILED: u16 = 128;
const SOLICITED: u16 = 256;
/// The work queue may have a completion waker.
const NOTIFIES: u16 = 512;
/// The completion queue has timestamps, which only its dispatch records: the operation must not
/// take its own completion.
const STAMPED: u16 = 1024;

pub(crate) type Outcome = Result<WorkCompletion, OpErrorKind>;

pub(crate) type DetachedBuffers = Box<dyn Any + Send>;

/// The drainer's remaining work after it finished a slot.
#[derive(Debug)]
pub(super) enum Finished {
    Stale,
    /// No waker was registered; the operation finds the result at its next poll.
    WithoutWaker,
    Wake(Waker),
    /// The operation was abandoned; the caller must [free](Slot::free) the slot.
    Detached {
        held: Option<DetachedBuffers>,
        /// Dropped without any lock held.
        waker: Option<Waker>,
    },
}

pub(super) type Discarded = [Option<Waker>; 2];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Registered {
    /// The result is available; the waker was not kept.
    Complete,
    /// The result arrived while an earlier waker was being replaced; the slot no longer waits.
    Overtaken,
    /// The result is about to arrive and the drainer may wake an earlier waker: the operation must
    /// poll again.
    Imminent,
    Fresh,
    /// The waker was kept in place of an earlier one.
    Again,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct WithoutWaker(u16);

impl WithoutWaker {
    #[inline]
    pub(super) fn notifies(self) -> bool {
        self.0 & NOTIFIES != 0
    }
}

#[derive(Debug)]
pub(super) enum Detach {
    /// The result is available; the buffers are returned, and the caller must release the slot.
    Complete(Option<DetachedBuffers>),
    InFlight {
        waiting: bool,
    },
}

/// One work request or batch in flight, in two cache lines. An operation that takes its own
/// completion, without a waker, uses only the first.
#[repr(C, align(64))]
pub(crate) struct Slot<Q> {
    /// The id of the work request, for a batch of its last one; the next id if the slot is free.
    id: AtomicU64,
    next: AtomicPtr<Self>,
    /// Owned by the future: the reference to the work queue for one generation. Not dropped with
    /// the slot: [`take_queue`](Self::take_queue) must take out what
    /// [`keep_queue`](Self::keep_queue) stored.
    queue: UnsafeCell<ManuallyDrop<Option<Arc<Q>>>>,
    /// Position, counted from the first work request of the queue; for a batch, of the last part.
    position: AtomicU32,
    start: AtomicU32,
    state: AtomicU16,
    /// The state of a claimed slot, with the flags of its work queue.
    submitted: u16,
    parts: AtomicU16,
    /// Rounds that the operation has spun, modulo 2^16; valid if SPUN is set.
    rounds: AtomicU16,
    /// Owned by the future while SUBMITTED or COMPLETE, by the drainer while WAKING or DETACHED.
    waker: UnsafeCell<Option<Waker>>,
    /// Owned by the drainer until COMPLETE, then by the future.
    outcome: UnsafeCell<Outcome>,
    /// Owned by the future until DETACHED, then by the drainer.
    held: UnsafeCell<Option<DetachedBuffers>>,
}

#[cfg(all(not(loom), target_pointer_width = "64"))]
const _: () = assert!(size_of::<Slot<u8>>() == 128);

// SAFETY: C1: each cell has one owner at a time, documented at the field and transferred by
// `state`.
unsafe impl<Q: Send + Sync> Send for Slot<Q> {}
// SAFETY: C1: as above; `state` transfers ownership by acquire and release.
unsafe impl<Q: Send + Sync> Sync for Slot<Q> {}

impl<Q> Slot<Q> {
    pub(super) fn new(id: WrId, polled: bool) -> Self {
        Self {
            id: AtomicU64::new(id.0),
            state: AtomicU16::new(FREE),
            submitted: if polled { SUBMITTED | POLLED } else { SUBMITTED },
            position: AtomicU32::new(0),
            start: AtomicU32::new(0),
            parts: AtomicU16::new(1),
            next: AtomicPtr::new(std::ptr::null_mut()),
            rounds: AtomicU16::new(0),
            waker: UnsafeCell::new(None),
            outcome: UnsafeCell::new(Err(OpErrorKind::Closed)),
            held: UnsafeCell::new(None),
            queue: UnsafeCell::new(ManuallyDrop::new(None)),
        }
    }

    pub(super) fn solicited(mut self) -> Self {
        self.submitted |= SOLICITED;
        self
    }

    pub(super) fn notifying(mut self) -> Self {
        self.submitted |= NOTIFIES;
        self
    }

    pub(super) fn stamped(mut self) -> Self {
        self.submitted |= STAMPED;
        self
    }

    /// A complete slot that is part of no work queue.
    #[cold]
    pub(super) fn refused(kind: OpErrorKind) -> Self {
        let mut slot = Self::new(WrId(0), false);
        slot.state = AtomicU16::new(COMPLETE);
        slot.outcome = UnsafeCell::new(Err(kind));
        slot
    }

    #[inline]
    pub(super) fn id(&self) -> WrId {
        WrId(self.id.load(Ordering::Relaxed))
    }

    // The poster.

    /// Starts a generation of `parts` work requests if the slot is free.
    #[inline]
    pub(super) fn claim(&self, parts: u32) -> bool {
        if self.state.load(Ordering::Acquire) != FREE {
            return false;
        }
        if parts > 1 {
            self.id.store(
                self.id().0.wrapping_add(u64::from(parts - 1) * GENERATION),
                Ordering::Relaxed,
            );
            // Release: a thread that sees this count also sees the id of the last part.
            self.parts.store(parts as u16, Ordering::Release);
        }
        // Release: a thread that sees this generation also sees its id.
        self.state.store(self.submitted, Ordering::Release);
        true
    }

    #[inline]
    pub(super) fn set_position(&self, position: u32) {
        self.position.store(position, Ordering::Relaxed);
    }

    pub(super) fn link(&self, next: &Self) {
        self.next.store(std::ptr::from_ref(next).cast_mut(), Ordering::Relaxed);
    }

    // The drainer.

    #[inline]
    pub(super) fn position(&self) -> u32 {
        self.position.load(Ordering::Relaxed)
    }

    #[inline]
    fn phase_in(&self, id: WrId) -> Option<u16> {
        // The phase is loaded first: a phase in flight then belongs to the generation of the id
        // loaded afterwards, or to a later one.
        let state = self.state.load(Ordering::Acquire);
        (self.id() == id).then_some(state & PHASE)
    }

    #[inline]
    pub(super) fn is_current(&self, id: WrId) -> bool {
        matches!(self.phase_in(id), Some(SUBMITTED | WAITING | DETACHED))
    }

    /// Returns the state of the slot if `id` is current and has no waker.
    #[inline]
    pub(super) fn without_waker(&self, id: WrId) -> Option<WithoutWaker> {
        // Same order of loads as in `phase_in`.
        let state = self.state.load(Ordering::Acquire);
        (state & PHASE == SUBMITTED && self.id() == id).then_some(WithoutWaker(state))
    }

    /// Stores the completion. Returns false if the slot has left the state that the same drainer
    /// has read: it has a waker, or its operation was abandoned.
    #[inline]
    pub(super) fn finish_without_waker(
        &self,
        WithoutWaker(state): WithoutWaker,
        completion: &WorkCompletion,
    ) -> bool {
        // SAFETY: C1: the drainer has seen SUBMITTED, and only it ends the phases in flight, in
        // which the cell is its own; there is one drainer.
        self.outcome.with_mut(|cell| unsafe { *cell = Ok(*completion) });
        let complete = self.phase(state, COMPLETE);
        self.state.compare_exchange(state, complete, Ordering::Release, Ordering::Relaxed).is_ok()
    }

    /// Completes an operation whose future is also the drainer, has not registered and already has
    /// the result.
    #[inline]
    pub(super) fn finish_own(&self) {
        self.state.store(COMPLETE, Ordering::Relaxed);
    }

    #[cold]
    pub(super) fn finish(&self, id: WrId, outcome: Outcome) -> Finished {
        if !self.is_current(id) {
            return Finished::Stale;
        }
        let mut state = self.state.load(Ordering::Acquire);
        // SAFETY: C1: in these phases the cell is the drainer's. There is one drainer: it holds the
        // lock of the completion queue, or of the work queue if the work was never posted.
        self.outcome.with_mut(|cell| unsafe { *cell = outcome });
        loop {
            let result = match state & PHASE {
                SUBMITTED => {
                    let to = self.phase(state, COMPLETE);
                    match self.state.compare_exchange(
                        state,
                        to,
                        Ordering::Release,
                        Ordering::Relaxed,
                    ) {
                        Ok(_) => return Finished::WithoutWaker,
                        Err(now) => Err(now),
                    }
                }
                WAITING => {
                    let to = self.phase(state, WAKING);
                    self.state.compare_exchange(state, to, Ordering::Acquire, Ordering::Relaxed)
                }
                DETACHED => return self.reap(state, None),
                _ => unreachable!("only the drainer ends the phases in flight"),
            };
            match result {
                Ok(_) => break,
                Err(now) => state = now,
            }
        }
        // SAFETY: C1: WAKING makes the waker the drainer's.
        let waker = self.waker.with_mut(|cell| unsafe { (*cell).take() });
        let before = self.state.swap(self.phase(state, COMPLETE), Ordering::AcqRel);
        if before & PHASE == DETACHED {
            return self.reap(before, waker);
        }
        waker.map_or(Finished::WithoutWaker, Finished::Wake)
    }

    /// Takes the waker of a slot that waits, so that its task polls again. Returns true with it if
    /// the slot stopped waiting, false if the operation was abandoned concurrently.
    #[cold]
    pub(super) fn wake_to_repoll(&self) -> Option<(Waker, bool)> {
        let state = self.state.load(Ordering::Acquire);
        let waking = self.phase(state, WAKING);
        if state & PHASE != WAITING
            || self
                .state
                .compare_exchange(state, waking, Ordering::Acquire, Ordering::Relaxed)
                .is_err()
        {
            return None;
        }
        // SAFETY: C2: WAKING makes the waker the drainer's.
        let waker = self.waker.with_mut(|cell| unsafe { (*cell).take() })?;
        let submitted = self.phase(state, SUBMITTED);
        let restored =
            self.state.compare_exchange(waking, submitted, Ordering::Release, Ordering::Relaxed);
        Some((waker, restored.is_ok()))
    }

    #[inline]
    pub(super) fn free(&self) {
        self.id.store(self.id().0.wrapping_add(GENERATION), Ordering::Relaxed);
        self.state.store(FREE, Ordering::Release);
    }

    #[cold]
    fn reap(&self, seen: u16, taken: Option<Waker>) -> Finished {
        debug_assert_eq!(seen & PHASE, DETACHED);
        // Acquires the future's writes.
        self.state.load(Ordering::Acquire);
        // SAFETY: C3: DETACHED (acquired): the future is gone, so both cells are the drainer's.
        let waker = self.waker.with_mut(|cell| unsafe { (*cell).take() }).or(taken);
        // SAFETY: C3: as above.
        let held = self.held.with_mut(|cell| unsafe { (*cell).take() });
        Finished::Detached { held, waker }
    }

    // The future.

    /// # Safety
    ///
    /// The caller has claimed the slot and not used it since.
    #[inline]
    pub(super) unsafe fn keep_queue(&self, queue: Arc<Q>) {
        // SAFETY: C1: the caller's promise.
        self.queue.with_mut(|cell| unsafe { *cell = ManuallyDrop::new(Some(queue)) });
    }

    /// Returns the work queue; `None` if the operation was refused.
    ///
    /// # Safety
    ///
    /// The caller has the claim, and keeps it while it uses the returned reference.
    #[inline]
    pub(super) unsafe fn queue(&self) -> Option<&Arc<Q>> {
        // SAFETY: C1: the caller's promise.
        self.queue.with(|cell| unsafe { (*cell).as_ref() })
    }

    /// # Safety
    ///
    /// The caller has the claim, calls this once, and ends the claim before it drops the reference.
    #[inline]
    pub(super) unsafe fn take_queue(&self) -> Option<Arc<Q>> {
        // SAFETY: C1: the caller's promise.
        self.queue.with_mut(|cell| unsafe { ManuallyDrop::take(&mut *cell) })
    }

    #[cold]
    pub(super) fn trace(&self) {
        self.state.fetch_or(TRACED, Ordering::Relaxed);
    }

    pub(super) fn is_traced(&self) -> bool {
        self.state.load(Ordering::Relaxed) & TRACED != 0
    }

    /// Returns true if the slot is in flight without flags and without a waker, so that its
    /// operation may take its own completion without the slot's phases.
    #[inline]
    pub(super) fn is_new(&self) -> bool {
        self.state.load(Ordering::Acquire) == SUBMITTED
    }

    pub(super) fn is_solicited(&self) -> bool {
        self.state.load(Ordering::Relaxed) & SOLICITED != 0
    }

    /// Returns true if the slot is in flight without a waker, and its operation may take its own
    /// completion.
    pub(super) fn may_take_own(&self) -> bool {
        self.state.load(Ordering::Acquire) & (PHASE | STAMPED) == SUBMITTED
    }

    pub(super) fn rounds(&self) -> u32 {
        if self.state.load(Ordering::Relaxed) & SPUN == 0 {
            0
        } else {
            self.rounds.load(Ordering::Relaxed).into()
        }
    }

    pub(super) fn spin(&self, rounds: u32) {
        self.rounds.store(rounds as u16, Ordering::Relaxed);
        self.state.fetch_or(SPUN, Ordering::Relaxed);
    }

    #[inline]
    pub(super) fn is_complete(&self) -> bool {
        self.state.load(Ordering::Acquire) & COMPLETE != 0
    }

    /// Wakers that are not kept move to `discarded`, which the caller drops without any lock held.
    pub(super) fn register(&self, waker: Waker, discarded: &mut Discarded) -> Registered {
        discarded[0] = Some(waker);
        let mut kept = false;
        let mut state = self.state.load(Ordering::Acquire);
        let mut registered = Registered::Fresh;
        loop {
            match state & PHASE {
                SUBMITTED => {
                    if !std::mem::replace(&mut kept, true) {
                        self.waker.with_mut(|cell| {
                            // SAFETY: C2: while SUBMITTED the waker is the future's; the drainer
                            // accesses it only after it has acquired WAITING, released below.
                            std::mem::swap(unsafe { &mut *cell }, &mut discarded[0])
                        });
                    }
                    let to = self.phase(state, WAITING);
                    match self.state.compare_exchange(
                        state,
                        to,
                        Ordering::AcqRel,
                        Ordering::Acquire,
                    ) {
                        Ok(_) => return registered,
                        Err(now) => state = now,
                    }
                }
                WAITING => {
                    let to = self.phase(state, SUBMITTED);
                    // Returns the waker to the future before replacing it: the drainer may be about
                    // to take it.
                    match self.state.compare_exchange(
                        state,
                        to,
                        Ordering::AcqRel,
                        Ordering::Acquire,
                    ) {
                        Ok(_) => {
                            registered = Registered::Again;
                            state = to;
                        }
                        Err(now) => state = now,
                    }
                }
                WAKING => {
                    // The drainer is about to store COMPLETE and to wake the waker that it took,
                    // perhaps of another task.
                    return Registered::Imminent;
                }
                _ => {
                    // SAFETY: C2: COMPLETE: the drainer is done with the waker.
                    discarded[1] = self.waker.with_mut(|cell| unsafe { (*cell).take() });
                    return match registered {
                        Registered::Again => Registered::Overtaken,
                        _ => Registered::Complete,
                    };
                }
            }
        }
    }

    #[inline]
    pub(super) fn outcome<R>(&self, read: impl FnOnce(&Outcome) -> R) -> R {
        debug_assert!(self.is_complete());
        // SAFETY: C1: COMPLETE (acquired by `is_complete`): the outcome is the future's.
        self.outcome.with(|cell| read(unsafe { &*cell }))
    }

    pub(super) fn detach(&self, held: Option<DetachedBuffers>) -> Detach {
        // SAFETY: C3: until DETACHED the cell is the future's.
        self.held.with_mut(|cell| unsafe { *cell = held });
        let mut state = self.state.load(Ordering::Acquire);
        while state & PHASE != COMPLETE {
            let to = self.phase(state, DETACHED);
            match self.state.compare_exchange(state, to, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => {
                    return Detach::InFlight { waiting: matches!(state & PHASE, WAITING | WAKING) };
                }
                Err(now) => state = now,
            }
        }
        // SAFETY: C3: the drainer did not see DETACHED, so the cell is still the future's.
        let held = self.held.with_mut(|cell| unsafe { (*cell).take() });
        Detach::Complete(held)
    }

    // All parties.

    pub(super) fn in_flight(&self) -> Option<WrId> {
        let state = self.state.load(Ordering::Acquire);
        matches!(state & PHASE, SUBMITTED | WAITING | DETACHED).then(|| self.id())
    }

    #[inline]
    pub(super) fn next(&self) -> *mut Self {
        self.next.load(Ordering::Relaxed)
    }

    #[inline]
    fn phase(&self, state: u16, phase: u16) -> u16 {
        state & !PHASE | phase
    }
}

//! Life of one work request in flight, from post to result.
//!
//! [`Phase`] draws it. Three parties take part, each alone of its kind: the poster claims (under the lock of its work queue), the
//! drainer finishes (under the lock of the completion queue, or of the work queue for what was never posted), the operation's
//! future registers, takes or detaches.
//!
//! Beside the phase stands the number of the work request, another one in each life, so that a completion that comes
//! late for an earlier life of the slot is told apart.
//!
//! While a life lasts, the slot keeps a share of the work queue `Q` that it is part of, for its operation, which has no more
//! than a pointer to the slot: a [`Claim`](super::claim::Claim). Who frees the slot takes the share out first, and drops it last.

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
use crate::sync::{AtomicPtr, AtomicU32, AtomicU64, Ordering, UnsafeCell};
use crate::types::{WorkCompletion, WrId};

const FREE: u32 = Phase::Free as u32;
const SUBMITTED: u32 = Phase::Submitted as u32;
const WAITING: u32 = Phase::Waiting as u32;
const WAKING: u32 = Phase::Waking as u32;
const COMPLETE: u32 = Phase::Complete as u32;
const DETACHED: u32 = Phase::Detached as u32;
const PHASE: u32 = 15;
/// Beside the phase: a subscriber of `tracing` was told when it was posted, and is to be told when it completes.
const TRACED: u32 = 16;
/// Beside the phase: its operation has spun for it.
const SPUN: u32 = 32;
/// Beside the phase: a thread polls for all, so it is not to be fought for the lock.
const POLLED: u32 = 64;
/// Beside the phase: parts of the batch have failed, which its queue has noted.
const FAILED: u32 = 128;

/// How a work request ended: the device says how, or it never got a completion.
pub(crate) type Outcome = Result<WorkCompletion, OpErrorKind>;

/// Whatever an abandoned operation owned: its buffers.
pub(crate) type Held = Box<dyn Any + Send>;

/// What the drainer has to do after a slot was finished.
#[derive(Debug)]
pub(super) enum Finished {
    /// The completion is of an earlier life of the slot.
    Stale,
    /// The operation will find the result when it looks.
    Unwatched,
    /// The operation waits.
    Wake(Waker),
    /// The operation was abandoned; the slot is still to be [freed](Slot::free).
    Detached {
        /// What it owned.
        held: Option<Held>,
        /// Who waited for it before; to be dropped, without any lock, for that may end a task.
        waker: Option<Waker>,
    },
}

/// Wakers that nobody needs any more.
pub(super) type Spent = [Option<Waker>; 2];

/// What became of a waker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Registered {
    /// The result is there; the waker was not kept.
    Complete,
    /// The result came while an earlier waker was being replaced: the slot was waiting, and is not any more.
    Overtaken,
    /// The result will be there at once, and it is not known whom the drainer wakes: the operation is to look again.
    Imminent,
    /// Kept, and the slot was not waiting before.
    Fresh,
    /// Kept, in place of an earlier one.
    Again,
}

/// What an abandoned operation left behind.
#[derive(Debug)]
pub(super) enum Detach {
    /// The result is there, so what was held comes back; the slot is still to be released.
    Complete(Option<Held>),
    /// The work goes on.
    InFlight {
        /// True if it was waiting, and the drainer has not ended that.
        waiting: bool,
    },
}

/// One work request in flight, or a batch of them, which ends with the last.
pub(crate) struct Slot<Q> {
    /// Of the work request, or of the next if the slot is free. Of the last of a batch: those before it have the numbers of
    /// the lives before.
    id: AtomicU64,
    state: AtomicU32,
    /// State in which each life begins.
    first: AtomicU32,
    /// Position in its work queue, counted from the first work request; that of the last of a batch.
    position: AtomicU32,
    /// Position of the first of a batch.
    start: AtomicU32,
    /// Work requests: more than one in a batch.
    parts: AtomicU32,
    /// Where to look for a free slot after this.
    next: AtomicPtr<Self>,
    /// Rounds that its operation has spun, if SPUN is set.
    rounds: AtomicU32,
    /// Of the future while SUBMITTED or COMPLETE, of the drainer while WAKING or DETACHED.
    waker: UnsafeCell<Option<Waker>>,
    /// Of the drainer until COMPLETE, then of the future.
    outcome: UnsafeCell<Outcome>,
    /// Of the future until DETACHED, then of the drainer.
    held: UnsafeCell<Option<Held>>,
    /// Of the future: a share of the work queue that the slot is part of, while the life lasts. Without a drop of its own: what
    /// [`keep`](Self::keep) put in, [`let_go`](Self::let_go) takes out.
    queue: UnsafeCell<ManuallyDrop<Option<Arc<Q>>>>,
}

// SAFETY: C1: each cell has one owner at a time, named at the field and handed over by `state`.
unsafe impl<Q: Send + Sync> Send for Slot<Q> {}
// SAFETY: C1: as above; the hand-over is by acquire and release on `state`.
unsafe impl<Q: Send + Sync> Sync for Slot<Q> {}

impl<Q> Slot<Q> {
    /// Free, with the number of its first life; `polled` if a thread polls for all operations.
    pub(super) fn new(id: WrId, polled: bool) -> Self {
        Self {
            id: AtomicU64::new(id.0),
            state: AtomicU32::new(FREE),
            first: AtomicU32::new(if polled { SUBMITTED | POLLED } else { SUBMITTED }),
            position: AtomicU32::new(0),
            start: AtomicU32::new(0),
            parts: AtomicU32::new(1),
            next: AtomicPtr::new(std::ptr::null_mut()),
            rounds: AtomicU32::new(0),
            waker: UnsafeCell::new(None),
            outcome: UnsafeCell::new(Err(OpErrorKind::Closed)),
            held: UnsafeCell::new(None),
            queue: UnsafeCell::new(ManuallyDrop::new(None)),
        }
    }

    /// Of an operation that was refused: complete from the start, and of no work queue.
    #[cold]
    pub(super) fn refused(kind: OpErrorKind) -> Self {
        let mut slot = Self::new(WrId(0), false);
        slot.state = AtomicU32::new(COMPLETE);
        slot.outcome = UnsafeCell::new(Err(kind));
        slot
    }

    /// Number of the work request.
    #[inline(always)]
    pub(super) fn id(&self) -> WrId {
        WrId(self.id.load(Ordering::Relaxed))
    }

    // The poster.

    /// Starts a life of so many work requests if the slot is free.
    #[inline(always)]
    pub(super) fn claim(&self, parts: u32) -> bool {
        if self.state.load(Ordering::Acquire) != FREE {
            return false;
        }
        if parts > 1 {
            self.id.store(
                self.id().0.wrapping_add(u64::from(parts - 1) * GENERATION),
                Ordering::Relaxed,
            );
            // Released, so that who sees this many sees the number of the last.
            self.parts.store(parts, Ordering::Release);
        }
        // Released, so that who sees this life sees its number.
        self.state.store(self.first.load(Ordering::Relaxed), Ordering::Release);
        true
    }

    /// Notes where in the work queue it was posted, before it is.
    #[inline]
    pub(super) fn place(&self, position: u32) {
        self.position.store(position, Ordering::Relaxed);
    }

    /// Notes which slot comes after it in the table.
    pub(super) fn link(&self, next: &Self) {
        self.next.store(std::ptr::from_ref(next).cast_mut(), Ordering::Relaxed);
    }

    // The drainer.

    #[inline]
    pub(super) fn position(&self) -> u32 {
        self.position.load(Ordering::Relaxed)
    }

    /// The phase, if `id` is the life it is in.
    #[inline(always)]
    fn phase_in(&self, id: WrId) -> Option<u32> {
        // The phase first: what is in flight now is so in the life that the number read afterwards tells, or in a later one.
        let state = self.state.load(Ordering::Acquire);
        (self.id() == id).then_some(state & PHASE)
    }

    /// True if `id` is the life it is in, and that is not over.
    #[inline]
    pub(super) fn is_current(&self, id: WrId) -> bool {
        matches!(self.phase_in(id), Some(SUBMITTED | WAITING | DETACHED))
    }

    /// True if `id` is the life it is in, and nobody waits for it.
    #[inline(always)]
    pub(super) fn is_unwatched_in(&self, id: WrId) -> bool {
        self.phase_in(id) == Some(SUBMITTED)
    }

    /// Leaves the completion to the operation, if nobody waits for it in this life; false if somebody does by now.
    #[inline(always)]
    pub(super) fn finish_unwatched(&self, id: WrId, completion: &WorkCompletion) -> bool {
        // As `phase_in`.
        let state = self.state.load(Ordering::Acquire);
        if state & PHASE != SUBMITTED || self.id() != id {
            return false;
        }
        // SAFETY: C1: the phase is SUBMITTED, so the cell is the drainer's; there is one drainer.
        self.outcome.with_mut(|cell| unsafe { *cell = Ok(*completion) });
        let complete = self.phase(state, COMPLETE);
        self.state.compare_exchange(state, complete, Ordering::Release, Ordering::Relaxed).is_ok()
    }

    /// Ends the flight of an operation whose future is the drainer, and has not registered: it has the result already.
    #[inline(always)]
    pub(super) fn finish_own(&self) {
        self.state.store(COMPLETE, Ordering::Relaxed);
    }

    /// Hands the outcome over to whoever owns the operation.
    #[cold]
    pub(super) fn finish(&self, id: WrId, outcome: Outcome) -> Finished {
        if !self.is_current(id) {
            return Finished::Stale;
        }
        let mut state = self.state.load(Ordering::Acquire);
        // SAFETY: C1: the phase is neither COMPLETE nor FREE, so the cell is the drainer's; there is one drainer, for it holds
        // the lock of the completion queue, or that of posting for what was never posted.
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
                        Ok(_) => return Finished::Unwatched,
                        Err(now) => Err(now),
                    }
                }
                WAITING => {
                    let to = self.phase(state, WAKING);
                    self.state.compare_exchange(state, to, Ordering::Acquire, Ordering::Relaxed)
                }
                DETACHED => return self.reap(state, None),
                _ => unreachable!("only the drainer leaves the phases in flight"),
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
        waker.map_or(Finished::Unwatched, Finished::Wake)
    }

    /// Takes the waker of a slot that waits, so that its task looks again. True with it if the slot does not wait any
    /// more; it was abandoned just now if not.
    #[cold]
    pub(super) fn rouse(&self) -> Option<(Waker, bool)> {
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
        let back =
            self.state.compare_exchange(waking, submitted, Ordering::Release, Ordering::Relaxed);
        Some((waker, back.is_ok()))
    }

    /// Ends the life: another may begin.
    #[inline(always)]
    pub(super) fn free(&self) {
        self.id.store(self.id().0.wrapping_add(GENERATION), Ordering::Relaxed);
        self.state.store(FREE, Ordering::Release);
    }

    /// Takes what a detached operation owned.
    #[cold]
    fn reap(&self, seen: u32, taken: Option<Waker>) -> Finished {
        debug_assert_eq!(seen & PHASE, DETACHED);
        // Acquires what the future has left.
        self.state.load(Ordering::Acquire);
        // SAFETY: C3: DETACHED (acquired) says that the future is gone: both cells are the drainer's.
        let waker = self.waker.with_mut(|cell| unsafe { (*cell).take() }).or(taken);
        // SAFETY: C3: as above.
        let held = self.held.with_mut(|cell| unsafe { (*cell).take() });
        Finished::Detached { held, waker }
    }

    // The operation's future.

    /// Keeps a share of the work queue for the operation.
    ///
    /// # Safety
    ///
    /// The caller has claimed the slot, and this is the first that it does with it.
    #[inline(always)]
    pub(super) unsafe fn keep(&self, queue: Arc<Q>) {
        // SAFETY: C1: promised.
        self.queue.with_mut(|cell| unsafe { *cell = ManuallyDrop::new(Some(queue)) });
    }

    /// The work queue; none if the operation was refused.
    ///
    /// # Safety
    ///
    /// The caller has the claim, and keeps it as long as the reference.
    #[inline(always)]
    pub(super) unsafe fn queue(&self) -> Option<&Arc<Q>> {
        // SAFETY: C1: promised.
        self.queue.with(|cell| unsafe { (*cell).as_ref() })
    }

    /// Gives the share back.
    ///
    /// # Safety
    ///
    /// The caller has the claim, and ends it before it drops the share. Nothing asks for the share a second time.
    #[inline(always)]
    pub(super) unsafe fn let_go(&self) -> Option<Arc<Q>> {
        // SAFETY: C1: promised.
        self.queue.with_mut(|cell| unsafe { ManuallyDrop::take(&mut *cell) })
    }

    /// Has its operation tell `tracing` of the completion, if it is the operation that finds it.
    #[cold]
    pub(super) fn trace(&self) {
        self.state.fetch_or(TRACED, Ordering::Relaxed);
    }

    /// True if a subscriber of `tracing` is to be told of the completion.
    pub(super) fn is_traced(&self) -> bool {
        self.state.load(Ordering::Relaxed) & TRACED != 0
    }

    /// True if it is in flight, its operation has not waited for it, and nothing else is to be asked about it.
    #[inline(always)]
    pub(super) fn is_new(&self) -> bool {
        self.state.load(Ordering::Acquire) == SUBMITTED
    }

    /// True if no waker was registered.
    pub(super) fn is_unwatched(&self) -> bool {
        self.state.load(Ordering::Acquire) & PHASE == SUBMITTED
    }

    /// Rounds that its operation has spun.
    pub(super) fn rounds(&self) -> u32 {
        if self.state.load(Ordering::Relaxed) & SPUN == 0 {
            0
        } else {
            self.rounds.load(Ordering::Relaxed)
        }
    }

    /// Notes how many rounds its operation has spun.
    pub(super) fn spin(&self, rounds: u32) {
        self.rounds.store(rounds, Ordering::Relaxed);
        self.state.fetch_or(SPUN, Ordering::Relaxed);
    }

    /// True if the result is there.
    #[inline(always)]
    pub(super) fn is_complete(&self) -> bool {
        self.state.load(Ordering::Acquire) & COMPLETE != 0
    }

    /// Asks to be woken when the result is there. Wakers that are not kept end up in `spent`, to be dropped without any lock: one
    /// may be all that keeps another task.
    pub(super) fn register(&self, waker: Waker, spent: &mut Spent) -> Registered {
        spent[0] = Some(waker);
        let mut kept = false;
        let mut state = self.state.load(Ordering::Acquire);
        let mut registered = Registered::Fresh;
        loop {
            match state & PHASE {
                SUBMITTED => {
                    if !std::mem::replace(&mut kept, true) {
                        // SAFETY: C2: while SUBMITTED the waker is the future's; the drainer looks only after
                        // it has seen WAITING, which is stored with release below.
                        self.waker
                            .with_mut(|cell| std::mem::swap(unsafe { &mut *cell }, &mut spent[0]));
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
                    // Takes the waker back before it looks at it: the drainer may be about to.
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
                    // The drainer is two instructions away from COMPLETE and wakes the waker it took, perhaps that of another
                    // task: the caller makes sure that this one looks again.
                    return Registered::Imminent;
                }
                _ => {
                    // SAFETY: C2: COMPLETE: the drainer is done with the waker.
                    spent[1] = self.waker.with_mut(|cell| unsafe { (*cell).take() });
                    return match registered {
                        Registered::Again => Registered::Overtaken,
                        _ => Registered::Complete,
                    };
                }
            }
        }
    }

    /// The result, once [`is_complete`](Self::is_complete).
    #[inline]
    pub(super) fn outcome<R>(&self, look: impl FnOnce(&Outcome) -> R) -> R {
        debug_assert!(self.is_complete());
        // SAFETY: C1: COMPLETE (acquired by `is_complete`) makes the outcome the future's.
        self.outcome.with(|cell| look(unsafe { &*cell }))
    }

    /// Abandons the operation and leaves what it owned to the drainer.
    pub(super) fn detach(&self, held: Option<Held>) -> Detach {
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

    // All.

    /// The life it is in, for whoever ends all of them.
    pub(super) fn in_flight(&self) -> Option<WrId> {
        let state = self.state.load(Ordering::Acquire);
        matches!(state & PHASE, SUBMITTED | WAITING | DETACHED).then(|| self.id())
    }

    /// Where to look for a free slot after this.
    #[inline(always)]
    pub(super) fn next(&self) -> *mut Self {
        self.next.load(Ordering::Relaxed)
    }

    #[inline]
    fn phase(&self, state: u32, phase: u32) -> u32 {
        state & !PHASE | phase
    }
}

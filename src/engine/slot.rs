//! Life of one work request in flight, from post to result.
//!
//! ```text
//!          claim            register               finish          release
//!   FREE ────────▶ SUBMITTED ───────▶ WAITING ─────────────▶ COMPLETE ────▶ FREE
//!     ▲               │  │ └──────────── finish ──────────────▶ ▲
//!     │               │  │               │ └─ WAKING ───────────┘ finish: takes the waker first
//!     │               ▼  ▼ detach        ▼ detach
//!     └────────────── DETACHED ◀─────────┘
//!        finish: frees what the abandoned operation held
//! ```
//!
//! Three parties, each alone of its kind: the poster claims (under the lock of its work queue), the drainer
//! finishes (under the lock of the completion queue, or of the work queue for what was never posted), the
//! operation's future registers, takes or detaches.
//! Beside the phase stands the number of the work request, another one in each life, so that a completion that comes
//! late for an earlier life of the slot is told apart.
//!
//! Each slot owns a reference to its work queue, which its operation therefore need not count. When the queue has ended
//! ([`orphan`](Slot::orphan)), free slots drop theirs at once, the others when they are released. That may be the last
//! reference to the queue, and the slot lies within the queue. [`Claim::release`] therefore takes the claim by value and
//! reaches the slot through its pointer: a reference that is an argument must stay valid until the function returns.

#![allow(unsafe_code)]

mod parts;
#[cfg(all(test, not(loom)))]
mod tests;

use std::any::Any;
use std::ops::Deref;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::task::Waker;

pub(super) use self::parts::{FailedParts, MAX_PARTS};
use super::slot_table::INDEX_BITS;
use super::work_queue::WorkQueue;
use crate::error::OpErrorKind;
use crate::sync::{AtomicPtr, AtomicU32, AtomicU64, Ordering, UnsafeCell};
use crate::types::{WorkCompletion, WrId};

const FREE: u32 = 0;
const SUBMITTED: u32 = 1;
const WAITING: u32 = 2;
const WAKING: u32 = 3;
/// A bit of its own, to be asked for in one instruction.
const COMPLETE: u32 = 4;
const DETACHED: u32 = 8;
const PHASE: u32 = 15;
/// Beside the phase: the work queue has ended, so whoever releases the slot lets go of its share.
const ORPHAN: u32 = 16;
/// Beside the phase: its operation has spun for it.
const SPUN: u32 = 32;
/// Beside the phase: a thread polls for all, so it is not to be fought for the lock.
const POLLED: u32 = 64;
/// Beside the phase: parts of the batch have failed, which its queue has noted.
const FAILED: u32 = 128;

/// Bits of a work request number that tell lives of a slot apart: the uppermost.
const GENERATION_BITS: u32 = 20;
const GENERATION: u64 = 1 << (u64::BITS - GENERATION_BITS);
/// Bits below: which slot of which work queue.
pub(super) const PLACE_BITS: u32 = u64::BITS - GENERATION_BITS;
pub(super) const OWNER_BITS: u32 = PLACE_BITS - INDEX_BITS;

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
    /// The operation was abandoned.
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
pub(crate) struct Slot {
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
    /// Null for an operation that was never posted. Constant. Every field is a cell: another thread may free the slot while
    /// [`free`](Self::free) still has its reference.
    queue: AtomicPtr<WorkQueue>,
    /// Where to look for a free slot after this.
    next: AtomicPtr<Self>,
    /// Rounds that its operation has spun, if SPUN is set.
    rounds: AtomicU32,
    /// Of the future while SUBMITTED, of the drainer while WAKING.
    waker: UnsafeCell<Option<Waker>>,
    /// Of the drainer until COMPLETE, then of the future.
    outcome: UnsafeCell<Outcome>,
    /// Of the future until DETACHED, then of the drainer.
    held: UnsafeCell<Option<Held>>,
}

// SAFETY: C1: each cell has one owner at a time, named at the field and handed over by `state`; the queue is shared by
// threads, and the slot owns a share of it.
unsafe impl Send for Slot {}
// SAFETY: C1: as above; the hand-over is by acquire and release on `state`.
unsafe impl Sync for Slot {}

impl Slot {
    /// With the number of its first life, and the queue of which it takes a share, if any.
    pub(super) fn new(id: WrId, queue: Option<Arc<WorkQueue>>) -> Self {
        Self {
            id: AtomicU64::new(id.0),
            state: AtomicU32::new(FREE),
            first: AtomicU32::new(match &queue {
                Some(queue) if queue.is_polled() => SUBMITTED | POLLED,
                _ => SUBMITTED,
            }),
            position: AtomicU32::new(0),
            start: AtomicU32::new(0),
            parts: AtomicU32::new(1),
            queue: AtomicPtr::new(queue.map_or(ptr::null(), Arc::into_raw).cast_mut()),
            next: AtomicPtr::new(ptr::null_mut()),
            rounds: AtomicU32::new(0),
            waker: UnsafeCell::new(None),
            outcome: UnsafeCell::new(Err(OpErrorKind::Closed)),
            held: UnsafeCell::new(None),
        }
    }

    /// Number of the work request.
    #[inline(always)]
    pub(super) fn id(&self) -> WrId {
        WrId(self.id.load(Ordering::Relaxed))
    }

    // The poster.

    /// Starts a life of so many work requests if the slot is free.
    #[inline(always)]
    pub(super) fn claim(&self, parts: u32) -> Option<Claim> {
        if self.state.load(Ordering::Acquire) != FREE {
            return None;
        }
        if parts > 1 {
            self.id.store(self.id().0.wrapping_add(u64::from(parts - 1) * GENERATION), Ordering::Relaxed);
            // Released, so that who sees this many sees the number of the last.
            self.parts.store(parts, Ordering::Release);
        }
        // Released, so that who sees this life sees its number.
        self.state.store(self.first.load(Ordering::Relaxed), Ordering::Release);
        Some(Claim(NonNull::from(self)))
    }

    /// Notes where in the work queue it was posted, before it is.
    #[inline]
    pub(super) fn place(&self, position: u32) {
        self.position.store(position, Ordering::Relaxed);
    }

    /// Notes which slot comes after it in the table.
    pub(super) fn link(&self, next: &Self) {
        self.next.store(ptr::from_ref(next).cast_mut(), Ordering::Relaxed);
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
        // SAFETY: C1: the phase is neither COMPLETE nor FREE, so the cell is the drainer's; there is one
        // drainer, for it holds the lock of the completion queue.
        self.outcome.with_mut(|cell| unsafe { *cell = outcome });
        loop {
            let result = match state & PHASE {
                SUBMITTED => {
                    let to = self.phase(state, COMPLETE);
                    match self.state.compare_exchange(state, to, Ordering::Release, Ordering::Relaxed) {
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
            || self.state.compare_exchange(state, waking, Ordering::Acquire, Ordering::Relaxed).is_err()
        {
            return None;
        }
        // SAFETY: C2: WAKING makes the waker the drainer's.
        let waker = self.waker.with_mut(|cell| unsafe { (*cell).take() })?;
        let submitted = self.phase(state, SUBMITTED);
        let back = self.state.compare_exchange(waking, submitted, Ordering::Release, Ordering::Relaxed);
        Some((waker, back.is_ok()))
    }

    /// Ends the life. True if that was the last: the slot's reference to its queue is then the caller's to drop. If not, the
    /// queue may end at any time from here on, and the slot with it.
    #[inline(always)]
    #[must_use]
    pub(super) fn free(&self) -> bool {
        self.id.store(self.id().0.wrapping_add(GENERATION), Ordering::Relaxed);
        self.state.swap(FREE, Ordering::AcqRel) & ORPHAN != 0
    }

    /// Takes what a detached operation owned and frees the slot.
    #[cold]
    fn reap(&self, seen: u32, taken: Option<Waker>) -> Finished {
        debug_assert_eq!(seen & PHASE, DETACHED);
        // Acquires what the future has left.
        self.state.load(Ordering::Acquire);
        // SAFETY: C3: DETACHED (acquired) says that the future is gone: both cells are the drainer's.
        let waker = self.waker.with_mut(|cell| unsafe { (*cell).take() }).or(taken);
        // SAFETY: C3: as above.
        let held = self.held.with_mut(|cell| unsafe { (*cell).take() });
        self.end_parts();
        if let Some(queue) = self.queue() {
            queue.slots().hint(self);
        }
        // The drainer holds references into the queue, so this must not be the last life. It is not: `orphan` is called
        // when nothing is in flight any more, and this was.
        let last = self.free();
        debug_assert!(!last, "an orphaned slot is not in flight");
        Finished::Detached { held, waker }
    }

    // The operation's future.

    /// True if it is in flight, and its operation has not waited for it.
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
        if self.state.load(Ordering::Relaxed) & SPUN == 0 { 0 } else { self.rounds.load(Ordering::Relaxed) }
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
                        self.waker.with_mut(|cell| std::mem::swap(unsafe { &mut *cell }, &mut spent[0]));
                    }
                    let to = self.phase(state, WAITING);
                    match self.state.compare_exchange(state, to, Ordering::AcqRel, Ordering::Acquire) {
                        Ok(_) => return registered,
                        Err(now) => state = now,
                    }
                }
                WAITING => {
                    let to = self.phase(state, SUBMITTED);
                    // Takes the waker back before it looks at it: the drainer may be about to.
                    match self.state.compare_exchange(state, to, Ordering::AcqRel, Ordering::Acquire) {
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
                Ok(_) => return Detach::InFlight { waiting: matches!(state & PHASE, WAITING | WAKING) },
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

    /// The queue has ended, and nothing of it is in flight: the slot's reference to it if the slot is free. Any other slot
    /// drops its reference when it is released.
    pub(super) fn orphan(&self) -> Option<Arc<WorkQueue>> {
        if !self.end() {
            return None;
        }
        let queue = NonNull::new(self.queue.load(Ordering::Relaxed))?;
        // SAFETY: C1: the reference that `new` took; ORPHAN is set once, and of it and the last release one sees the other.
        Some(unsafe { Arc::from_raw(queue.as_ptr()) })
    }

    /// No life begins any more; true if none is left to end.
    pub(super) fn end(&self) -> bool {
        self.state.fetch_or(ORPHAN, Ordering::AcqRel) & PHASE == FREE
    }

    #[inline(always)]
    fn queue(&self) -> Option<&WorkQueue> {
        // SAFETY: C1: the slot owns a reference to it until its last life has ended.
        unsafe { self.queue.load(Ordering::Relaxed).as_ref() }
    }

    #[inline]
    fn phase(&self, state: u32, phase: u32) -> u32 {
        state & !PHASE | phase
    }
}

/// A slot in the hands of its operation. Forgetting it leaks the slot.
pub(crate) struct Claim(NonNull<Slot>);

// SAFETY: C1: it is a reference to a slot, which is `Sync`.
unsafe impl Send for Claim {}
// SAFETY: C1: as above.
unsafe impl Sync for Claim {}

impl Claim {
    /// The same claim, for who takes it out of its place meanwhile.
    #[inline(always)]
    pub(super) fn same(&self) -> Self {
        Self(self.0)
    }

    /// A slot of its own for an operation that was never posted.
    #[cold]
    pub(crate) fn refused(kind: OpErrorKind) -> Self {
        tracing::debug!(error = %kind, "operation refused");
        let mut slot = Slot::new(WrId(0), None);
        slot.state = AtomicU32::new(COMPLETE | ORPHAN);
        slot.outcome = UnsafeCell::new(Err(kind));
        Self(NonNull::from(Box::leak(Box::new(slot))))
    }

    /// Ends the life: nothing was posted, the result was taken, or no future will take it.
    ///
    /// Frees the work queue if it has ended and this was the last reference to it. The caller must be the frame of the
    /// operation, whose arguments do not refer to the queue, or hold another reference to it.
    #[inline(always)]
    pub(super) fn release(self) {
        if let Some(queue) = Slot::queue(&self) {
            queue.slots().hint(&self);
        }
        self.end();
    }

    /// As [`release`](Self::release), of a slot that is [hinted at](super::slot_table::Slots::hint).
    #[inline(always)]
    pub(super) fn end(self) {
        if self.free() {
            drop_last(self.0);
        }
    }

    /// Why it was never posted, if it was not.
    pub(super) fn refusal(&self) -> Option<OpErrorKind> {
        if self.queue.load(Ordering::Relaxed).is_null() { self.outcome(|outcome| outcome.err()) } else { None }
    }

    /// Where the work is in flight.
    ///
    /// # Panics
    ///
    /// If it was never posted.
    #[inline(always)]
    pub(super) fn queue(&self) -> &WorkQueue {
        // SAFETY: C1: the slot is claimed, so it has its share of the queue.
        match unsafe { self.queue.load(Ordering::Relaxed).as_ref() } {
            Some(queue) => queue,
            None => unreachable!("complete from the start"),
        }
    }

    /// A reference to the queue, for a caller that is about to give the slot away; none if it was never posted.
    pub(super) fn share(&self) -> Option<Arc<WorkQueue>> {
        let queue = self.queue.load(Ordering::Relaxed).cast_const();
        if queue.is_null() {
            return None;
        }
        // SAFETY: C1: the slot is claimed, so it has its share of the queue.
        unsafe {
            Arc::increment_strong_count(queue);
            Some(Arc::from_raw(queue))
        }
    }
}

/// Drops the reference to the queue of a slot whose last life has ended; the slot itself, if it is of no queue.
#[cold]
fn drop_last(slot: NonNull<Slot>) {
    // SAFETY: C1: the slot is there until its reference to the queue is dropped, which is done below.
    let queue = unsafe { slot.as_ref() }.queue.load(Ordering::Relaxed);
    if queue.is_null() {
        // SAFETY: C1: made by `Claim::refused`, whose only claim was released.
        drop(unsafe { Box::from_raw(slot.as_ptr()) });
    } else {
        // SAFETY: C1: the reference that `new` took; ORPHAN is set once, and of it and the last release one sees the other.
        // M1: no argument of this function or of its callers up to the operation's frame is a reference into the queue.
        drop(unsafe { Arc::from_raw(queue) });
    }
}

impl Deref for Claim {
    type Target = Slot;

    #[inline(always)]
    fn deref(&self) -> &Slot {
        // SAFETY: C1: the slot is of the queue that it keeps, and never moves.
        unsafe { self.0.as_ref() }
    }
}

/// Where to look for a free slot first.
pub(super) struct Hint(AtomicPtr<Slot>);

impl Hint {
    pub(super) fn new() -> Self {
        Self(AtomicPtr::new(ptr::null_mut()))
    }

    /// Starts a life in that slot, if it is free.
    #[inline(always)]
    pub(super) fn claim(&self, parts: u32) -> Option<Claim> {
        // SAFETY: C1: it is a slot of the table that the hint is part of, and slots never move.
        let slot = unsafe { self.0.load(Ordering::Relaxed).as_ref() }?;
        self.claim_at(slot, parts)
    }

    /// Starts a life in `slot`, of the same table, if it is free.
    #[inline(always)]
    pub(super) fn claim_at(&self, slot: &Slot, parts: u32) -> Option<Claim> {
        let claim = slot.claim(parts)?;
        self.0.store(slot.next.load(Ordering::Relaxed), Ordering::Relaxed);
        Some(claim)
    }

    /// `slot` is of the table that the hint is part of.
    #[inline(always)]
    pub(super) fn set(&self, slot: &Slot) {
        self.0.store(ptr::from_ref(slot).cast_mut(), Ordering::Relaxed);
    }
}

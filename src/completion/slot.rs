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
//! Beside the phase the state holds a generation, so that a completion that comes late for an earlier life
//! of the slot is told apart.

#![allow(unsafe_code)]

use std::any::Any;
use std::task::Waker;

use crate::error::OpErrorKind;
use crate::sync::{AtomicU32, Ordering, UnsafeCell};
use crate::types::WorkCompletion;

const FREE: u32 = 0;
const SUBMITTED: u32 = 1;
const WAITING: u32 = 2;
const WAKING: u32 = 3;
const COMPLETE: u32 = 4;
const DETACHED: u32 = 5;

const PHASE_BITS: u32 = 3;
const PHASE: u32 = (1 << PHASE_BITS) - 1;

/// No slot: end of a chain.
pub(super) const NONE: u32 = u32::MAX;

/// Which life of a slot: as many bits as a work request number has room for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Generation(u32);

impl Generation {
    pub(super) const BITS: u32 = 20;
    const MASK: u32 = (1 << Self::BITS) - 1;

    pub(super) const fn new(value: u32) -> Self {
        Self(value & Self::MASK)
    }

    pub(super) const fn value(self) -> u32 {
        self.0
    }
}

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
        /// It was the last of a batch, whose slots are all still to be released.
        batch: bool,
    },
}

/// What became of a waker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Registered {
    /// The result is there; the waker was not kept.
    Complete,
    /// The result came while an earlier waker was being replaced: the slot was waiting, and is not any more.
    Overtaken,
    /// The result will be there at once; the waker was woken, to look again.
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

/// One work request in flight.
pub(super) struct Slot {
    state: AtomicU32,
    /// Position in its work queue, counted from the first work request.
    position: AtomicU32,
    /// The work request before it in the same batch, or [`NONE`].
    previous: AtomicU32,
    /// Of the future while SUBMITTED, of the drainer while WAKING.
    waker: UnsafeCell<Option<Waker>>,
    /// Of the drainer until COMPLETE, then of the future.
    outcome: UnsafeCell<Outcome>,
    /// Of the future until DETACHED, then of the drainer.
    held: UnsafeCell<Option<Held>>,
}

// SAFETY: C1: each cell has one owner at a time, named at the field and handed over by `state`.
unsafe impl Send for Slot {}
// SAFETY: C1: as above; the hand-over is by acquire and release on `state`.
unsafe impl Sync for Slot {}

impl Slot {
    pub(super) fn new() -> Self {
        Self {
            state: AtomicU32::new(FREE),
            position: AtomicU32::new(0),
            previous: AtomicU32::new(NONE),
            waker: UnsafeCell::new(None),
            outcome: UnsafeCell::new(Err(OpErrorKind::Closed)),
            held: UnsafeCell::new(None),
        }
    }

    // The poster.

    /// Starts a life if the slot is free.
    #[inline(always)]
    pub(super) fn claim(&self, previous: u32) -> Option<Generation> {
        let state = self.state.load(Ordering::Acquire);
        if state & PHASE != FREE {
            return None;
        }
        self.previous.store(previous, Ordering::Relaxed);
        self.state.store(state | SUBMITTED, Ordering::Release);
        Some(Generation::new(state >> PHASE_BITS))
    }

    /// Notes where in the work queue it was posted, before it is.
    #[inline]
    pub(super) fn place(&self, position: u32) {
        self.position.store(position, Ordering::Relaxed);
    }

    /// Ends a life that never began: nothing was posted.
    pub(super) fn unclaim(&self) {
        self.free(self.state.load(Ordering::Relaxed));
    }

    // The drainer.

    /// True if it is in flight and nobody waits for it.
    #[inline]
    pub(super) fn is_unwatched(&self) -> bool {
        self.state.load(Ordering::Acquire) & PHASE == SUBMITTED
    }

    #[inline]
    pub(super) fn position(&self) -> u32 {
        self.position.load(Ordering::Relaxed)
    }

    #[inline]
    pub(super) fn previous(&self) -> Option<u32> {
        let previous = self.previous.load(Ordering::Relaxed);
        (previous != NONE).then_some(previous)
    }

    /// True if `generation` is the life it is in, and that is not over.
    #[inline]
    pub(super) fn is_current(&self, generation: Generation) -> bool {
        let state = self.state.load(Ordering::Acquire);
        Generation::new(state >> PHASE_BITS) == generation && matches!(state & PHASE, SUBMITTED | WAITING | DETACHED)
    }

    /// True if `generation` is the life it is in, and nobody waits for it.
    #[inline(always)]
    pub(super) fn is_unwatched_in(&self, generation: Generation) -> bool {
        self.state.load(Ordering::Acquire) == generation.value() << PHASE_BITS | SUBMITTED
    }

    /// Leaves the completion to the operation, if nobody waits for it in this life; false if somebody does by now.
    #[inline(always)]
    pub(super) fn finish_unwatched(&self, generation: Generation, completion: &WorkCompletion) -> bool {
        let unwatched = generation.value() << PHASE_BITS | SUBMITTED;
        if self.state.load(Ordering::Acquire) != unwatched {
            return false;
        }
        // SAFETY: C1: the phase is SUBMITTED, so the cell is the drainer's; there is one drainer.
        self.outcome.with_mut(|cell| unsafe { *cell = Ok(*completion) });
        let complete = self.phase(unwatched, COMPLETE);
        self.state.compare_exchange(unwatched, complete, Ordering::Release, Ordering::Relaxed).is_ok()
    }

    /// Hands the outcome over to whoever owns the operation.
    #[cold]
    pub(super) fn finish(&self, generation: Generation, outcome: Outcome) -> Finished {
        let mut state = self.state.load(Ordering::Acquire);
        let current = Generation::new(state >> PHASE_BITS) == generation;
        if !current || !matches!(state & PHASE, SUBMITTED | WAITING | DETACHED) {
            return Finished::Stale;
        }
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

    /// Ends the life: the result was looked at, or a batch of which it is a part was abandoned and is done.
    #[inline]
    pub(super) fn release(&self) {
        self.free(self.state.load(Ordering::Relaxed));
    }

    /// Takes what a detached operation owned and frees the slot, if it is not of a batch.
    #[cold]
    fn reap(&self, seen: u32, taken: Option<Waker>) -> Finished {
        debug_assert_eq!(seen & PHASE, DETACHED);
        let state = self.state.load(Ordering::Acquire);
        // SAFETY: C3: DETACHED (acquired) says that the future is gone: both cells are the drainer's.
        let waker = self.waker.with_mut(|cell| unsafe { (*cell).take() }).or(taken);
        // SAFETY: C3: as above.
        let held = self.held.with_mut(|cell| unsafe { (*cell).take() });
        let batch = self.previous().is_some();
        if !batch {
            self.free(state);
        }
        Finished::Detached { held, waker, batch }
    }

    // The operation's future.

    /// True if the result is there.
    #[inline]
    pub(super) fn is_complete(&self) -> bool {
        self.state.load(Ordering::Acquire) & PHASE == COMPLETE
    }

    /// Asks to be woken when the result is there. An earlier waker ends up in `replaced`, to be dropped without any
    /// lock: it may be all that keeps another task.
    pub(super) fn register(&self, waker: &Waker, replaced: &mut Option<Waker>) -> Registered {
        let mut state = self.state.load(Ordering::Acquire);
        let mut registered = Registered::Fresh;
        loop {
            match state & PHASE {
                SUBMITTED => {
                    // SAFETY: C2: while SUBMITTED the waker is the future's; the drainer looks only after
                    // it has seen WAITING, which is stored with release below.
                    let before = self.waker.with_mut(|cell| unsafe { (*cell).replace(waker.clone()) });
                    if before.is_some() {
                        *replaced = before;
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
                    // The drainer is two instructions away from COMPLETE and wakes the waker it took,
                    // perhaps that of another task: make sure this one looks again.
                    waker.wake_by_ref();
                    return Registered::Imminent;
                }
                _ => {
                    // SAFETY: C2: COMPLETE: the drainer is done with the waker. It is a clone of `waker`, if any.
                    self.waker.with_mut(|cell| unsafe { *cell = None });
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
    pub(super) fn in_flight(&self) -> Option<Generation> {
        let state = self.state.load(Ordering::Acquire);
        matches!(state & PHASE, SUBMITTED | WAITING | DETACHED).then(|| Generation::new(state >> PHASE_BITS))
    }

    #[inline]
    fn phase(&self, state: u32, phase: u32) -> u32 {
        state & !PHASE | phase
    }

    /// Free, in the next life.
    #[inline]
    fn free(&self, state: u32) {
        let next = Generation::new((state >> PHASE_BITS).wrapping_add(1));
        self.state.store(next.value() << PHASE_BITS | FREE, Ordering::Release);
    }
}

//! Every interleaving of the slot, capacity, arming and spinning protocols:
//! `RUSTFLAGS="--cfg loom" cargo test --release --lib loom`.

#![allow(unsafe_code)]

mod waking;

use std::sync::Arc as StdArc;
use std::task::{Wake, Waker};

use ::loom::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use ::loom::sync::{Arc, Mutex};
use ::loom::thread;

use super::capacity::Capacity;
use super::slot::{Detach, DetachedBuffers, Discarded, Finished, Outcome, Registered, Slot};
use crate::error::OpErrorKind;
use crate::types::{WorkCompletion, WrId};

const POSTED: WorkCompletion = {
    let mut completion = WorkCompletion::EMPTY;
    completion.wr_id = WrId(7);
    completion
};

struct Flag(AtomicUsize);

impl Wake for Flag {
    fn wake(self: StdArc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

fn flag() -> (StdArc<Flag>, Waker) {
    let flag = StdArc::new(Flag(AtomicUsize::new(0)));
    (flag.clone(), Waker::from(flag))
}

impl Flag {
    fn woken(&self) -> bool {
        self.0.load(Ordering::SeqCst) > 0
    }

    fn reset(&self) {
        self.0.store(0, Ordering::SeqCst);
    }
}

fn claimed() -> (Arc<Slot<()>>, WrId) {
    let slot = Arc::new(Slot::new(POSTED.wr_id, false));
    assert!(slot.claim(1), "a new slot is free");
    let id = slot.id();
    (slot, id)
}

fn take(slot: &Slot<()>) -> Outcome {
    let outcome = slot.outcome(|outcome| *outcome);
    slot.free();
    outcome
}

fn completed(slot: &Slot<()>, id: WrId) -> Finished {
    if slot
        .without_waker(id)
        .is_some_and(|without_waker| slot.finish_without_waker(without_waker, &POSTED))
    {
        Finished::WithoutWaker
    } else {
        slot.finish(id, Ok(POSTED))
    }
}

fn finish(slot: &Slot<()>, id: WrId) -> Option<DetachedBuffers> {
    match completed(slot, id) {
        Finished::Stale => panic!("the slot is in flight"),
        Finished::WithoutWaker => None,
        Finished::Wake(waker) => {
            waker.wake();
            None
        }
        Finished::Detached { held, waker: _ } => {
            slot.end_parts();
            slot.free();
            held
        }
    }
}

// Shows C1.
#[test]
fn loom_a_registered_waker_is_woken_or_the_result_is_seen() {
    ::loom::model(|| {
        let (slot, id) = claimed();
        let drainer = thread::spawn({
            let slot = slot.clone();
            move || assert!(finish(&slot, id).is_none())
        });
        let (woken, waker) = flag();
        let registered = slot.register(waker, &mut Discarded::default());
        drainer.join().unwrap();
        assert!(slot.is_complete());
        if registered != Registered::Complete {
            assert!(woken.woken(), "{registered:?} and never woken");
        }
        assert_eq!(take(&slot), Ok(POSTED));
        assert!(slot.claim(1), "the slot is free again");
    });
}

// Shows C2.
#[test]
fn loom_the_latest_of_two_wakers_is_woken() {
    ::loom::model(|| {
        let (slot, id) = claimed();
        let drainer = thread::spawn({
            let slot = slot.clone();
            move || assert!(finish(&slot, id).is_none())
        });
        let (_, first) = flag();
        let (woken, second) = flag();
        slot.register(first, &mut Discarded::default());
        let registered = slot.register(second, &mut Discarded::default());
        drainer.join().unwrap();
        // Otherwise the caller polls again.
        if !matches!(
            registered,
            Registered::Complete | Registered::Overtaken | Registered::Imminent
        ) {
            assert!(woken.woken(), "{registered:?}, but the task it moved to was never woken");
        }
        assert_eq!(take(&slot), Ok(POSTED));
    });
}

struct Buffer(Arc<AtomicU32>);

impl Drop for Buffer {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

// Shows S1, C3, E2.
#[test]
fn loom_an_abandoned_operation_is_freed_once_and_never_before_its_completion() {
    for waits in [false, true] {
        ::loom::model(move || {
            let (slot, id) = claimed();
            let drops = Arc::new(AtomicU32::new(0));
            let (_, waker) = flag();
            if waits {
                assert_eq!(slot.register(waker, &mut Discarded::default()), Registered::Fresh);
            }
            let drainer = thread::spawn({
                let (slot, drops) = (slot.clone(), drops.clone());
                move || {
                    assert_eq!(drops.load(Ordering::SeqCst), 0, "the device still uses it");
                    drop(finish(&slot, id));
                }
            });
            match slot.detach(Some(Box::new(Buffer(drops.clone())))) {
                Detach::InFlight { waiting } => assert_eq!(waiting, waits),
                Detach::Complete(held) => {
                    slot.free();
                    drop(held);
                }
            }
            drainer.join().unwrap();
            assert_eq!(drops.load(Ordering::SeqCst), 1);
            assert!(slot.claim(1), "the slot is free again");
        });
    }
}

fn over() -> (Arc<Slot<()>>, WrId) {
    let (slot, id) = claimed();
    assert!(finish(&slot, id).is_none());
    assert_eq!(take(&slot), Ok(POSTED));
    (slot, id)
}

// Shows S1, C1.
#[test]
fn loom_a_stale_completion_of_an_earlier_generation_changes_nothing() {
    ::loom::model(|| {
        let (slot, old) = over();
        let stale = thread::spawn({
            let slot = slot.clone();
            move || assert!(matches!(slot.finish(old, Err(OpErrorKind::Closed)), Finished::Stale))
        });
        assert!(slot.claim(1), "taken slots are free");
        let new = slot.id();
        stale.join().unwrap();
        assert_ne!(old, new);
        assert!(!slot.is_complete());
        assert!(finish(&slot, new).is_none());
        assert_eq!(take(&slot), Ok(POSTED));
    });
}

// Shows C1.
#[test]
fn loom_a_stale_completion_of_an_earlier_generation_matches_no_batch_part() {
    ::loom::model(|| {
        let (slot, old) = over();
        let stale = thread::spawn({
            let slot = slot.clone();
            move || assert_eq!(slot.current_part(old), None)
        });
        assert!(slot.claim(3), "taken slots are free");
        let parts = [0, 1, 2].map(|part| slot.id_of(part));
        stale.join().unwrap();
        assert_eq!(parts.map(|id| slot.current_part(id)), [Some(0), Some(1), Some(2)]);
        assert_eq!(parts[2], slot.id(), "it ends with its last");
        assert!(finish(&slot, slot.id()).is_none());
        assert!(!slot.end_parts(), "none has failed");
        assert_eq!(take(&slot), Ok(POSTED));
        assert!(parts.iter().all(|&id| slot.current_part(id).is_none()));
    });
}

// Shows S1.
#[test]
fn loom_an_abandoned_batch_leaves_a_slot_of_one() {
    ::loom::model(|| {
        let slot = Arc::new(Slot::new(POSTED.wr_id, false));
        assert!(slot.claim(2), "a new slot is free");
        let last = slot.id();
        let drops = Arc::new(AtomicU32::new(0));
        let drainer = thread::spawn({
            let slot = slot.clone();
            move || drop(finish(&slot, last))
        });
        if let Detach::Complete(held) = slot.detach(Some(Box::new(Buffer(drops.clone())))) {
            slot.end_parts();
            slot.free();
            drop(held);
        }
        drainer.join().unwrap();
        assert_eq!(drops.load(Ordering::SeqCst), 1);
        assert!(slot.claim(1), "the slot is free again");
        let next = slot.id();
        assert_eq!((slot.parts(), slot.part(last)), (1, None));
        assert!(slot.is_current(next));
    });
}

// An operation abandons its slot, and the next one claims it while the drainer frees it: each has
// its own reference to the queue.
// Shows C1.
#[test]
fn loom_each_generation_has_its_own_reference_to_the_work_queue() {
    ::loom::model(|| {
        let queue = StdArc::new(());
        let slot = Arc::new(Slot::<()>::new(POSTED.wr_id, false));
        assert!(slot.claim(1), "a new slot is free");
        // SAFETY: C1: claimed; same as in `Claim`.
        unsafe { slot.keep_queue(queue.clone()) };
        let id = slot.id();
        let drainer = thread::spawn({
            let slot = slot.clone();
            move || assert!(finish(&slot, id).is_none())
        });
        // SAFETY: C1: as above; the reference is dropped after the last use of the slot in this
        // generation.
        let reference = unsafe { slot.take_queue() };
        if let Detach::Complete(_) = slot.detach(None) {
            slot.free();
        }
        drop(reference);
        if slot.claim(1) {
            // SAFETY: C1: as above.
            unsafe { slot.keep_queue(queue.clone()) };
            assert_eq!(StdArc::strong_count(&queue), 2);
            // SAFETY: C1: as above.
            drop(unsafe { slot.take_queue() });
        }
        drainer.join().unwrap();
        assert_eq!(StdArc::strong_count(&queue), 1);
    });
}

struct PostQueue {
    capacity: Capacity,
    state: Mutex<QueuedWork>,
}

struct QueuedWork {
    posted: u32,
    waiting: u32,
}

impl PostQueue {
    fn post_queued(&self, state: &mut QueuedWork) {
        while state.waiting > 0 && self.capacity.free(state.posted) > 0 {
            state.waiting -= 1;
            state.posted += 1;
        }
        if state.waiting == 0 {
            self.capacity.clear_waiters();
        }
    }
}

// Shows C4.
#[test]
fn loom_queued_work_is_posted_when_capacity_is_freed() {
    ::loom::model(|| {
        let queue = Arc::new(PostQueue {
            capacity: Capacity::new(1, false),
            state: Mutex::new(QueuedWork { posted: 1, waiting: 0 }),
        });
        let drainer = thread::spawn({
            let queue = queue.clone();
            move || {
                if queue.capacity.retire(0) {
                    queue.post_queued(&mut queue.state.lock().unwrap());
                }
            }
        });
        {
            let mut state = queue.state.lock().unwrap();
            if state.waiting == 0 && queue.capacity.free(state.posted) > 0 {
                state.posted += 1;
            } else {
                state.waiting += 1;
                queue.capacity.announce_waiter();
                queue.post_queued(&mut state);
            }
        }
        drainer.join().unwrap();
        let state = queue.state.lock().unwrap();
        assert_eq!(
            (state.waiting, state.posted),
            (0, 2),
            "work is queued although capacity is free"
        );
        assert_eq!(queue.capacity.in_flight(state.posted), 1);
    });
}

//! Every interleaving of the slot, capacity, stream, arming and spinning protocols:
//! `RUSTFLAGS="--cfg loom" cargo test --release --lib loom`.

#![allow(unsafe_code)]

mod waking;

use std::collections::VecDeque;
use std::sync::Arc as StdArc;
use std::task::{Wake, Waker};

use ::loom::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use ::loom::sync::{Arc, Mutex};
use ::loom::thread;

use super::capacity::Capacity;
use super::posting::Posting;
use super::slot::{Detach, Discarded, Finished, Held, Outcome, Registered, Slot};
use super::slot_table::Cursor;
use super::streams::{StreamWork, Streams};
use super::watch::Watch;
use super::work_request::StreamUse;
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
    if slot.unwatched(id).is_some_and(|unwatched| slot.finish_unwatched(unwatched, &POSTED)) {
        Finished::Unwatched
    } else {
        slot.finish(id, Ok(POSTED))
    }
}

fn finish(slot: &Slot<()>, id: WrId) -> Option<Held> {
    match completed(slot, id) {
        Finished::Stale => panic!("the slot is in flight"),
        Finished::Unwatched => None,
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

/// Returns a slot whose first generation is over, and the id of that generation.
fn over() -> (Arc<Slot<()>>, WrId) {
    let (slot, id) = claimed();
    assert!(finish(&slot, id).is_none());
    assert_eq!(take(&slot), Ok(POSTED));
    (slot, id)
}

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

/// A poster with queued work and a drainer that frees capacity, like `WorkQueue` uses `Capacity`.
struct PostQueue {
    capacity: Capacity,
    posting: Mutex<QueuedWork>,
}

struct QueuedWork {
    posted: u32,
    waiting: u32,
}

impl PostQueue {
    fn post_queued(&self, posting: &mut QueuedWork) {
        while posting.waiting > 0 && self.capacity.free(posting.posted) > 0 {
            posting.waiting -= 1;
            posting.posted += 1;
        }
        if posting.waiting == 0 {
            self.capacity.clear_waiters();
        }
    }
}

#[test]
fn loom_queued_work_is_posted_when_capacity_is_freed() {
    ::loom::model(|| {
        let queue = Arc::new(PostQueue {
            capacity: Capacity::new(1, false),
            posting: Mutex::new(QueuedWork { posted: 1, waiting: 0 }),
        });
        let drainer = thread::spawn({
            let queue = queue.clone();
            move || {
                if queue.capacity.retire(0) {
                    queue.post_queued(&mut queue.posting.lock().unwrap());
                }
            }
        });
        {
            let mut posting = queue.posting.lock().unwrap();
            if posting.waiting == 0 && queue.capacity.free(posting.posted) > 0 {
                posting.posted += 1;
            } else {
                posting.waiting += 1;
                queue.capacity.announce_waiter();
                queue.post_queued(&mut posting);
            }
        }
        drainer.join().unwrap();
        let posting = queue.posting.lock().unwrap();
        assert_eq!(
            (posting.waiting, posting.posted),
            (0, 2),
            "work is queued although capacity is free"
        );
        assert_eq!(queue.capacity.in_flight(posting.posted), 1);
    });
}

/// A send queue with streams: its work in flight, and what the device has made of it.
struct StreamQueue {
    capacity: Capacity,
    posting: Mutex<Posting>,
    streams: StdArc<Streams>,
    device: Mutex<StreamDevice>,
}

#[derive(Default)]
struct StreamDevice {
    has_failed: bool,
    /// Positions of work that is not dispatched yet, and whether it was executed.
    completions: VecDeque<(u32, bool)>,
    executed: Vec<u32>,
    flushed: Vec<u32>,
    resets: u32,
}

const STREAM: u16 = 1;

impl StreamQueue {
    /// Returns a queue whose first work request has failed, which is not dispatched yet.
    fn failed() -> Arc<Self> {
        let streams = Streams::new(2);
        let mut work = StreamWork::new(streams.clone(), 4);
        work.record(STREAM, 0);
        let posting = Posting {
            poster: None,
            cursor: Cursor::default(),
            posted: 1,
            until: 0,
            waited: 0,
            wait_queue: VecDeque::new(),
            watch: Watch::default(),
            streams: Some(Box::new(work)),
        };
        let completions = VecDeque::from([(0, false)]);
        let device = StreamDevice { has_failed: true, completions, ..StreamDevice::default() };
        Arc::new(Self {
            capacity: Capacity::new(4, false),
            posting: Mutex::new(posting),
            streams,
            device: Mutex::new(device),
        })
    }

    /// Posts like a sender, or if `generation` is given, like a lease. Returns the position, or
    /// `None` if the stream refuses the work.
    fn post(&self, generation: Option<u32>) -> Option<u32> {
        if generation.is_none() && self.streams.has_failed(STREAM) {
            return None;
        }
        let mut posting = self.posting.lock().unwrap();
        if posting.has_outlived(StreamUse { number: STREAM, generation }) {
            return None;
        }
        let position = posting.posted as u32;
        posting.streams.as_mut().unwrap().record(STREAM, position);
        let mut device = self.device.lock().unwrap();
        let executes = !device.has_failed;
        device.completions.push_back((position, executes));
        posting.posted += 1;
        Some(position)
    }

    /// Dispatches all completions, like `WorkQueue::complete`.
    fn dispatch(&self) {
        loop {
            let next = self.device.lock().unwrap().completions.pop_front();
            let Some((position, executed)) = next else { return };
            if executed {
                self.capacity.retire(position);
                self.device.lock().unwrap().executed.push(position);
                continue;
            }
            let failed = self.posting.lock().unwrap().fail_stream(position);
            assert_eq!(failed, Some(STREAM));
            self.capacity.retire(position);
            self.device.lock().unwrap().flushed.push(position);
            if self.posting.lock().unwrap().is_drained(STREAM, &self.capacity) {
                self.restore();
            }
        }
    }

    /// Resets the drained streams, like `WorkQueue::restore_streams`.
    fn restore(&self) {
        let posting = self.posting.lock().unwrap();
        for stream in posting.drained_streams(&self.capacity) {
            let mut device = self.device.lock().unwrap();
            assert!(device.completions.is_empty(), "the stream was reset with work in flight");
            assert!(device.has_failed, "the stream was reset twice");
            device.has_failed = false;
            device.resets += 1;
            self.streams.restore(stream);
        }
    }
}

#[test]
fn loom_work_posted_at_the_reset_of_its_stream_is_refused_flushed_or_executed() {
    ::loom::model(|| {
        let queue = StreamQueue::failed();
        let drainer = thread::spawn({
            let queue = queue.clone();
            move || queue.dispatch()
        });
        let posted = queue.post(None);
        drainer.join().unwrap();
        queue.dispatch();
        {
            let device = queue.device.lock().unwrap();
            let mut reported = device.flushed.clone();
            reported.extend(&device.executed);
            let expected: Vec<u32> = std::iter::once(0).chain(posted).collect();
            assert_eq!(reported, expected, "each posted work request is reported once");
            assert_eq!((device.resets, device.has_failed), (1, false));
        }
        assert!(!queue.streams.has_failed(STREAM));
        assert_eq!((queue.streams.generation(STREAM), queue.streams.resets()), (1, 1));
        let next = queue.post(None);
        queue.dispatch();
        let device = queue.device.lock().unwrap();
        assert_eq!(device.executed.last().copied(), next, "the stream is usable again");
        assert!(next.is_some());
    });
}

#[test]
fn loom_work_of_a_lease_is_not_executed_after_the_reset_of_its_stream() {
    ::loom::model(|| {
        let queue = StreamQueue::failed();
        let generation = queue.streams.generation(STREAM);
        let drainer = thread::spawn({
            let queue = queue.clone();
            move || queue.dispatch()
        });
        let posted = queue.post(Some(generation));
        drainer.join().unwrap();
        queue.dispatch();
        let device = queue.device.lock().unwrap();
        let expected: Vec<u32> = std::iter::once(0).chain(posted).collect();
        assert_eq!((&device.flushed, &device.executed), (&expected, &Vec::new()));
        assert_eq!((device.resets, queue.streams.has_failed(STREAM)), (1, false));
    });
}

#[test]
fn loom_a_peer_that_leaves_a_stream_after_its_work_knows_of_a_failure() {
    ::loom::model(|| {
        let queue = StreamQueue::failed();
        let [_other, stream] = [(); 2].map(|()| queue.streams.assign());
        assert_eq!(stream.number(), STREAM);
        let drainer = thread::spawn({
            let queue = queue.clone();
            move || queue.dispatch()
        });
        // Like the rebalance and the replacement of a stream in a pool of initiators.
        let has_ended = {
            let posting = queue.posting.lock().unwrap();
            queue.capacity.in_flight(posting.posted as u32) == 0
        };
        if has_ended || stream.has_failed() {
            assert!(stream.has_failed_since(), "left without the failure");
        }
        drainer.join().unwrap();
        assert!(stream.has_failed_since());
    });
}

#[test]
fn loom_a_stream_that_fails_when_it_is_assigned_has_failed_since() {
    ::loom::model(|| {
        let queue = StreamQueue::failed();
        // The stream that fails has the fewest peers then.
        let _other = queue.streams.assign();
        let drainer = thread::spawn({
            let queue = queue.clone();
            move || {
                assert_eq!(queue.posting.lock().unwrap().fail_stream(0), Some(STREAM));
            }
        });
        let assigned = queue.streams.assign();
        drainer.join().unwrap();
        assert!(assigned.number() != STREAM || assigned.has_failed_since());
    });
}

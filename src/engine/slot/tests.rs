//! Every phase and step of one slot, in one thread. `loom.rs` tests concurrent threads.

use std::sync::atomic::AtomicUsize;
use std::task::Wake;

use super::*;

const ID: WrId = WrId(7);

fn slot() -> Slot<()> {
    Slot::new(ID, false)
}

#[derive(Default)]
struct Count(AtomicUsize);

impl Wake for Count {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    }
}

fn wakers() -> [(Arc<Count>, Waker); 2] {
    std::array::from_fn(|_| {
        let count = Arc::<Count>::default();
        (count.clone(), count.into())
    })
}

fn success() -> WorkCompletion {
    WorkCompletion { wr_id: ID, ..WorkCompletion::EMPTY }
}

fn complete(slot: &Slot<()>, id: WrId) -> bool {
    slot.without_waker(id)
        .is_some_and(|without_waker| slot.finish_without_waker(without_waker, &success()))
}

fn has_no_waker_in(slot: &Slot<()>, id: WrId) -> bool {
    slot.without_waker(id).is_some()
}

#[test]
fn completion_of_an_operation_that_does_not_wait_stays_in_the_slot() {
    let slot = slot();
    assert!(slot.in_flight().is_none() && !slot.is_current(ID));
    assert!(slot.claim(1));
    assert!(!slot.claim(1), "it is taken");
    assert_eq!((slot.id(), slot.parts(), slot.in_flight()), (ID, 1, Some(ID)));
    assert!(
        slot.is_new() && slot.may_take_own() && slot.is_current(ID) && has_no_waker_in(&slot, ID)
    );
    assert!(!slot.is_complete() && !slot.is_current(WrId(8)) && !has_no_waker_in(&slot, WrId(8)));
    assert!(slot.wake_to_repoll().is_none(), "nothing waits");

    assert!(!complete(&slot, WrId(8)), "the id of another generation");
    assert!(matches!(slot.finish(WrId(8), Ok(success())), Finished::Stale));
    assert!(!slot.is_complete());
    assert!(complete(&slot, ID));
    assert!(
        slot.is_complete() && !slot.is_new() && !slot.may_take_own() && slot.in_flight().is_none()
    );
    assert!(!slot.is_current(ID) && !has_no_waker_in(&slot, ID));
    assert!(slot.outcome(|outcome| outcome.is_ok_and(|completion| completion.wr_id == ID)));
    // A second result changes nothing.
    assert!(!complete(&slot, ID));
    assert!(matches!(slot.finish(ID, Err(OpErrorKind::Closed)), Finished::Stale));
    assert!(slot.outcome(Result::is_ok));
    let [(_, waker), _] = wakers();
    assert_eq!(slot.register(waker.clone(), &mut Discarded::default()), Registered::Complete);

    slot.free();
    assert!(!slot.is_complete() && slot.id() != ID);
    assert!(slot.claim(1));
    assert!(slot.is_new());
    assert!(matches!(slot.finish(slot.id(), Ok(success())), Finished::WithoutWaker));
    slot.free();
    // The future is also the drainer.
    assert!(slot.claim(1));
    slot.finish_own();
    assert!(slot.is_complete());
    slot.free();
}

#[test]
fn operation_that_waits_is_woken_by_its_latest_waker() {
    let slot = slot();
    assert!(slot.claim(1));
    let ([(first, earlier), (second, later)], mut discarded) = (wakers(), Discarded::default());
    assert_eq!(slot.register(earlier.clone(), &mut discarded), Registered::Fresh);
    assert!(
        !slot.is_new()
            && !slot.may_take_own()
            && !has_no_waker_in(&slot, ID)
            && slot.is_current(ID)
    );
    assert!(discarded.iter().all(Option::is_none) && slot.in_flight() == Some(ID));
    assert!(!complete(&slot, ID), "its waker is to be taken");
    assert_eq!(slot.register(later.clone(), &mut discarded), Registered::Again);
    assert!(discarded[0].take().is_some_and(|waker| waker.data() == earlier.data()));

    let (waker, stopped_waiting) = slot.wake_to_repoll().expect("it waits");
    assert!(stopped_waiting && waker.data() == later.data());
    assert!(slot.may_take_own() && slot.wake_to_repoll().is_none());
    assert_eq!(slot.register(waker.clone(), &mut discarded), Registered::Fresh);
    let Finished::Wake(waker) = slot.finish(ID, Err(OpErrorKind::Closed)) else {
        panic!("it waits")
    };
    waker.wake();
    let woken = [first, second].map(|count| count.0.load(std::sync::atomic::Ordering::Relaxed));
    assert_eq!((woken, slot.is_complete()), ([0, 1], true));
    assert!(slot.outcome(|outcome| matches!(outcome, Err(OpErrorKind::Closed))));
}

#[test]
fn spin_rounds_start_at_zero_in_each_generation() {
    let slot = slot();
    assert!(slot.claim(1));
    assert_eq!(slot.rounds(), 0);
    slot.spin(3);
    assert_eq!(slot.rounds(), 3);
    assert!(
        !slot.is_new() && slot.may_take_own() && has_no_waker_in(&slot, ID),
        "it has spun and does not wait"
    );
    assert!(complete(&slot, ID) && slot.is_complete());
    slot.free();
    assert!(slot.claim(1));
    assert_eq!(slot.rounds(), 0);
}

#[test]
fn operation_with_a_timestamp_never_takes_its_own_completion() {
    let slot = slot().stamped();
    assert!(slot.claim(1));
    assert!(!slot.is_new() && !slot.may_take_own());
    assert!(slot.is_current(ID) && has_no_waker_in(&slot, ID));
    assert!(complete(&slot, ID) && slot.is_complete());
    slot.free();
}

#[test]
fn buffers_of_an_abandoned_operation_are_returned_by_its_completion() {
    let (slot, [(_, waker), _]) = (slot(), wakers());
    let held = |value: u8| -> Option<DetachedBuffers> { Some(Box::new(value)) };
    let value = |held: Option<DetachedBuffers>| *held.unwrap().downcast::<u8>().unwrap();
    for waits in [false, true] {
        assert!(slot.claim(1));
        let id = slot.id();
        if waits {
            assert_eq!(slot.register(waker.clone(), &mut Discarded::default()), Registered::Fresh);
        }
        assert!(matches!(slot.detach(held(1)), Detach::InFlight { waiting } if waiting == waits));
        assert!(slot.is_current(id) && slot.in_flight() == Some(id) && !has_no_waker_in(&slot, id));
        assert!(!complete(&slot, id));
        let Finished::Detached { held, waker } = slot.finish(id, Ok(success())) else {
            panic!("it was abandoned")
        };
        assert_eq!((value(held), waker.is_some()), (1, waits));
        assert!(slot.in_flight() == Some(id), "until it is freed");
        slot.free();
        assert!(slot.in_flight().is_none() && slot.id() != id);
    }
    assert!(slot.claim(1));
    slot.finish_own();
    let Detach::Complete(back) = slot.detach(held(2)) else { panic!("it is complete") };
    assert_eq!(value(back), 2);
    slot.free();
    assert!(slot.claim(1));
}

#[test]
fn batch_takes_one_generation_and_one_position_per_work_request() {
    let slot = slot();
    assert!(slot.claim(5));
    assert_eq!((slot.id(), slot.parts()), (WrId(ID.0 + 4 * GENERATION), 5));
    slot.set_part_position(slot.id_of(1), u32::MAX);
    assert_eq!((slot.start(), slot.position()), (u32::MAX - 1, 2));
    slot.set_part_position(slot.id(), 14);
    assert_eq!((slot.start(), slot.position()), (10, 14));
    assert_eq!([0, 4].map(|part| slot.current_part(slot.id_of(part))), [Some(0), Some(4)]);
    assert_eq!(
        slot.part(WrId(slot.id_of(0).0.wrapping_sub(GENERATION))),
        None,
        "the preceding generation"
    );
    slot.finish_own();
    assert_eq!(slot.current_part(slot.id()), None, "it is over");
    assert!(!slot.end_parts(), "none has failed");
    slot.free();
    assert!(slot.claim(1));
    assert_eq!((slot.id(), slot.parts()), (WrId(ID.0 + 5 * GENERATION), 1));
}

#[derive(Debug, Clone, Copy)]
enum Step {
    Claim,
    Register,
    Finish,
    FinishWithoutWaker,
    WakeToRepoll,
    Detach,
    Free,
}

/// Returns the phase after a step; `None` if no party takes this step in this phase.
fn after(phase: Phase, step: Step) -> Option<Phase> {
    use Phase::{Complete, Detached, Free, Submitted, Waiting, Waking};
    match (step, phase) {
        (Step::Claim, Free) => Some(Submitted),
        (Step::Register, Submitted | Waiting) => Some(Waiting),
        (Step::Finish, Submitted | Waiting) => Some(Complete),
        (Step::FinishWithoutWaker, Submitted) => Some(Complete),
        (Step::WakeToRepoll, Waiting) => Some(Submitted),
        (Step::Detach, Submitted | Waiting | Waking) => Some(Detached),
        (Step::Free, Submitted | Complete | Detached) => Some(Free),
        // The future owns the slot until it detaches.
        (Step::Register | Step::Detach, Free | Detached) => None,
        // The drainer or the future still uses the slot.
        (Step::Free, Free | Waiting | Waking) => None,
        // Nothing changes. A detached slot is freed by the party that finished it.
        _ => Some(phase),
    }
}

#[test]
fn each_step_leads_from_each_phase_where_the_table_says() {
    use Phase::{Complete, Detached, Free, Submitted, Waiting, Waking};
    let steps = [
        Step::Claim,
        Step::Register,
        Step::Finish,
        Step::FinishWithoutWaker,
        Step::WakeToRepoll,
        Step::Detach,
        Step::Free,
    ];
    for phase in [Free, Submitted, Waiting, Waking, Complete, Detached] {
        for step in steps {
            let Some(expected) = after(phase, step) else { continue };
            let (slot, [(_, waker), _]) = (slot(), wakers());
            if phase != Free {
                assert!(slot.claim(1));
            }
            match phase {
                Free | Submitted => {}
                Waiting | Waking => assert_eq!(
                    slot.register(waker.clone(), &mut Discarded::default()),
                    Registered::Fresh
                ),
                Complete => assert!(complete(&slot, ID)),
                Detached => assert!(matches!(slot.detach(None), Detach::InFlight { .. })),
            }
            if phase == Waking {
                // Stands in for the drainer, which is another thread.
                slot.state.store(WAKING, Ordering::Relaxed);
            }
            let changed = match step {
                Step::Claim => slot.claim(1),
                Step::Register => {
                    matches!(
                        slot.register(waker, &mut Discarded::default()),
                        Registered::Fresh | Registered::Again
                    )
                }
                Step::Finish => !matches!(slot.finish(ID, Ok(success())), Finished::Stale),
                Step::FinishWithoutWaker => complete(&slot, ID),
                Step::WakeToRepoll => slot.wake_to_repoll().is_some(),
                Step::Detach => matches!(slot.detach(None), Detach::InFlight { .. }),
                Step::Free => {
                    slot.free();
                    slot.id() != ID
                }
            };
            let state = slot.state.load(Ordering::Relaxed);
            assert_eq!(state, expected as u16, "{step:?} of a slot that is {phase:?}");
            let again =
                matches!((phase, step), (Waiting, Step::Register) | (Detached, Step::Finish));
            assert_eq!(changed, phase != expected || again, "{step:?} of a slot that is {phase:?}");
        }
    }
}

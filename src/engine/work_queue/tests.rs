//! Batches that end before the device has done all of them.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use crate::engine::wake_list::WakeList;
use crate::engine::{CompletionMode, CompletionQueue};
use crate::error::{OpErrorKind, VerbError};
use crate::memory::{ExposedRegion, Pool};
use crate::op::{Batch, QueuePair};
use crate::software::{Faults, Network};
use crate::types::{Access, QpAttr, QpState};
use crate::verbs::Device;

// Shows C1.
#[test]
fn batch_that_was_done_before_a_reset_has_succeeded() {
    let device = Device::software_in(&Network::new(), "device").unwrap();
    let pd = device.protection_domain().unwrap();
    let queue = CompletionQueue::new(&device, CompletionMode::Event).unwrap();
    let [a, b] = [(); 2].map(|()| QueuePair::new(&pd, &queue).unwrap());
    a.connect(&b.endpoint()).unwrap();
    b.connect(&a.endpoint()).unwrap();
    let pool = Pool::new(&pd, 64, 8).unwrap();
    let region = ExposedRegion::new(&pd, vec![0; 64], Access::REMOTE_ALL).unwrap();
    for every in [0, 2] {
        let mut batch = Batch::new();
        batch.signal_every(every);
        for _ in 0..5 {
            batch.write(pool.try_alloc(64).unwrap(), region.grant());
        }
        let mut batch = pin!(a.post_batch(batch));
        queue.shared().drain();
        assert_eq!(a.send_counters().in_flight, 0);
        a.modify(&QpAttr::to_state(QpState::Reset)).unwrap();
        let mut context = Context::from_waker(Waker::noop());
        let Poll::Ready(result) = batch.as_mut().poll(&mut context) else { panic!("it is done") };
        assert!(result.is_ok(), "{:?}", result.results());
        drop(result);
        assert_eq!(pool.available(), 8);
        // Both ends are reset and reconnected for the next round.
        b.modify(&QpAttr::to_state(QpState::Reset)).unwrap();
        for qp in [&a, &b] {
            let path = qp.port_and_gid().0;
            let access = Some(Access::REMOTE_ALL);
            let attr = QpAttr {
                pkey_index: Some(0),
                port: Some(path),
                access,
                ..QpAttr::to_state(QpState::Init)
            };
            qp.modify(&attr).unwrap();
        }
        a.connect(&b.endpoint()).unwrap();
        b.connect(&a.endpoint()).unwrap();
    }
}

// Shows S1.
#[test]
fn batch_of_a_queue_pair_that_cannot_be_flushed_ends_and_keeps_its_buffers_until_that_is_destroyed()
{
    // The device processes nothing.
    let network = Network::simulated(1, Faults::none());
    let device = Device::software_in(&network, "stuck").unwrap();
    let pd = device.protection_domain().unwrap();
    let queue = CompletionQueue::new(&device, CompletionMode::Event).unwrap();
    let [a, b] = [(); 2].map(|()| QueuePair::new(&pd, &queue).unwrap());
    a.connect(&b.endpoint()).unwrap();
    b.connect(&a.endpoint()).unwrap();
    let pool = Pool::new(&pd, 64, 2).unwrap();
    let region = ExposedRegion::new(&pd, vec![0; 64], Access::REMOTE_ALL).unwrap();
    let mut batch = Batch::new();
    for _ in 0..2 {
        batch.read(pool.try_alloc(64).unwrap(), region.grant());
    }
    let mut batch = pin!(a.post_batch(batch));
    let mut context = Context::from_waker(Waker::noop());
    assert!(batch.as_mut().poll(&mut context).is_pending());

    let schedule_teardown = || {
        let mut woken = WakeList::new();
        let [stuck, refused] =
            ["ibv_modify_qp", "ibv_post_send"].map(|verb| VerbError::new(verb, VerbError::ENOMEM));
        a.send_queue().schedule_teardown(&stuck, refused, &mut woken);
        woken
    };
    let woken = schedule_teardown();
    assert!(batch.as_mut().poll(&mut context).is_pending() && pool.available() == 0);
    woken.finish();
    let Poll::Ready(result) = batch.as_mut().poll(&mut context) else { panic!("it hangs") };
    assert!(
        result
            .results()
            .iter()
            .all(|part| matches!(part, Err(OpErrorKind::Post(_) | OpErrorKind::Completion(_))))
    );
    drop(result);
    assert_eq!(pool.available(), 2);
    schedule_teardown().finish();
}

// Shows C1.
#[test]
fn part_in_flight_before_one_that_was_refused_has_not_succeeded() {
    // The device processes nothing.
    let device = Device::software_in(&Network::simulated(1, Faults::none()), "stuck").unwrap();
    let pd = device.protection_domain().unwrap();
    let queue = CompletionQueue::new(&device, CompletionMode::Event).unwrap();
    let [a, b] = [(); 2].map(|()| QueuePair::new(&pd, &queue).unwrap());
    a.connect(&b.endpoint()).unwrap();
    b.connect(&a.endpoint()).unwrap();
    let pool = Pool::new(&pd, 64, 3).unwrap();
    let region = ExposedRegion::new(&pd, vec![0; 64], Access::REMOTE_ALL).unwrap();
    let mut batch = Batch::new();
    for _ in 0..3 {
        batch.read(pool.try_alloc(64).unwrap(), region.grant());
    }
    let mut batch = pin!(a.post_batch(batch));
    // The state that `refuse_from` leaves: the device holds the first part and the one in place of
    // the last.
    let refused = OpErrorKind::Post(VerbError::new("ibv_post_send", VerbError::ENOMEM));
    a.send_queue().failures.fail_part(a.send_queue().slots().slot(0), 1, refused);
    let mut context = Context::from_waker(Waker::noop());
    assert!(batch.as_mut().poll(&mut context).is_pending());
    a.modify(&QpAttr::to_state(QpState::Reset)).unwrap();
    let Poll::Ready(result) = batch.as_mut().poll(&mut context) else { panic!("it hangs") };
    assert_eq!(
        result.results(),
        [Err(OpErrorKind::Closed), Err(refused), Err(OpErrorKind::Closed)]
    );
    drop(result);
    assert_eq!(pool.available(), 3);
}

struct Panics;

impl tracing::Subscriber for Panics {
    fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}

    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}

    fn event(&self, _: &tracing::Event<'_>) {
        std::panic::resume_unwind(Box::new("a subscriber"));
    }

    fn enter(&self, _: &tracing::span::Id) {}

    fn exit(&self, _: &tracing::span::Id) {}
}

// Shows S1.
#[test]
fn buffers_posted_while_a_subscriber_panics_are_not_freed() {
    // The device processes nothing.
    let device = Device::software_in(&Network::simulated(1, Faults::none()), "stuck").unwrap();
    let pd = device.protection_domain().unwrap();
    let queue = CompletionQueue::new(&device, CompletionMode::Event).unwrap();
    let [a, b] = [(); 2].map(|()| QueuePair::builder(&pd, &queue).max_send_wr(2).build().unwrap());
    a.connect(&b.endpoint()).unwrap();
    b.connect(&a.endpoint()).unwrap();
    let pool = Pool::new(&pd, 64, 4).unwrap();
    let region = ExposedRegion::new(&pd, vec![0; 64], Access::REMOTE_ALL).unwrap();
    let alloc = || pool.try_alloc(64).unwrap();
    // With a single subscriber, an event that another test's thread reaches first would never be
    // enabled.
    let _second = tracing::Dispatch::new(tracing::subscriber::NoSubscriber::new());
    for left in [3, 2] {
        let posts = || {
            if left == 3 {
                drop(a.write(alloc(), region.grant()));
            } else {
                let mut batch = Batch::new();
                batch.write(alloc(), region.grant());
                drop(a.post_batch(batch));
            }
        };
        tracing::subscriber::with_default(Panics, posts);
        assert_eq!(pool.available(), left, "the buffer is available again");
    }
}

#[derive(Default)]
struct PanicsWhenWoken(AtomicBool);

impl Wake for PanicsWhenWoken {
    fn wake(self: Arc<Self>) {
        if self.0.load(Ordering::Relaxed) {
            std::panic::resume_unwind(Box::new("a waker"));
        }
    }
}

#[test]
fn panic_of_another_waker_does_not_reach_the_poster() {
    // The device processes nothing.
    let device = Device::software_in(&Network::simulated(1, Faults::none()), "stuck").unwrap();
    let pd = device.protection_domain().unwrap();
    let queue = CompletionQueue::new(&device, CompletionMode::Event).unwrap();
    let [a, b] = [(); 2].map(|()| QueuePair::builder(&pd, &queue).max_send_wr(1).build().unwrap());
    a.connect(&b.endpoint()).unwrap();
    b.connect(&a.endpoint()).unwrap();
    let pool = Pool::new(&pd, 64, 4).unwrap();
    let region = ExposedRegion::new(&pd, vec![0; 64], Access::REMOTE_ALL).unwrap();
    let alloc = || pool.try_alloc(64).unwrap();
    let _first = a.write(alloc(), region.grant());
    // Queued; the full device refuses it once the counted capacity says otherwise.
    let mut waits = pin!(a.write(alloc(), region.grant()));
    let panics = Arc::new(PanicsWhenWoken::default());
    assert!(waits.as_mut().poll(&mut Context::from_waker(&panics.clone().into())).is_pending());
    panics.0.store(true, Ordering::Relaxed);
    a.send_queue().capacity.retire(0);
    let posted =
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| a.write(alloc(), region.grant())));
    let mut posted = pin!(posted.expect("the panic of another task's waker"));
    for write in [&mut waits, &mut posted] {
        let Poll::Ready(refused) = write.as_mut().poll(&mut Context::from_waker(Waker::noop()))
        else {
            panic!()
        };
        drop(refused.unwrap_err().into_buffer());
    }
    assert_eq!(pool.available(), 3);
}

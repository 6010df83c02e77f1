//! Arming, events and the task that spins: no completion is missed.

use std::sync::Arc as StdArc;
use std::task::Waker;

use ::loom::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use ::loom::sync::{Arc, Mutex};
use ::loom::thread;

use super::{Flag, POSTED, completed, flag};
use crate::engine::arm::{self, Arm, Armed};
use crate::engine::slot::{Discarded, Finished, Registered, Slot};
use crate::types::WrId;

/// A runtime that watches the channel.
type Runtime = u32;

struct Device {
    completions: u32,
    /// The completion waker learns of them.
    receives: u32,
    /// The device is lost: drains fail once they find nothing.
    lost: bool,
    arm: Arm,
    events: u32,
    servers: Vec<Waker>,
}

impl Device {
    fn raise(&mut self, arm: Arm) -> bool {
        let raises = self.arm >= arm;
        if raises {
            (self.arm, self.events) = (Arm::Off, self.events + 1);
            self.servers.iter().for_each(Waker::wake_by_ref);
        }
        raises
    }
}

struct State {
    failed: bool,
    request: arm::Request,
    spinning: Option<Runtime>,
}

struct Queue {
    device: Mutex<Device>,
    state: Mutex<State>,
    slot: Slot<()>,
    id: WrId,
    waiting: AtomicU32,
    completion_waker: Option<Waker>,
    runtimes: Mutex<Vec<Runtime>>,
}

struct Draining<'a> {
    queue: &'a Queue,
    state: &'a mut State,
    woken: Vec<Waker>,
}

impl Armed for Draining<'_> {
    type Runtime = Runtime;

    fn drain(&mut self) -> bool {
        let (taken, received) = {
            let mut device = self.queue.device.lock().unwrap();
            let (taken, received) =
                (std::mem::take(&mut device.completions), std::mem::take(&mut device.receives));
            self.state.failed |= device.lost && taken + received == 0;
            (taken, received)
        };
        self.woken.extend(self.queue.completion_waker.iter().filter(|_| received > 0).cloned());
        for _ in 0..taken {
            match completed(&self.queue.slot, self.queue.id) {
                Finished::Wake(waker) => {
                    self.queue.waiting.fetch_sub(1, Ordering::Relaxed);
                    self.woken.push(waker);
                }
                Finished::WithoutWaker => {}
                other => panic!("{other:?}"),
            }
        }
        taken + received > 0
    }

    fn arm(&mut self, arm: Arm) -> bool {
        let mut device = self.queue.device.lock().unwrap();
        device.arm = device.arm.max(arm);
        true
    }

    fn take_event(&mut self) -> bool {
        let mut device = self.queue.device.lock().unwrap();
        let any = device.events > 0;
        device.events = device.events.saturating_sub(1);
        any
    }

    fn awaited(&self) -> Arm {
        match &self.queue.completion_waker {
            _ if self.queue.waiting.load(Ordering::Relaxed) > 0 => Arm::All,
            Some(_) => Arm::Solicited,
            None => Arm::Off,
        }
    }

    fn request(&mut self) -> &mut arm::Request {
        &mut self.state.request
    }

    fn spinning(&mut self) -> &mut Option<Runtime> {
        &mut self.state.spinning
    }
}

impl Queue {
    fn new(arm: Arm, completion_waker: Option<Waker>) -> Self {
        let slot = Slot::new(POSTED.wr_id, false);
        assert!(slot.claim(1), "a new slot is free");
        let device = Device {
            completions: 0,
            receives: 0,
            lost: false,
            arm,
            events: 0,
            servers: Vec::new(),
        };
        Self {
            device: Mutex::new(device),
            state: Mutex::new(State {
                failed: false,
                request: arm::Request::new(arm),
                spinning: None,
            }),
            id: slot.id(),
            slot,
            waiting: AtomicU32::new(0),
            completion_waker,
            runtimes: Mutex::new(Vec::new()),
        }
    }

    fn with<R>(&self, f: impl FnOnce(&mut Draining<'_>) -> R) -> R {
        let mut state = self.state.lock().unwrap();
        let mut draining = Draining { queue: self, state: &mut state, woken: Vec::new() };
        let result = f(&mut draining);
        let woken = std::mem::take(&mut draining.woken);
        drop(state);
        woken.into_iter().for_each(Waker::wake);
        result
    }

    fn complete(&self) {
        let mut device = self.device.lock().unwrap();
        device.completions += 1;
        device.raise(Arm::All);
    }

    fn receive(&self) {
        let mut device = self.device.lock().unwrap();
        device.receives += 1;
        device.raise(Arm::Solicited);
    }

    /// Like `wait`. Returns true if the operation is complete.
    fn wait(&self, waker: Waker) -> bool {
        self.with(|draining| {
            draining.drain();
            if self.slot.is_complete() {
                return true;
            }
            self.waiting.fetch_add(1, Ordering::Relaxed);
            assert_eq!(self.slot.register(waker, &mut Discarded::default()), Registered::Fresh);
            arm::before_park(draining);
            self.slot.is_complete()
        })
    }

    /// Like `on_event`. Returns true if the task of `runtime`, which exists if `has_task`, is to
    /// spin.
    fn on_event(&self, runtime: Runtime, has_task: bool) -> bool {
        self.with(|draining| {
            let is_only = self.runtimes.lock().unwrap().iter().all(|&watching| watching == runtime);
            arm::on_event_or_spin(draining, (has_task && is_only).then_some(runtime))
        })
    }

    fn stop_spinning(&self) {
        self.with(|draining| {
            if draining.state.spinning == Some(OWN) {
                arm::stop_spinning(draining);
            }
        });
    }

    fn is_readable(&self) -> bool {
        self.device.lock().unwrap().events > 0
    }

    fn receives(&self) -> u32 {
        self.device.lock().unwrap().receives
    }
}

// Shows C2.
#[test]
fn loom_a_parked_task_never_misses_a_completion() {
    // A request for solicited messages may raise its event before or after it is replaced.
    for (arm, solicited) in [Arm::Off, Arm::Solicited, Arm::All]
        .into_iter()
        .flat_map(|arm| [false, true].map(|solicited| (arm, solicited)))
    {
        ::loom::model(move || {
            let queue = Arc::new(Queue::new(arm, None));
            let device = thread::spawn({
                let queue = queue.clone();
                move || {
                    let readable = {
                        let mut device = queue.device.lock().unwrap();
                        device.completions += 1;
                        device.raise(if solicited { Arm::Solicited } else { Arm::All })
                    };
                    // The reactor acts only after the channel becomes readable.
                    if readable {
                        queue.with(|draining| arm::on_event(draining));
                    }
                }
            });
            let (woken, waker) = flag();
            let complete = queue.wait(waker);
            device.join().unwrap();
            assert!(complete || woken.woken(), "asleep with the completion in the queue");
        });
    }
}

#[test]
fn loom_a_parked_task_learns_of_a_device_that_is_lost_after_a_completion() {
    for arm in [Arm::Off, Arm::Solicited, Arm::All] {
        ::loom::model(move || {
            let queue = Arc::new(Queue::new(arm, None));
            let device = thread::spawn({
                let queue = queue.clone();
                move || {
                    queue.receive();
                    let mut device = queue.device.lock().unwrap();
                    device.lost = true;
                    device.raise(Arm::Solicited);
                }
            });
            assert!(!queue.wait(Waker::noop().clone()));
            // The reactor acts only after the channel becomes readable.
            if queue.is_readable() {
                queue.with(|draining| arm::on_event(draining));
            }
            device.join().unwrap();
            while queue.is_readable() {
                queue.with(|draining| arm::on_event(draining));
            }
            assert!(queue.state.lock().unwrap().failed, "asleep although the device is lost");
        });
    }
}

// Shows C2.
#[test]
fn loom_a_completion_around_the_start_of_the_serving_task_wakes_its_operation() {
    ::loom::model(|| {
        let queue = Arc::new(Queue::new(Arm::Off, None));
        let device = thread::spawn({
            let queue = queue.clone();
            move || queue.complete()
        });
        let (woken, waker) = flag();
        let complete = queue.wait(waker);
        let (scheduled, server) = flag();
        let task = thread::spawn({
            let queue = queue.clone();
            move || {
                queue.device.lock().unwrap().servers.push(server);
                queue.with(|draining| arm::on_event(draining));
            }
        });
        task.join().unwrap();
        device.join().unwrap();
        if scheduled.woken() {
            queue.with(|draining| arm::on_event(draining));
        }
        assert!(complete || woken.woken(), "asleep with the completion in the queue");
    });
}

const OWN: Runtime = 1;
const OTHER: Runtime = 2;

/// The polls without a completion after which a task ends to spin.
const BUDGET: u32 = 1;

/// Like `ReactorTask`.
struct SpinningTask {
    queue: Arc<Queue>,
    rounds: u32,
    scheduled: StdArc<Flag>,
}

impl SpinningTask {
    /// The task runs in [`OWN`]. It spins, or has an event to handle if `by_event`.
    fn new(by_event: bool, completion_waker: Waker) -> Self {
        let queue = Arc::new(Queue::new(Arm::Solicited, Some(completion_waker)));
        queue.runtimes.lock().unwrap().push(OWN);
        let (scheduled, server) = flag();
        let mut device = queue.device.lock().unwrap();
        assert!(device.raise(Arm::Solicited));
        device.servers.push(server);
        drop(device);
        let rounds = if by_event { 0 } else { u32::from(queue.on_event(OWN, true)) };
        Self { queue, rounds, scheduled }
    }

    fn poll(&mut self) {
        // An event while it spins schedules it once, for this poll.
        self.scheduled.reset();
        if self.rounds == 0 {
            self.queue.on_event(OWN, true);
        }
        let rounds = self.rounds;
        self.rounds = self.queue.with(|draining| {
            if draining.state.spinning != Some(OWN) {
                return 0;
            }
            draining.drain();
            if rounds < BUDGET {
                return rounds + 1;
            }
            arm::stop_spinning(draining);
            0
        });
    }

    fn run(&mut self) {
        self.poll();
        while self.rounds > 0 || self.scheduled.woken() {
            self.poll();
        }
    }
}

// Shows C2.
#[test]
fn loom_receives_are_found_while_a_task_begins_or_ends_to_spin() {
    for by_event in [false, true] {
        ::loom::model(move || {
            let (woken, completion_waker) = flag();
            let mut task = SpinningTask::new(by_event, completion_waker);
            let device = thread::spawn({
                let queue = task.queue.clone();
                move || (0..2).for_each(|_| queue.receive())
            });
            task.run();
            device.join().unwrap();
            if task.scheduled.woken() {
                task.run();
            }
            assert!(task.queue.receives() == 0 && woken.woken(), "receives not found");
        });
    }
}

// Shows C2.
#[test]
fn loom_an_operation_that_waits_beside_a_spinning_task_is_woken() {
    for by_event in [false, true] {
        ::loom::model(move || {
            let mut task = SpinningTask::new(by_event, Waker::noop().clone());
            let device = thread::spawn({
                let queue = task.queue.clone();
                move || queue.complete()
            });
            let (woken, waker) = flag();
            let waiter = thread::spawn({
                let queue = task.queue.clone();
                move || queue.wait(waker)
            });
            task.run();
            let complete = waiter.join().unwrap();
            device.join().unwrap();
            if task.scheduled.woken() {
                task.run();
            }
            assert!(complete || woken.woken(), "asleep with the completion in the queue");
        });
    }
}

// Shows C2.
#[test]
fn loom_an_event_for_an_operation_that_waits_beside_a_spinning_task_is_taken() {
    ::loom::model(|| {
        let (found, completion_waker) = flag();
        let mut task = SpinningTask::new(false, completion_waker);
        let (woken, waker) = flag();
        assert!(!task.queue.wait(waker));
        // The receive is found only if the queue is armed again after the event.
        let device = thread::spawn({
            let queue = task.queue.clone();
            move || {
                queue.complete();
                queue.receive();
            }
        });
        task.run();
        device.join().unwrap();
        if task.scheduled.woken() {
            task.run();
        }
        assert!(woken.woken() && found.woken(), "asleep with a completion in the queue");
    });
}

// The reactor of the other runtime acts only after the channel becomes readable.
// Shows C2.
#[test]
fn loom_a_receive_is_found_by_another_runtime_than_the_blocked_one_whose_task_spins() {
    for by_event in [false, true] {
        ::loom::model(move || {
            let (woken, completion_waker) = flag();
            let mut task = SpinningTask::new(by_event, completion_waker);
            let queue = task.queue.clone();
            let device = thread::spawn({
                let queue = queue.clone();
                move || queue.receive()
            });
            // Its runtime is blocked afterwards.
            let blocked = thread::spawn(move || task.poll());
            queue.runtimes.lock().unwrap().push(OTHER);
            queue.with(|draining| arm::arm_beside_spinning(draining, |runtime| runtime == OTHER));
            device.join().unwrap();
            blocked.join().unwrap();
            while queue.is_readable() {
                assert!(!queue.on_event(OTHER, true), "two runtimes watch the queue");
            }
            assert!(queue.receives() == 0 && woken.woken(), "the receive is not found");
        });
    }
}

// Shows C2.
#[test]
fn loom_a_receive_is_found_although_the_task_that_spins_is_dropped() {
    for by_event in [false, true] {
        ::loom::model(move || {
            let (woken, completion_waker) = flag();
            let SpinningTask { queue, .. } = SpinningTask::new(by_event, completion_waker);
            let ended = Arc::new(AtomicBool::new(false));
            let device = thread::spawn({
                let queue = queue.clone();
                move || queue.receive()
            });
            // Like the destructor of `ReactorTask`.
            let dropped = thread::spawn({
                let (queue, ended) = (queue.clone(), ended.clone());
                move || {
                    ended.store(true, Ordering::Release);
                    queue.stop_spinning();
                }
            });
            // Like `Reactor::on_event`.
            let on_event = || {
                if queue.on_event(OWN, !ended.load(Ordering::Acquire))
                    && ended.load(Ordering::Acquire)
                {
                    queue.stop_spinning();
                }
            };
            on_event();
            device.join().unwrap();
            dropped.join().unwrap();
            while queue.is_readable() {
                on_event();
            }
            assert!(queue.receives() == 0 && woken.woken(), "the receive is not found");
        });
    }
}

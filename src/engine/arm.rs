//! The arm, poll, park protocol, which prevents missed completions.
//!
//! Arming requests one event for the *next* completion. An earlier completion raises none, so the
//! queue is polled between arming and parking (`ibv_get_cq_event(3)`, NOTES). After an event, the
//! queue is polled, and armed again if operations still wait. One lock covers all of this.
//!
//! While only receives of solicited messages wait, only solicited completions are requested, so
//! that a SEND that no task awaits raises no event.
//!
//! In hybrid mode, a task of one runtime may *spin*: it polls the queue after an event, and arms it
//! only when it stops.

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Arm {
    Off,
    /// Completions of solicited messages, and failures.
    Solicited,
    All,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Request {
    arm: Arm,
    /// This request replaced another one, whose event may have been raised before.
    replaces: bool,
}

impl Request {
    pub(super) const NONE: Self = Self { arm: Arm::Off, replaces: false };

    #[cfg(all(test, loom))]
    pub(super) fn new(arm: Arm) -> Self {
        Self { arm, replaces: false }
    }
}

pub(super) trait Armed {
    type Runtime: Copy + PartialEq;

    /// Returns true if it took any completions.
    fn drain(&mut self) -> bool;

    fn arm(&mut self, arm: Arm) -> bool;

    fn take_event(&mut self) -> bool;

    fn awaited(&self) -> Arm;

    fn request(&mut self) -> &mut Request;

    /// Returns the runtime whose task spins. While it is set, the queue may be unarmed: the task is
    /// scheduled, and arms the queue before it clears this.
    fn spinning(&mut self) -> &mut Option<Self::Runtime>;
}

/// Called after the wakers of waiting operations are registered.
pub(super) fn before_park(queue: &mut impl Armed) {
    let arm = queue.awaited();
    let before = queue.request().arm;
    if before < arm && queue.arm(arm) {
        *queue.request() = Request { arm, replaces: before > Arm::Off };
        // Until a poll finds nothing: only an empty poll reports a device that was lost before the
        // request.
        while queue.drain() {}
    }
}

#[inline]
fn take_event(queue: &mut impl Armed) {
    // One arming raises at most one event.
    if queue.take_event() {
        if queue.request().replaces {
            queue.take_event();
        }
        *queue.request() = Request::NONE;
    }
}

pub(super) fn on_event(queue: &mut impl Armed) {
    take_event(queue);
    queue.drain();
    before_park(queue);
}

/// Returns true if the task of `runtime` starts to spin, because it may and no other task does.
#[inline]
pub(super) fn on_event_or_spin<Q: Armed>(queue: &mut Q, runtime: Option<Q::Runtime>) -> bool {
    let spinning = *queue.spinning();
    let begins = runtime.filter(|own| spinning.is_none_or(|spinning| spinning == *own));
    if begins.is_some() {
        take_event(queue);
        queue.drain();
        *queue.spinning() = begins;
    } else {
        on_event(queue);
    }
    begins.is_some()
}

/// Requests an event if a task of another runtime spins, because that runtime may be blocked.
pub(super) fn arm_beside_spinning<Q: Armed>(
    queue: &mut Q,
    is_own: impl FnOnce(Q::Runtime) -> bool,
) {
    if queue.spinning().is_some_and(|runtime| !is_own(runtime)) {
        before_park(queue);
    }
}

pub(super) fn stop_spinning(queue: &mut impl Armed) {
    *queue.spinning() = None;
    // Another waiter may have armed the queue meanwhile, and its event may have been raised.
    on_event(queue);
}

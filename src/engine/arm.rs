//! The arm, poll, park protocol, which prevents missed completions.
//!
//! Arming requests one event at the *next* completion. An earlier completion raises none, so the
//! queue is polled between arming and parking (`ibv_get_cq_event(3)`, NOTES). While armed, the
//! event is still to come or in the channel. The component that takes it polls, and arms again if
//! operations still wait. One lock covers all of this.
//!
//! While only receives of solicited messages wait, solicited completions are requested: a SEND that
//! no task awaits then raises no event. A request for all completions replaces it.

/// The completions that raise the requested event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Arm {
    /// None: no event is requested.
    Off,
    /// Completions of solicited messages, and failures.
    Solicited,
    All,
}

/// The requested event, from arming until it is taken.
#[derive(Debug, Clone, Copy)]
pub(super) struct Request {
    arm: Arm,
    /// It replaced another request, whose event may have been raised before.
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
    fn drain(&mut self);

    /// Requests one event; returns false if the queue is dead.
    fn arm(&mut self, arm: Arm) -> bool;

    /// Takes an event from the channel; returns false if there is none.
    fn take_event(&mut self) -> bool;

    /// Returns the completions that operations wait for.
    fn awaited(&self) -> Arm;

    fn request(&mut self) -> &mut Request;
}

/// Arms and polls the queue for the operations that wait, whose wakers are registered.
pub(super) fn before_park(queue: &mut impl Armed) {
    let arm = queue.awaited();
    let before = queue.request().arm;
    if before < arm && queue.arm(arm) {
        *queue.request() = Request { arm, replaces: before > Arm::Off };
        queue.drain();
    }
}

/// Takes the requested event, if it was raised.
pub(super) fn take_event(queue: &mut impl Armed) {
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

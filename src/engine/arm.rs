//! The arm, poll, park protocol, which prevents missed completions.
//!
//! Arming requests one event at the *next* completion. An earlier completion raises none, so the
//! queue is polled between arming and parking (`ibv_get_cq_event(3)`, NOTES). While `armed` is set,
//! the event is still to come or in the channel. The component that takes it polls, and arms again
//! if operations still wait. One lock covers all of this.

pub(super) trait Armed {
    fn drain(&mut self);

    /// Requests one event; returns false if the queue is dead.
    fn arm(&mut self) -> bool;

    /// Takes an event from the channel; returns false if there is none.
    fn take_event(&mut self) -> bool;

    fn is_awaited(&self) -> bool;

    /// Accesses the flag: set from arming until the event is taken.
    fn armed(&mut self) -> &mut bool;
}

/// Arms and polls the queue, after an operation has registered its waker.
pub(super) fn before_park(queue: &mut impl Armed) {
    if !*queue.armed() && queue.arm() {
        *queue.armed() = true;
        queue.drain();
    }
}

pub(super) fn on_event(queue: &mut impl Armed) {
    // One arming raises at most one event, so one take suffices.
    if queue.take_event() {
        *queue.armed() = false;
    }
    queue.drain();
    if queue.is_awaited() {
        before_park(queue);
    }
}

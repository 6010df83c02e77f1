//! Arm, look again, park: how no completion is ever slept through.
//!
//! Arming asks a completion queue for one event at the *next* completion. One that came before raises none, so
//! whoever has armed looks once more before it parks (`ibv_get_cq_event(3)`, NOTES). While `armed` is set an
//! event is either still to come or already in the channel; whoever takes it out of the channel looks, and arms
//! again if somebody still waits. All of this happens under one lock.

/// A completion queue with its channel, as the protocol sees it.
pub(super) trait Armed {
    /// Takes all completions there are and finishes their operations.
    fn drain(&mut self);

    /// Asks for one event at the next completion; false if the queue is dead.
    fn arm(&mut self) -> bool;

    /// Takes an event out of the channel; false if there is none.
    fn take_event(&mut self) -> bool;

    /// True if an operation sleeps that only a completion can wake.
    fn is_awaited(&self) -> bool;

    /// True from arming until its event was taken.
    fn armed(&mut self) -> &mut bool;
}

/// An operation has registered its waker and is about to park.
pub(super) fn before_park(queue: &mut impl Armed) {
    if !*queue.armed() && queue.arm() {
        *queue.armed() = true;
        queue.drain();
    }
}

/// The channel has become readable.
pub(super) fn on_event(queue: &mut impl Armed) {
    // Armed once, the queue has raised at most one event: there is no second to look for.
    if queue.take_event() {
        *queue.armed() = false;
    }
    queue.drain();
    if queue.is_awaited() {
        before_park(queue);
    }
}

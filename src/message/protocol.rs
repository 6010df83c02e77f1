//! Protocol of one end of a connection, without I/O. Its input is headers of frames, events and time. Its output is headers of
//! frames to send, actions and a deadline.
//!
//! ```text
//!   frames that have arrived ─▶ receive ─┐                      ┌─▶ next_frame   frames that carry no message
//!   messages to send ─────────▶ flow ────┤                      ├─▶ abort_frame  the `Abort`, if there is a credit
//!   receives posted again ────▶ flow ────┤                      ├─▶ flow         credits, what the peer has finished
//!   the service, failures ────▶ on ──────┼─▶ Flow               ├─▶ actions      what to send, to wake, to release
//!   the last handle is gone ──▶ abandon ─┤   Phase              │
//!   time ─────────────────────▶ due ─────┘   Timers ────────────┴─▶ deadline
//! ```
//!
//! [`Core`](super::core::Core) feeds it with completions, posts its frames, and executes its actions. For credits it calls
//! [`Flow`] directly, in `core.rs`, `inbound.rs`, `outbound.rs`, `fetching.rs` and `ending.rs`.

use std::time::Instant;

use super::error::CloseReason;
use super::flow_control::Flow;
use super::frame::{Header, Kind};
use super::lifecycle::{Action, Event, Phase, Stage, transition};
use super::timers::{Expired, Observed, Timers, Times};

/// State of one end of a connection, as far as it depends on frames, events and time alone.
#[derive(Debug, Clone)]
pub(super) struct Protocol {
    pub(super) flow: Flow,
    phase: Phase,
    timers: Timers,
}

/// Requirement of a deadline that has passed.
#[derive(Debug)]
pub(super) enum Due {
    /// Send this frame.
    Frame(Header),
    /// End the connection.
    End(CloseReason),
}

impl Protocol {
    /// Creates an end that has posted `receives`, and whose peer is not known yet.
    pub(super) fn new(receives: u32) -> Self {
        Self {
            flow: Flow::new(receives, 0),
            phase: Phase::Running(Stage::Open),
            timers: Timers::unset(),
        }
    }

    /// Sets the peer's window and starts the timers.
    pub(super) fn meet(&mut self, receives: u32, window: u32, times: Times, now: Instant) {
        self.flow = Flow::new(receives, window);
        self.timers = Timers::new(times, now);
    }

    #[inline]
    pub(super) fn phase(&self) -> &Phase {
        &self.phase
    }

    /// Makes the transition of `event`, and returns its actions.
    #[must_use]
    pub(super) fn on(&mut self, event: Event) -> &'static [Action] {
        let (phase, actions) = transition(self.phase, event);
        self.phase = phase;
        actions
    }

    /// Makes the transition of a service that drops its last handle.
    #[must_use]
    pub(super) fn abandon(&mut self, at_end: bool) -> &'static [Action] {
        self.timers.set_dropped();
        self.on(Event::Drop { at_end })
    }

    /// Limits the time that remains to a connection that was [abandoned](Self::abandon), from the first call after that.
    pub(super) fn linger(&mut self, now: impl FnOnce() -> Instant) {
        self.timers.linger(now);
    }

    /// Takes the header of a frame that has arrived. Returns how many more offers of this end the peer has fetched.
    ///
    /// # Errors
    ///
    /// The reason for which the connection ends.
    pub(super) fn receive(&mut self, header: Header) -> Result<u32, CloseReason> {
        let fetched = self.flow.receive(header)?;
        if header.kind == Kind::Abort && !self.flow.is_over() {
            return Err(CloseReason::Dropped);
        }
        Ok(fetched)
    }

    /// Returns the next frame that is due and carries no message: a `Fin`, or an `Ack`. The caller sends it.
    pub(super) fn next_frame(&mut self) -> Option<Header> {
        let Phase::Running(stage) = self.phase else { return None };
        let kind = if stage.sends_fin() && self.flow.may_send(Kind::Fin) {
            Kind::Fin
        } else if stage != Stage::Aborting && self.flow.ack_due() {
            Kind::Ack
        } else {
            return None;
        };
        Some(self.flow.send(kind))
    }

    /// Returns the `Abort` of [`Action::SendAbort`], if there is a credit for it. The caller sends it.
    pub(super) fn abort_frame(&mut self) -> Option<Header> {
        self.flow.may_send(Kind::Abort).then(|| self.flow.send(Kind::Abort))
    }

    /// Returns when to call [`due`](Self::due).
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.timers.deadline()
    }

    /// Returns the next requirement of the deadlines that have passed at `now`.
    pub(super) fn due(&mut self, now: Instant, observed: Observed) -> Option<Due> {
        while let Some(expired) = self.timers.expire(now, self.flow.arrived(), observed) {
            match expired {
                Expired::End(reason) => return Some(Due::End(reason)),
                // A peer that is alive returns a credit sooner or later.
                Expired::Silence if self.flow.may_send(Kind::Ping) => {
                    return Some(Due::Frame(self.flow.send(Kind::Ping)));
                }
                Expired::Silence => {}
            }
        }
        None
    }
}

//! The protocol of one end of a connection, without its I/O: headers of frames, events and time go in; headers of frames to
//! send, tasks to wake and a deadline come out.
//!
//! ```text
//!   frames that have arrived ─▶ receive ─┐                      ┌─▶ next_frame   frames that carry no message
//!   messages to send ─────────▶ flow ────┤                      │
//!   the service, failures ────▶ on ──────┼─▶ Flow               ├─▶ actions      what to send, to wake, to release
//!   the last handle is gone ──▶ abandon ─┤   Phase              │
//!   time ─────────────────────▶ due ─────┘   Timers ────────────┴─▶ deadline
//! ```
//!
//! [`Core`](super::core::Core) posts what comes out of it and feeds it with what completes.

use std::time::Instant;

use super::error::CloseReason;
use super::flow_control::Flow;
use super::frame::{Header, Kind};
use super::lifecycle::{Action, Event, Phase, Stage, transition};
use super::timers::{Expired, Observed, Timers, Times};

/// One end of a connection, as its peer sees it.
#[derive(Debug, Clone)]
pub(super) struct Protocol {
    pub(super) flow: Flow,
    phase: Phase,
    timers: Timers,
}

/// What time asks for.
#[derive(Debug)]
pub(super) enum Due {
    /// Send this frame.
    Frame(Header),
    /// End the connection.
    End(CloseReason),
}

impl Protocol {
    /// An end with so many receives posted, whose peer is not known yet.
    pub(super) fn new(receives: u32) -> Self {
        Self { flow: Flow::new(receives, 0), phase: Phase::Running(Stage::Open), timers: Timers::unset() }
    }

    /// The peer is connected, and has `window` receives posted.
    pub(super) fn meet(&mut self, receives: u32, window: u32, times: Times, now: Instant) {
        self.flow = Flow::new(receives, window);
        self.timers = Timers::new(times, now);
    }

    #[inline]
    pub(super) fn phase(&self) -> &Phase {
        &self.phase
    }

    /// Goes on to the next phase; what is to be done.
    #[must_use]
    pub(super) fn on(&mut self, event: Event) -> &'static [Action] {
        let (phase, actions) = transition(self.phase, event);
        self.phase = phase;
        actions
    }

    /// The service has dropped its last handle.
    #[must_use]
    pub(super) fn abandon(&mut self, at_end: bool, now: Instant) -> &'static [Action] {
        self.timers.linger(now);
        self.on(Event::Drop { at_end })
    }

    /// Takes the header of a frame that has arrived. Returns how many offers of this end it newly says to be done.
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

    /// The next frame that is due and carries no message: a `Fin`, or an `Ack`. The caller sends it.
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

    /// The `Abort` of [`Action::SendAbort`], if there is a credit for it. The caller sends it.
    pub(super) fn abort_frame(&mut self) -> Option<Header> {
        self.flow.may_send(Kind::Abort).then(|| self.flow.send(Kind::Abort))
    }

    /// When [`due`](Self::due) has something to say.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.timers.deadline()
    }

    /// The next thing that is due at `now`, if there is one.
    pub(super) fn due(&mut self, now: Instant, observed: Observed) -> Option<Due> {
        while let Some(expired) = self.timers.expire(now, self.flow.arrived(), observed) {
            match expired {
                Expired::End(reason) => return Some(Due::End(reason)),
                // A peer that is alive has given a credit back.
                Expired::Silence if self.flow.may_send(Kind::Ping) => {
                    return Some(Due::Frame(self.flow.send(Kind::Ping)));
                }
                Expired::Silence => {}
            }
        }
        None
    }
}

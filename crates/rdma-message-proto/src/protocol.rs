//! The protocol of one side of a connection, without I/O.
//!
//! ```text
//!   frames received ─────────▶ receive ─┐                      ┌─▶ next_frame   `Ack`, `Fin`…
//!   messages to send ────────▶ flow ────┤                      ├─▶ abort_frame  `Abort`
//!   receives posted again ───▶ flow ────┤                      ├─▶ flow         credits, offers
//!   service calls, failures ─▶ on ──────┼─▶ Flow               ├─▶ actions      to execute
//!   last handle dropped ─────▶ abandon ─┤   Phase              │
//!   time ────────────────────▶ due ─────┘   Timers ────────────┴─▶ deadline
//! ```
//!
//! The connection feeds it, posts its frames and executes its actions. Credits are also used
//! directly in [`Flow`].

use std::time::{Duration, Instant};

use crate::end::{End, Reason};
use crate::flow::Flow;
use crate::frame::{Header, Kind};
use crate::lifecycle::{Action, Event, Phase, Stage, transition};
use crate::timers::{Expired, LINGER, Observed, Timers, Times};
use crate::window::Resize;

/// The state of one side that depends only on frames, events and time.
#[derive(Debug, Clone)]
pub struct Protocol<R> {
    /// Credits.
    pub flow: Flow,
    phase: Phase<R>,
    timers: Timers,
    /// The listener shuts down: a peer that has everything does not delay `close`.
    draining: bool,
}

/// The action required by an expired deadline.
#[derive(Debug)]
pub enum Due {
    /// A frame to be sent.
    Frame(Header),
    /// A check of the buffers.
    Buffers {
        /// No message was sent or received since the last check.
        idle: bool,
    },
    /// The connection ends.
    Terminate(End),
}

impl<R: Reason> Protocol<R> {
    /// Creates the state before the peer is known.
    pub fn new(receives: u32) -> Self {
        Self {
            flow: Flow::new(receives, 0),
            phase: Phase::Running(Stage::Open),
            timers: Timers::unset(),
            draining: false,
        }
    }

    /// Sets the peer's window and starts the timers.
    pub fn set_peer(&mut self, receives: u32, window: u32, times: Times, now: Instant) {
        self.flow = Flow::new(receives, window);
        self.timers = Timers::new(times, now);
    }

    /// Returns the phase.
    #[inline]
    pub fn phase(&self) -> &Phase<R> {
        &self.phase
    }

    /// Applies `event` and returns the resulting actions.
    #[must_use]
    pub fn on(&mut self, event: Event<R>) -> &'static [Action] {
        let (phase, actions) = transition(self.phase, event);
        self.phase = phase;
        actions
    }

    /// Applies the drop of the last handle.
    #[must_use]
    pub fn abandon(&mut self, at_end: bool) -> &'static [Action] {
        self.timers.set_dropped(LINGER);
        self.on(Event::Drop { at_end })
    }

    /// Applies the drop of a stream's last handle: what was written is still sent. The stream
    /// lingers for `limit`, but only for [`LINGER`] once the peer has
    /// everything.
    #[must_use]
    pub fn abandon_stream(&mut self, limit: Duration) -> &'static [Action] {
        self.draining = true;
        self.timers.set_dropped(limit);
        let (closing, actions) = transition(self.phase, Event::Close);
        self.phase = transition(closing, Event::Drop { at_end: true }).0;
        actions
    }

    /// Shortens `close` for the shutdown of the listener.
    pub fn drain(&mut self) {
        self.draining = true;
    }

    /// Starts the linger timeout, on the first call after [`abandon`](Self::abandon), or when the
    /// peer of a draining connection has received all messages and may be idle.
    pub fn linger(&mut self, now: impl FnOnce() -> Instant) {
        if self.is_linger_due() {
            self.draining = false;
            self.timers.set_dropped(LINGER);
        }
        self.timers.linger(now);
    }

    /// Returns true if the peer of a draining connection has received all messages, and the linger
    /// timeout is to start.
    pub fn is_linger_due(&self) -> bool {
        self.draining && self.phase.awaits_peer() && self.flow.peer_has_all()
    }

    /// Processes a received header. Returns how many more offers the peer has fetched.
    ///
    /// # Errors
    ///
    /// Returns the reason to terminate.
    #[inline(always)]
    pub fn receive(&mut self, header: Header) -> Result<u32, End> {
        let fetched = self.flow.receive(header)?;
        if header.kind == Kind::Abort && !self.flow.is_over() {
            return Err(End::Dropped);
        }
        Ok(fetched)
    }

    /// Returns true if [`next_frame`](Self::next_frame) certainly returns none, for fewer
    /// instructions. After `false` it may return none, too.
    #[inline]
    pub fn is_quiet(&self) -> bool {
        self.flow.is_quiet() && matches!(self.phase, Phase::Running(stage) if !stage.sends_fin())
    }

    /// Returns the next due `Fin`, `Resize` or `Ack`, which must be sent, with the payload of a
    /// `Resize`. A `Fin` and skipped receives only with `all_sent`, after everything that the
    /// service has written, and the latter only if this side `may_skip`.
    #[inline(always)]
    pub fn next_frame(
        &mut self,
        all_sent: bool,
        may_skip: impl FnOnce() -> bool,
    ) -> Option<(Header, Option<Resize>)> {
        let Phase::Running(stage) = self.phase else { return None };
        if stage == Stage::Aborting {
            return None;
        }
        // Before other frames, which may use the receives whose size changes.
        if let Some((header, resize)) = self.flow.announce() {
            return Some((header, Some(resize)));
        }
        if stage.sends_fin() && all_sent && self.flow.may_send(Kind::Fin) {
            return Some((self.flow.send(Kind::Fin), None));
        }
        if self.flow.ack_due() {
            return Some((self.flow.send(Kind::Ack), None));
        }
        // Tested first: skips are rare.
        let skips = self.flow.skips() && all_sent && may_skip();
        let skipped = if skips { self.flow.skip() } else { None };
        skipped.map(|header| (header, None))
    }

    /// Returns the `Abort`, which must be sent, if a credit is available.
    pub fn abort_frame(&mut self) -> Option<Header> {
        self.flow.may_send(Kind::Abort).then(|| self.flow.send(Kind::Abort))
    }

    /// Returns true if this side may change its receives.
    pub fn may_resize(&self) -> bool {
        matches!(self.phase, Phase::Running(stage) if stage != Stage::Aborting)
            && self.flow.may_resize()
            && self.flow.may_send(Kind::Resize)
            && !self.flow.peer_has_finished()
    }

    /// Begins to watch for messages, unless it does so.
    pub fn watch_idle(&mut self, now: impl FnOnce() -> Instant) {
        self.timers.watch_idle(now);
    }

    /// Makes a `Ping` due now, unless one is unanswered or `keepalive` is off.
    pub fn probe(&mut self, now: Instant) {
        self.timers.probe(now, self.flow.used_receives());
    }

    /// Notes arrived frames, which answer a `Ping`. Returns true if the deadline has changed.
    pub fn note_answer(&mut self, now: impl FnOnce() -> Instant) -> bool {
        self.timers.note_answer(now, self.flow.used_receives())
    }

    /// Returns the next deadline.
    pub fn deadline(&self) -> Option<Instant> {
        self.timers.deadline()
    }

    /// Returns the next action of deadlines expired at `now`.
    pub fn due(&mut self, now: Instant, observed: Observed) -> Option<Due> {
        while let Some(expired) = self.timers.expire(now, self.flow.used_receives(), observed) {
            match expired {
                Expired::Terminate(reason) => return Some(Due::Terminate(reason)),
                // Without a credit no `Ping` is needed: a live peer returns credits by itself.
                Expired::Silence if self.flow.may_send(Kind::Ping) => {
                    return Some(Due::Frame(self.flow.send(Kind::Ping)));
                }
                Expired::Silence => {}
                Expired::Buffers { idle } => return Some(Due::Buffers { idle }),
            }
        }
        None
    }
}

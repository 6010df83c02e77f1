//! Decides when an end posts more or longer receives, and when it returns to the first ones.
//!
//! ```text
//!   first: few and short ──▶ long: as many ──▶ full: the configured number
//!           ▲                     │                    │
//!           └─────────────────────┴────────────────────┘  idle
//! ```
//!
//! Each change is one `Resize`. If the length changes, all receives are replaced.

use std::time::{Duration, Instant};

use crate::flow::RESERVE;
use crate::handshake::Service;
use crate::incoming::Arrival;
use crate::window::FIRST_SIZE;

const ACKS_APART: Duration = Duration::from_millis(20);

/// If the receives hold this many messages of several frames, separate `Ack`s are rare, because the
/// headers of answers announce the released receives.
const LONG_MESSAGES: u64 = 8;

#[derive(Debug, Clone)]
pub(crate) struct Growth {
    stage: Stage,
    /// The number of receives, including the reserve.
    receives: u32,
    size: u32,
    first: u32,
    most: u32,
    follows_use: bool,
    eager: u64,
    wanted: bool,
    /// No buffers could be registered since the last check.
    refused: bool,
    acked: Option<Instant>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    First,
    Long,
    Full,
}

impl Growth {
    /// Without `follows_use`, the receives never change.
    pub(crate) fn new(first: u32, most: u32, eager: u64, follows_use: bool) -> Self {
        let stage = if follows_use { Stage::First } else { Stage::Full };
        Self {
            stage,
            receives: first,
            size: FIRST_SIZE,
            first,
            most,
            follows_use,
            eager,
            wanted: false,
            refused: false,
            acked: None,
        }
    }

    pub(crate) fn receives(&self) -> u32 {
        self.receives
    }

    #[inline]
    fn is_ended(&self) -> bool {
        self.stage == Stage::Full || self.refused
    }

    #[inline]
    pub(crate) fn note_message(&mut self, service: Service, arrival: Arrival, unanswered: u32) {
        if !self.is_ended() {
            self.wanted |= self.is_wanted_by(service, arrival, unanswered);
        }
    }

    fn is_wanted_by(&self, service: Service, arrival: Arrival, unanswered: u32) -> bool {
        self.reaches_threshold(unanswered)
            || match arrival {
                // The sender may have more bytes.
                Arrival::Message { len, .. } if service == Service::Bytes => {
                    self.stage == Stage::First && len >= self.size.into()
                }
                // The frames may be shorter than a receive, because the sender has not reached
                // these receives yet.
                Arrival::Message { len, .. } if len > self.size.into() => {
                    let frames = len.div_ceil(self.size.into());
                    frames * LONG_MESSAGES > (self.receives - RESERVE).into()
                }
                _ => false,
            }
    }

    pub(crate) fn note_offer(&mut self, len: u64, unanswered: u32) {
        let too_long = len > self.size.into() && len <= self.eager;
        self.wanted |= !self.is_ended() && (self.reaches_threshold(unanswered) || too_long);
    }

    /// Returns true if the frames use half of the first receives for messages, or later all
    /// receives, because the configured number takes much memory.
    fn reaches_threshold(&self, unanswered: u32) -> bool {
        let messages = self.receives - RESERVE;
        unanswered >= if self.stage == Stage::First { messages.div_ceil(2) } else { messages }
    }

    /// The application keeps a received buffer, for which the first receives are too few.
    pub(crate) fn note_buffer_taken(&mut self) {
        self.wanted |= self.stage == Stage::First && !self.refused;
    }

    /// Notes an `Ack` for credits alone. If these are frequent, the peer may wait for them, so more
    /// receives may help.
    pub(crate) fn note_ack(&mut self, now: impl FnOnce() -> Instant) {
        if self.is_ended() {
            return;
        }
        let now = now();
        let before = self.acked.replace(now);
        self.wanted |= before.is_some_and(|at| now.duration_since(at) < ACKS_APART);
    }

    #[inline]
    pub(crate) fn is_wanted(&self) -> bool {
        self.wanted
    }

    pub(crate) fn next(&self) -> u32 {
        if self.stage == Stage::First { self.first } else { self.most }
    }

    pub(crate) fn first(&self) -> u32 {
        self.first
    }

    pub(crate) fn is_grown(&self) -> bool {
        self.follows_use && self.stage != Stage::First
    }

    /// Checks `unanswered` again, because a peer that waits for credits sends no further frame,
    /// which would ask for the next growth.
    pub(crate) fn grow(&mut self, size: u32, unanswered: u32) {
        (self.receives, self.size) = (self.next(), size);
        self.stage = if self.receives < self.most { Stage::Long } else { Stage::Full };
        self.wanted = !self.is_ended() && self.reaches_threshold(unanswered);
    }

    pub(crate) fn shrink(&mut self) {
        (self.receives, self.size) = (self.first, FIRST_SIZE);
        (self.stage, self.wanted) = (Stage::First, false);
    }

    pub(crate) fn refuse(&mut self) {
        (self.wanted, self.refused) = (false, true);
    }

    pub(crate) fn renew(&mut self) {
        self.refused = false;
    }

    pub(crate) fn is_refused(&self) -> bool {
        self.refused
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: u32 = 8;
    const MOST: u32 = 68;
    const LONG: u32 = 16_384;

    fn side() -> Growth {
        Growth::new(FIRST, MOST, 65_536, true)
    }

    fn message(parts: u32, len: u64) -> Arrival {
        Arrival::Message { parts, len }
    }

    #[test]
    fn receives_become_long_then_more_then_the_first_again() {
        let mut side = side();
        for expected in [FIRST, MOST] {
            assert!(!side.is_ended() && side.next() == expected);
            side.note_message(Service::Messages, message(0, 1), FIRST - RESERVE);
            assert!(side.is_wanted());
            side.grow(LONG, 0);
            assert!(!side.is_wanted() && side.is_grown() && side.receives() == expected);
        }
        assert!(side.is_ended());
        side.shrink();
        assert!(!side.is_ended() && !side.is_grown() && side.receives() == FIRST);
    }

    #[test]
    fn few_receives_become_long_and_are_full() {
        let mut side = Growth::new(FIRST, FIRST, 65_536, true);
        side.grow(LONG, 0);
        assert!(side.is_ended() && side.is_grown());
        let fixed = Growth::new(MOST, MOST, 65_536, false);
        assert!(fixed.is_ended() && !fixed.is_grown());
    }

    #[test]
    fn frames_that_come_before_the_growth_call_for_the_next() {
        for (unanswered, next) in [(FIRST - RESERVE - 1, false), (FIRST - RESERVE, true)] {
            let mut side = side();
            side.note_message(Service::Messages, message(0, 1), 2);
            side.grow(LONG, unanswered);
            assert_eq!(side.is_wanted(), next);
            side.grow(LONG, MOST);
            assert!(!side.is_wanted(), "there is no next growth");
        }
    }

    #[test]
    fn growth_is_called_for_by_what_it_makes_faster() {
        type Cause = fn(&mut Growth);
        let first = u64::from(FIRST_SIZE);
        let long = |side: &mut Growth| side.grow(LONG, 0);
        let wanted = |prepare: &dyn Fn(&mut Growth), cause: Cause| {
            let mut side = side();
            prepare(&mut side);
            cause(&mut side);
            side.is_wanted()
        };
        let causes: [(Cause, bool, bool); 13] = [
            (|side| side.note_message(Service::Messages, message(0, 384), 1), false, false),
            (|side| side.note_message(Service::Messages, message(0, 1), 2), true, false),
            (|side| side.note_message(Service::Messages, message(0, 1), 4), true, true),
            (|side| side.note_message(Service::Messages, Arrival::Notification, 1), false, false),
            (|side| side.note_message(Service::Messages, Arrival::Notification, 4), true, true),
            (|side| side.note_message(Service::Messages, message(1, 500), 1), true, false),
            (|side| side.note_message(Service::Messages, message(1, 20_000), 1), true, true),
            (|side| side.note_message(Service::Bytes, message(0, 383), 1), false, false),
            (|side| side.note_message(Service::Bytes, message(0, 384), 1), true, false),
            (|side| side.note_offer(16_384, 1), true, false),
            (|side| side.note_offer(65_536, 1), true, true),
            (|side| side.note_offer(65_537, 1), false, false),
            (Growth::note_buffer_taken, true, false),
        ];
        assert_eq!(first, 384);
        for (number, (cause, at_first, once_long)) in causes.into_iter().enumerate() {
            assert_eq!(wanted(&|_| (), cause), at_first, "cause {number} at first");
            assert_eq!(wanted(&long, cause), once_long, "cause {number} of a long side");
        }
    }

    #[test]
    fn acks_call_for_more_when_they_are_frequent() {
        let start = Instant::now();
        for (apart, frequent) in [(ACKS_APART, false), (ACKS_APART / 2, true)] {
            let mut side = side();
            side.note_ack(|| start);
            assert!(!side.is_wanted(), "one is not frequent");
            side.note_ack(|| start + apart);
            assert_eq!(side.is_wanted(), frequent);
        }
    }

    #[test]
    fn refused_growth_is_tried_again_after_the_next_check() {
        let mut side = side();
        side.note_offer(1000, 1);
        side.refuse();
        assert!(side.is_ended() && side.is_refused() && !side.is_wanted());
        side.renew();
        assert!(!side.is_ended() && !side.is_refused());
    }
}

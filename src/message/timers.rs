//! Deadlines of a connection. Time is an argument: the driver reads the clock.

use std::time::{Duration, Instant};

use super::config::ConnectionConfig;
use super::error::CloseReason;

/// Longest wait for the peer after the service has dropped or aborted the connection, and for the queue pair to be flushed. On a
/// network that works both take less than a millisecond.
pub(super) const LINGER: Duration = Duration::from_secs(1);

/// Time limits of the configuration.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Times {
    keepalive: Option<(Duration, Duration)>,
    stall: Option<Duration>,
    first_message: Option<Duration>,
}

impl Times {
    pub(super) fn new(config: &ConnectionConfig) -> Self {
        let (keepalive, stall) = (config.keepalive, config.stall_timeout);
        Self { keepalive, stall, first_message: config.first_message_timeout }
    }
}

/// Activity of the connection at the time of a deadline.
#[derive(Debug, Clone, Copy)]
pub(super) struct Observed {
    /// Number of messages sent, if a task waits to send.
    pub(super) stalled_at: Option<u64>,
    /// True if a message of the peer has arrived, or was announced.
    pub(super) begun: bool,
}

/// A deadline that has passed.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Expired {
    /// No frame of the peer has arrived. A `Ping` is due.
    Silence,
    /// The connection ends.
    End(CloseReason),
}

/// Deadlines.
#[derive(Debug, Clone)]
pub(super) struct Timers {
    times: Times,
    /// When to check whether a frame has arrived.
    silence: Option<Instant>,
    /// Number of frames that had arrived at the last check.
    arrived: u32,
    /// A `Ping` was due at the last check.
    asked: bool,
    /// When to check whether a message was sent.
    stall: Option<Instant>,
    /// Number of messages sent when a task was found waiting, and the time since which it has not grown.
    stalled: Option<(u64, Instant)>,
    /// When the first message of the peer must have arrived.
    first_message: Option<Instant>,
    /// The service has dropped the connection, and `linger` is not set.
    dropped: bool,
    /// Latest end of a connection that the service has dropped.
    linger: Option<Instant>,
}

impl Timers {
    /// Creates timers that never expire.
    pub(super) fn unset() -> Self {
        Self {
            times: Times::default(),
            silence: None,
            arrived: 0,
            asked: false,
            stall: None,
            stalled: None,
            first_message: None,
            dropped: false,
            linger: None,
        }
    }

    /// Creates the timers of a connection that begins at `now`.
    pub(super) fn new(times: Times, now: Instant) -> Self {
        let after = |time: Option<Duration>| time.and_then(|time| now.checked_add(time));
        Self {
            times,
            silence: after(times.keepalive.map(|(interval, _)| interval)),
            // Checks at intervals find a stall, so that sending costs nothing. The time is counted from the first check that finds
            // the task waiting, half of `stall` after the wait began at the latest: the connection ends after 1 to 1.5 × `stall`.
            stall: after(times.stall.map(|stall| stall / 2)),
            first_message: after(times.first_message),
            ..Self::unset()
        }
    }

    /// Notes that the service has dropped the connection.
    pub(super) fn set_dropped(&mut self) {
        self.dropped = true;
    }

    /// Limits the time of a connection that the service has dropped, from the first call after that. The driver calls this when its
    /// last frame is posted: a runtime that is busy between the drop and the driver must not use up the time in which the
    /// frame is retransmitted.
    pub(super) fn linger(&mut self, now: impl FnOnce() -> Instant) {
        if std::mem::take(&mut self.dropped) {
            self.linger = Some(now() + LINGER);
        }
    }

    /// Returns the earliest deadline.
    pub(super) fn deadline(&self) -> Option<Instant> {
        [self.silence, self.stall, self.first_message, self.linger].into_iter().flatten().min()
    }

    /// Returns a deadline that has passed and requires something. Sets the next deadline of periodic checks.
    pub(super) fn expire(
        &mut self,
        now: Instant,
        arrived: u32,
        observed: Observed,
    ) -> Option<Expired> {
        let is_due = |time: Option<Instant>| time.is_some_and(|time| time <= now);
        if let (true, Some((interval, patience))) = (is_due(self.silence), self.times.keepalive) {
            let heard = arrived != self.arrived;
            let asked = std::mem::replace(&mut self.asked, !heard);
            self.arrived = arrived;
            self.silence = now.checked_add(if heard { interval } else { patience });
            if !heard {
                return Some(if asked {
                    Expired::End(CloseReason::Silent)
                } else {
                    Expired::Silence
                });
            }
        }
        if let (true, Some(stall)) = (is_due(self.stall), self.times.stall) {
            self.stalled = match (observed.stalled_at, self.stalled) {
                (Some(sent), Some((before, since))) if sent == before => Some((before, since)),
                (Some(sent), _) => Some((sent, now)),
                (None, _) => None,
            };
            // See `new` for why half.
            self.stall = now.checked_add(stall / 2);
            if self.stalled.is_some_and(|(_, since)| now.duration_since(since) >= stall) {
                return Some(Expired::End(CloseReason::Stalled));
            }
        }
        if is_due(self.first_message) {
            self.first_message = None;
            if !observed.begun {
                return Some(Expired::End(CloseReason::NoFirstMessage));
            }
        }
        if is_due(self.linger) {
            self.linger = None;
            return Some(Expired::End(CloseReason::Local));
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const QUIET: Observed = Observed { stalled_at: None, begun: true };

    fn timers(times: Times) -> (Timers, impl Fn(u64) -> Instant) {
        let start = Instant::now();
        (Timers::new(times, start), move |millis| start + Duration::from_millis(millis))
    }

    #[test]
    fn silent_peer_is_asked_once_and_then_given_up() {
        let keepalive = Some((Duration::from_millis(10), Duration::from_millis(30)));
        let (mut timers, at) = timers(Times { keepalive, ..Times::default() });
        assert_eq!(timers.expire(at(9), 0, QUIET), None);
        assert_eq!(timers.expire(at(10), 1, QUIET), None, "a frame has arrived");
        assert_eq!(timers.deadline(), Some(at(20)));
        assert_eq!(timers.expire(at(20), 1, QUIET), Some(Expired::Silence));
        assert_eq!(timers.deadline(), Some(at(50)), "the peer is given its time to answer");
        assert_eq!(timers.expire(at(50), 2, QUIET), None, "it has answered");
        assert_eq!(timers.expire(at(60), 2, QUIET), Some(Expired::Silence));
        assert_eq!(timers.expire(at(90), 2, QUIET), Some(Expired::End(CloseReason::Silent)));
    }

    #[test]
    fn sender_stalls_only_if_nothing_is_sent_while_it_waits() {
        let stall = Some(Duration::from_millis(20));
        let (mut timers, at) = timers(Times { stall, ..Times::default() });
        let waits = |sent| Observed { stalled_at: sent, begun: true };
        assert_eq!(timers.expire(at(10), 0, waits(Some(5))), None);
        assert_eq!(timers.expire(at(20), 0, waits(Some(6))), None, "one was sent");
        assert_eq!(timers.expire(at(30), 0, waits(None)), None, "none waits");
        assert_eq!(timers.expire(at(40), 0, waits(Some(6))), None);
        assert_eq!(timers.expire(at(50), 0, waits(Some(6))), None);
        assert_eq!(
            timers.expire(at(60), 0, waits(Some(6))),
            Some(Expired::End(CloseReason::Stalled))
        );
    }

    #[test]
    fn first_message_is_waited_for_once_and_a_dropped_connection_lingers() {
        let first_message = Some(Duration::from_millis(10));
        for (begun, end) in [(true, None), (false, Some(Expired::End(CloseReason::NoFirstMessage)))]
        {
            let (mut timers, at) = timers(Times { first_message, ..Times::default() });
            assert_eq!(timers.expire(at(10), 0, Observed { stalled_at: None, begun }), end);
            assert_eq!(timers.deadline(), None);
            timers.linger(|| at(15));
            assert_eq!(timers.deadline(), None, "the service has it");
            timers.set_dropped();
            timers.linger(|| at(20));
            timers.linger(|| at(30));
            assert_eq!(timers.deadline(), Some(at(20) + LINGER));
            assert_eq!(
                timers.expire(at(20) + LINGER, 0, QUIET),
                Some(Expired::End(CloseReason::Local))
            );
            assert_eq!(timers.deadline(), None);
        }
    }
}

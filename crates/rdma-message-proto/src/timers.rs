use std::time::{Duration, Instant};

use crate::end::End;

/// The time for the last exchange with the peer after a drop or abort, and for a flush.
/// Both usually take less than a millisecond.
pub const LINGER: Duration = Duration::from_secs(1);

#[derive(Debug, Clone, Copy, Default)]
pub struct Times {
    /// The time without frames after which a `Ping` is due, and the time to answer it.
    pub keepalive: Option<(Duration, Duration)>,
    /// How long a sender may wait while nothing is sent.
    pub stall: Option<Duration>,
    pub first_message: Option<Duration>,
    /// The time without messages after which an end is idle.
    pub shrink: Duration,
}

#[derive(Debug, Clone, Copy)]
pub struct Observed {
    /// The number of messages sent, if a task waits to send.
    pub stalled_at: Option<u64>,
    /// A message has arrived or was offered.
    pub message_seen: bool,
    pub messages: u64,
}

#[derive(Debug, PartialEq, Eq)]
pub enum Expired {
    Silence,
    Buffers { idle: bool },
    Terminate(End),
}

#[derive(Debug, Clone)]
pub struct Timers {
    times: Times,
    /// When to conclude that the peer is silent, unless `arrived` has changed.
    silence: Option<Instant>,
    arrived: u32,
    pinged: bool,
    stall: Option<Instant>,
    /// The number of messages sent when a waiting task was first found, and that time.
    stalled: Option<(u64, Instant)>,
    first_message: Option<Instant>,
    idle: Option<Instant>,
    messages: u64,
    /// The linger timeout, until [`linger`](Self::linger) starts it.
    dropped: Option<Duration>,
    linger: Option<Instant>,
}

impl Timers {
    pub fn unset() -> Self {
        Self {
            times: Times::default(),
            silence: None,
            arrived: 0,
            pinged: false,
            stall: None,
            stalled: None,
            first_message: None,
            idle: None,
            messages: 0,
            dropped: None,
            linger: None,
        }
    }

    pub fn new(times: Times, now: Instant) -> Self {
        let after = |time: Option<Duration>| time.and_then(|time| now.checked_add(time));
        Self {
            times,
            silence: after(times.keepalive.map(|(interval, _)| interval)),
            // Periodic checks keep sending cheap. Time counts from the first check that finds a
            // waiting task, so the connection terminates after 1 to 1.5 × `stall`.
            stall: after(times.stall.map(|stall| stall / 2)),
            first_message: after(times.first_message),
            ..Self::unset()
        }
    }

    pub fn set_dropped(&mut self, limit: Duration) {
        self.dropped = Some(limit);
    }

    /// Starts the linger timeout on the first call after [`set_dropped`](Self::set_dropped), after
    /// the driver has posted the last frame, so that a busy runtime does not shorten the time for
    /// retransmission.
    pub fn linger(&mut self, now: impl FnOnce() -> Instant) {
        if let Some(limit) = self.dropped.take() {
            self.linger = now().checked_add(limit);
        }
    }

    pub fn watch_idle(&mut self, now: impl FnOnce() -> Instant) {
        if self.idle.is_none() {
            self.idle = now().checked_add(self.times.shrink);
        }
    }

    /// Makes a `Ping` due now, unless one is unanswered or `keepalive` is off.
    pub fn probe(&mut self, now: Instant, arrived: u32) {
        if self.silence.is_some() && !self.pinged {
            (self.silence, self.arrived) = (Some(now), arrived);
        }
    }

    /// Makes the next `Ping` due an interval after an answer to the last one. Otherwise it would be
    /// due only when the time to answer is over, and the loss of the peer would be found late.
    /// Returns true if the deadline has changed.
    pub fn note_answer(&mut self, now: impl FnOnce() -> Instant, arrived: u32) -> bool {
        if !self.pinged || arrived == self.arrived {
            return false;
        }
        (self.pinged, self.arrived) = (false, arrived);
        self.silence = self.times.keepalive.and_then(|(interval, _)| now().checked_add(interval));
        true
    }

    pub fn deadline(&self) -> Option<Instant> {
        let times = [self.silence, self.stall, self.first_message, self.idle, self.linger];
        times.into_iter().flatten().min()
    }

    pub fn expire(&mut self, now: Instant, arrived: u32, observed: Observed) -> Option<Expired> {
        let is_due = |time: Option<Instant>| time.is_some_and(|time| time <= now);
        if let (true, Some((interval, patience))) = (is_due(self.silence), self.times.keepalive) {
            let active = arrived != self.arrived;
            let pinged = std::mem::replace(&mut self.pinged, !active);
            self.arrived = arrived;
            self.silence = now.checked_add(if active { interval } else { patience });
            if !active {
                return Some(if pinged {
                    Expired::Terminate(End::Silent)
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
            // See `new` for the factor.
            self.stall = now.checked_add(stall / 2);
            if self.stalled.is_some_and(|(_, since)| now.duration_since(since) >= stall) {
                return Some(Expired::Terminate(End::Stalled));
            }
        }
        if is_due(self.first_message) {
            self.first_message = None;
            if !observed.message_seen {
                return Some(Expired::Terminate(End::NoFirstMessage));
            }
        }
        if is_due(self.idle) {
            let before = std::mem::replace(&mut self.messages, observed.messages);
            self.idle = None;
            return Some(Expired::Buffers { idle: before == observed.messages });
        }
        if is_due(self.linger) {
            self.linger = None;
            return Some(Expired::Terminate(End::Local));
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const QUIET: Observed = Observed { stalled_at: None, message_seen: true, messages: 0 };

    fn timers(times: Times) -> (Timers, impl Fn(u64) -> Instant) {
        let start = Instant::now();
        (Timers::new(times, start), move |millis| start + Duration::from_millis(millis))
    }

    #[test]
    fn silent_peer_gets_one_ping_and_then_times_out() {
        let keepalive = Some((Duration::from_millis(10), Duration::from_millis(30)));
        let (mut timers, at) = timers(Times { keepalive, ..Times::default() });
        assert_eq!(timers.expire(at(9), 0, QUIET), None);
        assert_eq!(timers.expire(at(10), 1, QUIET), None, "a frame has arrived");
        assert_eq!(timers.deadline(), Some(at(20)));
        assert_eq!(timers.expire(at(20), 1, QUIET), Some(Expired::Silence));
        assert_eq!(timers.deadline(), Some(at(50)), "the peer has time to answer");
        assert_eq!(timers.expire(at(50), 2, QUIET), None, "it has answered");
        assert_eq!(timers.expire(at(60), 2, QUIET), Some(Expired::Silence));
        assert_eq!(timers.expire(at(90), 2, QUIET), Some(Expired::Terminate(End::Silent)));
    }

    #[test]
    fn peer_lost_after_an_answer_is_asked_an_interval_later() {
        let keepalive = Some((Duration::from_millis(10), Duration::from_millis(30)));
        let (mut timers, at) = timers(Times { keepalive, ..Times::default() });
        assert!(!timers.note_answer(|| at(5), 1), "no `Ping` was due");
        assert_eq!(timers.expire(at(10), 1, QUIET), None, "a frame has arrived");
        assert_eq!(timers.expire(at(20), 1, QUIET), Some(Expired::Silence));
        assert!(!timers.note_answer(|| at(21), 1), "no frame has arrived since");
        assert!(timers.note_answer(|| at(22), 2));
        assert_eq!(timers.deadline(), Some(at(32)));
        assert_eq!(timers.expire(at(32), 2, QUIET), Some(Expired::Silence));
        assert_eq!(timers.expire(at(62), 2, QUIET), Some(Expired::Terminate(End::Silent)));
    }

    #[test]
    fn probe_sends_a_ping_at_once_but_not_a_second_one() {
        let keepalive = Some((Duration::from_millis(10), Duration::from_millis(30)));
        let (mut timers, at) = timers(Times { keepalive, ..Times::default() });
        timers.probe(at(3), 1);
        assert_eq!(timers.deadline(), Some(at(3)));
        assert_eq!(timers.expire(at(3), 1, QUIET), Some(Expired::Silence));
        timers.probe(at(4), 1);
        assert_eq!(timers.deadline(), Some(at(33)), "the peer keeps its time to answer");
        assert_eq!(timers.expire(at(33), 2, QUIET), None, "it has answered");
        timers.probe(at(34), 2);
        assert_eq!(timers.expire(at(34), 2, QUIET), Some(Expired::Silence));
        assert_eq!(timers.expire(at(64), 2, QUIET), Some(Expired::Terminate(End::Silent)));

        let (mut timers, at) = self::timers(Times::default());
        timers.probe(at(3), 0);
        assert_eq!(timers.deadline(), None, "keepalive is off");
    }

    #[test]
    fn sender_stalls_only_if_nothing_is_sent_while_it_waits() {
        let stall = Some(Duration::from_millis(20));
        let (mut timers, at) = timers(Times { stall, ..Times::default() });
        let waits = |sent| Observed { stalled_at: sent, ..QUIET };
        assert_eq!(timers.expire(at(10), 0, waits(Some(5))), None);
        assert_eq!(timers.expire(at(20), 0, waits(Some(6))), None, "one was sent");
        assert_eq!(timers.expire(at(30), 0, waits(None)), None, "no task waits");
        assert_eq!(timers.expire(at(40), 0, waits(Some(6))), None);
        assert_eq!(timers.expire(at(50), 0, waits(Some(6))), None);
        assert_eq!(
            timers.expire(at(60), 0, waits(Some(6))),
            Some(Expired::Terminate(End::Stalled))
        );
    }

    #[test]
    fn first_message_timer_expires_once_and_a_dropped_connection_lingers() {
        let first_message = Some(Duration::from_millis(10));
        for (message_seen, end) in
            [(true, None), (false, Some(Expired::Terminate(End::NoFirstMessage)))]
        {
            let (mut timers, at) = timers(Times { first_message, ..Times::default() });
            assert_eq!(timers.expire(at(10), 0, Observed { message_seen, ..QUIET }), end);
            assert_eq!(timers.deadline(), None);
            timers.linger(|| at(15));
            assert_eq!(timers.deadline(), None, "the service holds a handle");
            timers.set_dropped(LINGER);
            timers.linger(|| at(20));
            timers.linger(|| at(30));
            assert_eq!(timers.deadline(), Some(at(20) + LINGER));
            assert_eq!(
                timers.expire(at(20) + LINGER, 0, QUIET),
                Some(Expired::Terminate(End::Local))
            );
            assert_eq!(timers.deadline(), None);
        }
    }
}

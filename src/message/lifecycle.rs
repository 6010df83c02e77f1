//! Lifecycle of one end of a connection, as data.
//!
//! ```text
//!  Running(stage)                          recv returns None
//!                                  Open ──────────────────────▶ ReceivedAll ─ ─ drop ─ ─┐
//!                            finish │                            │ finish               ╎
//!                                   ▼                            ▼                      ▼
//!                               Finished ─────────────────────▶ Complete ─ ─ drop ─▶ Lingering
//!                                   └──────────┬─────────────────┘                      ▲
//!        close, from any of these four         ▼                                        ╎
//!                                           Closing ─ ─ ─ drop, no message is left ─ ─ ─┘
//!                                              ╎
//!        drop, also from Open and Finished     └ ─ ─ ─ drop, messages may follow ─ ─ ▶ Aborting
//!
//!  Running(stage) ── an operation fails ──▶ Failing(stage, cause)        the stage changes as above
//!        │                                      │
//!        └──────── abort, end ──────────────────┴──────▶ Ended ── queue pair closed ──▶ Closed
//! ```
//!
//! | Stage | Sends messages | Takes messages | Sends |
//! |---|---|---|---|
//! | `Open`, `ReceivedAll` | yes | yes | what its service sends |
//! | `Finished`, `Complete` | no | yes | `Fin`, once |
//! | `Closing`, `Lingering` | no | discards them | `Fin`, once |
//! | `Aborting` | no | discards them | `Abort`, once, and nothing after it |
//!
//! The service holds a handle in all stages but `Lingering` and `Aborting`, which last at most
//! [`LINGER`](super::timers::LINGER). What the peer has said is not part of a phase: [`Flow`](super::flow_control::Flow) knows
//! whether both ends have finished, and the connection then ends as [`CloseReason::Clean`].
//!
//! [`transition`] is the only place where a phase changes. Every pair of a phase and an event has a transition; an event that
//! means nothing in a phase leaves it as it is. `flow_model.rs` runs two ends through every interleaving of these events.

use super::error::{CloseReason, MessageError};
use crate::error::OpErrorKind;
use crate::types::WcStatus;

/// Phase of one end of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    /// Frames are sent and received.
    Running(Stage),
    /// An operation has failed, and the queue pair with it. The first cause is not known for certain: until it is, other
    /// completions are polled.
    Failing(Stage, OpErrorKind),
    /// No frame is sent or received any more. The queue pair is still to be closed.
    Ended(End),
    /// The queue pair is closed.
    Closed(End),
}

/// What the service has asked of the connection so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Stage {
    /// Messages go both ways.
    Open,
    /// The service has received the end of the peer's messages.
    ReceivedAll,
    /// The service has finished: this end sends no more messages.
    Finished,
    /// The service has finished, and has received the end of the peer's messages.
    Complete,
    /// The service has closed the connection: this end sends no more messages, and discards those of the peer.
    Closing,
    /// The service has dropped a connection whose messages it had all received: this end finishes as in `Closing`.
    Lingering,
    /// The service has dropped the connection before: the peer is told by an `Abort`.
    Aborting,
}

/// How a connection has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct End {
    pub(super) reason: CloseReason,
    /// Messages that had arrived may still be received.
    pub(super) readable: bool,
}

/// What happens to one end of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Event {
    /// The service sends no more messages.
    Finish,
    /// The service neither sends nor receives any more messages.
    Close,
    /// The service has received the end of the peer's messages.
    EndReceived,
    /// The service has dropped its last handle.
    Drop {
        /// The peer has finished, and no message of it is left.
        at_end: bool,
    },
    /// The service ends the connection at once, for this reason.
    Leave(CloseReason),
    /// An operation has failed.
    Fail(OpErrorKind),
    /// The connection ends for any other reason.
    End(CloseReason),
    /// The queue pair is closed.
    QueuePairClosed,
}

/// What a transition asks for besides the new phase, in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Action {
    /// Send an `Abort`, if there is a credit for it.
    SendAbort,
    /// Post nothing any more, of the service's operations neither.
    StopSending,
    /// Detach all operations, and drop the messages that can no longer be received.
    Release,
    /// The same, but for an `Abort` that the device has: the driver awaits it before it closes the queue pair.
    ReleaseAllButAbort,
    /// End the registrations of messages that the peer has not fetched.
    ReleaseOffers,
    /// Drop the connection manager's part.
    ReleaseLink,
    /// Wake all tasks that wait to send.
    WakeSenders,
    /// Wake all tasks that wait to receive.
    WakeReceivers,
    /// Wake all tasks that wait for a flush or for the end.
    WakeFlushers,
}

const FINISH: &[Action] = &[Action::WakeSenders];
const CLOSE: &[Action] = &[Action::WakeSenders, Action::WakeReceivers];
const ABORT: &[Action] = &[Action::SendAbort];
/// The offers stay until the queue pair is closed: a peer that is refused what it fetches takes that for the reason.
const LEAVE: &[Action] = &[
    Action::SendAbort,
    Action::StopSending,
    Action::ReleaseAllButAbort,
    Action::WakeSenders,
    Action::WakeReceivers,
    Action::WakeFlushers,
];
/// The `Abort` was sent when the service dropped the connection.
const LEAVE_ABORTED: &[Action] = LEAVE.split_at(1).1;
/// As in [`LEAVE`], the offers stay.
const END_ABORTED: &[Action] = &[Action::Release, Action::WakeSenders, Action::WakeReceivers, Action::WakeFlushers];
const END: &[Action] =
    &[Action::Release, Action::ReleaseOffers, Action::WakeSenders, Action::WakeReceivers, Action::WakeFlushers];
const QUEUE_PAIR_CLOSED: &[Action] = &[Action::ReleaseOffers, Action::ReleaseLink, Action::WakeFlushers];

/// The phase after `event`, and what is to be done.
pub(super) fn transition(from: Phase, event: Event) -> (Phase, &'static [Action]) {
    match from {
        Phase::Running(stage) => match event {
            Event::Fail(kind) => (Phase::Failing(stage, kind), &[]),
            _ => leave_stage(stage, event).unwrap_or_else(|| {
                let (stage, actions) = next_stage(stage, event);
                (Phase::Running(stage), actions)
            }),
        },
        Phase::Failing(stage, cause) => match event {
            // The flush of other work says less than the failure that it follows, and may be seen before it.
            Event::Fail(kind) => (Phase::Failing(stage, if is_flush(cause) { kind } else { cause }), &[]),
            _ => leave_stage(stage, event).unwrap_or_else(|| {
                let (stage, actions) = next_stage(stage, event);
                (Phase::Failing(stage, cause), actions)
            }),
        },
        Phase::Ended(end) => match event {
            Event::QueuePairClosed => (Phase::Closed(end), QUEUE_PAIR_CLOSED),
            Event::Close => (Phase::Ended(End { readable: false, ..end }), CLOSE),
            _ => (from, &[]),
        },
        Phase::Closed(end) => match event {
            Event::Close => (Phase::Closed(End { readable: false, ..end }), CLOSE),
            _ => (from, &[]),
        },
    }
}

/// The phase after an event that ends the connection.
fn leave_stage(stage: Stage, event: Event) -> Option<(Phase, &'static [Action])> {
    let (end, actions) = match (event, stage) {
        (Event::Leave(reason), Stage::Aborting) => (End { reason, readable: false }, LEAVE_ABORTED),
        (Event::Leave(reason), _) => (End { reason, readable: false }, LEAVE),
        (Event::End(reason), Stage::Aborting) => (End { reason, readable: false }, END_ABORTED),
        (Event::End(reason), _) => (End { reason, readable: stage.takes_messages() }, END),
        _ => return None,
    };
    Some((Phase::Ended(end), actions))
}

/// The stage after an event that does not end the connection.
fn next_stage(stage: Stage, event: Event) -> (Stage, &'static [Action]) {
    use Stage::{Aborting, Closing, Complete, Finished, Lingering, Open, ReceivedAll};
    match (stage, event) {
        // The service holds no handle any more.
        (Lingering | Aborting, _) => (stage, &[]),
        (Open, Event::Finish) => (Finished, FINISH),
        (ReceivedAll, Event::Finish) => (Complete, FINISH),
        (_, Event::Close) => (Closing, CLOSE),
        (Open, Event::EndReceived) => (ReceivedAll, &[]),
        (Finished, Event::EndReceived) => (Complete, &[]),
        (Open, Event::Drop { .. }) | (Finished | Closing, Event::Drop { at_end: false }) => (Aborting, ABORT),
        (_, Event::Drop { .. }) => (Lingering, &[]),
        _ => (stage, &[]),
    }
}

impl Phase {
    /// How the connection has ended, if it has.
    pub(super) fn end(&self) -> Option<End> {
        match *self {
            Self::Running(_) | Self::Failing(..) => None,
            Self::Ended(end) | Self::Closed(end) => Some(end),
        }
    }

    /// Why the connection has ended, if it has.
    pub(super) fn ended(&self) -> Option<CloseReason> {
        self.end().map(|end| end.reason)
    }

    /// The cause of a failure, as far as it is known.
    pub(super) fn failure(&self) -> Option<OpErrorKind> {
        match *self {
            Self::Failing(_, cause) => Some(cause),
            _ => None,
        }
    }

    /// True if the service has dropped the connection before it had received all messages.
    pub(super) fn is_aborting(&self) -> bool {
        matches!(self, Self::Running(Stage::Aborting) | Self::Failing(Stage::Aborting, _))
    }

    /// True if messages of the peer are for the service, and not to be discarded.
    pub(super) fn takes_messages(&self) -> bool {
        match self {
            Self::Running(stage) | Self::Failing(stage, _) => stage.takes_messages(),
            Self::Ended(end) | Self::Closed(end) => end.readable,
        }
    }

    /// Why the service cannot send a message, if it cannot.
    pub(super) fn check_open(&self) -> Result<(), MessageError> {
        match self {
            Self::Running(stage) | Self::Failing(stage, _) => match stage {
                Stage::Open | Stage::ReceivedAll => Ok(()),
                Stage::Finished | Stage::Complete => Err(MessageError::Finished),
                Stage::Closing | Stage::Lingering | Stage::Aborting => Err(MessageError::Closed(CloseReason::Local)),
            },
            Self::Ended(end) | Self::Closed(end) => Err(MessageError::Closed(end.reason)),
        }
    }
}

impl Stage {
    fn takes_messages(self) -> bool {
        !matches!(self, Self::Closing | Self::Lingering | Self::Aborting)
    }

    /// True if a `Fin` is to be sent, unless it was.
    pub(super) fn sends_fin(self) -> bool {
        matches!(self, Self::Finished | Self::Complete | Self::Closing | Self::Lingering)
    }
}

/// True if an operation has failed because something else has.
pub(super) fn is_flush(kind: OpErrorKind) -> bool {
    kind.status() == Some(WcStatus::WR_FLUSH_ERR) || kind == OpErrorKind::Closed
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::VerbError;

    /// The stage after each event that does not end the connection; `.` if it stays.
    const STAGES: &str = "
                     finish    close    end-received  drop-at-end  drop
        Open         Finished  Closing  ReceivedAll   Aborting     Aborting
        ReceivedAll  Complete  Closing  .             Lingering    Lingering
        Finished     .         Closing  Complete      Lingering    Aborting
        Complete     .         Closing  .             Lingering    Lingering
        Closing      .         .        .             Lingering    Aborting
        Lingering    .         .        .             .            .
        Aborting     .         .        .             .            .
    ";

    const ALL: [Stage; 7] = [
        Stage::Open,
        Stage::ReceivedAll,
        Stage::Finished,
        Stage::Complete,
        Stage::Closing,
        Stage::Lingering,
        Stage::Aborting,
    ];

    const FLUSH: OpErrorKind = OpErrorKind::Closed;
    const FAILURE: OpErrorKind = OpErrorKind::Post(VerbError::new("ibv_post_send", VerbError::EIO));
    const OTHER: OpErrorKind = OpErrorKind::Post(VerbError::new("ibv_post_recv", VerbError::EIO));

    const STAGE_EVENTS: [Event; 5] =
        [Event::Finish, Event::Close, Event::EndReceived, Event::Drop { at_end: true }, Event::Drop { at_end: false }];

    const OTHER_EVENTS: [Event; 5] = [
        Event::Leave(CloseReason::Aborted),
        Event::Fail(FLUSH),
        Event::Fail(OTHER),
        Event::End(CloseReason::Silent),
        Event::QueuePairClosed,
    ];

    /// A stage, and what the table says that comes after it for each of [`STAGE_EVENTS`].
    fn rows() -> Vec<(Stage, [Stage; 5])> {
        let lines = STAGES.lines().map(str::trim).filter(|line| !line.is_empty()).skip(1);
        let named = |name: &str| ALL.into_iter().find(|stage| format!("{stage:?}") == name).expect("it is a stage");
        let row = |line: &str| {
            let mut cells = line.split_whitespace();
            let from = named(cells.next().expect("a stage"));
            let to: Vec<Stage> = cells.map(|cell| if cell == "." { from } else { named(cell) }).collect();
            (from, to.try_into().expect("a cell for each event"))
        };
        lines.map(row).collect()
    }

    #[test]
    fn every_stage_has_a_row_and_every_event_its_cell() {
        let rows = rows();
        assert_eq!(rows.iter().map(|(stage, _)| *stage).collect::<Vec<_>>(), ALL);
        for (from, row) in rows {
            for (event, to) in STAGE_EVENTS.into_iter().zip(row) {
                let actions = match event {
                    Event::Finish if to != from => &[Action::WakeSenders][..],
                    Event::Close if to == Stage::Closing => &[Action::WakeSenders, Action::WakeReceivers],
                    Event::Drop { .. } if to == Stage::Aborting && from != to => &[Action::SendAbort],
                    _ => &[],
                };
                let phases: [fn(Stage) -> Phase; 3] =
                    [Phase::Running, |stage| Phase::Failing(stage, FLUSH), |stage| Phase::Failing(stage, FAILURE)];
                for phase in phases {
                    assert_eq!(transition(phase(from), event), (phase(to), actions), "{from:?}, {event:?}");
                }
            }
        }
    }

    #[test]
    fn every_stage_fails_with_the_first_cause_and_ends_once() {
        for stage in ALL {
            let readable = ALL[..4].contains(&stage);
            for from in [Phase::Running(stage), Phase::Failing(stage, FLUSH), Phase::Failing(stage, FAILURE)] {
                for event in OTHER_EVENTS {
                    let (to, actions) = transition(from, event);
                    let expected = match (from, event) {
                        (Phase::Failing(_, FAILURE), Event::Fail(_)) | (_, Event::QueuePairClosed) => from,
                        (_, Event::Fail(kind)) => Phase::Failing(stage, kind),
                        (_, Event::Leave(reason)) => Phase::Ended(End { reason, readable: false }),
                        (_, Event::End(reason)) => Phase::Ended(End { reason, readable }),
                        (_, event) => unreachable!("{event:?} is not of these"),
                    };
                    assert_eq!(to, expected, "{from:?}, {event:?}");
                    let has = |action| actions.contains(&action);
                    let ends = to.end().is_some();
                    let leaves = matches!(event, Event::Leave(_));
                    for woken in [Action::WakeSenders, Action::WakeReceivers, Action::WakeFlushers] {
                        assert_eq!(has(woken), ends, "{from:?}, {event:?}");
                    }
                    assert_eq!(has(Action::SendAbort), leaves && stage != Stage::Aborting, "once");
                    assert_eq!(has(Action::StopSending), leaves);
                    assert_eq!((has(Action::ReleaseAllButAbort), has(Action::Release)), (leaves, ends && !leaves));
                    assert_eq!(has(Action::ReleaseOffers), ends && !leaves && stage != Stage::Aborting);
                    assert!(!has(Action::ReleaseLink));
                }
            }
        }
    }

    #[test]
    fn nothing_but_close_and_the_end_of_the_queue_pair_changes_an_end() {
        let reason = CloseReason::Dropped;
        for readable in [true, false] {
            let end = End { reason, readable };
            for event in STAGE_EVENTS.into_iter().chain(OTHER_EVENTS) {
                let shut = End { reason, readable: false };
                let (ended, closed) = match event {
                    Event::Close => ((Phase::Ended(shut), CLOSE), (Phase::Closed(shut), CLOSE)),
                    Event::QueuePairClosed => ((Phase::Closed(end), QUEUE_PAIR_CLOSED), (Phase::Closed(end), &[][..])),
                    _ => ((Phase::Ended(end), &[][..]), (Phase::Closed(end), &[][..])),
                };
                assert_eq!(transition(Phase::Ended(end), event), ended, "{event:?}");
                assert_eq!(transition(Phase::Closed(end), event), closed, "{event:?}");
            }
        }
    }

    #[test]
    fn service_is_told_what_its_phase_allows() {
        let closed = |reason| Err(MessageError::Closed(reason));
        for (at, stage) in ALL.into_iter().enumerate() {
            let sends = match at {
                0 | 1 => Ok(()),
                2 | 3 => Err(MessageError::Finished),
                _ => closed(CloseReason::Local),
            };
            for phase in [Phase::Running(stage), Phase::Failing(stage, FLUSH)] {
                assert_eq!((phase.check_open(), phase.takes_messages(), phase.ended()), (sends.clone(), at < 4, None));
            }
            assert_eq!(stage.sends_fin(), (2..6).contains(&at));
        }
        let end = End { reason: CloseReason::Silent, readable: true };
        for phase in [Phase::Ended(end), Phase::Closed(end)] {
            assert_eq!((phase.check_open(), phase.takes_messages()), (closed(CloseReason::Silent), true));
        }
    }
}

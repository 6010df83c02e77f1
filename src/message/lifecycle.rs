//! Lifecycle of one end of a connection, as data.
//!
//! A phase carries a stage while the connection runs: how far the service is. These are all transitions; an event that is not
//! drawn leaves the phase and the stage as they are.
//!
//! ```text
//!  Running ── fail ────────▶ Failing ── abort, end ──▶ Ended ── queue pair closed ──▶ Closed
//!  Running ── abort, end ────────────────────────────▶ Ended
//!
//!  Open ── finish ─────────▶ Finished ───── end received ──▶ Complete
//!  Open ── end received ───▶ ReceivedAll ── finish ────────▶ Complete
//!
//!  Open, ReceivedAll, Finished, Complete ── close ─────────────▶ Closing
//!  ReceivedAll, Complete ─── drop at end, drop before end ─────▶ Lingering
//!  Finished, Closing ─────── drop at end ──────────────────────▶ Lingering
//!  Finished, Closing ─────── drop before end ──────────────────▶ Aborting
//!  Open ──────────────────── drop at end, drop before end ─────▶ Aborting
//! ```
//!
//! | Stage | Service sends | Service receives | Last frame |
//! |---|---|---|---|
//! | `Open`, `ReceivedAll` | yes | yes | |
//! | `Finished`, `Complete` | no | yes | `Fin` |
//! | `Closing`, `Lingering` | no | no: messages are discarded | `Fin` |
//! | `Aborting` | no | no: messages are discarded | `Abort` |
//!
//! The service holds a handle in all stages but `Lingering` and `Aborting`, which last at most
//! [`LINGER`](super::timers::LINGER). A phase does not include what the peer has sent: [`Flow`](super::flow_control::Flow)
//! knows whether both ends have finished, and the connection then ends as [`CloseReason::Clean`].
//!
//! [`transition`] is the only place where a phase changes. The tests read the drawing and the table above, and compare them with
//! the result for every pair of a phase and an event. `flow_model.rs` runs two ends through every interleaving of these events.

use super::error::{CloseReason, MessageError};
use crate::error::OpErrorKind;
use crate::types::WcStatus;

/// Phase of one end of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    /// Frames are sent and received.
    Running(Stage),
    /// An operation has failed, and the queue pair with it. Other completions are polled until the first cause is known.
    Failing(Stage, OpErrorKind),
    /// The connection sends and receives no more frames. The queue pair is still to be closed.
    Ended(End),
    /// The queue pair is closed.
    Closed(End),
}

/// Calls of the service so far, as far as they change what the connection does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Stage {
    /// The service sends and receives.
    Open,
    /// The service has received the end of the peer's messages.
    ReceivedAll,
    /// The service has finished.
    Finished,
    /// The service has finished, and has received the end of the peer's messages.
    Complete,
    /// The service has closed the connection.
    Closing,
    /// The service has dropped the connection after it had received all messages. This end finishes as in `Closing`.
    Lingering,
    /// The service has dropped the connection before it had received all messages. An `Abort` notifies the peer.
    Aborting,
}

/// Outcome of a connection that has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct End {
    pub(super) reason: CloseReason,
    /// True if the service can still receive messages that had arrived.
    pub(super) readable: bool,
}

/// Cause of a transition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Event {
    /// The service finishes: it sends no more messages.
    Finish,
    /// The service closes the connection: it neither sends nor receives any more messages.
    Close,
    /// The service has received the end of the peer's messages.
    EndReceived,
    /// The service has dropped its last handle.
    Drop {
        /// True if the peer has finished, and none of its messages is left.
        at_end: bool,
    },
    /// The service ends the connection at once, for this reason.
    Abort(CloseReason),
    /// An operation has failed.
    Fail(OpErrorKind),
    /// The connection ends for another reason.
    End(CloseReason),
    /// The queue pair is closed.
    QueuePairClosed,
}

/// Side effect of a transition. [`Core`](super::core::Core) executes them in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Action {
    /// Send an `Abort`, if there is a credit for it.
    SendAbort,
    /// Stop posting, for the service's operations, too.
    StopSending,
    /// Detach all operations, and drop the messages that can no longer be received.
    Release,
    /// As `Release`, except that an `Abort` that is posted stays: the driver awaits it before it closes the queue pair.
    ReleaseAllButAbort,
    /// Deregister messages that the peer has not fetched.
    ReleaseOffers,
    /// Drop the link of the connection manager.
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
const DROP_BEFORE_END: &[Action] = &[Action::SendAbort];
/// The offers stay registered until the queue pair is closed: a peer whose READ is refused would report that as the reason.
const ABORT: &[Action] = &[
    Action::SendAbort,
    Action::StopSending,
    Action::ReleaseAllButAbort,
    Action::WakeSenders,
    Action::WakeReceivers,
    Action::WakeFlushers,
];
/// The `Abort` was sent when the service dropped the connection.
const ABORT_AFTER_DROP: &[Action] = ABORT.split_at(1).1;
/// The offers stay as in [`ABORT`].
const END_AFTER_DROP: &[Action] =
    &[Action::Release, Action::WakeSenders, Action::WakeReceivers, Action::WakeFlushers];
const END: &[Action] = &[
    Action::Release,
    Action::ReleaseOffers,
    Action::WakeSenders,
    Action::WakeReceivers,
    Action::WakeFlushers,
];
const QUEUE_PAIR_CLOSED: &[Action] =
    &[Action::ReleaseOffers, Action::ReleaseLink, Action::WakeFlushers];

/// Returns the phase after `event`, and the actions that it requires.
pub(super) fn transition(from: Phase, event: Event) -> (Phase, &'static [Action]) {
    match from {
        Phase::Running(stage) => match event {
            Event::Fail(kind) => (Phase::Failing(stage, kind), &[]),
            _ => end_stage(stage, event).unwrap_or_else(|| {
                let (stage, actions) = next_stage(stage, event);
                (Phase::Running(stage), actions)
            }),
        },
        Phase::Failing(stage, cause) => match event {
            // The flush of other work follows the failure that caused it, but may be polled before it.
            Event::Fail(kind) => {
                (Phase::Failing(stage, if is_flush(cause) { kind } else { cause }), &[])
            }
            _ => end_stage(stage, event).unwrap_or_else(|| {
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

/// Returns the phase after an event that ends the connection; `None` for another event.
fn end_stage(stage: Stage, event: Event) -> Option<(Phase, &'static [Action])> {
    let (end, actions) = match (event, stage) {
        (Event::Abort(reason), Stage::Aborting) => {
            (End { reason, readable: false }, ABORT_AFTER_DROP)
        }
        (Event::Abort(reason), _) => (End { reason, readable: false }, ABORT),
        (Event::End(reason), Stage::Aborting) => (End { reason, readable: false }, END_AFTER_DROP),
        (Event::End(reason), _) => (End { reason, readable: stage.takes_messages() }, END),
        _ => return None,
    };
    Some((Phase::Ended(end), actions))
}

/// Returns the stage after an event that does not end the connection.
fn next_stage(stage: Stage, event: Event) -> (Stage, &'static [Action]) {
    use Stage::{Aborting, Closing, Complete, Finished, Lingering, Open, ReceivedAll};
    match (stage, event) {
        // The service holds no handle.
        (Lingering | Aborting, _) => (stage, &[]),
        (Open, Event::Finish) => (Finished, FINISH),
        (ReceivedAll, Event::Finish) => (Complete, FINISH),
        (_, Event::Close) => (Closing, CLOSE),
        (Open, Event::EndReceived) => (ReceivedAll, &[]),
        (Finished, Event::EndReceived) => (Complete, &[]),
        (Open, Event::Drop { .. }) | (Finished | Closing, Event::Drop { at_end: false }) => {
            (Aborting, DROP_BEFORE_END)
        }
        (_, Event::Drop { .. }) => (Lingering, &[]),
        _ => (stage, &[]),
    }
}

impl Phase {
    /// Returns the outcome of a connection that has ended.
    pub(super) fn end(&self) -> Option<End> {
        match *self {
            Self::Running(_) | Self::Failing(..) => None,
            Self::Ended(end) | Self::Closed(end) => Some(end),
        }
    }

    /// Returns the reason of a connection that has ended.
    pub(super) fn ended(&self) -> Option<CloseReason> {
        self.end().map(|end| end.reason)
    }

    /// Returns the cause of a failure, as far as it is known.
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

    /// True if messages of the peer are for the service. Otherwise they are discarded.
    pub(super) fn takes_messages(&self) -> bool {
        match self {
            Self::Running(stage) | Self::Failing(stage, _) => stage.takes_messages(),
            Self::Ended(end) | Self::Closed(end) => end.readable,
        }
    }

    /// Checks that the service may send a message.
    pub(super) fn check_open(&self) -> Result<(), MessageError> {
        match self {
            Self::Running(stage) | Self::Failing(stage, _) => match stage {
                Stage::Open | Stage::ReceivedAll => Ok(()),
                Stage::Finished | Stage::Complete => Err(MessageError::Finished),
                Stage::Closing | Stage::Lingering | Stage::Aborting => {
                    Err(MessageError::Closed(CloseReason::Local))
                }
            },
            Self::Ended(end) | Self::Closed(end) => Err(MessageError::Closed(end.reason)),
        }
    }
}

impl Stage {
    fn takes_messages(self) -> bool {
        !matches!(self, Self::Closing | Self::Lingering | Self::Aborting)
    }

    /// True if the last frame is a `Fin`.
    pub(super) fn sends_fin(self) -> bool {
        matches!(self, Self::Finished | Self::Complete | Self::Closing | Self::Lingering)
    }
}

/// True if an operation has failed as a consequence of another failure.
pub(super) fn is_flush(kind: OpErrorKind) -> bool {
    kind.status() == Some(WcStatus::WR_FLUSH_ERR) || kind == OpErrorKind::Closed
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use super::*;
    use crate::error::VerbError;

    const STAGES: [Stage; 7] = [
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

    const EVENTS: [Event; 10] = [
        Event::Finish,
        Event::Close,
        Event::EndReceived,
        Event::Drop { at_end: true },
        Event::Drop { at_end: false },
        Event::Abort(CloseReason::Aborted),
        Event::Fail(FLUSH),
        Event::Fail(OTHER),
        Event::End(CloseReason::Silent),
        Event::QueuePairClosed,
    ];

    fn phases() -> Vec<Phase> {
        let running = STAGES.map(Phase::Running);
        let failing =
            [FLUSH, FAILURE].map(|cause| STAGES.map(|stage| Phase::Failing(stage, cause)));
        let ends = [true, false].map(|readable| End { reason: CloseReason::Dropped, readable });
        [&running[..], &failing.concat(), &ends.map(Phase::Ended), &ends.map(Phase::Closed)]
            .concat()
    }

    /// Name of a phase in the drawing.
    fn phase_name(phase: Phase) -> &'static str {
        match phase {
            Phase::Running(_) => "Running",
            Phase::Failing(..) => "Failing",
            Phase::Ended(_) => "Ended",
            Phase::Closed(_) => "Closed",
        }
    }

    /// Name of a stage in the drawing and in the table.
    fn stage_name(stage: Stage) -> &'static str {
        match stage {
            Stage::Open => "Open",
            Stage::ReceivedAll => "ReceivedAll",
            Stage::Finished => "Finished",
            Stage::Complete => "Complete",
            Stage::Closing => "Closing",
            Stage::Lingering => "Lingering",
            Stage::Aborting => "Aborting",
        }
    }

    /// Name of an event in the drawing.
    fn event_name(event: Event) -> &'static str {
        match event {
            Event::Finish => "finish",
            Event::Close => "close",
            Event::EndReceived => "end received",
            Event::Drop { at_end: true } => "drop at end",
            Event::Drop { at_end: false } => "drop before end",
            Event::Abort(_) => "abort",
            Event::Fail(_) => "fail",
            Event::End(_) => "end",
            Event::QueuePairClosed => "queue pair closed",
        }
    }

    /// Stage that continues in a phase.
    fn stage(phase: Phase) -> Option<Stage> {
        match phase {
            Phase::Running(stage) | Phase::Failing(stage, _) => Some(stage),
            Phase::Ended(_) | Phase::Closed(_) => None,
        }
    }

    /// Lines of the module's documentation.
    fn docs() -> impl Iterator<Item = &'static str> {
        include_str!("lifecycle.rs")
            .lines()
            .map_while(|line| line.strip_prefix("//!"))
            .map(str::trim)
    }

    /// Reads the drawing: for a phase or stage and an event, the phase or stage that follows.
    fn drawing() -> BTreeMap<(&'static str, &'static str), &'static str> {
        let mut edges = BTreeMap::new();
        for line in
            docs().skip_while(|line| *line != "```text").skip(1).take_while(|line| *line != "```")
        {
            let path: Vec<&str> =
                line.split(['─', '▶']).map(str::trim).filter(|name| !name.is_empty()).collect();
            for edge in path.windows(3).step_by(2) {
                for from in edge[0].split(", ") {
                    for event in edge[1].split(", ") {
                        assert_eq!(
                            edges.insert((from, event), edge[2]),
                            None,
                            "{from}, {event} is drawn twice"
                        );
                    }
                }
            }
        }
        edges
    }

    #[test]
    fn every_phase_and_event_has_the_transition_that_is_drawn() {
        let drawing = drawing();
        let mut met = BTreeSet::new();
        let mut next = |from: &'static str, event| {
            let edge = (from, event_name(event));
            met.extend(drawing.contains_key(&edge).then_some(edge));
            drawing.get(&edge).copied().unwrap_or(from)
        };
        for from in phases() {
            for event in EVENTS {
                let (to, _) = transition(from, event);
                assert_eq!(phase_name(to), next(phase_name(from), event), "{from:?}, {event:?}");
                if let (Some(before), Some(after)) = (stage(from), stage(to)) {
                    assert_eq!(
                        stage_name(after),
                        next(stage_name(before), event),
                        "{from:?}, {event:?}"
                    );
                }
            }
        }
        assert_eq!(met, drawing.keys().copied().collect(), "every edge of the drawing occurs");
    }

    #[test]
    fn first_cause_of_a_failure_is_kept() {
        for stage in STAGES {
            for kind in [FLUSH, OTHER] {
                let after = |phase| transition(phase, Event::Fail(kind));
                assert_eq!(after(Phase::Running(stage)), (Phase::Failing(stage, kind), &[][..]));
                assert_eq!(
                    after(Phase::Failing(stage, FLUSH)),
                    (Phase::Failing(stage, kind), &[][..])
                );
                assert_eq!(
                    after(Phase::Failing(stage, FAILURE)),
                    (Phase::Failing(stage, FAILURE), &[][..])
                );
            }
            let failing = Phase::Failing(stage, FAILURE);
            assert!(EVENTS.into_iter().all(|event| {
                transition(failing, event).0.failure().is_none_or(|kind| kind == FAILURE)
            }));
        }
    }

    #[test]
    fn end_keeps_its_reason_and_is_readable_unless_the_service_gave_up_reading() {
        for from in phases() {
            for event in EVENTS {
                let expected = match (from.end(), event) {
                    (Some(end), Event::Close) => Some(End { readable: false, ..end }),
                    (Some(end), _) => Some(end),
                    (None, Event::Abort(reason)) => Some(End { reason, readable: false }),
                    (None, Event::End(reason)) => {
                        Some(End { reason, readable: from.takes_messages() })
                    }
                    (None, _) => None,
                };
                assert_eq!(transition(from, event).0.end(), expected, "{from:?}, {event:?}");
            }
        }
    }

    #[test]
    fn every_phase_and_event_has_its_actions() {
        use Action::*;
        for from in phases() {
            for event in EVENTS {
                let (to, actions) = transition(from, event);
                let (ended, dropped) = (from.end().is_some(), from.is_aborting());
                let expected = match event {
                    Event::Finish if stage(from) != stage(to) => vec![WakeSenders],
                    Event::Close if ended || stage(to) == Some(Stage::Closing) => {
                        vec![WakeSenders, WakeReceivers]
                    }
                    Event::Drop { .. } if to.is_aborting() && !dropped => vec![SendAbort],
                    Event::Abort(_) if !ended => {
                        let rest = [
                            StopSending,
                            ReleaseAllButAbort,
                            WakeSenders,
                            WakeReceivers,
                            WakeFlushers,
                        ];
                        [&[SendAbort][usize::from(dropped)..], &rest].concat()
                    }
                    Event::End(_) if !ended => {
                        let offers = &[ReleaseOffers][usize::from(dropped)..];
                        [&[Release], offers, &[WakeSenders, WakeReceivers, WakeFlushers]].concat()
                    }
                    Event::QueuePairClosed if matches!(from, Phase::Ended(_)) => {
                        vec![ReleaseOffers, ReleaseLink, WakeFlushers]
                    }
                    _ => vec![],
                };
                assert_eq!(actions, expected, "{from:?}, {event:?}");
            }
        }
    }

    #[test]
    fn service_may_do_in_each_stage_what_the_table_allows() {
        let mut rows = 0;
        for row in docs().filter(|line| line.starts_with("| `")) {
            let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
            for name in cells[0].split(", ") {
                let stage = STAGES
                    .into_iter()
                    .find(|&stage| stage_name(stage) == name.trim_matches('`'))
                    .expect("a stage");
                rows += 1;
                assert_eq!(stage.sends_fin(), cells[3] == "`Fin`", "{stage:?}");
                for phase in [Phase::Running(stage), Phase::Failing(stage, FLUSH)] {
                    assert_eq!(phase.check_open().is_ok(), cells[1] == "yes", "{stage:?}");
                    assert_eq!(phase.takes_messages(), cells[2] == "yes", "{stage:?}");
                    assert_eq!(phase.is_aborting(), cells[3] == "`Abort`", "{stage:?}");
                }
            }
        }
        assert_eq!(rows, STAGES.len());
        let local = Err(MessageError::Closed(CloseReason::Local));
        for (stage, error) in
            [(Stage::Finished, Err(MessageError::Finished)), (Stage::Closing, local)]
        {
            assert_eq!(Phase::Running(stage).check_open(), error);
        }
        let end = End { reason: CloseReason::Silent, readable: true };
        for phase in [Phase::Ended(end), Phase::Closed(end)] {
            assert_eq!(phase.check_open(), Err(MessageError::Closed(CloseReason::Silent)));
            assert!(phase.takes_messages());
        }
    }
}

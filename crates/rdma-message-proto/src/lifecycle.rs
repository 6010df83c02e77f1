//! The lifecycle of one end of a connection: its phase, and while it runs or fails, its stage.
//! Events without a drawn transition change nothing.
//!
//! ```text
//!  Running ── fail ───▶ Failing ── abort, terminate ──▶ Terminated ── queue pair closed ──▶ Closed
//!  Running ── abort, terminate ───────────────────────▶ Terminated
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
//! | Stage | Sends | Receives | Last frame |
//! |---|---|---|---|
//! | `Open`, `ReceivedAll` | yes | yes | |
//! | `Finished`, `Complete` | no | yes | `Fin` |
//! | `Closing`, `Lingering` | no | no: messages are discarded | `Fin` |
//! | `Aborting` | no | no: messages are discarded | `Abort` |
//!
//! In `Lingering` and `Aborting` the application holds no handle. They last at most
//! [`LINGER`](crate::timers::LINGER), or for a dropped stream its own limit.
//!
//! Tests compare drawing and table with [`transition`].

use crate::end::{End, Reason};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase<R> {
    Running(Stage),
    /// An operation has failed, and with it the queue pair, whose completions are polled for the
    /// cause.
    Failing(Stage, R),
    /// No more frames are sent or received.
    Terminated(Outcome<R>),
    Closed(Outcome<R>),
}

/// The progress of the application.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Stage {
    Open,
    /// `recv` has returned the end of the peer's messages.
    ReceivedAll,
    /// The application sends no more messages.
    Finished,
    /// Both `Finished` and `ReceivedAll`.
    Complete,
    /// The application neither sends nor receives.
    Closing,
    /// Dropped after all messages were received, or a dropped stream. It finishes as in `Closing`.
    Lingering,
    /// Dropped before all messages were received. An `Abort` notifies the peer.
    Aborting,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Outcome<R> {
    pub reason: R,
    /// Arrived messages can still be received.
    pub readable: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event<R> {
    Finish,
    Close,
    EndReceived,
    /// The last handle was dropped.
    Drop {
        /// The peer has finished and no message is left.
        at_end: bool,
    },
    Abort(R),
    Fail(R),
    Terminate(R),
    QueuePairClosed,
}

/// The caller executes the effects in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Sends an `Abort` if there is a credit.
    SendAbort,
    /// Stops posting, including the application's operations.
    StopSending,
    /// Detaches all operations except receives, and drops unreadable messages.
    Release,
    /// Like `Release`, but keeps a posted `Abort`, for which the driver waits.
    ReleaseAllButAbort,
    /// Deregisters unfetched offers.
    ReleaseOffers,
    /// Drops the receives, which have completed unless the flush took too long.
    ReleaseReceives,
    ReleaseLink,
    WakeSenders,
    WakeReceivers,
    /// Wakes tasks that wait for a flush, the termination, or the queue pair to close.
    WakeFlushers,
}

const FINISH: &[Action] = &[Action::WakeSenders];
const CLOSE: &[Action] = &[Action::WakeSenders, Action::WakeReceivers];
const DROP_BEFORE_END: &[Action] = &[Action::SendAbort];
/// After an abort or a drop, offers stay registered until the queue pair is closed. Otherwise the
/// peer would report its refused READ as the reason.
const ABORT: &[Action] = &[
    Action::SendAbort,
    Action::StopSending,
    Action::ReleaseAllButAbort,
    Action::WakeSenders,
    Action::WakeReceivers,
    Action::WakeFlushers,
];
const ABORT_AFTER_DROP: &[Action] = ABORT.split_at(1).1;
const TERMINATE_AFTER_DROP: &[Action] =
    &[Action::Release, Action::WakeSenders, Action::WakeReceivers, Action::WakeFlushers];
const TERMINATE: &[Action] = &[
    Action::Release,
    Action::ReleaseOffers,
    Action::WakeSenders,
    Action::WakeReceivers,
    Action::WakeFlushers,
];
const QUEUE_PAIR_CLOSED: &[Action] =
    &[Action::ReleaseReceives, Action::ReleaseOffers, Action::ReleaseLink, Action::WakeFlushers];

pub fn transition<R: Reason>(from: Phase<R>, event: Event<R>) -> (Phase<R>, &'static [Action]) {
    match from {
        Phase::Running(stage) => match event {
            Event::Fail(failure) => (Phase::Failing(stage, failure), &[]),
            _ => terminate_stage(stage, event).unwrap_or_else(|| {
                let (stage, actions) = next_stage(stage, event);
                (Phase::Running(stage), actions)
            }),
        },
        Phase::Failing(stage, cause) => match event {
            // The flush of other work follows the failure that caused it, but may be polled first.
            Event::Fail(failure) => {
                (Phase::Failing(stage, if cause.is_flush() { failure } else { cause }), &[])
            }
            _ => terminate_stage(stage, event).unwrap_or_else(|| {
                let (stage, actions) = next_stage(stage, event);
                (Phase::Failing(stage, cause), actions)
            }),
        },
        Phase::Terminated(outcome) => match event {
            Event::QueuePairClosed => (Phase::Closed(outcome), QUEUE_PAIR_CLOSED),
            Event::Close => (Phase::Terminated(Outcome { readable: false, ..outcome }), CLOSE),
            _ => (from, &[]),
        },
        Phase::Closed(outcome) => match event {
            Event::Close => (Phase::Closed(Outcome { readable: false, ..outcome }), CLOSE),
            _ => (from, &[]),
        },
    }
}

fn terminate_stage<R>(stage: Stage, event: Event<R>) -> Option<(Phase<R>, &'static [Action])> {
    let (outcome, actions) = match (event, stage) {
        (Event::Abort(reason), Stage::Aborting) => {
            (Outcome { reason, readable: false }, ABORT_AFTER_DROP)
        }
        (Event::Abort(reason), _) => (Outcome { reason, readable: false }, ABORT),
        (Event::Terminate(reason), Stage::Aborting) => {
            (Outcome { reason, readable: false }, TERMINATE_AFTER_DROP)
        }
        (Event::Terminate(reason), _) => {
            (Outcome { reason, readable: stage.takes_messages() }, TERMINATE)
        }
        _ => return None,
    };
    Some((Phase::Terminated(outcome), actions))
}

fn next_stage<R>(stage: Stage, event: Event<R>) -> (Stage, &'static [Action]) {
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

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NotOpen<R> {
    Finished,
    /// The application closed this end, or the connection has ended.
    Ended(R),
}

impl<R: Reason> Phase<R> {
    pub fn outcome(&self) -> Option<Outcome<R>> {
        match *self {
            Self::Running(_) | Self::Failing(..) => None,
            Self::Terminated(outcome) | Self::Closed(outcome) => Some(outcome),
        }
    }

    pub fn close_reason(&self) -> Option<R> {
        self.outcome().map(|outcome| outcome.reason)
    }

    /// The cause, as far as it is known.
    pub fn failure(&self) -> Option<R> {
        match *self {
            Self::Failing(_, cause) => Some(cause),
            _ => None,
        }
    }

    pub fn is_aborting(&self) -> bool {
        matches!(self, Self::Running(Stage::Aborting) | Self::Failing(Stage::Aborting, _))
    }

    /// Returns true if only the peer has to finish: in `close`, or after a drop.
    pub fn awaits_peer(&self) -> bool {
        matches!(self, Self::Running(Stage::Closing | Stage::Lingering))
    }

    pub fn takes_messages(&self) -> bool {
        match self {
            Self::Running(stage) | Self::Failing(stage, _) => stage.takes_messages(),
            Self::Terminated(outcome) | Self::Closed(outcome) => outcome.readable,
        }
    }

    pub fn check_open(&self) -> Result<(), NotOpen<R>> {
        match self {
            Self::Running(stage) | Self::Failing(stage, _) => match stage {
                Stage::Open | Stage::ReceivedAll => Ok(()),
                Stage::Finished | Stage::Complete => Err(NotOpen::Finished),
                Stage::Closing | Stage::Lingering | Stage::Aborting => {
                    Err(NotOpen::Ended(End::Local.into()))
                }
            },
            Self::Terminated(outcome) | Self::Closed(outcome) => {
                Err(NotOpen::Ended(outcome.reason))
            }
        }
    }
}

impl Stage {
    fn takes_messages(self) -> bool {
        !matches!(self, Self::Closing | Self::Lingering | Self::Aborting)
    }

    /// Returns true if a `Fin` follows the last message.
    pub fn sends_fin(self) -> bool {
        matches!(self, Self::Finished | Self::Complete | Self::Closing | Self::Lingering)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use super::*;
    use crate::end::TestReason;

    type Phase = super::Phase<TestReason>;
    type Event = super::Event<TestReason>;

    const STAGES: [Stage; 7] = [
        Stage::Open,
        Stage::ReceivedAll,
        Stage::Finished,
        Stage::Complete,
        Stage::Closing,
        Stage::Lingering,
        Stage::Aborting,
    ];

    const FLUSH: TestReason = TestReason::Flush;
    const FAILURE: TestReason = TestReason::Failed(1);
    const OTHER: TestReason = TestReason::Failed(2);
    const SILENT: TestReason = TestReason::Protocol(End::Silent);

    const EVENTS: [Event; 10] = [
        Event::Finish,
        Event::Close,
        Event::EndReceived,
        Event::Drop { at_end: true },
        Event::Drop { at_end: false },
        Event::Abort(TestReason::Aborted),
        Event::Fail(FLUSH),
        Event::Fail(OTHER),
        Event::Terminate(SILENT),
        Event::QueuePairClosed,
    ];

    fn phases() -> Vec<Phase> {
        let running = STAGES.map(Phase::Running);
        let failing =
            [FLUSH, FAILURE].map(|cause| STAGES.map(|stage| Phase::Failing(stage, cause)));
        let outcomes = [true, false]
            .map(|readable| Outcome { reason: TestReason::Protocol(End::Dropped), readable });
        [
            &running[..],
            &failing.concat(),
            &outcomes.map(Phase::Terminated),
            &outcomes.map(Phase::Closed),
        ]
        .concat()
    }

    fn phase_name(phase: Phase) -> &'static str {
        match phase {
            Phase::Running(_) => "Running",
            Phase::Failing(..) => "Failing",
            Phase::Terminated(_) => "Terminated",
            Phase::Closed(_) => "Closed",
        }
    }

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

    /// Returns the name of an event in the drawing.
    fn event_name(event: Event) -> &'static str {
        match event {
            Event::Finish => "finish",
            Event::Close => "close",
            Event::EndReceived => "end received",
            Event::Drop { at_end: true } => "drop at end",
            Event::Drop { at_end: false } => "drop before end",
            Event::Abort(_) => "abort",
            Event::Fail(_) => "fail",
            Event::Terminate(_) => "terminate",
            Event::QueuePairClosed => "queue pair closed",
        }
    }

    fn stage(phase: Phase) -> Option<Stage> {
        match phase {
            Phase::Running(stage) | Phase::Failing(stage, _) => Some(stage),
            Phase::Terminated(_) | Phase::Closed(_) => None,
        }
    }

    /// Returns the lines of the module's documentation.
    fn docs() -> impl Iterator<Item = &'static str> {
        include_str!("lifecycle.rs")
            .lines()
            .map_while(|line| line.strip_prefix("//!"))
            .map(str::trim)
    }

    /// Parses the drawing into (state, event) → next state.
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
    fn outcome_keeps_its_reason_and_is_readable_unless_the_service_closed() {
        for from in phases() {
            for event in EVENTS {
                let expected = match (from.outcome(), event) {
                    (Some(outcome), Event::Close) => Some(Outcome { readable: false, ..outcome }),
                    (Some(outcome), _) => Some(outcome),
                    (None, Event::Abort(reason)) => Some(Outcome { reason, readable: false }),
                    (None, Event::Terminate(reason)) => {
                        Some(Outcome { reason, readable: from.takes_messages() })
                    }
                    (None, _) => None,
                };
                assert_eq!(transition(from, event).0.outcome(), expected, "{from:?}, {event:?}");
            }
        }
    }

    #[test]
    fn every_phase_and_event_has_its_actions() {
        use Action::*;
        for from in phases() {
            for event in EVENTS {
                let (to, actions) = transition(from, event);
                let (ended, dropped) = (from.outcome().is_some(), from.is_aborting());
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
                    Event::Terminate(_) if !ended => {
                        let offers = &[ReleaseOffers][usize::from(dropped)..];
                        [&[Release], offers, &[WakeSenders, WakeReceivers, WakeFlushers]].concat()
                    }
                    Event::QueuePairClosed if matches!(from, Phase::Terminated(_)) => {
                        vec![ReleaseReceives, ReleaseOffers, ReleaseLink, WakeFlushers]
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
                    .expect("name of a stage");
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
        let local = Err(NotOpen::Ended(TestReason::Protocol(End::Local)));
        for (stage, error) in [(Stage::Finished, Err(NotOpen::Finished)), (Stage::Closing, local)] {
            assert_eq!(Phase::Running(stage).check_open(), error);
        }
        let outcome = Outcome { reason: SILENT, readable: true };
        for phase in [Phase::Terminated(outcome), Phase::Closed(outcome)] {
            assert_eq!(phase.check_open(), Err(NotOpen::Ended(SILENT)));
            assert!(phase.takes_messages());
        }
    }
}

//! Findings: errors in what the program wrote into queues, doorbell records and registers. Hardware
//! would report them late or never.

use std::fmt;

/// The kind of a [`Finding`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Problem {
    /// A malformed send WQE: wrong index or queue pair number, inconsistent segments, or unknown
    /// opcode.
    MalformedWqe,
    /// A send queue's doorbell record stayed ahead of its doorbells for longer than
    /// [`Options::doorbell_patience`](crate::Options::doorbell_patience).
    MissedDoorbell,
    /// A doorbell whose WQE the queue's doorbell record does not cover: the record was not written
    /// before the doorbell.
    DoorbellWithoutRecord,
    /// A doorbell whose index does not name a posted WQE.
    WrongDoorbellIndex,
    /// A WQE stored to a register (BlueFlame) that differs from the WQE in the ring. Only with
    /// [`Options::check_blue_flame`](crate::Options::check_blue_flame).
    BlueFlameMismatch,
    /// A WQE that changed between its doorbell and its execution. Only with
    /// [`Options::check_overwritten`](crate::Options::check_overwritten).
    OverwrittenEntry,
    /// A doorbell for a queue pair that does not use this UAR page or never existed.
    StrayDoorbell,
    /// More WQE blocks posted than the queue holds: some were overwritten before execution.
    QueueOverflow,
    /// A new completion queue whose entries are not marked as owned by the device. The first pass
    /// would take them for CQEs.
    UnmarkedCompletions,
    /// The program consumed an entry that the device owned. The consumer index is ahead of the
    /// producer index, moved back, or passed an entry whose owner bit the program changed. A wrong
    /// owner bit check causes this.
    WrongOwner,
    /// A completion for a full completion queue, which is then in the error state
    /// (`ibv_poll_cq(3)`).
    CompletionOverrun,
}

/// An error in what the program wrote.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Finding {
    /// Number of the queue pair or completion queue.
    pub number: u32,
    /// The kind of error.
    pub problem: Problem,
    /// The value found and the value expected.
    pub detail: String,
}

impl fmt::Debug for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} on queue {:#x}: {}", self.problem, self.number, self.detail)
    }
}

#[derive(Debug, Default)]
pub(crate) struct Lint {
    pub(crate) findings: Vec<Finding>,
}

impl Lint {
    /// Limit of stored findings: a broken queue yields one for each WQE.
    const MAX_FINDINGS: usize = 1000;

    pub(crate) fn note(&mut self, number: u32, problem: Problem, detail: String) {
        let finding = Finding { number, problem, detail };
        if self.findings.len() < Self::MAX_FINDINGS && !self.findings.contains(&finding) {
            self.findings.push(finding);
        }
    }
}

//! What is wrong with what the program wrote into queues, records and registers, and would be silent or late on a device.

use std::fmt;

/// What can be wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Problem {
    /// An entry of a send queue that is none: wrong index or queue pair number, segments that do not add up, an operation
    /// that there is not.
    MalformedWqe,
    /// The record of a send queue was ahead of the doorbells for longer than the patience.
    MissedDoorbell,
    /// A doorbell for a queue pair that does not ring on this page, or that there has never been.
    StrayDoorbell,
    /// More entries posted than the queue holds: some were overwritten before they were executed.
    QueueOverflow,
    /// A completion queue whose entries are not marked as the device's own when it is made: the first pass over them would
    /// take them for completions.
    UnmarkedCompletions,
    /// The consumer index is ahead of what was written: a completion was taken that was none, or taken twice, which is what
    /// a wrong owner bit does.
    WrongOwner,
    /// A completion for which the queue had no room. `ibv_poll_cq(3)`: the queue is in the error state.
    CompletionOverrun,
}

/// Something that was found.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Finding {
    /// Number of the queue pair or completion queue.
    pub number: u32,
    /// What it is.
    pub problem: Problem,
    /// What was there and what should be.
    pub detail: String,
}

impl fmt::Debug for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} of {:#x}: {}", self.problem, self.number, self.detail)
    }
}

#[derive(Debug, Default)]
pub(crate) struct Lint {
    pub(crate) findings: Vec<Finding>,
}

impl Lint {
    /// Kept at most: a queue that is broken is so with every entry.
    const MOST: usize = 1000;

    pub(crate) fn note(&mut self, number: u32, problem: Problem, detail: String) {
        let finding = Finding { number, problem, detail };
        if self.findings.len() < Self::MOST && !self.findings.contains(&finding) {
            self.findings.push(finding);
        }
    }
}

use std::collections::VecDeque;

use super::message_memory::Job;

#[derive(Debug, Default)]
pub(super) enum Jobs {
    #[default]
    None,
    /// Jobs for a helper that is not started yet.
    Queued(VecDeque<Job>),
    Running(VecDeque<Job>),
}

impl Jobs {
    pub(super) fn add(&mut self, job: Job) {
        match self {
            Self::None => *self = Self::Queued(VecDeque::from([job])),
            Self::Queued(jobs) | Self::Running(jobs) => jobs.push_back(job),
        }
    }

    pub(super) fn need_helper(&self) -> bool {
        matches!(self, Self::Queued(_))
    }

    /// If this returns true, the caller must start the helper.
    #[must_use]
    pub(super) fn start(&mut self) -> bool {
        let starts = self.need_helper();
        if let Self::Queued(jobs) = self {
            *self = Self::Running(std::mem::take(jobs));
        }
        starts
    }

    /// Without a next job, the helper ends.
    pub(super) fn pop(&mut self) -> Option<Job> {
        let (Self::Queued(jobs) | Self::Running(jobs)) = self else { return None };
        let next = jobs.pop_front();
        if next.is_none() {
            *self = Self::None;
        }
        next
    }

    /// Ends the helper.
    pub(super) fn take(&mut self) -> VecDeque<Job> {
        match self {
            Self::None => VecDeque::new(),
            Self::Queued(jobs) | Self::Running(jobs) => std::mem::take(jobs),
        }
    }
}

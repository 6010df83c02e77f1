//! Blocking jobs of a connection.

use std::collections::VecDeque;

use super::message_memory::Job;

#[derive(Debug, Default)]
pub(super) enum Jobs {
    /// No jobs and no thread.
    #[default]
    None,
    /// Pending jobs of a thread.
    Running(VecDeque<Job>),
}

impl Jobs {
    /// Adds a job. Returns true if a thread must be started.
    #[must_use]
    pub(super) fn add(&mut self, job: Job) -> bool {
        match self {
            Self::None => {
                *self = Self::Running(VecDeque::from([job]));
                true
            }
            Self::Running(jobs) => {
                jobs.push_back(job);
                false
            }
        }
    }

    /// Removes the next job. If none is left, the thread exits.
    pub(super) fn pop(&mut self) -> Option<Job> {
        let Self::Running(jobs) = self else { return None };
        let next = jobs.pop_front();
        if next.is_none() {
            *self = Self::None;
        }
        next
    }

    /// Removes all jobs; the thread exits.
    pub(super) fn take(&mut self) -> VecDeque<Job> {
        match self {
            Self::None => VecDeque::new(),
            Self::Running(jobs) => std::mem::take(jobs),
        }
    }
}

//! Blocking jobs of a connection, and their thread.

use std::collections::VecDeque;
use std::sync::Weak;

use rdma_message_proto::lifecycle::Event;

use super::error::CloseReason;
use super::message_memory::Job;
use super::shared::Shared;

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

/// The thread. A connection has at most one, whatever its peer offers.
pub(super) struct Helper {
    shared: Weak<Shared>,
    running: bool,
}

impl Helper {
    pub(super) fn new(shared: Weak<Shared>) -> Self {
        Self { shared, running: true }
    }

    pub(super) fn run(mut self) {
        while let Some(shared) = self.shared.upgrade()
            && let Some(job) = shared.with(|core, _| core.memory.jobs.pop())
        {
            let done = job.run();
            shared.with(|core, driver| core.on_job_done(done, driver));
        }
        self.running = false;
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        if let (true, Some(shared)) = (self.running, self.shared.upgrade()) {
            // It panicked. Otherwise receivers of the message would never be woken.
            shared.with(|core, _| core.on(Event::Terminate(CloseReason::Memory)));
            shared.driver_waker.wake_driver();
        }
    }
}

//! Times and resource usage.

use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeVal;
use serde::{Deserialize, Serialize};

use crate::Result;

/// The end of a round.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Until(Instant);

impl Until {
    pub(crate) fn after(time: Duration) -> Self {
        Self(Instant::now() + time)
    }

    pub(crate) fn is_over(self, now: Instant) -> bool {
        now >= self.0
    }
}

/// The operations of one lane in one round.
#[derive(Debug)]
pub(crate) struct Tally {
    pub(crate) operations: u64,
    /// Nanoseconds from posting to completion, or to the answer.
    pub(crate) times: Histogram<u64>,
}

impl Tally {
    pub(crate) fn new() -> Result<Self> {
        // Three significant digits.
        Ok(Self { operations: 0, times: Histogram::new(3)? })
    }

    /// Counts operations that took `time`, as one or as a batch.
    pub(crate) fn add(&mut self, operations: usize, time: Duration) -> Result<()> {
        self.operations += operations as u64;
        Ok(self.times.record_n(u64::try_from(time.as_nanos())?, operations as u64)?)
    }
}

/// The resources that a process has used.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Usage {
    /// Seconds of processor time in user mode and in the kernel.
    pub(crate) user: f64,
    pub(crate) system: f64,
    /// Voluntary context switches.
    pub(crate) sleeps: u64,
    /// Involuntary context switches.
    pub(crate) preemptions: u64,
}

impl Usage {
    pub(crate) fn now() -> Result<Self> {
        let usage = getrusage(UsageWho::RUSAGE_SELF)?;
        let seconds = |time: TimeVal| time.tv_sec() as f64 + time.tv_usec() as f64 / 1e6;
        let count = |count: i64| u64::try_from(count).unwrap_or(0);
        Ok(Self {
            user: seconds(usage.user_time()),
            system: seconds(usage.system_time()),
            sleeps: count(usage.voluntary_context_switches()),
            preemptions: count(usage.involuntary_context_switches()),
        })
    }

    pub(crate) fn since(self, before: Self) -> Self {
        Self {
            user: self.user - before.user,
            system: self.system - before.system,
            sleeps: self.sleeps.saturating_sub(before.sleeps),
            preemptions: self.preemptions.saturating_sub(before.preemptions),
        }
    }

    pub(crate) fn and(self, other: Self) -> Self {
        Self {
            user: self.user + other.user,
            system: self.system + other.system,
            sleeps: self.sleeps + other.sleeps,
            preemptions: self.preemptions + other.preemptions,
        }
    }
}

#[derive(Debug)]
pub(crate) struct Round {
    pub(crate) operations: u64,
    pub(crate) time: Duration,
    pub(crate) times: Histogram<u64>,
    /// The usage of both ends.
    pub(crate) usage: Usage,
}

impl Round {
    pub(crate) fn rate(&self) -> f64 {
        self.operations as f64 / self.time.as_secs_f64()
    }
}

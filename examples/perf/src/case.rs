//! The parameters of a measurement, shared by both ends.

use std::fmt;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Case {
    pub(crate) work: Work,
    pub(crate) verb: Verb,
    pub(crate) over: Over,
    /// Bytes per operation.
    pub(crate) size: usize,
    /// Operations in flight per lane.
    pub(crate) depth: usize,
    /// Queue pairs, or connections.
    pub(crate) lanes: usize,
    /// Completion queues that the lanes share.
    pub(crate) queues: usize,
    /// Operations per doorbell.
    pub(crate) batch: usize,
    pub(crate) inline: bool,
    pub(crate) mode: Mode,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Work {
    /// Time per operation, one after the other
    Latency,
    /// Bytes and operations per second, with many in flight
    Bandwidth,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Verb {
    /// SEND; the peer answers with a SEND
    Send,
    /// WRITE into the peer's memory
    Write,
    /// WRITE with immediate; the peer's task answers with the same
    WriteImm,
    /// READ from the peer's memory
    Read,
    /// Compare-and-swap of a word
    CompareSwap,
    /// Fetch-and-add of a word
    FetchAdd,
    /// Messages of a `Connection`
    Messages,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Over {
    /// RDMA operations of a device
    Rdma,
    /// A TCP stream
    Tcp,
}

/// A `CompletionMode`. Busy-poll uses one thread per completion queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Mode {
    /// Sleep until the device raises an event
    Event,
    /// A dedicated thread polls
    BusyPoll,
    /// The waiting task polls
    Cooperative,
    /// Poll for a while, then sleep
    Hybrid,
}

impl Case {
    pub(crate) const EXAMPLE: Self = Self {
        work: Work::Latency,
        verb: Verb::Write,
        over: Over::Rdma,
        size: 8,
        depth: 1,
        lanes: 1,
        queues: 1,
        batch: 1,
        inline: false,
        mode: Mode::Event,
    };

    /// Returns the number of messages that the server acknowledges at a time.
    pub(crate) fn ack_interval(&self) -> usize {
        (self.depth / 2).max(1)
    }

    /// Returns the number of operations with distinct contents, which are used cyclically.
    pub(crate) fn slots(&self) -> usize {
        match (self.over, self.verb) {
            (Over::Rdma, Verb::Messages) => 1,
            (Over::Rdma, _) => self.depth,
            (Over::Tcp, _) => self.requests_per_answer(),
        }
    }

    pub(crate) fn slot_of(&self, operations: u64) -> usize {
        (operations.saturating_sub(1) % self.slots() as u64) as usize
    }

    /// Returns the number of requests over TCP that share one answer.
    pub(crate) fn requests_per_answer(&self) -> usize {
        match (self.work, self.verb) {
            (Work::Bandwidth, Verb::Send | Verb::Write | Verb::WriteImm | Verb::Messages) => {
                self.ack_interval()
            }
            _ => 1,
        }
    }

    /// Returns the content of the operation at `slot`.
    pub(crate) fn pattern(&self, slot: usize) -> impl Iterator<Item = u8> + use<> {
        let first = slot.wrapping_mul(89).wrapping_add(17);
        (0..self.size).map(move |at| (first.wrapping_add(at).wrapping_add(at >> 8)) as u8)
    }
}

impl Verb {
    /// Returns whether the peer's task answers.
    pub(crate) fn two_sided(self) -> bool {
        matches!(self, Self::Send | Self::WriteImm | Self::Messages)
    }

    pub(crate) fn batches(self) -> bool {
        matches!(self, Self::Send | Self::Write | Self::WriteImm | Self::Read)
    }

    pub(crate) fn inlines(self) -> bool {
        matches!(self, Self::Send | Self::Write)
    }
}

impl fmt::Display for Verb {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Send => "send",
            Self::Write => "write",
            Self::WriteImm => "write-imm",
            Self::Read => "read",
            Self::CompareSwap => "compare-swap",
            Self::FetchAdd => "fetch-add",
            Self::Messages => "messages",
        })
    }
}

impl fmt::Display for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Latency => "latency",
            Self::Bandwidth => "bandwidth",
        })
    }
}

impl fmt::Display for Over {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Rdma => "RDMA",
            Self::Tcp => "TCP",
        })
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Event => "event",
            Self::BusyPoll => "busy-poll",
            Self::Cooperative => "cooperative",
            Self::Hybrid => "hybrid",
        })
    }
}

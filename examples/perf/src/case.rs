//! A measurement, as both ends know it.

use std::fmt;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// What both ends do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Case {
    pub(crate) work: Work,
    pub(crate) verb: Verb,
    pub(crate) over: Over,
    /// Bytes of an operation.
    pub(crate) size: usize,
    /// Operations in flight on each lane.
    pub(crate) depth: usize,
    /// Queue pairs, or connections.
    pub(crate) lanes: usize,
    /// Completion queues, over which lanes are spread.
    pub(crate) queues: usize,
    /// Operations posted together.
    pub(crate) batch: usize,
    pub(crate) inline: bool,
    pub(crate) mode: Mode,
}

/// What is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Work {
    /// Time of one operation after the other
    Latency,
    /// Bytes and operations per second, with many in flight
    Bandwidth,
}

/// By which operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Verb {
    /// A message into a receive of the peer, which answers with another
    Send,
    /// Into the peer's memory
    Write,
    /// Into the peer's memory, and the peer is told, and answers the same way
    WriteImm,
    /// From the peer's memory
    Read,
    /// Compare-and-swap of a word
    CompareSwap,
    /// Fetch-and-add of a word
    FetchAdd,
    /// Messages of a `Connection`
    Messages,
}

/// Over what.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Over {
    /// Operations of a device
    Rdma,
    /// A stream
    Tcp,
}

/// `CompletionMode`, with a thread of its own for each completion queue that has one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Mode {
    /// Sleep until the device raises an event
    Event,
    /// A thread that polls
    BusyPoll,
    /// The task that waits polls
    Cooperative,
    /// Poll for a while, then sleep
    Hybrid,
}

impl Case {
    /// The smallest there is.
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

    /// Peer messages are answered one by one, or acknowledged each so many.
    pub(crate) fn credit(&self) -> usize {
        (self.depth / 2).max(1)
    }

    /// Operations in flight whose contents differ; the next one begins again with the first.
    pub(crate) fn slots(&self) -> usize {
        match (self.over, self.verb) {
            (Over::Rdma, Verb::Messages) => 1,
            (Over::Rdma, _) => self.depth,
            (Over::Tcp, _) => self.unit(),
        }
    }

    /// The slot of the last of so many operations.
    pub(crate) fn slot_of(&self, operations: u64) -> usize {
        (operations.saturating_sub(1) % self.slots() as u64) as usize
    }

    /// Over TCP: operations that one answer is for.
    pub(crate) fn unit(&self) -> usize {
        match (self.work, self.verb) {
            (Work::Bandwidth, Verb::Send | Verb::Write | Verb::WriteImm | Verb::Messages) => {
                self.credit()
            }
            _ => 1,
        }
    }

    /// Content of the operation at `slot`; another one in each of two that could be mistaken for each other.
    pub(crate) fn pattern(&self, slot: usize) -> impl Iterator<Item = u8> + use<> {
        let first = slot.wrapping_mul(89).wrapping_add(17);
        (0..self.size).map(move |at| (first.wrapping_add(at).wrapping_add(at >> 8)) as u8)
    }
}

impl Verb {
    /// The peer takes part, and answers.
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

/// As on the command line.
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

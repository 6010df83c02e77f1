//! A lane: one stream of work over a queue pair, a `Connection` or a TCP stream.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use tokio_rdma::BufMut;

use crate::Result;
use crate::case::{Case, Verb};
use crate::measure::{Tally, Until};
use crate::{messages, queue_pair, tcp};

/// The client's end of a lane.
#[derive(Debug)]
pub(crate) enum Lane {
    QueuePair(queue_pair::Lane),
    Messages(messages::Lane),
    Tcp(tcp::Lane),
}

impl Lane {
    pub(crate) async fn run(&mut self, until: Until) -> Result<Tally> {
        match self {
            Self::QueuePair(lane) => lane.run(until).await,
            Self::Messages(lane) => lane.run(until).await,
            Self::Tcp(lane) => lane.run(until).await,
        }
    }

    /// Checks the data that arrived at the client.
    pub(crate) async fn check(&mut self) -> Result<()> {
        match self {
            Self::QueuePair(lane) => lane.check().await,
            Self::Messages(lane) => lane.check(),
            Self::Tcp(lane) => lane.check(),
        }
    }

    pub(crate) fn operations(&self) -> u64 {
        match self {
            Self::QueuePair(lane) => lane.operations,
            Self::Messages(lane) => lane.operations,
            Self::Tcp(lane) => lane.operations,
        }
    }

    pub(crate) async fn close(self) -> Result<()> {
        match self {
            Self::Messages(lane) => lane.close().await,
            Self::QueuePair(_) | Self::Tcp(_) => Ok(()),
        }
    }
}

/// The messages that the server has received on a lane.
#[derive(Debug, Clone, Default)]
pub(crate) struct Arrivals(Arc<Mutex<ArrivalState>>);

#[derive(Debug, Default)]
struct ArrivalState {
    messages: u64,
    last: Option<Held>,
}

#[derive(Debug)]
pub(crate) enum Held {
    Buffer(BufMut),
    Bytes(Bytes),
    Vec(Vec<u8>),
}

/// The limit for acknowledged messages to reach the server's task.
const ARRIVAL: Duration = Duration::from_secs(10);

impl Arrivals {
    /// Stores a message as the last one and returns the previous one.
    pub(crate) fn record(&self, message: Held) -> Option<Held> {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        state.messages += 1;
        state.last.replace(message)
    }

    /// Counts a message without content.
    pub(crate) fn count(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).messages += 1;
    }

    /// Compares the messages with those that the client sent.
    pub(crate) async fn check(&self, case: &Case, sent: u64) -> Result<()> {
        let arrived = async {
            while self.0.lock().unwrap_or_else(PoisonError::into_inner).messages < sent {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        let late = tokio::time::timeout(ARRIVAL, arrived).await.is_err();
        let state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if late || state.messages != sent {
            return Err(format!("{} of {sent} messages have arrived", state.messages).into());
        }
        match &state.last {
            Some(last) => compare("the last message", last.as_ref(), case, case.slot_of(sent)),
            None => Ok(()),
        }
    }
}

impl AsRef<[u8]> for Held {
    fn as_ref(&self) -> &[u8] {
        match self {
            Self::Buffer(buffer) => buffer,
            Self::Bytes(bytes) => bytes,
            Self::Vec(bytes) => bytes,
        }
    }
}

/// Fails unless `bytes` is the content of the operation at `slot`.
pub(crate) fn compare(what: &str, bytes: &[u8], case: &Case, slot: usize) -> Result<()> {
    if matches!(case.verb, Verb::CompareSwap | Verb::FetchAdd) {
        return Ok(());
    }
    if bytes.len() != case.size {
        return Err(format!("{what}: expected {} bytes, got {}", case.size, bytes.len()).into());
    }
    match bytes.iter().copied().zip(case.pattern(slot)).position(|(is, expected)| is != expected) {
        None => Ok(()),
        Some(at) => Err(format!("{what} (slot {slot}): wrong byte at offset {at}").into()),
    }
}

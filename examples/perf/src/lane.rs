//! One stream of work: a queue pair, a connection with messages, or one of TCP.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use tokio_rdma::BufMut;

use crate::Result;
use crate::case::{Case, Verb};
use crate::measure::{Tally, Until};
use crate::{messages, queue_pair, tcp};

/// The client's end.
#[derive(Debug)]
pub(crate) enum Lane {
    QueuePair(queue_pair::Lane),
    Messages(messages::Lane),
    Tcp(tcp::Lane),
}

impl Lane {
    /// Works until then.
    pub(crate) async fn run(&mut self, until: Until) -> Result<Tally> {
        match self {
            Self::QueuePair(lane) => lane.run(until).await,
            Self::Messages(lane) => lane.run(until).await,
            Self::Tcp(lane) => lane.run(until).await,
        }
    }

    /// Compares what came here with what should have come.
    pub(crate) async fn check(&mut self) -> Result<()> {
        match self {
            Self::QueuePair(lane) => lane.check().await,
            Self::Messages(lane) => lane.check(),
            Self::Tcp(lane) => lane.check(),
        }
    }

    /// Operations done since it was opened.
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

/// What the server has seen of a lane.
#[derive(Debug, Clone, Default)]
pub(crate) struct Seen(Arc<Mutex<Sight>>);

#[derive(Debug, Default)]
struct Sight {
    messages: u64,
    last: Option<Held>,
}

/// A message, wherever it is.
#[derive(Debug)]
pub(crate) enum Held {
    Buffer(BufMut),
    Bytes(Bytes),
    Vec(Vec<u8>),
}

/// Messages that have been acknowledged may still wait for the server's task.
const ARRIVAL: Duration = Duration::from_secs(10);

impl Seen {
    /// One more message; gives the one before.
    pub(crate) fn message(&self, message: Held) -> Option<Held> {
        let mut sight = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        sight.messages += 1;
        sight.last.replace(message)
    }

    /// One more message, without bytes.
    pub(crate) fn told(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).messages += 1;
    }

    /// Compares with what the client says that it has sent.
    pub(crate) async fn check(&self, case: &Case, sent: u64) -> Result<()> {
        let arrived = async {
            while self.0.lock().unwrap_or_else(PoisonError::into_inner).messages < sent {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        let late = tokio::time::timeout(ARRIVAL, arrived).await.is_err();
        let sight = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if late || sight.messages != sent {
            return Err(format!(
                "{} messages have arrived of {sent} that were sent",
                sight.messages
            )
            .into());
        }
        match &sight.last {
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

/// Fails if these are not the bytes of the operation at `slot`.
pub(crate) fn compare(what: &str, bytes: &[u8], case: &Case, slot: usize) -> Result<()> {
    if matches!(case.verb, Verb::CompareSwap | Verb::FetchAdd) {
        return Ok(());
    }
    if bytes.len() != case.size {
        return Err(format!("{what} has {} bytes instead of {}", bytes.len(), case.size).into());
    }
    match bytes.iter().copied().zip(case.pattern(slot)).position(|(is, expected)| is != expected) {
        None => Ok(()),
        Some(at) => Err(format!("{what} (slot {slot}): byte {at} is wrong").into()),
    }
}

//! Messages in order, including offers to be fetched.

use std::collections::VecDeque;
use std::ops::Deref;

use bytes::Bytes;

use super::message_memory::Fetch;
use crate::memory::{Buf, BufMut, RemoteRegion};
use crate::types::Imm;

/// The report of a WRITE with immediate data, which has written memory exposed to the peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Notification {
    /// The number passed to [`write_with_imm`](super::Connection::write_with_imm).
    pub imm: Imm,
    /// The length of the WRITE in bytes.
    pub len: usize,
}

#[derive(Debug, Default)]
pub(super) struct Inbox {
    pub(super) messages: VecDeque<Incoming>,
    /// Parts of messages of several frames. They keep their receives, which limits them.
    parts: VecDeque<BufMut>,
    /// Number of the first message.
    pub(super) base: u64,
    pub(super) unfetched: VecDeque<u64>,
    pub(super) fetching: VecDeque<u64>,
    /// Length of the messages that are being fetched, or were fetched and are not received yet.
    pub(super) fetch_bytes: u64,
    /// The connection has ended, and messages that had not arrived whole are gone.
    pub(super) lost: bool,
    /// Each keeps a credit of the peer until the application takes it.
    pub(super) notifications: VecDeque<Notification>,
    /// Number of the first message that is not delivered because the listener shuts down.
    drained_at: Option<u64>,
}

#[derive(Debug)]
pub(crate) enum FetchedMessage {
    Registered(Buf),
    Heap(Bytes),
}

impl Deref for FetchedMessage {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Registered(buffer) => buffer,
            Self::Heap(bytes) => bytes,
        }
    }
}

impl Default for FetchedMessage {
    fn default() -> Self {
        Self::Heap(Bytes::new())
    }
}

impl From<FetchedMessage> for Bytes {
    fn from(message: FetchedMessage) -> Self {
        match message {
            FetchedMessage::Registered(buffer) => buffer.into(),
            FetchedMessage::Heap(bytes) => bytes,
        }
    }
}

#[derive(Debug)]
pub(super) enum Next {
    Message(Buf),
    /// A message that the receiver copies to its memory, without the lock.
    Copy(Bytes),
    /// The message stays in the inbox until the receiver has memory of this length for a copy.
    Memory(usize),
}

#[derive(Debug)]
pub(super) enum Incoming {
    Arrived(Arrived),
    Offered(RemoteRegion),
    Preparing(RemoteRegion),
    Fetching(Fetch),
    Releasing,
    Lost,
}

#[derive(Debug)]
pub(super) enum Arrived {
    Buffered(BufMut),
    /// The last frame of a message of `len` bytes; the inbox has the other `parts`.
    Fragmented {
        parts: usize,
        last: BufMut,
        len: usize,
    },
    Fetched(FetchedMessage),
}

impl Incoming {
    pub(super) fn is_ready(&self) -> bool {
        matches!(self, Self::Arrived(_))
    }
}

impl Inbox {
    pub(super) fn push(&mut self, message: Incoming) {
        if matches!(message, Incoming::Offered(_)) {
            self.unfetched.push_back(self.base + self.messages.len() as u64);
        }
        self.messages.push_back(message);
    }

    pub(super) fn push_part(&mut self, part: BufMut) {
        self.parts.push_back(part);
    }

    pub(super) fn push_last(&mut self, parts: usize, last: BufMut, len: usize) {
        self.push(Incoming::Arrived(match parts {
            0 => Arrived::Buffered(last),
            _ => Arrived::Fragmented { parts, last, len },
        }));
    }

    pub(super) fn take_part(&mut self) -> BufMut {
        match self.parts.pop_front() {
            Some(part) => part,
            None => unreachable!("the parts of a message are in the inbox"),
        }
    }

    pub(super) fn has_seen_message(&self) -> bool {
        self.base > 0 || !self.messages.is_empty()
    }

    pub(super) fn is_draining(&self) -> bool {
        self.drained_at.is_some()
    }

    pub(super) fn get(&mut self, number: u64) -> Option<&mut Incoming> {
        self.messages.get_mut((number - self.base) as usize)
    }

    pub(super) fn is_ready(&self) -> bool {
        self.messages.front().is_some_and(Incoming::is_ready)
    }

    pub(super) fn drain(&mut self) {
        self.drained_at.get_or_insert(self.base + self.messages.len() as u64);
    }

    pub(super) fn is_drained(&self) -> bool {
        self.drained_at.is_some_and(|end| self.base >= end)
    }

    pub(super) fn pop(&mut self) -> Option<Arrived> {
        if !self.is_ready() {
            return None;
        }
        let Some(Incoming::Arrived(message)) = self.messages.pop_front() else {
            unreachable!("the first message is ready")
        };
        self.base += 1;
        Some(message)
    }
}

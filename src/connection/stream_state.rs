//! The state that a stream adds to its connection.

use std::time::Duration;

use crate::memory::BufMut;
use crate::waiters::Ticket;

/// The most bytes copied under the lock, which the driver and the other half also need.
pub(super) const COPIED: usize = 128 << 10;

/// What a stream adds to the state of its connection.
#[derive(Debug, Default)]
pub(crate) struct StreamState {
    /// Positions of the tasks that poll for its readiness.
    pub(super) polled: Polled,
    /// How long it continues to send after it was dropped, if the service has set it; zero resets
    /// it.
    pub(crate) linger: Option<Duration>,
    /// Short writes are not held.
    pub(crate) nodelay: bool,
}

/// Positions in the queues of a stream of the tasks that poll for its readiness, one per direction.
/// Under the connection's lock, because these methods take `&self`.
#[derive(Debug, Default)]
pub(super) struct Polled {
    pub(super) reader: Option<Ticket>,
    pub(super) writer: Option<Ticket>,
}

/// Bytes that wait for a credit, or for the frames before them.
#[derive(Debug)]
pub(super) struct Held {
    buffer: BufMut,
    /// The bytes of the buffer that are sent, and that are written.
    sent: usize,
    written: usize,
}

impl Held {
    /// Holds the first `written` bytes of `buffer`.
    pub(super) fn new(buffer: BufMut, written: usize) -> Self {
        Self { buffer, sent: 0, written }
    }

    pub(super) fn len(&self) -> usize {
        self.written - self.sent
    }

    pub(super) fn is_full(&self) -> bool {
        self.written == self.buffer.len()
    }

    /// Appends bytes: `fill` writes them to the rest of the buffer, and returns how many.
    pub(super) fn append(&mut self, fill: impl FnOnce(&mut [u8]) -> usize) {
        self.written += fill(&mut self.buffer[self.written..]);
    }

    /// Returns the bytes that are not sent.
    pub(super) fn unsent(&self) -> &[u8] {
        &self.buffer[self.sent..self.written]
    }

    /// Notes that `len` more bytes are sent.
    pub(super) fn advance(&mut self, len: usize) {
        self.sent += len;
    }

    pub(super) fn into_buffer(mut self) -> BufMut {
        self.buffer.copy_within(self.sent..self.written, 0);
        self.buffer.truncate(self.len());
        self.buffer
    }
}

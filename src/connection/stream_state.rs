use std::time::Duration;

use crate::memory::BufMut;
use crate::waiters::Ticket;

/// The maximum of bytes copied under the lock, which the driver and the other half also need.
pub(super) const COPIED: usize = 128 << 10;

#[derive(Debug, Default)]
pub(crate) struct StreamState {
    pub(super) polled: Polled,
    /// Set by the application; zero resets a dropped stream.
    pub(crate) linger: Option<Duration>,
    pub(crate) nodelay: bool,
}

/// The task that polls each direction for readiness. Under the connection's lock, because these
/// methods take `&self`.
#[derive(Debug, Default)]
pub(super) struct Polled {
    pub(super) reader: Option<Ticket>,
    pub(super) writer: Option<Ticket>,
}

/// Bytes that wait for a credit, or for earlier frames.
#[derive(Debug)]
pub(super) struct Held {
    buffer: BufMut,
    /// The bytes of the buffer that are sent, and that are written.
    sent: usize,
    written: usize,
}

impl Held {
    pub(super) fn new(buffer: BufMut, written: usize) -> Self {
        Self { buffer, sent: 0, written }
    }

    pub(super) fn len(&self) -> usize {
        self.written - self.sent
    }

    pub(super) fn is_full(&self) -> bool {
        self.written == self.buffer.len()
    }

    /// `fill` writes to the rest of the buffer and returns the number of bytes.
    pub(super) fn append(&mut self, fill: impl FnOnce(&mut [u8]) -> usize) {
        self.written += fill(&mut self.buffer[self.written..]);
    }

    pub(super) fn unsent(&self) -> &[u8] {
        &self.buffer[self.sent..self.written]
    }

    pub(super) fn advance(&mut self, len: usize) {
        self.sent += len;
    }

    pub(super) fn into_buffer(mut self) -> BufMut {
        self.buffer.copy_within(self.sent..self.written, 0);
        self.buffer.truncate(self.len());
        self.buffer
    }
}

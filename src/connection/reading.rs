use std::ops::Deref;
use std::task::{Poll, Waker};

use tokio::io::ReadBuf;

use super::error::MessageError;
use super::inbox::{Arrived, FetchedMessage, Incoming};
use super::state::ConnectionState;
use super::stream_state::COPIED;
use crate::memory::BufMut;
use crate::waiters::{Caller, Ticket};

/// Received bytes that are read in place.
#[derive(Debug)]
pub(crate) enum Chunk {
    /// A receive buffer. It and its credit return with [`ConnectionState::release_chunk`].
    Frame(BufMut),
    Fetched(FetchedMessage),
}

impl Deref for Chunk {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Frame(buffer) => buffer,
            Self::Fetched(message) => message,
        }
    }
}

#[derive(Debug)]
pub(crate) enum Taken {
    /// The bytes of whole frames, whose buffers were reposted.
    Copied,
    Chunk(Chunk),
}

impl ConnectionState {
    /// Copies whole received frames to `into`, as many as fit, up to about [`COPIED`] bytes.
    /// Otherwise returns the next chunk, or `None` at the end.
    pub(crate) fn poll_read(
        &mut self,
        into: &mut Option<&mut ReadBuf<'_>>,
        ticket: &mut Option<Ticket>,
        waker: &Waker,
        caller: &mut Caller<'_>,
    ) -> Poll<Result<Option<Taken>, MessageError>> {
        self.poll_message(|state| state.take_bytes(into), ticket, waker, caller)
    }

    /// Returns the next chunk, or `None` at the end.
    pub(crate) fn try_read(&mut self, waker: &Waker) -> Poll<Result<Option<Chunk>, MessageError>> {
        if !self.inbox.is_ready() {
            self.progress_for_receiver(waker);
        }
        let may_take = self.protocol.phase().takes_messages() && !self.inbox.is_drained();
        if may_take && let Some(Taken::Chunk(chunk)) = self.take_bytes(&mut None) {
            self.send_due();
            if !self.inbox.unfetched.is_empty() {
                self.progress(waker);
            }
            return Poll::Ready(Ok(Some(chunk)));
        }
        self.end_of_messages().map_or(Poll::Pending, |end| Poll::Ready(end.map(|()| None)))
    }

    pub(crate) fn poll_readable(
        &mut self,
        ticket: &mut Option<Ticket>,
        waker: &Waker,
        caller: &mut Caller<'_>,
    ) -> Poll<()> {
        let is_ready = |state: &mut Self| state.inbox.is_ready().then_some(());
        self.poll_message(is_ready, ticket, waker, caller).map(drop)
    }

    /// Waits like [`poll_readable`](Self::poll_readable), but only for the last task that calls
    /// this.
    pub(crate) fn poll_read_ready(&mut self, waker: &Waker, caller: &mut Caller<'_>) -> Poll<()> {
        let mut ticket = self.stream.polled.reader.take();
        let ready = self.poll_readable(&mut ticket, waker, caller);
        self.stream.polled.reader = ticket;
        ready
    }

    fn take_bytes(&mut self, into: &mut Option<&mut ReadBuf<'_>>) -> Option<Taken> {
        let open = self.close_reason().is_none();
        let mut copied = 0;
        while copied < COPIED
            && let Some(Incoming::Arrived(first)) = self.inbox.messages.front()
        {
            let fits = |buffer: &BufMut| {
                into.as_ref().is_some_and(|into| buffer.len() <= into.remaining())
            };
            match first {
                Arrived::Buffered(buffer) if fits(buffer) => {}
                _ if copied > 0 => break,
                _ => return self.take_chunk(),
            }
            if let (Some(into), Some(Chunk::Frame(buffer))) = (into.as_mut(), self.pop_chunk()) {
                into.put_slice(&buffer);
                copied += buffer.len();
                if open {
                    self.post_receive(buffer);
                    self.protocol.flow.release_message();
                }
            }
        }
        (copied > 0).then_some(Taken::Copied)
    }

    fn take_chunk(&mut self) -> Option<Taken> {
        let chunk = self.pop_chunk()?;
        if let Chunk::Fetched(message) = &chunk {
            self.inbox.fetch_bytes -= message.len() as u64;
            if self.close_reason().is_none() {
                self.protocol.flow.release_message();
            }
        }
        Some(Taken::Chunk(chunk))
    }

    fn pop_chunk(&mut self) -> Option<Chunk> {
        let arrived = self.inbox.pop()?;
        self.counters.received += 1;
        Some(match arrived {
            Arrived::Buffered(buffer) => Chunk::Frame(buffer),
            Arrived::Fetched(message) => Chunk::Fetched(message),
            Arrived::Fragmented { .. } => unreachable!("frames of a stream are whole"),
        })
    }

    /// Reposts the receive of a chunk that was read.
    pub(crate) fn release_chunk(&mut self, chunk: Chunk) {
        if let Chunk::Frame(buffer) = chunk
            && self.close_reason().is_none()
        {
            self.post_receive(buffer);
            self.protocol.flow.release_message();
            self.send_due();
        }
    }
}

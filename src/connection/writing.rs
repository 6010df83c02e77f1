//! Writes bytes to frames of up to the peer's buffer size. Bytes for which there is no credit, or
//! that do not fill a frame while earlier ones are in flight, are held in send buffers, and later
//! writes are appended. Held bytes are sent when there is a credit and
//!
//! - they fill a frame,
//! - all earlier frames are acknowledged, or
//! - the application flushes, shuts down or drops its half.
//!
//! So the first short write is never delayed, and a stream of short writes costs one frame per
//! round trip. If the peer does not read, short writes fill the send buffers. Long ones do not if
//! its receives hold as much already: that would only use more of the processor's caches.

use std::io::IoSlice;
use std::task::{Poll, Waker};

use bytes::Bytes;
use rdma_message_proto::frame::Kind;
use rdma_message_proto::sending::Blocked;
use smallvec::SmallVec;

use super::error::MessageError;
use super::outbound::{INLINE, Outgoing, Pieces};
use super::state::ConnectionState;
use super::stream_state::{COPIED, Held};
use super::waiting::Attempt;
use crate::memory::{Buf, BufMut};
use crate::waiters::{Caller, Ticket};

/// The longest piece that the peer reads at once: its longest pooled buffer.
const PIECE: usize = 1 << 20;

/// With this number of frames in flight, completed ones are looked for, although buffers are free:
/// the same few buffers stay in the processor's caches.
const REUSED: usize = 4;

#[derive(Debug, Clone, Copy)]
struct Unwritten<'a> {
    pieces: Pieces<'a, IoSlice<'a>>,
    len: usize,
}

impl<'a> Unwritten<'a> {
    fn new(slices: &'a [IoSlice<'a>]) -> Self {
        let len = slices.iter().fold(0usize, |len, slice| len.saturating_add(slice.len()));
        Self { pieces: Pieces { first: &[], rest: slices }, len }
    }

    fn fill(&mut self, target: &mut [u8]) -> usize {
        let filled = self.pieces.fill(target);
        self.len -= filled;
        filled
    }
}

impl ConnectionState {
    /// Writes up to about [`COPIED`] bytes. Waits if buffers allow none.
    pub(crate) fn poll_write(
        &mut self,
        slices: &[IoSlice<'_>],
        ticket: &mut Option<Ticket>,
        waker: &Waker,
        caller: &mut Caller<'_>,
    ) -> Poll<Result<usize, MessageError>> {
        self.poll_written(|state| state.write(slices), ticket, waker, caller)
    }

    pub(crate) fn try_write(&mut self, slices: &[IoSlice<'_>], waker: &Waker) -> Attempt<usize> {
        self.protocol.phase().check_open()?;
        let mut written = self.write(slices);
        if matches!(written, Ok(Err(_))) {
            self.progress(waker);
            written = self.write(slices);
        }
        if matches!(written, Ok(Ok(_))) && !self.outbox.held.is_empty() {
            self.progress(waker);
        }
        written
    }

    pub(crate) fn poll_writable(
        &mut self,
        ticket: &mut Option<Ticket>,
        waker: &Waker,
        caller: &mut Caller<'_>,
    ) -> Poll<()> {
        let check = |state: &mut Self| {
            state.protocol.phase().check_open()?;
            let appends = state.outbox.held.back().is_some_and(|held| !held.is_full());
            Ok(if appends { Ok(()) } else { state.check_held_buffer() })
        };
        self.poll_unblocked(check, ticket, waker, caller).map(drop)
    }

    /// Waits like [`poll_writable`](Self::poll_writable), but only for the last task that calls
    /// this.
    pub(crate) fn poll_write_ready(&mut self, waker: &Waker, caller: &mut Caller<'_>) -> Poll<()> {
        let mut ticket = self.stream.polled.writer.take();
        let ready = self.poll_writable(&mut ticket, waker, caller);
        self.stream.polled.writer = ticket;
        ready
    }

    /// Sends `buffer`, if it has the bytes, or copies, or lets the peer read long bytes.
    pub(crate) fn poll_write_bytes(
        &mut self,
        bytes: &Bytes,
        buffer: Option<&Buf>,
        ticket: &mut Option<Ticket>,
        waker: &Waker,
        caller: &mut Caller<'_>,
    ) -> Poll<Result<usize, MessageError>> {
        let len = bytes.len().min(PIECE).min(usize::try_from(self.limits.send).unwrap_or(PIECE));
        if len <= self.protocol.framing().eager() {
            return match buffer {
                Some(buffer) => self.poll_write_buffer(buffer, ticket, waker, caller),
                None => self.poll_write(&[IoSlice::new(bytes)], ticket, waker, caller),
            };
        }
        let piece = bytes.slice(..len);
        let offer = |state: &mut Self| state.send_whole(Outgoing::Bytes(&piece), len, waker);
        self.poll_written(offer, ticket, waker, caller)
    }

    /// Sends from the buffer's memory if that is registered here.
    pub(crate) fn poll_write_buffer(
        &mut self,
        buffer: &Buf,
        ticket: &mut Option<Ticket>,
        waker: &Waker,
        caller: &mut Caller<'_>,
    ) -> Poll<Result<usize, MessageError>> {
        if !self.is_registered(buffer) {
            return self.poll_write_bytes(&buffer.clone().into(), None, ticket, waker, caller);
        }
        // One frame while their size changes: a piece of several could be offered instead.
        let framing = self.protocol.framing();
        let longest =
            if framing.is_settled() { framing.eager() } else { self.protocol.frame_len(0) };
        let len = buffer.len().min(longest);
        let piece;
        let lent = if len == buffer.len() {
            buffer
        } else {
            let Ok(part) = buffer.slice(..len) else { unreachable!("shorter than the buffer") };
            piece = part;
            &piece
        };
        let lend = |state: &mut Self| state.send_whole(Outgoing::Buffer(lent), len, waker);
        self.poll_written(lend, ticket, waker, caller)
    }

    pub(crate) fn push(&mut self, waker: &Waker) {
        if !self.send_held_now() {
            self.progress(waker);
        }
    }

    fn poll_written<T>(
        &mut self,
        write: impl FnMut(&mut Self) -> Attempt<T>,
        ticket: &mut Option<Ticket>,
        waker: &Waker,
        caller: &mut Caller<'_>,
    ) -> Poll<Result<T, MessageError>> {
        let written = self.poll_unblocked(write, ticket, waker, caller);
        if written.is_ready() && !self.outbox.held.is_empty() {
            // Also registers the connection's waker with the last frame, and takes credits that
            // have arrived.
            self.progress(waker);
        }
        written
    }

    fn write(&mut self, slices: &[IoSlice<'_>]) -> Attempt<usize> {
        self.protocol.phase().check_open()?;
        let mut bytes = Unwritten::new(slices);
        let len = bytes.len;
        if len == 0 {
            return Ok(Ok(0));
        }
        if let Some(held) = self.outbox.held.back_mut() {
            held.append(|rest| bytes.fill(rest));
            if held.is_full() {
                self.send_held();
            }
        }
        let mut block = None;
        while bytes.len > 0 && len - bytes.len < COPIED && block.is_none() {
            block = self.write_frame(&mut bytes)?.err();
        }
        let written = len - bytes.len;
        match block {
            Some(block) if written == 0 => Ok(Err(block)),
            _ => {
                self.counters.sent += 1;
                Ok(Ok(written))
            }
        }
    }

    /// If bytes are held already, their buffers are full.
    fn write_frame(&mut self, bytes: &mut Unwritten<'_>) -> Attempt<()> {
        if !self.outbox.held.is_empty() || !self.protocol.flow.may_send(Kind::Data) {
            return Ok(self.held_buffer()?.map(|buffer| self.hold(buffer, bytes)));
        }
        let frame = self.protocol.frame_len(0);
        let hold = bytes.len < frame && !self.stream.nodelay && self.has_unacknowledged();
        if !hold && bytes.len <= self.protocol.sending.inline().min(frame) {
            let mut gathered = SmallVec::<[u8; INLINE]>::from_elem(0, bytes.len);
            bytes.fill(&mut gathered);
            self.protocol.sending.note_full(frame, gathered.len() == frame);
            let header = self.protocol.flow.send(Kind::Data);
            self.send_short(header, &gathered);
            return Ok(Ok(()));
        }
        let len = if hold { frame } else { bytes.len.min(frame) };
        if !self.memory.send.has_free(1) || self.outbox.sends.len() >= REUSED {
            self.reap();
        }
        let mut buffer = match self.take_send_buffer(len, 1)? {
            Ok(buffer) => buffer,
            Err(block) => return Ok(Err(block)),
        };
        if hold {
            self.hold(buffer, bytes);
        } else {
            bytes.fill(&mut buffer);
            self.protocol.sending.note_full(frame, len == frame);
            self.send_copied(Kind::Data, buffer);
        }
        Ok(Ok(()))
    }

    fn hold(&mut self, buffer: BufMut, bytes: &mut Unwritten<'_>) {
        let mut held = Held::new(buffer, 0);
        held.append(|rest| bytes.fill(rest));
        self.outbox.held.push_back(held);
    }

    /// The peer acknowledges frames by its device or by credits.
    fn has_unacknowledged(&mut self) -> bool {
        self.reap();
        if self.outbox.sends.is_empty() || self.protocol.flow.is_everything_released() {
            return false;
        }
        self.io.qp.drain_completions();
        self.reap();
        !self.outbox.sends.is_empty()
    }

    pub(super) fn send_held(&mut self) {
        while let Some(first) = self.outbox.held.front() {
            let (len, is_full) = (first.len(), first.is_full() || self.outbox.held.len() > 1);
            let is_due = self.stream.nodelay || self.protocol.sends_held(len, is_full);
            if !is_due || !self.send_first_held() {
                return;
            }
        }
    }

    fn send_held_now(&mut self) -> bool {
        while self.send_first_held() {}
        self.outbox.held.is_empty()
    }

    /// Returns false if no bytes are held, or no credit is free.
    fn send_first_held(&mut self) -> bool {
        if !self.protocol.flow.may_send(Kind::Data) {
            return false;
        }
        let Some(mut held) = self.outbox.held.pop_front() else { return false };
        let frame = self.protocol.frame_len(0);
        self.protocol.sending.note_full(frame, held.len() >= frame);
        if held.len() <= frame {
            self.send_copied(Kind::Data, held.into_buffer());
            return true;
        }
        // The peer's receives are shorter.
        let sent = match self.take_send_buffer(frame, 1) {
            Ok(Ok(mut part)) => {
                part.copy_from_slice(&held.unsent()[..frame]);
                self.send_copied(Kind::Data, part);
                frame
            }
            // As much as needs no buffer.
            Ok(Err(_)) | Err(_) => {
                let len = frame.min(self.protocol.sending.inline());
                let header = self.protocol.flow.send(Kind::Data);
                self.send_short(header, &held.unsent()[..len]);
                len
            }
        };
        held.advance(sent);
        self.outbox.held.push_front(held);
        true
    }

    /// Sends `message` after the held bytes.
    fn send_whole(&mut self, message: Outgoing<'_>, len: usize, waker: &Waker) -> Attempt<usize> {
        self.protocol.phase().check_open()?;
        if !self.send_held_now() {
            return Ok(Err(Blocked::Held));
        }
        self.protocol.sending.note_full(0, false);
        Ok(self.attempt_send(message, waker)?.map(|()| len))
    }

    pub(crate) fn set_nodelay(&mut self, nodelay: bool, waker: &Waker) {
        self.stream.nodelay = nodelay;
        self.progress(waker);
    }
}

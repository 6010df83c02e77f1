//! Writing: the frames that bytes become.
//!
//! A write becomes frames of up to the peer's buffer size, which are sent at once, as far as the
//! peer has credits. The exception are bytes that do not fill a frame while earlier frames are in
//! flight: they are held, and later writes are appended. Held bytes are sent when
//!
//! - they fill a frame,
//! - all earlier frames are acknowledged, or
//! - the service flushes, shuts down or drops its half.
//!
//! So the first short write is never delayed, and a stream of short writes costs one frame per
//! round trip.

use std::io::IoSlice;
use std::task::{Poll, Waker};

use bytes::Bytes;
use smallvec::SmallVec;

use super::COPIED;
use crate::memory::{Buf, BufMut};
use crate::message::core::Core;
use crate::message::error::MessageError;
use crate::message::frame::Kind;
use crate::message::outbound::{Attempt, Block, INLINE, Outgoing, Pieces};
use crate::waiters::{Caller, Ticket};

/// The longest piece of memory that the peer reads at once: its longest pooled buffer.
const PIECE: usize = 1 << 20;

/// Bytes that wait for the frames before them.
#[derive(Debug)]
pub(in crate::message) struct Held {
    /// A buffer with the length of a frame.
    buffer: BufMut,
    len: usize,
}

impl Held {
    #[cfg(all(test, not(loom)))]
    pub(super) fn new(buffer: BufMut, len: usize) -> Self {
        Self { buffer, len }
    }

    #[cfg(all(test, not(loom)))]
    pub(super) fn len(&self) -> usize {
        self.len
    }

    fn is_full(&self) -> bool {
        self.len == self.buffer.len()
    }

    fn append(&mut self, bytes: &mut Unwritten<'_>) {
        self.len += bytes.fill(&mut self.buffer[self.len..]);
    }

    fn into_buffer(mut self) -> BufMut {
        self.buffer.truncate(self.len);
        self.buffer
    }
}

/// The bytes of a write that are in no frame yet.
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

    /// Moves the next bytes to `target`, and returns how many.
    fn fill(&mut self, target: &mut [u8]) -> usize {
        let filled = self.pieces.fill(target);
        self.len -= filled;
        filled
    }
}

impl Core {
    /// Writes as many bytes as credits and buffers allow, up to some [`COPIED`]. Waits if that is
    /// none.
    pub(super) fn poll_write(
        &mut self,
        slices: &[IoSlice<'_>],
        ticket: &mut Option<Ticket>,
        driver: &Waker,
        caller: &mut Caller<'_>,
    ) -> Poll<Result<usize, MessageError>> {
        self.poll_written(|core| core.write(slices), ticket, driver, caller)
    }

    /// Writes like [`poll_write`](Self::poll_write), or from the `buffer` that has the bytes, or
    /// lets the peer read long bytes.
    pub(super) fn poll_write_bytes(
        &mut self,
        bytes: &Bytes,
        buffer: Option<&Buf>,
        ticket: &mut Option<Ticket>,
        driver: &Waker,
        caller: &mut Caller<'_>,
    ) -> Poll<Result<usize, MessageError>> {
        let len = bytes.len().min(PIECE).min(usize::try_from(self.limits.send).unwrap_or(PIECE));
        if len <= self.limits.eager {
            return match buffer {
                Some(buffer) => self.poll_write_buffer(buffer, ticket, driver, caller),
                None => self.poll_write(&[IoSlice::new(bytes)], ticket, driver, caller),
            };
        }
        let piece = bytes.slice(..len);
        let offer = |core: &mut Self| core.send_whole(Outgoing::Bytes(&piece), len, driver);
        self.poll_written(offer, ticket, driver, caller)
    }

    /// Writes a buffer from its memory, if that is registered here.
    pub(super) fn poll_write_buffer(
        &mut self,
        buffer: &Buf,
        ticket: &mut Option<Ticket>,
        driver: &Waker,
        caller: &mut Caller<'_>,
    ) -> Poll<Result<usize, MessageError>> {
        if !self.is_registered(buffer) {
            return self.poll_write_bytes(&buffer.clone().into(), None, ticket, driver, caller);
        }
        // One frame while their size changes: a piece of several could be offered instead.
        let longest = if self.sizes.is_settled() { self.limits.eager } else { self.frame_len(0) };
        let len = buffer.len().min(longest);
        let piece;
        let lent = if len == buffer.len() {
            buffer
        } else {
            let Ok(part) = buffer.slice(..len) else { unreachable!("shorter than the buffer") };
            piece = part;
            &piece
        };
        let lend = |core: &mut Self| core.send_whole(Outgoing::Buffer(lent), len, driver);
        self.poll_written(lend, ticket, driver, caller)
    }

    /// Sends held bytes.
    pub(super) fn poll_push(
        &mut self,
        ticket: &mut Option<Ticket>,
        driver: &Waker,
        caller: &mut Caller<'_>,
    ) -> Poll<Result<(), MessageError>> {
        if self.send_held_now() {
            // A write that waits keeps its position.
            return Poll::Ready(Ok(()));
        }
        self.poll_written(|core| core.push(), ticket, driver, caller)
    }

    /// Waits for `write` like a sender.
    fn poll_written<T>(
        &mut self,
        write: impl FnMut(&mut Self) -> Attempt<T>,
        ticket: &mut Option<Ticket>,
        driver: &Waker,
        caller: &mut Caller<'_>,
    ) -> Poll<Result<T, MessageError>> {
        let written = self.poll_unblocked(write, ticket, driver, caller);
        if written.is_ready() && self.held.is_some() {
            // Registers the driver with the last frame.
            self.progress(driver);
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
        if let Some(held) = &mut self.held {
            held.append(&mut bytes);
            if held.is_full() {
                self.send_held();
            }
        }
        let mut block = None;
        while bytes.len > 0 && len - bytes.len < COPIED && block.is_none() {
            block = match self.held {
                None => self.write_frame(&mut bytes)?.err(),
                Some(_) => Some(Block::Credits { frames: 1 }),
            };
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

    /// Sends or holds one frame of `bytes`.
    fn write_frame(&mut self, bytes: &mut Unwritten<'_>) -> Attempt<()> {
        if !self.protocol.flow.may_send(Kind::Data) {
            return Ok(Err(Block::Credits { frames: 1 }));
        }
        let frame = self.frame_len(0);
        let hold = bytes.len < frame && !self.nodelay && self.has_unacknowledged();
        if !hold && bytes.len <= self.limits.inline.min(frame) {
            let mut gathered = SmallVec::<[u8; INLINE]>::from_elem(0, bytes.len);
            bytes.fill(&mut gathered);
            let header = self.protocol.flow.send(Kind::Data);
            self.send_short(header, &gathered);
            return Ok(Ok(()));
        }
        let len = if hold { frame } else { bytes.len.min(frame) };
        if !self.send_memory.has_free(1) {
            self.reap();
        }
        let mut buffer = match self.send_buffer(len, 1)? {
            Ok(buffer) => buffer,
            Err(block) => return Ok(Err(block)),
        };
        let filled = bytes.fill(&mut buffer);
        if hold {
            self.held = Some(Held { buffer, len: filled });
        } else {
            self.send_copied(Kind::Data, buffer);
        }
        Ok(Ok(()))
    }

    /// Returns true if the peer has not acknowledged all frames, by its device or by credits.
    fn has_unacknowledged(&mut self) -> bool {
        self.reap();
        if self.sends.is_empty() || self.protocol.flow.is_everything_released() {
            return false;
        }
        self.qp.drain_completions();
        self.reap();
        !self.sends.is_empty()
    }

    /// Sends held bytes if they wait no longer for other frames, and a credit is free.
    pub(in crate::message) fn send_held(&mut self) {
        let Some(held) = &self.held else { return };
        let finishes = self.protocol.phase().check_open().is_err();
        if held.is_full() || self.nodelay || finishes || self.sends.is_empty() {
            self.send_held_now();
        }
    }

    /// Sends held bytes if a credit is free. Returns true if none are left.
    fn send_held_now(&mut self) -> bool {
        while self.protocol.flow.may_send(Kind::Data)
            && let Some(mut held) = self.held.take()
        {
            let frame = self.frame_len(0);
            if held.len <= frame {
                self.send_copied(Kind::Data, held.into_buffer());
                break;
            }
            // The peer's receives have become shorter since.
            let len = match self.send_buffer(frame, 1) {
                Ok(Ok(mut part)) => {
                    part.copy_from_slice(&held.buffer[..frame]);
                    self.send_copied(Kind::Data, part);
                    frame
                }
                // As much as needs no buffer.
                Ok(Err(_)) | Err(_) => {
                    let len = frame.min(self.limits.inline);
                    let header = self.protocol.flow.send(Kind::Data);
                    self.send_short(header, &held.buffer[..len]);
                    len
                }
            };
            held.buffer.copy_within(len..held.len, 0);
            held.len -= len;
            self.held = Some(held);
        }
        self.held.is_none()
    }

    fn push(&mut self) -> Attempt<()> {
        if self.send_held_now() {
            return Ok(Ok(()));
        }
        match self.close_reason() {
            Some(reason) => Err(reason.into()),
            None => Ok(Err(Block::Held)),
        }
    }

    /// Sends a message of `len` bytes after the held ones.
    fn send_whole(&mut self, message: Outgoing<'_>, len: usize, driver: &Waker) -> Attempt<usize> {
        self.protocol.phase().check_open()?;
        if !self.send_held_now() {
            return Ok(Err(Block::Held));
        }
        Ok(self.try_send(message, driver)?.map(|()| len))
    }

    pub(super) fn set_nodelay(&mut self, nodelay: bool, driver: &Waker) {
        self.nodelay = nodelay;
        self.progress(driver);
    }
}

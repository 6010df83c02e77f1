//! Sending: inline, copied, in place, or as an offer.

use std::ops::Deref;
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use rdma_message_proto::frame::{Header, Kind};
use rdma_message_proto::handshake::Service;
use rdma_message_proto::sending::{Blocked, FlushPoint, Transfer};
use rdma_provider::later;
use smallvec::SmallVec;

use super::error::{CloseReason, MessageError};
use super::outbox::Sent;
use super::state::ConnectionState;
use super::waiting::Attempt;
use crate::error::{LimitError, OpErrorKind};
use crate::memory::{Buf, BufMut, Gather, PdKey, ReadOnlyRegion, RemoteRegion, Sealed as _};
use crate::op::Write;
use crate::types::Imm;
use crate::waiters::{Caller, Ticket};

const REAP_THRESHOLD: usize = 256;

/// Messages of several parts up to this length are gathered inline without an allocation.
pub(super) const INLINE: usize = 256;

#[derive(Debug, Clone, Copy)]
pub(super) enum Outgoing<'a> {
    Bytes(&'a Bytes),
    Buffer(&'a Buf),
    Parts(&'a [Bytes]),
}

impl<'a> Outgoing<'a> {
    #[inline]
    pub(super) fn of(bytes: &'a Bytes, buffer: Option<&'a Buf>) -> Self {
        buffer.map_or(Self::Bytes(bytes), Self::Buffer)
    }

    /// A `u64`, because repeated parts may add up to more than the address space.
    fn len(self) -> u64 {
        match self {
            Self::Bytes(bytes) => bytes.len() as u64,
            Self::Buffer(buffer) => buffer.len() as u64,
            Self::Parts(parts) => {
                parts.iter().fold(0, |len: u64, part| len.saturating_add(part.len() as u64))
            }
        }
    }

    fn pieces(self) -> Pieces<'a, Bytes> {
        let (first, rest): (&[u8], &[Bytes]) = match self {
            Self::Bytes(bytes) => (bytes, &[]),
            Self::Buffer(buffer) => (buffer, &[]),
            Self::Parts(parts) => (&[], parts),
        };
        Pieces { first, rest }
    }

    pub(super) fn to_bytes(self) -> Bytes {
        match self {
            Self::Bytes(bytes) => bytes.clone(),
            Self::Buffer(buffer) => buffer.clone().into(),
            Self::Parts(parts) => parts.concat().into(),
        }
    }
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Pieces<'a, S> {
    pub(super) first: &'a [u8],
    pub(super) rest: &'a [S],
}

impl<S: Deref<Target = [u8]>> Pieces<'_, S> {
    pub(super) fn fill(&mut self, mut target: &mut [u8]) -> usize {
        let len = target.len();
        loop {
            let (bytes, after) = self.first.split_at(self.first.len().min(target.len()));
            let (filled, rest) = target.split_at_mut(bytes.len());
            filled.copy_from_slice(bytes);
            (self.first, target) = (after, rest);
            match self.rest {
                [next, others @ ..] if !target.is_empty() => {
                    (self.first, self.rest) = (next, others);
                }
                _ => return len - target.len(),
            }
        }
    }
}

#[derive(Debug, Default)]
pub(super) struct Flush {
    target: Option<FlushPoint>,
    /// Messages sent when `target` was set.
    messages: u64,
}

impl Flush {
    /// Includes later messages, because an earlier flush of a sink may have been abandoned.
    pub(super) fn renew(&mut self, state: &ConnectionState) {
        if self.messages != state.counters.sent {
            self.target = None;
        }
    }
}

impl ConnectionState {
    pub(super) fn send_bare(&mut self, header: Header) {
        self.send_short(header, &[]);
    }

    pub(super) fn send_short(&mut self, header: Header, payload: &[u8]) {
        let send = self.io.send_inline(header, payload);
        self.add_sent(if header.kind == Kind::Abort {
            Sent::Abort(send)
        } else {
            Sent::Inline(send)
        });
    }

    #[inline]
    pub(super) fn add_sent(&mut self, sent: Sent) {
        self.note_refusal(sent.refusal());
        self.protocol.sending.post();
        self.outbox.push(sent);
    }

    /// The caller must drop `message` without the lock.
    pub(super) fn poll_send(
        &mut self,
        message: Outgoing<'_>,
        ticket: &mut Option<Ticket>,
        waker: &Waker,
        caller: &mut Caller<'_>,
    ) -> Poll<Result<(), MessageError>> {
        self.poll_unblocked(|state| state.attempt_send(message, waker), ticket, waker, caller)
    }

    /// Calls `send` if this task is first in the queue. Waits for the resource that it returns as
    /// missing.
    pub(super) fn poll_unblocked<T>(
        &mut self,
        mut send: impl FnMut(&mut Self) -> Attempt<T>,
        ticket: &mut Option<Ticket>,
        waker: &Waker,
        caller: &mut Caller<'_>,
    ) -> Poll<Result<T, MessageError>> {
        if self.is_turn(&self.waiting.senders, *ticket) {
            let mut result = send(self);
            if matches!(result, Ok(Err(_))) {
                self.progress(waker);
                result = send(self);
            }
            match result {
                Ok(Err(block)) => self.waiting.blocked = block,
                Ok(Ok(sent)) => {
                    // Without a ticket, no message waits.
                    if ticket.is_some() {
                        self.withdraw_sender(ticket);
                    }
                    return Poll::Ready(Ok(sent));
                }
                Err(error) => {
                    self.withdraw_sender(ticket);
                    return Poll::Ready(Err(error));
                }
            }
        } else if let Err(error) = self.protocol.phase().check_open() {
            self.withdraw_sender(ticket);
            return Poll::Ready(Err(error.into()));
        }
        self.waiting.senders.wait(ticket, caller);
        if matches!(self.waiting.blocked, Blocked::Buffers(_)) {
            // Registers the connection's waker with a buffer's send.
            self.progress(waker);
        }
        Poll::Pending
    }

    pub(super) fn poll_write_with_imm<B: Gather>(
        &mut self,
        buffer: &mut Option<B>,
        (remote, imm): (RemoteRegion, Imm),
        ticket: &mut Option<Ticket>,
        waker: &Waker,
        caller: &mut Caller<'_>,
    ) -> Poll<Option<Write<B>>> {
        let first = self.waiting.senders.is_first(*ticket);
        if first && !self.protocol.flow.may_send(Kind::Data) {
            self.progress(waker);
        }
        let open = self.protocol.phase().check_open().is_ok();
        if open && !(first && self.protocol.flow.may_send(Kind::Data)) {
            if first {
                self.waiting.blocked = Blocked::Credits(1);
            }
            self.waiting.senders.wait(ticket, caller);
            return Poll::Pending;
        }
        let write = buffer.take().map(|buffer| {
            if !open {
                return Write::refused(OpErrorKind::Closed, buffer);
            }
            let write = self.io.qp.solicited().with_imm(imm).write(buffer, remote);
            if write.refusal().is_none() {
                self.protocol.flow.send_notification();
                self.counters.notifications_sent += 1;
            }
            write
        });
        self.withdraw_sender(ticket);
        Poll::Ready(write)
    }

    /// Returns false if a resource is missing or other tasks wait for one. The caller must drop the
    /// message without the lock.
    pub(super) fn try_send(
        &mut self,
        message: Outgoing<'_>,
        waker: &Waker,
    ) -> Result<bool, MessageError> {
        self.protocol.phase().check_open()?;
        if !self.waiting.senders.is_empty() {
            return Ok(false);
        }
        let mut sent = self.attempt_send(message, waker)?;
        if sent.is_err() {
            self.progress(waker);
            sent = self.attempt_send(message, waker)?;
        }
        Ok(sent.is_ok())
    }

    pub(crate) fn withdraw_sender(&mut self, ticket: &mut Option<Ticket>) {
        let waker = self.waiting.senders.withdraw(ticket);
        match self.protocol.service() {
            Service::Messages => later::discard(waker),
            // The task may have waited in another method, which it now polls again.
            Service::Bytes => later::wake(waker),
        }
        self.wake_senders();
    }

    /// Completions of sends in place call `waker`.
    pub(super) fn attempt_send(&mut self, message: Outgoing<'_>, waker: &Waker) -> Attempt<()> {
        self.protocol.phase().check_open()?;
        let long = message.len();
        // Bytes of a stream are no message; `poll_write_bytes` limits what it offers.
        if self.protocol.service() == Service::Messages {
            LimitError::check("message bytes (max_message of the peer)", long, self.limits.send)
                .map_err(MessageError::TooLong)?;
        }
        let transfer = match self.protocol.transfer(long, self.memory.send.most()) {
            Ok(transfer) => transfer,
            Err(blocked) => return Ok(Err(blocked)),
        };
        match transfer {
            Transfer::Inline => {
                let Pieces { first, rest } = message.pieces();
                let mut gathered = SmallVec::<[u8; INLINE]>::new();
                rest.iter().for_each(|part| gathered.extend_from_slice(part));
                let bytes = if rest.is_empty() { first } else { &gathered[..] };
                let header = self.protocol.flow.send(Kind::Data);
                self.send_short(header, bytes);
            }
            Transfer::Frames(frames) => match message {
                Outgoing::Buffer(buffer) if self.is_registered(buffer) => {
                    self.send_in_place(buffer, frames, waker);
                }
                _ => {
                    let copied = self.copy_to_frames(message.pieces(), long as usize, frames)?;
                    if copied.is_err() {
                        return Ok(copied);
                    }
                }
            },
            Transfer::Offer => {
                let pd = self.io.qp.protection_domain();
                let region = ReadOnlyRegion::new(pd, message.to_bytes());
                let region = region.map_err(MessageError::Register)?;
                let header = self.protocol.flow.send(Kind::Offer);
                self.send_short(header, &region.grant().to_bytes());
                self.protocol.sending.offer(region.len());
                self.outbox.offers.push_back(region);
                self.counters.offered += 1;
            }
        }
        self.counters.sent += 1;
        if self.outbox.sends.len() > REAP_THRESHOLD {
            self.reap();
        }
        Ok(Ok(()))
    }

    pub(super) fn is_offered(&self, parts: &[Bytes]) -> bool {
        let len = Outgoing::Parts(parts).len();
        len > self.protocol.framing().eager() as u64 && len <= self.limits.send
    }

    /// A header at the end needs a copy.
    pub(super) fn is_registered(&self, buffer: &Buf) -> bool {
        if self.io.trailer > 0 {
            return false;
        }
        let own = PdKey(self.io.qp.protection_domain().id());
        buffer.single().is_some_and(|(_, pd)| pd == own)
    }

    /// One part per frame.
    fn send_in_place(&mut self, message: &Buf, frames: usize, waker: &Waker) {
        if frames == 1 && self.outbox.sends.is_empty() {
            return self.send_alone_in_place(message, waker);
        }
        let (watches, mut start) = (self.outbox.in_place == 0, 0);
        for number in 1..=frames {
            let end = message.len().min(start + self.protocol.frame_len(0));
            let Ok(part) = message.slice(start..end) else {
                unreachable!("the parts are within the message")
            };
            start = end;
            let kind = self.protocol.kind_of(number == frames);
            let header = self.protocol.flow.send(kind);
            let send = self.io.frame(header).send(part);
            self.add_sent(Sent::InPlace(send));
        }
        if watches {
            // The buffers must return even if no task waits for their sends, so one send is always
            // watched, and its completion leads to the next.
            let context = &mut Context::from_waker(waker);
            self.terminate_on_error(|state| state.watch_sends(context));
        }
    }

    /// Requires that no other frame is in flight.
    fn send_alone_in_place(&mut self, message: &Buf, waker: &Waker) {
        let header = self.protocol.flow.send(Kind::Data);
        let send = self.io.frame(header).send(message.clone());
        let mut sent = Sent::InPlace(send);
        self.note_refusal(sent.refusal());
        self.protocol.sending.post();
        let context = &mut Context::from_waker(waker);
        match sent.poll(context) {
            Poll::Pending => {
                self.outbox.push(sent);
                self.watch_by_driver();
            }
            // This drops a view under the lock, which frees nothing: the caller holds another one.
            Poll::Ready(result) => {
                self.protocol.sending.complete();
                if let Err(kind) = result {
                    self.terminate_on_error(|state| state.on_failure(kind.into(), context));
                }
            }
        }
    }

    /// Returns the missing resource, if any.
    fn copy_to_frames(
        &mut self,
        mut message: Pieces<'_, Bytes>,
        len: usize,
        frames: usize,
    ) -> Attempt<()> {
        if !self.memory.send.has_free(frames) {
            self.reap();
        }
        let mut buffers = SmallVec::<[_; 8]>::new();
        let mut left = len;
        for number in 0..frames {
            let frame = left.min(self.protocol.frame_len(number as u32));
            match self.take_send_buffer(frame, frames)? {
                Ok(mut buffer) => {
                    message.fill(&mut buffer);
                    left -= frame;
                    buffers.push(buffer);
                }
                Err(block) => return Ok(Err(block)),
            }
        }
        for (number, buffer) in (1..).zip(buffers) {
            self.send_copied(self.protocol.kind_of(number == frames), buffer);
        }
        Ok(Ok(()))
    }

    pub(super) fn send_copied(&mut self, kind: Kind, buffer: BufMut) {
        let header = self.protocol.flow.send(kind);
        let send = self.io.send_buffer(header, buffer);
        self.add_sent(Sent::Copied(send));
    }

    pub(super) fn poll_flush(
        &mut self,
        flush: &mut Flush,
        ticket: &mut Option<Ticket>,
        waker: &Waker,
        caller: &mut Caller<'_>,
    ) -> Poll<Result<(), MessageError>> {
        let target = match flush.target {
            Some(target) => target,
            None => {
                flush.messages = self.counters.sent;
                *flush.target.insert(self.protocol.sending.flush_point())
            }
        };
        // Registers before `progress`, which watches only sends that someone waits for. A spurious
        // wake-up is possible: it may wake this task for another flush.
        self.waiting.flushers.wait(ticket, caller);
        let earliest = self.waiting.flush.map_or(target, |point| point.min(target));
        self.waiting.flush = Some(earliest);
        self.progress(waker);
        let result = match self.close_reason() {
            Some(CloseReason::Clean) => Ok(()),
            Some(reason) => Err(MessageError::Closed(reason)),
            None if self.protocol.sending.has_reached(target) => Ok(()),
            None => return Poll::Pending,
        };
        flush.target = None;
        self.withdraw_flusher(ticket);
        Poll::Ready(result)
    }

    pub(super) fn withdraw_flusher(&mut self, ticket: &mut Option<Ticket>) {
        later::discard(self.waiting.flushers.withdraw(ticket));
    }
}

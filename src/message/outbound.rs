//! What an end sends: each message in the way that its length asks for.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use bytes::Bytes;

use super::core::{Core, Mark};
use super::error::{CloseReason, MessageError};
use super::frame::{Header, Kind};
use super::waiters::{Guest, Ticket};
use crate::error::{LimitError, OpErrorKind};
use crate::memory::{BufMut, PoolError, ReadOnlyRegion};
use crate::op::Send;

/// Frames on their way before those that are done are looked for, though nobody needs what they hold.
const LOOK: usize = 256;

/// A frame on its way.
#[derive(Debug)]
pub(super) enum Sent {
    Inline(Send<()>),
    Copied(Send<BufMut>),
    /// An `Abort`.
    Abort(Send<()>),
    Done,
}

impl Sent {
    pub(super) fn is_finished(&self) -> bool {
        match self {
            Self::Inline(send) | Self::Abort(send) => send.is_finished(),
            Self::Copied(send) => send.is_finished(),
            Self::Done => true,
        }
    }

    fn refusal(&self) -> Option<OpErrorKind> {
        match self {
            Self::Inline(send) | Self::Abort(send) => send.refusal(),
            Self::Copied(send) => send.refusal(),
            Self::Done => None,
        }
    }

    /// True if it is an `Abort` that the device has.
    pub(super) fn is_posted_abort(&self) -> bool {
        matches!(self, Self::Abort(send) if !send.is_in_line())
    }

    pub(super) fn poll(&mut self, context: &mut Context<'_>) -> Poll<Result<(), OpErrorKind>> {
        let result = match self {
            Self::Inline(send) | Self::Abort(send) => {
                Pin::new(send).poll(context).map_err(|error| error.kind())
            }
            Self::Copied(send) => {
                Pin::new(send).poll(context).map_ok(drop).map_err(|error| error.kind())
            }
            Self::Done => return Poll::Ready(Ok(())),
        };
        if result.is_ready() {
            *self = Self::Done;
        }
        result
    }
}

/// Why the first in line cannot send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Block {
    Credits,
    Buffers,
    Memory(u64),
}

/// A wait for what was sent to arrive.
#[derive(Debug, Default)]
pub(super) struct Flush {
    pub(super) ticket: Option<Ticket>,
    /// What had been sent when it began.
    target: Option<Mark>,
    /// Messages that had been sent then.
    messages: u64,
}

impl Flush {
    /// Waits for all that was sent so far, if there was more since it began: a sink may have begun to flush, and stopped, before.
    pub(super) fn renew(&mut self, core: &Core) {
        if self.messages != core.counters.sent {
            self.target = None;
        }
    }
}

impl Core {
    /// Posts a frame of which there is nothing but its header.
    pub(super) fn send_bare(&mut self, header: Header) {
        let send = self.qp.send_inline_with_imm(&[], header.encode());
        self.add_sent(if header.kind == Kind::Abort {
            Sent::Abort(send)
        } else {
            Sent::Inline(send)
        });
    }

    fn add_sent(&mut self, sent: Sent) {
        self.note_refusal(sent.refusal());
        self.sends.push_back(sent);
    }

    /// Sends `message` if that is possible now and nobody is before it in line. It is the caller's to drop, without the lock:
    /// that may run code of the service.
    pub(super) fn poll_send(
        &mut self,
        message: &Bytes,
        ticket: &mut Option<Ticket>,
        bell: &Waker,
        guest: &mut Guest<'_>,
    ) -> Poll<Result<(), MessageError>> {
        if self.senders.is_first(*ticket) {
            let mut result = self.try_send(message);
            if matches!(result, Ok(Some(_))) {
                self.progress(bell);
                result = self.try_send(message);
            }
            match result {
                Ok(Some(block)) => self.blocked = block,
                Ok(None) => {
                    self.next_sender(ticket);
                    return Poll::Ready(Ok(()));
                }
                Err(error) => {
                    self.next_sender(ticket);
                    return Poll::Ready(Err(error));
                }
            }
        } else if let Err(error) = self.protocol.phase().check_open() {
            self.next_sender(ticket);
            return Poll::Ready(Err(error));
        }
        self.senders.wait(ticket, guest);
        if self.blocked == Block::Buffers {
            // Somebody must be told when one comes back.
            self.progress(bell);
        }
        Poll::Pending
    }

    /// Leaves the line of senders.
    pub(super) fn next_sender(&mut self, ticket: &mut Option<Ticket>) {
        self.after.spent.extend(self.senders.leave(ticket));
        // What it needs nobody knows; it will say so.
        self.after.wakers.extend(self.senders.first());
    }

    /// Sends a message, or says why not now.
    pub(super) fn try_send(&mut self, message: &Bytes) -> Result<Option<Block>, MessageError> {
        self.protocol.phase().check_open()?;
        let len = message.len();
        LimitError::check("message bytes (max_message of the peer)", len as u64, self.limits.send)
            .map_err(MessageError::TooLong)?;
        if !self.protocol.flow.may_send(Kind::Data) {
            return Ok(Some(Block::Credits));
        }
        if len <= self.limits.inline && len <= self.limits.eager {
            let header = self.protocol.flow.send(Kind::Data);
            self.add_sent(Sent::Inline(self.qp.send_inline_with_imm(message, header.encode())));
        } else if len <= self.limits.eager {
            self.reap();
            let buffer = match self.send_pool.copy_from(message) {
                Ok(buffer) => buffer,
                Err(PoolError::Empty) => return Ok(Some(Block::Buffers)),
                Err(PoolError::TooLong(limit)) => return Err(MessageError::TooLong(limit)),
                Err(PoolError::Register(error)) => return Err(MessageError::Register(error)),
            };
            let header = self.protocol.flow.send(Kind::Data);
            self.add_sent(Sent::Copied(self.qp.send_with_imm(buffer, header.encode())));
        } else {
            let bytes = len as u64;
            if !self.offers.is_empty() && self.offered + bytes > self.limits.send_memory {
                return Ok(Some(Block::Memory(bytes)));
            }
            let region = ReadOnlyRegion::new(self.qp.protection_domain(), message.clone());
            let region = region.map_err(MessageError::Register)?;
            let header = self.protocol.flow.send(Kind::Offer);
            let grant = region.grant().to_bytes();
            self.add_sent(Sent::Inline(self.qp.send_inline_with_imm(&grant, header.encode())));
            self.offers.push_back(region);
            self.offered += bytes;
            self.counters.offered += 1;
        }
        self.counters.sent += 1;
        if self.sends.len() > LOOK {
            self.reap();
        }
        Ok(None)
    }

    /// Waits until all that was sent when it was first asked has arrived: others may go on sending.
    pub(super) fn poll_flush(
        &mut self,
        flush: &mut Flush,
        bell: &Waker,
        guest: &mut Guest<'_>,
    ) -> Poll<Result<(), MessageError>> {
        let target = match flush.target {
            Some(target) => target,
            None => {
                flush.messages = self.counters.sent;
                *flush.target.insert(self.sent_so_far())
            }
        };
        // In line first: progress looks at sends that somebody waits for. If it reaches the mark of another, it wakes this task.
        self.flushers.wait(&mut flush.ticket, guest);
        self.mark = Some(self.mark.map_or(target, |mark| mark.min(target)));
        self.progress(bell);
        let result = match self.ended() {
            Some(CloseReason::Clean) => Ok(()),
            Some(reason) => Err(MessageError::Closed(reason)),
            None if self.has_reached(target) => Ok(()),
            None => {
                self.flushers.wait(&mut flush.ticket, guest);
                return Poll::Pending;
            }
        };
        flush.target = None;
        self.leave_flushers(&mut flush.ticket);
        Poll::Ready(result)
    }

    /// No longer waits for a flush, or for the end.
    pub(super) fn leave_flushers(&mut self, ticket: &mut Option<Ticket>) {
        self.after.spent.extend(self.flushers.leave(ticket));
    }
}

//! What an end receives: messages in order, those to be fetched among them.

use std::collections::VecDeque;
use std::task::{Poll, Waker};

use bytes::Bytes;

use super::core::Core;
use super::error::{CloseReason, MessageError};
use super::lifecycle::Event;
use super::message_memory::Landing;
use super::waiters::{Guest, Ticket};
use crate::memory::BufMut;
use crate::memory::RemoteRegion;

/// Messages up to this length are copied out: that costs less than to keep their buffer and to find another.
const COPIED_OUT: usize = 256;

/// Messages that have arrived, or will have once they are fetched, in order.
#[derive(Debug, Default)]
pub(super) struct Inbox {
    pub(super) messages: VecDeque<Incoming>,
    /// Number of the first.
    pub(super) base: u64,
    /// Numbers of those that are not being fetched yet, and of those that are.
    pub(super) waiting: VecDeque<u64>,
    pub(super) fetching: VecDeque<u64>,
    /// Bytes of those that are being fetched or have been.
    pub(super) memory: u64,
    /// The connection has ended, and some were lost.
    pub(super) lost: bool,
}

#[derive(Debug)]
pub(super) enum Incoming {
    Here(BufMut),
    Offered(RemoteRegion),
    /// Memory for it is being registered.
    Preparing(RemoteRegion),
    Landing(Landing),
    /// It is there; the registration of its memory is being ended.
    Releasing,
    Landed(Bytes),
    /// Could not be fetched; the connection has failed.
    Lost,
}

impl Inbox {
    pub(super) fn push(&mut self, message: Incoming) {
        if matches!(message, Incoming::Offered(_)) {
            self.waiting.push_back(self.base + self.messages.len() as u64);
        }
        self.messages.push_back(message);
    }

    /// True if a message has arrived, or was announced.
    pub(super) fn has_begun(&self) -> bool {
        self.base > 0 || !self.messages.is_empty()
    }

    pub(super) fn get(&mut self, number: u64) -> Option<&mut Incoming> {
        self.messages.get_mut((number - self.base) as usize)
    }

    pub(super) fn is_ready(&self) -> bool {
        matches!(self.messages.front(), Some(Incoming::Here(_) | Incoming::Landed(_)))
    }

    pub(super) fn pop(&mut self) -> Option<Incoming> {
        if !self.is_ready() {
            return None;
        }
        self.base += 1;
        self.messages.pop_front()
    }
}

impl Core {
    /// The next message; `None` after the last.
    pub(super) fn poll_recv(
        &mut self,
        ticket: &mut Option<Ticket>,
        bell: &Waker,
        guest: &mut Guest<'_>,
    ) -> Poll<Result<Option<Bytes>, MessageError>> {
        if self.receivers.is_first(*ticket) {
            if !self.inbox.is_ready() {
                self.progress(bell);
            }
            // After `close`, those before it may be gone.
            if self.protocol.phase().takes_messages()
                && let Some(message) = self.take_message()
            {
                self.next_receiver(ticket);
                if self.ended().is_none() {
                    self.send_due();
                    if !self.inbox.waiting.is_empty() {
                        self.progress(bell);
                    }
                }
                return Poll::Ready(Ok(Some(message)));
            }
            if let Some(end) = self.end_of_messages() {
                self.next_receiver(ticket);
                return Poll::Ready(end);
            }
        }
        self.receivers.wait(ticket, guest);
        Poll::Pending
    }

    pub(super) fn end_of_messages(&mut self) -> Option<Result<Option<Bytes>, MessageError>> {
        // Only to whoever has received all of them.
        if self.is_at_end() && self.counters.discarded == 0 {
            self.on(Event::EndReceived);
            return Some(Ok(None));
        }
        if !self.protocol.phase().takes_messages() {
            let reason = self
                .ended()
                .filter(|&reason| reason == CloseReason::Aborted)
                .unwrap_or(CloseReason::Local);
            return Some(Err(MessageError::Closed(reason)));
        }
        self.ended().map(|reason| Err(MessageError::Closed(reason)))
    }

    /// Leaves the line of receivers.
    pub(super) fn next_receiver(&mut self, ticket: &mut Option<Ticket>) {
        self.after.spent.extend(self.receivers.leave(ticket));
        if self.ended().is_some() || self.inbox.is_ready() || self.is_at_end() {
            self.after.wakers.extend(self.receivers.first());
        }
    }

    pub(super) fn take_message(&mut self) -> Option<Bytes> {
        let message = self.inbox.pop()?;
        self.counters.received += 1;
        let open = self.ended().is_none();
        let bytes = match message {
            Incoming::Landed(bytes) => {
                self.inbox.memory -= bytes.len() as u64;
                bytes
            }
            Incoming::Here(buffer) => self.hand_out(buffer, open),
            Incoming::Offered(_)
            | Incoming::Preparing(_)
            | Incoming::Landing(_)
            | Incoming::Releasing
            | Incoming::Lost => unreachable!("it was ready"),
        };
        if open {
            self.protocol.flow.release_message();
        }
        Some(bytes)
    }

    /// Makes a message of a buffer, and posts a receive with another, or with the same if there is none.
    fn hand_out(&mut self, buffer: BufMut, open: bool) -> Bytes {
        if buffer.len() > COPIED_OUT {
            let spare = self.receive_pool.try_alloc(self.receive_pool.buffer_size());
            match spare {
                Ok(spare) => {
                    if open {
                        self.post_receive(spare);
                    }
                    return buffer.freeze().into();
                }
                Err(_) => self.counters.copied_out += 1,
            }
        }
        let bytes = Bytes::copy_from_slice(&buffer);
        if open {
            self.post_receive(buffer);
        }
        bytes
    }
}

use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use rdma_message_proto::Violation;
use rdma_message_proto::incoming::Arrival;
use rdma_message_proto::lifecycle::Event;
use rdma_provider::later;

use super::error::{CloseReason, MessageError};
use super::inbox::{Arrived, FetchedMessage, Incoming, Next, Notification};
use super::state::ConnectionState;
use crate::memory::{BufMut, RemoteRegion};
use crate::op::Received;
use crate::waiters::{Caller, Ticket};

/// Frames taken before the task yields.
pub(super) const BATCH: usize = 128;

impl ConnectionState {
    pub(super) fn take_frames(&mut self, context: &mut Context<'_>) -> Result<(), CloseReason> {
        for taken in 0..BATCH {
            let Some(receive) = self.receives.posted.front_mut() else { return Ok(()) };
            // `is_finished` may poll the device, so only the first round calls it. A later
            // completion calls the connection's waker.
            let arrived = if taken == 0 { receive.is_finished() } else { receive.is_complete() };
            if self.io.notifies && !arrived {
                return Ok(());
            }
            let Poll::Ready(result) = receive.poll_unconstrained(context) else { return Ok(()) };
            self.receives.posted.pop_front();
            match result {
                Ok(received) => self.on_frame(received)?,
                Err(error) => {
                    self.on(Event::Fail(error.kind().into()));
                    return Ok(());
                }
            }
        }
        // Yields to other tasks.
        context.waker().wake_by_ref();
        Ok(())
    }

    fn on_frame(&mut self, received: Received<BufMut>) -> Result<(), CloseReason> {
        let Received { mut buffer, len, imm, written, .. } = received;
        let header = self.io.header(&mut buffer, imm);
        let frame = self.protocol.on_frame(header, buffer.len(), written)?;
        for _ in 0..frame.fetched {
            if let Some(region) = self.outbox.offers.pop_front() {
                self.protocol.sending.fetched(region.len());
                later::dispose(region);
            }
        }
        match frame.arrival {
            Arrival::Message { parts, len } => {
                self.inbox.push_last(parts as usize, buffer, len as usize);
            }
            Arrival::Part => self.inbox.push_part(buffer),
            Arrival::Offer => {
                let region = RemoteRegion::from_bytes(&buffer)
                    .ok_or(Violation::FrameLength { len: buffer.len() })?;
                self.protocol.on_offer(region.addr(), region.len())?;
                self.post_receive(buffer);
                self.inbox.push(Incoming::Offered(region));
            }
            Arrival::Notification => {
                self.post_receive(buffer);
                if let Some(imm) = imm {
                    self.inbox.notifications.push_back(Notification { imm, len });
                }
            }
            Arrival::Control => self.post_receive(buffer),
            Arrival::Resize => {
                let size = self.protocol.on_resize(&buffer)?;
                self.post_receive(buffer);
                self.limit_frames(Some(size));
                // A message may now need fewer frames, or be offered.
                self.wake_senders();
            }
            Arrival::Skip => self.on_skip(buffer),
        }
        Ok(())
    }

    pub(super) fn poll_notification(
        &mut self,
        ticket: &mut Option<Ticket>,
        waker: &Waker,
        caller: &mut Caller<'_>,
    ) -> Poll<Option<Result<Notification, MessageError>>> {
        if self.waiting.notified.is_first(*ticket) {
            if self.inbox.notifications.is_empty() {
                self.progress_for_receiver(waker);
            }
            if self.protocol.phase().takes_messages()
                && let Some(notification) = self.inbox.notifications.pop_front()
            {
                self.counters.notifications_received += 1;
                self.withdraw_notified(ticket);
                if self.close_reason().is_none() {
                    self.protocol.flow.release_message();
                    self.send_due();
                }
                return Poll::Ready(Some(Ok(notification)));
            }
            if let Some(end) = self.end_of_notifications() {
                self.withdraw_notified(ticket);
                return Poll::Ready(end.map(|reason| Err(MessageError::Closed(reason))));
            }
        }
        self.waiting.notified.wait(ticket, caller);
        Poll::Pending
    }

    /// Returns a reason unless the peer has finished.
    fn end_of_notifications(&self) -> Option<Option<CloseReason>> {
        let reason = self.close_reason();
        if !self.protocol.phase().takes_messages() {
            return Some(Some(reason.unwrap_or(CloseReason::Local)));
        }
        if self.protocol.flow.peer_has_finished() || self.inbox.is_draining() {
            return Some(None);
        }
        reason.map(Some)
    }

    pub(super) fn has_notification_or_end(&self) -> bool {
        !self.inbox.notifications.is_empty() || self.end_of_notifications().is_some()
    }

    pub(super) fn withdraw_notified(&mut self, ticket: &mut Option<Ticket>) {
        later::discard(self.waiting.notified.withdraw(ticket));
        if self.has_notification_or_end() {
            later::wake(self.waiting.notified.take_first());
        }
    }

    pub(crate) fn poll_recv(
        &mut self,
        ticket: &mut Option<Ticket>,
        waker: &Waker,
        caller: &mut Caller<'_>,
    ) -> Poll<Result<Option<Bytes>, MessageError>> {
        self.poll_message(Self::take_message, ticket, waker, caller)
    }

    /// Copies into `memory`.
    pub(super) fn poll_recv_buffer(
        &mut self,
        memory: &mut Option<BufMut>,
        ticket: &mut Option<Ticket>,
        waker: &Waker,
        caller: &mut Caller<'_>,
    ) -> Poll<Result<Option<Next>, MessageError>> {
        self.poll_message(|state| state.take_registered(memory), ticket, waker, caller)
    }

    pub(super) fn poll_next(
        &mut self,
        ticket: &mut Option<Ticket>,
        waker: &Waker,
        caller: &mut Caller<'_>,
    ) -> Poll<Result<Option<Bytes>, MessageError>> {
        match self.next(Self::take_message, waker, caller) {
            Some(next) => {
                self.withdraw_stream(ticket);
                Poll::Ready(next)
            }
            None => {
                self.waiting.streams.wait(ticket, caller);
                Poll::Pending
            }
        }
    }

    /// If `take` leaves the message in the inbox, a queued receiver keeps its position.
    pub(super) fn poll_message<T>(
        &mut self,
        take: impl FnOnce(&mut Self) -> Option<T>,
        ticket: &mut Option<Ticket>,
        waker: &Waker,
        caller: &mut Caller<'_>,
    ) -> Poll<Result<Option<T>, MessageError>> {
        let first = self.inbox.base;
        if self.is_turn(&self.waiting.receivers, *ticket)
            && let Some(next) = self.next(take, waker, caller)
        {
            let keeps_turn = matches!(next, Ok(Some(_))) && self.inbox.base == first;
            if !keeps_turn {
                self.withdraw_receiver(ticket);
            }
            return Poll::Ready(next);
        }
        self.waiting.receivers.wait(ticket, caller);
        Poll::Pending
    }

    fn next<T>(
        &mut self,
        take: impl FnOnce(&mut Self) -> Option<T>,
        waker: &Waker,
        caller: &mut Caller<'_>,
    ) -> Option<Result<Option<T>, MessageError>> {
        // Not in the second check of a poll: a completion since the first has called the
        // connection's waker.
        if !self.inbox.is_ready() && !caller.checks_again() {
            self.progress_for_receiver(waker);
        }
        let first = self.inbox.base;
        // After `close`, earlier messages may be discarded.
        if self.protocol.phase().takes_messages()
            && !self.inbox.is_drained()
            && let Some(message) = take(self)
        {
            if self.inbox.base != first {
                self.send_due();
                if !self.inbox.unfetched.is_empty() {
                    self.progress(waker);
                }
            }
            return Some(Ok(Some(message)));
        }
        self.end_of_messages().map(|end| end.map(|()| None))
    }

    pub(super) fn end_of_messages(&mut self) -> Option<Result<(), MessageError>> {
        if self.is_at_end() && self.counters.discarded == 0 {
            self.on(Event::EndReceived);
            return Some(Ok(()));
        }
        if !self.protocol.phase().takes_messages() {
            let reason = self
                .close_reason()
                .filter(|&reason| reason == CloseReason::Aborted)
                .unwrap_or(CloseReason::Local);
            return Some(Err(MessageError::Closed(reason)));
        }
        self.close_reason().map(|reason| Err(MessageError::Closed(reason)))
    }

    pub(crate) fn withdraw_receiver(&mut self, ticket: &mut Option<Ticket>) {
        later::discard(self.waiting.receivers.withdraw(ticket));
        self.wake_next_receiver();
    }

    pub(super) fn withdraw_stream(&mut self, ticket: &mut Option<Ticket>) {
        later::discard(self.waiting.streams.withdraw(ticket));
        self.wake_next_receiver();
    }

    fn wake_next_receiver(&mut self) {
        let waits = !self.waiting.receivers.is_empty() || !self.waiting.streams.is_empty();
        if waits && (self.close_reason().is_some() || self.inbox.is_ready() || self.is_at_end()) {
            self.wake_receivers();
        }
    }

    pub(super) fn take_message(&mut self) -> Option<Bytes> {
        self.take(|state, message, open| match message {
            Arrived::Fetched(message) => message.into(),
            Arrived::Buffered(buffer) => state.message_in(buffer, open),
            Arrived::Fragmented { parts, last, len } => {
                let mut bytes = Vec::with_capacity(len);
                state.join(parts, last, open, |part| bytes.extend_from_slice(part));
                bytes.into()
            }
        })
    }

    /// Returns `None` if the message needs a copy and `memory` is too short.
    fn take_registered(&mut self, memory: &mut Option<BufMut>) -> Option<Next> {
        let open = self.close_reason().is_none();
        let mut spare = None;
        let Incoming::Arrived(first) = self.inbox.messages.front()? else { return None };
        let copied = match first {
            Arrived::Fetched(FetchedMessage::Registered(_)) => None,
            Arrived::Fetched(FetchedMessage::Heap(bytes)) => Some(bytes.len()),
            Arrived::Fragmented { len, .. } => Some(*len),
            Arrived::Buffered(buffer) => {
                if open && self.receives.may_give(buffer) {
                    spare = self.receives.spare();
                }
                (open && spare.is_none()).then_some(buffer.len())
            }
        };
        if let Some(len) = copied
            && memory.as_ref().is_none_or(|memory| memory.capacity() < len)
        {
            return Some(Next::Memory(len));
        }
        self.take(|state, message, open| match message {
            Arrived::Fetched(FetchedMessage::Registered(buffer)) => Next::Message(buffer),
            Arrived::Fetched(FetchedMessage::Heap(bytes)) => Next::Copy(bytes),
            Arrived::Fragmented { parts, last, len } => {
                let mut target = copy_target(memory, len);
                let mut rest = &mut target[..];
                state.join(parts, last, open, |part| {
                    let (start, end) = std::mem::take(&mut rest).split_at_mut(part.len());
                    start.copy_from_slice(part);
                    rest = end;
                });
                Next::Message(target.freeze())
            }
            Arrived::Buffered(buffer) if copied.is_none() => {
                if let Some(spare) = spare {
                    state.post_receive(spare);
                }
                Next::Message(buffer.freeze())
            }
            Arrived::Buffered(buffer) => {
                let mut target = copy_target(memory, buffer.len());
                target.copy_from_slice(&buffer);
                state.counters.copied_out += 1;
                state.protocol.note_buffer_taken();
                state.post_receive(buffer);
                Next::Message(target.freeze())
            }
        })
    }

    /// Frees the credit of the first message when `convert` has its bytes. The `bool` is true if
    /// receives can still be posted.
    fn take<T>(&mut self, convert: impl FnOnce(&mut Self, Arrived, bool) -> T) -> Option<T> {
        let message = self.inbox.pop()?;
        self.counters.received += 1;
        let open = self.close_reason().is_none();
        if let Arrived::Fetched(message) = &message {
            self.inbox.fetch_bytes -= message.len() as u64;
        }
        let taken = convert(self, message, open);
        if open {
            self.protocol.flow.release_message();
        }
        Some(taken)
    }

    /// Reposts the buffers.
    pub(super) fn join(
        &mut self,
        parts: usize,
        last: BufMut,
        open: bool,
        mut append: impl FnMut(&[u8]),
    ) {
        for _ in 0..parts {
            let part = self.inbox.take_part();
            append(&part);
            if open {
                self.post_receive(part);
                self.protocol.flow.release_message();
            }
        }
        append(&last);
        if open {
            self.post_receive(last);
        }
    }

    /// Posts a spare buffer instead, or copies the message if none is free.
    fn message_in(&mut self, buffer: BufMut, open: bool) -> Bytes {
        if !self.receives.copies_out(&buffer) {
            match self.receives.spare() {
                Some(spare) => {
                    if open {
                        self.post_receive(spare);
                    }
                    return buffer.freeze().into();
                }
                None => self.counters.copied_out += 1,
            }
        }
        let bytes = Bytes::copy_from_slice(&buffer);
        if open {
            self.post_receive(buffer);
        }
        bytes
    }
}

/// The capacity of `memory` must have been checked.
pub(super) fn copy_target(memory: &mut Option<BufMut>, len: usize) -> BufMut {
    let Some(mut target) = memory.take() else { unreachable!("checked before the copy") };
    if target.resize(len).is_err() {
        unreachable!("checked before the copy")
    }
    target
}

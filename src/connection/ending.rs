use std::task::{Context, Poll, Waker};
use std::time::Duration;

use rdma_message_proto::end::Reason as _;
use rdma_message_proto::handshake::Service;
use rdma_message_proto::lifecycle::{Action, Event, Outcome, Phase};
use rdma_message_proto::refusal::{RefusalReason, Rejection};
use rdma_provider::later;
use smallvec::SmallVec;

use super::error::{CloseReason, MessageError};
use super::inbound::BATCH;
use super::inbox::{Arrived, FetchedMessage, Incoming};
use super::message_memory::FetchOutput;
use super::outbox::Sent;
use super::state::ConnectionState;
use crate::waiters::{Caller, Ticket};

impl ConnectionState {
    /// The failure has failed the queue pair, too.
    pub(super) fn on_failure(
        &mut self,
        failure: CloseReason,
        context: &mut Context<'_>,
    ) -> Result<(), CloseReason> {
        self.on(Event::Fail(failure));
        // Frames that arrived earlier count: a peer that closes sends its last frames first.
        for _ in 0..=self.receives.posted.len() / BATCH {
            self.take_frames(context)?;
        }
        if self.protocol.flow.is_over() {
            // The peer has closed its queue pair.
            return Err(CloseReason::Clean);
        }
        let mut reason = self.protocol.phase().failure().unwrap_or(failure);
        if reason.is_flush() {
            // A failure of the application's operation precedes the flushes but may not be polled
            // yet.
            self.io.qp.drain_completions();
            reason = self.io.qp.cause().map_or(reason, CloseReason::from);
        }
        let mut pending = self.outbox.poll_all(context, |kind| {
            if reason.is_flush() {
                reason = kind.into();
            }
        });
        let mut filled = SmallVec::<[_; 2]>::new();
        for (number, message) in (self.inbox.base..).zip(&mut self.inbox.messages) {
            if let Incoming::Fetching(fetch) = message {
                match fetch.poll(&self.io.qp, context) {
                    Poll::Ready(Ok(FetchOutput::Message(buffer))) => {
                        *message =
                            Incoming::Arrived(Arrived::Fetched(FetchedMessage::Registered(buffer)))
                    }
                    Poll::Ready(Ok(FetchOutput::Region(region))) => {
                        *message = Incoming::Releasing;
                        filled.push(self.memory.fetch.release(number, region));
                    }
                    Poll::Ready(Err(kind)) => {
                        reason = if reason.is_flush() { kind.into() } else { reason };
                        *message = Incoming::Lost;
                    }
                    Poll::Pending => pending = true,
                }
            }
        }
        filled.into_iter().for_each(|job| self.memory.jobs.add(job));
        self.on(Event::Fail(reason));
        if self.inbox.messages.iter().any(|message| matches!(message, Incoming::Releasing)) {
            // The helper calls `progress` after the release.
            return Ok(());
        }
        // In the error state all pending operations complete.
        let disconnected = || self.io.link.as_ref().is_some_and(|link| !link.is_connected());
        match reason.is_flush() {
            true if pending => Ok(()),
            true if disconnected() => Err(self.disconnect_reason()),
            _ => Err(reason),
        }
    }

    pub(super) fn on(&mut self, event: Event<CloseReason>) {
        let actions = self.protocol.on(event);
        self.act(actions);
    }

    fn act(&mut self, actions: &[Action]) {
        for action in actions {
            match action {
                Action::SendAbort => {
                    if let Some(header) = self.protocol.abort_frame() {
                        self.send_bare(header);
                    }
                }
                Action::StopSending => self.io.qp.stop_sending(),
                Action::Release => self.release(None),
                Action::ReleaseAllButAbort => {
                    let abort = self
                        .outbox
                        .sends
                        .back()
                        .is_some_and(Sent::is_posted_abort)
                        .then(|| self.outbox.sends.pop_back());
                    self.release(abort.flatten());
                }
                Action::ReleaseReceives => {
                    let flushed = std::mem::take(&mut self.receives.posted);
                    later::dispose(flushed);
                }
                Action::ReleaseOffers => {
                    let offers = self.outbox.offers.drain(..);
                    offers.for_each(later::dispose);
                }
                Action::ReleaseLink => {
                    if let Some(link) = self.io.link.take() {
                        later::dispose(link);
                    }
                }
                Action::WakeSenders => later::wake(self.waiting.senders.take_all()),
                Action::WakeReceivers => {
                    later::wake(self.waiting.receivers.take_all());
                    later::wake(self.waiting.streams.take_all());
                    later::wake(self.waiting.notified.take_all());
                }
                Action::WakeFlushers => later::wake(self.waiting.flushers.take_all()),
            }
        }
    }

    fn release(&mut self, abort: Option<Sent>) {
        let Some(Outcome { reason, readable }) = self.protocol.phase().outcome() else {
            unreachable!("only termination releases")
        };
        match reason {
            CloseReason::Clean | CloseReason::Local | CloseReason::Aborted => {
                rdma_provider::debug!(qpn = %self.io.qp.qpn(), %reason, "connection closed")
            }
            _ => rdma_provider::warn!(qpn = %self.io.qp.qpn(), %reason, "connection closed"),
        }
        // The device owns memory of fetches until the queue pair is closed.
        let is_readable = |message: &&Incoming| message.is_ready();
        let kept =
            if readable { self.inbox.messages.iter().take_while(is_readable).count() } else { 0 };
        let lost = self.inbox.messages.split_off(kept);
        self.inbox.lost = !lost.is_empty();
        if !readable {
            self.inbox.notifications.clear();
            self.counters.discarded += lost.iter().filter(is_readable).count() as u64;
        }
        later::dispose(std::mem::take(&mut self.outbox.sends));
        self.outbox.held.clear();
        self.outbox.in_place = 0;
        later::dispose(lost);
        self.protocol.sending.detach(usize::from(abort.is_some()));
        self.outbox.sends.extend(abort);
        later::dispose(self.memory.jobs.take());
        self.io.wake_driver();
    }

    pub(crate) fn finish(&mut self, waker: &Waker) -> Result<(), MessageError> {
        if let Some(reason) = self.close_reason().filter(|&reason| reason != CloseReason::Clean) {
            return Err(MessageError::Closed(reason));
        }
        self.on(Event::Finish);
        self.progress(waker);
        Ok(())
    }

    pub(super) fn close(&mut self, waker: &Waker) {
        self.on(Event::Close);
        self.progress(waker);
    }

    /// The application receives the messages that have arrived, and then the end.
    pub(super) fn drain(&mut self, waker: &Waker) {
        self.take_arrived(waker);
        self.inbox.drain();
        self.protocol.drain();
        self.wake_receivers();
        later::wake(self.waiting.notified.take_first());
    }

    pub(super) fn poll_closed(
        &mut self,
        ticket: &mut Option<Ticket>,
        waker: &Waker,
        caller: &mut Caller<'_>,
    ) -> Poll<CloseReason> {
        self.progress(waker);
        match self.protocol.phase() {
            &Phase::Closed(Outcome { reason, .. }) => {
                self.withdraw_flusher(ticket);
                Poll::Ready(reason)
            }
            _ => {
                self.waiting.flushers.wait(ticket, caller);
                Poll::Pending
            }
        }
    }

    pub(super) fn poll_terminated(
        &mut self,
        ticket: &mut Option<Ticket>,
        caller: &mut Caller<'_>,
    ) -> Poll<CloseReason> {
        match self.close_reason() {
            Some(reason) => {
                self.withdraw_flusher(ticket);
                Poll::Ready(reason)
            }
            None => {
                self.waiting.flushers.wait(ticket, caller);
                Poll::Pending
            }
        }
    }

    pub(super) fn abandon(&mut self, waker: &Waker) {
        // The peer's `Fin` may be among received frames.
        self.progress(waker);
        let actions = match self.protocol.service() {
            Service::Messages => self.protocol.abandon(self.is_at_end()),
            Service::Bytes if self.stream.linger == Some(Duration::ZERO) => {
                return self.abort(CloseReason::Aborted, waker);
            }
            Service::Bytes => {
                self.protocol.abandon_stream(self.stream.linger.unwrap_or(self.limits.linger))
            }
        };
        self.act(actions);
    }

    /// Posts nothing afterwards, not even queued operations or an `Abort` behind them.
    pub(crate) fn abort(&mut self, reason: CloseReason, waker: &Waker) {
        if self.close_reason().is_some() {
            return;
        }
        // A received frame may carry a credit.
        self.io.qp.drain_completions();
        if let Err(peer_reason) = self.take_frames(&mut Context::from_waker(waker)) {
            // The application's reason takes precedence. The `Abort` fails or is ignored.
            rdma_provider::debug!(
                qpn = %self.io.qp.qpn(),
                %peer_reason,
                "the peer closed the connection before the abort"
            );
        }
        self.on(Event::Abort(reason));
    }

    /// The `Abort` is the last frame of a dropped connection.
    pub(super) fn is_abort_acknowledged(&mut self, waker: &Waker) -> bool {
        let context = &mut Context::from_waker(waker);
        let last = self.outbox.sends.len().checked_sub(1);
        self.protocol.phase().is_aborting()
            && last.is_none_or(|last| self.poll_sent(last, context).is_ready())
    }

    /// Includes frames that the busy-poll thread has not polled.
    fn take_arrived(&mut self, waker: &Waker) {
        self.io.qp.drain_completions();
        for _ in 0..=self.receives.posted.len() / BATCH {
            self.progress(waker);
        }
    }

    /// Frames that arrived before the disconnect count.
    pub(super) fn on_disconnect(&mut self, waker: &Waker) {
        self.take_arrived(waker);
        let reason = if self.protocol.flow.is_over() {
            CloseReason::Clean
        } else {
            self.disconnect_reason()
        };
        self.on(Event::Terminate(reason));
    }

    fn disconnect_reason(&self) -> CloseReason {
        let Some(private_data) = self.io.link.as_ref().and_then(|link| link.rejection()) else {
            return CloseReason::Disconnected;
        };
        match RefusalReason::decode(&private_data) {
            Some(refusal) => CloseReason::Refused(refusal),
            None if Rejection::decode(&private_data).is_some() => CloseReason::Rejected,
            None => CloseReason::Unconfirmed,
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::time::Instant;

    use super::*;

    use crate::connection::{Connection, ConnectionConfig};
    use crate::contained::tests::HANG;
    use crate::software::Network;
    use crate::types::Access;
    use crate::verbs::Device;
    use rdma_message_proto::frame::Kind;
    use rdma_message_proto::timers::LINGER;

    /// The capacity of the send queue.
    const DEPTH: u32 = 4;

    /// Connects two sides; if `silent`, the second one's port is down.
    fn sides(silent: bool) -> [Connection; 2] {
        let network = Network::new();
        let config = ConnectionConfig::default().max_send_wr(DEPTH).keepalive(None);
        let prepared = ["one", "two"].map(|name| {
            let pd = Device::software_in(&network, name).unwrap().protection_domain().unwrap();
            Connection::prepare(&pd, &config).unwrap()
        });
        let [(one_end, one_handshake), (two_end, two_handshake)] = [0, 1]
            .map(|side: usize| (prepared[side].endpoint(), prepared[side].handshake(&[]).unwrap()));
        let [one, two] = prepared;
        let sides = [
            one.establish(&two_end, &two_handshake).unwrap(),
            two.establish(&one_end, &one_handshake).unwrap(),
        ];
        network.control("two").unwrap().set_port(!silent);
        sides
    }

    /// Runs `test` without polling spawned tasks.
    fn without_drivers(test: impl FnOnce()) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async { test() });
    }

    #[test]
    fn posted_abort_is_awaited_with_operations_queued_behind_it() {
        for (before, posted) in [(0, true), (DEPTH, false)] {
            without_drivers(|| {
                let [one, two] = sides(true);
                let remote = two.expose(vec![0; 64], Access::REMOTE_ALL).unwrap();
                let write = || one.write(one.copy_from(b"x").unwrap(), remote.grant());
                let mut writes: Vec<_> = (0..before).map(|_| write()).collect();
                one.handle().shared.with(|state, _| {
                    state.on(Event::Drop { at_end: false });
                    assert!(matches!(state.outbox.sends.back(), Some(Sent::Abort(_))));
                });
                writes.extend((0..2 * DEPTH).map(|_| write()));
                one.handle().shared.with(|state, _| {
                    assert!(state.io.qp.send_counters().waiting > 0);
                    state.on(Event::Abort(CloseReason::Aborted));
                    assert_eq!(!state.outbox.sends.is_empty(), posted);
                });
            });
        }
    }

    #[test]
    fn busy_runtime_after_a_drop_does_not_use_up_the_linger_time() {
        without_drivers(|| {
            let [one, _two] = sides(false);
            one.handle().shared.with(|state, waker| {
                state.abandon(waker);
                let busy_until = Instant::now() + Duration::from_secs(3600);
                assert!(state.protocol.deadline().is_none());
                state.on_deadline(busy_until);
                assert_eq!(state.close_reason(), None);
                // Simulates `ConnectionState::drive`.
                state.protocol.linger(|| busy_until);
                state.on_deadline(busy_until);
                assert_eq!(state.close_reason(), None);
                state.on_deadline(busy_until + LINGER);
                assert_eq!(state.close_reason(), Some(CloseReason::Local));
            });
        });
    }

    #[test]
    fn abort_uses_a_credit_of_a_frame_that_was_not_polled() {
        without_drivers(|| {
            let [one, two] = sides(false);
            let shared = [&one, &two].map(|side| &side.handle().shared);
            shared[0].with(|state, _| {
                while state.protocol.flow.may_send(Kind::Ping) {
                    let ping = state.protocol.flow.send(Kind::Ping);
                    state.send_bare(ping);
                }
                let ack = state.protocol.flow.send(Kind::Ack);
                state.send_bare(ack);
                assert!(!state.protocol.flow.may_send(Kind::Abort));
            });
            let deadline = Instant::now() + HANG;
            let wait = |done: &dyn Fn() -> bool| {
                while !done() {
                    assert!(Instant::now() < deadline, "timed out");
                    std::thread::yield_now();
                }
            };
            // The first side's device confirms the delivery.
            wait(&|| {
                shared[0].qp.drain_completions();
                shared[1].with(|state, waker| {
                    state.io.qp.drain_completions();
                    state.progress(waker);
                    state.reap();
                    state.counters.acks > 0 && state.outbox.sends.is_empty()
                })
            });
            shared[0].with(|state, waker| {
                assert!(!state.protocol.flow.may_send(Kind::Abort));
                state.abort(CloseReason::Aborted, waker);
                assert!(state.outbox.sends.back().is_some_and(Sent::is_posted_abort));
            });
            wait(&|| {
                shared[1].with(|state, waker| {
                    state.io.qp.drain_completions();
                    state.progress(waker);
                    state.close_reason() == Some(CloseReason::Dropped)
                })
            });
        });
    }
}
